"""The blocking face of a log: `headwater.open()` gives a `Log`. Safe to use from several threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, Unpack

from headwater.broker.claims import Claimed, Failure
from headwater.broker.consumer import PREFETCH, Consumer
from headwater.broker.dead_letters import Exported, LetterFilter, LetterStatistics, Redriven
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
from headwater.broker.flow import Flow, Ticket, finish, run_blocking
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


class ReceivedMessage(Received, gc=False, eq=False):
    """A delivered message with the verbs that settle it."""

    _subscription: Subscription
    declined: bool = False  # nacked or rejected

    def ack(self, *, wait: bool = True, tx: Any = None) -> None:
        """Done. Returns when that is on disk; with wait=False at once, and a failure is only logged. With `tx`, a
        connection of yours to the log's PostgreSQL, it is done when you commit there."""
        if not self.settled and tx is not None:
            refuse_other_colour(tx, awaits=False)
            subscription = self._subscription
            run_blocking(subscription._core.outside.ack(tx, subscription._consumer, self._claimed))
            self.settled = True
        elif not self.settled:
            self._subscription.ack_many([self], wait=wait)

    def nack(self, delay: Span | None = None, *, error: str | None = None) -> None:
        """Try again: after `delay` seconds, or after the backoff of the subscription."""
        if not self.settled:
            delay_ms, failure = nack_arguments(delay, error)
            run_blocking(self._subscription._consumer.nack(self._claimed, delay_ms, failure))
            self.settled = self.declined = True

    def reject(self, reason: str | None = None) -> None:
        """Never again: to the dead letters."""
        if not self.settled:
            run_blocking(self._subscription._consumer.reject(self._claimed, Failure("rejected", reason)))
            self.settled = self.declined = True

    def extend(self, by: Span | None = None) -> None:
        """More time to settle it, counted from now; the ack wait if not said otherwise."""
        by_ms = None if by is None else span_ms(by, "by")
        run_blocking(self._subscription._consumer.extend([self._claimed], by_ms))

    @contextmanager
    def transaction(self) -> Iterator[Transaction]:
        """Your own writes in the log's database and this ack: both commit at the end of the block, or neither."""
        subscription = self._subscription
        with _transaction(subscription._core.transaction(subscription._consumer, self._claimed)) as tx:
            yield tx
        self.settled = True


@contextmanager
def _transaction(inner: OwnTransaction) -> Iterator[Transaction]:
    inner.begin()
    inside, me = inner.engine.in_transaction, threading.get_ident()
    inside.add(me)
    try:
        yield Transaction(inner)
    except BaseException as exc:
        inner.rollback(exc)
        raise
    else:
        inner.commit()
    finally:
        inside.discard(me)


class Transaction:
    """Inside `with message.transaction() as tx` or `with log.transaction() as tx`. Nobody else can
    write meanwhile: keep it short."""

    def __init__(self, inner: OwnTransaction) -> None:
        self._inner = inner

    def execute(self, sql: str, bindings: Sequence[Any] | Mapping[str, Any] = ()) -> list[tuple[Any, ...]]:
        return self._inner.execute(sql, bindings)

    def publish(self, topic: str, data: Any, **options: Unpack[PublishOptions]) -> int:
        return self._inner.publish(topic, data, **options)


