"""A log in a PostgreSQL database, which several processes on several hosts may share."""

from __future__ import annotations

import contextlib
import random
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import psycopg
from psycopg import sql
from psycopg.pq import TransactionStatus

from headwater import processes
from headwater.errors import (
    ClosedError,
    ConflictError,
    HeadwaterError,
    NotALogError,
    OutcomeUnknownError,
    StoreError,
    UnavailableError,
)
from headwater.message import Draft
from headwater.ports.clock import SystemClock
from headwater.ports.store import COUNTERS, PUBLISHING, GroupedWorkT, Interruption
from headwater.stores.postgres.connection import (
    RECONNECT_S_MAX,
    RECONNECT_S_MIN,
    SERVER_VERSION_MIN,
    SQL,
    Durability,
    Place,
    Pool,
    PoolTimeout,
    connect,
    is_broken,
    place_of,
    settings_of,
    translate,
    translated,
)
from headwater.stores.postgres.external_tx import PostgresExternalTx
from headwater.stores.postgres.known import KnownSubscriptions
from headwater.stores.postgres.migrations import prepare
from headwater.stores.postgres.pipelined import PipelinedConnection, Statement
from headwater.stores.postgres.reader import PostgresReader
from headwater.stores.postgres.writer import PostgresWriter
from headwater.stores.sql import TopicTail

READERS_MAX = 8  # connections that read, at most
OPENINGS_MAX = 5  # how often a log is opened whose connection breaks meanwhile

PATIENCE_S_MIN = 1.0  # for connections, which take a while to make
DEAD_DELIVERIES_MAX = 50_000  # above this, maintenance does not wait for autovacuum
VACUUM_MS_MAX = 2_000  # limits how long close() waits for it; autovacuum does the rest
CANCEL_AGAIN_S = 0.1
_LOCK_ORDER = {COUNTERS: 1, PUBLISHING: 2}  # after all subscriptions
CLOCK_JITTER_MS = 20  # what a round trip may take is no difference of clocks

_XID_AND_TIME = "pg_current_xact_id()::text, (extract(epoch FROM clock_timestamp()) * 1000)::bigint"
_SERVER_PROCESS = "pg_backend_pid() || ' ' || pg_postmaster_start_time()"
_DEAD_DELIVERIES = "SELECT pg_stat_get_dead_tuples(?::regclass)"
OUTCOME_POLL_S = 0.05
NOTES_KEPT_MS = 24 * 3_600_000  # those of stores that were killed

_END_TRANSACTION = (
    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid = ? AND backend_xid = ?::xid8::xid"
    " AND usename = current_user"
)
_END_CONNECTION = (
    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid = ? AND backend_start = ?::timestamptz"
    " AND usename = current_user"
)
_STARTED = "SELECT backend_start::text FROM pg_stat_activity WHERE pid = pg_backend_pid()"
_TABLES = """
SELECT relname, n_live_tup, n_dead_tup, pg_total_relation_size(relid), last_autovacuum::text
FROM pg_stat_user_tables WHERE schemaname = ? ORDER BY relname
"""
_CONNECTIONS = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()"
_OLDEST = """
SELECT extract(epoch FROM now() - xact_start)::float8, coalesce(nullif(application_name, ''), 'pid ' || pid)
FROM pg_stat_activity WHERE backend_xmin IS NOT NULL AND pid <> pg_backend_pid()
ORDER BY xact_start LIMIT 1
"""


