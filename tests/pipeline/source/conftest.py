"""Logs to read from. ADBC and apsw must not have the same file open in one process, so they are closed again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import apsw
import pytest

from headwater.stores.sqlite import SqliteStore

Insert = Callable[[str, list[dict[str, Any]]], None]


def insert(path: str, rows: list[dict[str, Any]]) -> None:
    """Rows of the table `messages`, put in with plain SQL, all in one transaction."""
    connection = apsw.Connection(path)
    with connection:
        for row in rows:
            names = ", ".join(f'"{name}"' for name in row)
            values = ", ".join("CAST(? AS TEXT)" if isinstance(value, bytes) else "?" for value in row.values())
            connection.execute(f"INSERT INTO messages ({names}) VALUES ({values})", tuple(row.values()))
    connection.close()


def new_log(path: Path) -> str:
    SqliteStore(path, durability="relaxed").close()
    return str(path)


@pytest.fixture
def log_path(tmp_path: Path) -> str:
    return new_log(tmp_path / "log.db")


@pytest.fixture(scope="session")
def put() -> Insert:
    return insert


@pytest.fixture(scope="session")
def make_log() -> Callable[[Path], str]:
    return new_log
