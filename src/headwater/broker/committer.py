"""Group commit: one thread writes for everybody, and one fsync serves all that waited for it.

Publishes, acks and claims from all threads and tasks queue up here. The thread takes whatever is there, runs it in one
transaction and tells everybody after the commit. While one group is being written the next one gathers, so groups grow
by themselves under load and there is no timer to tune.

A group is bounded in works, messages and bytes. What does not fit into one group waits in a lane for each source, and
the lanes take turns by bytes (deficit round robin): a source with little to write is in the next group, however much
another one has queued.
"""

from __future__ import annotations

import contextlib
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from operator import attrgetter
from typing import Any, NamedTuple, TypeVar

from headwater.broker.flow import Ticket, finish
from headwater.broker.logger import logger
from headwater.delivery.dedupe import DedupeWindow
from headwater.errors import (
    Closed,
    Conflict,
    Corrupt,
    DiskFull,
    HeadwaterError,
    InputOutput,
    InvalidOption,
    Locked,
    OutcomeUnknown,
    ReadOnly,
    SubscriptionError,
    Unavailable,
    UnknownDeadLetter,
)
from headwater.message import Draft
from headwater.ports.clock import Clock
from headwater.ports.store import Store, Writer

T = TypeVar("T")


class Undo(list[Callable[[], None]]):
    """What takes back in memory what a transaction did there, should it fail; `then` is done once it is committed, and
    readers are told of what was `published`. `timed` is for `timings`, to make one batch of many."""

    def __init__(self) -> None:
        super().__init__()
        self.then: list[Callable[[], None]] = []
        self.published: Published | None = None
        self.timed: dict[tuple[str, str], list[Any]] = {}

    def note_published(self, drafts: Iterable[Draft], new_seqs: Sequence[int]) -> None:
        if new_seqs:
            topics = {draft.topic for draft in drafts}
            if self.published is None:
                self.published = Published(topics, new_seqs[0], new_seqs[-1])
            else:
                self.published = Published(topics | self.published.topics, self.published.first_seq, new_seqs[-1])

    def take_back(self) -> None:
        while self:
            self.pop()()


class Published(NamedTuple):
    """What a group adds to the log."""

    topics: set[str]
    first_seq: int
    last_seq: int


Work = Callable[[Writer, Undo], T]

GROUP_MESSAGES_MAX = 10_000  # a group is closed at this many, so that no transaction grows without end
GROUP_WORKS_MAX = 2_000
GROUP_BYTES_MAX = 4 * 1024 * 1024  # of payload; the work that reaches it is still taken
TURN_BYTES = 64 * 1024  # that a lane may write when its turn comes
WORK_COST_BYTES = 1_024  # of a work besides its payload
CONFLICTS_MAX = 5  # how often a group gives way to another process before it is an error

NO_SUBSCRIPTION = ""  # what a work touches that only publishes
COUNTS = "\0"  # what a work touches that only counts; no subscription has such an id
_TURNS = {COUNTS: 1, NO_SUBSCRIPTION: 2}  # after all subscriptions; who publishes locks last what all others wait for


