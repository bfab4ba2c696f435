"""What processes under fire write down beside the log, to be held against it afterwards.

Each process appends to a file of its own, one JSON line per event and one write(2) per line, so that a SIGKILL can only
cut off the last line. Times are of the monotonic clock, which all processes of a machine share.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Literal, TypeVar

import msgspec

LEASE_S = 0.7
ACK_WAIT_S = 1.0

# id -> (mode, pattern, the topics it matches)
SUBSCRIPTIONS = {
    "ex": ("exclusive", "work.*", ("work.a", "work.b")),
    "sh": ("shared", "work.*", ("work.a", "work.b")),
    "mix": ("exclusive", "work.a", ("work.a",)),
    "hd": ("exclusive", "work.*", ("work.a", "work.b")),  # consumed by handlers, whose acks return unseen
}

How = Literal["ack", "nack"]
Key = tuple[int, int]  # seq, attempt


class Event(msgspec.Struct, frozen=True, tag=True, tag_field="what", kw_only=True):
    actor: str  # a thread of a process: "mixed-3/publisher"
    t: int  # when it was written down, in ns


class Trying(Event, frozen=True, kw_only=True):
    """About to publish. Tokens stand in the data; `with_ids`: they are the ids too."""

    tokens: tuple[str, ...]
    with_ids: bool


class Published(Event, frozen=True, kw_only=True):
    tokens: tuple[str, ...]
    seqs: tuple[int, ...]


class Held(Event, frozen=True, kw_only=True):
    """subscribe() has returned: `holder` is this one session of the subscription."""

    subscription: str
    holder: str


class Received(Event, frozen=True, kw_only=True):
    """fetch() was called at `began` and has returned these. Or, `fetched_ahead`, a handler or one of several iterating
    threads got a message that was fetched some time after `began`; a late holder may still have some of those to hand
    out. `actor` tells the threads of one holder apart."""

    subscription: str
    holder: str
    began: int
    fetched_ahead: bool = False
    found: tuple[tuple[int, int, str], ...]  # seq, attempt, token


class Settling(Event, frozen=True, kw_only=True):
    subscription: str
    holder: str
    how: How
    keys: tuple[Key, ...]


class Settled(Event, frozen=True, kw_only=True):
    """The ack or nack that began at `began` has returned."""

    subscription: str
    holder: str
    how: How
    keys: tuple[Key, ...]
    began: int


class Refused(Event, frozen=True, kw_only=True):
    """The ack or nack raised: the right to settle had passed on."""

    subscription: str
    holder: str
    how: How
    keys: tuple[Key, ...]
    error: str


class Closing(Event, frozen=True, kw_only=True):
    """About to give a subscription back."""

    subscription: str
    holder: str


class Failed(Event, frozen=True, kw_only=True):
    """Something raised that nothing here expects."""

    error: str


AnyEvent = Trying | Published | Held | Received | Settling | Settled | Refused | Closing | Failed
E_ = TypeVar("E_", bound=Event)

_decoder = msgspec.json.Decoder(AnyEvent)


class Witness:
    """One thread's pen. Several may share a file: O_APPEND keeps their lines apart."""

    def __init__(self, path: str, actor: str) -> None:
        # O_DSYNC, so that the side log would survive what the log survives.
        self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_DSYNC, 0o644)
        self._actor = actor

    def note(self, kind: type[E_], **fields: object) -> int:
        """Write an event down; returns its time."""
        event = kind(actor=self._actor, t=time.monotonic_ns(), **fields)  # type: ignore[arg-type]
        os.write(self._descriptor, msgspec.json.encode(event) + b"\n")
        return event.t


def read(path: Path) -> Iterable[AnyEvent]:
    if not path.exists():
        return
    *lines, _rest = path.read_bytes().split(b"\n")  # the rest is empty, or was cut off by the kill
    for line in lines:
        yield _decoder.decode(line)
