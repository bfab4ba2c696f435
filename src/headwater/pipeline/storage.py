"""The files of a lake: in a folder or an object store, and as Parquet files of a table.

A file appears under its name whole or not at all. In a folder it is also on the disk before it has its name; delta-rs
itself syncs nothing. An object store is durable when it answers.
"""

from __future__ import annotations

import datetime as dt
import errno
import hashlib
import os
import re
import secrets
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq

from headwater.errors import DiskFullError, InvalidOptionError, ReadOnlyError, StoreError
from headwater.files import sync_file
from headwater.formats import iso

COPY_BYTES = 8 * 1024 * 1024
OPEN_FILES_MAX = 64
ROW_GROUP_ROWS = 128 * 1024
ROW_GROUP_BYTES = 64 * 1024 * 1024  # a reader takes a column of a row group into memory whole
FILE_BYTES = 128 * 1024 * 1024
COMPRESSION_LEVEL = 1  # level 3 of zstd costs a third more time for some 5 % less space
DAY_US = 86_400_000_000

_URL = re.compile(r"([a-z][a-z0-9+.-]*)://(.+)")
_GLOB = re.compile(r"[][{}*?\\]")
_OS_ERROR = re.compile(r"\(os error (\d+)\)")  # as delta-rs has it in its texts
_FULL = (DiskFullError, "Free some disk space and run again: it continues where it stopped")
_REFUSED = (ReadOnlyError, "Get write access to the folder and to all in it; reading needs none")
_WRITE_ERRORS = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), _FULL),
    **dict.fromkeys((errno.EROFS, errno.EACCES, errno.EPERM), _REFUSED),
}
_FEW_VALUES = {"topic", "type", "version", "from", "to", "reply_to", "content_type", "priority", "size"}
_MEASURED = ("seq", "published_at")
"""Columns whose least and greatest values the table's log has, so that readers skip files."""


