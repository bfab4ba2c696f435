"""Killed, without power, or without room, between any two steps of a push: the newest version is whole, nothing is half
accepted, nothing is left lying about, and the next push succeeds."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from headwater import ManualClock
from headwater.errors import DiskFullError, InputOutputError
from headwater.replication.host import disk
from headwater.replication.host.store import ReplicaStore
from headwater.replication.host.versions import VersionRetention

BEFORE_COMMIT = ["begun", "checked", "delta named", "version named", "directory synced"]
AFTER_COMMIT = ["committed", "old file removed", "versions forgotten"]
FIRST_STEPS = [step for step in [*BEFORE_COMMIT, *AFTER_COMMIT] if step not in ("delta named", "versions forgotten")]

InAProcess = Callable[[Callable[[], object]], int]


def serve(directory: Path, checkpoint: Callable[[str], object] = lambda step: None) -> ReplicaStore:
    store = ReplicaStore(directory, VersionRetention(keep_last=2), ManualClock(), checkpoint=checkpoint).open(
        serve=True
    )  # type: ignore[arg-type]
    assert store.recover().damaged == []
    return store


def announce_all(store: ReplicaStore) -> None:
    for replica, version in store.catalogue.unannounced():
        store.catalogue.announced(replica.id, version.number)


def push_some(directory: Path, pusher, versions: int) -> None:
    with serve(directory) as store:
        for number in range(1, versions + 1):
            pusher.push(store, number)
        announce_all(store)


def push_and_die(directory: Path, pusher, number: int, step: str, die: Callable[[], object]) -> None:
    with serve(directory, lambda at: die() if at == step else None) as store:
        pusher.push(store, number)


def check_after(directory: Path, pusher, step: str, versions: int, pushed: int) -> None:
    """`versions` were accepted before the push number `pushed` that was cut off after `step`."""
    newest = pushed if step in AFTER_COMMIT else versions
    with serve(directory) as store:
        numbers = store.catalogue.numbers(pusher.name) if newest else []
        assert numbers[-1:] == ([newest] if newest else [])
        assert all(store.verify(pusher.name, number).ok for number in numbers)
        wanted = sorted([f"{number}.pages" for number in numbers[:-1]] + [f"{newest}.db"] * bool(newest))
        assert pusher.files(store) == wanted
        assert len([each for each in os.scandir(directory) if each.is_dir()]) == bool(newest)
        accepted = pusher.push(store, newest + 10)
        assert (accepted.version.number, accepted.is_new) == (newest + 1, True)
        assert all(store.verify(pusher.name, number).ok for number in store.catalogue.numbers(pusher.name))


@pytest.mark.parametrize("step", [*BEFORE_COMMIT, *AFTER_COMMIT])
def test_killed_after_any_step_of_a_push(directory: Path, pusher, in_a_process: InAProcess, step: str) -> None:
    push_some(directory, pusher, 2)
    assert in_a_process(lambda: push_and_die(directory, pusher, 3, step, lambda: os._exit(9))) == 9
    check_after(directory, pusher, step, versions=2, pushed=3)


@pytest.mark.parametrize("step", FIRST_STEPS)
def test_killed_after_any_step_of_a_first_push(directory: Path, pusher, in_a_process: InAProcess, step: str) -> None:
    assert in_a_process(lambda: push_and_die(directory, pusher, 1, step, lambda: os._exit(9))) == 9
    check_after(directory, pusher, step, versions=0, pushed=1)


class Power:
    """Remembers what was synced to the disk. When the power goes, files that were not synced lose their
    content, and (if `names_go`) names that were given or taken since their directory was synced are as before.

    The catalogue is SQLite's own matter."""

    def __init__(self, directory: Path, names_go: bool) -> None:
        self._directory = directory
        self._names_go = names_go
        self._graveyard = directory.with_name("graveyard")
        self._graveyard.mkdir()
        self._kept = {os.stat(file).st_ino for file in directory.glob("*/*")}
        self._undo: list[tuple[str, Callable[[], object]]] = []
        self._lock = threading.Lock()
        self._os = {name: getattr(os, name) for name in ("fsync", "replace", "unlink", "mkdir")}
        os.fsync, os.replace, os.unlink, os.mkdir = self.fsync, self.replace, self.unlink, self.mkdir  # type: ignore

    def fsync(self, descriptor: int) -> None:
        found = os.fstat(descriptor)
        with self._lock:
            self._kept.add(found.st_ino)
            self._undo = [(home, undo) for home, undo in self._undo if os.stat(home).st_ino != found.st_ino]

    def replace(self, source: str, target: str) -> None:
        self._os["replace"](source, target)
        self._undo.append((os.path.dirname(target), lambda: self._os["replace"](target, source)))

    def unlink(self, path: str, **options: object) -> None:
        if not os.path.isabs(path) or "catalogue" in path:
            self._os["unlink"](path, **options)
            return
        dead_lettered = self._graveyard / f"{len(self._undo)}"
        self._os["replace"](path, dead_lettered)
        self._undo.append((os.path.dirname(path), lambda: self._os["replace"](dead_lettered, path)))

    def mkdir(self, path: str, mode: int = 0o777) -> None:
        self._os["mkdir"](path, mode)
        self._undo.append((os.path.dirname(path), lambda: shutil.rmtree(path)))

    def fail(self) -> None:
        for name, was in self._os.items():
            setattr(os, name, was)
        for file in self._directory.glob("*/*"):
            if os.stat(file).st_ino not in self._kept:
                os.truncate(file, 0)
        if self._names_go:
            for _, undo in reversed(self._undo):
                undo()
        os._exit(9)


