# Generated from _async.py by tools/generate_sync.py: change that file, not this one.
"""The synchronous API: `headwater.open()` returns an `Log`."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import copy_context
from functools import partial
from types import EllipsisType
from typing import TYPE_CHECKING, Any, Self, TypeVar

from headwater.api._runtime import (
    Hinting,
    SyncOnly,
    SyncOnlyLoop,
    check_connection_kind,
    check_takes,
    claimed_of,
    given,
    in_place,
    mark_settled,
    no_loop,
    refuse_after_ack,
    refuse_after_nack,
    spawn_thread,
    sync_transaction,
    waking,
)
from headwater.api.received import Received
from headwater.arguments import (
    check_callable,
    check_flag,
    check_optional_text,
    check_text,
    check_whole,
    hinted,
)
from headwater.broker.consumer import PREFETCH, Consumer
from headwater.broker.dead_letters import LetterFilter, LetterStatistics, RedriveResult, make_query
from headwater.broker.deliveries import Claimed, Failure
from headwater.broker.flow import Flow, run_blocking
from headwater.broker.handlers import SHUTDOWN_TIMEOUT_S, Handler, Handlers, Registration, stopped_by_signals
from headwater.broker.live import LiveVerbs
from headwater.broker.maintenance import MaintenanceReport
from headwater.broker.publish import Outgoing
from headwater.broker.schedules import ScheduleInfo, ScheduleRegistration
from headwater.broker.statistics import LogStatistics, SubscriptionInfo
from headwater.broker.subscribe import (
    Entities,
    Start,
    SubscribeOptions,
    check_start,
    check_subscription_id,
    make_spec,
)
from headwater.broker.transaction import OwnTransaction
from headwater.broker.verbs import LogVerbs, RemoteVerbs
from headwater.delivery.retention import make_limits
from headwater.delivery.schedule import Missed, Schedule, check_schedule
from headwater.errors import ClosedError, InvalidOptionError
from headwater.formats import Moment, Span, span_ms, span_s
from headwater.message import PublishOptions
from headwater.ports.dedupe import DedupeQueue
from headwater.ports.records import DeadLetter, Gap, Mode, Order, RetentionPolicy, TopicCount
from headwater.topics import Dialect, check_topic

if TYPE_CHECKING:
    from headwater.broker.tracing import Tracing

IS_ASYNC = False
CONCURRENCY_MAX = 1_000

Function = TypeVar("Function", bound=Callable[..., Any])

_NO_OPTIONS: PublishOptions = {}
_NOT_GIVEN = (None,) * 15  # most messages have nothing but topic and data
_NO_PRIORITY = 0


class ReceivedMessage(Received, gc=False, eq=False):
    """A delivered message with the methods that settle it."""

    _subscription: Subscription

    def ack(self, *, confirm: bool = True, tx: Any = None) -> None:
        """Settle the message as done. Returns when the ack is on disk; with confirm=False at once, and a failure is
        only logged. With `tx`, a connection of yours to the log's PostgreSQL, the ack is part of your transaction."""
        if self.settled:
            refuse_after_nack(self, self._subscription._consumer.spec.mode)
            return
        if tx is None:
            self._subscription.ack_many([self], confirm=confirm)
            return
        check_connection_kind(tx, is_async=IS_ASYNC)
        subscription = self._subscription
        run_blocking(subscription._core.external_tx.ack(tx, subscription._consumer, self._claimed))
        self.settled = True

    @hinted("nack")
    def nack(self, delay: Span | None = None, *, error: str | None = None) -> None:
        """Redeliver the message after `delay` seconds, or after the backoff of the subscription."""
        if self.settled:
            refuse_after_ack(self, self._subscription._consumer.spec.mode, "nack")
        else:
            delay_ms = None if delay is None else span_ms(delay, "delay")
            failure = Failure("processing_error", check_optional_text("error", error))
            run_blocking(self._subscription._consumer.nack(self._claimed, delay_ms, failure))
            self.settled = self.declined = True

    @hinted("reject")
    def reject(self, reason: str | None = None) -> None:
        """Dead-letter the message."""
        if self.settled:
            refuse_after_ack(self, self._subscription._consumer.spec.mode, "reject")
        else:
            run_blocking(
                self._subscription._consumer.reject(
                    self._claimed, Failure("rejected", check_optional_text("reason", reason))
                )
            )
            self.settled = self.declined = True

    def extend(self, by: Span | None = None) -> None:
        """Extend the time to settle the message to `by` seconds from now; the default is the subscription's
        `ack_wait`."""
        by_ms = None if by is None else span_ms(by, "by")
        run_blocking(self._subscription._consumer.extend([self._claimed], by_ms))

    @contextmanager
    def transaction(self) -> Iterator[Transaction]:
        """Your own writes in the log's database and this ack: all commit at the end of the block, or none."""
        subscription = self._subscription
        inner = subscription._core.transaction(subscription._consumer, self._claimed)
        with sync_transaction(inner):
            yield Transaction(inner)
        self.settled = True


