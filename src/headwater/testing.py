"""For tests of programs that use Headwater: a log whose clock the test moves, handlers run by the test itself, and
assertions on what was published.

    with testing.open_log() as log:
        register_handlers(log)
        log.publish("orders.new", {"order": 17})
        testing.drain(log)
        testing.assert_published(log, "mails.>", data={"to": "reader@example.org"})

`drain`, `published` and `assert_published` take a log of either API; those of an `AsyncLog` are awaited. The plugin
`pytest_headwater` offers the log and its clock as fixtures.
"""

from __future__ import annotations

import asyncio
import contextlib
import difflib
import inspect
import json
import math
import os
import weakref
from collections.abc import Awaitable, Callable, Iterator, Mapping
from datetime import timedelta
from functools import wraps
from typing import Any, NamedTuple, TypeVar, cast, overload

from headwater.api._async import AsyncLog
from headwater.api._runtime import Opening
from headwater.api._sync import Log
from headwater.arguments import check_whole, hinted
from headwater.broker.consumer import Consumer
from headwater.broker.flow import Flow, run_async, run_blocking
from headwater.broker.handlers import Registration, RunningHandler
from headwater.broker.log import LocalLog
from headwater.broker.schedules import Occurrence, RunningSchedule, ScheduleRegistration
from headwater.broker.subscribe import SubscribeOptions, make_spec
from headwater.errors import InvalidDataError, InvalidOptionError, InvalidStateError, TooLargeError
from headwater.formats import Span, datetime_of, span_ms
from headwater.message import Message, decode, encode
from headwater.ports.clock import ManualClock
from headwater.ports.records import selection_of
from headwater.wiring import open, open_async

__tracebackhide__ = True  # pytest leaves the frames of this module out: the mistake is in the test

STEPS_MAX = 10_000  # calls of handlers and moves of the clock in one drain
CLOCK_S_MAX = 366 * 86_400  # how far a drain moves the clock unless `within` says so
PUBLISHED_PAGE = 1_000
SHOWN_MAX = 10  # messages and topics in the text of a failed assertion
SHOWN_CHARS_MAX = 200  # of one of them
DIFF_LINES_MAX = 60
DIFF_CHARS_MAX = 20_000  # a diff of more takes too long

T = TypeVar("T")


class _Anything:
    def __repr__(self) -> str:
        return "anything"


ANYTHING: Any = _Anything()


class HandlerError(NamedTuple):
    """An error of a handler: its subscription, the message, the attempt and the exception."""

    subscription: str
    message: Message
    attempt: int
    error: BaseException


class Drained(NamedTuple):
    """What a drain did: how many messages were handled without an error, the errors of all attempts, by how much the
    clock was moved, and how many occurrences of schedules were done."""

    handled: int
    errors: list[HandlerError]
    elapsed: timedelta
    occurrences: int = 0


class NotDrainedError(AssertionError):
    """A drain did not come to an end. The text says what is left; `drained` is what was done until then."""

    def __init__(self, text: str, drained: Drained) -> None:
        super().__init__(text)
        self.drained = drained


def open_log(url: str | os.PathLike[str] = "memory:", *, clock: ManualClock | None = None) -> Log:
    """A log for one test. Its time stands still until the test moves it, and nothing happens in the background: leases
    are not renewed, and retention applies when the test calls `run_maintenance`."""
    return open(url, clock=clock or ManualClock(), heartbeats=False, maintenance_interval=None, durability="relaxed")


def open_log_async(url: str | os.PathLike[str] = "memory:", *, clock: ManualClock | None = None) -> Opening[AsyncLog]:
    """`open_log` for asyncio: `async with testing.open_log_async() as log`."""
    return open_async(
        url, clock=clock or ManualClock(), heartbeats=False, maintenance_interval=None, durability="relaxed"
    )


def clock_of(log: Log | AsyncLog) -> ManualClock:
    """The clock of a log that was opened with a ManualClock; `clock_of(log).advance(60)` moves it by a minute."""
    clock = _local(log).engine.clock
    if not isinstance(clock, ManualClock):
        raise InvalidStateError(
            "the time of this log cannot be moved",
            where=log.name,
            next="Open it with headwater.testing.open_log(), or with clock=headwater.ManualClock()",
        )
    return clock


