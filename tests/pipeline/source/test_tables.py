"""The tables beside the messages, as the log says them."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pytest

import headwater
from headwater import ManualClock
from headwater.pipeline.schema import TABLE_SCHEMAS, arrow_schema
from headwater.pipeline.source import tables
from headwater.pipeline.source.tables import read_table

NOW = datetime(2023, 11, 14, 22, 13, 20, tzinfo=UTC)
BESIDE = [table for table in TABLE_SCHEMAS if table != "messages"]


@pytest.fixture
def path(any_log: str) -> str:
    """A log in which something has happened in every table."""
    path = any_log
    clock = ManualClock(1_700_000_000_000)
    with headwater.open(path, housekeeping=None, durability="relaxed", clock=clock) as log:
        worker = log.subscribe("worker", "orders.>", mode="shared")
        log.subscribe("idle", "orders.>").close()
        log.publish_many([("orders.new", n) for n in range(10)])
        first, second, third, *_ = worker.fetch(4)
        worker.reject(first, "broken")
        worker.nack(second, delay=3600)
        worker.ack(third)
        log.retain("orders.>", max_count=6)
        log.housekeep()
    return path


def rows(path: str, table: str) -> list[dict[str, Any]]:
    return [row for batch in read_table(path, table) for row in batch.to_pylist()]


@pytest.mark.parametrize("table", BESIDE)
def test_every_table_has_its_schema(path: str, table: str) -> None:
    batches = list(read_table(path, table))
    assert all(batch.schema == arrow_schema(TABLE_SCHEMAS[table]) for batch in batches)
    if table != "timings":
        assert sum(batch.num_rows for batch in batches) > 0


def test_dead_letters(path: str) -> None:
    (letter,) = rows(path, "dead_letters")
    assert (letter["subscription"], letter["seq"], letter["topic"]) == ("worker", 1, "orders.new")
    assert letter["error"] == "broken"
    assert (letter["died_at"], letter["redriving"], letter["attempts"]) == (NOW, False, 1)
    assert '"orders.new"' in letter["message"]


def test_subscriptions_with_lag(path: str) -> None:
    found = {row["id"]: row for row in rows(path, "subscriptions")}
    assert set(found) == {"idle", "worker"}
    assert (found["idle"]["lag"], found["idle"]["gaps"], found["idle"]["mode"]) == (7, 3, "exclusive"), (
        "one is in flight and was spared"
    )
    assert found["worker"]["created_at"] == NOW
    assert found["worker"]["observed_at"] > NOW


def test_what_is_in_flight_or_waiting(path: str) -> None:
    found = rows(path, "deliveries")
    assert {row["subscription"] for row in found} == {"worker"}
    assert all(row["due_at"] > datetime(1971, 1, 1, tzinfo=UTC) for row in found)


def test_gaps_retention_and_topics(path: str) -> None:
    assert [(gap["subscription"], gap["told"], gap["at"]) for gap in rows(path, "gaps")][:1] == [("idle", False, NOW)]
    (policy,) = rows(path, "retention")
    assert (policy["pattern"], policy["max_count"], policy["max_age_ms"], policy["keep_unacked"]) == (
        "orders.>",
        6,
        None,
        False,
    )
    (topic,) = rows(path, "topics")
    assert (topic["topic"], topic["count"], topic["last_seq"], topic["last_published_at"]) == ("orders.new", 7, 10, NOW)


def test_a_topic_that_is_not_utf8_is_counted_too(log_path: str, put: Callable[..., None]) -> None:
    put(log_path, [{"topic": b"bad.\xff", "data": "12", "checked": 2}, {"topic": "good", "data": "1"}])
    assert [(row["topic"], row["count"], row["bytes"]) for row in rows(log_path, "topics")] == [
        ("bad.\ufffd", 1, 2),
        ("good", 1, 1),
    ]


@pytest.mark.parametrize("page", [1, 2, 3, 100])
def test_a_long_table_comes_page_by_page(any_log: str, monkeypatch: pytest.MonkeyPatch, page: int) -> None:
    with headwater.open(any_log, housekeeping=None, durability="relaxed") as log:
        log.publish_many([("a", n) for n in range(5)])
        for name in ("one", "two"):
            subscription = log.subscribe(name, "a", mode="shared", start="first")
            subscription.fetch(5)
    monkeypatch.setattr(tables, "PAGE_ROWS", page)
    assert [(row["subscription"], row["seq"]) for row in rows(any_log, "deliveries")] == [
        (name, seq) for name in ("one", "two") for seq in range(1, 6)
    ]
