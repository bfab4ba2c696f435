"""Reading an archive of objects back, in the order of its manifest, and proving that it is whole.

Messages of one first token and day come in the order in which they were given; a batch of several tokens lies in
several objects, which are read one after another. Who reads the directories with other tools (Spark, DuckDB) must take
the objects that the manifest names, and no others.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from headwater.errors import Corrupt, InvalidData
from headwater.message import Message
from headwater.transports.lines import from_line
from headwater.transports.object_layout import unpack
from headwater.transports.object_manifest import (
    ENTRY_BYTES_MAX,
    MANIFEST,
    Entry,
    NamedObject,
    decode_entry,
    entry_number,
    entry_path,
)
from headwater.transports.object_storage_client import Objects, open_objects

DAMAGE_MAX = 100


class Verdict(NamedTuple):
    """What `verify` found: the first and last entry, and how much of what they name is whole. A rule of the bucket may
    have removed entries and objects from the front."""

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


def read_archive(url: str, options: Mapping[str, Any] | None = None) -> Iterator[Message]:
    """All messages of the archive, those included that are written meanwhile. Raises Corrupt, which names the object or
    entry that is damaged, before it yields anything of that object."""
    objects = open_objects(url, options or {})
    for entry in entries(objects):
        for named, digests in _with_digests(entry):
            yield from _messages(objects, entry, named, digests)


def verify(url: str, options: Mapping[str, Any] | None = None) -> Verdict:
    """Read all of it, and say what is there and what is damaged."""
    objects = open_objects(url, options or {})
    first = last = count = messages = size = 0
    damage: list[str] = []
    for number in _numbers(objects):
        first, last = first or number, number
        try:
            entry = read_entry(objects, number)
        except Corrupt as exc:
            damage.append(str(exc))
            continue
        for named, digests in _with_digests(entry):
            try:
                messages += len(_messages(objects, entry, named, digests))
                count, size = count + 1, size + named.bytes
            except Corrupt as exc:
                damage.append(str(exc))
        if len(damage) >= DAMAGE_MAX:
            break
    return Verdict(first, last, count, messages, size, tuple(damage[:DAMAGE_MAX]))


def entries(objects: Objects) -> Iterator[Entry]:
    """All of them in order; raises Corrupt where one is missing."""
    return (read_entry(objects, number) for number in _numbers(objects))


def _numbers(objects: Objects) -> Iterator[int]:
    """From the first entry to the last, those included that should be between."""
    after: int | None = None
    while page := numbers_after(objects, after or 0):
        yield from range(page[0] if after is None else after + 1, page[-1] + 1)
        after = page[-1]


def numbers_after(objects: Objects, after: int) -> list[int]:
    """Of the first page of entries after this one; none if it was the last."""
    found = (entry_number(path) for path in objects.page(MANIFEST, entry_path(after)))
    return [number for number in found if number is not None]


def find_entry(objects: Objects, number: int) -> Entry | None:
    path = entry_path(number)
    found = objects.get(path, ENTRY_BYTES_MAX)
    return None if found is None else decode_entry(found.data, number, objects.at(path))


def read_entry(objects: Objects, number: int) -> Entry:
    entry = find_entry(objects, number)
    if entry is None:
        raise _missing(objects, number)
    return entry


def _missing(objects: Objects, number: int) -> Corrupt:
    return Corrupt("this entry is missing, and later ones are there", where=objects.at(entry_path(number)))


def _with_digests(entry: Entry) -> Iterator[tuple[NamedObject, list[bytes]]]:
    digests, at = entry.digests(), 0
    for named in entry.objects:
        yield named, digests[at : at + named.messages]
        at += named.messages


def _messages(objects: Objects, entry: Entry, named: NamedObject, digests: list[bytes]) -> list[Message]:
    where = objects.at(named.path)
    found = objects.get(named.path, 2 * named.bytes + 1024)  # what cannot be compressed grows a little
    if found is None:
        raise Corrupt("the manifest names it, and it is not there", where=where)
    lines = unpack(found.data, named.bytes, named.sha256, where).split(b"\n")[:-1]
    try:
        messages = [from_line(line, where) for line in lines]
    except InvalidData as exc:
        raise Corrupt(exc.why, where=where) from exc
    if not entry.holds(messages, digests):
        raise Corrupt("it holds other messages than its entry says", where=where)
    return messages
