"""From the lake back into a log, once."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from lake_world import make_lake
from pyspark.sql import SparkSession
from small_logs import put

import headwater
from headwater.errors import ConflictError, InvalidOptionError
from headwater.pipeline import replay as replaying
from headwater.pipeline.lake import REPLAYS, Lake
from headwater.pipeline.replay import chosen_messages, replay, replayed_to

WHERE = "topic = 'orders.0'"


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    """Of ten orders on two topics, one with everything, and one that is no JSON, inserted by hand."""
    path = tmp_path / "events.db"
    with headwater.open(path, maintenance_interval=None) as log:
        log.publish_many([(f"orders.{n % 2}", {"n": n}) for n in range(10)])
        log.publish("orders.0", {"n": 99}, type="order", from_="shop", headers={"k": "v"}, priority=3, ttl=1)
    put(str(path), [{"topic": "orders.0", "data": "{not json", "checked": 2}])
    return make_lake(path, tmp_path / "lake")


def test_messages_come_again_in_order_and_only_once(
    spark: SparkSession, lake: Lake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replaying, "BATCH_MESSAGES", 3)
    slept: list[float] = []
    with headwater.open(tmp_path / "target.db", maintenance_interval=None) as target:

        def failing(messages: Sequence[dict[str, Any]]) -> Sequence[int]:
            target.publish_many(messages)
            raise OSError("killed after the publish, before its commit")

        with pytest.raises(OSError, match="killed"):
            replay(spark, lake, WHERE, "r1", failing)
        assert replayed_to(lake, "r1") == 0
        done = replay(spark, lake, WHERE, "r1", target.publish_many, rate=1_000, sleep=slept.append)
        assert (done.published, done.refused, done.through_seq) == (6, 1, 12)
        assert replayed_to(lake, "r1") == 12
        assert replay(spark, lake, WHERE, "r1", target.publish_many).published == 0
        with target.subscribe("all", ">") as all_of_them:
            found = list(all_of_them.messages())
    assert [message.data["n"] for message in found] == [0, 2, 4, 6, 8, 99]
    last = found[-1]
    assert (last.type, last.from_, last.headers, last.priority) == ("order", "shop", {"k": "v", "replayed_seq": 11}, 3)
    assert last.expires_at is None
    assert slept
    assert lake.table(REPLAYS).rows == 0


def test_positions_of_two_replays_do_not_disturb_each_other(lake: Lake) -> None:
    replaying._move(lake, "r1", 0, 3)
    replaying._move(lake, "r2", 0, 5)
    replaying._move(lake, "r1", 3, 7)
    assert (replayed_to(lake, "r1"), replayed_to(lake, "r2")) == (7, 5)
    with pytest.raises(ConflictError, match="another process runs this replay"):
        replaying._move(lake, "r1", 3, 9)
    assert replayed_to(lake, "r1") == 7


def test_what_came_into_the_lake_since_a_replay_began_is_not_part_of_it(
    spark: SparkSession, lake: Lake, tmp_path: Path
) -> None:
    """It may be what the replay itself published."""
    taken: list[dict[str, Any]] = []

    def publish(messages: Sequence[dict[str, Any]]) -> Sequence[int]:
        taken.extend(messages)
        return []

    replay(spark, lake, WHERE, "r1", publish)
    with headwater.open(tmp_path / "events.db", maintenance_interval=None) as log:
        log.publish("orders.0", {"n": 100})
    make_lake(tmp_path / "events.db", tmp_path / "lake")
    assert replay(spark, lake, WHERE, "r1", publish).published == 0
    assert len(taken) == 6


@pytest.mark.parametrize("where", ["topic = ", "colour = 'red'"])
def test_a_bad_condition_is_an_error_of_the_user(spark: SparkSession, lake: Lake, where: str) -> None:
    with pytest.raises(InvalidOptionError, match="no condition"):
        chosen_messages(spark, lake, where)
