"""The forwarder as users see it: start and stop it, ask how it is."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypedDict, Unpack, cast

from headwater.broker.blocking import Log
from headwater.broker.forwarding.sending import Sender
from headwater.broker.forwarding.source import Source, same_log
from headwater.broker.forwarding.status import ForwarderStatus
from headwater.broker.forwarding.work import Work
from headwater.broker.logger import logger
from headwater.broker.options import Entities, Start, SubscribeOptions, check_subscription_id, make_spec
from headwater.delivery.breaker import BreakerPolicy
from headwater.delivery.retry import ATTEMPTS_MAX, RetryPolicy
from headwater.errors import HeadwaterError, InvalidOption, RemoteError, StoreError, UnknownSubscription
from headwater.message import Span, check_whole, span_ms
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
LOOK_S = 1.0  # how often drain looks at the log, whatever it is told


class SourceOptions(TypedDict, total=False):
    """What of the options of a subscription a forwarder leaves to the user."""

    start: Start
    dialect: Dialect
    from_: Entities
    to: Entities
    broadcast: bool
    where: str | None
    ack_wait: Span
    lease: Span
    inactive_timeout: Span | None


class Forwarder:
    """Feeds a transport from a durable, exclusive subscription: `start()` and `stop()`, or `run()` until stopped.

    A batch is full, or has waited for `wait`, when it is sent; it is acked when the transport has taken it. While the
    target is away the batch stays in hand and is tried again after a backoff, for as long as it takes; nothing is
    counted against the messages. One that the target refuses while others get through is kept aside, tried
    `max_attempts` times and then dead-lettered. Whoever is killed in between repeats a batch, which a target that
    recognises ids does not notice. Options are those of the subscription.
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
        **options: Unpack[SourceOptions],
    ) -> None:
        unknown = options.keys() - SourceOptions.__annotations__.keys()
        if unknown:
            raise InvalidOption(
                f"a forwarder has no option {sorted(unknown)[0]!r}",
                where=id,
                next=f"Its subscription takes {', '.join(SourceOptions.__annotations__)}",
            )
        self.id = check_subscription_id(id)
        check_transport(transport, id)
        if buffers(transport):
            raise InvalidOption(
                "a forwarder makes batches by itself, and what it acked would be lost with a buffer",
                where=transport.name,
                next="Open the transport without batch, and say batch and wait here",
            )
        for fed in logs_fed_by(transport):
            if fed is log or same_log(log.name, getattr(fed, "name", "")):
                raise InvalidOption(
                    "this is the log itself, and would get a second copy of all it has",
                    where=transport.name,
                    next="Forward to another log",
                )
        make_spec(pattern, {name: value for name, value in options.items() if name != "start"})  # complain at once
        base_ms, cap_ms = span_ms(backoff, "backoff"), span_ms(backoff_max, "backoff_max")
        clock = clock or SystemClock()
        self._log = log
        self._source = Source(log._core, clock, self.id, pattern, cast(SubscribeOptions, options))
        self._sender = Sender(transport, breaker or BreakerPolicy(), clock)
        self._work = Work(
            self._source,
            self._sender,
            clock,
            batch=check_whole("batch", batch, 1, BATCH_MAX),
            wait_s=min(span_ms(wait, "wait"), WAIT_MS_MAX) / 1000,
            policy=RetryPolicy(
                check_whole("max_attempts", max_attempts, 1, ATTEMPTS_MAX),
                base_ms,
                BACKOFF_FACTOR,
                max(base_ms, cap_ms),
                jitter,
            ),
            on_error=on_error,
        )
        self._failure: BaseException | None = None
        self._thread: threading.Thread | None = None

    def __repr__(self) -> str:
        return f"<Forwarder {self.id} to {self._sender.name}>"

    def start(self, *, once: bool = False) -> None:
        """Run on a thread of its own. After a stop, make another forwarder; it goes on where this one was."""
        if self._thread is not None:
            raise InvalidOption("this forwarder has been started already", where=self.id, next="Make another one")
        self._thread = threading.Thread(
            target=self._run_quietly, args=(once,), name=f"headwater-forward-{self.id}", daemon=True
        )
        self._thread.start()

    def _run_quietly(self, once: bool) -> None:
        try:
            self.run(once=once)
        except HeadwaterError as exc:  # whoever waits for it or stops it gets it
            logger.info("forwarder %s stopped: %s", self.id, exc)
        except Exception:
            logger.exception("forwarder %s stopped", self.id)

    def run(self, *, once: bool = False) -> None:
        """Forward until `stop()`. With `once` until all is forwarded that is there now; if the target is away, it
        raises a TransportError when the circuit opens, and the rest waits in the log."""
        try:
            self._work.run(self._log.last_seq if once else None)
        except BaseException as exc:
            self._failure = exc
            raise
        finally:
            self._work.end(failed=self._failure is not None)

    def stop(self, timeout: float | None = None) -> None:
        """Let it finish the batch it is sending, and give the rest back. If it had failed, this raises the reason."""
        self.ask_to_stop()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout)
        self._raise_failure()

    def join(self, timeout: float | None = None) -> bool:
        """Wait for it to end by itself; False if it goes on after so many seconds. Raises what it failed with."""
        if self._thread is not None:
            self._thread.join(timeout)
            if self._thread.is_alive():
                return False
        self._raise_failure()
        return True

    def ask_to_stop(self) -> None:
        """The same without waiting: for signal handlers, and for the transport itself."""
        self._work.ask_to_stop()

    def drain(self, timeout: float | None = None) -> bool:
        """Wait until nothing is left to forward; False if the time is over before, or the forwarder was stopped."""
        until = None if timeout is None else time.monotonic() + timeout
        while True:
            self._raise_failure()
            seen = self._work.changes
            if self._lag() == 0:
                return True
            left_s = LOOK_S if until is None else min(LOOK_S, until - time.monotonic())
            if left_s <= 0 or self._work.stopping:
                return False
            self._work.wait_for_change(seen, left_s)

    def status(self) -> ForwarderStatus:
        work = self._work
        return ForwarderStatus(
            id=self.id,
            target=self._sender.name,
            state=work.state,
            forwarded=work.forwarded,
            retried=work.retried,
            dead=work.dead,
            in_hand=work.in_hand,
            set_aside=work.set_aside,
            lag=self._lag(),
            breaker=self._sender.state,
            last_error=work.last_error,
        )

    def _lag(self) -> int | None:
        try:
            return self._log.subscription(self.id).lag
        except (UnknownSubscription, StoreError, RemoteError):  # it has not begun, or the log cannot be asked
            return None

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure
