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
    Closed,
    Corrupt,
    InvalidOption,
    NotADatabase,
    ReplicationFailed,
    TooLarge,
    UnknownReplica,
    VersionConflict,
)
from headwater.replication.host import catalogue
from headwater.replication.host.policy import Policy
from headwater.replication.host.records import Facts
from headwater.replication.host.scratch import agreed_base
from headwater.replication.host.shelf import Shelf
from headwater.replication.names import MESSAGE_CHARS_MAX, ReplicaName

Open = Callable[..., Shelf]


def test_a_push_becomes_a_version_with_all_that_is_known_of_it(shelf: Shelf, pusher, clock: ManualClock) -> None:
    first = pusher.push(shelf, 1, message="begin", dbhash="ab" * 20, wire_bytes=1234)
    clock.advance(5_000)
    second = pusher.push(shelf, 2)
    replica = shelf.get(pusher.name)
    assert (first.is_new, second.is_new) == (True, True)
    assert (replica.newest, replica.versions, replica.created_ms) == (2, 2, clock.now_ms() - 5_000)
    newest, oldest = shelf.versions(pusher.name)
    assert (oldest.number, oldest.base, oldest.message, oldest.client) == (1, 0, "begin", "laptop:1")
    assert (oldest.dbhash, oldest.wire_bytes, oldest.at_ms) == ("ab" * 20, 1234, clock.now_ms() - 5_000)
    assert (oldest.changed_pages, oldest.page_size, oldest.size) == (oldest.pages, 512, 512 * oldest.pages)
    assert (newest.number, newest.base, newest.at_ms) == (2, 1, clock.now_ms())
    assert 0 < newest.changed_pages < 6
    assert oldest.stored_bytes < newest.stored_bytes == newest.size
    assert replica.stored_bytes == oldest.stored_bytes + newest.size
    assert pusher.files(shelf) == ["1.pages", "2.db"]


def test_each_version_stays_readable_byte_for_byte_as_it_was_pushed(shelf: Shelf, pusher) -> None:
    pushed = []
    for number in range(1, 6):
        scratch = pusher.begin(shelf)
        pusher.write(scratch.path, pusher.edit(number, rows=10 + 15 * (number % 3)))
        pushed.append(Path(scratch.path).read_bytes())
        shelf.accept(scratch, Facts())
    assert [pusher.bytes_of(shelf, number) for number in range(1, 6)] == pushed
    assert pusher.files(shelf) == ["1.pages", "2.pages", "3.pages", "4.pages", "5.db"]


def test_a_stale_base_is_refused_with_the_newest(shelf: Shelf, pusher) -> None:
    pusher.push(shelf, 1)
    pusher.push(shelf, 2)
    for base in (0, 1, 3):
        with pytest.raises(VersionConflict) as caught:
            pusher.begin(shelf, base)
        assert caught.value.newest == 2
    unknown = ReplicaName("shop", "other.db")
    with pytest.raises(VersionConflict) as caught:
        shelf.begin(unknown, base=3, push_id="p")
    assert caught.value.newest == 0
    assert pusher.files(shelf) == ["1.pages", "2.db"]


def test_of_two_pushes_from_one_base_one_is_accepted(open_shelf: Open, pusher) -> None:
    """Both pass all checks before either gets its name."""
    both = threading.Barrier(2)
    shelf = open_shelf(checkpoint=lambda step: both.wait(10) if step == "checked" and racing else None)
    racing = False
    pusher.push(shelf, 1)
    racing = True
    scratches = [pusher.begin(shelf, 1), pusher.begin(shelf, 1)]
    for number, scratch in enumerate(scratches, 2):
        pusher.write(scratch.path, pusher.edit(number))
    pushed = [Path(scratch.path).read_bytes() for scratch in scratches]
    outcomes: dict[int, object] = {}

    def accept(which: int) -> None:
        try:
            outcomes[which] = shelf.accept(scratches[which], Facts())
        except VersionConflict as exc:
            outcomes[which] = exc.newest

    threads = [threading.Thread(target=accept, args=(which,)) for which in (0, 1)]
    [thread.start() for thread in threads]  # type: ignore[func-returns-value]
    [thread.join(20) for thread in threads]  # type: ignore[func-returns-value]
    [loser] = [which for which, outcome in outcomes.items() if outcome == 2]
    assert pusher.bytes_of(shelf, 2) == pushed[1 - loser]
    assert all(shelf.verify(pusher.name, number).ok for number in (1, 2))
    assert pusher.files(shelf) == ["1.pages", "2.db"]


