"""Clients with a token that send without waiting, or ask without reading: the bytes they make the server hold are
bounded, for each and for all, and a victim's publish does not wait behind theirs."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from attacked import Attacked, call
from websockets.exceptions import ConnectionClosed
from websockets.frames import Frame, Opcode
from websockets.sync.client import ClientConnection

MB = "x" * 1_000_000


def frame(method: str, params: object, id: int = 1) -> bytes:
    text = json.dumps({"jsonrpc": "2.0", "id": id, "method": method, "params": params})
    return Frame(Opcode.TEXT, text.encode()).serialize(mask=True)


@contextlib.contextmanager
def sending(client: ClientConnection, frames: Callable[[], Iterator[bytes]]) -> Iterator[None]:
    """On a thread of its own; it reads no answer, and ends with the block."""

    def send() -> None:
        with contextlib.suppress(OSError):
            for each in frames():
                client.socket.sendall(each)

    thread = threading.Thread(target=send, daemon=True)
    thread.start()
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            client.socket.shutdown(socket.SHUT_RDWR)
        thread.join(30)


def silent(server: Attacked, token: str) -> ClientConnection:
    """Its library reads no more than a few frames."""
    return server.connect(token, max_queue=1, ping_interval=None, close_timeout=0)


@pytest.fixture
def backlog(tmp_path: Path) -> Iterator[tuple[Attacked, str]]:
    """A server with 60 MB of large messages, and a token that may read them."""
    with Attacked(tmp_path) as server:
        token = server.token(publish=["big"], read=["big"], consume=["*"])
        with server.connect(token) as publisher:
            for _ in range(20):
                messages = [{"topic": "big", "data": MB} for _ in range(3)]
                assert call(publisher, "rpc.publish.batch", {"messages": messages})["result"]
        yield server, token


def test_fetches_without_reading(backlog: tuple[Attacked, str]) -> None:
    server, token = backlog
    with server.victim() as victim, contextlib.ExitStack() as attack:
        for number in range(4):
            reader = attack.enter_context(silent(server, token))
            options = {"subscription_id": f"s{number}", "topic": "big", "deliver": "fetch", "max_in_flight": 10_000}
            assert call(reader, "rpc.subscribe.persistent", options)["result"]
            fetch = frame("rpc.fetch", {"subscription_id": f"s{number}", "count": 1_000, "wait": 30})
            attack.enter_context(sending(reader, lambda fetch=fetch: iter([fetch] * 400)))
    server.assert_unharmed(victim, attack="4 × 400 fetches without reading")
    assert server.stop() < 12


def test_pushes_without_reading_or_acking(backlog: tuple[Attacked, str]) -> None:
    server, token = backlog
    with server.victim() as victim, contextlib.ExitStack() as attack:
        for number in range(10):
            reader = attack.enter_context(silent(server, token))
            for id in range(10):
                options = {"subscription_id": f"s{number}-{id}", "topic": "big", "max_in_flight": 10_000}
                reader.socket.sendall(frame("rpc.subscribe.persistent", options))
            reader.socket.sendall(frame("rpc.subscribe", {"topic": "big"}))
        with server.connect(token) as publisher:
            for id in range(20):
                assert call(publisher, "rpc.publish", {"topic": "big", "data": MB}, id)["result"]
    server.assert_unharmed(victim, attack="100 subscriptions without reading")


def test_messages_in_flight_take_no_memory(backlog: tuple[Attacked, str]) -> None:
    """Read, and never acked."""
    server, token = backlog
    with server.victim() as victim, server.connect(token) as reader:
        before_mb = server.rss_mb()
        for number in range(4):
            options = {"subscription_id": f"s{number}", "topic": "big", "deliver": "fetch", "max_in_flight": 10_000}
            assert call(reader, "rpc.subscribe.persistent", options)["result"]
            got, at_once = 0, -1
            while at_once:
                answer = call(reader, "rpc.fetch", {"subscription_id": f"s{number}", "count": 100, "wait": 0})
                at_once = len(answer["result"]["messages"])
                got += at_once
            assert got == 60
        after_mb = server.rss_mb()
    server.assert_unharmed(victim, attack="240 MB in flight")
    assert after_mb - before_mb < 120


def test_large_frames_without_waiting(tmp_path: Path) -> None:
    """From ten connections; the victim's small publishes do not wait for their turn."""
    with Attacked(tmp_path) as server:
        token = server.token(publish=["big"])
        large = frame("rpc.publish.batch", {"messages": [{"topic": "big", "data": MB} for _ in range(4)]})
        with server.victim() as victim, contextlib.ExitStack() as attack:
            for _ in range(10):
                sender = attack.enter_context(silent(server, token))
                attack.enter_context(sending(sender, lambda: iter([large] * 25)))
        server.assert_unharmed(victim, attack="250 frames of 4 MB")


