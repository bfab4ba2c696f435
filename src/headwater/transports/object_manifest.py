"""Which objects belong to an archive: numbered entries, each written once, after the objects that it names. Pure.

The entries are the archive's log. An entry is created only if there is none of its number, so of two writers one gets
the number; the other reads what the first wrote, leaves out what that holds, and takes the next. An object that no
entry names is no part of the archive: its writer died, or somebody else wrote the same messages first.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Iterable, Sequence

import msgspec

from headwater.errors import Corrupt
from headwater.message import Message
from headwater.transports.object_layout import Piece, is_object_name

MANIFEST = "_manifest"  # readers of partitioned directories pass over names that begin so
ENTRY_MESSAGES_MAX = 10_000
ENTRY_BYTES_MAX = 32 * 1024 * 1024
RECENT_ENTRIES_MAX = 64
RECENT_IDS_MAX = 100_000
LIST_PAGE = 1_000
FORMAT = 2
_ID_BYTES = 16
_DIGITS = 20


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


class Entry(msgspec.Struct, frozen=True):
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


def named(piece: Piece, path: str) -> NamedObject:
    return NamedObject(
        path=path,
        messages=len(piece.ids),
        bytes=len(piece.lines),
        sha256=piece.sha256,
        seq_from=piece.seq_from,
        seq_to=piece.seq_to,
        id_from=piece.ids[0],
        id_to=piece.ids[-1],
    )


def make_entry(number: int, pieces: Sequence[Piece], paths: Sequence[str]) -> Entry:
    digests = b"".join(id_digest(each) for piece in pieces for each in piece.scoped_ids)
    objects = [named(piece, path) for piece, path in zip(pieces, paths, strict=True)]
    return Entry(number, objects, base64.b64encode(digests).decode())


def entry_path(number: int) -> str:
    return f"{MANIFEST}/{number:0{_DIGITS}d}.json"


def entry_number(path: str) -> int | None:
    """None for what else may lie there."""
    directory, _, name = path.rpartition("/")
    digits, _, ending = name.partition(".")
    good = directory == MANIFEST and ending == "json" and len(digits) == _DIGITS
    return int(digits) if good and digits.isascii() and digits.isdigit() else None


def encode_entry(entry: Entry) -> bytes:
    return msgspec.json.encode(entry) + b"\n"


_decode = msgspec.json.Decoder(Entry).decode


def decode_entry(found: bytes, number: int, where: str) -> Entry:
    """Raises Corrupt for anything that a writer of this format would not have written."""
    try:
        entry = _decode(found)
        if entry.format > FORMAT:
            raise Corrupt(f"it is of format {entry.format}", where=where, next="Read it with a newer Headwater")
        messages = sum(each.messages for each in entry.objects)
        whole = (
            entry.number == number
            and entry.objects
            and all(each.messages > 0 and each.bytes > 0 and is_object_name(each.path) for each in entry.objects)
            and len(base64.b64decode(entry.ids, validate=True)) == messages * _ID_BYTES
        )
    except (msgspec.MsgspecError, ValueError, RecursionError) as exc:
        raise Corrupt(f"this is no entry of a manifest ({exc})", where=where, next=_RESTORE) from exc
    if not whole:
        raise Corrupt("what it says does not hold together", where=where, next=_RESTORE)
    return entry


_RESTORE = "Restore this entry from a copy; the objects themselves are not touched by it"


def id_digest(identity: str) -> bytes:
    return hashlib.blake2b(identity.encode(errors="surrogatepass"), digest_size=_ID_BYTES).digest()


class RecentIds:
    """The scoped ids that came last, no more than `most`. An entry of format 1 does not tell the topics of its ids, so
    nothing is recognised by it: what is written twice can be told later, what is left out is lost."""

    def __init__(self, most: int = RECENT_IDS_MAX) -> None:
        self._most = most
        self._known: dict[bytes, None] = {}

    def add(self, entry: Entry) -> None:
        for digest in entry.digests() if entry.format > 1 else ():
            self._known.pop(digest, None)
            self._known[digest] = None
        while len(self._known) > self._most:
            del self._known[next(iter(self._known))]

    def unknown(self, messages: Iterable[Message]) -> list[Message]:
        """Those that are not among them, and of several with one topic and id the first."""
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
    them at most. Years of entries take some dozens of pages instead of thousands: the steps double until nothing lies
    behind, then halve."""
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


def newest(numbers: range, find: Callable[[int], Entry | None]) -> list[Entry]:
    """The last few of these entries in order: RECENT_ENTRIES_MAX, or as many as it takes for RECENT_IDS_MAX ids, or as
    many as are left."""
    found: list[Entry] = []
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
