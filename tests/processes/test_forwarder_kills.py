"""Forwarders that are killed in the middle of it, and two of the same name."""

from __future__ import annotations

import itertools
import json
import random
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from eventually import eventually
from process_child import PATIENCE_S, Child
from process_roles import forward

import headwater

KILLS = 4
KILLS_MAX = 20  # should none have hit a batch
Spawn = Callable[..., Child]


@pytest.fixture
def dice(pytestconfig: pytest.Config) -> random.Random:
    return random.Random(pytestconfig.getoption("--dice"))


@pytest.mark.parametrize("kind", ["log", "file"])
def test_whatever_is_killed_when_everything_arrives_and_where_ids_are_known_once(
    log: headwater.Log, path: str, tmp_path: Path, spawn: Spawn, dice: random.Random, kind: str
) -> None:
    copy = tmp_path / ("copy.db" if kind == "log" else "copy.jsonl")
    target = f"headwater:{copy}" if kind == "log" else str(copy)
    over, published = threading.Event(), itertools.count()

    def publish() -> None:
        while not over.wait(0.005):
            log.publish_many([("a", next(published)) for _ in range(20)])

    publisher = threading.Thread(target=publish)
    publisher.start()
    try:
        for kills in range(KILLS_MAX):
            if kills >= KILLS and log.subscription("f").redelivered:
                break
            acked = _acked(log)
            child = spawn(forward, path, target)
            child.hear()
            eventually(lambda: _acked(log) > acked, True)  # noqa: B023
            over.wait(dice.uniform(0.0, 0.05))
            child.kill()
    finally:
        over.set()
        publisher.join(PATIENCE_S)
    child = spawn(forward, path, target)
    child.hear()
    _until_drained(log)
    child.say("end")
    child.hear()
    child.end()
    arrived = _arrived(copy, kind)
    count = next(published)
    assert sorted(set(arrived)) == list(range(count)), "nothing is lost"
    if kind == "log":
        assert len(arrived) == count, "nothing is there twice"
    assert log.dead_letters.list() == []
    assert log.subscription("f").redelivered > 0, "or no kill has hit a batch"


def test_of_two_with_the_same_name_one_forwards_and_the_other_takes_over_when_it_dies(
    log: headwater.Log, path: str, tmp_path: Path, spawn: Spawn
) -> None:
    target = f"headwater:{tmp_path / 'copy.db'}"
    first = spawn(forward, path, target)
    first.hear()
    eventually(lambda: first.hears_of("state"), "running")
    second = spawn(forward, path, target)
    second.hear()
    eventually(lambda: second.hears_of("state"), "waiting")
    log.publish("a", 1)
    _until_drained(log)
    assert first.hears_of("state") == "running"
    first.kill()
    log.publish("a", 2)
    eventually(lambda: second.hears_of("state"), "running")
    _until_drained(log)
    assert _arrived(tmp_path / "copy.db", "log") == [1, 2]
    assert second.hears_of("end") == 1, "the first one's was not repeated"


def _arrived(copy: Path, kind: str) -> list[int]:
    if kind == "file":
        return [json.loads(line)["data"] for line in copy.read_text().splitlines()]
    with headwater.open(copy, maintenance_interval=None) as target:
        return [message.data for message in target.subscribe("check", ">", mode="ephemeral", start="first").messages()]


def _acked(log: headwater.Log) -> int:
    return sum(info.acked for info in log.subscriptions() if info.id == "f")


def _until_drained(log: headwater.Log) -> None:
    eventually(lambda: [info.lag for info in log.subscriptions() if info.id == "f"], [0])