def test_the_catalogue_alone_refuses_a_stale_base_too(shelf: Shelf, pusher, directory: Path) -> None:
    """Should ever two servers write one directory, on a file system without locks."""
    pusher.push(shelf, 1)
    pusher.push(shelf, 2)
    stale = msgspec.structs.replace(shelf.version(pusher.name, 2), push_id="stale")
    other = catalogue.Catalogue(str(directory), create=False)
    with contextlib.closing(other), pytest.raises(VersionConflict) as caught:
        other.accept(shelf.get(pusher.name), stale, None, with_replica=False)
    assert caught.value.newest == 2
    assert [version.push_id == "stale" for version in shelf.versions(pusher.name)] == [False, False]


def test_of_two_first_pushes_one_makes_the_replica(shelf: Shelf, pusher) -> None:
    scratches = [pusher.begin(shelf, 0), pusher.begin(shelf, 0)]
    for number, scratch in enumerate(scratches, 1):
        pusher.write(scratch.path, pusher.edit(number))
    assert shelf.find(pusher.name) is None
    assert shelf.accept(scratches[1], Facts()).is_new
    with pytest.raises(VersionConflict) as caught:
        shelf.accept(scratches[0], Facts())
    assert caught.value.newest == 1
    assert shelf.get(pusher.name).id == scratches[1].replica.id
    assert len([each for each in os.scandir(shelf.directory) if each.is_dir()]) == 1


def test_a_push_whose_answer_was_lost_goes_on_from_what_it_made(shelf: Shelf, pusher) -> None:
    scratch = pusher.begin(shelf, 0, push_id="lost")
    pusher.write(scratch.path, pusher.edit(1))
    shelf.accept(scratch, Facts())
    with pytest.raises(VersionConflict):
        pusher.begin(shelf, 0, last_push_id="another")
    with pytest.raises(VersionConflict):
        pusher.begin(shelf, 0)
    again = pusher.begin(shelf, 0, last_push_id="lost")
    assert again.base == 1
    accepted = shelf.accept(again, Facts())
    assert (accepted.version.number, accepted.is_new) == (1, False)


HASHES = st.sampled_from([None, "x", "y"])


@given(st.integers(0, 5), st.integers(0, 5), st.sampled_from([None, "a", "b"]), HASHES, HASHES)
def test_a_base_is_agreed_on_only_if_it_is_the_newest_or_led_to_it(
    newest: int, base: int, last: str | None, remembered: str | None, noted: str | None
) -> None:
    from headwater.replication.host.records import Version

    version = Version(newest, newest - 1, "a", "", "", 0, 1, 1, 1, 1, 1, noted, "") if newest else None
    agreed = agreed_base(base, last, remembered, version)
    led_to_it = newest > 0 and base == newest - 1 and last == "a"
    is_it = base == newest and (newest == 0 or remembered is None or noted is None or remembered == noted)
    assert agreed == (newest if is_it or led_to_it else None)
    assert agreed_base("latest", last, remembered, version) == newest


def test_a_change_that_is_told_is_noted(shelf: Shelf, pusher) -> None:
    pusher.push(shelf, 1)
    [before] = shelf.list()
    shelf.note_change(before.name)
    shelf.note_change(ReplicaName("nobody", "knows"))
    [after] = shelf.list()
    assert (before.changed_ms, after.changed_ms) == (None, shelf._clock.now_ms())


def test_what_is_identical_makes_no_version(shelf: Shelf, pusher) -> None:
    pusher.push(shelf, 1)
    scratch = pusher.begin(shelf)
    with open(scratch.path, "r+b") as file:  # as the replica end does, which counts changes for itself
        file.seek(24)
        file.write(b"\0\0\0\x63")
    accepted = shelf.accept(scratch, Facts())
    assert (accepted.is_new, accepted.version.number) == (False, 1)
    assert shelf.numbers(pusher.name) == [1]
    assert pusher.files(shelf) == ["1.db"]


def test_another_page_size_starts_from_nothing_and_older_versions_stay(shelf: Shelf, pusher) -> None:
    pusher.push(shelf, 1)
    before = pusher.bytes_of(shelf, 1)
    scratch = pusher.begin(shelf, 1, page_size=4096)
    assert not os.path.exists(scratch.path)
    pusher.write(scratch.path, pusher.edit(2), page_size=4096)
    accepted = shelf.accept(scratch, Facts())
    assert (accepted.version.page_size, accepted.version.changed_pages) == (4096, accepted.version.pages)
    pusher.push(shelf, 3)
    assert pusher.bytes_of(shelf, 1) == before
    assert shelf.version(pusher.name, 1).page_size == 512


def test_a_scratch_begins_as_the_newest_version(shelf: Shelf, pusher) -> None:
    first = pusher.begin(shelf, 0)
    assert not os.path.exists(first.path)
    shelf.discard(first)
    assert pusher.files(shelf) == []
    assert [each.name for each in os.scandir(shelf.directory) if each.is_dir()] == []
    pusher.push(shelf, 1)
    scratch = pusher.begin(shelf, 1)
    assert Path(scratch.path).read_bytes() == pusher.bytes_of(shelf, 1)
    shelf.discard(scratch)
    assert pusher.files(shelf) == ["1.db"]