def test_unfinished_frames_of_many(tmp_path: Path) -> None:
    """With a token, so that frames may be long: the budget of all holds, and those that stall are let go."""
    with Attacked(tmp_path) as server:
        token = server.token(publish=["big"])
        large = frame("rpc.publish.batch", {"messages": [{"topic": "big", "data": MB} for _ in range(4)]})
        with server.victim() as victim, contextlib.ExitStack() as attack:
            for _ in range(60):
                sender = attack.enter_context(silent(server, token))
                attack.enter_context(sending(sender, lambda: iter([large[:-1]])))
        server.assert_unharmed(victim, attack="60 unfinished frames of 4 MB")


PINGS = Frame(Opcode.PING, b"").serialize(mask=True) * 2_000
PIECES = Frame(Opcode.CONT, b"", fin=False).serialize(mask=True) * 2_000
NONSENSE = Frame(Opcode.TEXT, b"1").serialize(mask=True) * 2_000


@pytest.mark.parametrize(
    ("first", "flood"),
    [(b"", PINGS), (Frame(Opcode.TEXT, b"[", fin=False).serialize(mask=True), PIECES), (b"", NONSENSE)],
    ids=["pings", "empty pieces", "nonsense"],
)
def test_a_flood_of_small_frames(tmp_path: Path, first: bytes, flood: bytes) -> None:
    with Attacked(tmp_path) as server:
        token = server.token(publish=["mine"])
        with server.victim() as victim, contextlib.ExitStack() as attack:
            for _ in range(3):
                sender = attack.enter_context(silent(server, token))
                attack.enter_context(sending(sender, lambda: iter([first, *[flood] * 100])))
        server.assert_unharmed(victim, attack="a flood of small frames")


def test_pipelined_requests_without_reading(tmp_path: Path) -> None:
    with Attacked(tmp_path) as server:
        requests = b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n" * 2_000
        with server.victim() as victim, contextlib.ExitStack() as attack:
            for _ in range(10):
                raw = attack.enter_context(server.socket())
                raw.settimeout(0.5)
                with contextlib.suppress(OSError):
                    raw.sendall(requests)
        server.assert_unharmed(victim, attack="20,000 pipelined requests")


def test_nothing_is_compressed(tmp_path: Path) -> None:
    """So there is no bomb either: a frame is as long as it says."""
    with Attacked(tmp_path) as server, server.connect(server.token(publish=["mine"])) as client:
        assert client.protocol.extensions == []
        compressed = bytearray(Frame(Opcode.TEXT, b"{}").serialize(mask=True))
        compressed[0] |= 0x40
        client.socket.sendall(compressed)
        with pytest.raises(ConnectionClosed) as closed:
            client.recv(10)
        assert closed.value.rcvd is not None
        assert closed.value.rcvd.code == 1002


def test_an_end_in_time_with_clients_that_do_not_leave(tmp_path: Path) -> None:
    with Attacked(tmp_path, shutdown_timeout=3.0) as server:
        token = server.token(publish=["big"], read=["big"], consume=["*"])
        large = frame("rpc.publish.batch", {"messages": [{"topic": "big", "data": MB} for _ in range(4)]})
        with contextlib.ExitStack() as attack:
            for number in range(5):
                sender = attack.enter_context(silent(server, token))
                options = {"subscription_id": f"s{number}", "topic": "big"}
                assert call(sender, "rpc.subscribe.persistent", options)["result"]
                attack.enter_context(sending(sender, lambda: iter([large] * 10)))
            assert server.stop() < 4.5