class Subscription(SubscriptionFace):
    """Fetch from it, or iterate over it. Close it, or leave its `with` block, to give back what is in flight."""

    def fetch(self, n: int = PREFETCH, wait: float | None = 0.0) -> list[ReceivedMessage]:
        """Up to `n` messages. Waits up to `wait` seconds for the first one; None waits for ever."""
        return [ReceivedMessage(claimed, self) for claimed in run_blocking(self._consumer.take(n, wait))]

    def __iter__(self) -> Iterator[ReceivedMessage]:
        return self.messages(wait=None)

    def messages(self, wait: float | None = 0.0) -> Iterator[ReceivedMessage]:
        """Message after message; ends when none comes for `wait` seconds (None: only when closed). Threads may share
        the subscription: each message goes to one of them."""
        consumer = self._consumer
        with consumer.taking():
            while True:
                try:
                    claimed = consumer.pop() or run_blocking(consumer.take_next(wait))
                except Closed:
                    return
                if claimed is None:
                    return
                yield ReceivedMessage(claimed, self)

    def ack(self, message: ReceivedMessage, *, wait: bool = True) -> None:
        message.ack(wait=wait)

    def ack_many(self, messages: Sequence[ReceivedMessage], *, wait: bool = True) -> None:
        """Done with all of these, in one transaction: all acks hold, or the error says which does not and none does."""
        if wait:
            run_blocking(self._ack_all(messages))
        else:
            self._consumer.ack_soon(claimed_of(messages))
            mark_settled(messages)

    def nack(self, message: ReceivedMessage, delay: Span | None = None, *, error: str | None = None) -> None:
        message.nack(delay, error=error)

    def reject(self, message: ReceivedMessage, reason: str | None = None) -> None:
        message.reject(reason)

    def extend(self, message: ReceivedMessage, by: Span | None = None) -> None:
        message.extend(by)

    def info(self) -> SubscriptionInfo:
        return run_blocking(self._core.describe(self._consumer))

    def close(self) -> None:
        run_blocking(self._consumer.close())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class DeadLetterBox:
    """`log.dead_letters`. Filters everywhere: ids, subscription, topic (a pattern), type, reason, error (a regex)."""

    def __init__(self, core: LogVerbs) -> None:
        self._inner = core.dead_letters

    def list(self, after: int = 0, limit: int = 100, **given: Unpack[LetterFilter]) -> list[DeadLetter]:
        return run_blocking(self._inner.find(after, limit, **given))

    def get(self, id: int) -> DeadLetter:
        return run_blocking(self._inner.get(id))

    def statistics(self, **given: Unpack[LetterFilter]) -> LetterStatistics:
        return run_blocking(self._inner.statistics(**given))

    def redrive(self, *letters: int, to_topic: str | None = None, **given: Unpack[LetterFilter]) -> Redriven:
        """Deliver them again to the subscription they died in, or publish them anew on another topic. Without ids or a
        filter: all of them."""
        return run_blocking(self._inner.redrive(to_topic, **by_id(letters, given)))

    def purge(self, *letters: int, **given: Unpack[LetterFilter]) -> int:
        return run_blocking(self._inner.purge(**by_id(letters, given)))

    def export(self, **given: Unpack[LetterFilter]) -> Iterator[str]:
        """JSON, one line a letter; read page by page as the lines are taken."""
        if "ids" in given:
            given["ids"] = tuple(given["ids"])  # asked for with every page
        page = run_blocking(self._inner.export(**given))

        def lines(page: Exported = page) -> Iterator[str]:
            yield from page.lines
            while page.next is not None:
                page = run_blocking(self._inner.export(page.next, **given))
                yield from page.lines

        return lines()

    def import_(self, lines: Iterable[str]) -> int:
        return run_blocking(self._inner.import_(lines))


class RemoteEnd(RemoteFace):
    """`log.remote`: the connection itself, for a log behind one. Calls go both ways."""

    def call(self, method: str, params: Any = None, *, timeout: float | None = None) -> Any:
        """Call a method of the server and return its result."""
        return run_blocking(self._inner.call(method, params, timeout))


