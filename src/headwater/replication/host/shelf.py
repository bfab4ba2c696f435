"""The data directory: replicas, their versions, and pushes under way.

Blocking, and safe to use from several threads. One server at a time takes pushes; commands may look, restore, verify
and remove beside it.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Sequence
from types import TracebackType

from headwater.errors import Closed, Corrupt, HeadwaterError, InputOutput, InvalidOption, Locked, UnknownReplica
from headwater.ports.clock import Clock
from headwater.replication.host import disk, keys, scratch
from headwater.replication.host.accepting import DATABASE_BYTES_MAX, Accepting, Checkpoint, LastWord
from headwater.replication.host.catalogue import REPLICAS_MAX, REPORTS_KEPT, VERSIONS_PAGE, Catalogue
from headwater.replication.host.layout import Layout, new_replica_id, refuse_foreign
from headwater.replication.host.policy import Policy, surplus
from headwater.replication.host.reading import TRIES_MAX, Materialised, materialise, refuse_removed
from headwater.replication.host.records import (
    Accepted,
    Facts,
    Key,
    KeyKind,
    Listed,
    Replica,
    Report,
    Totals,
    Unannounced,
    Version,
)
from headwater.replication.host.recovery import Recovered, recover
from headwater.replication.host.restoring import refuse_target, restore
from headwater.replication.host.scratch import Base, Scratch
from headwater.replication.host.verifying import Verdict, verify
from headwater.replication.names import ReplicaName


def _go_on(step: str) -> None:
    pass


class Shelf:
    def __init__(
        self,
        directory: str | os.PathLike[str],
        policy: Policy,
        clock: Clock,
        *,
        bytes_max: int = DATABASE_BYTES_MAX,
        replicas_max: int = REPLICAS_MAX,
        checkpoint: Checkpoint = _go_on,
    ) -> None:
        self._layout = Layout(os.fspath(directory))
        self._policy = policy
        self._clock = clock
        self._bytes_max = bytes_max
        self._replicas_max = replicas_max
        self._checkpoint = checkpoint
        self._opened: Catalogue | None = None
        self._accepting: Accepting | None = None
        self._serving: int | None = None

    # --- its life ---------------------------------------------------------------------------------------------------

    @property
    def directory(self) -> str:
        return self._layout.directory

    def open(self, *, serve: bool = False) -> Shelf:
        """For commands the directory must be there. `serve`: make it if need be, and take pushes, as the only one."""
        refuse_foreign(self.directory)
        if not serve and not os.path.isdir(self.directory):
            raise InvalidOption("there is no such directory", where=self.directory, next="headwater serve makes one")
        with disk.translated(self.directory):
            if serve:
                disk.make_directory(self.directory)
                self._serving = disk.lock(self._layout.serving_lock)
                if self._serving is None:
                    raise Locked(
                        "another server serves these replicas", where=self.directory, next="Stop it, or name another"
                    )
        try:
            self._opened = Catalogue(self.directory, create=serve)
            if serve:
                with disk.translated(self.directory):
                    disk.sync_directory(self.directory)
        except BaseException:
            self.close()
            raise
        if serve:
            self._accepting = Accepting(
                self._layout, self._opened, self._checkpoint, self._bytes_max, self._replicas_max
            )
        return self

    def close(self) -> None:
        self._accepting = None
        if self._opened is not None:
            self._opened.close()
            self._opened = None
        if self._serving is not None:
            os.close(self._serving)
            self._serving = None

    def __enter__(self) -> Shelf:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def recover(self) -> Recovered:
        """What a crash left behind goes, and what is beyond the policy. Before serving."""
        self._require_serving()
        found = recover(self._layout, self._catalogue)
        for replica in self._catalogue.replicas():
            self._apply_policy(replica.id)
        return found

    # --- looking ----------------------------------------------------------------------------------------------------

    def find(self, name: ReplicaName) -> Replica | None:
        return self._catalogue.find(name)

    def find_id(self, replica_id: str) -> Replica | None:
        return self._catalogue.find_id(replica_id)

    def get(self, name: ReplicaName) -> Replica:
        if (found := self.find(name)) is None:
            raise UnknownReplica("there is no such replica", where=name.path, next="`headwater replica ls` lists them")
        return found

    def list(self) -> Sequence[Replica]:
        return self._catalogue.replicas()

    def listing(
        self, *, namespace: str | None = None, after: ReplicaName | None = None, limit: int | None = None
    ) -> Sequence[Listed]:
        """By name, each with its newest version."""
        return self._catalogue.listing(namespace, after, limit)

    def totals(self) -> Totals:
        return self._catalogue.totals()

    def versions(self, name: ReplicaName, *, below: int | None = None, limit: int = VERSIONS_PAGE) -> Sequence[Version]:
        """Newest first, at most VERSIONS_PAGE of them."""
        return self._catalogue.versions(self.get(name).id, below, limit)

    def numbers(self, name: ReplicaName) -> Sequence[int]:
        return self._catalogue.numbers(self.get(name).id)

    def version(self, name: ReplicaName, number: int) -> Version:
        if (found := self._catalogue.version(self.get(name).id, number)) is None:
            raise UnknownReplica(
                f"it has no version {number}", where=name.path, next="`headwater replica log` lists them"
            )
        return found

    # --- pushes -----------------------------------------------------------------------------------------------------

    def create(self, name: ReplicaName) -> Replica:
        """A replica without versions, so that it can have keys; or the one that is there."""
        return self._catalogue.add(new_replica_id(), name, self._clock.now_ms(), self._replicas_max)

    def begin(
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
        """A copy of the newest version to write into. Raises VersionConflict if `base` is not the newest, or has
        another content than the client remembers. A replica that is not there comes to be when its first version is
        accepted."""
        self._require_serving()
        scratch.check_words(push_id, client)
        for _ in range(TRIES_MAX):
            replica = self.find(name)
            try:
                return self._begin(name, replica, base, push_id, last_push_id, base_hash, client, page_size)
            except (Corrupt, InputOutput):
                if self.find(name) == replica:
                    raise
            # Another push was accepted between our look at the catalogue and at the file, which has gone.
        raise self._catalogue.conflict(name)

    def _begin(
        self,
        name: ReplicaName,
        replica: Replica | None,
        base: Base,
        push_id: str,
        last_push_id: str | None,
        base_hash: str | None,
        client: str,
        page_size: int | None,
    ) -> Scratch:
        newest = self._catalogue.version(replica.id, replica.newest) if replica is not None else None
        agreed = scratch.agreed_base(base, last_push_id, base_hash, newest)
        if agreed is None:
            raise self._catalogue.conflict(name)
        if brings_replica := replica is None:
            self._catalogue.refuse_one_more(self._replicas_max)
            replica = Replica(new_replica_id(), name, self._clock.now_ms(), 0)
        made = Scratch(replica, self._layout.new_scratch(replica.id), agreed, push_id, client, brings_replica)
        try:
            scratch.prepare(self._layout, made, newest, page_size)
            self._checkpoint("begun")
        except OSError as exc:
            scratch.clear(self._layout, made)
            raise disk.error_of(exc, self.directory) from exc
        except BaseException:
            scratch.clear(self._layout, made)
            raise
        return made

    def accept(
        self,
        begun: Scratch,
        facts: Facts,
        last_word: LastWord = lambda: None,
        stop: threading.Event | None = None,
    ) -> Accepted:
        """Make it the newest version, if it is whole and its base still is the newest. The scratch is used up, whatever
        comes of it. `stop` ends the check."""
        accepting = self._require_serving()
        try:
            accepted = accepting.accept(begun, facts, self._clock.now_ms(), last_word, stop or threading.Event())
        finally:
            scratch.clear(self._layout, begun)
        if accepted.is_new:
            with contextlib.suppress(HeadwaterError):  # it is accepted; the next push or start tries again
                self._apply_policy(begun.replica.id)
        return accepted

    def note_change(self, name: ReplicaName) -> None:
        """A client says that its database has changed; nothing if there is no such replica."""
        self._catalogue.note_change(name, self._clock.now_ms())

    def discard(self, begun: Scratch) -> None:
        scratch.clear(self._layout, begun)

    def unannounced(self) -> Sequence[Unannounced]:
        return self._catalogue.unannounced()

    def announced(self, replica_id: str, number: int) -> None:
        self._catalogue.announced(replica_id, number)

    # --- reading ----------------------------------------------------------------------------------------------------

    def open_version(self, name: ReplicaName, number: int) -> Materialised:
        """A private file with that version, until it is closed."""
        return materialise(self._layout, self._catalogue, self.get(name), number)

    def restore(
        self, name: ReplicaName, number: int, target: str | os.PathLike[str], *, overwrite: bool = False
    ) -> Version:
        refuse_target(os.fspath(target), overwrite=overwrite)
        with self.open_version(name, number) as made:
            try:
                restore(made, os.fspath(target), overwrite=overwrite)
            except HeadwaterError as exc:
                refuse_removed(self._catalogue, made.replica, exc)
                raise
            return made.version

    def verify(self, name: ReplicaName, number: int) -> Verdict:
        return verify(self._layout, self._catalogue, self.get(name), number)

    # --- removing ---------------------------------------------------------------------------------------------------

    def remove(self, name: ReplicaName) -> Replica:
        """The replica with its versions, keys and reports. One of the same name is another one, and begins anew."""
        replica = self.get(name)
        mark = self._layout.new_mark(replica.id)
        with contextlib.suppress(OSError):  # for who dies on the way: without it, the next start would keep the files
            disk.touch(mark)
            disk.sync_directory(self._layout.home(replica.id))
        try:
            self._catalogue.remove(replica.id)
        except BaseException:
            with contextlib.suppress(OSError):
                disk.remove(mark)
            raise
        with contextlib.suppress(OSError):  # it has none yet
            disk.rename(self._layout.home(replica.id), self._layout.removed(replica.id))
        disk.remove_tree(self._layout.removed(replica.id))
        return replica

    def apply_policy(self, name: ReplicaName) -> Sequence[int]:
        """The numbers of the versions that went."""
        return self._apply_policy(self.get(name).id)

    def _apply_policy(self, replica_id: str) -> Sequence[int]:
        if self._policy.keeps_all:
            return []
        gone = surplus(self._catalogue.versions_from(replica_id, 0), self._policy, self._clock.now_ms())
        if gone:
            self._catalogue.remove_versions(replica_id, gone[-1])
            self._checkpoint("versions forgotten")
            with disk.translated(self._layout.home(replica_id)):
                for number in gone:
                    disk.remove(self._layout.delta(replica_id, number))
        return gone

    # --- keys and reports -------------------------------------------------------------------------------------------

    def create_key(self, name: ReplicaName, kind: KeyKind, label: str = "") -> str:
        """The text of a new key, shown this once. The replica is made if it is not there."""
        return keys.create_key(self._catalogue, self.create(name), kind, label, self._clock.now_ms())

    def keys(self, name: ReplicaName) -> Sequence[Key]:
        return self._catalogue.keys(self.get(name).id)

    def revoke_key(self, name: ReplicaName, key_id: str) -> bool:
        return self._catalogue.remove_key(self.get(name).id, key_id)

    def has_keys(self, replica: Replica) -> bool:
        """Whether it is asked for a key: it has one, or had one, for revoking the last must not let everybody in."""
        return self._catalogue.is_keyed(replica.id)

    def key_kind(self, replica: Replica, text: str) -> KeyKind | None:
        """Which key of this replica the text is, if any."""
        return keys.kind_of(self._catalogue, replica.id, text)

    def add_report(self, replica: Replica, client: str, document: str) -> None:
        """The last REPORTS_KEPT are kept, and REPORTS_BYTES_KEPT of them."""
        self._catalogue.add_report(
            replica.id, Report(self._clock.now_ms(), client[: scratch.CLIENT_CHARS_MAX], document)
        )

    def reports(self, name: ReplicaName, limit: int = REPORTS_KEPT) -> Sequence[Report]:
        return self._catalogue.reports(self.get(name).id, limit)

    # --- inside -----------------------------------------------------------------------------------------------------

    @property
    def _catalogue(self) -> Catalogue:
        if self._opened is None:
            raise Closed("the data directory is not open", where=self.directory)
        return self._opened

    def _require_serving(self) -> Accepting:
        if self._accepting is None:
            raise Closed("this data directory was not opened to be served", where=self.directory)
        return self._accepting
