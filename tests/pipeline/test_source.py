"""The data source `headwater`: options, filters, the offsets of a stream as Spark asks for them, and Spark itself."""

from __future__ import annotations

import json
import logging
import pickle
import random
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from postgres_server import PostgresServer
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.datasource import (
    EqualNullSafe,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    InputPartition,
    IsNotNull,
    IsNull,
    LessThan,
    LessThanOrEqual,
    Not,
    StringContains,
    StringStartsWith,
)
from pyspark.sql.functions import spark_partition_id
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows
from pyspark.sql.types import StructType
from small_logs import new_log, prune, put

import headwater
from headwater import Log, ManualClock
from headwater.errors import InvalidOptionError, LeaseLostError, SubscriptionError
from headwater.formats import TIME_MS_MAX
from headwater.pipeline.columns import COLUMNS, MESSAGE_SCHEMA, TABLE_SCHEMAS, spark_schema
from headwater.pipeline.logs import Range, read_range
from headwater.pipeline.source import HeadwaterDataSource, MessagesStreamReader, SourceOptions, push

# --- options ----------------------------------------------------------------------------------------------------------


def read(**options: str) -> SourceOptions:
    return SourceOptions({"path": "/logs/events.db", **options})


def test_names_are_read_in_any_case() -> None:
    options = read(STARTINGSEQ="5", endingseq="9", MinPartitions="3", failondataloss="FALSE", Table="Dead_Letters")
    assert (options.starting_seq, options.ending_seq, options.partitions_min) == (5, 9, 3)
    assert (options.fail_on_data_loss, options.table) == (False, "dead_letters")


def test_without_options_everything_is_read() -> None:
    options = read()
    assert (options.path, options.table, options.patterns) == ("/logs/events.db", "messages", ())
    assert (options.starting_seq, options.ending_seq, options.fail_on_data_loss) == (0, None, True)
    assert vars(read(checkpointLocation="/c", queryName="q", mergeSchema="true")) == vars(options), "Spark has its own"
    assert "events.db" not in repr(options), "a path may hold a password"


def test_topics_are_one_pattern_or_several() -> None:
    assert [pattern.text for pattern in read(topics="orders.>, pay.* ,orders.>").patterns] == ["orders.>", "pay.*"]


def test_a_time_is_iso_or_milliseconds() -> None:
    assert read(startingTimestamp="1700000000000").starting_ms == 1_700_000_000_000
    assert read(startingTimestamp="2023-11-14T22:13:20Z").starting_ms == 1_700_000_000_000
    assert read(startingTimestamp="2023-11-14T23:13:20.5+01:00").starting_ms == 1_700_000_000_500


@pytest.mark.parametrize(
    ("options", "where", "output"),
    [
        ({"topics": "orders.*.>"}, "topics", "do not go together"),
        ({"topics": "orders.>,"}, "topics", "empty"),
        ({"startingSeq": "-1"}, "startingSeq", "earliest, latest or a seq"),
        ({"startingSeq": "1", "startingTimestamp": "1"}, "startingTimestamp", "Give one of them"),
        ({"startingTimestamp": "2023-11-14T22:13:20"}, "startingTimestamp", "20Z if UTC is meant"),
        ({"startingTimestamp": "yesterday"}, "startingTimestamp", "milliseconds since 1970"),
        ({"endingSeq": "many"}, "endingSeq", "whole number"),
        ({"maxMessagesPerTrigger": "0"}, "maxMessagesPerTrigger", "at least 1"),
        ({"minPartitions": "100000"}, "minPartitions", "at most 10000"),
        ({"failOnDataLoss": "maybe"}, "failOnDataLoss", "true or false"),
        ({"subscription": "a b"}, "subscription", "cannot name a subscription"),
        ({"table": "message"}, "table", "dead_letters"),
        ({"startingSeqs": "1"}, "startingseqs", "Did you mean startingSeq?"),
        ({"topic": "a"}, "topic", "Did you mean topics?"),
        ({"maxMessagePerTrigger": "1"}, "maxmessagepertrigger", "Did you mean maxMessagesPerTrigger?"),
    ],
)
def test_what_makes_no_sense_is_refused(options: dict[str, Any], where: str, output: str) -> None:
    with pytest.raises(InvalidOptionError) as refusal:
        read(**options)
    assert refusal.value.where == where
    assert output in str(refusal.value)


# --- filters ----------------------------------------------------------------------------------------------------------

