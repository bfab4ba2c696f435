"""The page for people who come from elsewhere: what stands in the right column runs."""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from command_line import HEADWATER, serving

import headwater

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "howto" / "elsewhere.md").read_text()


def calls() -> list[tuple[str, str]]:
    """System and call, of every row whose right column is one piece of code."""
    found = []
    for system, section in re.findall(r"^## ([^\n]+)\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL):
        found += [(system, call) for call in re.findall(r"^\| .* \| `([^`]+)` \|$", section, re.MULTILINE)]
    return found


PYTHON = [each for each in calls() if "spark" not in each[0].lower() and not each[1].startswith("headwater ")]
COMMANDS = [call for _, call in calls() if call.startswith("headwater ")]


class OrderPlaced(headwater.Event, topic="orders.placed"):
    order_id: str


@pytest.fixture
def prepared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """The names that the page uses: a log with some messages, subscriptions, a message in hand."""
    monkeypatch.chdir(tmp_path)
    with headwater.open("events.db") as log:
        log.publish_many([("orders.new", {"order": number}, {"from_": "shop"}) for number in range(3)])
        log.publish("events", {"order": 17})
        for idle, mode in (("old", "exclusive"), ("stock", "exclusive"), ("resizers", "shared")):
            log.subscribe(idle, "images.resize" if mode == "shared" else "orders.>", mode=mode).close()
        with log.subscribe("billing", "orders.>") as subscription:
            [message] = subscription.fetch(1)
            log.live.subscribe("subscriber-001", "orders.#", print, dialect="amqp")
            yield {
                "headwater": headwater,
                "log": log,
                "subscription": subscription,
                "message": message,
                "handle": lambda message: None,
                "make_report": lambda occurrence: None,
                "OrderPlaced": OrderPlaced,
            }


def test_every_system_has_its_table() -> None:
    systems = ["NATS and JetStream", "Celery", "Redis Streams", "Kafka's Spark connector"]
    systems += ["JROW", "SQLRsync", "SmartMessage", "MiniQ"]
    assert list(dict.fromkeys(system for system, _ in calls())) == systems
    assert len(PYTHON) > 50


@pytest.mark.parametrize(("system", "call"), PYTHON, ids=lambda value: value[:60])
def test_our_call_runs(system: str, call: str, prepared: dict[str, Any]) -> None:
    if call.startswith('log.subscribe("billing"'):  # how the page's `subscription` is made
        prepared["subscription"].close()
    made = eval(call, prepared)
    if hasattr(made, "close") and made is not prepared["subscription"]:
        made.close()


def test_our_commands_run(tmp_path: Path) -> None:
    with headwater.open(tmp_path / "events.db") as log:
        log.publish("orders.new", {"order": 17})
    with headwater.open(tmp_path / "app.db") as log:
        log.publish("any", {})
    assert len(COMMANDS) >= 8
    with serving(tmp_path) as port:
        for command in COMMANDS:
            words = shlex.split(command.replace("8765", port))[1:]
            ran = subprocess.run([*HEADWATER, *words], cwd=tmp_path, capture_output=True, text=True, timeout=60)
            assert ran.returncode == 0, (command, ran.stderr)
