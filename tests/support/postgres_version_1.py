"""A log as version 1 of the schema made it."""

from __future__ import annotations

from pathlib import Path

import psycopg

_TEXTS = Path(__file__).parents[1] / "postgres"


def make_version_1(connection: psycopg.Connection, schema: str) -> None:
    """Into a schema that is there, by the role that the connection has."""
    with connection.transaction():
        connection.execute(f"SET LOCAL search_path = {schema}, pg_catalog, pg_temp")
        for name in ("schema_version_1.sql", "functions_version_1.sql"):
            connection.execute((_TEXTS / name).read_bytes())
        connection.execute("INSERT INTO headwater VALUES ('schema_version', 1), ('salt', 7), ('created_at', 0)")
        connection.execute("INSERT INTO headwater VALUES ('counted_to', 0)")
