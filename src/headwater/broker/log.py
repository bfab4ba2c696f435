"""The verbs of a log in this process. Those that wait once return a Completion, the others are flows."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterable
from functools import partial
from typing import Any, TypeVar, Unpack
from weakref import WeakValueDictionary

from headwater.arguments import check_flag
from headwater.broker import history, maintenance, schedules, statistics
from headwater.broker.background import PeriodicTask
from headwater.broker.committer import TransactionHooks
from headwater.broker.consumer import Consumer, ephemeral_error
from headwater.broker.dead_letters import DeadLetters
from headwater.broker.deliveries import Claimed, Resume, already_active, load, replace
from headwater.broker.durable_consumer import DurableConsumer
from headwater.broker.engine import Engine, SharedRead
from headwater.broker.flow import Completion, Flow, finished, run_blocking, run_together
from headwater.broker.live import LiveFeed
from headwater.broker.logger import logger
from headwater.broker.publish import Outgoing, make_drafts, submit_drafts
from headwater.broker.schedules import Allow as ScheduleAllow
from headwater.broker.schedules import ScheduleRecord, ScheduleTurn
from headwater.broker.shared_consumers import forget_consumers
from headwater.broker.subscribe import (
    Allow,
    Start,
    SubscribeOptions,
    SubscribeRequest,
    Tenant,
    acquire,
    check_subscription_id,
    load_allowed,
    load_movable,
    spec_of,
    start_position,
)
from headwater.broker.tail_consumer import TailConsumer
from headwater.broker.transaction import ExternalTransactions, OwnTransaction
from headwater.broker.verbs import RemoteVerbs
from headwater.delivery.lease import Lease
from headwater.delivery.retention import Limits
from headwater.delivery.schedule import Schedule
from headwater.delivery.window import WindowState
from headwater.errors import (
    HeadwaterError,
    InvalidStateError,
    ReadOnlyError,
)
from headwater.message import PublishOptions, make_draft
from headwater.ports.clock import Clock
from headwater.ports.records import (
    Appended,
    RetentionPolicy,
    SubscriptionRecord,
    TopicCount,
)
from headwater.ports.store import COUNTERS, Reader, Writer
from headwater.topics import Dialect, check_topic, parse_pattern

T = TypeVar("T")

HEARTBEATS_PER_LEASE = 3
HEARTBEAT_S_MIN = 0.2  # a beat renews all; one impatient subscription must not set the pace of the others
WRITE_PROOF = "write proof"  # the name of the lease that is written to see whether writing works


class LocalLog:
    """One open log: its engine, its subscribers, its background work."""

    def __init__(self, engine: Engine, *, maintenance_s: float | None, heartbeats: bool = True) -> None:
        self.engine = engine
        self.dead_letters = DeadLetters(engine)
        self.live = LiveFeed(engine)
        self.external_tx = ExternalTransactions(engine)
        self._shared_reads: WeakValueDictionary[Hashable, SharedRead[Any]] = WeakValueDictionary()  # that are wanted
        self._sharing = threading.Lock()
        self._subscribers: set[DurableConsumer | TailConsumer] = set()
        self._closed = False
        self._sampling: PeriodicTask | None = None
        self._heartbeats = (
            PeriodicTask("headwater-heartbeats", self.heartbeat, self.heartbeat_s) if heartbeats else None
        )
        self._maintenance = (
            None
            if maintenance_s is None
            else PeriodicTask(
                "headwater-maintenance", lambda: run_blocking(self.run_maintenance()), lambda: maintenance_s
            )
        )

    @property
    def name(self) -> str:
        return self.engine.store.name

    @property
    def remote(self) -> RemoteVerbs:
        raise InvalidStateError(
            "there is no connection: the log is in this process", where=self.name, next="Open a server: ws://…"
        )

    # --- publishing ---------------------------------------------------------------------------------------------

    def publish(self, topic: str, data: Any, options: PublishOptions) -> Completion[int]:
        engine = self.engine
        engine.check_usable()
        now_ms = engine.clock.now_ms() if options else 0  # of times that are relative
        draft = make_draft(check_topic(topic), data, options, now_ms)
        return engine.committer.publish(draft)

    def publish_many(self, messages: Iterable[Outgoing]) -> Completion[list[int]]:
        """Publish all or none, in one transaction."""
        engine = self.engine
        engine.check_usable()
        drafts = make_drafts(messages, engine.clock.now_ms())
        if not drafts:
            return finished([])
        return engine.committer.publish_all(drafts)

    def append(self, messages: Iterable[Outgoing]) -> Completion[Appended]:
        return submit_drafts(self.engine, make_drafts(messages, self.engine.clock.now_ms()), None)

    def transaction(self, consumer: Consumer | None = None, claimed: Claimed | None = None) -> OwnTransaction:
        if consumer is None or claimed is None:
            return OwnTransaction(self.engine)
        if not isinstance(consumer, DurableConsumer):
            raise ephemeral_error(consumer, "has nothing to ack")
        return OwnTransaction(self.engine, consumer.id, partial(consumer.ack_in, [claimed]))

    # --- subscribing --------------------------------------------------------------------------------------------

    def subscribe(
        self,
        id: str,
        pattern: str,
        resume: Resume | None = None,
        tenant: Tenant | None = None,
        **options: Unpack[SubscribeOptions],
    ) -> Flow[DurableConsumer | TailConsumer]:
        check_subscription_id(id)
        start: Start = options.pop("start", "new" if options.get("mode") == "ephemeral" else "first")
        timeout_s = options.pop("timeout", 0.0)
        takeover = options.pop("takeover", False)
        check_flag("takeover", takeover, where=id)
        spec = spec_of(id, pattern, options)
        subscriber: DurableConsumer | TailConsumer
        if spec.mode == "ephemeral":
            after = yield from self.engine.read(lambda reader: start_position(reader, start))
            subscriber = TailConsumer(self.engine, id, spec, after)
        else:
            name = self.engine.new_owner() if resume is None else resume.owner
            request = SubscribeRequest(start, takeover, resume, name, tenant)
            begun = yield from acquire(self.engine, id, spec, request, timeout_s)
            self._end_former_holders(begun.record)
            subscriber = DurableConsumer(self.engine, begun.record, begun.resumed_from, begun.resumed, request.consumer)
            subscriber.is_new = begun.is_new
        self._subscribers.add(subscriber)
        subscriber.gone.watch(lambda _: self._subscribers.discard(subscriber))
        if self._heartbeats is not None:
            self._heartbeats.poke()
        return subscriber

    def _end_former_holders(self, record: SubscriptionRecord) -> None:
        """A former holder in this process learns of its loss now, not with its next heartbeat."""
        if record.spec.mode == "exclusive":
            for other in list(self._subscribers):
                if isinstance(other, DurableConsumer) and other.id == record.id and other.fence != record.lease.fence:
                    other.lose()

    def delete_subscription(self, id: str, allow: Allow | None = None) -> Flow[None]:
        """Remove a subscription with all its state; its dead letters stay."""

        def work(writer: Writer, hooks: TransactionHooks) -> None:
            record = load_allowed(writer, id, allow)
            if record.lease.live(self.engine.clock.now_ms()):
                raise already_active(record, "Close it first")
            writer.end_redrives(id, "the subscription was removed")
            writer.delete_subscription(id)
            forget_consumers(writer, id)

        yield from self.engine.write(work)
        self.engine.wakeups.settled(id)  # consumers of a shared one learn that it is gone

    def seek(self, id: str, start: Start, allow: Allow | None = None) -> Flow[int]:
        """Move a subscription: what comes after the new position is delivered (again), all else counts as settled.
        Only while it has no holder; shared consumers lose their messages in flight."""

        def work(writer: Writer, hooks: TransactionHooks) -> int:
            record = load_movable(writer, id, allow, self.engine.clock.now_ms())
            after = start_position(writer, start)
            lease = Lease("", record.lease.fence + 1, 0)
            writer.end_redrives(id, "the subscription was moved")
            writer.clear_deliveries(id)
            writer.save_subscription(replace(record, window=WindowState(after, after), lease=lease))
            return after

        position = yield from self.engine.write(work)
        self.engine.wakeups.wake_all()
        return position

    def pause(self, id: str, allow: Allow | None = None) -> Flow[None]:
        """Deliver nothing of a subscription until it is resumed. Messages in flight may still be settled."""
        yield from self._set_paused(id, self.engine.clock.now_ms(), allow)
        for subscriber in list(self._subscribers):
            if isinstance(subscriber, DurableConsumer) and subscriber.id == id:
                subscriber.note_paused(True)

    def resume(self, id: str, allow: Allow | None = None) -> Flow[None]:
        yield from self._set_paused(id, None, allow)
        self.engine.wakeups.settled(id)

    def _set_paused(self, id: str, paused_ms: int | None, allow: Allow | None) -> Flow[None]:
        """A subscription that is paused already stays so since when it was."""

        def work(writer: Writer, hooks: TransactionHooks) -> None:
            record = load_allowed(writer, id, allow)
            if (record.spec.paused_ms is None) != (paused_ms is None):
                spec = replace(record.spec, paused_ms=paused_ms)
                writer.save_subscription(replace(record, spec=spec, active_ms=self.engine.clock.now_ms()))

        return self.engine.write(work, touching=id)

    # --- looking ------------------------------------------------------------------------------------------------

    def subscription_infos(self) -> Flow[list[statistics.SubscriptionInfo]]:
        clock = self.engine.clock
        return self.shared_read("subscriptions", lambda reader: statistics.describe_all(reader, clock.now_ms()))

    def describe(self, consumer: Consumer) -> Flow[statistics.SubscriptionInfo]:
        if isinstance(consumer, TailConsumer):
            raise ephemeral_error(consumer, "keeps no state to describe")
        return self.subscription_info(consumer.id)

    def subscription_info(self, id: str) -> Flow[statistics.SubscriptionInfo]:
        now_ms = self.engine.clock.now_ms()
        return self.engine.read(
            lambda reader: statistics.describe(reader, load(reader, id), now_ms), self.engine.statistics
        )

    def subscription_record(self, id: str) -> Flow[SubscriptionRecord]:
        return self.engine.read(lambda reader: load(reader, id))

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

    def take_sample(self) -> Flow[None]:
        return history.take_sample(self.engine)

    def record_history(self) -> None:
        """Take samples of the figures from now on, as a server does."""
        self._sampling = PeriodicTask("headwater-history", self._take_sample, lambda: history.SAMPLE_S, at_once=True)

    def _take_sample(self) -> None:
        try:
            run_blocking(self.take_sample())
        except ReadOnlyError:
            raise
        except HeadwaterError as exc:
            if not self._closed:
                logger.warning("figures were not recorded: %s", exc)

    def shared_read(self, key: Hashable, work: Callable[[Reader], T]) -> Flow[T]:
        """Statistics that concurrent callers share; `key` names them."""
        with self._sharing:
            read = self._shared_reads.get(key)
            if read is None:
                read = self._shared_reads[key] = SharedRead(self.engine, work)
        return read.get()

    def health(self) -> Flow[dict[str, Any]]:
        yield from self.prove_writable()
        return (yield from self.engine.look(self.engine.store.health, self.engine.statistics))

    def prove_writable(self) -> Flow[None]:
        """Make one small durable write; it raises what any other write would, such as DiskFullError."""
        proof = Lease(self.engine.owner, 0, self.engine.clock.now_ms())
        return self.engine.write(lambda writer, _: writer.save_lease(WRITE_PROOF, proof), touching=COUNTERS)

    # --- retention ----------------------------------------------------------------------------------------------

    def retain(self, pattern: str, limits: Limits, dialect: Dialect) -> Flow[None]:
        policy = RetentionPolicy(parse_pattern(pattern, dialect).text, limits, dialect)
        if policy not in (yield from self.retention()):  # so that a server starts on a full disk
            yield from self.engine.write(lambda writer, _: writer.set_retention(policy))

    def delete_retention(self, pattern: str, dialect: Dialect) -> Flow[bool]:
        return self.engine.write(lambda writer, _: writer.remove_retention(pattern, dialect))

    def retention(self) -> Flow[list[RetentionPolicy]]:
        return self.engine.read(lambda reader: reader.retention(), self.engine.statistics)

    def run_maintenance(self) -> Flow[maintenance.MaintenanceReport]:
        return maintenance.run_maintenance(self.engine, lambda: self._closed)

    # --- schedules ----------------------------------------------------------------------------------------------

    @property
    def clock(self) -> Clock:
        return self.engine.clock

    def schedules(self) -> Flow[list[ScheduleRecord]]:
        return self.engine.read(schedules.schedules, self.engine.statistics)

    def declare_schedule(
        self, schedule: Schedule, publisher: str | None = None, allow: ScheduleAllow | None = None
    ) -> Flow[ScheduleTurn]:
        return schedules.declare_schedule(self.engine, schedule, publisher or self.engine.owner, allow)

    def take_schedule(self, schedule: Schedule, due_ms: int, publisher: str | None = None) -> Flow[ScheduleTurn]:
        return schedules.take_schedule(self.engine, schedule, publisher or self.engine.owner, due_ms)

    def publish_occurrence(
        self, schedule: Schedule, fence: int, at_ms: int, data: Any, ends: bool, publisher: str | None = None
    ) -> Flow[bool]:
        publisher = publisher or self.engine.owner
        return schedules.publish_occurrence(self.engine, schedule, publisher, fence, at_ms, data, ends=ends)

    def delete_schedule(self, id: str, allow: ScheduleAllow | None = None) -> Flow[bool]:
        return schedules.delete_schedule(self.engine, id, allow)

    # --- living and ending --------------------------------------------------------------------------------------

    def heartbeat(self) -> None:
        """Renew what this process holds. Blocks; a periodic task calls it on a thread of its own."""
        beats = [subscriber.heartbeat() for subscriber in list(self._subscribers) if not subscriber.closed]
        saves = [self._save_timings()] if self.engine.timings.is_due() else []
        run_together(
            [*beats, *saves],
            lambda flow, exc: logger.warning(
                "%s: %s", "timings wait to be saved" if flow in saves else "a subscription could not be renewed", exc
            ),
        )

    def _save_timings(self) -> Flow[None]:
        return self.engine.write(self.engine.timings.save, touching=COUNTERS)

    def heartbeat_s(self) -> float:
        specs = [subscriber.spec for subscriber in list(self._subscribers) if isinstance(subscriber, DurableConsumer)]
        shortest_ms = (min(spec.lease_ms, spec.ack_wait_ms, spec.inactive_ms or 30_000) for spec in specs)
        return max(min([*shortest_ms, 30_000]) / 1000 / HEARTBEATS_PER_LEASE, HEARTBEAT_S_MIN)

    def close(self) -> None:
        """Release the subscriptions, finish what is queued, close the store. Blocks. Twice is harmless."""
        if self._closed:
            return
        self._closed = True
        if self.engine.forked:
            return
        self.engine.interrupt_reads()  # also those of the background work
        for background in (self._maintenance, self._heartbeats, self._sampling):
            if background is not None:
                background.stop()
        self.live.close()
        for subscriber in list(self._subscribers):
            try:
                run_blocking(subscriber.close())
            except HeadwaterError as exc:  # it will be free when its lease runs out
                logger.warning("subscription %s could not be released: %s", subscriber.id, exc)
        if self.engine.timings:
            try:
                run_blocking(self._save_timings())
            except HeadwaterError as exc:
                logger.warning("the last timings were not saved: %s", exc)
        self.engine.close()
