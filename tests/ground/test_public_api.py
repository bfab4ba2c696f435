"""The public API is a list; signatures have every option with type and default; the synchronous API is generated."""

import inspect
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

import headwater
from headwater import Log, ReceivedMessage, Subscription
from headwater.api._sync import DeadLetters, Transaction
from headwater.api.forwarder import Forwarder
from headwater.broker.subscribe import SubscribeOptions, make_spec
from headwater.message import PublishOptions
from headwater.settings.model import SECTIONS
from headwater.wiring import OpenOptions

ROOT = Path(__file__).parents[2]

EXPORTED = [
    "AsyncLog",
    "AsyncReceivedMessage",
    "AsyncSubscription",
    "DeadLetter",
    "Event",
    "Forwarder",
    "Gap",
    "HeadwaterError",
    "Log",
    "ManualClock",
    "Message",
    "Middleware",
    "MultiTransport",
    "Occurrence",
    "ReceivedMessage",
    "Reject",
    "ShortCircuit",
    "Subscription",
    "errors",
    "follow",
    "open",
    "open_async",
    "open_bus",
    "open_bus_async",
    "open_dedupe",
    "open_transport",
    "serve",
    "sync",
]

PUBLIC_NAMES = {
    Log: [
        "close", "cron", "delete_retention", "delete_schedule", "delete_subscription", "every", "health",
        "last_seq", "live", "name", "on", "pause", "publish", "publish_many", "remote", "resume", "retain",
        "retention", "run", "run_maintenance", "schedules", "seek", "start", "statistics", "stop", "subscribe",
        "subscription", "subscriptions", "topic_max_seq", "topics", "transaction",
    ],
    Subscription: [
        "ack", "ack_many", "close", "extend", "fetch", "id", "info", "messages", "nack", "on_gap", "reject",
        "resumed_from",
    ],
    ReceivedMessage: [
        "ack", "attempt", "content_type", "correlation_id", "data", "deliver_at", "expires_at", "extend", "from_",
        "headers", "id", "message",
        "nack", "priority", "published_at", "reject", "reply_to", "seq", "size", "to", "topic",
        "traceparent", "transaction", "type",
        "version",
    ],
    DeadLetters: ["export", "get", "import_", "list", "purge", "redrive", "statistics"],
    Transaction: ["execute", "publish"],
    headwater.Message: [
        "data", "data_json", "deliver_at", "expires_at", "field", "headers", "id", "published_at", "scoped_id",
        "to_json",
    ],
    headwater.ManualClock: ["advance", "now_ms", "on_advance"],
}  # fmt: skip


def members(kind: type) -> dict[str, Any]:
    """Public methods and properties, inherited ones too; plain fields are data, not API."""
    return {
        name: value
        for base in reversed(kind.__mro__)
        for name, value in vars(base).items()
        if not name.startswith("_") and (inspect.isfunction(value) or isinstance(value, property))
    }


def options_of(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    return {
        name: each
        for name, each in inspect.signature(function).parameters.items()
        if each.kind is inspect.Parameter.KEYWORD_ONLY
    }


def test_exported_names() -> None:
    assert headwater.__all__ == EXPORTED
    for name in EXPORTED:
        assert getattr(headwater, name) is not None


@pytest.mark.parametrize("kind", PUBLIC_NAMES, ids=lambda kind: kind.__name__)
def test_public_names(kind: type) -> None:
    assert sorted(members(kind)) == PUBLIC_NAMES[kind]


def test_the_synchronous_api_is_what_the_asyncio_api_gives() -> None:
    command = [sys.executable, str(ROOT / "tools" / "generate_sync.py"), "--check"]
    assert subprocess.run(command, capture_output=True, text=True, timeout=60).stderr == ""


@pytest.mark.parametrize(
    ("function", "options"),
    [
        (Log.publish, {*PublishOptions.__annotations__, "tx"}),
        (Transaction.publish, {*PublishOptions.__annotations__}),
        (Log.subscribe, {*SubscribeOptions.__annotations__}),
        (headwater.AsyncLog.subscribe, {*SubscribeOptions.__annotations__}),
        (
            Log.on,
            {*SubscribeOptions.__annotations__, "id", "concurrency", "auto_ack", "on_gap", "dedupe"} - {"timeout"},
        ),
    ],
)
def test_signatures_have_every_option(function: Callable[..., Any], options: set[str]) -> None:
    found = options_of(function)
    assert set(found) == options
    assert all(each.annotation is not inspect.Parameter.empty for each in found.values())
    assert all(each.default is not inspect.Parameter.empty for each in found.values())


def test_serve_takes_every_setting() -> None:
    settings = {
        f"{'' if section == 'server' else f'{section}_'}{key}"
        for section, model in SECTIONS.items()
        if section != "cli"  # of other commands
        for key in model.model_fields
    }
    opening = {*OpenOptions.__annotations__}
    assert set(options_of(headwater.serve)) == (settings - {"log"}) | opening | {"config", "profile"}


@pytest.mark.parametrize("function", [Log.subscribe, Log.on, Forwarder])
def test_default_values_are_those_of_a_subscription(function: Callable[..., Any]) -> None:
    """Of the Forwarder, some are the target's and not the subscription's. Left out, `inactive_timeout` is the log's."""
    targets = ("max_attempts", "backoff", "backoff_max", "jitter") if function is Forwarder else ()
    names = SubscribeOptions.__annotations__.keys() - {"start", "timeout", "takeover", "inactive_timeout", *targets}
    defaults = {name: each.default for name, each in options_of(function).items() if name in names}
    assert make_spec("a", defaults) == make_spec("a", {})


@pytest.mark.parametrize(
    "call",
    [
        lambda: headwater.open("memory:", colour="red"),
        lambda: headwater.open_async("memory:", colour="red"),
        lambda: headwater.serve("memory:", colour="red"),
        lambda: headwater.open("memory:").publish("a", 1, colour="red"),
        lambda: headwater.open("memory:").subscribe("s", "a", colour="red"),
        lambda: headwater.open("memory:").on("a", id="s", colour="red"),
        lambda: headwater.open("memory:").dead_letters.list(colour="red"),
    ],
)
def test_python_itself_refuses_unknown_options(call: Callable[[], Any]) -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'colour'"):
        call()


def test_open_and_connect_take_the_same_options() -> None:
    assert options_of(headwater.open) == options_of(headwater.open_async)


async def test_subscribing_is_awaited_or_a_block() -> None:
    """Logs and subscriptions of asyncio open with `async with`, and with `await`."""
    async with headwater.open_async("memory:") as log:
        await log.publish_many([("a", 1), ("a", 2)])
        async with log.subscribe("s", "a") as subscription:
            [first] = await subscription.fetch(1)
            await first.ack()
        again = await log.subscribe("s", "a")
        assert [message.data for message in await again.fetch()] == [2]
        await again.close()
