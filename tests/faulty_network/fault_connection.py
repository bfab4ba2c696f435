"""A client's connection and the server's, joined by two lanes; they may end apart."""

from __future__ import annotations

import asyncio
import contextlib
import enum
import random
import socket
import struct
from collections.abc import Coroutine, Mapping
from typing import Any, Protocol

from fault_counts import Tally
from fault_lane import Direction, Ending, Lane, Weather


class Order(enum.Enum):
    RESET = enum.auto()
    PART_FROM_CLIENT = enum.auto()
    LOOK = enum.auto()


class Onlooker(Protocol):
    """The proxy, as its connections see it."""

    def parted(self, connection: Connection) -> None: ...
    def answered(self, connection: Connection) -> None: ...
    def failed(self, error: BaseException) -> None: ...


def reset_socket(one: socket.socket) -> None:
    """Close with an RST: no time to linger means that nothing is sent, and the other end sees it."""
    one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    one.close()


class Connection:
    def __init__(
        self,
        number: int,
        client: socket.socket,
        server: socket.socket,
        weather: Mapping[Direction, Weather],
        dice: random.Random,
        tally: Tally,
        onlooker: Onlooker,
    ) -> None:
        self.number = number
        self.orphaned = False
        self.parted = asyncio.Event()
        self._client, self._server = client, server
        self._tally, self._onlooker = tally, onlooker
        self._orders: asyncio.Queue[Order] = asyncio.Queue()
        self._part_at_bytes: int | None = None

        def lane(direction: Direction, source: socket.socket, target: socket.socket) -> Lane:
            return Lane(
                direction,
                source,
                target,
                weather[direction],
                dice,
                on_held=self._held,
                on_passed=self._passed,
                on_swallowed=lambda size: tally.add(swallowed_bytes=size),
                on_cut=self._cut,
                on_target_gone=self._target_gone,
            )

        self._to_server = lane(Direction.TO_SERVER, client, server)
        self._to_client = lane(Direction.TO_CLIENT, server, client)
        self._fills = {lane: self._task(lane.fill()) for lane in self._lanes}
        self._drains = {lane: self._task(self._drain(lane)) for lane in self._lanes}

    @property
    def _lanes(self) -> tuple[Lane, Lane]:
        return self._to_server, self._to_client

    # What the proxy orders.

    def stir(self) -> None:
        for lane in self._lanes:
            lane.stir()

    def reset(self) -> None:
        self._orders.put_nowait(Order.RESET)

    def close(self) -> None:
        for lane in self._lanes:
            lane.end(Ending.FIN)

    def hold_back(self, part_at_bytes: int | None) -> None:
        """Bytes for the server wait here; once there are so many, the client is reset."""
        if self._to_server.held:
            return
        self._to_server.held = True
        self._part_at_bytes = part_at_bytes
        self._held(self._to_server.buffered_bytes)

    async def part_from_client(self) -> None:
        if self._to_server.held:
            self._orders.put_nowait(Order.PART_FROM_CLIENT)
            await self.parted.wait()

    def deliver(self) -> None:
        if self._to_server.held:
            self._tally.add(held_bytes=-self._to_server.buffered_bytes)
            self._to_server.held = False
            self._to_server.stir()

    async def run(self) -> None:
        """Returns when both ends are closed."""
        ending = Ending.RESET
        try:
            while (order := await self._orders.get()) is not Order.RESET:
                if order is Order.PART_FROM_CLIENT:
                    await self._part()
                if all(task.done() for task in self._tasks):
                    ending = Ending.FIN
                    break
        finally:
            await self._stop(*self._tasks)
            for end in (self._client, self._server):
                if ending is Ending.RESET and end.fileno() >= 0:
                    reset_socket(end)
                end.close()
            self.deliver()  # the connection is gone, but it is not held any more
            self.parted.set()

    # What its tasks tell.

    @property
    def _tasks(self) -> list[asyncio.Task[None]]:
        return [*self._fills.values(), *self._drains.values()]

    def _task(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        task.add_done_callback(self._task_done)
        return task

    def _task_done(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()):
            self._onlooker.failed(error)
            self.reset()
        if task is self._fills[self._to_server] and self._to_server.held:
            self._orders.put_nowait(Order.PART_FROM_CLIENT)  # it went by itself; the server must not hear of it yet
        self._orders.put_nowait(Order.LOOK)

    async def _drain(self, lane: Lane) -> None:
        ending = await lane.drain()
        if ending is Ending.RESET and not self.orphaned:
            self.reset()
        elif ending is not None:
            target = self._server if lane is self._to_server else self._client
            with contextlib.suppress(OSError):  # it went first
                target.shutdown(socket.SHUT_WR)

    def _held(self, size: int) -> None:
        self._tally.add(held_bytes=size)
        if self._part_at_bytes is not None and self._to_server.buffered_bytes >= self._part_at_bytes:
            self._part_at_bytes = None
            self._orders.put_nowait(Order.PART_FROM_CLIENT)

    def _passed(self, direction: Direction, size: int) -> None:
        if direction is Direction.TO_CLIENT:
            self._tally.add(to_client_bytes=size)
            self._onlooker.answered(self)
        else:
            self._tally.add(to_server_bytes=size, late_bytes=size if self.orphaned else 0)

    def _cut(self) -> None:
        self._tally.add(cuts=1)
        self.reset()

    def _target_gone(self, direction: Direction) -> None:
        """Its end travels the way its bytes did, unless that end already knows."""
        back = self._to_server if direction is Direction.TO_CLIENT else self._to_client
        if self._drains[back].done() and not back.lost:
            self.reset()
        else:
            back.end(Ending.RESET)

    async def _part(self) -> None:
        if self.orphaned:
            return
        self.orphaned = True
        self._to_client.lost = True
        await self._stop(self._fills[self._to_server], self._drains[self._to_client])
        self._drains[self._to_client] = self._task(self._drain(self._to_client))
        self._to_server.end(Ending.FIN)
        if self._client.fileno() >= 0:
            reset_socket(self._client)
        self._tally.add(orphaned=1)
        self.parted.set()
        self._onlooker.parted(self)

    async def _stop(self, *tasks: asyncio.Task[None]) -> None:
        """Wait for them too: only then are their sockets out of the event loop, and may be closed."""
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
