"""A log in a file. The driver looks at it through APSW; tasks read it through ADBC, which brings a second SQLite."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from typing import Any

import apsw
import pyarrow as pa
from adbc_driver_manager.dbapi import Connection

from headwater.errors import NewerSchema, NotALog, StoreError
from headwater.pipeline.source import adbc
from headwater.pipeline.source.place import (
    BUSY_TIMEOUT_MS,
    Condition,
    Durability,
    Identity,
    Look,
    Opened,
    Param,
    Range,
    Words,
)
from headwater.ports.clock import SystemClock
from headwater.ports.records import TopicCount
from headwater.stores.sqlite import SqliteStore
from headwater.stores.sqlite.connection import translated
from headwater.stores.sqlite.migrations import SCHEMA_VERSION
from headwater.stores.sqlite.reader import SqliteReader

WORDS = Words(
    columns={"priority": "nullif(priority, 0)", "size": "octet_length(data)"},
    topic_bytes="CAST(topic AS BLOB)",
    topics_in="topic IN (SELECT value FROM json_each(?))",
)
_NUMBERS = frozenset(["seq", "version", "priority", "size", "published_at", "deliver_at", "expires_at"])
_TOPIC_COUNTS = """
    SELECT CAST(topic AS BLOB), sum(count), sum(bytes), max(last_seq), max(last_published_at) FROM (
        SELECT topic, count, bytes, last_seq, last_published_at FROM topic_counts
        UNION ALL
        SELECT topic, 1, octet_length(data), seq, published_at FROM messages
        WHERE seq > (SELECT value FROM headwater WHERE name = 'counted_to')
    ) GROUP BY topic ORDER BY topic
"""


class SqlitePlace:
    """`place.LogPlace`."""

    def __init__(self, path: str) -> None:
        self.name = path

    def open(
        self, *, durability: Durability = "full", busy_timeout_ms: int = BUSY_TIMEOUT_MS, create: bool = False
    ) -> Opened:
        if not create:
            _refuse_absent(self.name)
        store = SqliteStore(self.name, durability=durability, busy_timeout_ms=busy_timeout_ms)
        return Opened(store, SystemClock())

    @contextmanager
    def looking(self) -> Iterator[Look]:
        with self._connected() as connection:
            salt = connection.execute("SELECT value FROM headwater WHERE name = 'salt'").get
            connection.execute("BEGIN")

            def query(sql: str, params: Sequence[Param]) -> list[tuple[Any, ...]]:
                return connection.execute(sql, tuple(params)).fetchall()

            yield Look(SqliteReader(connection, int(salt)), query, WORDS)

    @contextmanager
    def rows(self) -> Iterator[SqliteRows]:
        with adbc.opened(self.name) as connection:
            yield SqliteRows(connection, self.name)

    def identity(self) -> Identity:
        with self._connected() as connection:
            facts = dict(connection.execute("SELECT name, value FROM headwater WHERE name IN ('salt', 'created_at')"))
        return facts["salt"], facts.get("created_at", 0)

    def topic_counts(self) -> list[TopicCount]:
        """Not through the store's reader, which trips over a topic that is no UTF-8."""
        with self._connected() as connection:
            rows: list[Any] = connection.execute(_TOPIC_COUNTS).fetchall()
        return [TopicCount(topic.decode(errors="replace"), *numbers) for topic, *numbers in rows]

    @contextmanager
    def _connected(self) -> Iterator[apsw.Connection]:
        path = self.name
        _refuse_absent(path)
        with translated(path):
            flags = apsw.SQLITE_OPEN_READONLY | apsw.SQLITE_OPEN_URI
            with closing(apsw.Connection(adbc.read_only_uri(path), flags=flags)) as connection:
                connection.set_busy_timeout(BUSY_TIMEOUT_MS)
                _check_version(connection, path)
                yield connection


class SqliteRows:
    """`place.Rows`. ADBC takes the type of a column from the first rows, so the first is made up and has them all."""

    words = WORDS

    def __init__(self, connection: Connection, path: str) -> None:
        self._connection = connection
        self._path = path

    def batches(
        self, values: Mapping[str, str], asked: Range, condition: Condition, rows_at_once: int
    ) -> Generator[pa.RecordBatch, None, None]:
        typed = ", ".join(f"""{0 if name in _NUMBERS else "''"} AS "{name}\"""" for name in values)
        wanted = ", ".join(f'{sql} AS "{name}"' for name, sql in values.items())
        sql = (
            f"SELECT {typed} UNION ALL SELECT * FROM (SELECT {wanted} FROM messages "
            f"WHERE seq > ? AND seq <= ? AND ({condition.sql}) ORDER BY messages.seq LIMIT ?)"
        )
        params = (*asked, *condition.params, asked.upto - asked.after)
        is_first = True
        with closing(adbc.batches(self._connection, self._path, sql, params, rows_at_once)) as found:
            for batch in found:
                yield batch.slice(1) if is_first else batch
                is_first = False

    def table(self, sql: str, params: Sequence[Param] = (), *, like: pa.Schema | None = None) -> pa.Table:
        if like is None:
            return adbc.run(self._connection, self._path, sql, params)
        typed = ", ".join(f"""{"''" if pa.types.is_string(field.type) else 0} AS "{field.name}\"""" for field in like)
        return adbc.run(self._connection, self._path, f"SELECT {typed} UNION ALL SELECT * FROM ({sql})", params).slice(
            1
        )


def _refuse_absent(path: str) -> None:
    if not os.path.isfile(path):
        raise NotALog("there is no such file", where=path, next="Check the option `path`; headwater.open() makes a log")


def _check_version(connection: apsw.Connection, path: str) -> None:
    if not connection.execute("SELECT count(*) FROM sqlite_schema WHERE name = 'headwater'").get:
        raise NotALog("a SQLite database without a log in it", where=path, next="Name the file of a log")
    version = connection.execute("SELECT value FROM headwater WHERE name = 'schema_version'").get
    if version > SCHEMA_VERSION:
        raise NewerSchema(
            f"the log has schema {version}, this Headwater knows up to {SCHEMA_VERSION}",
            where=path,
            next="Upgrade: pip install -U headwater",
        )
    if version < SCHEMA_VERSION:
        raise StoreError(
            f"the log has schema {version}, which is older than {SCHEMA_VERSION}",
            where=path,
            next=f"Open it once to bring it up to date: headwater doctor {path}",
        )
