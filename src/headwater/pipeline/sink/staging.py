"""Staging files: what tasks checked and wrote, until the driver promotes or discards it."""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import IO

import pyarrow as pa
from pyspark.sql.datasource import WriterCommitMessage

from headwater.errors import InputOutput
from headwater.pipeline.sink.rows import STAGED

LEFTOVER_MS = 24 * 3600 * 1000
FOLDER_TRIES_MAX = 5
FOLDER_MODE = 0o700  # it may be where everybody can look

_NAME = re.compile(r"staged-[0-9a-f]{32}\.arrow")


@dataclass
class Staged(WriterCommitMessage):
    """One partition's rows: the name of their file, None if there are none."""

    name: str | None
    rows: int


def stage(folder: str, pieces: Iterable[pa.RecordBatch]) -> Staged:
    """Write one partition's pieces to a file of their own; nothing is left behind if that fails."""
    iterator = iter(pieces)
    first = next(iterator, None)
    if first is None:
        return Staged(None, 0)
    name, file = _create(folder)
    try:
        with file, pa.ipc.new_stream(file, STAGED) as stream:
            rows = 0
            for piece in _chained(first, iterator):
                stream.write_batch(piece)
                rows += piece.num_rows
            stream.close()
            file.flush()
            os.fsync(file.fileno())  # a full disk is the task's problem, which can be retried, not the commit's
    except BaseException:
        discard(folder, [Staged(name, 0)])
        raise
    return Staged(name, rows)


@contextmanager
def staged_pieces(folder: str, staged: Staged) -> Iterator[Iterator[pa.RecordBatch]]:
    """The pieces of one partition, one at a time. Raises InputOutput if the file is not as it was written."""
    if staged.name is None:
        yield iter(())
        return
    path = _path(folder, staged.name)
    try:
        with pa.OSFile(path) as file, pa.ipc.open_stream(file) as stream:
            yield _counted(stream, staged.rows, path)
    except (OSError, pa.ArrowInvalid) as exc:
        raise _unreadable(path, str(exc)) from exc


def discard(folder: str, staged: Iterable[Staged | None]) -> None:
    """Remove these files, and the folder with the last of them. Failed tasks left no message (None)."""
    for each in staged:
        if each is not None and each.name is not None:
            with suppress(OSError):
                os.unlink(_path(folder, each.name))
    with suppress(OSError):  # others may still use it
        os.rmdir(folder)


def sweep(folder: str, now_ms: int) -> int:
    """Remove what killed runs left behind; returns how many. Touches nothing but files with our names."""
    removed = 0
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if _NAME.fullmatch(entry.name) and entry.stat().st_mtime * 1000 < now_ms - LEFTOVER_MS:
                with suppress(OSError):
                    os.unlink(entry.path)
                    removed += 1
    return removed


def _create(folder: str) -> tuple[str, IO[bytes]]:
    name = f"staged-{secrets.token_hex(16)}.arrow"
    for attempt in range(FOLDER_TRIES_MAX):
        try:
            os.makedirs(folder, FOLDER_MODE, exist_ok=True)
            return name, open(os.path.join(folder, name), "xb")
        except FileNotFoundError as exc:  # somebody removed the empty folder in between
            if attempt == FOLDER_TRIES_MAX - 1:
                raise InputOutput(str(exc), where=folder, next="Set the option staging to another folder") from exc
        except OSError as exc:
            raise InputOutput(
                str(exc), where=folder, next="Tasks need to write here; the option staging names another folder"
            ) from exc
    raise AssertionError("unreachable")


def _path(folder: str, name: str) -> str:
    if not _NAME.fullmatch(name):
        raise InputOutput("this is no staging file", where=name)
    return os.path.join(folder, name)


def _chained(first: pa.RecordBatch, rest: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    yield first
    yield from rest


def _counted(stream: Iterable[pa.RecordBatch], rows: int, path: str) -> Iterator[pa.RecordBatch]:
    found = 0
    for piece in stream:
        found += piece.num_rows
        yield piece
    if found != rows:
        raise _unreadable(path, f"{rows} rows were staged, {found} are here")


def _unreadable(path: str, why: str) -> InputOutput:
    return InputOutput(
        why,
        where=path,
        next="Run the batch again; on a cluster the option staging must name a folder that all machines share",
    )
