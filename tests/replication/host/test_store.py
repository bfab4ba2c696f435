"""Pushes become versions, or they do not: the compare-and-set, what is refused, what is kept."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater import ManualClock
from headwater.errors import (
    ClosedError,
    CorruptError,
    InvalidOptionError,
    NotADatabaseError,
    ReplicationFailedError,
    TooLargeError,
    UnknownReplicaError,
    VersionConflictError,
)
from headwater.replication.host import catalogue
from headwater.replication.host.store import ReplicaStore, agreed_base
from headwater.replication.host.versions import VersionRetention
from headwater.replication.names import ReplicaName

Open = Callable[..., ReplicaStore]


def test_a_push_becomes_a_version_with_all_that_is_known_of_it(store: ReplicaStore, pusher, clock: ManualClock) -> None:
    first = pusher.push(store, 1, message="begin", dbhash="ab" * 20, wire_bytes=1234)
    clock.advance(5)
    second = pusher.push(store, 2)
    replica = store.catalogue.get(pusher.name)
    assert (first.is_new, second.is_new) == (True, True)
    assert (replica.newest, replica.versions, replica.created_ms) == (2, 2, clock.now_ms() - 5_000)
    newest, oldest = store.catalogue.versions(pusher.name)
    assert (oldest.number, oldest.base, oldest.message, oldest.client) == (1, 0, "begin", "laptop:1")
    assert (oldest.dbhash, oldest.wire_bytes, oldest.at_ms) == ("ab" * 20, 1234, clock.now_ms() - 5_000)
    assert (oldest.changed_pages, oldest.page_size, oldest.size) == (oldest.pages, 512, 512 * oldest.pages)
    assert (newest.number, newest.base, newest.at_ms) == (2, 1, clock.now_ms())
    assert 0 < newest.changed_pages < 6
    assert oldest.stored_bytes < newest.stored_bytes == newest.size
    assert replica.stored_bytes == oldest.stored_bytes + newest.size
    assert pusher.files(store) == ["1.pages", "2.db"]


def test_each_version_stays_readable_byte_for_byte_as_it_was_pushed(store: ReplicaStore, pusher) -> None:
    pushed = []
    for number in range(1, 6):
        scratch = pusher.begin(store)
        pusher.write(scratch.path, pusher.edit(number, rows=10 + 15 * (number % 3)))
        pushed.append(Path(scratch.path).read_bytes())
        store.accept_push(scratch)
    assert [pusher.bytes_of(store, number) for number in range(1, 6)] == pushed
    assert pusher.files(store) == ["1.pages", "2.pages", "3.pages", "4.pages", "5.db"]


def test_a_stale_base_is_refused_with_the_newest(store: ReplicaStore, pusher) -> None:
    pusher.push(store, 1)
    pusher.push(store, 2)
    for base in (0, 1, 3):
        with pytest.raises(VersionConflictError) as caught:
            pusher.begin(store, base)
        assert caught.value.newest == 2
    unknown = ReplicaName("shop", "other.db")
    with pytest.raises(VersionConflictError) as caught:
        store.begin_push(unknown, base=3, push_id="p")
    assert caught.value.newest == 0
    assert pusher.files(store) == ["1.pages", "2.db"]


def test_of_two_pushes_from_one_base_one_is_accepted(open_store: Open, pusher) -> None:
    """Both pass all checks before either gets its name."""
    both = threading.Barrier(2)
    store = open_store(checkpoint=lambda step: both.wait(10) if step == "checked" and racing else None)
    racing = False
    pusher.push(store, 1)
    racing = True
    scratches = [pusher.begin(store, 1), pusher.begin(store, 1)]
    for number, scratch in enumerate(scratches, 2):
        pusher.write(scratch.path, pusher.edit(number))
    pushed = [Path(scratch.path).read_bytes() for scratch in scratches]
    outcomes: dict[int, object] = {}

    def accept(which: int) -> None:
        try:
            outcomes[which] = store.accept_push(scratches[which])
        except VersionConflictError as exc:
            outcomes[which] = exc.newest

    threads = [threading.Thread(target=accept, args=(which,)) for which in (0, 1)]
    [thread.start() for thread in threads]  # type: ignore[func-returns-value]
    [thread.join(20) for thread in threads]  # type: ignore[func-returns-value]
    [loser] = [which for which, outcome in outcomes.items() if outcome == 2]
    assert pusher.bytes_of(store, 2) == pushed[1 - loser]
    assert all(store.verify(pusher.name, number).ok for number in (1, 2))
    assert pusher.files(store) == ["1.pages", "2.db"]


def test_the_catalogue_alone_refuses_a_stale_base_too(store: ReplicaStore, pusher, directory: Path) -> None:
    """Should ever two servers write one directory, on a file system without locks."""
    pusher.push(store, 1)
    pusher.push(store, 2)
    stale = msgspec.structs.replace(store.catalogue.get_version(pusher.name, 2), push_id="stale")
    other = catalogue.Catalogue(str(directory), ManualClock(0), create=False)
    with contextlib.closing(other), pytest.raises(VersionConflictError) as caught:
        other.commit_version(store.catalogue.get(pusher.name), stale, None, with_replica=False)
    assert caught.value.newest == 2
    assert [version.push_id == "stale" for version in store.catalogue.versions(pusher.name)] == [False, False]


def test_of_two_first_pushes_one_makes_the_replica(store: ReplicaStore, pusher) -> None:
    scratches = [pusher.begin(store, 0), pusher.begin(store, 0)]
    for number, scratch in enumerate(scratches, 1):
        pusher.write(scratch.path, pusher.edit(number))
    assert store.catalogue.find(pusher.name) is None
    assert store.accept_push(scratches[1]).is_new
    with pytest.raises(VersionConflictError) as caught:
        store.accept_push(scratches[0])
    assert caught.value.newest == 1
    assert store.catalogue.get(pusher.name).id == scratches[1].replica.id
    assert len([each for each in os.scandir(store.directory) if each.is_dir()]) == 1


def test_a_push_whose_answer_was_lost_goes_on_from_what_it_made(store: ReplicaStore, pusher) -> None:
    scratch = pusher.begin(store, 0, push_id="lost")
    pusher.write(scratch.path, pusher.edit(1))
    store.accept_push(scratch)
    with pytest.raises(VersionConflictError):
        pusher.begin(store, 0, last_push_id="another")
    with pytest.raises(VersionConflictError):
        pusher.begin(store, 0)
    again = pusher.begin(store, 0, last_push_id="lost")
    assert again.base == 1
    accepted = store.accept_push(again)
    assert (accepted.version.number, accepted.is_new) == (1, False)


HASHES = st.sampled_from([None, "x", "y"])


@given(st.integers(0, 5), st.integers(0, 5), st.sampled_from([None, "a", "b"]), HASHES, HASHES)
def test_a_base_is_agreed_on_only_if_it_is_the_newest_or_led_to_it(
    newest: int, base: int, last: str | None, remembered: str | None, noted: str | None
) -> None:
    from headwater.replication.host.catalogue import Version

    version = Version(newest, newest - 1, "a", "", "", 0, 1, 1, 1, 1, 1, noted, "") if newest else None
    agreed = agreed_base(base, last, remembered, version)
    led_to_it = newest > 0 and base == newest - 1 and last == "a"
    is_it = base == newest and (newest == 0 or remembered is None or noted is None or remembered == noted)
    assert agreed == (newest if is_it or led_to_it else None)
    assert agreed_base("latest", last, remembered, version) == newest


def test_a_change_that_is_reported_is_noted(store: ReplicaStore, pusher) -> None:
    pusher.push(store, 1)
    [before] = store.catalogue.replicas()
    store.catalogue.record_change(before.name)
    store.catalogue.record_change(ReplicaName("nobody", "knows"))
    [after] = store.catalogue.replicas()
    assert (before.changed_ms, after.changed_ms) == (None, store._clock.now_ms())


def test_what_is_identical_makes_no_version(store: ReplicaStore, pusher) -> None:
    pusher.push(store, 1)
    scratch = pusher.begin(store)
    with open(scratch.path, "r+b") as file:  # as the replica end does, which counts changes for itself
        file.seek(24)
        file.write(b"\0\0\0\x63")
    accepted = store.accept_push(scratch)
    assert (accepted.is_new, accepted.version.number) == (False, 1)
    assert store.catalogue.numbers(pusher.name) == [1]
    assert pusher.files(store) == ["1.db"]


def test_another_page_size_starts_from_nothing_and_older_versions_stay(store: ReplicaStore, pusher) -> None:
    pusher.push(store, 1)
    before = pusher.bytes_of(store, 1)
    scratch = pusher.begin(store, 1, page_size=4096)
    assert not os.path.exists(scratch.path)
    pusher.write(scratch.path, pusher.edit(2), page_size=4096)
    accepted = store.accept_push(scratch)
    assert (accepted.version.page_size, accepted.version.changed_pages) == (4096, accepted.version.pages)
    pusher.push(store, 3)
    assert pusher.bytes_of(store, 1) == before
    assert store.catalogue.get_version(pusher.name, 1).page_size == 512


def test_a_scratch_begins_as_the_newest_version(store: ReplicaStore, pusher) -> None:
    first = pusher.begin(store, 0)
    assert not os.path.exists(first.path)
    store.discard_push(first)
    assert pusher.files(store) == []
    assert [each.name for each in os.scandir(store.directory) if each.is_dir()] == []
    pusher.push(store, 1)
    scratch = pusher.begin(store, 1)
    assert Path(scratch.path).read_bytes() == pusher.bytes_of(store, 1)
    store.discard_push(scratch)
    assert pusher.files(store) == ["1.db"]


def break_page(scratch_path: str) -> None:
    with open(scratch_path, "r+b") as file:
        file.seek(512 * 3)
        file.write(b"\xff" * 100)


@pytest.mark.parametrize(
    ("spoil", "error"),
    [
        (break_page, CorruptError),
        (lambda path: os.truncate(path, 1000), CorruptError),
        (lambda path: Path(path).write_bytes(b""), CorruptError),
        (os.unlink, ReplicationFailedError),
        (lambda path: Path(path + "-wal").write_bytes(b"half"), ReplicationFailedError),
        (lambda path: Path(path + "-journal").write_bytes(b"half"), ReplicationFailedError),
        (
            lambda path: Path(path).write_bytes(b"not SQLite!" + Path(path).read_bytes()[11:]),
            (NotADatabaseError, CorruptError),
        ),
    ],
)
def test_what_is_not_a_whole_database_is_not_accepted(store: ReplicaStore, pusher, spoil, error) -> None:
    pusher.push(store, 1)
    before = pusher.bytes_of(store, 1)
    scratch = pusher.begin(store)
    pusher.write(scratch.path, pusher.edit(2))
    spoil(scratch.path)
    with pytest.raises(error):
        store.accept_push(scratch)
    assert (pusher.bytes_of(store, 1), pusher.files(store)) == (before, ["1.db"])
    assert pusher.push(store, 2).version.number == 2


def test_limits_are_held(open_store: Open, pusher) -> None:
    store = open_store(bytes_max=20_000, replicas_max=1)
    pusher.push(store, 1)
    with pytest.raises(TooLargeError, match="the limit is 20,000"):
        pusher.push(store, 2, rows=200)
    with pytest.raises(TooLargeError, match="1 replicas"):
        store.begin_push(ReplicaName("shop", "more.db"), base=0, push_id="p")
    with pytest.raises(TooLargeError, match="1 replicas"):
        store.catalogue.create(ReplicaName("shop", "more.db"))
    assert pusher.files(store) == ["1.db"]


def test_listings_come_in_pages(store: ReplicaStore, pusher) -> None:
    for number in range(1, 5):
        pusher.push(store, number)
    assert [version.number for version in store.catalogue.versions(pusher.name, limit=2)] == [4, 3]
    assert [version.number for version in store.catalogue.versions(pusher.name, below=3)] == [2, 1]
    assert store.catalogue.numbers(pusher.name) == [1, 2, 3, 4]


def test_old_versions_go_after_a_push_once_they_are_announced(open_store: Open, pusher, clock: ManualClock) -> None:
    store = open_store(policy=VersionRetention(keep_last=2))
    for number in range(1, 4):
        pusher.push(store, number)
    assert store.catalogue.numbers(pusher.name) == [1, 2, 3]
    waiting = store.catalogue.unannounced()
    assert [(replica.name, version.number) for replica, version in waiting] == [(pusher.name, n) for n in (1, 2, 3)]
    for replica, version in waiting:
        store.catalogue.announced(replica.id, version.number)
    assert store.catalogue.unannounced() == []
    pusher.push(store, 4)
    assert (store.catalogue.numbers(pusher.name), pusher.files(store)) == ([3, 4], ["3.pages", "4.db"])
    assert store.verify(pusher.name, 3).ok
    store.close()
    store = open_store(policy=VersionRetention(keep_age_ms=1000))
    clock.advance(2)
    store.recover()
    assert (store.catalogue.numbers(pusher.name), pusher.files(store)) == ([4], ["4.db"])
    assert pusher.push(store, 5).version.number == 5
    with pytest.raises(UnknownReplicaError, match="no version 2"):
        store.open_version(pusher.name, 2)


def test_a_removed_replica_is_gone_and_one_of_its_name_begins_anew(store: ReplicaStore, pusher) -> None:
    pusher.push(store, 1)
    text = store.catalogue.create_key(pusher.name, "push")
    gone = store.remove(pusher.name)
    assert (
        store.catalogue.find(pusher.name),
        store.catalogue.replicas(),
        os.path.exists(f"{store.directory}/{gone.id}"),
    ) == (None, [], False)
    with pytest.raises(UnknownReplicaError):
        store.catalogue.versions(pusher.name)
    with pytest.raises(UnknownReplicaError):
        store.remove(pusher.name)
    pusher.push(store, 1)
    anew = store.catalogue.get(pusher.name)
    assert anew.id != gone.id
    assert (anew.newest, store.catalogue.key_kind(anew.id, text), store.catalogue.needs_key(anew.id)) == (
        1,
        None,
        False,
    )


def test_a_replica_without_versions_removed_in_the_middle_of_a_push_does_not_come_back(
    open_store: Open, pusher
) -> None:
    """By a command beside the server, just before the commit; host/test_races.py has those with versions."""
    command: list[ReplicaStore] = []
    store = open_store(
        checkpoint=lambda step: command and step == "directory synced" and command[0].remove(pusher.name)
    )
    store.catalogue.create(pusher.name)
    command.append(open_store(serve=False))
    scratch = pusher.begin(store)
    pusher.write(scratch.path, pusher.edit(2))
    with pytest.raises(VersionConflictError):
        store.accept_push(scratch)
    assert store.catalogue.find(pusher.name) is None
    assert store.recover().damaged == []
    assert [each for each in os.scandir(store.directory) if each.is_dir()] == []


def test_keys_open_their_own_replica_and_only_while_they_are_there(store: ReplicaStore, pusher) -> None:
    replica = store.catalogue.create(pusher.name)
    other = store.catalogue.create(ReplicaName("shop", "other.db"))
    assert not store.catalogue.needs_key(replica.id)
    push, pull = (
        store.catalogue.create_key(pusher.name, "push", "laptop"),
        store.catalogue.create_key(pusher.name, "pull"),
    )
    assert (push[:7], pull[:7]) == ("hwpush_", "hwpull_")
    assert (store.catalogue.key_kind(replica.id, push), store.catalogue.key_kind(replica.id, pull)) == ("push", "pull")
    changed = push[:-1] + ("0" if push[-1] != "0" else "1")
    for wrong in ("", "hw_abc", changed, push.replace("push", "pull"), pull.replace("pull", "push"), push + "\n"):
        assert store.catalogue.key_kind(replica.id, wrong) is None
    assert store.catalogue.key_kind(other.id, push) is None
    assert [(key.kind, key.label) for key in store.catalogue.keys(pusher.name)] in (
        [("push", "laptop"), ("pull", "")],
        [("pull", ""), ("push", "laptop")],
    )
    secret = push.rsplit("_", 1)[1]
    assert all(secret.encode() not in file.read_bytes() for file in Path(store.directory).glob("catalogue.db*"))
    for key in store.catalogue.keys(pusher.name):
        assert store.catalogue.remove_key(pusher.name, key.id)
    assert not store.catalogue.remove_key(pusher.name, push.split("_")[1])
    assert store.catalogue.key_kind(replica.id, push) is None
    assert store.catalogue.needs_key(replica.id)  # revoking the last key opens nothing
    with pytest.raises(InvalidOptionError):
        store.catalogue.create_key(pusher.name, "pull", "two\nlines")


def test_keys_and_reports_have_limits(store: ReplicaStore, pusher, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalogue, "KEYS_MAX", 2)
    monkeypatch.setattr(catalogue, "REPORTS_KEPT", 3)
    replica = store.catalogue.create(pusher.name)
    for _ in range(2):
        store.catalogue.create_key(pusher.name, "pull")
    with pytest.raises(TooLargeError, match="2 keys"):
        store.catalogue.create_key(pusher.name, "pull")
    other = store.catalogue.create(ReplicaName("shop", "other.db"))
    store.catalogue.add_report(other.id, "c", "kept")
    for number in range(5):
        store.catalogue.add_report(replica.id, f"client {number}" + "x" * 1000, f'{{"error":{number}}}')
    assert [report.document for report in store.catalogue.reports(pusher.name)] == [
        f'{{"error":{n}}}' for n in (4, 3, 2)
    ]
    assert all(len(report.client) <= 300 for report in store.catalogue.reports(pusher.name))
    assert [report.document for report in store.catalogue.reports(other.name)] == ["kept"]
    with pytest.raises(TooLargeError):
        store.catalogue.add_report(replica.id, "c", "é" * (catalogue.REPORT_BYTES_MAX // 2 + 1))


def test_names_are_data_and_never_paths(store: ReplicaStore, pusher) -> None:
    for odd in ("con", "a.b-c_d", "x" * 128):
        store.catalogue.create(ReplicaName("-", odd))
    assert all(
        len(replica.id) == 16 and store.catalogue.find_id(replica.id) == replica
        for replica in store.catalogue.replicas()
    )
    assert sorted(os.listdir(store.directory))[0].startswith("catalogue.db")
    assert store.catalogue.find_id("../../etc") is None


def test_what_is_closed_or_only_looked_at_takes_no_push(open_store: Open, pusher) -> None:
    store = open_store()
    beside = open_store(serve=False)
    assert beside.catalogue.replicas() == []
    with pytest.raises(ClosedError):
        pusher.begin(beside)
    with pytest.raises(ClosedError):
        beside.recover()
    store.close()
    with pytest.raises(ClosedError):
        store.catalogue.replicas()
