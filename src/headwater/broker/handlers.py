"""Running users' functions for messages: ack when they return, retry with backoff when they raise.

    on() ─► start() ─► running ──── stop(), a signal ────► stopped
              │           │ ▲  a store or connection that is away: its workers try again
              │           └─┘
              └─► standby ─ the lease is free ─► running
              any other error of a worker ─► failed: its siblings end, run() raises it, health() shows it

Workers are flows: a thread or a task of its own runs each. All of it is the same for both APIs, and for a log in this
process, in PostgreSQL or behind a server.
"""

from __future__ import annotations

import contextlib
import contextvars
import hashlib
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import FrameType
from typing import Any, Literal, NamedTuple, Protocol

from headwater.broker.consumer import Consumer
from headwater.broker.deliveries import STACK_CHARS_MAX, Claimed, Failure
from headwater.broker.flow import Attempt, Blocking, Completion, Flow, WaitFor, complete
from headwater.broker.logger import from_the_function_on, logger
from headwater.broker.subscribe import SubscribeOptions
from headwater.broker.verbs import LogVerbs
from headwater.delivery.retry import Reason
from headwater.errors import (
    HeadwaterError,
    InvalidDataError,
    InvalidStateError,
    LeaseLostError,
    NotDeliveredError,
    OverloadedError,
    RequestTimeoutError,
    StoreError,
    SubscriptionActiveError,
)
from headwater.formats import error_text
from headwater.ports.dedupe import DEDUPE_ID_CHARS_MAX, Begun, DedupeQueue
from headwater.ports.records import Gap

RETRY_S = 1.0
STANDBY_S = 1.0  # how long one try to subscribe waits; then the worker checks whether it should stop
SHUTDOWN_TIMEOUT_S = 30.0
SIGNAL_S = 0.5  # Python may overlook a signal that arrives just before a wait begins, and sees it when the wait ends
DEDUPE_BUSY_S = 0.2  # until a claim of another worker is looked at again
DEDUPE_EXTENDS_PER_CLAIM = 3
DEDUPE_THREADS_MAX = 4  # for event loops; a blocking worker asks on its own thread
PASSING_ERRORS = (StoreError, RequestTimeoutError, OverloadedError)  # a store or connection that is away

Handler = Callable[[Any], Any]
Spawn = Callable[[Flow[None], str], "Worker"]
State = Literal["declared", "running", "standby", "restarting", "stopped", "failed"]

# The logs whose workers this runs in, or was started in: waiting there for those to end would be waiting for oneself.
_inside: contextvars.ContextVar[tuple[LogVerbs, ...]] = contextvars.ContextVar("headwater_inside_handlers", default=())


class Received(Protocol):
    """What a handler gets: a message that knows whether it has been settled already, and whether by nack or reject."""

    @property
    def settled(self) -> bool: ...

    @property
    def declined(self) -> bool: ...


class Reject(Exception):
    """Raised by a handler: dead-letter this message now, because a retry would not help."""


class Worker(NamedTuple):
    """A flow that a thread or a task runs. `ended` has its outcome; a thread cannot be cancelled."""

    ended: Completion[None]
    cancel: Callable[[], object] = lambda: None


class Registration(NamedTuple):
    """A handler as declared with `@log.on(...)`."""

    id: str
    pattern: str
    handler: Handler
    concurrency: int | None  # None: one, or what the worker's flag says
    auto_ack: bool
    on_gap: Callable[[Gap], None] | None
    dedupe: DedupeQueue | None
    options: SubscribeOptions
    receiving: Callable[[Consumer], Callable[[Claimed], Received]]

    @property
    def described(self) -> str:
        return f"the handler {self.id!r}"

    def make_running(
        self, log: LogVerbs, spawn: Spawn, failed: Callable[[], None], former: Running | None
    ) -> RunningHandler:
        return RunningHandler(log, self, spawn, failed, former)


class Declared(Protocol):
    """What can be declared: a handler, or a schedule."""

    @property
    def id(self) -> str: ...

    @property
    def pattern(self) -> str: ...

    @property
    def described(self) -> str: ...

    def make_running(
        self, log: LogVerbs, spawn: Spawn, failed: Callable[[], None], former: Running | None
    ) -> Running: ...


