"""What became of a commit whose answer got lost with its connection.

Every transaction knows its id before it commits, and `pg_xact_status` tells whether that one did. But after a crash of
the server the id of a transaction that was lost is given out again, so that somebody else's may be meant: therefore a
store numbers its transactions that publish, and the number of the last one that was committed stands in the database. A
claim or an ack that is taken for done and is not leads to one more delivery, no more; those go without.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import psycopg
from psycopg import sql

from headwater.errors import HeadwaterError, OutcomeUnknown
from headwater.stores.postgres.connection import Place, translate
from headwater.stores.postgres.queries import SQL

POLL_S = 0.05
NOTES_KEPT_MS = 24 * 3_600_000  # those of stores that were killed

_END_WHAT_RUNS = (
    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid = %s AND backend_xid = %s::xid8::xid"
    " AND usename = current_user"
)


class Outcomes:
    def __init__(self, place: Place, sender: str, connect: Callable[[str], psycopg.Connection]) -> None:
        self._place = place
        self._connect = connect
        self._note = f"commits of {sender}"
        self._number = 0
        self._table = sql.Identifier(place.schema, "leases")
        statement = SQL["note_commit"].replace("{number}", "{{number}}")
        self._statement = sql.SQL(statement).format(table=self._table, note=sql.Literal(self._note)).as_bytes()

    def note(self) -> bytes:
        """Stands before a COMMIT; each call is the next transaction."""
        self._number += 1
        return self._statement.replace(b"{number}", b"%d" % self._number) + b"; "

    def was_committed(self, xid: str, pid: int, patience_s: float, *, noted: bool) -> bool:
        """Ask on another connection, for so long, about a transaction; `noted`: the one that was noted last."""
        until = time.monotonic() + patience_s
        why: HeadwaterError | None = None
        while time.monotonic() < until:
            try:
                with self._connect("outcome") as connection:
                    while time.monotonic() < until:
                        connection.execute(_END_WHAT_RUNS, (pid, xid))  # it will get no further word from us
                        status = _value(connection, sql.SQL("SELECT pg_xact_status(%s::xid8)"), xid)
                        if status == "aborted":
                            return False
                        if status != "in progress":
                            return bool(self._noted(connection) == self._number if noted else status == "committed")
                        time.sleep(POLL_S)
            except psycopg.errors.InvalidParameterValue:
                return False  # an id that is yet to be given out: the server crashed before anything of it was kept
            except psycopg.Error as exc:
                why = translate(exc, self._place.name)
                time.sleep(POLL_S)
        raise OutcomeUnknown(
            f"the connection broke in the commit, and nobody says what became of it ({why or 'it runs on'})",
            where=self._place.name,
            next="Publish again with the same id: if it is there already, it stays one message",
        )

    def _noted(self, connection: psycopg.Connection) -> Any:
        return _value(connection, sql.SQL("SELECT fence FROM {} WHERE resource = %s").format(self._table), self._note)

    def forget(self, connection: psycopg.Connection) -> None:
        connection.execute(sql.SQL("DELETE FROM {} WHERE resource = %s").format(self._table), (self._note,))

    def forget_old(self, connection: psycopg.Connection, now_ms: int) -> None:
        query = "DELETE FROM {} WHERE starts_with(resource, 'commits of ') AND until < %s"
        connection.execute(sql.SQL(query).format(self._table), (now_ms - NOTES_KEPT_MS,))


def _value(connection: psycopg.Connection, query: sql.SQL | sql.Composed, argument: str) -> Any:
    row = connection.execute(query, (argument,)).fetchone()
    return None if row is None else row[0]
