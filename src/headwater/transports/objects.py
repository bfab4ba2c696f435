"""An archive of compressed, immutable, partitioned objects with a manifest, on S3 or in a directory: writing, reading.

The target must be able to create an object only if there is none of its name. It also decides how durable a write is:
a directory is not synced to its disk. Other tools (Spark, DuckDB) must read the objects that the manifest names, and no
others.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from headwater.arguments import check_whole
from headwater.errors import CorruptError, InvalidDataError, InvalidOptionError, TransportFailedError
from headwater.formats import Span, span_ms
from headwater.message import Message
from headwater.ports.clock import Clock, SystemClock
from headwater.transports.base import BaseTransport
from headwater.transports.file import from_line
from headwater.transports.object_client import (
    CONDITIONS_NEEDED,
    REQUEST_TIMEOUT_S,
    RETRIES,
    ObjectClient,
    open_objects,
)
from headwater.transports.object_manifest import (
    ENTRY_BYTES_MAX,
    ENTRY_MESSAGES_MAX,
    MANIFEST,
    OBJECT_BYTES_LEAST,
    OBJECT_BYTES_MAX,
    ManifestEntry,
    NamedObject,
    ObjectPart,
    RecentIds,
    decode_entry,
    encode_entry,
    entry_number,
    entry_path,
    is_object_name,
    last_number,
    make_entry,
    newest,
    pack,
    partition,
    unpack,
)

OBJECT_BYTES_MOST = 1024 * 1024 * 1024
RACES_MAX = 1_000
"""How often a batch may find that another writer was quicker."""
COMMIT_WITHIN_MS = 10 * 60_000
ADOPT_WITHIN_MS = 10 * 60_000
SWEEP_AGE_MIN_MS = 60 * 60_000
"""A repeat may adopt an object while it is young, and its entry comes soon after or never; so an object that is older
than both times together, with room for clocks that disagree, and named by no entry, will never be named."""
GENERATIONS_MAX = 100
PROBE = f"{MANIFEST}/if-none-match"
DAMAGE_MAX = 100


class SweepReport(NamedTuple):
    objects: int
    bytes: int


class ObjectStorage(BaseTransport):
    """One writer of an archive; there may be others. The store is asked for the first time at the first publish."""

    recognises_ids = True
    """By the manifest: a message is recognised if its topic and id are in one of the newest RECENT_ENTRIES_MAX entries
    (of their messages, the last RECENT_IDS_MAX), from any writer and in any batches. An older one is written again.
    So what a forwarder repeats after a crash is there once; what is forwarded again from the start is not."""

    read_instead = "Read it with headwater.transports.objects.read_archive, or subscribe to the log"

    def __init__(
        self,
        url: str,
        *,
        endpoint: str | None = None,
        region: str | None = None,
        timeout: float = REQUEST_TIMEOUT_S,
        retries: int = RETRIES,
        object_bytes_max: int = OBJECT_BYTES_MAX,
        entry_messages_max: int = ENTRY_MESSAGES_MAX,
        clock: Clock | None = None,
    ) -> None:
        """`s3://bucket/prefix` or `objects+file:///directory`. Credentials come from the environment; `timeout` is in
        seconds, for one request."""
        self._object_bytes_max = check_whole(
            "object_bytes_max", object_bytes_max, OBJECT_BYTES_LEAST, OBJECT_BYTES_MOST
        )
        self._entry_messages_max = check_whole("entry_messages_max", entry_messages_max, 1, ENTRY_MESSAGES_MAX)
        self._objects = open_objects(url, endpoint=endpoint, region=region, timeout=timeout, retries=retries)
        self.name = self._objects.name
        self._clock = clock or SystemClock()
        self._lock = threading.Lock()
        self._recent = RecentIds()
        self._last = 0
        self._ready = False

    @property
    def connected(self) -> bool:
        return self._objects.answers and not self._closed

    def _publish(self, messages: Sequence[Message]) -> None:
        with self._lock:
            self._check_open()
            try:
                if messages and not self._ready:
                    self._check_conditions()
                    self._catch_up()
                    self._ready = True
                for at in range(0, len(messages), self._entry_messages_max):
                    self._archive(messages[at : at + self._entry_messages_max])
            except CorruptError as exc:  # of an entry that would name known ids
                raise TransportFailedError(exc.why, where=exc.where, next=exc.next) from exc

    def close(self) -> None:
        self._closed = True

    def sweep(self, older_than: Span) -> SweepReport:
        """Remove the objects that no entry names and that are older than this, an hour at least. Reads every entry."""
        age_ms = span_ms(older_than, "older_than")
        if age_ms < SWEEP_AGE_MIN_MS:
            raise InvalidOptionError(
                "older_than must be an hour or more",
                where=self.name,
                next="The manifest may still get an entry for younger objects",
            )
        before_ms = self._clock.now_ms() - age_ms
        # Objects first, entries then: what gets its entry in between is found to be named.
        unnamed = {
            each.path: each.size
            for each in self._objects.everything()
            if each.modified_ms < before_ms and is_object_name(each.path)
        }
        for entry in entries(self._objects):
            for each in entry.objects:
                unnamed.pop(each.path, None)
        self._objects.delete(sorted(unnamed))
        return SweepReport(len(unnamed), sum(unnamed.values()))

    def _archive(self, messages: Sequence[Message]) -> None:
        begun_ms = time.monotonic_ns() // 1_000_000
        written: dict[str, str] = {}
        for _ in range(RACES_MAX):
            parts = partition(self._recent.unknown(messages), self._object_bytes_max)
            if not parts:
                return
            paths = [written.get(part.path()) or self._write(part) for part in parts]
            written.update((part.path(), path) for part, path in zip(parts, paths, strict=True))
            if time.monotonic_ns() // 1_000_000 - begun_ms > COMMIT_WITHIN_MS:
                break
            entry = make_entry(self._last + 1, parts, paths)
            if self._objects.create(entry_path(entry.number), encode_entry(entry)):
                self._recent.add(entry)
                self._last = entry.number
                return
            # The number is taken: by another writer, or by ourselves if an answer was lost on its way.
            self._catch_up()
        raise TransportFailedError(
            "the manifest did not take the batch in time", where=self.name, next="Publish it again, with fewer writers"
        )

    def _write(self, part: ObjectPart) -> str:
        """The name of the part's object. A young object of that name is left from an earlier attempt; an old one may be
        about to be swept, and a damaged one is of no use."""
        packed = pack(part.lines)
        for generation in range(1, GENERATIONS_MAX + 1):
            path = part.path(generation)
            if self._objects.create(path, packed) or self._can_adopt(path, part):
                return path
        raise TransportFailedError(
            f"{part.path()} was written {GENERATIONS_MAX} times before", where=self.name, next="Sweep the archive"
        )

    def _can_adopt(self, path: str, part: ObjectPart) -> bool:
        found = self._objects.get(path, 2 * len(part.lines) + 1024)
        if found is None or self._clock.now_ms() - found.modified_ms > ADOPT_WITHIN_MS:
            return False
        try:
            unpack(found.data, len(part.lines), part.sha256, path)
        except CorruptError:
            return False
        return True

    def _check_conditions(self) -> None:
        """A store that ignores If-None-Match would let writers replace each other's entries."""
        if self._objects.create(PROBE, b"{}\n") and self._objects.create(PROBE, b"{}\n"):
            raise TransportFailedError(
                "the store wrote over an object that it was to create only if there is none",
                where=self.name,
                next=CONDITIONS_NEEDED,
            )

    def _catch_up(self) -> None:
        last = last_number(lambda after: numbers_after(self._objects, after), self._last)
        for entry in newest(range(self._last + 1, last + 1), lambda number: find_entry(self._objects, number)):
            self._recent.add(entry)
        self._last = last


