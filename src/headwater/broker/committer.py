"""Group commit: one thread writes for everybody, and one fsync serves all that waited for it.

Publishes, acks and claims from all threads and tasks queue up here. The thread takes whatever is there, runs it in one
transaction and tells everybody after the commit. While one group is being written the next one gathers, so groups grow
by themselves under load and there is no timer to tune.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from headwater.broker.flow import Ticket, finish
from headwater.broker.logger import logger
from headwater.delivery.dedupe import DedupeWindow
from headwater.errors import Closed, HeadwaterError, InvalidInput, SubscriptionError, UnknownDeadLetter
from headwater.message import Draft
from headwater.ports.clock import Clock
from headwater.ports.records import Appended
from headwater.ports.store import Store, Writer

T = TypeVar("T")
Undo = list[Callable[[], None]]
Work = Callable[[Writer, Undo], T]

GROUP_MESSAGES_MAX = 10_000  # a group is closed at this many, so that no transaction grows without end
GROUP_WORKS_MAX = 2_000

_Queued = tuple[Ticket[Any], Sequence[Draft] | Work[Any]]


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
        self._bell = threading.Lock()  # locked while there is nothing to do; an Event costs three times as much
        self._bell.acquire()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="headwater-writer", daemon=True)
        self._thread.start()

    def publish(self, drafts: Sequence[Draft]) -> Ticket[Appended]:
        return self._enqueue(drafts)

    def submit(self, work: Work[T]) -> Ticket[T]:
        """Run `work` in the next transaction. It may be run again, if the group it was in failed; what it changes in
        memory it takes back through `undo`. If it refuses (SubscriptionError and the like), it does so before it
        writes, so that the others of its group are not held up."""
        return self._enqueue(work)

    def _enqueue(self, work: Sequence[Draft] | Work[Any]) -> Ticket[Any]:
        if self._closing:
            raise self._closed()
        ticket: Ticket[Any] = Ticket()
        self._queue.append((ticket, work))
        self._ring()
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
        while self._queue:  # slipped in while we closed
            finish([(self._queue.popleft()[0], None, self._closed())])

    def _closed(self) -> Closed:
        return Closed("the log is closed", where=self._store.name, next="Open it again")

    def _run(self) -> None:
        while True:
            self._bell.acquire()
            while self._queue:
                self._commit(self._next_group())
            if self._closing and not self._queue:
                return

    def _next_group(self) -> list[_Queued]:
        group: list[_Queued] = []
        messages = 0
        while self._queue and messages < GROUP_MESSAGES_MAX and len(group) < GROUP_WORKS_MAX:
            ticket, work = self._queue.popleft()
            group.append((ticket, work))
            messages += 1 if callable(work) else len(work)
        return group

    def _commit(self, group: list[_Queued]) -> None:
        undo: Undo = []
        try:
            outcomes = self._write(group, undo)
        except BaseException as exc:
            for take_back in reversed(undo):
                take_back()
            if len(group) == 1:
                finish([(group[0][0], None, exc)])
                return
            # One of them is at fault, or the disk is: tried one by one, each gets its own answer.
            for single in group:
                self._commit([single])
            return
        try:
            self._announce(group, outcomes)
        except Exception:  # a wake-up is only a hint; the commit stands and must be told
            logger.exception("waking readers failed")
        finish(
            [
                (ticket, None, outcome) if isinstance(outcome, HeadwaterError) else (ticket, outcome, None)
                for (ticket, _), outcome in zip(group, outcomes, strict=True)
            ]
        )

    def _announce(self, group: list[_Queued], outcomes: list[Any]) -> None:
        fresh = [seq for outcome in outcomes if isinstance(outcome, Appended) for seq in _ends(outcome)]
        if fresh:
            topics = {draft.topic for _, work in group if not callable(work) for draft in work}
            self._on_publish(topics, min(fresh), max(fresh))

    def _write(self, group: list[_Queued], undo: Undo) -> list[Any]:
        outcomes: list[Any] = []
        with self._store.write() as writer:
            now_ms = self._clock.now_ms()
            index = 0
            while index < len(group):
                work = group[index][1]
                if callable(work):
                    try:
                        outcomes.append(work(writer, undo))
                    except _REFUSALS as exc:
                        outcomes.append(exc)
                    index += 1
                    continue
                batches: list[Sequence[Draft]] = []
                while index < len(group) and not callable(following := group[index][1]):
                    batches.append(following)
                    index += 1
                outcomes += self._append(writer, batches, now_ms)
        return outcomes

    def _append(self, writer: Writer, batches: list[Sequence[Draft]], now_ms: int) -> list[Appended]:
        """Neighbouring publishes become one append, so that a hundred single publishes cost like one of a hundred."""
        if len(batches) == 1:
            return [writer.append(batches[0], now_ms, self._window)]
        appended = writer.append([draft for batch in batches for draft in batch], now_ms, self._window)
        parts: list[Appended] = []
        start = 0
        for batch in batches:
            end = start + len(batch)
            repeats = (
                frozenset(at - start for at in appended.repeats if start <= at < end) if appended.repeats else _NONE
            )
            parts.append(Appended(appended.seqs[start:end], repeats))
            start = end
        return parts


_NONE: frozenset[int] = frozenset()
_REFUSALS = (SubscriptionError, InvalidInput, UnknownDeadLetter)


def _ends(appended: Appended) -> list[int]:
    """The first and the last new seq of an append; new ones follow each other."""
    if not appended.repeats:
        return [appended.seqs[0], appended.seqs[-1]] if appended.seqs else []
    fresh = [seq for at, seq in enumerate(appended.seqs) if at not in appended.repeats]
    return [fresh[0], fresh[-1]] if fresh else []
