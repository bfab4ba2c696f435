"""The interface of consumers, and the buffer that any number of threads and tasks take messages from.

Four rules keep a message from being stranded between the log and the code that handles it:

1. A claim returns no messages to its caller. They enter the buffer when the claim is committed, whatever became of the
   caller by then; taking them out of the buffer waits for nothing. So cancelling a taker loses nothing.
2. One taker at a time claims for all that wait. One that is cancelled or runs out of time passes the turn on.
3. Takers are counted. When the last one leaves, a shared subscription releases its buffer, without counting an attempt;
   an exclusive one keeps it for the next taker, since no other consumer can have it.
4. Everything in flight is in the buffer, with a taker, or being settled. Heartbeats extend the first two.

`DurableConsumer` and `TailConsumer` claim from a log in this process, the client's `RemoteConsumer` from a server.
"""

from __future__ import annotations

import contextlib
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import repeat, starmap
from typing import Any

from headwater.arguments import check_whole
from headwater.broker.deliveries import Claimed, Failure, taken_over
from headwater.broker.flow import Completion, Flow, WaitFor, complete
from headwater.broker.logger import from_the_function_on, logger
from headwater.broker.wakeups import Waiter
from headwater.errors import ClosedError, HeadwaterError, InvalidStateError, LeaseLostError
from headwater.ports.records import Gap, SubscriptionSpec

FETCH_MAX = 10_000
PREFETCH = 100
PREFETCH_SHARED = 4  # to begin with few, so that one consumer does not sit on work that others could do
PREFETCH_S = 0.1  # shared consumers take about as much at a time as they get done in this time
FALLBACK_POLL_S = 5.0  # in case a wake-up of this process is lost; the watcher has its own for other processes


