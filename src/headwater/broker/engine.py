"""What every use case stands on: the store, the clock, the committer, the wake-ups. Also the log's background work."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import socket
import threading
import uuid
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import partial
from typing import Any, Generic, TypeVar

from headwater import processes
from headwater.broker.background import FairThreadPool
from headwater.broker.committer import Committer, Work
from headwater.broker.flow import Blocking, Completion, Flow, complete
from headwater.broker.statistics import Timings
from headwater.broker.wakeups import Wakeups
from headwater.delivery.publishing import DedupeWindow
from headwater.errors import ClosedError, ConflictError, InvalidStateError, RequestTimeoutError
from headwater.ports.clock import Clock
from headwater.ports.store import Interruption, Notifier, Reader, Store

T = TypeVar("T")

ANNOUNCED = "server-"  # in the name of an owner: whether its process lives can be asked

READERS_MAX = 4
STATISTICS_MAX = 1  # long reads for statistics, apart from those that deliver
FILTERS_MAX = 1  # looks by filters that take time, which keep each other waiting and nothing else
READS_MAX = 3  # attempts of a read, if its connection breaks
TOPICS_ANNOUNCED_MAX = 10_000  # after more messages of another process all readers wake, without a look at the topics


class Engine:
    def __init__(
        self,
        store: Store,
        clock: Clock,
        *,
        dedupe: DedupeWindow,
        roll: Callable[[], float] = random.random,
    ) -> None:
        self.store = store
        self.clock = clock
        self.dedupe = dedupe
        self.roll = roll
        self._pid = processes.ask()
        self.owner = f"{socket.gethostname()}:{self._pid}:{uuid.uuid4().hex[:8]}"
        self.wakeups = Wakeups()
        self.timings = Timings(clock)
        last_seq = self.read_now(lambda reader: reader.last_seq(), Interruption())
        self.wakeups.announced = self.wakeups.last_known = last_seq
        self.committer = Committer(store, clock, dedupe, self.wakeups)
        self.readers = FairThreadPool(READERS_MAX, "headwater-reader")
        self.statistics = FairThreadPool(STATISTICS_MAX, "headwater-statistics")
        self.filters = FairThreadPool(FILTERS_MAX, "headwater-filter")
        self._reading: set[Interruption] = set()
        # Of own transactions one is open at a time: its verbs follow each other on one thread, and those that wait for
        # their turn do so on another, so that they never take the thread that the open one needs to end.
        self.turns = ThreadPoolExecutor(1, thread_name_prefix="headwater-turn")
        self.transactions = ThreadPoolExecutor(1, thread_name_prefix="headwater-transaction")
        self.in_transaction: set[object] = set()  # threads and asyncio tasks inside a `transaction()` block
        self._notifier: Notifier | None = None
        self._make_notifier: Callable[[Callable[[], None]], Notifier] | None = None
        self._notifier_lock = threading.Lock()
        self._closed = False
        self._holders = itertools.count(1)
        clock.on_advance(self.wakeups.wake_all)

    def announce(self) -> None:
        """A server calls this before it takes leases: if it is killed, the next server frees them at once."""
        name = self.store.announce()
        kind = f"served-{uuid.uuid4().hex[:8]}" if name is None else f"{ANNOUNCED}{name}"
        self.owner = f"{socket.gethostname()}:{self._pid}:{kind}"

    def is_gone(self, owner: str) -> bool:
        """Whether this holder was a server's that has ended without giving back what it held."""
        _, is_announced, name = owner.partition(f":{ANNOUNCED}")
        return bool(is_announced) and self.store.is_gone(name.partition(":")[0])

    def new_owner(self) -> str:
        """A name for one holder: two of the same process are two."""
        return f"{self.owner}:{next(self._holders)}"

    def submit(
        self, work: Work[T], messages: int = 1, *, touching: str | None = None, synced: bool = True
    ) -> Completion[T]:
        self.check_usable()
        return self.committer.submit(work, messages, touching=touching, synced=synced)

    def write(self, work: Work[T], *, touching: str | None = None, synced: bool = True) -> Flow[T]:
        outcome: T = yield self.submit(work, touching=touching, synced=synced)
        return outcome

    def read(self, work: Callable[[Reader], T], lane: Executor | None = None) -> Flow[T]:
        """`lane`: `readers`, or one of `statistics` and `filters`, where a read keeps no delivery waiting."""
        return self.look(partial(self.read_now, work), lane)

    def read_now(self, work: Callable[[Reader], T], interruption: Interruption) -> T:
        for _ in range(READS_MAX - 1):
            with contextlib.suppress(ConflictError), self.store.read(interruption) as reader:
                return work(reader)
        with self.store.read(interruption) as reader:
            return work(reader)

    def look(self, look: Callable[[Interruption], T], lane: Executor | None = None) -> Flow[T]:
        """Run what reads the log, and interrupt it when its caller leaves or the log is closed."""
        self.refuse_closed()
        interruption = Interruption()
        outcome: T = yield Blocking(
            lambda: self.run_interruptible(look, interruption),
            lane or self.readers,
            lambda: interruption.interrupt(_abandoned()),
        )
        return outcome

    def run_interruptible(self, look: Callable[[Interruption], T], interruption: Interruption) -> T:
        self._reading.add(interruption)
        try:
            self.refuse_closed()  # or `close` has not seen this one
            return look(interruption)
        finally:
            self._reading.discard(interruption)

    def interrupt_reads(self) -> None:
        """Interrupt the reads that run now."""
        for interruption in list(self._reading):
            interruption.interrupt(self._closed_error("the log was closed while it was read"))

    def check_usable(self) -> None:
        """Refuse a write if the log is closed, or the caller is in a transaction of its own."""
        if self._closed or processes.pid != self._pid:
            self.refuse_closed()
        if self.in_transaction:
            refuse_in_transaction(self)

    def refuse_closed(self) -> None:
        if self._closed:
            raise self._closed_error("the log is closed")
        processes.refuse_forked(self._pid, self.store.name)

    def _closed_error(self, why: str) -> ClosedError:
        return ClosedError(why, where=self.store.name, next="Open it again")

    @property
    def forked(self) -> bool:
        return processes.is_forked(self._pid)

    def watch_with(self, make_notifier: Callable[[Callable[[], None]], Notifier]) -> None:
        """Set how the writes of other processes are noticed; the notifier starts when the first reader here waits."""
        self._make_notifier = make_notifier

    def ensure_watching(self) -> None:
        if self._notifier is None and self._make_notifier is not None:
            with self._notifier_lock:
                if self._notifier is None:
                    self._notifier = self._make_notifier(self.look_for_news)
                    self._notifier.start()

    def look_for_news(self) -> None:
        """Another process has written: wake the readers of its topics."""

        def look(reader: Reader) -> tuple[int, int, set[str] | None]:
            last, known = reader.last_seq(), self.wakeups.announced
            is_few = 0 < last - known <= TOPICS_ANNOUNCED_MAX
            return last, known, set(reader.topics_between(known, last)) if is_few else None

        last, known, topics = self.read_now(look, Interruption())
        if last <= known:  # no message, so an ack, a nack or a lease with a new owner
            self.wakeups.settled()
        elif topics is None:
            self.wakeups.published(set(), known + 1, last)
            self.wakeups.wake_all()
        else:
            self.wakeups.published(topics, known + 1, last, elsewhere=True)

    def close(self) -> None:
        self._closed = True
        if self.forked:
            return
        self.interrupt_reads()
        if self._notifier is not None:
            self._notifier.stop()
        self.committer.close()
        self.wakeups.wake_all()
        for pool in (self.turns, self.transactions, self.readers, self.statistics, self.filters):
            pool.shutdown(wait=True)
        self.store.close()


