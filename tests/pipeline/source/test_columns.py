"""Columns made a batch at a time say what the log says row by row."""

from __future__ import annotations

import json
from typing import Any

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from headwater.message import TIME_MS_MAX, datetime_of, derived_id
from headwater.pipeline.source.columns import byte_sizes, derived_ids, headers, readable, times

WHOLE = st.integers(0, 2**63 - 1)
FITTING = st.integers(0, 2**48 - 1)
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


@given(st.lists(st.tuples(FITTING, FITTING)) | st.lists(st.tuples(WHOLE, WHOLE)), st.integers(0, 2**26 - 1))
def test_ids_follow_from_the_rows_as_they_do_one_by_one(rows: list[tuple[int, int]], salt: int) -> None:
    at, seqs = pa.array([at for at, _ in rows], pa.int64()), pa.array([seq for _, seq in rows], pa.int64())
    assert derived_ids(at, seqs, salt).to_pylist() == [derived_id(at, salt, seq) for at, seq in rows]


def test_ids_of_a_piece_of_a_batch_are_its_own() -> None:
    seqs = pa.array(range(10), pa.int64())
    assert derived_ids(seqs.slice(3, 2), seqs.slice(5, 2), 7).to_pylist() == [derived_id(3, 7, 5), derived_id(4, 7, 6)]


@given(st.lists(st.none() | st.integers(-(2**63), 2**63 - 1) | st.integers(0, TIME_MS_MAX)))
def test_times_are_those_of_the_log_whatever_was_put_in(ms: list[int | None]) -> None:
    found = times(pa.array(ms, pa.int64()))
    assert found.type == pa.timestamp("us", tz="UTC")
    assert found.to_pylist() == [None if at is None else datetime_of(at) for at in ms]


@given(st.lists(st.none() | st.dictionaries(st.text(), JSON, max_size=4)))
def test_headers_keep_text_and_say_the_rest_as_json(rows: list[dict[str, Any] | None]) -> None:
    found = headers(pa.array([None if row is None else json.dumps(row) for row in rows], pa.string())).to_pylist()
    for row, pairs in zip(rows, found, strict=True):
        if row is None:
            assert pairs is None
        else:
            got = dict(pairs)
            assert got.keys() == row.keys()
            for name, value in row.items():
                assert got[name] == value if isinstance(value, str) else json.loads(got[name]) == value


def test_headers_that_are_no_object_are_still_seen() -> None:
    assert headers(pa.array(["[1]", None, "{", '{"a":"b"}'])).to_pylist() == [
        [("", "[1]")],
        None,
        [("", "{")],
        [("a", "b")],
    ]


@given(st.lists(st.none() | st.binary() | st.text().map(str.encode)))
def test_text_that_is_not_utf8_is_replaced_and_nothing_else_is_touched(rows: list[bytes | None]) -> None:
    raw = pa.array(rows, pa.binary())
    texts = pa.StringArray.from_buffers(len(raw), raw.buffers()[1], raw.buffers()[2], raw.buffers()[0])
    assert readable(texts).to_pylist() == [None if row is None else row.decode(errors="replace") for row in rows]
    assert byte_sizes(texts).to_pylist() == [None if row is None else len(row) for row in rows]
