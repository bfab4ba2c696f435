"""The data directory of a server: replicas, their versions, and running pushes.

Blocks, and is safe to use from several threads. One server at a time accepts pushes; commands may list, restore, verify
and remove beside it.
"""

from __future__ import annotations

import contextlib
import os
import re
from typing import NamedTuple

from headwater.errors import ClosedError, HeadwaterError, InvalidOptionError, LockedError
from headwater.ports.clock import Clock
from headwater.replication.host import disk
from headwater.replication.host.accept import CLIENT_CHARS_MAX, DATABASE_BYTES_MAX, Checkpoint, PushAcceptor
from headwater.replication.host.catalogue import REPLICAS_MAX, Catalogue, ClientReport, KeyKind, Replica, Version
from headwater.replication.host.disk import NEW, READING, REMOVED, Layout, is_replica_id, new_replica_id, refuse_foreign
from headwater.replication.host.verify import VersionVerdict, refuse_target, restore, verify
from headwater.replication.host.versions import LOCK, OpenedVersion, VersionRetention, open_version, refuse_removed
from headwater.replication.names import ReplicaName

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
        self._pushes: PushAcceptor | None = None
        self._serving: int | None = None

    # --- life cycle -------------------------------------------------------------------------------------------------

    @property
    def directory(self) -> str:
        return self._layout.directory

    @property
    def catalogue(self) -> Catalogue:
        if self._catalogue is None:
            raise ClosedError("the data directory is not open", where=self.directory)
        return self._catalogue

    @property
    def pushes(self) -> PushAcceptor:
        if self._pushes is None:
            raise ClosedError("this data directory was not opened to be served", where=self.directory)
        return self._pushes

    def open(self, *, serve: bool = False) -> ReplicaStore:
        """For commands the directory must exist. `serve`: create it if needed, and accept pushes, as the only
        server."""
        refuse_foreign(self.directory)
        if not serve and not os.path.isdir(self.directory):
            raise InvalidOptionError(
                "there is no such directory", where=self.directory, next="headwater serve makes one"
            )
        with disk.translated(self.directory):
            if serve:
                disk.make_directory(self.directory)
                self._serving = disk.lock(self._layout.serving_lock)
                if self._serving is None:
                    raise LockedError(
                        "another server serves these replicas", where=self.directory, next="Stop it, or name another"
                    )
        try:
            self._catalogue = Catalogue(self.directory, create=serve)
            if serve:
                with disk.translated(self.directory):
                    disk.sync_file(self.directory)
        except BaseException:
            self.close()
            raise
        if serve:
            self._pushes = PushAcceptor(
                self._layout,
                self._catalogue,
                self._policy,
                self._clock,
                bytes_max=self._bytes_max,
                replicas_max=self._replicas_max,
                checkpoint=self._checkpoint,
            )
        return self

    def close(self) -> None:
        self._pushes = None
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

    def create(self, name: ReplicaName) -> Replica:
        """A replica without versions, so that it can have keys; or the existing one."""
        return self.catalogue.add(new_replica_id(), name, self._clock.now_ms(), self._replicas_max)

    def create_key(self, name: ReplicaName, kind: KeyKind, label: str = "") -> str:
        """The text of a new key, which cannot be read again. Creates the replica if needed."""
        return self.catalogue.create_key(self.create(name), kind, label, self._clock.now_ms())

    def record_change(self, name: ReplicaName) -> None:
        """A client announced changes to push; an unknown replica is ignored."""
        self.catalogue.record_change(name, self._clock.now_ms())

    def add_report(self, replica: Replica, client: str, document: str) -> None:
        report = ClientReport(self._clock.now_ms(), client[:CLIENT_CHARS_MAX], document)
        self.catalogue.add_report(replica.id, report)

    def remove(self, name: ReplicaName) -> Replica:
        """Remove the replica with its versions, keys and reports. A later one of the same name is another replica."""
        replica = self.catalogue.get(name)
        mark = self._layout.new_mark(replica.id)
        with contextlib.suppress(OSError):  # without the mark, a start after a crash in between would keep the files
            disk.touch(mark)
            disk.sync_file(self._layout.home(replica.id))
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
        pushes, catalogue = self.pushes, self.catalogue
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
            pushes.apply_policy(replica_id)
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
    """False while a command reads there."""
    with contextlib.suppress(OSError):
        held = disk.lock(os.path.join(reading, LOCK))
        if held is None:
            return False
        os.close(held)
    return True
