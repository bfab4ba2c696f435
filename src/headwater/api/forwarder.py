"""A durable subscription that feeds a transport: while the target is away its cursor waits, so nothing is lost.

One thread fetches a batch, sends it and acks it (`Forwarder`). `_Source` is its end at the log: messages in flight stay
assigned to it until they are acked or dead-lettered. `_Sender` is its end at the target: tries, with a circuit breaker.
"""

from __future__ import annotations

import logging
import os
import random
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from types import EllipsisType
from typing import Literal, NamedTuple
from urllib.parse import parse_qsl, urlsplit

import msgspec

from headwater.api._runtime import given
from headwater.api._sync import Log
from headwater.arguments import check_whole
from headwater.broker.consumer import Consumer
from headwater.broker.deliveries import Claimed, Failure
from headwater.broker.flow import run_blocking
from headwater.broker.handlers import PASSING_ERRORS
from headwater.broker.logger import logger
from headwater.broker.subscribe import (
    IN_FLIGHT_MAX,
    Entities,
    Start,
    SubscribeOptions,
    check_subscription_id,
    make_spec,
)
from headwater.broker.verbs import LogVerbs
from headwater.delivery import circuit
from headwater.delivery.circuit import (
    Breaker,
    BreakerPolicy,
    BreakerState,
    Suspect,
    Tried,
    TryOutcome,
    begin_to_suspect,
    failed_again,
    goes_on,
    is_refused,
    judge,
    order_of_tries,
    others_got_through,
)
from headwater.delivery.retry import ATTEMPTS_MAX, RetryPolicy, backoff_ms
from headwater.errors import (
    ClosedError,
    HeadwaterError,
    InvalidInputError,
    InvalidOptionError,
    InvalidStateError,
    LeaseLostError,
    NotDeliveredError,
    RemoteError,
    StoreError,
    SubscriptionActiveError,
    TransportError,
    TransportFailedError,
    UnknownSubscriptionError,
    UnreachableError,
)
from headwater.formats import Span, span_ms
from headwater.ports.clock import Clock, SystemClock
from headwater.ports.transport import Transport, buffers, check_transport, logs_fed_by
from headwater.topics import Dialect

BATCH = 100
BATCH_MAX = 5_000
WAIT_S = 5.0
WAIT_MS_MAX = 3_600_000
ATTEMPTS = 5
BACKOFF_S = 1.0
BACKOFF_FACTOR = 2.0
BACKOFF_MAX_S = 30.0
POLL_S = 1.0  # how often drain reads the lag, whether or not the forwarder reports a change
ACQUIRE_S = 0.5  # how long one attempt to become the holder waits; then the forwarder checks whether it should stop
EXTENSIONS_PER_ACK_WAIT = 3
SUSPECTS_MAX = 1_000
LOG_RETRY_S = 1.0

_LOG_IS_AWAY = (*PASSING_ERRORS, UnreachableError)  # nothing is lost meanwhile
_LOOPBACK = ("localhost", "127.0.0.1", "::1", "")
_PORTS = {"ws": 80, "wss": 443, "postgres": 5432}

ForwarderState = Literal["stopped", "waiting", "running", "retrying", "failed"]
"""Waiting: another process holds the subscription. Retrying: the target did not accept the batch. Failed: the forwarder
ended with an error of its own side."""


class ForwarderStatus(msgspec.Struct, frozen=True):
    """Counts are since the forwarder was made. `lag` is that of its subscription, None before it has begun. `refused`
    are messages that the target refuses so far."""

    id: str
    target: str
    state: ForwarderState
    forwarded: int
    retried: int
    dead: int
    in_flight: int
    refused: int
    lag: int | None
    breaker: BreakerState
    last_error: str | None


class _RefusedMessage(msgspec.Struct):
    """A message that the target refused so far, with its last error."""

    claimed: Claimed
    suspect: Suspect
    error: str


