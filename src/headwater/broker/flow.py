"""Use cases are generators that yield what they wait for, so the sync and async APIs share one implementation.

A flow yields a step and is sent its outcome. Threads run flows with `run_blocking`, event loops with `run_async`; no
use case is written twice. The steps:

    Completion  a value that another thread will provide
    WaitFor     a completion with a timeout; the outcome says whether it came in time
    Blocking    work that may block: a thread runs it in place, an event loop in a pool
    Call        a user's function, which on an event loop may be a coroutine function
    Attempt     a user's function; the outcome is what it raised, or None
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import threading
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Executor
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

from headwater.broker.logger import logger
from headwater.errors import InvalidOptionError

T = TypeVar("T")

_PENDING = object()
_Waiter = Any  # a locked lock, an event loop with a future of it or what to call there, or a callback
_Woken = asyncio.Future[None] | Callable[[], None]

__tracebackhide__ = True  # pytest leaves the frames of this module out: an error is never about them


class Completion(Generic[T]):
    """A value that will come from another thread. Finishing it twice is harmless: the first outcome stays."""

    __slots__ = ("_error", "_value", "_waiters")

    def __init__(self) -> None:
        self._value: Any = _PENDING
        self._error: BaseException | None = None
        self._waiters: list[_Waiter] = []

    @property
    def done(self) -> bool:
        return self._value is not _PENDING or self._error is not None

    @property
    def error(self) -> BaseException | None:
        return self._error

    def result(self) -> T:
        if self._error is not None:
            raise self._error
        value: T = self._value
        return value

    def wait(self, timeout_s: float | None = None) -> bool:
        """Block until done; False if the time is over first."""
        if self._value is _PENDING and self._error is None:  # `done`, in place: a publish comes here
            latch = threading.Lock()
            latch.acquire()
            self._waiters.append(latch)
            # The finisher sets the value before it looks for waiters, the waiter is added before it looks for the
            # value: one of the two sees the other.
            timeout = -1 if timeout_s is None else max(0.0, timeout_s)
            if self._value is _PENDING and self._error is None and not latch.acquire(timeout=timeout):
                self._waiters.remove(latch)
        return self._value is not _PENDING or self._error is not None

    def then(self, loop: asyncio.AbstractEventLoop, callback: Callable[[Completion[T]], None]) -> None:
        """Call back on this event loop when done: where a task for each of thousands would be too much."""
        once = _Once(callback)
        self._waiters.append((loop, partial(once, self)))
        if self.done:
            loop.call_soon(once, self)

    def watch(self, callback: Callable[[Completion[T]], None]) -> None:
        """Call back when done, on the thread that finishes it and before its waiters go on. Be quick."""
        once = _Once(callback)
        self._waiters.append(once)
        if self.done:
            once(self)

    async def wait_async(self, timeout_s: float | None = None) -> bool:
        if self._value is _PENDING and self._error is None:
            loop = asyncio.get_running_loop()
            future: asyncio.Future[None] = loop.create_future()
            self._waiters.append((loop, future))
            if not self.done:
                if timeout_s is None:
                    await future
                else:
                    timer = loop.call_later(max(0.0, timeout_s), _set_if_waiting, future)
                    try:
                        await future
                    finally:
                        timer.cancel()
                        self._waiters.remove((loop, future))
        return self.done


class _Once:
    """A callback for one call, whichever of two threads is first."""

    __slots__ = ("_callbacks",)

    def __init__(self, callback: Callable[[Any], None]) -> None:
        self._callbacks = [callback]

    def __call__(self, completion: Any) -> None:
        try:
            callback = self._callbacks.pop()
        except IndexError:
            return
        try:
            callback(completion)
        except Exception:  # the completions that are finished with this one must have their outcome all the same
            logger.exception("what follows a finished ticket failed")


class WaitFor(NamedTuple):
    """Wait for a completion, but no longer than this; the flow is sent whether it came."""

    completion: Completion[Any]
    timeout_s: float | None


class Blocking(NamedTuple):
    """`abandon` is called, on an event loop, when the flow is cancelled while the work runs. It may not block."""

    work: Callable[[], Any]
    pool: Executor
    abandon: Callable[[], None] | None = None


class Call(NamedTuple):
    function: Callable[..., Any]
    argument: Any


class Attempt(NamedTuple):
    """Not raised inside the flow, where a GeneratorExit of the function would look like the flow's own."""

    function: Callable[..., Any]
    argument: Any


Step = Completion[Any] | WaitFor | Blocking | Call | Attempt
Flow = Generator[Step, Any, T]
Pending = Flow[T] | Completion[T]
"""What a verb returns: several steps, or the one that it waits for."""


