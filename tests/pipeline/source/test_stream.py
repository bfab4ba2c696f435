"""The offsets of a stream, asked for as Spark asks; reading in Spark itself is in test_spark.py."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows, ReadMinRows

import headwater
from headwater import Log, ManualClock
from headwater.errors import InvalidOption, LeaseLost, SubscriptionError
from headwater.pipeline.schema import COLUMNS
from headwater.pipeline.source.batch import RangePartition
from headwater.pipeline.source.conditions import topics_condition
from headwater.pipeline.source.log import seq_of_nth
from headwater.pipeline.source.options import read_options
from headwater.pipeline.source.place import Range
from headwater.pipeline.source.stream import MessagesStreamReader
from headwater.topics import parse_pattern

ALL = ReadAllAvailable()


@pytest.fixture
def path(any_log: str) -> str:
    return any_log


@pytest.fixture
def log(path: str) -> Iterator[Log]:
    with headwater.open(path, housekeeping=None, durability="relaxed") as opened:
        opened.publish_many([("a.x" if n % 2 else "b", n) for n in range(1, 21)])
        yield opened


@pytest.fixture
def stream(path: str) -> Iterator[Any]:
    made: list[MessagesStreamReader] = []

    def make(**options: str) -> MessagesStreamReader:
        given = {"path": path, "subscription": "lake", **options}
        made.append(MessagesStreamReader(read_options(given), COLUMNS))
        return made[-1]

    yield make
    for each in made:
        each.stop()


def prune(log: Log, pattern: str = ">", **limits: Any) -> None:
    log.retain(pattern, **limits)
    log.housekeep()


@pytest.mark.parametrize(
    ("options", "seq"),
    [({}, 0), ({"startingSeq": "earliest"}, 0), ({"startingSeq": "latest"}, 20), ({"startingSeq": "7"}, 6)],
)
def test_a_new_query_starts_where_it_is_told(log: Log, stream: Any, options: dict[str, str], seq: int) -> None:
    assert stream(**options).initialOffset() == {"seq": seq}
    assert log.subscription("lake").position == seq


@pytest.mark.parametrize(
    ("at", "seq"),
    [("1700000000000", 0), ("1700000000001", 1), ("2023-11-14T22:13:21Z", 1), ("1700000001001", 2), ("0", 0)],
)
def test_a_time_is_the_first_message_at_or_after_it(path: str, stream: Any, at: str, seq: int) -> None:
    clock = ManualClock(1_700_000_000_000)
    with headwater.open(path, housekeeping=None, durability="relaxed", clock=clock) as log:
        log.publish("a", 1)
        clock.advance(1_000)
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


def test_a_minimum_waits_until_there_is_enough(log: Log, stream: Any) -> None:
    reader = stream(topics="a.*")
    assert reader.latestOffset({"seq": 0}, ReadMinRows(10)) == {"seq": 20}
    assert reader.latestOffset({"seq": 0}, ReadMinRows(11)) == {"seq": 0}


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
    with pytest.raises(LeaseLost):
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
    assert stream(topics="a.>").latestOffset({"seq": 0}, ALL) == {"seq": 20}, "it was told, and is not told again"


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
    with pytest.raises(InvalidOption, match="8 messages from 3 on: 3 to 10"):
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
    assert [part.range for part in parts] == [Range(4, 20)]
    reader.stop()
    task = pickle.loads(pickle.dumps(reader))
    log.close()  # another process reads in Spark; here it is this one, which must not hold the file twice
    once = [row for batch in task.read(parts[0]) for row in batch.to_pylist()]
    again = [row for batch in task.read(parts[0]) for row in batch.to_pylist()]
    assert [row["seq"] for row in once] == [5, 7, 9, 11, 13, 15, 17, 19]
    assert once == again
    with headwater.open(task._options.path, housekeeping=None) as reopened:
        prune(reopened, max_count=2)
    with pytest.raises(SubscriptionError, match="before they were read"):
        list(task.read(parts[0]))
    assert len(list(task.read(RangePartition(Range(18, 20))))) == 1, "what is whole stays readable"


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.sampled_from(["a.x", "a.y.z", "b", "a"]), min_size=1, max_size=60),
    st.sampled_from(["a.*", "a.>", ">", "b", "none"]),
    st.integers(1, 30),
    st.integers(0, 20),
)
def test_the_nth_message_that_matches_is_found(
    tmp_path_factory: pytest.TempPathFactory, topics: list[str], pattern: str, n: int, after: int
) -> None:
    path = str(tmp_path_factory.mktemp("nth") / "log.db")
    with headwater.open(path, housekeeping=None, durability="relaxed") as log:
        log.publish_many([(topic, 1) for topic in topics])
    parsed = parse_pattern(pattern)
    seqs = [seq for seq, topic in enumerate(topics, 1) if seq > after and parsed.matches(topic)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("headwater.pipeline.source.log.COUNTED_SEQS", 7)
        found = seq_of_nth(path, Range(after, len(topics)), topics_condition([parsed]), n)
    assert found == (seqs[n - 1] if len(seqs) >= n else None)