class Forwarder:
    """Feeds a transport from a durable, exclusive subscription: `start()` and `stop()`, or `run()` until stopped.

    A batch is sent when it is full or has waited for `wait`, and acked when the transport has accepted it. While the
    target is unreachable, the forwarder keeps the batch and retries after a backoff, without limit; no attempt counts.
    A message that the target refuses while it accepts others is sent alone, up to `max_attempts` times, and then
    dead-lettered. A forwarder that was killed sends its batch again; a target that recognises ids stores it once. The
    other options are those of the subscription.
    """

    def __init__(
        self,
        log: Log,
        transport: Transport,
        *,
        id: str,
        pattern: str = ">",
        batch: int = BATCH,
        wait: Span = WAIT_S,
        max_attempts: int = ATTEMPTS,
        backoff: Span = BACKOFF_S,
        backoff_max: Span = BACKOFF_MAX_S,
        jitter: float = 0.25,
        breaker: BreakerPolicy | None = None,
        clock: Clock | None = None,
        on_error: Callable[[Exception], None] | None = None,
        start: Start | None = None,
        dialect: Dialect = "nats",
        from_: Entities = None,
        to: Entities = None,
        broadcast: bool = False,
        where: str | None = None,
        ack_wait: Span = 30.0,
        lease: Span = 15.0,
        inactive_timeout: Span | EllipsisType | None = ...,
    ) -> None:
        options = given(SubscribeOptions, Forwarder.__init__, locals())
        for name in ("max_attempts", "backoff", "backoff_max", "jitter"):  # of the target, not of the subscription
            options.pop(name, None)  # type: ignore[misc]
        self.id = check_subscription_id(id)
        check_transport(transport, id)
        if buffers(transport):
            raise InvalidOptionError(
                "a forwarder makes batches itself, and messages that it acked would be lost with a buffer",
                where=transport.name,
                next="Open the transport without batch, and pass batch and wait here",
            )
        for fed in logs_fed_by(transport):
            if fed is log or same_log(log.name, getattr(fed, "name", "")):
                raise InvalidOptionError(
                    "this is the log itself, and would get a second copy of its messages",
                    where=transport.name,
                    next="Forward to another log",
                )
        make_spec(pattern, options)  # refuses here, not on the thread
        base_ms, cap_ms = span_ms(backoff, "backoff"), span_ms(backoff_max, "backoff_max")
        self._log = log
        self._clock = clock or SystemClock()
        self._source = _Source(log._core, self._clock, self.id, pattern, options)
        self._transport = transport
        self._sender = _Sender(transport, breaker or BreakerPolicy(), self._clock)
        self._batch = check_whole("batch", batch, 1, BATCH_MAX)
        self._wait_s = min(span_ms(wait, "wait"), WAIT_MS_MAX) / 1000
        self._policy = RetryPolicy(
            check_whole("max_attempts", max_attempts, 1, ATTEMPTS_MAX),
            base_ms,
            BACKOFF_FACTOR,
            max(base_ms, cap_ms),
            jitter,
        )
        self._on_error = on_error
        self._state: ForwarderState = "stopped"
        self._forwarded = self._retried = self._dead = self._changes = 0
        self._last_error: str | None = None
        self._current_batch: list[Claimed] = []
        self._refused: dict[int, _RefusedMessage] = {}  # by seq
        self._witness: Claimed | None = None  # the last that got through, if it may be sent again
        self._rounds_in_vain = 0
        self._stopping = threading.Event()
        self._nudge = threading.Event()
        self._changed = threading.Condition()
        self._failure: BaseException | None = None
        self._thread: threading.Thread | None = None
        self._clock.on_advance(self._nudge.set)

    def __repr__(self) -> str:
        return f"<Forwarder {self.id} to {self._transport.name}>"

    # --- for users ----------------------------------------------------------------------------------------------

    def start(self, *, once: bool = False) -> None:
        """Run on a thread of its own. A stopped forwarder cannot be started again; a new one continues after it."""
        if self._thread is not None:
            raise InvalidStateError("this forwarder has been started already", where=self.id, next="Make another one")
        self._thread = threading.Thread(
            target=self._run_quietly, args=(once,), name=f"headwater-forward-{self.id}", daemon=True
        )
        self._thread.start()

    def _run_quietly(self, once: bool) -> None:
        try:
            self.run(once=once)
        except HeadwaterError as exc:  # join and stop raise it
            logger.info("forwarder %s stopped: %s", self.id, exc)
        except Exception:
            logger.exception("forwarder %s stopped", self.id)

    def run(self, *, once: bool = False) -> None:
        """Forward until `stop()`; with `once`, until all messages stored now are forwarded. With `once` an unreachable
        target raises TransportError when the circuit opens, and the other messages stay in the log."""
        try:
            while not self._stopping.is_set():
                try:
                    if self._acquire(waits=not once):
                        self._forward(self._log.last_seq() if once else None)
                        return
                except (LeaseLostError, NotDeliveredError) as exc:  # another holder has taken over
                    logger.warning("forwarder %s begins again: %s", self.id, exc)
                    self._release()
        except BaseException as exc:
            self._failure = exc
            raise
        finally:
            self._release()
            self._stopping.set()
            self._become("stopped" if self._failure is None else "failed")

    def stop(self, timeout: float | None = None) -> None:
        """Stop after the batch that is being sent, and release the rest. Raises the error that ended it, if any."""
        self.ask_to_stop()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout)
        self._raise_failure()

    def join(self, timeout: float | None = None) -> bool:
        """Wait until it ends; False if it still runs after `timeout` seconds. Raises the error that ended it."""
        if self._thread is not None:
            self._thread.join(timeout)
            if self._thread.is_alive():
                return False
        self._raise_failure()
        return True

    def ask_to_stop(self) -> None:
        """Request the stop, and return at once: for signal handlers, and for the transport itself."""
        self._stopping.set()
        self._nudge.set()
        self._source.interrupt()

    def drain(self, timeout: float | None = None) -> bool:
        """Wait until nothing is left to forward; False if `timeout` ends first, or the forwarder was stopped."""
        until = None if timeout is None else time.monotonic() + timeout
        while True:
            self._raise_failure()
            seen = self._changes
            if self._lag() == 0:
                return True
            left_s = POLL_S if until is None else min(POLL_S, until - time.monotonic())
            if left_s <= 0 or self._stopping.is_set():
                return False
            self._wait_for_change(seen, left_s)

    def status(self) -> ForwarderStatus:
        """The state, what was sent and what failed."""
        return ForwarderStatus(
            id=self.id,
            target=self._transport.name,
            state=self._state,
            forwarded=self._forwarded,
            retried=self._retried,
            dead=self._dead,
            in_flight=len(self._current_batch),
            refused=len(self._refused),
            lag=self._lag(),
            breaker=self._sender.state,
            last_error=self._last_error,
        )

    def _lag(self) -> int | None:
        try:
            return self._log.subscription(self.id).lag
        except (UnknownSubscriptionError, StoreError, RemoteError):  # it has not begun, or the log cannot be reached
            return None

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    # --- the log ------------------------------------------------------------------------------------------------

    def _acquire(self, *, waits: bool) -> bool:
        while not self._stopping.is_set():
            try:
                self._source.acquire()
            except SubscriptionActiveError:
                if not waits:
                    raise
                self._become("waiting")
            except _LOG_IS_AWAY as exc:
                self._log_is_away(exc)
            else:
                self._become("running")
                return True
        return False

    def _release(self) -> None:
        self._source.release()
        self._current_batch, self._refused = [], {}
        self._rounds_in_vain = 0

    def _extend(self) -> None:
        try:
            self._source.extend([*self._current_batch, *(each.claimed for each in self._refused.values())])
        except _LOG_IS_AWAY as exc:
            self._log_is_away(exc)

    def _forward(self, upto: int | None) -> None:
        """Forward until asked to stop, or until all up to a seq is done."""
        while not self._stopping.is_set():
            if not self._current_batch:
                self._extend()
                self._fill(until_full=upto is None)
                if upto is not None and not self._current_batch:
                    self._drain_refused()
                    return
            reached = max((claimed.message.seq for claimed in self._current_batch), default=0)
            if self._current_batch:
                self._round(gives_up=upto is not None)
            self._retry_refused()
            if upto is not None and not self._current_batch and reached >= upto:
                self._drain_refused()
                return

    def _drain_refused(self) -> None:
        """Try the refused messages again until none is left, or `max_attempts` rounds in a row prove nothing. No new
        message is there to prove that the target is up: if it recognises ids, a delivered message that is sent again
        proves it. What still fails stays in the log."""
        in_vain = 0
        while self._refused and in_vain < self._policy.max_attempts and not self._stopping.is_set():
            self._pause(round((self._idle_s() or 0.0) * 1000))
            self._extend()
            self._retry_refused()
            if self._witness is not None and self._sender.try_all([self._witness])[0] == "sent":
                in_vain = 0
                self._count_refusals()
            else:
                in_vain += 1

    def _fill(self, *, until_full: bool) -> None:
        """A batch: full, or as many as arrived in the time that it may wait. A redelivery is sent at once and alone:
        the log delivers one at a time of the messages that a killed forwarder left."""
        try:
            self._current_batch += self._source.fetch(self._batch, self._idle_s() if until_full else 0.0)
            until = time.monotonic() + self._wait_s
            while until_full and 0 < len(self._current_batch) < self._batch and self._current_batch[-1].attempt == 1:
                left_s = until - time.monotonic()
                more = self._source.fetch(self._batch - len(self._current_batch), left_s) if left_s > 0 else []
                if not more:
                    break
                self._current_batch += more
        except _LOG_IS_AWAY as exc:
            if not until_full:
                raise
            self._log_is_away(exc)

    def _idle_s(self) -> float | None:
        if not self._refused:
            return None
        due_ms = max(min(each.suspect.due_ms for each in self._refused.values()), self._sender.open_until_ms or 0)
        return max(0.0, (due_ms - self._clock.now_ms()) / 1000)

    def _top_up(self) -> None:
        """Others beside those that fail: only they can show that the target is there."""
        if len(self._current_batch) < self._batch and not self._stopping.is_set():
            self._extend()  # a fetch gives up what is overdue
            try:
                self._current_batch += self._source.fetch(self._batch - len(self._current_batch), 0.0)
            except _LOG_IS_AWAY as exc:
                self._log_is_away(exc)

    def _ack(self, arrived: Sequence[Claimed]) -> None:
        if not arrived:
            return
        if self._transport.recognises_ids:
            self._witness = arrived[-1]
        self._count("_forwarded", len(arrived), lambda: self._source.ack(arrived))

    def _dead_letter(self, claimed: Claimed, error: str) -> None:
        logger.warning("forwarder %s gives up message %d: %s", self.id, claimed.message.seq, error)
        handler = f"forward to {self._transport.name}"
        self._count("_dead", 1, lambda: self._source.dead_letter(claimed, error, handler))

    def _count(self, name: Literal["_forwarded", "_dead"], count: int, settle: Callable[[], None]) -> None:
        """Retried while the log is away, unless asked to stop. Counted first, and taken back if it fails: a caller that
        sees a lag of 0 sees the count as well."""
        setattr(self, name, getattr(self, name) + count)
        settled = False
        try:
            while not settled:
                try:
                    settle()
                    settled = True
                except _LOG_IS_AWAY as exc:
                    self._log_is_away(exc)
                    if self._stopping.is_set():
                        return
        finally:
            if not settled:
                setattr(self, name, getattr(self, name) - count)

    def _log_is_away(self, exc: Exception) -> None:
        logger.warning("forwarder %s waits for its log: %s", self.id, exc)
        self._last_error = _shown(exc)
        self._stopping.wait(LOG_RETRY_S)

    # --- the target ---------------------------------------------------------------------------------------------

    def _round(self, *, gives_up: bool) -> None:
        self._extend()
        if not self._sender.may_try():
            self._pause(0)
            return
        made = self._sender.send(self._current_batch, self._rounds_in_vain)
        self._current_batch = made.rest
        self._settle(made)
        if made.error is not None:
            self._report(made.error, is_raised=gives_up and not made.sent)
        if made.sent:
            self._rounds_in_vain = 0
            self._become("running")
            self._count_refusals()
        elif made.rest:
            self._rounds_in_vain += 1
            self._become("retrying")
            if gives_up and self._sender.state == "open":
                raise _as_transport_error(made.error, self._transport.name)
            self._pause(backoff_ms(self._policy, self._rounds_in_vain, random.random()))
            self._top_up()

    def _settle(self, made: _Round) -> None:
        self._ack(made.sent)
        for claimed, error in made.unfit:
            self._dead_letter(claimed, error)
        for claimed, error in made.suspects:
            if len(self._refused) >= SUSPECTS_MAX:
                self._current_batch.append(claimed)
                continue
            suspect = begin_to_suspect(self._policy, self._clock.now_ms(), random.random())
            self._refused[claimed.message.seq] = _RefusedMessage(claimed, suspect, error)
        self._current_batch.sort(key=lambda claimed: claimed.message.seq)

    def _report(self, error: Exception, *, is_raised: bool = False) -> None:
        """`is_raised`: if the target stays away, the caller gets the error."""
        if not self._rounds_in_vain:  # later ones show as changes of the circuit
            level = logging.INFO if is_raised else logging.WARNING
            logger.log(level, "forwarder %s: %s", self.id, _shown(error))
        self._retried += 1
        self._last_error = _shown(error)
        if self._on_error is not None:
            try:
                self._on_error(error)
            except Exception:
                logger.exception("the on_error callback of forwarder %s failed", self.id)

    def _count_refusals(self) -> None:
        """Other messages got through, so the target is up: each refused message that failed before counts a
        refusal."""
        for seq, each in list(self._refused.items()):
            each.suspect = others_got_through(each.suspect)
            if is_refused(each.suspect, self._policy):
                del self._refused[seq]
                self._dead_letter(each.claimed, each.error)

    def _retry_refused(self) -> None:
        """Alone, when they are due, unless the circuit is open. Their outcome does not count for the circuit."""
        now_ms = self._clock.now_ms()
        tries: list[Tried] = []
        for seq, each in sorted(self._refused.items()):
            is_closed = (self._sender.open_until_ms or 0) <= now_ms
            if each.suspect.due_ms > now_ms or not is_closed or self._stopping.is_set():
                continue
            if not goes_on(tries, target_answers=self._transport.connected):
                return
            tried, error = self._sender.try_all([each.claimed])
            tries.append(tried)
            if tried == "failed":
                each.error = _shown(error)
                each.suspect = failed_again(each.suspect, self._policy, now_ms, random.random())
                continue
            del self._refused[seq]
            if tried == "sent":
                self._ack([each.claimed])
                self._count_refusals()
            else:
                self._dead_letter(each.claimed, _shown(error))
        if tries:
            self._become(self._state)

    # --- waiting ------------------------------------------------------------------------------------------------

    def _pause(self, ms: int) -> None:
        """Wait for this long, and while the circuit is open; ends when the forwarder is asked to stop."""
        at_ms = max(self._clock.now_ms() + ms, self._sender.open_until_ms or 0)
        while not self._stopping.is_set():
            self._nudge.clear()
            left_ms = at_ms - self._clock.now_ms()
            if left_ms <= 0 or self._stopping.is_set():
                return
            self._nudge.wait(left_ms / 1000)

    def _become(self, state: ForwarderState) -> None:
        with self._changed:
            self._state = state
            self._changes += 1
            self._changed.notify_all()

    def _wait_for_change(self, seen: int, timeout_s: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._changes != seen, timeout_s)


