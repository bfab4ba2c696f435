"""The named statements of queries.sql, and the texts that make a schema."""

from __future__ import annotations

from headwater.stores.named_queries import load, text_of

_PACKAGE = "headwater.stores.postgres"

SCHEMA = text_of(_PACKAGE, "schema.sql")
FUNCTIONS = text_of(_PACKAGE, "functions.sql")
SQL = load(_PACKAGE)
