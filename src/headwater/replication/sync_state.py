"""The directory `<database>-headwater` next to a database that is pushed or pulled.

It holds the version that the database comes from (`state.json`), the lock that allows one sync at a time (`lock`), and
temporary files of a running sync."""

from __future__ import annotations

import contextlib
import errno
import os
import shlex

import msgspec

from headwater.errors import DiskFullError, InputOutputError, LockedError
from headwater.files import lock_file, sync_file
from headwater.replication.local_database import private, remove_database
from headwater.replication.names import Remote

ENDING = "-headwater"
REMOTES_MAX = 100  # of one database, in its state
STATE_BYTES_MAX = 1024 * 1024
LOCK_TRIES_MAX = 1000  # while other syncs remove the lock file as they end


class SyncRecord(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """The state of a database with respect to one remote."""

    replica_id: str | None = msgspec.field(name="replicaID", default=None)
    base: int = 0
    """The version that the database was pulled from or pushed as; 0: none."""
    dbhash: str | None = None
    """Of that version."""
    head: str | None = None
    """The hash of its first page without the counters."""
    last_push_id: str | None = msgspec.field(name="lastPushID", default=None)
    """Of a push without an answer: the server may have made a version of it."""
    pulling: str | None = None
    """The hash of the version that a pull is about to write, empty if unknown. Left by a pull that was killed: then the
    database is either unchanged or this version."""


class _State(msgspec.Struct):
    remotes: dict[str, SyncRecord] = {}


class SyncState:
    """Holds the lock while it is entered."""

    def __init__(self, database: str) -> None:
        self.database = os.path.realpath(database)
        self.directory = self.database + ENDING
        self.snapshot_path = os.path.join(self.directory, "snapshot.db")
        self.pulled_path = os.path.join(self.directory, "pulled.db")
        self._state_path = os.path.join(self.directory, "state.json")
        self._lock_path = os.path.join(self.directory, "lock")
        self._lock = -1

    def __enter__(self) -> SyncState:
        try:
            self._acquire()
            self._remove_temporary()
        except OSError as exc:
            self._unlock()
            above = os.path.dirname(self.directory)
            if not os.path.isdir(above):
                remedy = f"mkdir -p {shlex.quote(above)}"
                raise InputOutputError("the directory does not exist", where=above, next=remedy) from exc
            raise InputOutputError(
                exc.strerror or str(exc),
                where=self.directory,
                next="Give this user write access to the directory of the database",
            ) from exc
        except BaseException:
            self._unlock()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, *details: object) -> None:
        with contextlib.suppress(OSError):
            self._remove_temporary()
            if not os.path.exists(self._state_path):  # without a state, no directory stays
                os.unlink(self._lock_path)
                os.rmdir(self.directory)
        self._unlock()

    def load(self, remote: Remote) -> SyncRecord:
        return self._state().remotes.get(remote.key) or SyncRecord()

    def load_replica(self, replica_id: str) -> SyncRecord | None:
        """The newest record of this replica, under any address."""
        records = [record for record in self._state().remotes.values() if record.replica_id == replica_id]
        return records[-1] if records else None

    def save(self, remote: Remote, record: SyncRecord, *, durable: bool = True) -> None:
        """An empty record is removed. If not `durable`, a power cut may bring the old one back. Raises DiskFullError or
        InputOutput."""
        remotes = {key: known for key, known in self._state().remotes.items() if key != remote.key}
        newest = list(remotes.items())[-(REMOTES_MAX - 1) :]
        state = _State(remotes=dict([*newest, (remote.key, record)] if record != SyncRecord() else newest))
        try:
            if not state.remotes:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(self._state_path)
                return
            _replace_file(self._state_path, msgspec.json.encode(state), durable)
        except OSError as exc:
            kind = DiskFullError if exc.errno in (errno.ENOSPC, errno.EDQUOT) else InputOutputError
            raise kind(
                f"the state of the sync cannot be saved: {exc.strerror or exc}",
                where=self._state_path,
                next="Sync again",
            ) from exc

    def _state(self) -> _State:
        """An unreadable file counts as empty: then a push is from base 0, and the server refuses a wrong one."""
        try:
            with open(self._state_path, "rb") as file:
                return msgspec.json.decode(file.read(STATE_BYTES_MAX), type=_State)
        except (FileNotFoundError, msgspec.MsgspecError, UnicodeDecodeError):
            return _State()

    def _acquire(self) -> None:
        for _ in range(LOCK_TRIES_MAX):
            if self._try_lock():
                return
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))  # the directory is a dangling link

    def _try_lock(self) -> bool:
        """Take the lock. Returns False if the sync that held it removed the file at its end."""
        with contextlib.suppress(FileExistsError):
            os.mkdir(self.directory, mode=0o700)
        try:
            held = lock_file(self._lock_path)
        except FileNotFoundError:
            return False
        if held is None:
            raise LockedError(
                "another sync of this database is running", where=self.database, next="Wait for it, or stop it"
            )
        self._lock = held
        try:
            here = os.stat(self._lock_path)
        except FileNotFoundError:
            here = None
        if here is None or here.st_ino != os.fstat(self._lock).st_ino:
            self._unlock()
            return False
        return True

    def _unlock(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _remove_temporary(self) -> None:
        """Remove temporary files, also those of a sync that was killed; only while the lock is held."""
        if self._lock >= 0:
            remove_database(self.snapshot_path)
            remove_database(self.pulled_path)


def _replace_file(path: str, content: bytes, durable: bool) -> None:
    """Replace the content of a file, which after a crash has either the old content or the new one."""
    draft = path + ".new"
    try:
        with open(draft, "wb", opener=private) as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(draft)
        raise
    if durable:
        sync_file(os.path.dirname(path))
