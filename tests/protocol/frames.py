"""What the tests of the protocol share: a small dispatcher, and a strict reader of what a session sends."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import msgspec

from headwater.protocol.jsonrpc import METHOD_NOT_FOUND, Answer, Call, Fault
from headwater.protocol.session import Exchange, Session

Handler = Callable[[Call], Any]


def exchange_of(session: Session, text: str | bytes) -> Exchange:
    """The one exchange of a frame that holds nothing but calls."""
    [found] = session.receive_text(text)
    assert isinstance(found, Exchange)
    return found


def answers_of(session: Session, text: str | bytes) -> list[Answer]:
    found = session.receive_text(text)
    assert all(isinstance(each, Answer) for each in found)
    return [each for each in found if isinstance(each, Answer)]


def serve(session: Session, text: str | bytes, handlers: dict[str, Handler]) -> list[bytes]:
    """Answer a frame as a server does; what it sends."""
    for found in session.receive_text(text):
        if isinstance(found, Exchange):
            for call in list(found.calls):
                handler = handlers.get(call.method)
                if handler is None:
                    found.refuse(call, Fault(METHOD_NOT_FOUND, "Method not found"))
                else:
                    found.answer(call, handler(call))
    return session.texts_to_send()


def refuse_constant(name: str) -> None:
    raise AssertionError(f"{name} is not JSON")


def parsed(text: bytes) -> Any:
    return json.loads(text.decode(), parse_constant=refuse_constant)


def responses_in(text: bytes) -> list[dict[str, Any]]:
    """The responses of an outgoing text, each checked against the specification; the array, if it is one, has some."""
    found = parsed(text)
    responses = found if isinstance(found, list) else [found]
    assert responses
    for response in responses:
        assert isinstance(response, dict)
        assert response["jsonrpc"] == "2.0"
        assert ("result" in response) != ("error" in response)
        assert response["id"] is None or type(response["id"]) in (str, int, float)
        assert response.keys() <= {"jsonrpc", "result", "error", "id"}
        if "error" in response:
            error = response["error"]
            assert type(error["code"]) is int
            assert type(error["message"]) is str
            assert error.keys() <= {"code", "message", "data"}
    return responses


def without_details(text: bytes) -> Any:
    """A response, or an array of them, without `data` in errors: the specification leaves that to the server."""
    responses_in(text)
    found = parsed(text)
    for response in found if isinstance(found, list) else [found]:
        if "error" in response:
            response["error"].pop("data", None)
    return found


def encoded(value: Any) -> bytes:
    return msgspec.json.encode(value)
