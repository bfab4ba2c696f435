"""Statements kept in .sql files under names, each with a line of purpose: `-- :name: what it is for`."""

from __future__ import annotations

import re
from importlib import resources

_HEADING = re.compile(r"^-- :(\w+): .*\n", re.MULTILINE)
_COMMENT = re.compile(r"^--.*\n?", re.MULTILINE)


def text_of(package: str, file: str) -> str:
    return resources.files(package).joinpath(file).read_text(encoding="utf-8")


def load(package: str, file: str = "queries.sql") -> dict[str, str]:
    """The statements by name. Where one says {other}, the text of that other stands in its place."""
    pieces = _HEADING.split(text_of(package, file))
    found = {name: _COMMENT.sub("", body).strip() for name, body in zip(pieces[1::2], pieces[2::2], strict=True)}
    return {name: _filled(sql, found) for name, sql in found.items()}


def _filled(sql: str, pieces: dict[str, str]) -> str:
    for name, piece in pieces.items():
        sql = sql.replace(f"{{{name}}}", piece)
    return sql
