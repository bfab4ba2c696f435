"""What a database leaves to Python when it looks for messages: regexes, and conditions over large payloads.

One look is bounded: by the bytes it looks through and by time, whatever was found until then; the next one goes on
where it ended. A large payload is decoded once for all conditions that ask about it, not once for each.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import NamedTuple

from headwater.delivery.where import Where
from headwater.errors import InvalidData
from headwater.message import Message
from headwater.ports.records import Selection

SMALL_BYTES_MAX = 4_096  # of data; up to here the database is asked whether a condition holds
LOOK_BYTES_MAX = 1024 * 1024  # of messages that were found or looked into
LOOK_S_MAX = 0.05
CANDIDATES_MAX = 10_000
DECODED_BYTES_MAX = 3 * 1024 * 1024  # of payloads that are kept decoded; in Python's objects up to 25 times as much


class Candidate(NamedTuple):
    """A message that may be wanted. `is_judged`: the database has said that its content fits."""

    seq: int
    topic: str
    from_: str | None
    to: str | None
    size: int
    published_ms: int
    is_judged: bool


class Sifted(NamedTuple):
    """`stopped_at`: the seq behind which to go on; None if all candidates were looked at."""

    seqs: list[int]
    stopped_at: int | None


def sift(
    selection: Selection, candidates: Iterable[Candidate], limit: int, salt: int, load: Callable[[int], Message | None]
) -> Sifted:
    found: list[int] = []
    weight, until_s = 0, time.monotonic() + LOOK_S_MAX
    for each in candidates:
        fits = selection.pattern.matches(each.topic) and selection.entities.keeps(each.from_, each.to)
        if fits and selection.where is not None and not each.is_judged:
            weight += each.size
            fits = _holds(selection.where, each, salt, load)
        if fits:
            found.append(each.seq)
            weight += each.size
        if len(found) >= limit or weight >= LOOK_BYTES_MAX or time.monotonic() > until_s:
            return Sifted(found, each.seq)
    return Sifted(found, None)


def _holds(where: Where, candidate: Candidate, salt: int, load: Callable[[int], Message | None]) -> bool:
    key = (salt, candidate.seq, candidate.published_ms)
    decoded = _kept.get(key)
    if decoded is None:
        message = load(candidate.seq)
        if message is None:
            return False
        decoded = Decoded(message)
        if candidate.size > SMALL_BYTES_MAX:
            _kept.put(key, decoded)
    try:
        return where.holds(decoded.field)
    except InvalidData:
        return True  # unreadable: better delivered, failed and buried with a reason than silently left out


class Decoded:
    """A message whose fields are worked out once."""

    def __init__(self, message: Message) -> None:
        self.size = len(message.raw)
        self._message = message
        self._fields: dict[str, object] = {}

    def field(self, name: str) -> object:
        if name not in self._fields:
            self._fields[name] = self._message.field(name)
        return self._fields[name]


class _Kept:
    """The last large messages that were decoded."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._messages: OrderedDict[tuple[int, int, int], Decoded] = OrderedDict()
        self._bytes = 0

    def get(self, key: tuple[int, int, int]) -> Decoded | None:
        with self._lock:
            found = self._messages.get(key)
            if found is not None:
                self._messages.move_to_end(key)
            return found

    def put(self, key: tuple[int, int, int], decoded: Decoded) -> None:
        with self._lock:
            if key in self._messages:
                return
            self._messages[key] = decoded
            self._bytes += decoded.size
            while self._bytes > DECODED_BYTES_MAX and len(self._messages) > 1:
                self._bytes -= self._messages.popitem(last=False)[1].size


_kept = _Kept()
