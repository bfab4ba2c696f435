"""Threads for reads, where sources take turns: one that asks for much waits behind itself, the others not behind it."""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import ContextVar
from functools import partial
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

SOURCE: ContextVar[Hashable] = ContextVar("source", default=None)
"""On whose behalf this task works: a server sets it for each call. All that a process does for itself is one source."""


class Lanes(ThreadPoolExecutor):
    """Each source has a queue of its own, and whichever thread is free takes one work of the next source."""

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
