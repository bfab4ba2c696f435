"""Plain callbacks for messages as they come: no cursor, no ack, nothing kept. The log is the truth, this is a hint.

Each subscriber has a bounded queue and gets its messages one at a time, in order. A callback that raises is logged and
goes on with the next message; a callback that is too slow loses its oldest waiting messages, which is counted.
"""

from __future__ import annotations

import inspect
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import msgspec

from headwater.broker.engine import Engine
from headwater.broker.flow import run_blocking
from headwater.broker.logger import logger
from headwater.broker.tail import Tail
from headwater.errors import Closed, InvalidOption
from headwater.message import Message
from headwater.ports.records import SubscriptionSpec
from headwater.topics import Dialect, Pattern, TopicTrie, parse_pattern

QUEUE_MAX = 1_000
CALLBACK_THREADS = 8
PAGE = 500
RETRY_S = 1.0

Callback = Callable[[Message], object]


class LiveCounts(msgspec.Struct):
    delivered: int = 0
    failed: int = 0
    dropped: int = 0


class Listener:
    def __init__(self, id: str, pattern: Pattern, callback: Callback, queue_max: int) -> None:
        self.id = id
        self.pattern = pattern
        self.callback = callback
        self.queue: deque[Message] = deque()
        self.queue_max = queue_max
        self.counts = LiveCounts()
        self.scheduled = False
        self.gone = False


class LiveVerbs(Protocol):
    """Plain callbacks for messages as they come."""

    run_coroutine: Callable[[Coroutine[Any, Any, Any]], Any] | None

    def subscribe(
        self, id: str, pattern: str, callback: Callback, *, dialect: Dialect = "nats", queue_max: int = QUEUE_MAX
    ) -> bool: ...

    def unsubscribe(self, id: str, pattern: str) -> bool: ...

    def unsubscribe_all(self, id: str) -> int: ...

    def counts(self, id: str) -> LiveCounts: ...


class Listeners(ABC):
    """`subscribe` and `unsubscribe` say whether they changed anything; `unsubscribe_all` says how many it ended. Where
    the messages come from is up to the kind."""

    def __init__(self, where: str) -> None:
        self.run_coroutine: Callable[[Coroutine[Any, Any, Any]], Any] | None = None  # set where there is an event loop
        self._where = where
        self._lock = threading.Lock()
        self._listeners: dict[tuple[str, str], Listener] = {}
        self._workers: ThreadPoolExecutor | None = None
        self._closed = False

    def subscribe(
        self,
        id: str,
        pattern: str,
        callback: Callback,
        *,
        dialect: Dialect = "nats",
        queue_max: int = QUEUE_MAX,
    ) -> bool:
        parsed = parse_pattern(pattern, dialect)
        if not callable(callback) or queue_max < 1:
            raise InvalidOption("a live subscription needs a callback and a queue of at least 1", where=id)
        if inspect.iscoroutinefunction(callback) and self.run_coroutine is None:
            raise InvalidOption("a coroutine function needs an event loop", where=id, next="Use headwater.connect()")
        with self._lock:
            if self._closed:
                raise Closed("the log is closed", where=self._where, next="Open it again")
            if (id, parsed.text) in self._listeners:
                return False
            if self._workers is None:
                self._workers = ThreadPoolExecutor(CALLBACK_THREADS, thread_name_prefix="headwater-live")
            listener = Listener(id, parsed, callback, queue_max)
            self._listeners[id, parsed.text] = listener
            self._begin(listener)
            return True

    def unsubscribe(self, id: str, pattern: str) -> bool:
        with self._lock:
            return self._remove((id, pattern))

    def unsubscribe_all(self, id: str) -> int:
        with self._lock:
            return sum([self._remove(key) for key in list(self._listeners) if key[0] == id])

    def _remove(self, key: tuple[str, str]) -> bool:
        listener = self._listeners.pop(key, None)
        if listener is None:
            return False
        listener.gone = True
        self._end(listener)
        return True

    @abstractmethod
    def _begin(self, listener: Listener) -> None:
        """It has been added; called under the lock."""

    @abstractmethod
    def _end(self, listener: Listener) -> None:
        """It has been removed; called under the lock."""

    def counts(self, id: str) -> LiveCounts:
        with self._lock:
            mine = [listener.counts for listener in self._listeners.values() if listener.id == id]
        return LiveCounts(
            sum(each.delivered for each in mine),
            sum(each.failed for each in mine),
            sum(each.dropped for each in mine),
        )

    def _offer(self, listener: Listener, message: Message) -> None:
        """Under the lock."""
        if len(listener.queue) >= listener.queue_max:
            listener.queue.popleft()
            listener.counts.dropped += 1
        listener.queue.append(message)
        if not listener.scheduled and self._workers is not None:
            listener.scheduled = True
            self._workers.submit(self._drain, listener)

    def _drain(self, listener: Listener) -> None:
        """Runs one listener's callbacks; `scheduled` keeps any other worker away from it, hence the order."""
        while True:
            with self._lock:
                if listener.gone or not listener.queue:
                    listener.scheduled = False
                    return
                message = listener.queue.popleft()
            try:
                outcome = listener.callback(message)
                if inspect.iscoroutine(outcome) and self.run_coroutine is not None:
                    self.run_coroutine(outcome)
                listener.counts.delivered += 1
            except Exception:
                listener.counts.failed += 1
                logger.exception("live callback %s failed on message %d", listener.id, message.seq)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            for key in list(self._listeners):
                self._remove(key)
            workers = self._workers
        self._stop_source()
        if workers is not None:
            workers.shutdown(wait=True)

    @abstractmethod
    def _stop_source(self) -> None:
        """Whatever brings the messages ends; called without the lock."""


class LiveFeed(Listeners):
    """For a log in this process: one reader follows it for all."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine.store.name)
        self._engine = engine
        self._trie: TopicTrie[Listener] = TopicTrie()
        self._tail: Tail | None = None
        self._pump: threading.Thread | None = None

    def _begin(self, listener: Listener) -> None:
        self._trie.add(listener.pattern, listener)
        if self._pump is None:
            with self._engine.store.read() as reader:
                now = reader.last_seq()
            self._tail = Tail(self._engine, "live", SubscriptionSpec(">"), now)
            self._pump = threading.Thread(target=self._run, args=(self._tail,), name="headwater-live", daemon=True)
            self._pump.start()

    def _end(self, listener: Listener) -> None:
        self._trie.remove(listener.pattern, listener)

    def _run(self, tail: Tail) -> None:
        while True:
            try:
                found = run_blocking(tail.take(PAGE, None))
            except Closed:
                return
            except Exception:
                logger.exception("the live feed could not read the log and tries again")
                time.sleep(RETRY_S)
                continue
            for claimed in found:
                with self._lock:
                    for listener in self._trie.match(claimed.message.topic):
                        self._offer(listener, claimed.message)

    def _stop_source(self) -> None:
        if self._tail is not None and self._pump is not None:
            run_blocking(self._tail.close())
            self._pump.join()
