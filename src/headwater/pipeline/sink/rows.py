"""Rows of a DataFrame become messages: the checks and limits of a publish, on Arrow batches. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import compress
from typing import Any, cast

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from headwater.errors import InvalidData, InvalidInput, TooLarge
from headwater.message import DATA_BYTES_MAX, ID_CHARS_MAX, Draft, Extras, PublishOptions, make_draft
from headwater.pipeline.sink.options import DataFormat
from headwater.topics import check_topic

STAGED_ROWS_MAX = 1_000  # as many as one append takes; more do not make it faster
STAGED_BYTES_MAX = 16 * 1024 * 1024
QUOTED_CHARS_MAX = 80

# What waits in a staging file: checked, so that nothing but the place in the log is missing.
STAGED = pa.schema([("topic", pa.string()), ("data", pa.string()), ("id", pa.string()), ("extras", pa.string())])

_OPTION_OF = {"from": "from_"}
_decode = msgspec.json.Decoder().decode
_encode = msgspec.json.encode
_extras_of = msgspec.json.Decoder(Extras).decode
_BAD_JSON = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


class RowChecker:
    """Checks one partition's batches in turn; says of a bad row where it stands. `topic` goes before the column."""

    def __init__(
        self, columns: Sequence[str], *, topic: str | None, data_format: DataFormat, place: str, now_ms: int
    ) -> None:
        self._topic = topic
        self._has_id = "id" in columns
        self._optional = [name for name in columns if name not in ("topic", "data", "id")]
        self._is_text = data_format == "text"
        self._place = place
        self._now_ms = now_ms
        self._rows = 0

    def staged(self, batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        """The same rows as they wait, in pieces of bounded size. Raises InvalidInput."""
        topics = self._topics(batch)
        data = self._data(batch, topics)
        ids = self._ids(batch, topics)
        extras = self._extras(batch, topics)
        self._rows += batch.num_rows
        whole = pa.record_batch([topics, data, ids, extras], schema=STAGED)
        yield from _pieces(whole)

    def _topics(self, batch: pa.RecordBatch) -> pa.Array:
        if self._topic is not None:
            return pa.repeat(pa.scalar(self._topic, pa.string()), batch.num_rows)
        topics = _text(batch, "topic")
        for topic in pc.unique(topics).to_pylist():
            try:
                check_topic(topic)
            except InvalidInput as exc:
                at = pc.index(topics, pa.scalar(topic, pa.string())).as_py() if topic is not None else _null_at(topics)
                raise self._bad(type(exc), at, topics, exc.why, exc.next) from exc
        return topics

    def _data(self, batch: pa.RecordBatch, topics: pa.Array) -> pa.Array:
        column = _text(batch, "data")
        if column.null_count:
            raise self._bad(
                InvalidData,
                _null_at(column),
                topics,
                "data is null",
                "Filter such rows out, or use coalesce(col(\"data\"), lit('null')) to publish JSON null",
            )
        texts = column.to_pylist()
        if self._is_text:
            column = pa.array([_encode(text).decode() for text in texts], pa.string())
        else:
            self._check_json(texts, topics)
        longest = pc.max(pc.binary_length(column)).as_py() or 0
        if longest > DATA_BYTES_MAX:
            raise self._bad(
                TooLarge,
                pc.index(pc.binary_length(column), longest).as_py(),
                topics,
                f"{longest} bytes of JSON, the limit is {DATA_BYTES_MAX}",
                "Store it elsewhere and publish a reference",
            )
        return column

    def _check_json(self, texts: list[str], topics: pa.Array) -> None:
        at = 0
        try:
            for at, text in enumerate(texts):  # noqa: B007 - the handler says where it stopped
                _decode(text)
        except _BAD_JSON as exc:
            raise self._bad(
                InvalidData,
                at,
                topics,
                f"data is not JSON ({exc}): {_quoted(texts[at])}",
                'Make it JSON, or add .option("dataFormat", "text") to publish it as a JSON string',
            ) from exc

    def _ids(self, batch: pa.RecordBatch, topics: pa.Array) -> pa.Array:
        if not self._has_id:
            return pa.nulls(batch.num_rows, pa.string())
        ids = _text(batch, "id")
        lengths = pc.min_max(pc.utf8_length(ids))
        shortest, longest = lengths["min"].as_py(), lengths["max"].as_py()
        if shortest is not None and not 0 < shortest <= longest <= ID_CHARS_MAX:
            for at, id in enumerate(ids.to_pylist()):
                if id is not None:
                    self._draft(at, topics, {"id": id})
        return ids

    def _extras(self, batch: pa.RecordBatch, topics: pa.Array) -> pa.Array:
        """What most messages do without, as JSON; columns that say nothing in this batch cost nothing."""
        columns = {name: batch.column(name) for name in self._optional}
        said = {name: column for name, column in columns.items() if _says_something(name, column)}
        if not said:
            return pa.nulls(batch.num_rows, pa.string())
        names = [_OPTION_OF.get(name, name) for name in said]
        values = [self._values(name, column, topics) for name, column in said.items()]
        found: list[str | None] = []
        for at, row in enumerate(zip(*values, strict=True)):
            present = [value is not None for value in row]
            given = cast(PublishOptions, dict(compress(zip(names, row, strict=True), present)))
            extras = self._draft(at, topics, given).extras if given else None
            found.append(None if extras is None else _encode(extras).decode())
        return pa.array(found, pa.string())

    def _values(self, name: str, column: pa.Array, topics: pa.Array) -> list[Any]:
        try:
            values: list[Any] = column.to_pylist()
        except (ValueError, OverflowError) as exc:  # a time that no datetime can say
            raise self._bad(InvalidData, 0, topics, f"a value of {name} (here or below): {exc}", "") from exc
        if name == "headers":
            return [None if pairs is None else dict(pairs) for pairs in values]
        return values

    def _draft(self, at: int, topics: pa.Array, given: PublishOptions) -> Draft:
        try:
            return make_draft("", None, given, self._now_ms)
        except InvalidInput as exc:
            raise self._bad(type(exc), at, topics, exc.why.replace("from_", "from"), exc.next) from exc

    def _bad(self, kind: type[InvalidInput], at: int, topics: pa.Array, why: str, next: str) -> InvalidInput:
        hint = f"{next}. " if next else ""
        return kind(
            why,
            where=f"row {self._rows + at} of {self._place}, topic {_quoted(topics[at].as_py())}",
            next=f"{hint}Nothing of this batch was published",
        )


def drafts_of(staged: pa.RecordBatch, first_row: int, id_of_row: Callable[[int], str]) -> list[Draft]:
    """The messages of a staged piece; rows that were given no id get the one of their row."""
    topics, data, ids, extras = (column.to_pylist() for column in staged.columns)
    if None in ids:
        ids = [id_of_row(first_row + at) if id is None else id for at, id in enumerate(ids)]
    sizes = pc.binary_length(staged.column("data")).to_pylist()
    if staged.column("extras").null_count < staged.num_rows:
        extras = [None if text is None else _extras_of(text) for text in extras]
    return list(map(Draft, topics, data, sizes, ids, extras))


def _pieces(whole: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    sizes = pc.binary_length(whole.column("data")).to_pylist()
    start = taken = 0
    for at, size in enumerate(sizes):
        if at > start and (at - start >= STAGED_ROWS_MAX or taken + size > STAGED_BYTES_MAX):
            yield whole.slice(start, at - start)
            start, taken = at, 0
        taken += size
    if start < whole.num_rows:
        yield whole.slice(start)


def _text(batch: pa.RecordBatch, name: str) -> pa.Array:
    column = batch.column(name)
    return (
        column if pa.types.is_string(column.type) else column.cast(pa.string())
    )  # Spark can be told to send large ones


def _says_something(name: str, column: pa.Array) -> bool:
    if column.null_count == len(column):
        return False
    return name != "priority" or bool(pc.any(pc.not_equal(column, 0)).as_py())


def _null_at(column: pa.Array) -> int:
    return cast(int, pc.index(pc.is_null(column), True).as_py())


def _quoted(text: str | None) -> str:
    return repr(text) if text is None or len(text) <= QUOTED_CHARS_MAX else f"{text[:QUOTED_CHARS_MAX]!r}…"
