"""Consumers of Redis: of a stream's new entries, of a stream in a group, and of Pub/Sub channels.

Each is a thread. `subscribe` makes its first connection and raises if that fails; later the thread reconnects by itself
until it is stopped.
"""

from __future__ import annotations

import contextlib
import logging
import random
import re
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import msgspec
import redis
from redis.client import PubSub

from headwater.delivery.retry import RetryPolicy, backoff_ms
from headwater.errors import InvalidDataError
from headwater.formats import error_text, iso
from headwater.message import Message, scoped_id
from headwater.ports.transport import Handle
from headwater.topics import Pattern
from headwater.transports.redis_connection import (
    ANSWER_TIMEOUT_S,
    Fields,
    from_doc,
    make_client,
    translated,
)

WAKE_EVERY_S = 0.05  # while stopping: how often a consumer that waits for the server is woken
PUBSUB_WAIT_S = 1.0  # the longest wait for a message in one call
BLOCK_MS = 1_000  # the longest wait for entries in one call; also how late the first message of a new topic may come
DISCOVER_S = 1.0
HELD_ENTRIES_MAX = 64  # read and not handled yet, over all streams of a consumer
STREAMS_MAX = 1_000
BEGINNING = "0-0"
TIDY_S = 3600.0
ERROR_CHARS_MAX = 2_000
DEAD_FIELDS_MAX = 256  # of an entry that another program wrote
HOLDS_PER_IDLE = 4  # how often held entries are renewed within the time after which they could be reclaimed
RECLAIMS_PER_IDLE = 2
PAUSE_S_MIN = 0.01
RECONNECT = RetryPolicy(base_ms=100, cap_ms=5_000)

_GLOB = re.compile(r"([*?\[\]\\^])")

logger = logging.getLogger("headwater")


class ConsumerSpec(NamedTuple):
    """`report` is called with whether the server answers."""

    name: str
    url: str
    pattern: Pattern
    handle: Handle
    report: Callable[[bool], None]


class RedisConsumer(ABC):
    def __init__(self, spec: ConsumerSpec) -> None:
        self._name, _, self._pattern, self._handle, self._report = spec
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"headwater-{self._name}", daemon=True)

    def start(self) -> None:
        """Raises TransportFailedError if it cannot even begin."""
        try:
            with translated(self._name, "subscribing"):
                self._open()
        except BaseException:
            self._close()
            self._dispose()
            raise
        self._report(True)
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        if threading.current_thread() is self._thread:  # called by the handler, which cannot wait for itself
            return
        while self._thread.is_alive():
            self._wake()
            self._thread.join(WAKE_EVERY_S)
        self._dispose()

    @property
    def has_ended(self) -> bool:
        return self._stopping.is_set() and not self._thread.is_alive()

    def _run(self) -> None:
        failures = 0
        try:
            while not self._stopping.is_set():
                try:
                    if failures:
                        self._open()
                        self._connected_again()
                    self._round()
                    if failures:
                        failures = 0
                        self._report(True)
                except Exception as exc:
                    failures += 1
                    if not self._stopping.is_set():
                        self._log_failure(exc, failures)
                        self._close()
                        self._stopping.wait(backoff_ms(RECONNECT, failures, random.random()) / 1000)
        finally:
            try:
                self._finish()
            except Exception as exc:
                logger.warning("%s: stopped without acknowledging (%s)", self._name, exc)
            self._close()

    def _log_failure(self, exc: Exception, failures: int) -> None:
        self._report(False)
        if not isinstance(exc, (redis.RedisError, OSError)):
            logger.error("%s: internal error; trying again", self._name, exc_info=exc)
        elif failures == 1:
            logger.warning("%s: connection lost (%s); trying again", self._name, exc)
        else:
            logger.info("%s: still unreachable (%s)", self._name, exc)

    @abstractmethod
    def _open(self) -> None:
        """Connects; called again after a failure and `_close`."""

    def _connected_again(self) -> None:
        logger.info("%s: connected again", self._name)

    @abstractmethod
    def _round(self) -> None:
        """Waits a while for messages and handles them."""

    @abstractmethod
    def _wake(self) -> None:
        """Makes a `_round` that waits for the server return soon. Called from another thread. Never raises."""

    def _finish(self) -> None:  # noqa: B027
        """End what needs the connection, before the last `_close`; the connection may be lost already."""

    @abstractmethod
    def _close(self) -> None:
        """Closes the connections of the thread. May be called twice; never raises."""

    def _dispose(self) -> None:  # noqa: B027
        """Closes the other connections, after the thread has ended. May be called twice; never raises."""

    def _handle_once(self, doc: bytes | None, where: str) -> None:
        """Call the handler, for consumers without retries: what fails or cannot be read is logged."""
        try:
            message = from_doc(doc, where)
        except InvalidDataError as exc:
            logger.warning("%s: skipped (%s)", self._name, exc)
            return
        if self._pattern.matches(message.topic):
            try:
                self._handle(message)
            except (Exception, SystemExit):
                logger.exception("%s: the handler failed for message %s", self._name, message.id)