class Handlers:
    """The handlers and schedules of one log: declared, started, supervised, stopped. `spawn` gives a flow a thread or a
    task."""

    def __init__(self, log: LogVerbs, spawn: Spawn) -> None:
        self._log = log
        self._spawn = spawn
        self._running: dict[str, Running] = {}  # those that ended stay until they are declared or started anew
        self._declared: dict[str, Declared] = {}
        self._started = False
        self.on_started: Callable[[], None] = lambda: None  # called by run()
        self._over: Completion[None] = Completion()  # run() goes on: a stop was requested, or a handler failed

    def declare(self, registration: Declared) -> None:
        """Add a handler or a schedule. It starts with the others; at once, if those are started already."""
        id, running = registration.id, self._running.get(registration.id)
        if id in self._declared and (running is None or not running.has_ended):
            raise InvalidStateError(
                f"{registration.described} is declared already",
                where=registration.pattern,
                next="Give this one another id; concurrency says how many messages one handles at a time",
            )
        self._running.pop(id, None)
        self._declared[id] = registration
        if self._started:
            self._add(registration).start_by_itself()

    def declared(self) -> list[Declared]:
        """The handlers and schedules, for `headwater.testing`, which runs them itself."""
        if any(not running.has_ended for running in self._running.values()):
            raise InvalidStateError(
                "the handlers run in the background already",
                where=self._log.name,
                next="Stop them first, or do not start them",
            )
        return list(self._declared.values())

    @property
    def has_declared(self) -> bool:
        return bool(self._declared)

    def change_registrations(self, change: Callable[[Registration], Registration]) -> None:
        """Replace the registrations of handlers, before they are started."""
        for id, registration in self._declared.items():
            if isinstance(registration, Registration):
                self._declared[id] = change(registration)

    def health(self) -> dict[str, Any]:
        return {
            id: self._running[id].health() if id in self._running else {"state": "declared", "error": None}
            for id in list(self._declared)  # a worker asks on a thread of its own
        }

    def start(self) -> Flow[None]:
        self._started = True
        for registration in list(self._declared.values()):
            running = self._running.get(registration.id)
            if running is None or running.is_stopping:
                yield from self._add(registration).start()

    def _add(self, registration: Declared) -> Running:
        former = self._running.get(registration.id)
        running = registration.make_running(self._log, self._spawn, self.end_run, former)
        self._running[registration.id] = running
        return running

    def end_run(self) -> None:
        """End `run`; from any thread, or a signal handler."""
        complete([(self._over, None, None)])

    def run(self, timeout_s: float | None) -> Flow[None]:
        """Run until asked to stop, or until a handler fails, whose error is raised. `end_run` counts from this call on,
        also before the flow begins."""
        if not self._declared:
            raise InvalidStateError(
                "there is no handler to run", next="Declare one with the decorator log.on or log.every"
            )
        if self._over.done:
            self._over = Completion()
        return self._run(timeout_s)

    def _run(self, timeout_s: float | None) -> Flow[None]:
        try:
            yield from self.start()
            self.on_started()
            while not (yield WaitFor(self._over, SIGNAL_S)):
                pass
            self.ask_to_stop()
            logger.info("the handlers of %s are stopping", self._log.name)
        finally:
            yield from self.stop(timeout_s)
        for running in self._running.values():
            if running.error is not None:
                raise running.error

    def ask_to_stop(self) -> None:
        """Take nothing new, and release at once what no handler has begun."""
        self._started = False
        for running in list(self._running.values()):
            running.ask_to_stop()
        self.end_run()

    def stop(self, timeout_s: float | None) -> Flow[None]:
        """Wait until the handlers have finished the messages they are at, but not for longer than this. Called by a
        handler, it only asks, since it cannot wait for itself."""
        self.ask_to_stop()
        if self._log in _inside.get():
            return
        until = None if timeout_s is None else time.monotonic() + timeout_s
        for running in list(self._running.values()):
            yield from running.stop(until)