class Transaction(Hinting):
    """The `tx` of `with message.transaction() as tx` and `with log.transaction() as tx`. It blocks all
    other writers of the log: keep it short."""

    _kind = "transaction"

    def __init__(self, inner: OwnTransaction) -> None:
        self._inner = inner

    def execute(self, sql: str, bindings: Sequence[Any] | Mapping[str, Any] = ()) -> list[tuple[Any, ...]]:
        """Run your SQL in the transaction and return its rows."""
        return in_place(partial(self._inner.execute, sql, bindings), self._inner.engine.transactions)

    @hinted("publish")
    def publish(
        self,
        topic: str,
        data: Any,
        *,
        id: str | None = None,
        headers: Mapping[str, Any] | None = None,
        from_: str | None = None,
        to: str | None = None,
        reply_to: str | None = None,
        correlation_id: str | None = None,
        type: str | None = None,
        version: int | None = None,
        content_type: str | None = None,
        traceparent: str | None = None,
        priority: int = 0,
        deliver_at: Moment | None = None,
        delay: Span | None = None,
        expires_at: Moment | None = None,
        ttl: Span | None = None,
        published_at: Moment | None = None,
    ) -> int:
        """Publish with the transaction's commit. Return the seq."""
        publish = partial(self._inner.publish, topic, data, given(PublishOptions, Transaction.publish, locals()))
        context = copy_context()  # which has the current span
        return in_place(partial(context.run, publish), self._inner.engine.transactions)


