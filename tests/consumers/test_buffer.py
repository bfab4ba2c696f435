"""What waits in the buffer of a consumer, and what waits for it."""

from __future__ import annotations

from typing import Any

import headwater
from headwater import ManualClock


def messages(count: int) -> list[tuple[str, int]]:
    return [("a", number) for number in range(count)]


def test_what_an_ephemeral_reader_has_read_ahead_does_not_grow_stale() -> None:
    clock = ManualClock()
    with headwater.open("memory:", clock=clock, housekeeping=None) as log:
        subscription = log.subscribe("e", "a", mode="ephemeral", ack_wait=30)
        log.publish_many(messages(5))
        iterator: Any = subscription.messages()
        assert next(iterator).data == 0
        iterator.close()
        clock.advance(60_000)
        assert [message.data for message in subscription.fetch(10)] == [1, 2, 3, 4]
