"""Which column and which type a property of a JSON Schema gets."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.errors import TooLarge
from headwater.pipeline.datasets.json_types import COLUMNS_MAX, properties, sql_type


def columns(*schemas: dict[str, Any], taken: tuple[str, ...] = ()) -> dict[str, str]:
    return {each.column: sql_type(each.kind) for each in properties(schemas, taken)}


def with_properties(names: list[str]) -> dict[str, Any]:
    return {"properties": {name: {} for name in names}}


def column_type(schema: Any, **root: Any) -> str:
    return columns({"properties": {"x": schema}, **root})["x"]


@pytest.mark.parametrize(
    ("schema", "kind"),
    [
        ({"type": "string"}, "string"),
        ({"type": "integer"}, "bigint"),
        ({"type": "number"}, "double"),
        ({"type": "boolean"}, "boolean"),
        ({"type": "string", "format": "date-time"}, "timestamp"),
        ({"type": "string", "format": "email"}, "string"),
        ({"type": ["integer", "null"]}, "bigint"),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "bigint"),
        ({"allOf": [{"$ref": "#/$defs/money"}]}, "struct<`amount`: double, `unit`: string>"),
        ({"$ref": "#/$defs/money"}, "struct<`amount`: double, `unit`: string>"),
        ({"$ref": "#/$defs/a~1b"}, "boolean"),
        ({"type": "array", "items": {"type": "integer"}}, "array<bigint>"),
        ({"type": "array", "items": {"$ref": "#/$defs/money"}}, "array<struct<`amount`: double, `unit`: string>>"),
        # all else is text
        ({"type": ["integer", "string"]}, "string"),
        ({"anyOf": [{"type": "integer"}, {"type": "string"}]}, "string"),
        ({"type": "array"}, "string"),
        ({"type": "object"}, "string"),
        ({"type": "object", "properties": {"a": {}, "A": {}}}, "string"),
        ({"enum": [1, 2]}, "string"),
        ({"$ref": "#/$defs/nowhere"}, "string"),
        (True, "string"),
        ({}, "string"),
    ],
)
def test_the_type_of_a_column_follows_from_the_schema(schema: Any, kind: str) -> None:
    money = {"type": "object", "properties": {"amount": {"type": "number"}, "unit": {"type": "string"}}}
    assert column_type(schema, **{"$defs": {"money": money, "a/b": {"type": "boolean"}}}) == kind


def test_a_schema_that_contains_itself_ends_in_text() -> None:
    tree = {"type": "object", "properties": {"left": {"$ref": "#/$defs/tree"}}}
    found = column_type({"$ref": "#/$defs/tree"}, **{"$defs": {"tree": tree}})
    assert found.startswith("struct<`left`: struct<`left`: ")
    assert found.rstrip(">").endswith("`left`: string")
    assert column_type({"$ref": "#/$defs/loop"}, **{"$defs": {"loop": {"$ref": "#/$defs/loop"}}}) == "string"


def test_versions_are_united() -> None:
    def version(**kinds: Any) -> dict[str, Any]:
        return {"properties": kinds}

    old = version(
        gone={"type": "boolean"},
        same={"type": "string"},
        widened={"type": "integer"},
        other={"type": "string"},
        nested={"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}},
        many={"type": "array", "items": {"type": "integer"}},
    )
    new = version(
        nested={"type": "object", "properties": {"c": {"type": "boolean"}, "b": {"type": "integer"}}},
        many={"type": "array", "items": {"type": "number"}},
        other={"type": "integer"},
        widened={"type": "number"},
        same={"type": "string"},
        added={"type": "string", "format": "date-time"},
    )
    assert columns(old, new) == {
        "gone": "boolean",
        "same": "string",
        "widened": "double",
        "other": "string",
        "nested": "struct<`a`: bigint, `b`: string, `c`: boolean>",
        "many": "array<double>",
        "added": "timestamp",
    }


def test_names_that_are_taken_or_differ_only_in_case_are_told_apart() -> None:
    schema = with_properties(["Seq", "sku", "SKU", "Sku", "data_seq", "", "größe", "GRÖSSE", "GRÖßE"])
    found = [(each.column, each.name) for each in properties([schema], taken=["seq", "id"])]
    assert found == [
        ("data_Seq", "Seq"),
        ("sku", "sku"),
        ("SKU_2", "SKU"),
        ("Sku_3", "Sku"),
        ("data_seq_2", "data_seq"),
        ("data_", ""),
        ("größe", "größe"),
        ("GRÖSSE", "GRÖSSE"),
        ("GRÖßE_2", "GRÖßE"),
    ]


@given(st.lists(st.text("aAbB_2", max_size=3), unique=True), st.lists(st.text("aAbB_2", max_size=3), unique=True))
def test_a_new_version_renames_no_column_and_no_two_are_alike(old: list[str], new: list[str]) -> None:
    before = properties([with_properties(old)], taken=["a", "b_2"])
    after = properties([with_properties(old), with_properties(new)], taken=["a", "b_2"])
    assert after[: len(before)] == before
    assert {each.name for each in after} == {*old, *new}
    lower = [each.column.lower() for each in after]
    assert len(set(lower) | {"a", "b_2"}) == len(lower) + 2


def test_the_number_of_columns_is_limited() -> None:
    with pytest.raises(TooLarge, match=str(COLUMNS_MAX)):
        properties([{"properties": {f"p{number}": {} for number in range(COLUMNS_MAX + 1)}}], taken=[])


def test_names_are_quoted_for_sql() -> None:
    nested = {"type": "object", "properties": {"a`b c": {"type": "string"}}}
    assert column_type(nested) == "struct<`a``b c`: string>"
