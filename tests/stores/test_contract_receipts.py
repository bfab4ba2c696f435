"""What every store promises about the receipts of numbered publishers."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.delivery.publishing import RUN_MAX, Receipt
from headwater.ports.store import Store

NOW = 1_700_000_000_000


def add(store: Store, *receipts: Receipt, publisher: str = "p", now_ms: int = NOW) -> None:
    with store.write() as writer:
        writer.add_receipts(publisher, receipts, now_ms)


def found(store: Store, first: int = 1, count: int = 1_000_000, publisher: str = "p") -> list[Receipt]:
    with store.read() as reader:
        return sorted(reader.receipts(publisher, first, count), key=lambda receipt: receipt.number)


def forget(store: Store, below: int, publisher: str = "p") -> None:
    with store.write() as writer:
        writer.forget_receipts(publisher, below)


def forget_old(store: Store, before_ms: int, limit: int = 1_000) -> int:
    with store.write() as writer:
        return writer.forget_old_receipts(before_ms, limit)


# --- noting and asking --------------------------------------------------------------------------------------


def test_a_log_without_numbered_publishers(store: Store) -> None:
    assert found(store) == []
    forget(store, 10)
    assert forget_old(store, NOW) == 0


def test_what_was_noted_is_found(store: Store) -> None:
    add(store, Receipt(1, 3, 11), Receipt(4, 1, 20))
    add(store, Receipt(5, 2, 2**40), Receipt(2**40, 1, 2**41))
    assert found(store, count=2**50) == [
        Receipt(1, 3, 11),
        Receipt(4, 1, 20),
        Receipt(5, 2, 2**40),
        Receipt(2**40, 1, 2**41),
    ]


def test_nothing_to_note(store: Store) -> None:
    add(store)
    assert found(store) == []


@pytest.mark.parametrize(
    ("first", "count", "expected"),
    [
        (1, 9, []),
        (1, 10, [10]),
        (10, 1, [10]),
        (14, 1, [10]),
        (14, 2, [10, 15]),
        (15, 1, [15]),
        (16, 3, []),
        (16, 4, [19]),
        (12, 100, [10, 15, 19]),
        (1, 0, []),
        (20, 100, []),
    ],
)
def test_a_receipt_tells_of_its_first_number_to_its_last(
    store: Store, first: int, count: int, expected: list[int]
) -> None:
    add(store, Receipt(10, 5, 100), Receipt(15, 1, 200), Receipt(19, 1, 300))
    assert [receipt.number for receipt in found(store, first, count)] == expected


def test_the_longest_receipt_is_found_by_its_last_number(store: Store) -> None:
    add(store, Receipt(7, RUN_MAX, 1))
    assert found(store, 7 + RUN_MAX - 1, 1) == [Receipt(7, RUN_MAX, 1)]
    assert found(store, 7 + RUN_MAX, 1) == []


def test_publishers_are_kept_apart(store: Store) -> None:
    names = ["p", "P", "p ", "", "ü", "p'; DROP TABLE receipts; --", "a" * 200]
    for at, name in enumerate(names):
        add(store, Receipt(1, 1, at + 1), publisher=name)
    assert [found(store, publisher=name) for name in names] == [[Receipt(1, 1, at + 1)] for at in range(len(names))]
    forget(store, 2, publisher="p")
    assert [len(found(store, publisher=name)) for name in names] == [0, 1, 1, 1, 1, 1, 1]


def test_the_last_word_on_a_number_holds(store: Store) -> None:
    add(store, Receipt(1, 2, 10))
    add(store, Receipt(1, 4, 20))
    assert found(store) == [Receipt(1, 4, 20)]


# --- forgetting ---------------------------------------------------------------------------------------------


def test_forgotten_is_what_lies_wholly_below(store: Store) -> None:
    add(store, Receipt(1, 3, 1), Receipt(4, 3, 4), Receipt(7, 1, 7))
    forget(store, 3)
    assert len(found(store)) == 3
    forget(store, 4)
    assert found(store) == [Receipt(4, 3, 4), Receipt(7, 1, 7)]
    forget(store, 6)
    assert len(found(store)) == 2, "number 6 has not been heard of"
    forget(store, 7)
    assert found(store) == [Receipt(7, 1, 7)]
    forget(store, 8)
    assert found(store) == []


def test_old_ones_go_whosever_they_are(store: Store) -> None:
    for at, publisher in enumerate("pqr"):
        add(store, Receipt(1, 1, 1), publisher=publisher, now_ms=NOW + at)
    assert forget_old(store, NOW) == 0
    assert forget_old(store, NOW + 2) == 2
    assert [found(store, publisher=publisher) for publisher in "pqr"] == [[], [], [Receipt(1, 1, 1)]]


def test_old_ones_go_so_many_at_a_time(store: Store) -> None:
    add(store, *(Receipt(number, 1, number) for number in range(1, 8)))
    assert [forget_old(store, NOW + 1, limit=3) for _ in range(4)] == [3, 3, 1, 0]
    assert found(store) == []


def test_one_noted_again_is_as_young_as_that(store: Store) -> None:
    add(store, Receipt(1, 1, 1))
    add(store, Receipt(1, 2, 1), now_ms=NOW + 5)
    assert forget_old(store, NOW + 5) == 0
    assert forget_old(store, NOW + 6) == 1


# --- the stores agree ---------------------------------------------------------------------------------------

publishers = st.sampled_from(["p", "q"])
# They do not overlap: only what no receipt tells of yet gets one.
receipts = st.builds(
    lambda place, *rest: Receipt(7 * place + 1, *rest), st.integers(0, 2), st.integers(1, 7), st.integers(1, 99)
)
steps = st.one_of(
    st.tuples(st.just("add_receipts"), publishers, st.lists(receipts, max_size=4), st.integers(0, 9)),
    st.tuples(st.just("forget_receipts"), publishers, st.integers(0, 22)),
    st.tuples(st.just("forget_old_receipts"), st.integers(0, 10), st.just(100)),
)


@settings(max_examples=40, deadline=None)
@given(script=st.lists(steps, max_size=12), first=st.integers(0, 22), count=st.integers(0, 22))
def test_stores_agree_on_receipts(
    side_by_side: Callable[[], AbstractContextManager[list[Store]]], script: list[Any], first: int, count: int
) -> None:
    with side_by_side() as stores:
        for name, *arguments in script:
            outcomes = []
            for store in stores:
                with store.write() as writer:
                    outcomes.append(getattr(writer, name)(*arguments))
            assert outcomes == outcomes[:1] * len(stores)
        reported = [[found(store, first, count, publisher) for publisher in "pq"] for store in stores]
        assert reported == reported[:1] * len(stores)
