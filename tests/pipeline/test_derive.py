"""What follows from a batch of messages: silver, quarantine, explicit ids, typed tables and sums."""

from __future__ import annotations

import gc
import itertools
import json
import random
import subprocess
import sys
from collections.abc import Iterable
from contextlib import nullcontext
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.errors import HeadwaterError
from headwater.message import derived_id
from headwater.pipeline.columns import (
    EXPLICIT_IDS_SCHEMA,
    GOLD_SCHEMAS,
    MESSAGE_SCHEMA,
    QUARANTINE_SCHEMA,
    TYPED_SCHEMA,
)
from headwater.pipeline.derive import Derived, Deriver, Sums, merged, named_seqs, repeated_seqs
from headwater.pipeline.logs import Range
from headwater.pipeline.run import Task, run_task
from headwater.pipeline.storage import Storage
from headwater.pipeline.types import RegisteredSchema, Types, typed_schema

SALT = 12_345
NO_TYPES = Types()
AT = datetime(2026, 11, 15, 10, 30, tzinfo=UTC)
TODAY, LONG_AGO = date(2026, 11, 15), date(2025, 1, 1)
ORDER_1 = {"type": "object", "required": ["sku"], "properties": {"sku": {"type": "string"}}}
ORDER_2 = {**ORDER_1, "properties": {"sku": {"type": "integer"}}}
ORDERS = Types((RegisteredSchema("order", 1, json.dumps(ORDER_1)), RegisteredSchema("order", 2, json.dumps(ORDER_2))))


def message(seq: int, **fields: Any) -> dict[str, Any]:
    at = fields.get("published_at", AT)
    own_id = derived_id(int(at.timestamp() * 1000) if at else 0, SALT, seq)
    return {"topic": "orders.new", "data": "{}", "size": 2, "published_at": AT, "id": own_id, **fields, "seq": seq}


def batch(*rows: dict[str, Any]) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist(list(rows), MESSAGE_SCHEMA)


def derive(*rows: dict[str, Any], types: Types = NO_TYPES, drop: Iterable[int] = ()) -> Derived:
    found = Deriver(types, SALT, np.array(list(drop), dtype=np.int64)).derive(batch(*rows))
    for table in (found.silver, found.quarantine, found.explicit_ids, *found.typed.values()):
        table.validate(full=True)
    assert found.silver.schema == MESSAGE_SCHEMA
    assert found.quarantine.schema == QUARANTINE_SCHEMA
    assert found.explicit_ids.schema == EXPLICIT_IDS_SCHEMA
    return found


def seqs(table: pa.RecordBatch | pa.Table) -> list[int]:
    return table["seq"].to_pylist()


def rows(table: pa.Table | pa.RecordBatch) -> list[tuple[Any, ...]]:
    return [tuple(row.values()) for row in table.to_pylist()]


def at(text: str) -> datetime:
    return datetime.fromisoformat(f"2026-11-{text}").replace(tzinfo=UTC)


class TestSilver:
    def test_messages_that_are_wrong_are_quarantined_with_the_reason(self) -> None:
        right = [
            message(1, data="null"),
            message(2, data='{"ü": "😀"}', type="unregistered", version=9, headers=[("a", "b")]),
            message(3, data='{"sku": "a"}', type="order", version=1),
            message(4, data='{"sku": 7}', type="order", version=2),
            message(5, data='{"a": 1, "a": 2}'),
        ]
        wrong = [
            (message(6, data='{"sku": 7}', type="order", version=1), '$.sku: 7 is not of type "string"'),
            (message(7, type="order", version=3), "version 3 of order is not registered; known: 1, 2"),
            (message(8, data="[NaN]"), "data is not JSON: JSON is malformed: invalid character (byte 1)"),
            (message(9, data='{"ü', type="order", version=1), "data is not JSON: Input data was truncated"),
            (message(10, data=None, topic=None, published_at=None, id=None, size=None), "there is no data"),
        ]
        found = derive(*right, *(row for row, _ in wrong), types=ORDERS)
        assert found.silver == batch(*right)
        assert found.quarantine == pa.RecordBatch.from_pylist(
            [{**row, "problem": problem} for row, problem in wrong], QUARANTINE_SCHEMA
        )

    def test_where_nothing_is_wrong_silver_is_the_batch_itself(self) -> None:
        given = batch(message(1), message(2, id="mine"))
        found = Deriver(Types(), SALT).derive(given)
        assert found.silver is given
        assert len(found.quarantine) == 0

    def test_repeats_are_left_out_of_everything_but_the_quarantine(self) -> None:
        order = {"type": "order", "version": 1, "data": '{"sku": "a"}'}
        given = [message(1, id="a", **order), message(2, id="a", **order), message(3, id="b", data="{")]
        found = derive(*given, types=ORDERS, drop=[3, 2, 99])
        assert found.silver == batch(given[0])
        assert seqs(found.explicit_ids) == seqs(found.typed["typed/order"]) == [1]
        assert seqs(found.quarantine) == [3]

    def test_ids_are_explicit_unless_this_log_derives_them_for_that_row(self) -> None:
        copied, foreign = derived_id(1_700_000_000_000, SALT, 255), derived_id(1_700_000_000_000, SALT + 1, 2)
        found = derive(
            message(1),
            message(2, id=foreign),
            message(255, id=copied),  # of its seq, but not of its time
            message(256, id=copied),
            message(4, id="x" * 20 + "000000000004"),
            message(5, id=None),
            message(6, id="ü" * 36),
            message(7, published_at=None),
            message(8, id=""),
        )
        explicit = [(foreign, 2), (copied, 255), (copied, 256), ("x" * 20 + "000000000004", 4), ("ü" * 36, 6), ("", 8)]
        assert rows(found.explicit_ids) == [(id, "orders.new", seq) for id, seq in explicit]

    def test_nothing_in_nothing_out(self) -> None:
        found = derive(types=ORDERS)
        assert [len(table) for table in found[:3]] == [0, 0, 0]
        assert found.typed == {}


