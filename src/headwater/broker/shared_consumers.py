"""The list of consumers of a shared subscription, for display only: no delivery depends on it.

One lease per subscription has the list as its owner: names, and until when each counts as alive. A consumer renews its
entry in the transaction of its heartbeat.

The token of a claim names its consumer at no cost: a claim raises the fence to the next number whose remainder by MARKS
is the mark of the consumer.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import msgspec

from headwater.delivery.lease import Lease
from headwater.ports.store import Reader, Writer

CONSUMERS_LISTED_MAX = 1_000  # of one subscription
MARKS = 1 << 20  # two of 100 random names share a mark once in 200 times; a 64-bit fence lasts for 2**43 claims

_decode = msgspec.json.Decoder(dict[str, int]).decode


def live_consumers(reader: Reader, subscription: str, now_ms: int) -> list[str]:
    return sorted(_alive(reader.lease(_resource(subscription)), now_ms))


def renew_consumer(writer: Writer, subscription: str, name: str, now_ms: int, until_ms: int) -> None:
    """Renew the entry of a consumer; one whose `until_ms` is past is removed."""
    resource = _resource(subscription)
    lease = writer.lease(resource)
    alive = _alive(lease, now_ms)
    alive.pop(name, None)
    if until_ms > now_ms and len(alive) < CONSUMERS_LISTED_MAX:
        alive[name] = until_ms
    text = msgspec.json.encode(alive).decode() if alive else ""
    writer.save_lease(resource, Lease(text, lease.fence + 1, max(alive.values(), default=0)))


def forget_consumers(writer: Writer, subscription: str) -> None:
    """Delete the list of consumers, of a subscription that is deleted."""
    writer.delete_lease(_resource(subscription))


def next_token(fence: int, name: str) -> int:
    """The fence of the next claim by the consumer of this name."""
    return (fence // MARKS + 1) * MARKS + _mark(name)


def consumer_of(token: int, names: Sequence[str]) -> str | None:
    """The consumer that claimed with this token; None if it is not among these, or two of them may have it."""
    marked = [name for name in names if _mark(name) == token % MARKS]
    return marked[0] if len(marked) == 1 else None


def _mark(name: str) -> int:
    return zlib.crc32(name.encode()) % MARKS


def _alive(lease: Lease, now_ms: int) -> dict[str, int]:
    known = _decode(lease.owner) if lease.live(now_ms) else {}
    return {name: until_ms for name, until_ms in known.items() if now_ms < until_ms}


def _resource(subscription: str) -> str:
    return f"consumers of {subscription}"
