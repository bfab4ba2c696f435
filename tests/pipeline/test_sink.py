"""Publishing a DataFrame: what is refused, what a row must be, batches staged and promoted once, and Spark itself."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from postgres_server import PostgresServer
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.functions import col, lit, struct, to_json
from pyspark.sql.types import (
    BinaryType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampNTZType,
    VariantType,
)
from small_logs import forget_ids, messages_in, published

import headwater
from headwater.delivery.publishing import DedupeWindow
from headwater.errors import (
    HeadwaterError,
    InputOutputError,
    InvalidDataError,
    InvalidInputError,
    InvalidOptionError,
    InvalidTopicError,
    TooLargeError,
)
from headwater.message import DATA_BYTES_MAX, Draft, Message
from headwater.pipeline import sink
from headwater.pipeline.columns import MESSAGE_SCHEMA, spark_schema
from headwater.pipeline.logs import backend_of
from headwater.pipeline.sink import (
    IGNORED,
    LEFTOVER_MS,
    PUBLISHED,
    BatchWriter,
    RowChecker,
    SinkKey,
    SinkOptions,
    StagedPartition,
    StreamWriter,
    check_columns,
    is_repeat,
    row_ids,
    sink_key,
)
from headwater.stores.sqlite import SqliteStore
from headwater.stores.sqlite.writer import SqliteWriter

# --- options and columns ----------------------------------------------------------------------------------------------

PLAIN = StructType([StructField("topic", StringType()), StructField("data", StringType())])


def schema(**types: object) -> StructType:
    return StructType([StructField(name, kind) for name, kind in types.items()])  # type: ignore[arg-type]


def test_names_are_read_in_any_case_and_paths_become_absolute() -> None:
    options = SinkOptions({"PATH": "some/events.db", "SinkID": "s", "dataformat": "text", "Topic": "a.b"})
    assert options.path == os.path.abspath("some/events.db")
    assert options.staging == options.path + "-staging"
    assert (options.sink_id, options.is_text, options.topic) == ("s", True, "a.b")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "no log is named"),
        ({"path": "mysql://host/db"}, "in files and in PostgreSQL"),
        ({"path": "ws://host:1"}, "through a server"),
        ({"path": "memory:"}, "in memory"),
        ({"path": "e.db", "tpoic": "x"}, "Did you mean topic"),
        ({"path": "e.db", "colour": "x"}, "there is no option 'colour'"),
        ({"path": "e.db", "dataFormat": "xml"}, "json or text"),
        ({"path": "e.db", "durability": "none"}, "full or relaxed"),
        ({"path": "e.db", "sinkId": ""}, "sinkId: this has 0 characters"),
        ({"path": "e.db", "batchId": "-1"}, "whole number"),
        ({"path": "e.db", "topic": "a.*"}, "topic: .*wildcard"),
    ],
)
def test_impossible_options_are_refused(options: dict[str, str], words: str) -> None:
    with pytest.raises(InvalidOptionError, match=words):
        SinkOptions(options)


def test_batch_ids_go_with_sink_ids_and_only_in_batch_writes(tmp_path: Path) -> None:
    path = str(tmp_path / "e.db")
    with pytest.raises(InvalidOptionError, match="go together"):
        BatchWriter({"path": path, "sinkId": "s"}, PLAIN)
    with pytest.raises(InvalidOptionError, match="go together"):
        BatchWriter({"path": path, "batchId": "1"}, PLAIN)
    with pytest.raises(InvalidOptionError, match="batch ids of its own"):
        StreamWriter({"path": path, "sinkId": "s", "batchId": "1"}, PLAIN)


def test_a_log_is_never_overwritten(tmp_path: Path) -> None:
    options = {"path": str(tmp_path / "e.db"), "sinkId": "s"}
    with pytest.raises(InvalidOptionError, match="never overwritten"):
        BatchWriter(options, PLAIN, overwrite=True)
    with pytest.raises(InvalidOptionError, match="whole result again"):
        StreamWriter(options, PLAIN, overwrite=True)


def test_the_columns_of_a_message_are_taken_and_those_of_the_log_ignored() -> None:
    assert set(MESSAGE_SCHEMA.names) == {*PUBLISHED, *IGNORED}
    assert set(check_columns(spark_schema(MESSAGE_SCHEMA), None)) == set(PUBLISHED)
    assert "topic" not in check_columns(spark_schema(MESSAGE_SCHEMA), "fixed")


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        (schema(data=StringType()), "no topic is given"),
        (schema(topic=StringType()), "there is no column data"),
        (schema(topic=StringType(), data=StringType(), colour=StringType()), "column colour: a message has no such"),
        (schema(topic=StringType(), data=PLAIN), r'to_json\(col\("data"\)\)'),
        (schema(topic=StringType(), data=VariantType()), r'to_json\(col\("data"\)\)'),
        (schema(topic=StringType(), data=BinaryType()), r'cast\("string"\)'),
        (schema(topic=LongType(), data=StringType()), "column topic: it is bigint, not string"),
        (
            schema(topic=StringType(), data=StringType(), version=StringType()),
            "column version: it is string, not bigint",
        ),
        (schema(topic=StringType(), data=StringType(), expires_at=TimestampNTZType()), r'cast\("timestamp"\)'),
        (schema(topic=StringType(), data=StringType(), headers=MapType(StringType(), LongType())), "create_map"),
        (StructType([*PLAIN.fields, StructField("data", StringType())]), "two columns"),
    ],
)
def test_columns_that_cannot_be_published_are_refused_with_the_cure(columns: StructType, words: str) -> None:
    with pytest.raises(HeadwaterError, match=words):
        check_columns(columns, None)


def test_a_query_is_known_by_the_id_in_its_checkpoint(tmp_path: Path) -> None:
    checkpoint = tmp_path / "check point"
    checkpoint.mkdir()
    (checkpoint / "metadata").write_text('{"id":"5f0e6a1c"}')
    for spelled in (str(checkpoint), checkpoint.as_uri(), f"file:{checkpoint}".replace(" ", "%20")):
        assert sink_key(SinkOptions({"path": "e.db", "checkpointLocation": spelled})) == ("5f0e6a1c", "5f0e6a1c")
    named = sink_key(SinkOptions({"path": "e.db", "checkpointLocation": str(checkpoint), "sinkId": "mine"}))
    assert named == SinkKey("mine", "5f0e6a1c")


@pytest.mark.parametrize("checkpoint", [None, "/nowhere/at/all", "hdfs://host/checkpoint"])
def test_a_query_that_cannot_be_known_must_be_named(checkpoint: str | None) -> None:
    given = {"path": "e.db"} if checkpoint is None else {"path": "e.db", "checkpointLocation": checkpoint}
    with pytest.raises(InvalidOptionError, match="sinkId"):
        StreamWriter(given, PLAIN)
    assert sink_key(SinkOptions({**given, "sinkId": "mine"})) == SinkKey("mine", None)


# --- which batch is new -----------------------------------------------------------------------------------------------

BY_QUERY = SinkKey("q1", "q1")
NAMED = SinkKey("mine", "q1")

sinks = st.text(max_size=20)
numbers = st.integers(0, 2**40)


def test_the_first_and_every_higher_batch_are_new() -> None:
    assert not is_repeat(BY_QUERY, 0, None, None)
    assert not is_repeat(BY_QUERY, 6, 5, None)
    assert not is_repeat(NAMED, 6, 5, 5)
    assert not is_repeat(SinkKey("mine"), 6, 5, None)


def test_the_same_batch_is_a_repeat() -> None:
    assert is_repeat(BY_QUERY, 5, 5, None)
    assert is_repeat(NAMED, 5, 5, 5)
    assert is_repeat(SinkKey("mine"), 5, 5, None)


def test_a_lower_batch_is_refused_with_what_to_do() -> None:
    with pytest.raises(InvalidOptionError, match=r"sink q1, batch 4: batch 5 was published.*another sinkId"):
        is_repeat(BY_QUERY, 4, 5, None)


@pytest.mark.parametrize("batch", [4, 5, 6])
def test_a_name_that_another_query_used_is_refused_even_if_the_batch_would_fit(batch: int) -> None:
    with pytest.raises(InvalidOptionError, match="came from another query"):
        is_repeat(NAMED, batch, 5, None)
    with pytest.raises(InvalidOptionError, match="came from another query"):
        is_repeat(NAMED, batch, 5, 3)


@given(sinks, numbers, numbers, st.integers(0, 2**48 - 1))
def test_an_id_is_a_uuid_and_the_same_whenever_it_is_asked(sink: str, batch: int, partition: int, row: int) -> None:
    id = row_ids(sink, batch, partition)(row)
    assert id == row_ids(sink, batch, partition)(row)
    assert str(uuid.UUID(id)) == id
    assert (uuid.UUID(id).version, uuid.UUID(id).variant) == (8, uuid.RFC_4122)


@given(st.lists(st.tuples(sinks, numbers, numbers, numbers), min_size=2, max_size=20, unique=True))
def test_different_rows_have_different_ids(places: list[tuple[str, int, int, int]]) -> None:
    ids = {row_ids(sink, batch, partition)(row) for sink, batch, partition, row in places}
    assert len(ids) == len(places)


# --- rows -------------------------------------------------------------------------------------------------------------

NOW_MS = 1_700_000_000_000
TYPES = {
    "topic": pa.string(),
    "data": pa.string(),
    "id": pa.string(),
    "type": pa.string(),
    "from": pa.string(),
    "version": pa.int32(),
    "priority": pa.int64(),
    "deliver_at": pa.timestamp("us", tz="UTC"),
    "headers": pa.map_(pa.string(), pa.string()),
}


def drafts(rows: list[dict[str, Any]], topic: str | None = None, is_text: bool = False) -> list[Draft]:
    names = [name for name in TYPES if any(name in row for row in rows)]
    batch = pa.record_batch([pa.array([row.get(name) for row in rows], TYPES[name]) for name in names], names=names)
    return list(RowChecker(names, topic, is_text, "partition 0", NOW_MS).drafts(batch))


def test_a_row_of_topic_and_data_keeps_its_json_text_as_it_is() -> None:
    (draft,) = drafts([{"topic": "orders.new", "data": '{"b": 1,  "ä": 2}'}])
    assert (draft.topic, draft.data_json, draft.size, draft.extras) == (
        "orders.new",
        '{"b": 1,  "ä": 2}',
        18,
        None,
    )


def test_every_other_column_becomes_what_publish_makes_of_it() -> None:
    at = datetime(2030, 1, 2, 3, 4, 5, 678_000, UTC)
    row = {
        "topic": "t",
        "data": "1",
        "id": "my-id",
        "type": "order",
        "from": "alice",
        "version": 3,
        "priority": 7,
        "deliver_at": at,
        "headers": [("a", "1"), ("b", None)],
    }
    plain = {"topic": "t", "data": "2", "priority": 0}
    first, second = drafts([row, plain])
    assert first.id == "my-id"
    assert first.extras is not None
    assert (first.extras.type, first.extras.from_, first.extras.version) == ("order", "alice", 3)
    assert (first.extras.priority, first.extras.deliver_ms) == (7, round(at.timestamp() * 1000))
    assert msgspec.json.decode(first.extras.headers_json or "") == {"a": "1", "b": None}
    assert (second.extras, second.id) == (None, None)


def test_the_option_topic_goes_before_the_column() -> None:
    assert drafts([{"topic": "not a topic", "data": "1"}], topic="fixed")[0].topic == "fixed"


def test_text_becomes_a_json_string_when_asked() -> None:
    assert drafts([{"topic": "t", "data": 'say "hi"'}], is_text=True)[0].data_json == '"say \\"hi\\""'


@pytest.mark.parametrize(
    ("bad", "kind", "words"),
    [
        ({"data": "{oops"}, InvalidDataError, ["not JSON", "'{oops'", "dataFormat"]),
        ({"data": None}, InvalidDataError, ["data is null", "coalesce"]),
        ({"data": '"' + "x" * DATA_BYTES_MAX + '"'}, TooLargeError, [str(DATA_BYTES_MAX)]),
        ({"topic": "a..b"}, InvalidTopicError, ["'a..b'", "empty"]),
        ({"topic": None}, InvalidTopicError, ["None"]),
        ({"id": ""}, InvalidOptionError, ["id must be non-empty"]),
        ({"id": "x" * 129}, TooLargeError, ["id has 129"]),
        ({"from": ""}, InvalidOptionError, ["from must be non-empty"]),
        ({"version": -1}, InvalidOptionError, ["version"]),
        ({"priority": 10**9}, InvalidOptionError, ["priority"]),
        ({"deliver_at": datetime(1960, 1, 1, tzinfo=UTC)}, InvalidOptionError, ["deliver_at"]),
        ({"headers": [("type", "x")]}, InvalidOptionError, ["option of its own"]),
        ({"headers": [("h", "x" * 70_000)]}, TooLargeError, ["headers take"]),
    ],
)
def test_an_error_names_the_bad_row_and_what_to_do(
    bad: dict[str, Any], kind: type[InvalidInputError], words: list[str]
) -> None:
    good = {"topic": "t", "data": "1"}
    with pytest.raises(kind) as raised:
        drafts([good, good, {**good, **bad}, good])
    reported = str(raised.value)
    assert "row 2 of partition 0" in reported
    assert "Nothing of this batch was published" in reported
    assert all(word in reported for word in words), reported


def test_a_bad_row_of_a_later_batch_is_counted_from_the_start_of_the_partition() -> None:
    checker = RowChecker(["topic", "data"], None, False, "partition 4", NOW_MS)
    good = pa.record_batch([["t"] * 10, ["1"] * 10], names=["topic", "data"])
    list(checker.drafts(good))
    with pytest.raises(InvalidDataError, match="row 11 of partition 4"):
        list(checker.drafts(pa.record_batch([["t", "t"], ["1", "]"]], names=["topic", "data"])))


def test_an_error_names_the_column_of_a_time_that_python_cannot_hold() -> None:
    names = ["topic", "data", "deliver_at"]
    batch = pa.record_batch([["t"], ["1"], pa.array([2**62], TYPES["deliver_at"])], names=names)
    with pytest.raises(InvalidDataError, match="row 0 of the partition, or below it: a value of deliver_at"):
        list(RowChecker(names, None, False, "the partition", NOW_MS).drafts(batch))


finite = st.floats(allow_nan=False, allow_infinity=False)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | finite | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(st.lists(json_values, min_size=1, max_size=5))
def test_whatever_json_says_comes_through_unchanged(values: list[Any]) -> None:
    texts = [msgspec.json.encode(value).decode() for value in values]
    assert [draft.data_json for draft in drafts([{"topic": "t", "data": text} for text in texts])] == texts


@given(st.lists(st.text(), min_size=1, max_size=5))
def test_any_text_comes_back_from_the_json_string_it_became(texts: list[str]) -> None:
    made = drafts([{"topic": "t", "data": text} for text in texts], is_text=True)
    assert [msgspec.json.decode(draft.data_json) for draft in made] == texts
    assert [draft.size for draft in made] == [len(draft.data_json.encode()) for draft in made]


# --- writers as Spark calls them --------------------------------------------------------------------------------------


def arrow_rows(*data: object) -> Iterator[pa.RecordBatch]:
    yield pa.record_batch([["t"] * len(data), [str(each) for each in data]], names=["topic", "data"])


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "events.db"


def staging_files(path: Path) -> list[str]:
    folder = f"{path}-staging"
    return os.listdir(folder) if os.path.isdir(folder) else []


def stream_writer(log: Path | str, sink: str = "s", **options: str) -> StreamWriter:
    return StreamWriter({"path": str(log), "sinkId": sink, **options}, PLAIN)


def run_batch(log: Path | str, batch: int, partitions: Sequence[Sequence[object]], sink: str = "s") -> None:
    """As Spark does it: one pickled writer for the tasks, another one for the commit."""
    task = pickle.loads(pickle.dumps(stream_writer(log, sink)))
    staged = [task.write(arrow_rows(*data)) for data in partitions]
    stream_writer(log, sink).commit(staged, batch)


def test_rows_stand_in_the_log_in_the_order_of_partitions_and_rows(path: Path) -> None:
    run_batch(path, 0, [[1, 2], [3], [], [4, 5]])
    assert published(path) == [1, 2, 3, 4, 5]
    assert not os.path.exists(f"{path}-staging")


def test_a_partition_of_many_pieces_is_whole(path: Path) -> None:
    run_batch(path, 0, [range(2_500), range(2_500, 2_600)])
    assert published(path) == list(range(2_600))


def test_a_repeat_is_known_by_its_batch_even_when_its_ids_are_long_forgotten(path: Path) -> None:
    run_batch(path, 0, [[1, 2]])
    run_batch(path, 1, [[3]])
    forget_ids(path)
    run_batch(path, 1, [[3]])
    assert published(path) == [1, 2, 3]
    assert staging_files(path) == []


def test_a_repeat_is_known_by_its_ids_even_when_the_sinks_are_forgotten(path: Path) -> None:
    """A second protection: the ids follow from sink, batch, partition and row."""
    run_batch(path, 7, [[1, 2], [3]])
    before = [(message.id, message.data) for message in messages_in(path)]
    store = SqliteStore(path)
    with store.write() as writer:
        writer._connection.execute("DELETE FROM sinks")
    store.close()
    run_batch(path, 7, [[1, 2], [3]])
    assert [(message.id, message.data) for message in messages_in(path)] == before
    run_batch(path, 8, [[1, 2], [3]])  # the same rows of another batch are other messages
    assert published(path) == [1, 2, 3, 1, 2, 3]


def test_a_lower_batch_is_refused_and_nothing_changes(path: Path) -> None:
    run_batch(path, 4, [[1]])
    with pytest.raises(InvalidOptionError, match=r"batch 4 was published already.*another sinkId"):
        run_batch(path, 3, [[2]])
    assert published(path) == [1]
    run_batch(path, 3, [[2]], sink="another")
    assert published(path) == [1, 2]


def test_two_queries_under_one_name_are_distinguished(path: Path, tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metadata").write_text(f'{{"id": "query-{name}"}}')
    first = stream_writer(path, checkpointLocation=str(tmp_path / "a"))
    second = stream_writer(path, checkpointLocation=str(tmp_path / "b"))
    first.commit([first.write(arrow_rows(1))], 0)
    with pytest.raises(InvalidOptionError, match="another query"):
        second.commit([second.write(arrow_rows(2))], 0)  # the same batch number, which would be taken for a repeat
    first.commit([first.write(arrow_rows(1))], 0)
    first.commit([first.write(arrow_rows(3))], 1)
    assert published(path) == [1, 3]


def test_one_bad_row_and_nothing_of_the_batch_is_published(path: Path) -> None:
    writer = stream_writer(path)
    good = writer.write(arrow_rows(1, 2))
    with pytest.raises(InvalidDataError, match="'oops'"):
        writer.write(arrow_rows(3, "oops"))
    assert staging_files(path) == [good.name]  # the bad partition left nothing behind
    writer.abort([good, None], 0)
    assert staging_files(path) == []
    assert not path.exists()


def test_a_partition_that_turns_bad_late_leaves_no_file_behind(path: Path) -> None:
    def late() -> Iterator[pa.RecordBatch]:
        yield from arrow_rows(*range(5_000))
        yield from arrow_rows("oops")

    with pytest.raises(InvalidDataError, match="row 5000 of"):
        stream_writer(path).write(late())
    assert staging_files(path) == []


def test_messages_and_the_mark_that_they_are_published_stand_or_fall_together(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object) -> None:
        raise InputOutputError("no more")

    monkeypatch.setattr(SqliteWriter, "save_sink_batch", fail)
    with pytest.raises(InputOutputError, match="no more"):
        run_batch(path, 0, [[1, 2]])
    assert published(path) == []
    monkeypatch.undo()
    run_batch(path, 0, [[1, 2]])
    assert published(path) == [1, 2]


def test_a_commit_that_fails_in_the_middle_leaves_nothing_in_the_log(path: Path) -> None:
    run_batch(path, 0, [[1]])
    writer = stream_writer(path)
    first, second = writer.write(arrow_rows(*range(3_000))), writer.write(arrow_rows(2))
    os.truncate(os.path.join(f"{path}-staging", second.name or ""), 100)
    with pytest.raises(InputOutputError, match="Run the batch again"):
        writer.commit([first, second], 1)
    assert published(path) == [1]
    run_batch(path, 1, [[2]])  # the batch was not marked as done
    assert published(path) == [1, 2]


def test_fewer_rows_than_were_staged_are_noticed(path: Path) -> None:
    writer = stream_writer(path)
    staged = writer.write(arrow_rows(1, 2, 3))
    with pytest.raises(InputOutputError, match="4 rows were staged, 3 are here"):
        writer.commit([StagedPartition(staged.name, 4)], 0)
    assert published(path) == []


def test_leftovers_of_killed_runs_go_after_a_day(path: Path) -> None:
    writer = stream_writer(path)
    old, young = writer.write(arrow_rows(8)), writer.write(arrow_rows(9))
    foreign = Path(f"{path}-staging") / "notes.txt"
    foreign.write_text("not ours")
    long_ago = time.time() - LEFTOVER_MS / 1000 - 60
    for name in (old.name or "", foreign.name):
        os.utime(os.path.join(f"{path}-staging", name), (long_ago, long_ago))
    run_batch(path, 0, [[1]])
    assert sorted(staging_files(path)) == sorted([young.name, "notes.txt"])
    assert published(path) == [1]


def test_a_batch_write_with_a_batch_id_knows_its_repeat(path: Path) -> None:
    """What foreachBatch needs: it may call the same write twice."""
    options = {"path": str(path), "sinkId": "s", "batchId": "3"}
    for _ in range(2):
        writer = BatchWriter(options, PLAIN)
        writer.commit([writer.write(arrow_rows(1, 2))])
    assert published(path) == [1, 2]


def test_two_batch_jobs_are_two_jobs_but_one_commit_repeated_is_one(path: Path) -> None:
    writer = BatchWriter({"path": str(path)}, PLAIN)
    staged = writer.write(arrow_rows(1))
    kept = Path(f"{path}-staging", staged.name or "").read_bytes()
    writer.commit([staged])
    Path(f"{path}-staging").mkdir()
    Path(f"{path}-staging", staged.name or "").write_bytes(kept)
    pickle.loads(pickle.dumps(writer)).commit([staged])
    assert published(path) == [1]
    again = BatchWriter({"path": str(path)}, PLAIN)
    again.commit([again.write(arrow_rows(1))])
    assert published(path) == [1, 1]


def test_given_ids_are_known_to_the_log_as_those_of_any_publisher(path: Path) -> None:
    store = SqliteStore(path)
    with store.write() as writer:
        writer.append([Draft("t", "0", 1, "known")], int(time.time() * 1000), DedupeWindow())
    store.close()
    schema = StructType([*PLAIN.fields, StructField("id", StringType()), StructField("seq", LongType())])
    names = ["topic", "data", "id", "seq"]
    batch = pa.record_batch([["t"] * 3, ["1", "2", "3"], ["known", "new", None], [7, 8, 9]], names=names)
    job = BatchWriter({"path": str(path)}, schema)
    job.commit([job.write(iter([batch]))])
    assert published(path) == [0, 2, 3]
    assert [message.id for message in messages_in(path)][:2] == ["known", "new"]


# --- in PostgreSQL ----------------------------------------------------------------------------------------------------


def test_two_commits_of_the_same_batch_at_once_publish_it_once(
    postgres_schema_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other one has more rows, as a repeat of a query that is not deterministic may."""
    url, append = postgres_schema_url, sink.append

    def be_overtaken(*arguments: Any) -> None:
        monkeypatch.setattr(sink, "append", append)
        run_batch(url, 0, [[1, 2]])
        append(*arguments)

    monkeypatch.setattr(sink, "append", be_overtaken)
    run_batch(url, 0, [[1, 2, 3]])
    assert published(url) == [1, 2]


