"""What a write is told, and what is refused before anything is written."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
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

from headwater.errors import HeadwaterError, InvalidOption, InvalidTopic
from headwater.pipeline.sink.columns import COLUMNS, IGNORED, check_columns
from headwater.pipeline.sink.guard import SinkKey
from headwater.pipeline.sink.options import read_options
from headwater.pipeline.sink.query import sink_key
from headwater.pipeline.sink.writers import BatchWriter, StreamWriter

PLAIN = StructType([StructField("topic", StringType()), StructField("data", StringType())])


def schema(**types: object) -> StructType:
    return StructType([StructField(name, kind) for name, kind in types.items()])  # type: ignore[arg-type]


def test_names_are_read_in_any_case_and_paths_become_absolute() -> None:
    options = read_options({"PATH": "some/events.db", "SinkID": "s", "dataformat": "text", "Topic": "a.b"})
    assert options.path == os.path.abspath("some/events.db")
    assert options.staging == options.path + "-staging"
    assert (options.sink_id, options.data_format, options.topic) == ("s", "text", "a.b")


@pytest.mark.parametrize("url", ["/logs/events.db", "sqlite:/logs/events.db", "sqlite:////logs/events.db",
                                 "file:/logs/events.db", "file:///logs/events.db"])  # fmt: skip
def test_a_file_may_be_spelled_as_a_url(url: str) -> None:
    assert read_options({"path": url}).path == "/logs/events.db"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "no path"),
        ({"path": "mysql://host/db"}, "in files and in PostgreSQL"),
        ({"path": "ws://host:1"}, "through a server"),
        ({"path": "memory:"}, "in memory"),
        ({"path": "e.db", "tpoic": "x"}, "unknown option 'tpoic'"),
        ({"path": "e.db", "dataFormat": "xml"}, "json or text"),
        ({"path": "e.db", "durability": "none"}, "full or relaxed"),
        ({"path": "e.db", "sinkId": ""}, "sinkId has 0 characters"),
        ({"path": "e.db", "batchId": "-1"}, "whole number"),
    ],
)
def test_impossible_options_are_refused(options: dict[str, str], words: str) -> None:
    with pytest.raises(InvalidOption, match=words):
        read_options(options)


def test_a_fixed_topic_is_checked_at_once() -> None:
    with pytest.raises(InvalidTopic):
        read_options({"path": "e.db", "topic": "a.*"})


def test_batch_ids_go_with_sink_ids_and_only_in_batch_writes(tmp_path: Path) -> None:
    path = str(tmp_path / "e.db")
    with pytest.raises(InvalidOption, match="go together"):
        BatchWriter({"path": path, "sinkId": "s"}, PLAIN)
    with pytest.raises(InvalidOption, match="go together"):
        BatchWriter({"path": path, "batchId": "1"}, PLAIN)
    with pytest.raises(InvalidOption, match="batch ids of its own"):
        StreamWriter({"path": path, "sinkId": "s", "batchId": "1"}, PLAIN)


def test_a_log_is_never_overwritten(tmp_path: Path) -> None:
    options = {"path": str(tmp_path / "e.db"), "sinkId": "s"}
    with pytest.raises(InvalidOption, match="never overwritten"):
        BatchWriter(options, PLAIN, overwrite=True)
    with pytest.raises(InvalidOption, match="whole result again"):
        StreamWriter(options, PLAIN, overwrite=True)


def test_the_columns_of_a_message_are_taken_and_those_of_the_log_ignored() -> None:
    from headwater.pipeline.schema import MESSAGE_SCHEMA

    assert set(MESSAGE_SCHEMA.fieldNames()) == {*COLUMNS, *IGNORED}
    assert set(check_columns(MESSAGE_SCHEMA, None)) == set(COLUMNS)
    assert "topic" not in check_columns(MESSAGE_SCHEMA, "fixed")


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        (schema(data=StringType()), "nothing says the topic"),
        (schema(topic=StringType()), "there is no column data"),
        (schema(topic=StringType(), data=StringType(), colour=StringType()), "column colour: a message has no such"),
        (schema(topic=StringType(), data=PLAIN), r'to_json\(col\("data"\)\)'),
        (schema(topic=StringType(), data=VariantType()), r'to_json\(col\("data"\)\)'),
        (schema(topic=StringType(), data=BinaryType()), r'cast\("string"\)'),
        (schema(topic=LongType(), data=StringType()), "column topic: it is bigint, not text"),
        (schema(topic=StringType(), data=StringType(), version=StringType()), "column version.*whole number"),
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
        assert sink_key(read_options({"path": "e.db", "checkpointLocation": spelled})) == ("5f0e6a1c", "5f0e6a1c")
    named = sink_key(read_options({"path": "e.db", "checkpointLocation": str(checkpoint), "sinkId": "mine"}))
    assert named == SinkKey("mine", "5f0e6a1c")


@pytest.mark.parametrize("checkpoint", [None, "/nowhere/at/all", "hdfs://host/checkpoint"])
def test_a_query_that_cannot_be_known_must_be_named(checkpoint: str | None) -> None:
    given = {"path": "e.db"} if checkpoint is None else {"path": "e.db", "checkpointLocation": checkpoint}
    with pytest.raises(InvalidOption, match="sinkId"):
        StreamWriter(given, PLAIN)
    assert sink_key(read_options({**given, "sinkId": "mine"})) == SinkKey("mine", None)
