"""A log of a server: the methods of a local log (`broker.log`) as calls."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import threading
import uuid
from collections.abc import Callable, Iterable
from functools import cache, partial
from typing import Any, TypeVar, Unpack

import msgspec
from msgspec import Raw

from headwater.broker.consumer import Consumer, ephemeral_error
from headwater.broker.dead_letters import (
    PAGE,
    Exported,
    LetterDocument,
    LetterFilter,
    LetterStatistics,
    RedriveResult,
    from_wire,
    imported_pages,
    make_query,
)
from headwater.broker.deliveries import Claimed
from headwater.broker.flow import Completion, Flow, WaitFor, run_async
from headwater.broker.logger import logger
from headwater.broker.maintenance import MaintenanceReport
from headwater.broker.publish import Outgoing, make_drafts, parts_of
from headwater.broker.schedules import ScheduleRecord, ScheduleTurn
from headwater.broker.statistics import LogStatistics, SubscriptionInfo
from headwater.broker.subscribe import Start, SubscribeOptions, check_subscription_id, spec_of
from headwater.broker.transaction import OwnTransaction
from headwater.broker.verbs import ExternalTxVerbs
from headwater.client.connection import Connection
from headwater.client.consumer import RemoteConsumer, read_delivered, start_on_the_wire, subscribe_params
from headwater.client.live import RemoteLive
from headwater.client.outbox import Decode, Request, read_nothing
from headwater.client.rpc import RpcMethods
from headwater.delivery.retention import Limits
from headwater.delivery.schedule import Schedule
from headwater.errors import InvalidInputError, InvalidStateError
from headwater.formats import span_ms, time_ms
from headwater.message import BATCH_MESSAGES_MAX, Draft, PublishOptions, encode, encode_all, make_draft
from headwater.ports.clock import Clock
from headwater.ports.records import Appended, DeadLetter, RetentionPolicy, TopicCount
from headwater.protocol import methods as rpc
from headwater.topics import Dialect, check_topic, parse_pattern

CLOSE_SECONDS_MAX = 10.0
DEAD_LETTERS_PER_CALL = 1_000

T = TypeVar("T")


@cache
def _decoder(type: Any) -> Decode:
    return msgspec.json.Decoder(type).decode


_position = msgspec.json.Decoder(rpc.SequenceId)
_batch = msgspec.json.Decoder(rpc.PublishedBatch)


def _sequence_id(raw: Any) -> int:
    return _position.decode(raw).sequence_id


def _appended(raw: Any) -> Appended:
    answer = _batch.decode(raw)
    return Appended(answer.sequence_ids, frozenset(answer.duplicates))


def _removed(raw: Any) -> bool:
    return msgspec.json.decode(raw, type=rpc.Removed).removed


class RemoteLog:
    """`loop_thread`: the thread of the event loop, if this log has to end it."""

    def __init__(self, connection: Connection, clock: Clock, loop_thread: threading.Thread | None) -> None:
        self._connection = connection
        self._clock = clock
        self._loop_thread = loop_thread
        self._consumers: dict[str, RemoteConsumer] = {}
        self._rpc_methods = RpcMethods(connection, blocking=loop_thread is not None)
        self._closed = False
        name = f"{socket.gethostname()}:{os.getpid()}:{uuid.uuid4().hex[:8]}"
        self._schedule_publisher = name[: rpc.PUBLISHER_CHARS_MAX]
        self._heartbeat_timer: asyncio.TimerHandle | None = None
        self.dead_letters = RemoteDeadLetters(self._ask)
        self.live = RemoteLive(connection)
        connection.resumables.append(self.live)
        connection.on_call = self._rpc_methods.take_call
        self._rpc_methods.builtin = {
            "rpc.deliver": partial(self._take, read_delivered, RemoteConsumer.take_messages),
            "rpc.gap": partial(self._take, _decoder(rpc.GapNotice), RemoteConsumer.take_gap),
            "rpc.lost": partial(self._take, _decoder(rpc.LostNotice), lambda consumer, _: consumer.lose()),
            "rpc.paused": partial(
                self._take, _decoder(rpc.SubscriptionId), lambda consumer, _: consumer.release_buffer()
            ),
            "rpc.notification": self.live.take_notification,
        }

    @property
    def name(self) -> str:
        return self._connection.settings.url

    @property
    def remote(self) -> RpcMethods:
        return self._rpc_methods

    def _ask(self, method: str, params: Any, decode: Decode = read_nothing, *, again: bool = True) -> Flow[Any]:
        outcome = yield self._connection.enqueue(Request(method, params, decode, again=again))
        return outcome

    # --- publishing ---------------------------------------------------------------------------------------------

    def publish(self, topic: str, data: Any, options: PublishOptions) -> Completion[int]:
        """Validated as for a file, so that an invalid message raises the same error at once."""
        check_topic(topic)
        params: rpc.PlainPublish | rpc.Publish
        if options:
            params = _publish_params(make_draft(topic, data, options, self._clock.now_ms()), options)
        else:
            params = rpc.PlainPublish(topic, Raw(encode(data, topic)[0]))
        return self._connection.enqueue(Request("rpc.publish", params, _sequence_id, count=1, gathers=not options))

    def publish_many(self, messages: Iterable[Outgoing]) -> Flow[list[int]]:
        return (yield from self.append(messages)).seqs

    def append(self, messages: Iterable[Outgoing]) -> Flow[Appended]:
        batch = list(messages)
        params: rpc.PlainBatch | rpc.PublishBatch
        if plain := _plain_messages(batch):
            params = rpc.PlainBatch(plain)
        else:
            drafts = make_drafts(batch, self._clock.now_ms())  # validates as for a file
            if not drafts:
                return Appended([], frozenset())
            options = (parts_of(message)[2] for message in batch)
            params = rpc.PublishBatch([_publish_params(*each) for each in zip(drafts, options, strict=True)])
        request = Request("rpc.publish.batch", params, _appended, count=len(batch), alone=True)
        appended: Appended = yield self._connection.enqueue(request)
        return appended

    @property
    def external_tx(self) -> ExternalTxVerbs:
        raise self._elsewhere()

    def transaction(self, consumer: Consumer | None = None, claimed: Claimed | None = None) -> OwnTransaction:
        raise self._elsewhere()

    def _elsewhere(self) -> InvalidStateError:
        return InvalidStateError(
            "a transaction with tables of your own needs the log in this process",
            where=self.name,
            next="Open the file itself; over a connection, give messages an id to publish them once",
        )

    # --- subscribing --------------------------------------------------------------------------------------------

    def subscribe(self, id: str, pattern: str, **options: Unpack[SubscribeOptions]) -> Flow[RemoteConsumer]:
        check_subscription_id(id)
        spec_options = {name: value for name, value in options.items() if name not in ("start", "timeout", "takeover")}
        spec = spec_of(id, pattern, spec_options)
        for former in [each for each in list(self._consumers.values()) if each.id == id and each.closed]:
            yield WaitFor(former.gone, self._connection.settings.timeout_s)  # it is being released
        consumer = RemoteConsumer(self._connection, id, spec, subscribe_params(id, pattern, options))
        consumer.gone.watch(lambda _: self._consumers.__delitem__(consumer.wire_id))
        number = 1
        while self._consumers.setdefault(consumer.wire_id, consumer) is not consumer:  # this log holds it already
            number += 1
            consumer.wire_id = f"{id}#{number}"
        self._connection.resumables.append(consumer)
        try:
            yield from consumer.begin()
        except BaseException:
            self._connection.resumables.remove(consumer)
            consumer.abandon()
            raise
        self._connection.loop.call_soon_threadsafe(self._schedule_heartbeat)
        return consumer

    def delete_subscription(self, id: str) -> Flow[None]:
        return self._ask("rpc.subscription.remove", rpc.SubscriptionId(id), again=False)

    def seek(self, id: str, start: Start) -> Flow[int]:
        return self._ask("rpc.seek", rpc.Seek(id, start_on_the_wire(start)), _sequence_id)

    def pause(self, id: str) -> Flow[None]:
        return self._ask("rpc.subscription.pause", rpc.SubscriptionId(id))

    def resume(self, id: str) -> Flow[None]:
        return self._ask("rpc.subscription.resume", rpc.SubscriptionId(id))

    # --- inspecting ---------------------------------------------------------------------------------------------

    def describe(self, consumer: Consumer) -> Flow[SubscriptionInfo]:
        if consumer.spec.mode == "ephemeral":
            raise ephemeral_error(consumer, "keeps no state to describe")
        return self.subscription_info(consumer.id)

    def subscription_infos(self) -> Flow[list[SubscriptionInfo]]:
        return self._pages(
            "rpc.subscriptions", rpc.SubscriptionPage, rpc.SUBSCRIPTIONS_MAX, SubscriptionInfo, lambda last: last.id
        )

    def _pages(
        self, method: str, params: Callable[[str], Any], most: int, kind: type[T], name_of: Callable[[T], str]
    ) -> Flow[list[T]]:
        """All items; a page with fewer than `most` is the last."""
        found: list[T] = []
        while len(found) % most == 0:
            after = name_of(found[-1]) if found else ""
            page = yield from self._ask(method, params(after), _decoder(list[kind]))  # type: ignore[valid-type]
            if not page:
                break
            found += page
        return found

    def subscription_info(self, id: str) -> Flow[SubscriptionInfo]:
        return self._ask("rpc.subscription", rpc.SubscriptionId(id), _decoder(SubscriptionInfo))

    def topics(self) -> Flow[list[TopicCount]]:
        return self._pages("rpc.topics", rpc.TopicPage, rpc.TOPICS_MAX, TopicCount, lambda last: last.topic)

    def topic_max_seq(self, topic: str) -> Flow[int]:
        return self._ask("rpc.topic_max_seq", rpc.Topic(check_topic(topic)), _sequence_id)

    def last_seq(self) -> Flow[int]:
        return self._ask("rpc.last_seq", None, _sequence_id)

    def statistics(self) -> Flow[LogStatistics]:
        return self._ask("rpc.stats", None, _decoder(LogStatistics))

    def health(self) -> Flow[dict[str, Any]]:
        return self._ask("rpc.health", None, _decoder(dict[str, Any]))

    # --- retention ----------------------------------------------------------------------------------------------

    def retain(self, pattern: str, limits: Limits, dialect: Dialect) -> Flow[None]:
        age_s = None if limits.max_age_ms is None else limits.max_age_ms / 1000
        text = parse_pattern(pattern, dialect).text
        params = rpc.Retain(text, age_s, limits.max_count, limits.max_bytes, limits.keep_unacked, dialect)
        return self._ask("rpc.retain", params)

    def delete_retention(self, pattern: str, dialect: Dialect) -> Flow[bool]:
        return self._ask("rpc.retention.remove", rpc.RemoveRetention(pattern, dialect), _removed, again=False)

    def retention(self) -> Flow[list[RetentionPolicy]]:
        return self._ask("rpc.retention", None, _decoder(list[RetentionPolicy]))

    def run_maintenance(self) -> Flow[MaintenanceReport]:
        return self._ask("rpc.maintenance.run", None, _decoder(MaintenanceReport))

    # --- schedules ----------------------------------------------------------------------------------------------

    @property
    def clock(self) -> Clock:
        return self._clock

    def schedules(self) -> Flow[list[ScheduleRecord]]:
        return self._ask("rpc.schedules", None, _decoder(list[ScheduleRecord]))

    def declare_schedule(self, schedule: Schedule) -> Flow[ScheduleTurn]:
        params = rpc.DeclareSchedule(msgspec.to_builtins(schedule), self._schedule_publisher)
        return self._ask("rpc.schedule.declare", params, _decoder(ScheduleTurn))

    def take_schedule(self, schedule: Schedule, due_ms: int) -> Flow[ScheduleTurn]:
        params = rpc.TakeSchedule(msgspec.to_builtins(schedule), self._schedule_publisher, due_ms)
        return self._ask("rpc.schedule.take", params, _decoder(ScheduleTurn))

    def publish_occurrence(self, schedule: Schedule, fence: int, at_ms: int, data: Any, ends: bool) -> Flow[bool]:
        """Publish an occurrence. A call that is sent again after a lost answer stores nothing and returns False."""
        raw = None if data is None else Raw(encode(data, schedule.topic)[0])
        publisher = self._schedule_publisher
        params = rpc.PublishOccurrence(msgspec.to_builtins(schedule), publisher, fence, at_ms, raw, ends)
        return self._ask("rpc.schedule.publish", params, _decoder(bool))

    def delete_schedule(self, id: str) -> Flow[bool]:
        return self._ask("rpc.schedule.remove", rpc.ScheduleId(id), _removed, again=False)

    # --- notifications of the server ------------------------------------------------------------------------------

    def _take(self, decode: Decode, take: Callable[[RemoteConsumer, Any], None], raw: Raw) -> None:
        notice = decode(raw)
        consumer = self._consumers.get(notice.subscription_id)
        if consumer is not None:  # else it was closed, and the server has released its messages
            take(consumer, notice)

    # --- heartbeats, closing ------------------------------------------------------------------------------------

    def _send_heartbeats(self) -> None:
        """Extends messages that are being handled, so that they are not redelivered."""
        self._heartbeat_timer = None
        self._schedule_heartbeat()
        for consumer in list(self._consumers.values()):
            request = consumer.heartbeat()
            if request is not None:
                self._connection.enqueue(request)

    def _schedule_heartbeat(self) -> None:
        """Again for a new consumer, whose interval may be shorter than the current one."""
        intervals_s = [consumer.heartbeat_s for consumer in list(self._consumers.values())]
        if not intervals_s or self._closed:
            return
        due_s = self._connection.loop.time() + min(intervals_s)
        if self._heartbeat_timer is not None:
            due_s = min(due_s, self._heartbeat_timer.when())
            self._heartbeat_timer.cancel()
        self._heartbeat_timer = self._connection.loop.call_at(due_s, self._send_heartbeats)

    async def _close(self) -> None:
        if self._heartbeat_timer is not None:
            self._heartbeat_timer.cancel()
        if self._connection.state == "connected":  # else the server has released them
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CLOSE_SECONDS_MAX):
                    closing = [run_async(consumer.close()) for consumer in list(self._consumers.values())]
                    await asyncio.gather(*closing, return_exceptions=True)
        await self._connection.close()

    def close(self) -> None:
        """Release subscriptions, send queued calls, close the connection. Blocks; not on the connection's own loop."""
        if self._closed:
            return
        self._closed = True
        loop = self._connection.loop
        if loop.is_closed() or self._connection.forked:
            return
        asyncio.run_coroutine_threadsafe(self._close(), loop).result()
        self.live.close()
        self._rpc_methods.close()
        if self._loop_thread is not None:
            loop.call_soon_threadsafe(loop.stop)
            self._loop_thread.join()


