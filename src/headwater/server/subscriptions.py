"""The durable subscriptions that one connection holds: taken up, delivered, settled, given back."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Coroutine, Mapping, Sequence
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from msgspec import UNSET

from headwater.broker.claims import Claimed, Failure
from headwater.broker.flow import Flow, run_async
from headwater.broker.options import Start, SubscribeOptions
from headwater.broker.resuming import Resume
from headwater.broker.statistics import count_waiting
from headwater.broker.subscriber import Subscriber
from headwater.broker.tail import Tail
from headwater.delivery.retry import Reason
from headwater.errors import (
    Closed,
    HeadwaterError,
    InvalidOption,
    LeaseLost,
    StoreError,
    SubscriptionActive,
    TooLarge,
    UnknownSubscription,
)
from headwater.message import iso, span_ms
from headwater.ports.records import Gap, selection_of
from headwater.ports.store import Reader
from headwater.protocol import wire
from headwater.server.deliveries import pack, push
from headwater.server.logger import logger
from headwater.server.scopes import not_allowed
from headwater.topics import parse_pattern

if TYPE_CHECKING:
    from headwater.server.connection import Connection

PUSH_BATCH = 500
PUSH_BATCH_MIN = 32  # to begin with, so that many subscriptions of a connection find room at once
TAKE_BYTES_MAX = 1024 * 1024  # of data read and sent at a time; others wait meanwhile, and a slow reader is noticed
FIRST_GUESS_BYTES = 256  # of a message; a claim reads no more bytes than there is room for, however large they are
SIZES_VARY = 4  # room is asked for so many times the usual size
RETRY_S = 1.0
ROOM_S = 30.0  # longer than asked, a fetch waits for room to answer in
UNDELIVERED_LOOKED_AT_MAX = 50_000  # messages, matching or not
COUNT_S = 1.0  # for counting them
HOLDER_CHARS_MAX = 32
HOLDER_NAME = re.compile(r"[A-Za-z0-9-]{8,128}")
_NO_OPTIONS = ("subscription_id", "topic", "deliver", "resume", "start")


class Taken(NamedTuple):
    """Messages to be sent, and the room that was reserved for them, to be given back once they are on their way."""

    found: list[Claimed]
    room_bytes: int


class Held:
    """A subscription in the hands of this connection; `pump` pushes what it delivers, if it was asked to."""

    def __init__(self, subscriber: Subscriber | Tail) -> None:
        self.subscriber = subscriber
        self.pump: asyncio.Task[None] | None = None
        self.is_forbidden = False  # by now: what a fetch under way has found is not for its client
        self.push_batch = PUSH_BATCH_MIN
        self._usual_bytes = FIRST_GUESS_BYTES
        self._least_bytes = TAKE_BYTES_MAX  # to be reserved: a guess may be wrong, and many may begin at once
        self._turn = asyncio.Lock()  # of the one that waits
        self._waits: set[asyncio.Task[Taken]] = set()

    async def take(self, connection: Connection, count: int, wait_s: float | None) -> Taken:
        """Not more than may be sent at a time: about as many as fit, by the size of the last ones; what is too much
        after all stays in the buffer. Nothing is read from the log before there is room for it on the way out."""
        taking = self._take(connection, count, wait_s)
        if not wait_s:
            return await taking
        task = asyncio.ensure_future(self._take_in_turn(taking))
        self._waits.add(task)
        try:
            await asyncio.wait([task])
        finally:
            self._waits.discard(task)
            task.cancel()
        taking.close()
        return Taken([], 0) if task.cancelled() else task.result()

    async def _take_in_turn(self, taking: Coroutine[Any, Any, Taken]) -> Taken:
        async with self._turn:
            return await taking

    async def _take(self, connection: Connection, count: int, wait_s: float | None) -> Taken:
        loop = asyncio.get_running_loop()
        until_s = None if wait_s is None else loop.time() + wait_s
        while True:
            news = self.subscriber.news()
            bytes = max(self._least_bytes, min(TAKE_BYTES_MAX, SIZES_VARY * count * self._usual_bytes))
            try:
                async with asyncio.timeout_at(None if until_s is None else until_s + ROOM_S):
                    room_bytes = await connection.room(bytes, self._least_bytes)
            except TimeoutError:
                return Taken([], 0)
            try:
                most = min(count, max(1, room_bytes // self._usual_bytes))
                self.subscriber.claim_bytes_max = room_bytes
                found = self._fitting(await run_async(self.subscriber.take(most, 0)))
            except BaseException:
                connection.give_room_back(room_bytes)
                raise
            if found:
                return Taken(found, room_bytes)
            connection.give_room_back(room_bytes)
            left_s = None if until_s is None else until_s - loop.time()
            if self.subscriber.interrupted or (left_s is not None and left_s <= 0):
                return Taken([], 0)
            await run_async(self.subscriber.wait_for(news, left_s))

    def _fitting(self, found: list[Claimed]) -> list[Claimed]:
        total, fit = 0, 0
        for claimed in found:
            total += claimed.message.size + len(memoryview(claimed.message.raw_headers))
            if fit and total > TAKE_BYTES_MAX:
                self.subscriber.put_back(found[fit:])
                break
            fit += 1
        if fit:
            self._usual_bytes = max(1, total // fit)
            self._least_bytes = min(TAKE_BYTES_MAX, self._usual_bytes)
        return found[:fit]

    def end_waits(self) -> None:
        """Let fetches that wait return with nothing. What one of them was just claiming is there for the next."""
        for task in self._waits:
            task.cancel()


def stored_id(subscription_id: str) -> str:
    """One connection may hold a subscription more than once: as `billing`, `billing#2` and so on. What follows the #
    tells the holders apart, in calls and notifications alike, and is not part of what is stored."""
    id, mark, holder = subscription_id.partition("#")
    if mark and not 1 <= len(holder) <= HOLDER_CHARS_MAX:
        raise InvalidOption(
            f"a holder's name has 1 to {HOLDER_CHARS_MAX} characters", where=id, next="Write it after #"
        )
    return id


class Subscriptions:
    """By subscription_id as the client says it: see `stored_id`."""

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

    def find(self, id: str) -> Subscriber | Tail:
        return self._find(id).subscriber

    def _find(self, id: str) -> Held:
        held = self._held.get(id)
        if held is None:
            raise self._not_held(id)
        return held

    def _not_held(self, id: str) -> UnknownSubscription:
        return UnknownSubscription(
            f"subscription {id!r} is not held here",
            where=id,
            next="Call rpc.subscribe.persistent first",
        )

    def _may_hold(self, subscriber: Subscriber | Tail) -> bool:
        spec, connection = subscriber.spec, self._connection
        pattern = parse_pattern(spec.pattern, spec.dialect)
        if not connection.scopes.may_read(pattern):
            return False
        return isinstance(subscriber, Tail) or connection.may_use(subscriber.id, pattern, spec.owner)

    def _check_those_of_the_token(self, id: str) -> None:
        """Those without state cost as much while they are held."""
        parts, owner = self._connection.parts, self._connection.owner
        most = parts.limits.subscriptions_per_token
        if owner and sum(len(each.subscriptions) for each in parts.holders(owner)) >= most:
            raise TooLarge(
                f"the connections of one token hold {most} subscriptions",
                where=id,
                next="End those that are not used, or raise limits.subscriptions_per_token",
            )

    # --- beginning ----------------------------------------------------------------------------------------------

    async def begin(self, params: wire.Subscribe, created: set[str] | None = None) -> wire.Subscribed:
        """`created`: gets the name of what was not stored before, also if this fails after that."""
        connection, id = self._connection, params.subscription_id
        stored = stored_id(id)
        most = connection.parts.limits.subscriptions_per_connection
        if len(self) >= most:
            raise TooLarge(f"more than {most} subscriptions on one connection", where=id, next="Open another one")
        self._check_those_of_the_token(id)
        if id in self._held or id in self._beginning:
            raise SubscriptionActive(
                f"Subscription '{id}' is already active on another connection",
                where=connection.address,
                next=f"It is held by this very connection; to hold it once more, call it {id}#2",
            )
        if params.deliver not in ("push", "fetch"):
            raise InvalidOption(f"deliver is push or fetch, not {params.deliver!r}", where=id)
        options, grant = self._options(params), connection.grant
        pattern = parse_pattern(params.topic, options.get("dialect", "nats"))
        connection.require_read(pattern)
        if options.get("mode") != "ephemeral" and not connection.may_use(stored, pattern, None):
            raise not_allowed("consume", stored)
        asked = params.resume
        resume = None if asked is None else Resume(check_holder(asked.holder), asked.held)
        self._beginning.add(id)
        try:
            core, audit = connection.core, connection.parts.audit
            taking_over = audit.change("subscription.taken_over", connection.who, subscription_id=stored)
            with taking_over if options.get("takeover") else contextlib.nullcontext():
                subscriber = await run_async(core.subscribe(stored, params.topic, resume, connection.tenant, **options))
        finally:
            self._beginning.discard(id)
        if created is not None and subscriber.is_new:
            created.add(stored)
        if connection.is_gone:  # it left while we were at it
            self._in_background(self._give_back(Held(subscriber), vanished=True))
            raise Closed("the connection is gone", where=id)
        if connection.grant is not grant and not self._may_hold(subscriber):  # it came with another token meanwhile
            self._in_background(self._give_back(Held(subscriber), vanished=False))
            raise not_allowed("read or consume", id)
        held = self._held[id] = Held(subscriber)
        subscriber.on_gap = partial(self._tell_gap, id)
        try:
            undelivered = await self._count_undelivered(subscriber)
        except BaseException:  # such as its time limit: the client believes that it holds nothing, and tries again
            if self._held.get(id) is held:
                del self._held[id]
                self._in_background(self._give_back(held, vanished=False))
            raise
        if params.deliver == "push" and self._held.get(id) is held:  # else the client has ended it meanwhile
            held.pump = asyncio.create_task(self._push(id, held))
        return _subscribed(params, subscriber, undelivered)

    async def _count_undelivered(self, subscriber: Subscriber | Tail) -> int:
        """A courtesy, for which no subscription fails: what cannot be counted quickly is not counted."""
        limit_s = min(COUNT_S, self._connection.parts.limits.request_timeout / 4)
        try:
            async with asyncio.timeout(limit_s):
                return await run_async(_undelivered(subscriber))
        except (TimeoutError, StoreError):
            return 0

    async def begin_all(self, params: wire.SubscribeBatch) -> list[wire.Subscribed]:
        """All or none: what was begun is undone when one of them is refused."""
        begun: list[wire.Subscribed] = []
        created: set[str] = set()
        try:
            for each in params.subscriptions:
                begun.append(await self.begin(each, created))
        except BaseException:
            await asyncio.shield(self._in_background(self._undo([done.subscription_id for done in begun], created)))
            raise
        return begun

    async def _undo(self, begun: list[str], created: set[str]) -> None:
        """What cannot be undone is another's by now, or gone, and keeps nothing else from being undone."""
        core, allow = self._connection.core, self._connection.require_use
        for id in begun:
            with contextlib.suppress(HeadwaterError):
                await self.release(id)
        for id in created:
            with contextlib.suppress(HeadwaterError):
                await run_async(core.unsubscribe(id, allow))

    def _options(self, params: wire.Subscribe) -> SubscribeOptions:
        given = {
            name: value
            for name in params.__struct_fields__
            if name not in _NO_OPTIONS and (value := getattr(params, name)) is not UNSET
        }
        if params.start is not UNSET:
            given["start"] = start_of(params.start)
        timeout = self._connection.parts.subscription_timeout
        if timeout is not None and given.get("mode") != "ephemeral":
            given.setdefault("inactive_timeout", timeout)
        if "wait" in given:
            given["wait"] = min(given["wait"], self._connection.parts.limits.request_timeout)
        return cast(SubscribeOptions, given)

    # --- delivering ---------------------------------------------------------------------------------------------

    async def _push(self, id: str, held: Held) -> None:
        """Deliver until the end: as many as may be in flight, and no faster than the client reads."""
        connection, subscriber = self._connection, held.subscriber
        with subscriber.taking():
            while True:
                try:
                    await connection.writable()
                    found, room_bytes = await held.take(connection, held.push_batch, None)
                    held.push_batch = min(PUSH_BATCH, max(PUSH_BATCH_MIN, 2 * len(found)))
                    try:
                        await push(connection, id, subscriber, found)
                    finally:
                        connection.give_room_back(room_bytes)
                except StoreError as exc:
                    logger.warning("subscription %s tries again: %s", subscriber.id, exc)
                    await asyncio.sleep(RETRY_S)
                except (LeaseLost, UnknownSubscription, Closed) as exc:
                    if not connection.is_gone and self._held.get(id) is held:
                        connection.notify("rpc.lost", wire.LostNotice(id, exc.why))
                        del self._held[id]
                        self._in_background(self._give_back(held, vanished=False))
                    return

    async def fetch(self, params: wire.Fetch) -> Any:
        connection = self._connection
        held = self._find(params.subscription_id)
        wait_s = min(max(0.0, params.wait), connection.parts.limits.fetch_wait)
        found, room_bytes = await held.take(connection, params.count, wait_s)
        connection.keep_room(room_bytes)
        if connection.is_gone:
            return None
        sent, answer = await pack(connection, held.subscriber, found)
        if held.is_forbidden:
            raise self._not_held(params.subscription_id)
        held.subscriber.set_payloads_aside(sent)
        connection.parts.metrics.observe_delivered(sent, connection.core.engine.clock.now_ms())
        return answer

    def end_fetches(self, id: str) -> None:
        """Those that wait are answered now, as if their time were over."""
        self._find(id).end_waits()

    def _tell_gap(self, id: str, gap: Gap) -> None:
        notice = wire.GapNotice(id, gap.from_seq, gap.to_seq, gap.count, gap.why, iso(gap.at_ms))
        self._connection.notify("rpc.gap", notice)

    # --- settling -----------------------------------------------------------------------------------------------

    def acknowledge(self, id: str, seqs: Sequence[int]) -> Flow[Mapping[int, HeadwaterError]]:
        """Ack what is in flight. An ack may be repeated; returns why each of the others was not acked."""
        late = yield from self.acknowledge_leniently(id, seqs)
        subscriber = self.find(id)
        if not late or isinstance(subscriber, Tail):
            return {}
        return (yield from subscriber.why_not_acked(late))

    def acknowledge_strictly(self, id: str, seqs: Sequence[int]) -> Flow[None]:
        """All or none of what is in flight."""
        subscriber = self.find(id)
        claimed = yield from subscriber.handed_out(seqs)
        yield subscriber.ack(claimed)
        self._connection.parts.metrics.count_settled("ack", len(seqs))

    def acknowledge_leniently(self, id: str, seqs: Sequence[int]) -> Flow[list[int]]:
        """Ack what is still in flight, and return the seqs of the others, also of those that were acked before."""
        subscriber = self.find(id)
        claimed = subscriber.still_in_flight(seqs)
        known = {each.message.seq for each in claimed}
        late: list[int] = []
        if claimed:
            late = yield subscriber.submit_ack(claimed)
        self._connection.parts.metrics.count_settled("ack", len(claimed) - len(late))
        if isinstance(subscriber, Tail):
            return []
        return sorted({*late, *(seq for seq in seqs if seq not in known)})

    def nack(self, params: wire.Settle) -> Flow[None]:
        subscriber, claimed = yield from self._one(params)
        delay_ms = None if params.delay is None else span_ms(params.delay, "delay")
        failure = Failure("processing_error", params.reason, params.stack, params.handler)
        for each in claimed:
            yield from subscriber.nack(each, delay_ms, failure)
        self._connection.parts.metrics.count_settled("nack", len(claimed))

    def reject(self, params: wire.Settle) -> Flow[None]:
        subscriber, claimed = yield from self._one(params)
        reason: Reason = "processing_error" if params.failed else "rejected"
        for each in claimed:
            yield from subscriber.reject(each, Failure(reason, params.reason, params.stack, params.handler))
        self._connection.parts.metrics.count_settled("reject", len(claimed))

    def extend(self, params: wire.Settle) -> Flow[None]:
        if params.lenient:
            yield from self.find(params.subscription_id).extend_held(params.sequence_ids or [])
            return
        subscriber, claimed = yield from self._one(params)
        by_ms = None if params.by is None else span_ms(params.by, "by")
        yield from subscriber.extend(claimed, by_ms)

    def _one(self, params: wire.Settle) -> Flow[tuple[Subscriber | Tail, list[Claimed]]]:
        if (params.sequence_id is None) == (params.sequence_ids is None):
            raise InvalidOption("give either sequence_id or sequence_ids", where=params.subscription_id)
        seqs = [params.sequence_id] if params.sequence_id is not None else params.sequence_ids or []
        subscriber = self.find(params.subscription_id)
        claimed = yield from subscriber.handed_out(seqs, params.attempt)
        return subscriber, claimed

    # --- ending -------------------------------------------------------------------------------------------------

    def give_back(self, id: str, seqs: Sequence[int]) -> Flow[None]:
        """What the client has not looked at, for others to have."""
        subscriber = self.find(id)
        yield subscriber.release(subscriber.still_in_flight(seqs))

    async def release(self, id: str, seen: Sequence[tuple[int, int]] | None = None) -> None:
        """`seen`: all else that is in flight was not looked at, and counts as no attempt."""
        self.find(id)
        await asyncio.shield(self._in_background(self._let_go(self._held.pop(id), seen)))

    def _in_background(self, ending: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """What gives back must not end half-way, whatever becomes of the call that needs it."""
        task = asyncio.create_task(ending)
        self._ending.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._ending.discard(task)
        if not task.cancelled():
            task.exception()  # seen by the call that waited for it, if there was one

    async def stop_delivering(self) -> None:
        """No more deliveries; waiting fetches are answered with nothing. What is in flight can still be settled."""
        for held in list(self._held.values()):
            held.subscriber.interrupt()
            await _cancel(held.pump)

    def drop_forbidden(self, why: str) -> None:
        """The connection has another token: what that may not hold is given back, and the client told."""
        for id, held in list(self._held.items()):
            if not self._may_hold(held.subscriber):
                self._drop(id, held)
                self._connection.notify("rpc.lost", wire.LostNotice(id, why))

    def end(self) -> None:
        """The connection has no token any more."""
        for id, held in list(self._held.items()):
            self._drop(id, held)

    def _drop(self, id: str, held: Held) -> None:
        del self._held[id]
        held.is_forbidden = True
        held.end_waits()
        self._in_background(self._give_back(held, vanished=False))

    async def close(self, *, vanished: bool) -> None:
        held = list(self._held.values())
        self._held.clear()
        await asyncio.gather(*(self._give_back(each, vanished=vanished) for each in held))

    async def _give_back(self, held: Held, *, vanished: bool) -> None:
        try:
            await self._let_go(held, vanished=vanished)
        except HeadwaterError as exc:  # it will be free when its lease runs out
            logger.warning("subscription %s could not be given back: %s", held.subscriber.id, exc)

    async def _let_go(
        self, held: Held, seen: Sequence[tuple[int, int]] | None = None, *, vanished: bool = False
    ) -> None:
        await _cancel(held.pump)
        await run_async(held.subscriber.close(seen, vanished=vanished))


async def _cancel(task: asyncio.Task[None] | None) -> None:
    if task is not None and task is not asyncio.current_task():
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def _undelivered(subscriber: Subscriber | Tail) -> Flow[int]:
    """How much is waiting, among so many messages that it costs no more than a fetch."""
    if isinstance(subscriber, Tail):
        return 0
    selection = selection_of(subscriber.spec)
    after = subscriber.delivered_to

    def look(reader: Reader) -> int:
        rows = reader.delivery_counts(subscriber.id)
        # A new holder's rows in flight are those that the last one left; sharers have rows of their own.
        left = rows.in_flight - len(subscriber.resumed.held) if subscriber.spec.mode == "exclusive" else 0
        if selection.takes_time:  # what one look finds
            return len(reader.scan(selection, after, UNDELIVERED_LOOKED_AT_MAX).messages) + rows.waiting + left
        return count_waiting(reader, selection, after, UNDELIVERED_LOOKED_AT_MAX).messages + rows.waiting + left

    engine = subscriber.engine
    return (yield from engine.read(look, engine.filters if selection.takes_time else engine.readers))


def _subscribed(params: wire.Subscribe, subscriber: Subscriber | Tail, undelivered: int) -> wire.Subscribed:
    done = wire.Subscribed(
        params.subscription_id, params.topic, subscriber.resumed_from, subscriber.resumed_from, undelivered
    )
    if isinstance(subscriber, Subscriber):
        done.held = [claimed.message.seq for claimed in subscriber.resumed.held]
        done.settled = subscriber.resumed.settled
        subscriber.set_payloads_aside(subscriber.resumed.held)
    return done


def check_holder(name: str) -> str:
    if not HOLDER_NAME.fullmatch(name):
        raise InvalidOption("a holder's name has 8 to 128 letters, digits and dashes", where="resume.holder")
    return name


def start_of(given: str | int) -> Start:
    """`first`, `new`, a seq, or a moment in ISO 8601."""
    if isinstance(given, int) or given in ("first", "new"):
        return cast(Start, given)
    try:
        return datetime.fromisoformat(given)
    except ValueError as exc:
        raise InvalidOption(
            f"start is first, new, a seq or a moment, not {given!r}", next="Write a moment like 2030-01-31T12:00:00Z"
        ) from exc