# --- streams -----------------------------------------------------------------------------------------------------


class StreamSettings(msgspec.Struct, frozen=True):
    """`per_topic`: a stream for each topic, `<stream>:<topic>`, instead of one for all."""

    stream: str = "headwater"
    per_topic: bool = False
    maxlen: int = 0
    dedupe_ms: int = 24 * 3600 * 1000
    reclaim_idle_ms: int = 60_000
    max_deliveries: int = 5
    forget_consumers_ms: int = 24 * 3600 * 1000
    start: str = "first"

    def stream_of(self, topic: str) -> str:
        return f"{self.stream}:{topic}" if self.per_topic else self.stream

    @property
    def topics_key(self) -> str:
        """The set of topics that have streams. No topic can hold '#', so no stream has this name."""
        return f"{self.stream}#topics"

    @property
    def groups_key(self) -> str:
        """The set of groups that have begun: to them, each stream found later is new, even after a restart."""
        return f"{self.stream}#groups"

    def key_of_id(self, stream: str, topic: str, id: str) -> str:
        """The key that remembers an id, in the same slot of a cluster as its stream. In a stream for all topics ids
        are unique by topic."""
        tagged = stream if _has_hash_tag(stream) else f"{{{stream}}}"
        return f"{tagged}#id:{id if self.per_topic else scoped_id(topic, id)}"

    @staticmethod
    def dead_of(stream: str) -> str:
        return f"{stream}:dead"


def _has_hash_tag(key: str) -> bool:
    _, opened, rest = key.partition("{")
    tag, closed, _ = rest.partition("}")
    return bool(opened and closed and tag)


