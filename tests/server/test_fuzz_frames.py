"""Whatever comes in, the server goes on: it answers others, leaks nothing, and no input is an internal error.

A long run: HEADWATER_EXAMPLES=20000 pytest tests/server/test_fuzz_frames.py --timeout=0; a million frames:
pytest tests/server/test_fuzz_frames.py -m long --timeout=0
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from background_server import BackgroundServer
from foreign_client import without_settings
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from raw_http import UPGRADE
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect

import headwater
from headwater.server.methods import METHODS

EXAMPLES = int(os.environ.get("HEADWATER_EXAMPLES", "80"))
PATIENCE_S = 20.0
COMMON = settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@pytest.fixture(scope="module")
def under_fire(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BackgroundServer]:
    path: Path = tmp_path_factory.mktemp("fuzz") / "log.db"
    flags: dict[str, Any] = {
        "limits_frame_bytes": 20_000,
        "limits_batch_calls": 20,
        "limits_request_timeout": 0.3,
        "limits_fetch_wait": 0.02,
    }
    with pytest.MonkeyPatch.context() as monkeypatch:
        without_settings(monkeypatch, path.parent)
        background = BackgroundServer(headwater.serve(path, port=0, **flags))
    yield background
    background.check_nothing_is_left()
    background.stop()


# --- what is sent -----------------------------------------------------------------------------------------------------

_SUBJECTS = st.sampled_from(
    ["", "a", "a.b", "a.*", ">", "a.>", "#", "a.#.b", "a..b", "a.*.>", "s", "s#2", "t", "é", "\0"]
)
_WORDS = st.sampled_from(
    ["first", "new", "shared", "exclusive", "ephemeral", "fetch", "push", "amqp", "2030-01-01T00:00:00Z"]
)
_NUMBERS = st.integers(-3, 12) | st.sampled_from([2**31, 2**63 - 1, 2**63, 2**64, 10**30, -(2**63) - 1])
_SCALARS = (
    st.none()
    | st.booleans()
    | _NUMBERS
    | st.floats(allow_nan=False, allow_infinity=False)
    | _SUBJECTS
    | st.text(max_size=20)
    | _WORDS
)
_VALUES = st.recursive(
    _SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(_SUBJECTS, inner, max_size=3), max_leaves=8
)


def _fields_of(params: Any) -> list[str]:
    is_struct = isinstance(params, type) and issubclass(params, msgspec.Struct)
    return [field.encode_name for field in msgspec.structs.fields(params)] if is_struct else []


_LIKELY: dict[str, st.SearchStrategy[Any]] = {
    "topic": _SUBJECTS,
    "subscription_id": st.sampled_from(["s", "t", "s#2"]),
    "sequence_id": st.integers(0, 6) | _NUMBERS,
    "sequence_ids": st.lists(st.integers(0, 6) | _NUMBERS, max_size=4),
    "topics": st.lists(_SUBJECTS, max_size=4),
    "messages": st.lists(st.fixed_dictionaries({"topic": _SUBJECTS, "data": _VALUES}), max_size=4),
    "subscriptions": st.lists(st.fixed_dictionaries({"subscription_id": _SUBJECTS, "topic": _SUBJECTS}), max_size=3),
    "wait": st.sampled_from([0, 0.01, -1, 1e300]),
    "publisher": st.sampled_from(["p", "q"]),
    "number": _NUMBERS,
    "confirmed": _NUMBERS,
    "deliver": st.sampled_from(["push", "fetch"]),
    "mode": st.sampled_from(["exclusive", "shared", "ephemeral"]),
}


@st.composite
def _params(draw: st.DrawFn, method: str) -> Any:
    names = _fields_of(METHODS[method].params) if method in METHODS else ["x"]
    if not names or draw(st.integers(0, 9)) == 0:
        return draw(st.lists(_VALUES, max_size=4) | st.dictionaries(_SUBJECTS, _VALUES, max_size=3))
    needed = [name for name in names if draw(st.integers(0, 4))] if len(names) < 6 else names[:2]
    more = draw(st.lists(st.sampled_from(names), max_size=2))
    values = {name: draw(_LIKELY.get(name, _VALUES) if draw(st.integers(0, 5)) else _VALUES) for name in needed + more}
    return draw(st.sampled_from([values, values, values, list(values.values())]))


@st.composite
def _calls(draw: st.DrawFn) -> Any:
    method = draw(st.sampled_from(sorted(METHODS)) | st.text(max_size=10))
    call: dict[str, Any] = {"jsonrpc": "2.0", "method": method, "params": draw(_params(method)), "id": draw(_SCALARS)}
    for name in draw(st.lists(st.sampled_from(["jsonrpc", "method", "params", "id"]), max_size=1)):
        if draw(st.booleans()):
            del call[name]
        else:
            call[name] = draw(_VALUES)
    return call


def _answers(member: str) -> st.SearchStrategy[Any]:
    return st.fixed_dictionaries({"jsonrpc": st.just("2.0"), "id": _SCALARS, member: _VALUES})


_ANSWERS = _answers("result") | _answers("error")
_DOCUMENTS = st.one_of(_calls(), _calls(), _ANSWERS, st.lists(_calls() | _ANSWERS | _VALUES, max_size=25), _VALUES)
_TEXTS = st.one_of(_DOCUMENTS.map(json.dumps), _DOCUMENTS.map(json.dumps), st.text(max_size=200))


@st.composite
def _frames(draw: st.DrawFn) -> Any:
    """Text, text in fragments, text cut short, binary, or binary in fragments."""
    text = draw(_TEXTS)
    kind = draw(st.integers(0, 19))
    if kind < 14:
        return text
    if kind < 17:
        cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=4)))
        return [text[low:high] for low, high in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    if kind < 18:
        return text[: draw(st.integers(0, len(text)))]
    return draw(st.binary(max_size=50) | st.lists(st.binary(max_size=20), min_size=1, max_size=3))


# --- what must hold ---------------------------------------------------------------------------------------------------


def still_answers(server: BackgroundServer) -> None:
    with connect(f"{server.url}/rpc", proxy=None, close_timeout=1) as client:
        client.send('{"jsonrpc":"2.0","method":"rpc.publish","params":{"topic":"alive","data":1},"id":1}')
        assert "sequence_id" in json.loads(client.recv(PATIENCE_S))["result"]


def dial(server: BackgroundServer) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), PATIENCE_S)


def answers_up_to(client: ClientConnection, last: str) -> Iterator[Any]:
    while True:
        frame = json.loads(client.recv(PATIENCE_S))
        for each in frame if isinstance(frame, list) else [frame]:
            yield each
            if each.get("id") == last:
                return


@COMMON
@given(frames=st.lists(_frames(), min_size=1, max_size=8))
def test_arbitrary_frames(under_fire: BackgroundServer, frames: list[Any]) -> None:
    last = "this is the last one"
    url = f"{under_fire.url}/rpc"
    with contextlib.suppress(ConnectionClosed), connect(url, proxy=None, close_timeout=1) as client:
        for frame in frames:
            client.send(frame)
        client.send(json.dumps({"jsonrpc": "2.0", "method": "rpc.hello", "id": last}))
        for answer in answers_up_to(client, last):
            assert answer["jsonrpc"] == "2.0"
            assert ("result" in answer) + ("error" in answer) + ("method" in answer) == 1
            error = answer.get("error", {})
            assert error.get("code") != -32603, (error, frames)
    still_answers(under_fire)
    assert under_fire.take_mishaps() == []


# --- many: made without Hypothesis, which takes longer to think of a frame than the server to answer it ---------------

CONNECTION_FRAMES = 500
LAST = b"this is the last one"
_FUZZED: list[Any] = ["", "a", "a.b", "a.*", ">", "#", "a..b", "s", "s#2", "\0", "é", None, True, False, 0, 1, -1]
_FUZZED += [2**31, 2**63, -(2**63) - 1, 1e300, 0.01, [], {}, [1, 2], ["a", "b"], {"topic": "a", "data": 1}, [[]]]
_FUZZED += ["first", "new", "shared", "exclusive", "ephemeral", "push", "fetch", "amqp", "2030-01-01T00:00:00Z"]


def _fuzzed_text(chance: random.Random) -> bytes:
    method = chance.choice(_METHOD_NAMES)
    names = _PARAM_NAMES[method] or ["x"]
    given = {name: chance.choice(_FUZZED) for name in chance.sample(names, chance.randint(0, min(4, len(names))))}
    call: dict[str, Any] = {"jsonrpc": "2.0", "method": method, "params": given, "id": chance.choice(_FUZZED)}
    if chance.random() < 0.2:
        call[chance.choice(["jsonrpc", "method", "params", "id", "result", "error"])] = chance.choice(_FUZZED)
    if chance.random() < 0.1:
        del call[chance.choice(["jsonrpc", "method", "params", "id"])]
    text = bytearray(json.dumps(call if chance.random() < 0.9 else [call] * chance.randint(0, 22)).encode())
    if chance.random() < 0.15:  # a byte that is another, or the end of it is missing
        text[chance.randrange(len(text))] = chance.randrange(256)
    return bytes(text[: chance.randrange(len(text))]) if chance.random() < 0.05 else bytes(text)


_METHOD_NAMES = [*sorted(METHODS), "nothing", ""]
_PARAM_NAMES = {name: _fields_of(METHODS[name].params) if name in METHODS else [] for name in _METHOD_NAMES}


def _frame(text: bytes, first: int = 0x81) -> bytes:
    """Masked with zeros, which leave it as it is."""
    length = bytes([0x80 | len(text)]) if len(text) < 126 else b"\xfe" + len(text).to_bytes(2, "big")
    return bytes([first]) + length + bytes(4) + text


def _fuzzed_frames(chance: random.Random) -> bytes:
    """Of one connection; a few of them break the rules of WebSocket, and end it."""
    frames = [_frame(_fuzzed_text(chance)[:19_000]) for _ in range(CONNECTION_FRAMES)]
    if chance.random() < 0.3:
        at = chance.randrange(len(frames))
        frames[at] = bytes([chance.randrange(256)]) + frames[at][1:]
    return b"".join(frames) + _frame(
        json.dumps({"jsonrpc": "2.0", "method": "rpc.hello", "id": LAST.decode()}).encode()
    )


@pytest.mark.parametrize("count", [20_000, pytest.param(1_000_000, marks=pytest.mark.long)])
@pytest.mark.timeout(0)
def test_very_many_frames(under_fire: BackgroundServer, count: int) -> None:
    chance = random.Random(17)
    for sent in range(0, count, CONNECTION_FRAMES):
        answers = bytearray()
        with dial(under_fire) as raw, contextlib.suppress(ConnectionError):
            raw.sendall(f"GET /rpc HTTP/1.1\r\nHost: x\r\n{UPGRADE}\r\n".encode())
            sender = threading.Thread(target=_send, args=(raw, _fuzzed_frames(chance)))
            sender.start()
            while LAST not in answers[-200_000:] and (data := raw.recv(100_000)):
                answers += data
            raw.shutdown(socket.SHUT_RDWR)
            sender.join(PATIENCE_S)
        assert b"-32603" not in answers, (sent, bytes(answers)[bytes(answers).index(b"-32603") - 200 :][:500])
        if sent % 10_000 == 0:
            still_answers(under_fire)
            assert under_fire.take_mishaps() == []
    still_answers(under_fire)
    assert under_fire.take_mishaps() == []


def _send(raw: socket.socket, data: bytes) -> None:
    with contextlib.suppress(OSError):
        raw.sendall(data)


@COMMON
@given(data=st.binary(min_size=1, max_size=300))
def test_arbitrary_bytes_where_frames_should_be(under_fire: BackgroundServer, data: bytes) -> None:
    head = f"GET /rpc HTTP/1.1\r\nHost: x\r\n{UPGRADE}\r\n".encode()
    with dial(under_fire) as raw, contextlib.suppress(ConnectionError):
        raw.sendall(head)
        assert b"101" in raw.recv(1_000)
        raw.sendall(data)
        raw.shutdown(socket.SHUT_WR)
        while raw.recv(10_000):
            pass
    still_answers(under_fire)
    assert under_fire.take_mishaps() == []


_HEADS = st.lists(
    st.sampled_from(
        [
            b"GET / HTTP/1.1\r\n",
            b"POST /metrics HTTP/1.1\r\n",
            b"GET /readyz HTTP/1.0\r\n",
            b"Host: x\r\n",
            UPGRADE.encode(),
            b"Upgrade: websocket\r\n",
            b"Content-Length: 5\r\n",
            b"Transfer-Encoding: chunked\r\n",
            b"Authorization: Bearer x\r\n",
            b"Origin: null\r\n",
            b"Expect: 100-continue\r\n",
            b"\r\n",
            b"hello",
            b"0\r\n\r\n",
        ]
    )
    | st.binary(max_size=20),
    max_size=12,
).map(b"".join)


@COMMON
@given(data=_HEADS)
def test_arbitrary_bytes_at_the_door(under_fire: BackgroundServer, data: bytes) -> None:
    with dial(under_fire) as raw, contextlib.suppress(ConnectionError):
        raw.sendall(data)
        raw.shutdown(socket.SHUT_WR)
        while raw.recv(10_000):
            pass
    still_answers(under_fire)
    assert under_fire.take_mishaps() == []