class _Source:
    """Delivery attempts say little here: a restart during an outage is one, too. How often the target refused a message
    is counted elsewhere; the log's own limit remains for a message that kills its forwarder."""

    def __init__(self, log: LogVerbs, clock: Clock, id: str, pattern: str, options: SubscribeOptions) -> None:
        self.id = id
        self._log = log
        self._clock = clock
        self._pattern = pattern
        self._options: SubscribeOptions = {
            **options,
            "mode": "exclusive",
            "timeout": ACQUIRE_S,
            "max_in_flight": IN_FLIGHT_MAX,
            "max_attempts": ATTEMPTS_MAX,
        }
        self._consumer: Consumer | None = None
        self._interrupted = False
        self._extended_ms = 0

    def acquire(self) -> None:
        """Become the holder. Raises SubscriptionActiveError if another holder does not release it in time."""
        self._consumer = run_blocking(self._log.subscribe(self.id, self._pattern, **self._options))
        self._extended_ms = self._clock.now_ms()
        if self._interrupted:
            self._consumer.interrupt()

    @property
    def _held(self) -> Consumer:
        if self._consumer is None:
            raise ClosedError(f"subscription '{self.id}' is not held", where=self.id)
        return self._consumer

    def fetch(self, limit: int, wait_s: float | None) -> list[Claimed]:
        found = run_blocking(self._held.take(limit, wait_s))
        for claimed in found:
            self._held.began(claimed)  # the log's heartbeats extend it from now on
        return found

    def extend(self, in_flight: Sequence[Claimed]) -> None:
        """Extend all messages in flight, before each round: they stay assigned to it, however long the target is
        away."""
        now_ms = self._clock.now_ms()
        for claimed in in_flight:
            self._held.began(claimed)
        is_recent = 0 <= now_ms - self._extended_ms < self._held.spec.ack_wait_ms // EXTENSIONS_PER_ACK_WAIT
        if in_flight and not is_recent:
            run_blocking(self._held.extend(in_flight, None))
            self._extended_ms = now_ms

    def ack(self, arrived: Sequence[Claimed]) -> None:
        """A message whose time ran out does not prevent the others from being acked; it is redelivered, and the target
        may recognise its id."""
        completion = self._held.submit_ack(arrived)
        completion.wait()
        late = completion.result()
        if late:
            logger.warning("forwarder %s was too late to ack %s", self.id, late)
        self._ended(arrived)

    def dead_letter(self, claimed: Claimed, error: str, handler: str) -> None:
        try:
            run_blocking(self._held.reject(claimed, Failure("processing_error", error, None, handler)))
        except (LeaseLostError, NotDeliveredError) as exc:
            if self._held.lost:
                raise
            logger.warning("forwarder %s: %s", self.id, exc)
        self._ended([claimed])

    def _ended(self, settled: Iterable[Claimed]) -> None:
        for claimed in settled:
            self._held.ended(claimed)

    def interrupt(self) -> None:
        """A fetch that waits returns, as does every later one. From any thread."""
        self._interrupted = True
        if self._consumer is not None:
            self._consumer.interrupt()

    def release(self) -> None:
        """Messages in flight count as not attempted."""
        consumer, self._consumer = self._consumer, None
        if consumer is None:
            return
        try:
            run_blocking(consumer.close(seen=()))
        except HeadwaterError as exc:  # its lease runs out by itself
            logger.warning("forwarder %s could not release its subscription: %s", self.id, exc)


