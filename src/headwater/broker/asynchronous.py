"""The asyncio face of a log: `headwater.connect()` gives an `AsyncLog`. The same verbs as `blocking`, awaited."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import asynccontextmanager
from contextvars import copy_context
from functools import partial
from typing import TYPE_CHECKING, Any, Self, TypeVar, Unpack

from headwater.broker.claims import Claimed, Failure
from headwater.broker.consumer import PREFETCH, Consumer
from headwater.broker.dead_letters import LetterFilter, LetterStatistics, Redriven
from headwater.broker.face import (
    LogFace,
    RemoteFace,
    SubscriptionFace,
    by_id,
    claimed_of,
    mark_settled,
    nack_arguments,
    refuse_other_colour,
)
from headwater.broker.flow import Flow, Ticket, finish, run_async
from headwater.broker.handlers import SHUTDOWN_TIMEOUT_S, Handler, Worker, stopped_by_signals
from headwater.broker.housekeeping import Report
from headwater.broker.options import Start, SubscribeOptions
from headwater.broker.publish import Outgoing
from headwater.broker.received import Received
from headwater.broker.statistics import LogStatistics, SubscriptionInfo
from headwater.broker.transaction import OwnTransaction
from headwater.broker.verbs import LogVerbs
from headwater.errors import Closed
from headwater.message import PublishOptions, Span, span_ms
from headwater.ports.dedupe import DedupeQueue
from headwater.ports.records import DeadLetter, Gap, RetentionPolicy, TopicCount
from headwater.topics import Dialect

if TYPE_CHECKING:
    from headwater.broker.tracing import Tracing

T = TypeVar("T")


async def _off_loop(work: Callable[[], T], pool: Executor | None = None) -> T:
    """Blocking work on a thread, so that the event loop goes on."""
    return await asyncio.get_running_loop().run_in_executor(pool, work)


class AsyncReceivedMessage(Received, gc=False, eq=False):
    """A delivered message with the verbs that settle it."""

    _subscription: AsyncSubscription
    declined: bool = False  # nacked or rejected

    async def ack(self, *, wait: bool = True, tx: Any = None) -> None:
        if not self.settled and tx is not None:
            refuse_other_colour(tx, awaits=True)
            subscription = self._subscription
            await run_async(subscription._core.outside.ack(tx, subscription._consumer, self._claimed))
            self.settled = True
        elif not self.settled:
            await self._subscription.ack_many([self], wait=wait)

    async def nack(self, delay: Span | None = None, *, error: str | None = None) -> None:
        if not self.settled:
            delay_ms, failure = nack_arguments(delay, error)
            await run_async(self._subscription._consumer.nack(self._claimed, delay_ms, failure))
            self.settled = self.declined = True

    async def reject(self, reason: str | None = None) -> None:
        if not self.settled:
            await run_async(self._subscription._consumer.reject(self._claimed, Failure("rejected", reason)))
            self.settled = self.declined = True

    async def extend(self, by: Span | None = None) -> None:
        by_ms = None if by is None else span_ms(by, "by")
        await run_async(self._subscription._consumer.extend([self._claimed], by_ms))

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[AsyncTransaction]:
        subscription = self._subscription
        async with _transaction(subscription._core.transaction(subscription._consumer, self._claimed)) as tx:
            yield tx
        self.settled = True


@asynccontextmanager
async def _transaction(inner: OwnTransaction) -> AsyncIterator[AsyncTransaction]:
    pool = inner.engine.transactions
    beginning = inner.engine.turns.submit(inner.begin)
    try:
        await asyncio.wrap_future(beginning)
    except asyncio.CancelledError:
        # The thread cannot be cancelled; what it begins has to be ended, or nobody could write any more.
        beginning.add_done_callback(inner.abandon)
        raise
    inside, me = inner.engine.in_transaction, asyncio.current_task()
    inside.add(me)
    try:
        yield AsyncTransaction(inner)
    except BaseException as exc:
        await _off_loop(partial(inner.rollback, exc), pool)  # behind a statement that still runs there
        raise
    else:
        await _off_loop(inner.commit, pool)
    finally:
        inside.discard(me)


class AsyncTransaction:
    """Inside `async with message.transaction() as tx` or `async with log.transaction() as tx`. Nobody else
    can write meanwhile: keep it short."""

    def __init__(self, inner: OwnTransaction) -> None:
        self._inner = inner

    async def execute(self, sql: str, bindings: Sequence[Any] | Mapping[str, Any] = ()) -> list[tuple[Any, ...]]:
        return await _off_loop(partial(self._inner.execute, sql, bindings), self._inner.engine.transactions)

    async def publish(self, topic: str, data: Any, **options: Unpack[PublishOptions]) -> int:
        publish = partial(self._inner.publish, topic, data, **options)
        here = copy_context()  # where the current span is known
        return await _off_loop(partial(here.run, publish), self._inner.engine.transactions)


class AsyncSubscription(SubscriptionFace):
    async def fetch(self, n: int = PREFETCH, wait: float | None = 0.0) -> list[AsyncReceivedMessage]:
        found = await run_async(self._consumer.take(n, wait))
        return [AsyncReceivedMessage(claimed, self) for claimed in found]

    def __aiter__(self) -> AsyncIterator[AsyncReceivedMessage]:
        return self.messages(wait=None)

    async def messages(self, wait: float | None = 0.0) -> AsyncIterator[AsyncReceivedMessage]:
        consumer = self._consumer
        with consumer.taking():
            while True:
                try:
                    claimed = consumer.pop() or await run_async(consumer.take_next(wait))
                except Closed:
                    return
                if claimed is None:
                    return
                yield AsyncReceivedMessage(claimed, self)

    async def ack(self, message: AsyncReceivedMessage, *, wait: bool = True) -> None:
        await message.ack(wait=wait)

    async def ack_many(self, messages: Sequence[AsyncReceivedMessage], *, wait: bool = True) -> None:
        if wait:
            await run_async(self._ack_all(messages))
        else:
            self._consumer.ack_soon(claimed_of(messages))
            mark_settled(messages)

    async def nack(self, message: AsyncReceivedMessage, delay: Span | None = None, *, error: str | None = None) -> None:
        await message.nack(delay, error=error)

    async def reject(self, message: AsyncReceivedMessage, reason: str | None = None) -> None:
        await message.reject(reason)

    async def extend(self, message: AsyncReceivedMessage, by: Span | None = None) -> None:
        await message.extend(by)

    async def info(self) -> SubscriptionInfo:
        return await run_async(self._core.describe(self._consumer))

    async def close(self) -> None:
        await run_async(self._consumer.close())

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()


class AsyncDeadLetterBox:
    def __init__(self, core: LogVerbs) -> None:
        self._inner = core.dead_letters

    async def list(self, after: int = 0, limit: int = 100, **given: Unpack[LetterFilter]) -> list[DeadLetter]:
        return await run_async(self._inner.find(after, limit, **given))

    async def get(self, id: int) -> DeadLetter:
        return await run_async(self._inner.get(id))

    async def statistics(self, **given: Unpack[LetterFilter]) -> LetterStatistics:
        return await run_async(self._inner.statistics(**given))

    async def redrive(self, *letters: int, to_topic: str | None = None, **given: Unpack[LetterFilter]) -> Redriven:
        return await run_async(self._inner.redrive(to_topic, **by_id(letters, given)))

    async def purge(self, *letters: int, **given: Unpack[LetterFilter]) -> int:
        return await run_async(self._inner.purge(**by_id(letters, given)))

    async def export(self, **given: Unpack[LetterFilter]) -> AsyncIterator[str]:
        if "ids" in given:
            given["ids"] = tuple(given["ids"])  # asked for with every page
        after: int | None = 0
        while after is not None:
            page = await run_async(self._inner.export(after, **given))
            for line in page.lines:
                yield line
            after = page.next

    async def import_(self, lines: Iterable[str]) -> int:
        return await run_async(self._inner.import_(lines))


class AsyncRemoteEnd(RemoteFace):
    async def call(self, method: str, params: Any = None, *, timeout: float | None = None) -> Any:
        return await run_async(self._inner.call(method, params, timeout))


class AsyncLog(LogFace):
    _runs_coroutines = True

    def __init__(self, core: LogVerbs, tracing: Tracing | None = None) -> None:
        super().__init__(core, tracing)
        self.dead_letters = AsyncDeadLetterBox(core)
        self._loop = core.live.loop = asyncio.get_running_loop()

    @property
    def remote(self) -> AsyncRemoteEnd:
        return AsyncRemoteEnd(self._core.remote)

    async def publish(self, topic: str, data: Any, *, tx: Any = None, **options: Unpack[PublishOptions]) -> int:
        if tx is not None:
            refuse_other_colour(tx, awaits=True)
            return await run_async(self._core.outside.publish(tx, topic, data, options))
        return await run_async(self._core.publish(topic, data, options))

    async def publish_many(self, messages: Iterable[Outgoing]) -> list[int]:
        return await run_async(self._core.publish_many(messages))

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[AsyncTransaction]:
        async with _transaction(self._core.transaction()) as tx:
            yield tx

    async def subscribe(self, id: str, pattern: str, **options: Unpack[SubscribeOptions]) -> AsyncSubscription:
        return AsyncSubscription(self._core, await run_async(self._core.subscribe(id, pattern, **options)))

    async def unsubscribe(self, id: str) -> None:
        await run_async(self._core.unsubscribe(id))

    async def seek(self, id: str, start: Start) -> int:
        return await run_async(self._core.seek(id, start))

    def on(
        self,
        pattern: str,
        *,
        id: str | None = None,
        concurrency: int = 1,
        auto_ack: bool = True,
        on_gap: Callable[[Gap], None] | None = None,
        dedupe: DedupeQueue | None = None,
        **options: Unpack[SubscribeOptions],
    ) -> Callable[[Handler], Handler]:
        """Declare a handler, a plain function or a coroutine function; see `Log.on`."""
        return self._declare(pattern, id, concurrency, auto_ack, on_gap, dedupe, options)

    async def start(self) -> None:
        await run_async(self._handlers.start())

    async def run(self, shutdown_timeout: float | None = SHUTDOWN_TIMEOUT_S) -> None:
        end_run = partial(self._loop.call_soon_threadsafe, self._handlers.end_run)  # wakes the loop, too
        running = self._handlers.run(shutdown_timeout)  # first: no signal may be overlooked
        with stopped_by_signals(end_run):
            await run_async(running)

    async def stop(self, timeout: float | None = None) -> None:
        await run_async(self._handlers.stop(timeout))

    def _spawn(self, flow: Flow[None], name: str) -> Worker:
        task = self._loop.create_task(run_async(flow), name=name)
        ended: Ticket[None] = Ticket()

        def end(done: asyncio.Task[None]) -> None:
            error = asyncio.CancelledError() if done.cancelled() else done.exception()
            finish([(ended, None, error)])

        task.add_done_callback(end)
        return Worker(ended, task.cancel)

    def _receiving(self, consumer: Consumer) -> Callable[[Claimed], AsyncReceivedMessage]:
        subscription = AsyncSubscription(self._core, consumer)
        return lambda claimed: AsyncReceivedMessage(claimed, subscription)

    async def subscriptions(self) -> list[SubscriptionInfo]:
        return await run_async(self._core.subscription_infos())

    async def subscription(self, id: str) -> SubscriptionInfo:
        return await run_async(self._core.subscription_info(id))

    async def topics(self) -> list[TopicCount]:
        return await run_async(self._core.topics())

    async def topic_max_seq(self, topic: str) -> int:
        return await run_async(self._core.topic_max_seq(topic))

    async def last_seq(self) -> int:
        return await run_async(self._core.last_seq())

    async def statistics(self) -> LogStatistics:
        return await run_async(self._core.statistics())

    async def health(self) -> dict[str, Any]:
        return self._with_handlers(await run_async(self._core.health()))

    async def retain(
        self,
        pattern: str,
        *,
        max_age: Span | None = None,
        max_count: int | None = None,
        max_bytes: int | None = None,
        keep_unacked: bool = False,
        dialect: Dialect = "nats",
    ) -> None:
        await run_async(
            self._core.retain(
                pattern,
                max_age=max_age,
                max_count=max_count,
                max_bytes=max_bytes,
                keep_unacked=keep_unacked,
                dialect=dialect,
            )
        )

    async def unretain(self, pattern: str, dialect: Dialect = "nats") -> bool:
        return await run_async(self._core.unretain(pattern, dialect))

    async def retention(self) -> list[RetentionPolicy]:
        return await run_async(self._core.retention())

    async def housekeep(self) -> Report:
        return await run_async(self._core.housekeep())

    async def close(self) -> None:
        await self.stop()
        await _off_loop(self._core.close)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()
