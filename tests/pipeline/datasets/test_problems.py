"""The sentence that says what is wrong with a message."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.pipeline.datasets.problems import PROBLEM_CHARS_MAX, problems, validators_of
from headwater.pipeline.datasets.types import RegisteredSchema, Types

ORDER_1 = json.dumps({"type": "object", "required": ["sku"], "properties": {"sku": {"type": "string"}}})
ORDER_2 = json.dumps({"properties": {"lines": {"items": {"properties": {"n": {"type": "integer"}}}}}})
DATED = json.dumps({"properties": {"at": {"type": "string", "format": "date-time"}}})
TYPES = Types(
    (
        RegisteredSchema("order", 1, ORDER_1),
        RegisteredSchema("order", 2, ORDER_2),
        RegisteredSchema("dated", None, DATED),
    )
)


def problem(type: str | None, version: int | None, data: str | None) -> str | None:
    return problems(TYPES, [(type, version, data)])[0]


@pytest.mark.parametrize(
    ("type", "version", "data"),
    [
        (None, None, "null"),
        ("never heard of", 7, '{"sku": 5}'),
        ("order", 1, ' {"sku": "ü", "more": [1, 2]} '),
        ("order", 2, '{"lines": [{"n": 1.0}]}'),
        ("dated", None, '{"at": "2026-11-15T10:00:00Z"}'),
        ("dated", 3, '{"at": "2026-11-15t10:00:00+01:00"}'),
        (None, None, '{"a": 1, "a": 2}'),
    ],
)
def test_nothing_is_wrong_with(type: str | None, version: int | None, data: str) -> None:
    assert problem(type, version, data) is None


@pytest.mark.parametrize(
    "data",
    [
        "",
        " ",
        "{",
        "NaN",
        "[Infinity]",
        "-Infinity",
        "{'a': 1}",
        '{"a": 1} x',
        "1 2",
        "[1,]",
        "01",
        '"\t"',
        '"\\ud800"',
        "[" * 5000 + "]" * 5000,
    ],
)
def test_what_is_not_json_is_wrong_whatever_its_type(data: str) -> None:
    found = problems(TYPES, [(None, None, data), ("order", 1, data)])
    assert all(each is not None and each.startswith("data is not JSON: ") for each in found)


def test_a_violation_says_where_and_why() -> None:
    assert problem("order", 1, "{}") == '$: "sku" is a required property'
    assert problem("order", 1, '{"sku": 5}') == '$.sku: 5 is not of type "string"'
    assert problem("order", 2, '{"lines": [{}, {"n": 1.5}]}') == '$.lines[1].n: 1.5 is not of type "integer"'
    assert problem("dated", 1, '{"at": "yesterday"}') == '$.at: "yesterday" is not a "date-time"'


def test_an_unknown_version_of_a_known_type_is_wrong() -> None:
    assert problem("order", 3, "{}") == "version 3 of order is not registered; known: 1, 2"
    assert problem("order", None, "{}") == "order without a version is not registered; known: 1, 2"


def test_of_very_many_versions_the_newest_are_told() -> None:
    types = Types(tuple(RegisteredSchema("order", number, "{}") for number in range(1, 101)))
    (found,) = problems(types, [("order", 500, "{}")])
    assert found is not None
    assert found.startswith("version 500 of order is not registered; known: …, 81, 82")
    assert found.endswith("99, 100")


def test_a_version_of_its_own_goes_before_any_version() -> None:
    types = Types((RegisteredSchema("a", None, "false"), RegisteredSchema("a", 1, "true")))
    found = problems(types, [("a", 1, "1"), ("a", 2, "1"), ("a", None, "1")])
    assert [each is None for each in found] == [True, False, False]


def test_no_data_is_wrong() -> None:
    assert problem(None, None, None) == "there is no data"


def test_a_problem_is_never_long() -> None:
    found = problem("order", 1, json.dumps({"sku": ["x" * 100_000]}))
    assert found is not None
    assert found.startswith('$.sku: ["xxx')
    assert len(found) == PROBLEM_CHARS_MAX


def test_validators_are_compiled_once() -> None:
    assert validators_of(TYPES) is validators_of(Types(tuple(TYPES.schemas)))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)


@given(JSON, st.booleans())
def test_all_json_is_json_and_nothing_is_once_it_is_cut_short(value: object, ascii: bool) -> None:
    text = json.dumps([value], ensure_ascii=ascii)
    assert problem(None, None, text) is None
    assert problem(None, None, text[:-1]) is not None
    assert problem(None, None, text + "]") is not None
