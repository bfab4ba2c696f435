"""Idempotent publish: how long an id is remembered."""

from __future__ import annotations

import msgspec

from headwater.errors import InvalidOption


class DedupeWindow(msgspec.Struct, frozen=True):
    """An id counts as a repeat while both hold: not older than `span_ms`, and among the last `count` messages."""

    span_ms: int = 24 * 3600 * 1000
    count: int = 1_000_000

    def __post_init__(self) -> None:
        if self.span_ms < 0 or self.count < 0:
            raise InvalidOption("a dedupe window cannot be negative")

    def remembers(self, seq: int, published_ms: int, last_seq: int, now_ms: int) -> bool:
        return seq > self.oldest_seq(last_seq) and published_ms >= self.oldest_ms(now_ms)

    def oldest_seq(self, last_seq: int) -> int:
        return last_seq - self.count

    def oldest_ms(self, now_ms: int) -> int:
        return now_ms - self.span_ms
