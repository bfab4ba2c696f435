"""Publishing a DataFrame into a log.

A stream's `write` does not know its batch, `commit` does: so tasks check rows and stage them in files, and the commit
on the driver publishes what they staged in one transaction of the log, guarded by (sink, batch). Spark makes a new
writer for every batch, and another one for its commit; they share nothing but the options.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import tempfile
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from itertools import chain
from typing import IO, Any, NamedTuple, cast, get_args
from urllib.parse import unquote, urlsplit

import msgspec
import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql import types as T
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from headwater.delivery.publishing import DedupeWindow
from headwater.errors import (
    ConflictError,
    InputOutputError,
    InvalidDataError,
    InvalidInputError,
    InvalidOptionError,
    TooLargeError,
)
from headwater.message import DATA_BYTES_MAX, Draft, PublishOptions, make_draft
from headwater.pipeline.columns import COLUMNS, MESSAGE_SCHEMA, spark_schema
from headwater.pipeline.logs import POSTGRES, Durability, backend_of, log_path, transact
from headwater.pipeline.options import Options, one_of, whole
from headwater.ports.clock import SystemClock
from headwater.ports.store import Writer
from headwater.topics import check_topic
from headwater.transports.base import batches

BUSY_TIMEOUT_MS = 60_000  # a batch job waits longer than a publish: giving up costs the whole batch again
SINK_ID_CHARS_MAX = 256
PIECE_ROWS_MAX = 1_000  # as many as one append takes; more do not make it faster
PIECE_BYTES_MAX = 16 * 1024 * 1024
LENGTH_BYTES = 4  # in front of each piece in a file
LEFTOVER_MS = 24 * 3600 * 1000
FOLDER_TRIES_MAX = 5
FOLDER_MODE = 0o700  # other users may be able to reach the folder
QUOTED_CHARS_MAX = 80

Messages = Sequence[WriterCommitMessage | None]


# --- writers ----------------------------------------------------------------------------------------------------------


@dataclass
class StagedPartition(WriterCommitMessage):
    """One partition's rows: the name of their file, None if there are none."""

    name: str | None
    rows: int


class _StagingWriter:
    """What tasks do in a batch and in a stream alike."""

    def __init__(self, options: Mapping[str, str], schema: StructType) -> None:
        self._options = SinkOptions(options)
        self._columns = check_columns(schema, self._options.topic)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> StagedPartition:
        options, context = self._options, TaskContext.get()
        partition = "the partition" if context is None else f"partition {context.partitionId()}"
        checker = RowChecker(self._columns, options.topic, options.is_text, partition, SystemClock().now_ms())
        return stage(options.staging, chain.from_iterable(map(checker.drafts, iterator)))

    def abort(self, messages: Messages, batchId: int | None = None) -> None:
        discard(self._options.staging, cast(Sequence[StagedPartition | None], messages))

    def _publish(self, messages: Messages, key: SinkKey, batch: int | None) -> None:
        if None in messages:
            raise InvalidOptionError("a partition was not staged", where="headwater sink", next="Run the batch again")
        options, staged = self._options, cast(Sequence[StagedPartition], messages)
        store, clock = backend_of(options.path).open(
            durability=options.durability, busy_timeout_ms=BUSY_TIMEOUT_MS, create=True
        )
        with closing(store):
            now_ms = clock.now_ms()
            transact(store, lambda writer: publish_batch(writer, options.staging, staged, key, batch, now_ms))
        sweep(options.staging, SystemClock().now_ms())  # as this machine dates its files
        discard(options.staging, staged)


class BatchWriter(_StagingWriter, DataSourceArrowWriter):
    """`df.write.format("headwater")`: all rows in one transaction. With `sinkId` and `batchId` a repeat is recognised,
    as `foreachBatch` needs it."""

    def __init__(self, options: Mapping[str, str], schema: StructType, overwrite: bool = False) -> None:
        if overwrite:
            raise InvalidOptionError("a log is never overwritten", where="headwater sink", next='Use .mode("append")')
        super().__init__(options, schema)
        if (self._options.sink_id is None) != (self._options.batch_id is None):
            next = "Set both, so that a repeat of the batch is recognised, or neither"
            raise InvalidOptionError(
                "sinkId and batchId go together in a batch write", where="headwater sink", next=next
            )
        self._key = SinkKey(self._options.sink_id or str(uuid.uuid4()))

    def commit(self, messages: Messages) -> None:
        self._publish(messages, self._key, self._options.batch_id)


