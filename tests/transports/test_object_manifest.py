"""Entries, the ids that a writer remembers, and finding the last entry of many."""

from __future__ import annotations

import base64

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.errors import Corrupt
from headwater.message import Message
from headwater.transports import object_manifest
from headwater.transports.lines import make_message
from headwater.transports.object_layout import cut
from headwater.transports.object_manifest import (
    LIST_PAGE,
    RECENT_ENTRIES_MAX,
    Entry,
    RecentIds,
    decode_entry,
    encode_entry,
    entry_number,
    entry_path,
    id_digest,
    last_number,
    make_entry,
    newest,
)


def some(*ids: str) -> list[Message]:
    return [make_message("orders.new", None, 1_794_744_000_000, id=each) for each in ids]


def entry(number: int, *ids: str) -> Entry:
    pieces = cut(some(*ids))
    return make_entry(number, pieces, [piece.path() for piece in pieces])


def test_an_entry_names_its_objects_and_the_ids_in_them() -> None:
    made = entry(3, "a", "b")
    found = decode_entry(encode_entry(made), 3, "here")
    assert found == made
    assert found.digests() == [id_digest("orders.new a"), id_digest("orders.new b")]
    (named,) = found.objects
    assert (named.messages, named.id_from, named.id_to) == (2, "a", "b")


@pytest.mark.parametrize(
    "spoil",
    [
        lambda whole: whole[: len(whole) // 2],
        lambda whole: b"",
        lambda whole: b"[]",
        lambda whole: whole.replace(b'"number":3', b'"number":4'),
        lambda whole: whole.replace(b'"messages":2', b'"messages":3'),
        lambda whole: whole.replace(b'"path":"day=', b'"path":"../day='),
        lambda whole: whole.replace(b'"format":2', b'"format":3'),
        lambda whole: whole.replace(b'"ids":"', b'"ids":"!'),
    ],
)
def test_a_damaged_entry_is_refused(spoil: object) -> None:
    with pytest.raises(Corrupt, match="here"):
        decode_entry(spoil(encode_entry(entry(3, "a", "b"))), 3, "here")  # type: ignore[operator]


def test_paths_of_entries_sort_as_their_numbers_do() -> None:
    numbers = [1, 9, 10, 99, 100, 10**15]
    assert sorted(map(entry_path, numbers)) == [entry_path(number) for number in numbers]
    assert [entry_number(entry_path(number)) for number in numbers] == numbers
    assert entry_number("_manifest/if-none-match") is None
    assert entry_number("_manifest/٣٣٣٣٣٣٣٣٣٣٣٣٣٣٣٣٣٣٣٣.json") is None


def test_recent_ids_are_left_out_and_the_oldest_are_forgotten_first() -> None:
    recent = RecentIds(most=3)
    recent.add(entry(1, *"abc"))
    assert [each.id for each in recent.unknown(some("c", "d", "d", "a"))] == ["d"]
    recent.add(entry(2, *"ad"))  # `a` came again, so `b` is the oldest
    assert [each.id for each in recent.unknown(some("a", "b", "c", "d"))] == ["b"]
    assert len(recent) == 3


@given(first=st.integers(1, 10**6), count=st.integers(0, 10**6), after=st.integers(0, 10**6))
def test_the_last_of_many_entries_is_found_in_few_pages(first: int, count: int, after: int) -> None:
    """Also when a rule of the bucket has removed the first ones."""
    asked = 0

    def page(above: int) -> range:
        nonlocal asked
        asked += 1
        begin = max(first, above + 1)
        return range(begin, max(begin, min(begin + LIST_PAGE, first + count)))

    last = first + count - 1
    assert last_number(page, after) == (last if count and last > after else after)
    assert asked < 60


def test_a_writer_reads_back_the_newest_entries_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def find(number: int) -> Entry | None:
        asked.append(number)
        return entry(number, f"{number}a", f"{number}b") if number > 40 else None

    assert [each.number for each in newest(range(1, 501), find)] == list(range(501 - RECENT_ENTRIES_MAX, 501))
    assert len(asked) == RECENT_ENTRIES_MAX
    assert [each.number for each in newest(range(1, 44), find)] == [41, 42, 43]
    monkeypatch.setattr(object_manifest, "RECENT_IDS_MAX", 5)
    assert [each.number for each in newest(range(1, 501), find)] == [498, 499, 500]


def test_ids_that_no_encoding_knows_have_a_digest_too() -> None:
    assert id_digest("\ud800") != id_digest("\ud801")
    assert msgspec.json.decode(encode_entry(entry(1, "x")))["format"] == 2


def test_an_entry_from_before_ids_were_told_apart_by_topic_says_what_it_holds_and_recognises_nothing() -> None:
    """To recognise by the id alone would leave out a message of another topic, which is worse than one that is there
    twice."""
    digests = base64.b64encode(id_digest("a") + id_digest("b")).decode()
    old = msgspec.structs.replace(entry(1, "a", "b"), format=1, ids=digests)
    found = decode_entry(encode_entry(old), 1, "here")
    assert found.holds(some("a", "b"), found.digests())
    assert not found.holds(some("b", "a"), found.digests())
    recent = RecentIds()
    recent.add(found)
    assert [each.id for each in recent.unknown(some("a", "c"))] == ["a", "c"]