@pytest.mark.parametrize("names_go", [True, False])
@pytest.mark.parametrize("step", [*BEFORE_COMMIT, *AFTER_COMMIT])
def test_without_power_after_any_step_of_a_push(
    directory: Path, pusher, in_a_process: InAProcess, step: str, names_go: bool
) -> None:
    push_some(directory, pusher, 2)

    def work() -> None:
        power = Power(directory, names_go)
        push_and_die(directory, pusher, 3, step, power.fail)

    assert in_a_process(work) == 9
    check_after(directory, pusher, step, versions=2, pushed=3)


@pytest.mark.parametrize("names_go", [True, False])
@pytest.mark.parametrize("step", FIRST_STEPS)
def test_without_power_after_any_step_of_a_first_push(
    directory: Path, pusher, in_a_process: InAProcess, step: str, names_go: bool
) -> None:
    serve(directory).close()

    def work() -> None:
        power = Power(directory, names_go)
        push_and_die(directory, pusher, 1, step, power.fail)

    assert in_a_process(work) == 9
    check_after(directory, pusher, step, versions=0, pushed=1)


@pytest.mark.parametrize("step", BEFORE_COMMIT)
@pytest.mark.parametrize(
    ("number", "error"), [(errno.ENOSPC, DiskFullError), (errno.EDQUOT, DiskFullError), (errno.EIO, InputOutputError)]
)
def test_a_disk_that_says_no_at_any_step_changes_nothing(
    directory: Path, pusher, step: str, number: int, error: type[Exception]
) -> None:
    says_no = False

    def checkpoint(at: str) -> None:
        if says_no and at == step:
            raise OSError(number, os.strerror(number))

    with serve(directory, checkpoint) as store:
        pusher.push(store, 1)
        pusher.push(store, 2)
        before = pusher.files(store), [pusher.bytes_of(store, each) for each in (1, 2)]
        says_no = True
        with pytest.raises(error):
            pusher.push(store, 3)
        assert (pusher.files(store), [pusher.bytes_of(store, each) for each in (1, 2)]) == before
        says_no = False
        assert pusher.push(store, 4).version.number == 3
        assert all(store.verify(pusher.name, each).ok for each in store.catalogue.numbers(pusher.name))


def test_a_full_disk_while_the_newest_version_is_copied(directory: Path, pusher, in_a_process: InAProcess) -> None:
    with serve(directory) as store:
        pusher.push(store, 1, rows=1500)
        size = store.catalogue.get_version(pusher.name, 1).size

    def work() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size // 2, resource.RLIM_INFINITY))
        with serve(directory) as store:
            with pytest.raises(DiskFullError):
                pusher.begin(store)
            assert pusher.files(store) == ["1.db"]

    assert in_a_process(work) == 0
    check_after(directory, pusher, "begun", versions=1, pushed=2)


def test_a_full_disk_while_a_delta_is_written(directory: Path, pusher, in_a_process: InAProcess) -> None:
    """A small database with other pages takes the place of a large one: the delta is the large one, whole."""
    with serve(directory) as store:
        pusher.push(store, 1, rows=1500)
        size = store.catalogue.get_version(pusher.name, 1).size

    def work() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size // 2, resource.RLIM_INFINITY))
        with serve(directory) as store:
            scratch = pusher.begin(store, page_size=1024)
            pusher.write(scratch.path, pusher.edit(2), page_size=1024)
            with pytest.raises(DiskFullError):
                store.accept_push(scratch)
            assert pusher.files(store) == ["1.db"]

    assert in_a_process(work) == 0
    check_after(directory, pusher, "checked", versions=1, pushed=2)


def test_a_delta_leaves_the_last_room_of_the_disk_to_others(
    directory: Path, pusher, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = 1 << 40
    monkeypatch.setattr(disk.shutil, "disk_usage", lambda _: SimpleNamespace(total=1 << 40, free=free))
    with serve(directory) as store:
        pusher.push(store, 1)
        scratch = pusher.begin(store)
        pusher.write(scratch.path, pusher.edit(2))
        free = disk.FREE_BYTES_MIN - 1
        with pytest.raises(DiskFullError):
            store.accept_push(scratch)
        assert pusher.files(store) == ["1.db"]
        free = 1 << 40
        assert pusher.push(store, 2).version.number == 2


def test_a_commit_that_fails_leaves_the_old_version_the_newest(
    directory: Path, pusher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is unknown whether such a commit is found on the disk after a crash, so no file goes that it might name."""
    from headwater.replication.host.catalogue import Catalogue

    def fail(*_: object, **__: object) -> None:
        raise InputOutputError("the disk did not answer")

    with serve(directory) as store:
        pusher.push(store, 1)
        with monkeypatch.context() as patched:
            patched.setattr(Catalogue, "commit_version", fail)
            with pytest.raises(InputOutputError):
                pusher.push(store, 2)
        assert pusher.files(store) == ["1.db", "1.pages", "2.db"]
        assert store.verify(pusher.name, 1).ok
        assert pusher.push(store, 3).version.number == 2
    check_after(directory, pusher, "committed", versions=1, pushed=2)
