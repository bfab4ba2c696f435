"""What follows from messages: silver, the quarantine, explicit ids, typed tables, sums by hour and day; and which
messages repeat an id.

Arrow in, Arrow out, one batch at a time, in Spark's Python tasks. A batch may be of any size: the tables of a whole
range are the same, however it is split.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, groupby
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from headwater.message import derived_id
from headwater.pipeline.columns import EXPLICIT_IDS_SCHEMA, GOLD_SCHEMAS, QUARANTINE_SCHEMA, TIME, TYPED_SCHEMA
from headwater.pipeline.logs import derived_ids
from headwater.pipeline.storage import DataFile, Storage, read_rows
from headwater.pipeline.types import WHOLE, Types, array, check, typed_arrays, typed_columns, typed_schema

PUSH_BYTES_MAX = 1 << 40  # sums of what a publisher invents would leave 64 bits
SEARCH_ROWS = 2_000_000
"""So many rows one task searches; fewer are searched without a task."""


class Derived(NamedTuple):
    silver: pa.RecordBatch
    """The messages that are right and not left out; the batch itself if all are."""
    quarantine: pa.RecordBatch
    explicit_ids: pa.RecordBatch
    """Of silver's rows."""
    typed: dict[str, pa.RecordBatch]
    """By table; only tables that get rows."""


class Deriver:
    """`drop` has the seqs to leave out of silver, as repeats of an id."""

    def __init__(self, types: Types, salt: int, drop: npt.ArrayLike = ()) -> None:
        self._types, self._salt = types, salt
        self._drop = np.asarray(drop, dtype=np.int64)

    def derive(self, batch: pa.RecordBatch) -> Derived:
        problems, values = check(self._types, batch["type"], batch["version"], batch["data"])
        kept = ~np.isin(batch["seq"].to_numpy(), self._drop)
        kept[list(problems)] = False
        silver = batch if kept.all() else batch.filter(pa.array(kept))
        return Derived(
            silver=silver,
            quarantine=_quarantine(batch, problems),
            explicit_ids=_explicit_ids(silver, self._salt),
            typed=self._typed(batch, kept, values),
        )

    def _typed(
        self, batch: pa.RecordBatch, kept: npt.NDArray[np.bool_], values: dict[str, dict[int, Any]]
    ) -> dict[str, pa.RecordBatch]:
        found = {}
        for type, by_row in values.items():
            if rows := [row for row in by_row if kept[row]]:
                columns = _rows(batch, TYPED_SCHEMA.names, rows).columns
                columns += typed_arrays(typed_columns(type, self._types), [by_row[row] for row in rows])
                schema = typed_schema(type, self._types)
                found[self._types.table_names[type]] = pa.RecordBatch.from_arrays(columns, schema=schema)
        return found


def _rows(batch: pa.RecordBatch, columns: Sequence[str], rows: Sequence[int]) -> pa.RecordBatch:
    return batch.select(list(columns)).take(pa.array(rows, pa.int64()))


def _quarantine(batch: pa.RecordBatch, problems: dict[int, str]) -> pa.RecordBatch:
    found = _rows(batch, [name for name in QUARANTINE_SCHEMA.names if name != "problem"], list(problems))
    found = found.append_column("problem", pa.array(problems.values(), pa.string()))
    return found.select(QUARANTINE_SCHEMA.names)


def _explicit_ids(messages: pa.RecordBatch, salt: int) -> pa.RecordBatch:
    """(id, topic, seq) of the messages whose publisher chose the id. Only these can repeat."""
    published_ms = pc.divide(pc.fill_null(messages["published_at"].cast(pa.int64()), 0), 1000)
    derived = derived_ids(published_ms, messages["seq"], salt)
    is_explicit = pc.fill_null(pc.not_equal(messages["id"], derived), False)
    return messages.select(EXPLICIT_IDS_SCHEMA.names).filter(is_explicit)


# --- sums -------------------------------------------------------------------------------------------------------------

