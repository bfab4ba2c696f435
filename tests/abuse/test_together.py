"""Many attackers, each alone and all at once."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from attacked import ATTACKER_SCOPES, Attacked, line_of

import headwater

ALONE = [
    "bare_connects", "unfinished_heads", "unfinished_frames", "large_frames", "fetches_unread", "regexes", "conditions",
    "scrapes", "exports", "pings", "garbage",
]  # fmt: skip


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A log with messages and dead letters that are worth asking for."""
    path = tmp_path_factory.mktemp("filled") / "log.db"
    with headwater.open(path, durability="relaxed") as log:
        for _ in range(10):
            log.publish_many([("mine.large", "x" * 500_000)] * 20)
        with log.subscribe("mine-dead", "mine.>") as subscription:
            for message in subscription.fetch(100):
                message.reject("no")
    return path


def attack(tmp_path: Path, filled: Path, names: list[str], *, p99_ms: float = 250, rss_mb: float = 400) -> str:
    """Returns a line for the report."""
    shutil.copy(filled, tmp_path / "log.db")
    with Attacked(tmp_path, descriptors=1_024) as server:
        program = [sys.executable, str(Path(__file__).with_name("attackers.py"))]
        token = server.token("attacker", **ATTACKER_SCOPES)
        with (
            server.victim() as victim,
            subprocess.Popen(
                [*program, str(server.port), token, *names], stdin=subprocess.PIPE, stdout=subprocess.PIPE
            ) as attackers,
        ):
            assert line_of(attackers) == "begun"
            victim.wait()
            assert attackers.stdin is not None
            attackers.stdin.close()
            moves = json.loads(line_of(attackers) or "{}")
        reported = server.assert_unharmed(victim, p99_ms=p99_ms, rss_mb=rss_mb, attack=f"{'+'.join(names)} {moves}")
        seconds = server.stop(30)
        assert seconds < 12, f"SIGTERM took {seconds:.1f} s"
    return f"{reported}; SIGTERM {seconds:.1f} s"


@pytest.mark.long
@pytest.mark.parametrize("name", ALONE)
def test_one_attacker(tmp_path: Path, filled: Path, name: str, figures: Callable[[str], None]) -> None:
    figures(attack(tmp_path, filled, [name]))


def test_all_attackers_at_once(tmp_path: Path, filled: Path, figures: Callable[[str], None]) -> None:
    figures(attack(tmp_path, filled, ALONE, p99_ms=1_000, rss_mb=800))
