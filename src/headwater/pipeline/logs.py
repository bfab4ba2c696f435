"""Reading a log, in a file or in a PostgreSQL database, for the pipeline. Imports no Spark.

The driver looks at a log through a snapshot: the store's reader and plain SQL. Tasks read ranges of its messages as
Arrow batches. SQL that goes through here is understood by both databases, with a `?` for each bound parameter; what
they spell differently is in `Dialect`.
"""

from __future__ import annotations

import os
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from adbc_driver_manager import AdbcConnection, AdbcDatabase, AdbcStatement, Error
from adbc_driver_manager._reader import AdbcRecordBatchReader
from msgspec.structs import asdict

from headwater.broker.statistics import describe_all
from headwater.errors import ConflictError, HeadwaterError, InvalidOptionError, NewerSchemaError, StoreError
from headwater.formats import TIME_MS_MAX
from headwater.message import derived_id
from headwater.pipeline.columns import COLUMNS, HEADERS, MESSAGE_SCHEMA, TABLE_SCHEMAS, TIME
from headwater.ports.clock import Clock, SystemClock
from headwater.ports.store import Reader, Store, Writer
from headwater.stores.conditions import topic_condition
from headwater.stores.sqlite.conditions import Param
from headwater.topics import Pattern
from headwater.version import UPGRADE, install_hint

if TYPE_CHECKING:
    from headwater.pipeline.logs_postgres import PostgresLog
    from headwater.pipeline.logs_sqlite import SqliteLog

POSTGRES = ("postgres://", "postgresql://")
BUSY_TIMEOUT_MS = 10_000
PARTITION_ROWS_MIN = 5_000  # fewer are read faster than another task is started
PARTITIONS_MAX = 10_000
COUNTED_SEQS = 200_000  # how much of the log `seq_of_nth` counts in one transaction
WRITE_TRIES_MAX = 5

FIRST_SEQS = 64  # a first small chunk shows how big messages are, and which columns they have
CHUNK_SEQS = 50_000  # how much of the log one statement walks through
CHUNK_BYTES = 32 * 1024 * 1024  # a statement ends early after so much
BATCH_ROWS = 32_768
STATEMENT_ROWS = 512  # rows that ADBC collects before their bytes are counted: few, for each may be a megabyte
STATEMENT_ROWS_BIG = 8  # the same where rows are big
BIG_ROW_BYTES = 64 * 1024

Durability = Literal["full", "relaxed"]
Identity = tuple[int, int]
Query = Callable[..., list[tuple[Any, ...]]]
"""SQL and its parameters."""
Row = dict[str, Any]
_Answer = TypeVar("_Answer")


class Range(NamedTuple):
    """The messages with a seq above `after`, up to and with `upto`."""

    after: int
    upto: int

    def overlap(self, other: Range) -> Range:
        """What is in both; an empty range if nothing is."""
        after = max(self.after, other.after)
        return Range(after, max(after, min(self.upto, other.upto)))