class Storage:
    """A folder, or a url of an object store. Only its root is pickled: credentials come from the environment of each
    process."""

    def __init__(self, root: str | Path) -> None:
        url = _URL.fullmatch(str(root))
        self.is_local = url is None or url[1] == "file"
        if self.is_local:
            self.root = str(Path(url[2] if url else root).expanduser().resolve())
            if found := _GLOB.search(self.root):
                raise InvalidOptionError(
                    f"Spark takes {found[0]} in a path for a wildcard", where=self.root, next="Name another folder"
                )
        else:
            self.root = str(root).rstrip("/")
            if url is not None and "@" in url[2].partition("/")[0]:
                raise InvalidOptionError(
                    "credentials do not belong into the url of a lake",
                    where=f"{url[1]}://…",
                    next="Put them into the environment, like AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
                )

    def __reduce__(self) -> tuple[type[Storage], tuple[str]]:
        return Storage, (self.root,)

    @property
    def options(self) -> dict[str, str]:
        """The options for delta-rs, beside the environment: a commit on S3 must never replace another one."""
        return {"AWS_CONDITIONAL_PUT": "etag"} if self.root.startswith(("s3://", "s3a://")) else {}

    @cached_property
    def filesystem(self) -> pafs.FileSystem:
        """Paths are relative to the root."""
        if self.is_local:
            return pafs.SubTreeFileSystem(self.root, pafs.LocalFileSystem())
        from deltalake.fs import DeltaStorageHandler

        return pafs.PyFileSystem(DeltaStorageHandler(self.root, self.options))

    def uri(self, path: str) -> str:
        return f"{self.root}/{path}"

    def size(self, path: str) -> int | None:
        """Bytes of a file; None if it is not there."""
        found = self.filesystem.get_file_info(path)
        return found.size if found.type == pafs.FileType.File else None

    def read(self, path: str) -> bytes:
        with self.filesystem.open_input_stream(path) as stream:
            return bytes(stream.read())

    def digest(self, path: str) -> str:
        """SHA-256 of a file."""
        digest = hashlib.sha256()
        with self.filesystem.open_input_stream(path) as stream:
            while part := stream.read(COPY_BYTES):
                digest.update(part)
        return digest.hexdigest()

    def names(self, folder: str) -> list[str]:
        """The names of the files directly in a folder."""
        return sorted(each.base_name for each in self.entries(folder) if each.type == pafs.FileType.File)

    def paths(self, folder: str) -> dict[str, int]:
        """All files below a folder, with their sizes."""
        found = self.entries(folder, recursive=True)
        return {each.path: each.size for each in found if each.type == pafs.FileType.File}

    def entries(self, folder: str, *, recursive: bool = False) -> Sequence[pafs.FileInfo]:
        """What is in a folder; nothing if there is none."""
        selector = pafs.FileSelector(folder, allow_not_found=True, recursive=recursive)
        try:
            found: Sequence[pafs.FileInfo] = self.filesystem.get_file_info(selector)
        except FileNotFoundError:
            # Arrow did not find it, and then looked whether it is there: another process made it in between.
            found = self.filesystem.get_file_info(selector)
        return found

    def delete(self, path: str) -> None:
        if self.size(path) is not None:
            self.filesystem.delete_file(path)

    @contextmanager
    def new_file(self, folder: str) -> Iterator[Path]:
        """A local file that `put` moves into the folder; else it is removed at the end. Vacuum removes what a kill
        leaves in the lake's own folder, for no table names it."""
        if self.is_local:
            path = Path(self.root, folder, f"part-{secrets.token_hex(8)}.parquet.writing")
            path.parent.mkdir(parents=True, exist_ok=True)
        else:
            descriptor, name = tempfile.mkstemp(".parquet", "headwater-")  # readable by this user alone
            os.close(descriptor)
            path = Path(name)
        try:
            yield path
        finally:
            with suppress(OSError):
                path.unlink(missing_ok=True)

    def put(self, written: Path, path: str) -> None:
        """Give a local file its name in the lake; `sync` makes the name durable."""
        if self.is_local:
            sync_file(written)
            os.rename(written, Path(self.root, path))
            return
        # Buffered, for delta-rs's stream takes bytes and not Arrow's buffers.
        with (
            written.open("rb") as source,
            pa.BufferedOutputStream(self.filesystem.open_output_stream(path), COPY_BYTES) as target,
        ):
            shutil.copyfileobj(source, target, COPY_BYTES)

    def sync(self, paths: Iterable[str]) -> None:
        """Make files that others wrote durable, with the names of all folders above them."""
        if not self.is_local:
            return
        root = Path(self.root)
        written = [root / path for path in paths]
        for each in written:
            sync_file(each)
        for folder in {folder for file in written for folder in file.parents if folder.is_relative_to(root)}:
            sync_file(folder)


def write_error(exc: BaseException, where: str) -> StoreError | None:
    """What a full disk or a lack of rights is called here; None for any other error."""
    in_text = _OS_ERROR.search(str(exc))
    code = exc.errno if isinstance(exc, OSError) and exc.errno else int(in_text[1]) if in_text else None
    if code not in _WRITE_ERRORS:
        return None
    kind, advice = _WRITE_ERRORS[code]
    return kind(f"the lake cannot be written ({os.strerror(code)})", where=where, next=advice)


@contextmanager
def write_errors_translated(where: str) -> Iterator[None]:
    """Other errors pass as they are: Spark tries a task again that an object store has failed."""
    try:
        yield
    except Exception as exc:
        if (found := write_error(exc, where)) is None or isinstance(exc, StoreError):
            raise
        raise found from exc


# --- Parquet ----------------------------------------------------------------------------------------------------------


class DataFile(msgspec.Struct, frozen=True):
    """A file of a table; its path is relative to the table, and names its content: seqs, SHA-256, and a nonce, for a
    task that is tried again writes another file."""

    path: str
    size: int
    rows: int
    seq_from: int = 0
    seq_to: int = 0
    day: str | None = None
    stats: str = ""

    def overlaps(self, after: int, upto: int) -> bool:
        """Whether it may hold a seq of (after, upto]."""
        return self.seq_from <= upto and self.seq_to > after

    @property
    def sha256(self) -> str | None:
        """The hash in the name of a file; None for a file that another writer named."""
        words = self.path.rpartition("/")[2].removesuffix(".parquet").split("-")
        return words[2] if len(words) == 4 and len(words[2]) == 64 else None