class TestTyped:
    def test_a_typed_table_has_the_properties_of_all_versions(self) -> None:
        new = {
            "properties": {
                "id": {"type": "string"},
                "count": {"type": "integer"},
                "Count": {"type": "boolean"},
                "price": {"type": "number"},
                "at": {"type": "string", "format": "date-time"},
                "tags": {"type": "array", "items": {"type": "integer"}},
                "to": {"type": "object", "properties": {"city": {"type": "string"}, "zip": {}}},
                "a.b 'c' \"d\"": {"type": "integer"},
            }
        }
        old = {"properties": {"sku": {"type": "string"}, "price": {"type": "string"}, "it's": {"type": "boolean"}}}
        types = Types((RegisteredSchema("thing", 2, json.dumps(new)), RegisteredSchema("thing", 1, json.dumps(old))))
        full = {
            "id": "i",
            "count": 3.0,
            "Count": True,
            "price": 1.5,
            "at": "2026-11-15t12:30:00.250+02:00",
            "tags": [1, 2.0],
            "to": {"city": "Zürich", "zip": {"n": 8000}, "more": 1},
            "a.b 'c' \"d\"": 5,
            "unknown": 1,
        }
        given = [
            message(1, type="thing", version=1, data='{"sku": "s", "price": "9", "it\'s": false, "count": "no"}'),
            message(2, type="thing", version=2, data=json.dumps(full)),
            message(3, type="thing", version=2, data='{"count": 1e30, "to": {"zip": "8000"}}'),
            message(4, type="thing", version=2, data="[1]"),
            message(5, type="Thing"),
            message(6),
        ]
        found = derive(*given, types=types)
        assert list(found.typed) == ["typed/thing"]
        table = found.typed["typed/thing"]
        assert table.schema == typed_schema("thing", types)
        names = ["sku", "price", "it's", "data_id", "count", "Count_2", "at", "tags", "to", "a.b_'c'_\"d\""]
        assert table.schema.names == [*TYPED_SCHEMA.names, *names]
        base = [(row["seq"], row["id"], "orders.new", row["version"], AT) for row in given[:4]]
        nothing = (None,) * 10
        assert rows(table) == [
            (*base[0], "s", "9", False, *nothing[3:]),
            (
                *(*base[1], None, "1.5", None, "i", 3, True, AT.replace(microsecond=250_000), [1, 2]),
                *({"city": "Zürich", "zip": '{"n":8000}'}, 5),
            ),
            (*base[2], *nothing[:8], {"city": None, "zip": "8000"}, None),
            (*base[3], *nothing),
        ]