class RemoteDeadLetters:
    def __init__(self, ask: Callable[..., Flow[Any]]) -> None:
        self._ask = ask

    def find(self, after: int = 0, limit: int = 100, **given: Unpack[LetterFilter]) -> Flow[list[DeadLetter]]:
        """Find dead letters, in pages that fit into an answer."""
        found: list[DeadLetter] = []
        while len(found) < limit:
            most = min(limit - len(found), DEAD_LETTERS_PER_CALL)
            params = _filter(given, after=after, limit=most)
            page = yield from self._ask("rpc.dead_letters", params, _decoder(list[LetterDocument]))
            found += [from_wire(letter) for letter in page]
            if not page:
                break
            after = found[-1].id
        return found

    def get(self, id: int) -> Flow[DeadLetter]:
        found = yield from self._ask("rpc.dead_letters.get", rpc.DeadLetterId(id), _decoder(LetterDocument))
        return from_wire(found)

    def statistics(self, **given: Unpack[LetterFilter]) -> Flow[LetterStatistics]:
        return self._ask("rpc.dead_letters.stats", _filter(given), _decoder(LetterStatistics))

    def redrive(
        self, to_topic: str | None = None, dry_run: bool = False, **given: Unpack[LetterFilter]
    ) -> Flow[RedriveResult]:
        params = _filter(given, to_topic=to_topic, dry_run=dry_run)
        return self._ask("rpc.dead_letters.redrive", params, _decoder(RedriveResult), again=dry_run)

    def purge(self, dry_run: bool = False, **given: Unpack[LetterFilter]) -> Flow[int]:
        return self._ask("rpc.dead_letters.purge", _filter(given, dry_run=dry_run), _decoder(int), again=dry_run)

    def export(self, after: int = 0, limit: int = PAGE, **given: Unpack[LetterFilter]) -> Flow[Exported]:
        return self._ask("rpc.dead_letters.export", _filter(given, after=after, limit=limit), _decoder(Exported))

    def import_(self, lines: Iterable[str]) -> Flow[int]:
        imported = 0
        for page in imported_pages(lines):
            asked = rpc.ImportDeadLetters(page.lines)
            imported += yield from self._ask("rpc.dead_letters.import", asked, _decoder(int), again=False)
        return imported


