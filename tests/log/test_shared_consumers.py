"""The consumers of a shared subscription are listed while they live."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import headwater
from headwater.broker.shared_consumers import consumer_of, next_token
from headwater.errors import UnknownSubscriptionError


def test_consumers_are_listed_while_they_are_open(tmp_path: Path) -> None:
    with headwater.open(tmp_path / "log.db") as log, headwater.open(tmp_path / "log.db") as other:
        assert log.subscribe("alone", ">").info().consumers == []
        first = log.subscribe("work", "jobs.>", mode="shared")
        second = other.subscribe("work", "jobs.>", mode="shared")
        names = log.subscription("work").consumers
        assert len(names) == 2
        assert log.subscription("work").holder is None
        second.close()
        assert len(log.subscription("work").consumers) == 1
        first.close()
        assert log.subscription("work").consumers == []


def test_a_consumer_that_vanished_is_listed_until_its_lease_ends_and_a_living_one_stays(tmp_path: Path) -> None:
    clock = headwater.ManualClock()
    with (
        headwater.open(tmp_path / "log.db", clock=clock, heartbeats=False) as log,
        headwater.open(tmp_path / "log.db", clock=clock, heartbeats=False) as dead,
        log.subscribe("work", "jobs.>", mode="shared"),
    ):
        dead.subscribe("work", "jobs.>", mode="shared")  # which has no heartbeat
        assert len(log.subscription("work").consumers) == 2
        clock.advance(10)
        log._core.heartbeat()  # type: ignore[attr-defined]
        clock.advance(10)
        assert len(log.subscription("work").consumers) == 1
        clock.advance(10)
        assert log.subscription("work").consumers == []


@pytest.mark.parametrize("deleted", ["by a call", "by maintenance"])
def test_nothing_is_left_of_the_list_when_its_subscription_is_deleted(tmp_path: Path, deleted: str) -> None:
    clock = headwater.ManualClock()
    with (
        headwater.open(tmp_path / "log.db", clock=clock, maintenance_interval=None, heartbeats=False) as log,
        log.subscribe("work", "jobs.>", mode="shared", inactive_timeout=5) as left,
    ):
        if deleted == "by a call":
            log.delete_subscription("work")
        else:
            clock.advance(6)
            assert log.run_maintenance().expired_subscriptions == ["work"]
        with pytest.raises(UnknownSubscriptionError):
            left.fetch()
        with log._core.engine.store.read() as reader:  # type: ignore[attr-defined]
            assert reader.leases("consumers of ") == {}


def test_a_consumer_that_waits_learns_at_once_that_its_subscription_is_deleted(tmp_path: Path) -> None:
    with headwater.open(tmp_path / "log.db") as log, log.subscribe("work", "jobs.>", mode="shared") as consumer:
        news = consumer._consumer._waiter.arm()  # type: ignore[attr-defined]
        log.delete_subscription("work")
        assert news.done


@given(st.integers(0, 2**60), st.lists(st.text(min_size=1), min_size=1, max_size=5, unique=True), st.data())
def test_tokens_grow_and_name_their_consumer(fence: int, names: list[str], data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(names))
    token = next_token(fence, name)
    assert token > fence
    assert consumer_of(token, names) in (name, None)
    assert consumer_of(token, [name]) == name
    assert next_token(token, name) > token


def test_two_consumers_of_one_mark_are_not_mistaken_for_each_other() -> None:
    names: dict[int, str] = {}
    for number in range(10_000):
        name = hashlib.sha256(str(number).encode()).hexdigest()
        other = names.setdefault(next_token(0, name), name)
        if other != name:
            break
    assert other != name, "two of so many have the same mark"
    assert consumer_of(next_token(0, name), [name, other]) is None