_KEYS = {
    "volume": ("day", "hour", "topic", "type"),
    "traffic": ("day", "from", "to"),
    "replication": ("replica", "day"),
}
_ADDED = {"messages": "sum", "bytes": "sum", "pushes": "sum", "last_version": "max", "last_at": "max"}
_REPLICA = r"^replica\.([^.]+)\.(.+)$"
_ROWS_PENDING_MAX = 1 << 18


class Sums:
    """The sums of one task; `merged` adds those of several tasks, and what the gold tables have already."""

    def __init__(self) -> None:
        self._parts: dict[str, list[pa.Table]] = {name: [] for name in _KEYS}

    def add(self, published: pa.RecordBatch, silver: pa.RecordBatch) -> None:
        """Volume counts everything published, for what is quarantined was sent too, and takes its space."""
        found = {"volume": _volume(published), "traffic": _traffic(silver), "replication": _replication(silver)}
        for name, part in found.items():
            self._parts[name].append(merged(name, [part]))
            if sum(map(len, self._parts[name])) > _ROWS_PENDING_MAX:
                self._parts[name] = [merged(name, self._parts[name])]

    def tables(self) -> dict[str, pa.Table]:
        return {name: merged(name, parts) for name, parts in self._parts.items()}


def merged(name: str, parts: Sequence[pa.Table]) -> pa.Table:
    """One row for each key: what all rows with that key add up to, sorted by key."""
    schema, keys = GOLD_SCHEMAS[name], list(_KEYS[name])
    rows = pa.concat_tables([schema.empty_table(), *(part.select(schema.names).cast(schema) for part in parts)])
    sums = [(column, _ADDED[column]) for column in schema.names if column not in keys]
    found = rows.group_by(keys, use_threads=False).aggregate(sums).rename_columns([*keys, *(name for name, _ in sums)])
    return found.select(schema.names).sort_by([(key, "ascending") for key in keys])


def _volume(messages: pa.RecordBatch) -> pa.Table:
    hours = pc.floor_temporal(_in_utc(messages), unit="hour").cast(TIME)
    return _counted(messages, {"hour": hours, "topic": messages["topic"], "type": messages["type"]})


def _traffic(messages: pa.RecordBatch) -> pa.Table:
    named = messages.select(["published_at", "from", "to", "size"])
    named = named.filter(pc.or_(named["from"].is_valid(), named["to"].is_valid()))
    return _counted(named, {"from": named["from"], "to": named["to"]})


def _counted(messages: pa.RecordBatch, keys: dict[str, pa.Array]) -> pa.Table:
    sums = {"messages": np.ones(len(messages), dtype=np.int64), "bytes": pc.fill_null(messages["size"], 0)}
    return pa.table({"day": _in_utc(messages).cast(pa.date32()), **keys, **sums})


def _replication(messages: pa.RecordBatch) -> pa.Table:
    """Pushes of replicas, from the message that each new version makes on `replica.<ns>.<name>`. Any publisher may use
    such a topic: where `version` or `bytes` (moved over the wire) is missing, it is null."""
    is_of_a_replica = pc.fill_null(pc.match_substring_regex(messages["topic"], _REPLICA), False)
    found = messages.select(["topic", "published_at", "data"]).filter(is_of_a_replica)
    contents = [msgspec.json.decode(text) for text in found["data"].to_pylist()]
    pushes = [each if isinstance(each, dict) else {} for each in contents]
    sizes = array(WHOLE, [each.get("bytes") for each in pushes])
    is_possible = pc.and_(pc.greater_equal(sizes, 0), pc.less_equal(sizes, PUSH_BYTES_MAX))
    return pa.table(
        {
            "replica": pc.replace_substring_regex(found["topic"], _REPLICA, r"\1/\2"),
            "day": _in_utc(found).cast(pa.date32()),
            "pushes": np.ones(len(found), dtype=np.int64),
            "bytes": pc.if_else(is_possible, sizes, pa.scalar(None, pa.int64())),
            "last_version": array(WHOLE, [each.get("version") for each in pushes]),
            "last_at": found["published_at"],
        }
    )