# --- reading -----------------------------------------------------------------------------------------------------


class VerifyReport(NamedTuple):
    """The first and last entry, and how much of what they name is intact. A lifecycle rule of the bucket may have
    removed entries and objects from the front."""

    first: int
    last: int
    objects: int
    messages: int
    bytes: int
    """Before compression."""
    damage: tuple[str, ...]
    """One sentence for each object or entry that is damaged or missing, DAMAGE_MAX of them at most."""

    @property
    def whole(self) -> bool:
        return not self.damage


def read_archive(url: str, **options: Any) -> Iterator[Message]:
    """All messages of the archive, those included that are written meanwhile, in the manifest's order: messages of one
    first token and day in the order of publishing, the objects of one batch one after another. The options are those
    of `open_objects`. Raises CorruptError, which names the damaged object or entry, before it yields any of that
    object."""
    objects = ObjectClient.from_url(url, **options)
    for entry in entries(objects):
        for named, digests in _with_digests(entry):
            yield from _messages(objects, entry, named, digests)


def verify(url: str, **options: Any) -> VerifyReport:
    """Reads all of the archive."""
    objects = ObjectClient.from_url(url, **options)
    first = last = count = messages = size = 0
    damage: list[str] = []
    for number in _numbers(objects):
        first, last = first or number, number
        try:
            entry = read_entry(objects, number)
        except CorruptError as exc:
            damage.append(str(exc))
            continue
        for named, digests in _with_digests(entry):
            try:
                messages += len(_messages(objects, entry, named, digests))
                count, size = count + 1, size + named.bytes
            except CorruptError as exc:
                damage.append(str(exc))
        if len(damage) >= DAMAGE_MAX:
            break
    return VerifyReport(first, last, count, messages, size, tuple(damage[:DAMAGE_MAX]))