class StreamConsumer(RedisConsumer):
    """Reads streams: its connections, and which streams there are for a pattern."""

    def __init__(self, spec: ConsumerSpec, settings: StreamSettings) -> None:
        super().__init__(spec)
        self._settings = settings
        # One connection that waits for entries, and others that never do.
        self._client = make_client(spec.url, connections=1)
        self._control = make_client(spec.url, connections=2)
        self._client_id = 0
        self._streams: list[str] = []
        self._looked_at = -DISCOVER_S
        self._began = False
        answer_s = self._client.connection_pool.connection_kwargs.get("socket_timeout") or 3600.0
        self._block_ms = min(BLOCK_MS, int(answer_s * 500))

    @property
    def _count(self) -> int:
        """How many entries to ask of each stream."""
        return max(1, HELD_ENTRIES_MAX // max(1, len(self._streams)))

    def _open(self) -> None:
        self._client_id = self._client.client_id()
        self._look_for_streams(at_once=True)
        self._began = True

    def _look_for_streams(self, at_once: bool = False) -> None:
        now = time.monotonic()
        if not at_once and (now - self._looked_at < DISCOVER_S or self._is_complete()):
            return
        found = self._find_streams()
        new = [stream for stream in found if stream not in self._streams]
        if len(self._streams) + len(new) > STREAMS_MAX:
            logger.warning("%s: over %d streams; the others are not read", self._name, STREAMS_MAX)
            new = new[: STREAMS_MAX - len(self._streams)]
        for stream in new:
            self._begin(stream)
            self._streams.append(stream)
        self._looked_at = now

    def _is_complete(self) -> bool:
        return bool(self._streams) and (not self._settings.per_topic or self._pattern.is_exact)

    def _find_streams(self) -> list[str]:
        if not self._settings.per_topic:
            return [self._settings.stream]
        if self._pattern.is_exact:
            return [self._settings.stream_of(self._pattern.literal_prefix)]
        topics = sorted(topic.decode(errors="replace") for topic in self._client.smembers(self._settings.topics_key))
        return [self._settings.stream_of(topic) for topic in topics if self._pattern.matches(topic)]

    @abstractmethod
    def _begin(self, stream: str) -> None:
        """Begins to read a stream. Streams found after the start are new, and read from their first entry."""

    def _wake(self) -> None:
        with contextlib.suppress(redis.RedisError, OSError):
            self._control.client_unblock(self._client_id)

    def _close(self) -> None:
        with contextlib.suppress(redis.RedisError, OSError):
            self._client.connection_pool.disconnect()

    def _dispose(self) -> None:
        with contextlib.suppress(redis.RedisError, OSError):
            self._control.connection_pool.disconnect()


class LiveConsumer(StreamConsumer):
    """Every entry from now on. After a lost connection it resumes where it was; a message whose handler fails is not
    tried again: that needs a group."""

    def __init__(self, spec: ConsumerSpec, settings: StreamSettings) -> None:
        super().__init__(spec, settings)
        self._after: dict[str, str] = {}

    def _begin(self, stream: str) -> None:
        last = [] if self._began else self._client.xrevrange(stream, count=1)
        self._after[stream] = last[0][0].decode() if last else BEGINNING

    def _round(self) -> None:
        self._look_for_streams()
        if not self._streams:
            self._stopping.wait(DISCOVER_S)
            return
        answer = self._client.xread(dict(self._after), count=self._count, block=self._block_ms)
        for stream, entry_id, fields in read_entries(answer):
            if self._stopping.is_set():
                return
            self._handle_once(fields.get(b"doc"), f"{stream} {entry_id}")
            self._after[stream] = entry_id


def read_entries(answer: list[tuple[bytes, list[tuple[bytes, Fields | None]]]]) -> Iterator[tuple[str, str, Fields]]:
    """(stream, entry id, fields) of an answer of XREAD or XREADGROUP."""
    for stream, entries in answer:
        for entry_id, fields in entries:
            yield stream.decode(), entry_id.decode(), fields or {}


# --- groups ------------------------------------------------------------------------------------------------------


class EntryDelivery(msgspec.Struct, frozen=True):
    """An entry for the handler, for the n-th time."""

    stream: str
    entry_id: str
    fields: Fields
    deliveries: int

    @property
    def place(self) -> tuple[str, str]:
        return self.stream, self.entry_id


class ClaimedEntries(msgspec.Struct, frozen=True):
    """An answer of XAUTOCLAIM. Redis 6.2 returns deleted entries as nil and keeps them pending; Redis 7 returns them in
    a list of their own and has removed them already."""

    cursor: str
    entries: Sequence[tuple[str, Fields]]
    deleted: int
    still_pending: bool


def read_claim(answer: Sequence[Any]) -> ClaimedEntries:
    cursor, entries = answer[0], answer[1]
    there = [(entry_id.decode(), fields or {}) for entry_id, fields in entries if entry_id is not None]
    missing = len(entries) - len(there)
    return ClaimedEntries(
        cursor=cursor.decode(),
        entries=there,
        deleted=missing + (len(answer[2]) if len(answer) > 2 else 0),
        still_pending=missing > 0,
    )


class GroupConsumer(StreamConsumer):
    """One consumer of a group. An entry is acked after its handler returned. If the handler raised, it stays pending
    and is delivered again, to any consumer, after `reclaim_idle`; if the process died, likewise. While it is being
    handled it is renewed, so a handler may take its time. After `max_deliveries` it goes to the dead stream."""

    def __init__(
        self, spec: ConsumerSpec, settings: StreamSettings, *, group: str, consumer: str, removed_at_end: bool
    ) -> None:
        """`removed_at_end`: the consumer's name is random, so it is removed from the group when this stops."""
        super().__init__(spec, settings)
        self._group = group
        self._consumer = consumer
        self._removed_at_end = removed_at_end
        self._idle_s = settings.reclaim_idle_ms / 1000
        self._from_now = False
        self._backlog: deque[EntryDelivery] = deque()
        self._cursors: dict[str, str] = {}
        self._reclaim_at = 0.0
        self._tidy_at = 0.0
        # Handled, but the ack may not have arrived.
        self._done: dict[tuple[str, str], None] = {}
        self._held: dict[tuple[str, str], None] = {}
        self._lost: set[tuple[str, str]] = set()
        self._held_lock = threading.Lock()
        self._ended = threading.Event()
        self._renewer = threading.Thread(target=self._keep_renewing, name=f"{self._thread.name}-renewer", daemon=True)
        script = self._client.register_script
        self._release = script(RELEASE)
        self._move_to_dead = script(DEAD_LETTER)
        self._forget_deleted = script(FORGET_DELETED)
        self._tidy = script(TIDY)
        self._hold = self._control.register_script(HOLD)

    def _run(self) -> None:
        self._renewer.start()
        super()._run()

    def _open(self) -> None:
        self._from_now = self._settings.start == "new" and not self._began and not self._began_before()
        super()._open()
        self._from_now = False
        self._record_start()
        try:
            self._renew_held(self._client)  # after a lost connection: which of them are still this consumer's?
        except redis.ResponseError as exc:
            if not _is_missing_group(exc):
                raise
            self._begin_again()

    def _begin(self, stream: str) -> None:
        self._create_group(stream, "$" if self._from_now else BEGINNING)

    def _began_before(self) -> bool:
        key = self._settings.groups_key
        return self._settings.per_topic and bool(self._client.sismember(key, self._group))

    def _record_start(self) -> None:
        """Record that the group has begun, after all streams have: a consumer that is killed before that begins
        again."""
        if self._settings.per_topic and self._settings.start == "new":
            self._client.sadd(self._settings.groups_key, self._group)

    def _create_group(self, stream: str, after: str) -> None:
        try:
            self._client.xgroup_create(stream, self._group, after, mkstream=True)
        except redis.ResponseError as exc:
            if not str(exc).startswith("BUSYGROUP"):
                raise

    def _round(self) -> None:
        try:
            self._acknowledge()
            self._look_for_streams()
            self._remove_forgotten_consumers()
            if not self._backlog:
                deliveries = self._reclaim() if time.monotonic() >= self._reclaim_at else []
                self._take(deliveries or self._read())
            self._handle_backlog()
        except redis.ResponseError as exc:
            if not _is_missing_group(exc):
                raise
            self._begin_again()

    def _begin_again(self) -> None:
        logger.warning(
            "%s: the group %s is gone, as after FLUSHDB; made again from the beginning", self._name, self._group
        )
        self._done.clear()
        self._cursors.clear()
        self._take([])
        for stream in self._streams:
            self._create_group(stream, BEGINNING)
        self._record_start()

    def _read(self) -> list[EntryDelivery]:
        if not self._streams:
            self._stopping.wait(DISCOVER_S)
            return []
        wait_ms = max(1, min(self._block_ms, int((self._reclaim_at - time.monotonic()) * 1000)))
        answer = self._client.xreadgroup(
            self._group, self._consumer, dict.fromkeys(self._streams, ">"), count=self._count, block=wait_ms
        )
        return [EntryDelivery(stream, entry_id, fields, 1) for stream, entry_id, fields in read_entries(answer)]

    def _reclaim(self) -> list[EntryDelivery]:
        """Claims entries that were not renewed for `reclaim_idle`, with how often they were delivered."""
        found: list[tuple[str, str, Fields]] = []
        for stream in self._streams:
            claimed = read_claim(
                self._client.xautoclaim(
                    stream,
                    self._group,
                    self._consumer,
                    min_idle_time=self._settings.reclaim_idle_ms,
                    start_id=self._cursors.get(stream, BEGINNING),
                    count=self._count,
                )
            )
            self._cursors[stream] = claimed.cursor
            found.extend((stream, entry_id, fields) for entry_id, fields in claimed.entries)
            if claimed.still_pending:
                self._forget_deleted(keys=[stream], args=[self._group, self._consumer, HELD_ENTRIES_MAX * 16])
            if claimed.deleted:
                logger.warning(
                    "%s: %d entries of %s were deleted or trimmed before they were handled",
                    self._name,
                    claimed.deleted,
                    stream,
                )
        if all(cursor == BEGINNING for cursor in self._cursors.values()):
            self._reclaim_at = time.monotonic() + max(PAUSE_S_MIN, self._idle_s / RECLAIMS_PER_IDLE)
        return self._counted(found)

    def _counted(self, found: Sequence[tuple[str, str, Fields]]) -> list[EntryDelivery]:
        if not found:
            return []
        with self._client.pipeline(transaction=False) as pipeline:
            for stream, entry_id, _ in found:
                pipeline.xpending_range(stream, self._group, entry_id, entry_id, 1)
            answers = pipeline.execute()
        return [
            EntryDelivery(stream, entry_id, fields, pending[0]["times_delivered"])
            for (stream, entry_id, fields), pending in zip(found, answers, strict=True)
            # A slow handler elsewhere may have finished in between.
            if pending and pending[0]["consumer"] == self._consumer.encode()
        ]

    def _take(self, deliveries: Sequence[EntryDelivery]) -> None:
        self._backlog = deque(deliveries)
        with self._held_lock:
            self._held = dict.fromkeys(delivery.place for delivery in deliveries)
            self._lost.clear()

    def _handle_backlog(self) -> None:
        """Handle what was read. After a lost connection the rest is handled later; at a stop it is released."""
        while self._backlog and not self._stopping.is_set():
            delivery = self._backlog[0]
            self._deliver(delivery)
            self._backlog.popleft()
            with self._held_lock:
                self._held.pop(delivery.place, None)
            self._acknowledge()

    def _deliver(self, delivery: EntryDelivery) -> None:
        with self._held_lock:
            if delivery.place in self._lost:
                return  # this process stood still for so long that another consumer has it now
        try:
            message = from_doc(delivery.fields.get(b"doc"), f"{delivery.stream} {delivery.entry_id}")
        except InvalidDataError as exc:
            self._dead_letter(delivery, "unreadable", str(exc))
            return
        if not self._pattern.matches(message.topic):
            self._done[delivery.place] = None
        elif delivery.deliveries > self._settings.max_deliveries:
            self._dead_letter(
                delivery,
                "abandoned",
                "each consumer that had it ended or lost its connection",
            )
        else:
            self._call(delivery, message)

    def _call(self, delivery: EntryDelivery, message: Message) -> None:
        try:
            self._handle(message)
        except (Exception, SystemExit) as exc:  # a handler that exits has failed like any other
            logger.warning(
                "%s: the handler failed for message %s, delivery %d of %d (%s: %s)",
                self._name,
                message.id,
                delivery.deliveries,
                self._settings.max_deliveries,
                type(exc).__name__,
                exc,
            )
            if delivery.deliveries >= self._settings.max_deliveries:
                self._dead_letter(delivery, "failed", error_text(exc))
        else:
            self._done[delivery.place] = None

    def _dead_letter(self, delivery: EntryDelivery, reason: str, error: str) -> None:
        reasons = {
            "dead_reason": reason,
            "dead_error": error[:ERROR_CHARS_MAX],
            "dead_deliveries": str(delivery.deliveries),
            "dead_entry": delivery.entry_id,
            "dead_group": self._group,
            "dead_consumer": self._consumer,
            "dead_at": iso(time.time_ns() // 1_000_000),
        }
        fields: list[str | bytes] = [part for pair in reasons.items() for part in pair]
        for name, value in list(delivery.fields.items())[:DEAD_FIELDS_MAX]:
            fields += [name, value]
        dead = self._settings.dead_of(delivery.stream)
        self._move_to_dead(keys=[delivery.stream, dead], args=[self._group, self._consumer, delivery.entry_id, *fields])
        logger.warning("%s: entry %s is in %s now: %s (%s)", self._name, delivery.entry_id, dead, reason, error)

    def _acknowledge(self) -> None:
        for stream, entry_ids in _by_stream(self._done):
            self._client.xack(stream, self._group, *entry_ids)
        self._done.clear()

    def _remove_forgotten_consumers(self) -> None:
        if time.monotonic() >= self._tidy_at:
            for stream in self._streams:
                self._tidy(keys=[stream], args=[self._group, self._settings.forget_consumers_ms, ""])
            self._tidy_at = time.monotonic() + TIDY_S

    def _keep_renewing(self) -> None:
        while not self._ended.wait(max(PAUSE_S_MIN, self._idle_s / HOLDS_PER_IDLE)):
            # Without an answer they are not renewed, and another consumer gets them: that is the promise.
            with contextlib.suppress(redis.RedisError, OSError):
                self._renew_held(self._control)

    def _renew_held(self, client: Any) -> None:
        with self._held_lock:
            held = list(self._held)
        for stream, entry_ids in _by_stream(held):
            lost: list[bytes] = self._hold(keys=[stream], args=[self._group, self._consumer, *entry_ids], client=client)
            with self._held_lock:
                self._lost.update((stream, each.decode()) for each in lost)

    def _finish(self) -> None:
        self._ended.set()
        self._renewer.join()
        with self._held_lock:
            held = list(self._held)
            self._held.clear()
        self._acknowledge()
        for stream, entry_ids in _by_stream(held):
            idle_ms = self._settings.reclaim_idle_ms
            self._release(keys=[stream], args=[self._group, self._consumer, idle_ms, *entry_ids])
        if self._removed_at_end:
            for stream in self._streams:
                self._tidy(keys=[stream], args=[self._group, 0, self._consumer])


def _by_stream(places: Iterable[tuple[str, str]]) -> list[tuple[str, list[str]]]:
    grouped: dict[str, list[str]] = {}
    for stream, entry_id in places:
        grouped.setdefault(stream, []).append(entry_id)
    return list(grouped.items())


def _is_missing_group(exc: redis.ResponseError) -> bool:
    # Not only at the beginning: Redis 6.2 puts words of its own before the error of a command in a script.
    return "NOGROUP" in str(exc) or "no such key" in str(exc)


# --- scripts -----------------------------------------------------------------------------------------------------
#
# Each runs atomically inside Redis. Where a command in a script can fail, it stands before those that would hide the
# failure.

# Keep entries that are being handled from being reclaimed. Answers with those that are not this consumer's any more.
# KEYS: stream. ARGV: group, consumer, then entry ids.
HOLD = """
local lost = {}
for n = 3, #ARGV do
    local pending = redis.call('XPENDING', KEYS[1], ARGV[1], ARGV[n], ARGV[n], 1)[1]
    if pending and pending[2] == ARGV[2] then
        redis.call('XCLAIM', KEYS[1], ARGV[1], ARGV[2], 0, ARGV[n], 'JUSTID')
    else
        lost[#lost + 1] = ARGV[n]
    end
end
return lost
"""

# Release entries that were read but never handled: reclaimable at once, and this delivery is not counted.
# KEYS: stream. ARGV: group, consumer, idle ms, then entry ids.
RELEASE = """
local released = 0
for n = 4, #ARGV do
    local pending = redis.call('XPENDING', KEYS[1], ARGV[1], ARGV[n], ARGV[n], 1)[1]
    if pending and pending[2] == ARGV[2] then
        redis.call('XCLAIM', KEYS[1], ARGV[1], ARGV[2], 0, ARGV[n],
                   'IDLE', ARGV[3], 'RETRYCOUNT', pending[4] - 1, 'JUSTID')
        released = released + 1
    end
end
return released
"""

# Move one entry to the dead stream, unless another consumer has it by now. Written there before it is acked here.
# KEYS: stream, dead stream. ARGV: group, consumer, entry id, then names and values of the dead entry's fields.
DEAD_LETTER = """
local pending = redis.call('XPENDING', KEYS[1], ARGV[1], ARGV[3], ARGV[3], 1)[1]
if not pending or pending[2] ~= ARGV[2] then
    return 0
end
redis.call('XADD', KEYS[2], '*', unpack(ARGV, 4))
redis.call('XACK', KEYS[1], ARGV[1], ARGV[3])
return 1
"""

# Redis 6.2 keeps deleted entries pending and claims them as nil forever: ack them.
# KEYS: stream. ARGV: group, consumer, how many to examine.
FORGET_DELETED = """
local forgotten = 0
for _, pending in ipairs(redis.call('XPENDING', KEYS[1], ARGV[1], '-', '+', ARGV[3], ARGV[2])) do
    if #redis.call('XRANGE', KEYS[1], pending[1], pending[1]) == 0 then
        forgotten = forgotten + redis.call('XACK', KEYS[1], ARGV[1], pending[1])
    end
end
return forgotten
"""

# Remove consumers that have been idle for long and hold nothing. Looking and deleting must be atomic: an entry that is
# delivered in between would be lost.
# KEYS: stream. ARGV: group, idle ms, and the only name to consider or '' for all.
TIDY = """
local removed = 0
for _, pairs_of in ipairs(redis.call('XINFO', 'CONSUMERS', KEYS[1], ARGV[1])) do
    local consumer = {}
    for n = 1, #pairs_of, 2 do
        consumer[pairs_of[n]] = pairs_of[n + 1]
    end
    if consumer.pending == 0 and consumer.idle >= tonumber(ARGV[2])
       and (ARGV[3] == '' or ARGV[3] == consumer.name) then
        redis.call('XGROUP', 'DELCONSUMER', KEYS[1], ARGV[1], consumer.name)
        removed = removed + 1
    end
end
return removed
"""


# --- pub/sub -----------------------------------------------------------------------------------------------------


def channels_of(prefix: str, pattern: Pattern) -> str:
    """A pattern of Redis that matches at least what ours does; the consumer then checks ours."""
    known = _GLOB.sub(r"\\\1", f"{prefix}:{pattern.literal_prefix}")
    return known if pattern.is_exact else f"{known}*"


class PubSubConsumer(RedisConsumer):
    def __init__(self, spec: ConsumerSpec, prefix: str) -> None:
        super().__init__(spec)
        self._channels = channels_of(prefix, spec.pattern)
        self._redis = make_client(spec.url, connections=1)
        self._pubsub: PubSub | None = None
        self._closing_lock = threading.Lock()

    def _open(self) -> None:
        """Returns when the server has confirmed: messages published after that arrive."""
        self._close()
        pubsub = self._redis.pubsub()
        self._pubsub = pubsub
        pubsub.psubscribe(self._channels)
        until = time.monotonic() + ANSWER_TIMEOUT_S
        while (remaining := until - time.monotonic()) > 0:
            answer = pubsub.get_message(timeout=remaining)
            if answer is not None and answer["type"] == "psubscribe":
                # Else the client would reconnect by itself, at once and only once, and report nothing.
                pubsub.patterns.clear()
                return
        raise redis.TimeoutError("the subscription was not confirmed")

    def _connected_again(self) -> None:
        logger.warning("%s: connected again; messages published in between are lost", self._name)

    def _round(self) -> None:
        assert self._pubsub is not None
        answer = self._pubsub.get_message(timeout=PUBSUB_WAIT_S)
        if answer is not None and answer["type"] == "pmessage" and not self._stopping.is_set():
            self._handle_once(answer["data"], f"channel {answer['channel'].decode(errors='replace')}")

    def _wake(self) -> None:
        with self._closing_lock:
            pubsub: Any = self._pubsub
            # The server's confirmation ends the wait.
            if pubsub is not None and pubsub.subscribed:
                with contextlib.suppress(Exception):  # the thread may close it meanwhile
                    pubsub.punsubscribe()

    def _close(self) -> None:
        with self._closing_lock, contextlib.suppress(redis.RedisError, OSError):
            pubsub, self._pubsub = self._pubsub, None
            if pubsub is not None:
                pubsub.close()
            self._redis.connection_pool.disconnect()
