"""The consumers of a shared subscription are listed while they live."""

from __future__ import annotations

import hashlib
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

import headwater
from headwater.broker.shared_consumers import consumer_of, next_token


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