class TestSums:
    def test_volume_and_traffic_count_messages_and_bytes(self) -> None:
        late = datetime(2025, 1, 1, 23, 59, 59, 999000, tzinfo=UTC)
        silver = [
            message(1, type="a", size=10, **{"from": "shop", "to": "bank"}),
            message(2, type="a", size=5, published_at=at("15 10:59:59.999"), **{"from": "shop"}),
            message(3, type=None, size=1, to="bank"),
            message(4, topic="ü", size=7, published_at=at("15 11:00"), **{"from": "shop", "to": "bank"}),
            message(5, type="a", size=2, published_at=late, **{"from": "shop", "to": "bank"}),
            message(6, topic=None, size=None, published_at=None, **{"from": "Shop"}),
        ]
        wrong = message(7, size=3, to="nowhere", data="{")
        found = sums([batch(*silver, wrong)], [batch(*silver)])
        assert rows(found["volume"]) == [
            (LONG_AGO, datetime(2025, 1, 1, 23, tzinfo=UTC), "orders.new", "a", 1, 2),
            (TODAY, at("15 10:00"), "orders.new", "a", 2, 15),
            (TODAY, at("15 10:00"), "orders.new", None, 2, 4),
            (TODAY, at("15 11:00"), "ü", None, 1, 7),
            (None, None, None, None, 1, 0),
        ]
        assert rows(found["traffic"]) == [
            (LONG_AGO, "shop", "bank", 1, 2),
            (TODAY, "shop", "bank", 2, 17),
            (TODAY, "shop", None, 1, 5),
            (TODAY, None, "bank", 1, 1),
            (None, "Shop", None, 1, 0),
        ]
        assert rows(found["replication"]) == []

    def test_invented_sizes_of_pushes_do_not_wrap_the_sum(self) -> None:
        sizes = [2**63 - 1, 2**63 - 1, -5, 1.0, "7", True, 3]
        pushes = [message(n, topic="replica.a.b", data=json.dumps({"bytes": each})) for n, each in enumerate(sizes, 1)]
        silver = batch(*pushes)
        assert rows(sums([silver], [silver])["replication"])[0][:4] == ("a/b", TODAY, 7, 4)

    def test_replication_counts_versions_and_the_bytes_moved(self) -> None:
        topic = "replica.acme.orders.db"
        silver = batch(
            message(1, topic=topic, data='{"version": 7, "bytes": 4096, "size": 900000}'),
            message(2, topic=topic, data='{"version": 8, "bytes": 1e2}', published_at=at("15 12:00")),
            message(3, topic=topic, data='{"version": 9, "bytes": "many"}'),
            message(4, topic=topic, data='{"version": 3}', published_at=at("14 01:00")),
            message(5, topic="replica.ü.x", data="12"),
            message(6, topic="replica.acme", data='{"version": 1}'),
            message(7, topic="my.replica.acme.orders", data='{"version": 1}'),
            message(8, topic=None),
        )
        assert rows(sums([silver], [silver])["replication"]) == [
            ("acme/orders.db", date(2026, 11, 14), 1, None, 3, at("14 01:00")),
            ("acme/orders.db", TODAY, 3, 4196, 9, at("15 12:00")),
            ("ü/x", TODAY, 1, None, None, AT),
        ]

    def test_rows_of_the_gold_table_itself_are_added(self) -> None:
        whole = sums([batch(message(1), message(2))], [batch()])["volume"]
        gold = whole.select([*reversed(whole.column_names)])  # a partition column comes last
        assert rows(merged("volume", [gold, whole]))[0][-2:] == (4, 8)
        assert merged("volume", []).schema == GOLD_SCHEMAS["volume"]


HOURS = st.integers(0, 50).map(lambda hours: datetime.fromtimestamp(1_763_000_000 + 1800 * hours, UTC))
DATA = st.sampled_from(["{}", '{"sku": "s"}', '{"sku": 5}', "{", '{"version": 4, "bytes": 9}', '{"version": 2.0}', "7"])
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {
            "topic": st.sampled_from(["a", "b", "replica.n.x", "replica.n.y"]),
            "data": DATA,
            "size": st.none() | st.just(3),
        },
        optional={
            "id": st.sampled_from(["one", "two", derived_id(1_763_000_000_000, SALT, 1)]) | st.none(),
            "type": st.sampled_from(["order", "other"]),
            "version": st.sampled_from([1, 2, 3]),
            "from": st.sampled_from(["f", "g"]),
            "to": st.sampled_from(["f", "g"]),
            "published_at": st.none() | HOURS,
        },
    ),
    max_size=20,
)


@settings(max_examples=50)
@given(MESSAGES, st.lists(st.integers(0, 20), max_size=3), st.sets(st.integers(1, 20), max_size=3), st.randoms())
def test_the_tables_are_the_same_however_the_messages_are_split(
    published: list[dict[str, Any]], cuts: list[int], drop: set[int], chance: random.Random
) -> None:
    whole = batch(*(message(seq, **fields) for seq, fields in enumerate(published, 1)))
    ends = [0, *sorted(min(cut, len(whole)) for cut in cuts), len(whole)]
    parts = [whole.slice(begin, end - begin) for begin, end in itertools.pairwise(ends)]
    deriver = Deriver(ORDERS, SALT, pa.array(sorted(drop), pa.int64()))
    one, many = deriver.derive(whole), [deriver.derive(part) for part in parts]

    for place in range(3):
        assert together(each[place] for each in many) == pa.Table.from_batches([one[place]])
    typed = [each.typed["typed/order"] for each in many if each.typed]
    assert bool(typed) == bool(one.typed)
    if typed:
        assert together(typed) == pa.Table.from_batches([one.typed["typed/order"]])

    expected = sums([whole], [one.silver])
    partial = [sums([part], [each.silver]) for part, each in zip(parts, many, strict=True)]
    assert sums(parts, [each.silver for each in many]) == expected
    chance.shuffle(partial)
    for name, table in expected.items():
        table.validate(full=True)
        assert table.schema == GOLD_SCHEMAS[name]
        assert merged(name, [part[name] for part in partial]) == table


