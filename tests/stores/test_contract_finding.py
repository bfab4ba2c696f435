"""What every store promises of a search for people: upwards or newest first, all that matches, in bounded looks."""

from __future__ import annotations

from typing import Any

import pytest

from headwater.delivery.filters import parse_where
from headwater.delivery.publishing import DedupeWindow
from headwater.message import make_draft
from headwater.ports.records import DeadLetter, DeadLetterQuery, DeliveryCounts, DeliveryRow, LetterGroup, Selection
from headwater.ports.store import SEQ_MAX, Store
from headwater.stores import sql
from headwater.topics import parse_pattern

NOW = 1_700_000_000_000
EVERYTHING = Selection(parse_pattern(">"))


def publish(store: Store, *messages: tuple[str, Any]) -> None:
    with store.write() as writer:
        writer.append([make_draft(topic, data, {}, NOW) for topic, data in messages], NOW, DedupeWindow())


def found(store: Store, selection: Selection, limit: int, newest_first: bool) -> tuple[list[int], int]:
    """All that matches, and how many looks it took."""
    low, seqs, looks = 0, list[int](), 0
    with store.read() as reader:
        high = reader.last_seq()
        while low < high:
            page, looked_to = reader.find(selection, low, high, limit, newest_first=newest_first)
            assert low <= looked_to <= high
            assert looked_to < high if newest_first else looked_to > low
            low, high = (low, looked_to) if newest_first else (looked_to, high)
            seqs, looks = seqs + page, looks + 1
    return seqs, looks


@pytest.mark.parametrize("newest_first", [False, True])
@pytest.mark.parametrize("limit", [1, 2, 100])
@pytest.mark.parametrize(
    ("pattern", "where"), [(">", None), ("a.*", None), ("*.b", "data.n >= 3"), ("a.b", "data.text contains 'xz'")]
)
@pytest.mark.parametrize("padding", [0, 9_000], ids=["small", "large"])
def test_all_that_matches_is_found_in_both_directions(
    store: Store, pattern: str, where: str | None, limit: int, newest_first: bool, padding: int
) -> None:
    publish(
        store,
        *((("a.b", "c.b", "a.d")[n % 3], {"n": n, "text": "xy" * (padding // 2) + "xz" * (n % 2)}) for n in range(12)),
    )
    selection = Selection(parse_pattern(pattern), where=None if where is None else parse_where(where))
    with store.read() as reader:
        expected = [seq for seq, message in sorted(reader.messages(range(1, 13)).items()) if selection.keeps(message)]
    assert expected
    assert found(store, selection, limit, newest_first)[0] == (expected[::-1] if newest_first else expected)


def test_a_range_is_kept_to(store: Store) -> None:
    publish(store, *(("a", n) for n in range(10)))
    with store.read() as reader:
        assert reader.find(EVERYTHING, 3, 6, 10) == ([4, 5, 6], 6)
        assert reader.find(EVERYTHING, 3, 6, 10, newest_first=True) == ([6, 5, 4], 3)
        assert reader.find(EVERYTHING, 3, 6, 2, newest_first=True) == ([6, 5], 4)
        assert reader.find(EVERYTHING, 8, SEQ_MAX, 10) == ([9, 10], 10)
        assert reader.find(EVERYTHING, 8, SEQ_MAX, 10, newest_first=True) == ([10, 9], 8)
        assert reader.find(EVERYTHING, 6, 6, 10) == ([], 6)
        assert reader.find(EVERYTHING, 10, SEQ_MAX, 10) == ([], 10)


@pytest.mark.parametrize("newest_first", [False, True])
def test_one_look_passes_a_bounded_number_of_seqs(
    store: Store, newest_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sql, "SCAN_SEQS_MAX", 4)
    publish(store, *(("a", n) for n in range(10)))
    assert found(store, Selection(parse_pattern("never")), 5, newest_first) == ([], 3)


@pytest.mark.parametrize("newest_first", [False, True])
def test_one_look_ends_after_its_time(store: Store, newest_first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sql, "SIFT_S_MAX", -1.0)
    publish(store, *(("a", n) for n in range(5)))
    seqs, looks = found(store, EVERYTHING, 5, newest_first)
    assert (sorted(seqs), looks) == ([1, 2, 3, 4, 5], 5)


def test_rows_up_to_a_seq_are_counted(store: Store) -> None:
    publish(store, *(("a", n) for n in range(4)))
    with store.write() as writer:
        writer.put_deliveries("s", [DeliveryRow(1, 1, NOW), DeliveryRow(2, 1, NOW, 7), DeliveryRow(4, 1, NOW)])
    with store.read() as reader:
        assert reader.delivery_counts("s", 2) == DeliveryCounts(in_flight=1, waiting=1, first_seq=1)
        assert reader.delivery_counts("s", 0) == DeliveryCounts(0, 0, None)


def test_dead_letters_are_grouped_by_what_failed_alike(store: Store) -> None:
    publish(store, ("a", 1))
    with store.read() as reader:
        message = reader.messages([1])[1]
    given: list[tuple[str, str, str | None, str | None, bool]] = [
        ("s", "max_attempts", "KeyError: 'x'\nmore", "on_a", False),
        ("s", "max_attempts", "KeyError: 'x'\nother", "on_a", True),
        ("s", "max_attempts", "KeyError: 'x'", None, False),
        ("s", "rejected", None, None, False),
        ("t", "rejected", "z" * 200, None, False),
    ]
    with store.write() as writer:
        ids = writer.save_dead_letters(
            [
                DeadLetter(0, id, message, reason, 1, NOW + n, error, None, handler, redriving=redriving)  # type: ignore[arg-type]
                for n, (id, reason, error, handler, redriving) in enumerate(given)
            ]
        )
    with store.read() as reader:
        groups = reader.group_dead_letters(DeadLetterQuery(), 100)
        assert groups[0] == LetterGroup("s", "max_attempts", "on_a", "KeyError: 'x'", 2, 1, NOW, NOW + 1, ids[1])
        assert [(each.handler, each.error, each.count) for each in groups[1:]] == [
            ("", "z" * 120, 1),
            ("", "", 1),
            ("", "KeyError: 'x'", 1),
        ]
        assert len(reader.group_dead_letters(DeadLetterQuery(), 2)) == 2
        assert [each.last_id for each in reader.group_dead_letters(DeadLetterQuery(subscription="t"), 9)] == ids[4:]
        by_handler = [
            [each.id for each in reader.dead_letters(DeadLetterQuery(handler=name), 0, 9)] for name in ("on_a", "")
        ]
        assert by_handler == [ids[:2], ids[2:]]
