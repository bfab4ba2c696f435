"""The data directory of a server: replicas, their versions, and how a push becomes one.

A push is written into a scratch copy of the newest version, which stays as it is. The scratch file is checked and
synced, the delta that leads back to the old version is written and synced, both are renamed, the directory is synced.
Then the catalogue commits, which is the commit point. Only after it the old file is removed.

Blocks, and is safe to use from several threads. One server at a time accepts pushes; commands may list, restore, verify
and remove beside it.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Literal, NamedTuple

import msgspec

from headwater.errors import (
    ClosedError,
    CorruptError,
    HeadwaterError,
    InputOutputError,
    InvalidOptionError,
    LockedError,
    NotADatabaseError,
    ReplicationFailedError,
    TooLargeError,
)
from headwater.files import lock_file, sync_file
from headwater.ports.clock import Clock
from headwater.replication.host import disk
from headwater.replication.host.catalogue import (
    REPLICAS_MAX,
    Accepted,
    Catalogue,
    Replica,
    Version,
)
from headwater.replication.host.disk import (
    NEW,
    READING,
    REMOVED,
    Layout,
    is_replica_id,
    refuse_foreign,
    refuse_to_fill,
)
from headwater.replication.host.verify import VersionVerdict, refuse_target, restore, verify
from headwater.replication.host.versions import (
    LOCK,
    TRIES_MAX,
    Delta,
    OpenedVersion,
    Shape,
    VersionRetention,
    open_version,
    refuse_other_count,
    refuse_removed,
    sha256_of,
    shape_of,
    surplus,
    write_delta,
)
from headwater.replication.integrity import check_integrity
from headwater.replication.local_database import SIDECARS, remove_database
from headwater.replication.names import ReplicaName

DATABASE_BYTES_MAX = 10 * 1024**3

Base = int | Literal["latest"]
Checkpoint = Callable[[str], None]
"""Called after each step, with its name; tests fail or die there."""


class Scratch(msgspec.Struct, frozen=True):
    """A running push. Pages are written to `path`; the file does not exist yet if no page of the newest version can be
    reused. `base` is the version that it was made from. `creates_replica`: there is no replica of this name yet."""

    replica: Replica
    path: str
    base: int
    push_id: str
    client: str
    creates_replica: bool

    @property
    def delta_path(self) -> str:
        return self.path.removesuffix(".db") + ".pages"


_VERSION_FILE = re.compile(r"\d+\.(db|pages)")


class Recovered(NamedTuple):
    """`removed` are paths below the data directory; `damaged` names accepted files that are missing or truncated."""

    removed: list[str]
    damaged: list[str]


class ReplicaStore:
    def __init__(
        self,
        directory: str | os.PathLike[str],
        policy: VersionRetention,
        clock: Clock,
        *,
        bytes_max: int = DATABASE_BYTES_MAX,
        replicas_max: int = REPLICAS_MAX,
        checkpoint: Checkpoint = lambda step: None,
    ) -> None:
        self._layout = Layout(os.fspath(directory))
        self._policy = policy
        self._clock = clock
        self._bytes_max = bytes_max
        self._replicas_max = replicas_max
        self._checkpoint = checkpoint
        self._catalogue: Catalogue | None = None
        self._serving: int | None = None
        # Two pushes from one base use the same file names, so they take turns from the first rename to the commit.
        self._naming = threading.Lock()

    # --- life cycle -------------------------------------------------------------------------------------------------

    @property
    def directory(self) -> str:
        return self._layout.directory

    @property
    def catalogue(self) -> Catalogue:
        if self._catalogue is None:
            raise ClosedError("the data directory is not open", where=self.directory)
        return self._catalogue

    def _check_served(self) -> None:
        if self._serving is None:
            raise ClosedError("this data directory was not opened to be served", where=self.directory)

    def open(self, *, serve: bool = False) -> ReplicaStore:
        """Open the directory, which must exist for commands. `serve`: create it if needed, and accept pushes, as the
        only server."""
        refuse_foreign(self.directory)
        if not serve and not os.path.isdir(self.directory):
            raise InvalidOptionError(
                "there is no such directory", where=self.directory, next="headwater serve makes one"
            )
        with disk.translated(self.directory):
            if serve:
                disk.make_directory(self.directory)
                self._serving = lock_file(self._layout.serving_lock)
                if self._serving is None:
                    raise LockedError(
                        "another server serves these replicas",
                        where=self.directory,
                        next="Stop it, or name another directory",
                    )
        try:
            self._catalogue = Catalogue(self.directory, self._clock, create=serve, replicas_max=self._replicas_max)
            if serve:
                with disk.translated(self.directory):
                    sync_file(self.directory)
        except BaseException:
            self.close()
            raise
        return self

    def close(self) -> None:
        if self._catalogue is not None:
            self._catalogue.close()
            self._catalogue = None
        if self._serving is not None:
            os.close(self._serving)
            self._serving = None

    def __enter__(self) -> ReplicaStore:
        return self

    def __exit__(self, kind: type[BaseException] | None, *details: object) -> None:
        self.close()

    # --- pushes -----------------------------------------------------------------------------------------------------

    def begin_push(
        self,
        name: ReplicaName,
        *,
        base: Base,
        push_id: str,
        last_push_id: str | None = None,
        base_hash: str | None = None,
        client: str = "",
        page_size: int | None = None,
    ) -> Scratch:
        """A copy of the newest version to write into. Raises VersionConflictError if `base` is not the newest, or has
        another content than the client remembers. A new replica is created when its first version is accepted. The
        lengths of texts are checked by the session."""
        self._check_served()
        for _ in range(TRIES_MAX):
            replica = self.catalogue.find(name)
            newest = self.catalogue.version(replica.id, replica.newest) if replica is not None else None
            agreed = agreed_base(base, last_push_id, base_hash, newest)
            if agreed is None:
                raise self.catalogue.conflict(name)
            owner = replica
            if owner is None:
                self.catalogue.refuse_one_more()
                owner = self.catalogue.new_replica(name)
            path = self._layout.new_scratch(owner.id)
            scratch = Scratch(owner, path, agreed, push_id, client, creates_replica=replica is None)
            try:
                self._prepare(scratch, newest, page_size)
                return scratch
            except (CorruptError, InputOutputError):
                # Unless another push was accepted between the look at the catalogue and the copy of its file.
                if self.catalogue.find(name) == replica:
                    raise
        raise self.catalogue.conflict(name)

    def _prepare(self, scratch: Scratch, newest: Version | None, page_size: int | None) -> None:
        """Make its directory, if it is the first of its replica, and copy the newest version, if its pages have the
        same size."""
        home = self._layout.home(scratch.replica.id)
        try:
            with disk.translated(home):
                if newest is None and not os.path.isdir(home):  # otherwise it exists, or was removed just now
                    with contextlib.suppress(FileExistsError):
                        os.mkdir(home, 0o700)
                if scratch.creates_replica:
                    disk.touch(self._layout.new_mark(scratch.replica.id))
                if newest is not None and page_size in (None, newest.page_size):
                    head = self._layout.head(scratch.replica.id, newest.number)
                    if not os.path.exists(head) or os.stat(head).st_size != newest.size:
                        raise CorruptError(
                            f"version {newest.number} is not on the disk as it was accepted",
                            where=scratch.replica.name.path,
                            next="On the server, run `headwater replica verify`",
                        )
                    disk.copy(head, scratch.path)
                self._checkpoint("begun")
        except BaseException:
            self.discard_push(scratch)
            raise

    def discard_push(self, scratch: Scratch) -> None:
        """Remove its files. What cannot be removed now is removed at the next start of the server."""
        with contextlib.suppress(OSError):
            remove_database(scratch.path)
            disk.remove(scratch.delta_path)
            if scratch.creates_replica:
                disk.remove(self._layout.new_mark(scratch.replica.id))
                os.rmdir(self._layout.home(scratch.replica.id))  # fails if a version is there

    def accept_push(
        self,
        scratch: Scratch,
        *,
        message: str = "",
        dbhash: str | None = None,
        wire_bytes: int = 0,
        check_rights: Callable[[], None] = lambda: None,
        stop: threading.Event | None = None,
    ) -> Accepted:
        """Make it the newest version, if it is intact and its base still is the newest. The scratch is removed in any
        case. `dbhash`: as the client sent it. `check_rights` is called before the version is made, and may refuse.
        `stop` ends the check; after the check it has no effect."""
        now_ms = self._clock.now_ms()
        try:
            with disk.translated(self._layout.home(scratch.replica.id)):
                try:
                    shape, sha256, delta = self._check(scratch, stop or threading.Event())
                    self._checkpoint("checked")
                    if delta is not None and delta.identical:
                        return self._unchanged(scratch)
                    version = Version(
                        number=scratch.base + 1,
                        base=scratch.base,
                        push_id=scratch.push_id,
                        message=message,
                        client=scratch.client,
                        at_ms=now_ms,
                        size=shape.size,
                        page_size=shape.page_size,
                        pages=shape.pages,
                        changed_pages=shape.pages if delta is None else delta.changed,
                        wire_bytes=wire_bytes,
                        dbhash=dbhash,
                        sha256=sha256,
                    )
                    check_rights()
                    with self._naming:
                        self._name_and_commit(scratch, version, delta)
                except (FileNotFoundError, NotADatabaseError) as exc:
                    # Files are removed when another push is accepted, or the replica is removed.
                    self._refuse_stale(scratch)
                    if isinstance(exc, FileNotFoundError):
                        raise CorruptError("a file is missing", where=str(exc.filename)) from exc
                    raise
                self._checkpoint("committed")
                if scratch.base:
                    with contextlib.suppress(OSError):  # the version is accepted, whatever happens to the old file
                        disk.remove(self._layout.head(scratch.replica.id, scratch.base))
                self._checkpoint("old file removed")
        finally:
            self.discard_push(scratch)
        with contextlib.suppress(HeadwaterError):  # the version is accepted; the next push or start tries again
            self.apply_policy(scratch.replica.id)
        return Accepted(version, is_new=True)

    def _check(self, scratch: Scratch, stop: threading.Event) -> tuple[Shape, str, Delta | None]:
        """Check a pushed database; returns its shape, its SHA-256 and the delta to its base. All checks run at once:
        they wait for disk and processor in turns, and none holds the interpreter for long."""
        path = scratch.path
        if not os.path.exists(path) or any(_size(path + beside) for beside in SIDECARS):
            raise ReplicationFailedError("the copy is incomplete", next="Push again")
        shape = shape_of(path)
        if shape.size > self._bytes_max:
            raise TooLargeError(
                f"the database has {shape.size:,} bytes and the limit is {self._bytes_max:,}", next="Raise max_bytes"
            )
        refuse_other_count(path, shape)
        has_failed = threading.Event()

        def go_on() -> None:
            if stop.is_set() or has_failed.is_set():
                raise ReplicationFailedError("stopped", next="Push again")

        def go_on_with_space() -> None:
            go_on()
            refuse_to_fill(self._layout.directory, 0)

        with ThreadPoolExecutor(4, thread_name_prefix="headwater-accept") as pool:
            intact = pool.submit(check_integrity, path, constraints=True, stop=stop)
            sha256 = pool.submit(sha256_of, path, go_on)
            delta = None
            if scratch.base:
                head = self._layout.head(scratch.replica.id, scratch.base)
                delta = pool.submit(write_delta, head, path, scratch.delta_path, go_on_with_space)
            synced = pool.submit(sync_file, path)
            try:
                intact.result()
                synced.result()
                return shape, sha256.result(), None if delta is None else delta.result()
            finally:
                has_failed.set()

    def _name_and_commit(self, scratch: Scratch, version: Version, delta: Delta | None) -> None:
        self._refuse_stale(scratch)
        replica_id = scratch.replica.id
        head = self._layout.head(replica_id, version.number)
        older = self._layout.delta(replica_id, scratch.base)
        try:
            if delta is not None:
                os.replace(scratch.delta_path, older)
                self._checkpoint("delta named")
            os.replace(scratch.path, head)
            self._checkpoint("version named")
            sync_file(self._layout.home(replica_id))
            if not scratch.base:
                sync_file(self._layout.directory)
            self._checkpoint("directory synced")
            self.catalogue.commit_version(
                scratch.replica,
                version,
                None if delta is None else (delta.bytes, delta.sha256),
                with_replica=scratch.creates_replica,
            )
        except InputOutputError:
            # The commit may be on disk nevertheless, and be found after a crash. So the files stay: the next push
            # overwrites them, or the next start removes them.
            raise
        except BaseException:
            with contextlib.suppress(OSError):
                disk.remove(head)
                disk.remove(older)
            raise

    def _unchanged(self, scratch: Scratch) -> Accepted:
        self._refuse_stale(scratch)
        newest = self.catalogue.version(scratch.replica.id, scratch.base)
        if newest is None:
            raise self.catalogue.conflict(scratch.replica.name)
        return Accepted(newest, is_new=False)

    def _refuse_stale(self, scratch: Scratch) -> None:
        found = self.catalogue.find(scratch.replica.name)
        if found is None and scratch.creates_replica:
            return
        if found is None or (found.id, found.newest) != (scratch.replica.id, scratch.base):
            raise self.catalogue.conflict(scratch.replica.name)

    def apply_policy(self, replica_id: str) -> list[int]:
        """Remove old versions; returns their numbers."""
        if self._policy.keeps_all:
            return []
        versions = self.catalogue.versions_from(replica_id, 0)
        removed = surplus(versions, self._policy, self._clock.now_ms())
        if removed:
            self.catalogue.remove_versions(replica_id, removed[-1])
            self._checkpoint("versions forgotten")
            with disk.translated(self._layout.home(replica_id)):
                for number in removed:
                    disk.remove(self._layout.delta(replica_id, number))
        return removed

    # --- versions ---------------------------------------------------------------------------------------------------

    def open_version(self, name: ReplicaName, number: int) -> OpenedVersion:
        """A private file with that version, until it is closed."""
        return open_version(self._layout, self.catalogue, self.catalogue.get(name), number)

    def restore(
        self, name: ReplicaName, number: int, target: str | os.PathLike[str], *, overwrite: bool = False
    ) -> Version:
        refuse_target(os.fspath(target), overwrite=overwrite)
        with self.open_version(name, number) as opened:
            try:
                restore(opened, os.fspath(target), overwrite=overwrite)
            except HeadwaterError as exc:
                refuse_removed(self.catalogue, opened.replica, exc)
                raise
            return opened.version

    def verify(self, name: ReplicaName, number: int) -> VersionVerdict:
        return verify(self._layout, self.catalogue, self.catalogue.get(name), number)

    # --- replicas ---------------------------------------------------------------------------------------------------

    def remove(self, name: ReplicaName) -> Replica:
        """Remove the replica with its versions, keys and reports. A later one of the same name is another replica."""
        replica = self.catalogue.get(name)
        mark = self._layout.new_mark(replica.id)
        with contextlib.suppress(OSError):  # without the mark, a start after a crash in between would keep the files
            disk.touch(mark)
            sync_file(self._layout.home(replica.id))
        try:
            self.catalogue.remove(replica.id)
        except BaseException:
            with contextlib.suppress(OSError):
                disk.remove(mark)
            raise
        with contextlib.suppress(OSError):  # it has no directory yet
            os.replace(self._layout.home(replica.id), self._layout.removed(replica.id))
        disk.remove_tree(self._layout.removed(replica.id))
        return replica

    # --- recovery ---------------------------------------------------------------------------------------------------

    def recover(self) -> Recovered:
        """Remove the files that a crash has left, and old versions by the policy. Before serving: running pushes of
        another server would look like left behind.

        The catalogue decides: a file of a replica that it does not name was never accepted, or is not kept any more.
        But whole replicas that it does not know stay: perhaps the catalogue was lost, or restored from an old
        backup."""
        self._check_served()
        catalogue = self.catalogue
        catalogue.check()
        found = Recovered([], [])
        replicas = {replica.id: replica for replica in catalogue.replicas()}
        with disk.translated(self.directory):
            for name in sorted(os.listdir(self.directory)):
                if name in replicas or not is_replica_id(name.removeprefix(REMOVED)):
                    continue
                path = os.path.join(self.directory, name)
                if is_replica_id(name) and _has_versions(path):
                    found.damaged.append(f"{name} has versions and is not in the catalogue; remove it if it is unused")
                    continue
                disk.remove_tree(path)
                found.removed.append(name)
            for replica in replicas.values():
                self._recover_replica(replica, found)
        for replica_id in replicas:
            self.apply_policy(replica_id)
        return found

    def _recover_replica(self, replica: Replica, found: Recovered) -> None:
        home = self._layout.home(replica.id)
        files = set(os.listdir(home)) if os.path.isdir(home) else set()
        wanted = {
            f"{version.number}.db" if version.number == replica.newest else f"{version.number}.pages": (
                version.stored_bytes
            )
            for version in self.catalogue.versions_from(replica.id, 0)
        }
        damaged = [
            f"{replica.name.path}: {name} is {'not as long as it was' if name in files else 'missing'}"
            for name, size in wanted.items()
            if name not in files or os.stat(os.path.join(home, name)).st_size != size
        ]
        found.damaged.extend(damaged)
        for name in sorted(files - set(wanted)):
            path = os.path.join(home, name)
            if damaged and _VERSION_FILE.fullmatch(name):
                continue  # it may help to repair the damage
            if name.startswith(READING) and not _is_left_behind(path):
                continue
            if os.path.isdir(path):
                disk.remove_tree(path)
            else:
                disk.remove(path)
            found.removed.append(f"{replica.id}/{name}")


def _has_versions(home: str) -> bool:
    """Whether it may hold accepted versions."""
    files = os.listdir(home) if os.path.isdir(home) else []
    return NEW not in files and any(_VERSION_FILE.fullmatch(name) for name in files)


def _is_left_behind(reading: str) -> bool:
    """Whether nothing reads there any more; False while a command does."""
    with contextlib.suppress(OSError):
        held = lock_file(os.path.join(reading, LOCK))
        if held is None:
            return False
        os.close(held)
    return True


def agreed_base(base: Base, last_push_id: str | None, base_hash: str | None, newest: Version | None) -> int | None:
    """The version that a push is made from, or None if that is not the newest. Pure.

    Numbers repeat when an old data directory is restored from a backup; the hash of the content, if both sides know it,
    does not.

    If the newest version was made by this client's last push, from the version that it names, the answer to that push
    was lost: the client's base is the newest version."""
    number = newest.number if newest is not None else 0
    if base == "latest":
        return number
    if base == number:
        is_another = newest is not None and None not in (base_hash, newest.dbhash) and base_hash != newest.dbhash
        return None if is_another else number
    was_answer_lost = newest is not None and newest.base == base and newest.push_id == last_push_id
    return number if was_answer_lost else None


def _size(path: str) -> int:
    return os.stat(path).st_size if os.path.exists(path) else 0
