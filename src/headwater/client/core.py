"""The verbs of a log, carried to a server: what `broker.core` does here, done there."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import uuid
from collections.abc import Callable, Iterable
from typing import Any, Unpack, cast

import msgspec

from headwater.broker.claims import Claimed
from headwater.broker.consumer import Consumer
from headwater.broker.flow import Flow, Within, run_async
from headwater.broker.housekeeping import Report
from headwater.broker.logger import logger
from headwater.broker.options import Start, SubscribeOptions, check_subscription_id, spec_of
from headwater.broker.publish import Outgoing, parts_of
from headwater.broker.statistics import LogStatistics, SubscriptionInfo
from headwater.broker.transaction import OwnTransaction
from headwater.broker.verbs import OutsideVerbs
from headwater.client.consumer import RemoteConsumer
from headwater.client.dead_letters import RemoteDeadLetters
from headwater.client.link import Link
from headwater.client.live import RemoteLive
from headwater.client.methods import Offered
from headwater.client.options import read_options
from headwater.client.params import start_on_the_wire, subscribe_params
from headwater.client.request import Request
from headwater.errors import InvalidInput, InvalidOption, TooLarge
from headwater.message import (
    BATCH_MESSAGES_MAX,
    PublishOptions,
    Span,
    encode,
    encode_all,
    make_draft,
    span_ms,
    time_ms,
)
from headwater.ports.clock import Clock
from headwater.ports.records import RetentionPolicy, TopicCount
from headwater.protocol import wire
from headwater.topics import Dialect, check_topic, parse_pattern

CLOSE_SECONDS_MAX = 10.0

__all__ = ["Link", "RemoteCore", "new_publisher", "open_on_a_thread", "open_on_this_loop", "read_options"]


class _Seq(msgspec.Struct):
    sequence_id: int


class _Seqs(msgspec.Struct):
    sequence_ids: list[int]


class _Removed(msgspec.Struct):
    removed: bool


def reader_of(type: Any, then: Callable[[Any], Any] | None = None) -> Callable[[Any], Any]:
    """How a raw result becomes a value."""
    decode = msgspec.json.Decoder(type).decode
    return decode if then is None else lambda raw: then(decode(raw))


_published = reader_of(_Seq, lambda found: found.sequence_id)
_published_many = reader_of(_Seqs, lambda found: found.sequence_ids)
_infos = reader_of(list[SubscriptionInfo])
_info = reader_of(SubscriptionInfo)
_topics = reader_of(list[TopicCount])
_statistics = reader_of(LogStatistics)
_health = reader_of(dict[str, Any])
_retention = reader_of(list[RetentionPolicy])
_removed = reader_of(_Removed, lambda found: found.removed)
_report = reader_of(Report)
_nothing = reader_of(Any, lambda _: None)


class RemoteCore:
    """One log behind a connection. `loop_thread` is the thread of the link's loop if that is ours to end."""

    def __init__(self, link: Link, clock: Clock, loop_thread: threading.Thread | None) -> None:
        self._link = link
        self._clock = clock
        self._loop_thread = loop_thread
        self._consumers: dict[str, RemoteConsumer] = {}
        self._offered = Offered(link, blocking=loop_thread is not None)
        self._closed = False
        self._heart: asyncio.TimerHandle | None = None
        self.dead_letters = RemoteDeadLetters(self._ask)
        self.live = RemoteLive(link)
        link.resuming.append(self.live)
        link.on_call = self._offered.take_call
        self._offered.builtin = {
            "rpc.gap": self._take_gap,
            "rpc.lost": self._take_loss,
            "rpc.notification": self.live.take_notification,
        }

    @property
    def name(self) -> str:
        return self._link.settings.url

    @property
    def remote(self) -> Offered:
        return self._offered

    def _ask(self, method: str, params: Any, decode: Callable[[Any], Any], *, again: bool = True) -> Flow[Any]:
        outcome = yield self._link.enqueue(Request(method, params, decode, again=again))
        return outcome

    # --- publishing ---------------------------------------------------------------------------------------------

    def publish(self, topic: str, data: Any, options: PublishOptions) -> Flow[int]:
        params = self._params(topic, data, options)
        gathers = isinstance(params, wire.PlainPublish)
        seq: int = yield self._link.enqueue(Request("rpc.publish", params, _published, count=1, gathers=gathers))
        return seq

    def publish_many(self, messages: Iterable[Outgoing]) -> Flow[list[int]]:
        batch = list(messages)
        if len(batch) > BATCH_MESSAGES_MAX:
            raise TooLarge(f"more than {BATCH_MESSAGES_MAX} messages in one batch", next="Publish it in parts")
        plain = _plain_messages(batch)
        if plain:
            request = Request(
                "rpc.publish.batch", wire.PlainBatch(plain), _published_many, count=len(plain), alone=True
            )
            seqs: list[int] = yield self._link.enqueue(request)
            return seqs
        params: list[wire.Publish | wire.PlainPublish] = []
        for message in batch:
            try:
                params.append(self._params(*parts_of(message)))
            except InvalidInput as exc:
                where = f"message {len(params)} of the batch" + (f" ({exc.where})" if exc.where else "")
                raise type(exc)(exc.why, where=where, next=exc.next or "Nothing of the batch was published") from exc
        if not params:
            return []
        whole = wire.PublishBatch(cast(list[wire.Publish], params))
        request = Request("rpc.publish.batch", whole, _published_many, count=len(params), alone=True)
        seqs = yield self._link.enqueue(request)
        return seqs

    def _params(self, topic: str, data: Any, options: PublishOptions) -> wire.Publish | wire.PlainPublish:
        """Checked here as it is for a file, so that mistakes are told at once and alike."""
        check_topic(topic)
        if not options:
            return wire.PlainPublish(topic, msgspec.Raw(encode(data, topic)[0].encode()))
        draft = make_draft(topic, data, options, self._clock.now_ms())
        given: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
        for name in ("deliver_at", "expires_at"):
            if name in given:
                given[name] = time_ms(given[name], name) / 1000
        for name in ("delay", "ttl"):
            if name in given:
                given[name] = span_ms(given[name], name) / 1000
        if "headers" in given:
            given["headers"] = dict(given["headers"])
        return wire.Publish(topic, msgspec.Raw(draft.data_json.encode()), **given)

    @property
    def outside(self) -> OutsideVerbs:
        raise self._elsewhere()

    def transaction(self, consumer: Consumer | None = None, claimed: Claimed | None = None) -> OwnTransaction:
        raise self._elsewhere()

    def _elsewhere(self) -> InvalidOption:
        return InvalidOption(
            "a transaction with tables of your own needs the log in this process",
            where=self.name,
            next="Open the file itself; over a connection, give messages an id to publish them once",
        )

    # --- subscribing --------------------------------------------------------------------------------------------

    def subscribe(self, id: str, pattern: str, **options: Unpack[SubscribeOptions]) -> Flow[RemoteConsumer]:
        check_subscription_id(id)
        spec_options = {name: value for name, value in options.items() if name not in ("start", "wait", "takeover")}
        spec = spec_of(id, pattern, spec_options)
        for former in [each for each in list(self._consumers.values()) if each.id == id and each.closed]:
            yield Within(former.gone, self._link.settings.timeout_s)  # it is being given back
        consumer = RemoteConsumer(self._link, id, spec, subscribe_params(id, pattern, options))
        consumer.gone.watch(lambda _: self._consumers.__delitem__(consumer.wire_id))
        number = 1
        while self._consumers.setdefault(consumer.wire_id, consumer) is not consumer:  # this log holds it already
            number += 1
            consumer.wire_id = f"{id}#{number}"
        self._link.resuming.append(consumer)
        try:
            yield from consumer.begin()
        except BaseException:
            self._link.resuming.remove(consumer)
            consumer.abandon()
            raise
        self._link.loop.call_soon_threadsafe(self._beat_in_time)
        return consumer

    def unsubscribe(self, id: str) -> Flow[None]:
        return self._ask("rpc.subscription.remove", wire.SubscriptionId(id), _nothing, again=False)

    def seek(self, id: str, start: Start) -> Flow[int]:
        return self._ask("rpc.seek", wire.Seek(id, start_on_the_wire(start)), _published)

    # --- looking ------------------------------------------------------------------------------------------------

    def describe(self, consumer: Consumer) -> Flow[SubscriptionInfo]:
        if consumer.spec.mode == "ephemeral":
            raise InvalidOption(
                "an ephemeral subscription keeps no state to describe",
                where=consumer.id,
                next="Use mode exclusive or shared",
            )
        return self.subscription_info(consumer.id)

    def subscription_infos(self) -> Flow[list[SubscriptionInfo]]:
        return self._ask("rpc.subscriptions", None, _infos)

    def subscription_info(self, id: str) -> Flow[SubscriptionInfo]:
        return self._ask("rpc.subscription", wire.SubscriptionId(id), _info)

    def topics(self) -> Flow[list[TopicCount]]:
        found: list[TopicCount] = []
        while len(found) % wire.TOPICS_MAX == 0:
            page = yield from self._ask("rpc.topics", wire.TopicPage(found[-1].topic if found else ""), _topics)
            if not page:
                break
            found += page
        return found

    def topic_max_seq(self, topic: str) -> Flow[int]:
        return self._ask("rpc.topic_max_seq", wire.Topic(check_topic(topic)), _published)

    def last_seq(self) -> Flow[int]:
        return self._ask("rpc.last_seq", None, _published)

    def statistics(self) -> Flow[LogStatistics]:
        return self._ask("rpc.stats", None, _statistics)

    def health(self) -> Flow[dict[str, Any]]:
        return self._ask("rpc.health", None, _health)

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
        age_s = None if max_age is None else span_ms(max_age, "max_age") / 1000
        text = parse_pattern(pattern, dialect).text
        return self._ask("rpc.retain", wire.Retain(text, age_s, max_count, max_bytes, keep_unacked, dialect), _nothing)

    def unretain(self, pattern: str, dialect: Dialect) -> Flow[bool]:
        return self._ask("rpc.unretain", wire.Unretain(pattern, dialect), _removed, again=False)

    def retention(self) -> Flow[list[RetentionPolicy]]:
        return self._ask("rpc.retention", None, _retention)

    def housekeep(self) -> Flow[Report]:
        return self._ask("rpc.housekeep", None, _report)

    # --- what the server tells by itself --------------------------------------------------------------------------

    def _take_gap(self, notice: msgspec.Raw) -> None:
        gap = _gap_notice.decode(notice)
        consumer = self._consumers.get(gap.subscription_id)
        if consumer is not None:
            consumer.take_gap(gap)

    def _take_loss(self, notice: msgspec.Raw) -> None:
        consumer = self._consumers.get(_lost_notice.decode(notice).subscription_id)
        if consumer is not None:
            consumer.lose(None)

    # --- living and ending --------------------------------------------------------------------------------------

    def _beat(self) -> None:
        """Keep what is being handled from being given to others."""
        self._heart = None
        self._beat_in_time()
        for consumer in list(self._consumers.values()):
            request = consumer.heartbeat()
            if request is not None:
                self._link.enqueue(request)

    def _beat_in_time(self) -> None:
        """Once more for a new one, whose interval may be shorter than the one that is being waited for."""
        intervals_s = [consumer.heartbeat_s for consumer in list(self._consumers.values())]
        if not intervals_s or self._closed:
            return
        due_s = self._link.loop.time() + min(intervals_s)
        if self._heart is not None:
            due_s = min(due_s, self._heart.when())
            self._heart.cancel()
        self._heart = self._link.loop.call_at(due_s, self._beat)

    async def _close(self) -> None:
        if self._heart is not None:
            self._heart.cancel()
        if self._link.state == "connected":  # else the server has let go of them
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CLOSE_SECONDS_MAX):
                    closing = [run_async(consumer.close()) for consumer in list(self._consumers.values())]
                    await asyncio.gather(*closing, return_exceptions=True)
        await self._link.close()

    def close(self) -> None:
        """Give back what is held, send what is queued, end the connection. Blocks; not on the link's own loop."""
        if self._closed:
            return
        self._closed = True
        loop = self._link.loop
        if loop.is_closed() or self._link.forked:
            return
        asyncio.run_coroutine_threadsafe(self._close(), loop).result()
        self.live.close()
        self._offered.close()
        if self._loop_thread is not None:
            loop.call_soon_threadsafe(loop.stop)
            self._loop_thread.join()


