"""Without an attack: what the others are measured against."""

from __future__ import annotations

from pathlib import Path

from attacked import Attacked, call


def test_a_victim_that_nothing_attacks(tmp_path: Path) -> None:
    with Attacked(tmp_path) as server:
        with server.victim() as victim, server.connect(server.token(publish=["other"])) as other:
            for id in range(1, 101):
                assert call(other, "rpc.publish", {"topic": "other", "data": id}, id)["result"]
        server.assert_unharmed(victim, attack="none")
        assert server.stop() < 10
