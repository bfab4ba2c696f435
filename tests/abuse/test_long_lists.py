"""A client puts as many topics, acks or names into one frame as fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from attacked import Attacked, call

FRAME_BYTES = 4 * 1024 * 1024 - 1_000
SEQS = [*range(1_000_000, 1_450_000)]
FRAMES: dict[str, tuple[str, dict[str, Any]]] = {
    "topics": ("rpc.subscribe.batch", {"topics": ["a"] * 800_000}),
    "acks": ("rpc.acknowledge.persistent", {"subscription_id": "att", "sequence_ids": SEQS}),
    "acks in a batch": (
        "rpc.acknowledge.persistent.batch",
        {"acknowledgments": [{"subscription_id": "att", "sequence_id": 1}] * 70_000},
    ),
}


@pytest.mark.parametrize("name", FRAMES)
def test_a_frame_full_of_one_list(tmp_path: Path, name: str) -> None:
    method, params = FRAMES[name]
    frame = json.dumps({"jsonrpc": "2.0", "id": 1, "method": method, "params": params}, separators=(",", ":"))
    assert FRAME_BYTES / 2 < len(frame) < FRAME_BYTES
    with Attacked(tmp_path) as server:
        token = server.token(read=["a"], consume=["att"])
        with server.connect(token) as connection:
            call(connection, "rpc.subscribe.persistent", {"subscription_id": "att", "topic": "a", "deliver": "fetch"})
            with server.victim() as victim:
                for _ in range(8):
                    connection.send(frame)
                answers = [json.loads(connection.recv(timeout=30)) for _ in range(8)]
            server.assert_unharmed(victim, attack=f"8 frames of {name}")
            assert {each["error"]["code"] for each in answers} == {-32602}
