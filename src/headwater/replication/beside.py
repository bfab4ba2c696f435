"""What is kept beside a database that is pushed or pulled, in the directory `<database>-headwater`: from which version
it comes (`state.json`), the lock that lets one sync run at a time (`lock`), and files that last as long as one sync."""

from __future__ import annotations

import contextlib
import errno
import os
import shlex
from types import TracebackType

import msgspec

from headwater.errors import DiskFull, InputOutput, Locked
from headwater.replication.database_file import remove_database
from headwater.replication.local_files import private
from headwater.replication.names import Remote

try:
    import fcntl
except ImportError:  # then nobody guards against a second sync; the server's compare-and-set still does
    fcntl = None  # type: ignore[assignment]

ENDING = "-headwater"
REMOTES_MAX = 100  # that a database is remembered to have been synced with
STATE_BYTES_MAX = 1024 * 1024
TAKES_MAX = 1000  # of a lock that others have just taken away with all that lay beside the database


class Noted(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """What is known of a database and one remote."""

    replica_id: str | None = msgspec.field(name="replicaID", default=None)
    base: int = 0
    """The version that the database came from, or was pushed as; 0: none."""
    dbhash: str | None = None
    """Of that version."""
    head: str | None = None
    """Of its first page, but for the counters that each copy keeps for itself."""
    last_push_id: str | None = msgspec.field(name="lastPushID", default=None)
    """Of a push that was begun and whose answer did not come: the server may have made a version of it."""
    pulling: str | None = None
    """The hash of what a pull is about to write, or empty if that has none. It stays only if the pull was killed: then
    the database is still what it was, or this already."""


class State(msgspec.Struct):
    remotes: dict[str, Noted] = {}


class Beside:
    """Holds the lock while it is entered."""

    def __init__(self, database: str) -> None:
        self.database = os.path.realpath(database)
        self.directory = self.database + ENDING
        self.snapshot_path = os.path.join(self.directory, "snapshot.db")
        self.pulled_path = os.path.join(self.directory, "pulled.db")
        self._state_path = os.path.join(self.directory, "state.json")
        self._lock_path = os.path.join(self.directory, "lock")
        self._lock = -1

    def __enter__(self) -> Beside:
        try:
            self._take()
            self._sweep()
        except OSError as exc:
            self._unlock()
            above = os.path.dirname(self.directory)
            if not os.path.isdir(above):
                mend = f"mkdir -p {shlex.quote(above)}"
                raise InputOutput("the directory does not exist", where=above, next=mend) from exc
            raise InputOutput(
                exc.strerror or str(exc),
                where=self.directory,
                next="Give this user write access to the directory of the database",
            ) from exc
        except BaseException:
            self._unlock()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with contextlib.suppress(OSError):
            self._sweep()
            if not os.path.exists(self._state_path):  # nothing to remember: leave nothing behind
                os.unlink(self._lock_path)
                os.rmdir(self.directory)
        self._unlock()

    def noted(self, remote: Remote) -> Noted:
        return self._state().remotes.get(remote.key) or Noted()

    def noted_of(self, replica_id: str) -> Noted | None:
        """The latest that is known of this replica, under whatever address."""
        notes = [noted for noted in self._state().remotes.values() if noted.replica_id == replica_id]
        return notes[-1] if notes else None

    def note(self, remote: Remote, noted: Noted, *, durable: bool = True) -> None:
        """On disk when it returns; if not durable, a power cut may bring the old one back. One that says nothing is
        forgotten. Raises DiskFull or InputOutput."""
        remotes = {key: known for key, known in self._state().remotes.items() if key != remote.key}
        newest = list(remotes.items())[-(REMOTES_MAX - 1) :]
        state = State(remotes=dict([*newest, (remote.key, noted)] if noted != Noted() else newest))
        try:
            if not state.remotes:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(self._state_path)
                return
            _write_whole(self._state_path, msgspec.json.encode(state), durable)
        except OSError as exc:
            kind = DiskFull if exc.errno in (errno.ENOSPC, errno.EDQUOT) else InputOutput
            raise kind(
                f"what was synced cannot be noted: {exc.strerror or exc}", where=self._state_path, next="Sync again"
            ) from exc

    def _state(self) -> State:
        """An unreadable one says nothing: then a push is from base 0, and the server refuses what does not fit."""
        try:
            with open(self._state_path, "rb") as file:
                return msgspec.json.decode(file.read(STATE_BYTES_MAX), type=State)
        except (FileNotFoundError, msgspec.MsgspecError, UnicodeDecodeError):
            return State()

    def _take(self) -> None:
        for _ in range(TAKES_MAX):
            if self._locked():
                return  # else whoever had it took the file away: take the next one
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))  # a link that points nowhere

    def _locked(self) -> bool:
        with contextlib.suppress(FileExistsError):
            os.mkdir(self.directory, mode=0o700)
        try:
            self._lock = os.open(self._lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except FileNotFoundError:
            return False
        if fcntl is not None:
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as exc:
                if exc.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                    raise
                raise Locked(
                    "another sync of this database is running", where=self.database, next="Wait for it, or stop it"
                ) from exc
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

    def _sweep(self) -> None:
        """What a killed sync left. Only while the lock is held."""
        if self._lock >= 0:
            remove_database(self.snapshot_path)
            remove_database(self.pulled_path)


def _write_whole(path: str, content: bytes, durable: bool) -> None:
    """Either the old content or the new one is there, also after a crash."""
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
        directory = os.open(os.path.dirname(path), os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)