def _filter(given: LetterFilter, **more: Any) -> rpc.DeadLetterFilter:
    make_query(given)  # raises as for a file
    chosen: dict[str, Any] = dict(given)
    if chosen.get("ids") is not None:
        chosen["ids"] = list(chosen["ids"])
    return rpc.DeadLetterFilter(**chosen, **more)


def _plain_messages(batch: list[Outgoing]) -> list[rpc.PlainMessage] | None:
    """The hot path, for messages with topic and data only; None if a message has options or is invalid."""
    if not 0 < len(batch) <= BATCH_MESSAGES_MAX or set(map(type, batch)) != {tuple} or set(map(len, batch)) != {2}:
        return None
    topics, payloads = zip(*batch, strict=True)
    try:
        for topic in set(topics):
            check_topic(topic)
        encoded = encode_all(payloads)
    except (InvalidInputError, TypeError):
        return None
    return None if encoded is None else list(map(rpc.PlainMessage, topics, map(Raw, encoded)))


def _publish_params(draft: Draft, options: PublishOptions) -> rpc.Publish:
    """`delay` and `ttl` stay durations: the clock of the server counts."""
    given: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    for name in ("deliver_at", "expires_at", "published_at"):
        if name in given:
            given[name] = time_ms(given[name], name) / 1000
    for name in ("delay", "ttl"):
        if name in given:
            given[name] = span_ms(given[name], name) / 1000
    if "headers" in given:
        given["headers"] = dict(given["headers"])
    return rpc.Publish(draft.topic, Raw(draft.data_json.encode()), **given)


