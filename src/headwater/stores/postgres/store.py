"""A log in a PostgreSQL database, which several processes on several hosts may share."""

from __future__ import annotations

import contextlib
import os
import random
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import psycopg
from psycopg import sql
from psycopg.pq import TransactionStatus

from headwater.errors import Closed, Conflict, NotALog, StoreError, Unavailable
from headwater.ports.store import Interruption
from headwater.stores.database import TopicTail
from headwater.stores.postgres.connection import (
    SERVER_VERSION_MIN,
    Durability,
    Place,
    connect,
    is_broken,
    place_of,
    settings_of,
    translate,
    translated,
)
from headwater.stores.postgres.health import health_of
from headwater.stores.postgres.migrations import prepare
from headwater.stores.postgres.outcome import Outcomes
from headwater.stores.postgres.outside import PostgresOutside
from headwater.stores.postgres.pool import RECONNECT_S_MAX, RECONNECT_S_MIN, Pool, PoolTimeout
from headwater.stores.postgres.queries import SQL
from headwater.stores.postgres.reader import PostgresReader
from headwater.stores.postgres.writer import PostgresWriter

READERS_MAX = 8  # connections that read, at most
OPENINGS_MAX = 5  # how often a log is opened whose connection breaks meanwhile

PATIENCE_S_MIN = 1.0  # for connections, which take a while to make
DEAD_DELIVERIES_MAX = 50_000  # what housekeeping leaves to autovacuum
VACUUM_MS_MAX = 2_000  # limits how long close() waits for it; autovacuum does the rest
CANCEL_AGAIN_S = 0.1
CLOCK_JITTER_MS = 20  # what a round trip may take is no difference of clocks

_XID_AND_TIME = "pg_current_xact_id()::text, (extract(epoch FROM clock_timestamp()) * 1000)::bigint"
_DEAD_DELIVERIES = "SELECT pg_stat_get_dead_tuples(%s::regclass)"


