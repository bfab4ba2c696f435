"""Forwarding to real servers that stop, die and come back: at the target each message is there once, in order."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from redis_server import RedisServer
from server_process import ServerProcess

import headwater
from headwater.api.forwarder import Forwarder
from headwater.delivery.circuit import BreakerPolicy

PATIENCE_S = 60.0
QUICK: Any = {"wait": 0, "backoff": 0.05, "backoff_max": 0.2, "breaker": BreakerPolicy(open_ms=200)}


@pytest.fixture
def source(tmp_path: Path) -> Iterator[headwater.Log]:
    with headwater.open(tmp_path / "source.db", maintenance_interval=None) as log:
        yield log


def publish(log: headwater.Log, first: int, count: int) -> None:
    log.publish_many([("orders.new", number) for number in range(first, first + count)])


def test_another_headwater_that_is_killed_and_started_again_gets_everything_once(
    source: headwater.Log, tmp_path: Path
) -> None:
    with ServerProcess(tmp_path / "target.db") as server:
        for round, reconnect in enumerate(["exponential", "none"]):  # the second client gives up, and is replaced
            transport = headwater.open_transport(server.url, timeout=2, reconnect=reconnect)
            forwarder = Forwarder(source, transport, id="f", batch=20, **QUICK)
            forwarder.start()
            publish(source, round * 100, 50)
            server.kill() if round % 2 else server.stop()  # perhaps in the middle of a batch
            publish(source, round * 100 + 50, 50)
            server.start()
            assert forwarder.drain(PATIENCE_S)
            forwarder.stop()
            transport.close()
        with headwater.open(server.url) as target, target.subscribe("check", ">") as subscription:
            assert [message.data for message in subscription.fetch(1_000)] == list(range(200))
    assert source.dead_letters.list() == []
    assert source.subscription("f").redelivered == 0


def test_a_redis_that_stops_and_comes_back_gets_everything_once(source: headwater.Log) -> None:
    with RedisServer() as server:
        failed = threading.Event()
        transport = headwater.open_transport(f"{server.url}?stream=orders")
        forwarder = Forwarder(source, transport, id="f", batch=20, on_error=lambda _: failed.set(), **QUICK)
        publish(source, 0, 50)
        forwarder.start()
        assert forwarder.drain(PATIENCE_S)
        server.stop()
        publish(source, 50, 50)
        assert failed.wait(PATIENCE_S)
        assert forwarder.status().forwarded == 50
        server.start()
        assert forwarder.drain(PATIENCE_S)
        forwarder.stop()
        transport.close()
        with server.client() as client:
            assert client.xlen("orders") == 100
    assert source.dead_letters.list() == []


def test_two_targets_are_fed_apart_and_one_that_is_away_does_not_hold_the_other_back(
    source: headwater.Log, tmp_path: Path
) -> None:
    away = headwater.open_transport("redis://127.0.0.1:1/0")
    there = headwater.open_transport(tmp_path / "copy.jsonl")
    held_up, goes_on = Forwarder(source, away, id="away", **QUICK), Forwarder(source, there, id="there", **QUICK)
    publish(source, 0, 10)
    held_up.start()
    goes_on.start()
    assert goes_on.drain(PATIENCE_S)
    assert len((tmp_path / "copy.jsonl").read_text().splitlines()) == 10
    for forwarder in (held_up, goes_on):
        forwarder.stop()
    assert (source.subscription("away").lag, source.subscription("there").lag) == (10, 0)
    away.close()
    there.close()
