"""An archive's objects and the manifest that names them: what they hold and what they are called. Pure.

    <prefix>/day=2026-11-15/topic_prefix=orders/000000000000001-000000000000100-<digest>.jsonl.gz
    <prefix>/_manifest/00000000000000000001.json

An object holds messages as JSON lines, in their order, all of one UTC day and one first token of the topic, in the
directories that the lake's bronze has too: Spark, DuckDB and others read them as columns. Its name follows from its
content. gzip, because the standard library of Python 3.11 has it and every reader of JSON lines takes it.

The manifest's entries are numbered, and each is written once, after the objects that it names. An entry is created
only if there is none of its number, so of two writers one gets the number; the other reads what the first wrote, leaves
out those messages, and takes the next number. An object that no entry names is no part of the archive: its writer died,
or another one wrote the same messages first.
"""

from __future__ import annotations

import base64
import hashlib
import re
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import msgspec

from headwater.errors import CorruptError
from headwater.formats import datetime_of
from headwater.message import Message
from headwater.transports.base import batches
from headwater.transports.file import LINE_BYTES_MAX, to_line

OBJECT_BYTES_MAX = 16 * 1024 * 1024
"""Of one object before compression; more begins another."""
OBJECT_BYTES_LEAST = LINE_BYTES_MAX  # any one message fits
PREFIX_CHARACTERS_MAX = 32
BATCH_PREFIXES_MAX = 32
"""How many first tokens of one batch have objects of their own; further ones share one. Tokens may be ids."""
OTHER_PREFIXES = "~"
COMPRESSION_LEVEL = 6

_GZIP = 31  # of zlib's wbits: the largest window, and gzip's own header, whose time zlib leaves at 0
_PLAIN = re.compile(r"[A-Za-z0-9_-]+")
_OBJECT_NAME = re.compile(r"day=\d{4}-\d\d-\d\d/topic_prefix=[^/]+/\d{15,}-\d{15,}-[0-9a-f]{32}(-\d+)?\.jsonl\.gz")

MANIFEST = "_manifest"  # readers of partitioned directories pass over names that begin so
ENTRY_MESSAGES_MAX = 10_000
ENTRY_BYTES_MAX = 32 * 1024 * 1024
RECENT_ENTRIES_MAX = 64
RECENT_IDS_MAX = 100_000
LIST_PAGE = 1_000
FORMAT = 2
_ID_BYTES = 16
_DIGITS = 20


# --- objects -----------------------------------------------------------------------------------------------------


class ObjectPart(NamedTuple):
    """The content of one object."""

    directory: str
    lines: bytes
    ids: tuple[str, ...]
    scoped_ids: tuple[str, ...]
    seq_from: int
    seq_to: int
    sha256: str
    """Of the lines as they were before compression, which another version of zlib may do differently."""

    def path(self, generation: int = 1) -> str:
        again = "" if generation == 1 else f"-{generation}"
        return f"{self.directory}/{self.seq_from:015d}-{self.seq_to:015d}-{self.sha256[:32]}{again}.jsonl.gz"


def partition(messages: Sequence[Message], bytes_max: int = OBJECT_BYTES_MAX) -> list[ObjectPart]:
    """The parts of a batch, in the order of their first messages; the same batch gives the same parts."""
    prefixes: set[str] = set()
    directories: dict[str, list[_Line]] = {}
    for position, message in enumerate(messages):
        line = _Line(position, _directory(message, prefixes), message, to_line(message))
        directories.setdefault(line.directory, []).append(line)
    parts = [
        part
        for lines in directories.values()
        for part in batches(lines, lambda line: len(line.text), len(lines), bytes_max)
    ]
    return [_object_part(lines) for lines in sorted(parts)]


class _Line(NamedTuple):
    position: int
    directory: str
    message: Message
    text: bytes


