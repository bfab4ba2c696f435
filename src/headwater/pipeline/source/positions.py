"""Where a stream stands, kept in the log as a subscription: so it shows with its lag, retention spares what a running
batch reads, and what was deleted before the stream came to it is told as a gap."""

from __future__ import annotations

import hashlib
import logging
import os
import secrets
import socket
import threading
from collections.abc import Sequence
from typing import Any

import msgspec

from headwater.broker.claims import load_held
from headwater.delivery.lease import Lease, release, renew
from headwater.delivery.window import WindowState
from headwater.errors import HeadwaterError, SubscriptionMismatch
from headwater.pipeline.source.conditions import topics_where
from headwater.pipeline.source.place import Range, log_at
from headwater.pipeline.source.writing import changed
from headwater.ports.clock import Clock
from headwater.ports.records import Gap, SubscriptionRecord, SubscriptionSpec
from headwater.ports.store import Store, Writer
from headwater.topics import Pattern

LEASE_MS = 20_000
RENEWALS_PER_LEASE = 4
STOP_S = 5.0  # how long release() waits for a renewal that is under way

logger = logging.getLogger("headwater.pipeline")
_replace = msgspec.structs.replace


class Position:
    """A stream's place in a log: everything matching at or below `floor` is done, (floor, delivered] is being read.

    One process at a time holds it. Who opens it takes it over at once, since Spark does not start a query twice; the
    former holder's next step fails with LeaseLost. A thread keeps the lease alive while a batch runs.
    """

    def __init__(self, store: Store, record: SubscriptionRecord, is_new: bool, clock: Clock) -> None:
        self.name = record.id
        self.is_new = is_new
        self.found_at = record.window.floor
        """Where it stood when it was opened."""
        self._store = store
        self._clock = clock
        self._lease = record.lease
        self._window = record.window
        self._released = threading.Event()
        self._keeper = threading.Thread(target=self._keep, name=f"headwater-position-{record.id}", daemon=True)
        self._keeper.start()

    @classmethod
    def open(
        cls,
        path: str,
        name: str | None,
        patterns: Sequence[Pattern],
        *,
        start: int | None = None,
        clock: Clock | None = None,
    ) -> Position:
        """Take the position of that name, or make it: at `start`, or else at the end of the log."""
        spec, id = position_spec(patterns), name or position_name(patterns)
        owner = f"spark:{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(4)}"
        store, its_clock = log_at(path).open()
        clock = clock or its_clock
        try:
            now_ms = clock.now_ms()
            record, is_new = changed(store, lambda writer: _taken(writer, id, spec, owner, start, now_ms), alone=True)
        except BaseException:
            store.close()
            raise
        return cls(store, record, is_new, clock)

    def begin(self, start: int, end: int) -> None:
        """(start, end] is being read, and everything up to `start` is done, also if the position was further on."""
        self._move(WindowState(start, end))

    def commit(self, end: int) -> None:
        """Everything up to `end` is done."""
        if self._window != WindowState(end, end):
            self._move(WindowState(end, end))

    def look(self) -> tuple[int, list[Gap]]:
        """The last seq of the log, and what was deleted before it was read, as far as it was not told yet."""
        with self._store.read() as reader:
            return reader.last_seq(), reader.gaps(self.name)

    def last_seq(self) -> int:
        return self.look()[0]

    def gaps(self) -> list[Gap]:
        return self.look()[1]

    def mark_gaps_told(self) -> None:
        def mark(writer: Writer) -> None:
            self._held(writer)
            writer.mark_gaps_told(self.name)

        changed(self._store, mark)

    def pruned(self, asked: Range) -> list[tuple[int, int]]:
        """Runs of a range that retention deleted, whether or not anybody wanted them."""
        with self._store.read() as reader:
            return reader.pruned(asked.after + 1, asked.upto)

    def release(self) -> None:
        """Give it back; it stays where it is."""
        if self._released.is_set():
            return
        self._released.set()
        self._keeper.join(STOP_S)
        try:
            changed(self._store, self._give_back)
        finally:
            self._store.close()

    def _give_back(self, writer: Writer) -> None:
        record = writer.subscription(self.name)
        if record is not None and record.lease.held_by(self._lease.owner, self._lease.fence):
            writer.save_subscription(_replace(record, lease=release(record.lease)))

    def __enter__(self) -> Position:
        return self

    def __exit__(self, *exc: object) -> None:
        self.release()

    def _move(self, window: WindowState) -> None:
        changed(self._store, lambda writer: self._save(writer, window=window))
        self._window = window

    def _held(self, writer: Writer) -> SubscriptionRecord:
        return load_held(writer, self.name, self._lease.owner, self._lease.fence)

    def _save(self, writer: Writer, **changes: Any) -> None:
        now_ms = self._clock.now_ms()
        record = self._held(writer)
        lease = renew(record.lease, now_ms, LEASE_MS)
        writer.save_subscription(_replace(record, lease=lease, active_ms=now_ms, **changes))

    def _keep(self) -> None:
        while not self._released.wait(LEASE_MS / RENEWALS_PER_LEASE / 1000):
            try:
                self.renew()
            except HeadwaterError as exc:  # the next step says it loudly, if it is still so
                logger.warning("position %s: its lease was not renewed: %s", self.name, exc)

    def renew(self) -> None:
        changed(self._store, self._save)


def position_name(patterns: Sequence[Pattern]) -> str:
    """The same for the same topics."""
    topics = "\n".join(sorted({pattern.text for pattern in patterns}) or [">"])
    return f"spark:{hashlib.sha256(topics.encode()).hexdigest()[:12]}"


def position_spec(patterns: Sequence[Pattern]) -> SubscriptionSpec:
    only = patterns[0] if len(patterns) == 1 else None
    return SubscriptionSpec(
        pattern=">" if only is None else only.text,
        dialect="nats" if only is None else only.dialect,
        where=topics_where(patterns),
        lease_ms=LEASE_MS,
        bury_expired=False,
    )


def _taken(
    writer: Writer, id: str, spec: SubscriptionSpec, owner: str, start: int | None, now_ms: int
) -> tuple[SubscriptionRecord, bool]:
    record = writer.subscription(id)
    is_new = record is None
    if record is None:
        at = writer.last_seq() if start is None else start
        record = SubscriptionRecord(id, spec, now_ms, now_ms, WindowState(at, at))
    elif _but_topics(record.spec) != _but_topics(spec):
        raise SubscriptionMismatch(
            f"{id!r} is a subscription of another kind, not the position of a stream",
            where=id,
            next="Give the stream another name with the option `subscription`",
        )
    lease = Lease(owner, record.lease.fence + 1, now_ms + LEASE_MS)
    record = _replace(record, spec=spec, lease=lease, active_ms=now_ms)
    writer.save_subscription(record)
    return record, is_new


def _but_topics(spec: SubscriptionSpec) -> SubscriptionSpec:
    """A query may be restarted with other topics, and is still the same stream."""
    return _replace(spec, pattern="", dialect="nats", where=None)
