"""What every store promises about how long deliveries took."""

from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.ports.records import SubscriptionRecord, SubscriptionSpec, Timing
from headwater.ports.store import Store, Writer

HOUR_MS = 3_600_000


@pytest.fixture
def store(store: Store) -> Store:
    """Each with two subscriptions."""
    create(store)
    return store


def create(store: Store) -> None:
    with store.write() as writer:
        for id in ("s", "t"):
            writer.save_subscription(SubscriptionRecord(id, SubscriptionSpec(">"), 0, 0))


def add(store: Store, *timings: Timing) -> None:
    with store.write() as writer:
        writer.add_timings(timings)


def found(store: Store) -> list[Timing]:
    with store.read() as reader:
        return reader.timings()


def test_none_yet(store: Store) -> None:
    assert found(store) == []
    add(store)
    assert found(store) == []


def test_counts_add_up(store: Store) -> None:
    add(store, Timing("s", 0, "deliver", 3, 10), Timing("s", 0, "ack", 3, 1))
    add(store, Timing("s", 0, "deliver", 3, 5), Timing("s", 0, "deliver", 4, 2**40))
    assert found(store) == [
        Timing("s", 0, "ack", 3, 1),
        Timing("s", 0, "deliver", 3, 15),
        Timing("s", 0, "deliver", 4, 2**40),
    ]


def test_they_come_in_order(store: Store) -> None:
    given = [
        Timing(id, hour * HOUR_MS, stage, bucket, 1)
        for id in ("s", "t")
        for hour in (1, 2, 10)
        for stage in ("ack", "deliver")
        for bucket in (0, 2, 10)
    ]
    add(store, *reversed(given))
    assert found(store) == given


def test_only_hours_from_one_on(store: Store) -> None:
    add(store, *(Timing(id, hour * HOUR_MS, "ack", 1, 1) for id in ("s", "t") for hour in range(4)))
    with store.read() as reader:
        found = [(timing.subscription, timing.hour_ms // HOUR_MS) for timing in reader.timings(2 * HOUR_MS)]
    assert found == [("s", 2), ("s", 3), ("t", 2), ("t", 3)]


def test_they_go_with_their_subscription(store: Store) -> None:
    add(store, Timing("s", 0, "ack", 3, 1), Timing("t", 0, "ack", 3, 1))
    with store.write() as writer:
        writer.delete_subscription("s")
    assert found(store) == [Timing("t", 0, "ack", 3, 1)]


def test_one_that_counted_until_its_subscription_was_deleted_comes_too_late(store: Store) -> None:
    with store.write() as writer:
        writer.delete_subscription("s")
    add(store, Timing("s", 0, "ack", 3, 1), Timing("t", 0, "ack", 3, 1))
    assert found(store) == [Timing("t", 0, "ack", 3, 1)]


def test_old_hours_go_so_many_at_a_time(store: Store) -> None:
    add(store, *(Timing("s", hour * HOUR_MS, "ack", 1, 1) for hour in range(5)))
    with store.write() as writer:
        assert writer.forget_old_timings(3 * HOUR_MS, 2) == 2
        assert writer.forget_old_timings(3 * HOUR_MS, 2) == 1
        assert writer.forget_old_timings(3 * HOUR_MS, 2) == 0
    assert [timing.hour_ms for timing in found(store)] == [3 * HOUR_MS, 4 * HOUR_MS]


timings = st.builds(
    Timing,
    st.sampled_from(["s", "t", "gone"]),
    st.integers(0, 3).map(lambda hour: hour * HOUR_MS),
    st.sampled_from(["deliver", "ack"]),
    st.integers(0, 3),
    st.integers(1, 9),
)
steps = st.one_of(
    st.lists(timings, max_size=6).map(lambda given: lambda writer: writer.add_timings(given)),
    st.integers(0, 4).map(lambda hour: lambda writer: writer.forget_old_timings(hour * HOUR_MS, 100)),
    st.just(lambda writer: writer.delete_subscription("t")),
)


@settings(max_examples=30, deadline=None)
@given(script=st.lists(steps, max_size=8))
def test_stores_agree_on_timings(
    side_by_side: Callable[[], AbstractContextManager[list[Store]]], script: list[Callable[[Writer], object]]
) -> None:
    with side_by_side() as stores:
        reported = []
        for each in stores:
            create(each)
            for step in script:
                with each.write() as writer:
                    step(writer)
            reported.append(found(each))
    assert reported == reported[:1] * len(stores)
