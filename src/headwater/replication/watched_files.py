"""What a watcher sees of a database: the file events of its directory, and a connection of its own."""

from __future__ import annotations

import contextlib
import os
from typing import NamedTuple

import apsw

from headwater.replication.local_files import Identity, identity_of
from headwater.stores.sqlite import file_events
from headwater.stores.sqlite.file_events import take_events, watch_directory

Stamp = tuple[int, int, int]  # inode, size and time of the last write

_KINDS = (
    file_events.MODIFY
    | file_events.CLOSE_WRITE
    | file_events.MOVED_FROM
    | file_events.MOVED_TO
    | file_events.CREATE
    | file_events.DELETE
    | file_events.DIRECTORY_GONE
)


class DirectoryEvents:
    """The file events of one directory, and what they say about commits and checkpoints."""

    def __init__(self, events: int, identity: Identity) -> None:
        self.events = events
        self.identity = identity
        self.gone = False
        self.someone_closed = False
        self._wal_written = False
        self.commit_then_backfill = False

    @classmethod
    def watched(cls, path: str, identity: Identity) -> DirectoryEvents | None:
        events = watch_directory(path, _KINDS)
        return None if events is None else cls(events, identity)

    def take(self, names: tuple[bytes, bytes, bytes], *, closed_by_us: bool = False) -> bool:
        """Empty the queue; whether something happened to files of these names, or to the directory."""
        database, wal, _ = names
        concerned = False
        for kinds, name in take_events(self.events):
            if kinds & file_events.LOST:
                concerned = self.commit_then_backfill = self.someone_closed = True
            elif not name:
                concerned = self.gone = True
            elif name in names:
                concerned = True
                if kinds & file_events.CLOSE_WRITE and not closed_by_us:
                    self.someone_closed = True
                if kinds & file_events.MODIFY:
                    self._wal_written = self._wal_written or name == wal
                    self.commit_then_backfill = self.commit_then_backfill or (name == database and self._wal_written)
        return concerned

    def settle(self) -> None:
        """Nothing happened for a while, so all that events told of has been seen."""
        self._wal_written = self.commit_then_backfill = False

    def close(self) -> None:
        os.close(self.events)


class Stamps(NamedTuple):
    database: Stamp | None
    wal: Stamp | None


class DatabaseView:
    """A connection to the database that is at a path now, and what was last seen through it."""

    def __init__(self, path: str, identity: Identity, *, may_checkpoint: bool = True) -> None:
        self.identity = identity
        self.may_checkpoint = may_checkpoint
        self._path = path
        self._connection = _connect(path)
        try:
            self._connection.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, not may_checkpoint)
            self._version = self._data_version()
            self.wal_frames = self._frames()
            self._wal_identity = identity_of(self._wal_path())
            if identity_of(path) != identity:
                raise apsw.CantOpenError("it was replaced while it was opened")
        except BaseException:
            self._connection.close()
            raise

    def close(self) -> None:
        # SQLite sees that a file was moved away, and then leaves the -wal file to whoever has the name now.
        with contextlib.suppress(apsw.Error):
            self._connection.close()

    def moved(self, directory: DirectoryEvents | None) -> bool:
        """Whether there was a commit since the last look."""
        version = self._data_version()
        if version == self._version:
            return False
        frames_before, self.wal_frames = self.wal_frames, self._frames()
        self._version = version
        # A checkpoint that empties the -wal file looks like a commit. But a commit before it would have been written to
        # the -wal file first and to the database then.
        was_emptied = frames_before >= 0 and self.wal_frames == 0
        return not was_emptied or directory is None or directory.commit_then_backfill

    def has_its_wal_left(self) -> bool:
        """Whether a database that was put in place of this one has this one's -wal file beside it."""
        wal = _stamp(self._wal_path())
        return wal is not None and wal[1] > 0 and identity_of(self._wal_path()) == self._wal_identity

    def stamps(self) -> Stamps:
        return Stamps(_stamp(self._path), _stamp(self._wal_path()))

    def _wal_path(self) -> str:
        return os.path.realpath(self._path) + "-wal"

    def _data_version(self) -> int:
        return int(self._connection.execute("PRAGMA data_version").get)

    def _frames(self) -> int:
        """In the -wal file; -1 where there is none."""
        return self._connection.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_NOOP)[0]


def _connect(path: str) -> apsw.Connection:
    """It only reads, but a WAL has to be shared in writing. Never waits for a lock: the next look will do."""
    try:
        connection = apsw.Connection(path, flags=apsw.SQLITE_OPEN_READWRITE)
    except apsw.CantOpenError:
        connection = apsw.Connection(path, flags=apsw.SQLITE_OPEN_READONLY)
    connection.execute("PRAGMA query_only = ON")
    return connection


def _stamp(path: str) -> Stamp | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns
