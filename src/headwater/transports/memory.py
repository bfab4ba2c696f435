"""A transport that keeps messages in this process: for tests, and for those who live together in it."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict, deque
from collections.abc import Sequence
from typing import Literal

from headwater.errors import Closed, InvalidOption, TransportFailed
from headwater.message import Message, check_whole
from headwater.ports.transport import Handle
from headwater.topics import Pattern, parse_pattern
from headwater.transports.base import BaseTransport

logger = logging.getLogger("headwater")

MESSAGES_DEFAULT = 1_000
MESSAGES_MAX = 10_000_000
FOLLOWER_QUEUE_MAX = 10_000
GROUP_ATTEMPTS_MAX = 5

Overflow = Literal["drop_oldest", "refuse"]


class MemoryTransport(BaseTransport):
    """Holds the last `max_messages`; when full it drops the oldest, counted in `dropped`, or refuses the new."""

    name = "memory"
    recognises_ids = True

    def __init__(self, *, max_messages: int = MESSAGES_DEFAULT, overflow: Overflow = "drop_oldest") -> None:
        if overflow not in ("drop_oldest", "refuse"):
            raise InvalidOption(f"overflow is 'drop_oldest' or 'refuse', not {overflow!r}", where=self.name)
        self._max_messages = check_whole("max_messages", max_messages, 1, MESSAGES_MAX)
        self._overflow = overflow
        self._held: OrderedDict[str, Message] = OrderedDict()
        self._followers: list[_Follower] = []
        self._lock = threading.Lock()
        self._closed = False
        self.dropped = 0

    @property
    def messages(self) -> list[Message]:
        """What it holds, in the order it came; also after close."""
        with self._lock:
            return list(self._held.values())

    @property
    def connected(self) -> bool:
        return not self._closed

    def _publish(self, messages: Sequence[Message]) -> None:
        with self._lock:
            self._refuse_closed()
            new = {message.scoped_id: message for message in messages if message.scoped_id not in self._held}
            if self._overflow == "refuse" and len(self._held) + len(new) > self._max_messages:
                raise TransportFailed(
                    f"it holds {len(self._held)} messages and may hold {self._max_messages}",
                    where=self.name,
                    next="clear() it, or allow more with max_messages",
                )
            for identity, message in new.items():
                self._held[identity] = message
                if len(self._held) > self._max_messages:
                    self._held.popitem(last=False)
                    self.dropped += 1
                # Within the lock, so that every follower gets everything in the same order.
                for lane in {id(follower.lane): follower.lane for follower in self._followers}.values():
                    lane.offer(message)

    def subscribe(
        self, pattern: str, handle: Handle, *, group: str | None = None, consumer: str | None = None
    ) -> MemoryFollowing:
        """A follower that falls FOLLOWER_QUEUE_MAX behind misses messages, and its `missed` counts them. What fails in
        a group is given to it again, GROUP_ATTEMPTS_MAX times in all; without one, a failure is logged."""
        wanted = parse_pattern(pattern)
        with self._lock:
            self._refuse_closed()
            lane = next((each.lane for each in self._followers if group and each.lane.key == (group, wanted)), None)
            follower = _Follower(lane or _Lane(wanted, group), handle, consumer)
            self._followers.append(follower)
        follower.start()
        return MemoryFollowing(self, follower)

    def clear(self) -> None:
        with self._lock:
            self._held.clear()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            followers = list(self._followers)
        for follower in followers:
            self.leave(follower)

    def leave(self, follower: _Follower) -> None:
        with self._lock:
            if follower in self._followers:
                self._followers.remove(follower)
        follower.stop()

    def _refuse_closed(self) -> None:
        if self._closed:
            raise Closed("this transport is closed", where=self.name)


class MemoryFollowing:
    """A subscription to a MemoryTransport."""

    def __init__(self, transport: MemoryTransport, follower: _Follower) -> None:
        self._transport = transport
        self._follower = follower

    @property
    def missed(self) -> int:
        """How many messages found its queue, or that of its group, full."""
        return self._follower.lane.missed

    def stop(self) -> None:
        self._transport.leave(self._follower)


class _Lane:
    """What waits for one follower, or for those of a group together: first in, first out."""

    def __init__(self, wanted: Pattern, group: str | None) -> None:
        self.key = (group, wanted)
        self.changed = threading.Condition()
        self.missed = 0
        self._waiting: deque[tuple[Message, int]] = deque()

    def offer(self, message: Message, attempts: int = 0) -> None:
        if not self.key[1].matches(message.topic):
            return
        with self.changed:
            if len(self._waiting) < FOLLOWER_QUEUE_MAX:
                self._waiting.append((message, attempts))
                self.changed.notify()
                return
            self.missed += 1
        if self.missed == 1:
            logger.error("%s: a follower is %d behind and misses messages", MemoryTransport.name, FOLLOWER_QUEUE_MAX)

    def take(self, follower: _Follower) -> tuple[Message, int] | None:
        with self.changed:
            self.changed.wait_for(lambda: self._waiting or follower.stopping)
            return None if follower.stopping else self._waiting.popleft()


class _Follower:
    def __init__(self, lane: _Lane, handle: Handle, consumer: str | None) -> None:
        self.lane = lane
        self.stopping = False
        self._handle = handle
        self._thread = threading.Thread(target=self._run, name=f"follower {consumer or ''}".rstrip(), daemon=True)
        self.start = self._thread.start

    def stop(self) -> None:
        with self.lane.changed:
            self.stopping = True
            self.lane.changed.notify_all()
        if self._thread is not threading.current_thread():  # a handler may stop its own
            self._thread.join()

    def _run(self) -> None:
        for message, attempts in iter(lambda: self.lane.take(self), None):
            try:
                self._handle(message)
            except Exception:
                again = self.lane.key[0] is not None and attempts + 1 < GROUP_ATTEMPTS_MAX
                logger.exception(
                    "%s: the handler failed with message %s%s",
                    MemoryTransport.name,
                    message.id,
                    "; its group gets it again" if again else "",
                )
                if again:
                    self.lane.offer(message, attempts + 1)
