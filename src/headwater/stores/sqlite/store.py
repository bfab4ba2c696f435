"""A log in one SQLite file."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import IO, Any

import apsw

from headwater.errors import ClosedError, HeadwaterError, LockedError
from headwater.message import Draft
from headwater.ports.store import GroupedWorkT, Interruption
from headwater.stores.sql import TopicTail
from headwater.stores.sqlite.connection import (
    MEMORY,
    SQL,
    WAL_PAGES_CHECKPOINT,
    WAL_PAGES_MAX,
    Durability,
    check_file,
    connect,
    connect_read_only,
    keep_journal,
    patience,
    refuse_unsafe_sqlite,
    translate,
    translated,
)
from headwater.stores.sqlite.migrations import PAGE_BYTES, SCHEMA_VERSION, check_readable, prepare
from headwater.stores.sqlite.reader import SqliteReader
from headwater.stores.sqlite.second_library import check_descriptors, unwatch, watch
from headwater.stores.sqlite.writer import SqliteWriter

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None  # type: ignore[assignment]

logger = logging.getLogger("headwater")

IDLE_READERS_MAX = 8
UNSEEN_PAGES_MAX = WAL_PAGES_CHECKPOINT // 4  # written by `publish_at_once`, which never looks at the journal's length
PAGES_PER_PUBLISH = 3  # besides those of the payloads
PUBLISHER_S_MAX, PUBLISHER_STEP_S = 0.1, 0.000_1  # a checkpoint waits for `publish_at_once`, looking so often
ASKS_EVERY_STEPS = 1_000_000  # of SQLite's virtual machine, some 20 ms


class SqliteStore:
    """`ports.store.Store`. One connection writes, under a lock; readers have connections of their own.

    Other processes may use the same file: SQLite's own locks keep the writers apart.
    """

    external_tx = None
    claims_with_publish = commits_in_place = True

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        durability: Durability = "full",
        busy_timeout_ms: int = 10_000,
        adopt: bool = False,
        vfs: str | None = None,
        read_only: bool = False,
    ) -> None:
        refuse_unsafe_sqlite()
        self.path = self.name = self._check_path(path)
        self.durability = durability
        self._busy_timeout_ms = busy_timeout_ms
        self._vfs = vfs
        self._read_only = read_only
        self._closed = False
        self._announcements = f"{self.path}-server"
        self._announced: IO[bytes] | None = None
        self._turn = threading.Lock()
        self._syncs = durability == "full"  # the writing connection, as it is set now
        self._topics = TopicTail()
        self._idle_readers: list[apsw.Connection] = []
        self._publishers: list[apsw.Connection] = []  # idle, one as a rule; see `publish_at_once`
        self._publishing = 0  # the thread that does so, as far as is known
        self._unseen_pages = 0
        self._reading: dict[int, tuple[float, str]] = {}  # thread names and since when they read, for `health`
        with translated(self.path):
            self._connection = self.connect()
            self.waits = True  # the transaction, for the locks of other processes
            be_patient = patience(busy_timeout_ms)
            self._connection.set_busy_handler(lambda tries: self.waits and be_patient(tries))
            try:
                if read_only:
                    check_readable(self._connection, self.path)
                else:
                    prepare(self._connection, self.path, adopt=adopt, busy_timeout_ms=busy_timeout_ms)
                self.salt = int(self._connection.execute(SQL["fact"], ("salt",)).get)
                self._foreign_version = self.data_version(self._connection)
            except BaseException:
                self._connection.close()
                raise
            self._checkpointer = Checkpointer(self, self._connection)
        if self._connection.filename:  # a database in memory has none
            watch(self.path)

    def _check_path(self, path: str | os.PathLike[str]) -> str:
        file = check_file(os.fspath(path))
        check_descriptors(file)
        return file

    def connect(self) -> apsw.Connection:
        """One more connection with the log's settings."""
        if self._read_only:
            return connect_read_only(self.path, busy_timeout_ms=self._busy_timeout_ms)
        connection = connect(
            self.path, durability=self.durability, busy_timeout_ms=self._busy_timeout_ms, vfs=self._vfs
        )
        if os.path.exists(self._announcements):  # it is a server's, which can be started again on a full disk
            keep_journal(connection)
        return connection

    @contextmanager
    def write(
        self,
        on_rollback: Callable[[], None] | None = None,
        *,
        alone: bool = True,
        synced: bool = True,
        wait: bool = True,
    ) -> Iterator[SqliteWriter]:
        """Always alone: SQLite has one writer at a time."""
        if not self._turn.acquire(blocking=wait):
            raise LockedError("another transaction of this process is open", where=self.path, next="Try again")
        try:
            with translated(self.path):
                self._refuse_closed()
                self.waits = wait
                yield from self._transaction(on_rollback, synced)
        finally:
            self.waits = True
            self._turn.release()

    def _transaction(self, on_rollback: Callable[[], None] | None, synced: bool) -> Iterator[SqliteWriter]:
        connection = self._connection
        if connection.in_transaction:  # a rollback failed; without this one no write would ever succeed again
            connection.execute("ROLLBACK")
        if synced is not self._syncs and self.durability == "full":
            connection.execute("PRAGMA synchronous = FULL" if synced else "PRAGMA synchronous = NORMAL")
            self._syncs = synced
        connection.execute("BEGIN IMMEDIATE")
        try:
            yield SqliteWriter(connection, self.salt, self._topics)
            connection.execute("COMMIT")
        except BaseException:
            try:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
            finally:
                if on_rollback is not None:
                    on_rollback()
            raise

    def publish_at_once(self, drafts: Sequence[Draft]) -> range | None:
        """Commit messages in one call of APSW, on a connection that calls no Python code back and waits for nothing. No
        lock of this process is held, so a signal handler may raise or publish wherever it interrupts. `_publishing` is
        a hint for other threads. The connection belongs to one caller at a time: the seq is read by a second call,
        which must find it neither busy nor closed, or what is stored would count as not stored."""
        me = threading.get_ident()
        if (
            self._publishing not in (0, me)
            or self._turn.locked()
            or self._unseen_pages >= UNSEEN_PAGES_MAX
            or self._closed
        ):
            self._unseen_pages = 0  # the transaction that follows looks
            return None
        self._publishing = me
        connection: apsw.Connection | None = None
        try:
            try:
                connection = self._publishers.pop()
            except IndexError:
                connection = None  # opened below, so that an error of that has no context
            if connection is None:
                connection = self._open_publisher()
            bindings: list[str] = []
            bytes = 0
            for draft in drafts:
                bindings += draft.topic, draft.data_json
                bytes += draft.size
            self._unseen_pages += PAGES_PER_PUBLISH + bytes // PAGE_BYTES
            last: int = connection.execute(_publish_at_once(len(drafts)), bindings).get
            return range(last - len(drafts) + 1, last + 1)
        except (apsw.BusyError, apsw.CantOpenError):
            return None
        except apsw.Error as exc:
            raise translate(exc, self.path) from exc
        finally:
            self._publishing = 0
            if connection is not None:
                self._publishers.append(connection)
            if self._closed or len(self._publishers) > 1:
                self._close_publishers()

    def _open_publisher(self) -> apsw.Connection:
        connection = self.connect()
        connection.set_busy_timeout(0)
        return connection

    def _close_publishers(self) -> None:
        """Close the connections that publish: all of them in a closed log, else all but one. The one of a running call
        is closed by its thread."""
        with contextlib.suppress(IndexError):  # another thread was quicker
            while len(self._publishers) > (not self._closed):
                self._publishers.pop().close()

    def order(self, group: list[GroupedWorkT]) -> bool:
        """Any order will do: SQLite locks the whole file."""
        return True

    def split_locked(self, group: list[GroupedWorkT]) -> tuple[list[GroupedWorkT], list[GroupedWorkT]]:
        return group, []

    @contextmanager
    def read(self, interruption: Interruption | None = None) -> Iterator[SqliteReader]:
        with translated(self.path):
            connection = self._reader()
            key = id(connection)
            self._reading[key] = (time.monotonic(), threading.current_thread().name)
            try:
                connection.execute("BEGIN")
                with _interrupting(connection, interruption):
                    yield SqliteReader(connection, self.salt, self._topics)
            finally:
                self._reading.pop(key, None)
                self._put_back(connection)

    def _put_back(self, connection: apsw.Connection) -> None:
        try:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
        except apsw.Error:
            connection.close(True)
            raise
        # A connection that takes the file for one that does not change would not see that it did.
        if self._closed or self._read_only or len(self._idle_readers) >= IDLE_READERS_MAX:
            connection.close()
        else:
            self._idle_readers.append(connection)

    def _reader(self) -> apsw.Connection:
        self._refuse_closed()
        try:
            return self._idle_readers.pop()
        except IndexError:
            connection = self.connect()
            connection.execute("PRAGMA query_only = ON")
            return connection

    def changed_by_others(self) -> bool:
        """Whether another process committed since this was last asked. The writing connection does not count its own
        commits; it counts those of `publish_at_once`, which is left alone while a consumer waits here."""
        with self._turn, translated(self.path):
            if self._closed:
                return False
            before, self._foreign_version = self._foreign_version, self.data_version(self._connection)
            return before != self._foreign_version

    def data_version(self, connection: apsw.Connection) -> int:
        """A number that changes with each commit of other connections than this one. Of a log that may not be written,
        where a connection may take the file for one that does not change, it changes each second too: a file is written
        before its commit can be seen."""
        if not self._read_only:
            return int(connection.execute("PRAGMA data_version").get)
        return hash((int(time.monotonic()), *(_written_ns(f"{self.path}{suffix}") for suffix in ("", "-wal"))))

    def announce(self) -> str | None:
        """A lock on a file of its own, which the system takes away with the process, however that ends. The file is
        never removed: another process could hold a lock on what is not there any more."""
        try:
            file = open(self._announcements, "a+b", opener=_for_its_user_alone)  # noqa: SIM115
        except OSError:  # a directory that may not be written to
            return None
        if not _locked(file, exclusive=True):
            file.close()
            return None
        with self._turn:
            keep_journal(self._connection)
        name = uuid.uuid4().hex
        try:
            file.truncate(0)
            file.write(name.encode())
            file.flush()
        except OSError:  # a full disk
            with contextlib.suppress(OSError):
                file.close()
            return None
        self._announced = file
        return name

    def is_gone(self, name: str) -> bool:
        """Whether a server has ended. One at a time holds the lock, and its name is in the file."""
        try:
            with open(self._announcements, "rb") as file:
                return _locked(file, exclusive=False) or file.read() != name.encode()
        except OSError:
            return False

    def reclaim_space(self, pages: int) -> bool:
        with self._turn, translated(self.path):
            self._refuse_closed()
            # Each returned page is a row of its own in the pragma, so it has to be stepped to the end.
            self._connection.execute(f"PRAGMA incremental_vacuum({int(pages)})").fetchall()
            auto_vacuum = self._connection.execute("PRAGMA auto_vacuum").get
            free = self._connection.execute("PRAGMA freelist_count").get
            return bool(auto_vacuum) and bool(free)

    def checkpoint(self) -> tuple[int, int]:
        """Move what the WAL holds into the database; (pages in the WAL, pages moved). Fewer moved than there are
        means that some reader still needs the rest."""
        with self._turn, translated(self.path):
            self._refuse_closed()
            until = time.monotonic() + PUBLISHER_S_MAX
            while self._publishing and time.monotonic() < until:  # its commit would be left out, and no other begins
                time.sleep(PUBLISHER_STEP_S)
            return self._connection.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_PASSIVE)

    def journal_bytes(self) -> int:
        try:
            return os.stat(f"{self.path}-wal").st_size
        except OSError:  # there is none before the first write, and after the last connection closed
            return 0

    def health(self, interruption: Interruption | None = None) -> dict[str, Any]:
        in_wal, moved = self.checkpoint()
        with self.read(interruption) as reader:
            pragma = reader._connection.execute
            integrity = [row[0] for row in pragma("PRAGMA quick_check(10)")]
            oldest = min(self._reading.values(), default=None)
            return {
                "store": "sqlite",
                "path": self.path,
                "sqlite": apsw.sqlite_lib_version(),
                "apsw": apsw.apsw_version(),
                "schema": SCHEMA_VERSION,
                "durability": self.durability,
                "journal": pragma("PRAGMA journal_mode").get,
                "page_size": pragma("PRAGMA page_size").get,
                "pages": pragma("PRAGMA page_count").get,
                "free_pages": pragma("PRAGMA freelist_count").get,
                "auto_vacuum": pragma("PRAGMA auto_vacuum").get,
                "file_bytes": os.stat(self.path).st_size,
                "wal_bytes": self.journal_bytes(),
                "wal_pages": in_wal,
                "wal_pages_moved": moved,
                "oldest_reader_s": 0.0 if oldest is None else round(time.monotonic() - oldest[0], 3),
                "oldest_reader": None if oldest is None else oldest[1],
                "integrity": "ok" if integrity == ["ok"] else integrity,
            }

    def close(self) -> None:
        self._checkpointer.stop()
        with self._turn:
            if self._closed:
                return
            self._closed = True
            try:
                self._close_publishers()
                while self._idle_readers:
                    self._idle_readers.pop().close()
                self._connection.close()
            finally:  # also on a full disk
                unwatch(self.path)
            if self._announced is not None:
                self._announced.close()

    def _refuse_closed(self) -> None:
        if self._closed:
            raise ClosedError("the log is closed", where=self.path, next="Open it again")


