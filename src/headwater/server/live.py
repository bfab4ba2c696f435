"""Live subscriptions: what is published goes to whoever listens at that moment, and nobody keeps count.

One reader follows the log for all connections. A client that does not read fast enough misses messages, which is
counted; who must not miss any takes a durable subscription.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from headwater.broker.core import Core
from headwater.broker.flow import run_async
from headwater.broker.tail import Tail
from headwater.errors import Closed, HeadwaterError, TooLarge
from headwater.ports.records import SubscriptionSpec
from headwater.protocol.wire import Notification
from headwater.server.deliveries import as_notification
from headwater.server.logger import logger
from headwater.server.metrics import Metrics
from headwater.topics import Pattern, TopicTrie

if TYPE_CHECKING:
    from headwater.server.connection import Connection

PAGE = 500
RETRY_S = 1.0


class Listener:
    __slots__ = ("connection", "pattern")

    def __init__(self, connection: Connection, pattern: Pattern) -> None:
        self.connection = connection
        self.pattern = pattern


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
        mine = self._listeners.setdefault(connection, {})
        most = connection.parts.limits.subscriptions_per_connection
        if len(mine.keys() | {pattern.text for pattern in patterns}) > most:
            raise TooLarge(f"more than {most} live subscriptions on one connection", next="Use wider patterns")
        self._follow()
        for pattern in patterns:
            if pattern.text not in mine and not connection.is_gone:
                listener = mine[pattern.text] = Listener(connection, pattern)
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

    def _follow(self) -> None:
        if self._tail is None:
            engine = self._core.engine
            self._tail = Tail(engine, "live", SubscriptionSpec(">"), engine.wakeups.announced)
            self._follower = asyncio.create_task(self._run(self._tail))

    async def _run(self, tail: Tail) -> None:
        while True:
            try:
                found = await run_async(tail.fetch(PAGE, None))
            except Closed:
                return
            except HeadwaterError as exc:
                logger.warning("the live feed tries again: %s", exc)
                await asyncio.sleep(RETRY_S)
                continue
            heard: dict[Connection, list[Notification]] = {}
            for claimed in found:
                for listener in self._trie.match(claimed.message.topic):
                    notification = as_notification(claimed.message, listener.pattern.text)
                    heard.setdefault(listener.connection, []).append(notification)
            for connection, notifications in heard.items():
                if connection.is_full:
                    self._metrics.count_live(0, len(notifications))
                else:
                    batches = connection.takes_batches
                    connection.session.notify_many("rpc.notification", notifications, batch=batches)
                    self._metrics.count_live(len(notifications), 0)

    async def close(self) -> None:
        if self._tail is not None:
            await run_async(self._tail.close())
        if self._follower is not None:
            await asyncio.gather(self._follower, return_exceptions=True)