def _in_utc(messages: pa.RecordBatch) -> pa.TimestampArray:
    """When they were published, without a time zone: so Arrow needs no time zone database."""
    return messages["published_at"].cast(pa.timestamp("us"))


# --- repeated ids -----------------------------------------------------------------------------------------------------
#
# Only explicit ids can repeat: an id that the log derives follows from the row itself. A slice has few ids compared to
# silver, so each task searches some files for them. A join by Spark SQL takes longer to start.

_NEW = np.int64(1 << 62)  # ranks what silver has before what is new


class Search(NamedTuple):
    """Rows of some files: those with one of these ids, or at one of these seqs."""

    storage: Storage
    table: str
    files: tuple[DataFile, ...]
    ids: pa.Array | None = None
    seqs: pa.Array | None = None


def searches(search: Search) -> list[Search]:
    """A search in parts that take about equally long, without the files that cannot hold such a seq."""
    files = list(search.files)
    if search.seqs is not None:
        seqs = np.sort(search.seqs.to_numpy(zero_copy_only=False))
        files = [
            file for file in files if np.searchsorted(seqs, file.seq_from) < np.searchsorted(seqs, file.seq_to, "right")
        ]
    begins = accumulate((file.rows for file in files), initial=0)
    parts = groupby(zip(files, begins, strict=False), key=lambda each: each[1] // SEARCH_ROWS)
    return [search._replace(files=tuple(file for file, _ in part)) for _, part in parts]


def find_rows(search: Search) -> pa.Table:
    """(id, topic, seq) of the rows."""
    found = [EXPLICIT_IDS_SCHEMA.empty_table()]
    for file in search.files:
        for rows in read_rows(search.storage, f"{search.table}/{file.path}", EXPLICIT_IDS_SCHEMA):
            if search.ids is not None:
                rows = rows.filter(pc.is_in(rows["id"], search.ids))
            if search.seqs is not None:
                rows = rows.filter(pc.is_in(rows["seq"], search.seqs))
            found.append(rows)
    return pa.concat_tables(found)


def named_seqs(new: pa.Table, salt: int) -> pa.Array:
    """The seqs in ids that this log derives: each may be the message that was published again; its own id and topic
    decide."""
    salt_and_variant = derived_id(0, salt, 0)[14:24]  # time, 7 and salt, the seq in the last twelve digits
    ids = new["id"].filter(
        pc.match_substring_regex(new["id"], f"^[0-9a-f]{{8}}-[0-9a-f]{{4}}-{salt_and_variant}[0-9a-f]{{12}}$")
    )
    return pa.array(sorted({int(id[-12:], 16) for id in ids.to_pylist()}), pa.int64())


def repeated_seqs(new: pa.Table, known: pa.Table, originals: pa.Table) -> npt.NDArray[np.int64]:
    """The seqs of `new`, sorted, whose id is at another seq of the same topic already.

    `new` are the explicit ids of the slice, `known` those that silver has from before it, `originals` rows of silver
    and of the slice that new ones may be copies of. Of an id on a topic the row that silver has stays, else the lowest
    seq.
    """
    if not new.num_rows:
        return np.empty(0, np.int64)
    rows = pa.concat_tables([known, new, originals])
    seqs = rows["seq"].to_numpy()
    is_new = np.arange(rows.num_rows) >= known.num_rows
    ranked = rows.select(["id", "topic"]).append_column("rank", pa.array(seqs + is_new * _NEW))
    first = ranked.group_by(["id", "topic"]).aggregate([("rank", "min")])
    joined = new.select(EXPLICIT_IDS_SCHEMA.names).join(first, keys=["id", "topic"], join_type="inner")
    found, ranks = joined["seq"].to_numpy(), joined["rank_min"].to_numpy()
    return np.unique(found[found != (ranks & (_NEW - 1))])
