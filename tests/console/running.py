"""A server on a thread with its own event loop, for tests that drive a browser and wait for it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future

from headwater.server.server import Server

SECONDS_MAX = 60


class Running:
    def __init__(self, server: Server) -> None:
        self._server = server
        self._ready: Future[asyncio.AbstractEventLoop] = Future()
        self._thread = threading.Thread(target=self._run, name="console-server", daemon=True)
        self._thread.start()
        self._loop = self._ready.result(SECONDS_MAX)
        self.url = server.url
        self.port = server.port

    @property
    def page(self) -> str:
        return self.url.replace("ws://", "http://") + "/"

    def _run(self) -> None:
        try:
            self._server.run(lambda _: self._ready.set_result(asyncio.get_running_loop()))
        except BaseException as exc:
            if self._ready.done():
                raise
            self._ready.set_exception(exc)

    def do(self, what: Callable[[Server], None]) -> None:
        """Do something to the server, where it lives."""
        done: Future[None] = Future()

        def run() -> None:
            what(self._server)
            done.set_result(None)

        self._loop.call_soon_threadsafe(run)
        done.result(SECONDS_MAX)

    def stop(self) -> None:
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._server.ask_to_stop)
            self._thread.join(SECONDS_MAX)
        assert not self._thread.is_alive(), "the server does not stop"
