"""From the lake back into a log, once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from lake_world import World

import headwater
from headwater.errors import InvalidOption
from headwater.pipeline.jobs.replay import chosen_messages, replay


def test_messages_come_again_in_order_and_only_once(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headwater.pipeline.jobs.replay.BATCH_MESSAGES", 3)
    with world.log() as log:
        log.publish_many([(f"orders.{n % 2}", {"n": n}) for n in range(10)])
        log.publish("orders.0", {"n": 99}, type="order", from_="shop", headers={"k": "v"}, priority=3, ttl=1)
    world.insert_by_hand("orders.0", "{not json")
    world.take_in()
    slept: list[float] = []
    with headwater.open(world.folder / "target.db", housekeeping=None) as target:

        def failing(messages: Sequence[dict[str, Any]]) -> Sequence[int]:
            target.publish_many(messages)
            raise OSError("killed after the publish, before it was noted")

        where = "topic = 'orders.0'"
        with pytest.raises(OSError, match="killed"):
            replay(world.spark, world.lake, where, "r1", failing)
        done = replay(world.spark, world.lake, where, "r1", target.publish_many, rate=1_000, sleep=slept.append)
        assert (done.published, done.refused) == (6, 1)
        again = replay(world.spark, world.lake, where, "r1", target.publish_many)
        assert again.published == 0
        with target.subscribe("all", ">") as all_of_them:
            found = list(all_of_them.messages())
    assert [message.data["n"] for message in found] == [0, 2, 4, 6, 8, 99]
    last = found[-1]
    assert (last.type, last.from_, last.headers, last.priority) == ("order", "shop", {"k": "v", "replayed_seq": 11}, 3)
    assert last.expires_at is None
    assert slept


def test_a_bad_condition_is_told(world: World) -> None:
    for where in ("topic = ", "colour = 'red'"):
        with pytest.raises(InvalidOption, match="no condition"):
            chosen_messages(world.spark, world.lake, where)
