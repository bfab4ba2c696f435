"""Versions on disk: the newest one is a whole file, each older one a reverse delta against the next.

A delta holds the pages of the older version that the newer one does not have alike. Its file: a head (magic, page size,
page count, whether it is whole), then groups of pages: their count, their numbers from 0, the length of the rest, the
pages one after another, deflated. An empty group ends it. A delta is whole when the newer version has another page
size: it holds every page then, and needs no newer version.
"""

from __future__ import annotations

import hashlib
import os
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import BinaryIO, NamedTuple

import msgspec

from headwater.errors import CorruptError, HeadwaterError, InvalidOptionError, UnknownReplicaError
from headwater.files import lock_file
from headwater.replication.host import disk
from headwater.replication.host.catalogue import Catalogue, Replica, Version
from headwater.replication.host.disk import Layout
from headwater.replication.local_database import COUNTERS, private
from headwater.replication.protocol import PAGES_MAX

BLOCK_BYTES = 1024 * 1024  # compared at once; a multiple of every page size
GROUP_BYTES_MAX = 1024 * 1024  # of pages before they are deflated
ZLIB_LEVEL = 1
MAGIC = b"HWPAGES1"

_HEAD = struct.Struct(">8sIIB")
_COUNT = struct.Struct(">I")
_HEADER_BYTES = 100

TRIES_MAX = 5  # files are removed meanwhile only when a push is accepted
LOCK = "lock"
FILE = "version.db"
KEEP_LAST = 100


class Shape(NamedTuple):
    page_size: int
    pages: int

    @property
    def size(self) -> int:
        return self.page_size * self.pages


class Delta(NamedTuple):
    """`bytes` is its size; `changed` is how many pages of the newer version the older one does not have alike.
    `identical`: nothing but SQLite's change counter differs, and no file was left."""

    bytes: int
    sha256: str
    changed: int
    identical: bool


class StoredDelta(NamedTuple):
    """A delta file, its recorded hash, and the shape of the version it leads to."""

    path: str
    sha256: str
    shape: Shape


