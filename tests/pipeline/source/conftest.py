"""Logs to read from. ADBC and apsw must not have the same file open in one process, so they are closed again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import apsw
import psycopg
import pytest
from psycopg import sql

import headwater
from headwater.stores.sqlite import SqliteStore

Insert = Callable[[str, list[dict[str, Any]]], None]


def insert(path: str, rows: list[dict[str, Any]]) -> None:
    """Rows of the table `messages`, put in with plain SQL, all in one transaction."""
    if path.startswith("postgres://"):
        insert_into_postgres(path, rows)
        return
    connection = apsw.Connection(path)
    with connection:
        for row in rows:
            names = ", ".join(f'"{name}"' for name in row)
            values = ", ".join("CAST(? AS TEXT)" if isinstance(value, bytes) else "?" for value in row.values())
            connection.execute(f"INSERT INTO messages ({names}) VALUES ({values})", tuple(row.values()))
    connection.close()


def insert_into_postgres(url: str, rows: list[dict[str, Any]]) -> None:
    with psycopg.connect(url) as connection:
        for row in rows:
            names = sql.SQL(", ").join(map(sql.Identifier, row))
            marks = sql.SQL(", ").join(sql.SQL("%s") for _ in row)
            connection.execute(
                sql.SQL("INSERT INTO headwater.messages ({}) VALUES ({})").format(names, marks), list(row.values())
            )


def new_log(path: Path) -> str:
    SqliteStore(path, durability="relaxed").close()
    return str(path)


@pytest.fixture
def log_path(tmp_path: Path) -> str:
    return new_log(tmp_path / "log.db")


@pytest.fixture
def postgres_log(postgres_schema_url: str) -> str:
    """The same in a database."""
    headwater.open(postgres_schema_url, housekeeping=None).close()
    return postgres_schema_url


@pytest.fixture(params=["in a file", "in PostgreSQL"])
def any_log(request: pytest.FixtureRequest) -> str:
    """For what must hold wherever a log is."""
    place: str = request.getfixturevalue("log_path" if request.param == "in a file" else "postgres_log")
    return place


@pytest.fixture(scope="session")
def put() -> Insert:
    return insert


@pytest.fixture(scope="session")
def make_log() -> Callable[[Path], str]:
    return new_log
