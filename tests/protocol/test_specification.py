"""Every example of section 7 of the JSON-RPC 2.0 specification, through a session and a dispatcher of a few lines."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from frames import serve, without_details

from headwater.protocol.jsonrpc import Call, params_of
from headwater.protocol.session import Session


class Subtraction(msgspec.Struct):
    minuend: int
    subtrahend: int


def subtract(call: Call) -> int:
    numbers = params_of(call, Subtraction)
    return numbers.minuend - numbers.subtrahend


HANDLERS = {
    "subtract": subtract,
    "sum": lambda call: sum(params_of(call, list[int])),
    "get_data": lambda call: ["hello", 5],
    "update": lambda call: None,
    "notify_hello": lambda call: None,
    "notify_sum": lambda call: None,
}

INVALID = {"jsonrpc": "2.0", "error": {"code": -32600, "message": "Invalid Request"}, "id": None}
MALFORMED = {"jsonrpc": "2.0", "error": {"code": -32700, "message": "Parse error"}, "id": None}


def not_found(id: Any) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "error": {"code": -32601, "message": "Method not found"}, "id": id}


EXAMPLES = {
    "positional params": (
        '{"jsonrpc": "2.0", "method": "subtract", "params": [42, 23], "id": 1}',
        {"jsonrpc": "2.0", "result": 19, "id": 1},
    ),
    "positional params the other way round": (
        '{"jsonrpc": "2.0", "method": "subtract", "params": [23, 42], "id": 2}',
        {"jsonrpc": "2.0", "result": -19, "id": 2},
    ),
    "named params": (
        '{"jsonrpc": "2.0", "method": "subtract", "params": {"subtrahend": 23, "minuend": 42}, "id": 3}',
        {"jsonrpc": "2.0", "result": 19, "id": 3},
    ),
    "named params in another order": (
        '{"jsonrpc": "2.0", "method": "subtract", "params": {"minuend": 42, "subtrahend": 23}, "id": 4}',
        {"jsonrpc": "2.0", "result": 19, "id": 4},
    ),
    "a notification": ('{"jsonrpc": "2.0", "method": "update", "params": [1,2,3,4,5]}', None),
    "a notification of an unknown method": ('{"jsonrpc": "2.0", "method": "foobar"}', None),
    "an unknown method": ('{"jsonrpc": "2.0", "method": "foobar", "id": "1"}', not_found("1")),
    "invalid JSON": ('{"jsonrpc": "2.0", "method": "foobar, "params": "bar", "baz]', MALFORMED),
    "an invalid request": ('{"jsonrpc": "2.0", "method": 1, "params": "bar"}', INVALID),
    "a batch of invalid JSON": (
        '[{"jsonrpc": "2.0", "method": "sum", "params": [1,2,4], "id": "1"}, {"jsonrpc": "2.0", "method"]',
        MALFORMED,
    ),
    "an empty array": ("[]", INVALID),
    "an invalid batch that is not empty": ("[1]", [INVALID]),
    "an invalid batch": ("[1,2,3]", [INVALID, INVALID, INVALID]),
    "a mixed batch": (
        """[
            {"jsonrpc": "2.0", "method": "sum", "params": [1,2,4], "id": "1"},
            {"jsonrpc": "2.0", "method": "notify_hello", "params": [7]},
            {"jsonrpc": "2.0", "method": "subtract", "params": [42,23], "id": "2"},
            {"foo": "boo"},
            {"jsonrpc": "2.0", "method": "foo.get", "params": {"name": "myself"}, "id": "5"},
            {"jsonrpc": "2.0", "method": "get_data", "id": "9"}
        ]""",
        [
            {"jsonrpc": "2.0", "result": 7, "id": "1"},
            {"jsonrpc": "2.0", "result": 19, "id": "2"},
            INVALID,
            not_found("5"),
            {"jsonrpc": "2.0", "result": ["hello", 5], "id": "9"},
        ],
    ),
    "a batch of notifications": (
        """[
            {"jsonrpc": "2.0", "method": "notify_sum", "params": [1,2,4]},
            {"jsonrpc": "2.0", "method": "notify_hello", "params": [7]}
        ]""",
        None,
    ),
}


@pytest.mark.parametrize("as_bytes", [False, True], ids=["text", "bytes"])
@pytest.mark.parametrize("example", EXAMPLES)
def test_the_examples_of_the_specification(example: str, as_bytes: bool) -> None:
    sent, expected = EXAMPLES[example]
    texts = serve(Session(), sent.encode() if as_bytes else sent, HANDLERS)
    if expected is None:
        assert texts == []
    else:
        [text] = texts
        assert without_details(text) == expected


def test_a_frame_may_be_spread_over_lines_and_begin_with_a_blank() -> None:
    batch = json.dumps([{"jsonrpc": "2.0", "method": "get_data", "id": 1}], indent=3)
    [text] = serve(Session(), "\r\n\t " + batch + "\n", HANDLERS)
    assert without_details(text) == [{"jsonrpc": "2.0", "result": ["hello", 5], "id": 1}]
