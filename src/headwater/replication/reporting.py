"""Error reports of a push subscription: nobody looks at its terminal for weeks, but somebody looks after the server.

A push that was cut off in the middle is reported always, and so is a conflict; what often passes by itself, like a
network failure, when it has lasted five minutes. What cannot be sent while the server is away is kept, the newest one,
and goes out when it is back.
"""

from __future__ import annotations

import asyncio
import logging

import msgspec

from headwater.errors import HeadwaterError, RemoteError, VersionConflict
from headwater.replication.asking import ask, report_url
from headwater.replication.link import is_partial
from headwater.replication.names import Remote, ReportKind

NETWORK_FAILURE_MS = 5 * 60_000  # so long a failure that may pass by itself goes without a report
ERROR_CHARS_MAX = 4_000

logger = logging.getLogger("headwater")


class Report(msgspec.Struct, frozen=True):
    kind: ReportKind
    error: str
    since: float
    """For how many seconds pushes had failed."""


class Reports:
    """What is to be reported. Pure: times are passed in."""

    def __init__(self) -> None:
        self._failing_since_ms: int | None = None
        self._long_failure_told = False
        self.pending: Report | None = None

    def note_failure(self, now_ms: int, error: str, kind: ReportKind) -> None:
        if self._failing_since_ms is None:
            self._failing_since_ms = now_ms
        failing_ms = now_ms - self._failing_since_ms
        if kind in ("network", "local"):  # these often pass by themselves
            if failing_ms < NETWORK_FAILURE_MS or self._long_failure_told:
                return
            self._long_failure_told = True
        self.pending = Report(kind, error[:ERROR_CHARS_MAX], failing_ms / 1000)

    def note_success(self) -> None:
        self._failing_since_ms = None
        self._long_failure_told = False

    def sent(self, report: Report) -> None:
        if self.pending is report:
            self.pending = None


class Reporter:
    """Sends them, beside the pushes."""

    def __init__(self, remote: Remote, key: str | None, ca: str | None) -> None:
        self._remote = remote
        self._key = key
        self._ca = ca
        self._reports = Reports()
        self._sending: asyncio.Task[None] | None = None
        self._tried: Report | None = None

    def note_failure(self, now_ms: int, fault: BaseException) -> None:
        self._reports.note_failure(now_ms, str(fault), kind_of(fault))
        self._send_soon()

    def note_success(self) -> None:
        self._reports.note_success()
        self._send_soon()

    async def flush(self) -> None:
        """The newest one is tried once; the one on its way may be older."""
        self._send_soon()
        while self._sending is not None:
            await asyncio.gather(self._sending, return_exceptions=True)
            if self._reports.pending is not self._tried:
                self._send_soon()

    def _send_soon(self) -> None:
        if self._reports.pending is not None and self._sending is None:
            self._tried = self._reports.pending
            self._sending = asyncio.create_task(self._send(self._tried))
            self._sending.add_done_callback(self._sent)

    def _sent(self, task: asyncio.Task[None]) -> None:
        self._sending = None

    async def _send(self, report: Report) -> None:
        try:
            body = msgspec.json.encode(report)
            await asyncio.to_thread(ask, report_url(self._remote), key=self._key, ca=self._ca, body=body)
        except HeadwaterError as exc:
            logger.debug("the error report could not be sent: %s", exc)
        else:
            self._reports.sent(report)


def kind_of(fault: BaseException) -> ReportKind:
    if isinstance(fault, VersionConflict):
        return "conflict"
    if is_partial(fault):
        return "partial"
    return "network" if isinstance(fault, RemoteError) else "local"
