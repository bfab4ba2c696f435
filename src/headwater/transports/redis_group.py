"""Reading Redis streams in a group: its consumers share the entries, and one that fails or dies passes its on."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import redis

from headwater.errors import InvalidData
from headwater.message import Message, iso
from headwater.ports.transport import Handle
from headwater.topics import Pattern
from headwater.transports import redis_scripts
from headwater.transports.redis_connection import RedisAddress
from headwater.transports.redis_entries import Fields, from_fields
from headwater.transports.redis_reading import (
    BEGINNING,
    DISCOVER_S,
    HELD_ENTRIES_MAX,
    StreamReader,
    StreamSettings,
    read_entries,
)

TIDY_S = 3600.0
ERROR_CHARS_MAX = 2_000
DEAD_FIELDS_MAX = 256  # of an entry that somebody else wrote
HOLDS_PER_IDLE = 4  # how often held entries are renewed within the time after which they could be reclaimed
RECLAIMS_PER_IDLE = 2
PAUSE_S_MIN = 0.01

logger = logging.getLogger("headwater")


class Delivery(msgspec.Struct, frozen=True):
    """An entry on its way to the handler, for the n-th time."""

    stream: str
    entry_id: str
    fields: Fields
    deliveries: int

    @property
    def place(self) -> tuple[str, str]:
        return self.stream, self.entry_id


class Claimed(msgspec.Struct, frozen=True):
    """An answer of XAUTOCLAIM. Deleted entries come as nothing from Redis 6.2, which keeps them pending, and as a list
    of their own from Redis 7, which has forgotten them already."""

    cursor: str
    entries: Sequence[tuple[str, Fields]]
    deleted: int
    still_pending: bool


def read_claim(answer: Sequence[Any]) -> Claimed:
    cursor, entries = answer[0], answer[1]
    there = [(entry_id.decode(), fields or {}) for entry_id, fields in entries if entry_id is not None]
    missing = len(entries) - len(there)
    return Claimed(
        cursor=cursor.decode(),
        entries=there,
        deleted=missing + (len(answer[2]) if len(answer) > 2 else 0),
        still_pending=missing > 0,
    )


class GroupReader(StreamReader):
    """One consumer of a group. An entry is acked after its handler returned. If the handler raised, it stays pending
    and is delivered again, to any consumer, after `reclaim_idle`; if the process died, likewise. While it is being
    handled it is renewed, so a handler may take its time. After `max_deliveries` it goes to the dead stream."""

    def __init__(
        self,
        name: str,
        address: RedisAddress,
        settings: StreamSettings,
        pattern: Pattern,
        handle: Handle,
        report: Callable[[bool], None],
        *,
        group: str,
        consumer: str,
        leaves_nothing: bool,
    ) -> None:
        """`leaves_nothing`: the consumer's name is of no use to anybody else, so it goes when this stops."""
        super().__init__(name, address, settings, pattern, handle, report)
        self._group = group
        self._consumer = consumer
        self._leaves_nothing = leaves_nothing
        self._idle_s = settings.reclaim_idle_ms / 1000
        self._from_now = False
        self._backlog: deque[Delivery] = deque()
        self._cursors: dict[str, str] = {}
        self._reclaim_at = 0.0
        self._tidy_at = 0.0
        # Handled, but the ack may not have arrived.
        self._done: dict[tuple[str, str], None] = {}
        self._held: dict[tuple[str, str], None] = {}
        self._lost: set[tuple[str, str]] = set()
        self._held_lock = threading.Lock()
        self._ended = threading.Event()
        self._keeper = threading.Thread(target=self._keep, name=f"{self._thread.name}-keeper", daemon=True)
        script = self._client.register_script
        self._release = script(redis_scripts.RELEASE)
        self._bury_entry = script(redis_scripts.BURY)
        self._forget_deleted = script(redis_scripts.FORGET_DELETED)
        self._tidy = script(redis_scripts.TIDY)
        self._hold = self._aside.register_script(redis_scripts.HOLD)

    def _run(self) -> None:
        self._keeper.start()
        super()._run()

    def _open(self) -> None:
        self._from_now = self._settings.start == "new" and not self._began and not self._began_before()
        super()._open()
        self._from_now = False
        self._note_that_it_began()
        try:
            self._renew_held(self._client)  # after a lost connection: which of them are still this consumer's?
        except redis.ResponseError as exc:
            if not _says_that_the_group_is_gone(exc):
                raise
            self._begin_again()

    def _begin(self, stream: str) -> None:
        self._create_group(stream, "$" if self._from_now else BEGINNING)

    def _began_before(self) -> bool:
        key = self._settings.groups_key
        return self._settings.per_topic and bool(self._client.sismember(key, self._group))

    def _note_that_it_began(self) -> None:
        """After all streams that there are have: who is killed before that begins anew."""
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
            if not _says_that_the_group_is_gone(exc):
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
        self._note_that_it_began()

    def _read(self) -> list[Delivery]:
        if not self._streams:
            self._stopping.wait(DISCOVER_S)
            return []
        wait_ms = max(1, min(self._block_ms, int((self._reclaim_at - time.monotonic()) * 1000)))
        answer = self._client.xreadgroup(
            self._group, self._consumer, dict.fromkeys(self._streams, ">"), count=self._count, block=wait_ms
        )
        return [Delivery(stream, entry_id, fields, 1) for stream, entry_id, fields in read_entries(answer)]

    def _reclaim(self) -> list[Delivery]:
        """What nobody has touched for `reclaim_idle` is this consumer's now, with how often it was delivered."""
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

    def _counted(self, found: Sequence[tuple[str, str, Fields]]) -> list[Delivery]:
        if not found:
            return []
        with self._client.pipeline(transaction=False) as pipeline:
            for stream, entry_id, _ in found:
                pipeline.xpending_range(stream, self._group, entry_id, entry_id, 1)
            answers = pipeline.execute()
        return [
            Delivery(stream, entry_id, fields, pending[0]["times_delivered"])
            for (stream, entry_id, fields), pending in zip(found, answers, strict=True)
            # A handler that took longer than anybody believed may have finished in between.
            if pending and pending[0]["consumer"] == self._consumer.encode()
        ]

    def _take(self, deliveries: Sequence[Delivery]) -> None:
        self._backlog = deque(deliveries)
        with self._held_lock:
            self._held = dict.fromkeys(delivery.place for delivery in deliveries)
            self._lost.clear()

    def _handle_backlog(self) -> None:
        """If the connection goes in between, the rest stays for after it is back. At a stop, the rest is given back."""
        while self._backlog and not self._stopping.is_set():
            delivery = self._backlog[0]
            self._deliver(delivery)
            self._backlog.popleft()
            with self._held_lock:
                self._held.pop(delivery.place, None)
            self._acknowledge()

    def _deliver(self, delivery: Delivery) -> None:
        with self._held_lock:
            if delivery.place in self._lost:
                return  # this process stood still for so long that another has it now
        try:
            message = from_fields(delivery.fields, f"{delivery.stream} {delivery.entry_id}")
        except InvalidData as exc:
            self._bury(delivery, "unreadable", str(exc))
            return
        if not self._pattern.matches(message.topic):
            self._done[delivery.place] = None
        elif delivery.deliveries > self._settings.max_deliveries:
            self._bury(delivery, "abandoned", "each consumer that had it ended, or lost its connection, without a word")
        else:
            self._call(delivery, message)

    def _call(self, delivery: Delivery, message: Message) -> None:
        try:
            self._handle(message)
        except (Exception, SystemExit) as exc:  # a handler that wants to exit has failed like any other
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
                self._bury(delivery, "failed", f"{type(exc).__name__}: {exc}")
        else:
            self._done[delivery.place] = None

    def _bury(self, delivery: Delivery, reason: str, error: str) -> None:
        told = {
            "dead_reason": reason,
            "dead_error": error[:ERROR_CHARS_MAX],
            "dead_deliveries": str(delivery.deliveries),
            "dead_entry": delivery.entry_id,
            "dead_group": self._group,
            "dead_consumer": self._consumer,
            "dead_at": iso(time.time_ns() // 1_000_000),
        }
        fields: list[str | bytes] = [part for pair in told.items() for part in pair]
        for name, value in list(delivery.fields.items())[:DEAD_FIELDS_MAX]:
            fields += [name, value]
        dead = self._settings.dead_of(delivery.stream)
        self._bury_entry(keys=[delivery.stream, dead], args=[self._group, self._consumer, delivery.entry_id, *fields])
        logger.warning("%s: entry %s is in %s now: %s (%s)", self._name, delivery.entry_id, dead, reason, error)

    def _acknowledge(self) -> None:
        by_stream: dict[str, list[str]] = {}
        for stream, entry_id in self._done:
            by_stream.setdefault(stream, []).append(entry_id)
        for stream, entry_ids in by_stream.items():
            self._client.xack(stream, self._group, *entry_ids)
        self._done.clear()

    def _remove_forgotten_consumers(self) -> None:
        if time.monotonic() >= self._tidy_at:
            for stream in self._streams:
                self._tidy(keys=[stream], args=[self._group, self._settings.forget_consumers_ms, ""])
            self._tidy_at = time.monotonic() + TIDY_S

    def _keep(self) -> None:
        while not self._ended.wait(max(PAUSE_S_MIN, self._idle_s / HOLDS_PER_IDLE)):
            # Without an answer they are not renewed, and another consumer will have them: that is the promise.
            with contextlib.suppress(redis.RedisError, OSError):
                self._renew_held(self._aside)

    def _renew_held(self, client: Any) -> None:
        with self._held_lock:
            held = list(self._held)
        for stream, entry_ids in _by_stream(held):
            lost: list[bytes] = self._hold(keys=[stream], args=[self._group, self._consumer, *entry_ids], client=client)
            with self._held_lock:
                self._lost.update((stream, each.decode()) for each in lost)

    def _farewell(self) -> None:
        self._ended.set()
        self._keeper.join()
        with self._held_lock:
            held = list(self._held)
            self._held.clear()
        self._acknowledge()
        for stream, entry_ids in _by_stream(held):
            idle_ms = self._settings.reclaim_idle_ms
            self._release(keys=[stream], args=[self._group, self._consumer, idle_ms, *entry_ids])
        if self._leaves_nothing:
            for stream in self._streams:
                self._tidy(keys=[stream], args=[self._group, 0, self._consumer])


def _by_stream(places: Sequence[tuple[str, str]]) -> list[tuple[str, list[str]]]:
    grouped: dict[str, list[str]] = {}
    for stream, entry_id in places:
        grouped.setdefault(stream, []).append(entry_id)
    return list(grouped.items())


def _says_that_the_group_is_gone(exc: redis.ResponseError) -> bool:
    # Not only at the beginning: Redis 6.2 puts words of its own before the error of a command in a script.
    return "NOGROUP" in str(exc) or "no such key" in str(exc)
