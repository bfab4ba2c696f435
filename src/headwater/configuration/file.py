"""Finding `headwater.toml` and reading it."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from typing import Any, NamedTuple

from pydantic import ValidationError

from headwater.configuration.complaints import Complaint, complaints_of
from headwater.configuration.settings import ConfigurationFile
from headwater.errors import InvalidConfiguration

FILE_NAME = "headwater.toml"
FILE_BYTES_MAX = 1024**2
CONFIG_VARIABLE = "HEADWATER_CONFIG"
CONFIG_FLAG = "--config"


class Found(NamedTuple):
    name: str
    """As the user named it, for everything that is said about it."""
    named_by: str
    """The flag or variable; empty if nobody named it and it just lay there."""

    @property
    def place(self) -> str:
        return f"{self.named_by} {self.name}".strip()


def find_file(config: str | None, environment: Mapping[str, str], directory: str) -> Found | None:
    if config is not None:
        return Found(config, CONFIG_FLAG)
    if (named := environment.get(CONFIG_VARIABLE)) is not None:
        return Found(named, CONFIG_VARIABLE)
    # A dangling link is there too: better a complaint than a server that silently runs on defaults.
    return Found(FILE_NAME, "") if os.path.lexists(os.path.join(directory, FILE_NAME)) else None


def read_file(found: Found | None, directory: str) -> tuple[ConfigurationFile, list[Complaint]]:
    """What the file says; an empty file beside complaints if it cannot be used."""
    if found is None:
        return ConfigurationFile(), []
    try:
        return ConfigurationFile.model_validate(_tables_of(found, directory)), []
    except ValidationError as exc:
        return ConfigurationFile(), complaints_of(exc, ConfigurationFile, lambda path: f"{found.name}, {path}")
    except InvalidConfiguration as exc:
        return ConfigurationFile(), [Complaint(exc.where, exc.why, exc.next)]


def _tables_of(found: Found, directory: str) -> dict[str, Any]:
    if not found.name:
        raise InvalidConfiguration("it is empty", where=found.named_by, next="Name a file, or do not give it")
    try:
        with open(os.path.join(directory, found.name), "rb") as file:
            content = file.read(FILE_BYTES_MAX + 1)
    except FileNotFoundError:
        next = f"Without it, {FILE_NAME} is used if there is one" if found.named_by else "It is a link to nowhere"
        raise InvalidConfiguration("there is no such file", where=found.place, next=next) from None
    except (OSError, ValueError) as exc:  # ValueError: a name with a NUL
        next = "Name a file that can be read"
        raise InvalidConfiguration(f"it cannot be read: {_reason(exc)}", where=found.place, next=next) from exc
    if len(content) > FILE_BYTES_MAX:
        why = f"it is larger than {FILE_BYTES_MAX:,} bytes"
        raise InvalidConfiguration(why, where=found.place, next="Name another file")
    try:
        return tomllib.loads(content.decode("utf-8-sig"))
    except UnicodeDecodeError as exc:
        why = f"it is not UTF-8 at byte {exc.start}"
        raise InvalidConfiguration(why, where=found.place, next="Save it as UTF-8") from exc
    except (ValueError, RecursionError) as exc:  # also a number with more digits than Python reads
        next = 'Text stands in quotes, sections in brackets: [server], host = "::1", port = 8765'
        raise InvalidConfiguration(f"it is not TOML: {_reason(exc)}", where=found.place, next=next) from exc


def _reason(exc: Exception) -> str:
    text = (exc.strerror if isinstance(exc, OSError) else None) or str(exc)
    return text[:1].lower() + text[1:]
