"""A plain echo server on a thread, which records what each connection sent and how it ended."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Self

WAIT_S_MAX = 5.0
CHUNK_BYTES_MAX = 64 * 1024


class EchoServer:
    def __init__(self) -> None:
        self.heard: list[bytes] = []
        """By connection, in the order of their arrival."""
        self.endings: dict[int, str] = {}
        self._changed = threading.Condition()
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]

    def __enter__(self) -> Self:
        self._start(self._accept)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for one in self._sockets:
            with contextlib.suppress(OSError):  # it went first
                one.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(WAIT_S_MAX)

    def wait_until(self, reached: Callable[[], bool]) -> None:
        with self._changed:
            if not self._changed.wait_for(reached, WAIT_S_MAX):
                raise TimeoutError(f"heard {self.heard}, ended {self.endings}")

    def _start(self, work: Callable[..., None], *arguments: object) -> None:
        thread = threading.Thread(target=work, args=arguments, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                one, _ = self._listener.accept()
            except OSError:
                return
            with self._changed:
                self.heard.append(b"")
                self._sockets.append(one)
                self._changed.notify_all()
            self._start(self._echo, one, len(self.heard) - 1)

    def _echo(self, one: socket.socket, number: int) -> None:
        ending = "fin"
        with one:
            try:
                while data := one.recv(CHUNK_BYTES_MAX):
                    with self._changed:
                        self.heard[number] += data
                        self._changed.notify_all()
                    one.sendall(data)
            except OSError:
                ending = "reset"
        with self._changed:
            self.endings[number] = ending
            self._changed.notify_all()