class StreamWriter(_StagingWriter, DataSourceStreamArrowWriter):
    """`df.writeStream.format("headwater")`: each micro-batch in one transaction, and once, whatever is killed when."""

    def __init__(self, options: Mapping[str, str], schema: StructType, overwrite: bool = False) -> None:
        if overwrite:
            why = "outputMode complete would publish the whole result again with every batch"
            raise InvalidOptionError(
                why, where="headwater sink", next='Use .outputMode("append") or .outputMode("update")'
            )
        super().__init__(options, schema)
        if self._options.batch_id is not None:
            raise InvalidOptionError("a stream has batch ids of its own", where="batchId", next="Leave the option out")
        self._key = sink_key(self._options)

    def commit(self, messages: Messages, batchId: int) -> None:
        self._publish(messages, self._key, batchId)


# --- options ----------------------------------------------------------------------------------------------------------


class SinkOptions:
    """`topic` overrides the column of that name. `sink_id` and `batch_id` identify what was published, so that a repeat
    is recognised; a stream has the ids of its query."""

    def __init__(self, given: Mapping[str, str]) -> None:
        options = Options(given)
        self.path = log_path(options.get("path", str, ""))  # may hold a password
        self.staging = _staging_folder(self.path, options.get("staging", str, ""))
        self.topic = options.get("topic", check_topic, None)
        self.is_text = options.get("dataFormat", one_of("json", "text"), "json") == "text"
        self.sink_id = options.get("sinkId", _sink_id, None)
        self.batch_id = options.get("batchId", whole(0), None)
        self.durability = cast(Durability, options.get("durability", one_of(*get_args(Durability)), "full"))
        self.checkpoint = options.get("checkpointLocation", str, None)
        options.check_unknown(of_spark=("queryName",))


def _sink_id(text: str) -> str:
    if not 0 < len(text) <= SINK_ID_CHARS_MAX:
        raise InvalidOptionError(f"this has {len(text)} characters; 1 to {SINK_ID_CHARS_MAX} are allowed")
    return text


def _staging_folder(path: str, named: str) -> str:
    """Next to a log's file. For a log in a database, in this machine's folder for temporary files, which is enough
    where driver and tasks run on one machine."""
    if named:
        return os.path.abspath(re.sub("^file:(//)?", "", named))
    if not path.startswith(POSTGRES):
        return f"{path}-staging"
    user = os.getuid() if hasattr(os, "getuid") else 0
    digest = hashlib.sha256(backend_of(path).name.encode()).hexdigest()[:16]
    folder = os.path.join(tempfile.gettempdir(), f"headwater-staging-{user}-{digest}")
    if os.path.exists(folder) and os.stat(folder).st_uid != user:
        raise InputOutputError(
            "this folder belongs to another user", where=folder, next="Name another: the option staging"
        )
    return folder


# --- columns ----------------------------------------------------------------------------------------------------------

IGNORED = ("seq", "published_at", "size")
"""The log sets them itself; a DataFrame read from a log has them, and may be written back as it is."""
PUBLISHED = tuple(name for name in COLUMNS if name not in IGNORED)


def check_columns(schema: StructType, topic: str | None) -> tuple[str, ...]:
    """The names of the columns that will be published, or the first reason why they cannot be."""
    names = schema.fieldNames()
    kinds = {each.name: each.dataType for each in spark_schema(MESSAGE_SCHEMA)}
    for each in schema.fields:
        if names.count(each.name) > 1:
            raise InvalidOptionError("there are two columns of this name", where=f"column {each.name}", next="Drop one")
        if each.name not in kinds:
            next = f"Drop it, or put it into data or headers. Known ones: {', '.join(PUBLISHED)}"
            raise InvalidOptionError("a message has no such column", where=f"column {each.name}", next=next)
        if each.name in PUBLISHED:
            _check_type(each.name, each.dataType, kinds[each.name])
    if "data" not in names:
        next = 'Select to_json(struct("*")).alias("data"), or name the column that holds the payload so'
        raise InvalidOptionError("there is no column data", where="headwater sink", next=next)
    if "topic" not in names and topic is None:
        next = 'Add .option("topic", …) or a column topic'
        raise InvalidOptionError("no topic is given", where="headwater sink", next=next)
    return tuple(name for name in names if name in PUBLISHED and not (name == "topic" and topic is not None))