def break_page(scratch_path: str) -> None:
    with open(scratch_path, "r+b") as file:
        file.seek(512 * 3)
        file.write(b"\xff" * 100)


@pytest.mark.parametrize(
    ("spoil", "error"),
    [
        (break_page, Corrupt),
        (lambda path: os.truncate(path, 1000), Corrupt),
        (lambda path: Path(path).write_bytes(b""), Corrupt),
        (os.unlink, ReplicationFailed),
        (lambda path: Path(path + "-wal").write_bytes(b"half"), ReplicationFailed),
        (lambda path: Path(path + "-journal").write_bytes(b"half"), ReplicationFailed),
        (lambda path: Path(path).write_bytes(b"not SQLite!" + Path(path).read_bytes()[11:]), (NotADatabase, Corrupt)),
    ],
)
def test_what_is_not_a_whole_database_is_not_accepted(shelf: Shelf, pusher, spoil, error) -> None:
    pusher.push(shelf, 1)
    before = pusher.bytes_of(shelf, 1)
    scratch = pusher.begin(shelf)
    pusher.write(scratch.path, pusher.edit(2))
    spoil(scratch.path)
    with pytest.raises(error):
        shelf.accept(scratch, Facts())
    assert (pusher.bytes_of(shelf, 1), pusher.files(shelf)) == (before, ["1.db"])
    assert pusher.push(shelf, 2).version.number == 2


def test_limits_are_held(open_shelf: Open, pusher) -> None:
    shelf = open_shelf(bytes_max=20_000, replicas_max=1)
    pusher.push(shelf, 1)
    with pytest.raises(TooLarge, match="the limit is 20,000"):
        pusher.push(shelf, 2, rows=200)
    with pytest.raises(TooLarge, match="4,096"):
        pusher.push(shelf, 2, message="x" * (MESSAGE_CHARS_MAX + 1))
    with pytest.raises(TooLarge, match="1 replicas"):
        shelf.begin(ReplicaName("shop", "more.db"), base=0, push_id="p")
    with pytest.raises(TooLarge, match="1 replicas"):
        shelf.create(ReplicaName("shop", "more.db"))
    for words in ({"push_id": ""}, {"push_id": "x" * 129}, {"client": "x" * 301}):
        with pytest.raises(InvalidOption):
            pusher.begin(shelf, **words)
    assert pusher.files(shelf) == ["1.db"]
    assert pusher.push(shelf, 2, message="x" * MESSAGE_CHARS_MAX).version.number == 2


def test_listings_come_in_pages(shelf: Shelf, pusher) -> None:
    for number in range(1, 5):
        pusher.push(shelf, number)
    assert [version.number for version in shelf.versions(pusher.name, limit=2)] == [4, 3]
    assert [version.number for version in shelf.versions(pusher.name, below=3)] == [2, 1]
    assert shelf.numbers(pusher.name) == [1, 2, 3, 4]


def test_old_versions_go_after_a_push_once_they_are_announced(open_shelf: Open, pusher, clock: ManualClock) -> None:
    shelf = open_shelf(policy=Policy(keep_last=2))
    for number in range(1, 4):
        pusher.push(shelf, number)
    assert shelf.numbers(pusher.name) == [1, 2, 3]
    waiting = shelf.unannounced()
    assert [(each.replica.name, each.version.number) for each in waiting] == [(pusher.name, n) for n in (1, 2, 3)]
    for replica, version in waiting:
        shelf.announced(replica.id, version.number)
    assert shelf.unannounced() == []
    pusher.push(shelf, 4)
    assert (shelf.numbers(pusher.name), pusher.files(shelf)) == ([3, 4], ["3.pages", "4.db"])
    assert shelf.verify(pusher.name, 3).ok
    shelf.close()
    shelf = open_shelf(policy=Policy(keep_age_ms=1000))
    clock.advance(2000)
    shelf.recover()
    assert (shelf.numbers(pusher.name), pusher.files(shelf)) == ([4], ["4.db"])
    assert pusher.push(shelf, 5).version.number == 5
    with pytest.raises(UnknownReplica, match="no version 2"):
        shelf.open_version(pusher.name, 2)


def test_a_removed_replica_is_gone_and_one_of_its_name_begins_anew(shelf: Shelf, pusher) -> None:
    pusher.push(shelf, 1)
    text = shelf.create_key(pusher.name, "push")
    gone = shelf.remove(pusher.name)
    assert (shelf.find(pusher.name), shelf.list(), os.path.exists(f"{shelf.directory}/{gone.id}")) == (None, [], False)
    with pytest.raises(UnknownReplica):
        shelf.versions(pusher.name)
    with pytest.raises(UnknownReplica):
        shelf.remove(pusher.name)
    pusher.push(shelf, 1)
    anew = shelf.get(pusher.name)
    assert anew.id != gone.id
    assert (anew.newest, shelf.key_kind(anew, text), shelf.has_keys(anew)) == (1, None, False)


