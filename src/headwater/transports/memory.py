"""A transport that keeps messages in this process: for tests, and to connect parts of one program."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict, deque
from collections.abc import Sequence
from typing import Literal

from headwater.arguments import check_whole
from headwater.errors import InvalidOptionError, TransportFailedError
from headwater.message import Message
from headwater.ports.transport import Handle
from headwater.topics import Pattern, parse_pattern
from headwater.transports.base import BaseTransport

logger = logging.getLogger("headwater")

MESSAGES_DEFAULT = 1_000
MESSAGES_MAX = 10_000_000
CONSUMER_QUEUE_MAX = 10_000
GROUP_ATTEMPTS_MAX = 5

Overflow = Literal["drop_oldest", "refuse"]


class MemoryTransport(BaseTransport):
    """Holds the last `max_messages`; when full it drops the oldest, counted in `dropped`, or refuses the new."""

    name = "memory"
    recognises_ids = True

    def __init__(self, *, max_messages: int = MESSAGES_DEFAULT, overflow: Overflow = "drop_oldest") -> None:
        if overflow not in ("drop_oldest", "refuse"):
            raise InvalidOptionError(f"overflow is 'drop_oldest' or 'refuse', not {overflow!r}", where=self.name)
        self._max_messages = check_whole("max_messages", max_messages, 1, MESSAGES_MAX)
        self._overflow = overflow
        self._held: OrderedDict[str, Message] = OrderedDict()
        self._consumers: list[MemorySubscription] = []
        self._lock = threading.Lock()
        self.dropped = 0

    @classmethod
    def _address(cls, url: str) -> tuple[()]:
        return ()

    @property
    def messages(self) -> list[Message]:
        """What it holds, in the order it came; also after close."""
        with self._lock:
            return list(self._held.values())

    def _publish(self, messages: Sequence[Message]) -> None:
        with self._lock:
            self._check_open()
            new = {message.scoped_id: message for message in messages if message.scoped_id not in self._held}
            if self._overflow == "refuse" and len(self._held) + len(new) > self._max_messages:
                raise TransportFailedError(
                    f"it holds {len(self._held)} messages and may hold {self._max_messages}",
                    where=self.name,
                    next="clear() it, or allow more with max_messages",
                )
            for identity, message in new.items():
                self._held[identity] = message
                if len(self._held) > self._max_messages:
                    self._held.popitem(last=False)
                    self.dropped += 1
                # Within the lock, so that every consumer gets all messages in the same order.
                for queue in {id(each.queue): each.queue for each in self._consumers}.values():
                    queue.offer(message)

    def subscribe(
        self, pattern: str, handle: Handle, *, group: str | None = None, consumer: str | None = None
    ) -> MemorySubscription:
        """A consumer that falls CONSUMER_QUEUE_MAX behind misses messages, and its `missed` counts them. What fails in
        a group is given to it again, GROUP_ATTEMPTS_MAX times in all; without a group, a failure is logged."""
        wanted = parse_pattern(pattern)
        with self._lock:
            self._check_open()
            queue = next((each.queue for each in self._consumers if group and each.queue.key == (group, wanted)), None)
            made = MemorySubscription(self, queue or _Queue(wanted, group), handle, consumer)
            self._consumers.append(made)
        return made

    def clear(self) -> None:
        with self._lock:
            self._held.clear()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            consumers = list(self._consumers)
        for each in consumers:
            each.stop()

    def remove(self, consumer: MemorySubscription) -> None:
        with self._lock:  # `_publish` must not pass over another one
            if consumer in self._consumers:
                self._consumers.remove(consumer)


class MemorySubscription:
    """A consumer of a MemoryTransport."""

    def __init__(self, transport: MemoryTransport, queue: _Queue, handle: Handle, consumer: str | None) -> None:
        self.queue = queue
        self.stopping = False
        self._transport = transport
        self._handle = handle
        self._thread = threading.Thread(target=self._run, name=f"consumer {consumer or ''}".rstrip(), daemon=True)
        self._thread.start()

    @property
    def missed(self) -> int:
        """How many messages found its queue, or that of its group, full."""
        return self.queue.missed

    def stop(self) -> None:
        self._transport.remove(self)
        with self.queue.changed:
            self.stopping = True
            self.queue.changed.notify_all()
        if self._thread is not threading.current_thread():  # a handler may stop its own
            self._thread.join()

    def _run(self) -> None:
        for message, attempts in iter(lambda: self.queue.take(self), None):
            try:
                self._handle(message)
            except Exception:
                again = self.queue.key[0] is not None and attempts + 1 < GROUP_ATTEMPTS_MAX
                logger.exception(
                    "%s: the handler failed with message %s%s",
                    MemoryTransport.name,
                    message.id,
                    "; its group gets it again" if again else "",
                )
                if again:
                    self.queue.offer(message, attempts + 1)


class _Queue:
    """The messages that wait for one consumer, or for those of a group together: first in, first out."""

    def __init__(self, wanted: Pattern, group: str | None) -> None:
        self.key = (group, wanted)
        self.changed = threading.Condition()
        self.missed = 0
        self._waiting: deque[tuple[Message, int]] = deque()

    def offer(self, message: Message, attempts: int = 0) -> None:
        if not self.key[1].matches(message.topic):
            return
        with self.changed:
            if len(self._waiting) < CONSUMER_QUEUE_MAX:
                self._waiting.append((message, attempts))
                self.changed.notify()
                return
            self.missed += 1
        if self.missed == 1:
            logger.error("%s: a consumer is %d behind and misses messages", MemoryTransport.name, CONSUMER_QUEUE_MAX)

    def take(self, subscriber: MemorySubscription) -> tuple[Message, int] | None:
        with self.changed:
            self.changed.wait_for(lambda: self._waiting or subscriber.stopping)
            return None if subscriber.stopping else self._waiting.popleft()
