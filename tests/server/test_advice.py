"""What an error over the wire advises can be done over the wire: it names options and methods, never Python."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from foreign_client import Client, Refused, Serve, connect

import headwater
from headwater.server.methods import METHODS

PACKAGE = Path(headwater.__file__).parent
PYTHON = re.compile(
    r"\w\(\)|\w\([a-z_]+=|\bwith log\b|`with |\b[a-z_]+=(?:…|'|True|False|None|\s|$)|@log\b|\bawait\b|\bdatetime\b|"
    r"\bTrue\b|\bFalse\b|\bNone\b|\bdict\b"
)
SOURCES = ("broker", "delivery", "message", "topics", "ports", "protocol", "server")
# What these refuse, they refuse to a program in Python: one that uses the library, or that sets up a server.
OF_THE_LIBRARY = {
    "broker/handlers.py",
    "broker/live.py",
    "broker/publish.py",
    "broker/transaction.py",
    "server/server.py",
}


# --- as written -------------------------------------------------------------------------------------------------------


def advice_in(tree: ast.AST) -> Iterator[str]:
    """Every text that is given as `next=`, or as the last of the arguments of a function that raises."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            given = [each.value for each in node.keywords if each.arg == "next"]
            for value in [*given, *node.args[1:]]:
                parts = [each.value for each in ast.walk(value) if isinstance(each, ast.Constant)]
                yield " ".join(each for each in parts if isinstance(each, str))


def travelling() -> list[Path]:
    files = [path for source in SOURCES for path in sorted((PACKAGE / source).rglob("*.py"))]
    names = {path: path.relative_to(PACKAGE).as_posix() for path in files}
    return [path for path, name in names.items() if not any(name.startswith(each) for each in OF_THE_LIBRARY)]


@pytest.mark.parametrize("path", travelling(), ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_no_advice_that_may_travel_is_python(path: Path) -> None:
    found = [advice for advice in advice_in(ast.parse(path.read_text())) if PYTHON.search(advice)]
    assert found == []


@pytest.mark.parametrize(
    "advice",
    [
        "Close it there, or pass wait= to wait for it",
        "or use mode='shared' to share the work",
        "raise ack_wait or call extend()",
        "Use `with log.transaction()`",
        "Pass from_=… to publish",
        "Pass (topic, data) or call publish(topic=1)",
    ],
)
def test_python_is_recognised(advice: str) -> None:
    assert PYTHON.search(advice)


# --- as it travels ----------------------------------------------------------------------------------------------------

STRANGE: list[Any] = [
    None,
    [],
    {},
    [1],
    [[]],
    ["a..b"],
    {"topic": "a.*.>", "data": 1, "subscription_id": "new"},
    {"topic": "a.#", "subscription_id": "new"},
    {"topic": "a.*b", "subscription_id": "new"},
    {"topic": "a", "subscription_id": "new", "start": "2030-01-31T12:00:00"},
    {"topic": "a", "subscription_id": "new", "start": -5},
    {"topic": "a", "subscription_id": "new", "mode": "odd"},
    {"topic": "a", "subscription_id": "new", "deliver": "odd"},
    {"topic": "a", "subscription_id": "new", "where": "priority = 5"},
    {"topic": "a", "subscription_id": "new", "from": "/(/"},
    {"topic": "a", "subscription_id": "new", "order_key": "x"},
    {"topic": "a", "subscription_id": "new", "max_in_flight": 0},
    {"topic": "a", "subscription_id": "new", "ack_wait": -1},
    {"topic": "a", "subscription_id": "new", "resume": {"holder": "x"}},
    {"topic": "a", "subscription_id": "not a name"},
    {"topic": "a", "subscription_id": "held"},
    {"topic": "b", "subscription_id": "free"},
    {"subscription_id": "held"},
    {"subscription_id": "unknown"},
    {"subscription_id": "held", "start": "first"},
    {"subscription_id": "mine", "start": "2030-01-31T12:00:00"},
    {"subscription_id": "mine", "sequence_id": 1},
    {"subscription_id": "mine", "sequence_id": 99},
    {"subscription_id": "mine", "sequence_ids": [2, 99], "delay": -1},
    {"subscription_id": "mine", "count": 0},
    {"subscription_ids": ["mine", "unknown"]},
    {"subscriptions": [{"subscription_id": "held", "topic": "a"}]},
    {"topics": ["a..b"]},
    {"topic": "a", "data": 1, "deliver_at": "2030-01-31"},
    {"topic": "a", "data": 1, "deliver_at": "soon"},
    {"topic": "a", "data": 1, "deliver_at": 1, "delay": 1},
    {"topic": "a", "data": 1, "priority": 10**9},
    {"topic": "a", "data": 1, "headers": {"from": 7}},
    {"topic": "a", "data": 1, "number": 1},
    {"messages": [{"topic": "a..b", "data": 1}]},
    {"topic": "a", "max_age": -1},
    {"topic": "a", "dialect": "odd"},
    {"topic": "a"},
    {"id": 99},
    {"ids": [99]},
    {"reason": "odd"},
    {"error": "("},
    {"limit": 0},
    {"lines": ["x"]},
    {"token": "x"},
    {"publisher": ""},
    ["held"],
    [{"subscription_id": "held", "topic": "a"}],
]


async def advice(client: Client, method: str, params: Any) -> str | None:
    try:
        await client.call(method, params)
    except Refused as refused:
        data = refused.error.get("data")
        return str(data.get("next", "")) if isinstance(data, dict) else ""
    return None


async def test_no_method_gives_advice_in_python(serve: Serve) -> None:
    quiet = {"lease": 100_000, "ack_wait": 100_000}
    async with serve() as server, connect(server) as client, connect(server) as other:
        await other.subscribe("held", "a", **quiet)
        seen: set[str] = set()
        for method in sorted(METHODS):
            for params in STRANGE:
                if await advice(client, "rpc.subscription", {"subscription_id": "free"}) is not None:
                    await client.subscribe("free", "a")
                    await client.release("free")
                if await advice(client, "rpc.extend", {"subscription_id": "mine", "sequence_ids": []}) is not None:
                    await client.subscribe("mine", "a", deliver="fetch", **quiet)
                seen.add(await advice(client, method, params) or "")
        late = {"subscription_id": "late", "sequence_id": await client.publish("late")}
        await client.subscribe("late", "late")
        await client.delivery()
        await client.call("rpc.reject", late)
        seen.add(await advice(client, "rpc.ack_persistent", late) or "")
        assert [each for each in sorted(seen) if PYTHON.search(each)] == []
        assert len(seen) > 40
        for words in ("option timeout", "Give it one, such as UTC", "longer ack_wait", "dialect amqp", "remove the"):
            assert any(words in each for each in seen), words