def split(whole: Range, partitions: int, rows_min: int = PARTITION_ROWS_MIN) -> list[Range]:
    """Neighbouring ranges of about equal length that cover the whole and nothing else: as many as asked for, unless
    that would make them shorter than `rows_min`. An empty range gives none."""
    seqs = whole.upto - whole.after
    if seqs <= 0:
        return []
    pieces = max(1, min(partitions, seqs // rows_min, PARTITIONS_MAX))
    ends = [whole.after + seqs * piece // pieces for piece in range(pieces + 1)]
    return [Range(after, upto) for after, upto in pairwise(ends)]


EVERY_SEQ = Range(-(2**63), 2**63 - 1)


class Condition(NamedTuple):
    """Which messages of a range: SQL over the table `messages` that holds bound parameters only, and where that lets
    too much through, the patterns of which a topic must match one; and which seqs, where that is known."""

    sql: str = "TRUE"
    params: tuple[Param, ...] = ()
    patterns: tuple[Pattern, ...] = ()
    seqs: Range = EVERY_SEQ

    def __and__(self, other: Condition) -> Condition:
        if self == Condition():
            return other
        both = f"({self.sql}) AND ({other.sql})", (*self.params, *other.params)
        return Condition(*both, self.patterns or other.patterns, self.seqs.overlap(other.seqs))

    def matches(self, topic: str) -> bool:
        return not self.patterns or any(pattern.matches(topic) for pattern in self.patterns)


def topics_condition(patterns: Sequence[Pattern]) -> Condition:
    """Messages whose topic matches one of the patterns; without patterns, all."""
    if not patterns or any(pattern.is_all for pattern in patterns):
        return Condition()
    found = [topic_condition(pattern) for pattern in patterns]
    return Condition(
        " OR ".join(f"({each.sql})" for each, _ in found),
        tuple(param for each, _ in found for param in each.params),
        () if all(exact for _, exact in found) else tuple(patterns),
    )


# --- backends ---------------------------------------------------------------------------------------------------------


class Dialect(NamedTuple):
    """`columns`: the SQL of a message's column where its name is not enough. `text`: a text column in a snapshot, as
    bytes if it may be no UTF-8."""

    columns: Mapping[str, str]
    text: str


class Snapshot(NamedTuple):
    """A log at one moment: through the store's reader, and in SQL. Read-only: it neither creates a log nor changes its
    schema. The identity distinguishes this log from others wherever it is moved: its salt and the time of its
    creation."""

    reader: Reader
    query: Query
    dialect: Dialect
    identity: Identity


class OpenLog(NamedTuple):
    """A log opened for positions and sinks, which upgrades an older schema; and its clock."""

    store: Store
    clock: Clock


def backend_of(path: str) -> SqliteLog | PostgresLog:
    """The backend of a log that `log_path` named."""
    if not path.startswith(POSTGRES):
        from headwater.pipeline.logs_sqlite import SqliteLog

        return SqliteLog(path)
    try:
        from headwater.pipeline.logs_postgres import PostgresLog
    except ImportError as exc:
        why = f"this needs a package that is not installed ({exc})"
        raise InvalidOptionError(why, where="postgres://", next=install_hint("postgres", "spark")) from exc
    return PostgresLog(path)


def log_path(url: str) -> str:
    """A log as `headwater.open` takes it: its file, absolute, so that tasks and driver mean the same one wherever they
    run; or the url of its database."""
    if url.startswith(POSTGRES):
        return url
    if url in ("memory:", ":memory:"):
        raise InvalidOptionError(
            "a log in memory ends with its process", where=f"path {url!r}", next="Name the file of one"
        )
    # sqlite:///relative and sqlite:////absolute, as in headwater.open; Spark writes file:///absolute
    path = re.sub("^(sqlite:///?|sqlite:|file://|file:(?=/))", "", url)
    scheme, found, _ = path.partition("://")
    if found:
        raise InvalidOptionError(
            "Spark reads and writes logs in files and in PostgreSQL, not through a server",
            where=f"path {scheme}://…",  # what follows may hold a password
            next="Name the log that the server serves: its file, on its machine, or postgres://…",
        )
    if not path.strip():
        next = 'Say which: .option("path", "events.db") or .load("events.db")'
        raise InvalidOptionError("no log is named", where=f"path {url!r}", next=next)
    return os.path.abspath(path)


def log_identity(path: str) -> Identity:
    with backend_of(path).snapshot() as snapshot:
        return snapshot.identity


@contextmanager
def open_reader(path: str) -> Iterator[Reader]:
    with backend_of(path).snapshot() as snapshot:
        yield snapshot.reader


def identity_of(query: Query, schema_version: int, name: str, address: str) -> Identity:
    """The identity in the table `headwater` of a log, if it has the schema that this version reads."""
    facts: dict[str, int] = dict(query("SELECT name, value FROM headwater"))
    version = facts["schema_version"]
    if version > schema_version:
        why = f"the log has schema {version}, this Headwater knows up to {schema_version}"
        raise NewerSchemaError(why, where=name, next=UPGRADE)
    if version < schema_version:
        why = f"the log has schema {version}, which is older than {schema_version}"
        raise StoreError(why, where=name, next=f"Open it once to bring it up to date: headwater doctor {address}")
    return int(facts["salt"]), facts.get("created_at", 0)


def transact(store: Store, change: Callable[[Writer], _Answer], *, alone: bool = False) -> _Answer:
    """Run `change` in a transaction, and again if it lost a conflict, which leaves nothing of it. `alone` if it adds a
    subscription."""
    for _ in range(WRITE_TRIES_MAX - 1):
        with suppress(ConflictError), store.write(alone=alone) as writer:
            return change(writer)
    with store.write(alone=alone) as writer:
        return change(writer)


# --- questions to a snapshot ------------------------------------------------------------------------------------------


def seq_after(snapshot: Snapshot, after: int) -> int | None:
    """The seq of the first message above `after`."""
    ((found,),) = snapshot.query("SELECT min(seq) FROM messages WHERE seq > ?", (after,))
    return None if found is None else int(found)


def seq_of_nth(path: str, asked: Range, condition: Condition, n: int) -> int | None:
    """The seq of the n-th message of a range that fits; None if there are fewer."""
    for after in range(asked.after, asked.upto, COUNTED_SEQS):
        with backend_of(path).snapshot() as snapshot:
            topic = snapshot.dialect.text.format("topic")
            sql = f"SELECT seq, {topic} FROM messages WHERE seq > ? AND seq <= ? AND ({condition.sql}) ORDER BY seq"
            rows = snapshot.query(sql, (after, min(after + COUNTED_SEQS, asked.upto), *condition.params))
        seqs = [seq for seq, topic in rows if condition.matches(_decoded(topic))]
        if len(seqs) >= n:
            return int(seqs[n - 1])
        n -= len(seqs)
    return None


def _decoded(raw: Any) -> Any:
    return raw.decode(errors="replace") if isinstance(raw, bytes) else raw


# --- messages as Arrow ------------------------------------------------------------------------------------------------


class ArrowReader(ABC):
    """A connection of ADBC, whose drivers make no Python object of any row, in autocommit mode. For tasks. Errors of
    the driver are raised as `_translate` has them.

    ADBC's own DB-API is not used: it imports pandas, and polars where that is installed, which costs each Python worker
    of Spark most of a second.
    """

    dialect: Dialect

    def __init__(self, connect: Callable[[], AdbcDatabase], name: str) -> None:
        self._name = name
        with self._translated():
            self._database = connect()
            try:
                self._connection = AdbcConnection(self._database)
            except Error:
                self._database.close()
                raise

    def close(self) -> None:
        with suppress(Error):
            self._connection.close()
            self._database.close()

    @abstractmethod
    def messages(
        self, columns: Mapping[str, str], asked: Range, condition: Condition, statement_rows: int
    ) -> Generator[pa.RecordBatch, None, None]:
        """Messages of a range in seq order, `columns` being their names and SQL: at least one batch, which may be
        empty. The transaction lasts until the iterator is exhausted or closed. Where rows come one by one,
        `statement_rows` of them make a batch."""

    @abstractmethod
    def _translate(self, exc: Error) -> HeadwaterError: ...

    def table(self, sql: str, params: Sequence[Param] = ()) -> pa.Table:
        """All rows of a small result."""
        with self.query(sql, params) as reader:
            return reader.read_all()

    @contextmanager
    def query(self, sql: str, params: Sequence[Param] = (), **options: str) -> Iterator[pa.RecordBatchReader]:
        """The result as it comes; the statement ends with the block, however much of its result is left."""
        with self._translated(), AdbcStatement(self._connection) as statement:
            statement.set_options(**options)
            statement.set_sql_query(sql)
            if params:
                statement.prepare()
                names = [str(at) for at in range(len(params))]
                statement.bind(pa.record_batch([pa.array([param]) for param in params], names=names))
            handle, _ = statement.execute_query()
            reader = AdbcRecordBatchReader._import_from_c(handle.address)
            try:
                yield reader
            except GeneratorExit:
                with suppress(Error):
                    statement.cancel()  # PostgreSQL would send the rest first, and SQLite has nothing to cancel
                raise
            finally:
                reader.close()

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except Error as exc:
            raise self._translate(exc) from exc


def messages_sql(columns: Mapping[str, str], condition: Condition) -> str:
    """The query of a range of messages; its parameters are those of the range and of the condition."""
    wanted = ", ".join(f'{sql} AS "{name}"' for name, sql in columns.items())
    return f"SELECT {wanted} FROM messages WHERE seq > ? AND seq <= ? AND ({condition.sql}) ORDER BY messages.seq"


_TIMES = ("published_at", "deliver_at", "expires_at")
NUMBERS = frozenset(["seq", "version", "priority", "size", *_TIMES])
# Columns that are empty in a message which was published with topic and data only.
_RARE = tuple(name for name in COLUMNS if name not in ("seq", "topic", "data", "published_at", "size"))


def read_range(
    path: str,
    after: int,
    upto: int,
    *,
    condition: Condition | None = None,
    columns: Sequence[str] | None = None,
    batch_rows: int = BATCH_ROWS,
) -> Iterator[pa.RecordBatch]:
    """The messages of (after, upto] in seq order, as batches of MESSAGE_SCHEMA or of those of its columns.

    Every column costs ADBC some 65 ns a row, empty or not, and most columns of most messages are empty. So a statement
    asks for the columns that have turned out to hold something so far, and negates the seq of a row that has something
    in another; a chunk with such a row is read again with the columns it needs. Ids that follow from the row, times,
    sizes and empty columns are made here, a batch at a time.

    A statement's rows are fetched to the end before the first of them is passed on: however slowly batches are
    consumed, no read transaction outlives a chunk, and SQLite can checkpoint its WAL.
    """
    condition = condition or Condition()
    with backend_of(path).arrow() as reader:
        scan = _Scan(reader, condition, tuple(COLUMNS if columns is None else columns))
        for chunk in scan.chunks(*Range(after, upto).overlap(condition.seqs)):
            for start in range(0, chunk.num_rows, batch_rows):
                (batch,) = chunk.slice(start, batch_rows).combine_chunks().to_batches()
                yield scan.finished(batch)


class _Scan:
    """One pass over a range; learns on the way which columns hold something."""

    def __init__(self, reader: ArrowReader, condition: Condition, columns: tuple[str, ...]) -> None:
        self._reader = reader
        self._condition = condition
        self._columns = columns
        self._schema = pa.schema([MESSAGE_SCHEMA.field(name) for name in columns])
        self._rare = tuple(name for name in _RARE if name in columns)
        self._filled: tuple[str, ...] = ()
        self._statement_rows = STATEMENT_ROWS
        self._salt = self._number("SELECT value FROM headwater WHERE name = 'salt'") or 0

    def chunks(self, after: int, upto: int) -> Iterator[pa.Table]:
        seqs = FIRST_SEQS
        while after < upto:
            start = after
            found, after = self._fetched(Range(after, min(upto, after + seqs)))
            # As many as will probably fit: a statement that ends early is not free everywhere.
            row_bytes = found.nbytes // max(1, after - start)
            seqs = min(CHUNK_SEQS, max(FIRST_SEQS, CHUNK_BYTES // (row_bytes + 1)))
            if found.num_rows:
                yield found
            else:  # there may be nothing for a long way
                following = self._number("SELECT min(seq) FROM messages WHERE seq > ?", (after,))
                after = upto if following is None else max(after, following - 1)

    def _fetched(self, asked: Range) -> tuple[pa.Table, int]:
        """The rows of a range, and how far they reach if there are too many bytes."""
        found: list[pa.RecordBatch] = []
        fetched_bytes = 0
        with closing(
            self._reader.messages(self._selected(), asked, self._condition, self._statement_rows)
        ) as statement:
            for batch in statement:
                found.append(batch)
                fetched_bytes += batch.nbytes
                if fetched_bytes > CHUNK_BYTES and batch.num_rows:
                    break
        table = pa.Table.from_batches(found)
        if not table.num_rows:
            return table, asked.upto
        if pc.min(table["seq"]).as_py() < 0:
            self._widen(asked)
            return self._fetched(asked)
        is_big = table.nbytes / table.num_rows > BIG_ROW_BYTES
        self._statement_rows = STATEMENT_ROWS_BIG if is_big else STATEMENT_ROWS
        last = table["seq"][-1].as_py() if fetched_bytes > CHUNK_BYTES else asked.upto
        return self._matching(table), last

    def _selected(self) -> dict[str, str]:
        """The columns of the statement, each with its SQL."""
        wanted = {"seq", *self._columns}
        if "id" in wanted:
            wanted.add("published_at")
        if self._condition.patterns:
            wanted.add("topic")
        selected: dict[str, str] = {
            name: self._sql(name) for name in ("seq", "topic", "data", "published_at") if name in wanted
        }
        if "size" in wanted and "data" not in wanted:
            selected["size"] = self._sql("size")
        # `checked` is 1 where the log recorded that the rare columns are empty.
        selected |= {name: f"CASE WHEN checked = 1 THEN NULL ELSE {self._sql(name)} END" for name in self._filled}
        others = [self._sql(name) for name in self._rare if name not in self._filled]
        if others:
            is_filled = " OR ".join(f"{sql} IS NOT NULL" for sql in others)
            selected["seq"] = f"CASE WHEN checked = 1 THEN seq WHEN {is_filled} THEN -seq ELSE seq END"
        return selected

    def _sql(self, column: str) -> str:
        return self._reader.dialect.columns.get(column, f'"{column}"')

    def _widen(self, asked: Range) -> None:
        counts = ", ".join(f'count({self._sql(name)}) AS "{name}"' for name in self._rare)
        sql = f"SELECT {counts} FROM messages WHERE seq > ? AND seq <= ? AND coalesce(checked, 0) <> 1"
        (row,) = self._reader.table(sql, asked).to_pylist()
        self._filled = tuple(name for name in self._rare if row[name] or name in self._filled)

    def _matching(self, table: pa.Table) -> pa.Table:
        if not self._condition.patterns:
            return table
        encoded = utf8(table["topic"].combine_chunks()).dictionary_encode()
        matches = [self._condition.matches(topic) for topic in encoded.dictionary.to_pylist()]
        return table.filter(pa.array(matches, pa.bool_()).take(encoded.indices))

    def finished(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        return pa.RecordBatch.from_arrays([self._column(batch, name) for name in self._columns], schema=self._schema)

    def _column(self, batch: pa.RecordBatch, name: str) -> pa.Array:
        if name == "id":
            ids = derived_ids(batch["published_at"], batch["seq"], self._salt)
            return pc.coalesce(utf8(batch["id"]), ids) if "id" in self._filled else ids
        if name == "size" and "size" not in batch.schema.names:
            return pc.binary_length(batch["data"]).cast(pa.int64())
        if name == "priority":
            zeros = pa.repeat(pa.scalar(0, pa.int64()), batch.num_rows)
            return pc.coalesce(batch[name], zeros) if name in self._filled else zeros
        if name not in batch.schema.names:
            return pa.nulls(batch.num_rows, MESSAGE_SCHEMA.field(name).type)
        if name in _TIMES:
            return timestamps(batch[name])
        if name == "headers":
            return header_maps(utf8(batch[name]))
        return batch[name] if name in NUMBERS else utf8(batch[name])

    def _number(self, sql: str, params: tuple[Param, ...] = ()) -> int | None:
        found: int | None = self._reader.table(sql, params).column(0)[0].as_py()
        return found


_text = msgspec.json.Decoder(str).decode
_ID_CHARS = 36
_BITS_48 = 1 << 48  # what the twelve hex digits of an id hold
_HEX_OF_BYTE = np.frombuffer("".join(f"{byte:02x}" for byte in range(256)).encode(), dtype=np.uint16)
"""The two hex digits of each byte, as they lie in memory."""


def derived_ids(published_ms: pa.Int64Array, seqs: pa.Int64Array, salt: int) -> pa.StringArray:
    """What `message.derived_id` returns for each row: many times as fast as SQLite's printf in the view `history`."""
    times, numbers = published_ms.to_numpy(), seqs.to_numpy()
    rows = len(times)
    if not rows or min(times.min(), numbers.min()) < 0 or max(times.max(), numbers.max()) >= _BITS_48:
        # Rows inserted by hand, without the checks.
        ids = [derived_id(at, salt, seq) for at, seq in zip(times.tolist(), numbers.tolist(), strict=True)]
        return pa.array(ids, pa.string())
    chars = np.empty((rows, _ID_CHARS), dtype=np.uint8)
    chars[:] = np.frombuffer(derived_id(0, salt, 0).encode(), dtype=np.uint8)
    digits = _hex_digits(times)
    chars[:, 0:8], chars[:, 9:13], chars[:, 24:36] = digits[:, :8], digits[:, 8:], _hex_digits(numbers)
    offsets = np.arange(0, (rows + 1) * _ID_CHARS, _ID_CHARS, dtype=np.int32)
    return pa.StringArray.from_buffers(rows, pa.py_buffer(offsets), pa.py_buffer(chars))


def _hex_digits(numbers: np.ndarray[Any, np.dtype[np.int64]]) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """The low twelve hex digits of each number, as ASCII."""
    big_endian = numbers.astype(">i8").view(np.uint8).reshape(-1, 8)[:, 2:]
    return _HEX_OF_BYTE[big_endian].view(np.uint8)


def timestamps(ms: pa.Int64Array) -> pa.TimestampArray:
    """Milliseconds as timestamps. A time beyond the years 1970 to 9999, in a row inserted by hand, becomes the nearest
    one within them, as in `formats.datetime_of`."""
    ms = pc.min_element_wise(pc.max_element_wise(ms, 0, skip_nulls=False), TIME_MS_MAX, skip_nulls=False)
    return pc.multiply(ms, 1000).cast(TIME)


def header_maps(texts: pa.StringArray) -> pa.MapArray:
    """JSON objects as maps of text; a value that is no text is its JSON. Headers that cannot be parsed are a map with
    their text under the empty name, so that a row inserted without the checks is still visible."""
    return pa.array([None if text is None else _header_items(text) for text in texts.to_pylist()], HEADERS)


def _header_items(text: str) -> list[tuple[str, str]]:
    try:
        found = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
        texts = {name: bytes(value) for name, value in found.items()}
        return [(name, _text(raw) if raw[:1] == b'"' else raw.decode()) for name, raw in texts.items()]
    except (msgspec.DecodeError, RecursionError, UnicodeError):
        return [("", text)]


def utf8(texts: pa.StringArray) -> pa.StringArray:
    """The texts themselves if they are UTF-8, as a rule; else with U+FFFD for what is not."""
    try:
        texts.validate(full=True)
    except pa.ArrowInvalid:
        return pa.array([_decoded(raw) for raw in texts.cast(pa.binary()).to_pylist()], pa.string())
    return texts


# --- the other tables as Arrow ----------------------------------------------------------------------------------------

# Tables that grow are read as they are stored, so many rows at a time along their key.
_STORED = {
    "deliveries": (("subscription", "seq"), 10_000),
    "dead_letters": (("id",), 256),  # each may be a megabyte and more
    "gaps": (("number",), 10_000),
}
# Not through the store's reader, which fails on a topic that is no UTF-8.
_TOPIC_COUNTS = """
    SELECT {topic}, CAST(sum(count) AS bigint), CAST(sum(bytes) AS bigint), max(last_seq), max(last_published_at) FROM (
        SELECT topic, count, bytes, last_seq, last_published_at FROM topic_counts
        UNION ALL
        SELECT topic, 1, {size}, seq, published_at FROM messages
        WHERE seq > (SELECT value FROM headwater WHERE name = 'counted_to')
    ) AS counted GROUP BY topic ORDER BY topic
"""


def read_table(
    path: str, table: str, now_ms: int | None = None, after: tuple[Any, ...] | None = None
) -> Iterator[pa.RecordBatch]:
    """A table other than `messages`, with all its columns. What changes in place is read at one moment, `now_ms`; a
    table that grows, from a key on."""
    schema = TABLE_SCHEMAS[table]
    if table in _STORED:
        yield from _stored_table(path, table, schema, *_STORED[table], after)
        return
    observed_ms = SystemClock().now_ms() if now_ms is None else now_ms
    with backend_of(path).snapshot() as snapshot:
        rows = [{**row, "observed_ms": observed_ms} for row in _observed(snapshot, table, observed_ms)]
    names = [f"{each.name.removesuffix('_at')}_ms" if each.type == TIME else each.name for each in schema]
    columns = [[row[name] for row in rows] for name in names]
    yield pa.RecordBatch.from_arrays(list(map(_array, columns, schema.types)), schema=schema)


def _stored_table(
    path: str, table: str, schema: pa.Schema, key: tuple[str, ...], page_rows: int, after: tuple[Any, ...] | None
) -> Iterator[pa.RecordBatch]:
    after = after or tuple("" if schema.field(name).type == pa.string() else -1 for name in key)
    while True:
        with backend_of(path).snapshot() as snapshot:  # a new one for each page: no transaction waits for the consumer
            text = snapshot.dialect.text
            names = [text.format(each.name) if each.type == pa.string() else f'"{each.name}"' for each in schema]
            rows = snapshot.query(
                f"SELECT {', '.join(names)} FROM {table} WHERE ({', '.join(key)}) > ({', '.join('?' * len(key))}) "
                f"ORDER BY {', '.join(key)} LIMIT {page_rows}",
                after,
            )
        if rows:
            arrays = list(map(_array, zip(*rows, strict=True), schema.types))
            batch = pa.RecordBatch.from_arrays(arrays, schema=schema)
            yield batch
            after = tuple(batch[name][-1].as_py() for name in key)
        if len(rows) < page_rows:
            return


def _observed(snapshot: Snapshot, table: str, now_ms: int) -> Iterable[Row]:
    reader, dialect = snapshot.reader, snapshot.dialect
    match table:
        case "subscriptions":
            return map(asdict, describe_all(reader, now_ms))
        case "timings":
            return map(asdict, reader.timings())
        case "retention":
            return [{**asdict(policy), **asdict(policy.limits)} for policy in reader.retention()]
    counts = snapshot.query(_TOPIC_COUNTS.format(topic=dialect.text.format("topic"), size=dialect.columns["size"]))
    names = ("topic", "count", "bytes", "last_seq", "last_published_ms")
    return [dict(zip(names, row, strict=True)) for row in counts]


def _array(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    if kind == TIME:
        return timestamps(pa.array(values, pa.int64()))
    if kind == pa.bool_():  # SQLite has integers
        return pa.array([None if value is None else bool(value) for value in values], kind)
    return pa.array([_decoded(value) for value in values], kind)