class Log(LogFace):
    """A log. Publish to it, subscribe to it; close it, or use it in a `with` block."""

    def __init__(self, core: LogVerbs, tracing: Tracing | None = None) -> None:
        super().__init__(core, tracing)
        self.dead_letters = DeadLetterBox(core)

    @property
    def remote(self) -> RemoteEnd:
        return RemoteEnd(self._core.remote)

    def publish(self, topic: str, data: Any, *, tx: Any = None, **options: Unpack[PublishOptions]) -> int:
        """Store a message and return its seq. When this returns, the message is on disk. With `tx`, a connection of
        yours to the log's PostgreSQL, it is when you commit there; until then other publishers wait."""
        if tx is not None:
            refuse_other_colour(tx, awaits=False)
            return run_blocking(self._core.outside.publish(tx, topic, data, options))
        return run_blocking(self._core.publish(topic, data, options))

    def publish_many(self, messages: Iterable[Outgoing]) -> list[int]:
        """Store many, all or none, in one transaction: (topic, data), (topic, data, options) or mappings."""
        return run_blocking(self._core.publish_many(messages))

    @contextmanager
    def transaction(self) -> Iterator[Transaction]:
        """Your own writes in the log's database and your publishes: all commit at the end of the block, or none."""
        with _transaction(self._core.transaction()) as tx:
            yield tx

    def subscribe(self, id: str, pattern: str, **options: Unpack[SubscribeOptions]) -> Subscription:
        """Begin or resume the durable subscription `id`."""
        return Subscription(self._core, run_blocking(self._core.subscribe(id, pattern, **options)))

    def unsubscribe(self, id: str) -> None:
        """Remove a subscription with all its state."""
        run_blocking(self._core.unsubscribe(id))

    def seek(self, id: str, start: Start) -> int:
        """Move a subscription nobody holds to another place; returns the position."""
        return run_blocking(self._core.seek(id, start))

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
        """Declare a handler. It runs once `start()` or `run()` is called, or at once if it has been; its name is the id
        if none is given. With a `dedupe` queue, a message that it has handled is only acked when it comes again."""
        return self._declare(pattern, id, concurrency, auto_ack, on_gap, dedupe, options)

    def start(self) -> None:
        """Run the declared handlers on threads of their own. One whose subscription another process holds stands by."""
        run_blocking(self._handlers.start())

    def run(self, shutdown_timeout: float | None = SHUTDOWN_TIMEOUT_S) -> None:
        """Run the declared handlers until `stop()`, SIGTERM or SIGINT: then nothing new is taken, handlers have so many
        seconds to finish the messages they are at, and all else is given back. A second signal ends the process at
        once. If a handler cannot go on, this raises the reason."""
        running = self._handlers.run(shutdown_timeout)  # first: no signal may be overlooked
        with stopped_by_signals(self._handlers.end_run):
            run_blocking(running)

    def stop(self, timeout: float | None = None) -> None:
        """Let the handlers finish the message they are at, then give the rest back; after `timeout` seconds that one,
        too. Called by a handler, it only asks for that, since it cannot wait for itself."""
        run_blocking(self._handlers.stop(timeout))

    def _spawn(self, flow: Flow[None], name: str) -> Worker:
        worker = Worker(Ticket())

        def work() -> None:
            error: BaseException | None = None
            try:
                run_blocking(flow)
            except BaseException as exc:
                error = exc
            finish([(worker.ended, None, error)])

        threading.Thread(target=work, name=name, daemon=True).start()
        return worker

    def _receiving(self, consumer: Consumer) -> Callable[[Claimed], ReceivedMessage]:
        subscription = Subscription(self._core, consumer)
        return lambda claimed: ReceivedMessage(claimed, subscription)

    def subscriptions(self) -> list[SubscriptionInfo]:
        return run_blocking(self._core.subscription_infos())

    def subscription(self, id: str) -> SubscriptionInfo:
        return run_blocking(self._core.subscription_info(id))

    def topics(self) -> list[TopicCount]:
        return run_blocking(self._core.topics())

    def topic_max_seq(self, topic: str) -> int:
        return run_blocking(self._core.topic_max_seq(topic))

    def last_seq(self) -> int:
        return run_blocking(self._core.last_seq())

    def statistics(self) -> LogStatistics:
        return run_blocking(self._core.statistics())

    def health(self) -> dict[str, Any]:
        """How the store is, and under `handlers` how each handler is: its state, and the error it failed with."""
        return self._with_handlers(run_blocking(self._core.health()))

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
        """Keep no more than this of the messages under a pattern; housekeeping deletes the oldest beyond it."""
        run_blocking(
            self._core.retain(
                pattern,
                max_age=max_age,
                max_count=max_count,
                max_bytes=max_bytes,
                keep_unacked=keep_unacked,
                dialect=dialect,
            )
        )

    def unretain(self, pattern: str, dialect: Dialect = "nats") -> bool:
        return run_blocking(self._core.unretain(pattern, dialect))

    def retention(self) -> list[RetentionPolicy]:
        return run_blocking(self._core.retention())

    def housekeep(self) -> Report:
        """Do now what the background does every so often."""
        return run_blocking(self._core.housekeep())

    def close(self) -> None:
        self.stop()
        self._core.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
