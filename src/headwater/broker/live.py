"""Plain callbacks for messages as they come: no cursor, no ack, nothing kept. The log is the truth, this is a hint.

Each subscriber has a bounded queue and a worker of its own: a thread, or for a coroutine function a task. It gets its
messages one at a time, in order. A callback that raises is logged and goes on with the next message. A callback that is
too slow, or blocks, loses its own oldest waiting messages: they are counted, logged once until it has caught up, and
their number is given to `on_dropped` before the next message.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import msgspec

from headwater.arguments import INT64_MAX, check_callable, check_whole, hinted
from headwater.broker.engine import Engine
from headwater.broker.flow import Call, Completion, Flow, WaitFor, complete, run_async, run_blocking
from headwater.broker.logger import from_the_function_on, logger
from headwater.broker.tail_consumer import TailConsumer
from headwater.errors import ClosedError, InvalidOptionError
from headwater.message import Message
from headwater.ports.records import SubscriptionSpec
from headwater.topics import Dialect, Pattern, TopicTrie, parse_pattern

QUEUE_MAX = 1_000
PAGE = 500
RETRY_S = 1.0
IDLE_S = 10.0  # a worker without messages ends after so long
CLOSE_SECONDS_MAX = 5.0  # for the callbacks that run when the log is closed
JUST_BEFORE_MS = 1_000  # how far back the first look at the log goes; see `LiveFeed`

Callback = Callable[[Message], object]
OnDropped = Callable[[int], object]


class LiveCounts(msgspec.Struct):
    delivered: int = 0
    failed: int = 0
    dropped: int = 0


class Listener:
    def __init__(
        self, id: str, pattern: Pattern, callback: Callback, queue_max: int, on_dropped: OnDropped | None
    ) -> None:
        self.id = id
        self.pattern = pattern
        self.callback = callback
        self.is_coroutine_function = inspect.iscoroutinefunction(callback)
        self.on_dropped = on_dropped
        self.queue: deque[Message] = deque()
        self.queue_max = queue_max
        self.counts = LiveCounts()
        self.after = 0  # what has this seq or a lower one was there before
        self.dropped = 0  # and not reported yet
        self.is_behind = False  # it lost messages and has not caught up since
        self.gone = False
        self.news: Completion[None] = Completion()
        self.thread = 0  # where its worker runs


class LiveVerbs(Protocol):
    """Plain callbacks for messages as they come. These methods do not wait, so with asyncio they are not awaited."""

    loop: asyncio.AbstractEventLoop | None

    def subscribe(
        self,
        id: str,
        pattern: str,
        callback: Callback,
        *,
        dialect: Dialect = "nats",
        queue_max: int = QUEUE_MAX,
        on_dropped: OnDropped | None = None,
    ) -> bool:
        """Call `callback` with each new message. Return False if the id has a callback for the pattern already."""

    def unsubscribe(self, id: str, pattern: str) -> bool:
        """End one callback. Return whether there was one."""

    def unsubscribe_all(self, id: str) -> int:
        """End all callbacks of an id and return their number."""

    def counts(self, id: str) -> LiveCounts:
        """How many messages the callbacks of an id got, and how many were dropped."""


class Listeners(ABC):
    """`subscribe` and `unsubscribe` say whether they changed anything; `unsubscribe_all` says how many it ended. Where
    the messages come from is up to the kind."""

    def __init__(self, where: str) -> None:
        self.loop: asyncio.AbstractEventLoop | None = None  # of the user; where coroutine functions run
        self._where = where
        self._lock = threading.Lock()
        self._listeners: dict[tuple[str, str], Listener] = {}
        self._working: set[Listener] = set()
        self._tasks: set[asyncio.Task[None]] = set()  # an event loop alone does not keep them alive
        self._rested = threading.Condition(self._lock)
        self._closed = False

    @hinted("live.subscribe")
    def subscribe(
        self,
        id: str,
        pattern: str,
        callback: Callback,
        *,
        dialect: Dialect = "nats",
        queue_max: int = QUEUE_MAX,
        on_dropped: OnDropped | None = None,
    ) -> bool:
        parsed = parse_pattern(pattern, dialect)
        check_callable("callback", callback, where=id)
        check_whole("queue_max", queue_max, 1, INT64_MAX)
        if self.loop is None and any(map(inspect.iscoroutinefunction, (callback, on_dropped))):
            raise InvalidOptionError(
                "a coroutine function needs an event loop", where=id, next="Use headwater.open_async()"
            )
        with self._lock:
            if self._closed:
                raise ClosedError("the log is closed", where=self._where, next="Open it again")
            if (id, parsed.text) in self._listeners:
                return False
            listener = Listener(id, parsed, callback, queue_max, on_dropped)
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
        complete([(listener.news, None, None)])
        self._end(listener)
        return True

    @abstractmethod
    def _begin(self, listener: Listener) -> None:
        """Called under the lock when a listener has been added."""

    @abstractmethod
    def _end(self, listener: Listener) -> None:
        """Called under the lock when a listener has been removed."""

    def counts(self, id: str) -> LiveCounts:
        with self._lock:
            mine = [listener.counts for listener in self._listeners.values() if listener.id == id]
        return LiveCounts(
            sum(each.delivered for each in mine),
            sum(each.failed for each in mine),
            sum(each.dropped for each in mine),
        )

    def _offer(self, listener: Listener, message: Message) -> None:
        """Queue a message for a listener, under the lock; if the queue is full, the oldest is dropped."""
        if len(listener.queue) >= listener.queue_max:
            listener.queue.popleft()
            listener.counts.dropped += 1
            listener.dropped += 1
            if not listener.is_behind:
                listener.is_behind = True
                logger.warning("live callback %s is too slow and loses messages", listener.id)
        listener.queue.append(message)
        complete([(listener.news, None, None)])
        if listener not in self._working:
            self._start_worker(listener)

    # --- workers ------------------------------------------------------------------------------------------------

    def _start_worker(self, listener: Listener) -> None:
        """Start the worker of a listener, under the lock. Should it fail, because there are no more threads or the loop
        is closed, the next message tries again."""
        self._working.add(listener)
        try:
            if self.loop is not None and listener.is_coroutine_function:
                self.loop.call_soon_threadsafe(self._start_task, self.loop, listener)
            else:
                work = self._work(listener)
                threading.Thread(target=run_blocking, args=(work,), name="headwater-live", daemon=True).start()
        except RuntimeError:
            self._working.discard(listener)

    def _start_task(self, loop: asyncio.AbstractEventLoop, listener: Listener) -> None:
        task = loop.create_task(run_async(self._work(listener)))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _work(self, listener: Listener) -> Flow[None]:
        """Run one listener's callbacks. Being in `_working` keeps any other worker away from it, hence the order."""
        listener.thread = threading.get_ident()
        try:
            while (found := (yield from self._next(listener))) is not None:
                dropped, message = found
                if dropped and listener.on_dropped is not None:
                    yield from self._call(listener, listener.on_dropped, dropped)
                if (yield from self._call(listener, listener.callback, message)):
                    listener.counts.delivered += 1
                else:
                    listener.counts.failed += 1
                if listener.is_coroutine_function:  # one that never waits must not keep the loop to itself
                    yield Call(asyncio.sleep, 0)
        except BaseException:  # cancelled with its loop
            with self._lock:
                self._rest(listener)
            raise

    def _next(self, listener: Listener) -> Flow[tuple[int, Message] | None]:
        """How many were lost before it, and the message; None when the worker is to end."""
        is_idle = False
        while True:
            with self._lock:
                if listener.queue and not listener.gone:
                    dropped, listener.dropped = listener.dropped, 0
                    return dropped, listener.queue.popleft()
                if is_idle or listener.gone:
                    self._rest(listener)  # under the same lock, or a message that comes now would find no worker
                    return None
                listener.is_behind = False
                listener.news = Completion()
                wait = WaitFor(listener.news, IDLE_S)
            is_idle = not (yield wait)

    def _call(self, listener: Listener, function: Callable[[Any], object], argument: Any) -> Flow[bool]:
        """Call a callback and log its error. Returns whether it went well."""
        try:
            outcome = yield Call(function, argument)
            if inspect.iscoroutine(outcome) and self.loop is not None:  # given by a plain function on a thread
                asyncio.run_coroutine_threadsafe(outcome, self.loop).result()
            return True
        except (Exception, asyncio.CancelledError, SystemExit, KeyboardInterrupt) as exc:
            if _ends_its_task(exc):
                raise
            what = f"message {argument.seq}" if isinstance(argument, Message) else f"{argument} lost messages"
            logger.error("live callback %s failed on %s", listener.id, what, exc_info=from_the_function_on(exc))
            return False

    def _rest(self, listener: Listener) -> None:
        """Note that a worker has ended, under the lock."""
        self._working.discard(listener)
        self._rested.notify_all()

    def close(self) -> None:
        """Call no callback any more. Those that run have a few seconds to end; one that blocks is left behind."""
        with self._lock:
            self._closed = True
            for key in list(self._listeners):
                self._remove(key)
        self._stop_source()
        with self._lock:
            here = threading.get_ident()  # a callback may close the log
            self._rested.wait_for(lambda: all(each.thread == here for each in self._working), CLOSE_SECONDS_MAX)
            blocked = sorted({each.id for each in self._working if each.thread != here})
        if blocked:
            logger.warning("the log is closed while live callbacks still run: %s", ", ".join(blocked))

    @abstractmethod
    def _stop_source(self) -> None:
        """Whatever brings the messages ends; called without the lock."""