def _local(log: Log | AsyncLog) -> LocalLog:
    if isinstance(log, Opening):
        log.close()
        raise InvalidOptionError(
            "the log is not awaited",
            next="Write `async with open_log_async() as log`, or `log = await open_log_async()`",
        )
    if not isinstance(log, Log | AsyncLog):
        raise InvalidOptionError(
            f"expected a log, not {log!r:.80}", next="Pass that of headwater.testing.open_log(), or of the fixture log"
        )
    core: Any = log._core
    if not isinstance(getattr(core, "_inner", core), LocalLog):  # within the proxy of tracing
        raise InvalidStateError(
            "the log is behind a server", where=log.name, next="Test with a log of this process: memory:"
        )
    return cast(LocalLog, core)


# --- draining ---------------------------------------------------------------------------------------------------------


@overload
def drain(log: Log, *, within: Span | None = None, limit: int = STEPS_MAX) -> Drained: ...
@overload
def drain(log: AsyncLog, *, within: Span | None = None, limit: int = STEPS_MAX) -> Awaitable[Drained]: ...
@hinted("drain")
def drain(log: Log | AsyncLog, *, within: Span | None = None, limit: int = STEPS_MAX) -> Drained | Awaitable[Drained]:
    """Run the declared handlers in the calling thread, one message at a time, until no message is left for them. When
    nothing is due, the clock is moved to the next delay, backoff or end of an `ack_wait`. Handlers that fail are
    retried and their messages dead-lettered as ever; the result has their errors.

    `within` seconds, a timedelta or a text like `5m`: what is due in that time is handled, and the clock is moved by
    exactly this time; 0 handles what is due now. Schedules run only with it, because they never end; an error of a
    schedule's function is raised. Without it, a drain that would move the clock by more than a year raises
    NotDrainedError, and so does one of more than `limit` steps: calls of functions and moves of the clock.
    """
    check_whole("limit", limit, 1, 2**31)
    within_ms = None if within is None else span_ms(within, "within")
    return _run(log, _Drain(log, within_ms, limit).run())


@overload
def _run(log: Log, flow: Flow[T]) -> T: ...
@overload
def _run(log: AsyncLog, flow: Flow[T]) -> Awaitable[T]: ...
@overload
def _run(log: Log | AsyncLog, flow: Flow[T]) -> T | Awaitable[T]: ...
def _run(log: Log | AsyncLog, flow: Flow[T]) -> T | Awaitable[T]:
    return run_async(flow) if isinstance(log, AsyncLog) else run_blocking(flow)


# How far ephemeral handlers have read: the log keeps no position for them.
_read_to: weakref.WeakKeyDictionary[Log | AsyncLog, int] = weakref.WeakKeyDictionary()


