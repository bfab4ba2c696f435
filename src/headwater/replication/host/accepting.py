"""How a push becomes a version.

Everything that can fail is done beside the newest version, which stays as it is: the scratch file is checked and
synced, the delta that leads back to the old version is written and synced, both get their names, the directory is
synced. Then the catalogue commits, which is the one moment that counts. Only after it the old file goes.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from headwater.errors import Corrupt, InputOutput, InvalidOption, NotADatabase, ReplicationFailed, TooLarge
from headwater.replication.database_file import SIDECARS
from headwater.replication.host import disk
from headwater.replication.host.catalogue import Catalogue
from headwater.replication.host.layout import Layout
from headwater.replication.host.pages import Delta, Sums, refuse_other_count, shape_of, sums_of, write_delta
from headwater.replication.host.records import Accepted, Facts, Version
from headwater.replication.host.room import refuse_to_fill
from headwater.replication.host.scratch import Scratch
from headwater.replication.names import MESSAGE_CHARS_MAX
from headwater.replication.proof import check_integrity

DBHASH_CHARS_MAX = 128
DATABASE_BYTES_MAX = 10 * 1024**3

Checkpoint = Callable[[str], None]
"""Called after each step, by its name; tests fail or die there."""
LastWord = Callable[[], None]
"""Asked before a push becomes a version, which it does not if this raises."""


class _Checked(NamedTuple):
    sums: Sums
    delta: Delta | None


class Accepting:
    def __init__(
        self,
        layout: Layout,
        catalogue: Catalogue,
        checkpoint: Checkpoint,
        bytes_max: int,
        replicas_max: int,
    ) -> None:
        self._layout = layout
        self._catalogue = catalogue
        self._checkpoint = checkpoint
        self._bytes_max = bytes_max
        self._replicas_max = replicas_max
        # Two pushes from one base want the same file names, so they take turns from the first name to the commit.
        self._naming = threading.Lock()

    def accept(
        self, scratch: Scratch, facts: Facts, now_ms: int, last_word: LastWord, stop: threading.Event
    ) -> Accepted:
        """When `stop` is set before it is checked, it is not made; later it is brought to its end."""
        check_facts(facts)
        home = self._layout.home(scratch.replica.id)
        with disk.translated(home):
            try:
                checked = self._check(scratch, stop)
                self._checkpoint("checked")
                if checked.delta is not None and checked.delta.identical:
                    return self._unchanged(scratch)
                version = _version(scratch, facts, checked, now_ms)
                last_word()
                with self._naming:
                    self._name_and_commit(scratch, version, checked.delta)
            except (FileNotFoundError, NotADatabase) as exc:
                # Files go when another push is accepted, or the replica is removed.
                self._refuse_stale(scratch)
                if isinstance(exc, FileNotFoundError):
                    raise Corrupt("a file is missing", where=str(exc.filename)) from exc
                raise
            self._checkpoint("committed")
            if scratch.base:
                with contextlib.suppress(OSError):  # it is accepted, whatever becomes of the old file
                    disk.remove(self._layout.head(scratch.replica.id, scratch.base))
            self._checkpoint("old file removed")
        return Accepted(version, is_new=True)

    def _check(self, scratch: Scratch, stop: threading.Event) -> _Checked:
        """All at once: they wait for disk and processor in turns, and none holds the interpreter for long."""
        path = scratch.path
        if not os.path.exists(path) or any(_size(path + beside) for beside in SIDECARS):
            raise ReplicationFailed("the copy did not come to its end", next="Push again")
        shape = shape_of(path)
        if shape.size > self._bytes_max:
            raise TooLarge(
                f"the database has {shape.size:,} bytes and the limit is {self._bytes_max:,}", next="Raise max_bytes"
            )
        refuse_other_count(path, shape)
        over = threading.Event()  # for the others, when one of them has failed

        def go_on() -> None:
            if stop.is_set() or over.is_set():
                raise ReplicationFailed("stopped", next="Push again")

        def go_on_with_room() -> None:
            go_on()
            refuse_to_fill(self._layout.directory, 0)

        with ThreadPoolExecutor(4, thread_name_prefix="headwater-accept") as pool:
            whole = pool.submit(check_integrity, path, constraints=True, stop=stop)
            sums = pool.submit(sums_of, path, go_on)
            delta = None
            if scratch.base:
                head = self._layout.head(scratch.replica.id, scratch.base)
                delta = pool.submit(write_delta, head, path, scratch.delta_path, go_on_with_room)
            synced = pool.submit(disk.sync_file, path)
            try:
                whole.result()
                synced.result()
                return _Checked(sums.result(), None if delta is None else delta.result())
            finally:
                over.set()

    def _name_and_commit(self, scratch: Scratch, version: Version, delta: Delta | None) -> None:
        self._refuse_stale(scratch)
        replica_id = scratch.replica.id
        head = self._layout.head(replica_id, version.number)
        older = self._layout.delta(replica_id, scratch.base)
        try:
            if delta is not None:
                disk.rename(scratch.delta_path, older)
                self._checkpoint("delta named")
            disk.rename(scratch.path, head)
            self._checkpoint("version named")
            disk.sync_directory(self._layout.home(replica_id))
            if not scratch.base:
                disk.sync_directory(self._layout.directory)
            self._checkpoint("directory synced")
            self._catalogue.accept(
                scratch.replica,
                version,
                delta,
                with_replica=scratch.brings_replica,
                replicas_max=self._replicas_max,
            )
        except InputOutput:
            # Perhaps the commit is on disk for all that, and is found there after a crash. So the files stay: the next
            # push takes their names, or the next start removes them.
            raise
        except BaseException:
            with contextlib.suppress(OSError):
                disk.remove(head)
                disk.remove(older)
            raise

    def _unchanged(self, scratch: Scratch) -> Accepted:
        self._refuse_stale(scratch)
        newest = self._catalogue.version(scratch.replica.id, scratch.base)
        if newest is None:
            raise self._catalogue.conflict(scratch.replica.name)
        return Accepted(newest, is_new=False)

    def _refuse_stale(self, scratch: Scratch) -> None:
        found = self._catalogue.find(scratch.replica.name)
        if found is None and scratch.brings_replica:
            return
        if found is None or (found.id, found.newest) != (scratch.replica.id, scratch.base):
            raise self._catalogue.conflict(scratch.replica.name)


def check_facts(facts: Facts) -> None:
    if len(facts.message) > MESSAGE_CHARS_MAX:
        raise TooLarge(f"the message has {len(facts.message):,} characters and the limit is {MESSAGE_CHARS_MAX:,}")
    if facts.dbhash is not None and not 0 < len(facts.dbhash) <= DBHASH_CHARS_MAX:
        raise InvalidOption(f"a hash has up to {DBHASH_CHARS_MAX} characters")


def _version(scratch: Scratch, facts: Facts, checked: _Checked, now_ms: int) -> Version:
    shape = checked.sums.shape
    return Version(
        number=scratch.base + 1,
        base=scratch.base,
        push_id=scratch.push_id,
        message=facts.message,
        client=scratch.client,
        at_ms=now_ms,
        size=shape.size,
        page_size=shape.page_size,
        pages=shape.pages,
        changed_pages=shape.pages if checked.delta is None else checked.delta.changed,
        wire_bytes=facts.wire_bytes,
        dbhash=facts.dbhash,
        sha256=checked.sums.sha256,
    )


def _size(path: str) -> int:
    return os.stat(path).st_size if os.path.exists(path) else 0
