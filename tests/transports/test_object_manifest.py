"""How batches are partition into objects, and what a damaged one looks like."""

from __future__ import annotations

import base64
import gzip
import tracemalloc

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.errors import CorruptError
from headwater.message import Message
from headwater.transports import object_manifest
from headwater.transports.base import make_message
from headwater.transports.file import from_line
from headwater.transports.object_manifest import (
    BATCH_PREFIXES_MAX,
    LIST_PAGE,
    OBJECT_BYTES_MAX,
    RECENT_ENTRIES_MAX,
    ManifestEntry,
    ObjectPart,
    RecentIds,
    decode_entry,
    encode_entry,
    entry_number,
    entry_path,
    id_digest,
    is_object_name,
    last_number,
    make_entry,
    newest,
    pack,
    partition,
    unpack,
)

NOON = 1_794_744_000_000  # 2026-11-15T12:00Z
DAY_MS = 86_400_000

topics = st.sampled_from(["orders.new", "orders", "payments.eu.done", "Größe.a", "a=b/c.x", "%2F", "__.x"])
days = st.integers(0, 3)


def message(seq: int, topic: str = "orders.new", data: object = None, day: int = 0) -> Message:
    made = make_message(topic, data, NOON + day * DAY_MS, id=f"id-{seq}")
    return msgspec.structs.replace(made, seq=seq)


def held(piece: ObjectPart) -> list[Message]:
    return [from_line(line) for line in piece.lines.split(b"\n")[:-1]]


def test_an_object_is_named_by_day_first_token_seqs_and_content() -> None:
    (piece,) = partition([message(7), message(9, "orders.paid")])
    assert piece.path() == (
        f"day=2026-11-15/topic_prefix=orders/000000000000007-000000000000009-{piece.sha256[:32]}.jsonl.gz"
    )
    assert piece.path(3).endswith(f"{piece.sha256[:32]}-3.jsonl.gz")
    assert piece.ids == ("id-7", "id-9")


@pytest.mark.parametrize(
    ("topic", "directory"),
    [("a=b/c.x", "a%3Db%2Fc"), ("Größe.a", "Größe"), ("%2F", "%252F"), ("x" * 40 + ".y", "x" * 32)],
)
def test_a_token_that_is_no_plain_name_is_escaped_as_hive_does(topic: str, directory: str) -> None:
    (piece,) = partition([message(1, topic)])
    assert piece.directory == f"day=2026-11-15/topic_prefix={directory}"
    assert is_object_name(piece.path())


@given(st.lists(st.tuples(topics, days), max_size=40), st.sampled_from([300, 600, OBJECT_BYTES_MAX]))
def test_every_message_is_in_one_piece_and_those_of_a_place_are_in_their_order(
    given_: list[tuple[str, int]], bytes_max: int
) -> None:
    messages = [message(at, topic, {"n": at}, day) for at, (topic, day) in enumerate(given_, 1)]
    pieces = partition(messages, bytes_max)
    everything = [each for piece in pieces for each in held(piece)]
    assert sorted(everything, key=lambda each: each.seq) == messages
    if bytes_max == OBJECT_BYTES_MAX:
        assert len({piece.directory for piece in pieces}) == len(pieces)
    for piece in pieces:
        seqs = [each.seq for each in held(piece)]
        assert seqs == sorted(seqs)
        assert (piece.seq_from, piece.seq_to) == (seqs[0], seqs[-1])
        assert is_object_name(piece.path())
    firsts = [held(piece)[0].seq for piece in pieces]
    assert firsts == sorted(firsts)
    assert partition(messages, bytes_max) == pieces


def test_more_bytes_than_an_object_may_have_begin_another() -> None:
    messages = [message(seq, data="x" * 1000) for seq in range(1, 21)]
    pieces = partition(messages, bytes_max=5_000)
    assert len(pieces) > 4
    assert all(len(piece.lines) <= 5_000 for piece in pieces)
    assert [each for piece in pieces for each in held(piece)] == messages


def test_a_batch_with_a_token_for_each_message_makes_no_heap_of_objects() -> None:
    pieces = partition([message(seq, f"user{seq}.clicked") for seq in range(1, 501)])
    assert len(pieces) == BATCH_PREFIXES_MAX + 1
    assert "topic_prefix=%7E" in pieces[-1].directory
    assert sum(len(piece.ids) for piece in pieces) == 500


def test_a_payload_with_line_breaks_stays_on_one_line() -> None:
    by_hand = msgspec.structs.replace(message(1), raw=msgspec.Raw(b'{\r\n "a": 1\r\n}'))
    (piece,) = partition([by_hand])
    (found,) = held(piece)
    assert found.data == {"a": 1}


def test_the_same_lines_are_packed_into_the_same_bytes_and_any_tool_unpacks_them() -> None:
    (piece,) = partition([message(1, data="ü" * 100)])
    packed = pack(piece.lines)
    assert packed == pack(piece.lines)
    assert gzip.decompress(packed) == piece.lines
    assert unpack(packed, len(piece.lines), piece.sha256, "here") == piece.lines


def test_whatever_byte_is_lost_or_added_is_noticed() -> None:
    (piece,) = partition([message(1, data="something")])
    packed, size = pack(piece.lines), len(piece.lines)
    spoiled = [packed[:at] for at in range(len(packed))] + [packed + b"\0", packed + packed, b""]
    for each in spoiled:
        with pytest.raises(CorruptError, match="here"):
            unpack(each, size, piece.sha256, "here")
    with pytest.raises(CorruptError, match="bytes"):
        unpack(pack(piece.lines + b" "), size, piece.sha256, "here")
    with pytest.raises(CorruptError, match="digest"):
        unpack(pack(piece.lines.replace(b"something", b"sOmething")), size, piece.sha256, "here")


def test_a_small_object_that_unpacks_into_a_huge_one_is_stopped_at_its_promised_size() -> None:
    packed = pack(bytes(4 * OBJECT_BYTES_MAX))
    tracemalloc.start()
    try:
        with pytest.raises(CorruptError, match="bytes"):
            unpack(packed, 100, "0" * 64, "here")
        assert tracemalloc.get_traced_memory()[1] < OBJECT_BYTES_MAX
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "path",
    [
        "notes.txt",
        "day=2026-11-15/x.jsonl.gz",
        "_manifest/00000000000000000001.json",
        "other/day=2026-11-15/topic_prefix=a/1-2-3.jsonl.gz",
    ],
)
def test_what_we_did_not_name_is_not_ours(path: str) -> None:
    assert not is_object_name(path)


def some(*ids: str) -> list[Message]:
    return [make_message("orders.new", None, 1_794_744_000_000, id=each) for each in ids]


def entry(number: int, *ids: str) -> ManifestEntry:
    pieces = partition(some(*ids))
    return make_entry(number, pieces, [piece.path() for piece in pieces])


def test_an_entry_names_its_objects_and_the_ids_in_them() -> None:
    made = entry(3, "a", "b")
    found = decode_entry(encode_entry(made), 3, "here")
    assert found == made
    assert found.digests() == [id_digest("orders.new#a"), id_digest("orders.new#b")]
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
    with pytest.raises(CorruptError, match="here"):
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

    def find(number: int) -> ManifestEntry | None:
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


def test_an_entry_of_format_1_has_its_content_and_recognises_nothing() -> None:
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