class MemoryStore(SqliteStore):
    """A log in memory, gone when it is closed. SQLite has one connection to it, so reads and writes take turns. A read
    that waits longer than the busy timeout, for one because its own thread has a transaction open, raises
    LockedError."""

    def __init__(self, *, busy_timeout_ms: int = 10_000) -> None:
        super().__init__(MEMORY, durability="relaxed", busy_timeout_ms=busy_timeout_ms)

    def _check_path(self, path: str | os.PathLike[str]) -> str:
        return "memory"

    def connect(self) -> apsw.Connection:
        return connect(MEMORY, durability=self.durability, busy_timeout_ms=self._busy_timeout_ms)

    @contextmanager
    def read(self, interruption: Interruption | None = None) -> Iterator[SqliteReader]:
        if not self._turn.acquire(timeout=self._busy_timeout_ms / 1000):
            why = "another transaction is open, and in memory reads and writes take turns"
            raise LockedError(why, where=self.path, next="End the transaction, or raise busy_timeout")
        try:
            self._refuse_closed()
            with translated(self.path), _interrupting(self._connection, interruption):
                yield SqliteReader(self._connection, self.salt, self._topics)
        finally:
            self._turn.release()

    def publish_at_once(self, drafts: Sequence[Draft]) -> None:
        """There is only one connection."""

    def announce(self) -> None:
        """Nothing outlives this process."""

    def is_gone(self, name: str) -> bool:
        return False

    def journal_bytes(self) -> int:
        return 0

    def health(self, interruption: Interruption | None = None) -> dict[str, Any]:
        with self.read(interruption) as reader:
            pragma = reader._connection.execute
            return {
                "store": self.name,
                "sqlite": apsw.sqlite_lib_version(),
                "apsw": apsw.apsw_version(),
                "schema": SCHEMA_VERSION,
                "page_size": pragma("PRAGMA page_size").get,
                "pages": pragma("PRAGMA page_count").get,
                "free_pages": pragma("PRAGMA freelist_count").get,
            }

    def _refuse_closed(self) -> None:
        if self._closed:
            raise ClosedError("the log is closed", where=self.path, next="Its messages are gone; open a new one")