class Subscription(SyncOnlyLoop, Hinting):
    """Fetch from it, or iterate over it. Closing it, or leaving its `with` block, releases the messages in
    flight and keeps the subscription. Threads and tasks may share it: each message goes to one of them."""

    _kind = "subscription"

    def __init__(self, core: LogVerbs, consumer: Consumer) -> None:
        self._core = core
        self._consumer = consumer

    def __repr__(self) -> str:
        spec = self._consumer.spec
        return f"<{type(self).__name__} {self.id}: {spec.pattern}, {spec.mode}>"

    @property
    def id(self) -> str:
        """The name under which the log keeps the position of the subscription."""
        return self._consumer.id

    @property
    def resumed_from(self) -> int:
        """All messages up to this seq were settled when the subscription began here; 0 for a new one."""
        return self._consumer.resumed_from

    def on_gap(self, callback: Callable[[Gap], None]) -> Callable[[Gap], None]:
        """Call this when messages were deleted before they were settled here."""
        check_callable("callback", callback)
        self._consumer.on_gap = callback
        return callback

    @hinted("fetch")
    def fetch(self, n: int = PREFETCH, timeout: Span | None = 0.0) -> list[ReceivedMessage]:
        """Up to `n` messages. Waits up to `timeout` seconds for the first one; None waits without limit."""
        found = run_blocking(self._consumer.take(n, span_s(timeout, "timeout")))
        return [ReceivedMessage(claimed, self) for claimed in found]

    def __iter__(self) -> Iterator[ReceivedMessage]:
        return self.messages(timeout=None)

    @hinted("messages")
    def messages(self, timeout: Span | None = 0.0) -> Iterator[ReceivedMessage]:
        """Yield one message after another, until none arrives for `timeout` seconds; with None, until the subscription
        is closed."""
        consumer, timeout_s = self._consumer, span_s(timeout, "timeout")
        with consumer.taking():
            while True:
                try:
                    claimed = consumer.pop() or run_blocking(consumer.take_next(timeout_s))
                except ClosedError:
                    return
                if claimed is None:
                    return
                yield ReceivedMessage(claimed, self)

    def ack(self, message: ReceivedMessage, *, confirm: bool = True) -> None:
        """As `message.ack()`."""
        claimed_of([message])
        message.ack(confirm=confirm)

    def ack_many(self, messages: Sequence[ReceivedMessage], *, confirm: bool = True) -> None:
        """Ack all of these in one transaction; if one cannot be acked, none is, and the error names it."""
        if confirm:
            run_blocking(self._ack_all(messages))
        else:
            self._consumer.ack_soon(claimed_of(messages))
            mark_settled(messages)

    def _ack_all(self, messages: Sequence[ReceivedMessage]) -> Flow[None]:
        """A submitted ack cannot be withdrawn: one that is cancelled and repeated waits for the first."""
        claimed = claimed_of(messages)
        ack = messages[0]._ack if messages else None
        if ack is None or ack.error is not None or any(message._ack is not ack for message in messages):
            ack = self._consumer.ack(claimed)
        try:
            yield ack
        except BaseException:
            for message in messages:
                message._ack = ack
            raise
        mark_settled(messages)

    @hinted("nack")
    def nack(self, message: ReceivedMessage, delay: Span | None = None, *, error: str | None = None) -> None:
        """As `message.nack()`."""
        claimed_of([message])
        message.nack(delay, error=error)

    @hinted("reject")
    def reject(self, message: ReceivedMessage, reason: str | None = None) -> None:
        """As `message.reject()`."""
        claimed_of([message])
        message.reject(reason)

    def extend(self, message: ReceivedMessage, by: Span | None = None) -> None:
        """As `message.extend()`."""
        claimed_of([message])
        message.extend(by)

    def info(self) -> SubscriptionInfo:
        """The settings, position, lag and holder of the subscription."""
        return run_blocking(self._core.describe(self._consumer))

    def close(self) -> None:
        """Release the subscription and the messages that it claimed ahead. The log keeps its position."""
        run_blocking(self._consumer.close())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class DeadLetters(Hinting):
    """`log.dead_letters`. A dead letter is selected if it meets all given conditions; `topic` is a pattern, `error` a
    regex."""

    _kind = "dead letters"

    def __init__(self, core: LogVerbs) -> None:
        self._inner = core.dead_letters

    @hinted("dead letters")
    def list(
        self,
        after: int = 0,
        limit: int = 100,
        *,
        ids: Iterable[int] | None = None,
        subscription: str | None = None,
        topic: str | None = None,
        type: str | None = None,
        reason: str | None = None,
        error: str | None = None,
    ) -> list[DeadLetter]:
        """Dead letters by id, at most `limit` of those after the id `after`."""
        chosen = given(LetterFilter, DeadLetters.list, locals())
        return run_blocking(self._inner.find(after, limit, **chosen))

    def get(self, id: int) -> DeadLetter:
        """One dead letter. UnknownDeadLetterError if there is none of this id."""
        return run_blocking(self._inner.get(id))

    @hinted("dead letters")
    def statistics(
        self,
        *,
        ids: Iterable[int] | None = None,
        subscription: str | None = None,
        topic: str | None = None,
        type: str | None = None,
        reason: str | None = None,
        error: str | None = None,
    ) -> LetterStatistics:
        """Count dead letters by reason, subscription, topic, type and error."""
        chosen = given(LetterFilter, DeadLetters.statistics, locals())
        return run_blocking(self._inner.statistics(**chosen))

    @hinted("dead letters")
    def redrive(
        self,
        *letters: int,
        to_topic: str | None = None,
        dry_run: bool = False,
        ids: Iterable[int] | None = None,
        subscription: str | None = None,
        topic: str | None = None,
        type: str | None = None,
        reason: str | None = None,
        error: str | None = None,
    ) -> RedriveResult:
        """Deliver dead letters again to their subscription, or publish them on another topic; without ids or a
        filter all of them. `dry_run` only reports what would be redriven."""
        chosen = _with_ids(letters, given(LetterFilter, DeadLetters.redrive, locals()))
        return run_blocking(self._inner.redrive(to_topic, dry_run, **chosen))

    @hinted("dead letters")
    def purge(
        self,
        *letters: int,
        dry_run: bool = False,
        ids: Iterable[int] | None = None,
        subscription: str | None = None,
        topic: str | None = None,
        type: str | None = None,
        reason: str | None = None,
        error: str | None = None,
    ) -> int:
        """Delete dead letters; without ids or a filter all of them. `dry_run` only reports how many."""
        chosen = _with_ids(letters, given(LetterFilter, DeadLetters.purge, locals()))
        return run_blocking(self._inner.purge(dry_run, **chosen))

    @hinted("dead letters")
    def export(
        self,
        *,
        ids: Iterable[int] | None = None,
        subscription: str | None = None,
        topic: str | None = None,
        type: str | None = None,
        reason: str | None = None,
        error: str | None = None,
    ) -> Iterator[str]:
        """Yield each dead letter as a line of JSON. A page is read when its first line is consumed."""
        chosen = given(LetterFilter, DeadLetters.export, locals())
        if ids is not None:
            chosen["ids"] = tuple(ids)  # read again with every page
        make_query(chosen)  # refuses here, not with the first line
        return self._exported(chosen)

    def _exported(self, chosen: LetterFilter) -> Iterator[str]:
        after: int | None = 0
        while after is not None:
            page = run_blocking(self._inner.export(after, **chosen))
            for line in page.lines:
                yield line
            after = page.next

    def import_(self, lines: Iterable[str]) -> int:
        """Store the lines of an export as dead letters and return their number."""
        return run_blocking(self._inner.import_(lines))


