"""Looking at a log before it is read: read-only, and without ever making the file or changing its schema."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import apsw

from headwater.errors import InvalidOption, NewerSchema, NotALog, StoreError
from headwater.pipeline.source.adbc import BUSY_TIMEOUT_MS, read_only_uri
from headwater.pipeline.source.options import SourceOptions
from headwater.pipeline.source.reading import Condition, Range
from headwater.ports.store import Reader
from headwater.stores.sqlite.connection import translated
from headwater.stores.sqlite.migrations import SCHEMA_VERSION
from headwater.stores.sqlite.reader import SqliteReader
from headwater.topics import Pattern

COUNTED_SEQS = 200_000  # how much of the log is looked through in one transaction
RUNS_TOLD_MAX = 5


@contextmanager
def connected(path: str) -> Iterator[apsw.Connection]:
    """A read-only connection to a log."""
    if not os.path.isfile(path):
        raise NotALog("there is no such file", where=path, next="Check the option `path`; headwater.open() makes a log")
    with translated(path):
        connection = apsw.Connection(read_only_uri(path), flags=apsw.SQLITE_OPEN_READONLY | apsw.SQLITE_OPEN_URI)
        try:
            connection.set_busy_timeout(BUSY_TIMEOUT_MS)
            _check_version(connection, path)
            yield connection
        finally:
            connection.close()


@contextmanager
def reading(path: str) -> Iterator[Reader]:
    """The log at one moment."""
    with connected(path) as connection:
        salt = connection.execute("SELECT value FROM headwater WHERE name = 'salt'").get
        connection.execute("BEGIN")
        yield SqliteReader(connection, int(salt))


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


def log_identity(path: str) -> tuple[int, int]:
    """What tells this log from others, wherever it is moved: its salt and its birth."""
    with connected(path) as connection:
        facts = dict(connection.execute("SELECT name, value FROM headwater WHERE name IN ('salt', 'created_at')"))
    return facts["salt"], facts.get("created_at", 0)


def last_seq(connection: apsw.Connection) -> int:
    return int(connection.execute("SELECT coalesce(max(seq), 0) FROM sqlite_sequence WHERE name = 'messages'").get)


def starting_after(reader: Reader, options: SourceOptions) -> int:
    """The seq after which the first wanted message comes."""
    if options.starting_ms is not None:
        return reader.seq_before(options.starting_ms)
    if options.starting_seq == "earliest":
        return 0
    if options.starting_seq == "latest":
        return reader.last_seq()
    after = max(0, options.starting_seq - 1)
    if options.fail_on_data_loss:
        refuse_pruned(reader, Range(after, reader.last_seq()), options.path)
    return after


def refuse_pruned(reader: Reader, asked: Range, where: str) -> None:
    """An error if retention deleted anything of what is asked for."""
    runs = reader.pruned(asked.after + 1, asked.upto)
    if runs:
        raise InvalidOption(
            f"retention has deleted {sum(last - first + 1 for first, last in runs)} messages from {asked.after + 1} "
            f"on: {told(runs)}",
            where=where,
            next="Start at what is there with startingSeq=earliest, or read on without them with failOnDataLoss=false",
        )


def told(runs: list[tuple[int, int]]) -> str:
    """The first of the runs in words."""
    words = [f"{first}" if first == last else f"{first} to {last}" for first, last in runs[:RUNS_TOLD_MAX]]
    return ", ".join(words) + (f" and {len(runs) - RUNS_TOLD_MAX} more runs" if len(runs) > RUNS_TOLD_MAX else "")


def stored_range(connection: apsw.Connection, asked: Range) -> Range:
    """The part of a range in which there are messages."""
    first, last = connection.execute(
        "SELECT (SELECT min(seq) FROM messages WHERE seq > ?1), (SELECT max(seq) FROM messages WHERE seq <= ?2)", asked
    ).fetchone() or (None, None)
    if first is None or last is None or first > last:
        return Range(asked.after, asked.after)
    return Range(first - 1, last)


def seq_of_nth(connection: apsw.Connection, asked: Range, condition: Condition, n: int) -> int | None:
    """The seq of the n-th message of a range that fits; None if there are fewer."""
    after = asked.after
    if asked.upto - after < n:
        return None
    while after < asked.upto:
        upto = min(after + max(n, COUNTED_SEQS), asked.upto)
        sql, params = _exact(connection, Range(after, upto), condition)
        where = f"FROM messages WHERE seq > ? AND seq <= ? AND ({sql})"
        found = connection.execute(
            f"SELECT seq {where} ORDER BY seq LIMIT 1 OFFSET ?", (after, upto, *params, n - 1)
        ).get
        if found is not None:
            return int(found)
        n -= int(connection.execute(f"SELECT count(*) {where}", (after, upto, *params)).get)
        after = upto
    return None


def _exact(
    connection: apsw.Connection, asked: Range, condition: Condition
) -> tuple[str, tuple[str | int | float, ...]]:
    """The condition where it needs no second look: with the topics that fit by name."""
    if not condition.patterns:
        return condition.sql, condition.params
    sql = f"SELECT DISTINCT CAST(topic AS BLOB) FROM messages WHERE seq > ? AND seq <= ? AND ({condition.sql})"
    rows: list[Any] = connection.execute(sql, (*asked, *condition.params)).fetchall()
    topics = [topic for (raw,) in rows if _matches(condition.patterns, topic := raw.decode(errors="replace"))]
    return f"({condition.sql}) AND topic IN (SELECT value FROM json_each(?))", (*condition.params, json.dumps(topics))


def _matches(patterns: tuple[Pattern, ...], topic: str) -> bool:
    return any(pattern.matches(topic) for pattern in patterns)