class _Drain:
    def __init__(self, log: Log | AsyncLog, within_ms: int | None, limit: int) -> None:
        self._log = log
        self._core = _local(log)
        self._clock = clock_of(log)
        self._began_ms = self._clock.now_ms()
        self._until_ms = self._began_ms + (CLOCK_S_MAX * 1000 if within_ms is None else within_ms)
        self._is_bounded = within_ms is not None
        self._limit = limit
        self._steps = self._calls = 0
        self._errors: list[HandlerError] = []
        self._running: dict[str, tuple[RunningHandler, Consumer]] = {}
        self._schedules: dict[str, _DrainedSchedule] = {}
        self._occurrences = 0

    def run(self) -> Flow[Drained]:
        self._refuse_without_work()
        with contextlib.ExitStack() as taking:
            try:
                while True:
                    last_seq = yield from self._handle_due(taking)
                    due_ms = min(self._due_times(), default=None)
                    if due_ms is None or due_ms > self._until_ms:
                        break
                    self._step()
                    self._move_to(due_ms)
                if due_ms is not None and not self._is_bounded:
                    due = datetime_of(due_ms).isoformat(sep=" ", timespec="seconds")
                    raise (yield from self._unfinished(f"the next message is due at {due}"))
            except _LimitReached:
                raise (yield from self._unfinished(f"it made more than {self._limit} steps")) from None
            finally:
                yield from self._close()
        _read_to[self._log] = last_seq
        if self._is_bounded:
            self._move_to(self._until_ms)
        return self._drained()

    def _refuse_without_work(self) -> None:
        declared = self._log._handlers.declared()
        if not declared:
            raise InvalidStateError(
                "no handler is declared on this log", where=self._log.name, next="Is it on another log? Declare it here"
            )
        if not self._is_bounded and not any(isinstance(each, Registration) for each in declared):
            raise InvalidStateError(
                "only schedules are declared, which never end",
                where=self._log.name,
                next='Pass how long to run them: drain(log, within="1h")',
            )

    def _handle_due(self, taking: contextlib.ExitStack) -> Flow[int]:
        """Everything that is due now, also what the handlers publish meanwhile. Returns the last seq that each handler
        was offered."""
        while True:
            last_seq, calls = (yield from self._core.last_seq()), self._calls + self._occurrences
            for registration in self._log._handlers.declared():  # a handler may declare another one
                if isinstance(registration, Registration):
                    yield from self._handle_all(registration, taking)
                elif isinstance(registration, ScheduleRegistration) and self._is_bounded:
                    yield from self._publish_due(registration)
            if self._calls + self._occurrences == calls:
                return last_seq

    def _handle_all(self, registration: Registration, taking: contextlib.ExitStack) -> Flow[None]:
        if registration.id not in self._running:
            running = RunningHandler(self._core, self._recorded(registration), self._log._handlers._spawn, _nothing)
            consumer = yield from running.subscribe_without_workers()
            self._running[registration.id] = running, consumer
            taking.enter_context(consumer.taking())
        running, consumer = self._running[registration.id]
        while True:
            calls = self._calls
            while (yield from running.handle_next(consumer)):
                self._step()
                self._raise_what_ends_the_test()
            yield from consumer.flush_acks()  # what is acked may make room, or be the first of its key
            if self._calls == calls:
                return

    def _raise_what_ends_the_test(self) -> None:
        """A Ctrl-C, or `pytest.fail()` in a handler, is no error of the handler's, though one on a thread would be."""
        for failed in self._errors[-1:]:
            if not isinstance(failed.error, Exception | SystemExit | asyncio.CancelledError):
                raise failed.error

    def _publish_due(self, registration: ScheduleRegistration) -> Flow[None]:
        schedule = self._schedules.get(registration.id)
        if schedule is None:
            schedule = self._schedules[registration.id] = _DrainedSchedule(self, registration)
            schedule.last_ms = (yield from schedule.running.declare()).last_ms
        wait_s = 0.0
        while not wait_s:
            schedule.last_ms, wait_s = yield from schedule.running.publish_due(schedule.last_ms)
            if schedule.error is not None:
                raise schedule.error
        schedule.next_ms = None if wait_s == math.inf else self._clock.now_ms() + math.ceil(wait_s * 1000)

    def count_occurrence(self) -> None:
        self._step()
        self._occurrences += 1

    def _recorded(self, registration: Registration) -> Registration:
        """The registration with a handler that is counted and whose errors are noted."""

        def count() -> None:
            self._calls += 1

        def note(message: Any, error: BaseException) -> None:
            self._errors.append(HandlerError(registration.id, message._claimed.message, message.attempt, error))

        options = registration.options
        if options.get("mode") == "ephemeral" and "start" not in options:
            options = cast(SubscribeOptions, {**options, "start": _read_to.get(self._log, 0) + 1})
        return registration._replace(handler=_observed(registration.handler, count, note), options=options)

    def _due_times(self) -> Iterator[int]:
        for _, consumer in self._running.values():
            if consumer.look_again_ms is not None:
                yield consumer.look_again_ms
        for schedule in self._schedules.values():
            if schedule.next_ms is not None:
                yield schedule.next_ms

    def _move_to(self, at_ms: int) -> None:
        """Move the clock there, or a little further, if that is now and something only has to be looked at again."""
        self._clock.advance(max(at_ms - self._clock.now_ms(), 1 if at_ms < self._until_ms else 0) / 1000)

    def _step(self) -> None:
        self._steps += 1
        if self._steps > self._limit:
            raise _LimitReached

    def _drained(self) -> Drained:
        elapsed = timedelta(milliseconds=self._clock.now_ms() - self._began_ms)
        return Drained(self._calls - len(self._errors), self._errors, elapsed, self._occurrences)

    def _unfinished(self, why: str) -> Flow[NotDrainedError]:
        drained = self._drained()
        infos = yield from self._core.subscription_infos()
        lines = [
            f"the drain did not end: {why}",
            f"handled {drained.handled} messages with {len(drained.errors)} errors, and moved the clock by "
            f"{drained.elapsed}",
            *(f"left for {info.id}: {info.lag} messages on {info.pattern}" for info in infos if info.lag),
        ]
        for failed in drained.errors[-1:]:
            topic, error = failed.message.topic, failed.error
            lines.append(f"last error, of {failed.subscription} on {topic}: {type(error).__name__}: {error}")
        lines.append("a handler that publishes what it handles never ends; `within` limits the time, `limit` the steps")
        return NotDrainedError("\n".join(lines), drained)

    def _close(self) -> Flow[None]:
        for _, consumer in self._running.values():
            yield from consumer.close()


