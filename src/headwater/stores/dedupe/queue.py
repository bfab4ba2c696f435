"""What all dedupe queues share: limits, checks, and counting what was answered."""

from __future__ import annotations

import threading
import uuid
from abc import ABC, abstractmethod
from collections import Counter

from headwater.errors import Closed, InvalidOption
from headwater.message import Span, check_whole, span_ms
from headwater.ports.clock import Clock, SystemClock
from headwater.ports.dedupe import (
    DEDUPE_AGE_S,
    DEDUPE_COUNT,
    DEDUPE_COUNT_MAX,
    DEDUPE_ID_CHARS_MAX,
    HANDLER_CHARS_MAX,
    Begun,
    DedupeEntry,
    DedupeStats,
)


class CheckedQueue(ABC):
    """`ports.dedupe.DedupeQueue` over a few steps that each kind of memory has in its own way. Every object is an owner
    of its own: it releases only its own claims."""

    def __init__(
        self,
        name: str,
        *,
        max_count: int = DEDUPE_COUNT,
        max_age: Span = DEDUPE_AGE_S,
        clock: Clock | None = None,
    ) -> None:
        self.name = name
        self.clock: Clock = clock or SystemClock()
        self.max_count = check_whole("max_count", max_count, 1, DEDUPE_COUNT_MAX)
        self.max_age_ms = span_ms(max_age, "max_age")
        if self.max_age_ms < 1:
            raise InvalidOption("max_age must be longer than 0")
        self._owner = uuid.uuid4().hex
        self._answers: Counter[Begun] = Counter()
        self._answers_lock = threading.Lock()
        self._closed = False

    def begin(self, handler: str, id: str, now_ms: int, claim_ms: int) -> Begun:
        self._check(handler, id)
        check_whole("claim_ms", claim_ms, 1, 2**53)
        return self._count(self._begin(handler, id, now_ms, now_ms + claim_ms))

    def extend(self, handler: str, id: str, now_ms: int, claim_ms: int) -> bool:
        self._check(handler, id)
        check_whole("claim_ms", claim_ms, 1, 2**53)
        return self._extend(handler, id, now_ms, now_ms + claim_ms)

    def finish(self, handler: str, id: str) -> None:
        self._check(handler, id)
        self._finish(handler, id, self.clock.now_ms())

    def release(self, handler: str, id: str) -> None:
        self._check(handler, id)
        self._release(handler, id)

    def contains(self, handler: str, id: str) -> bool:
        self._check(handler, id)
        return self._contains(handler, id, self._forgotten_ms())

    def add(self, handler: str, id: str) -> bool:
        self._check(handler, id)
        return self._count(self._begin(handler, id, self.clock.now_ms(), None)) == "first"

    def entries(self, handler: str) -> list[DedupeEntry]:
        self._check(handler)
        return self._entries(handler, self._forgotten_ms())

    def stats(self, handler: str | None = None) -> DedupeStats:
        self._check(*(() if handler is None else (handler,)))
        handlers, done, begun, oldest_ms = self._totals(handler, self._forgotten_ms())
        with self._answers_lock:
            answers = self._answers.copy()
        return DedupeStats(
            handlers,
            done,
            begun,
            oldest_ms,
            self.max_count,
            self.max_age_ms,
            answers["first"],
            answers["done"],
            answers["busy"],
        )

    def clear(self, handler: str | None = None) -> int:
        self._check(*(() if handler is None else (handler,)))
        return self._clear(handler)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._close()

    def __enter__(self) -> CheckedQueue:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @abstractmethod
    def _begin(self, handler: str, id: str, now_ms: int, until_ms: int | None) -> Begun:
        """Without `until_ms` it is done at once, and the oldest beyond the limits are forgotten."""

    @abstractmethod
    def _extend(self, handler: str, id: str, now_ms: int, until_ms: int) -> bool: ...

    @abstractmethod
    def _finish(self, handler: str, id: str, now_ms: int) -> None: ...

    @abstractmethod
    def _release(self, handler: str, id: str) -> None: ...

    @abstractmethod
    def _contains(self, handler: str, id: str, forgotten_ms: int) -> bool: ...

    @abstractmethod
    def _entries(self, handler: str, forgotten_ms: int) -> list[DedupeEntry]: ...

    @abstractmethod
    def _totals(self, handler: str | None, forgotten_ms: int) -> tuple[int, int, int, int | None]:
        """Handlers, done, begun, and when the oldest was."""

    @abstractmethod
    def _clear(self, handler: str | None) -> int: ...

    @abstractmethod
    def _close(self) -> None: ...

    def _forgotten_ms(self, now_ms: int | None = None) -> int:
        """What was done then or earlier counts as never seen."""
        return (self.clock.now_ms() if now_ms is None else now_ms) - self.max_age_ms

    def _count(self, answer: Begun) -> Begun:
        with self._answers_lock:
            self._answers[answer] += 1
        return answer

    def _check(self, *texts: str) -> None:
        if self._closed:
            raise Closed("this dedupe queue is closed", where=self.name)
        for what, text, limit in zip(("handler", "id"), texts, (HANDLER_CHARS_MAX, DEDUPE_ID_CHARS_MAX), strict=False):
            if not isinstance(text, str) or not text or "\0" in text or not _encodable(text):
                raise InvalidOption(f"{what} must be non-empty text, not {text!r}", where=self.name)
            if len(text) > limit:
                raise InvalidOption(f"{what} has {len(text)} characters, the limit is {limit}", where=self.name)


def _encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
