"""What every store promises about counting topics: right at every moment, and never slower for what was published."""

import contextlib
from collections.abc import Sequence

import pytest
from rows_looked_at import rows_looked_at

from headwater.delivery.publishing import DedupeWindow
from headwater.message import make_draft
from headwater.ports.records import TopicCount
from headwater.ports.store import Reader, Store
from headwater.topics import parse_pattern

NOW = 1_700_000_000_000


def append(store: Store, topics: Sequence[str]) -> None:
    with store.write() as writer:
        writer.append([make_draft(topic, 1, {}, NOW) for topic in topics], NOW, DedupeWindow())


def topic_counts(reader: Reader) -> list[TopicCount]:
    return reader.topic_counts()


def counts(store: Store) -> dict[str, int]:
    with store.read() as reader:
        return {counted.topic: counted.count for counted in reader.topic_counts()}


def test_counting_topics_looks_only_at_what_is_new(store: Store) -> None:
    append(store, ["a", "b"])
    counts(store)
    few = rows_looked_at(store, topic_counts)
    append(store, ["a", "b"] * 2_500)
    assert counts(store) == {"a": 2_501, "b": 2_501}

    assert rows_looked_at(store, topic_counts) <= few + 20
    append(store, ["a"])
    assert rows_looked_at(store, topic_counts) <= few + 200
    assert counts(store) == {"a": 2_502, "b": 2_501}


def test_a_writer_counts_what_it_publishes_and_no_reader_does_until_it_commits(store: Store) -> None:
    append(store, ["a", "a"])
    assert counts(store) == {"a": 2}
    with contextlib.suppress(ZeroDivisionError), store.write() as writer:
        writer.append([make_draft(topic, 1, {}, NOW) for topic in ("b", "c")], NOW, DedupeWindow())
        assert [counted.topic for counted in writer.topic_counts()] == ["a", "b", "c"]
        raise ZeroDivisionError
    append(store, ["d", "c"])  # the same seqs, the last message the same too
    assert counts(store) == {"a": 2, "c": 1, "d": 1}


@pytest.mark.parametrize("folds", [False, True])
def test_what_is_deleted_is_counted_no_more_in_between(store: Store, folds: bool) -> None:
    append(store, ["a", "b", "a"])
    assert counts(store) == {"a": 2, "b": 1}
    with store.write() as writer:
        if folds:
            writer.fold_topic_counts(2)
        writer.delete_messages(writer.oldest(parse_pattern("a"), 0, 1))
        assert [counted.count for counted in writer.topic_counts()] == [1, 1]
    assert counts(store) == {"a": 1, "b": 1}
    append(store, ["b"])
    assert counts(store) == {"a": 1, "b": 2}


def test_an_older_view_counts_what_it_sees(concurrent_store: Store) -> None:
    append(concurrent_store, ["a"])
    with concurrent_store.read() as older:
        assert older.last_seq() == 1
        append(concurrent_store, ["b"])
        assert counts(concurrent_store) == {"a": 1, "b": 1}
        assert [counted.topic for counted in older.topic_counts()] == ["a"]
    assert counts(concurrent_store) == {"a": 1, "b": 1}