BASE = datetime(2026, 1, 1, tzinfo=UTC)
BASE_MS = int(BASE.timestamp() * 1000)
TOPICS: list[str | bytes] = ["a", "a.b", "ab", "é.x", "é", "a\x7fb", b"a\x7f\x80", b"a\xff", "z\U0010ffff", "日本"]

COMPARISONS: dict[type[Filter], Callable[[Any, Any], bool]] = {
    EqualTo: lambda a, b: a == b,
    EqualNullSafe: lambda a, b: a == b,
    GreaterThan: lambda a, b: a > b,
    GreaterThanOrEqual: lambda a, b: a >= b,
    LessThan: lambda a, b: a < b,
    LessThanOrEqual: lambda a, b: a <= b,
    StringStartsWith: lambda a, b: a.startswith(b),
    In: lambda a, b: a in b,
}
ORDERED = [EqualTo, EqualNullSafe, GreaterThan, GreaterThanOrEqual, LessThan, LessThanOrEqual]
TEXTS = st.sampled_from(["", "a", "a.", "ab", "é", "a\x7f", "z", "\U0010ffff", "日", "x' OR 1=1 --"]) | st.text(
    max_size=3
)
MOMENTS = st.integers(-2_500, 6_500).map(lambda us: BASE + timedelta(microseconds=us)) | st.datetimes(
    timezones=st.just(UTC)
)
SEQS = st.integers(-3, 14)
FILTERS = (
    st.builds(lambda kind, value: kind(("seq",), value), st.sampled_from(ORDERED), SEQS)
    | st.builds(lambda value: In(("seq",), value), st.lists(SEQS | st.none(), max_size=4).map(tuple))
    | st.builds(lambda kind, value: kind(("topic",), value), st.sampled_from([EqualTo, StringStartsWith]), TEXTS)
    | st.builds(lambda value: In(("topic",), value), st.lists(TEXTS | st.none(), max_size=4).map(tuple))
    | st.builds(lambda kind, value: kind(("published_at",), value), st.sampled_from(ORDERED), MOMENTS)
    | st.sampled_from([IsNotNull(("seq",)), IsNotNull(("topic",)), IsNotNull(("published_at",))])
)