class _DrainedSchedule:
    """A schedule whose occurrences the drain publishes. The function's error is noted, and its occurrence not tried
    again: the drain raises it."""

    def __init__(self, drain: _Drain, registration: ScheduleRegistration) -> None:
        self.last_ms = 0
        self.next_ms: int | None = None
        self.error: BaseException | None = None

        def note(occurrence: Occurrence, error: BaseException) -> None:
            self.error = error

        called = _observed(registration.function, drain.count_occurrence, note)
        spawn = drain._log._handlers._spawn
        self.running = RunningSchedule(drain._core, registration._replace(function=called), spawn, _nothing)


def _observed(
    function: Callable[[Any], Any], on_call: Callable[[], None], on_error: Callable[[Any, BaseException], None]
) -> Callable[[Any], Any]:
    """The function, which may return an awaitable, with its calls and its errors reported."""

    async def awaited(argument: Any, outcome: Awaitable[Any]) -> Any:
        try:
            return await outcome
        except BaseException as exc:
            on_error(argument, exc)
            raise

    @wraps(function)
    def observed(argument: Any) -> Any:
        on_call()
        try:
            outcome = function(argument)
        except BaseException as exc:
            on_error(argument, exc)
            raise
        return awaited(argument, outcome) if inspect.isawaitable(outcome) else outcome

    return observed


class _LimitReached(Exception):
    pass


def _nothing() -> None:
    pass


# --- what was published -----------------------------------------------------------------------------------------------


@overload
def published(log: Log, pattern: str = ">", *, where: str | None = None) -> list[Message]: ...
@overload
def published(log: AsyncLog, pattern: str = ">", *, where: str | None = None) -> Awaitable[list[Message]]: ...
def published(
    log: Log | AsyncLog, pattern: str = ">", *, where: str | None = None
) -> list[Message] | Awaitable[list[Message]]:
    """The messages of the log that match, oldest first; also those that are delayed, expired or handled already."""
    return _run(log, _published(_local(log), pattern, where))


def _published(core: LocalLog, pattern: str, where: str | None) -> Flow[list[Message]]:
    selection = selection_of(make_spec(pattern, {"mode": "ephemeral", "where": where}))
    found: list[Message] = []
    after, last_seq = 0, (yield from core.last_seq())
    while after < last_seq:
        page, after = yield from core.engine.read(
            lambda reader, after=after: reader.scan(selection, after, PUBLISHED_PAGE, last_seq)  # type: ignore[misc]
        )
        found += page
    return found