class Running:
    """One handler or schedule at work: its workers, and how they end. `former`: one that may not have ended yet, whose
    workers are waited for like its own."""

    def __init__(
        self, log: LogVerbs, id: str, spawn: Spawn, failed: Callable[[], None], former: Running | None = None
    ) -> None:
        self.id = id
        self.error: BaseException | None = None
        self._log = log
        self._spawn = spawn
        self._on_failure = failed
        self._name = id
        self._workers: list[Worker] = [] if former is None or former.has_ended else list(former._workers)
        self._lock = threading.Lock()
        self._left = 0  # workers that have not ended
        self._state: State = "declared"
        self._stopped: Completion[None] = Completion()

    @property
    def has_ended(self) -> bool:
        return self._state in ("stopped", "failed")

    @property
    def is_stopping(self) -> bool:
        """Whether it takes nothing any more; also when it has ended."""
        return self._stopped.done

    def health(self) -> dict[str, Any]:
        error = None if self.error is None else f"{type(self.error).__name__}: {self.error}"
        return {"state": self._state, "error": error}

    def start(self) -> Flow[None]:
        raise NotImplementedError

    def start_by_itself(self) -> None:
        """Start without being waited for."""
        self._begin_worker(self.start(), "start")

    def _begin_worker(self, flow: Flow[None], name: str) -> None:
        with self._lock:
            self._left += 1
        self._workers.append(self._spawn(self._supervised(flow), f"headwater-{self.id}-{name}"))

    def _supervised(self, flow: Flow[None]) -> Flow[None]:
        """Run a worker, so that none ends unnoticed. The last one to end gives the subscription back."""
        _inside.set((*_inside.get(), self._log))
        try:
            yield from flow
        except GeneratorExit:  # abandoned with its event loop: nothing can be waited for any more
            raise
        except BaseException as exc:
            self._fail(exc)
            yield from self._end_worker()
            raise
        yield from self._end_worker()

    def _end_worker(self) -> Flow[None]:
        with self._lock:
            self._left -= 1
            is_last = self._left == 0
        if is_last:
            yield from self._close()

    def _fail(self, error: BaseException) -> None:
        if not self._stopped.done:
            logger.error("%s ended: %s: %s", self._described(), type(error).__name__, error)
            self.error = error
            self.ask_to_stop()
            self._on_failure()

    def _described(self) -> str:
        return self._name

    def ask_to_stop(self) -> None:
        complete([(self._stopped, None, None)])

    def stop(self, until_s: float | None) -> Flow[None]:
        if self.has_ended:  # or was given up: a thread that outlasted an earlier stop is not waited for again
            return
        for worker in list(self._workers):
            left_s = None if until_s is None else max(0.0, until_s - time.monotonic())
            if not (yield WaitFor(worker.ended, left_s)):
                logger.warning("handler %s did not end in time; its message is delivered again", self._name)
                worker.cancel()
        yield from self._close()

    def _close(self) -> Flow[None]:
        self._state = "stopped" if self.error is None else "failed"
        return
        yield