def _check_type(name: str, found: T.DataType, wanted: T.DataType) -> None:
    if isinstance(found, T.IntegralType if isinstance(wanted, T.LongType) else type(wanted)) and (
        name != "headers" or found.simpleString() == wanted.simpleString()
    ):
        return
    cure = f'Use col("{name}").cast("{wanted.simpleString()}")'
    if name == "headers":
        cure = 'Make it with create_map(lit("name"), col("value").cast("string"), …)'
    elif name == "data" and isinstance(found, (T.StructType, T.MapType, T.ArrayType, T.VariantType)):
        cure = 'Use to_json(col("data")).alias("data")'
    elif isinstance(found, T.TimestampNTZType):
        cure += " (its time zone is the session's)"
    kind = InvalidDataError if name == "data" else InvalidOptionError
    raise kind(f"it is {found.simpleString()}, not {wanted.simpleString()}", where=f"column {name}", next=cure)


# --- rows -------------------------------------------------------------------------------------------------------------


@dataclass
class RowChecker:
    """Makes messages of one partition's batches in turn, with the checks and limits of a publish; an error names the
    row. They lack nothing but their seq, and their id where the row has none."""

    columns: Sequence[str]
    topic: str | None
    is_text: bool
    partition: str
    now_ms: int
    _rows: int = 0

    def drafts(self, batch: pa.RecordBatch) -> Iterator[Draft]:
        for row in zip(*map(self._values, self.columns, map(batch.column, self.columns)), strict=True):
            values = dict(zip(self.columns, row, strict=True))
            topic = self.topic or values["topic"]
            try:
                yield self._draft(topic, values)
            except InvalidInputError as exc:
                where = f"row {self._rows} of {self.partition}, topic {_quoted(topic)}"
                raise type(exc)(exc.why, where=where, next=f"{exc.next}. {_NOTHING}" if exc.next else _NOTHING) from exc
            self._rows += 1

    def _values(self, name: str, column: pa.Array) -> list[Any]:
        try:
            values: list[Any] = column.to_pylist()
        except (ValueError, OverflowError) as exc:  # a time that no datetime can hold
            where = f"row {self._rows} of {self.partition}, or below it"
            raise InvalidDataError(f"a value of {name}: {exc}", where=where, next=_NOTHING) from exc
        return [None if pairs is None else dict(pairs) for pairs in values] if name == "headers" else values

    def _draft(self, topic: str, values: dict[str, Any]) -> Draft:
        text = values.pop("data")
        if text is None:
            next = "Filter such rows out, or use coalesce(col(\"data\"), lit('null')) to publish JSON null"
            raise InvalidDataError("data is null", next=next)
        data = _encode(text).decode() if self.is_text else _checked_json(text)
        size = len(data.encode())
        if size > DATA_BYTES_MAX:
            why = f"{size} bytes of JSON, the limit is {DATA_BYTES_MAX}"
            raise TooLargeError(why, next="Store it elsewhere and publish a reference")
        values.pop("topic", None)
        options = {_OPTION_OF.get(name, name): value for name, value in values.items() if value is not None}
        try:
            made = make_draft("", None, cast(PublishOptions, options), self.now_ms)
        except InvalidInputError as exc:
            raise type(exc)(exc.why.replace("from_", "from"), next=exc.next) from exc
        return Draft(check_topic(topic), data, size, made.id, made.extras)


_NOTHING = "Nothing of this batch was published"
_OPTION_OF = {"from": "from_"}
_decode = msgspec.json.Decoder().decode
_encode = msgspec.json.encode


def _checked_json(text: str) -> str:
    try:
        _decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        next = 'Make it JSON, or add .option("dataFormat", "text") to publish it as a JSON string'
        raise InvalidDataError(f"data is not JSON ({exc}): {_quoted(text)}", next=next) from exc
    return text


