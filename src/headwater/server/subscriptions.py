"""The durable subscriptions of one connection: subscribe, deliver, settle, release."""

from __future__ import annotations

import asyncio
import contextlib
import math
import re
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from datetime import datetime
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from msgspec import UNSET

from headwater.arguments import check_whole
from headwater.broker.consumer import FETCH_MAX
from headwater.broker.deliveries import Claimed, Failure, Resume, drop_payloads
from headwater.broker.durable_consumer import DurableConsumer
from headwater.broker.flow import Completion, Flow, run_async
from headwater.broker.statistics import count_waiting
from headwater.broker.subscribe import Start, SubscribeOptions
from headwater.broker.tail_consumer import TailConsumer
from headwater.delivery.retry import Reason
from headwater.errors import (
    ClosedError,
    HeadwaterError,
    InvalidOptionError,
    LeaseLostError,
    StoreError,
    SubscriptionActiveError,
    TooLargeError,
    UnknownSubscriptionError,
)
from headwater.formats import iso, span_ms
from headwater.ports.records import Gap, selection_of
from headwater.ports.store import Reader
from headwater.protocol import methods as rpc
from headwater.server.auth import not_allowed
from headwater.server.logging import logger
from headwater.server.shapes import fetched
from headwater.topics import parse_pattern

if TYPE_CHECKING:
    from headwater.server.connection import Connection

PUSH_BATCH = 500
PUSH_BATCH_MIN = 32  # at first, so that many subscriptions of a connection find room at once
TAKE_BYTES_MAX = 1024 * 1024  # of data read and sent at a time, so that other clients have their turn
FIRST_GUESS_BYTES = 256  # of a message; a claim reads no more bytes than there is room for in any case
SIZES_VARY = 4  # room is reserved for so many times the usual size
RETRY_S = 1.0
ROOM_S = 30.0  # a fetch waits so much longer than its timeout for outbound room
UNDELIVERED_LOOKED_AT_MAX = 50_000  # messages, matching or not
COUNT_S = 1.0  # for counting them
FETCHED_BYTES_MAX = 7 * 1024 * 1024  # with the rest of the answer it fits into a frame
LARGE_BYTES = 256 * 1024  # takes milliseconds to encode
HOLDER_CHARS_MAX = 32
HOLDER_NAME = re.compile(r"[A-Za-z0-9-]{8,128}")
OK = {"ok": True}
_NO_OPTIONS = ("subscription_id", "topic", "deliver", "resume", "start")


Send = Callable[["Connection", str, DurableConsumer | TailConsumer, Sequence[Claimed]], Coroutine[Any, Any, int]]
Pack = Callable[[list[Claimed]], Coroutine[Any, Any, Any]]


class Taken(NamedTuple):
    """What became of messages that were taken, and the outbound bytes reserved for them, which are released when they
    are sent. `outcome` is None if there were none."""

    outcome: Any
    room_bytes: int


NOTHING_TAKEN = Taken(None, 0)


