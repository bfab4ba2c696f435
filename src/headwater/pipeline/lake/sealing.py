"""Arrow batches of messages in, finished Parquet files out, laid out by day and topic prefix."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from headwater.pipeline.lake.disk import finish, make_directories, name_while_writing
from headwater.pipeline.lake.layout import DAY_MS, OTHER_PREFIXES, day_text, file_name, place_of, topic_prefix
from headwater.pipeline.lake.manifest import LakeFile

OPEN_FILES_MAX = 256
PREFIXES_MAX = 256
"""How many first tokens of topics have a place of their own in a lake; what comes later shares one."""
ROW_GROUP_ROWS = 128 * 1024
ROW_GROUP_BYTES = 64 * 1024 * 1024  # a reader takes a column of a row group into memory whole
BUFFERED_BYTES_MAX = 256 * 1024 * 1024
COMPRESSION = "zstd"
COMPRESSION_LEVEL = 1  # level 3 costs a third more time for some 5 % less space
SCHEMA_VERSION = "1"
"""Of bronze, kept in each file's metadata. A later version may add columns; readers fill what an older file lacks."""

_FEW_VALUES = ["topic", "type", "version", "from", "to", "reply_to", "content_type", "priority", "size"]
_ORDERED = ["seq", "topic", "type", "published_at", "size"]


class Place(NamedTuple):
    day: str
    prefix: str


def seal(
    batches: Iterable[pa.RecordBatch],
    lake: Path,
    table: str,
    after: int,
    upto: int,
    known_prefixes: Collection[str] = (),
) -> list[LakeFile]:
    """Write the messages of the stretch (after, upto] into new files. If it fails, nothing is left behind.
    `known_prefixes` have their places in the lake already."""
    sealer = _Sealer(lake, table, after, upto)
    prefixes = Prefixes(known_prefixes)
    try:
        for batch in batches:
            for place, rows in split_by_place(batch, prefixes):
                sealer.add(place, rows)
        return sealer.finish()
    except BaseException:
        sealer.abandon()
        raise


class Prefixes:
    """Which prefixes have a place of their own. Somebody's first tokens may be ids: a folder for each would be a heap
    of small files that can never be merged."""

    def __init__(self, known: Collection[str] = ()) -> None:
        self._known = set(known)

    def place(self, topic: str) -> str:
        prefix = topic_prefix(topic)
        if prefix in self._known:
            return prefix
        if len(self._known) < PREFIXES_MAX:
            self._known.add(prefix)
            return prefix
        return OTHER_PREFIXES


def split_by_place(batch: pa.RecordBatch, known: Prefixes) -> Iterator[tuple[Place, pa.RecordBatch]]:
    """Rows that belong into the same directory, in their order."""
    if batch.num_rows == 0:
        return
    topics = batch.column("topic").dictionary_encode()
    prefixes, prefix_of_topic = np.unique(
        [known.place(topic) for topic in topics.dictionary.to_pylist()], return_inverse=True
    )
    days = batch.column("published_at").cast(pa.int64()).to_numpy() // (DAY_MS * 1000)
    key = days * len(prefixes) + prefix_of_topic[topics.indices.to_numpy()]
    for each in np.unique(key):
        day, prefix = divmod(int(each), len(prefixes))
        at = np.flatnonzero(key == each)
        rows = batch if len(at) == batch.num_rows else batch.take(pa.array(at))
        yield Place(day_text(day), str(prefixes[prefix])), rows


class _Sealer:
    """One file per place, open until the end, or until too many are: then the one that waited longest is finished."""

    def __init__(self, lake: Path, table: str, after: int, upto: int) -> None:
        self._lake, self._table, self._after, self._upto = lake, table, after, upto
        self._open: dict[Place, _OpenFile] = {}
        self._finished: list[LakeFile] = []

    def add(self, place: Place, rows: pa.RecordBatch) -> None:
        file = self._open.pop(place, None) or self._begin(place)
        self._open[place] = file  # to the end of the line
        file.add(rows)
        if sum(each.buffered_bytes for each in self._open.values()) > BUFFERED_BYTES_MAX:
            max(self._open.values(), key=lambda each: each.buffered_bytes).flush()

    def _begin(self, place: Place) -> _OpenFile:
        if len(self._open) >= OPEN_FILES_MAX:
            oldest = next(iter(self._open))
            self._finished.append(self._open.pop(oldest).finish())
        return _OpenFile(self._lake, self._table, place, self._after + 1, self._upto)

    def finish(self) -> list[LakeFile]:
        while self._open:
            _, file = self._open.popitem()
            self._finished.append(file.finish())
        return sorted(self._finished, key=lambda file: (file.seq_from, file.path))

    def abandon(self) -> None:
        for file in self._open.values():
            file.abandon()
        for finished in self._finished:
            (self._lake / finished.path).unlink(missing_ok=True)


class _OpenFile:
    def __init__(self, lake: Path, table: str, place: Place, low: int, high: int) -> None:
        directory = place_of(table, *place)
        make_directories(lake, lake / directory)
        self._lake, self._table, self._place = lake, table, place
        self._path = f"{directory}/{file_name(low, high)}"
        self._written = name_while_writing(lake / self._path)
        self._writer: pq.ParquetWriter | None = None
        self._buffer: list[pa.RecordBatch] = []
        self._buffered_rows = 0
        self.buffered_bytes = 0
        self._rows = 0
        self._seq_from, self._seq_to = 0, 0

    def add(self, rows: pa.RecordBatch) -> None:
        seqs = rows.column("seq")
        self._seq_from = self._seq_from or seqs[0].as_py()
        self._seq_to = seqs[-1].as_py()
        self._rows += rows.num_rows
        self._buffer.append(rows)
        self._buffered_rows += rows.num_rows
        self.buffered_bytes += rows.nbytes
        if self._buffered_rows >= ROW_GROUP_ROWS or self.buffered_bytes >= ROW_GROUP_BYTES:
            self.flush()

    def flush(self) -> None:
        if not self._buffer:
            return
        table = pa.Table.from_batches(self._buffer)
        if self._writer is None:
            self._writer = open_parquet(self._written, table.schema)
        self._writer.write_table(table, row_group_size=max(1, self._buffered_rows))
        self._buffer, self._buffered_rows, self.buffered_bytes = [], 0, 0

    def finish(self) -> LakeFile:
        self.flush()
        assert self._writer is not None  # a file is begun for its first rows
        self._writer.close()
        size = self._written.stat().st_size
        digest = finish(self._written, self._lake / self._path)
        seqs = self._seq_from, self._seq_to
        return LakeFile(self._path, self._table, self._rows, size, digest, *seqs, *self._place)

    def abandon(self) -> None:
        if self._writer is not None:
            self._writer.close()
        self._written.unlink(missing_ok=True)


def filled(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """A file of an older schema lacks the columns that came later."""
    columns = [
        table.column(field.name) if field.name in table.schema.names else pa.nulls(table.num_rows, field.type)
        for field in schema
    ]
    return pa.Table.from_arrays(columns, schema=schema)


def open_parquet(path: Path, schema: pa.Schema) -> pq.ParquetWriter:
    names = set(schema.names)
    writer = pq.ParquetWriter(
        path,
        schema,
        compression=COMPRESSION,
        compression_level=COMPRESSION_LEVEL,
        use_dictionary=[name for name in _FEW_VALUES if name in names],
        write_statistics=[name for name in _ORDERED if name in names],
        write_page_checksum=True,
        store_schema=False,
    )
    writer.add_key_value_metadata({"headwater.schema": SCHEMA_VERSION})
    return writer
