"""Clients against real servers on real sockets. A test that is a coroutine function runs in a loop of its own."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from fault_proxy import FaultProxy
from frame_tap import FrameTap
from served import RunningServer

import headwater
from headwater import AsyncLog
from headwater.client.options import TOKEN_VARIABLE
from headwater.server.server import Server

Serve = Callable[..., Server]
ProxyTo = Callable[[int], FaultProxy]
Proxied = Callable[..., AbstractAsyncContextManager[tuple[Server, FaultProxy, AsyncLog]]]


@pytest.fixture(autouse=True)
def nothing_is_set_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # where no headwater.toml lies
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)


@pytest.fixture
def serve(tmp_path: Path) -> Serve:
    """`async with serve() as server`: a server in the loop of the test, for a log of the test's own."""

    def make(log: str | Path = tmp_path / "log.db", **flags: Any) -> Server:
        return headwater.serve(log, **{"port": 0, **flags})

    return make


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RunningServer]:
    """For tests that have no loop: a server on a thread."""
    running = RunningServer(tmp_path / "log.db")
    yield running
    running.stop()


@pytest.fixture
def proxy_to() -> Iterator[ProxyTo]:
    with ExitStack() as proxies:
        yield lambda port: proxies.enter_context(FaultProxy("127.0.0.1", port))


@pytest.fixture
def tap(monkeypatch: pytest.MonkeyPatch) -> FrameTap:
    return FrameTap(monkeypatch)


@pytest.fixture
def proxied(serve: Serve, proxy_to: ProxyTo) -> Proxied:
    """`async with proxied(timeout=…) as (server, proxy, log)`: a client whose connection can be broken, and is replaced
    soon. With a server as the first argument: to that one."""

    @asynccontextmanager
    async def connect(server: Server | None = None, **options: Any) -> AsyncIterator[Any]:
        async with server or serve() as running:
            proxy = proxy_to(running.port)
            url = f"ws://127.0.0.1:{proxy.port}"
            async with headwater.open_async(url, **{"reconnect_min": 0.01, **options}) as log:
                yield running, proxy, log

    return connect