class SharedRead(Generic[T]):
    """Statistics for many callers at once: each read serves all that asked before it began, so that what they wrote is
    in it. It is interrupted when all of them have left."""

    class _Round:
        def __init__(self) -> None:
            self.outcome: Completion[Any] = Completion()
            self.interruption = Interruption()
            self.asking = 0

    def __init__(self, engine: Engine, work: Callable[[Reader], T]) -> None:
        self._engine = engine
        self._work = work
        self._lock = threading.Lock()
        self._next: SharedRead._Round | None = None  # not begun yet

    def get(self) -> Flow[T]:
        self._engine.refuse_closed()
        with self._lock:
            round = self._next
            if round is None:
                round = self._next = self._Round()
                self._engine.statistics.submit_for(
                    self, partial(self._run, round)
                )  # a source of its own, not that of a caller
            round.asking += 1
        try:
            outcome: T = yield round.outcome
            return outcome
        finally:
            with self._lock:
                round.asking -= 1
                if not round.asking:
                    round.interruption.interrupt(_abandoned())
                    if self._next is round:
                        self._next = None

    def _run(self, round: _Round) -> None:
        with self._lock:
            if self._next is round:
                self._next = None
        try:
            value = self._engine.run_interruptible(partial(self._engine.read_now, self._work), round.interruption)
        except BaseException as exc:
            complete([(round.outcome, None, exc)])
        else:
            complete([(round.outcome, value, None)])


def _abandoned() -> RequestTimeoutError:
    return RequestTimeoutError("the read was stopped: its caller waits no longer")


def refuse_in_transaction(engine: Engine) -> None:
    """Inside `with log.transaction()`, a call through the committer would deadlock: the committer waits for the block.
    Other threads and tasks wait for their turn, also those that were started inside the block."""
    inside = engine.in_transaction
    if threading.get_ident() in inside or (asyncio._get_running_loop() and asyncio.current_task() in inside):
        raise InvalidStateError(
            "this would wait for the transaction it is called in",
            where=engine.store.name,
            next="Inside a transaction use its own methods: publish, execute",
        )
