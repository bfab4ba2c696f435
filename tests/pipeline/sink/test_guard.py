"""Which batch is new, which is a repeat, which is refused; and ids that do not depend on when they are asked."""

from __future__ import annotations

import uuid

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.errors import InvalidOption
from headwater.pipeline.sink.guard import SinkKey, is_repeat, row_ids

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
    with pytest.raises(InvalidOption, match=r"sink q1, batch 4: batch 5 was published.*another sinkId"):
        is_repeat(BY_QUERY, 4, 5, None)


@pytest.mark.parametrize("batch", [4, 5, 6])
def test_a_name_that_another_query_used_is_refused_even_if_the_batch_would_fit(batch: int) -> None:
    with pytest.raises(InvalidOption, match="came from another query"):
        is_repeat(NAMED, batch, 5, None)
    with pytest.raises(InvalidOption, match="came from another query"):
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
