"""Reads that look at much: asked for by the hundred, given up, and asked for again."""

from __future__ import annotations

import contextlib
import json
import shutil
from pathlib import Path

import pytest
from attacked import Attacked, call
from test_scrapes import again_and_again

import headwater
from headwater.ports.records import SubscriptionRecord, SubscriptionSpec
from headwater.stores.sqlite import SqliteStore

MESSAGES = 400_000
REQUEST_S = 0.2  # less than a count takes
READER = {"read": ["a.>"], "consume": ["*"]}


@pytest.fixture(scope="module")
def large_log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Subscriptions whose count walks the whole log in Python, because of their regexes."""
    path = tmp_path_factory.mktemp("large") / "log.db"
    with headwater.open(path, heartbeats=False, maintenance_interval=None, durability="relaxed") as log:
        for _ in range(MESSAGES // 100_000):
            log.publish_many([("a.b", 1)] * 100_000)
    store = SqliteStore(path)
    with store.write() as writer:
        for number in range(100):
            spec = SubscriptionSpec("a.>", entities={"from": f"/x{number}/"})
            writer.save_subscription(SubscriptionRecord(f"s{number}", spec, 0, 0))
    store.close()
    return path


@pytest.fixture
def large(large_log: Path, tmp_path: Path) -> Path:
    shutil.copy(large_log, tmp_path / "log.db")
    return tmp_path


def questions(count: int) -> str:
    asked = [
        {"jsonrpc": "2.0", "id": number, "method": "rpc.subscription", "params": {"subscription_id": f"s{number}"}}
        for number in range(count)
    ]
    return json.dumps(asked)


def test_counts_asked_for_and_given_up(large: Path) -> None:
    """Clients that ask a hundred times for a second's work and leave at once: nothing of it goes on."""
    with Attacked(large) as server:
        token = server.token(**READER)

        def ask_and_leave() -> None:
            with contextlib.suppress(OSError), server.connect(token) as client:
                client.send(questions(50))
                client.ping().wait(0.2)

        with server.victim() as victim, again_and_again(ask_and_leave, 4):
            pass
        server.assert_unharmed(victim, attack="counts asked for and given up")
        with server.connect(token) as client:  # the lane is free again
            assert call(client, "rpc.subscription", {"subscription_id": "s1"})["result"]["lag"] == 0
        assert server.stop() < 5


def test_counts_whose_time_is_over(large: Path) -> None:
    """With a request timeout shorter than a count: each is interrupted, and the next one is not later for it."""
    with Attacked(large, limits_request_timeout=REQUEST_S) as server:
        token = server.token(**READER)
        with server.victim() as victim, server.connect(token) as client:
            client.send(questions(20))
            answers = json.loads(client.recv(30))
        kinds = {answer["error"]["data"]["kind"] for answer in answers if "error" in answer}
        assert kinds == {"RequestTimeoutError"}, answers
        server.assert_unharmed(victim, attack="counts whose time is over")
