"""A test that is a coroutine function runs in a loop of its own. A conftest takes it up by importing the hook."""

from __future__ import annotations

import asyncio
import inspect
from typing import Any

import pytest

TEST_S_MAX = 90.0
SETTLING_TURNS = 200


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = pyfuncitem._fixtureinfo.argnames
    asyncio.run(_without_a_trace(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names})))
    return True


async def _without_a_trace(test: Any) -> None:
    """Run a test; exceptions that reach the event loop and tasks that are left over fail it."""
    mishaps: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: mishaps.append(context))
    await asyncio.wait_for(test, TEST_S_MAX)
    for _ in range(SETTLING_TURNS):
        if len(asyncio.all_tasks()) == 1:
            break
        await asyncio.sleep(0.001)
    left = asyncio.all_tasks() - {asyncio.current_task()}
    assert not left, f"still running: {left}"
    assert not mishaps, f"raised on the event loop: {mishaps}"
