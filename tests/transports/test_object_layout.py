"""How batches are cut into objects, and what a damaged one looks like."""

from __future__ import annotations

import gzip
import tracemalloc

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.errors import Corrupt
from headwater.message import Message
from headwater.transports.lines import from_line, make_message
from headwater.transports.object_layout import (
    BATCH_PREFIXES_MAX,
    OBJECT_BYTES_MAX,
    Piece,
    cut,
    is_object_name,
    pack,
    unpack,
)

NOON = 1_794_744_000_000  # 2026-11-15T12:00Z
DAY_MS = 86_400_000

topics = st.sampled_from(["orders.new", "orders", "payments.eu.done", "Größe.a", "a=b/c.x", "%2F", "__.x"])
days = st.integers(0, 3)


def message(seq: int, topic: str = "orders.new", data: object = None, day: int = 0) -> Message:
    made = make_message(topic, data, NOON + day * DAY_MS, id=f"id-{seq}")
    return msgspec.structs.replace(made, seq=seq)


def held(piece: Piece) -> list[Message]:
    return [from_line(line) for line in piece.lines.split(b"\n")[:-1]]


def test_an_object_is_named_by_day_first_token_seqs_and_content() -> None:
    (piece,) = cut([message(7), message(9, "orders.paid")])
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
    (piece,) = cut([message(1, topic)])
    assert piece.place == f"day=2026-11-15/topic_prefix={directory}"
    assert is_object_name(piece.path())


@given(st.lists(st.tuples(topics, days), max_size=40), st.sampled_from([300, 600, OBJECT_BYTES_MAX]))
def test_every_message_is_in_one_piece_and_those_of_a_place_are_in_their_order(
    given_: list[tuple[str, int]], bytes_max: int
) -> None:
    messages = [message(at, topic, {"n": at}, day) for at, (topic, day) in enumerate(given_, 1)]
    pieces = cut(messages, bytes_max)
    everything = [each for piece in pieces for each in held(piece)]
    assert sorted(everything, key=lambda each: each.seq) == messages
    if bytes_max == OBJECT_BYTES_MAX:
        assert len({piece.place for piece in pieces}) == len(pieces)
    for piece in pieces:
        seqs = [each.seq for each in held(piece)]
        assert seqs == sorted(seqs)
        assert (piece.seq_from, piece.seq_to) == (seqs[0], seqs[-1])
        assert is_object_name(piece.path())
    firsts = [held(piece)[0].seq for piece in pieces]
    assert firsts == sorted(firsts)
    assert cut(messages, bytes_max) == pieces


def test_more_bytes_than_an_object_may_have_begin_another() -> None:
    messages = [message(seq, data="x" * 1000) for seq in range(1, 21)]
    pieces = cut(messages, bytes_max=5_000)
    assert len(pieces) > 4
    assert all(len(piece.lines) <= 5_000 for piece in pieces)
    assert [each for piece in pieces for each in held(piece)] == messages


def test_a_batch_with_a_token_for_each_message_makes_no_heap_of_objects() -> None:
    pieces = cut([message(seq, f"user{seq}.clicked") for seq in range(1, 501)])
    assert len(pieces) == BATCH_PREFIXES_MAX + 1
    assert "topic_prefix=%7E" in pieces[-1].place
    assert sum(len(piece.ids) for piece in pieces) == 500


def test_a_payload_with_line_breaks_stays_on_one_line() -> None:
    by_hand = msgspec.structs.replace(message(1), raw=msgspec.Raw(b'{\r\n "a": 1\r\n}'))
    (piece,) = cut([by_hand])
    (found,) = held(piece)
    assert found.data == {"a": 1}


def test_the_same_lines_are_packed_into_the_same_bytes_and_any_tool_unpacks_them() -> None:
    (piece,) = cut([message(1, data="ü" * 100)])
    packed = pack(piece.lines)
    assert packed == pack(piece.lines)
    assert gzip.decompress(packed) == piece.lines
    assert unpack(packed, len(piece.lines), piece.sha256, "here") == piece.lines


def test_whatever_byte_is_lost_or_added_is_noticed() -> None:
    (piece,) = cut([message(1, data="something")])
    packed, size = pack(piece.lines), len(piece.lines)
    spoiled = [packed[:at] for at in range(len(packed))] + [packed + b"\0", packed + packed, b""]
    for each in spoiled:
        with pytest.raises(Corrupt, match="here"):
            unpack(each, size, piece.sha256, "here")
    with pytest.raises(Corrupt, match="bytes"):
        unpack(pack(piece.lines + b" "), size, piece.sha256, "here")
    with pytest.raises(Corrupt, match="digest"):
        unpack(pack(piece.lines.replace(b"something", b"sOmething")), size, piece.sha256, "here")


def test_a_small_object_that_unpacks_into_a_huge_one_is_stopped_at_its_promised_size() -> None:
    packed = pack(bytes(4 * OBJECT_BYTES_MAX))
    tracemalloc.start()
    try:
        with pytest.raises(Corrupt, match="bytes"):
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