MixedLog = tuple[str, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def mixed_log(tmp_path_factory: pytest.TempPathFactory) -> MixedLog:
    return filled(new_log(tmp_path_factory.mktemp("pushdown") / "log.db"), TOPICS)


@pytest.fixture(scope="module")
def mixed_log_in_postgres(postgres: PostgresServer) -> MixedLog:
    path = postgres.new_database()
    headwater.open(path, maintenance_interval=None).close()
    return filled(path, [topic for topic in TOPICS if isinstance(topic, str)])  # it has no text that is no UTF-8


def filled(path: str, topics: list[str | bytes]) -> MixedLog:
    times = [BASE_MS + n for n in range(-2, len(topics) - 4)] + [-5, TIME_MS_MAX + 7]
    rows = [
        {"topic": topic, "data": "1", "published_at": at, "checked": 2} for topic, at in zip(topics, times, strict=True)
    ]
    put(path, rows)
    found = pa.Table.from_batches(read_range(path, 0, 100)).to_pylist()
    assert len(found) == len(topics)
    return path, found


def keeps(filter: Filter, row: dict[str, Any]) -> bool:
    if isinstance(filter, IsNotNull):
        return row[filter.attribute[0]] is not None
    value: Any = filter.value  # type: ignore[attr-defined]
    return COMPARISONS[type(filter)](row[filter.attribute[0]], value)  # type: ignore[attr-defined]


@settings(max_examples=80, deadline=None)
@given(st.lists(FILTERS, min_size=1, max_size=3))
def test_what_is_taken_and_what_is_left_is_what_python_keeps(mixed_log: MixedLog, filters: list[Filter]) -> None:
    check_filters(mixed_log, filters)


@settings(max_examples=10, deadline=None)  # each of them connects anew
@given(st.lists(FILTERS, min_size=2, max_size=5))
def test_in_postgres_too(mixed_log_in_postgres: MixedLog, filters: list[Filter]) -> None:
    check_filters(mixed_log_in_postgres, filters[:1])
    check_filters(mixed_log_in_postgres, filters)


def check_filters(log: MixedLog, filters: list[Filter]) -> None:
    path, rows = log
    pushed, unhandled = push(filters)
    read = [row for batch in read_range(path, 0, 100, condition=pushed) for row in batch.to_pylist()]
    left = [row["seq"] for row in read if all(keeps(filter, row) for filter in unhandled)]
    assert left == [row["seq"] for row in rows if all(keeps(filter, row) for filter in filters)]


def test_the_filters_of_the_issue_are_taken() -> None:
    filters: list[Filter] = [
        GreaterThan(("seq",), 5),
        LessThanOrEqual(("seq",), 9),
        In(("seq",), (6, 8)),
        EqualTo(("topic",), "a"),
        In(("topic",), ("a", "b")),
        StringStartsWith(("topic",), "a"),
        GreaterThanOrEqual(("published_at",), BASE),
        IsNotNull(("seq",)),
    ]
    pushed, unhandled = push(filters)
    assert unhandled == []
    assert pushed.seqs == (5, 8)


def test_what_sql_does_not_mean_exactly_is_left_to_spark() -> None:
    left: list[Filter] = [
        EqualTo(("topic",), "a\ufffd"),
        EqualTo(("type",), "a"),
        EqualTo(("headers", "a"), "a"),
        EqualTo(("published_at",), datetime(2026, 1, 1)),
        EqualTo(("seq",), None),
        EqualTo(("seq",), True),
        In(("seq",), tuple(range(10_000))),
        IsNotNull(("type",)),
        IsNull(("seq",)),
        Not(EqualTo(("seq",), 1)),
        StringContains(("topic",), "a"),
    ]
    assert push(left)[1] == left


def test_what_a_user_writes_is_bound_never_part_of_the_sql() -> None:
    evil = "x' OR 1=1 --"
    pushed, _ = push([EqualTo(("topic",), evil), StringStartsWith(("topic",), evil)])
    assert evil not in pushed.sql
    assert set(pushed.params) == {evil}


# --- offsets of a stream ----------------------------------------------------------------------------------------------

ALL = ReadAllAvailable()


@pytest.fixture
def path(any_log: str) -> str:
    return any_log


@pytest.fixture
def log(path: str) -> Iterator[Log]:
    with headwater.open(path, maintenance_interval=None, durability="relaxed") as opened:
        opened.publish_many([("a.x" if n % 2 else "b", n) for n in range(1, 21)])
        yield opened


@pytest.fixture
def stream(path: str) -> Iterator[Any]:
    made: list[MessagesStreamReader] = []

    def make(**options: str) -> MessagesStreamReader:
        given = {"path": path, "subscription": "lake", **options}
        made.append(MessagesStreamReader(SourceOptions(given), COLUMNS))
        return made[-1]

    yield make
    for each in made:
        each.stop()


@pytest.mark.parametrize(
    ("options", "seq"),
    [({}, 0), ({"startingSeq": "earliest"}, 0), ({"startingSeq": "latest"}, 20), ({"startingSeq": "7"}, 6)],
)
def test_a_new_query_starts_at_its_options(log: Log, stream: Any, options: dict[str, str], seq: int) -> None:
    assert stream(**options).initialOffset() == {"seq": seq}
    assert log.subscription("lake").position == seq


@pytest.mark.parametrize(
    ("at", "seq"),
    [("1700000000000", 0), ("1700000000001", 1), ("2023-11-14T22:13:21Z", 1), ("1700000001001", 2), ("0", 0)],
)
def test_a_time_is_the_first_message_at_or_after_it(path: str, stream: Any, at: str, seq: int) -> None:
    clock = ManualClock(1_700_000_000_000)
    with headwater.open(path, maintenance_interval=None, durability="relaxed", clock=clock) as log:
        log.publish("a", 1)
        clock.advance(1)
        log.publish("a", 2)
        assert stream(startingTimestamp=at).initialOffset() == {"seq": seq}


def test_a_limit_counts_messages_that_match(log: Log, stream: Any) -> None:
    reader = stream(topics="a.*", maxMessagesPerTrigger="3")
    assert reader.getDefaultReadLimit() == ReadMaxRows(3)
    start, ends = reader.initialOffset(), []
    while (end := reader.latestOffset(start, ReadMaxRows(3))) != start:
        ends.append(end["seq"])
        start = end
    assert ends == [5, 11, 17, 20]
    assert reader.reportLatestOffset() == {"seq": 20}


def test_available_now_ends_at_what_was_there(log: Log, stream: Any) -> None:
    reader = stream()
    reader.prepareForTriggerAvailableNow()
    log.publish("a.x", "later")
    assert reader.latestOffset({"seq": 0}, ALL) == {"seq": 20}
    assert reader.latestOffset({"seq": 20}, ALL) == {"seq": 20}
    assert reader.reportLatestOffset() == {"seq": 21}


def test_the_position_follows_batch_by_batch(log: Log, stream: Any) -> None:
    reader = stream()
    reader.initialOffset()
    reader.latestOffset({"seq": 0}, ReadMaxRows(8))
    reader.partitions({"seq": 0}, {"seq": 8})
    assert (log.subscription("lake").position, log.subscription("lake").in_flight) == (0, 8)
    reader.latestOffset({"seq": 8}, ReadMaxRows(8))
    assert (log.subscription("lake").position, log.subscription("lake").in_flight) == (8, 0)
    reader.stop()
    assert log.subscription("lake").holder is None


def test_a_second_query_of_the_same_name_takes_over(log: Log, stream: Any) -> None:
    first, second = stream(), stream()
    first.initialOffset()
    second.latestOffset({"seq": 0}, ALL)
    with pytest.raises(LeaseLostError):
        first.partitions({"seq": 0}, {"seq": 20})


def test_what_retention_deleted_before_it_was_read_fails_the_query(log: Log, stream: Any) -> None:
    reader = stream(topics="a.>")
    reader.initialOffset()
    prune(log, max_count=6)
    with pytest.raises(SubscriptionError, match=r"7 messages: 1 to 13.*failOnDataLoss=false"):
        reader.latestOffset({"seq": 0}, ALL)
    reader.stop()
    with pytest.raises(SubscriptionError, match="7 messages"):
        stream(topics="a.>").partitions({"seq": 0}, {"seq": 20})


def test_or_is_recorded_and_passed_over(log: Log, stream: Any, caplog: pytest.LogCaptureFixture) -> None:
    stream(topics="a.>").initialOffset()
    prune(log, max_count=6)
    with caplog.at_level(logging.WARNING, "headwater.pipeline"):
        reader = stream(topics="a.>", failOnDataLoss="false")
        assert reader.latestOffset({"seq": 0}, ALL) == {"seq": 20}
    assert "7 messages: 1 to 13" in caplog.text
    assert log.subscription("lake").gaps == 7
    reader.stop()
    assert stream(topics="a.>").latestOffset({"seq": 0}, ALL) == {"seq": 20}, "the position was reported once"


def test_what_others_lose_is_no_loss_of_the_stream(log: Log, stream: Any) -> None:
    reader = stream(topics="a.x,c.>")
    reader.initialOffset()
    prune(log, "b", max_count=0)
    assert reader.latestOffset({"seq": 0}, ALL) == {"seq": 20}


def test_a_checkpoint_below_the_position_finds_what_was_deleted_in_between(log: Log, stream: Any) -> None:
    reader = stream()
    reader.latestOffset({"seq": 15}, ALL)
    reader.stop()
    prune(log, max_count=10)
    with pytest.raises(SubscriptionError, match="8 messages: 3 to 10"):
        stream().latestOffset({"seq": 2}, ALL)
    assert stream(subscription="another").latestOffset({"seq": 12}, ALL) == {"seq": 20}
    with pytest.raises(SubscriptionError, match="1 to 10"):
        stream(subscription="a-third").latestOffset({"seq": 0}, ALL)


def test_an_explicit_start_below_what_was_deleted_is_refused(log: Log, stream: Any) -> None:
    prune(log, max_count=10)
    with pytest.raises(InvalidOptionError, match="8 messages: 3 to 10"):
        stream(startingSeq="3").initialOffset()
    assert stream(startingSeq="3", failOnDataLoss="false").initialOffset() == {"seq": 2}
    assert stream(startingSeq="11").initialOffset() == {"seq": 10}
    assert stream().initialOffset() == {"seq": 0}


def test_a_checkpoint_beyond_the_end_of_the_log_is_not_its_own(log: Log, stream: Any) -> None:
    with pytest.raises(SubscriptionError, match="stands at seq 21, and the log ends at 20"):
        stream().latestOffset({"seq": 21}, ALL)
    assert stream().latestOffset({"seq": 20}, ALL) == {"seq": 20}


def test_a_new_query_does_not_inherit_the_losses_of_an_old_one(log: Log, stream: Any) -> None:
    stream().initialOffset()
    prune(log, max_count=6)
    reader = stream()
    assert reader.initialOffset() == {"seq": 0}
    assert reader.latestOffset({"seq": 0}, ALL) == {"seq": 20}


def test_a_task_reads_its_range_each_time_alike_and_notices_what_went_missing(log: Log, stream: Any) -> None:
    reader = stream(topics="a.>")
    reader.initialOffset()
    parts = reader.partitions({"seq": 4}, {"seq": 20})
    assert [part.value for part in parts] == [Range(4, 20)]
    reader.stop()
    task = pickle.loads(pickle.dumps(reader))
    log.close()  # another process reads in Spark; here it is this one, which must not hold the file twice
    once = [row for batch in task.read(parts[0]) for row in batch.to_pylist()]
    again = [row for batch in task.read(parts[0]) for row in batch.to_pylist()]
    assert [row["seq"] for row in once] == [5, 7, 9, 11, 13, 15, 17, 19]
    assert once == again
    with headwater.open(task._options.path, maintenance_interval=None) as reopened:
        prune(reopened, max_count=2)
    with pytest.raises(SubscriptionError, match="before they were read"):
        list(task.read(parts[0]))
    assert len(list(task.read(InputPartition(Range(18, 20))))) == 1, "what is whole stays readable"


# --- in Spark ---------------------------------------------------------------------------------------------------------

MESSAGES = 12_000


def some_messages(count: int, seed: int) -> list[dict[str, Any]]:
    """Messages of all kinds, each seed its own."""
    choose = random.Random(seed)
    alphabet = 'abc "\\\n\x00éß日本\U0001f600'
    text = lambda: "".join(choose.choices(alphabet, k=choose.randrange(12)))  # noqa: E731
    deep: Any = 1
    for _ in range(60):
        deep = [deep] if choose.random() < 0.5 else {text(): deep}
    rows: list[dict[str, Any]] = []
    for n in range(count):
        row: dict[str, Any] = {
            "topic": choose.choice(["orders.new", "orders.paid", "orders.é.x", "metrics", "日本.a"]),
            "data": json.dumps({"n": n, "text": text()}, ensure_ascii=choose.random() < 0.5),
            "published_at": 1_700_000_000_000 + n * 250,
        }
        if choose.random() < 0.02:
            row |= {"id": f"id-{n}", "type": text(), "version": n, "from": text(), "to": text(), "priority": n % 7}
            row |= {"headers": json.dumps({text(): text(), "n": n, "deep": deep}), "deliver_at": n, "expires_at": n}
        rows.append(row)
    rows[7]["data"] = json.dumps(text() + "x" * 1024 * 1024)
    rows[8]["data"] = json.dumps(deep)
    rows[9] |= {"topic": b"bad.\xff", "checked": 2}
    return rows


@pytest.fixture(scope="module")
def spark_log(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = new_log(tmp_path_factory.mktemp("source") / "events of spark.db")
    put(path, some_messages(MESSAGES, 4))
    return path


def load(spark: SparkSession, path: str, **options: str) -> DataFrame:
    return spark.read.format("headwater").options(**options).load(path)


def test_a_batch_is_the_same_rows_as_reading_the_log(spark: SparkSession, spark_log: str) -> None:
    frame = load(spark, spark_log, minPartitions="2")
    assert frame.schema == spark_schema(MESSAGE_SCHEMA)
    found = frame.toArrow().sort_by("seq")
    assert found.num_rows == MESSAGES
    assert found.to_pylist() == pa.Table.from_batches(read_range(spark_log, 0, MESSAGES)).to_pylist()
    assert frame.select(spark_partition_id()).distinct().count() == 2


def source(path: str, **options: str) -> HeadwaterDataSource:
    return HeadwaterDataSource({"path": path, **options})


def rows_read(path: str, schema: StructType, **options: str) -> list[dict[str, Any]]:
    """As Spark reads, without it."""
    reader = source(path, **options).reader(schema)
    return [row for part in reader.partitions() for batch in reader.read(part) for row in batch.to_pylist()]


def test_the_options_choose_what_is_read(spark_log: str) -> None:
    asked = {"topics": "orders.*,日本.>", "startingTimestamp": "1700000001000", "endingSeq": "500"}
    found = rows_read(spark_log, spark_schema(MESSAGE_SCHEMA), **asked)
    rows = [row for batch in read_range(spark_log, 4, 500) for row in batch.to_pylist()]
    assert found == [row for row in rows if row["topic"] in ("orders.new", "orders.paid", "日本.a")]


def test_columns_are_chosen_with_a_schema(spark_log: str) -> None:
    chosen = StructType().add("topic", "string").add("seq", "long")
    assert [(list(row), row["seq"]) for row in rows_read(spark_log, chosen, endingSeq="2")] == [
        (["topic", "seq"], 1),
        (["topic", "seq"], 2),
    ]
    with pytest.raises(InvalidOptionError, match="there is no column 'payload'"):
        source(spark_log).reader(StructType().add("payload", "string"))
    with pytest.raises(InvalidOptionError, match="seq is bigint, not string"):
        source(spark_log).reader(StructType().add("seq", "string"))


FILTERS = [
    "seq > 100 and seq <= 250 and topic in ('orders.new', 'nothing')",
    "topic like 'orders.é%' and size < 60 and published_at < timestamp'2023-11-14 22:40:00'",
]


def test_filters_keep_the_same_rows_pushed_down_or_not(spark: SparkSession, spark_log: str) -> None:
    assert spark.conf.get("spark.sql.python.filterPushdown.enabled") == "true"
    plain = load(spark, spark_log)
    for condition in FILTERS:
        wanted = [row.seq for row in plain.where(condition).select("seq").collect()]
        pushed = load(spark, spark_log, filterPushdown="true").where(condition)
        assert sorted(row.seq for row in pushed.select("seq").collect()) == sorted(wanted)
        assert wanted, condition
    spark.conf.set("spark.sql.python.filterPushdown.enabled", "false")
    try:
        assert load(spark, spark_log, filterPushdown="true").where("seq <= 10").count() == 10
    finally:
        spark.conf.set("spark.sql.python.filterPushdown.enabled", "true")


def test_a_frame_used_twice_is_the_whole_log_twice(spark: SparkSession, spark_log: str) -> None:
    """Spark 4.3 keeps what one query pushed down for the next one over the same frame: so nothing is by default."""
    frame = load(spark, spark_log)
    assert frame.where("seq <= 10").count() == 10
    assert frame.where("seq <= 10").union(frame.where("seq <= 30")).count() == 40


def test_the_other_tables_are_read_but_not_streamed(spark: SparkSession, spark_log: str) -> None:
    frame = load(spark, spark_log, table="topics")
    assert frame.schema == spark_schema(TABLE_SCHEMAS["topics"])
    assert frame.where("topic = 'metrics'").select("topic").collect() == [("metrics",)]
    with pytest.raises(InvalidOptionError, match="changes in place"):
        source(spark_log, table="topics").streamReader(frame.schema)
    with pytest.raises(InvalidOptionError, match="a stream has no end"):
        source(spark_log, endingSeq="5").streamReader(spark_schema(MESSAGE_SCHEMA))


def test_a_stream_goes_on_where_it_was_and_says_what_it_lost(spark: SparkSession, tmp_path: Path) -> None:
    path = str(tmp_path / "log.db")

    def run(**options: str) -> list[int]:
        query = (
            spark.readStream.format("headwater")
            .options(topics="orders.>", maxMessagesPerTrigger="400", subscription="lake", **options)
            .load(path)
            .writeStream.format("parquet")
            .option("checkpointLocation", str(tmp_path / "checkpoint"))
            .trigger(availableNow=True)
            .start(str(tmp_path / "out"))
        )
        assert query.awaitTermination(100)
        return [progress.numInputRows for progress in query.recentProgress if progress.numInputRows]

    def publish(first: int, last: int) -> None:
        with headwater.open(path, maintenance_interval=None, durability="relaxed") as log:
            log.publish_many([("orders.new" if n % 2 else "other", n) for n in range(first, last + 1)])

    def seqs() -> list[int]:
        return sorted(row.seq for row in spark.read.parquet(str(tmp_path / "out")).select("seq").collect())

    publish(1, 2_000)
    assert run() == [400, 400, 200]
    publish(2_001, 2_200)
    with headwater.open(path, maintenance_interval=None) as log:
        info = log.subscription("lake")
        assert (info.position, info.lag, info.holder) == (2_000, 100, None)
        prune(log, max_count=20)
    with pytest.raises(StreamingQueryException, match="90 messages: 2001 to 2179"):
        run()
    assert run(failOnDataLoss="false") == [10]
    assert seqs() == [*range(1, 2_001, 2), *range(2_181, 2_201, 2)]
    with headwater.open(path, maintenance_interval=None) as log:
        assert (log.subscription("lake").gaps, log.subscription("lake").lag) == (90, 0)