class _Queued(NamedTuple):
    ticket: Ticket[Any]
    work: Draft | list[Draft] | Work[Any]
    messages: int  # how many it writes
    touching: str | None  # the subscription that it reads and changes; None if it may be any
    bytes: int  # of payload
    source: Hashable  # works of one source stay in order; None for all that belongs to no client in particular


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
        on_publish: Callable[[set[str], int, int], None],
    ) -> None:
        self._store = store
        self._clock = clock
        self._window = window
        self._on_publish = on_publish
        self._queue: deque[_Queued] = deque()
        # The writer's own: what did not fit into a group, next turn first.
        self._lanes: OrderedDict[Hashable, _Lane] = OrderedDict()
        self._bell = threading.Lock()  # locked while there is nothing to do; an Event costs three times as much
        self._bell.acquire()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="headwater-writer", daemon=True)
        self._thread.start()

    def publish(self, draft: Draft) -> Ticket[int]:
        """Store one message; the outcome is its seq."""
        return self._enqueue(draft, 1, draft.size)

    def publish_many(self, drafts: list[Draft]) -> Ticket[list[int]]:
        """Store many, all or none."""
        return self._enqueue(drafts, len(drafts), bytes_of(drafts))

    def submit(
        self,
        work: Work[T],
        messages: int = 1,
        *,
        bytes: int = 0,
        touching: str | None = None,
        source: Hashable = None,
    ) -> Ticket[T]:
        """Run `work`, which writes so many messages and bytes, in the next transaction, or when its source has its
        turn. It may be run again, if the group it was
        in failed; what it changes in memory it takes back through `undo`. If it refuses (SubscriptionError and the
        like), it does so before it writes, so that the others of its group are not held up. Who says which existing
        subscription it touches, and touches no other, does not keep other processes waiting."""
        return self._enqueue(work, messages, bytes, touching, source)

    def _enqueue(
        self,
        work: Draft | list[Draft] | Work[Any],
        messages: int,
        bytes: int,
        touching: str | None = NO_SUBSCRIPTION,
        source: Hashable = None,
    ) -> Ticket[Any]:
        if self._closing:
            raise self._closed()
        ticket: Ticket[Any] = Ticket()
        self._queue.append(_Queued(ticket, work, messages, touching, bytes, source))
        self._ring()
        if not self._thread.is_alive():  # it ended between the look at `_closing` and now
            self._refuse_rest()
        return ticket

    def _ring(self) -> None:
        if self._bell.locked():
            with contextlib.suppress(RuntimeError):  # somebody else rang at the same moment
                self._bell.release()

    def close(self) -> None:
        """Finish what is queued, then stop."""
        self._closing = True
        self._ring()
        self._thread.join()
        self._refuse_rest()

    def _refuse_rest(self) -> None:
        """What slipped in while we closed."""
        with contextlib.suppress(IndexError):  # two of us at once: the queue is empty
            while True:
                finish([(self._queue.popleft().ticket, None, self._closed())])

    def _closed(self) -> Closed:
        return Closed("the log is closed", where=self._store.name, next="Open it again")

    def _run(self) -> None:
        while True:
            self._bell.acquire()
            while self._queue or self._lanes:
                self._commit(self._next_group())
            if self._closing and not self._queue:
                return

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

    def _commit(self, group: list[_Queued], conflicts: int = 0) -> None:
        undo = Undo()
        try:
            outcomes = self._write(group, undo)
        except BaseException as exc:
            if isinstance(exc, Conflict) and conflicts < CONFLICTS_MAX:
                self._commit(group, conflicts + 1)
                return
            if isinstance(exc, Locked) and self._store.writes_beside_others:
                # Somebody publishes in a long transaction: those who publish wait for him in vain, the others need not.
                publishing = [queued for queued in group if queued.touching in (None, NO_SUBSCRIPTION)]
                others = [queued for queued in group if queued.touching not in (None, NO_SUBSCRIPTION)]
                if publishing and others:
                    self._commit(others)
                    finish([(queued.ticket, None, exc) for queued in publishing])
                    return
            if len(group) == 1 or isinstance(exc, _FOR_EVERYBODY):
                finish([(queued.ticket, None, exc) for queued in group])
                return
            # One of them is at fault: tried one by one, each gets its own answer.
            for single in group:
                self._commit([single])
            return
        try:
            self._after_commit(undo)
        except Exception:  # a wake-up is only a hint; the commit stands and must be told
            logger.exception("waking readers failed")
        finish(
            [
                (ticket, None, outcome) if isinstance(outcome, HeadwaterError) else (ticket, outcome, None)
                for (ticket, *_), outcome in zip(group, outcomes, strict=True)
            ]
        )

    def _write(self, group: list[_Queued], undo: Undo) -> list[Any]:
        """Run a group in one transaction; the outcome of each, an error where one refused."""
        outcomes: list[Any] = []
        alone = True
        if self._store.writes_beside_others:
            alone = any(queued.touching is None for queued in group)
            if not alone:  # in one order everywhere, so that no two processes wait for each other
                group.sort(key=lambda queued: (_TURNS.get(queued.touching or "", 0), queued.touching))
        with self._store.write(undo.take_back, alone=alone) as writer:
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
                    outcomes += self._append(writer, undo, drafts, sizes, now_ms)
                else:
                    try:
                        outcomes.append(work(writer, undo))
                    except _REFUSALS as exc:
                        outcomes.append(exc)
                    index += 1
        return outcomes

    def _append(
        self, writer: Writer, undo: Undo, drafts: list[Draft], sizes: list[int | None], now_ms: int
    ) -> list[Any]:
        """Store drafts and hand their seqs to whom they belong: a seq for each None, a list for each size."""
        seqs, repeats = writer.append(drafts, now_ms, self._window)
        undo.note_published(drafts, seqs if not repeats else [s for at, s in enumerate(seqs) if at not in repeats])
        if len(sizes) == len(drafts) and not any(sizes):
            return seqs
        parts: list[Any] = []
        start = 0
        for size in sizes:
            parts.append(seqs[start] if size is None else seqs[start : start + size])
            start += 1 if size is None else size
        return parts

    def _after_commit(self, undo: Undo) -> None:
        if undo.published is not None:
            self._on_publish(*undo.published)
        for step in undo.then:
            step()


def bytes_of(drafts: Sequence[Draft]) -> int:
    return sum(map(_size, drafts))


_size: Callable[[Draft], int] = attrgetter("size")

# The database, not one of the works.
_FOR_EVERYBODY = (
    Locked,
    DiskFull,
    ReadOnly,
    Corrupt,
    InputOutput,
    Conflict,
    Unavailable,
    OutcomeUnknown,
    Closed,
)
_REFUSALS = (SubscriptionError, InvalidOption, UnknownDeadLetter)
