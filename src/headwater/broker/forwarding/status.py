"""How a forwarder is."""

from __future__ import annotations

from typing import Literal

import msgspec

from headwater.delivery.breaker import BreakerState

ForwarderState = Literal["stopped", "waiting", "running", "retrying", "failed"]
"""Waiting: another process holds the subscription. Retrying: the target did not take what is in hand. Failed: it ended
with an error of its own side."""


class ForwarderStatus(msgspec.Struct, frozen=True):
    """Counts are since this object was made, `lag` is the subscription's: all that has not arrived yet,
    None before it has begun. `set_aside` are
    messages that the target refuses, so far."""

    id: str
    target: str
    state: ForwarderState
    forwarded: int
    retried: int
    dead: int
    in_hand: int
    set_aside: int
    lag: int | None
    breaker: BreakerState
    last_error: str | None
