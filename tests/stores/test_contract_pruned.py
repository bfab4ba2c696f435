"""What every store promises about deleted messages: it knows which they were. And about the batches of sinks."""

import itertools
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import headwater
from headwater import ManualClock
from headwater.delivery.publishing import DedupeWindow
from headwater.delivery.retention import Kept
from headwater.message import make_draft
from headwater.ports.store import Reader, Store, Writer
from headwater.topics import parse_pattern

NOW = 1_700_000_000_000
EVERYTHING = parse_pattern(">")
WINDOW = DedupeWindow(span_ms=1_000, count=100)


def publish(store: Store, count: int, topic: str = "a") -> None:
    with store.write() as writer:
        writer.append([make_draft(topic, n, {}, NOW) for n in range(count)], NOW, WINDOW)


def delete(store: Store, *seqs: int) -> None:
    with store.write() as writer:
        delete_in(writer, *seqs)


def delete_in(writer: Writer, *seqs: int) -> None:
    writer.delete_messages([Kept(seq, "a", 1, NOW) for seq in seqs])


def pruned(store: Store, low: int = 0, high: int = 1_000) -> list[tuple[int, int]]:
    with store.read() as reader:
        return reader.pruned(low, high)


# --- which are gone -----------------------------------------------------------------------------------------


def test_a_log_that_never_lost_anything(store: Store) -> None:
    assert pruned(store) == []
    publish(store, 5)
    assert pruned(store) == []
    delete(store)
    assert pruned(store) == []


@pytest.mark.parametrize(
    ("batches", "expected"),
    [
        ([[1, 2, 3]], [(1, 3)]),
        ([[3, 1, 2]], [(1, 3)]),
        ([[1], [2], [3]], [(1, 3)]),
        ([[3], [2], [1]], [(1, 3)]),
        ([[1, 3, 5]], [(1, 1), (3, 3), (5, 5)]),
        ([[1, 3, 5], [2, 4]], [(1, 5)]),
        ([[1, 3, 5], [4]], [(1, 1), (3, 5)]),
        ([[2, 3], [7, 8], [4, 5, 6]], [(2, 8)]),
        ([[2, 3], [7, 8], [5]], [(2, 3), (5, 5), (7, 8)]),
        ([[2, 3], [8], [1, 4, 7, 9]], [(1, 4), (7, 9)]),
        ([[4, 6], [3, 5, 7]], [(3, 7)]),
    ],
)
def test_what_was_deleted_is_known_in_runs(
    store: Store, batches: list[list[int]], expected: list[tuple[int, int]]
) -> None:
    publish(store, 10)
    for batch in batches:
        delete(store, *batch)
    assert pruned(store) == expected


def test_only_what_was_there_counts(store: Store) -> None:
    publish(store, 5)
    delete(store, 2, 2, 99)
    delete(store, 2, 3, 77)
    delete(store, 88)
    assert pruned(store) == [(2, 3)]
    publish(store, 1)
    assert pruned(store) == [(2, 3)]


def test_a_whole_log_is_one_run_and_grows(store: Store) -> None:
    publish(store, 5)
    delete(store, 1, 2, 3, 4, 5)
    assert pruned(store) == [(1, 5)]
    publish(store, 2)
    delete(store, 6)
    assert pruned(store) == [(1, 6)]


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (1, 20, [(2, 4), (6, 6), (8, 12)]),
        (3, 3, [(3, 3)]),
        (4, 9, [(4, 4), (6, 6), (8, 9)]),
        (5, 5, []),
        (5, 7, [(6, 6)]),
        (7, 7, []),
        (13, 20, []),
        (12, 12, [(12, 12)]),
        (1, 1, []),
        (1, 2, [(2, 2)]),
        (9, 8, []),
        (-5, 3, [(2, 3)]),
        (10, 2**62, [(10, 12)]),
    ],
)
def test_runs_are_cut_to_what_was_asked(store: Store, low: int, high: int, expected: list[tuple[int, int]]) -> None:
    publish(store, 20)
    delete(store, 2, 3, 4, 6, 8, 9, 10, 11, 12)
    assert pruned(store, low, high) == expected