def entries(objects: ObjectClient) -> Iterator[ManifestEntry]:
    """All of them in order; raises CorruptError where one is missing."""
    return (read_entry(objects, number) for number in _numbers(objects))


def _numbers(objects: ObjectClient) -> Iterator[int]:
    """The numbers from the first entry to the last, without gaps."""
    after: int | None = None
    while page := numbers_after(objects, after or 0):
        yield from range(page[0] if after is None else after + 1, page[-1] + 1)
        after = page[-1]


def numbers_after(objects: ObjectClient, after: int) -> list[int]:
    """The numbers of the first page of entries after this one; none if it was the last."""
    found = (entry_number(path) for path in objects.page(MANIFEST, entry_path(after)))
    return [number for number in found if number is not None]


def find_entry(objects: ObjectClient, number: int) -> ManifestEntry | None:
    path = entry_path(number)
    found = objects.get(path, ENTRY_BYTES_MAX)
    return None if found is None else decode_entry(found.data, number, objects.at(path))


def read_entry(objects: ObjectClient, number: int) -> ManifestEntry:
    entry = find_entry(objects, number)
    if entry is None:
        raise CorruptError("this entry is missing, and later ones are there", where=objects.at(entry_path(number)))
    return entry


def _with_digests(entry: ManifestEntry) -> Iterator[tuple[NamedObject, list[bytes]]]:
    digests, at = entry.digests(), 0
    for named in entry.objects:
        yield named, digests[at : at + named.messages]
        at += named.messages


def _messages(objects: ObjectClient, entry: ManifestEntry, named: NamedObject, digests: list[bytes]) -> list[Message]:
    where = objects.at(named.path)
    found = objects.get(named.path, 2 * named.bytes + 1024)  # what cannot be compressed grows a little
    if found is None:
        raise CorruptError("the manifest names it, and it is not there", where=where)
    lines = unpack(found.data, named.bytes, named.sha256, where).split(b"\n")[:-1]
    try:
        messages = [from_line(line, where) for line in lines]
    except InvalidDataError as exc:
        raise CorruptError(exc.why, where=where) from exc
    if not entry.holds(messages, digests):
        raise CorruptError("it holds other messages than its entry names", where=where)
    return messages