def _plain_messages(batch: list[Outgoing]) -> list[wire.PlainMessage] | None:
    """The hot path, for messages of nothing but topic and data; None if some message needs a closer look."""
    if set(map(type, batch)) != {tuple} or set(map(len, batch)) != {2}:
        return None
    topics, payloads = zip(*batch, strict=True)
    try:
        for topic in set(topics):
            check_topic(topic)
    except (InvalidInput, TypeError):
        return None
    encoded = encode_all(payloads)
    return (
        None if encoded is None else list(map(wire.PlainMessage, topics, map(msgspec.Raw, map(str.encode, encoded[0]))))
    )


_gap_notice = msgspec.json.Decoder(wire.GapNotice)
_lost_notice = msgspec.json.Decoder(wire.LostNotice)


def new_publisher() -> str:
    """A name that nobody else has: what this client sends twice is told apart from what others send."""
    return uuid.uuid4().hex


async def open_on_this_loop(link: Link, clock: Clock) -> RemoteCore:
    core = RemoteCore(link, clock, None)
    link.start()
    try:
        await link.first_connection.wait_async()
        link.first_connection.result()
    except BaseException:
        await link.close()
        raise
    return core


def open_on_a_thread(make_link: Callable[[asyncio.AbstractEventLoop], Link], clock: Clock) -> RemoteCore:
    """For those who have no event loop: one on a thread of its own."""
    loop = asyncio.new_event_loop()
    link = make_link(loop)
    thread = threading.Thread(target=_run_loop, args=(loop, link), name="headwater-link", daemon=True)
    thread.start()
    core = RemoteCore(link, clock, thread)
    loop.call_soon_threadsafe(link.start)
    try:
        link.first_connection.wait()
        link.first_connection.result()
    except BaseException:
        core.close()
        raise
    return core


def _run_loop(loop: asyncio.AbstractEventLoop, link: Link) -> None:
    asyncio.set_event_loop(loop)
    is_stopped = False
    while not is_stopped:
        try:
            loop.run_forever()
            is_stopped = True
        except BaseException:  # SystemExit in a callback: on this thread it ends no program, and all wait for the loop
            logger.exception("the event loop of the connection goes on")
    loop.close()
    link.refuse_stranded()