def read_rows(
    storage: Storage, path: str, schema: pa.Schema, day: str | None = None, batch_rows: int = ROW_GROUP_ROWS
) -> Iterator[pa.Table]:
    """Rows of a data file with the columns of a schema: the day is its folder's, and an older file lacks what came
    later."""
    with storage.filesystem.open_input_file(path) as source:
        parquet = pq.ParquetFile(source)
        have = [name for name in schema.names if name in parquet.schema_arrow.names]
        for batch in parquet.iter_batches(batch_rows, columns=have):
            columns = []
            for field in schema:
                if field.name in have:
                    columns.append(batch[field.name].cast(field.type))
                elif field.name == "day" and day is not None:
                    columns.append(pa.repeat(pa.scalar(dt.date.fromisoformat(day), field.type), batch.num_rows))
                else:
                    columns.append(pa.nulls(batch.num_rows, field.type))
            yield pa.Table.from_arrays(columns, schema=schema)


class TableWriter:
    """Writes rows of one table into files, one for each day where the table is partitioned by day. As a context manager
    it leaves nothing behind when an exception ends the block."""

    def __init__(self, storage: Storage, table: str, *, by_day: bool = False) -> None:
        self._storage, self._table, self._by_day = storage, table, by_day
        self._open: dict[str | None, _OpenFile] = {}
        self._finished: list[DataFile] = []

    def __enter__(self) -> TableWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        if kind is not None:
            self.abandon()

    def write(self, rows: pa.RecordBatch | pa.Table) -> None:
        """A `day` column, if rows have one, decides their day; otherwise `published_at` does."""
        if rows.num_rows == 0:
            return
        parts = _by_day(rows) if self._by_day else [(None, rows)]
        with write_errors_translated(self._storage.root):
            for day, part in parts:
                file = self._open.pop(day, None) or self._begin(day)
                self._open[day] = file  # the one that waited longest comes first
                file.write(part)
                if file.bytes >= FILE_BYTES:
                    self._finish(day)

    def _begin(self, day: str | None) -> _OpenFile:
        if len(self._open) >= OPEN_FILES_MAX:
            self._finish(next(iter(self._open)))
        return _OpenFile(self._storage, self._table, day)

    def _finish(self, day: str | None) -> None:
        self._finished.append(self._open[day].finish())
        del self._open[day]  # only now: `abandon` removes a file that could not be finished

    def finish(self) -> list[DataFile]:
        with write_errors_translated(self._storage.root):
            for day in list(self._open):
                self._finish(day)
        return sorted(self._finished, key=lambda file: (file.seq_from, file.path))

    def abandon(self) -> None:
        """Leave nothing behind."""
        for file in self._open.values():
            file.abandon()
        for finished in self._finished:
            self._storage.delete(f"{self._table}/{finished.path}")


def _by_day(rows: pa.RecordBatch | pa.Table) -> Iterator[tuple[str, pa.RecordBatch | pa.Table]]:
    if "day" in rows.schema.names:
        days = rows.column("day").cast(pa.int32()).to_numpy(zero_copy_only=False)
        rows = rows.drop_columns(["day"])
    else:
        days = rows.column("published_at").cast(pa.int64()).to_numpy() // DAY_US
    first, last = int(days.min()), int(days.max())
    if first == last:
        yield _day_text(first), rows
        return
    for day in np.unique(days):
        yield _day_text(int(day)), rows.filter(pa.array(days == day))


def _day_text(days: int) -> str:
    return (dt.date(1970, 1, 1) + dt.timedelta(days=days)).isoformat()