def new_publisher() -> str:
    """A unique name, under which the server recognises messages that are sent again."""
    return uuid.uuid4().hex


async def open_on_this_loop(connection: Connection, clock: Clock) -> RemoteLog:
    core = RemoteLog(connection, clock, None)
    connection.start()
    try:
        await connection.first_connection.wait_async()
        connection.first_connection.result()
    except BaseException:
        await connection.close()
        raise
    return core


def open_on_a_thread(make_connection: Callable[[asyncio.AbstractEventLoop], Connection], clock: Clock) -> RemoteLog:
    """Open a log for synchronous code, with an event loop on a thread of its own."""
    loop = asyncio.new_event_loop()
    connection = make_connection(loop)
    thread = threading.Thread(target=_run_loop, args=(loop, connection), name="headwater-connection", daemon=True)
    thread.start()
    core = RemoteLog(connection, clock, thread)
    loop.call_soon_threadsafe(connection.start)
    try:
        connection.first_connection.wait()
        connection.first_connection.result()
    except BaseException:
        core.close()
        raise
    return core


def _run_loop(loop: asyncio.AbstractEventLoop, connection: Connection) -> None:
    asyncio.set_event_loop(loop)
    is_stopped = False
    while not is_stopped:
        try:
            loop.run_forever()
            is_stopped = True
        except BaseException:  # SystemExit in a callback must not end this thread: other threads wait for the loop
            logger.exception("the event loop of the connection goes on")
    loop.close()
    connection.refuse_stranded()
