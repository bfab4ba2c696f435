"""The server's side of subscriptions: clients hear of new versions, and claims go both ways."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from headwater.errors import HeadwaterError
from headwater.ports.clock import Clock
from headwater.replication.claims import ClaimRegistry, ClientIdentity
from headwater.replication.host.catalogue import Replica
from headwater.replication.host.events import SessionOutcome
from headwater.replication.host.session import (
    Abort,
    HostContext,
    ReplicaSession,
    config,
    config_of,
)
from headwater.replication.names import ReplicaName
from headwater.replication.protocol import CHANGED, CLAIM, LATEST, RELEASE, SessionKind, SubscribeConfig
from headwater.replication.timers import seconds_text

SPAN_S_MAX = 1e9
CHANGES_S = 1.0  # at least, between two recorded changes
FRAMES_A_SECOND_MAX = 50  # that are read; a client that sends more waits
PULL_ONLY = "this key can only pull: waitIdle, minInterval, maxInterval and coordinate are ignored"
REPLICAS_MAX = 20_000  # above it, the claim of a disconnected holder is dropped at once
CLEANUP_S_MIN = 1.0  # between two looks at a claim without subscribers

logger = logging.getLogger("headwater")


@dataclass(eq=False)
class SubscribeSession:
    """A `Subscriber`. `may_push`: at the beginning; `check_may_push`: now. The latter blocks."""

    context: HostContext
    session: ReplicaSession
    name: ReplicaName
    key_type: str
    may_push: bool
    check_may_push: Callable[[], bool]
    outcome: SessionOutcome | None = None

    def __post_init__(self) -> None:
        self.identity = self.session.identity
        self.coordinates = False
        self._next_change_s = 0.0
        self._waiting: list[str] | None = []
        """Texts that come before the first CONFIG is sent; None afterwards."""

    async def run(self) -> None:
        asked = config_of(await self.session.first(self.context.idle_s), SubscribeConfig)
        self.coordinates = asked.coordinate and self.may_push
        # Joined before the newest version is read, so that no version is missed in between.
        with self.context.subscribers.of(self.name) as subscribers, subscribers.joined(self):
            await self._begin(asked)
            await self._listen(subscribers)

    async def _begin(self, asked: SubscribeConfig) -> None:
        replica = await self.context.threads.do(self.context.store.catalogue.find, self.name)
        fields: dict[str, object] = {
            "replicaID": None if replica is None else replica.id,
            "keyType": self.key_type,
        }
        if not self.may_push and (asked.has_timers or asked.coordinate):
            fields["warning"] = PULL_ONLY
        waiting, self._waiting = self._waiting or [], None
        newest = 0 if replica is None else replica.newest
        self.send(config(**fields))
        self.send(f"{LATEST} {newest}")
        for text in waiting:
            if not text.startswith(LATEST) or int(text.removeprefix(LATEST)) > newest:
                self.send(text)

    def send(self, text: str) -> None:
        if self._waiting is None:
            self.session.queue_text(text)
        else:
            self._waiting.append(text)

    async def _listen(self, subscribers: Subscribers) -> None:
        loop = asyncio.get_running_loop()
        second, frames = 0, 0
        while (frame := await self.session.next(None)) is not None:
            if isinstance(frame, bytes):
                raise Abort("FAILED", "there are no pages in a subscription")
            await self._handle(subscribers, frame)
            if int(loop.time()) != second:
                second, frames = int(loop.time()), 0
            frames += 1
            if frames >= FRAMES_A_SECOND_MAX:
                await asyncio.sleep(1.0)

    async def _handle(self, subscribers: Subscribers, frame: str) -> None:
        word, _, rest = frame.partition(" ")
        if word == CLAIM:
            span_ms = _span_ms(rest)
            if self.coordinates:
                if not await self.context.threads.do(self.check_may_push):
                    raise rights_revoked("push")
                subscribers.claim(self, span_ms)
        elif word == RELEASE and not rest:
            if self.coordinates:
                subscribers.release(self)
        elif word == CHANGED:
            _span_ms(rest or "0")
            await self._record_change()
        else:
            raise Abort("FAILED", f"{frame[:40]!r} is unknown in a subscription")

    async def _record_change(self) -> None:
        now_s = asyncio.get_running_loop().time()
        if self.may_push and now_s >= self._next_change_s:
            self._next_change_s = now_s + CHANGES_S
            try:
                await self.context.threads.do(self.context.store.catalogue.record_change, self.name)
            except HeadwaterError as exc:  # the subscription goes on
                logger.warning("a change of %s was not recorded: %s", self.name.path, exc)


def rights_revoked(session: SessionKind) -> Abort:
    why = "its key or token was revoked or has expired, or one is needed by now"
    return Abort("UNAUTHORIZED", f"this client may not {session} any more: {why}")


def _span_ms(text: str) -> int:
    try:
        span_s = float(text)
    except ValueError:
        span_s = math.nan
    if not 0 <= span_s <= SPAN_S_MAX:
        raise Abort("FAILED", f"{text[:40]!r} is no number of seconds")
    return round(span_s * 1000)


# --- all subscribers ------------------------------------------------------------------------------------------------


class Subscriber(Protocol):
    identity: ClientIdentity
    coordinates: bool
    """Whether it takes part in the claims."""

    def send(self, text: str) -> None: ...


class Subscribers:
    """The subscribers of one replica, and their claims."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.claims = ClaimRegistry()
        self.subscribers: set[Subscriber] = set()
        self.users = 0
        """Sessions of clients that subscribe or push."""
        self.timer: asyncio.TimerHandle | None = None
        self._announced = ("", 0)

    def announce_version(self, replica_id: str, number: int) -> None:
        """Announce versions in order: of two concurrent pushes, the later one may come here first."""
        if self._announced[0] == replica_id and number <= self._announced[1]:
            return
        self._announced = (replica_id, number)
        for subscriber in list(self.subscribers):
            subscriber.send(f"{LATEST} {number}")

    @contextmanager
    def joined(self, subscriber: Subscriber) -> Iterator[None]:
        self.subscribers.add(subscriber)
        if subscriber.coordinates:
            remaining_ms = self.claims.join(subscriber.identity, self._clock.now_ms())
            if remaining_ms is not None:
                subscriber.send(f"{CLAIM} {seconds_text(remaining_ms)}")
        try:
            yield
        finally:
            self.subscribers.discard(subscriber)
            if subscriber.coordinates and self.claims.leave(subscriber.identity, self._clock.now_ms()):
                self._send_release_when_free()

    @contextmanager
    def pushing(self, identity: ClientIdentity) -> Iterator[None]:
        """Let the client of a push keep its claim while the push runs."""
        self.claims.push_began(identity, self._clock.now_ms())
        try:
            yield
        finally:
            self.claims.push_ended(identity, self._clock.now_ms())

    def _send_release_when_free(self) -> None:
        """Tell the others when the claim has ended. They know when it was to end; without its holder it may end
        sooner."""
        remaining_ms = self.claims.remaining_ms(self._clock.now_ms())
        if remaining_ms and self.subscribers:
            asyncio.get_running_loop().call_later(remaining_ms / 1000, self._send_release_when_free)
        elif not remaining_ms:
            for subscriber in list(self.subscribers):
                if subscriber.coordinates:
                    subscriber.send(RELEASE)

    def claim(self, subscriber: Subscriber, span_ms: int) -> None:
        answer = self.claims.claim(subscriber.identity, span_ms, self._clock.now_ms())
        if not answer.granted:
            subscriber.send(f"{CLAIM} {seconds_text(answer.remaining_ms)}")
            return
        subscriber.send(CLAIM)
        self._send_others(subscriber, f"{CLAIM} {seconds_text(answer.remaining_ms)}")

    def release(self, subscriber: Subscriber) -> None:
        if self.claims.release(subscriber.identity, self._clock.now_ms()):
            self._send_others(subscriber, RELEASE)

    def _send_others(self, subscriber: Subscriber, text: str) -> None:
        for other in list(self.subscribers):
            if other.coordinates and other.identity != subscriber.identity:
                other.send(text)