@pytest.mark.parametrize("had_versions", [True, False])
def test_a_replica_removed_in_the_middle_of_a_push_does_not_come_back(
    open_shelf: Open, pusher, had_versions: bool
) -> None:
    """By a command beside the server, at the worst moment: just before the commit."""
    command: list[Shelf] = []
    shelf = open_shelf(
        checkpoint=lambda step: command and step == "directory synced" and command[0].remove(pusher.name)
    )
    if had_versions:
        pusher.push(shelf, 1)
    else:
        shelf.create(pusher.name)
    command.append(open_shelf(serve=False))
    scratch = pusher.begin(shelf)
    pusher.write(scratch.path, pusher.edit(2))
    with pytest.raises(VersionConflict):
        shelf.accept(scratch, Facts())
    assert shelf.find(pusher.name) is None
    assert shelf.recover().damaged == []
    assert [each for each in os.scandir(shelf.directory) if each.is_dir()] == []


def test_keys_open_their_own_replica_and_only_while_they_are_there(shelf: Shelf, pusher) -> None:
    replica = shelf.create(pusher.name)
    other = shelf.create(ReplicaName("shop", "other.db"))
    assert not shelf.has_keys(replica)
    push, pull = shelf.create_key(pusher.name, "push", "laptop"), shelf.create_key(pusher.name, "pull")
    assert (push[:7], pull[:7]) == ("hwpush_", "hwpull_")
    assert (shelf.key_kind(replica, push), shelf.key_kind(replica, pull)) == ("push", "pull")
    changed = push[:-1] + ("0" if push[-1] != "0" else "1")
    for wrong in ("", "hw_abc", changed, push.replace("push", "pull"), pull.replace("pull", "push"), push + "\n"):
        assert shelf.key_kind(replica, wrong) is None
    assert shelf.key_kind(other, push) is None
    assert [(key.kind, key.label) for key in shelf.keys(pusher.name)] in (
        [("push", "laptop"), ("pull", "")],
        [("pull", ""), ("push", "laptop")],
    )
    secret = push.rsplit("_", 1)[1]
    assert all(secret.encode() not in file.read_bytes() for file in Path(shelf.directory).glob("catalogue.db*"))
    for key in shelf.keys(pusher.name):
        assert shelf.revoke_key(pusher.name, key.id)
    assert not shelf.revoke_key(pusher.name, push.split("_")[1])
    assert shelf.key_kind(replica, push) is None
    assert shelf.has_keys(replica)  # revoking the last key lets nobody in
    with pytest.raises(InvalidOption):
        shelf.create_key(pusher.name, "pull", "two\nlines")


def test_keys_and_reports_have_limits(shelf: Shelf, pusher, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalogue, "KEYS_MAX", 2)
    monkeypatch.setattr(catalogue, "REPORTS_KEPT", 3)
    replica = shelf.create(pusher.name)
    for _ in range(2):
        shelf.create_key(pusher.name, "pull")
    with pytest.raises(TooLarge, match="2 keys"):
        shelf.create_key(pusher.name, "pull")
    other = shelf.create(ReplicaName("shop", "other.db"))
    shelf.add_report(other, "c", "kept")
    for number in range(5):
        shelf.add_report(replica, f"client {number}" + "x" * 1000, f'{{"error":{number}}}')
    assert [report.document for report in shelf.reports(pusher.name)] == [f'{{"error":{n}}}' for n in (4, 3, 2)]
    assert all(len(report.client) <= 300 for report in shelf.reports(pusher.name))
    assert [report.document for report in shelf.reports(other.name)] == ["kept"]
    with pytest.raises(TooLarge):
        shelf.add_report(replica, "c", "é" * (catalogue.REPORT_BYTES_MAX // 2 + 1))


def test_names_are_data_and_never_paths(shelf: Shelf, pusher) -> None:
    for odd in ("con", "a.b-c_d", "x" * 128):
        shelf.create(ReplicaName("-", odd))
    assert all(len(replica.id) == 16 and shelf.find_id(replica.id) == replica for replica in shelf.list())
    assert sorted(os.listdir(shelf.directory))[0].startswith("catalogue.db")
    assert shelf.find_id("../../etc") is None


def test_what_is_closed_or_only_looked_at_takes_no_push(open_shelf: Open, pusher) -> None:
    shelf = open_shelf()
    beside = open_shelf(serve=False)
    assert beside.list() == []
    with pytest.raises(Closed):
        pusher.begin(beside)
    with pytest.raises(Closed):
        beside.recover()
    shelf.close()
    with pytest.raises(Closed):
        shelf.list()