class _Round(NamedTuple):
    """The outcome of a batch. `rest` is neither sent, unfit nor suspect, in its order; `error` is the last one."""

    sent: list[Claimed]
    unfit: list[tuple[Claimed, str]]
    suspects: list[tuple[Claimed, str]]
    rest: list[Claimed]
    error: Exception | None


class _Sender:
    def __init__(self, transport: Transport, policy: BreakerPolicy, clock: Clock) -> None:
        self._transport = transport
        self._policy = policy
        self._clock = clock
        self._breaker = Breaker()
        self._turn: int | None = None

    @property
    def state(self) -> BreakerState:
        return self._breaker.state

    @property
    def open_until_ms(self) -> int | None:
        return circuit.until_ms(self._policy, self._breaker)

    def may_try(self) -> bool:
        """Begins a round, which must come next, unless the circuit is open."""
        breaker, self._turn = circuit.ask(self._policy, self._breaker, self._clock.now_ms())
        self._become(breaker)
        return self._turn is not None

    def send(self, hand: Sequence[Claimed], rounds_in_vain: int) -> _Round:
        """Send all together; if that fails, one by one, so that a refused message does not delay the others."""
        tried, error = self.try_all(hand)
        if tried == "sent":
            made = _Round(list(hand), [], [], [], None)
        elif len(hand) == 1:
            unfit = [(hand[0], _shown(error))] if tried == "unfit" else []
            made = _Round([], unfit, [], [] if unfit else list(hand), error)
        else:
            made = self._one_by_one(hand, rounds_in_vain, error)
        self._report(made)
        return made

    def try_all(self, messages: Sequence[Claimed]) -> tuple[Tried, Exception | None]:
        try:
            self._transport.publish_many([claimed.message for claimed in messages])
        except ClosedError:
            raise
        except InvalidInputError as exc:
            return "unfit", exc
        except Exception as exc:  # whatever a transport raises, it did not accept them
            return "failed", exc
        return "sent", None

    def _one_by_one(self, hand: Sequence[Claimed], rounds_in_vain: int, error: Exception | None) -> _Round:
        order = order_of_tries(len(hand), rounds_in_vain)
        tries: list[Tried] = []
        errors: dict[int, Exception | None] = {}
        for position in order:
            tried, errors[position] = self.try_all([hand[position]])
            tries.append(tried)
            error = errors[position] or error
            if not goes_on(tries, target_answers=self._transport.connected, rounds_in_vain=rounds_in_vain):
                break
        for position in judge(order, tries).suspects:  # once more, now that others got through: an outage may be over
            tries[order.index(position)], errors[position] = self.try_all([hand[position]])
        verdict = judge(order, tries)
        gone = {*verdict.sent, *verdict.unfit, *verdict.suspects}
        return _Round(
            [hand[position] for position in verdict.sent],
            [(hand[position], _shown(errors[position])) for position in verdict.unfit],
            [(hand[position], _shown(errors[position])) for position in verdict.suspects],
            [claimed for position, claimed in enumerate(hand) if position not in gone],
            error,
        )

    def _report(self, made: _Round) -> None:
        turn, self._turn = self._turn, None
        if turn is not None:
            outcome: TryOutcome = "succeeded" if made.sent else "failed" if made.rest else "not tried"
            self._become(circuit.ended(self._policy, self._breaker, turn, outcome, self._clock.now_ms()))

    def _become(self, breaker: Breaker) -> None:
        before, self._breaker = self._breaker, breaker
        if "open" in (before.state, breaker.state) and before.state != breaker.state:
            logger.info("%s: circuit %s", self._transport.name, breaker.state)


