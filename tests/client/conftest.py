"""Clients against real servers on real sockets. A test that is a coroutine function runs in a loop of its own."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from fault_proxy import FaultProxy
from served import RunningServer

import headwater
from headwater.client.options import TOKEN_VARIABLE
from headwater.server.serving import Server

TEST_S_MAX = 60.0
SETTLING_TURNS = 100

Serve = Callable[..., Server]
ProxyTo = Callable[[int], FaultProxy]


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = pyfuncitem._fixtureinfo.argnames
    asyncio.run(_without_a_trace(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names})))
    return True


async def _without_a_trace(test: Any) -> None:
    """Run a test; what was raised where nobody looks, and tasks that are left over, fail it."""
    mishaps: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: mishaps.append(context))
    await asyncio.wait_for(test, TEST_S_MAX)
    for _ in range(SETTLING_TURNS):
        if len(asyncio.all_tasks()) == 1:
            break
        await asyncio.sleep(0.001)
    left = asyncio.all_tasks() - {asyncio.current_task()}
    assert not left, f"still running: {left}"
    assert not mishaps, f"raised where nobody looks: {mishaps}"


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