class Held:
    """A subscription that this connection holds; `pump` pushes its messages if the client does not fetch them."""

    def __init__(self, subscriber: DurableConsumer | TailConsumer) -> None:
        self.subscriber = subscriber
        self.pump: asyncio.Task[None] | None = None
        self.is_forbidden = False  # for the current token: a fetch under way must not return messages
        self.credit_upto: float = 0  # so many messages in all may be sent without a fetch
        self.sent = 0  # of these
        self.has_credit = asyncio.Event()
        self.push_batch = PUSH_BATCH_MIN
        self._usual_bytes = FIRST_GUESS_BYTES
        self._least_bytes = TAKE_BYTES_MAX  # to reserve: a guess may be wrong, and many may begin at once
        self._turn = asyncio.Lock()  # one fetch waits at a time
        self._order = asyncio.Lock()  # a fetch and the pump send in the order in which they take
        self._waits: set[asyncio.Task[None]] = set()
        self._ends = 0  # how often waiting fetches were ended

    async def fetch(self, connection: Connection, count: int, wait_s: float, pack: Pack) -> Taken:
        """About as many messages as may be sent at a time, judged by the size of the last ones; those that do not fit
        stay in the buffer. What `pack` returns must be sent without waiting again, or the pump overtakes it."""
        if not wait_s:
            return await self._take_now(connection, count, asyncio.get_running_loop().time(), pack)
        ends = self._ends
        async with self._turn:
            until_s = asyncio.get_running_loop().time() + wait_s
            with self.subscriber.taking():  # so that what a publish claims for it stays here
                while self._ends == ends:
                    news = self.subscriber.news()
                    taken = await self._take_now(connection, count, until_s, pack)
                    left_s = until_s - asyncio.get_running_loop().time()
                    if taken.outcome is not None or self.subscriber.interrupted or left_s <= 0:
                        return taken
                    await self._wait(news, left_s, count)
        return NOTHING_TAKEN

    async def _wait(self, news: Completion[None], left_s: float, count: int) -> None:
        """Wait until a fetch may find something, for `left_s` seconds at most, or until `end_waits`."""
        task = asyncio.ensure_future(run_async(self.subscriber.wait_for(news, left_s, count)))
        self._waits.add(task)
        try:
            await asyncio.wait([task])
        finally:
            self._waits.discard(task)
            task.cancel()
        if not task.cancelled():
            task.result()

    async def send_on_credit(self, connection: Connection, send: Pack) -> None:
        """Wait for messages for as long as there is credit, and send them."""
        while self.credit > 0:
            news, count = self.subscriber.news(), int(min(self.push_batch, self.credit))
            if not self.subscriber.has_nothing():
                sent, room_bytes = await self._take_now(connection, count, None, send)
                if sent is not None:
                    connection.release_room(room_bytes)
                    self.push_batch = min(PUSH_BATCH, max(PUSH_BATCH_MIN, 2 * sent))
                    self.spend_credit(sent)
                    return
            await run_async(self.subscriber.wait_for(news, None, count))

    async def _take_now(self, connection: Connection, count: int, until_s: float | None, pack: Pack) -> Taken:
        """Take messages without waiting for new ones. The log is not read before outbound room is reserved. `until_s`
        None: on credit, where what is in the buffer is sent before more is looked for."""
        bytes = max(self._least_bytes, min(TAKE_BYTES_MAX, SIZES_VARY * count * self._usual_bytes))
        try:
            async with asyncio.timeout_at(None if until_s is None else until_s + ROOM_S):
                room_bytes = await connection.room(bytes, self._least_bytes)
        except TimeoutError:
            return NOTHING_TAKEN
        try:
            async with self._order:
                most = min(count, max(1, room_bytes // self._usual_bytes))
                self.subscriber.claim_bytes_max = room_bytes
                buffered = self.subscriber.pop_many(most) if until_s is None else []
                found = self._fitting(buffered or await run_async(self.subscriber.take(most, 0)))
                if found:
                    return Taken(await pack(found), room_bytes)
        except BaseException:
            connection.release_room(room_bytes)
            raise
        connection.release_room(room_bytes)
        return NOTHING_TAKEN

    def _fitting(self, found: list[Claimed]) -> list[Claimed]:
        if not found:
            return found
        sizes = [each.message.size + len(memoryview(each.message.raw_headers)) for each in found]
        total = sum(sizes)
        if total > TAKE_BYTES_MAX:
            fit = max(1, sum(size <= TAKE_BYTES_MAX for size in accumulate(sizes)))
            self.subscriber.put_back(found[fit:])
            found, total = found[:fit], sum(sizes[:fit])
        self._usual_bytes = max(1, total // len(found))
        self._least_bytes = min(TAKE_BYTES_MAX, self._usual_bytes)
        return found

    def end_waits(self) -> None:
        """Make waiting fetches return nothing. Messages that one of them just claimed go to the next fetch."""
        self._ends += 1
        for task in self._waits:
            task.cancel()

    @property
    def credit(self) -> float:
        return self.credit_upto - self.sent

    def give_credit(self, upto: float) -> None:
        self.credit_upto = upto
        self._on_credit()
        self.subscriber.wake()

    def spend_credit(self, count: int) -> None:
        self.sent += count
        self._on_credit()

    def _on_credit(self) -> None:
        if self.credit > 0:
            self.has_credit.set()
        else:
            self.has_credit.clear()


def stored_id(subscription_id: str) -> str:
    """The id that the log stores: the part before the #.

    One connection may hold a subscription more than once: as `billing`, `billing#2` and so on. The part after the #
    distinguishes the holders in calls and notifications."""
    id, mark, holder = subscription_id.partition("#")
    if mark and not 1 <= len(holder) <= HOLDER_CHARS_MAX:
        raise InvalidOptionError(
            f"a holder's name has 1 to {HOLDER_CHARS_MAX} characters", where=id, next="Write it after #"
        )
    return id


class Subscriptions:
    """By subscription_id as the client sends it: see `stored_id`."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._held: dict[str, Held] = {}
        self._beginning: set[str] = set()
        self._ending: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._held) + len(self._beginning)

    def topics(self) -> set[str]:
        """The topics and patterns as the client subscribed to them."""
        return {held.subscriber.spec.pattern for held in self._held.values()}

    def find(self, id: str) -> DurableConsumer | TailConsumer:
        return self._find(id).subscriber

    def _find(self, id: str) -> Held:
        held = self._held.get(id)
        if held is None:
            raise self._not_held(id)
        return held

    def _not_held(self, id: str) -> UnknownSubscriptionError:
        return UnknownSubscriptionError(
            f"subscription {id!r} is not held here",
            where=id,
            next="Call rpc.subscribe.persistent first",
        )

    def _may_hold(self, subscriber: DurableConsumer | TailConsumer) -> bool:
        spec, connection = subscriber.spec, self._connection
        pattern = parse_pattern(spec.pattern, spec.dialect)
        if not connection.scopes.may_read(pattern):
            return False
        return isinstance(subscriber, TailConsumer) or connection.may_use(subscriber.id, pattern, spec.owner)

    def _check_limit_of_token(self, id: str) -> None:
        """Ephemeral subscriptions count as well."""
        context, owner = self._connection.context, self._connection.owner
        most = context.limits.subscriptions_per_token
        if owner and sum(len(each.subscriptions) for each in context.connections_of(owner)) >= most:
            raise TooLargeError(
                f"the connections of one token hold {most} subscriptions",
                where=id,
                next="End those that are not used, or raise limits.subscriptions_per_token",
            )

    # --- beginning ----------------------------------------------------------------------------------------------

    async def begin(self, params: rpc.Subscribe, created: set[str] | None = None) -> rpc.Subscribed:
        """`created` gets the name of a subscription that is new, even if this fails afterwards."""
        connection, id = self._connection, params.subscription_id
        stored = stored_id(id)
        most = connection.context.limits.subscriptions_per_connection
        if len(self) >= most:
            raise TooLargeError(f"more than {most} subscriptions on one connection", where=id, next="Open another one")
        self._check_limit_of_token(id)
        if id in self._held or id in self._beginning:
            raise SubscriptionActiveError(
                f"Subscription '{id}' is already active on another connection",  # JROW's text
                where=connection.address,
                next=f"This connection holds it; to hold it once more, call it {id}#2",
            )
        if params.deliver not in ("push", "fetch"):
            raise InvalidOptionError(f"deliver is push or fetch, not {params.deliver!r}", where=id)
        options, grant = self._options(params), connection.grant
        pattern = parse_pattern(params.topic, options.get("dialect", "nats"))
        connection.require_read(pattern)
        if options.get("mode") != "ephemeral" and not connection.may_use(stored, pattern, None):
            raise not_allowed("consume", stored)
        asked = params.resume
        resume = None if asked is None else Resume(check_holder(asked.holder), asked.held)
        self._beginning.add(id)
        try:
            core, audit = connection.core, connection.context.audit
            taking_over = audit.change("subscription.taken_over", connection.identity, subscription_id=stored)
            with taking_over if options.get("takeover") else contextlib.nullcontext():
                subscriber = await run_async(core.subscribe(stored, params.topic, resume, connection.tenant, **options))
        finally:
            self._beginning.discard(id)
        if created is not None and subscriber.is_new:
            created.add(stored)
        if connection.is_gone:  # disconnected meanwhile
            self._in_background(self._release_quietly(Held(subscriber), vanished=True))
            raise ClosedError("the connection is gone", where=id)
        if connection.grant is not grant and not self._may_hold(subscriber):  # it has another token by now
            self._in_background(self._release_quietly(Held(subscriber), vanished=False))
            raise not_allowed("read or consume", id)
        held = self._held[id] = Held(subscriber)
        subscriber.on_gap = partial(self._notify_gap, id)
        if params.deliver == "fetch" and isinstance(subscriber, DurableConsumer):
            subscriber.on_paused = partial(self._notify_paused, id)
        try:
            undelivered = await self._count_undelivered(subscriber)
        except BaseException:  # such as the timeout: the client does not know that it holds it, and tries again
            if self._held.get(id) is held:
                del self._held[id]
                self._in_background(self._release_quietly(held, vanished=False))
            raise
        if params.deliver == "push" and self._held.get(id) is held:  # else the client has unsubscribed meanwhile
            held.give_credit(math.inf)
            held.pump = asyncio.create_task(self._pump(id, held, _push))
        return _subscribed(params, subscriber, undelivered)

    async def _count_undelivered(self, subscriber: DurableConsumer | TailConsumer) -> int:
        """0 if it cannot be counted quickly: no subscription fails for this number."""
        limit_s = min(COUNT_S, self._connection.context.limits.request_timeout / 4)
        try:
            async with asyncio.timeout(limit_s):
                return await run_async(_undelivered(subscriber))
        except (TimeoutError, StoreError):
            return 0

    async def begin_all(self, params: rpc.SubscribeBatch) -> list[rpc.Subscribed]:
        """Begin all or none: if one is refused, the others are released."""
        begun: list[rpc.Subscribed] = []
        created: set[str] = set()
        try:
            for each in params.subscriptions:
                begun.append(await self.begin(each, created))
        except BaseException:
            await asyncio.shield(self._in_background(self._undo([done.subscription_id for done in begun], created)))
            raise
        return begun

    async def _undo(self, begun: list[str], created: set[str]) -> None:
        """A subscription that cannot be released belongs to another client by now, or is deleted."""
        core, allow = self._connection.core, self._connection.require_use
        for id in begun:
            with contextlib.suppress(HeadwaterError):
                await self.release(id)
        for id in created:
            with contextlib.suppress(HeadwaterError):
                await run_async(core.delete_subscription(id, allow))

    def _options(self, params: rpc.Subscribe) -> SubscribeOptions:
        given = {
            name: value
            for name in params.__struct_fields__
            if name not in _NO_OPTIONS and (value := getattr(params, name)) is not UNSET
        }
        if params.start is not UNSET:
            given["start"] = start_of(params.start)
        timeout = self._connection.context.subscription_timeout
        if timeout is not None and given.get("mode") != "ephemeral":
            given.setdefault("inactive_timeout", timeout)
        if "wait" in given:
            given["timeout"] = min(given.pop("wait"), self._connection.context.limits.request_timeout)
        return cast(SubscribeOptions, given)

    # --- delivering ---------------------------------------------------------------------------------------------

    async def _pump(self, id: str, held: Held, send: Send) -> None:
        """Deliver until the subscription ends: as many as may be in flight, as the client gives credit for, and no
        faster than it reads."""
        connection, subscriber = self._connection, held.subscriber
        while True:
            try:
                await held.has_credit.wait()
                with subscriber.taking():
                    while held.credit > 0:
                        await connection.writable()
                        await held.send_on_credit(connection, partial(send, connection, id, subscriber))
            except StoreError as exc:
                logger.warning("delivery of subscription %s is retried: %s", subscriber.id, exc)
                await asyncio.sleep(RETRY_S)
            except Exception as exc:
                why = exc.why if isinstance(exc, HeadwaterError) else "internal error"
                if not isinstance(exc, (LeaseLostError, UnknownSubscriptionError, ClosedError)):
                    logger.exception("delivery of subscription %s ended", subscriber.id)
                if not connection.is_gone and self._held.get(id) is held:
                    connection.notify("rpc.lost", rpc.LostNotice(id, why))
                    del self._held[id]
                    self._in_background(self._release_quietly(held, vanished=False))
                return

    def give_credit(self, params: rpc.Credit) -> dict[str, bool]:
        """The client takes messages without fetching them, until so many have been sent in all."""
        held = self._find(params.subscription_id)
        if held.credit_upto == math.inf:
            raise InvalidOptionError(
                "the messages of this subscription are pushed",
                where=params.subscription_id,
                next='Use "deliver": "fetch"',
            )
        held.give_credit(check_whole("the credit", params.upto, 0, held.sent + FETCH_MAX))
        if held.pump is None:
            held.pump = asyncio.create_task(self._pump(params.subscription_id, held, _deliver))
        return OK

    async def fetch(self, params: rpc.Fetch) -> Any:
        """Up to `count` messages; if there are none, wait for the first up to `wait` seconds."""
        connection = self._connection
        held = self._find(params.subscription_id)
        wait_s = min(max(0.0, params.wait), connection.context.limits.fetch_wait)
        pack = partial(_pack, connection, held.subscriber)
        try:
            packed, room_bytes = await held.fetch(connection, params.count, wait_s, pack)
        except ClosedError:
            if held.is_forbidden:  # and released by now
                raise self._not_held(params.subscription_id) from None
            raise
        connection.keep_room(room_bytes)
        if connection.is_gone:
            return None
        sent, answer = packed or ([], fetched([]))
        if held.is_forbidden:
            raise self._not_held(params.subscription_id)
        drop_payloads(sent)
        connection.context.metrics.observe_delivered(sent, connection.core.engine.clock.now_ms())
        return answer

    def end_fetches(self, params: rpc.SubscriptionId) -> dict[str, bool]:
        """Waiting fetches are answered now, as if their timeout had passed."""
        self._find(params.subscription_id).end_waits()
        return OK

    def _notify_gap(self, id: str, gap: Gap) -> None:
        notice = rpc.GapNotice(id, gap.from_seq, gap.to_seq, gap.count, gap.why, iso(gap.at_ms))
        self._connection.notify("rpc.gap", notice)

    def _notify_paused(self, id: str) -> None:
        """Tell the client of a pause, on whichever thread learns of it."""
        notify = self._connection.notify
        self._connection.loop.call_soon_threadsafe(notify, "rpc.paused", rpc.SubscriptionId(id))

    # --- settling -----------------------------------------------------------------------------------------------

    def acknowledge(self, id: str, seqs: Sequence[int]) -> Flow[Mapping[int, HeadwaterError]]:
        """Ack messages in flight. An ack may be repeated; returns the reason for each seq that was not acked."""
        late = yield from self.acknowledge_leniently(id, seqs, lazy=False)
        subscriber = self.find(id)
        if not late or isinstance(subscriber, TailConsumer):
            return {}
        return (yield from subscriber.why_not_acked(late))

    def acknowledge_strictly(self, id: str, seqs: Sequence[int]) -> Flow[None]:
        """Ack all or none."""
        subscriber = self.find(id)
        claimed = yield from subscriber.find_in_flight(seqs)
        yield subscriber.ack(claimed)
        self._connection.context.metrics.count_settled("ack", len(seqs))

    def acknowledge_leniently(self, id: str, seqs: Sequence[int], *, lazy: bool = True) -> Flow[list[int]]:
        """Ack messages still in flight, and return the other seqs, including those that were acked before. `lazy`: the
        client goes on meanwhile."""
        subscriber = self.find(id)
        claimed = subscriber.still_in_flight(seqs)
        late: list[int] = []
        if claimed:
            late = yield subscriber.submit_ack(claimed, lazy=lazy)
        self._connection.context.metrics.count_settled("ack", len(claimed) - len(late))
        if isinstance(subscriber, TailConsumer):
            return []
        if len(claimed) < len(seqs):
            late = [*late, *set(seqs).difference([each.message.seq for each in claimed])]
        return sorted(late)

    def nack(self, params: rpc.Settle) -> Flow[dict[str, bool]]:
        """The messages failed: deliver them again after `delay`, or dead-letter those without attempts left."""
        subscriber, claimed = yield from self._claimed(params)
        delay_ms = None if params.delay is None else span_ms(params.delay, "delay")
        failure = Failure("processing_error", params.reason, params.stack, params.handler)
        for each in claimed:
            yield from subscriber.nack(each, delay_ms, failure)
        self._connection.context.metrics.count_settled("nack", len(claimed))
        return OK

    def reject(self, params: rpc.Settle) -> Flow[dict[str, bool]]:
        """Dead-letter the messages now, whatever attempts are left."""
        subscriber, claimed = yield from self._claimed(params)
        reason: Reason = "processing_error" if params.failed else "rejected"
        for each in claimed:
            yield from subscriber.reject(each, Failure(reason, params.reason, params.stack, params.handler))
        self._connection.context.metrics.count_settled("reject", len(claimed))
        return OK

    def extend(self, params: rpc.Settle) -> Flow[dict[str, bool]]:
        """Postpone the redelivery of messages that are still being processed. `lenient` skips those not in flight."""
        if params.lenient:
            yield from self.find(params.subscription_id).extend_in_flight(params.sequence_ids or [])
            return OK
        subscriber, claimed = yield from self._claimed(params)
        by_ms = None if params.by is None else span_ms(params.by, "by")
        yield from subscriber.extend(claimed, by_ms)
        return OK

    def _claimed(self, params: rpc.Settle) -> Flow[tuple[DurableConsumer | TailConsumer, list[Claimed]]]:
        subscriber, seqs = self.find(params.subscription_id), seqs_of(params)
        claimed = yield from subscriber.find_in_flight(seqs, params.attempt)
        return subscriber, claimed

    # --- ending -------------------------------------------------------------------------------------------------

    def release_messages(self, params: rpc.Release) -> Flow[dict[str, bool]]:
        """Messages that the client has not processed go to other consumers."""
        subscriber = self.find(params.subscription_id)
        yield subscriber.release(subscriber.still_in_flight(params.sequence_ids))
        return OK

    async def release(self, id: str, seen: Sequence[tuple[int, int]] | None = None) -> None:
        """`seen`: all other messages in flight were not processed, and count as no attempt."""
        self.find(id)
        await asyncio.shield(self._in_background(self._release(self._held.pop(id), seen)))

    def _in_background(self, ending: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """A release must complete, even if the call that started it is cancelled."""
        task = asyncio.create_task(ending)
        self._ending.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._ending.discard(task)
        if not task.cancelled():
            task.exception()  # marks it as retrieved; the call that waited for it has raised it

    async def stop_delivering(self) -> None:
        """Stops deliveries and answers waiting fetches with nothing. Messages in flight can still be settled."""
        for held in list(self._held.values()):
            held.subscriber.interrupt()
            await _cancel(held.pump)

    def drop_forbidden(self, why: str) -> None:
        """Release the subscriptions that the connection may not hold with its new token."""
        for id, held in list(self._held.items()):
            if not self._may_hold(held.subscriber):
                self._drop(id, held)
                self._connection.notify("rpc.lost", rpc.LostNotice(id, why))

    def drop_all(self) -> None:
        for id, held in list(self._held.items()):
            self._drop(id, held)

    def _drop(self, id: str, held: Held) -> None:
        del self._held[id]
        held.is_forbidden = True
        held.end_waits()
        self._in_background(self._release_quietly(held, vanished=False))

    async def close(self, *, vanished: bool) -> None:
        held = list(self._held.values())
        self._held.clear()
        await asyncio.gather(*(self._release_quietly(each, vanished=vanished) for each in held))

    async def _release_quietly(self, held: Held, *, vanished: bool) -> None:
        try:
            await self._release(held, vanished=vanished)
        except HeadwaterError as exc:  # it becomes free when its lease expires
            logger.warning("subscription %s could not be released: %s", held.subscriber.id, exc)

    async def _release(
        self, held: Held, seen: Sequence[tuple[int, int]] | None = None, *, vanished: bool = False
    ) -> None:
        await _cancel(held.pump)
        await run_async(held.subscriber.close(seen, vanished=vanished))


@contextlib.asynccontextmanager
async def _one_large_at_a_time(connection: Connection, found: Sequence[Claimed]) -> AsyncIterator[None]:
    """Large batches are encoded one at a time, and other connections have their turn between two of them."""
    if sum([claimed.message.size for claimed in found]) < LARGE_BYTES:
        yield
        return
    async with connection.context.writing_large:
        await asyncio.sleep(0)
        yield


async def _push(
    connection: Connection, id: str, subscriber: DurableConsumer | TailConsumer, found: Sequence[Claimed]
) -> int:
    """Send notifications; returns how many. A message too large for any frame (inserted by hand, because no client can
    publish it) is dead-lettered: it would block all others."""
    try:
        async with _one_large_at_a_time(connection, found):
            notices = connection.shapes.durable(id, subscriber.spec.pattern, found)
            connection.session.notify_many(notices, batch=connection.takes_batches)
    except asyncio.CancelledError:
        subscriber.put_back(found)
        raise
    except TooLargeError as exc:
        if len(found) == 1:
            await run_async(subscriber.reject(found[0], Failure("processing_error", exc.why)))
            return 0
        return sum([await _push(connection, id, subscriber, [each]) for each in found])
    drop_payloads(found)
    connection.flush()
    connection.context.metrics.observe_delivered(found, connection.core.engine.clock.now_ms())
    return len(found)


async def _deliver(
    connection: Connection, id: str, subscriber: DurableConsumer | TailConsumer, found: Sequence[Claimed]
) -> int:
    """Deliver in the form of `rpc.fetch`, for clients that give credit."""
    try:
        sent, packed = await _pack(connection, subscriber, found)
    except asyncio.CancelledError:
        subscriber.put_back(found)
        raise
    if not sent:
        return 0
    drop_payloads(sent)
    connection.notify("rpc.deliver", rpc.Delivered(id, packed.messages, packed.unreadable))
    connection.flush()
    connection.context.metrics.observe_delivered(sent, connection.core.engine.clock.now_ms())
    return len(sent)


async def _pack(
    connection: Connection, subscriber: DurableConsumer | TailConsumer, found: Sequence[Claimed]
) -> tuple[Sequence[Claimed], rpc.Fetched]:
    """The messages that fit into an answer, and the answer. The others come with the next fetch; one that fits into no
    answer is dead-lettered, as above."""
    async with _one_large_at_a_time(connection, found):
        packed = fetched(found)
    while found and len(memoryview(packed.messages)) > FETCHED_BYTES_MAX:
        first, others = found[:1], found[1:]
        if others:
            subscriber.put_back(others)
        else:
            why = f"it takes {len(memoryview(packed.messages))} bytes, the limit of an answer is {FETCHED_BYTES_MAX}"
            await run_async(subscriber.reject(first[0], Failure("processing_error", why)))
        found = first if others else []
        packed = fetched(found)
    return found, packed


async def _cancel(task: asyncio.Task[None] | None) -> None:
    if task is not None and task is not asyncio.current_task():
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def _undelivered(subscriber: DurableConsumer | TailConsumer) -> Flow[int]:
    """The number of waiting messages, among so many that counting costs no more than a fetch."""
    if isinstance(subscriber, TailConsumer):
        return 0
    selection = selection_of(subscriber.spec)
    after = subscriber.delivered_to

    def look(reader: Reader) -> int:
        rows = reader.delivery_counts(subscriber.id)
        # The rows in flight of a new exclusive holder are those of the last one; shared holders have their own.
        left = rows.in_flight - len(subscriber.resumed.held) if subscriber.spec.mode == "exclusive" else 0
        if selection.takes_time:  # one scan
            return len(reader.scan(selection, after, UNDELIVERED_LOOKED_AT_MAX).messages) + rows.waiting + left
        return count_waiting(reader, selection, after, UNDELIVERED_LOOKED_AT_MAX).messages + rows.waiting + left

    engine = subscriber.engine
    return (yield from engine.read(look, engine.filters if selection.takes_time else engine.readers))


def _subscribed(params: rpc.Subscribe, subscriber: DurableConsumer | TailConsumer, undelivered: int) -> rpc.Subscribed:
    done = rpc.Subscribed(
        params.subscription_id, params.topic, subscriber.resumed_from, subscriber.resumed_from, undelivered
    )
    if isinstance(subscriber, DurableConsumer):
        done.held = [claimed.message.seq for claimed in subscriber.resumed.held]
        done.settled = subscriber.resumed.settled
        drop_payloads(subscriber.resumed.held)
    return done


def seqs_of(params: rpc.Acknowledge | rpc.Settle) -> list[int]:
    if (params.sequence_id is None) == (params.sequence_ids is None):
        raise InvalidOptionError("give either sequence_id or sequence_ids", where=params.subscription_id)
    return [params.sequence_id] if params.sequence_id is not None else params.sequence_ids or []


def check_holder(name: str) -> str:
    if not HOLDER_NAME.fullmatch(name):
        raise InvalidOptionError("a holder's name has 8 to 128 letters, digits and dashes", where="resume.holder")
    return name


def start_of(given: str | int) -> Start:
    """`first`, `new`, the seq of the first message, or a time in ISO 8601."""
    if isinstance(given, int) or given in ("first", "new"):
        return cast(Start, given)
    try:
        return datetime.fromisoformat(given)
    except ValueError as exc:
        raise InvalidOptionError(
            f"start is first, new, a seq or a time, not {given!r}", next="Write a time like 2030-01-31T12:00:00Z"
        ) from exc
