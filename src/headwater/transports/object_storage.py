"""Messages as compressed, immutable, partitioned objects with a manifest, on S3 or in a directory.

`object_layout.py` says how objects are cut and named, `object_manifest.py` what makes them part of the archive,
`object_reading.py` reads them back. The target must be able to create an object only if there is none of its name. It
also decides how durable a write is: a directory is not synced to its disk.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

from headwater.errors import Closed, Corrupt, InvalidOption, TransportFailed
from headwater.message import Message, Span, check_whole, span_ms
from headwater.ports.clock import Clock, SystemClock
from headwater.transports.base import BaseTransport
from headwater.transports.lines import publish_only
from headwater.transports.object_layout import (
    OBJECT_BYTES_LEAST,
    OBJECT_BYTES_MAX,
    Piece,
    cut,
    is_object_name,
    pack,
    unpack,
)
from headwater.transports.object_manifest import (
    ENTRY_MESSAGES_MAX,
    MANIFEST,
    RecentIds,
    encode_entry,
    entry_path,
    last_number,
    make_entry,
    newest,
)
from headwater.transports.object_reading import entries, find_entry, numbers_after
from headwater.transports.object_storage_client import CONDITIONS_NEEDED, Objects, open_objects

RACES_MAX = 1_000
"""How often a batch may find that another writer was quicker."""
COMMIT_WITHIN_MS = 10 * 60_000
TAKE_UP_WITHIN_MS = 10 * 60_000
SWEEP_AGE_MIN_MS = 60 * 60_000
"""An object may be taken up by a repeat while it is young, and its entry comes soon after or never; so one that is
older than both times together, with room for clocks that disagree, and named by no entry, will never be named."""
GENERATIONS_MAX = 100
PROBE = f"{MANIFEST}/if-none-match"
_OWN_OPTIONS = {
    "object_bytes_max": (OBJECT_BYTES_MAX, OBJECT_BYTES_LEAST, 1024 * 1024 * 1024),
    "entry_messages_max": (ENTRY_MESSAGES_MAX, 1, ENTRY_MESSAGES_MAX),
}


class Swept(NamedTuple):
    objects: int
    bytes: int


class ObjectStorage(BaseTransport):
    """One writer of an archive; there may be others. The store is asked for the first time at the first publish."""

    recognises_ids = True
    """By the manifest: a message is recognised if its topic and id are in one of the newest RECENT_ENTRIES_MAX entries
    (of their messages, the last RECENT_IDS_MAX), whoever wrote it and however the batches were cut. One that is older
    is written again. So what a forwarder repeats after a crash is there once; what is forwarded anew from the start is
    not."""

    def __init__(
        self, objects: Objects, options: Mapping[str, Any] | None = None, *, clock: Clock | None = None
    ) -> None:
        given = dict(options or {})
        limits = {
            name: check_whole(name, given.pop(name, usual), least, most)
            for name, (usual, least, most) in _OWN_OPTIONS.items()
        }
        if given:
            raise InvalidOption(f"unknown option {sorted(given)[0]!r}", next=f"Known ones: {', '.join(_OWN_OPTIONS)}")
        self.name = objects.name
        self._objects = objects
        self._object_bytes_max, self._entry_messages_max = limits["object_bytes_max"], limits["entry_messages_max"]
        self._clock = clock or SystemClock()
        self._lock = threading.Lock()
        self._recent = RecentIds()
        self._last = 0
        self._ready = False
        self._closed = False

    @classmethod
    def from_url(
        cls, url: str, options: Mapping[str, Any] | None = None, *, clock: Clock | None = None
    ) -> ObjectStorage:
        """`s3://bucket/prefix?endpoint=…&region=…` or `objects+file:///directory`. Options, besides those of the url:
        timeout (seconds), retries, object_bytes_max, entry_messages_max. Credentials come from the environment."""
        given = dict(options or {})
        own = {name: given.pop(name) for name in _OWN_OPTIONS if name in given}
        return cls(open_objects(url, given), own, clock=clock)

    @property
    def connected(self) -> bool:
        return self._objects.answers and not self._closed

    def _publish(self, messages: Sequence[Message]) -> None:
        with self._lock:
            if self._closed:
                raise Closed("the transport is closed", where=self.name, next="Open another")
            try:
                if messages and not self._ready:
                    self._check_conditions()
                    self._catch_up()
                    self._ready = True
                for at in range(0, len(messages), self._entry_messages_max):
                    self._archive(messages[at : at + self._entry_messages_max])
            except Corrupt as exc:  # of an entry that says what is already there
                raise TransportFailed(exc.why, where=exc.where, next=exc.next) from exc

    def subscribe(self, pattern: str, handle: object, **_: object) -> NoReturn:
        raise publish_only(
            "ObjectStorage", self.name, "Read it with headwater.transports.object_reading, or subscribe to the log"
        )

    def close(self) -> None:
        """Nothing is held back, so nothing can be unsent."""
        self._closed = True

    def sweep(self, older_than: Span) -> Swept:
        """Remove the objects that no entry names and that are older than this, an hour at least. Reads every entry."""
        age_ms = span_ms(older_than, "older_than")
        if age_ms < SWEEP_AGE_MIN_MS:
            raise InvalidOption(
                "older_than must be an hour or more", where=self.name, next="What is younger may still get its entry"
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
        return Swept(len(unnamed), sum(unnamed.values()))

    def _archive(self, messages: Sequence[Message]) -> None:
        begun_ms = time.monotonic_ns() // 1_000_000
        written: dict[str, str] = {}
        for _ in range(RACES_MAX):
            pieces = cut(self._recent.unknown(messages), self._object_bytes_max)
            if not pieces:
                return
            paths = [written.get(piece.path()) or self._write(piece) for piece in pieces]
            written.update((piece.path(), path) for piece, path in zip(pieces, paths, strict=True))
            if time.monotonic_ns() // 1_000_000 - begun_ms > COMMIT_WITHIN_MS:
                break
            entry = make_entry(self._last + 1, pieces, paths)
            if self._objects.create(entry_path(entry.number), encode_entry(entry)):
                self._recent.add(entry)
                self._last = entry.number
                return
            # The number is taken: by another writer, or by ourselves if an answer was lost on its way.
            self._catch_up()
        raise TransportFailed(
            "the manifest did not take the batch in time", where=self.name, next="Give it again; fewer writers help"
        )

    def _write(self, piece: Piece) -> str:
        """The name under which the piece is there. A young object of that name is what an attempt before left; an old
        one may be in a sweeper's hands, and a damaged one is of no use."""
        packed = pack(piece.lines)
        for generation in range(1, GENERATIONS_MAX + 1):
            path = piece.path(generation)
            if self._objects.create(path, packed) or self._can_take_up(path, piece):
                return path
        raise TransportFailed(
            f"{piece.path()} was written {GENERATIONS_MAX} times before", where=self.name, next="Sweep the archive"
        )

    def _can_take_up(self, path: str, piece: Piece) -> bool:
        found = self._objects.get(path, 2 * len(piece.lines) + 1024)
        if found is None or self._clock.now_ms() - found.modified_ms > TAKE_UP_WITHIN_MS:
            return False
        try:
            unpack(found.data, len(piece.lines), piece.sha256, path)
        except Corrupt:
            return False
        return True

    def _check_conditions(self) -> None:
        """A store that passes over If-None-Match would let writers replace each other's entries."""
        if self._objects.create(PROBE, b"{}\n") and self._objects.create(PROBE, b"{}\n"):
            raise TransportFailed(
                "the store wrote over an object that it was to create only if there is none",
                where=self.name,
                next=CONDITIONS_NEEDED,
            )

    def _catch_up(self) -> None:
        last = last_number(lambda after: numbers_after(self._objects, after), self._last)
        for entry in newest(range(self._last + 1, last + 1), lambda number: find_entry(self._objects, number)):
            self._recent.add(entry)
        self._last = last