def _with_ids(ids: tuple[int, ...], chosen: LetterFilter) -> LetterFilter:
    return {**chosen, "ids": ids} if ids else chosen


class Remote:
    """`log.remote`: the connection of a log behind a server. Calls go both ways."""

    def __init__(self, inner: RemoteVerbs) -> None:
        self._inner = inner

    @property
    def state(self) -> str:
        """disconnected, connecting, connected, reconnecting or failed."""
        return self._inner.state

    def on_state(self, callback: Callable[[str], None]) -> Callable[[str], None]:
        """Call this with the new state whenever it changes."""
        self._inner.on_state(callback)
        return callback

    def call(self, method: str, params: Any = None, *, timeout: Span | None = None) -> Any:
        """Call a method of the server and return its result."""
        return run_blocking(self._inner.call(method, params, span_s(timeout, "timeout")))

    def notify(self, method: str, params: Any = None) -> None:
        """Send the server a notification, which has no answer."""
        self._inner.notify(method, params)

    def method(self, name: str) -> Callable[[Function], Function]:
        """Declare a function that the server may call."""

        def declare(function: Function) -> Function:
            self._inner.offer(name, function)
            return function

        return declare


class Log(SyncOnly, Hinting):
    """A log. Publish to it, subscribe to it; close it, or use it in a `with` block."""

    _kind = "log"

    def __init__(self, core: LogVerbs, tracing: Tracing | None = None) -> None:
        if isinstance(core, str | os.PathLike):
            raise TypeError('a log is opened by headwater.open("events.db"), or headwater.open_async for asyncio')
        self._core = core if tracing is None else tracing.of_log(core)
        self._tracing = tracing
        self._loop = core.live.loop = no_loop()
        self._handlers = Handlers(self._core, partial(spawn_thread, self._loop))
        self.dead_letters = DeadLetters(core)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name}>"

    @property
    def name(self) -> str:
        """The file or url of the log, without a password."""
        return self._core.name

    @property
    def live(self) -> LiveVerbs:
        """Plain callbacks for messages as they are published: subscribe, unsubscribe, unsubscribe_all. Not awaited."""
        return self._core.live

    @property
    def remote(self) -> Remote:
        """The connection to a server: its state, and calls of custom methods. InvalidStateError if there is none."""
        return Remote(self._core.remote)

    @hinted("publish")
    def publish(
        self,
        topic: str,
        data: Any,
        *,
        id: str | None = None,
        headers: Mapping[str, Any] | None = None,
        from_: str | None = None,
        to: str | None = None,
        reply_to: str | None = None,
        correlation_id: str | None = None,
        type: str | None = None,
        version: int | None = None,
        content_type: str | None = None,
        traceparent: str | None = None,
        priority: int = 0,
        deliver_at: Moment | None = None,
        delay: Span | None = None,
        expires_at: Moment | None = None,
        ttl: Span | None = None,
        published_at: Moment | None = None,
        tx: Any = None,
    ) -> int:
        """Store a message and return its seq. When this returns, the message is on disk. With `tx`, a connection of
        yours to the log's PostgreSQL, the message is on disk when your transaction commits, and other publishers wait
        until then. `published_at` is the time of a message of the past, from another system."""
        options = _NO_OPTIONS
        names = (
            id, headers, from_, to, reply_to, correlation_id, type, version, content_type, traceparent, deliver_at,
            delay, expires_at, ttl, published_at,
        )  # fmt: skip
        if names != _NOT_GIVEN or priority is not _NO_PRIORITY:
            options = given(PublishOptions, Log.publish, locals())
        if tx is not None:
            check_connection_kind(tx, is_async=IS_ASYNC)
            return run_blocking(self._core.external_tx.publish(tx, topic, data, options))
        return run_blocking(self._core.publish(topic, data, options))

    @hinted("publish_many")
    def publish_many(self, messages: Iterable[Outgoing]) -> list[int]:
        """Store messages in one transaction, all or none, and return their seqs. Each is (topic, data), (topic, data,
        options) or a mapping."""
        return run_blocking(self._core.publish_many(messages))

    @contextmanager
    def transaction(self) -> Iterator[Transaction]:
        """Your own writes in the log's database and your publishes: all commit at the end of the block, or none."""
        inner = self._core.transaction()
        with sync_transaction(inner):
            yield Transaction(inner)

    @hinted("subscribe")
    def subscribe(
        self,
        id: str,
        pattern: str,
        *,
        mode: Mode = "exclusive",
        start: Start | None = None,
        timeout: Span | None = 0.0,
        takeover: bool = False,
        dialect: Dialect = "nats",
        from_: Entities = None,
        to: Entities = None,
        broadcast: bool = False,
        where: str | None = None,
        order: Order = "seq",
        order_key: str | None = None,
        ack_wait: Span = 30.0,
        extension_max: Span = 3600.0,
        lease: Span = 15.0,
        max_in_flight: int = 1_000,
        max_attempts: int = 5,
        backoff: Span = 1.0,
        backoff_factor: float = 2.0,
        backoff_max: Span = 300.0,
        jitter: float = 0.25,
        inactive_timeout: Span | EllipsisType | None = ...,
        dead_letter_expired: bool = True,
    ) -> Subscription:
        """Begin or resume the durable subscription `id`. A new one starts at `start`: "first", "new", the seq of a
        message, or a datetime; None is "first", and "new" for an ephemeral one. `timeout`: how long to wait for another
        holder to release it, None without limit. `takeover`: take it from its holder instead."""
        options = given(SubscribeOptions, Log.subscribe, locals())
        if "timeout" in options:
            options["timeout"] = span_s(timeout, "timeout")
        return Subscription(self._core, run_blocking(self._core.subscribe(id, pattern, **options)))

    def delete_subscription(self, id: str) -> None:
        """Delete a subscription with all its state."""
        run_blocking(self._core.delete_subscription(id))

    @hinted("seek")
    def seek(self, id: str, start: Start) -> int:
        """Move the position of a subscription without a holder: messages from `start` on are delivered, all before it
        count as settled. Returns the new position, the seq before `start`."""
        return run_blocking(self._core.seek(id, start))

    def pause(self, id: str) -> None:
        """Pause a subscription: no process gets its messages until it is resumed. It keeps its position. Messages in
        flight may still be settled."""
        run_blocking(self._core.pause(id))

    def resume(self, id: str) -> None:
        """End a pause: delivery continues where it stopped."""
        run_blocking(self._core.resume(id))

    @hinted("on")
    def on(
        self,
        pattern: str,
        *,
        id: str | None = None,
        concurrency: int | None = None,
        auto_ack: bool = True,
        on_gap: Callable[[Gap], None] | None = None,
        dedupe: DedupeQueue | None = None,
        mode: Mode = "exclusive",
        start: Start | None = None,
        takeover: bool = False,
        dialect: Dialect = "nats",
        from_: Entities = None,
        to: Entities = None,
        broadcast: bool = False,
        where: str | None = None,
        order: Order = "seq",
        order_key: str | None = None,
        ack_wait: Span = 30.0,
        extension_max: Span = 3600.0,
        lease: Span = 15.0,
        max_in_flight: int = 1_000,
        max_attempts: int = 5,
        backoff: Span = 1.0,
        backoff_factor: float = 2.0,
        backoff_max: Span = 300.0,
        jitter: float = 0.25,
        inactive_timeout: Span | EllipsisType | None = ...,
        dead_letter_expired: bool = True,
    ) -> Callable[[Handler], Handler]:
        """Declare a handler. It runs once `start()` or `run()` is called, or at once if one of them was called before.
        `id` names its durable subscription; only an ephemeral handler needs none. `concurrency`: messages that it
        handles at a time; by default one, or, in a shared subscription, as many as `headwater worker --threads` says.
        With `auto_ack=False` a return does not ack: the handler acks each message itself. `on_gap` is called with each
        `Gap`. With a `dedupe` queue, a message that was handled before and is delivered again is acked without a call.
        The other options are those of `subscribe`."""
        if callable(pattern):
            raise InvalidOptionError(
                "@log.on is used without its pattern", next='Write @log.on("orders.>", id="billing")'
            )
        if concurrency is not None:
            check_whole("concurrency", concurrency, 1, CONCURRENCY_MAX)
        check_flag("auto_ack", auto_ack, where=pattern)
        if on_gap is not None:
            check_callable("on_gap", on_gap, where=pattern)
        _check_dedupe(dedupe, auto_ack, pattern)
        options = given(SubscribeOptions, Log.on, locals())
        spec = make_spec(pattern, options)  # refuses here, not when the handler is started
        if start is not None:
            check_start(start)
        if id is None and spec.mode != "ephemeral":
            raise InvalidOptionError(
                "a durable handler needs an id, under which the log keeps its position",
                where=pattern,
                next=f'Write @log.on("{pattern}", id="billing"); keep the id when the function is renamed',
            )
        name = check_subscription_id(id if id is not None else f"handler-{uuid.uuid4().hex[:12]}")

        def receiving(consumer: Consumer) -> Callable[[Claimed], ReceivedMessage]:
            subscription = Subscription(self._core, consumer)
            return lambda claimed: ReceivedMessage(claimed, subscription)

        def declare(handler: Handler) -> Handler:
            check_takes(handler, "message", where=pattern, is_async=IS_ASYNC)
            run = handler if self._tracing is None else self._tracing.of_handler(handler, awaits=IS_ASYNC)
            self._handlers.declare(
                Registration(name, pattern, run, concurrency, auto_ack, on_gap, dedupe, options, receiving)
            )
            return handler

        return declare

    @hinted("every")
    def every(
        self, interval: Span, *, id: str, topic: str, missed: Missed = "once", missed_max: int = 100
    ) -> Callable[[Function], Function]:
        """Declare a schedule: publish to `topic` at each multiple of the interval since 1970 UTC (`"5m"`: at :00, :05,
        …). The decorated function gets an `Occurrence` and returns the data; None publishes nothing. Of all processes
        that declare the schedule one calls the function, and an occurrence is stored once. It runs once `start()` or
        `run()` is called.

        `missed` says what happens to occurrences that no process published. "once": the newest of them is published.
        "skip": none is, if it is more than a minute late. "all": all of them, but the newest `missed_max` at most."""
        every_ms = span_ms(interval, "interval")
        return self._schedule(Schedule(id, topic, every_ms=every_ms, missed=missed, missed_max=missed_max))

    @hinted("cron")
    def cron(
        self,
        expression: str,
        *,
        id: str,
        topic: str,
        tz: str = "UTC",
        missed: Missed = "once",
        missed_max: int = 100,
    ) -> Callable[[Function], Function]:
        """Declare a schedule by a cron expression of five fields, in the time zone `tz`. The rest is as for `every`.

        When clocks change, a fixed time runs once a day: one that is skipped runs when the clocks have moved, one that
        comes twice runs the first time. An expression whose minute or hour begins with `*` runs by elapsed time."""
        check_text("a cron expression", expression)
        return self._schedule(Schedule(id, topic, cron=expression, tz=tz, missed=missed, missed_max=missed_max))

    def _schedule(self, schedule: Schedule) -> Callable[[Function], Function]:
        check_schedule(schedule)
        check_topic(schedule.topic)

        def declare(function: Function) -> Function:
            check_takes(function, "occurrence", where=schedule.id, is_async=IS_ASYNC)
            self._handlers.declare(ScheduleRegistration(schedule, function))
            return function

        return declare

    def schedules(self) -> list[ScheduleInfo]:
        """The schedules that any process has declared, by id."""
        return [record.info() for record in run_blocking(self._core.schedules())]

    def delete_schedule(self, id: str) -> bool:
        """Delete a schedule; processes that run it stop publishing. Returns whether there was one."""
        return run_blocking(self._core.delete_schedule(check_text("id", id)))

    def start(self) -> None:
        """Run the declared handlers and schedules in the background. A handler whose subscription another process holds
        is on standby."""
        run_blocking(self._handlers.start())

    def run(self, shutdown_timeout: Span | None = SHUTDOWN_TIMEOUT_S) -> None:
        """Run the declared handlers and schedules until `stop()`, SIGTERM or SIGINT. Then the handlers take no new
        messages, have `shutdown_timeout` seconds to finish those they handle, and release all others. A second signal
        ends the process at once. The error that ends a handler is raised here."""
        running = self._handlers.run(span_s(shutdown_timeout, "shutdown_timeout"))  # first: no signal may be overlooked
        with stopped_by_signals(waking(self._loop, self._handlers.end_run)):
            run_blocking(running)

    def stop(self, timeout: Span | None = None) -> None:
        """Stop the handlers: they finish the messages they handle and release all others; after `timeout` seconds they
        release those too. A call by a handler only requests the stop, because a handler cannot wait for itself."""
        run_blocking(self._handlers.stop(span_s(timeout, "timeout")))

    def subscriptions(self) -> list[SubscriptionInfo]:
        """All durable subscriptions with their settings, position and lag."""
        return run_blocking(self._core.subscription_infos())

    def subscription(self, id: str) -> SubscriptionInfo:
        """One durable subscription; UnknownSubscriptionError if there is none with this id."""
        return run_blocking(self._core.subscription_info(id))

    def topics(self) -> list[TopicCount]:
        """All topics with their counts, bytes and last seqs."""
        return run_blocking(self._core.topics())

    def topic_max_seq(self, topic: str) -> int:
        """The seq of the last message on the topic; 0 if there is none."""
        return run_blocking(self._core.topic_max_seq(topic))

    def last_seq(self) -> int:
        """The seq of the last message; 0 if none was published."""
        return run_blocking(self._core.last_seq())

    def statistics(self) -> LogStatistics:
        """Messages, bytes, topics, subscriptions and dead letters of the log in one object."""
        return run_blocking(self._core.statistics())

    def health(self) -> dict[str, Any]:
        """The state of the store, and under `handlers` the state of each handler and the error that ended it."""
        health = run_blocking(self._core.health())
        handlers = self._handlers.health()
        return {**health, "handlers": handlers} if handlers else health

    @hinted("retain")
    def retain(
        self,
        pattern: str,
        *,
        max_age: Span | None = None,
        max_count: int | None = None,
        max_bytes: int | None = None,
        keep_unacked: bool = False,
        dialect: Dialect = "nats",
    ) -> None:
        """Limit the messages under a pattern; maintenance deletes the oldest beyond the limits."""
        limits = make_limits(max_age=max_age, max_count=max_count, max_bytes=max_bytes, keep_unacked=keep_unacked)
        run_blocking(self._core.retain(pattern, limits, dialect))

    def delete_retention(self, pattern: str, dialect: Dialect = "nats") -> bool:
        """Delete the policy of a pattern. Returns whether there was one."""
        return run_blocking(self._core.delete_retention(pattern, dialect))

    def retention(self) -> list[RetentionPolicy]:
        """The retention policies."""
        return run_blocking(self._core.retention())

    def run_maintenance(self) -> MaintenanceReport:
        """Apply retention and delete expired state now; this also happens in the background every
        `maintenance_interval`."""
        return run_blocking(self._core.run_maintenance())

    def close(self) -> None:
        """Stop the handlers, finish pending writes and close the log."""
        self.stop()
        in_place(self._core.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _check_dedupe(dedupe: object, auto_ack: bool, pattern: str) -> None:
    if dedupe is None:
        return
    if not callable(getattr(dedupe, "begin", None)):
        raise InvalidOptionError(f"dedupe must be a dedupe queue, not {dedupe!r}", where=pattern)
    if not auto_ack:
        raise InvalidOptionError(
            "dedupe has to know when a message is handled, and without auto_ack it does not",
            where=pattern,
            next="Leave auto_ack on; the handler may still ack, nack or reject by itself",
        )
