"""Older versions as reverse deltas: the pages of the older one that the newer one does not have alike.

A delta file: a head (magic, page size, page count, whether it is whole), then groups of pages: how many, their numbers
from 0, the length of what follows, the pages one after another, deflated. A group of none ends it. A delta is whole
when the newer version has another page size: it holds every page then, and needs no newer version to be rebuilt from.
"""

from __future__ import annotations

import hashlib
import os
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import BinaryIO, NamedTuple, Protocol

import msgspec

from headwater.errors import Corrupt
from headwater.replication.database_file import COUNTERS
from headwater.replication.host.disk import copy, remove, write_all
from headwater.replication.local_files import private

BLOCK_BYTES = 1024 * 1024  # compared at once; a multiple of every page size
GROUP_BYTES_MAX = 1024 * 1024  # of pages before they are deflated
PAGES_MAX = 2**32 - 2  # as SQLite has it
ZLIB_LEVEL = 1
MAGIC = b"HWPAGES1"

_HEAD = struct.Struct(">8sIIB")
_COUNT = struct.Struct(">I")
_HEADER_BYTES = 100


class Shape(NamedTuple):
    page_size: int
    pages: int

    @property
    def size(self) -> int:
        return self.page_size * self.pages


class Delta(NamedTuple):
    """`pages` are in it, `bytes` is its size; `changed` is how many pages of the newer version the older one does not
    have alike. `identical`: nothing but SQLite's change counter differs, and no file was left."""

    pages: int
    bytes: int
    sha256: str
    changed: int
    identical: bool


class StoredDelta(NamedTuple):
    """A delta file and what was noted about it; `shape` is that of the version it leads to."""

    path: str
    sha256: str
    shape: Shape