def complete(completions: Iterable[tuple[Completion[Any], Any, BaseException | None]]) -> bool:
    """Give completions their outcome. Waiters of one event loop are woken by one call into it. Returns whether some of
    the running one go on."""
    by_loop: dict[asyncio.AbstractEventLoop, list[_Woken]] = {}
    for completion, value, error in completions:
        if completion._value is not _PENDING or completion._error is not None:
            continue
        if error is not None:
            completion._error = error
        else:
            completion._value = value
        for waiter in list(completion._waiters):
            if isinstance(waiter, tuple):
                by_loop.setdefault(waiter[0], []).append(waiter[1])
            elif isinstance(waiter, _Once):
                waiter(completion)
            else:
                with contextlib.suppress(RuntimeError):  # two finishers at once: the other one has opened it
                    waiter.release()
    here = asyncio._get_running_loop() if by_loop else None
    for loop, woken in by_loop.items():
        if loop is here:
            _wake_all(woken)
            continue
        with contextlib.suppress(RuntimeError):  # the loop is closed, and nothing waits there
            loop.call_soon_threadsafe(_wake_all, woken)
    return here in by_loop


def _wake_all(woken: list[_Woken]) -> None:
    for each in woken:
        if isinstance(each, asyncio.Future):
            if not each.done():
                each.set_result(None)
        else:
            each()


def _set_if_waiting(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def finished(value: T) -> Completion[T]:
    completion: Completion[T] = Completion()
    completion._value = value
    return completion


def wait(pending: Pending[T]) -> Flow[T]:
    """Wait inside a flow: `value = yield from wait(log.publish(…))`."""
    if isinstance(pending, Completion):
        value: T = yield pending
        return value
    return (yield from pending)


def run_blocking(flow: Pending[T]) -> T:
    if isinstance(flow, Completion):
        flow.wait()
        return flow.result()
    try:
        step = next(flow)
        while True:
            try:
                outcome = _block_on(step)
            except BaseException as exc:
                step = flow.throw(exc)
            else:
                step = flow.send(outcome)
    except StopIteration as stop:
        value: T = stop.value
        return value


def run_together(flows: Iterable[Flow[Any]], on_error: Callable[[Flow[Any], Exception], None]) -> None:
    """Run many flows of which each waits for a completion: all are begun before the first is waited for, so that what
    they ask of the committer goes into one group."""
    begun: list[tuple[Flow[Any], Step]] = []
    for flow in flows:
        try:
            begun.append((flow, next(flow)))
        except StopIteration:
            continue
        except Exception as exc:
            on_error(flow, exc)
    for flow, step in begun:
        try:
            run_blocking(_resumed(flow, step))
        except Exception as exc:
            on_error(flow, exc)


def _resumed(flow: Flow[T], step: Step) -> Flow[T]:
    """A flow that has yielded a step already, from there on."""
    while True:
        try:
            advance = partial(flow.send, (yield step))
        except BaseException as exc:
            advance = partial(flow.throw, exc)
        try:
            step = advance()
        except StopIteration as stop:
            value: T = stop.value
            return value


def _block_on(step: Step) -> Any:
    if isinstance(step, Completion):
        step.wait()
        return step.result()
    if isinstance(step, Attempt):
        try:
            outcome = step.function(step.argument)
            if outcome is not None and inspect.iscoroutine(outcome):
                outcome.close()
                raise InvalidOptionError("it returns a coroutine", next="Open the log for asyncio")
        except BaseException as exc:
            return exc
        return None
    if isinstance(step, WaitFor):
        return step.completion.wait(step.timeout_s)
    if isinstance(step, Blocking):
        return step.work()
    return step.function(step.argument)


async def run_async(flow: Pending[T]) -> T:
    if isinstance(flow, Completion):
        if flow._value is _PENDING and flow._error is None:  # `done`, in place: every publish comes here
            loop = asyncio.get_running_loop()
            future: asyncio.Future[None] = loop.create_future()
            flow._waiters.append((loop, future))
            if flow._value is _PENDING and flow._error is None:
                await future
        return flow.result()
    try:
        step = next(flow)
        while True:
            try:
                if type(step) is Completion:
                    await step.wait_async()
                    outcome = step.result()
                else:
                    outcome = await _await(step)
            except BaseException as exc:
                step = flow.throw(exc)
            else:
                step = flow.send(outcome)
    except StopIteration as stop:
        value: T = stop.value
        return value


async def _await(step: Step) -> Any:
    if isinstance(step, WaitFor):
        return await step.completion.wait_async(step.timeout_s)
    if isinstance(step, Blocking):
        try:
            return await asyncio.get_running_loop().run_in_executor(step.pool, step.work)
        except asyncio.CancelledError:
            if step.abandon is not None:
                step.abandon()
            raise
    if isinstance(step, Call):
        outcome = step.function(step.argument)
        return await outcome if inspect.isawaitable(outcome) else outcome
    if isinstance(step, Attempt):
        try:
            outcome = step.function(step.argument)
            if inspect.isawaitable(outcome):
                await outcome
        except BaseException as exc:
            if isinstance(exc, asyncio.CancelledError) and _is_being_cancelled():
                raise
            return exc
        return None
    await step.wait_async()
    return step.result()


def _is_being_cancelled() -> bool:
    """Whether this task was asked to end; a CancelledError may also come out of what it awaits."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
