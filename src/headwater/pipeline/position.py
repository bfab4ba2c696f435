"""The position of a stream or a lake, kept in the log as a subscription: it shows with its lag, retention spares what
a running batch reads, and messages deleted before they were read are recorded as gaps."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import secrets
import socket
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import msgspec

from headwater.broker.deliveries import load_held
from headwater.delivery.filters import WHERE_CHARS_MAX, WHERE_TERMS_MAX
from headwater.delivery.lease import Lease, release, renew
from headwater.delivery.window import WindowState
from headwater.errors import HeadwaterError, SubscriptionError, SubscriptionMismatchError
from headwater.pipeline.logs import backend_of, transact
from headwater.ports.clock import Clock
from headwater.ports.records import Gap, SubscriptionRecord, SubscriptionSpec
from headwater.ports.store import Store, Writer
from headwater.topics import Pattern

LEASE_MS = 20_000
RENEWALS_PER_LEASE = 4
STOP_S = 5.0  # how long release() waits for a renewal under way

logger = logging.getLogger("headwater.pipeline")
_replace = msgspec.structs.replace


class Position:
    """Every matching message at or below `floor` is done, (floor, delivered] is being read.

    One process at a time holds a position. Opening it takes it over at once, since Spark does not start a query twice;
    the former holder's next step fails with LeaseLostError. A thread renews the lease while a batch runs.
    """

    def __init__(self, store: Store, record: SubscriptionRecord, found_at: int | None, clock: Clock) -> None:
        self.name = record.id
        self.found_at = found_at
        """Where it was when it was opened; None if it was created then."""
        self.read = store.read
        self._store = store
        self._clock = clock
        self._lease = record.lease
        self._window = record.window
        self._released = threading.Event()
        self._renewer = threading.Thread(target=self._keep_lease, name=f"headwater-position-{record.id}", daemon=True)
        self._renewer.start()

    @classmethod
    def open(
        cls, path: str, name: str, patterns: Sequence[Pattern], *, start: int, clock: Clock | None = None
    ) -> Position:
        """Take the position of that name, or create it at `start`."""
        owner = f"spark:{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(4)}"
        store, log_clock = backend_of(path).open()
        clock = clock or log_clock

        def take(writer: Writer) -> tuple[SubscriptionRecord, int | None]:
            now_ms, spec, found = clock.now_ms(), _spec(patterns), writer.subscription(name)
            if found is not None and _without_topics(found.spec) != _without_topics(spec):
                raise SubscriptionMismatchError(
                    f"{name!r} is a subscription of another kind, not the position of a stream",
                    where=name,
                    next="Give the stream another name with the option `subscription`",
                )
            record = found or SubscriptionRecord(name, spec, now_ms, now_ms, WindowState(start, start))
            lease = Lease(owner, record.lease.fence + 1, now_ms + LEASE_MS)
            record = _replace(record, spec=spec, lease=lease, active_ms=now_ms)
            writer.save_subscription(record)
            return record, None if found is None else found.window.floor

        try:
            return cls(store, *transact(store, take, alone=True), clock)
        except BaseException:
            store.close()
            raise

    def begin(self, start: int, end: int) -> None:
        """(start, end] is being read, and all up to `start` is done, even if the position was further on."""
        window = WindowState(start, end)
        transact(self._store, lambda writer: self._save(writer, window=window))
        self._window = window

    def commit(self, end: int) -> None:
        """Store that all up to `end` is done."""
        if self._window != WindowState(end, end):
            self.begin(end, end)

    def gaps(self) -> list[Gap]:
        """What was deleted before it was read, as far as it was not reported yet."""
        with self.read() as reader:
            return reader.gaps(self.name)

    def mark_gaps_reported(self) -> None:
        def mark(writer: Writer) -> None:
            self._held(writer)
            writer.mark_gaps_reported(self.name)

        transact(self._store, mark)

    def renew(self) -> None:
        transact(self._store, self._save)

    def release(self) -> None:
        """Give up the lease; the position stays where it is."""
        if self._released.is_set():
            return
        self._released.set()
        self._renewer.join(STOP_S)

        def give_up(writer: Writer) -> None:
            with suppress(SubscriptionError):  # another holds it, or it was removed
                record = self._held(writer)
                writer.save_subscription(_replace(record, lease=release(record.lease)))

        try:
            transact(self._store, give_up)
        finally:
            self._store.close()

    def __enter__(self) -> Position:
        return self

    def __exit__(self, *exc: object) -> None:
        self.release()

    def _held(self, writer: Writer) -> SubscriptionRecord:
        return load_held(writer, self.name, self._lease.owner, self._lease.fence)

    def _save(self, writer: Writer, **changes: Any) -> None:
        now_ms = self._clock.now_ms()
        record = self._held(writer)
        lease = renew(record.lease, now_ms, LEASE_MS)
        writer.save_subscription(_replace(record, lease=lease, active_ms=now_ms, **changes))

    def _keep_lease(self) -> None:
        while not self._released.wait(LEASE_MS / RENEWALS_PER_LEASE / 1000):
            try:
                self.renew()
            except HeadwaterError as exc:  # the next step fails if it is still so
                logger.warning("position %s: its lease was not renewed: %s", self.name, exc)


def position_name(patterns: Sequence[Pattern]) -> str:
    """The same for the same topics."""
    topics = "\n".join(sorted({pattern.text for pattern in patterns}) or [">"])
    return f"spark:{hashlib.sha256(topics.encode()).hexdigest()[:12]}"


def _spec(patterns: Sequence[Pattern]) -> SubscriptionSpec:
    spec = SubscriptionSpec(pattern=">", where=_where(patterns), lease_ms=LEASE_MS, dead_letter_expired=False)
    return _replace(spec, pattern=patterns[0].text, dialect=patterns[0].dialect) if len(patterns) == 1 else spec


def _where(patterns: Sequence[Pattern]) -> str | None:
    """Several patterns as a `where`, for a subscription has one pattern only. It may match more, which counts as lag,
    but never less. None if they are too many to be written down."""
    if not 2 <= len(patterns) <= WHERE_TERMS_MAX or any(pattern.is_all for pattern in patterns):
        return None
    text = " or ".join(
        f"topic {'==' if each.is_exact else 'starts with'} {json.dumps(each.literal_prefix, ensure_ascii=False)}"
        for each in patterns
    )
    return text if len(text) <= WHERE_CHARS_MAX else None


def _without_topics(spec: SubscriptionSpec) -> SubscriptionSpec:
    """A query that restarts with other topics is still the same stream."""
    return _replace(spec, pattern="", dialect="nats", where=None)
