"""The verbs of a log, as flows. `blocking` and `asynchronous` give them their two colours."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Hashable, Iterable
from functools import partial
from typing import Any, NamedTuple, TypeVar, Unpack
from weakref import WeakValueDictionary

from headwater.broker import claims, housekeeping, statistics
from headwater.broker.claims import Claimed, replace
from headwater.broker.committer import COUNTS, Undo
from headwater.broker.consumer import Consumer
from headwater.broker.dead_letters import DeadLetters
from headwater.broker.engine import Engine, SharedRead
from headwater.broker.flow import Flow, Within, run_blocking, run_together
from headwater.broker.keeper import Repeating
from headwater.broker.live import LiveFeed
from headwater.broker.logger import logger
from headwater.broker.options import Start, SubscribeOptions, check_subscription_id, spec_of, start_position
from headwater.broker.outside import OutsideTransactions
from headwater.broker.publish import Outgoing, publish, publish_many
from headwater.broker.resuming import NOTHING_RESUMED, Resume, Resumed, resume
from headwater.broker.subscriber import Subscriber
from headwater.broker.tail import Tail
from headwater.broker.transaction import OwnTransaction
from headwater.broker.verbs import RemoteVerbs
from headwater.delivery.lease import Lease, release
from headwater.delivery.retention import Limits
from headwater.delivery.window import WindowState
from headwater.errors import (
    Closed,
    HeadwaterError,
    InvalidFilter,
    InvalidOption,
    SubscriptionActive,
    SubscriptionMismatch,
    TooLarge,
)
from headwater.message import PublishOptions, Span, check_whole, span_ms
from headwater.ports.records import (
    RetentionPolicy,
    SubscriptionRecord,
    SubscriptionSpec,
    TopicCount,
    pattern_of,
    selection_of,
)
from headwater.ports.store import Reader, Writer
from headwater.topics import Dialect, check_topic, parse_pattern

T = TypeVar("T")

HEARTBEATS_PER_LEASE = 3
HEARTBEAT_S_MIN = 0.2  # a beat renews all; one impatient subscription must not set the pace of the others
INT64_MAX = 2**63 - 1
WRITE_PROOF = "write proof"  # the name of the lease that is written to see whether writing works
STANDBY_POLL_S = 1.0  # a holder that was killed, or a lease that was not renewed, sends no wake-up


Allow = Callable[[SubscriptionRecord], None]
"""Raises Unauthorized if this subscription is not for who asks."""


class Tenant(NamedTuple):
    """On whose behalf a server subscribes: what is new is theirs, and so many may be."""

    owner: str
    allow: Allow
    subscriptions_max: int

    def check_new(self, writer: Writer, record: SubscriptionRecord) -> None:
        self.allow(record)
        if (there := writer.owned_subscriptions(self.owner)) >= self.subscriptions_max:
            raise TooLarge(
                f"there are {there:,} durable subscriptions of this token and the limit is {self.subscriptions_max:,}",
                where=record.id,
                next="Remove those that are not used, or raise limits.subscriptions_per_token",
            )


class Entry(NamedTuple):
    """How a subscription is to be begun: where, if it is new; against a live holder; or going on from before."""

    start: Start
    takeover: bool
    resume: Resume | None
    tenant: Tenant | None = None


class Begun(NamedTuple):
    record: SubscriptionRecord
    resumed_from: int
    resumed: Resumed
    is_new: bool


class Core:
    """One open log: its engine, its subscribers, its background work."""

    def __init__(self, engine: Engine, *, housekeeping_s: float | None, heartbeats: bool = True) -> None:
        self.engine = engine
        self.dead_letters = DeadLetters(engine)
        self.live = LiveFeed(engine)
        self.outside = OutsideTransactions(engine)
        self._shared_reads: WeakValueDictionary[Hashable, SharedRead[Any]] = WeakValueDictionary()  # that are wanted
        self._sharing = threading.Lock()
        self._subscribers: set[Subscriber | Tail] = set()
        self._closed = False
        self._keeper = Repeating("headwater-keeper", self.heartbeat, self.heartbeat_s) if heartbeats else None
        self._housekeeper = (
            None
            if housekeeping_s is None
            else Repeating("headwater-housekeeper", lambda: run_blocking(self.housekeep()), lambda: housekeeping_s)
        )

    @property
    def name(self) -> str:
        return self.engine.store.name

    @property
    def remote(self) -> RemoteVerbs:
        raise InvalidOption("there is no connection: the log is in this process", where=self.name, next="Open ws://…")

    # --- publishing ---------------------------------------------------------------------------------------------

    def publish(self, topic: str, data: Any, options: PublishOptions) -> Flow[int]:
        return publish(self.engine, topic, data, options)

    def publish_many(self, messages: Iterable[Outgoing]) -> Flow[list[int]]:
        return publish_many(self.engine, messages)

    def transaction(self, consumer: Consumer | None = None, claimed: Claimed | None = None) -> OwnTransaction:
        if consumer is None or claimed is None:
            return OwnTransaction(self.engine)
        if not isinstance(consumer, Subscriber):
            raise InvalidOption(
                "an ephemeral subscription has nothing to ack", where=consumer.id, next="Use mode exclusive or shared"
            )
        return OwnTransaction(self.engine, consumer.id, partial(consumer.ack_in, settled=[claimed]))

    # --- subscribing --------------------------------------------------------------------------------------------

    def subscribe(
        self,
        id: str,
        pattern: str,
        resume: Resume | None = None,
        tenant: Tenant | None = None,
        **options: Unpack[SubscribeOptions],
    ) -> Flow[Subscriber | Tail]:
        check_subscription_id(id)
        start: Start = options.pop("start", "new" if options.get("mode") == "ephemeral" else "first")
        wait_s = options.pop("wait", 0.0)
        takeover = options.pop("takeover", False)
        if not isinstance(takeover, bool):
            raise InvalidOption(f"takeover is True or False, not {takeover!r}", where=id)
        entry = Entry(start, takeover, resume, tenant)
        spec = spec_of(id, pattern, options)
        subscriber: Subscriber | Tail
        if spec.mode == "ephemeral":
            after = yield from self.engine.read(lambda reader: start_position(reader, start))
            subscriber = Tail(self.engine, id, spec, after)
        else:
            subscriber = yield from self._take_up(id, spec, entry, wait_s)
        self._subscribers.add(subscriber)
        subscriber.gone.watch(lambda _: self._subscribers.discard(subscriber))
        if self._keeper is not None:
            self._keeper.poke()
        return subscriber

    def _take_up(self, id: str, spec: SubscriptionSpec, entry: Entry, wait_s: float | None) -> Flow[Subscriber]:
        """Begin or resume; while another holds it, wait for its release, or for its lease to run out."""
        until = None if wait_s is None else time.monotonic() + wait_s
        waiter = self.engine.wakeups.add(pattern_of(spec), id, minds_settling=True)

        def look(reader: Reader) -> int:
            record = reader.subscription(id)
            return 0 if record is None else self._held_ms(record, self.engine.clock.now_ms())

        try:
            while True:
                ticket = waiter.arm()
                try:
                    begun = yield from self._begin_or_let_go(id, spec, entry)
                    self._tell_former_holders(begun.record)
                    subscriber = Subscriber(self.engine, begun.record, begun.resumed_from, begun.resumed)
                    subscriber.is_new = begun.is_new
                    return subscriber
                except SubscriptionActive:
                    self.engine.ensure_watching()
                    while held_ms := (yield from self.engine.read(look)):  # beside the writers: it may be for days
                        left_s = None if until is None else until - time.monotonic()
                        if left_s is not None and left_s <= 0:
                            raise
                        yield Within(ticket, min(s for s in (left_s, held_ms / 1000, STANDBY_POLL_S) if s is not None))
                        ticket = waiter.arm()
        finally:
            self.engine.wakeups.remove(waiter)

    def _held_ms(self, record: SubscriptionRecord, now_ms: int) -> int:
        """How long the lease of a living holder lasts, unless it is renewed or given back before."""
        lease = record.lease
        return lease.until_ms - now_ms if lease.live(now_ms) and not self.engine.is_gone(lease.owner) else 0

    def _begin_or_let_go(self, id: str, spec: SubscriptionSpec, entry: Entry) -> Flow[Begun]:
        """Who is cancelled while it waits may have got the lease already, and nobody would give it back."""
        begun: list[SubscriptionRecord] = []
        left = (yield from self._left_in_flight(id, spec)) if selection_of(spec).takes_time else None

        def work(writer: Writer, undo: Undo) -> Begun:
            outcome = self._begin(writer, id, spec, entry, left)
            begun[:] = [outcome.record]
            undo.append(begun.clear)
            return outcome

        def let_go(writer: Writer, undo: Undo) -> None:
            for mine in begun:
                record = writer.subscription(id)
                if record is not None and record.lease.held_by(mine.lease.owner, mine.lease.fence):
                    writer.save_subscription(replace(record, lease=release(record.lease)))

        try:
            return (yield from self.engine.write(work))
        except HeadwaterError:
            raise
        except BaseException:
            with contextlib.suppress(Closed):  # which lets go of everything
                self.engine.committer.submit(let_go)  # it comes after the beginning, for there is one queue
            raise

    def _left_in_flight(self, id: str, spec: SubscriptionSpec) -> Flow[claims.LeftInFlight | None]:
        """Beside the writers, and a page at a time."""
        record = yield from self.engine.read(lambda reader: reader.subscription(id))
        if record is None or spec.mode != "exclusive":
            return None
        found = claims.LeftInFlight(record.window, [])
        after, selection = record.window.floor, selection_of(spec)
        while after < record.window.delivered:
            messages, after = yield from self.engine.read(
                lambda reader, after=after: reader.scan(  # type: ignore[misc]
                    selection, after, claims.RECOVERY_PAGE, found.window.delivered
                ),
                self.engine.filters,
            )
            found.seqs.extend(message.seq for message in messages if not record.window.is_settled(message.seq))
        return found

    def _begin(
        self,
        writer: Writer,
        id: str,
        spec: SubscriptionSpec,
        entry: Entry,
        left: claims.LeftInFlight | None,
    ) -> Begun:
        now_ms = self.engine.clock.now_ms()
        record = writer.subscription(id)
        is_new = record is None
        if record is None:
            after = start_position(writer, entry.start)
            if entry.tenant is not None:
                spec = replace(spec, owner=entry.tenant.owner)
            record = SubscriptionRecord(id, spec, now_ms, now_ms, WindowState(after, after))
            if entry.tenant is not None:
                entry.tenant.check_new(writer, record)
        else:
            if entry.tenant is not None:
                entry.tenant.allow(record)
            _refuse_other_purpose(record.spec, spec, id)
            record = replace(record, spec=replace(spec, owner=record.spec.owner), active_ms=now_ms)
        resumed_from = claims.settled_to(writer, record)
        resumed = NOTHING_RESUMED
        if entry.takeover or not self._held_ms(record, now_ms):
            record = replace(record, lease=release(record.lease))
        if entry.resume is not None:
            record, resumed = resume(writer, record, entry.resume, now_ms, left)
        elif spec.mode == "exclusive":
            record = claims.acquire(writer, record, self.engine.new_owner(), now_ms, left)
        writer.save_subscription(record)
        return Begun(record, resumed_from, resumed, is_new)

    def _tell_former_holders(self, record: SubscriptionRecord) -> None:
        """Who held it until now in this process need not wait for its next heartbeat to learn that it does no more."""
        if record.spec.mode == "exclusive":
            for other in list(self._subscribers):
                if isinstance(other, Subscriber) and other.id == record.id and other.fence != record.lease.fence:
                    other.lose()

    def unsubscribe(self, id: str, allow: Allow | None = None) -> Flow[None]:
        """Remove a subscription with all its state; its dead letters stay."""

        def work(writer: Writer, undo: Undo) -> None:
            record = claims.load(writer, id)
            if allow is not None:
                allow(record)
            if record.lease.live(self.engine.clock.now_ms()):
                raise claims.already_active(record, "Close it there first")
            writer.end_redrives(id, "the subscription was removed")
            writer.delete_subscription(id)

        return self.engine.write(work)

    def seek(self, id: str, start: Start, allow: Allow | None = None) -> Flow[int]:
        """Move a subscription: what comes after the new position is delivered (again), all else counts as settled.
        Only while nobody holds it; shared consumers lose what they have in flight."""

        def work(writer: Writer, undo: Undo) -> int:
            record = claims.load(writer, id)
            if allow is not None:
                allow(record)
            if record.spec.mode == "exclusive" and record.lease.live(self.engine.clock.now_ms()):
                raise claims.already_active(record, "Close it there, seek, and subscribe again")
            after = start_position(writer, start)
            lease = Lease("", record.lease.fence + 1, 0)
            writer.end_redrives(id, "the subscription was moved")
            writer.clear_deliveries(id)
            writer.save_subscription(replace(record, window=WindowState(after, after), lease=lease))
            return after

        position = yield from self.engine.write(work)
        self.engine.wakeups.wake_all()
        return position

    # --- looking ------------------------------------------------------------------------------------------------

    def subscription_infos(self) -> Flow[list[statistics.SubscriptionInfo]]:
        clock = self.engine.clock
        return self.shared_read("subscriptions", lambda reader: statistics.describe_all(reader, clock.now_ms()))

    def describe(self, consumer: Consumer) -> Flow[statistics.SubscriptionInfo]:
        if isinstance(consumer, Tail):
            raise InvalidOption(
                "an ephemeral subscription keeps no state to describe",
                where=consumer.id,
                next="Use mode exclusive or shared",
            )
        return self.subscription_info(consumer.id)

    def subscription_info(self, id: str) -> Flow[statistics.SubscriptionInfo]:
        now_ms = self.engine.clock.now_ms()
        return self.engine.read(
            lambda reader: statistics.describe(reader, claims.load(reader, id), now_ms), self.engine.statistics
        )

    def subscription_record(self, id: str) -> Flow[SubscriptionRecord]:
        return self.engine.read(lambda reader: claims.load(reader, id))

    def topics(self) -> Flow[list[TopicCount]]:
        return self.engine.read(lambda reader: reader.topic_counts(), self.engine.statistics)

    def topic_max_seq(self, topic: str) -> Flow[int]:
        wanted = check_topic(topic)
        return self.engine.read(lambda reader: reader.topic_max_seq(wanted), self.engine.statistics)

    def last_seq(self) -> Flow[int]:
        return self.engine.read(lambda reader: reader.last_seq())

    def statistics(self, subscriptions_max: int | None = None) -> Flow[statistics.LogStatistics]:
        """`subscriptions_max`: only the first ones, by id, are described."""
        if subscriptions_max is None:
            clock = self.engine.clock
            return self.shared_read("statistics", lambda reader: statistics.log_statistics(reader, clock.now_ms()))
        now_ms = self.engine.clock.now_ms()
        return self.engine.read(
            lambda reader: statistics.log_statistics(reader, now_ms, subscriptions_max), self.engine.statistics
        )

    def shared_read(self, key: Hashable, work: Callable[[Reader], T]) -> Flow[T]:
        """Statistics for all who ask for the same, which `key` names."""
        with self._sharing:
            read = self._shared_reads.get(key)
            if read is None:
                read = self._shared_reads[key] = SharedRead(self.engine, work)
        return read.get()

    def health(self) -> Flow[dict[str, Any]]:
        yield from self.prove_writable()
        return (yield from self.engine.look(self.engine.store.health, self.engine.statistics))

    def prove_writable(self) -> Flow[None]:
        """Make one small durable write; it raises what any other write would, such as DiskFull."""
        proof = Lease(self.engine.owner, 0, self.engine.clock.now_ms())
        return self.engine.write(lambda writer, _: writer.save_lease(WRITE_PROOF, proof), touching=COUNTS)

    # --- retention ----------------------------------------------------------------------------------------------

    def retain(
        self,
        pattern: str,
        *,
        max_age: Span | None,
        max_count: int | None,
        max_bytes: int | None,
        keep_unacked: bool,
        dialect: Dialect,
    ) -> Flow[None]:
        for name, limit in (("max_count", max_count), ("max_bytes", max_bytes)):
            if limit is not None:
                check_whole(name, limit, 0, INT64_MAX)
        limits = Limits(None if max_age is None else span_ms(max_age, "max_age"), max_count, max_bytes, keep_unacked)
        policy = RetentionPolicy(parse_pattern(pattern, dialect).text, limits, dialect)
        if policy not in (yield from self.retention()):  # so that a server starts on a full disk
            yield from self.engine.write(lambda writer, _: writer.set_retention(policy))

    def unretain(self, pattern: str, dialect: Dialect) -> Flow[bool]:
        return self.engine.write(lambda writer, _: writer.remove_retention(pattern, dialect))

    def retention(self) -> Flow[list[RetentionPolicy]]:
        return self.engine.read(lambda reader: reader.retention(), self.engine.statistics)

    def housekeep(self) -> Flow[housekeeping.Report]:
        return housekeeping.housekeep(self.engine, lambda: self._closed)

    # --- living and ending --------------------------------------------------------------------------------------

    def heartbeat(self) -> None:
        """Renew what this process holds. Blocks; the keeper calls it on a thread of its own."""
        beats = [subscriber.heartbeat() for subscriber in list(self._subscribers) if not subscriber.closed]
        saves = [self._save_timings()] if self.engine.timings.is_due() else []
        run_together(
            [*beats, *saves],
            lambda flow, exc: logger.warning(
                "%s: %s", "timings wait to be saved" if flow in saves else "a subscription could not be renewed", exc
            ),
        )

    def _save_timings(self) -> Flow[None]:
        return self.engine.write(self.engine.timings.save, touching=COUNTS)

    def heartbeat_s(self) -> float:
        specs = [subscriber.spec for subscriber in list(self._subscribers) if isinstance(subscriber, Subscriber)]
        shortest_ms = (min(spec.lease_ms, spec.ack_wait_ms, spec.inactive_ms or 30_000) for spec in specs)
        return max(min([*shortest_ms, 30_000]) / 1000 / HEARTBEATS_PER_LEASE, HEARTBEAT_S_MIN)

    def close(self) -> None:
        """Give back what is held, finish what is queued, let go of the store. Blocks. Twice is harmless."""
        if self._closed:
            return
        self._closed = True
        if self.engine.forked:
            return
        self.engine.interrupt_reads()  # also those of the background work
        for background in (self._housekeeper, self._keeper):
            if background is not None:
                background.stop()
        self.live.close()
        for subscriber in list(self._subscribers):
            try:
                run_blocking(subscriber.close())
            except HeadwaterError as exc:  # it will be free when its lease runs out
                logger.warning("subscription %s could not be given back: %s", subscriber.id, exc)
        if self.engine.timings:
            try:
                run_blocking(self._save_timings())
            except HeadwaterError as exc:
                logger.warning("the last timings were not saved: %s", exc)
        self.engine.close()


def _refuse_other_purpose(stored: SubscriptionSpec, asked: SubscriptionSpec, id: str) -> None:
    """Settings may change from one subscribe to the next; what the subscription is for may not."""
    for name in ("pattern", "dialect", "mode", "entities", "where", "order", "order_key"):
        had, wants = getattr(stored, name), getattr(asked, name)
        if had != wants and not (name == "entities" and _is_unusable(stored)):
            raise SubscriptionMismatch(
                f"subscription '{id}' was created with {name} {had!r}, not {wants!r}",
                where=id,
                next="Use another id, or remove the subscription first and start anew",
            )


def _is_unusable(stored: SubscriptionSpec) -> bool:
    """Whether its filter was written in a dialect that is no longer spoken; then another may take its place."""
    try:
        selection_of(stored)
    except InvalidFilter:
        return True
    return False
