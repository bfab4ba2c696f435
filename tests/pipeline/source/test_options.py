"""Options are read as they are meant, and refused with what to do instead."""

from __future__ import annotations

import os
from typing import Any

import pytest

from headwater.errors import InvalidOption
from headwater.pipeline.source.options import SourceOptions, read_options
from headwater.pipeline.source.place import log_path


def read(**options: str) -> SourceOptions:
    return read_options({"path": "/logs/events.db", **options})


@pytest.mark.parametrize(
    ("url", "path"),
    [
        ("/logs/a b.db", "/logs/a b.db"),
        ("sqlite:/logs/a.db", "/logs/a.db"),
        ("sqlite:////logs/a.db", "/logs/a.db"),
        ("sqlite:///a.db", os.path.abspath("a.db")),
        ("file:///logs/a.db", "/logs/a.db"),
        ("file:/logs/a.db", "/logs/a.db"),
        ("a?b#c%20.db", os.path.abspath("a?b#c%20.db")),
        ("postgres://me@host/db?schema=log", "postgres://me@host/db?schema=log"),
    ],
)
def test_a_log_is_named_as_open_names_it(url: str, path: str) -> None:
    assert log_path(url) == path


@pytest.mark.parametrize("url", ["mysql://me:secret@host/db", "ws://:secret@host:1", "memory:", ":memory:", "", " "])
def test_a_log_that_spark_cannot_reach_is_refused_with_what_works(url: str) -> None:
    with pytest.raises(InvalidOption) as refusal:
        log_path(url)
    assert refusal.value.where.startswith("path")
    assert refusal.value.next
    assert "secret" not in str(refusal.value)


def test_names_are_read_in_any_case() -> None:
    options = read(STARTINGSEQ="5", endingseq="9", MinPartitions="3", failondataloss="FALSE", Table="Dead_Letters")
    assert (options.starting_seq, options.ending_seq, options.partitions_min) == (5, 9, 3)
    assert (options.fail_on_data_loss, options.table) == (False, "dead_letters")


def test_what_is_not_said_is_everything_there_is() -> None:
    assert read() == SourceOptions("/logs/events.db")


def test_topics_are_one_pattern_or_several() -> None:
    assert [pattern.text for pattern in read(topics="orders.>, pay.* ,orders.>").patterns] == ["orders.>", "pay.*"]


def test_a_time_is_iso_or_milliseconds() -> None:
    assert read(startingTimestamp="1700000000000").starting_ms == 1_700_000_000_000
    assert read(startingTimestamp="2023-11-14T22:13:20Z").starting_ms == 1_700_000_000_000
    assert read(startingTimestamp="2023-11-14T23:13:20.5+01:00").starting_ms == 1_700_000_000_500


@pytest.mark.parametrize(
    ("options", "where", "said"),
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
def test_what_makes_no_sense_is_refused(options: dict[str, Any], where: str, said: str) -> None:
    with pytest.raises(InvalidOption) as refusal:
        read(**options)
    assert refusal.value.where == where
    assert said in str(refusal.value)


def test_options_of_spark_itself_are_none_of_ours() -> None:
    assert read(checkpointLocation="/c", queryName="q", mergeSchema="true") == read()
