"""A file of messages, each stored once: a batch and the position behind it are one transaction."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from headwater.broker.committer import TransactionHooks, append
from headwater.broker.engine import Engine
from headwater.broker.flow import Flow
from headwater.errors import ConflictError
from headwater.message import Draft
from headwater.ports.records import Appended
from headwater.ports.store import Reader, Writer


class ImportPosition(NamedTuple):
    """How far a file is imported: bytes, lines, and a digest of those bytes, by which another file is recognised."""

    offset: int = 0
    lines: int = 0
    digest: int = 0


def _names(name: str) -> list[str]:
    """Where the log keeps the parts of a position: beside those of sinks, which have one number each too."""
    return [f"import/{name}/{part}" for part in ImportPosition._fields]


def _position(name: str, reader: Reader) -> ImportPosition | None:
    parts = [reader.sink_batch(each) for each in _names(name)]
    return None if None in parts else ImportPosition(*(part or 0 for part in parts))


def import_position(engine: Engine, name: str) -> Flow[ImportPosition | None]:
    return engine.read(partial(_position, name))


def import_drafts(
    engine: Engine, name: str, drafts: Sequence[Draft], before: ImportPosition | None, after: ImportPosition
) -> Flow[Appended]:
    """`before` is the stored position that this import found or stored; two imports of one file exclude each other."""

    def work(writer: Writer, hooks: TransactionHooks) -> Appended:
        if _position(name, writer) != before:
            raise ConflictError("another import of this file is running", where=name, next="Wait until it has ended")
        now_ms = engine.clock.now_ms()
        appended = append(writer, hooks, drafts, now_ms, engine.dedupe) if drafts else Appended([], frozenset())
        for each, part in zip(_names(name), after, strict=True):
            writer.save_sink_batch(each, part, now_ms)
        return appended

    return engine.write(work)
