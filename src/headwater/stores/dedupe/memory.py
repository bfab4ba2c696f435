"""A dedupe queue in memory: for one process, and forgotten with it."""

from __future__ import annotations

import threading

import msgspec

from headwater.message import Span
from headwater.ports.clock import Clock
from headwater.ports.dedupe import DEDUPE_AGE_S, DEDUPE_COUNT, Begun, DedupeEntry
from headwater.stores.dedupe.queue import CheckedQueue


class _Seen(msgspec.Struct):
    """`done` entries stand in the order in which they were done."""

    done: dict[str, int]  # id -> when
    begun: dict[str, tuple[int, int]]  # id -> when, until when


class MemoryDedupe(CheckedQueue):
    def __init__(
        self, *, max_count: int = DEDUPE_COUNT, max_age: Span = DEDUPE_AGE_S, clock: Clock | None = None
    ) -> None:
        super().__init__("memory:", max_count=max_count, max_age=max_age, clock=clock)
        self._lock = threading.Lock()
        self._seen: dict[str, _Seen] = {}

    def _begin(self, handler: str, id: str, now_ms: int, until_ms: int | None) -> Begun:
        with self._lock:
            seen = self._seen.setdefault(handler, _Seen({}, {}))
            done_ms = seen.done.get(id)
            if done_ms is not None:
                if done_ms > self._forgotten_ms(now_ms):
                    return "done"
                del seen.done[id]
            if id in seen.begun and seen.begun[id][1] > now_ms:
                return "busy"
            if until_ms is None:
                self._note(seen, id, now_ms)
            else:
                seen.begun[id] = (now_ms, until_ms)
            return "first"

    def _extend(self, handler: str, id: str, now_ms: int, until_ms: int) -> bool:
        with self._lock:
            begun = self._seen[handler].begun if handler in self._seen else {}
            if id not in begun:
                return False
            begun[id] = (begun[id][0], until_ms)
            return True

    def _finish(self, handler: str, id: str, now_ms: int) -> None:
        with self._lock:
            self._note(self._seen.setdefault(handler, _Seen({}, {})), id, now_ms)

    def _note(self, seen: _Seen, id: str, now_ms: int) -> None:
        seen.begun.pop(id, None)
        seen.done.pop(id, None)
        seen.done[id] = now_ms
        forgotten_ms = self._forgotten_ms(now_ms)
        while len(seen.done) > self.max_count or seen.done[next(iter(seen.done))] <= forgotten_ms:
            del seen.done[next(iter(seen.done))]
        for abandoned in [key for key, (_, until_ms) in seen.begun.items() if until_ms <= forgotten_ms]:
            del seen.begun[abandoned]

    def _release(self, handler: str, id: str) -> None:
        with self._lock:
            if handler in self._seen:
                self._seen[handler].begun.pop(id, None)

    def _contains(self, handler: str, id: str, forgotten_ms: int) -> bool:
        with self._lock:
            seen = self._seen.get(handler)
            return seen is not None and seen.done.get(id, forgotten_ms) > forgotten_ms

    def _entries(self, handler: str, forgotten_ms: int) -> list[DedupeEntry]:
        with self._lock:
            seen = self._seen.get(handler, _Seen({}, {}))
            found = [DedupeEntry(id, at_ms, None) for id, at_ms in seen.done.items() if at_ms > forgotten_ms]
            found += [DedupeEntry(id, at_ms, until_ms) for id, (at_ms, until_ms) in seen.begun.items()]
        return sorted(found, key=lambda entry: entry.at_ms)

    def _totals(self, handler: str | None, forgotten_ms: int) -> tuple[int, int, int, int | None]:
        with self._lock:
            handlers = [each for each in self._seen if handler in (None, each)]
        entries = [found for each in handlers if (found := self._entries(each, forgotten_ms))]
        times = [entry.at_ms for found in entries for entry in found]
        done = sum(entry.until_ms is None for found in entries for entry in found)
        return len(entries), done, len(times) - done, min(times, default=None)

    def _clear(self, handler: str | None) -> int:
        with self._lock:
            gone = [self._seen.pop(each) for each in list(self._seen) if handler in (None, each)]
        return sum(len(seen.done) + len(seen.begun) for seen in gone)

    def _close(self) -> None:
        self._seen.clear()
