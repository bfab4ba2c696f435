"""Live subscriptions: what is published goes to whoever listens at that moment, and nobody keeps count.

One reader follows the log for all connections. A client that does not read fast enough misses messages, which is
counted; who must not miss any takes a durable subscription.
"""

from __future__ import annotations

import asyncio
from contextvars import Context
from typing import TYPE_CHECKING

from headwater.broker.core import Core
from headwater.broker.flow import run_async
from headwater.broker.tail import Tail
from headwater.errors import Closed, HeadwaterError, TooLarge
from headwater.ports.records import SubscriptionSpec
from headwater.server.logger import logger
from headwater.server.metrics import Metrics
from headwater.server.shapes import Heard
from headwater.topics import Pattern, TopicTrie

if TYPE_CHECKING:
    from headwater.server.connection import Connection

PAGE = 500
SLICE_BYTES = 256 * 1024  # of data sent to one client before looking whether it has room for more
TOLD_BYTES_LEAST = 1024  # what a client costs that is sent next to nothing
RETRY_S = 1.0


class Listener:
    __slots__ = ("after", "connection", "pattern")

    def __init__(self, connection: Connection, pattern: Pattern, after: int) -> None:
        self.connection = connection
        self.pattern = pattern
        self.after = after  # the reader may be behind the log: what was there before is not for this one


class LiveHub:
    def __init__(self, core: Core, metrics: Metrics) -> None:
        self._core = core
        self._metrics = metrics
        self._trie: TopicTrie[Listener] = TopicTrie()
        self._listeners: dict[Connection, dict[str, Listener]] = {}
        self._follower: asyncio.Task[None] | None = None
        self._tail: Tail | None = None

    def __len__(self) -> int:
        return sum(map(len, self._listeners.values()))

    def add_all(self, connection: Connection, patterns: list[Pattern]) -> None:
        """All or none. When this returns, what is published from now on is heard."""
        if connection.is_gone:
            return
        mine = self._listeners.setdefault(connection, {})
        most = connection.parts.limits.subscriptions_per_connection
        if len(mine.keys() | {pattern.text for pattern in patterns}) > most:
            raise TooLarge(f"more than {most} live subscriptions on one connection", next="Use wider patterns")
        self._follow()
        after = self._core.engine.wakeups.announced
        for pattern in patterns:
            if pattern.text not in mine:
                listener = mine[pattern.text] = Listener(connection, pattern, after)
                self._trie.add(pattern, listener)

    def remove(self, connection: Connection, pattern: str) -> bool:
        listener = self._listeners.get(connection, {}).pop(pattern, None)
        if listener is None:
            return False
        self._trie.remove(listener.pattern, listener)
        return True

    def remove_all(self, connection: Connection) -> None:
        for listener in self._listeners.pop(connection, {}).values():
            self._trie.remove(listener.pattern, listener)

    def patterns(self, connection: Connection) -> list[Pattern]:
        return [listener.pattern for listener in self._listeners.get(connection, {}).values()]

    def _follow(self) -> None:
        if self._tail is None:
            engine = self._core.engine
            self._tail = Tail(engine, "live", SubscriptionSpec(">"), engine.wakeups.announced)
            self._follower = asyncio.create_task(self._run(self._tail), context=Context())  # of no source

    async def _run(self, tail: Tail) -> None:
        while True:
            try:
                found = await run_async(tail.take(PAGE, None))
            except Closed:
                return
            except HeadwaterError as exc:
                logger.warning("the live feed tries again: %s", exc)
                await asyncio.sleep(RETRY_S)
                continue
            by_connection: dict[Connection, list[Heard]] = {}
            for claimed in found:
                for listener in self._trie.match(claimed.message.topic):
                    if claimed.message.seq > listener.after:
                        heard = Heard(claimed.message, listener.pattern)
                        by_connection.setdefault(listener.connection, []).append(heard)
            told_bytes = 0
            for connection, all_heard in by_connection.items():
                mine = self._listeners.get(connection, {})  # it may have ended since
                wanted = [heard for heard in all_heard if heard.pattern.text in mine]
                sent = _tell(connection, wanted)
                self._metrics.count_live(sent, len(wanted) - sent)
                told_bytes += sum(heard.message.size for heard in wanted) + TOLD_BYTES_LEAST
                if told_bytes >= SLICE_BYTES:
                    told_bytes = 0
                    await asyncio.sleep(0)  # others wait meanwhile

    async def close(self) -> None:
        if self._tail is not None:
            await run_async(self._tail.close())
        if self._follower is not None:
            await asyncio.gather(self._follower, return_exceptions=True)


def _tell(connection: Connection, heard: list[Heard]) -> int:
    """As many as it has room for, a slice at a time."""
    at = sent = 0
    while at < len(heard):
        end, size = at, 0
        while end < len(heard) and size < SLICE_BYTES:
            size += heard[end].message.size
            end += 1
        if not connection.has_room(size):
            break
        sent += _send(connection, heard[at:end])
        at = end
        connection.flush()
    return sent


def _send(connection: Connection, heard: list[Heard]) -> int:
    try:
        connection.session.notify_many(connection.shapes.live(heard), batch=connection.takes_batches)
        return len(heard)
    except TooLarge:  # no frame takes it; put into the log by hand, since nobody can publish it
        return sum(_send(connection, [each]) for each in heard) if len(heard) > 1 else 0