class _OpenFile:
    def __init__(self, storage: Storage, table: str, day: str | None) -> None:
        self._storage, self._table, self._day = storage, table, day
        self._folder = table if day is None else f"{table}/day={day}"
        self._held: AbstractContextManager[Path] = storage.new_file(self._folder)
        self._path = self._held.__enter__()
        self._writer: pq.ParquetWriter | None = None
        self._buffer: list[pa.RecordBatch | pa.Table] = []
        self._buffered_rows = self._buffered_bytes = 0

    @property
    def bytes(self) -> int:
        return 0 if self._writer is None else self._path.stat().st_size

    def write(self, rows: pa.RecordBatch | pa.Table) -> None:
        self._buffer.append(rows)
        self._buffered_rows += rows.num_rows
        self._buffered_bytes += rows.nbytes
        if self._buffered_rows >= ROW_GROUP_ROWS or self._buffered_bytes >= ROW_GROUP_BYTES:
            self._flush()

    def _flush(self) -> None:
        if not self._buffer:
            return
        table = pa.concat_tables(
            pa.Table.from_batches([each]) if isinstance(each, pa.RecordBatch) else each for each in self._buffer
        )
        self._buffer, self._buffered_rows, self._buffered_bytes = [], 0, 0
        if self._writer is None:
            self._writer = open_parquet(self._path, table.schema)
        self._writer.write_table(table, row_group_size=table.num_rows)

    def finish(self) -> DataFile:
        self._flush()
        assert self._writer is not None  # a file begins with its first rows
        self._writer.close()
        with self._path.open("rb") as written:
            digest = hashlib.file_digest(written, "sha256").hexdigest()
        rows, bounds = _measured(self._path)
        first, last = bounds.get("seq", (0, 0))
        name = f"{first:012d}-{last:012d}-{digest}-{secrets.token_hex(4)}.parquet"
        size = self._path.stat().st_size
        self._storage.put(self._path, f"{self._folder}/{name}")
        self._held.__exit__(None, None, None)
        path = name if self._day is None else f"day={self._day}/{name}"
        return DataFile(path, size, rows, first, last, self._day, _delta_stats(rows, bounds))

    def abandon(self) -> None:
        if self._writer is not None:
            with suppress(OSError):  # it writes its footer, and the disk may be full
                self._writer.close()
        self._held.__exit__(None, None, None)


def _measured(path: Path) -> tuple[int, dict[str, tuple[int, int]]]:
    """The number of rows of a file; and of its measured columns the least and the greatest value, times in µs."""
    metadata = pq.read_metadata(path)
    bounds = {}
    for name in _MEASURED:
        if name in metadata.schema.names:
            column = metadata.schema.names.index(name)
            groups = [metadata.row_group(at).column(column).statistics for at in range(metadata.num_row_groups)]
            if known := [each for each in groups if each is not None and each.has_min_max]:
                bounds[name] = min(each.min_raw for each in known), max(each.max_raw for each in known)
    return metadata.num_rows, bounds


def _delta_stats(rows: int, bounds: Mapping[str, tuple[int, int]]) -> str:
    """The statistics of a file, as the log of a Delta table spells them. The log's times are whole milliseconds, so
    nothing is cut off."""
    values: list[dict[str, Any]] = [{name: each[side] for name, each in bounds.items()} for side in (0, 1)]
    for each in values:
        if "published_at" in each:
            each["published_at"] = iso(each["published_at"] // 1000)
    return msgspec.json.encode(
        {"numRecords": rows, "minValues": values[0], "maxValues": values[1], "nullCount": {}}
    ).decode()


def open_parquet(path: Path, schema: pa.Schema) -> pq.ParquetWriter:
    return pq.ParquetWriter(
        path,
        schema,
        compression="zstd",
        compression_level=COMPRESSION_LEVEL,
        use_dictionary=[name for name in schema.names if name in _FEW_VALUES],
        write_statistics=[name for name in schema.names if name in {*_MEASURED, "topic", "type", "size"}],
        write_page_checksum=True,
        store_schema=False,
    )
