"""Plain HTTP on the same port: health, readiness, and what breaks its rules."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import apsw
import pytest
from foreign_client import PATIENCE_S, Serve, connect, turn
from raw_http import UPGRADE, dial, get

from headwater.errors import DiskFullError
from headwater.server import listener, pages

HEAD = "Host: localhost\r\n"


async def test_health_and_readiness(serve: Serve) -> None:
    async with serve() as server:
        alive = await get(server, "/healthz")
        assert (alive.status, alive.headers["content-type"]) == (200, "application/json")
        assert json.loads(alive.body)["status"] == "alive"
        ready = await get(server, "/readyz?verbose=1")
        assert (ready.status, json.loads(ready.body)) == (200, {"status": "ready"})
        assert (await get(server, "/")).status == 200


async def test_what_is_not_there_is_404_and_what_may_not_be_done_405(serve: Serve) -> None:
    async with serve("memory:") as server:
        nothing = await get(server, "/nothing")
        assert nothing.status == 404
        assert b"/rpc" in nothing.body  # it says where to go instead
        for method in ("POST", "PUT", "DELETE", "OPTIONS"):
            assert (await get(server, "/metrics", "Content-Length: 0\r\n", method)).status == 405


async def test_a_head_request_has_the_headers_and_no_body(serve: Serve) -> None:
    async with serve("memory:") as server, dial(server) as raw:
        head = await raw.get("/healthz", method="HEAD")
        assert head.status == 200
        whole = await raw.get("/healthz")  # on the same connection: had there been a body, this would choke on it
        assert int(head.headers["content-length"]) == len(whole.body) > 0


async def test_a_connection_is_used_again_and_requests_may_be_sent_ahead(serve: Serve) -> None:
    async with serve("memory:") as server, dial(server) as raw:
        for _ in range(3):
            assert (await raw.get("/healthz")).status == 200
        raw.send(
            f"GET /healthz HTTP/1.1\r\n{HEAD}\r\n"
            f"POST /nothing HTTP/1.1\r\n{HEAD}Content-Length: 5\r\n\r\nhello"
            f"GET /readyz HTTP/1.1\r\n{HEAD}Connection: close\r\n\r\n"
        )
        assert [(await raw.response()).status for _ in range(3)] == [200, 404, 200]
        assert await raw.ended() == b""


async def test_old_clients_are_hung_up_on_after_their_answer(serve: Serve) -> None:
    async with serve("memory:") as server, dial(server) as raw:
        raw.send("GET /healthz HTTP/1.0\r\n\r\n")
        assert (await raw.response()).status == 200
        assert await raw.ended() == b""


async def test_a_head_may_come_byte_by_byte(serve: Serve) -> None:
    async with serve("memory:") as server, dial(server) as raw:
        for byte in f"GET /healthz HTTP/1.1\r\n{HEAD}\r\n":
            raw.send(byte)
            await raw.writer.drain()
            await asyncio.sleep(0)
        assert (await raw.response()).status == 200


async def test_a_client_that_closed_its_half_still_gets_its_answer(serve: Serve) -> None:
    async with serve("memory:") as server, dial(server) as raw:
        raw.send(f"GET /readyz HTTP/1.1\r\n{HEAD}Connection: close\r\n\r\n")
        raw.writer.write_eof()
        assert (await raw.response()).status == 200


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (f"GET /healthz HTTP/1.1\r\n{HEAD}X: {'y' * 5_000}\r\n\r\n", 431),  # though it came in one piece
        (f"GET /rpc HTTP/1.1\r\n{HEAD}{UPGRADE}X: {'y' * 5_000}\r\n\r\n", 431),
        ("GET /" + "y" * 5_000, 431),
        (f"POST /healthz HTTP/1.1\r\n{HEAD}Content-Length: 2000000\r\n\r\n" + "x" * 1_100_000, 413),
        (f"POST /healthz HTTP/1.1\r\n{HEAD}Transfer-Encoding: chunked\r\n\r\n" + "1000\r\n" + "x" * 4096 + "\r\n", 413),
        (f"POST /healthz HTTP/1.1\r\n{HEAD}Content-Length: nonsense\r\n\r\n", 400),
        ("nonsense\r\n\r\n", 400),
        ("GET /healthz HTTP/1.1\r\n\r\n", 400),  # no Host
        (f"GET /healthz HTTP/1.1\r\n{HEAD} folded: x\r\nNo colon\r\n\r\n", 400),
    ],
)
async def test_what_is_too_large_or_no_http_is_refused_and_ended(serve: Serve, sent: str, status: int) -> None:
    async with serve("memory:", limits_http_head_bytes=4_096) as server, dial(server) as raw:
        if "chunked" in sent:
            head, _, chunk = sent.partition("\r\n\r\n")
            sent = head + "\r\n\r\n" + chunk * 300
        raw.send(sent)
        response = await raw.response()
        assert response.status == status
        assert response.headers["connection"] == "close"
        assert await raw.ended() == b""
        assert (await get(server, "/healthz")).status == 200


async def test_a_body_within_the_limit_is_read_and_expect_continue_is_answered(serve: Serve) -> None:
    async with serve("memory:") as server, dial(server) as raw:
        raw.send(f"POST /nothing HTTP/1.1\r\n{HEAD}Content-Length: 5\r\nExpect: 100-continue\r\n\r\n")
        assert (await raw.response()).status == 100
        raw.send("hello")
        assert (await raw.response()).status == 404


@pytest.mark.parametrize(
    "sent",
    [
        "",
        "GET /healthz HT",
        f"POST /x HTTP/1.1\r\n{HEAD}Content-Length: 10\r\n\r\nhel",
        f"GET /healthz HTTP/1.1\r\n{HEAD}\r\n",
    ],
    ids=["nothing", "half a head", "half a body", "a whole request and then nothing"],
)
async def test_a_slow_request_is_cut(serve: Serve, sent: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "HTTP_SECONDS_MAX", 0.2)
    async with serve("memory:") as server, dial(server) as raw:
        raw.send(sent)
        await raw.ended()
        async with asyncio.timeout(PATIENCE_S):
            while server.acceptor.connections:
                await turn()


async def test_an_upgraded_connection_is_not_cut(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "HTTP_SECONDS_MAX", 0.5)
    async with serve("memory:") as server, connect(server) as client, dial(server) as slow:
        slow.send("GET / HT")
        await slow.ended()  # by now it would have been cut, too
        assert await client.publish("a") == 1


# --- readiness --------------------------------------------------------------------------------------------------------


async def test_a_log_that_cannot_be_written_is_not_ready(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages, "CACHED_S", 0.0)
    monkeypatch.setattr(pages, "PROBE_SECONDS_MAX", 0.2)
    async with serve() as server:
        other = apsw.Connection(str(tmp_path / "log.db"))
        other.execute("BEGIN IMMEDIATE")  # another connection keeps the lock
        not_ready = await get(server, "/readyz")
        assert not_ready.status == 503
        assert "write" in json.loads(not_ready.body)["why"]
        assert (await get(server, "/healthz")).status == 200  # it is alive all the same
        other.execute("ROLLBACK")
        monkeypatch.setattr(pages, "PROBE_SECONDS_MAX", PATIENCE_S)
        assert (await get(server, "/readyz")).status == 200
        other.close()


async def test_a_failing_store_is_reported_by_its_own_words(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "CACHED_S", 0.0)
    async with serve() as server:
        core = server._context.core  # type: ignore[union-attr]

        def full(*_: Any, **__: Any) -> Any:
            raise DiskFullError("the disk is full")

        with monkeypatch.context() as patched:
            patched.setattr(core.engine.store, "write", full)
            not_ready = await get(server, "/readyz")
        assert (not_ready.status, json.loads(not_ready.body)["why"]) == (503, "the disk is full")
        assert (await get(server, "/readyz")).status == 200


async def test_while_it_stops_it_is_not_ready_and_takes_no_new_client(serve: Serve) -> None:
    server = serve()
    let_go = asyncio.Event()

    @server.method("slow")
    async def slow() -> str:
        await let_go.wait()
        return "done"

    async with server, connect(server) as client, dial(server) as probe, dial(server) as late:
        assert (await probe.get("/readyz")).status == 200
        late.send("GET /rpc HTTP/1.1\r\n")
        working = await client.ask("slow")
        await client.call("rpc.hello")
        stopping = asyncio.create_task(server.stop())
        async with asyncio.timeout(PATIENCE_S):
            while (response := await probe.get("/readyz")).status == 200:
                pass
        assert response.status == 503
        assert "stopping" in json.loads(response.body)["why"]
        assert (await probe.get("/healthz")).status == 200
        late.send(f"{HEAD}{UPGRADE}\r\n")
        assert (await late.response()).status == 503
        let_go.set()
        assert await client.answer(working) == "done"
        assert await client.close_code() == 1001
        await stopping


@pytest.mark.parametrize(("path", "asked"), [("/readyz", "prove_writable"), ("/metrics", "statistics")])
async def test_one_answer_serves_all_requests_within_a_second(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, path: str, asked: str
) -> None:
    monkeypatch.setattr(pages, "CACHED_S", 60.0)
    async with serve() as server:
        core, asks = server._context.core, []  # type: ignore[union-attr]
        ask = getattr(core, asked)
        monkeypatch.setattr(core, asked, lambda *args: asks.append(args) or ask(*args))
        answers = await asyncio.gather(*(get(server, path) for _ in range(20)))
        answers.append(await get(server, path))
        assert {answer.status for answer in answers} == {200}
        assert len(asks) == 1


async def test_readiness_writes(serve: Serve) -> None:
    async with serve() as server:
        wal = server._context.core.engine.store.journal_bytes  # type: ignore[union-attr]
        before = wal()
        assert (await get(server, "/readyz")).status == 200
        assert wal() > before


async def test_a_scrape_that_takes_too_long_says_so(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "SCRAPE_SECONDS_MAX", 0.0)
    async with serve() as server:
        answer = await get(server, "/metrics")
        assert (answer.status, answer.body) == (503, b"not counted within 0 s\n")
