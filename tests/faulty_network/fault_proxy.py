"""A TCP proxy that fails on demand, for tests that put it between a client and a server.

It lives on a thread of its own with an event loop of its own, so that sync and asyncio tests can drive it:

    with FaultProxy("127.0.0.1", server_port) as proxy:
        client = connect(proxy.port)
        proxy.cut_after(100, Direction.TO_SERVER)
        client.send(...)
        proxy.wait_until(lambda counts: counts.cuts == 1)

An order returns when it is in force. Faults with no direction given hit both.
"""

from __future__ import annotations

import asyncio
import random
import socket
import threading
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import Any, Self

from fault_connection import Connection, reset_socket
from fault_counts import WAIT_S_MAX, Counts, Tally
from fault_lane import Direction, Weather

ORDER_S_MAX = 10.0
BACKLOG_CONNECTIONS_MAX = 128


def _new_socket() -> socket.socket:
    made = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    made.setblocking(False)
    return made


class FaultProxy:
    """Passes everything on until changed; `heal` takes all faults back."""

    host = "127.0.0.1"

    def __init__(self, target_host: str, target_port: int, *, seed: int = 0) -> None:
        self.port = 0
        self._target = (target_host, target_port)
        self._dice = random.Random(seed)
        self._tally = Tally()
        self._weather = {direction: Weather() for direction in Direction}
        self._connections: dict[Connection, asyncio.Task[None]] = {}
        self._joining: set[asyncio.Task[None]] = set()
        self._accepting: asyncio.Task[None] | None = None
        self._number = 0
        self._wait_for_return = False
        self._late: dict[Connection, int] = {}
        """Orphaned connections that wait for their client's return -> the newest connection when it left."""
        self._errors: list[BaseException] = []
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="fault-proxy", daemon=True)

    def __enter__(self) -> Self:
        # A second socket on the port, which never listens: while connections are refused, it keeps the port ours.
        self._placeholder = _new_socket()
        self._placeholder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        self._placeholder.bind((self.host, 0))
        self.port = self._placeholder.getsockname()[1]
        self._thread.start()
        self.accept()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.stop()
        if self._errors and error is None:
            raise BaseExceptionGroup("the proxy itself failed", self._errors)

    def stop(self) -> None:
        """Everything is reset, and nothing answers on the port any more."""
        if not self._thread.is_alive():
            return
        self._order(self._stop_accepting)
        self.reset()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(ORDER_S_MAX)
        self._loop.close()
        self._placeholder.close()

    # What happened.

    @property
    def counts(self) -> Counts:
        return self._tally.now()

    def wait_until(self, reached: Callable[[Counts], bool], timeout_s: float = WAIT_S_MAX) -> Counts:
        return self._tally.wait_until(reached, timeout_s)

    # Slow.

    def latency(self, delay_s: float, jitter_s: float = 0.0, direction: Direction | None = None) -> None:
        """Each chunk waits that long, and up to the jitter longer; order is kept."""
        self._change(direction, delay_s=delay_s, jitter_s=jitter_s)

    def throttle(self, bytes_per_s: float | None, direction: Direction | None = None) -> None:
        """For each connection by itself."""
        self._change(direction, bytes_per_s=bytes_per_s)

    # Broken.

    def reset(self) -> None:
        """RST to both ends of every connection, now; what was on its way is lost."""

        async def order() -> None:
            running = dict(self._connections)
            for connection in running:
                connection.reset()
            await asyncio.gather(*running.values(), return_exceptions=True)

        self._order(order)

    def close_cleanly(self) -> None:
        """FIN to both ends of every connection, after what is on its way."""
        self._tell(Connection.close)

    def cut_after(self, size: int, direction: Direction) -> None:
        """Once: the connection that carries the last of so many bytes passes it on and is reset, mid-frame or not."""
        if size < 1:
            raise ValueError("cut_after needs at least one byte; reset() cuts at once")
        self._change(direction, cut_in_bytes=size)

    def blackhole(self, direction: Direction | None = None) -> None:
        """Swallow everything, ends too, and close nothing. A connection that lost bytes stays silent after `heal`."""
        self._change(direction, swallowing=True)

    def refuse(self) -> None:
        """New connections are refused; the present ones live on."""
        self._order(self._stop_accepting)

    def accept(self) -> None:
        """The opposite of `refuse`."""
        self._order(self._start_accepting)

    # Late.

    def hold_back(self, part_at_bytes: int | None = None) -> None:
        """Bytes for the server wait in the proxy, on the present connections.

        Once a connection holds `part_at_bytes`, its client is reset, as `part_from_clients` does for all at any time.
        """
        self._tell(lambda connection: connection.hold_back(part_at_bytes))

    def part_from_clients(self) -> None:
        """Reset the client's end of what is held back; the server goes on believing in its own end."""

        async def order() -> None:
            await asyncio.gather(*(connection.part_from_client() for connection in self._connections))

        self._order(order)

    def deliver_late(self) -> None:
        """What was held back reaches the server now; of an orphaned connection, then its end."""
        self._tell(Connection.deliver)

    def duplicate_late(self, after_bytes: int = 1) -> None:
        """What the clients say next reaches the server only when they are back on new connections.

        It is held back, the client is reset, and the old connection's bytes are delivered as soon as the server has
        answered on a connection made since. A client that says it again makes it a duplicate.
        """

        async def order() -> None:
            self._wait_for_return = True
            for connection in self._connections:
                connection.hold_back(after_bytes)

        self._order(order)

    # Whole again.

    def heal(self) -> None:
        """No faults: what waits goes on, what is armed is disarmed, what is lost stays lost."""

        async def order() -> None:
            for weather in self._weather.values():
                weather.clear()
            self._wait_for_return = False
            self._late.clear()
            for connection in self._connections:
                connection.deliver()
                connection.stir()
            await self._start_accepting()

        self._order(order)

    def retarget(self, host: str, port: int) -> None:
        """New connections go there: a server that came back elsewhere."""
        self._target = (host, port)

    # As connections see it.

    def parted(self, connection: Connection) -> None:
        if self._wait_for_return:
            self._late[connection] = self._number

    def answered(self, connection: Connection) -> None:
        for late in [late for late, newest in self._late.items() if connection.number > newest]:
            del self._late[late]
            late.deliver()

    def failed(self, error: BaseException) -> None:
        self._errors.append(error)

    # On the proxy's own thread.

    def _order(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        asyncio.run_coroutine_threadsafe(work(), self._loop).result(ORDER_S_MAX)

    def _tell(self, what: Callable[[Connection], None]) -> None:
        async def order() -> None:
            for connection in self._connections:
                what(connection)

        self._order(order)

    def _change(self, direction: Direction | None, **values: float | bool | None) -> None:
        async def order() -> None:
            for one in Direction if direction is None else (direction,):
                for name, value in values.items():
                    setattr(self._weather[one], name, value)
            for connection in self._connections:
                connection.stir()

        self._order(order)

    async def _start_accepting(self) -> None:
        if self._accepting is not None:
            return
        listener = _new_socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind((self.host, self.port))
        listener.listen(BACKLOG_CONNECTIONS_MAX)
        self._accepting = self._watched(self._accept_all(listener))

    async def _stop_accepting(self) -> None:
        if self._accepting is None:
            return
        tasks = [self._accepting, *self._joining]
        self._accepting = None
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _accept_all(self, listener: socket.socket) -> None:
        with listener:
            while True:
                client, _ = await self._loop.sock_accept(listener)
                joining = self._watched(self._join(client))
                self._joining.add(joining)
                joining.add_done_callback(self._joining.discard)

    async def _join(self, client: socket.socket) -> None:
        server = _new_socket()
        try:
            await self._loop.sock_connect(server, self._target)
        except (OSError, asyncio.CancelledError):
            server.close()
            reset_socket(client)
            self._tally.add(unreachable=1)
            return
        for end in (client, server):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._number += 1
        connection = Connection(self._number, client, server, self._weather, self._dice, self._tally, self)
        self._connections[connection] = running = self._watched(connection.run())
        running.add_done_callback(lambda _: self._forget(connection))
        self._tally.add(connections=1, open=1)

    def _forget(self, connection: Connection) -> None:
        del self._connections[connection]
        self._late.pop(connection, None)
        self._tally.add(open=-1)

    def _watched(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        def done(task: asyncio.Task[None]) -> None:
            if not task.cancelled() and (error := task.exception()):
                self.failed(error)

        task = self._loop.create_task(work)
        task.add_done_callback(done)
        return task