class PostgresStore:
    """`ports.store.Store`. One connection writes, under a lock; readers come from a pool.

    Who publishes holds the log's publishing lock until it has committed, so that seqs become visible in their order; a
    test shows what happens without. Who touches a subscription locks its row, and only who may touch anything (`alone`)
    keeps all others out. A commit whose answer got lost is asked about by its transaction id: it has an outcome.
    """

    supports_sql = True
    supports_concurrent_reads = True
    shares_messages = False
    writes_beside_others = True

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
        ).as_bytes()
        # As bytes, all of them: to put a statement together takes longer than the server takes to run it.
        settings = b"; " + self._settings if poll_only else b""
        self._begin_read = b"BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY" + settings
        begin_write = b"BEGIN ISOLATION LEVEL READ COMMITTED" + settings
        self._begin_write = {
            alone: begin_write + f"; SELECT {SQL[lock]}, {_XID_AND_TIME}".encode()
            for alone, lock in ((True, "lock_alone"), (False, "lock_shared"))
        }
        tell = sql.SQL("SELECT pg_notify({}, {}); ").format(sql.Literal(self.place.channel), sql.Literal(self.sender))
        self._tell = tell.as_bytes()
        self._outcomes = Outcomes(self.place, self.sender, self.connect)
        self._turn = threading.Lock()
        self._announced: int | None = None
        self._topics = TopicTail()
        self._closed = False
        self.ahead_ms = 0
        """How far the server's clock is ahead of this host's, as the last transaction found it."""
        self.salt = self._open(create)
        self.outside = PostgresOutside(self.place, self.salt)
        self._pid = os.getpid()
        self._readers = Pool(lambda: self.connect("reader"), readers_max)

    def _open(self, create: bool, tries: int = OPENINGS_MAX) -> int:
        """Connect, make or upgrade the tables, and tell the salt. A server that is not there is told at once; a
        connection that breaks on the way is not."""
        with translated(self.name):
            self._connection = self.connect("writer")
            try:
                self._refuse_old_server()
                _, server_ms = self._connection.execute(f"SELECT {_XID_AND_TIME}").fetchone() or ("", 0)
                self._compare_clocks(server_ms)
                if not create:
                    self._refuse_absent()
                return prepare(self._connection, self.place.schema, self.name)
            except psycopg.OperationalError as exc:
                if not is_broken(self._connection, exc) or tries == 1:
                    raise
            except BaseException:
                self._connection.close()
                raise
        return self._open(create, tries - 1)

    def connect(self, purpose: str) -> psycopg.Connection:
        connection = connect(self.place, application=f"headwater {purpose}", prepare=not self._poll_only)
        if not self._poll_only:
            try:
                connection.execute(self._settings, prepare=False)
            except BaseException:
                connection.close()
                raise
        return connection

    def _refuse_old_server(self) -> None:
        version = self._connection.info.server_version
        if version < SERVER_VERSION_MIN:
            raise StoreError(
                f"PostgreSQL {version // 10_000} is too old", where=self.name, next="Use PostgreSQL 14 or newer"
            )

    def _refuse_absent(self) -> None:
        row = self._connection.execute("SELECT to_regclass(%s)", (f"{self.place.schema}.headwater",)).fetchone()
        if row is None or row[0] is None:
            raise NotALog(
                f"there is no log in schema {self.place.schema!r} of this database",
                where=self.name,
                next="Publish to it first, or name its schema: postgres://…?schema=NAME",
            )

    # --- writing ------------------------------------------------------------------------------------------------

    @contextmanager
    def write(self, on_rollback: Callable[[], None] | None = None, *, alone: bool = True) -> Iterator[PostgresWriter]:
        with self._turn:
            self._refuse_closed()
            xid = self._begin_writing(alone)
            writer = PostgresWriter(self._connection, self.salt, alone, self._topics)
            try:
                with self._whole_or_conflict():
                    yield writer
                self._commit(writer, xid)
            except BaseException:
                try:
                    self._roll_back()
                finally:
                    if on_rollback is not None:
                        on_rollback()
                raise

    def _begin_writing(self, alone: bool) -> str:
        """Begin, on a new connection if the old one is gone; the transaction's id."""
        until = time.monotonic() + self._patience_s
        pause_s = RECONNECT_S_MIN
        while True:
            try:
                if self._connection.closed:
                    self._connection = self.connect("writer")
                    self._hold_announced()
                if self._connection.info.transaction_status != TransactionStatus.IDLE:
                    self._connection.execute("ROLLBACK")
                cursor = self._connection.execute(self._begin_write[alone], prepare=False)
                while cursor.nextset():
                    pass
                _, xid, server_ms = cursor.fetchone() or (None, "", 0)
                self._compare_clocks(server_ms)
                return str(xid)
            except psycopg.Error as exc:
                told = translate(exc, self.name)
                gone = is_broken(self._connection, exc) or isinstance(told, Unavailable)
                self._roll_back()
                if not gone or time.monotonic() + pause_s > until:
                    raise told from exc
                time.sleep(pause_s * random.uniform(0.5, 1.0))
                pause_s = min(RECONNECT_S_MAX, pause_s * 2)

    @contextmanager
    def _whole_or_conflict(self) -> Iterator[None]:
        """Whatever breaks before the commit was sent, nothing of the transaction stays."""
        try:
            yield
        except psycopg.Error as exc:
            told = translate(exc, self.name)
            if is_broken(self._connection, exc):
                raise Conflict(
                    f"the connection broke ({told.why})", where=self.name, next="Nothing was written; try again"
                ) from exc
            raise told from exc

    def _commit(self, writer: PostgresWriter, xid: str) -> None:
        pid = self._connection.info.backend_pid
        note = self._outcomes.note() if writer.has_published else b""
        # A NOTIFY costs every committing transaction of the server a turn: only when there is news.
        news = self._tell if writer.has_news else b""
        try:
            self._connection.execute(note + news + b"COMMIT", prepare=False)
        except psycopg.Error as exc:
            if not is_broken(self._connection, exc):
                raise translate(exc, self.name) from exc  # it said no: rolled back
            if not self._outcomes.was_committed(xid, pid, self._patience_s, noted=bool(note)):
                raise Conflict(
                    "the connection broke in the commit, which did not happen",
                    where=self.name,
                    next="Nothing was written; try again",
                ) from exc

    def _roll_back(self) -> None:
        if self._connection.closed:
            return
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
                    connection.execute("COMMIT")  # after a ROLLBACK psycopg would prepare all statements anew
                except psycopg.Error as exc:
                    if interruption.reason is not None:
                        raise interruption.reason from exc
                    told = translate(exc, self.name)
                    if is_broken(connection, exc):
                        raise Conflict(
                            f"the connection broke ({told.why})", where=self.name, next="Read again"
                        ) from exc
                    raise told from exc
                finally:
                    ended.set()
                    if interruption.reason is not None:
                        connection.close()  # or the cancellation, if it comes late, ends what is read next
                    with contextlib.suppress(psycopg.Error):
                        if not connection.closed and connection.info.transaction_status != TransactionStatus.IDLE:
                            connection.execute("ROLLBACK")
        except psycopg.Error as exc:
            raise translate(exc, self.name) from exc
        except PoolTimeout as exc:
            raise Unavailable(
                str(exc), where=self.name, next="All connections to read with are busy; read fewer things at once"
            ) from exc

    def _begin_reading(self, connection: psycopg.Connection) -> None:
        connection.execute(self._begin_read, prepare=False)

    # --- the rest -----------------------------------------------------------------------------------------------

    def _compare_clocks(self, server_ms: int) -> None:
        ahead_ms = server_ms - time.time_ns() // 1_000_000
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
            self._connection.execute(SQL["announce"], (self._announced,))

    def is_gone(self, name: str) -> bool:
        with self.read() as reader:
            return not reader.is_announced(int(name))

    def reclaim_space(self, pages: int) -> bool:
        """Autovacuum does it, by the settings that the tables have, but comes once a minute; rows of deliveries come
        and go by the hundred thousand in that time."""
        with translated(self.name), self.connect("vacuum") as connection:
            self._outcomes.forget_old(connection, time.time_ns() // 1_000_000 + self.ahead_ms)
            row = connection.execute(_DEAD_DELIVERIES, (f"{self.place.schema}.deliveries",)).fetchone()
            if row is not None and row[0] > DEAD_DELIVERIES_MAX:
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
            if os.getpid() != self._pid:  # forked: the connections are the parent's
                return
            with contextlib.suppress(psycopg.Error):
                self._outcomes.forget(self._connection)
            self._connection.close()
        self._readers.close()

    def _refuse_closed(self) -> None:
        if self._closed:
            raise Closed("the log is closed", where=self.name, next="Open it again")


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