def _quoted(text: str | None) -> str:
    return repr(text) if text is None or len(text) <= QUOTED_CHARS_MAX else f"{text[:QUOTED_CHARS_MAX]!r}…"


# --- staging files ----------------------------------------------------------------------------------------------------

_FILE_NAME = re.compile(r"staged-[0-9a-f]{32}")
_decode_piece = msgspec.msgpack.Decoder(list[Draft]).decode


def stage(folder: str, drafts: Iterator[Draft]) -> StagedPartition:
    """Write one partition's messages to a file of their own; nothing is left behind if that fails."""
    first = next(drafts, None)
    if first is None:
        return StagedPartition(None, 0)
    name, file = _create_staged_file(folder)
    rows = 0
    try:
        with file:
            for piece in batches(chain([first], drafts), lambda draft: draft.size, PIECE_ROWS_MAX, PIECE_BYTES_MAX):
                encoded = msgspec.msgpack.encode(piece)
                file.write(len(encoded).to_bytes(LENGTH_BYTES))
                file.write(encoded)
                rows += len(piece)
            file.flush()
            os.fsync(file.fileno())  # a full disk fails the task, which can be retried, not the commit
    except BaseException:
        discard(folder, [StagedPartition(name, 0)])
        raise
    return StagedPartition(name, rows)


def staged_pieces(folder: str, staged: StagedPartition) -> Iterator[list[Draft]]:
    """The pieces of one partition, one at a time. Raises InputOutputError if the file is not as it was written."""
    if staged.name is None:
        return
    path, rows = os.path.join(folder, staged.name), 0
    try:
        with open(path, "rb") as file:
            while length := file.read(LENGTH_BYTES):
                piece = _decode_piece(file.read(int.from_bytes(length)))
                rows += len(piece)
                yield piece
        if rows != staged.rows:
            raise OSError(f"{staged.rows} rows were staged, {rows} are here")
    except (OSError, msgspec.DecodeError) as exc:
        next = "Run the batch again; on a cluster the option staging must name a folder that all machines share"
        raise InputOutputError(str(exc), where=path, next=next) from exc


def discard(folder: str, staged: Iterable[StagedPartition | None]) -> None:
    """Remove these files, and the folder with the last of them. Failed tasks left no message (None)."""
    for each in staged:
        if each is not None and each.name is not None:
            with suppress(OSError):
                os.unlink(os.path.join(folder, each.name))
    with suppress(OSError):  # it is not empty while another batch uses it
        os.rmdir(folder)


def sweep(folder: str, now_ms: int) -> None:
    """Remove what killed runs left behind a day ago; only staging files."""
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if _FILE_NAME.fullmatch(entry.name) and entry.stat().st_mtime * 1000 < now_ms - LEFTOVER_MS:
                with suppress(OSError):
                    os.unlink(entry.path)


def _create_staged_file(folder: str) -> tuple[str, IO[bytes]]:
    name = f"staged-{secrets.token_hex(16)}"
    try:
        for _ in range(FOLDER_TRIES_MAX):
            os.makedirs(folder, FOLDER_MODE, exist_ok=True)
            with suppress(FileNotFoundError):  # another batch removed the empty folder in between
                return name, open(os.path.join(folder, name), "xb")
        raise OSError("the folder vanishes again and again")
    except OSError as exc:
        next = "Tasks need to write here; the option staging names another folder"
        raise InputOutputError(str(exc), where=folder, next=next) from exc


# --- promoting a batch ------------------------------------------------------------------------------------------------

_WINDOW = DedupeWindow()


class SinkKey(NamedTuple):
    """A sink: the name that its options give, or its query's; and the query, where that is known."""

    sink: str
    query: str | None = None

    @property
    def of_query(self) -> str | None:
        """The name under which the log remembers what this very query published, if that is not the sink itself."""
        return None if self.query is None or self.query == self.sink else f"{self.sink}@{self.query}"


