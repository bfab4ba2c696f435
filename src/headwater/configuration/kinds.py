"""Kinds of values that settings have: what is read from TOML or text, checked and turned into what the code wants."""

from __future__ import annotations

import ipaddress
import re
from datetime import timedelta
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, Field

from headwater.configuration.durations import DURATION_HELP, duration_ms
from headwater.configuration.sizes import SIZE_HELP, size_bytes
from headwater.errors import InvalidOption
from headwater.message import span_ms
from headwater.topics.topic import quoted

COUNT_MAX = 1_000_000_000
INT64_MAX = 2**63 - 1
BUFFER_BYTES_MIN = 4 * 1024  # less would not hold the refusal of a call
BUFFER_BYTES_MAX = 1024**3
PORT_MAX = 65_535
TEXT_CHARS_MAX = 4_096
ORIGINS_MAX = 1_000

_HOST_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_.])?")
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://(\[[0-9a-f:.]+\]|[a-z0-9_.-]+)(:[0-9]{1,5})?")


def _read_duration(value: object) -> object:
    """Seconds of text with units, of a number of seconds or of a timedelta."""
    if isinstance(value, str):
        ms = duration_ms(value)
        if ms is None:
            bare = value.isdigit() and duration_ms(f"{value}s") is not None
            raise InvalidOption(
                f"a length of time must be text with units, not {quoted(value)}",
                next=f"Did you mean {value}s?" if bare else f"Write it {DURATION_HELP}",
            )
        value = ms / 1000
    if isinstance(value, bool) or not isinstance(value, int | float | timedelta):
        raise InvalidOption(f"must be a length of time, not {quoted(value)}", next=f"Write it {DURATION_HELP}")
    return span_ms(value, "a length of time") / 1000


def _check_longer_than_nothing(seconds: float) -> float:
    if not seconds:
        raise InvalidOption("must be longer than 0", next=f"Write it {DURATION_HELP}")
    return seconds


def _read_size(value: object) -> object:
    if not isinstance(value, str):
        return value
    size = size_bytes(value)
    if size is None:
        raise InvalidOption(f"must be a number of bytes, not {quoted(value)}", next=f"Write it {SIZE_HELP}")
    return size


def read_list(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value


def _none_if_empty(value: object) -> object:
    # TOML has no null, and a profile or a variable must be able to take back what the file says.
    return None if value == "" else value


def _check_host(host: str) -> str:
    if not is_address(host) and not _HOST_NAME.fullmatch(host):
        raise InvalidOption(
            f"must be a name or an address, not {quoted(host)}",
            next="Write it like localhost, 127.0.0.1 or ::1; the port stands in server.port",
        )
    return host


def _check_origin(origin: str) -> str:
    if origin not in ("*", "same") and not _ORIGIN.fullmatch(origin):
        raise InvalidOption(
            f"must be an origin as browsers send it, not {quoted(origin)}",
            next='Write it like "https://shop.example" (lower case, no path), or "*" for any',
        )
    return origin


def is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`. A name that is not `localhost` may mean anything, so it is not."""
    if is_address(host):
        return ipaddress.ip_address(host).is_loopback
    return host.lower().rstrip(".") == "localhost"


Text = Annotated[str, Field(min_length=1, max_length=TEXT_CHARS_MAX)]
OptionalText = Annotated[
    Annotated[str, Field(max_length=TEXT_CHARS_MAX)] | None,
    BeforeValidator(_none_if_empty),
]
OptionalBool = Annotated[bool | None, BeforeValidator(_none_if_empty)]
Host = Annotated[Text, AfterValidator(_check_host)]
Port = Annotated[int, Field(ge=0, le=PORT_MAX)]
Origins = Annotated[
    tuple[Annotated[str, AfterValidator(_check_origin)], ...],
    BeforeValidator(read_list),
    Field(max_length=ORIGINS_MAX),
]

Count = Annotated[int, Field(ge=1, le=COUNT_MAX)]
CountOrZero = Annotated[int, Field(ge=0, le=COUNT_MAX)]
BufferBytes = Annotated[int, BeforeValidator(_read_size), Field(ge=BUFFER_BYTES_MIN, le=BUFFER_BYTES_MAX)]
StoredCount = Annotated[int, Field(ge=0, le=INT64_MAX)]
StoredBytes = Annotated[int, BeforeValidator(_read_size), Field(ge=0, le=INT64_MAX)]

Duration = Annotated[float, BeforeValidator(_read_duration)]
"""Seconds, to the millisecond; may be 0."""
Timeout = Annotated[Duration, AfterValidator(_check_longer_than_nothing)]
"""Seconds, more than 0."""
OptionalTimeout = Annotated[Timeout | None, BeforeValidator(_none_if_empty)]
