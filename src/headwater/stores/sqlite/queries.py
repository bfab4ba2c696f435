"""The named statements of queries.sql and schema.sql."""

from __future__ import annotations

from headwater.stores.named_queries import load, text_of

_PACKAGE = "headwater.stores.sqlite"

SCHEMA = text_of(_PACKAGE, "schema.sql")
SQL = load(_PACKAGE)