class RunningHandler(Running):
    """One handler at work: its subscription, and the workers that share its buffer."""

    def __init__(
        self,
        log: LogVerbs,
        registration: Registration,
        spawn: Spawn,
        failed: Callable[[], None],
        former: Running | None = None,
    ) -> None:
        super().__init__(log, registration.id, spawn, failed, former)
        self._registration = registration
        self._name = getattr(registration.handler, "__qualname__", repr(registration.handler))
        self._consumer: Consumer | None = None
        self._once: HandledOnce | None = None
        self._receive: Callable[[Claimed], Received]

    # --- beginning ----------------------------------------------------------------------------------------------

    def start(self) -> Flow[None]:
        """Subscribe and begin. Where another process holds an exclusive subscription, stand by for it."""
        try:
            consumer = yield from self._subscribe(0.0)  # standing by is interruptible, waiting here is not
        except SubscriptionActiveError as exc:
            logger.info("handler of subscription %s stands by: %s", self.id, exc.why)
            self._state = "standby"
            self._begin_worker(self._stand_by(), "standby")
        except BaseException as exc:
            self._fail(exc)
            yield from self._close()
            raise
        else:
            self._begin(consumer)

    def _subscribe(self, wait_s: float) -> Flow[Consumer]:
        given = self._registration
        options: SubscribeOptions = {**given.options, "timeout": wait_s}
        return self._log.subscribe(given.id, given.pattern, **options)

    def _stand_by(self) -> Flow[None]:
        while not self._stopped.done:
            try:
                consumer = yield from self._subscribe(STANDBY_S)
            except SubscriptionActiveError:
                continue
            except PASSING_ERRORS as exc:
                logger.warning("subscription %s tries again: %s", self.id, exc)
                yield WaitFor(self._stopped, RETRY_S)
                continue
            logger.info("handler of subscription %s takes over", self.id)
            self._begin(consumer)
            return

    def _begin(self, consumer: Consumer) -> None:
        self._prepare(consumer)
        if self._stopped.done:
            consumer.interrupt()
        for number in range(self._registration.concurrency or 1):
            self._begin_worker(self._work(consumer), str(number))

    def _prepare(self, consumer: Consumer) -> None:
        given = self._registration
        consumer.on_gap = given.on_gap
        self._receive = given.receiving(consumer)
        if given.dedupe is not None:
            self._once = HandledOnce(given.dedupe, consumer.id, consumer.spec.ack_wait_ms)
        self._consumer = consumer
        self._state = "running"

    def subscribe_without_workers(self) -> Flow[Consumer]:
        """Subscribe for `headwater.testing`, where the caller runs the handler, one message at a time, with
        `handle_next`."""
        consumer = yield from self._subscribe(0.0)
        self._prepare(consumer)
        return consumer

    def handle_next(self, consumer: Consumer) -> Flow[bool]:
        """Handle the next message that is due, if there is one."""
        claimed = yield from consumer.take_next(0.0)
        if claimed is not None:
            yield from self._handle(consumer, claimed)
        return claimed is not None

    # --- ending -------------------------------------------------------------------------------------------------

    def _described(self) -> str:
        return f"the handler of subscription {self.id}"

    def ask_to_stop(self) -> None:
        super().ask_to_stop()
        if self._consumer is not None:
            self._consumer.interrupt()

    def _close(self) -> Flow[None]:
        if self._consumer is not None:
            try:
                yield from self._consumer.close()
            except HeadwaterError as exc:  # it is free when its lease runs out
                logger.warning("subscription %s could not be released: %s", self.id, exc)
        yield from super()._close()

    # --- working ------------------------------------------------------------------------------------------------

    def _work(self, consumer: Consumer) -> Flow[None]:
        with consumer.taking():
            while not self._stopped.done:
                try:
                    claimed = consumer.pop() or (yield from consumer.take_next(None))
                    if claimed is None:  # interrupted
                        return
                    self._state = "running"
                    yield from self._handle(consumer, claimed)
                except PASSING_ERRORS as exc:  # nothing is lost meanwhile
                    self._state = "restarting"
                    logger.warning("subscription %s tries again: %s", self.id, exc)
                    yield WaitFor(self._stopped, RETRY_S)

    def _handle(self, consumer: Consumer, claimed: Claimed) -> Flow[None]:
        consumer.began(claimed)
        try:
            if self._once is None:
                yield from self._run(consumer, claimed)
            else:
                yield from self._run_once(self._once, consumer, claimed)
        finally:
            consumer.ended(claimed)

    def _run_once(self, once: HandledOnce, consumer: Consumer, claimed: Claimed) -> Flow[None]:
        id = claimed.message.scoped_id
        answer = yield from once.begin(id, lambda: not (self._stopped.done or consumer.lost), self._stopped)
        if answer == "first":
            try:
                yield from self._run(consumer, claimed)
            finally:
                once.ended(id)
        elif answer == "done":
            consumer.ack_soon([claimed])  # it was handled before: the ack is all that is missing
        else:  # stopped while it waited for the claim of another worker
            consumer.put_back([claimed])

    def _run(self, consumer: Consumer, claimed: Claimed) -> Flow[None]:
        message = self._receive(claimed)
        error: BaseException | None = yield Attempt(self._registration.handler, message)
        failure, again = None, False
        if error is not None:
            from_the_function_on(error)
            failure = self._failure(error)
            again = not isinstance(error, Reject | InvalidDataError)  # an undecodable payload stays so
        if again:
            attempts = f"attempt {claimed.attempt} of {consumer.spec.retry.max_attempts}"
            logger.warning(
                "handler %s failed on message %d, %s", self._name, claimed.message.seq, attempts, exc_info=error
            )
        if self._once is not None:
            done = failure is None and not message.declined
            yield from (self._once.finish if done else self._once.release)(claimed.message.scoped_id)
        if message.settled:
            return
        if failure is None:
            if self._registration.auto_ack:
                consumer.ack_soon([claimed])
            return
        try:
            yield from consumer.nack(claimed, None, failure) if again else consumer.reject(claimed, failure)
        except (LeaseLostError, NotDeliveredError) as exc:
            if consumer.lost:
                raise
            logger.warning("%s", exc)  # it took too long and will be, or has been, delivered again

    def _failure(self, exc: BaseException) -> Failure:
        stack = "".join(traceback.format_exception(exc))[-STACK_CHARS_MAX:]
        reason: Reason = "rejected" if isinstance(exc, Reject) else "processing_error"
        return Failure(reason, error_text(exc), stack, self._name)


# --- handling once ----------------------------------------------------------------------------------------------------