class Prefetch:
    """How many messages each taker claims ahead. Where other consumers compete for them, as many as it has shown to get
    done quickly."""

    def __init__(self, spec: SubscriptionSpec, most: int) -> None:
        self._most = min(most, spec.max_in_flight)
        self._adapts = spec.mode == "shared"
        self.size = min(PREFETCH_SHARED, self._most) if self._adapts else self._most
        self._filled_s: float | None = None

    def filled(self, count: int) -> None:
        self._filled_s = time.monotonic() if count >= self.size else None

    def emptied(self) -> None:
        """Adapt the size to how long the takes of all that was claimed took: more next time if that was quick, less if
        slow."""
        if self._adapts and self._filled_s is not None:
            took_s = time.monotonic() - self._filled_s
            self.size = min(self.size * 2, self._most) if took_s < PREFETCH_S / 2 else self.size
            self.size = max(self.size // 2, 1) if took_s > PREFETCH_S * 2 else self.size


class Consumer(ABC):
    def __init__(
        self, id: str, spec: SubscriptionSpec, waiter: Waiter, now_ms: Callable[[], int], prefetch: int = PREFETCH
    ) -> None:
        self.id = id
        self.spec = spec
        self.resumed_from = 0
        self.is_new = False  # it was stored by this beginning
        self.on_gap: Callable[[Gap], None] | None = None
        self.claim_bytes_max: int | None = None  # about so much is read by a claim
        self._waiter = waiter
        self._now_ms = now_ms
        self._prefetch = Prefetch(spec, prefetch)
        # A killed process leaves open which of its messages were begun, so each has had an attempt. The only one must
        # not be spent on a message that was in the buffer.
        self._takes_ahead = spec.mode == "ephemeral" or spec.retry.max_attempts > 1
        self._lock = threading.RLock()  # what is asked of the log may be answered at once, on the same thread
        self._in_flight: dict[int, Claimed] = {}
        self._look_again_ms: int | None = None  # when a claim may find something though nothing wakes us
        self._buffer: deque[Claimed] = deque()
        self._buffered_ms = self._extended_ms = 0
        self._deliveries = 0  # how often something entered the buffer
        self._gaps: deque[Gap] = deque()
        self._takers = 0
        self._filling = False
        self._waiting: list[Completion[None]] = []  # takers, while another one claims
        self._running: dict[int, tuple[Claimed, int]] = {}  # being handled, and since when; one seq may be so twice
        self._acks: list[Claimed] = []  # to be acked when the acks under way are done
        self._acking: Completion[list[int]] | None = None
        self._interrupted = False
        self._error: HeadwaterError | None = None  # why there is nothing to take any more
        self._closing = False
        self.gone: Completion[None] = Completion()
        """Done when it is closed and everything is released."""
        self._releasing: Completion[None] | None = None

    # --- taking -------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def taking(self) -> Iterator[None]:
        """Around an iterator, a worker, a pump: in between two takes the buffer stays theirs."""
        with self._lock:
            self._takers += 1
        try:
            yield
        finally:
            with self._lock:
                self._takers -= 1
                is_last = self._takers == 0
            if is_last:
                self._end_credit()
            self._release_idle()

    def _end_credit(self) -> None:  # noqa: B027 (of a log in this process nothing comes unasked)
        """Let nothing more be delivered unasked: the last taker has left."""

    def take(self, limit: int, wait_s: float | None, *, ahead: bool = False) -> Flow[list[Claimed]]:
        """Up to `limit` messages; waits up to `wait_s` for the first (None: for ever), returns [] when time is up.
        `ahead`: claims more than it takes, for the takes to come, and stands inside `taking()`."""
        check_whole("the number to fetch", limit, 1, FETCH_MAX)
        if ahead:
            return (yield from self._take(limit, wait_s, ahead=True))
        with self._lock:
            self._takers += 1
        try:
            return (yield from self._take(limit, wait_s, ahead=False))
        finally:
            with self._lock:
                self._takers -= 1
            if self._buffer:
                self._release_idle()

    def _take(self, limit: int, wait_s: float | None, *, ahead: bool) -> Flow[list[Claimed]]:
        until = None if wait_s is None else time.monotonic() + wait_s
        self._refuse_ended()
        if self._buffer and self._is_overdue():
            # No heartbeat came: this process was asleep. They are perhaps another's by now.
            self._releasing = self.release(self._pop(len(self._buffer)))
        if self._releasing is not None and not self._releasing.done:
            yield WaitFor(self._releasing, None)  # so that a claim finds what was released before
        missing = limit - len(self._buffer)
        is_short = 0 < missing < limit and not ahead  # filled up, redeliveries and new ones together
        if (is_short or (wait_s == 0 and missing > 0)) and not self._interrupted:
            # A claim of its own: the taker whose turn it is may be waiting.
            yield from self._look(self._how_many(missing, ahead))
        while True:
            if self._gaps:
                self._report_gaps()
            with self._lock:
                self._refuse_ended()
                if found := self._pop(limit):
                    return found
                left_s = None if until is None else until - time.monotonic()
                if self._interrupted or (left_s is not None and left_s <= 0):
                    return []
                turn: Completion[None] | None = Completion() if self._filling else None
                if turn is not None:
                    self._waiting.append(turn)
                self._filling = True
            if turn is not None:
                try:
                    yield WaitFor(turn, left_s)
                finally:
                    self._leave_queue(turn)
                continue
            try:
                yield from self._fill(self._how_many(limit, ahead), until, ahead=ahead)
            finally:
                with self._lock:
                    self._filling = False
                self._pass_on()

    def take_next(self, wait_s: float | None) -> Flow[Claimed | None]:
        """Take one, claimed ahead, for iterators and workers inside `taking()`; None when time is up."""
        taken = yield from self.take(1, wait_s, ahead=self._takes_ahead)
        return taken[0] if taken else None

    def pop(self) -> Claimed | None:
        """The next of the buffer, if there is one: what an iterator does for most messages."""
        with self._lock:  # a close releases the buffer as unseen
            try:
                return None if self._closing else self._buffer.popleft()
            except IndexError:
                return None

    def pop_many(self, limit: int) -> list[Claimed]:
        """What the buffer has, up to so many; [] if its time may have run out."""
        with self._lock:
            return [] if self._closing or self._is_overdue() else self._pop(limit)

    def put_back(self, untouched: Sequence[Claimed]) -> None:
        """Give back what was taken and not looked at: it is the next to be taken."""
        self._buffer.extendleft(reversed(untouched))
        self._wake()  # also the one that waits for new ones
        self._release_idle()

    def deliver(self, found: Sequence[Claimed], gaps: Iterable[Gap] = ()) -> None:
        """Take over deliveries whose claim is committed; called on whichever thread learns of it."""
        self._gaps.extend(gaps)
        if found and self._error is None:
            self._buffered_ms = self._extended_ms = self._now_ms()
            self._prefetch.filled(len(found))
            self._deliveries += 1
            self._buffer.extend(found)
            self._pass_on()
            if self._takers == 0 or self._interrupted:
                self._release_idle()

    def _pop(self, limit: int) -> list[Claimed]:
        taken: list[Claimed] = []
        with contextlib.suppress(IndexError):  # another taker was quicker
            taken.extend(starmap(self._buffer.popleft, repeat((), min(limit, len(self._buffer)))))
        return taken

    def _is_overdue(self) -> bool:
        return self.spec.mode != "ephemeral" and self._now_ms() - self._extended_ms >= self.spec.ack_wait_ms

    def _how_many(self, limit: int, ahead: bool) -> int:
        """How many to claim now."""
        if self._acks:
            self._submit_acks()  # they ride in the commit of the claim
        if not ahead:
            return limit
        self._prefetch.emptied()
        return min(self._prefetch.size * max(1, self._takers), self.spec.max_in_flight)

    def _pass_on(self) -> None:
        """Let those that wait for another one's claim look at the buffer, or claim themselves."""
        with self._lock:
            waiting, self._waiting = self._waiting, []
        if waiting:
            complete([(turn, None, None) for turn in waiting])

    def _leave_queue(self, turn: Completion[None]) -> None:
        with self._lock, contextlib.suppress(ValueError):  # then it was woken
            self._waiting.remove(turn)

    def _release_idle(self) -> None:
        """Release the buffer where it would keep messages from others and no taker is there for them."""
        if self._buffer and not self._closing:
            with self._lock:
                idle = self._interrupted or (self._takers == 0 and self.spec.mode == "shared")
                untouched = self._pop(len(self._buffer)) if idle else []
            if untouched:
                with contextlib.suppress(ClosedError):  # then closing gives it back
                    self._releasing = self.release(untouched)

    def _refuse_ended(self) -> None:
        if self._closing:
            raise ClosedError(f"subscription '{self.id}' is closed", where=self.id, next="Subscribe again")
        if self._error is not None:
            raise self._error

    def _report_gaps(self) -> None:
        """Log new gaps and call `on_gap`. A taker does it, not what commits the claim: there a callback could not ask
        the log anything."""
        while self._gaps:
            try:
                gap = self._gaps.popleft()
            except IndexError:  # another taker was quicker
                return
            logger.warning("subscription %s lost %d messages (%s)", self.id, gap.count, gap.why)
            if self.on_gap is not None:
                try:
                    self.on_gap(gap)
                except Exception as exc:
                    what = "the on_gap callback of subscription %s failed"
                    logger.error(what, self.id, exc_info=from_the_function_on(exc))

    @abstractmethod
    def claim(self, limit: int) -> Flow[int | None]:
        """Claim what is there now, up to so many; `deliver` gets it. Returns when to look again at the latest."""

    def _look(self, limit: int) -> Flow[int | None]:
        try:
            self._look_again_ms = yield from self.claim(limit)
            return self._look_again_ms
        except LeaseLostError as exc:
            self.lose(exc)
            raise

    def _fill(self, limit: int, until_s: float | None, *, ahead: bool) -> Flow[None]:
        """Claim, and wait until something is delivered, time is up, or the consumer ends. One call at a time."""
        while True:
            news, deliveries = self._waiter.arm(), self._deliveries
            if self._buffer or self._has_ended:
                return
            if not (ahead and self.is_up_to_date()):
                yield from self._look(limit)
            left_s = None if until_s is None else until_s - time.monotonic()
            # Other takers may have popped all that came: then there may be more.
            if self._deliveries != deliveries or (left_s is not None and left_s <= 0):
                return
            self._report_gaps()
            yield from self.wait_for(news, left_s, limit)

    def news(self) -> Completion[None]:
        """Asked for before a take that finds nothing: what `wait_for` waits for afterwards."""
        return self._waiter.arm()

    def wait_for(self, news: Completion[None], timeout_s: float | None, limit: int) -> Flow[None]:
        """Wait until another take may find something, and no longer than this. A publish of this process may claim up
        to `limit` messages meanwhile."""
        due_ms = min((ms for ms in (self._look_again_ms, self._next_deadline_ms()) if ms is not None), default=None)
        due_s = None if due_ms is None else (due_ms - self._now_ms()) / 1000
        with self._standing_by(limit):
            yield WaitFor(news, max(0.0, min(s for s in (timeout_s, due_s, FALLBACK_POLL_S) if s is not None)))

    @property
    def look_again_ms(self) -> int | None:
        """When a take that has found nothing may find something, though nothing is published until then."""
        return self._look_again_ms

    def has_nothing(self) -> bool:
        """Whether a take would find nothing, as far as this process knows."""
        return not self._buffer and not self._gaps and not self._has_ended and self.is_up_to_date()

    def _next_deadline_ms(self) -> int | None:
        """When a delivery of this consumer times out that was claimed since the last look."""
        return None

    def is_up_to_date(self) -> bool:
        """Whether a look would find nothing, as far as this process knows."""
        return False

    def _standing_by(self, limit: int) -> contextlib.AbstractContextManager[None]:
        """Inside, transactions that publish claim for this consumer, where that is possible."""
        return contextlib.nullcontext()

    # --- ending -------------------------------------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        return self._closing

    @property
    def lost(self) -> bool:
        """Another consumer has taken the subscription over, or it was removed."""
        return self._error is not None

    @property
    def interrupted(self) -> bool:
        return self._interrupted

    @property
    def _has_ended(self) -> bool:
        return self._interrupted or self._error is not None or self._closing

    def interrupt(self) -> None:
        """Take nothing more: every take returns, now and later, and the buffer is released."""
        self._interrupted = True
        self._release_idle()
        self._wake()

    def lose(self, error: HeadwaterError | None = None) -> None:
        """Takers get the error now, not with their next claim."""
        self._error = error or taken_over(self.id)
        self._buffer.clear()
        self._wake()

    def wake(self) -> None:
        """Make those that wait look again."""
        self._waiter.wake()

    def _wake(self) -> None:
        self._waiter.wake()
        self._pass_on()

    def still_in_flight(self, seqs: Sequence[int]) -> list[Claimed]:
        return [claimed for claimed in map(self._in_flight.get, seqs) if claimed is not None]

    def _unseen(self) -> list[int]:
        return [claimed.message.seq for claimed in self._buffer.copy()]

    # --- keeping ------------------------------------------------------------------------------------------------

    def began(self, claimed: Claimed) -> None:
        """Extend it with every heartbeat until it `ended`."""
        self._running[id(claimed)] = claimed, self._now_ms()

    def ended(self, claimed: Claimed) -> None:
        self._running.pop(id(claimed), None)

    def _to_extend(self) -> list[Claimed]:
        """Deliveries whose handlers run, unless they take too long, and the buffer; a buffer that waited too long is
        released."""
        now_ms, most_ms = self._now_ms(), self.spec.extension_ms_max
        self._extended_ms = now_ms
        self._release_idle()  # if an earlier release failed
        if self._buffer and now_ms - self._buffered_ms >= most_ms:
            self.release(self._pop(len(self._buffer)))
        running = [claimed for claimed, since_ms in list(self._running.values()) if now_ms - since_ms < most_ms]
        return [*running, *self._buffer.copy()]

    # --- settling -----------------------------------------------------------------------------------------------

    def ack_soon(self, settled: Iterable[Claimed]) -> None:
        """Ack and go on. What is acked while an ack is under way goes into the next one, so that a quick handler is not
        held to one commit a message; and the ack may wait a moment to share the commit of a publish. A failure is
        logged; the message is delivered again."""
        with self._lock:
            self._acks += settled
            is_busy = self._acking is not None and not self._acking.done
        if not is_busy:
            self._submit_acks()

    def _submit_acks(self) -> None:
        with self._lock:
            settled, self._acks = self._acks, []
            if settled:
                self._acking = self.submit_ack(settled, lazy=True)
                self._acking.watch(self._acked)

    def flush_acks(self) -> Flow[None]:
        """Wait until everything that `ack_soon` was given is acked, or has failed to be."""
        self._submit_acks()
        while self._acking is not None and not self._acking.done:
            yield WaitFor(self._acking, None)
            self._submit_acks()

    def _acked(self, ack: Completion[list[int]]) -> None:
        if ack.error is not None:
            logger.warning("an ack of subscription %s failed: %s", self.id, ack.error)
            if isinstance(ack.error, LeaseLostError):
                self.lose(ack.error)
        elif ack.result():
            logger.warning("subscription %s was too late to ack %s", self.id, ack.result())
        if self._acks:
            self._submit_acks()

    @abstractmethod
    def ack(self, settled: Sequence[Claimed]) -> Completion[Any]:
        """Settle all or none: an error if one of them is not in flight here."""

    @abstractmethod
    def submit_ack(self, settled: Sequence[Claimed], *, lazy: bool = False) -> Completion[list[int]]:
        """Settle each by itself: one whose time ran out does not keep the others from being acked. The outcome is the
        seqs of those that were too late. `lazy`: no caller waits for it."""

    @abstractmethod
    def nack(self, claimed: Claimed, delay_ms: int | None, failure: Failure) -> Flow[None]:
        """Try again after a delay (the backoff, if none is given), or dead-letter it if it has had all its attempts."""

    @abstractmethod
    def reject(self, claimed: Claimed, failure: Failure) -> Flow[None]:
        """Dead-letter it now."""

    @abstractmethod
    def extend(self, extended: Sequence[Claimed], by_ms: int | None) -> Flow[None]:
        """More time from now on: `by_ms`, or the ack wait."""

    @abstractmethod
    def release(self, untouched: Sequence[Claimed]) -> Completion[None]:
        """Make those that are still in flight deliverable, as if they had never been claimed."""

    def close(self, seen: Collection[tuple[int, int]] | None = None, *, vanished: bool = False) -> Flow[None]:
        """Release everything: what is in flight is deliverable at once. What no code has seen is not an attempt: the
        buffer, or all but `seen`, (seq, attempt) each. What a consumer had that `vanished` is delivered one at a time,
        for one of them may have killed it. The close is submitted before this waits, so cancelling it does no harm;
        closing twice is harmless."""
        self._submit_acks()
        with self._lock:
            is_first, self._closing = not self._closing, True
        if is_first:
            try:
                self._submit_close(seen, vanished)
            except HeadwaterError as exc:
                complete([(self.gone, None, exc)])
            self._wake()
        yield self.gone

    @abstractmethod
    def _submit_close(self, seen: Collection[tuple[int, int]] | None, vanished: bool) -> None:
        """Ask for it, behind the acks that are under way; when it is done, this one is `gone`."""


def ephemeral_error(consumer: Consumer, why: str) -> InvalidStateError:
    return InvalidStateError(f"an ephemeral subscription {why}", where=consumer.id, next="Use mode exclusive or shared")
