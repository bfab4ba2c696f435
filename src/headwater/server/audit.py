"""The audit trail: refusals of clients, and changes that clients made.

Each event is one line in the log, and one JSON object a line in the file of `server.audit`. A thread of its own appends
them, so that a slow or full disk delays no client. Lines that could not be written are counted, and the count is the
first line when writing works again. A file that was renamed (by logrotate) is left alone, and a new one is made.
"""

from __future__ import annotations

import errno
import logging
import os
import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import msgspec

from headwater.errors import ClosedError, HeadwaterError, InvalidConfigurationError, StoreError
from headwater.formats import iso
from headwater.ports.clock import Clock
from headwater.protocol.jsonrpc import Fault
from headwater.server.budget import RateLimit
from headwater.server.logging import logger

TEXT_CHARS_MAX = 200  # of one value: clients choose some of them
LISTED_MAX = 20  # of a list
LINES_WAITING_MAX = 10_000
LINES_AT_ONCE = 500
CLOSE_S = 2.0
# Refusals are recorded at this rate, so that a client that is refused without end does not fill the disk; the next line
# says how many were left out.
REFUSED_PER_SECOND, REFUSED_BURST = 1.0, 20  # of one token at one address
REFUSED_PER_SECOND_OF_ALL, REFUSED_BURST_OF_ALL = 50.0, 200
CLIENTS_MAX = 1_000
AUTHENTICATION_REFUSED = "authentication.refused"


class Audit:
    """Called on the event loop only."""

    def __init__(self, path: str | None, clock: Clock, now_s: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._now_s = now_s
        self._file = None if path is None else AuditFile(path, clock)
        self._of_all = RateLimit(REFUSED_PER_SECOND_OF_ALL, REFUSED_BURST_OF_ALL, now_s)
        self._by_client: OrderedDict[tuple[str, str], RateLimit] = OrderedDict()
        self._left_out = 0

    def record(self, event: str, identity: Mapping[str, str], **details: Any) -> None:
        """`identity`: address, token (its id) and label, as far as they are known."""
        self._write(event, identity, details, is_refusal=False)

    @contextmanager
    def change(self, event: str, identity: Mapping[str, str], **details: Any) -> Iterator[None]:
        """Record the change made by the block. If it is cancelled (by its timeout, or because its client disconnected),
        or the store fails, the outcome is unknown: the change may have been made. A refused change is not recorded."""
        try:
            yield
        except BaseException as exc:
            if isinstance(exc, StoreError | ClosedError) or not isinstance(exc, HeadwaterError | Fault):
                self.record(event, identity, outcome="unknown", **details)
            raise
        self.record(event, identity, outcome="done", **details)

    def refused(self, event: str, identity: Mapping[str, str], **details: Any) -> None:
        """Record a refusal, within the rate of refusals."""
        if self._bucket((identity.get("address", ""), identity.get("token", ""))).take(1) or self._of_all.take(1):
            self._left_out += 1
            return
        if self._left_out:
            details["left_out"], self._left_out = self._left_out, 0
        self._write(event, identity, details, is_refusal=True)

    def _bucket(self, client: tuple[str, str]) -> RateLimit:
        bucket = self._by_client.pop(client, None) or RateLimit(REFUSED_PER_SECOND, REFUSED_BURST, self._now_s)
        self._by_client[client] = bucket
        if len(self._by_client) > CLIENTS_MAX:
            self._by_client.popitem(last=False)
        return bucket

    def _write(self, event: str, identity: Mapping[str, str], details: Mapping[str, Any], *, is_refusal: bool) -> None:
        given = {name: _short(value) for name, value in details.items() if value not in (None, "", [], ())}
        line = {**{name: _short(value) for name, value in identity.items() if value}, **given}
        # A refused token is no warning: any client that reaches the port can cause one.
        level = logging.WARNING if is_refusal and event != AUTHENTICATION_REFUSED else logging.INFO
        logger.log(level, "audit: %(event)s", {"event": event}, extra=line)
        if self._file is not None:
            self._file.append(_line(self._clock, event, line))

    def close(self) -> None:
        """Blocks until all events are written, for CLOSE_S at most."""
        if self._file is not None:
            self._file.close()


class AuditFile:
    """Appends lines to the file at `path`, which is made for its owner alone."""

    def __init__(self, path: str, clock: Clock) -> None:
        self._path = path
        self._clock = clock
        try:
            self._descriptor = self._open()
        except OSError as exc:
            raise InvalidConfigurationError(
                f"the audit trail cannot be written ({exc.strerror})",
                where=path,
                next="Set server.audit to a file that this user may write",
            ) from exc
        self._waiting: queue.Queue[bytes | None] = queue.Queue(LINES_WAITING_MAX)
        self._lost = 0
        self._lock = threading.Lock()  # for that number
        self._is_torn = False  # the last line in the file has no end
        self._is_reported = False
        self._thread = threading.Thread(target=self._run, name="headwater-audit", daemon=True)
        self._thread.start()

    def append(self, line: bytes) -> None:
        try:
            self._waiting.put_nowait(line)
        except queue.Full:
            with self._lock:
                self._lost += 1

    def close(self) -> None:
        try:
            self._waiting.put(None, timeout=CLOSE_S)
        except queue.Full:
            return
        self._thread.join(CLOSE_S)

    def _open(self) -> int:
        return os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def _run(self) -> None:
        line: bytes | None = b""
        while line is not None:
            lines = []
            line = self._waiting.get()
            while line is not None:
                lines.append(line)
                if len(lines) >= LINES_AT_ONCE or self._waiting.empty():
                    break
                line = self._waiting.get()
            if lines:
                self._write(lines)
        os.close(self._descriptor)

    def _write(self, lines: list[bytes]) -> None:
        """Write as many lines as the disk takes. A line that was cut off counts as lost, and a line break ends it."""
        with self._lock:
            lost, self._lost = self._lost, 0
        try:
            self._follow_rename()
            if self._is_torn:
                os.write(self._descriptor, b"\n")
                self._is_torn = False
            if lost:
                self._append(_line(self._clock, "audit.lost", {"lines": lost}))
                lost = 0
            while lines:
                self._append(lines[0])
                del lines[0]
            self._is_reported = False
        except OSError as exc:
            with self._lock:
                self._lost += lost + len(lines)
            if not self._is_reported:
                self._is_reported = True
                logger.error("the audit trail loses lines (%(why)s)", {"why": exc.strerror})

    def _append(self, line: bytes) -> None:
        written = os.write(self._descriptor, line)
        if written < len(line):
            self._is_torn = True
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _follow_rename(self) -> None:
        try:
            if os.path.samestat(os.stat(self._path), os.fstat(self._descriptor)):
                return
        except FileNotFoundError:
            pass
        fresh = self._open()
        os.close(self._descriptor)
        self._descriptor, self._is_torn = fresh, False


def _line(clock: Clock, event: str, fields: Mapping[str, Any]) -> bytes:
    return msgspec.json.encode({"time": iso(clock.now_ms()), "event": event, **fields}) + b"\n"


def _short(value: Any) -> Any:
    if isinstance(value, str):
        return value if len(value) <= TEXT_CHARS_MAX else f"{value[:TEXT_CHARS_MAX]}…"
    if isinstance(value, list | tuple):
        return [_short(each) for each in value[:LISTED_MAX]]
    return value
