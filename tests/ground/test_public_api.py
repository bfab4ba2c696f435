"""The public API is a list, and the two faces are one API in two colours."""

import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest

import headwater
from headwater.broker import asynchronous, blocking

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
    "ReceivedMessage",
    "Reject",
    "ShortCircuit",
    "Subscription",
    "connect",
    "connect_bus",
    "errors",
    "follow",
    "open",
    "open_bus",
    "open_dedupe",
    "open_transport",
    "serve",
    "sync",
]

PUBLIC_NAMES = {
    blocking.Log: [
        "close", "health", "housekeep", "last_seq", "live", "name", "on", "publish", "publish_many", "remote", "retain",
        "retention", "run", "seek", "start", "statistics", "stop", "subscribe", "subscription", "subscriptions",
        "topic_max_seq", "topics", "transaction", "unretain", "unsubscribe",
    ],
    blocking.Subscription: [
        "ack", "ack_many", "close", "extend", "fetch", "id", "info", "messages", "nack", "on_gap", "reject",
        "resumed_from",
    ],
    blocking.ReceivedMessage: [
        "ack", "attempt", "content_type", "correlation_id", "data", "deliver_at", "expires_at", "extend", "from_",
        "headers", "id", "message",
        "nack", "priority", "published_at", "reject", "reply_to", "seq", "size", "to", "topic",
        "traceparent", "transaction", "type",
        "version",
    ],
    blocking.DeadLetterBox: ["export", "get", "import_", "list", "purge", "redrive", "statistics"],
    blocking.Transaction: ["execute", "publish"],
    headwater.Message: [
        "data", "data_json", "deliver_at", "expires_at", "field", "headers", "id", "published_at", "scoped_id",
        "to_json",
    ],
    headwater.ManualClock: ["advance", "now_ms", "on_advance"],
}  # fmt: skip

FACES = [
    (blocking.Log, asynchronous.AsyncLog),
    (blocking.Subscription, asynchronous.AsyncSubscription),
    (blocking.ReceivedMessage, asynchronous.AsyncReceivedMessage),
    (blocking.DeadLetterBox, asynchronous.AsyncDeadLetterBox),
    (blocking.Transaction, asynchronous.AsyncTransaction),
]
NEVER_WAIT = {"on", "on_gap"}
STREAMS = {"export", "messages", "transaction"}  # `async for` and `async with` do the waiting there


def members(kind: type) -> dict[str, Any]:
    """Public methods and properties, inherited ones too; plain fields are data, not API."""
    return {
        name: value
        for base in reversed(kind.__mro__)
        for name, value in vars(base).items()
        if not name.startswith("_") and (inspect.isfunction(value) or isinstance(value, property))
    }


def parameters(function: Callable[..., Any]) -> list[tuple[str, str, str, str]]:
    return [
        (each.name, each.kind.name, repr(each.default), re.sub(r"\bAsync(?=[A-Z])", "", str(each.annotation)))
        for each in inspect.signature(function).parameters.values()
    ]


def test_exported_names() -> None:
    assert headwater.__all__ == EXPORTED
    for name in EXPORTED:
        assert getattr(headwater, name) is not None


@pytest.mark.parametrize("kind", PUBLIC_NAMES, ids=lambda kind: kind.__name__)
def test_public_names(kind: type) -> None:
    assert sorted(members(kind)) == PUBLIC_NAMES[kind]


@pytest.mark.parametrize(("sync", "asynchronous"), FACES, ids=lambda kind: kind.__name__)
def test_faces_have_the_same_names(sync: type, asynchronous: type) -> None:
    assert sorted(members(sync)) == sorted(members(asynchronous))


def verbs() -> list[Any]:
    return [
        pytest.param(getattr(sync, name), getattr(other, name), id=f"{sync.__name__}.{name}")
        for sync, other in FACES
        for name, value in members(sync).items()
        if inspect.isfunction(value)
    ]


@pytest.mark.parametrize(("sync", "asynchronous"), verbs())
def test_faces_take_the_same_parameters(sync: Callable[..., Any], asynchronous: Callable[..., Any]) -> None:
    assert parameters(sync) == parameters(asynchronous)


@pytest.mark.parametrize(("sync", "asynchronous"), verbs())
def test_each_verb_has_the_colour_of_its_face(sync: Callable[..., Any], asynchronous: Callable[..., Any]) -> None:
    assert not inspect.iscoroutinefunction(sync)
    waits = inspect.iscoroutinefunction(asynchronous)
    assert waits is (sync.__name__ not in NEVER_WAIT | STREAMS)


def test_with_blocks_and_loops_come_in_both_colours() -> None:
    for sync, other in FACES[:2]:
        assert hasattr(sync, "__enter__")
        assert hasattr(other, "__aenter__")
    assert hasattr(blocking.Subscription, "__iter__")
    assert hasattr(asynchronous.AsyncSubscription, "__aiter__")


def test_open_and_connect_take_the_same_options() -> None:
    assert parameters(headwater.open) == parameters(headwater.connect)


def test_logs_have_their_dead_letters_beside_their_verbs() -> None:
    with headwater.open("memory:") as log:
        assert isinstance(log.dead_letters, blocking.DeadLetterBox)
