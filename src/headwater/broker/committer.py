"""Group commit: one thread writes for all callers, and one fsync serves all that wait for it.

Publishes, acks and claims from all threads and tasks queue up here. The thread takes whatever is there, runs it in one
transaction and completes them after the commit. While one group is being written the next one gathers, so groups grow
by themselves under load. Only acks that no caller waits for are held back for a moment, so that they share the commit
of a publish or a claim.

A server's event loop commits small groups itself, at the end of its turn (`commit_on`): the way to the thread and back
takes longer than a small transaction. The thread takes over when a group is large, when the disk is slow, and when
another process has the lock.

A thread that waits for its publish anyway stores a few plain messages itself (`_store_at_once`), while nothing else is
written and no consumer of this process waits. That is one statement of SQLite, and what follows it in memory can be
left undone: in the main thread a signal handler may raise at any point. For the same reason threads never commit a
group themselves.

Not every transaction is synced to disk: one that only claims or extends is not. A power cut then loses the claim, which
costs an attempt count and never a message. The process may be killed at any time: what it committed stays.

A consumer that waits for messages is served by the transaction that publishes them (`Wakeups.claim_published`), where
the store allows it: one commit instead of two.

A group is bounded in works, messages and bytes. What does not fit into one group waits in a lane for each source, and
the lanes take turns by bytes (deficit round robin): a source with little to write is in the next group, however much
another one has queued.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple, TypeVar, overload

import msgspec

from headwater import processes
from headwater.broker.flow import Completion, complete, finished
from headwater.broker.logger import logger
from headwater.broker.wakeups import Wakeups
from headwater.delivery.publishing import DedupeWindow
from headwater.errors import (
    ClosedError,
    ConflictError,
    CorruptError,
    DiskFullError,
    HeadwaterError,
    InputOutputError,
    InvalidOptionError,
    InvalidStateError,
    LockedError,
    OutcomeUnknownError,
    ReadOnlyError,
    SubscriptionError,
    UnavailableError,
    UnknownDeadLetterError,
)
from headwater.message import Draft
from headwater.ports.clock import Clock, SystemClock
from headwater.ports.records import Appended
from headwater.ports.store import PUBLISHING, Store, Writer

T = TypeVar("T")


class TransactionHooks(list[Callable[[], None]]):
    """Callbacks that undo a transaction's changes in memory if it fails. `then`: callbacks after the commit.
    `published`: what readers are woken for. `claims`: consumers are being served, which no work is to blame for if it
    fails. `timed`: deliveries and acks, counted as one batch after the commit."""

    def __init__(self) -> None:
        super().__init__()
        self.then: list[Callable[[], None]] = []
        self.published: Published | None = None
        self.claims = False
        self.timed: dict[tuple[str, str], list[Any]] = {}

    def after_commit(self) -> None:
        """Call what follows the commit. It stands and must be reported: a callback that fails is logged, and the others
        run."""
        for step in self.then:
            try:
                step()
            except Exception:
                logger.exception("what follows a commit failed")

    def note_published(self, drafts: Iterable[Draft], new_seqs: Sequence[int]) -> None:
        self.add_published(Published({draft.topic for draft in drafts}, new_seqs[0], new_seqs[-1]))

    def add_published(self, more: Published) -> None:
        there = self.published
        self.published = more if there is None else there.joined(more)

    def take_back(self) -> None:
        while self:
            self.pop()()


class Published(NamedTuple):
    """What a group adds to the log."""

    topics: set[str]
    first_seq: int
    last_seq: int

    def joined(self, more: Published) -> Published:
        return Published(
            self.topics | more.topics, min(self.first_seq, more.first_seq), max(self.last_seq, more.last_seq)
        )


Work = Callable[[Writer, TransactionHooks], T]

GROUP_MESSAGES_MAX = 10_000  # a group is closed at this many, so that no transaction grows without end
GROUP_WORKS_MAX = 2_000
GROUP_BYTES_MAX = 4 * 1024 * 1024  # of payload; the work that reaches it is still taken
TURN_BYTES = 64 * 1024  # that a lane may write when its turn comes
WORK_COST_BYTES = 1_024  # of a work besides its payload
CONFLICTS_MAX = 5  # how often a group is retried after a conflict with another process
LAZY_S = 0.002  # how long a work that no caller waits for may wait for another one to share its commit
SMALL_MESSAGES_MAX = 256  # of a group that an event loop commits itself, or a thread that publishes
SMALL_BYTES_MAX = 64 * 1024
LOOP_WORKS_MAX = 64  # of a group that an event loop commits itself
LOOP_S_MAX = 0.01  # a commit that took longer: the disk is slow
SLOW_S = 0.25  # and for so long the thread commits


class _Queued(msgspec.Struct):  # tracked by the garbage collector: the error of one that failed refers to it in a cycle
    completion: Completion[Any]
    work: Draft | list[Draft] | Work[Any]
    messages: int  # how many it writes
    touching: str | None  # see `ports.store.GroupedWork`
    bytes: int  # of payload
    source: Hashable  # works of one source stay in order; None for all that belongs to no client in particular
    synced: bool
    lazy: bool
    is_of_loop: bool  # submitted on the event loop that commits


class _Lane:
    """The queue of one source, and how many bytes it may write before the others have their turn."""

    __slots__ = ("credit_bytes", "works")

    def __init__(self) -> None:
        self.works: deque[_Queued] = deque()
        self.credit_bytes = 0


class Committer:
    def __init__(
        self,
        store: Store,
        clock: Clock,
        window: DedupeWindow,
        wakeups: Wakeups,
    ) -> None:
        self._store = store
        self._clock = clock
        self._window = window
        self._wakeups = wakeups
        self._queue: deque[_Queued] = deque()
        # The writer's own: what did not fit into a group, next turn first.
        self._lanes: OrderedDict[Hashable, _Lane] = OrderedDict()
        self._work_queued = threading.Lock()  # locked while there is nothing to do; an Event costs three times as much
        self._work_queued.acquire()
        self._waits_for_others = False  # the writer has lazy works only
        self._committing = threading.Lock()  # by the thread, or by an event loop
        self._loop: asyncio.AbstractEventLoop | None = None
        self._loop_commits = False  # at the end of its turn
        self._loop_timer: asyncio.TimerHandle | None = None
        self._slow_until_s = 0.0
        self._is_shared = False  # the thread's last group had several works
        self._keeps_real_time = type(clock) is SystemClock
        self._closing = self._ended = False
        self._pid = processes.ask()
        self._thread = threading.Thread(target=self._run, name="headwater-writer", daemon=True)
        self._thread.start()

    @overload
    def submit(self, work: Draft, *, bytes: int, touching: str) -> Completion[int]: ...

    @overload
    def submit(self, work: list[Draft], messages: int, *, bytes: int, touching: str) -> Completion[list[int]]: ...

    @overload
    def submit(
        self,
        work: Work[T],
        messages: int = 1,
        *,
        bytes: int = 0,
        touching: str | None = None,
        source: Hashable = None,
        synced: bool = True,
        lazy: bool = False,
    ) -> Completion[T]: ...

    def submit(
        self,
        work: Draft | list[Draft] | Work[Any],
        messages: int = 1,
        *,
        bytes: int = 0,
        touching: str | None = None,
        source: Hashable = None,
        synced: bool = True,
        lazy: bool = False,
    ) -> Completion[Any]:
        """Store a message (the outcome is its seq) or several (all or none), or run `work`, in the next transaction, or
        when its source has its turn. `messages` and `bytes` are what it may read or write. A work may run again, if its
        group failed, and takes back its changes in memory through `hooks`. If it refuses (SubscriptionError and the
        like), it does so before it writes, so that the others of its group go on. One that names the existing
        subscription it touches, and touches no other, does not make other processes wait. A group of works that are
        not `synced` is committed without waiting for the disk. A `lazy` work waits a moment for others to share its
        commit."""
        if self._closing:
            raise self._closed()
        completion: Completion[Any] = Completion()
        loop = self._loop
        is_of_loop = loop is not None and asyncio._get_running_loop() is loop
        self._queue.append(_Queued(completion, work, messages, touching, bytes, source, synced, lazy, is_of_loop))
        if loop is not None and is_of_loop:
            self._commit_soon(loop, lazy=lazy)
        # Appended before this is asked: a writer that ends its wait takes the work along.
        elif self._work_queued.locked() and not (lazy and self._waits_for_others):
            self._ring()
        if self._ended:  # between the look at `_closing` and now
            self._refuse_rest()
        return completion

    def publish(self, draft: Draft) -> Completion[int]:
        seqs = self._store_at_once((draft,))
        return finished(seqs[0]) if seqs else self.submit(draft, bytes=draft.size, touching=PUBLISHING)

    def publish_all(self, drafts: list[Draft]) -> Completion[list[int]]:
        bytes = bytes_of(drafts)
        is_small = len(drafts) <= SMALL_MESSAGES_MAX and bytes <= SMALL_BYTES_MAX
        seqs = self._store_at_once(drafts) if is_small else None
        return finished(list(seqs)) if seqs else self.submit(drafts, len(drafts), bytes=bytes, touching=PUBLISHING)

    def _store_at_once(self, drafts: Sequence[Draft]) -> range | None:
        """A caller without an event loop waits for its publish anyway: if nothing else is being written, and no
        consumer of this process waits for messages, it stores plain ones itself, without the way to the thread."""
        if (
            self._is_shared
            or self._queue
            or self._wakeups.has_waiters
            or not self._keeps_real_time
            or asyncio._get_running_loop() is not None
        ):
            return None
        for draft in drafts:
            if draft.id is not None or draft.extras is not None:
                return None
        processes.refuse_forked(self._pid, self._store.name)
        seqs = self._store.publish_at_once(drafts)
        if seqs is not None and self._wakeups.note_stored(seqs):
            with contextlib.suppress(ClosedError):  # closed meanwhile, and the messages are stored
                wake = partial(_wake_readers, self._wakeups, drafts, seqs)
                self.submit(wake, touching=PUBLISHING, synced=False)
        return seqs

    def _ring(self) -> None:
        if self._work_queued.locked():
            processes.refuse_forked(self._pid, self._store.name)
            try:  # noqa: SIM105 (`suppress` is a call, and every publish comes here)
                self._work_queued.release()
            except RuntimeError:  # another thread rang at the same moment
                pass

    # --- on an event loop -----------------------------------------------------------------------------------------

    def commit_on(self, loop: asyncio.AbstractEventLoop) -> None:
        """Let this event loop commit what is submitted on it, if the store is fit for that."""
        self._loop = loop if self._store.commits_in_place else None
        self._loop_commits, self._loop_timer = False, None

    def _commit_soon(self, loop: asyncio.AbstractEventLoop, *, lazy: bool) -> None:
        if self._loop_commits:
            return
        if not lazy:
            self._loop_commits = True
            loop.call_soon(self._commit_here)
        elif self._loop_timer is None:
            self._loop_timer = loop.call_later(LAZY_S, self._commit_here)

    def _commit_here(self) -> None:
        self._loop_commits = False
        if self._loop_timer is not None:
            self._loop_timer.cancel()
            self._loop_timer = None
        if not self._queue:  # the thread was quicker
            return
        began_s = time.monotonic()
        is_slow = bool(self._lanes) or began_s < self._slow_until_s or len(self._queue) > LOOP_WORKS_MAX
        if is_slow or not _is_small(self._queue.copy()) or not self._committing.acquire(blocking=False):
            self._ring()
            return
        try:
            left = self._commit(self._next_group(), wait=False)
            self._queue.extendleft(reversed(left))
        finally:
            self._committing.release()
        if self._ended:
            self._refuse_rest()
        if time.monotonic() - began_s > LOOP_S_MAX:
            self._slow_until_s = began_s + SLOW_S
        if self._queue:
            self._ring()

    def close(self) -> None:
        """Finish what is queued, then stop."""
        self._loop = None
        self._closing = True
        with contextlib.suppress(RuntimeError):  # it rings already
            self._work_queued.release()
        self._thread.join()
        self._refuse_rest()

    def _refuse_rest(self) -> None:
        """Refuse what was queued during the close."""
        with contextlib.suppress(IndexError):  # two of us at once: the queue is empty
            while True:
                complete([(self._queue.popleft().completion, None, self._closed())])

    def _closed(self) -> ClosedError:
        return ClosedError("the log is closed", where=self._store.name, next="Open it again")

    def _run(self) -> None:
        while True:
            self._work_queued.acquire()
            while self._queue or self._lanes:
                if not self._closing and not self._lanes and self._is_lazy():
                    self._waits_for_others = True
                    self._work_queued.acquire(timeout=LAZY_S)
                    self._waits_for_others = False
                with self._committing:
                    group = self._next_group()
                    if group:
                        self._commit(group)
                        self._is_shared = len(group) > 1 or bool(self._queue)
            if self._closing and not self._queue:
                self._ended = True
                return

    def _is_lazy(self) -> bool:
        """Whether only works are queued that may wait for others."""
        return len(self._queue) <= LOOP_WORKS_MAX and all(queued.lazy for queued in self._queue.copy())

    def _next_group(self) -> list[_Queued]:
        group: list[_Queued] = []
        messages = bytes = 0
        if not self._lanes:
            while (
                self._queue
                and messages < GROUP_MESSAGES_MAX
                and bytes < GROUP_BYTES_MAX
                and len(group) < GROUP_WORKS_MAX
            ):
                queued = self._queue.popleft()
                group.append(queued)
                messages += queued.messages
                bytes += queued.bytes
        if self._queue:
            self._sort_into_lanes()
        while (
            self._lanes and messages < GROUP_MESSAGES_MAX and bytes < GROUP_BYTES_MAX and len(group) < GROUP_WORKS_MAX
        ):
            queued = self._next_in_turn()
            group.append(queued)
            messages += queued.messages
            bytes += queued.bytes
        return group

    def _sort_into_lanes(self) -> None:
        while self._queue:
            queued = self._queue.popleft()
            lane = self._lanes.get(queued.source)
            if lane is None:
                lane = self._lanes[queued.source] = _Lane()
            lane.works.append(queued)

    def _next_in_turn(self) -> _Queued:
        while True:
            source, lane = next(iter(self._lanes.items()))
            cost_bytes = lane.works[0].bytes + WORK_COST_BYTES
            if cost_bytes <= lane.credit_bytes:
                lane.credit_bytes -= cost_bytes
                queued = lane.works.popleft()
                if not lane.works:
                    del self._lanes[source]
                return queued
            lane.credit_bytes += TURN_BYTES
            self._lanes.move_to_end(source)

    def _commit(
        self, group: list[_Queued], conflicts: int = 0, *, claims: bool = True, wait: bool = True
    ) -> list[_Queued]:
        """Returns the works that it leaves to the thread: those that would have to wait for a lock, unless it may
        `wait`."""
        hooks = TransactionHooks()
        try:
            outcomes = self._write(group, hooks, claims=claims and self._store.claims_with_publish, wait=wait)
        except BaseException as exc:
            if isinstance(exc, LockedError) and not wait:
                return group
            if isinstance(exc, ConflictError) and conflicts < CONFLICTS_MAX:
                return self._commit(group, conflicts + 1, claims=claims)
            if isinstance(exc, LockedError):
                blocked, others = self._store.split_locked(group)
                if blocked and others:
                    self._commit(others, claims=claims)
                    complete([(queued.completion, None, exc) for queued in blocked])
                    return []
            if (len(group) == 1 and not hooks.claims) or isinstance(exc, _FOR_EVERYBODY):
                complete([(queued.completion, None, exc) for queued in group])
                return []
            # One of them is at fault, or a claim for a consumer: tried one by one, each gets its own answer.
            for at, single in enumerate(group):
                if self._commit([single], claims=False, wait=wait):
                    return group[at:]
            return []
        hooks.after_commit()  # first, so that a consumer that is woken finds what was claimed for it
        if hooks.published is not None:
            self._wakeups.published(*hooks.published)
        complete(
            [
                (queued.completion, None, outcome)
                if isinstance(outcome, HeadwaterError)
                else (queued.completion, outcome, None)
                for queued, outcome in zip(group, outcomes, strict=True)
            ]
        )
        return []

    def _write(self, group: list[_Queued], hooks: TransactionHooks, *, claims: bool, wait: bool) -> list[Any]:
        """Run a group in one transaction; the outcome of each, an error where one refused."""
        outcomes: list[Any] = []
        alone = self._store.order(group)
        synced = any(queued.synced for queued in group)
        with self._store.write(hooks.take_back, alone=alone, synced=synced, wait=wait) as writer:
            now_ms = self._clock.now_ms()
            index, end = 0, len(group)
            while index < end:
                work = group[index].work
                if isinstance(work, Draft | list):
                    # Neighbouring publishes become one append: a hundred single ones cost like one of a hundred.
                    drafts: list[Draft] = []
                    sizes: list[int | None] = []
                    while index < end and isinstance(work := group[index].work, Draft | list):
                        if isinstance(work, Draft):
                            drafts.append(work)
                            sizes.append(None)
                        else:
                            drafts += work
                            sizes.append(len(work))
                        index += 1
                    seqs = append(writer, hooks, drafts, now_ms, self._window).seqs
                    is_singles = len(sizes) == len(drafts) and not any(sizes)
                    outcomes += seqs if is_singles else _shared_out(seqs, sizes)
                else:
                    try:
                        outcomes.append(work(writer, hooks))
                    except _REFUSALS as exc:
                        outcomes.append(exc)
                    index += 1
            if claims and hooks.published is not None:
                hooks.claims = True
                self._wakeups.claim_published(hooks.published, writer, hooks)
        return outcomes


def _wake_readers(
    wakeups: Wakeups, drafts: Sequence[Draft], seqs: Sequence[int], writer: Writer, hooks: TransactionHooks
) -> None:
    """Wake all readers, for a consumer that has begun to wait while these messages were stored at once. The writer
    thread does it: a signal handler may have interrupted the holder of the wake-ups' lock. All look, because without
    the lock `last_known` may have been set below what was published meanwhile on other topics."""
    hooks.note_published(drafts, seqs)
    hooks.then.append(wakeups.wake_all)


def _is_small(queued: Collection[_Queued]) -> bool:
    """Whether an event loop may commit them: few, of its own, and none that may touch anything."""
    messages = bytes = 0
    for each in queued:
        if each.touching is None or not each.is_of_loop:
            return False
        messages += each.messages
        bytes += each.bytes
    return len(queued) <= LOOP_WORKS_MAX and messages <= SMALL_MESSAGES_MAX and bytes <= SMALL_BYTES_MAX


def append(
    writer: Writer, hooks: TransactionHooks, drafts: Sequence[Draft], now_ms: int, window: DedupeWindow
) -> Appended:
    """Store drafts, and note for the readers what is new."""
    appended = writer.append(drafts, now_ms, window)
    seqs, duplicates = appended
    new_seqs = [seq for at, seq in enumerate(seqs) if at not in duplicates] if duplicates else seqs
    if new_seqs:
        hooks.note_published(drafts, new_seqs)
    return appended


def _shared_out(seqs: list[int], sizes: list[int | None]) -> list[Any]:
    """Split seqs among works: one seq where the size is None, else a list of that many."""
    parts: list[Any] = []
    start = 0
    for size in sizes:
        parts.append(seqs[start] if size is None else seqs[start : start + size])
        start += 1 if size is None else size
    return parts


def bytes_of(drafts: Sequence[Draft]) -> int:
    return sum(map(_size, drafts))


_size: Callable[[Draft], int] = attrgetter("size")

# The database, not one of the works.
_FOR_EVERYBODY = (
    LockedError,
    DiskFullError,
    ReadOnlyError,
    CorruptError,
    InputOutputError,
    ConflictError,
    UnavailableError,
    OutcomeUnknownError,
    ClosedError,
)
_REFUSALS = (SubscriptionError, InvalidOptionError, InvalidStateError, UnknownDeadLetterError)
