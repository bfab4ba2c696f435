"""The user's own SQL inside a transaction of the log.

PostgreSQL has no authorizer that could be asked about each table, so mistakes are caught in three ways: by the first
word of the statement; by the plan of an INSERT, UPDATE, DELETE or MERGE, which names the tables it writes to; and after
any other statement by the locks it left. What a function, a DO block or a trigger does is not looked at, so that the
user's triggers may publish with plain SQL: this guards against mistakes, not against malice.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import psycopg
from psycopg.pq import TransactionStatus

from headwater.errors import SqlFailed
from headwater.stores.database import OWN_TABLES
from headwater.stores.postgres.queries import SQL

QUOTED_CHARS_MAX = 80

_PIECE = re.compile(
    r"""
    '(?:[^']|'')*' | "(?:[^"]|"")*" | --[^\n]* | /\*.*?\*/ | \$(?P<tag>\w*)\$.*?\$(?P=tag)\$
  | (?P<psycopg>%(?:[sbt]\b|\())
  | (?P<mark>\?)
  | (?<![:\w]):(?P<name>[^\W\d]\w*)
    """,
    re.VERBOSE | re.DOTALL,
)
_FIRST_WORD = re.compile(r"(?:\s|\(|--[^\n]*(?:\n|$)|/\*.*?\*/)*([A-Za-z]+)", re.DOTALL)
_READS = frozenset(["SELECT", "VALUES", "TABLE", "SHOW"])
_WRITES = frozenset(["INSERT", "UPDATE", "DELETE", "MERGE", "WITH"])
_OTHERS = frozenset(
    ["CREATE", "ALTER", "DROP", "TRUNCATE", "COMMENT", "GRANT", "REVOKE", "REFRESH", "CALL", "DO", "NOTIFY", "ANALYZE"]
)


def run(connection: psycopg.Connection, sql: str, bindings: Sequence[Any] | Mapping[str, Any]) -> list[tuple[Any, ...]]:
    """Run one statement; if it fails, nothing of it stays and the transaction goes on."""
    found = _FIRST_WORD.match(sql)
    word = found[1].upper() if found else ""
    if word not in _READS | _WRITES | _OTHERS:
        raise _refused(sql)
    begun = connection.execute(SQL["begin_users_sql"].encode(), prepare=False)
    begun.nextset()
    row = begun.fetchone()
    schema = "" if row is None else str(row[0])
    try:
        rows = _run_guarded(connection, word, sql, bindings, schema)
    except BaseException as exc:
        if not connection.closed:
            connection.execute("ROLLBACK TO SAVEPOINT headwater; RELEASE SAVEPOINT headwater", prepare=False)
        if isinstance(exc, psycopg.Error | TypeError) and not connection.closed:
            raise SqlFailed(_first_line(exc), where=sql[:QUOTED_CHARS_MAX]) from exc
        raise
    connection.execute(SQL["end_users_sql"].encode(), prepare=False)
    return rows


def _run_guarded(
    connection: psycopg.Connection, word: str, sql: str, bindings: Sequence[Any] | Mapping[str, Any], schema: str
) -> list[tuple[Any, ...]]:
    if word in _WRITES:
        plan = _execute(connection, f"EXPLAIN (VERBOSE, FORMAT JSON) {sql}", bindings)
        if any(written in OWN_TABLES for written in _written_tables(plan, schema)):
            raise _refused(sql)
    rows = _execute(connection, sql, bindings)
    if connection.info.transaction_status != TransactionStatus.INTRANS:
        raise _refused(sql)
    if word in _OTHERS:
        own = sorted(OWN_TABLES)
        row = connection.execute(SQL["untouched"].encode(), (len(own), schema, own)).fetchone()
        if row != (True,):
            raise _refused(sql)
    return rows


def _execute(
    connection: psycopg.Connection, sql: str, bindings: Sequence[Any] | Mapping[str, Any]
) -> list[tuple[Any, ...]]:
    spelled = in_psycopgs_spelling(sql).encode() if bindings else sql.encode()
    with connection.pipeline():  # in it, psycopg sends statements in the way that allows one at a time only
        cursor = connection.execute(spelled, bindings or None, prepare=False)
    return cursor.fetchall() if cursor.description is not None else []


def in_psycopgs_spelling(sql: str) -> str:
    """Bindings may stand as `%s` and `%(name)s`, or as `?` and `:name`, so that what was written for a file runs here.
    A statement that has one of psycopg's is left as it is: a `?` in it is an operator."""
    pieces = list(_PIECE.finditer(sql))
    if any(piece["psycopg"] for piece in pieces):
        return sql
    spelled, end = [], 0
    for piece in pieces:
        if piece["mark"] or piece["name"]:
            spelled += [sql[end : piece.start()].replace("%", "%%"), f"%({piece['name']})s" if piece["name"] else "%s"]
            end = piece.end()
    return "".join([*spelled, sql[end:].replace("%", "%%")])


def _written_tables(plan: Any, schema: str) -> Iterator[str]:
    """The tables of the schema that a plan inserts into, updates or deletes from."""
    if isinstance(plan, Mapping):
        if plan.get("Node Type") == "ModifyTable" and plan.get("Schema") == schema:
            yield str(plan.get("Relation Name"))
        plan = list(plan.values())
    if isinstance(plan, Sequence) and not isinstance(plan, str):
        for part in plan:
            yield from _written_tables(part, schema)


def _refused(sql: str) -> SqlFailed:
    return SqlFailed(
        "this statement would touch the log's own tables or the transaction itself",
        where=sql[:QUOTED_CHARS_MAX],
        next="Use the publish of the transaction, and leave BEGIN and COMMIT to it",
    )


def _first_line(exc: BaseException) -> str:
    lines = str(exc).strip().splitlines()
    return lines[0] if lines else type(exc).__name__