def shape_of(path: str) -> Shape:
    """Page size and count of a database that nobody writes, by its header and its length."""
    with open(path, "rb") as file:
        header = file.read(_HEADER_BYTES)
        size = os.fstat(file.fileno()).st_size
    page_size = int.from_bytes(header[16:18], "big")
    page_size = 65536 if page_size == 1 else page_size
    is_power = page_size >= 512 and page_size & (page_size - 1) == 0
    if len(header) < _HEADER_BYTES or not is_power or size % page_size or not 0 < size // page_size <= PAGES_MAX:
        raise Corrupt("it is not a whole number of pages", where=path, next="Push it again")
    return Shape(page_size, size // page_size)


def refuse_other_count(path: str, shape: Shape) -> None:
    """A file may be longer than its header says. SQLite would not see the rest of it."""
    with open(path, "rb") as file:
        header = file.read(_HEADER_BYTES)
    noted = int.from_bytes(header[28:32], "big")
    if header[24:28] == header[92:96] and noted not in (0, shape.pages):  # else SQLite goes by the length, as we do
        raise Corrupt(f"its header tells of {noted:,} pages, and it has {shape.pages:,}", next="Push it again")


# --- writing --------------------------------------------------------------------------------------------------------


def write_delta(older: str, newer: str, into: str, before_more: Callable[[], None] = lambda: None) -> Delta:
    """Compare two versions; what is needed to make the older from the newer goes into a new file, synced. `before_more`
    is asked before each block is compared and each group of pages is written, and ends it by raising."""
    was, now = shape_of(older), shape_of(newer)
    with (
        open(into, "wb", opener=private) as file,
        open(older, "rb", buffering=0) as old,
        open(newer, "rb", buffering=0) as new,
    ):
        writing = _Writing(file, was, before_more, whole=was.page_size != now.page_size)
        if was.page_size != now.page_size:
            writing.add_all(range(was.pages), old)
            alike, changed, identical = 0, now.pages, False
        else:
            alike, only_counters = _add_differing(writing, old, new, was, now)
            changed = now.pages - alike
            identical = only_counters and was.pages == now.pages
        digest = writing.finish()
        size = file.tell()
        if not identical:
            os.fsync(file.fileno())
    if identical:
        remove(into)
    return Delta(was.pages - alike, size, digest, changed, identical)


def _add_differing(writing: _Writing, old: BinaryIO, new: BinaryIO, was: Shape, now: Shape) -> tuple[int, bool]:
    """How many pages are alike, and whether nothing but the change counter differs."""
    page_size, common = was.page_size, min(was.pages, now.pages)
    differing, only_counters = 0, True
    ours, theirs = bytearray(BLOCK_BYTES), bytearray(BLOCK_BYTES)
    done = 0
    while done < common:
        wanted = min(BLOCK_BYTES, (common - done) * page_size)
        if wanted != len(ours):
            ours, theirs = bytearray(wanted), bytearray(wanted)
        writing.before_more()
        _fill(old, ours)
        _fill(new, theirs)
        # Bytearrays, not views of them: these are compared by memcmp.
        if ours != theirs:
            for at in range(0, wanted, page_size):
                page, other = ours[at : at + page_size], theirs[at : at + page_size]
                if page != other:
                    number = done + at // page_size
                    only_counters = only_counters and number == 0 and _same_but_counters(page, other)
                    differing += 1
                    writing.add(number, page)
        done += wanted // page_size
    writing.add_all(range(common, was.pages), old)
    return common - differing, only_counters


def _same_but_counters(page: bytearray, other: bytearray) -> bool:
    for counter in COUNTERS:
        other[counter] = page[counter]
    return page == other


def _fill(file: BinaryIO, buffer: bytearray) -> None:
    view, filled = memoryview(buffer), 0
    while filled < len(buffer):
        read = file.readinto(view[filled:])  # type: ignore[attr-defined]
        if not read:
            raise Corrupt("it is shorter than it was a moment ago", where=str(file.name))
        filled += read


class _Hash(Protocol):
    def update(self, data: bytes, /) -> None: ...

    def hexdigest(self) -> str: ...


class _Writing:
    def __init__(self, file: BinaryIO, shape: Shape, before_more: Callable[[], None], *, whole: bool) -> None:
        self._file = file
        self.before_more = before_more
        self._page_size = shape.page_size
        self._group_max = max(1, GROUP_BYTES_MAX // shape.page_size)
        self._numbers: list[int] = []
        self._group = bytearray()
        self._hash: _Hash = hashlib.sha256()
        self._put(_HEAD.pack(MAGIC, shape.page_size, shape.pages, whole))

    def add(self, number: int, page: bytes | bytearray) -> None:
        self._numbers.append(number)
        self._group += page
        if len(self._numbers) >= self._group_max:
            self._end_group()

    def add_all(self, numbers: Iterable[int], old: BinaryIO) -> None:
        page = bytearray(self._page_size)
        for number in numbers:
            _fill(old, page)
            self.add(number, page)

    def finish(self) -> str:
        if self._numbers:
            self._end_group()
        self._put(_COUNT.pack(0))
        self._file.flush()
        return self._hash.hexdigest()

    def _end_group(self) -> None:
        self.before_more()
        deflated = zlib.compress(self._group, ZLIB_LEVEL)
        count = len(self._numbers)
        self._put(struct.pack(f">I{count}II", count, *self._numbers, len(deflated)))
        self._put(deflated)
        self._numbers, self._group = [], bytearray()

    def _put(self, data: bytes) -> None:
        self._hash.update(data)
        self._file.write(data)


# --- rebuilding -----------------------------------------------------------------------------------------------------


def rebuild(head: str, deltas: Sequence[StoredDelta], into: str) -> None:
    """Make an older version in a new file: from the newest one, by the deltas in descending order of versions. Raises
    Corrupt if a delta is not as it was noted."""
    whole = next((at for at in reversed(range(len(deltas))) if _is_whole(deltas[at])), None)
    if whole is None:
        copy(head, into)
    else:
        deltas = deltas[whole:]
    try:
        with open(into, "r+b" if whole is None else "x+b", buffering=0, opener=private) as file:
            for delta in deltas:
                _apply(delta, file)
    except BaseException:
        remove(into)
        raise


def _is_whole(delta: StoredDelta) -> bool:
    with open(delta.path, "rb") as file:
        return bool(_Reading(file, delta).whole)


def _apply(delta: StoredDelta, target: BinaryIO) -> None:
    with open(delta.path, "rb") as file:
        reading = _Reading(file, delta)
        if reading.whole:
            target.truncate(0)
        page_size = delta.shape.page_size
        for numbers, pages in reading.groups():
            for start, end in _runs(numbers):
                target.seek(numbers[start] * page_size)
                write_all(target, pages[start * page_size : end * page_size])
        target.truncate(delta.shape.size)
        reading.check_end()


def _runs(numbers: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Stretches of numbers that follow each other, to be written in one piece."""
    start = 0
    for at in range(1, len(numbers) + 1):
        if at == len(numbers) or numbers[at] != numbers[at - 1] + 1:
            yield start, at
            start = at


class _Reading:
    """Trusts nothing: sizes are checked before they are used, and the hash at the end covers every byte."""

    def __init__(self, file: BinaryIO, delta: StoredDelta) -> None:
        self._file = file
        self._delta = delta
        self._hash: _Hash = hashlib.sha256()
        magic, page_size, pages, whole = _HEAD.unpack(self._take(_HEAD.size))
        if magic != MAGIC or (page_size, pages) != delta.shape or whole not in (0, 1):
            raise self._damage("its head is not as it was written")
        self.whole = bool(whole)

    def groups(self) -> Iterator[tuple[tuple[int, ...], memoryview]]:
        page_size, pages = self._delta.shape
        group_max = max(1, GROUP_BYTES_MAX // page_size)
        while True:
            (count,) = _COUNT.unpack(self._take(_COUNT.size))
            if count == 0:
                return
            if count > group_max:
                raise self._damage("a group of pages is larger than any that is written")
            *numbers, length = struct.unpack(f">{count + 1}I", self._take(4 * (count + 1)))
            wanted = count * page_size
            if max(numbers) >= pages or length > 2 * wanted + 1024:
                raise self._damage("a page lies beyond the end")
            inflating = zlib.decompressobj()
            try:
                inflated = inflating.decompress(self._take(length), wanted + 1)
            except zlib.error as exc:
                raise self._damage("pages cannot be inflated") from exc
            if len(inflated) != wanted:
                raise self._damage("a group of pages has another length")
            yield tuple(numbers), memoryview(inflated)

    def check_end(self) -> None:
        if self._file.read(1) or self._hash.hexdigest() != self._delta.sha256:
            raise self._damage("its hash is another than when it was written")

    def _take(self, wanted: int) -> bytes:
        data = self._file.read(wanted)
        if len(data) < wanted:
            raise self._damage("it ends too early")
        self._hash.update(data)
        return data

    def _damage(self, why: str) -> Corrupt:
        return Corrupt(why, where=self._delta.path, next="This version cannot be rebuilt; newer ones can")


class Sums(msgspec.Struct, frozen=True):
    sha256: str
    shape: Shape


def sums_of(path: str, before_more: Callable[[], None] = lambda: None) -> Sums:
    """The hash of every byte of a database, and its shape. `before_more` is asked before each block, and ends it by
    raising."""
    shape, digest, block = shape_of(path), hashlib.sha256(), bytearray(BLOCK_BYTES)
    with open(path, "rb", buffering=0) as file, memoryview(block) as view:
        while read := file.readinto(block):
            digest.update(view[:read])
            before_more()
    return Sums(digest.hexdigest(), shape)
