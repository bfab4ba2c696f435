"""Conditions over large messages are evaluated beside the writer: publishes do not wait for them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from attacked import Attacked, call

SUBSCRIPTIONS = 200
TERMS = 60
KEYS = {f"key-{n}": "a" * 8 for n in range(40_000)}  # about 1 MB; each name is looked for among all

MANY_NAMES = " or ".join(f"data['key-{39_999 - n}'] == 'b'" for n in range(48))
ONE_TEXT = " or ".join(f"data.text contains 'aaaaa{n:02}'" for n in range(TERMS))


@pytest.mark.parametrize(
    ("mode", "where", "data"),
    [("exclusive", MANY_NAMES, KEYS), ("shared", ONE_TEXT, {"text": "a" * 1_000_000})],
    ids=["many-names", "one-text"],
)
def test_conditions_over_large_messages(tmp_path: Path, mode: str, where: str, data: Any) -> None:
    with Attacked(tmp_path) as server:
        token = server.token(publish=["mine"], read=["mine"], consume=["*"])
        with server.connect(token) as attacker:
            for n in range(SUBSCRIPTIONS):
                asked = {
                    "subscription_id": f"many-{n}",
                    "topic": "mine",
                    "where": f"{where} or data.x == {n}",
                    "mode": mode,
                }
                assert call(attacker, "rpc.subscribe.persistent", asked)["result"]
            message = json.dumps({"topic": "mine", "data": data})
            with server.victim() as victim:
                for id in range(1, 4):
                    assert call(attacker, "rpc.publish", json.loads(message), id)["result"]
            server.assert_unharmed(victim, attack=f"200 conditions over 1 MB, {mode}")
