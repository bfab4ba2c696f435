"""A client that asks for what it has no right to, without end."""

from __future__ import annotations

import contextlib
import json
import threading
from pathlib import Path
from typing import Any

from attacked import Attacked, call
from websockets.exceptions import WebSocketException

CALLS_AT_ONCE = 500
WITHOUT_RIGHT: list[tuple[str, Any]] = [
    ("rpc.publish", {"topic": "victim.news", "data": 1}),
    ("rpc.subscribe", {"topic": "victim.>"}),
    ("rpc.subscribe.persistent", {"subscription_id": "victim", "topic": "victim.news"}),
    ("rpc.subscription.remove", {"subscription_id": "victim"}),
    ("rpc.seek", {"subscription_id": "victim", "start": "new"}),
    ("rpc.dead_letters.purge", {}),
    ("rpc.stats", {}),
    ("x" * 100, {}),
]


def test_refusals_without_end(tmp_path: Path) -> None:
    """By calls without the right, and by wrong tokens: they cost the victim nothing, and fill no disk."""
    trail = tmp_path / "audit.jsonl"
    with Attacked(tmp_path, audit=str(trail)) as server:
        token = server.token(publish=["mine.>"])
        calls = [{"jsonrpc": "2.0", "id": 1, "method": method, "params": params} for method, params in WITHOUT_RIGHT]
        frame = json.dumps(calls * (CALLS_AT_ONCE // len(calls)))
        stop, answered = threading.Event(), [0, 0]

        def ask() -> None:
            with server.connect(token) as client:
                while not stop.wait(0.02):
                    client.send(frame)
                    answers = json.loads(client.recv())
                    assert {each["error"]["code"] for each in answers} <= {-32000, -32002}  # or as if there were none
                    answered[0] += len(answers)

        def guess() -> None:
            while not stop.wait(0.005):
                with contextlib.suppress(WebSocketException, OSError), server.connect("hw_guess_" + "0" * 64):
                    raise AssertionError("a wrong token was let in")
                answered[1] += 1

        attackers = [threading.Thread(target=ask), threading.Thread(target=guess)]
        with server.victim() as victim:
            for attacker in attackers:
                attacker.start()
            stop.wait(4)
            stop.set()
            for attacker in attackers:
                attacker.join()
        server.assert_unharmed(victim, attack=f"{answered[0]} refused calls and {answered[1]} wrong tokens")
        assert answered[0] > 1_000
        assert trail.stat().st_size < 100_000
        with server.connect(server.token(read=["victim.>"], consume=["victim"])) as other:
            answer = call(other, "rpc.subscribe.persistent", {"subscription_id": "victim", "topic": "victim.news"})
            assert answer["error"]["message"] == "the subscription belongs to another token"


def test_subscriptions_without_end(tmp_path: Path) -> None:
    """Each is stored, and looked at by statistics and maintenance: a token has so many and no more."""
    with Attacked(tmp_path, limits_subscriptions_per_token=300) as server:
        token = server.token(read=["mine.>"], consume=["*"])
        with server.victim() as victim:
            made = refused = 0
            with server.connect(token) as client:
                for number in range(600):
                    id = f"s{number}"
                    answer = call(client, "rpc.subscribe.persistent", {"subscription_id": id, "topic": "mine.x"})
                    made += "result" in answer
                    refused += answer.get("error", {}).get("code") == -32005
                    call(client, "rpc.unsubscribe.persistent", {"subscription_id": id})
        server.assert_unharmed(victim, attack="600 durable subscriptions")
        assert (made, refused) == (300, 300)
