"""Scrapes, probes and statistics: many at once, of a log with many subscriptions that are far behind."""

from __future__ import annotations

import contextlib
import itertools
import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from attacked import BESIDE_OTHERS, PATIENCE_S, Attacked, call

import headwater
from headwater.delivery.window import WindowState
from headwater.ports.records import DeadLetter, SubscriptionRecord, SubscriptionSpec
from headwater.stores.sqlite import SqliteStore

SUBSCRIPTIONS = 3_000
MESSAGES = 50_000
SCRAPERS = 6
SCRAPE_S_MAX = 2.0 * BESIDE_OTHERS
SHUTDOWN_S = 1


@pytest.fixture
def crowded(tmp_path: Path) -> Iterator[Attacked]:
    """3,000 subscriptions, each with a pattern and a place of its own, 50,000 messages behind."""
    with headwater.open(tmp_path / "log.db", heartbeats=False, maintenance_interval=None) as log:
        log.publish_many([(f"a.b{number % 97}.c", {"text": "x" * 100}) for number in range(MESSAGES)])
    store = SqliteStore(tmp_path / "log.db")
    with store.write() as writer:
        for number in range(SUBSCRIPTIONS):
            spec = SubscriptionSpec(f"*.b{number % 500}.c", entities={"from": f"/x{number}/"} if number % 2 else {})
            writer.save_subscription(
                SubscriptionRecord(f"s{number:04}", spec, 0, 0, WindowState(number % 1_000, number % 1_000))
            )
    store.close()
    with Attacked(tmp_path, shutdown_timeout=SHUTDOWN_S) as server:
        yield server


def get(server: Attacked, path: str, token: str | None = None) -> tuple[int, bytes]:
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    request = urllib.request.Request(f"http://127.0.0.1:{server.port}{path}", headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as exc:
        return exc.code, exc.read()


@contextlib.contextmanager
def again_and_again(attack: Callable[[], object], count: int) -> Iterator[None]:
    """On so many threads, for as long as the block lasts."""
    stop = threading.Event()

    def run() -> None:
        while not stop.is_set():
            attack()

    threads = [threading.Thread(target=run) for _ in range(count)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def test_scrapes_of_a_crowded_log(crowded: Attacked) -> None:
    admin = crowded.token("admin", manage=[">"], admin=True)
    began = time.monotonic()
    status, text = get(crowded, "/metrics", admin)
    cold_s = time.monotonic() - began
    assert status == 200
    assert b'headwater_subscription_lag{subscription="s0000"}' in text
    assert cold_s < SCRAPE_S_MAX, f"a cold scrape took {cold_s:.1f} s"
    with (
        crowded.victim() as victim,
        again_and_again(lambda: get(crowded, "/metrics", admin), SCRAPERS),
        crowded.connect(admin) as other,
    ):
        for id, method in enumerate(["rpc.stats", "rpc.subscriptions", "rpc.stats"], 1):
            began = time.monotonic()
            assert len(str(call(other, method, id=id)["result"])) > SUBSCRIPTIONS
            assert time.monotonic() - began < 3 * SCRAPE_S_MAX
    crowded.assert_unharmed(victim, attack=f"{SCRAPERS} scrapers, {SUBSCRIPTIONS} subscriptions (cold {cold_s:.2f} s)")


@pytest.mark.parametrize("path", ["/healthz", "/readyz", "/metrics"])
def test_probes_without_end(tmp_path: Path, path: str) -> None:
    """By strangers, each over a connection of its own."""
    with Attacked(tmp_path) as server:
        with server.victim() as victim, again_and_again(lambda: get(server, path), 8):
            pass
        server.assert_unharmed(victim, attack=f"a flood of {path}")


def test_statistics_load_no_payloads(tmp_path: Path) -> None:
    """350 MB of dead letters, and 350 MB of messages that a subscription has yet to look at."""
    text = "x" * 1_000_000
    with headwater.open(tmp_path / "log.db", heartbeats=False, maintenance_interval=None, durability="relaxed") as log:
        for _ in range(14):
            log.publish_many([("big", text)] * 25)
        message = log.subscribe("first", "big").fetch(1)[0]._claimed.message
    store = SqliteStore(tmp_path / "log.db", durability="relaxed")
    with store.write() as writer:
        for _ in range(350):
            writer.save_dead_letters([DeadLetter(0, "s", message, "rejected", 1, 0, "an error")])
        for number in range(4):
            spec = SubscriptionSpec("big", entities={"from": f"/x{number}/"} if number % 2 else {})
            writer.save_subscription(SubscriptionRecord(f"s{number}", spec, 0, 0))
    store.close()
    with Attacked(tmp_path) as server:
        admin = server.token("admin", manage=[">"], admin=True)
        with server.victim() as victim, server.connect(admin) as other:
            status, text_ = get(server, "/metrics", admin)
            assert status == 200
            assert b'headwater_dead_letters{reason="rejected"} 350.0' in text_
            assert call(other, "rpc.dead_letters.stats", id=1)["result"]["by_topic"] == {"big": 350}
            assert call(other, "rpc.stats", id=2)["result"]["subscriptions"]
        server.assert_unharmed(victim, rss_mb=200, attack="statistics of 700 MB")


def test_a_stop_while_statistics_are_counted(crowded: Attacked) -> None:
    """SIGTERM waits neither for counts that run nor for `quick_check`, longer than the shutdown timeout."""
    with crowded.connect(crowded.token("admin", manage=[">"], admin=True)) as client:
        for id, method in enumerate(["rpc.subscriptions", "rpc.stats", "rpc.health", "rpc.stats"], 1):
            client.send(json.dumps({"jsonrpc": "2.0", "id": id, "method": method}))
        client.send(json.dumps({"jsonrpc": "2.0", "id": 9, "method": "rpc.last_seq"}))
        assert json.loads(client.recv(PATIENCE_S))["id"] == 9  # the others have begun, and are not done
        took_s = crowded.stop()
    assert took_s < SHUTDOWN_S + 2, f"the server took {took_s:.1f} s to end"


TOPICS = 40_000


@pytest.mark.parametrize(
    ("method", "params", "in_flight"),
    [("rpc.topics", {}, 2), ("rpc.stats", {}, 2), ("rpc.topic_max_seq", {"topic": "mine.topic-1"}, 200)],
)
def test_a_reader_of_many_topics(tmp_path: Path, method: str, params: dict[str, str], in_flight: int) -> None:
    """By 6 connections with one token, each with so many calls that have no answer."""
    with headwater.open(tmp_path / "log.db", heartbeats=False, maintenance_interval=None) as log:
        log.publish_many([(f"mine.topic-{number}", 1) for number in range(TOPICS)])
    with Attacked(tmp_path) as server, contextlib.ExitStack() as connections:
        admin = server.token("admin", manage=[">"], admin=True)
        attacker = server.token(read=["mine.>"])
        attackers = [connections.enter_context(server.connect(attacker, close_timeout=0.1)) for _ in range(6)]
        ask = json.dumps({"jsonrpc": "2.0", "id": 1, "method": method, "params": params})
        for each in attackers:
            for _ in range(in_flight):
                each.send(ask)
        in_turn = itertools.cycle(attackers)

        def one_more() -> None:
            each = next(in_turn)
            each.recv(PATIENCE_S)
            each.send(ask)

        with server.victim() as victim, again_and_again(one_more, 1):
            began = time.monotonic()
            assert get(server, "/metrics", admin)[0] == 200
            assert time.monotonic() - began < SCRAPE_S_MAX
        server.assert_unharmed(victim, attack=f"{method} of {TOPICS:,} topics")
