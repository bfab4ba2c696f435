"""A server on a thread with a loop of its own, for tests that are no coroutines."""

from __future__ import annotations

import asyncio
import threading
import traceback
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from headwater.server.server import Server

T = TypeVar("T")
PATIENCE_S = 20.0


class BackgroundServer:
    def __init__(self, make: Callable[[], Server]) -> None:
        self._mishaps: list[str] = []
        self._loop = asyncio.new_event_loop()
        self._loop.set_exception_handler(self._note_mishap)
        self._thread = threading.Thread(target=self._loop.run_forever, name="server under test", daemon=True)
        self._thread.start()
        self.server = make()
        self.run(self.server.start())
        self.url = self.server.url
        self.port = self.server.port
        self._tasks_at_rest = self.run(self._tasks())

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(PATIENCE_S)

    async def _tasks(self) -> int:
        return len(asyncio.all_tasks())

    async def _at_rest(self) -> list[str]:
        """Waits until nothing is left of any client; what stays is named."""
        server = self.server
        for _ in range(int(PATIENCE_S * 100)):
            context = server._context
            assert context is not None
            kept = {
                "connections": context.connections,
                "closing": context.closing,
                "incoming": server.acceptor.connections,
            }
            left = [f"{len(each)} {name}" for name, each in kept.items() if each]
            tasks = len(asyncio.all_tasks()) - self._tasks_at_rest
            # The live feed follows the log from the first live subscription on.
            live = context.live._follower is not None
            gauge = server.metrics.connections._value.get()
            if not left and tasks <= live and gauge == 0:
                return []
            await asyncio.sleep(0.01)
        return [*left, f"{tasks} tasks", f"the gauge says {gauge}"]

    def _note_mishap(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        exc = context.get("exception")
        trace = "" if exc is None else "".join(traceback.format_exception(exc))
        self._mishaps.append(f"{context['message']}\n{trace}")

    def take_mishaps(self) -> list[str]:
        """Exceptions that reached the event loop since the last call."""
        mishaps, self._mishaps = self._mishaps, []
        return mishaps

    def check_nothing_is_left(self) -> None:
        assert self.run(self._at_rest()) == []
        assert self.take_mishaps() == []

    def stop(self) -> None:
        self.run(self.server.stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(PATIENCE_S)
        self._loop.close()
