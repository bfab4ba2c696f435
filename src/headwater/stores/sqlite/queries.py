"""The named statements of queries.sql and schema.sql."""

from __future__ import annotations

import re
from importlib import resources

_HEADING = re.compile(r"^-- :(\w+): .*\n", re.MULTILINE)


def _text(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def _load() -> dict[str, str]:
    pieces = _HEADING.split(_text("queries.sql"))
    found = {name: body.strip() for name, body in zip(pieces[1::2], pieces[2::2], strict=True)}
    message = found.pop("message")
    return {name: sql.replace("{message}", message) for name, sql in found.items()}


SCHEMA = _text("schema.sql")
SQL = _load()
