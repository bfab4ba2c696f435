"""Budgets of bytes change how much is read at a time, not what comes first or whether it comes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from foreign_client import Serve, connect
from served import ServedFile

import headwater
from headwater import Log


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Log]:
    served = ServedFile(tmp_path / "log.db", maintenance_interval=None, durability="relaxed")
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


async def test_a_batch_of_large_answers_does_not_wait_for_itself(serve: Serve) -> None:
    methods = ["rpc.dead_letters", "rpc.topics", "rpc.subscriptions", "rpc.stats"]
    batch = [{"jsonrpc": "2.0", "id": id, "method": methods[id % 4], "params": {}} for id in range(100)]
    async with serve() as server, connect(server) as client:
        answers = await client.exchange(batch)
        assert sorted(answer["id"] for answer in answers) == list(range(100))
        assert all("result" in answer for answer in answers)


async def test_a_batch_whose_answers_take_too_much_is_reported_so(serve: Serve, tmp_path: Path) -> None:
    with headwater.open(tmp_path / "log.db", durability="relaxed") as log:
        log.publish_many([("a", "x" * 900_000) for _ in range(8)])
        with log.subscribe("s", "a") as subscription:
            while found := subscription.fetch(8):
                for message in found:
                    message.reject("no")
    calls = [{"jsonrpc": "2.0", "id": id, "method": "rpc.dead_letters.get", "params": {"id": id}} for id in range(1, 9)]
    async with serve() as server, connect(server) as client:
        answers = {answer["id"]: answer for answer in await client.exchange(calls)}
        reported = [id for id, answer in answers.items() if "error" in answer]
        assert 0 < len(reported) < 8
        assert {answers[id]["error"]["code"] for id in reported} == {-32005}
        assert "result" in await client.exchange(calls[0])