class Claim(NamedTuple):
    client: str
    until_ms: int


class SubscriberRegistry:
    """The subscribers by replica; an entry without users and claims is removed."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._by_name: dict[ReplicaName, Subscribers] = {}

    def __len__(self) -> int:
        return len(self._by_name)

    @contextmanager
    def of(self, name: ReplicaName) -> Iterator[Subscribers]:
        """The subscribers of a replica, for a session of a client."""
        if name not in self._by_name:
            self._by_name[name] = Subscribers(self._clock)
        subscribers = self._by_name[name]
        subscribers.users += 1
        try:
            yield subscribers
        finally:
            subscribers.users -= 1
            self._remove_if_unused(name)

    def claims(self) -> dict[ReplicaName, Claim]:
        """Those that are held now. A client that gave no name has the name ""."""
        now_ms, found = self._clock.now_ms(), {}
        for name, subscribers in self._by_name.items():
            holder = subscribers.claims.holder(now_ms)
            if holder is not None:
                client = holder[1] if isinstance(holder, tuple) else ""  # beside it stands its token or key
                found[name] = Claim(client, now_ms + subscribers.claims.remaining_ms(now_ms))
        return found

    def announce_version(self, replica: Replica, number: int) -> None:
        if replica.name in self._by_name:
            self._by_name[replica.name].announce_version(replica.id, number)

    def _remove_if_unused(self, name: ReplicaName) -> None:
        subscribers = self._by_name.get(name)
        if subscribers is None or subscribers.users:
            return
        if subscribers.timer is not None:
            subscribers.timer.cancel()
        remaining_ms = subscribers.claims.remaining_ms(self._clock.now_ms())
        if not remaining_ms or len(self._by_name) > REPLICAS_MAX:
            del self._by_name[name]
            return
        wait_s = max(CLEANUP_S_MIN, remaining_ms / 1000)
        subscribers.timer = asyncio.get_running_loop().call_later(wait_s, self._remove_if_unused, name)
