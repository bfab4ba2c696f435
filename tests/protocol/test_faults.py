"""Errors cross the wire and are the same on the other side."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from frames import answers_of, encoded, exchange_of, parsed

import headwater
from headwater import errors
from headwater.errors import CallError, HeadwaterError
from headwater.protocol.jsonrpc import ErrorObject, Fault, error_of, fault_of
from headwater.protocol.session import Session

CLASSES = [value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, HeadwaterError)]

CODES = {
    "UnauthorizedError": -32000,
    "SubscriptionActiveError": -32001,
    "UnknownSubscriptionError": -32002,
    "UnknownDeadLetterError": -32002,
    "NotDeliveredError": -32003,
    "LeaseLostError": -32003,
    "InvalidTopicError": -32004,
    "InvalidPatternError": -32004,
    "EmptyPatternError": -32004,
    "EmptyTokenError": -32004,
    "CombinedWildcardError": -32004,
    "MultiWildcardNotLastError": -32004,
    "MixedWildcardsError": -32004,
    "TooLargeError": -32005,
    "OverloadedError": -32006,
    "RequestTimeoutError": -32006,
    "SubscriptionMismatchError": -32007,
    "InvalidInputError": -32602,
    "InvalidFilterError": -32602,
    "InvalidWhereError": -32602,
    "InvalidDataError": -32602,
    "InvalidOptionError": -32602,
    "InvalidStateError": -32602,
    "SecondLibraryError": -32602,
    "InvalidMessageError": -32602,
    "InvalidConfigurationError": -32602,
}


def sent(exc: Exception) -> ErrorObject:
    """What a client receives when a handler raised this."""
    client, server = Session(), Session()
    client.call("m")
    exchange = exchange_of(server, client.texts_to_send()[0])
    exchange.refuse(exchange.calls[0], fault_of(exc))
    [answer] = answers_of(client, server.texts_to_send()[0])
    assert answer.error is not msgspec.UNSET
    return answer.error


def data_of(error: ErrorObject) -> Any:
    return None if error.data is msgspec.UNSET else parsed(bytes(error.data))


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_every_error_arrives_as_what_it_was(kind: type[HeadwaterError]) -> None:
    wire = sent(kind("it is empty", where="topic ''", next="Name at least one token"))
    assert wire.code == CODES.get(kind.__name__, -32603)
    assert wire.message == "it is empty"
    expected = {"kind": kind.__name__, "where": "topic ''", "why": "it is empty", "next": "Name at least one token"}
    assert data_of(wire) == expected
    arrived = error_of(wire, where="ws://localhost")
    assert type(arrived) is kind
    assert (arrived.why, arrived.where, arrived.next) == ("it is empty", "topic ''", "Name at least one token")


def test_every_code_of_the_table_is_that_of_a_real_class() -> None:
    assert CODES.keys() <= {kind.__name__ for kind in CLASSES}


def test_what_an_error_does_not_say_is_not_sent() -> None:
    wire = sent(errors.StoreError("disk"))
    assert data_of(wire) == {"kind": "StoreError", "why": "disk"}
    arrived = error_of(wire, where="rpc.publish on ws://localhost")
    assert arrived.where == "rpc.publish on ws://localhost"


@pytest.mark.parametrize("exc", [RuntimeError("password=hunter2"), KeyError("secret"), OSError(2, "/etc/shadow")])
def test_an_unexpected_error_tells_nothing(exc: Exception) -> None:
    wire = sent(exc)
    assert (wire.code, wire.message, wire.data) == (-32603, "internal error", msgspec.UNSET)
    arrived = error_of(wire, where="here")
    assert type(arrived) is CallError
    assert (arrived.code, arrived.data, arrived.where) == (-32603, None, "here")


def test_a_fault_stays_itself() -> None:
    fault = Fault(-32601, "Method not found")
    assert fault_of(fault) is fault
    arrived = error_of(sent(fault), where="rpc.nonsense")
    assert isinstance(arrived, CallError)
    assert (arrived.code, arrived.why, arrived.where) == (-32601, "Method not found", "rpc.nonsense")


def test_a_foreign_class_travels_as_the_nearest_of_ours() -> None:
    class Mine(errors.EmptyTokenError):
        pass

    wire = sent(Mine("no"))
    assert wire.code == -32004
    assert type(error_of(wire, where="")) is errors.EmptyTokenError


def test_how_long_to_wait_travels_with_an_overload() -> None:
    overloaded = errors.OverloadedError("too many")
    overloaded.retry_after = 2.5  # type: ignore[attr-defined]
    wire = sent(overloaded)
    assert data_of(wire)["retry_after"] == 2.5
    arrived = error_of(wire, where="")
    assert type(arrived) is errors.OverloadedError
    assert vars(arrived)["retry_after"] == 2.5


def test_a_failed_call_is_passed_on_with_its_own_code_and_data() -> None:
    failed = CallError("no stock", where="shop", next="Order less", code=17, data={"left": 3})
    wire = sent(failed)
    assert wire.code == 17
    arrived = error_of(wire, where="")
    assert type(arrived) is CallError
    assert (arrived.code, arrived.data, arrived.where, arrived.next) == (17, {"left": 3}, "shop", "Order less")


def foreign(code: int, data: Any = None) -> ErrorObject:
    return ErrorObject(code, "said so", msgspec.UNSET if data is None else msgspec.Raw(encoded(data)))


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (-32000, errors.UnauthorizedError),
        (-32001, errors.SubscriptionActiveError),
        (-32002, errors.UnknownSubscriptionError),
        (-32003, errors.NotDeliveredError),
        (-32004, errors.InvalidTopicError),
        (-32005, errors.TooLargeError),
        (-32006, errors.OverloadedError),
        (-32007, errors.SubscriptionMismatchError),
        (-32602, errors.InvalidInputError),
        (-32601, CallError),
        (-32603, CallError),
        (-32700, CallError),
        (4711, CallError),
    ],
)
def test_a_code_alone_tells_the_class(code: int, kind: type[HeadwaterError]) -> None:
    arrived = error_of(foreign(code), where="here")
    assert type(arrived) is kind
    assert (arrived.why, arrived.where) == ("said so", "here")


@pytest.mark.parametrize(
    "name", ["annotations", "__builtins__", "Fault", "SystemExit", "", 7, None, ["TooLargeError"], {}]
)
def test_only_names_of_the_tree_are_classes(name: Any) -> None:
    arrived = error_of(foreign(4711, {"kind": name, "why": 7, "where": [], "next": None}), where="here")
    assert type(arrived) is CallError
    assert (arrived.why, arrived.where, arrived.next, arrived.code) == ("said so", "here", "", 4711)


@pytest.mark.parametrize("data", [7, "text", [1], {"reason": "x"}])
def test_the_data_of_a_foreign_error_is_kept(data: Any) -> None:
    arrived = error_of(foreign(4711, data), where="")
    assert isinstance(arrived, CallError)
    assert arrived.data == data


def test_data_that_no_number_can_hold_is_dropped() -> None:
    arrived = error_of(ErrorObject(4711, "x", msgspec.Raw(b"[1e999]")), where="")
    assert isinstance(arrived, CallError)
    assert arrived.data is None


def test_retry_after_must_be_a_number() -> None:
    assert "retry_after" not in vars(error_of(foreign(-32006, {"retry_after": "soon"}), where=""))
    assert "retry_after" not in vars(error_of(foreign(-32006, {"retry_after": True}), where=""))


def test_an_active_subscription_is_refused_in_the_words_of_the_seed() -> None:
    with headwater.open("memory:") as log:
        with log.subscribe("billing", "orders.>"), pytest.raises(errors.SubscriptionActiveError) as caught:
            log.subscribe("billing", "orders.>")
        wire = sent(caught.value)
    assert (wire.code, wire.message) == (-32001, "Subscription 'billing' is already active on another connection")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("/var/lib/shop/log.db", "log.db"),
        ("the tokens file '/etc/headwater/tokens.json' is gone", "the tokens file 'tokens.json' is gone"),
        ("mkdir -p /srv/data/logs", "mkdir -p logs"),
        ("ws://host:8765/shop/books.db", "ws://host:8765/shop/books.db"),
        ("see docs/reference/server.md, and/or ask", "see docs/reference/server.md, and/or ask"),
        ("orders/eu/new", "orders/eu/new"),
        ("JSON-RPC is at /rpc", "JSON-RPC is at /rpc"),
    ],
)
def test_where_files_lie_is_not_reported(text: str, expected: str) -> None:
    fault = fault_of(errors.StoreError(text, where=text, next=text))
    assert (fault.message, fault.data) == (
        expected,
        {"kind": "StoreError", "where": expected, "why": expected, "next": expected},
    )