# --- all that was ever given out is stored or pruned --------------------------------------------------------


def members(runs: list[tuple[int, int]]) -> list[int]:
    return [seq for first, last in runs for seq in range(first, last + 1)]


def check_whole(reader: Reader) -> None:
    last = reader.last_seq()
    stored = [kept.seq for kept in reader.oldest(EVERYTHING, 0, 10_000)]
    runs = reader.pruned(1, last)
    assert sorted([*stored, *members(runs)]) == list(range(1, last + 1)), "each once: stored or pruned"
    assert all(before[1] + 1 < after[0] for before, after in itertools.pairwise(runs)), "runs are merged"
    assert reader.pruned(0, last + 100) == runs


topics = st.sampled_from(["a", "a.b", "b", "b.c", "c"])
deletions = st.tuples(
    st.just("delete"), st.sampled_from([">", "a.>", "a", "b", "*.c"]), st.integers(0, 30), st.integers(1, 9)
)
appends = st.tuples(st.just("publish"), st.lists(topics, min_size=1, max_size=8))
steps = st.lists(st.one_of(appends, deletions, st.tuples(st.just("fold"))), max_size=25)


@settings(max_examples=40, deadline=None)
@given(script=steps)
def test_random_deletions_leave_nothing_unexplained(
    side_by_side: Callable[[], AbstractContextManager[list[Store]]], script: list[tuple[str, ...]]
) -> None:
    with side_by_side() as stores:
        for verb, *arguments in script:
            runs = []
            for store in stores:
                with store.write() as writer:
                    do(writer, verb, *arguments)
                with store.read() as reader:
                    check_whole(reader)
                    runs.append(reader.pruned(1, 1_000))
            assert runs == runs[:1] * len(stores)


def do(writer: Writer, verb: str, *arguments: object) -> None:
    match verb, *arguments:
        case "publish", list(topics):
            writer.append([make_draft(topic, 1, {}, NOW) for topic in topics], NOW, WINDOW)
        case "delete", str(pattern), int(after), int(limit):
            writer.delete_messages(writer.oldest(parse_pattern(pattern), after, limit))
        case _:
            writer.fold_topic_counts(10)


limits = st.one_of(
    st.fixed_dictionaries({"max_count": st.integers(0, 5)}),
    st.fixed_dictionaries({"max_age": st.integers(0, 9)}),
    st.fixed_dictionaries({"max_bytes": st.integers(0, 9)}),
)
policies = st.tuples(st.sampled_from([">", "a.>", "a", "b", "*.c"]), limits)
rounds = st.lists(st.tuples(st.lists(topics, max_size=12), st.integers(0, 4), st.none() | policies), max_size=8)


@settings(max_examples=40, deadline=None)
@given(rounds)
def test_random_retention_leaves_nothing_unexplained(
    rounds: list[tuple[list[str], int, tuple[str, dict[str, int]] | None]],
) -> None:
    with tempfile.TemporaryDirectory() as directory:
        clock = ManualClock()
        with headwater.open(
            Path(directory) / "log.db", clock=clock, maintenance_interval=None, heartbeats=False
        ) as log:
            for topics, seconds, policy in rounds:
                if policy is not None:
                    log.retain(policy[0], **policy[1])
                log.publish_many([(topic, n) for n, topic in enumerate(topics)])
                clock.advance(seconds / 1000)
                log.run_maintenance()
                with log._core.engine.store.read() as reader:  # type: ignore[attr-defined]
                    check_whole(reader)


# --- sinks --------------------------------------------------------------------------------------------------


def test_a_sink_that_never_published(store: Store) -> None:
    with store.read() as reader:
        assert reader.sink_batch("s") is None


def test_the_last_batch_of_each_sink(store: Store) -> None:
    with store.write() as writer:
        writer.save_sink_batch("s", 0, NOW)
        assert writer.sink_batch("s") == 0, "the first batch has the number 0, which is not nothing"
        writer.save_sink_batch("s", 1, NOW)
        writer.save_sink_batch("t", 2**40, NOW)
    with store.read() as reader:
        assert [reader.sink_batch(sink) for sink in ("s", "t", "u")] == [1, 2**40, None]
