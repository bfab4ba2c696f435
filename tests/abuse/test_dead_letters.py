"""Dead letters are looked at, taken out and brought back in pages of bounded size, whatever is in them."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from attacked import Attacked, call

import headwater

LARGE = "x" * 1_000_000


def _dead_letter(path: Path, count: int, data: Any) -> None:
    """Expired messages, because they are dead-lettered a page at a time."""
    with headwater.open(path / "log.db", durability="relaxed") as log:
        died = log.subscribe("died", "mine")
        for _ in range(0, count, 50):
            log.publish_many([("mine", data, {"ttl": 0})] * min(50, count))
            died.fetch(50)


def test_twenty_exports_at_once(tmp_path: Path) -> None:
    _dead_letter(tmp_path, 20, LARGE)
    with Attacked(tmp_path) as server:
        token = server.token(manage=[">"], admin=True)

        def export(_: int) -> int:
            lines = after = 0
            with server.connect(token) as attacker:
                while True:
                    page = call(attacker, "rpc.dead_letters.export", {"after": after})["result"]
                    lines += len(page["lines"])
                    after = page.get("next")
                    if after is None:
                        return lines

        with server.victim() as victim, ThreadPoolExecutor(20) as attackers:
            assert [*attackers.map(export, range(20))] == [20] * 20
        server.assert_unharmed(victim, attack="20 exports of 20 MB at once")


def test_lists_of_large_letters(tmp_path: Path) -> None:
    _dead_letter(tmp_path, 20, LARGE)
    with Attacked(tmp_path) as server:
        token = server.token(manage=[">"], admin=True)

        def look(_: int) -> int:
            with server.connect(token) as attacker:
                return len(call(attacker, "rpc.dead_letters", {"limit": 1_000})["result"])

        with server.victim() as victim, ThreadPoolExecutor(20) as attackers:
            assert all(0 < found < 20 for found in attackers.map(look, range(20)))
            with headwater.open(server.url, token=token) as log:
                assert len(log.dead_letters.list(limit=20)) == 20
                assert sum(1 for _ in log.dead_letters.export()) == 20
        server.assert_unharmed(victim, attack="20 lists of large dead letters")


def test_a_reason_of_megabytes(tmp_path: Path) -> None:
    with Attacked(tmp_path) as server:
        token = server.token(publish=["mine"], read=["mine"], consume=["*"], manage=[">"], admin=True)
        with server.victim() as victim, server.connect(token) as attacker:
            asked = {"subscription_id": "died", "topic": "mine", "deliver": "fetch"}
            assert call(attacker, "rpc.subscribe.persistent", asked)["result"]
            for n in range(1, 21):
                seq = call(attacker, "rpc.publish", {"topic": "mine", "data": n}, n)["result"]["sequence_id"]
                call(attacker, "rpc.fetch", {"subscription_id": "died"})
                reported = dict.fromkeys(("reason", "stack", "handler"), "x" * 1000000)
                call(attacker, "rpc.reject", {"subscription_id": "died", "sequence_id": seq, **reported})
            found = call(attacker, "rpc.dead_letters", {"limit": 1_000})["result"]
            assert len(found) == 20
            assert len(json.dumps(found)) < 20 * 20_000
        server.assert_unharmed(victim, attack="reasons of megabytes")


def test_redrive_and_purge_of_many(tmp_path: Path) -> None:
    _dead_letter(tmp_path, 10_000, "x" * 1_000)
    with Attacked(tmp_path) as server:
        token = server.token(publish=[">"], read=[">"], consume=["*"], manage=[">"], admin=True)
        with server.victim() as victim, server.connect(token) as attacker:
            done = call(attacker, "rpc.dead_letters.redrive", {"to_topic": "again", "ids": [*range(1, 5_001)]})
            assert done["result"]["redriven"] == 5_000
            assert call(attacker, "rpc.dead_letters.redrive", {"subscription": "died"})["result"]["redriven"] == 5_000
            assert call(attacker, "rpc.dead_letters.purge")["result"] == 5_000
        server.assert_unharmed(victim, attack="redrive and purge of 10,000")
