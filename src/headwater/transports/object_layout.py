"""What an archive's objects hold, and under which names. Pure.

    <prefix>/day=2026-11-15/topic_prefix=orders/000000000000001-000000000000100-<digest>.jsonl.gz
    <prefix>/_manifest/00000000000000000001.json

An object holds messages as JSON lines, in their order, all of one UTC day and one first token of the topic, in the
directories that the lake's bronze has too: Spark, DuckDB and others read them as columns. Its name follows from what
it holds. gzip, because the standard library of Python 3.11 has it and every reader of JSON lines takes it.
"""

from __future__ import annotations

import hashlib
import re
import zlib
from collections.abc import Sequence
from typing import NamedTuple

from headwater.errors import Corrupt
from headwater.message import Message, datetime_of
from headwater.transports.lines import LINE_BYTES_MAX, to_line

OBJECT_BYTES_MAX = 16 * 1024 * 1024
"""Of one object before compression; more begins another."""
OBJECT_BYTES_LEAST = LINE_BYTES_MAX  # any one message fits
PREFIX_CHARACTERS_MAX = 32
BATCH_PREFIXES_MAX = 32
"""How many first tokens of one batch have objects of their own; what comes later shares one. Tokens may be ids."""
OTHER_PREFIXES = "~"
COMPRESSION_LEVEL = 6

_GZIP = 31  # of zlib's wbits: the largest window, and gzip's own header, whose time zlib leaves at 0
_PLAIN = re.compile(r"[A-Za-z0-9_-]+")
_OBJECT_NAME = re.compile(r"day=\d{4}-\d\d-\d\d/topic_prefix=[^/]+/\d{15,}-\d{15,}-[0-9a-f]{32}(-\d+)?\.jsonl\.gz")


class Piece(NamedTuple):
    """What one object is to hold."""

    place: str
    lines: bytes
    ids: tuple[str, ...]
    scoped_ids: tuple[str, ...]
    seq_from: int
    seq_to: int
    sha256: str
    """Of the lines as they were before compression, which another version of zlib may do differently."""

    def path(self, generation: int = 1) -> str:
        again = "" if generation == 1 else f"-{generation}"
        return f"{self.place}/{self.seq_from:015d}-{self.seq_to:015d}-{self.sha256[:32]}{again}.jsonl.gz"


def cut(messages: Sequence[Message], bytes_max: int = OBJECT_BYTES_MAX) -> list[Piece]:
    """The pieces of a batch, in the order of their first messages; the same batch gives the same ones."""
    prefixes: set[str] = set()
    heaps: dict[str, _Heap] = {}
    full: list[_Heap] = []
    for position, message in enumerate(messages):
        place = _place(message, prefixes)
        line = to_line(message)
        heap = heaps.get(place)
        if heap is not None and heap.size + len(line) > bytes_max:
            full.append(heaps.pop(place))
            heap = None
        if heap is None:
            heap = heaps[place] = _Heap(place, position)
        heap.add(message, line)
    return [heap.piece() for heap in sorted([*full, *heaps.values()], key=lambda heap: heap.position)]


class _Heap:
    def __init__(self, place: str, position: int) -> None:
        self.place, self.position, self.size = place, position, 0
        self._messages: list[Message] = []
        self._lines: list[bytes] = []

    def add(self, message: Message, line: bytes) -> None:
        self._messages.append(message)
        self._lines.append(line)
        self.size += len(line)

    def piece(self) -> Piece:
        lines = b"".join(self._lines)
        seqs = [message.seq for message in self._messages]
        ids = tuple(message.id for message in self._messages)
        scoped_ids = tuple(message.scoped_id for message in self._messages)
        return Piece(self.place, lines, ids, scoped_ids, min(seqs), max(seqs), hashlib.sha256(lines).hexdigest())


def _place(message: Message, prefixes: set[str]) -> str:
    prefix = message.topic.partition(".")[0][:PREFIX_CHARACTERS_MAX]
    if prefix not in prefixes:
        if len(prefixes) < BATCH_PREFIXES_MAX:
            prefixes.add(prefix)
        else:
            prefix = OTHER_PREFIXES
    return f"day={datetime_of(message.published_ms).date().isoformat()}/topic_prefix={_escaped(prefix)}"


def _escaped(value: str) -> str:
    """As Hive and Spark write a column's value into a path: ASCII that is not plain as %XX, all else as it is."""
    return "".join(each if _PLAIN.fullmatch(each) or not each.isascii() else f"%{ord(each):02X}" for each in value)


def is_object_name(path: str) -> bool:
    """Whether this is a name that `Piece.path` gives; nothing else under a prefix is ours to remove."""
    return _OBJECT_NAME.fullmatch(path) is not None


def pack(lines: bytes) -> bytes:
    packer = zlib.compressobj(COMPRESSION_LEVEL, zlib.DEFLATED, _GZIP)
    return packer.compress(lines) + packer.flush()


def unpack(packed: bytes, size: int, sha256: str, where: str) -> bytes:
    """The lines of an object, which must have this size and digest; raises Corrupt."""
    unpacker = zlib.decompressobj(_GZIP)
    try:
        lines = unpacker.decompress(packed, size + 1)  # never more than was promised, whatever is in there
    except zlib.error as exc:
        raise _damaged(where, f"what it holds cannot be unpacked ({exc})") from exc
    if len(lines) != size or not unpacker.eof or unpacker.unused_data:
        raise _damaged(where, f"it does not hold the {size} bytes that the manifest promises")
    if hashlib.sha256(lines).hexdigest() != sha256:
        raise _damaged(where, "its content has another digest than the manifest says")
    return lines


def _damaged(where: str, why: str) -> Corrupt:
    return Corrupt(why, where=where, next="Restore this object from a copy, or archive its messages again from the log")
