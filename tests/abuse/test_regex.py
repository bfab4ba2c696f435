"""A regex that a client gives must cost its sender, not the others: linear time, and no way to stop the server again
after a restart."""

from __future__ import annotations

import time
import urllib.request
from pathlib import Path

from attacked import Attacked, call

import headwater

SLOW = "(a+)+$"  # exponential for an engine that backtracks
SENDER = "a" * 64 + "b"


def test_a_regex_in_a_filter(tmp_path: Path) -> None:
    with Attacked(tmp_path) as server:
        token = server.token(publish=["mine"], read=["mine"], consume=["*"])
        with server.victim() as victim, server.connect(token) as attacker:
            for id in range(10):
                subscribe = {
                    "subscription_id": f"slow-{id}",
                    "topic": "mine",
                    "from": [f"/{SLOW}/", f"/(a?){{99}}b{id}/"],
                }
                assert call(attacker, "rpc.subscribe.persistent", subscribe)["result"]
            for _ in range(20):
                call(attacker, "rpc.publish", {"topic": "mine", "data": 1, "from": SENDER})
            _scrape(server)
        server.assert_unharmed(victim, attack="regex in a filter")
        server.stop()
        server.start()  # the subscriptions are stored
        assert _scrape(server) < 2
        server.stop()


def test_a_regex_over_dead_letters(tmp_path: Path) -> None:
    with headwater.open(tmp_path / "log.db") as log:
        died = log.subscribe("died", "mine")
        log.publish_many([("mine", n) for n in range(200)])
        for message in died.fetch(200):
            message.reject("a" * 1_000 + "b")
    with Attacked(tmp_path) as server:
        token = server.token(manage=[">"], admin=True)
        with server.victim() as victim, server.connect(token) as attacker:
            for id, regex in enumerate([SLOW, "(((a?){20}){20})c", "(a|aa)+$"] * 2, 1):
                assert "result" in call(attacker, "rpc.dead_letters", {"error": regex, "limit": 1_000}, id)
        server.assert_unharmed(victim, attack="regex over dead letters")


def _scrape(server: Attacked) -> float:
    began = time.monotonic()
    bearer = {"Authorization": f"Bearer {server.token('prometheus', admin=True)}"}
    asked = urllib.request.Request(f"http://127.0.0.1:{server.port}/metrics", headers=bearer)
    with urllib.request.urlopen(asked, timeout=30) as answer:
        assert b"slow-3" in answer.read()
    return time.monotonic() - began