def _object_part(lines: Sequence[_Line]) -> ObjectPart:
    joined = b"".join(line.text for line in lines)
    seqs = [line.message.seq for line in lines]
    return ObjectPart(
        lines[0].directory,
        joined,
        ids=tuple(line.message.id for line in lines),
        scoped_ids=tuple(line.message.scoped_id for line in lines),
        seq_from=min(seqs),
        seq_to=max(seqs),
        sha256=hashlib.sha256(joined).hexdigest(),
    )


def _directory(message: Message, prefixes: set[str]) -> str:
    prefix = message.topic.partition(".")[0][:PREFIX_CHARACTERS_MAX]
    if prefix not in prefixes:
        if len(prefixes) < BATCH_PREFIXES_MAX:
            prefixes.add(prefix)
        else:
            prefix = OTHER_PREFIXES
    return f"day={datetime_of(message.published_ms).date().isoformat()}/topic_prefix={_escaped(prefix)}"


def _escaped(value: str) -> str:
    """The value as Hive and Spark write it into a path: ASCII that is not plain as %XX, all else as it is."""
    return "".join(each if _PLAIN.fullmatch(each) or not each.isascii() else f"%{ord(each):02X}" for each in value)


def is_object_name(path: str) -> bool:
    """Whether this is a name that `ObjectPart.path` gives; `sweep` removes nothing else under a prefix."""
    return _OBJECT_NAME.fullmatch(path) is not None


def pack(lines: bytes) -> bytes:
    packer = zlib.compressobj(COMPRESSION_LEVEL, zlib.DEFLATED, _GZIP)
    return packer.compress(lines) + packer.flush()


def unpack(packed: bytes, size: int, sha256: str, where: str) -> bytes:
    """The lines of an object, which must have this size and digest; raises CorruptError."""
    unpacker = zlib.decompressobj(_GZIP)
    try:
        lines = unpacker.decompress(packed, size + 1)  # never more than was promised, whatever is in there
    except zlib.error as exc:
        raise _damaged(where, f"what it holds cannot be unpacked ({exc})") from exc
    if len(lines) != size or not unpacker.eof or unpacker.unused_data:
        raise _damaged(where, f"it does not hold the {size} bytes that the manifest promises")
    if hashlib.sha256(lines).hexdigest() != sha256:
        raise _damaged(where, "its content has another digest than in the manifest")
    return lines


def _damaged(where: str, why: str) -> CorruptError:
    return CorruptError(
        why, where=where, next="Restore this object from a copy, or archive its messages again from the log"
    )


# --- manifest ----------------------------------------------------------------------------------------------------


class NamedObject(msgspec.Struct, frozen=True):
    path: str
    messages: int
    bytes: int
    """Before compression."""
    sha256: str
    seq_from: int
    seq_to: int
    id_from: str
    id_to: str


class ManifestEntry(msgspec.Struct, frozen=True):
    number: int
    objects: list[NamedObject]
    ids: str
    """A digest of each message's topic and id, in the order of the objects: 16 bytes each, all of them in base64. In
    format 1, of its id alone."""
    format: int = FORMAT

    def holds(self, messages: Iterable[Message], digests: Sequence[bytes]) -> bool:
        """Whether these are the messages of which it has these digests."""
        return [id_digest(each.id if self.format == 1 else each.scoped_id) for each in messages] == digests

    def digests(self) -> list[bytes]:
        joined = base64.b64decode(self.ids)
        return [joined[at : at + _ID_BYTES] for at in range(0, len(joined), _ID_BYTES)]


def make_entry(number: int, parts: Sequence[ObjectPart], paths: Sequence[str]) -> ManifestEntry:
    digests = b"".join(id_digest(each) for part in parts for each in part.scoped_ids)
    objects = [
        NamedObject(
            path=path,
            messages=len(part.ids),
            bytes=len(part.lines),
            sha256=part.sha256,
            seq_from=part.seq_from,
            seq_to=part.seq_to,
            id_from=part.ids[0],
            id_to=part.ids[-1],
        )
        for part, path in zip(parts, paths, strict=True)
    ]
    return ManifestEntry(number, objects, base64.b64encode(digests).decode())


def entry_path(number: int) -> str:
    return f"{MANIFEST}/{number:0{_DIGITS}d}.json"