class PostgresStore:
    """`ports.store.Store`. One connection writes, under a lock; readers come from a pool.

    A publish holds the log's publish lock until it is committed, so that seqs become visible in their order; a test
    shows the loss without it. A work that touches a subscription locks its row, and only a transaction that may touch
    anything (`alone`) excludes all others. A commit whose answer got lost is looked up by its transaction id.
    """

    commits_in_place = False
    claims_with_publish = False  # the publish lock is taken last, behind the rows of subscriptions

    def __init__(
        self,
        url: str,
        *,
        durability: Durability = "full",
        busy_timeout_ms: int = 10_000,
        poll_only: bool = False,
        create: bool = True,
        readers_max: int = READERS_MAX,
    ) -> None:
        self.place: Place = place_of(url)
        self.name = self.place.name
        self.durability = durability
        self.sender = uuid.uuid4().hex[:12]
        """Names this store in the notifications that it sends, so that it can leave them to others."""
        busy_timeout_ms = max(1, busy_timeout_ms)  # to PostgreSQL, none means no limit
        self._patience_s = max(PATIENCE_S_MIN, busy_timeout_ms / 1000)
        self._poll_only = poll_only
        # Behind a pooler a connection is ours for one transaction only.
        self._settings = settings_of(
            self.place, durability=durability, lock_timeout_ms=busy_timeout_ms, local=poll_only
        ).as_string()
        settings = [self._settings] if poll_only else []
        self._begin_read = ["BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY", *settings]
        columns = f"{_XID_AND_TIME}, {_SERVER_PROCESS}" if poll_only else _XID_AND_TIME
        self._begin_write = {
            (alone, synced): [
                "BEGIN ISOLATION LEVEL READ COMMITTED",
                *settings,
                f"SELECT {SQL[lock]}, {columns}" + ("" if synced else f", {SQL['commit_unsynced']}"),
            ]
            for alone, lock in ((True, "lock_alone"), (False, "lock_shared"))
            for synced in (True, False)
        }
        self._news = (self.place.channel, self.sender)
        self._outcomes = Outcomes(self.place, self.sender, self.connect)
        self._known = KnownSubscriptions()
        self._server_process = ""  # behind a pooler: what the last transaction ran on
        self._turn = threading.Lock()
        self._announced: int | None = None
        self._topics = TopicTail()
        self._closed = False
        self.ahead_ms = 0
        """How far the server's clock is ahead of this host's, as the last transaction found it."""
        self.salt = self._open(create)
        self.external_tx = PostgresExternalTx(self.place, self.salt)
        self._pid = processes.ask()
        self._readers = Pool(lambda: self.connect("reader"), readers_max)

    def _open(self, create: bool, tries: int = OPENINGS_MAX) -> int:
        """Connect, make or upgrade the tables, and return the salt. An unreachable server is an error at
        once; a connection that breaks on the way is tried again."""
        with translated(self.name):
            self._connection = self._connect("writer")
            try:
                self._set_up(self._connection, "writer")
                self._refuse_old_server()
                self._compare_clocks(self._connection.ask(f"SELECT NULL, {_XID_AND_TIME}"))
                if not create:
                    self._refuse_absent()
                return prepare(self._connection, self.place.schema, self.name)
            except psycopg.OperationalError as exc:
                if not is_broken(self._connection, exc) or tries == 1:
                    self._connection.close()
                    raise
            except BaseException:
                self._connection.close()
                raise
        return self._open(create, tries - 1)

    def connect(self, purpose: str) -> PipelinedConnection:
        connection = self._connect(purpose)
        try:
            self._set_up(connection, purpose)
        except BaseException:
            connection.close()
            raise
        return connection

    def _connect(self, purpose: str) -> PipelinedConnection:
        return connect(self.place, application=f"headwater {purpose}", prepare=not self._poll_only)

    def _set_up(self, connection: PipelinedConnection, purpose: str) -> None:
        if not self._poll_only:
            connection.execute(self._settings.encode(), prepare=False)
            if purpose == "writer":
                connection.started = connection.ask(_STARTED).value()

    def _refuse_old_server(self) -> None:
        version = self._connection.info.server_version
        if version < SERVER_VERSION_MIN:
            raise StoreError(
                f"PostgreSQL {version // 10_000} is too old", where=self.name, next="Use PostgreSQL 14 or newer"
            )

    def _refuse_absent(self) -> None:
        if self._connection.ask("SELECT to_regclass(?)", (f"{self.place.schema}.headwater",)).value() is None:
            raise NotALogError(
                f"there is no log in schema {self.place.schema!r} of this database",
                where=self.name,
                next="Publish to it first, or name its schema: postgres://…?schema=NAME",
            )

    # --- writing ------------------------------------------------------------------------------------------------

    @contextmanager
    def write(
        self,
        on_rollback: Callable[[], None] | None = None,
        *,
        alone: bool = True,
        synced: bool = True,
        wait: bool = True,
    ) -> Iterator[PostgresWriter]:
        with self._turn:
            self._refuse_closed()
            begun = self._begin_writing(alone, synced or self.durability != "full")
            writer = PostgresWriter(self._connection, self.salt, alone, self._topics, self._news, self._known)
            try:
                with self._whole_or_conflict(writer):
                    yield writer
                    writer.queue_checks()
                self._commit(writer, begun)
            except BaseException:
                try:
                    self._roll_back()
                finally:
                    if on_rollback is not None:
                        on_rollback()
                raise

    def publish_at_once(self, drafts: Sequence[Draft]) -> None:
        """It takes several statements."""

    def order(self, group: list[GroupedWorkT]) -> bool:
        """Subscriptions by id, then counters, then publishes: the publish lock, which all others wait for, is taken
        last."""
        if any(work.touching is None for work in group):
            return True
        group.sort(key=lambda work: (_LOCK_ORDER.get(work.touching or "", 0), work.touching))
        return False

    def split_locked(self, group: list[GroupedWorkT]) -> tuple[list[GroupedWorkT], list[GroupedWorkT]]:
        """Another client publishes in a long transaction: publishes wait for it, the others need not."""
        blocked = [work for work in group if work.touching in (None, PUBLISHING)]
        return blocked, [work for work in group if work.touching not in (None, PUBLISHING)]

    def _begin_writing(self, alone: bool, synced: bool) -> Statement:
        """Begin, on a new connection if the old one is gone. Unless `alone`, BEGIN travels with the first statement.
        Returns the statement that tells the transaction's id and the server's time."""
        until = time.monotonic() + self._patience_s
        pause_s = RECONNECT_S_MIN
        while True:
            try:
                if not self._connection.is_alive():
                    self._connection = self.connect("writer")
                    self._known.clear()
                    self._hold_announced()
                if self._connection.info.transaction_status != TransactionStatus.IDLE:
                    self._connection.execute("ROLLBACK")
                *_, begun = [self._connection.queue(sql) for sql in self._begin_write[alone, synced]]
                if alone or self._poll_only:  # behind a pooler only the id tells of a lost commit
                    self._connection.send_queued()
                    self._compare_clocks(begun)
                if self._poll_only and self._server_process != (its_process := begun.row()[3]):
                    self._known.clear()
                    self._server_process = its_process
                return begun
            except psycopg.Error as exc:
                error = translate(exc, self.name)
                gone = is_broken(self._connection, exc) or isinstance(error, UnavailableError)
                self._roll_back()
                if not gone or time.monotonic() + pause_s > until:
                    raise error from exc
                time.sleep(pause_s * random.uniform(0.5, 1.0))
                pause_s = min(RECONNECT_S_MAX, pause_s * 2)

    @contextmanager
    def _whole_or_conflict(self, writer: PostgresWriter) -> Iterator[None]:
        """Whatever breaks before the commit was sent, nothing of the transaction stays."""
        try:
            yield
        except psycopg.errors.DivisionByZero as exc:
            raise self._changed_elsewhere(writer) from exc
        except psycopg.Error as exc:
            error = translate(exc, self.name)
            if is_broken(self._connection, exc):
                raise ConflictError(
                    f"the connection broke ({error.why})", where=self.name, next="Nothing was written; try again"
                ) from exc
            raise error from exc

    def _commit(self, writer: PostgresWriter, begun: Statement) -> None:
        connection = self._connection
        is_noted = writer.has_published or not begun.sent_ns
        if is_noted:
            connection.queue(SQL["note_commit"], self._outcomes.note())
        if writer.has_news:  # a NOTIFY costs every committing transaction of the server a turn
            connection.queue(SQL["notify"], self._news)
        connection.queue("COMMIT")
        try:
            connection.send_queued()
        except psycopg.errors.DivisionByZero as exc:
            raise self._changed_elsewhere(writer) from exc
        except psycopg.Error as exc:
            if not is_broken(connection, exc):
                raise translate(exc, self.name) from exc  # refused: rolled back
            if not self._outcomes.was_committed(begun, connection, self._patience_s, noted=is_noted):
                raise ConflictError(
                    "the connection broke in the commit, which did not happen",
                    where=self.name,
                    next="Nothing was written; try again",
                ) from exc
        else:
            self._known.committed(writer, begun.row()[1])
            self._compare_clocks(begun)

    def _changed_elsewhere(self, writer: PostgresWriter) -> ConflictError:
        self._known.forget(writer.taken_for_known)
        return ConflictError("another host changed the subscription", where=self.name, next="Try again")

    def _roll_back(self) -> None:
        if self._connection.closed:
            return
        self._connection.forget_queued()
        try:
            if self._connection.info.transaction_status != TransactionStatus.IDLE:
                self._connection.execute("ROLLBACK")
        except psycopg.Error:
            self._connection.close()  # then the server rolls back, and the next write begins on a new one

    # --- reading ------------------------------------------------------------------------------------------------

    @contextmanager
    def read(self, interruption: Interruption | None = None) -> Iterator[PostgresReader]:
        self._refuse_closed()
        interruption, ended = interruption or Interruption(), threading.Event()
        try:
            with self._readers.connection(self._begin_reading, self._patience_s) as connection:
                try:
                    with interruption.stops(partial(_cancel, connection, ended)):
                        yield PostgresReader(connection, self.salt, self._topics, interruption)
                    connection.ask("COMMIT")
                except psycopg.Error as exc:
                    if interruption.reason is not None:
                        raise interruption.reason from exc
                    error = translate(exc, self.name)
                    if is_broken(connection, exc):
                        raise ConflictError(
                            f"the connection broke ({error.why})", where=self.name, next="Read again"
                        ) from exc
                    raise error from exc
                finally:
                    ended.set()
                    if interruption.reason is not None:
                        connection.close()  # or the cancellation, if it comes late, ends what is read next
                    connection.forget_queued()
                    with contextlib.suppress(psycopg.Error):
                        if not connection.closed and connection.info.transaction_status != TransactionStatus.IDLE:
                            connection.execute("ROLLBACK")
        except psycopg.Error as exc:
            raise translate(exc, self.name) from exc
        except PoolTimeout as exc:
            raise UnavailableError(
                str(exc), where=self.name, next="All connections to read with are busy; read fewer things at once"
            ) from exc

    def _begin_reading(self, connection: PipelinedConnection) -> None:
        if not connection.is_alive():
            raise psycopg.OperationalError("the connection broke while it was idle")
        for statement in self._begin_read:
            connection.queue(statement)

    # --- the rest -----------------------------------------------------------------------------------------------

    def _compare_clocks(self, begun: Statement) -> None:
        """Estimate how far the server's clock is ahead: it was read between sending and receiving, by this host's."""
        row = begun.row()
        if row is not None:
            least_ms, most_ms = row[2] - begun.received_ns // 1_000_000, row[2] - begun.sent_ns // 1_000_000
            ahead_ms = min(max(self.ahead_ms, least_ms), most_ms)
            if abs(ahead_ms - self.ahead_ms) > CLOCK_JITTER_MS:
                self.ahead_ms = ahead_ms

    def announce(self) -> str | None:
        """A lock of the writing connection's session, which ends with the process. Behind a pooler there is none."""
        if self._poll_only:
            return None
        with self._turn, translated(self.name):
            self._announced = random.randrange(2**31)
            self._hold_announced()
        return str(self._announced)

    def _hold_announced(self) -> None:
        if self._announced is not None and not self._connection.closed:
            self._connection.ask(SQL["announce"], (self._announced,))

    def is_gone(self, name: str) -> bool:
        with self.read() as reader:
            return not reader.is_announced(int(name))

    def reclaim_space(self, pages: int) -> bool:
        """Autovacuum does it, by the settings that the tables have, but comes once a minute; rows of deliveries come
        and go by the hundred thousand in that time."""
        with translated(self.name), self.connect("vacuum") as connection:
            self._outcomes.forget_old(connection, time.time_ns() // 1_000_000 + self.ahead_ms)
            dead = connection.ask(_DEAD_DELIVERIES, (f"{self.place.schema}.deliveries",)).value()
            if dead > DEAD_DELIVERIES_MAX:
                table = sql.Identifier(self.place.schema, "deliveries")
                connection.execute(sql.SQL("SET statement_timeout = {}").format(sql.Literal(VACUUM_MS_MAX)))
                with contextlib.suppress(psycopg.errors.QueryCanceled):
                    connection.execute(sql.SQL("VACUUM (TRUNCATE FALSE) {}").format(table))
        return False

    def journal_bytes(self) -> int:
        return 0  # the server's own business

    def health(self, interruption: Interruption | None = None) -> dict[str, Any]:
        with self.read(interruption) as reader, translated(self.name):
            return health_of(reader.connection, self.name, self.place.schema, self.durability)

    def close(self) -> None:
        with self._turn:
            if self._closed:
                return
            self._closed = True
            if processes.pid != self._pid:  # forked: the connections are the parent's
                return
            with contextlib.suppress(psycopg.Error):
                self._outcomes.forget(self._connection)
            self._connection.close()
        self._readers.close()

    def _refuse_closed(self) -> None:
        if self._closed:
            raise ClosedError("the log is closed", where=self.name, next="Open it again")


def _cancel(connection: psycopg.Connection, ended: threading.Event) -> None:
    """Ask the server to end what it runs for this connection; over the network, so on a thread of its own, and until it
    has ended: between two statements the server has nothing to cancel, and forgets that it was asked."""
    try:
        cancel = connection.pgconn.get_cancel()
    except psycopg.Error:  # the connection has broken, and what it ran with it
        return

    def ask() -> None:
        while not ended.is_set():
            with contextlib.suppress(psycopg.Error):
                cancel.cancel()
            ended.wait(CANCEL_AGAIN_S)

    threading.Thread(target=ask, name="headwater-cancel", daemon=True).start()


class DatabaseClock(SystemClock):
    """The database's time, because leases are compared across hosts whose clocks differ: this host's clock, moved by
    how far the server's is ahead of it. Every transaction compares the two anew."""

    def __init__(self, store: PostgresStore) -> None:
        self._store = store

    def now_ms(self) -> int:
        return super().now_ms() + self._store.ahead_ms


class Outcomes:
    """What became of a commit whose answer got lost with its connection.

    Every transaction knows its id before it commits, and `pg_xact_status` tells whether that one did. But after a crash
    of the server the id of a lost transaction is given out again and may be another client's: therefore a store numbers
    its transactions that publish, and the number of the last committed one is in the database. Claims and acks go
    without: one that is taken for done and is not leads to one more delivery, no more.
    """

    def __init__(self, place: Place, sender: str, connect: Callable[[str], PipelinedConnection]) -> None:
        self._place = place
        self._connect = connect
        self._note = f"commits of {sender}"
        self._number = 0
        self._table = sql.Identifier(place.schema, "leases").as_string()

    def note(self) -> tuple[str, int]:
        """The note that is stored before a COMMIT; each call is the next transaction."""
        self._number += 1
        return self._note, self._number

    def was_committed(self, begun: Statement, lost: PipelinedConnection, patience_s: float, *, noted: bool) -> bool:
        """Ask on another connection, for so long, about a transaction; `noted`: the one that was noted last."""
        until = time.monotonic() + patience_s
        why: HeadwaterError | None = None
        while time.monotonic() < until:
            try:
                with self._connect("outcome") as connection:
                    while time.monotonic() < until:
                        status = self._status(connection, begun, lost)
                        if status == "aborted":
                            return False
                        if status != "in progress":
                            return bool(self._noted(connection) == self._number if noted else status == "committed")
                        time.sleep(OUTCOME_POLL_S)
            except psycopg.errors.InvalidParameterValue:
                return False  # an id that is yet to be given out: the server crashed before anything of it was kept
            except psycopg.Error as exc:
                why = translate(exc, self._place.name)
                time.sleep(OUTCOME_POLL_S)
        raise OutcomeUnknownError(
            f"the connection broke in the commit, and its outcome is unknown ({why or 'it runs on'})",
            where=self._place.name,
            next="Publish again with the same id: if it is there already, it stays one message",
        )

    def _status(self, connection: PipelinedConnection, begun: Statement, lost: PipelinedConnection) -> str | None:
        """The status of a transaction whose answer was lost. One that runs on is ended: it will get no further word
        from us. Where not even the id of the transaction came back, it is over when its connection is."""
        row = begun.row()
        if row is None:
            is_there = connection.ask(_END_CONNECTION, (lost.backend_pid, lost.started)).row() is not None
            return "in progress" if is_there else None
        connection.ask(_END_TRANSACTION, (lost.backend_pid, row[1]))
        status: str | None = connection.ask("SELECT pg_xact_status(?::xid8)", (row[1],)).value()
        return status

    def _noted(self, connection: PipelinedConnection) -> Any:
        return connection.ask(f"SELECT fence FROM {self._table} WHERE resource = ?", (self._note,)).value()

    def forget(self, connection: PipelinedConnection) -> None:
        connection.ask(f"DELETE FROM {self._table} WHERE resource = ?", (self._note,))

    def forget_old(self, connection: PipelinedConnection, now_ms: int) -> None:
        query = f"DELETE FROM {self._table} WHERE starts_with(resource, 'commits of ') AND until < ?"
        connection.ask(query, (now_ms - NOTES_KEPT_MS,))


def health_of(connection: PipelinedConnection, name: str, schema: str, durability: str) -> dict[str, Any]:
    tables = connection.ask(_TABLES, (schema,)).rows()
    oldest = connection.ask(_OLDEST).row()
    settings = {
        setting: connection.ask("SELECT current_setting(?)", (setting,)).value()
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
        "connections": connection.ask(_CONNECTIONS).value(),
        "file_bytes": sum(row[3] for row in tables),
        "dead_tuples": {row[0]: row[2] for row in tables if row[2]},
        "live_tuples": {row[0]: row[1] for row in tables},
        "last_autovacuum": max((row[4] for row in tables if row[4]), default=None),
        "oldest_reader_s": 0.0 if oldest is None else round(max(0.0, oldest[0] or 0.0), 3),
        "oldest_reader": None if oldest is None else oldest[1],
    }