def _shown(error: Exception | None) -> str:
    """An error as status and dead letters show it."""
    return str(error) if isinstance(error, HeadwaterError) else f"{type(error).__name__}: {error}"


def _as_transport_error(error: Exception | None, name: str) -> TransportError:
    if isinstance(error, TransportError):
        return error
    made = TransportFailedError(_shown(error), where=name)
    made.__cause__ = error
    return made


def same_log(one: str, other: str) -> bool:
    """Whether two names are those of one log, as far as names tell: a host may have other names."""
    if "memory" in (one, other):  # the name of every log in memory, and each is a log of its own
        return False
    if "://" in one or "://" in other:
        try:
            return "://" in one and "://" in other and _address(one) == _address(other)
        except ValueError:  # several hosts with ports of their own
            return one == other
    try:
        return os.path.samefile(one, other)
    except OSError:  # one does not exist (yet)
        return os.path.realpath(one) == os.path.realpath(other)


def _address(url: str) -> tuple[object, ...]:
    """The address of a PostgreSQL log: host, database and schema, without the user."""
    parts = urlsplit(url)
    scheme = parts.scheme.replace("postgresql", "postgres")
    query = dict(parse_qsl(parts.query)) if scheme == "postgres" else {}
    host = query.get("host") or parts.hostname or ""
    return (
        scheme,
        "localhost" if host in _LOOPBACK else host,
        int(query.get("port") or parts.port or _PORTS.get(scheme, 0)),
        query.get("dbname") or parts.path.strip("/"),
        query.get("schema", "headwater"),
    )