class LiveFeed(Listeners):
    """For a log in this process: one reader follows it for all, on a thread of its own.

    The callback gets everything that is published after `subscribe` returns. `subscribe` must not read the database to
    find out where that begins, for its caller may be an event loop. The highest seq that this process knows of is safe:
    a higher one is later, unless another process published it before and this one has not noticed yet. That
    may be much, so the reader leaves out what is older than a second. The rest is delivered: clocks and commits are not
    exact enough to tell just before from just after, and nothing that comes after may be missed."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine.store.name)
        self._engine = engine
        self._trie: TopicTrie[Listener] = TopicTrie()
        self._tail: TailConsumer | None = None
        self._pump: threading.Thread | None = None
        self._stopping = threading.Event()

    def _begin(self, listener: Listener) -> None:
        self._trie.add(listener.pattern, listener)
        listener.after = self._engine.wakeups.last_known
        if self._pump is None:
            since_ms = self._engine.clock.now_ms() - JUST_BEFORE_MS
            self._pump = threading.Thread(
                target=self._run, args=(listener.after, since_ms), name="headwater-live", daemon=True
            )
            self._pump.start()

    def _end(self, listener: Listener) -> None:
        self._trie.remove(listener.pattern, listener)

    def _run(self, after: int, since_ms: int) -> None:
        while not self._stopping.is_set():
            try:
                if self._tail is None:
                    before = run_blocking(self._engine.read(lambda reader: reader.seq_before(since_ms)))
                    self._tail = TailConsumer(self._engine, "live", SubscriptionSpec(">"), max(after, before))
                    continue  # to look whether it is to stop: the closing thread may have seen no tail yet
                for claimed in run_blocking(self._tail.take(PAGE, None)):
                    with self._lock:
                        for listener in self._trie.match(claimed.message.topic):
                            if claimed.message.seq > listener.after:
                                self._offer(listener, claimed.message)
            except ClosedError:
                return
            except Exception:
                logger.exception("the live feed could not read the log and tries again")
                self._stopping.wait(RETRY_S)

    def _stop_source(self) -> None:
        self._stopping.set()
        if self._tail is not None:
            run_blocking(self._tail.close())
        if self._pump is not None:
            self._pump.join()


def _ends_its_task(exc: BaseException) -> bool:
    """Whether the error ends the task, like a cancellation, and is not just a failed callback. On a thread, all are."""
    task = asyncio.current_task() if asyncio._get_running_loop() else None
    return task is not None and (task.cancelling() > 0 or not isinstance(exc, Exception | asyncio.CancelledError))
