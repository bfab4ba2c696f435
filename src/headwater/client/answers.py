"""Reading what the server answers to the calls of a consumer."""

from __future__ import annotations

from typing import Any

import msgspec

from headwater.broker.claims import Claimed
from headwater.message import Message
from headwater.protocol import wire

_acknowledged = msgspec.json.Decoder(wire.Acknowledged)
_claimed = msgspec.json.Decoder(list[Claimed])
_fetched = msgspec.json.Decoder(wire.Fetched)

read_subscribed = msgspec.json.Decoder(wire.Subscribed).decode


def read_fetched(raw: Any) -> list[Claimed]:
    fetched = _fetched.decode(raw)
    found = _claimed.decode(fetched.messages)
    for at in fetched.unreadable:
        found[at] = _unpacked(found[at])
    return found


def _unpacked(claimed: Claimed) -> Claimed:
    """A payload that is not JSON came as text."""
    message: Message = claimed.message
    raw = msgspec.Raw(str(msgspec.json.decode(message.raw)).encode())
    return msgspec.structs.replace(claimed, message=msgspec.structs.replace(message, raw=raw))


def read_late(raw: Any) -> list[int]:
    """Which of the acked seqs were not in flight any more."""
    return _acknowledged.decode(raw).late


def read_nothing(raw: Any) -> None:
    return None
