"""Budgets of bytes change how much is read at a time, not what comes first or whether it comes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from served import ServedFile

from headwater import Log


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Log]:
    served = ServedFile(tmp_path / "log.db", housekeeping=None, durability="relaxed")
    with served.open() as opened:
        yield opened
    served.stop()


def test_the_most_urgent_of_a_large_backlog_comes_first(log: Log) -> None:
    for part in range(12):
        log.publish_many([("a", "x" * 2_000, {"priority": 9 * ((part, n) == (0, 100))}) for n in range(500)])
    with log.subscribe("s", "a", mode="shared", order="priority") as subscription:
        [first] = subscription.fetch(1)
        assert first.priority == 9


def test_a_first_fetch_brings_all_that_is_asked_for(log: Log) -> None:
    log.publish_many([("a", {"n": n, "text": "x" * 300}) for n in range(1_000)])
    with log.subscribe("s", "a") as subscription:
        assert len(subscription.fetch(1_000)) == 1_000


def test_an_export_by_an_iterator_of_ids_is_whole(log: Log) -> None:
    log.publish_many([("a", "x" * 500_000) for _ in range(5)])
    with log.subscribe("s", "a") as subscription:
        rejected = 0
        while rejected < 5:
            for message in subscription.fetch(5):
                message.reject("no")
                rejected += 1
    ids = [letter.id for letter in log.dead_letters.list()]
    assert len(list(log.dead_letters.export(ids=iter(ids)))) == 5
