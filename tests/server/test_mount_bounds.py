"""What one client can make the server keep, on any path: answers, pongs, pieces; and liveness on a thin line."""

from __future__ import annotations

import asyncio
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from foreign_client import PATIENCE_S, Serve
from raw_http import UPGRADE, dial, get
from websockets.frames import Frame, Opcode

from headwater.protocol.websocket import ServerSocket
from headwater.server.budget import Budget
from headwater.server.listener import WebSocketTransport
from headwater.server.mount import (
    HttpRequest,
    HttpResponse,
    MountContext,
    MountTransport,
    Rights,
    UpgradeRequest,
    path_of,
)
from headwater.settings import Limits

PAGE = bytes(200_000)
UPGRADED = f"GET /shed/x HTTP/1.1\r\nHost: localhost\r\n{UPGRADE}\r\n".encode()


class Deaf:
    """A mount and its session in one, as far as they are needed here."""

    prefix = "/shed/"
    message_bytes_max = 1_000

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.transports: list[MountTransport] = []

    async def start(self, context: MountContext) -> None: ...

    async def stop(self) -> None: ...

    async def admit(
        self, request: UpgradeRequest, transport: MountTransport, bearer: str | None, rights: Rights | None
    ) -> Deaf:
        self.transports.append(transport)
        return self

    async def answer(self, request: HttpRequest, bearer: str | None, rights: Rights | None) -> HttpResponse:
        self.asked.append(request.target)
        if request.target == "/shed/nothing":
            return HttpResponse(204, "text/plain", b"")
        return HttpResponse(200, "text/plain", request.target.encode() + PAGE)

    def receive_text(self, text: bytes) -> None: ...

    def receive_binary(self, data: bytes) -> None: ...

    def on_drained(self) -> None: ...

    def on_closed(self, *, vanished: bool) -> None: ...


async def test_a_client_that_asks_without_reading_is_paused_and_gets_all_answers_when_it_reads(
    serve_mount: Serve,
) -> None:
    mount, count = Deaf(), 200
    async with serve_mount(mount) as server, dial(server) as raw:
        for number in range(count):
            raw.send(f"GET /shed/{number} HTTP/1.1\r\nHost: localhost\r\n\r\n")
        asked = -1
        while asked < len(mount.asked):  # until no more are answered
            asked = len(mount.asked)
            await asyncio.sleep(0.05)
        assert asked < count
        for number in range(count):
            assert (await raw.response()).body == f"/shed/{number}".encode() + PAGE
        assert (await raw.get("/healthz")).status == 200


@pytest.mark.usefixtures("short_close")
@pytest.mark.parametrize("path", ["/shed/x", "/rpc"])
async def test_a_client_that_pings_and_reads_nothing_is_disconnected(serve_mount: Serve, path: str) -> None:
    pings = Frame(Opcode.PING, bytes(125)).serialize(mask=True) * 1_000
    async with serve_mount(Deaf(), **{"limits.outbound_bytes": 65_536}) as server, dial(server) as raw:
        raw.send(UPGRADED.replace(b"/shed/x", path.encode()))
        assert (await raw.response()).status == 101
        for _ in range(400):  # 50 MB, more than the system takes
            raw.send(pings)
            if raw.writer.transport.is_closing():
                break
            await asyncio.sleep(0)
        async with asyncio.timeout(PATIENCE_S):
            while server.acceptor.connections:
                await asyncio.sleep(0.01)


def test_pieces_without_content_take_no_memory() -> None:
    socket = ServerSocket(1_000_000)
    request = socket.receive_request(UPGRADED)
    assert request is not None
    assert socket.accept(request)
    assert socket.receive_messages(Frame(Opcode.TEXT, b"a", fin=False).serialize(mask=True)) == []
    assert socket.receive_messages(Frame(Opcode.CONT, b"", fin=False).serialize(mask=True) * 5_000) == []
    assert sys.getsizeof(socket._fragments) < 1_000
    assert socket.receive_messages(Frame(Opcode.CONT, b"b").serialize(mask=True)) == [(b"ab", True)]


@pytest.mark.parametrize(
    ("target", "path"),
    [
        ("/a/b?c#d", "/a/b"),
        ("/a#b?c", "/a"),
        ("//x/sapi/push", "//x/sapi/push"),
        ("//[", "//["),
        ("http://here/a?b", "/a"),
        ("http://[/a", ""),
        ("*", "*"),
    ],
)
def test_the_path_of_a_request(target: str, path: str) -> None:
    assert path_of(target) == path


