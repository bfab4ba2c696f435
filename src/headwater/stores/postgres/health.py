"""What `doctor` shows of a log in PostgreSQL."""

from __future__ import annotations

from typing import Any

import psycopg

_TABLES = """
SELECT relname, n_live_tup, n_dead_tup, pg_total_relation_size(relid), last_autovacuum::text
FROM pg_stat_user_tables WHERE schemaname = %s ORDER BY relname
"""
_CONNECTIONS = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()"
_OLDEST = """
SELECT extract(epoch FROM now() - xact_start)::float8, coalesce(nullif(application_name, ''), 'pid ' || pid)
FROM pg_stat_activity WHERE backend_xmin IS NOT NULL AND pid <> pg_backend_pid()
ORDER BY xact_start LIMIT 1
"""


def health_of(connection: psycopg.Connection, name: str, schema: str, durability: str) -> dict[str, Any]:
    tables = connection.execute(_TABLES, (schema,)).fetchall()
    oldest = connection.execute(_OLDEST).fetchone()
    settings = {
        setting: _value(connection, f"SELECT current_setting('{setting}')")
        for setting in ("server_version", "fsync", "full_page_writes", "autovacuum", "max_connections")
    }
    return {
        "store": "postgres",
        "path": name,
        "postgres": settings["server_version"],
        "psycopg": psycopg.__version__,
        "schema": schema,
        "durability": durability,
        "fsync": settings["fsync"],
        "full_page_writes": settings["full_page_writes"],
        "autovacuum": settings["autovacuum"],
        "max_connections": int(settings["max_connections"]),
        "connections": int(_value(connection, _CONNECTIONS)),
        "file_bytes": sum(row[3] for row in tables),
        "dead_tuples": {row[0]: row[2] for row in tables if row[2]},
        "live_tuples": {row[0]: row[1] for row in tables},
        "last_autovacuum": max((row[4] for row in tables if row[4]), default=None),
        "oldest_reader_s": 0.0 if oldest is None else round(max(0.0, oldest[0] or 0.0), 3),
        "oldest_reader": None if oldest is None else oldest[1],
    }


def _value(connection: psycopg.Connection, query: str) -> Any:
    row = connection.execute(query).fetchone()
    return None if row is None else row[0]
