"""Many small files become few large ones, without a row moving from its table.

Files are merged with neighbours of their own size class, eight at a time, so that a row is rewritten once per class
and not once per batch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from headwater.errors import Corrupt
from headwater.pipeline.lake.disk import digest_of, finish, name_while_writing
from headwater.pipeline.lake.layout import file_name
from headwater.pipeline.lake.manifest import LakeFile, Manifest
from headwater.pipeline.lake.sealing import ROW_GROUP_BYTES, ROW_GROUP_ROWS, filled, open_parquet

MERGED_AT_ONCE = 8
SMALLEST_CLASS_BYTES = 256 * 1024
TARGET_BYTES = 128 * 1024 * 1024


def size_class(bytes: int) -> int:
    """0 up to SMALLEST_CLASS_BYTES, one more for each factor of MERGED_AT_ONCE."""
    found, limit = 0, SMALLEST_CLASS_BYTES
    while bytes > limit:
        found, limit = found + 1, limit * MERGED_AT_ONCE
    return found


def plan_compaction(files: Sequence[LakeFile], *, everything: bool = False) -> list[list[LakeFile]]:
    """Which files to merge into one, group by group: neighbours in seq order in the same directory. With `everything`,
    all that fits into a file of the target size."""
    by_place = sorted(files, key=lambda file: (file.day or "", file.prefix or "", file.seq_from, file.path))
    groups: list[list[LakeFile]] = []
    for _, found in groupby(by_place, key=lambda file: (file.day, file.prefix)):
        neighbours = list(found)
        if everything:
            groups += [group for group in _cut(neighbours) if len(group) > 1]
        else:
            groups += _first_class_to_merge(neighbours)
    return groups


def _first_class_to_merge(files: Sequence[LakeFile]) -> list[list[LakeFile]]:
    """Runs of neighbours none of which is above a class, with enough of that class to make one of the next; smaller
    ones among them go along. The smallest class comes first: its result may be what the next one waits for."""
    for wanted in sorted({size_class(file.bytes) for file in files}):
        runs = [list(run) for small, run in groupby(files, key=lambda file: size_class(file.bytes) <= wanted) if small]
        groups = [group for run in runs for group in _cut(run) if _of_class(group, wanted) >= MERGED_AT_ONCE]
        if groups:
            return groups
    return []


def _of_class(files: Sequence[LakeFile], wanted: int) -> int:
    return sum(size_class(file.bytes) == wanted for file in files)


def _cut(files: Sequence[LakeFile]) -> Iterator[list[LakeFile]]:
    """Into groups of at most the target size, as far as the files allow."""
    group: list[LakeFile] = []
    for file in files:
        if group and sum(each.bytes for each in group) + file.bytes > TARGET_BYTES:
            yield group
            group = []
        group.append(file)
    if group:
        yield group


def compact(
    lake: Path,
    manifest: Manifest,
    table: str,
    *,
    everything: bool = False,
    on_merged: Callable[[int], None] | None = None,
) -> int:
    """Merge what is worth merging in a table; returns how many files there are fewer. `on_merged` hears of the files
    read, group by group. Safe to be killed at any point: the old files count until the manifest names the new one."""
    fewer = 0
    while groups := plan_compaction(manifest.files(table), everything=everything):
        for group in groups:
            merged = _merge(lake, table, group)
            manifest.swap(group, [merged], time.time_ns() // 1_000_000)
            fewer += len(group) - 1
            if on_merged is not None:
                on_merged(len(group))
        if everything:
            break
    return fewer


def _merge(lake: Path, table: str, group: Sequence[LakeFile]) -> LakeFile:
    for file in group:
        if digest_of(lake / file.path) != file.sha256:  # a copy of a damaged file would look sound
            raise Corrupt(
                "the file is not as it was sealed",
                where=file.path,
                next="Restore it from a backup; the audit tells more",
            )
    first, last = group[0], group[-1]
    path = f"{first.path.rpartition('/')[0]}/{file_name(first.seq_from, last.seq_to)}"
    written = name_while_writing(lake / path)
    try:
        rows = _copy(lake, group, written)
        if rows != sum(file.rows for file in group):
            raise Corrupt(f"{rows} rows were read, and not as many as there should be", where=first.path)
        size = written.stat().st_size
        digest = finish(written, lake / path)
    except BaseException:
        written.unlink(missing_ok=True)
        raise
    return LakeFile(path, table, rows, size, digest, first.seq_from, last.seq_to, first.day, first.prefix)


def _copy(lake: Path, group: Sequence[LakeFile], written: Path) -> int:
    """Row group by row group: those are bounded in bytes, whatever the messages are like."""
    schema = pa.unify_schemas([pq.read_schema(lake / file.path) for file in group]).remove_metadata()
    rows = 0
    buffer: list[pa.Table] = []
    with open_parquet(written, schema) as writer:

        def flush() -> None:
            nonlocal rows
            if buffer:
                table = pa.concat_tables(buffer)
                writer.write_table(table, row_group_size=max(1, table.num_rows))
                rows += table.num_rows
                buffer.clear()

        for file in group:
            with pq.ParquetFile(lake / file.path) as source:
                for number in range(source.num_row_groups):
                    buffer.append(filled(source.read_row_group(number), schema))
                    if (
                        sum(each.num_rows for each in buffer) >= ROW_GROUP_ROWS
                        or sum(each.nbytes for each in buffer) >= ROW_GROUP_BYTES
                    ):
                        flush()
        flush()
    return rows