async def test_a_target_that_is_none_is_not_found(serve_mount: Serve) -> None:
    async with serve_mount(Deaf()) as server, dial(server) as raw:
        assert (await get(server, "//[")).status == 404
        assert (await get(server, "//x/shed/x")).status == 404
        raw.send(UPGRADED.replace(b"/shed/x", b"//["))
        assert (await raw.response()).status == 404


async def test_an_answer_without_content_has_no_length_either(serve_mount: Serve) -> None:
    async with serve_mount(Deaf()) as server, dial(server) as raw:
        answer = await raw.get("/shed/nothing")
        assert (answer.status, "content-length" in answer.headers) == (204, False)
        assert (await raw.get("/healthz")).status == 200


# --- liveness --------------------------------------------------------------------------------------------------------


class ThinLine:
    """A transport, and a loop whose clock is turned by hand."""

    def __init__(self) -> None:
        self.now_s = 1.0
        self.unread = 0
        self.is_cut = False
        self.is_reading = True

    def pause_reading(self) -> None:
        self.is_reading = False

    def resume_reading(self) -> None:
        self.is_reading = True

    def can_write_eof(self) -> bool:
        return False

    def time(self) -> float:
        return self.now_s

    def call_later(self, *_: Any) -> None: ...

    def set_write_buffer_limits(self, **_: int) -> None: ...

    def get_write_buffer_size(self) -> int:
        return self.unread

    def is_closing(self) -> bool:
        return False

    def write(self, data: bytes) -> None:
        self.unread += len(data)

    def abort(self) -> None:
        self.is_cut = True


def thin_transport(line: ThinLine, limits: Limits) -> WebSocketTransport:
    server = SimpleNamespace(limits=limits, inbound=Budget(1_000_000), outbound=Budget(1_000_000))
    transport = WebSocketTransport(SimpleNamespace(transport=line, server=server, address=""))  # type: ignore[arg-type]
    transport._loop, transport._received_s, transport._idle_frames_s = line, line.now_s, line.now_s  # type: ignore[assignment]
    request = transport._socket.receive_request(UPGRADED)
    assert request is not None
    transport._socket.accept(request)
    transport._flush()
    return transport


@pytest.mark.parametrize("reads", [True, False])
async def test_a_client_that_reads_slowly_is_alive_though_as_much_is_written_as_it_reads(reads: bool) -> None:
    line, limits = ThinLine(), Limits()
    transport = thin_transport(line, limits)
    for _ in range(6):
        line.now_s += limits.ping_interval
        line.unread -= 50_000 if reads and line.unread > 50_000 else 0
        transport.send_binary(bytes(60_000))
        transport._check_liveness()
    assert line.is_cut is not reads


async def test_a_client_that_is_not_listened_to_is_not_let_go_for_its_silence() -> None:
    """It cannot answer a ping: the server has no room for what it sends, and does not read."""
    line, limits = ThinLine(), Limits()
    transport = thin_transport(line, limits)
    transport._is_held = True
    for _ in range(6):
        line.now_s += limits.ping_interval
        transport._check_liveness()
    assert not line.is_cut
    transport._is_held = False
    for _ in range(6):
        line.now_s += limits.ping_interval
        transport._check_liveness()
    assert line.is_cut


async def test_a_stranger_that_waits_for_an_answer_is_not_read_beyond_its_bytes() -> None:
    line, limits = ThinLine(), Limits()
    transport = thin_transport(line, limits)
    client = SimpleNamespace(is_unauthenticated=True, is_busy=True, owner="")
    client.receive_text = client.on_closed = lambda *_, **__: None
    transport._client = client  # type: ignore[assignment]
    text = Frame(Opcode.TEXT, b"x" * 10_000).serialize(mask=True)
    while transport._received_bytes <= limits.unauthenticated_bytes:
        assert line.is_reading
        transport.data_received(text)
    assert not line.is_reading
    assert transport._socket.is_open
    client.is_busy = False
    transport.hold(0)  # it was answered, and is a stranger as before
    assert line.is_reading
    transport.data_received(text)
    assert not transport._socket.is_open
