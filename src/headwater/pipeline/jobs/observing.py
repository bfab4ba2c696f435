"""Raw: what the log says about itself at a moment. Messages are its history already; how far behind everybody was, only
whoever looks from time to time can tell later.

These tables are small, so they are written here and not by Spark. Of a file they are read through APSW alone: this
process may have the log open, and a second SQLite library would drop its locks.
"""

from __future__ import annotations

from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from headwater.message.times import datetime_of
from headwater.pipeline.lake.lake import Lake, now_ms
from headwater.pipeline.lake.manifest import Change
from headwater.pipeline.schema import TABLE_SCHEMAS, arrow_schema
from headwater.pipeline.source.log import reading
from headwater.pipeline.source.tables import read_table
from headwater.ports.records import DeadLetter, DeadLetterQuery

LETTERS = "raw.dead_letters"
LETTERS_AT_ONCE = 1_000
MOMENTS = ("subscriptions", "topics", "retention")
FILES_MAX = 50  # of a table that grows by a file at each look; then they become one


def observe(lake: Lake, log: str) -> None:
    at_ms = now_ms()
    changes = [_added(lake, f"raw.{name}", _read(log, name, at_ms)) for name in MOMENTS]
    changes.append(("raw.timings", lake.write_arrow("raw.timings", _merged_timings(lake, log, at_ms)), None))
    known = lake.manifest.mark(LETTERS)
    letters = _new_dead_letters(log, known)
    changes.append(_added(lake, LETTERS, letters))
    lake.publish(changes, marks={LETTERS: pc.max(letters["id"]).as_py() or known})


def _new_dead_letters(log: str, known: int) -> pa.Table:
    """By their ids, which are never used twice: a letter that is purged or redriven later stays here."""
    schema = arrow_schema(TABLE_SCHEMAS["dead_letters"])
    found = [schema.empty_table()]
    with reading(log) as reader:
        while letters := reader.dead_letters(DeadLetterQuery(), known, LETTERS_AT_ONCE):
            found.append(pa.Table.from_pylist([_letter_row(letter) for letter in letters], schema=schema))
            known = letters[-1].id
    return pa.concat_tables(found)


def _letter_row(letter: DeadLetter) -> dict[str, Any]:
    message = letter.message
    return {
        **{name: getattr(letter, name) for name in letter.__struct_fields__},
        "seq": message.seq,
        "topic": message.topic,
        "type": message.type,
        "died_at": datetime_of(letter.died_ms),
        "message": msgspec.json.encode(message.to_json()).decode(),
    }


def _added(lake: Lake, table: str, now: pa.Table) -> Change:
    if len(lake.manifest.files(table)) < FILES_MAX:
        return table, lake.write_arrow(table, now), []
    return table, lake.write_arrow(table, pa.concat_tables([lake.arrow(table, now.schema), now])), None


def _merged_timings(lake: Lake, log: str, at_ms: int) -> pa.Table:
    """The log's counts only grow and are forgotten after a while: of two looks at a count the greater is the truth."""
    now = _read(log, "timings", at_ms)
    both = pa.concat_tables([lake.arrow("raw.timings", now.schema), now])
    merged = both.group_by(["subscription", "hour", "stage", "bucket"]).aggregate(
        [("observed_at", "max"), ("count", "max")]
    )
    renamed = {"observed_at_max": "observed_at", "count_max": "count"}
    return merged.rename_columns([renamed.get(name, name) for name in merged.column_names]).select(now.column_names)


def _read(log: str, table: str, at_ms: int) -> pa.Table:
    return pa.Table.from_batches(read_table(log, table, at_ms), schema=arrow_schema(TABLE_SCHEMAS[table]))