def test_sums_stay_small_while_they_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headwater.pipeline.derive._ROWS_PENDING_MAX", 3)
    parts = [batch(*(message(seq, topic=f"t{seq % 4}") for seq in range(begin, begin + 3))) for begin in (1, 4, 7, 10)]
    assert sums(parts, parts)["volume"]["messages"].to_pylist() == [3, 3, 3, 3]


def test_spark_and_delta_and_json_schema_are_not_imported() -> None:
    code = "import sys, headwater.pipeline.derive; print(*sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert "headwater.pipeline.types" in found
    assert not {"pyspark", "deltalake", "jsonschema_rs", "pandas"} & {*found}


def together(batches: Iterable[pa.RecordBatch]) -> pa.Table:
    return pa.Table.from_batches(batches).combine_chunks()


def sums(published: list[pa.RecordBatch], silver: list[pa.RecordBatch]) -> dict[str, pa.Table]:
    found = Sums()
    for one, other in zip(published, silver, strict=True):
        found.add(one, other)
    return found.tables()


Row = tuple[str, str, int]

AT_MS = 1_700_000_000_000


def own(seq: int) -> str:
    return derived_id(AT_MS, 5, seq)


def test_of_an_id_on_a_topic_one_row_stays() -> None:
    new = [
        (11, "a", "t", False),
        (12, "b", "t", True),  # silver has it
        (13, "a", "t", True),  # repeats 11
        (16, own(10), "t", True),  # published again under the id of 10, which is in this slice
        (17, own(3), "t", True),  # the same of one that silver has
        (18, own(98), "t", False),  # there is no 98
        (19, derived_id(AT_MS, 6, 11), "t", False),  # the id of another log's message 11
        (22, "A", "t", False),  # not a
        (23, "d", "t", False),  # silver has this very row: the slice comes a second time
        (24, "e", "t", True),  # silver has it, though from further on
        (25, "a", "u", False),  # on another topic than 11
        (26, "b", "u", False),  # silver has it on the other topic
        (27, own(10), "u", False),  # on another topic than 10, so not a copy of it
        (28, "a", "u", True),  # repeats 25
        (29, "f", "u", True),  # silver has it on this topic
        (30, own(10), "t", True),  # published a third time
        (31, own(40), "t", False),  # the log derives it for 40 only later
    ]
    known = [("b", "t", 2), ("d", "t", 23), ("e", "t", 77), ("f", "u", 4), ("b", "t", 1)]
    rows = ids(*((id, topic, seq) for seq, id, topic, _ in reversed(new)))
    assert named_seqs(rows, 5).to_pylist() == [3, 10, 40, 98]
    found = repeated_seqs(rows, ids(*known), ids((own(10), "t", 10), (own(40), "t", 40), (own(3), "t", 3)))
    assert found.dtype == "int64"
    assert found.tolist() == [seq for seq, _, _, is_repeated in new if is_repeated]


@pytest.mark.parametrize("rows", [[], [("a", "t", 1), ("b", "t", 2), ("a", "t", 3)]])
def test_known_ids_and_originals_may_be_absent(rows: list[Row]) -> None:
    assert repeated_seqs(ids(*rows), ids(), ids()).tolist() == [seq for _, _, seq in rows[2:]]


def ids(*rows: Row) -> pa.Table:
    columns = [list(column) for column in zip(*rows, strict=True)] if rows else [[], [], []]
    return pa.table(columns, schema=EXPLICIT_IDS_SCHEMA)


@pytest.mark.parametrize("was_enabled", [True, False])
@pytest.mark.parametrize("log", [None, "nowhere.db"])
def test_a_task_leaves_the_garbage_collector_as_it_was(tmp_path: Path, log: str | None, was_enabled: bool) -> None:
    """The processes of Spark run many tasks."""
    task = Task(Storage(str(tmp_path)), Range(0, 1), log, (), None)
    (gc.enable if was_enabled else gc.disable)()
    try:
        with nullcontext() if log is None else pytest.raises(HeadwaterError):
            run_task(task)
        assert gc.isenabled() is was_enabled
    finally:
        gc.enable()
