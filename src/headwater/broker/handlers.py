"""Running a user's function for every message: ack when it returns, retry with backoff when it raises."""

from __future__ import annotations

import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from headwater.broker.claims import Claimed, Failure
from headwater.broker.flow import Call, Flow, Ticket, Within, finish
from headwater.broker.handled_once import HandledOnce
from headwater.broker.logger import logger
from headwater.broker.reading import Prefetch
from headwater.broker.verbs import Consumer
from headwater.errors import Closed, InvalidData, LeaseLost, NotDelivered, Overloaded, RequestTimeout, StoreError
from headwater.ports.dedupe import DedupeQueue

STACK_CHARS_MAX = 8_000
RETRY_S = 1.0

Handler = Callable[[Any], Any]


class Received(Protocol):
    """What a handler gets: a message that knows whether it has been settled already, and whether by nack or reject."""

    @property
    def settled(self) -> bool: ...

    @property
    def declined(self) -> bool: ...


class Reject(Exception):
    """Raised by a handler: dead-letter this message now, trying again is no use."""


class HandlerLoop:
    """One subscription's handler, run by any number of workers. Each worker is a flow: `work()`."""

    def __init__(
        self,
        subscriber: Consumer,
        handler: Handler,
        receive: Callable[[Claimed], Received],
        *,
        concurrency: int,
        auto_ack: bool,
        dedupe: DedupeQueue | None = None,
    ) -> None:
        self.subscriber = subscriber
        self._once = None if dedupe is None else HandledOnce(dedupe, subscriber.id, subscriber.spec.ack_wait_ms)
        self.concurrency = concurrency
        self._handler = handler
        self._name = getattr(handler, "__qualname__", repr(handler))
        self._receive = receive
        self._auto_ack = auto_ack
        self._prefetch = Prefetch(subscriber.spec, subscriber.prefetch)
        self._buffer: deque[Claimed] = deque()
        self._lock = threading.RLock()  # an ack that is answered at once comes back to us while we ask for it
        self._filling = False  # one worker fetches for all; the others wait here
        self._waiting: list[Ticket[None]] = []
        self._done: list[Claimed] = []  # handled, ack not yet asked for
        self._ack: Ticket[list[int]] | None = None  # the last ack asked for
        self._stopping = False
        self._stopped: Ticket[None] = Ticket()

    def stop(self) -> None:
        """Workers end after the message they are at. What was fetched and not begun is given back untouched."""
        self._stopping = True
        finish([(self._stopped, None, None)])
        self.subscriber.interrupt()

    def unseen(self) -> list[int]:
        return [claimed.message.seq for claimed in self._buffer]

    def work(self) -> Flow[None]:
        try:
            while not self._stopping:
                try:
                    claimed = yield from self._next()
                    if claimed is None:
                        return
                    yield from self._handle(claimed)
                except (StoreError, RequestTimeout, Overloaded) as exc:  # it passes, and nothing is lost meanwhile
                    logger.warning("subscription %s tries again: %s", self.subscriber.id, exc)
                    yield Within(self._stopped, RETRY_S)
        finally:
            self._submit_acks()
            last = self._ack
            if last is not None:
                yield Within(last, None)
                report_ack(self.subscriber, last)

    def _next(self) -> Flow[Claimed | None]:
        while not self._stopping:
            ticket: Ticket[None] = Ticket()
            with self._lock:
                if self.subscriber.lost:
                    self._buffer.clear()  # its new holder is at it; the fetch below says so
                if self._buffer:
                    return self._buffer.popleft()
                my_turn = not self._filling
                self._filling = True
                if not my_turn:
                    self._waiting.append(ticket)
            if not my_turn:
                self._submit_acks()  # nobody else may do it for a while
                yield ticket
                continue
            try:
                yield from self._fill()
            except (Closed, LeaseLost):
                if not self._stopping:
                    raise
            finally:
                with self._lock:
                    self._filling = False
                    waiting, self._waiting = self._waiting, []
                finish([(each, None, None) for each in waiting])
        return None

    def _fill(self) -> Flow[None]:
        self._submit_acks()  # rides in the same commit as the claim
        self._prefetch.emptied(time.monotonic())
        limit = min(self._prefetch.size * self.concurrency, self.subscriber.spec.max_in_flight)
        found = yield from self.subscriber.fetch(limit, None)
        self._prefetch.filled(len(found), time.monotonic())
        for claimed in found:
            self.subscriber.began(claimed)  # waiting in the buffer must not cost it its lease
        with self._lock:
            self._buffer.extend(found)

    def _acknowledge(self, claimed: Claimed) -> None:
        """Ask for the ack and go on: the next handler runs while it is committed. What is done in the meantime goes
        into the next ack, so a quick handler is not held to one commit a message."""
        with self._lock:
            self._done.append(claimed)
            busy = self._ack is not None and not self._ack.done
        if not busy:
            self._submit_acks()

    def _submit_acks(self) -> None:
        with self._lock:
            last, done = self._ack, self._done
            if done:
                # When it is committed, what was done meanwhile is asked for: the next handler may run for hours.
                self._done = []
                self._ack = self.subscriber.submit_ack(done, then=self._submit_acks)
        if done and last is not None and last.done:
            report_ack(self.subscriber, last)

    def _handle(self, claimed: Claimed) -> Flow[None]:
        self.subscriber.began(claimed)
        try:
            if self._once is None:
                yield from self._run(claimed)
            else:
                yield from self._run_once(claimed, self._once)
        finally:
            self.subscriber.ended(claimed)

    def _run_once(self, claimed: Claimed, once: HandledOnce) -> Flow[None]:
        """Unless it was handled before: then the ack is all that is missing."""
        id = claimed.message.id
        answer = yield from once.begin(id, lambda: not self._stopping and not self.subscriber.lost, self._stopped)
        if answer == "first":
            try:
                yield from self._run(claimed, once)
            finally:
                once.ended(id)
        elif answer == "done":
            self._acknowledge(claimed)
        else:  # told to stop while it waited for another's claim: as if it had not been looked at
            with self._lock:
                self._buffer.appendleft(claimed)

    def _run(self, claimed: Claimed, once: HandledOnce | None = None) -> Flow[None]:
        message = self._receive(claimed)
        failure: Failure | None = None
        again = False
        try:
            yield Call(self._handler, message)
        except Reject as exc:
            failure = self._failure("rejected", exc)
        except InvalidData as exc:  # an undecodable payload stays so
            failure = self._failure("processing_error", exc)
        except (Exception, SystemExit) as exc:  # a handler that wants to exit has failed like any other
            attempts = f"attempt {claimed.attempt} of {self.subscriber.spec.retry.max_attempts}"
            logger.warning(
                "handler %s failed on message %d, %s", self._name, claimed.message.seq, attempts, exc_info=exc
            )
            failure, again = self._failure("processing_error", exc), True
        if once is not None:
            done = failure is None and not message.declined
            yield from (once.finish if done else once.release)(claimed.message.id)
        if failure is None:
            if self._auto_ack and not message.settled:
                self._acknowledge(claimed)
        elif again:
            yield from self._unless_settled(message, self.subscriber.nack(claimed, None, failure))
        else:
            yield from self._unless_settled(message, self.subscriber.reject(claimed, failure))

    def _unless_settled(self, message: Received, settling: Flow[None]) -> Flow[None]:
        if message.settled:
            settling.close()
            return
        try:
            yield from settling
        except (LeaseLost, NotDelivered) as exc:
            logger.warning("%s", exc)  # it took too long and will be, or has been, delivered again

    def _failure(self, reason: Any, exc: BaseException) -> Failure:
        stack = "".join(traceback.format_exception(exc))[-STACK_CHARS_MAX:]
        return Failure(reason, f"{type(exc).__name__}: {exc}", stack, self._name)


def report_ack(consumer: Consumer, ack: Ticket[list[int]]) -> None:
    """What could not be acked is delivered again; whoever does not wait for the ack should still know why."""
    if ack.error is not None:
        logger.warning("an ack of subscription %s failed: %s", consumer.id, ack.error)
    elif ack.result():
        logger.warning("subscription %s was too late to ack %s", consumer.id, ack.result())
