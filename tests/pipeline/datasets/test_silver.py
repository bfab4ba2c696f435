"""Silver on hand-made messages: checked, quarantined, deduplicated, typed."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import StringType, StructField, StructType

from headwater.message.model import derived_id
from headwater.pipeline.datasets import checked as checked_dataset
from headwater.pipeline.datasets import given_ids as given_ids_dataset
from headwater.pipeline.datasets import quarantine as quarantine_dataset
from headwater.pipeline.datasets import silver_messages as silver_dataset
from headwater.pipeline.datasets.checked import checked
from headwater.pipeline.datasets.given_ids import ORIGINALS_SCHEMA, given_ids, originals
from headwater.pipeline.datasets.quarantine import quarantine
from headwater.pipeline.datasets.silver_messages import silver_messages
from headwater.pipeline.datasets.typed import typed
from headwater.pipeline.datasets.types import RegisteredSchema, Types
from headwater.pipeline.schema import MESSAGE_SCHEMA

Frame = Callable[..., DataFrame]
Check = Callable[..., None]

AT = datetime(2026, 11, 15, 10, 30, tzinfo=UTC)
LONG_AGO = datetime(2025, 1, 1, 23, 59, 59, 999000, tzinfo=UTC)
ORDER_1 = {"type": "object", "required": ["sku"], "properties": {"sku": {"type": "string"}}}
ORDER_2 = {**ORDER_1, "properties": {"sku": {"type": "integer"}}}
ORDERS = Types((RegisteredSchema("order", 1, json.dumps(ORDER_1)), RegisteredSchema("order", 2, json.dumps(ORDER_2))))


def with_problems(messages: Frame, problems: dict[int, str], *rows: dict[str, Any]) -> DataFrame:
    known = [F.when(F.col("seq") == seq, F.lit(problem)) for seq, problem in problems.items()]
    return messages(*rows).withColumn("problem", F.coalesce(*known, F.lit(None).cast("string")))


def test_messages_are_checked(messages: Frame, check: Check) -> None:
    said: dict[int, tuple[dict[str, Any], str | None]] = {
        1: ({"data": "null"}, None),
        2: ({"data": '{"ü": "😀"}', "type": "unregistered", "version": 9, "headers": {"a": "b"}}, None),
        3: ({"data": '{"sku": "a"}', "type": "order", "version": 1}, None),
        4: ({"data": '{"sku": 7}', "type": "order", "version": 2}, None),
        5: ({"data": '{"sku": 7}', "type": "order", "version": 1}, '$.sku: 7 is not of type "string"'),
        6: (
            {"data": "{}", "type": "order", "version": 3},
            "version 3 of order is not registered; known: 1, 2",
        ),
        7: ({"data": "[NaN]"}, "data is not JSON: JSON is malformed: invalid character (byte 1)"),
        8: ({"data": '{"sku": "ü', "type": "order", "version": 1}, "data is not JSON: Input data was truncated"),
        9: ({"data": None, "topic": None, "published_at": None, "id": None, "size": None}, "there is no data"),
    }
    rows = [{"seq": seq, **fields} for seq, (fields, _) in said.items()]
    expected = [(*row, said[row.seq][1]) for row in messages(*rows).collect()]

    check(checked(messages(*rows), ORDERS), checked_dataset.SCHEMA, expected)


def test_the_quarantine_has_what_is_wrong_with_the_reason(messages: Frame, check: Check) -> None:
    wrong = {"seq": 2, "id": "mine", "topic": "bad", "type": "t", "version": 1, "data": "{ü", "size": 3}
    found = quarantine(with_problems(messages, {2: "why"}, {"seq": 1}, wrong))
    check(found, quarantine_dataset.SCHEMA, [(2, "mine", "bad", "t", 1, AT, "why", "{ü", 3)])


def test_silver_has_what_is_right_with_payload_and_place(messages: Frame, spark: SparkSession, check: Check) -> None:
    rows = [
        {"seq": 1, "data": '{"b": [1, "ü", null], "a": 1.0}', "headers": {"k": "v"}, "from": "shop"},
        {"seq": 2, "topic": "x" * 40 + ".y", "data": "null", "published_at": LONG_AGO},
        {"seq": 3, "topic": "ünï", "data": '{"a": 1, "a": 2}'},
        {"seq": 4, "data": "broken"},
    ]
    found = silver_messages(with_problems(messages, {4: "not JSON"}, *rows), known(spark))
    assert found.schema == silver_dataset.SCHEMA

    one, two, three = messages(*rows[:3]).collect()
    check(
        found.withColumn("payload", F.to_json("payload")),
        text_of("payload", silver_dataset.SCHEMA),
        [
            (*one, '{"a":1,"b":[1,"ü",null]}', date(2026, 11, 15), "orders"),
            (*two, "null", date(2025, 1, 1), "x" * 32),
            (*three, '"{\\"a\\": 1, \\"a\\": 2}"', date(2026, 11, 15), "ünï"),
        ],
    )


def test_days_are_those_of_utc_in_any_time_zone(messages: Frame, spark: SparkSession) -> None:
    spark.conf.set("spark.sql.session.timeZone", "Pacific/Auckland")
    try:
        found = silver_messages(with_problems(messages, {}, {"seq": 1, "published_at": LONG_AGO}), known(spark))
        assert found.select("day").collect()[0].day == date(2025, 1, 1)
    finally:
        spark.conf.set("spark.sql.session.timeZone", "UTC")


def test_an_id_stands_in_silver_once(messages: Frame, spark: SparkSession) -> None:
    derived = {seq: derived_id(1_700_000_000_000, 5, seq) for seq in (10, 20, 99)}
    ids = {
        10: derived[10],
        11: "a",
        12: "b",  # silver has it
        13: "a",  # repeats 11
        14: "c",  # wrong: the next one of that id is the first that is right
        15: "c",
        16: derived[10],  # published again under the id of 10, which is in this input
        17: derived[99],  # again, of one that silver has
        18: derived_id(1_700_000_000_000, 6, 10),  # the id of another log's message 10
        19: None,
        20: derived[20],
        21: None,
        22: "A",  # not a
        23: "d",  # silver has this very row: the input comes a second time
        24: "e",  # silver has it, though from further on
    }
    elsewhere = {
        25: "a",  # the id of 11, on another topic
        26: "b",  # silver has it, on the other topic
        27: derived[10],  # given on another topic, so no copy of 10
        28: "a",  # repeats 25
        29: "f",  # silver has it on this topic
    }
    rows = [{"seq": seq, "id": id} for seq, id in ids.items()]
    rows += [{"seq": seq, "id": id, "topic": "a.x"} for seq, id in elsewhere.items()]
    found = silver_messages(
        with_problems(messages, {14: "wrong"}, *reversed(rows)),
        known(
            spark,
            *((id, "orders.new", seq) for id, seq in (("b", 2), (derived[99], 3), ("d", 23), ("e", 77))),
            ("f", "a.x", 4),
        ),
    )

    expected = [10, 11, 15, 18, 19, 20, 21, 22, 23, 25, 26, 27]
    assert sorted(row.seq for row in found.select("seq").collect()) == expected


def test_given_ids_are_those_that_do_not_follow_from_the_row(messages: Frame, check: Check) -> None:
    copied = derived_id(1_700_000_000_000, 5, 255)
    found = messages(
        {"seq": 1},
        {"seq": 2, "id": "mine"},
        {"seq": 255, "id": copied},
        {"seq": 256, "id": copied},
        {"seq": 4, "id": "x" * 20 + "000000000004"},
        {"seq": 5, "id": None},
    )
    given = [("mine", 2), (copied, 256), ("x" * 20 + "000000000004", 4)]
    check(given_ids(found), given_ids_dataset.SCHEMA, [(id, "orders.new", seq) for id, seq in given])
    check(originals(found), ORIGINALS_SCHEMA, [(255,)])


def test_silver_survives_parquet_and_arrow(messages: Frame, spark: SparkSession, tmp_path: Path) -> None:
    rows = [{"seq": 1, "data": '{"n": 1.5, "ü": [null]}'}, {"seq": 2, "data": '{"a": 1, "a": 2}'}]
    path = str(tmp_path / "silver")
    silver_messages(with_problems(messages, {}, *rows), known(spark)).write.partitionBy("day").parquet(path)

    found = spark.read.schema(silver_dataset.SCHEMA).parquet(path).orderBy("seq").select("payload")

    assert [row.payload.toPython() for row in found.collect()] == [{"n": 1.5, "ü": [None]}, '{"a": 1, "a": 2}']
    assert found.toArrow().num_rows == 2


NEW = {
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
OLD = {"properties": {"sku": {"type": "string"}, "price": {"type": "string"}, "it's": {"type": "boolean"}}}
THINGS = Types((RegisteredSchema("thing", 2, json.dumps(NEW)), RegisteredSchema("thing", 1, json.dumps(OLD))))
THING_COLUMNS = (
    "seq bigint, id string, topic string, version bigint, published_at timestamp, "
    "sku string, price string, `it's` boolean, data_id string, count bigint, Count_2 boolean, at timestamp, "
    "tags array<bigint>, to struct<city: string, zip: string>, `a.b 'c' \"d\"` bigint"
)


def test_a_typed_table_has_the_properties_of_all_versions(messages: Frame, frame: Frame, check: Check) -> None:
    new = {
        "id": "i",
        "count": 3.0,
        "Count": True,
        "price": 1.5,
        "at": "2026-11-15t12:30:00.250+02:00",
        "tags": [1, 2.0, None],
        "to": {"city": "Zürich", "zip": {"n": 8000}, "more": 1},
        "a.b 'c' \"d\"": 5,
        "unknown": 1,
    }
    huge = {"count": 10**30, "price": None, "tags": "no array", "at": "not a time", "to": {"zip": "8000"}}
    silver = messages(
        {"seq": 1, "type": "thing", "version": 1, "data": '{"sku": "s", "price": "9", "it\'s": false}'},
        {"seq": 2, "type": "thing", "version": 2, "data": json.dumps(new)},
        {"seq": 3, "type": "thing", "version": 2, "data": json.dumps(huge)},
        {"seq": 4, "type": "thing", "data": "[1]"},
        {"seq": 5, "type": "Thing", "data": "{}"},
        {"seq": 6, "data": "{}"},
    ).withColumn("payload", F.try_parse_json("data"))
    ids = {row.seq: row.id for row in silver.collect()}
    nothing = (None,) * 10
    check(
        typed(silver, "thing", THINGS),
        frame(THING_COLUMNS, []).schema,
        [
            (1, ids[1], "orders.new", 1, AT, "s", "9", False, *nothing[3:]),
            (
                *(2, ids[2], "orders.new", 2, AT, None, "1.5", None, "i", 3, True),
                datetime(2026, 11, 15, 10, 30, 0, 250000, tzinfo=UTC),
                *([1, 2, None], ("Zürich", '{"n":8000}'), 5),
            ),
            (3, ids[3], "orders.new", 2, AT, *nothing[:8], (None, "8000"), None),
            (4, ids[4], "orders.new", None, AT, *nothing),
        ],
    )


def test_nothing_in_nothing_out(messages: Frame, spark: SparkSession) -> None:
    nothing = checked(messages(), ORDERS)
    silver = silver_messages(nothing, known(spark))
    tables = (quarantine(nothing), silver, given_ids(silver), typed(silver, "thing", THINGS))
    assert functools.reduce(DataFrame.union, [table.select("seq") for table in tables]).collect() == []
    assert typed(silver, "no such type", THINGS).columns == ["seq", "id", "topic", "version", "published_at"]


def known(spark: SparkSession, *rows: tuple[str, str, int]) -> DataFrame:
    return spark.createDataFrame(list(rows), given_ids_dataset.SCHEMA)


def text_of(column: str, schema: StructType) -> StructType:
    return StructType([StructField(each.name, StringType()) if each.name == column else each for each in schema])


def test_the_schema_of_silver_begins_with_that_of_messages() -> None:
    assert silver_dataset.SCHEMA.fields[: len(MESSAGE_SCHEMA)] == MESSAGE_SCHEMA.fields
