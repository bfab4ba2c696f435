"""Threads of a log besides its writer: pools for reads where sources take turns, and periodic tasks."""

from __future__ import annotations

import math
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import ContextVar
from functools import partial
from typing import Any, ParamSpec, TypeVar

from headwater.broker.logger import logger
from headwater.errors import ReadOnlyError

P = ParamSpec("P")
T = TypeVar("T")

SOURCE: ContextVar[Hashable] = ContextVar("source", default=None)
"""On whose behalf this task works. A server sets it for each call; everything else in a process is one source."""


class FairThreadPool(ThreadPoolExecutor):
    """Threads for reads, with a queue for each source; the sources take turns. A source that asks for much waits behind
    itself, and the others do not wait behind it."""

    def __init__(self, threads: int, name: str) -> None:
        super().__init__(threads, thread_name_prefix=name)
        self._turn = threading.Lock()
        self._waiting: OrderedDict[Hashable, deque[tuple[Future[Any], Callable[[], Any]]]] = OrderedDict()

    def submit(self, work: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        return self.submit_for(SOURCE.get(), partial(work, *args, **kwargs))

    def submit_for(self, source: Hashable, work: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()
        with self._turn:
            super().submit(self._take_turn)  # as many turns as there are works
            self._waiting.setdefault(source, deque()).append((future, work))
        return future

    def _take_turn(self) -> None:
        with self._turn:
            source, queue = next(iter(self._waiting.items()))
            future, work = queue.popleft()
            if queue:
                self._waiting.move_to_end(source)
            else:
                del self._waiting[source]
        if not future.set_running_or_notify_cancel():
            return
        try:
            outcome = work()
        except BaseException as exc:
            future.set_exception(exc)
        else:
            future.set_result(outcome)


class PeriodicTask:
    """Calls `work` every `interval_s()` seconds on a thread of its own, the first time `at_once` or after an interval.
    Errors are logged, and the thread goes on; that the log may not be written, as for a role that only reads, is logged
    once."""

    def __init__(
        self, name: str, work: Callable[[], object], interval_s: Callable[[], float], *, at_once: bool = False
    ) -> None:
        self._work = work
        self._interval_s = interval_s
        self._at_once = at_once
        self._stopping = False
        self._poked = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def poke(self) -> None:
        """Ask for the interval anew: it may be shorter now than the one that is being waited for."""
        self._poked.set()

    def stop(self) -> None:
        self._stopping = True
        self._poked.set()
        self._thread.join()

    def _run(self) -> None:
        last_s = -math.inf if self._at_once else time.monotonic()
        is_logged = False
        while True:
            self._poked.wait(max(0.0, last_s + self._interval_s() - time.monotonic()))
            self._poked.clear()
            if self._stopping:
                return
            if time.monotonic() - last_s >= self._interval_s():
                last_s = time.monotonic()
                try:
                    self._work()
                except ReadOnlyError as exc:
                    if not is_logged:
                        logger.info("background work cannot write, so it is left to other processes: %s", exc)
                    is_logged = True
                except Exception:
                    logger.exception("background work failed; the next try is in %s s", self._interval_s())
