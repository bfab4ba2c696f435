"""Copies into another log: a file, a server, a PostgreSQL database; whatever `headwater.open` opens."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from headwater.errors import (
    ClosedError,
    HeadwaterError,
    InvalidInputError,
    TransportFailedError,
    UnauthorizedError,
    UnavailableError,
    UnreachableError,
)
from headwater.formats import iso
from headwater.message import BATCH_MESSAGES_MAX, EXTRA_FIELDS, HEADERS_BYTES_MAX, Message, readable
from headwater.transports.base import BaseTransport, batches

logger = logging.getLogger("headwater")

ORIGIN_SEQ = "origin-seq"
ORIGIN_PUBLISHED_AT = "origin-published-at"
ORIGIN_UNREADABLE = "origin-unreadable"
ORIGIN_BYTES_MAX = 128
BATCH_BYTES_MAX = 2 * 1024 * 1024  # with room to spare in a server's frame
ENVELOPE_BYTES = 256  # what a message has beside its data and free headers, about

Published = tuple[str, Any, Mapping[str, Any]]

_OPTIONS = tuple(field.option for field in EXTRA_FIELDS if field.kind != "json")


class OpenedLog(Protocol):
    """The other log; `headwater.open` returns one."""

    def publish_many(self, messages: Iterable[Any], /) -> object: ...

    def close(self) -> None: ...


class LogTransport(BaseTransport):
    """A copy keeps everything but its seq and the time it was published, which the other log assigns. The origin's
    seq and time are in the free headers `origin-seq` and `origin-published-at`; a copy of a copy keeps the first
    log's. The id is kept, so the other log recognises a repeated copy within its dedupe window.

    `open_log` is called at once. It is called again if the log is unreachable then, or a client gives it up later.
    """

    recognises_ids = True
    read_instead = "Open the log with headwater.open and subscribe there"

    def __init__(self, name: str, open_log: Callable[[], OpenedLog]) -> None:
        self.name = name
        self._open_log = open_log
        self._log: OpenedLog | None = None
        self._refusal: HeadwaterError | None = None  # why it could not be opened
        self._reopen_at = 0.0
        self._lock = threading.Lock()
        try:
            self._opened()
        except (UnreachableError, UnavailableError) as exc:
            self._connected = False
            logger.warning("%s: unreachable, will be tried again: %s", name, exc)

    @property
    def feeds(self) -> tuple[object, ...]:
        """The other log, if it is open: a forwarder refuses to feed the log that it reads."""
        return () if self._log is None else (self._log,)

    def _publish(self, messages: Sequence[Message]) -> None:
        """Publish in one transaction of the other log; in several above BATCH_BYTES_MAX. What the other log cannot hold
        is refused with its own InvalidInputError: sending it again will not help."""
        self._check_open()
        for part in batches(messages, _size_of, BATCH_MESSAGES_MAX, BATCH_BYTES_MAX):
            try:
                log = self._opened()
            except Exception as exc:  # also one of its options: that is no fault of the message
                raise self._failed(exc) from exc
            try:
                log.publish_many([copy_of(message) for message in part])
            except InvalidInputError:
                raise
            except Exception as exc:
                if isinstance(exc, (UnreachableError, UnauthorizedError)):  # a client that has given up stays so
                    self._drop(log)
                raise self._failed(exc) from exc
            self._connected = True

    def _opened(self) -> OpenedLog:
        with self._lock:
            self._check_open()
            if self._log is None:
                if self._refusal is not None and time.monotonic() < self._reopen_at:
                    raise self._refusal
                began = time.monotonic()
                try:
                    self._log = self._open_log()
                except HeadwaterError as exc:
                    # A client waits long for its first connection; for as long again, publishing fails at once.
                    now = time.monotonic()
                    self._refusal, self._reopen_at = exc, now + (now - began)
                    raise
                self._refusal = None
            return self._log

    def _drop(self, log: OpenedLog) -> None:
        with self._lock:
            if self._log is log:
                self._log = None
                log.close()

    def _failed(self, exc: Exception) -> TransportFailedError | ClosedError:
        if isinstance(exc, ClosedError) and self._closed:
            return exc
        self._connected = False
        return TransportFailedError(
            exc.why if isinstance(exc, HeadwaterError) else f"{type(exc).__name__}: {exc}",
            where=self.name,
            next=exc.next if isinstance(exc, HeadwaterError) else "",
        )

    def close(self) -> None:
        with self._lock:
            self._closed = True
            log, self._log = self._log, None
        if log is not None:
            log.close()


def copy_of(message: Message) -> Published:
    """What to publish elsewhere: topic, data and options as `Log.publish_many` takes them."""
    headers = message.headers
    if len(message.raw_headers) <= HEADERS_BYTES_MAX - ORIGIN_BYTES_MAX:
        if message.seq:  # 0: it never was in a log
            headers.setdefault(ORIGIN_SEQ, message.seq)
        headers.setdefault(ORIGIN_PUBLISHED_AT, iso(message.published_ms))
    options: dict[str, Any] = {"id": message.id, "headers": headers}
    options.update((name, value) for name in _OPTIONS if (value := getattr(message, name)) is not None)
    if not readable(message.raw):  # put in by hand; no log takes it but as text
        headers[ORIGIN_UNREADABLE] = True
        return message.topic, bytes(message.raw).decode(errors="replace"), options
    return message.topic, message.raw, options  # to the letter


def _size_of(message: Message) -> int:
    return message.size + len(message.raw_headers) + ENVELOPE_BYTES
