"""A version in a private file, for as long as somebody reads it.

The newest is a hard link, older ones are rebuilt. Whatever is accepted or forgotten meanwhile, the reader keeps its
file; only who removes the whole replica takes it away.
"""

from __future__ import annotations

import os
from types import TracebackType

from headwater.errors import Corrupt, HeadwaterError, UnknownReplica
from headwater.replication.host import disk
from headwater.replication.host.catalogue import Catalogue
from headwater.replication.host.layout import Layout
from headwater.replication.host.pages import Shape, StoredDelta, rebuild, sums_of
from headwater.replication.host.records import Replica, Version

TRIES_MAX = 5  # files go while we reach for them only when a push is accepted just then
LOCK = "lock"
FILE = "version.db"


class Materialised:
    """`path` is a database that nobody writes, and that must not be written. Close it when done. `directory` is for
    what is done with it, and goes with it; None: there was no room for one, and `path` is the newest as it lies."""

    def __init__(self, replica: Replica, version: Version, path: str, directory: str | None, lock: int | None) -> None:
        self.replica = replica
        self.version = version
        self.directory = directory
        self.path = path
        self._lock = lock

    @property
    def address(self) -> tuple[str, str]:
        """For SQLite, to be read without locks and without files beside it: those of a WAL database need room. In its
        directory, so that no complaint names that to a client."""
        directory, name = os.path.split(self.path)
        return directory, f"file:{name}?immutable=1"

    def close(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None
        if self.directory is not None:
            disk.remove_tree(self.directory)

    def __enter__(self) -> Materialised:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def materialise(
    layout: Layout, catalogue: Catalogue, replica: Replica, number: int, *, check: bool = True
) -> Materialised:
    """`check`: a rebuilt version must have the hash it was accepted with, and the newest its size. Without it, damage
    to the bytes is left to the caller to find."""
    missing = ""
    for _ in range(TRIES_MAX):
        chain = catalogue.versions_from(replica.id, number)
        if not chain or chain[0].number != number:
            raise UnknownReplica(
                f"it has no version {number}", where=replica.name.path, next="`headwater replica log` lists them"
            )
        with disk.translated(layout.home(replica.id)):
            try:
                return _made(layout, replica, chain, check)
            except FileNotFoundError as exc:
                missing = os.path.basename(str(exc.filename))
    raise Corrupt(
        f"a file of version {number} is missing: {missing}",
        where=replica.name.path,
        next="On the server, run `headwater replica verify`",
    )


def refuse_removed(catalogue: Catalogue, replica: Replica, error: HeadwaterError | None = None) -> None:
    """For a reader who failed: when the replica has gone, that is why."""
    if catalogue.find_id(replica.id) is None:
        raise UnknownReplica("it was removed meanwhile", where=replica.name.path) from error


def _made(layout: Layout, replica: Replica, chain: list[Version], check: bool) -> Materialised:
    is_newest = len(chain) == 1
    try:
        made = _filled(layout, replica, chain)
    except OSError as exc:
        if not is_newest or not disk.is_full(exc):
            raise
        made = Materialised(replica, chain[0], layout.head(replica.id, chain[0].number), None, None)
    try:
        if check:
            _refuse_damage(made, is_newest=is_newest)
    except BaseException:
        made.close()
        raise
    return made


def _filled(layout: Layout, replica: Replica, chain: list[Version]) -> Materialised:
    directory = layout.new_reading(replica.id)
    os.mkdir(directory, 0o700)
    try:
        lock = disk.lock(os.path.join(directory, LOCK))
    except OSError:
        disk.remove_tree(directory)
        raise
    if lock is None:  # a server that just starts is sweeping it away
        raise FileNotFoundError(2, "swept away", directory)
    made = Materialised(replica, chain[0], os.path.join(directory, FILE), directory, lock)
    try:
        _fill(layout, directory, made, chain)
    except BaseException:
        made.close()
        raise
    return made


def _fill(layout: Layout, directory: str, made: Materialised, chain: list[Version]) -> None:
    replica_id, newest = made.replica.id, chain[-1].number
    head = layout.head(replica_id, newest)
    if len(chain) == 1:
        disk.link_or_copy(head, made.path)
        return
    # All of them first: from here on nothing that is removed can take them away.
    own_head = os.path.join(directory, f"{newest}.db")
    disk.link_or_copy(head, own_head)
    deltas = []
    for version in reversed(chain[:-1]):
        own = os.path.join(directory, f"{version.number}.pages")
        disk.link_or_copy(layout.delta(replica_id, version.number), own)
        deltas.append(StoredDelta(own, version.delta_sha256 or "", Shape(version.page_size, version.pages)))
    rebuild(own_head, deltas, made.path)
    for path in (own_head, *(delta.path for delta in deltas)):
        disk.remove(path)


def _refuse_damage(made: Materialised, *, is_newest: bool) -> None:
    version = made.version
    damaged = os.stat(made.path).st_size != version.size
    if not damaged and not is_newest:
        damaged = sums_of(made.path).sha256 != version.sha256
    if damaged:
        raise Corrupt(
            f"version {version.number} is not as it was accepted",
            where=made.replica.name.path,
            next="On the server, run `headwater replica verify`",
        )