def shape_of(path: str) -> Shape:
    """Page size and count of a database that no program writes, by its header and its length."""
    with open(path, "rb") as file:
        header = file.read(_HEADER_BYTES)
        size = os.fstat(file.fileno()).st_size
    page_size = int.from_bytes(header[16:18], "big")
    page_size = 65536 if page_size == 1 else page_size
    is_power = page_size >= 512 and page_size & (page_size - 1) == 0
    if len(header) < _HEADER_BYTES or not is_power or size % page_size or not 0 < size // page_size <= PAGES_MAX:
        raise CorruptError("it is not a whole number of pages", where=path, next="Push it again")
    return Shape(page_size, size // page_size)


def refuse_other_count(path: str, shape: Shape) -> None:
    """Refuse a file that is longer than its header says: SQLite would ignore the rest of it."""
    with open(path, "rb") as file:
        header = file.read(_HEADER_BYTES)
    recorded = int.from_bytes(header[28:32], "big")
    if header[24:28] == header[92:96] and recorded not in (0, shape.pages):  # otherwise SQLite uses the length, too
        raise CorruptError(f"its header says {recorded:,} pages, and it has {shape.pages:,}", next="Push it again")


# --- writing deltas -------------------------------------------------------------------------------------------------


def write_delta(older: str, newer: str, into: str, before_more: Callable[[], None] = lambda: None) -> Delta:
    """Compare two versions, and write the delta that makes the older from the newer into a new file, synced.
    `before_more` is called before each block is compared and each group is written; it may raise to end it."""
    was, now = shape_of(older), shape_of(newer)
    with (
        open(into, "wb", opener=private) as file,
        open(older, "rb", buffering=0) as old,
        open(newer, "rb", buffering=0) as new,
    ):
        writing = _DeltaWriter(file, was, before_more, whole=was.page_size != now.page_size)
        if was.page_size != now.page_size:
            writing.add_all(range(was.pages), old)
            changed, identical = now.pages, False
        else:
            alike, only_counters = _add_differing(writing, old, new, was, now)
            changed = now.pages - alike
            identical = only_counters and was.pages == now.pages
        digest = writing.finish()
        size = file.tell()
        if not identical:
            os.fsync(file.fileno())
    if identical:
        disk.remove(into)
    return Delta(size, digest, changed, identical)


def _add_differing(writing: _DeltaWriter, old: BinaryIO, new: BinaryIO, was: Shape, now: Shape) -> tuple[int, bool]:
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
        _read_into(old, ours)
        _read_into(new, theirs)
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


def _read_into(file: BinaryIO, buffer: bytearray) -> None:
    view, filled = memoryview(buffer), 0
    while filled < len(buffer):
        read = file.readinto(view[filled:])  # type: ignore[attr-defined]
        if not read:
            raise CorruptError("it is shorter than it was a moment ago", where=str(file.name))
        filled += read


class _DeltaWriter:
    def __init__(self, file: BinaryIO, shape: Shape, before_more: Callable[[], None], *, whole: bool) -> None:
        self._file = file
        self.before_more = before_more
        self._page_size = shape.page_size
        self._group_max = max(1, GROUP_BYTES_MAX // shape.page_size)
        self._numbers: list[int] = []
        self._group = bytearray()
        self._hash = hashlib.sha256()
        self._put(_HEAD.pack(MAGIC, shape.page_size, shape.pages, whole))

    def add(self, number: int, page: bytes | bytearray) -> None:
        self._numbers.append(number)
        self._group += page
        if len(self._numbers) >= self._group_max:
            self._end_group()

    def add_all(self, numbers: Iterable[int], old: BinaryIO) -> None:
        page = bytearray(self._page_size)
        for number in numbers:
            _read_into(old, page)
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


# --- rebuilding versions --------------------------------------------------------------------------------------------


def rebuild(head: str, deltas: Sequence[StoredDelta], into: str) -> None:
    """Make an older version in a new file: from the newest one, by the deltas in descending order of versions. Raises
    CorruptError if a delta does not have its recorded hash."""
    whole = next((at for at in reversed(range(len(deltas))) if _is_whole(deltas[at])), None)
    if whole is None:
        disk.copy(head, into)
    else:
        deltas = deltas[whole:]
    try:
        with open(into, "r+b" if whole is None else "x+b", opener=private) as file:
            for delta in deltas:
                _apply(delta, file)
    except BaseException:
        disk.remove(into)
        raise


def _is_whole(delta: StoredDelta) -> bool:
    with open(delta.path, "rb") as file:
        return bool(_DeltaReader(file, delta).whole)


def _apply(delta: StoredDelta, target: BinaryIO) -> None:
    with open(delta.path, "rb") as file:
        reading = _DeltaReader(file, delta)
        if reading.whole:
            target.truncate(0)
        page_size = delta.shape.page_size
        for numbers, pages in reading.groups():
            for start, end in _runs(numbers):
                target.seek(numbers[start] * page_size)
                target.write(pages[start * page_size : end * page_size])
        target.truncate(delta.shape.size)
        reading.check_end()


def _runs(numbers: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Ranges of consecutive numbers, to be written at once."""
    start = 0
    for at in range(1, len(numbers) + 1):
        if at == len(numbers) or numbers[at] != numbers[at - 1] + 1:
            yield start, at
            start = at


class _DeltaReader:
    """Sizes are checked before they are used, and the hash at the end covers every byte."""

    def __init__(self, file: BinaryIO, delta: StoredDelta) -> None:
        self._file = file
        self._delta = delta
        self._hash = hashlib.sha256()
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

    def _damage(self, why: str) -> CorruptError:
        return CorruptError(why, where=self._delta.path, next="This version cannot be rebuilt; newer ones can")


def sha256_of(path: str, before_more: Callable[[], None] = lambda: None) -> str:
    """The hash of every byte of a file. `before_more` is called after each block; it may raise to end it."""
    digest, block = hashlib.sha256(), bytearray(BLOCK_BYTES)
    with open(path, "rb", buffering=0) as file, memoryview(block) as view:
        while read := file.readinto(block):
            digest.update(view[:read])
            before_more()
    return digest.hexdigest()


# --- reading versions -----------------------------------------------------------------------------------------------


class OpenedVersion:
    """A version in a private file, until it is closed: the newest as a hard link, older ones rebuilt. Later pushes and
    the removal of old versions do not affect it; only the removal of the whole replica does.

    The file at `path` must not be written. `directory` is for temporary files, and is removed with it; None: there was
    no space for one, and `path` is the stored file."""

    def __init__(self, replica: Replica, version: Version, path: str, directory: str | None) -> None:
        self.replica = replica
        self.version = version
        self.directory = directory
        self.path = path
        self.lock: int | None = None

    @property
    def url(self) -> tuple[str, str]:
        """The directory, and a url for SQLite relative to it, so that errors do not show the path to a client. SQLite
        reads it without locks and without files next to it, for which a full disk has no space."""
        directory, name = os.path.split(self.path)
        return directory, f"file:{name}?immutable=1"

    def close(self) -> None:
        if self.lock is not None:
            os.close(self.lock)
            self.lock = None
        if self.directory is not None:
            disk.remove_tree(self.directory)

    def __enter__(self) -> OpenedVersion:
        return self

    def __exit__(self, kind: type[BaseException] | None, *details: object) -> None:
        self.close()


def open_version(
    layout: Layout, catalogue: Catalogue, replica: Replica, number: int, *, check: bool = True
) -> OpenedVersion:
    """`check`: a rebuilt version must have the hash it was accepted with, and the newest its size."""
    missing = ""
    for _ in range(TRIES_MAX):
        chain = catalogue.versions_from(replica.id, number)
        if not chain or chain[0].number != number:
            raise UnknownReplicaError(
                f"it has no version {number}", where=replica.name.path, next="`headwater replica log` lists them"
            )
        with disk.translated(layout.home(replica.id)):
            try:
                return _materialise(layout, replica, chain, check)
            except FileNotFoundError as exc:
                missing = os.path.basename(str(exc.filename))
    raise CorruptError(
        f"a file of version {number} is missing: {missing}",
        where=replica.name.path,
        next="On the server, run `headwater replica verify`",
    )


def refuse_removed(catalogue: Catalogue, replica: Replica, error: HeadwaterError | None = None) -> None:
    """Raise UnknownReplicaError, after a failed read, if the replica was removed meanwhile."""
    if catalogue.find_id(replica.id) is None:
        raise UnknownReplicaError("it was removed meanwhile", where=replica.name.path) from error


def _materialise(layout: Layout, replica: Replica, chain: list[Version], check: bool) -> OpenedVersion:
    version, is_newest = chain[0], len(chain) == 1
    try:
        made = _private_copy(layout, replica, chain)
    except OSError as exc:
        if not is_newest or not disk.is_full(exc):
            raise
        made = OpenedVersion(replica, version, layout.head(replica.id, version.number), None)
    try:
        is_intact = not check or os.stat(made.path).st_size == version.size
        if check and is_intact and not is_newest:
            is_intact = sha256_of(made.path) == version.sha256
        if not is_intact:
            raise CorruptError(
                f"version {version.number} is not as it was accepted",
                where=replica.name.path,
                next="On the server, run `headwater replica verify`",
            )
    except BaseException:
        made.close()
        raise
    return made


def _private_copy(layout: Layout, replica: Replica, chain: list[Version]) -> OpenedVersion:
    directory = layout.new_reading(replica.id)
    made = OpenedVersion(replica, chain[0], os.path.join(directory, FILE), directory)
    os.mkdir(directory, 0o700)
    try:
        made.lock = lock_file(os.path.join(directory, LOCK))
        if made.lock is None:  # a starting server is removing it
            raise FileNotFoundError(2, "removed", directory)
        newest = chain[-1].number
        if len(chain) == 1:
            disk.link_or_copy(layout.head(replica.id, newest), made.path)
            return made
        # All of them first: from here on no removal affects them.
        own_head = os.path.join(directory, f"{newest}.db")
        disk.link_or_copy(layout.head(replica.id, newest), own_head)
        deltas = []
        for version in reversed(chain[:-1]):
            own = os.path.join(directory, f"{version.number}.pages")
            disk.link_or_copy(layout.delta(replica.id, version.number), own)
            deltas.append(StoredDelta(own, version.delta_sha256 or "", Shape(version.page_size, version.pages)))
        rebuild(own_head, deltas, made.path)
        for path in (own_head, *(delta.path for delta in deltas)):
            disk.remove(path)
    except BaseException:
        made.close()
        raise
    return made


# --- retention ------------------------------------------------------------------------------------------------------


class VersionRetention(msgspec.Struct, frozen=True):
    """A version is removed when it is beyond either limit, the newest never."""

    keep_last: int | None = KEEP_LAST
    keep_age_ms: int | None = None

    def __post_init__(self) -> None:
        if self.keep_last is not None and self.keep_last < 1:
            raise InvalidOptionError("keep_last is at least 1: the newest version always stays")
        if self.keep_age_ms is not None and self.keep_age_ms < 1:
            raise InvalidOptionError("keep_age must be positive; the newest version stays in any case")

    @property
    def keeps_all(self) -> bool:
        return self.keep_last is None and self.keep_age_ms is None


def surplus(versions: Sequence[Version], policy: VersionRetention, now_ms: int) -> list[int]:
    """The numbers of the versions to remove, from versions in ascending order. Pure.

    Always the oldest ones in one piece: a version is rebuilt through all newer ones, so none may be removed from the
    middle, whatever its time. A version that is not announced yet stays.
    """
    removed: list[int] = []
    for position, version in enumerate(versions[:-1]):
        beyond_last = policy.keep_last is not None and len(versions) - position > policy.keep_last
        beyond_age = policy.keep_age_ms is not None and now_ms - version.at_ms > policy.keep_age_ms
        if not version.announced or not (beyond_last or beyond_age):
            break
        removed.append(version.number)
    return removed