class HandledOnce:
    """A handler's dedupe queue, asked as flows: whether a message is this worker's to handle, and what became of it.
    Ids are scoped ones, since a handler may have many topics.

    A worker waits here for the claim of another one, not by nacks: each of those would count as an attempt, and a few
    of them as a dead letter. While a message is being handled its claim is extended, as its lease is."""

    def __init__(self, queue: DedupeQueue, handler: str, claim_ms: int) -> None:
        self._queue = queue
        self._handler = handler
        self._claim_ms = claim_ms
        self._pool = ThreadPoolExecutor(DEDUPE_THREADS_MAX, thread_name_prefix=f"headwater-dedupe-{handler}")
        self._at_work: dict[str, None] = {}
        self._extender: threading.Thread | None = None
        self._lock = threading.Lock()
        self._never = threading.Event()

    def begin(self, id: str, goes_on: Callable[[], bool], stopped: Completion[None]) -> Flow[Begun]:
        """First or done; busy only if it should no longer wait. A queue that cannot be reached is asked again, since
        the alternative is to handle a message twice."""
        while True:
            answer: Begun = "busy"
            pause_s = DEDUPE_BUSY_S
            try:
                answer = yield Blocking(partial(self._begin, key_of(id)), self._pool)
            except StoreError as exc:
                logger.warning("handler %s waits for its dedupe queue: %s", self._handler, exc)
                pause_s = RETRY_S
            if answer != "busy" or not goes_on():
                return answer
            yield WaitFor(stopped, pause_s)

    def _begin(self, key: str) -> Begun:
        answer = self._queue.begin(self._handler, key, self._queue.clock.now_ms(), self._claim_ms)
        if answer == "first":
            with self._lock:
                self._at_work[key] = None
                if self._extender is None:
                    name = f"headwater-dedupe-{self._handler}-extender"
                    self._extender = threading.Thread(target=self._extend_claims, name=name, daemon=True)
                    self._extender.start()
        return answer

    def finish(self, id: str) -> Flow[None]:
        """Note that a message is handled, before its ack: a crash between the two costs no second handling."""
        try:
            yield Blocking(partial(self._queue.finish, self._handler, key_of(id)), self._pool)
        except StoreError as exc:
            logger.warning("handler %s could not note that %s is done: %s", self._handler, id, exc)

    def release(self, id: str) -> Flow[None]:
        try:
            yield Blocking(partial(self._queue.release, self._handler, key_of(id)), self._pool)
        except StoreError as exc:  # its claim runs out by itself
            logger.warning("handler %s could not release %s: %s", self._handler, id, exc)

    def ended(self, id: str) -> None:
        """Its claim is extended no longer."""
        with self._lock:
            self._at_work.pop(key_of(id), None)

    def _extend_claims(self) -> None:
        """Extend the claims as long as something is being handled, and a little longer, so that not every message
        starts a thread."""
        while True:
            self._never.wait(self._claim_ms / 1000 / DEDUPE_EXTENDS_PER_CLAIM)
            with self._lock:
                at_work = list(self._at_work)
                if not at_work:
                    self._extender = None
                    return
            for key in at_work:
                try:
                    self._queue.extend(self._handler, key, self._queue.clock.now_ms(), self._claim_ms)
                except HeadwaterError as exc:
                    logger.warning("handler %s could not extend its claim of %s: %s", self._handler, key, exc)


def key_of(id: str) -> str:
    """The key of a message in the queue: its scoped id, or a digest of one that only plain SQL could have put there."""
    raw = id.encode(errors="surrogatepass")
    fits = 0 < len(id) <= DEDUPE_ID_CHARS_MAX and "\0" not in id and raw.decode(errors="replace") == id
    return id if fits else hashlib.sha256(raw).hexdigest()


# --- signals ----------------------------------------------------------------------------------------------------------


_asked_by_signals: list[Callable[[], object]] = []  # several logs may run on one event loop


@contextlib.contextmanager
def stopped_by_signals(ask_to_stop: Callable[[], object]) -> Iterator[None]:
    """SIGTERM and SIGINT ask to stop; a second one ends the process at once. Only the main thread has signals; the
    application's own handlers are back when nothing runs any more."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    _asked_by_signals.append(ask_to_stop)
    if len(_asked_by_signals) == 1:
        _take_signals()
    try:
        yield
    finally:
        _asked_by_signals.remove(ask_to_stop)
        if not _asked_by_signals:
            _give_signals_back()


_before: dict[signal.Signals, Any] = {}  # the application's handlers


def _take_signals() -> None:
    asked = False

    def on_signal(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        if asked:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        asked = True
        for ask_to_stop in list(_asked_by_signals):
            ask_to_stop()

    _before.update({number: signal.signal(number, on_signal) for number in (signal.SIGTERM, signal.SIGINT)})


def _give_signals_back() -> None:
    for number, handler in _before.items():
        signal.signal(number, handler or signal.SIG_DFL)
