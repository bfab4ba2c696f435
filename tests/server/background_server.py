"""A server that notes what reaches its event loop, and what stays behind when its clients have gone."""

from __future__ import annotations

import asyncio
import traceback
from typing import Any

from served import ServerOnThread

from headwater.server.server import Server

PATIENCE_S = 20.0


class BackgroundServer(ServerOnThread):
    def __init__(self, server: Server) -> None:
        super().__init__(server)
        self._mishaps: list[str] = []
        self._loop.call_soon_threadsafe(self._loop.set_exception_handler, self._note_mishap)
        self._tasks_at_rest = self.run(self._tasks())

    async def _tasks(self) -> int:
        return len(asyncio.all_tasks())

    async def _at_rest(self) -> list[str]:
        """Waits until nothing is left of any client; what stays is named."""
        server = self._server
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