def sink_key(options: SinkOptions) -> SinkKey:
    """The key of a sink, for the driver: Spark keeps the id of a query in its checkpoint, which the driver can read."""
    query = None if options.checkpoint is None else _query_id(options.checkpoint)
    sink = options.sink_id or query
    if sink is None:
        reason = ": no checkpointLocation is given" if options.checkpoint is None else " from its checkpoint"
        next = 'Name this query for the log: .option("sinkId", "…"), one that no other query uses'
        where = options.checkpoint or "headwater sink"
        raise InvalidOptionError(f"the id of the query cannot be read{reason}", where=where, next=next)
    return SinkKey(sink, query)


def _query_id(checkpoint: str) -> str | None:
    """The id in `<checkpoint>/metadata`, None if this is no folder that can be read here."""
    parts = urlsplit(checkpoint)
    if parts.scheme != "file" and len(parts.scheme) > 1:  # C:\… has a scheme of one letter
        return None
    folder = unquote(parts.path) if parts.scheme == "file" else checkpoint
    try:
        with open(os.path.join(folder, "metadata"), "rb") as file:
            return str(json.load(file)["id"])
    except (OSError, ValueError, LookupError, TypeError):
        return None


def publish_batch(
    writer: Writer, folder: str, staged: Sequence[StagedPartition], key: SinkKey, batch: int | None, now_ms: int
) -> None:
    """Publish a batch of a sink once, rows in order, by partition. A job that runs once has no batches (None)."""
    if batch is None:
        append(writer, folder, staged, key.sink, 0, now_ms)
        return
    stored = writer.sink_batch(key.sink)
    if is_repeat(key, batch, stored, None if key.of_query is None else writer.sink_batch(key.of_query)):
        return
    append(writer, folder, staged, key.sink, batch, now_ms)
    if writer.sink_batch(key.sink) != stored:  # from the first message on, no other writer can publish
        raise ConflictError("another writer publishes under this sinkId", where=f"sink {key.sink}, batch {batch}")
    for name in filter(None, (key.sink, key.of_query)):
        writer.save_sink_batch(name, batch, now_ms)


def append(writer: Writer, folder: str, staged: Sequence[StagedPartition], sink: str, batch: int, now_ms: int) -> None:
    for partition, each in enumerate(staged):
        id_of_row, row = row_ids(sink, batch, partition), 0
        for piece in staged_pieces(folder, each):
            writer.append([_with_id(draft, id_of_row, at) for at, draft in enumerate(piece, row)], now_ms, _WINDOW)
            row += len(piece)


def _with_id(draft: Draft, id_of_row: Callable[[int], str], row: int) -> Draft:
    """A row without an id gets the one that follows from its place."""
    return draft if draft.id else Draft(draft.topic, draft.data_json, draft.size, id_of_row(row), draft.extras)


def is_repeat(key: SinkKey, batch: int, stored: int | None, stored_of_query: int | None) -> bool:
    """Whether this batch was published before. Raises if that cannot be decided: `stored` is the last batch of the
    sink, `stored_of_query` the last one of it that came from this query."""
    if stored is None:
        return False
    where = f"sink {key.sink}, batch {batch}"
    if key.of_query is not None and stored_of_query != stored:
        next = "Was the checkpoint deleted, or do two queries share the sinkId? Give each its own sinkId"
        raise InvalidOptionError(f"batch {stored} under this sinkId came from another query", where=where, next=next)
    if batch < stored:
        why = f"batch {stored} was published already, so this one comes from an older or a new checkpoint"
        next = "Put back the checkpoint, or set another sinkId to publish from here again"
        raise InvalidOptionError(why, where=where, next=next)
    return batch == stored


def row_ids(sink: str, batch: int, partition: int) -> Callable[[int], str]:
    """The ids of a partition's rows: UUIDs (version 8) of 74 bits that follow from all three, and 48 of the row. The
    same row of the same batch always has the same id, so that the log recognises it."""
    digest = hashlib.blake2b(f"{batch}/{partition}/{sink}".encode(), digest_size=10).hexdigest()
    variant = 0x8000 | (int(digest[15:19], 16) & 0x3FFF)
    prefix = f"{digest[:8]}-{digest[8:12]}-8{digest[12:15]}-{variant:04x}-"
    return lambda row: f"{prefix}{row:012x}"
