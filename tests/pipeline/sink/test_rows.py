"""What a row must be to be published: the same checks and limits as a publish has."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import msgspec
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.errors import InvalidData, InvalidInput, InvalidOption, InvalidTopic, TooLarge
from headwater.message import DATA_BYTES_MAX, Draft
from headwater.pipeline.sink.guard import row_ids
from headwater.pipeline.sink.options import DataFormat
from headwater.pipeline.sink.rows import STAGED_BYTES_MAX, STAGED_ROWS_MAX, RowChecker, drafts_of

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


def staged(
    rows: list[dict[str, Any]], topic: str | None = None, data_format: DataFormat = "json"
) -> list[pa.RecordBatch]:
    names = [name for name in TYPES if any(name in row for row in rows)]
    batch = pa.record_batch([pa.array([row.get(name) for row in rows], TYPES[name]) for name in names], names=names)
    checker = RowChecker(names, topic=topic, data_format=data_format, place="partition 0", now_ms=NOW_MS)
    return list(checker.staged(batch))


def drafts(rows: list[dict[str, Any]], **how: Any) -> list[Draft]:
    pieces = staged(rows, **how)
    ids = row_ids("sink", 0, 0)
    return [draft for piece in pieces for draft in drafts_of(piece, 0, ids)]


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
    assert second.extras is None
    assert second.id == row_ids("sink", 0, 0)(1)


def test_the_option_topic_goes_before_the_column() -> None:
    assert drafts([{"topic": "not a topic", "data": "1"}], topic="fixed")[0].topic == "fixed"


def test_text_becomes_a_json_string_when_asked() -> None:
    assert drafts([{"topic": "t", "data": 'say "hi"'}], data_format="text")[0].data_json == '"say \\"hi\\""'


@pytest.mark.parametrize(
    ("bad", "kind", "words"),
    [
        ({"data": "{oops"}, InvalidData, ["not JSON", "'{oops'", "dataFormat"]),
        ({"data": None}, InvalidData, ["data is null", "coalesce"]),
        ({"data": '"' + "x" * DATA_BYTES_MAX + '"'}, TooLarge, [str(DATA_BYTES_MAX)]),
        ({"topic": "a..b"}, InvalidTopic, ["'a..b'", "empty"]),
        ({"topic": None}, InvalidTopic, ["None"]),
        ({"id": ""}, InvalidOption, ["id must be non-empty"]),
        ({"id": "x" * 129}, TooLarge, ["id has 129"]),
        ({"from": ""}, InvalidOption, ["from must be non-empty"]),
        ({"version": -1}, InvalidOption, ["version"]),
        ({"priority": 10**9}, InvalidOption, ["priority"]),
        ({"deliver_at": datetime(1960, 1, 1, tzinfo=UTC)}, InvalidOption, ["deliver_at"]),
        ({"headers": [("type", "x")]}, InvalidOption, ["option of its own"]),
        ({"headers": [("h", "x" * 70_000)]}, TooLarge, ["headers take"]),
    ],
)
def test_a_bad_row_is_told_with_its_place_and_what_to_do(
    bad: dict[str, Any], kind: type[InvalidInput], words: list[str]
) -> None:
    good = {"topic": "t", "data": "1"}
    with pytest.raises(kind) as raised:
        staged([good, good, {**good, **bad}, good])
    told = str(raised.value)
    assert "row 2 of partition 0" in told
    assert "Nothing of this batch was published" in told
    assert all(word in told for word in words), told


def test_a_bad_row_of_a_later_batch_is_counted_from_the_start_of_the_partition() -> None:
    checker = RowChecker(["topic", "data"], topic=None, data_format="json", place="partition 4", now_ms=NOW_MS)
    good = pa.record_batch([["t"] * 10, ["1"] * 10], names=["topic", "data"])
    list(checker.staged(good))
    with pytest.raises(InvalidData, match="row 11 of partition 4"):
        list(checker.staged(pa.record_batch([["t", "t"], ["1", "]"]], names=["topic", "data"])))


def test_pieces_are_bounded_by_rows_and_by_bytes() -> None:
    many = staged([{"topic": "t", "data": str(number)} for number in range(2_500)])
    assert [piece.num_rows for piece in many] == [STAGED_ROWS_MAX, STAGED_ROWS_MAX, 500]
    large = staged([{"topic": "t", "data": '"' + "x" * 1_000_000 + '"'} for _ in range(40)])
    assert max(piece.column("data").nbytes for piece in large) <= STAGED_BYTES_MAX + 4 * 41
    assert sum(piece.num_rows for piece in large) == 40


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
    published = drafts([{"topic": "t", "data": text} for text in texts], data_format="text")
    assert [msgspec.json.decode(draft.data_json) for draft in published] == texts
    assert [draft.size for draft in published] == [len(draft.data_json.encode()) for draft in published]
