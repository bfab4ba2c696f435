"""Mounts: paths of another room on the same port, with text and binary messages, and the server's own rules."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest
from foreign_client import PATIENCE_S, Serve
from raw_http import UPGRADE, dial, get
from websockets.asyncio.client import ClientConnection
from websockets.asyncio.client import connect as dial_socket
from websockets.exceptions import InvalidStatus
from websockets.frames import Frame, Opcode

from headwater.broker.flow import run_async
from headwater.server.auth import Scopes, TokenFile
from headwater.server.mount import (
    HttpRequest,
    HttpResponse,
    MountContext,
    MountSession,
    MountTransport,
    Refusal,
    Rights,
    UpgradeRequest,
)
from headwater.server.server import Server

MESSAGE_BYTES_MAX = 300_000


class Session:
    def __init__(self, mount: Shed, transport: MountTransport) -> None:
        self.mount = mount
        self.transport = transport
        self.heard: list[str | bytes] = []
        self.pauses_after: int | None = None
        self.drained = asyncio.Event()
        self.closed: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

    def receive_text(self, text: bytes) -> None:
        self._hear(text.decode())
        if text == b"echo":
            self.transport.send_text(b"text")
            self.transport.send_binary(b"\x00binary")

    def receive_binary(self, data: bytes) -> None:
        self._hear(data)

    def _hear(self, what: str | bytes) -> None:
        self.heard.append(what)
        self.mount.news.set()
        if len(self.heard) == self.pauses_after:
            self.transport.pause_reading()

    def on_drained(self) -> None:
        self.drained.set()

    def on_closed(self, *, vanished: bool) -> None:
        self.closed.set_result(vanished)


class Shed:
    prefix = "/shed/"
    message_bytes_max = MESSAGE_BYTES_MAX

    def __init__(self) -> None:
        self.sessions: list[Session] = []
        self.news = asyncio.Event()
        self.seen: list[tuple[str | None, Rights | None]] = []
        self.context: MountContext | None = None
        self.gate: asyncio.Event | None = None
        self.published_at_stop = False

    async def start(self, context: MountContext) -> None:
        self.context = context

    async def stop(self) -> None:
        assert self.context is not None
        await self.context.publish("shed.stopped", {}, "last")  # the log is still open
        self.published_at_stop = True
        for session in self.sessions:
            session.transport.close(1001, "going away")

    async def admit(
        self, request: UpgradeRequest, transport: MountTransport, bearer: str | None, rights: Rights | None
    ) -> MountSession | Refusal:
        self.seen.append((bearer, rights))
        if self.gate is not None:
            await self.gate.wait()
        if request.target == "/shed/broken":
            raise RuntimeError("no idea")
        if request.target == "/shed/no":
            return Refusal(418, "no tea here")
        self.sessions.append(Session(self, transport))
        return self.sessions[-1]

    async def answer(self, request: HttpRequest, bearer: str | None, rights: Rights | None) -> HttpResponse:
        self.seen.append((bearer, rights))
        return HttpResponse(200, "text/plain", f"{request.method} {request.target} {len(request.body)}".encode())

    async def heard(self, count: int) -> list[str | bytes]:
        async with asyncio.timeout(PATIENCE_S):
            while len(self.sessions[-1].heard) < count:
                self.news.clear()
                await self.news.wait()
        return self.sessions[-1].heard


def open_socket(server: Server, path: str = "/shed/here", **more: Any) -> Any:
    return dial_socket(server.url + path, compression=None, proxy=None, **more)


async def messages_in(server: Server) -> int:
    assert server._context is not None
    return (await run_async(server._context.core.statistics())).messages


async def close_code(socket: ClientConnection) -> int:
    async with asyncio.timeout(PATIENCE_S):
        await socket.wait_closed()
    assert socket.close_code is not None
    return socket.close_code


async def test_texts_and_binaries_come_and_go_in_order(serve_mount: Serve) -> None:
    shed = Shed()
    async with serve_mount(shed) as server, open_socket(server) as socket:
        sent: list[str | bytes] = []
        for size in (0, 1, 125, 126, 65_536, 262_144):
            sent += [os.urandom(size), f"text {size}"]
        for message in sent:
            await socket.send(message)
        await socket.send(["in ", "pieces"])
        await socket.send([b"in ", b"binary ", b"pieces"])
        await socket.send("echo")
        sent += ["in pieces", b"in binary pieces", "echo"]
        assert await shed.heard(len(sent)) == sent
        assert [await socket.recv(), await socket.recv()] == ["text", b"\x00binary"]


async def test_a_message_longer_than_the_mount_allows_is_refused_and_one_that_json_rpc_would_refuse_is_not(
    serve_mount: Serve,
) -> None:
    shed = Shed()
    async with serve_mount(shed, **{"limits.frame_bytes": 65_536}) as server, open_socket(server) as socket:
        await socket.send(bytes(MESSAGE_BYTES_MAX))
        await shed.heard(1)
        await socket.send(bytes(MESSAGE_BYTES_MAX + 1))
        assert await close_code(socket) == 1009
        assert len(shed.sessions[0].heard) == 1


async def test_json_rpc_beside_a_mount_still_refuses_binary_with_all_its_pieces(serve_mount: Serve) -> None:
    async with serve_mount(Shed()) as server, open_socket(server, "/rpc") as socket:
        call = b'{"jsonrpc":"2.0","method":"rpc.publish","params":{"topic":"a","data":1},"id":1}'
        pieces = [Frame(Opcode.BINARY, b"{", fin=False), Frame(Opcode.CONT, call)]
        socket.transport.write(b"".join(piece.serialize(mask=True) for piece in pieces))
        assert await close_code(socket) == 1003
        assert await messages_in(server) == 0


async def test_a_guest_that_pauses_hears_nothing_more_until_it_resumes(serve_mount: Serve) -> None:
    shed = Shed()
    async with serve_mount(shed) as server, open_socket(server) as socket:
        await socket.send("first")
        session = shed.sessions[0]
        await shed.heard(1)
        session.pauses_after = 3
        total = 400
        sending = asyncio.create_task(_send_all(socket, [bytes(100_000)] * total))
        await shed.heard(3)
        done, _ = await asyncio.wait([sending], timeout=0.3)  # 40 MB fit in no buffer between the two
        assert not done
        assert len(session.heard) == 3
        session.transport.resume_reading()
        await shed.heard(total + 1)
        await sending


async def _send_all(socket: ClientConnection, messages: list[bytes]) -> None:
    for message in messages:
        await socket.send(message)


async def test_a_client_that_does_not_read_fills_a_bounded_buffer_and_the_guest_hears_when_it_is_drained(
    serve_mount: Serve,
) -> None:
    shed = Shed()
    async with serve_mount(shed) as server, open_socket(server, max_queue=1) as socket:
        await socket.send("hello")
        await shed.heard(1)
        session = shed.sessions[0]
        sent = 0
        while session.transport.buffered_bytes() <= session.transport.outbound_bytes_max:
            session.transport.send_binary(bytes(200_000))
            sent += 1
            await asyncio.sleep(0)
        assert not session.drained.is_set()
        for _ in range(sent):
            assert len(await socket.recv()) == 200_000
        async with asyncio.timeout(PATIENCE_S):
            await session.drained.wait()


async def test_a_guest_hears_how_its_client_left(serve_mount: Serve) -> None:
    shed = Shed()
    async with serve_mount(shed) as server:
        async with open_socket(server):
            pass
        async with open_socket(server) as socket:
            socket.transport.abort()
        async with dial(server) as raw:
            raw.send(f"GET /shed/x HTTP/1.1\r\nHost: localhost\r\n{UPGRADE}\r\n")
            assert (await raw.response()).status == 101
            raw.send(Frame(Opcode.BINARY, bytes(1000)).serialize(mask=True)[:500])  # cut in mid-frame
        async with asyncio.timeout(PATIENCE_S):
            assert [await session.closed for session in shed.sessions] == [False, True, True]
        assert server.metrics.connections._value.get() == 0
        assert shed.sessions[2].heard == []


async def test_what_the_mount_refuses_is_refused_at_the_upgrade(serve_mount: Serve) -> None:
    async with serve_mount(Shed()) as server:
        with pytest.raises(InvalidStatus) as refused:
            await open_socket(server, "/shed/no")
        assert refused.value.response.status_code == 418
        assert b"no tea here" in refused.value.response.body
        with pytest.raises(InvalidStatus) as refused:
            await open_socket(server, "/elsewhere")
        assert refused.value.response.status_code == 404


async def test_what_comes_with_the_head_waits_for_the_admission(serve_mount: Serve) -> None:
    shed = Shed()
    shed.gate = asyncio.Event()
    async with serve_mount(shed) as server, dial(server) as raw, dial(server) as leaving:
        frames = Frame(Opcode.TEXT, b"early").serialize(mask=True) + Frame(Opcode.BINARY, b"bird").serialize(mask=True)
        head = f"GET /shed/x HTTP/1.1\r\nHost: localhost\r\n{UPGRADE}\r\n".encode()
        raw.send(head + frames)
        leaving.send(head)
        while len(shed.seen) < 2:
            await asyncio.sleep(0)
        for incoming in server.acceptor.connections:  # over TLS more data may arrive although reading is paused
            assert incoming.websocket is not None
            incoming.websocket.data_received(Frame(Opcode.TEXT, b"in between").serialize(mask=True))
        leaving.writer.transport.abort()
        shed.gate.set()
        assert (await raw.response()).status == 101
        async with asyncio.timeout(PATIENCE_S):
            assert await shed.sessions[1].closed
        while len(shed.sessions[0].heard) < 3:
            await asyncio.sleep(0)
        assert shed.sessions[0].heard == ["early", b"bird", "in between"]


async def test_a_mount_that_fails_to_say_yes_or_no_says_500(serve_mount: Serve) -> None:
    async with serve_mount(Shed()) as server:
        with pytest.raises(InvalidStatus) as refused:
            await open_socket(server, "/shed/broken")
        assert refused.value.response.status_code == 500


async def test_the_rules_of_the_server_hold_for_its_mounts(serve_mount: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    shed = Shed()
    async with serve_mount(shed, **{"limits.connections": 1}) as server:
        with pytest.raises(InvalidStatus) as refused:
            await open_socket(server, origin="http://elsewhere.example")
        assert refused.value.response.status_code == 403
        assert (await get(server, "/shed/x", "Origin: http://elsewhere.example\r\n")).status == 403
        async with open_socket(server):
            with pytest.raises(InvalidStatus) as refused:
                await open_socket(server)
            assert refused.value.response.status_code == 503
        assert server._context is not None
        while server.acceptor.connections:
            await asyncio.sleep(0)
        monkeypatch.setattr(Server, "port", server.port)  # which a server that is not ready does not tell
        server._context.is_ready = False
        with pytest.raises(InvalidStatus) as refused:
            await open_socket(server)
        assert refused.value.response.status_code == 503
        assert (await get(server, "/shed/x")).status == 503
        server._context.is_ready = True
    assert len(shed.sessions) == 1


async def test_plain_http_under_the_prefix_is_answered_by_the_mount(serve_mount: Serve) -> None:
    async with serve_mount(Shed()) as server, dial(server) as raw:
        assert (await raw.get("/shed/a?b=c", method="DELETE")).body == b"DELETE /shed/a?b=c 0"
        raw.send("POST /shed/a HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\n\r\nhello")
        assert (await raw.response()).body == b"POST /shed/a 5"
        assert (await raw.get("/shed")).status == 404


async def test_a_mount_sees_the_bearer_and_what_the_server_knows_of_it(serve_mount: Serve, tmp_path: Path) -> None:
    tokens = TokenFile(tmp_path / "tokens.json")
    token = tokens.create("t", Scopes(publish=("replica.a.>",), read=("replica.>",), consume=("*",)), now_ms=1)
    shed = Shed()
    async with serve_mount(shed, **{"server.tokens": str(tmp_path / "tokens.json")}) as server:
        assert shed.context is not None
        assert shed.context.needs_token
        for bearer in (token, "hwpush_unknown", None):
            headers = {} if bearer is None else {"Authorization": f"Bearer {bearer}"}
            async with open_socket(server, additional_headers=headers):
                pass
        await get(server, "/shed/x", f"Authorization: Bearer {token}\r\n")
    assert [bearer for bearer, _ in shed.seen] == [token, "hwpush_unknown", None, token]
    known, unknown, anonymous, over_http = (rights for _, rights in shed.seen)
    assert unknown is None
    assert anonymous is None
    for rights in (known, over_http):
        assert rights is not None
        assert rights.may_publish("replica.a.app.db")
        assert not rights.may_publish("replica.b.app.db")
        assert rights.may_read("replica.b.app.db")
        assert not rights.may_read("orders")


async def test_a_mount_starts_after_the_log_and_stops_before_it(serve_mount: Serve) -> None:
    shed = Shed()
    async with serve_mount(shed) as server:
        assert shed.context is not None
        assert not shed.context.needs_token
        await shed.context.publish("replica.a.b", {"version": 1}, "replica-1")
        await shed.context.publish("replica.a.b", {"version": 1}, "replica-1")  # known by its id
        assert await messages_in(server) == 1
        socket = await open_socket(server)
    assert shed.published_at_stop
    assert await close_code(socket) == 1001


async def test_a_mount_that_cannot_start_keeps_the_server_from_starting(serve_mount: Serve) -> None:
    class Broken(Shed):
        async def start(self, context: MountContext) -> None:
            raise RuntimeError("no shed")

    with pytest.raises(RuntimeError, match="no shed"):
        await serve_mount(Broken()).start()


async def test_a_mount_that_never_stops_is_cut_off_at_the_timeout(serve_mount: Serve) -> None:
    class Slow(Shed):
        async def stop(self) -> None:
            await asyncio.Event().wait()

    shed = Slow()
    async with serve_mount(shed, **{"server.shutdown_timeout": 0.1}) as server:
        socket = await open_socket(server)
    await close_code(socket)
    assert await shed.sessions[0].closed