def test_a_connection_that_breaks_costs_nothing(
    postgres: PostgresServer, postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    append = sink.append

    def cut_once(*arguments: Any) -> None:
        monkeypatch.setattr(sink, "append", append)
        assert postgres.cut_connections(postgres_url, "headwater writer")
        append(*arguments)

    monkeypatch.setattr(sink, "append", cut_once)
    run_batch(postgres_url, 0, [[1, 2]])
    assert published(postgres_url) == [1, 2]


def test_in_postgres_a_batch_write_has_the_time_of_the_database(postgres_schema_url: str) -> None:
    writer = BatchWriter({"path": postgres_schema_url}, PLAIN)
    writer.commit([writer.write(arrow_rows(1))])
    assert published(postgres_schema_url) == [1]
    with backend_of(postgres_schema_url).snapshot() as snapshot:
        sql = "SELECT abs(published_at - (extract(epoch FROM now()) * 1000)::bigint) < 60000 FROM messages"
        assert snapshot.query(sql, ()) == [(True,)]


# --- size -------------------------------------------------------------------------------------------------------------

LARGE_ROWS, ROWS_PER_ARROW_BATCH = 40_000, 4_000
DATA = '{"n":%d,"pad":"' + "x" * 4_970 + '"}'
GROWTH_MIB_MAX = 90  # the page cache, Arrow and one piece; the batch itself is twice that


def arrow_batches() -> Iterator[pa.RecordBatch]:
    for first in range(0, LARGE_ROWS, ROWS_PER_ARROW_BATCH):
        numbers = range(first, first + ROWS_PER_ARROW_BATCH)
        yield pa.record_batch(
            [[f"orders.{number % 20}" for number in numbers], [DATA % number for number in numbers]],
            names=["topic", "data"],
        )


@pytest.mark.skipif(sys.platform != "linux", reason="asks /proc how much memory it took")
def test_a_large_batch_is_committed_in_constant_memory(tmp_path: Path, figures: Callable[[str], None]) -> None:
    path = tmp_path / "events.db"
    started = time.monotonic()
    staged = StreamWriter({"path": str(path), "sinkId": "s"}, PLAIN).write(arrow_batches())
    staged_at = time.monotonic()
    file = Path(f"{path}-staging") / (staged.name or "")
    size_mib = file.stat().st_size / 2**20
    script = Path(__file__).parent / "kills" / "sink_commit.py"
    child = subprocess.run(
        [sys.executable, str(script), str(path), str(staged.name), str(staged.rows)],
        capture_output=True, text=True, check=True, timeout=100,
    )  # fmt: skip
    committed_at = time.monotonic()
    store = SqliteStore(path)
    with store.read() as reader:
        assert reader.last_seq() == LARGE_ROWS
        assert sum(count.count for count in reader.topic_counts()) == LARGE_ROWS
    store.close()
    grown_mib = int(child.stdout)
    assert grown_mib < GROWTH_MIB_MAX < size_mib / 2
    figures(
        f"sink: {LARGE_ROWS:,} rows of 5 kB staged at {LARGE_ROWS / (staged_at - started):,.0f}/s, committed at "
        f"{LARGE_ROWS / (committed_at - staged_at):,.0f}/s by a process that grew by {grown_mib} MiB"
    )


# --- in Spark ---------------------------------------------------------------------------------------------------------

ROWS = 5_000


def save(frame: DataFrame, path: Path, **options: str) -> None:
    frame.write.format("headwater").mode("append").options(path=str(path), **options).save()


def run_stream(frame: DataFrame, path: Path, checkpoint: Path, **options: str) -> None:
    query = (
        frame.writeStream.format("headwater")
        .options(path=str(path), checkpointLocation=str(checkpoint), **options)
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()


def numbers_from(spark: SparkSession, folder: Path) -> DataFrame:
    """A stream of the lines in the folder's files, one file a batch."""
    return spark.readStream.option("maxFilesPerTrigger", "1").text(str(folder)).select(col("value").alias("data"))


def test_a_batch_write_is_whole_and_in_order(spark: SparkSession, tmp_path: Path) -> None:
    path = tmp_path / "events.db"
    frame = spark.range(ROWS, numPartitions=2).select(to_json(struct(col("id").alias("n"))).alias("data"))
    save(frame, path, topic="numbers.all")
    found = messages_in(path)
    assert [message.data["n"] for message in found] == list(range(ROWS))
    assert {message.topic for message in found} == {"numbers.all"}
    assert len({message.id for message in found}) == ROWS
    assert not os.path.exists(f"{path}-staging")


def test_what_is_streamed_from_one_log_into_another_is_the_same(spark: SparkSession, tmp_path: Path) -> None:
    origin, copy = tmp_path / "origin.db", tmp_path / "copy.db"
    with headwater.open(origin) as log:
        log.publish("a.b", {"n": [1, None, "ü"]}, type="order", version=2, from_="alice", to="bob", priority=5,
                    reply_to="r", correlation_id="c", content_type="x/y", traceparent="t", headers={"h": "1"},
                    deliver_at=4_000_000_000.25, expires_at=4_000_000_001, id="given")  # fmt: skip
        log.publish_many([("a.c", number) for number in range(500)])
    frame = spark.readStream.format("headwater").option("path", str(origin)).load()
    run_stream(frame, copy, tmp_path / "checkpoint")
    assert [_fields(message) for message in messages_in(copy)] == [_fields(message) for message in messages_in(origin)]
    save(spark.read.format("headwater").option("path", str(origin)).load(), copy)
    assert len(messages_in(copy)) == 501  # the ids came along, so a second copy adds nothing


def _fields(message: Message) -> dict[str, Any]:
    """All but when it was published."""
    return {**message.to_json(), "published_at": None}


def test_a_stream_publishes_each_batch_once_even_when_spark_forgot_the_last(
    spark: SparkSession, tmp_path: Path
) -> None:
    path, source, checkpoint = tmp_path / "events.db", tmp_path / "source", tmp_path / "check point"
    source.mkdir()
    for file in range(3):
        (source / f"{file}.txt").write_text("\n".join(str(file * 10 + line) for line in range(10)))
    frame = numbers_from(spark, source)
    run_stream(frame, path, checkpoint, topic="numbers")
    assert sorted(published(path)) == list(range(30))
    last = max((checkpoint / "commits").glob("[0-9]*"), key=lambda file: int(file.name))
    for file in (last, last.with_name(f".{last.name}.crc")):
        file.unlink(missing_ok=True)
    forget_ids(path)  # so that the guard stands alone
    run_stream(frame, path, checkpoint, topic="numbers")
    assert last.exists()  # Spark did run that batch again
    assert sorted(published(path)) == list(range(30))
    (source / "3.txt").write_text("30\n31")
    run_stream(frame, path, checkpoint, topic="numbers")
    assert sorted(published(path)) == list(range(32))
    assert not os.path.exists(f"{path}-staging")


def test_one_bad_row_stops_the_query_with_its_reason_and_publishes_nothing(spark: SparkSession, tmp_path: Path) -> None:
    path = tmp_path / "events.db"
    data = [("1",), ("2",), ("{oops",), ("4",)]
    with pytest.raises(PySparkException) as raised:
        save(spark.createDataFrame(data, "data string").repartition(2), path, topic="t")
    reported = str(raised.value)
    assert "data is not JSON" in reported
    assert "'{oops'" in reported
    assert 'option("dataFormat", "text")' in reported
    assert messages_in(path) == []
    assert not os.path.exists(f"{path}-staging")


def test_what_cannot_be_published_is_refused_before_anything_is_written(spark: SparkSession, tmp_path: Path) -> None:
    frame = spark.createDataFrame([("1",)], "data string").withColumn("colour", lit("red"))
    with pytest.raises(PySparkException, match="column colour: a message has no such column"):
        save(frame, tmp_path / "events.db", topic="t")
    assert os.listdir(tmp_path) == []
