"""Live subscriptions: messages go to the clients that are subscribed at that moment, without acks and state.

One reader follows the log for all connections. A client that does not read fast enough misses messages, which is
counted; a durable subscription misses none.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextvars import Context
from typing import TYPE_CHECKING

from headwater.broker.deliveries import Claimed
from headwater.broker.flow import run_async
from headwater.broker.live import JUST_BEFORE_MS
from headwater.broker.log import LocalLog
from headwater.broker.tail_consumer import TailConsumer
from headwater.errors import ClosedError, HeadwaterError, TooLargeError
from headwater.ports.records import SubscriptionSpec
from headwater.server.logging import logger
from headwater.server.pages import Metrics
from headwater.server.shapes import LiveMessage
from headwater.topics import Pattern, TopicTrie

if TYPE_CHECKING:
    from headwater.server.connection import Connection

PAGE = 500
SLICE_BYTES = 256 * 1024  # of data sent to one client before looking whether it has room for more
CLIENT_BYTES_MIN = 1024  # the cost of a client that is sent almost nothing
RETRY_S = 1.0


class LiveSubscription:
    __slots__ = ("after", "connection", "pattern")

    def __init__(self, connection: Connection, pattern: Pattern, after: int) -> None:
        self.connection = connection
        self.pattern = pattern
        self.after = after  # the reader may be behind the log: earlier messages are not for this subscription


class LiveHub:
    def __init__(self, core: LocalLog, metrics: Metrics) -> None:
        self._core = core
        self._metrics = metrics
        self._trie: TopicTrie[LiveSubscription] = TopicTrie()
        self._subscriptions: dict[Connection, dict[str, LiveSubscription]] = {}
        self._follower: asyncio.Task[None] | None = None
        self._tail: TailConsumer | None = None
        self._closed = False

    def __len__(self) -> int:
        return sum(map(len, self._subscriptions.values()))

    def add_all(self, connection: Connection, patterns: list[Pattern]) -> None:
        """Add all subscriptions or none. When this returns, messages published from now on are delivered."""
        if connection.is_gone:
            return
        own = self._subscriptions.setdefault(connection, {})
        most = connection.context.limits.subscriptions_per_connection
        if len(own.keys() | {pattern.text for pattern in patterns}) > most:
            raise TooLargeError(f"more than {most} live subscriptions on one connection", next="Use wider patterns")
        after = self._core.engine.wakeups.last_known
        self._follow(after)
        for pattern in patterns:
            if pattern.text not in own:
                subscription = own[pattern.text] = LiveSubscription(connection, pattern, after)
                self._trie.add(pattern, subscription)

    def remove(self, connection: Connection, pattern: str) -> bool:
        subscription = self._subscriptions.get(connection, {}).pop(pattern, None)
        if subscription is None:
            return False
        self._trie.remove(subscription.pattern, subscription)
        return True

    def remove_all(self, connection: Connection) -> None:
        for subscription in self._subscriptions.pop(connection, {}).values():
            self._trie.remove(subscription.pattern, subscription)

    def patterns(self, connection: Connection) -> list[Pattern]:
        return [subscription.pattern for subscription in self._subscriptions.get(connection, {}).values()]

    def _follow(self, after: int) -> None:
        """Follow the log from there on, but from no message that is older than JUST_BEFORE_MS; see
        `broker.live.LiveFeed`."""
        if self._follower is None:
            since_ms = self._core.engine.clock.now_ms() - JUST_BEFORE_MS
            self._follower = asyncio.create_task(self._run(after, since_ms), context=Context())  # of no source

    async def _run(self, after: int, since_ms: int) -> None:
        engine = self._core.engine
        while not self._closed:
            try:
                if self._tail is None:
                    before = await run_async(engine.read(lambda reader: reader.seq_before(since_ms)))
                    self._tail = TailConsumer(engine, "live", SubscriptionSpec(">"), max(after, before))
                    continue  # to look whether it was closed meanwhile
                await self._send_to_all(await run_async(self._tail.take(PAGE, None)))
            except ClosedError:
                return
            except HeadwaterError as exc:
                logger.warning("the live feed tries again: %s", exc)
                await asyncio.sleep(RETRY_S)
            except Exception:  # no message may end the feed of all clients
                logger.exception("the live feed goes on without what it has read")
                await asyncio.sleep(RETRY_S)

    async def _send_to_all(self, found: Sequence[Claimed]) -> None:
        by_connection: dict[Connection, list[LiveMessage]] = {}
        for claimed in found:
            for subscription in self._trie.match(claimed.message.topic):
                if claimed.message.seq > subscription.after:
                    each = LiveMessage(claimed.message, subscription.pattern)
                    by_connection.setdefault(subscription.connection, []).append(each)
        sent_bytes = 0
        for connection, matching in by_connection.items():
            own = self._subscriptions.get(connection, {})  # they may have ended since
            wanted = [each for each in matching if each.pattern.text in own]
            sent = _send_all(connection, wanted)
            self._metrics.count_live(sent, len(wanted) - sent)
            sent_bytes += sum(each.message.size for each in wanted) + CLIENT_BYTES_MIN
            if sent_bytes >= SLICE_BYTES:
                sent_bytes = 0
                await asyncio.sleep(0)  # for the other connections

    async def close(self) -> None:
        self._closed = True
        if self._tail is not None:
            await run_async(self._tail.close())
        if self._follower is not None:
            await asyncio.gather(self._follower, return_exceptions=True)


def _send_all(connection: Connection, each: list[LiveMessage]) -> int:
    """Send a slice at a time, as long as the connection may take more."""
    at = sent = 0
    while at < len(each):
        end, size = at, 0
        while end < len(each) and size < SLICE_BYTES:
            size += each[end].message.size
            end += 1
        if not connection.has_room(size):
            break
        sent += _send(connection, each[at:end])
        at = end
        connection.flush()
    return sent


def _send(connection: Connection, each: list[LiveMessage]) -> int:
    try:
        connection.session.notify_many(connection.shapes.live(each), batch=connection.takes_batches)
        return len(each)
    except TooLargeError:  # no frame takes it: inserted by hand, because no client can publish it
        return sum(_send(connection, [each]) for each in each) if len(each) > 1 else 0
