"""Databases in which conditions on messages are tried: a table of one row, and whether a condition selects it."""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import apsw
import psycopg

from headwater.delivery.filters import EntityFilter, Where
from headwater.stores.conditions import topic_condition
from headwater.stores.postgres import conditions as postgres_conditions
from headwater.stores.postgres.pipelined import PipelinedConnection
from headwater.stores.sqlite import conditions as sqlite_conditions
from headwater.topics import Pattern

TEXT_FIELDS = ("topic", "type", "from", "to", "reply_to", "correlation_id", "content_type", "traceparent")
NUMBER_FIELDS = ("version", "priority", "seq", "published_at", "size")

UNFIT_FOR_POSTGRES = re.compile(r"\\u0000|\\u[dD][89a-fA-F]|[0-9]{309}")
"""The character NUL, half a surrogate pair (or what may be one), a number beyond any double."""


class Condition(Protocol):
    sql: str
    params: Any


class Asked(NamedTuple):
    """A condition, and whether it is exact; if not, Python checks what it lets through."""

    condition: Any
    exact: bool


class InSqlite:
    """The conditions of one store, and whether its database selects a row by them."""

    keeps_nul = True
    fills_in_size = False

    def __init__(self) -> None:
        self.log = apsw.Connection(":memory:")
        self.log.execute(
            """
            CREATE TABLE messages (
                seq INTEGER PRIMARY KEY, topic TEXT NOT NULL, type TEXT, version INTEGER, "from" TEXT, "to" TEXT,
                reply_to TEXT, correlation_id TEXT, content_type TEXT, traceparent TEXT, priority INTEGER,
                published_at INTEGER, size INTEGER, headers TEXT, data TEXT NOT NULL CHECK (json_valid(data))
            )
            """
        )

    def where(self, where: Where) -> Asked:
        return Asked(sqlite_conditions.where_condition(where), True)

    def entities(self, filter: EntityFilter) -> Asked:
        return Asked(*sqlite_conditions.entity_condition(filter))

    def topics(self, pattern: Pattern) -> Asked:
        return Asked(*topic_condition(pattern))

    def selects(self, condition: Condition, row: Mapping[str, object]) -> bool:
        columns = ", ".join(f'"{name}"' for name in row)
        marks = ", ".join("?" * len(row))
        with self.log:
            self.log.execute("DELETE FROM messages")
            self.log.execute(f"INSERT INTO messages ({columns}) VALUES ({marks})", tuple(row.values()))
            return bool(self.log.execute(f"SELECT 1 FROM messages WHERE {condition.sql}", condition.params).fetchall())

    def close(self) -> None:
        self.log.close()


class InPostgres:
    keeps_nul = False
    fills_in_size = True

    def __init__(self, url: str) -> None:
        self.log = PipelinedConnection.connect(url, autocommit=True)
        texts = ", ".join(f'"{name}" text COLLATE "C"' for name in TEXT_FIELDS)
        numbers = ", ".join(f"{name} bigint" for name in NUMBER_FIELDS)
        self.log.execute(f"CREATE TEMPORARY TABLE messages ({texts}, {numbers}, headers json, data json NOT NULL)")

    def where(self, where: Where) -> Asked:
        return Asked(*postgres_conditions.where_condition(where))

    def entities(self, filter: EntityFilter) -> Asked:
        return Asked(*postgres_conditions.entity_condition(filter))

    def topics(self, pattern: Pattern) -> Asked:
        return Asked(*topic_condition(pattern))

    def selects(self, condition: Condition, row: Mapping[str, object]) -> bool | None:
        """None if the database cannot say, because it cannot read the payload; then Python is asked."""
        columns = ", ".join(f'"{name}"' for name in row)
        marks = ", ".join(["%s"] * len(row))
        try:
            with self.log.transaction(force_rollback=True):
                self.log.execute(f"INSERT INTO messages ({columns}) VALUES ({marks})", tuple(row.values()))
                query = f"SELECT 1 FROM messages WHERE {condition.sql}"
                return bool(self.log.ask(query, condition.params).rows())
        except psycopg.DataError:
            assert UNFIT_FOR_POSTGRES.search(f"{row['data']} {row.get('headers')}")
            return None

    def close(self) -> None:
        self.log.close()