class Checkpointer:
    """Moves pages of the write-ahead log into the database, on a thread of its own and a connection of its own, so that
    commits do not wait for it. Then the writer waits for the few that came meanwhile: once all are moved, the next
    commit writes to the beginning of the file again, which syncs faster than a file that grows."""

    def __init__(self, store: SqliteStore, connection: apsw.Connection) -> None:
        self._store = store
        self._due = threading.Event()
        self._stopped = False
        self._thread: threading.Thread | None = None
        self._moved = 0  # pages
        connection.set_wal_hook(self._on_commit)

    def _on_commit(self, connection: apsw.Connection, name: str, pages: int) -> int:
        if pages < self._moved:  # it has started anew
            self._moved = 0
        if pages >= WAL_PAGES_MAX and self._store.waits:  # the thread does not keep up
            with contextlib.suppress(apsw.Error):  # the commit stands, and must not be reported as failed
                connection.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_PASSIVE)
        elif pages - self._moved >= WAL_PAGES_CHECKPOINT and not self._due.is_set():
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="headwater-checkpointer", daemon=True)
                self._thread.start()
            self._due.set()
        return apsw.SQLITE_OK

    def _run(self) -> None:
        connection: apsw.Connection | None = None
        while True:
            self._due.wait()
            self._due.clear()
            if self._stopped:
                break
            try:
                connection = connection or self._store.connect()
                connection.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_PASSIVE)
                _, self._moved = self._store.checkpoint()
            except (apsw.Error, HeadwaterError) as exc:  # such as a full disk; a later commit asks for it again
                logger.debug("the write-ahead log of %s is moved later: %s", self._store.path, exc)
        if connection is not None:
            connection.close()

    def stop(self) -> None:
        self._stopped = True
        self._due.set()
        if self._thread is not None:
            self._thread.join()


@lru_cache(maxsize=64)
def _publish_at_once(count: int) -> str:
    return SQL["publish_at_once"].format(rows=", ".join(["(?, ?)"] * count))


def _for_its_user_alone(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


@contextmanager
def _interrupting(connection: apsw.Connection, interruption: Interruption | None) -> Iterator[None]:
    """SQLite forgets an interruption that comes between two statements: so each asks before it begins, and now and then
    while it runs."""
    if interruption is None:
        yield
        return
    connection.exec_trace = lambda *_: interruption.reason is None
    connection.set_progress_handler(lambda: interruption.reason is not None, ASKS_EVERY_STEPS)
    try:
        with interruption.stops(connection.interrupt):
            yield
    except (apsw.InterruptError, apsw.ExecTraceAbort) as exc:
        if interruption.reason is None:
            raise
        raise interruption.reason from exc
    finally:
        connection.exec_trace = None
        connection.set_progress_handler(None)


def _locked(file: IO[bytes], *, exclusive: bool) -> bool:
    if fcntl is None:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_NB | (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH))
    except OSError:
        return False
    return True


def _written_ns(path: str) -> int:
    try:
        return os.stat(path).st_mtime_ns
    except FileNotFoundError:
        return 0
