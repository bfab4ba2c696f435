"""A range of a log as Arrow batches: the hot path of the source, and what the lake seals from.

Every column costs ADBC some 65 ns a row, empty or not, and most columns of most messages are empty. So a statement asks
for the columns that have turned out to hold something so far, and marks a row that has something in another by the sign
of its seq; a chunk with such a row is read anew with the columns it needs. Ids that follow from the row, times, sizes
and empty columns are made here, a batch at a time.

A statement's rows are taken to the end before the first of them is handed on: however slowly batches are consumed, no
read transaction outlives a chunk, and the WAL can be moved into the database.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing

import pyarrow as pa
import pyarrow.compute as pc

from headwater.pipeline.schema import ARROW_SCHEMA, COLUMNS
from headwater.pipeline.source.columns import byte_sizes, derived_ids, headers, readable, times
from headwater.pipeline.source.place import Condition, Param, Range, Rows, log_at

FIRST_SEQS = 64  # a first small chunk tells how big messages are, and which columns they have
CHUNK_SEQS = 50_000  # how much of the log one statement walks through
CHUNK_BYTES = 32 * 1024 * 1024  # a statement ends early after so much
BATCH_ROWS = 32_768
STATEMENT_ROWS = 512  # what ADBC gathers before the bytes are counted: not too many, for each may be a megabyte
STATEMENT_ROWS_BIG = 8  # the same where rows are big
BIG_ROW_BYTES = 64 * 1024

_TIMES = ("published_at", "deliver_at", "expires_at")
_NUMBERS = frozenset(["seq", "version", "priority", "size", *_TIMES])
# Columns that are empty in a message of which nothing but topic and data was said.
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
    """The messages of (after, upto] in seq order, as batches of ARROW_SCHEMA or of those of its columns."""
    with log_at(path).rows() as rows:
        reading = _Reading(rows, condition or Condition(), tuple(COLUMNS if columns is None else columns))
        for chunk in reading.chunks(after, upto):
            for start in range(0, chunk.num_rows, batch_rows):
                (batch,) = chunk.slice(start, batch_rows).combine_chunks().to_batches()
                yield reading.finished(batch)


class _Reading:
    """One pass over a range; learns on the way which columns hold something."""

    def __init__(self, rows: Rows, condition: Condition, columns: tuple[str, ...]) -> None:
        self._rows = rows
        self._condition = condition
        self._columns = columns
        self._schema = pa.schema([ARROW_SCHEMA.field(name) for name in columns])
        self._rare = tuple(name for name in _RARE if name in columns)
        self._filled: tuple[str, ...] = ()
        self._statement_rows = STATEMENT_ROWS
        self._salt = self._number("SELECT value FROM headwater WHERE name = 'salt'") or 0

    def chunks(self, after: int, upto: int) -> Iterator[pa.Table]:
        seqs = FIRST_SEQS
        while after < upto:
            begun_at = after
            found, after = self._chunk(after, min(upto, after + seqs))
            seqs = _next_seqs(found.nbytes // max(1, after - begun_at))
            if found.num_rows:
                yield found
            else:  # perhaps there is nothing for a long way
                following = self._number("SELECT min(seq) FROM messages WHERE seq > ?", (after,))
                after = upto if following is None else max(after, following - 1)

    def _chunk(self, after: int, end: int) -> tuple[pa.Table, int]:
        """Rows of (after, end], and how far they reach."""
        while (found := self._gathered(after, end)) is None:
            self._widen(after, end)
        table, stopped_at = found
        if table.num_rows:
            is_big = table.nbytes / table.num_rows > BIG_ROW_BYTES
            self._statement_rows = STATEMENT_ROWS_BIG if is_big else STATEMENT_ROWS
        return self._matching(table), end if stopped_at is None else stopped_at

    def _gathered(self, after: int, end: int) -> tuple[pa.Table, int | None] | None:
        """The rows and, if there were too many bytes, the seq of the last one; or None if more columns are needed."""
        found: list[pa.RecordBatch] = []
        taken_bytes = 0
        asked = Range(after, end)
        with closing(self._rows.batches(self._asked(), asked, self._condition, self._statement_rows)) as statement:
            for batch in statement:
                found.append(batch)
                taken_bytes += batch.nbytes
                if taken_bytes > CHUNK_BYTES and batch.num_rows:
                    break
        table = pa.Table.from_batches(found)
        if table.num_rows and pc.min(table["seq"]).as_py() < 0:
            return None
        return table, table["seq"][-1].as_py() if taken_bytes > CHUNK_BYTES else None

    def _asked(self) -> dict[str, str]:
        """The columns of the statement, each with its SQL."""
        wanted = {"seq", *self._columns}
        if "id" in wanted:
            wanted.add("published_at")
        if self._condition.patterns:
            wanted.add("topic")
        asked: dict[str, str] = {
            name: self._sql(name) for name in ("seq", "topic", "data", "published_at") if name in wanted
        }
        if "size" in wanted and "data" not in wanted:
            asked["size"] = self._sql("size")
        # `checked` is 1 where the log itself says that there is nothing else.
        asked |= {name: f"CASE WHEN checked = 1 THEN NULL ELSE {self._sql(name)} END" for name in self._filled}
        others = [self._sql(name) for name in self._rare if name not in self._filled]
        if others:
            something_else = " OR ".join(f"{sql} IS NOT NULL" for sql in others)
            asked["seq"] = f"CASE WHEN checked = 1 THEN seq WHEN {something_else} THEN -seq ELSE seq END"
        return asked

    def _sql(self, column: str) -> str:
        return self._rows.words.columns.get(column, f'"{column}"')

    def _widen(self, after: int, end: int) -> None:
        counts = ", ".join(f'count({self._sql(name)}) AS "{name}"' for name in self._rare)
        sql = f"SELECT {counts} FROM messages WHERE seq > ? AND seq <= ? AND coalesce(checked, 0) <> 1"
        (row,) = self._rows.table(sql, (after, end)).to_pylist()
        held = {name for name, count in zip(self._rare, row.values(), strict=True) if count}
        self._filled = tuple(name for name in self._rare if name in held or name in self._filled)

    def _matching(self, table: pa.Table) -> pa.Table:
        patterns = self._condition.patterns
        if not patterns or not table.num_rows:
            return table
        encoded = readable(table["topic"].combine_chunks()).dictionary_encode()
        topics = encoded.dictionary.to_pylist()
        fits = pa.array([any(pattern.matches(topic) for pattern in patterns) for topic in topics], pa.bool_())
        return table.filter(fits.take(encoded.indices))

    def finished(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        return pa.RecordBatch.from_arrays([self._column(batch, name) for name in self._columns], schema=self._schema)

    def _column(self, batch: pa.RecordBatch, name: str) -> pa.Array:
        if name == "id":
            ids = derived_ids(batch["published_at"], batch["seq"], self._salt)
            return pc.coalesce(readable(batch["id"]), ids) if "id" in self._filled else ids
        if name == "size" and "size" not in batch.schema.names:
            return byte_sizes(batch["data"])
        if name == "priority":
            zeros = pa.repeat(pa.scalar(0, pa.int64()), batch.num_rows)
            return pc.coalesce(batch[name], zeros) if name in self._filled else zeros
        if name in _RARE and name not in batch.schema.names:
            return pa.nulls(batch.num_rows, ARROW_SCHEMA.field(name).type)
        if name in _TIMES:
            return times(batch[name])
        if name == "headers":
            return headers(readable(batch[name]))
        return batch[name] if name in _NUMBERS else readable(batch[name])

    def _number(self, sql: str, params: tuple[Param, ...] = ()) -> int | None:
        found: int | None = self._rows.table(sql, params).column(0)[0].as_py()
        return found


def _next_seqs(bytes_each: int) -> int:
    """As many as will probably fit: a statement that is ended early is not free everywhere."""
    return min(CHUNK_SEQS, max(FIRST_SEQS, CHUNK_BYTES // (bytes_each + 1)))