def entry_number(path: str) -> int | None:
    """None for any other file in the directory."""
    directory, _, name = path.rpartition("/")
    digits, _, ending = name.partition(".")
    good = directory == MANIFEST and ending == "json" and len(digits) == _DIGITS
    return int(digits) if good and digits.isascii() and digits.isdigit() else None


def encode_entry(entry: ManifestEntry) -> bytes:
    return msgspec.json.encode(entry) + b"\n"


_decode = msgspec.json.Decoder(ManifestEntry).decode


def decode_entry(found: bytes, number: int, where: str) -> ManifestEntry:
    """Raises CorruptError for anything that a writer of this format would not have written."""
    try:
        entry = _decode(found)
        if entry.format > FORMAT:
            raise CorruptError(f"it is of format {entry.format}", where=where, next="Read it with a newer Headwater")
        messages = sum(each.messages for each in entry.objects)
        whole = (
            entry.number == number
            and entry.objects
            and all(each.messages > 0 and each.bytes > 0 and is_object_name(each.path) for each in entry.objects)
            and len(base64.b64decode(entry.ids, validate=True)) == messages * _ID_BYTES
        )
    except (msgspec.MsgspecError, ValueError, RecursionError) as exc:
        raise CorruptError(f"this is no entry of a manifest ({exc})", where=where, next=_RESTORE) from exc
    if not whole:
        raise CorruptError("its fields contradict each other", where=where, next=_RESTORE)
    return entry


_RESTORE = "Restore this entry from a copy; the objects themselves are not touched by it"


def id_digest(identity: str) -> bytes:
    return hashlib.blake2b(identity.encode(errors="surrogatepass"), digest_size=_ID_BYTES).digest()


class RecentIds:
    """The newest scoped ids, no more than `most`. An entry of format 1 does not have the topics of its ids, so nothing
    is recognised by it: a message that is written twice can be recognised later, one that is left out is lost."""

    def __init__(self, most: int = RECENT_IDS_MAX) -> None:
        self._most = most
        self._known: dict[bytes, None] = {}

    def add(self, entry: ManifestEntry) -> None:
        for digest in entry.digests() if entry.format > 1 else ():
            self._known.pop(digest, None)
            self._known[digest] = None
        while len(self._known) > self._most:
            del self._known[next(iter(self._known))]

    def unknown(self, messages: Iterable[Message]) -> list[Message]:
        """The messages that are not among them; of several with one topic and id the first."""
        found: dict[bytes, Message] = {}
        for message in messages:
            digest = id_digest(message.scoped_id)
            if digest not in self._known:
                found.setdefault(digest, message)
        return list(found.values())

    def __len__(self) -> int:
        return len(self._known)


def last_number(page: Callable[[int], Sequence[int]], after: int = 0) -> int:
    """The greatest number there is, or `after`. `page(n)` gives the smallest numbers above n in order, LIST_PAGE of
    them at most. Years of entries take some dozens of pages instead of thousands: the steps double until nothing
    follows, then halve."""
    low, step, high = after, LIST_PAGE, None
    probe = after
    while high is None or probe < high:
        found = page(probe)
        if found:
            low = found[-1]
            if len(found) < LIST_PAGE:
                return low
            step *= 2
        elif probe == low:
            return low
        else:
            high = probe
        probe = low + step if high is None else low + (high - low) // 2
    return low


def newest(numbers: range, find: Callable[[int], ManifestEntry | None]) -> list[ManifestEntry]:
    """The last few of these entries in order: RECENT_ENTRIES_MAX, or as many as it takes for RECENT_IDS_MAX ids, or as
    many as are left."""
    found: list[ManifestEntry] = []
    ids = 0
    for number in reversed(numbers[-RECENT_ENTRIES_MAX:]):
        entry = find(number)
        if entry is None:
            break
        found.append(entry)
        ids += sum(each.messages for each in entry.objects)
        if ids >= RECENT_IDS_MAX:
            break
    return found[::-1]
