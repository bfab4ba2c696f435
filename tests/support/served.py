"""Servers on a thread with an event loop of their own; and a log behind one, for tests that are written for a file."""

import asyncio
import threading
from collections.abc import AsyncIterator, Coroutine
from concurrent.futures import Future
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import headwater
from headwater import AsyncLog, Log
from headwater.server.server import Server
from headwater.settings import load_settings
from headwater.wiring import make_server

T = TypeVar("T")

PATIENCE_S = 60


class ServerOnThread:
    """A server on a thread with an event loop of its own, for tests that are no coroutines."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._ready: Future[asyncio.AbstractEventLoop] = Future()
        self._thread = threading.Thread(target=self._run, name="served-log", daemon=True)
        self._thread.start()
        self._loop = self._ready.result(PATIENCE_S)
        self.url = server.url
        self.port = server.port

    def _run(self) -> None:
        try:
            self._server.run(lambda _: self._ready.set_result(asyncio.get_running_loop()))
        except BaseException as exc:
            if self._ready.done():
                raise
            self._ready.set_exception(exc)

    @property
    def page(self) -> str:
        """For browsers."""
        return self.url.replace("ws://", "http://") + "/"

    @property
    def core(self) -> Any:
        """What the server does its work with."""
        assert self._server._context is not None
        return self._server._context.core

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Where the server lives."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(PATIENCE_S)

    def stop(self) -> None:
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._server.ask_to_stop)
            self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive(), "the server does not stop"


class RunningServer(ServerOnThread):
    """Options are those that `headwater.open` takes for a file. The settings are the built-in ones, whatever the
    environment says."""

    def __init__(self, path: Path, port: int = 0, **options: Any) -> None:
        flags = {"server.log": str(path), "server.port": port}
        settings = load_settings(config=None, profile=None, flags=flags, environment={}, directory=str(path.parent))
        super().__init__(make_server(settings, **options))


class ServedFile:
    """A file that is only reached through its server. The server starts with the first log that is opened, and anew
    with the first one after all were closed: so opening again is more than connecting again."""

    def __init__(self, path: Path, **options: Any) -> None:
        self._path = path
        self._options = options
        self._server: RunningServer | None = None
        self._opened: list[Log | AsyncLog] = []

    def url(self, **options: Any) -> str:
        """Where the server is, started with these options if none runs."""
        if self._opened and all(_is_closed(log) for log in self._opened):
            self.stop()
        if self._server is None:
            self._server = RunningServer(self._path, **{**self._options, **options})
        return self._server.url

    def open(self, **options: Any) -> Log:
        log = headwater.open(self.url(**options))
        self._reach_through(log)
        return log

    @asynccontextmanager
    async def connect(self, **options: Any) -> AsyncIterator[AsyncLog]:
        async with headwater.open_async(self.url(**options)) as log:
            self._reach_through(log)
            yield log

    def _reach_through(self, log: Log | AsyncLog) -> None:
        """For what no client can ask for: a heartbeat just now, a disk that is full. It happens where the engine is."""
        assert self._server is not None
        core: Any = log._core
        core.engine, core.heartbeat = self._server.core.engine, self._server.core.heartbeat
        self._opened.append(log)

    def stop(self) -> None:
        server, self._server, self._opened = self._server, None, []
        if server is not None:
            server.stop()


def _is_closed(log: Log | AsyncLog) -> bool:
    core: Any = log._core
    closed: bool = core._closed
    return closed