@overload
def assert_published(
    log: Log, pattern: str, *, data: Any = ANYTHING, where: str | None = None, count: int | None = None
) -> list[Message]: ...
@overload
def assert_published(
    log: AsyncLog, pattern: str, *, data: Any = ANYTHING, where: str | None = None, count: int | None = None
) -> Awaitable[list[Message]]: ...
@hinted("assert_published")
def assert_published(
    log: Log | AsyncLog, pattern: str, *, data: Any = ANYTHING, where: str | None = None, count: int | None = None
) -> list[Message] | Awaitable[list[Message]]:
    """Raise an AssertionError unless a message on `pattern` has this data and meets this condition; with `count`,
    unless exactly `count` do. Returns those messages. `data` is compared as the JSON that it becomes; it may hold
    objects with a comparison of their own, such as `unittest.mock.ANY`. `where` is the language of subscriptions."""
    if count is not None:
        check_whole("count", count, 0, 2**31)
    return _run(log, _assert_published(_local(log), pattern, data, where, count))


def _assert_published(
    core: LocalLog, pattern: str, data: Any, where: str | None, count: int | None
) -> Flow[list[Message]]:
    candidates = yield from _published(core, pattern, where)
    expected = _as_json(data)
    matching = candidates if data is ANYTHING else [message for message in candidates if message.data == expected]
    if len(matching) == count or (count is None and matching):
        return matching
    wanted = f"{'a message' if count is None else f'{count} messages'} on {pattern}"
    if where is not None:
        wanted += f" where {where}"
    if data is not ANYTHING:
        wanted += f" with the data {_cut(repr(data))}"
    lines = [f"expected {wanted}; {len(matching) or 'none'} of {len(candidates)} on the pattern match"]
    if candidates and not matching:
        lines += _difference(expected, _closest(expected, candidates))
    all_of_it = candidates or (yield from _published(core, ">", None))
    lines += _listed("published" if candidates else "published on other topics, or not matching", all_of_it)
    raise AssertionError("\n".join(lines))


def _as_json(data: Any) -> Any:
    """What a message with this data has; or the data itself, if it holds what is no JSON."""
    try:
        return decode(cast(Any, encode(data, "data")[0]), "data")
    except (InvalidDataError, TooLargeError):
        return data


def _closest(expected: Any, candidates: list[Message]) -> Message:
    """The one that has most of the expected items; of several the last one."""

    def alike(message: Message) -> int:
        data = message.data
        if isinstance(expected, Mapping) and isinstance(data, dict):
            return sum(1 for key, value in expected.items() if key in data and data[key] == value)
        return int(type(data) is type(expected))

    return max(reversed(candidates), key=alike)


def _difference(expected: Any, message: Message) -> list[str]:
    wanted, got = _pretty(expected), _pretty(message.data)
    header = f"- expected, + message {message.seq} on {message.topic}:"
    if len(wanted) + len(got) > DIFF_CHARS_MAX:
        return [header, f"- {_cut(wanted)}", f"+ {_cut(got)}"]
    lines = list(difflib.ndiff(wanted.splitlines(), got.splitlines()))
    return [header, *lines[:DIFF_LINES_MAX], *(["…"] if len(lines) > DIFF_LINES_MAX else [])]


def _pretty(data: Any) -> str:
    """One line an item, so that a diff shows the item."""
    try:
        return json.dumps(data, indent=2, sort_keys=True, ensure_ascii=False, default=repr)
    except TypeError:  # keys that are no text
        return repr(data)


def _listed(title: str, messages: list[Message]) -> list[str]:
    if not messages:
        return ["the log is empty"]
    shown = [f"  {message.seq} {message.topic} {_cut(message.data_json)}" for message in messages[-SHOWN_MAX:]]
    more = [f"  … and {len(messages) - SHOWN_MAX} before these"] if len(messages) > SHOWN_MAX else []
    return [f"{title}:", *more, *shown]


def _cut(text: str) -> str:
    return text if len(text) <= SHOWN_CHARS_MAX else f"{text[: SHOWN_CHARS_MAX - 1]}…"
