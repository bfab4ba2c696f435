"""How long it took from publish to delivery, and to the ack, counted as it happens.

These are statistics, not promises. Of a batch some messages stand for all. Counts gather in memory and are saved with
the heartbeats, in a commit that is made anyway, and when the log is closed; a process that is killed takes those of its
last seconds with it.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import chain

from headwater.broker.claims import Claimed
from headwater.broker.committer import Undo
from headwater.delivery.histogram import bucket_of, sample
from headwater.ports.clock import Clock
from headwater.ports.records import Stage, Timing
from headwater.ports.store import Writer

HOUR_MS = 3_600_000
SAVE_EVERY_MS = 10_000
UNSAVED_MAX = 50_000  # buckets; what would need more, while nothing can be saved, is not counted

_Key = tuple[str, int, Stage, int]


class Timings:
    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()  # the writer thread counts, and so do own transactions
        self._counts: dict[_Key, int] = {}
        self._saved_ms = clock.now_ms()

    def note(self, undo: Undo, stage: Stage, subscription: str, claimed: Sequence[Claimed]) -> None:
        """This transaction brings them to this stage. They are counted once it is committed, all that it brings there
        as one batch, so that next to nothing is paid for each."""
        batches = undo.timed.get((stage, subscription))
        if batches is None:
            batches = undo.timed[stage, subscription] = []
            undo.then.append(partial(self._count_all, stage, subscription, batches))
        batches.append(claimed)

    def _count_all(self, stage: Stage, subscription: str, batches: Sequence[Sequence[Claimed]]) -> None:
        self.count(stage, subscription, batches[0] if len(batches) == 1 else [*chain.from_iterable(batches)])

    def count(self, stage: Stage, subscription: str, claimed: Sequence[Claimed]) -> None:
        """A batch got to this stage now. Of deliveries only the first of a message counts; an ack counts whatever
        attempt it took."""
        now_ms = self._clock.now_ms()
        hour_ms = now_ms - now_ms % HOUR_MS
        took_ms = bucket = 0
        buckets: dict[int, int] = {}
        for index, weight in sample(len(claimed)):
            each = claimed[index]
            if each.attempt > 1 and stage == "deliver":
                continue
            since_ms = each.message.published_ms
            due_ms = each.message.deliver_ms
            if due_ms is not None and due_ms > since_ms:
                since_ms = due_ms
            if now_ms - since_ms != took_ms:  # neighbours were mostly published together
                took_ms = now_ms - since_ms
                bucket = bucket_of(took_ms)
            buckets[bucket] = buckets.get(bucket, 0) + weight
        self._add({(subscription, hour_ms, stage, bucket): count for bucket, count in buckets.items()})

    def is_due(self) -> bool:
        """Whether there is something to save, and the last time is long ago."""
        return bool(self._counts) and abs(self._clock.now_ms() - self._saved_ms) >= SAVE_EVERY_MS

    def __bool__(self) -> bool:
        return bool(self._counts)

    def save(self, writer: Writer, undo: Undo) -> None:
        """Work for the committer."""
        with self._lock:
            taken, self._counts = self._counts, {}
            self._saved_ms = self._clock.now_ms()
        undo.append(partial(self._add, taken))
        writer.add_timings([Timing(*key, count) for key, count in taken.items()])

    def _add(self, counts: Mapping[_Key, int]) -> None:
        with self._lock:
            unsaved = self._counts
            for key, count in counts.items():
                if key in unsaved:
                    unsaved[key] += count
                elif len(unsaved) < UNSAVED_MAX:
                    unsaved[key] = count
