"""Registered types: files, problems of messages, columns and their values."""

from __future__ import annotations

import json
import pickle
import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.errors import InvalidOptionError, TooLargeError
from headwater.pipeline import types as types_module
from headwater.pipeline.columns import TYPED_SCHEMA
from headwater.pipeline.types import (
    COLUMNS_MAX,
    PROBLEM_CHARS_MAX,
    SCHEMA_BYTES_MAX,
    RegisteredSchema,
    Types,
    check,
    load_types,
    typed_arrays,
    typed_columns,
    typed_schema,
)


def registered(*schemas: Any) -> Types:
    """Versions 1, 2, … of the type `t`."""
    return Types(tuple(RegisteredSchema("t", number, json.dumps(each)) for number, each in enumerate(schemas, 1)))


class TestRegistry:
    def test_types_and_versions_come_from_the_names_of_the_files(self, tmp_path: Path) -> None:
        write(tmp_path, **{"order_placed@10": {"title": "ten"}, "order_placed@2": {}, "note": True, "größe.v@0": {}})
        (tmp_path / "README.md").write_text("not a schema")

        types = load_types(tmp_path)

        assert {name: list(versions) for name, versions in types.by_name.items()} == {
            "order_placed": [2, 10],
            "note": [None],
            "größe.v": [0],
        }
        assert types.by_name["order_placed"][10].text == '{"title": "ten"}'
        assert types.by_name["note"][None].text == "true"

    def test_an_empty_directory_registers_nothing(self, tmp_path: Path) -> None:
        assert load_types(tmp_path) == Types(())

    def test_types_can_be_sent_to_executors(self, tmp_path: Path) -> None:
        types = load_types(write(tmp_path, **{"a@1": {"type": "object"}}))
        assert types.table_names
        assert pickle.loads(pickle.dumps(types)) == types

    def test_the_digest_is_that_of_the_schemas_in_any_order(self) -> None:
        one, two = RegisteredSchema("a", 1, "{}"), RegisteredSchema("a", None, "{}")
        assert Types((one, two)).digest == Types((two, one)).digest
        others = [(), (one,), (two,), (RegisteredSchema("a", 1, "true"),), (RegisteredSchema("b", 1, "{}"),)]
        assert len({Types(each).digest for each in others}) == len(others)
        assert re.fullmatch("[0-9a-f]{16}", Types().digest)

    @pytest.mark.parametrize("name", ["@1", "a@", "a@01", "a@-1", "a@1.5", "a@x", "a@1000001", ".hidden"])
    def test_a_name_without_a_type_or_with_a_wrong_version_is_refused(self, tmp_path: Path, name: str) -> None:
        with pytest.raises(InvalidOptionError, match=r"Call it TYPE@VERSION\.json") as caught:
            load_types(write(tmp_path, **{name: {}}))
        assert caught.value.where == str(tmp_path / f"{name}.json")

    @pytest.mark.parametrize(
        ("content", "why"),
        [
            ("{", "not JSON"),
            ("[" * 100_000, "not JSON"),
            ('"text"', "not a JSON Schema"),
            ({"type": "strin"}, "not a JSON Schema"),
            ({"pattern": "("}, "not a JSON Schema"),
            ({"$ref": "#/$defs/nowhere"}, "nowhere"),
            ({"$schema": "http://127.0.0.1:9/meta", "type": "string"}, "meta-schema"),
        ],
    )
    def test_what_is_not_a_schema_is_refused_with_file_and_reason(self, tmp_path: Path, content: Any, why: str) -> None:
        with pytest.raises(InvalidOptionError, match=why) as caught:
            load_types(write(tmp_path, **{"good@1": {}, "order@1": content}))
        assert caught.value.where == str(tmp_path / "order@1.json")
        assert caught.value.next

    def test_a_schema_refers_to_its_own_parts_only(self, tmp_path: Path) -> None:
        inside = {"$ref": "#/$defs/money", "$defs": {"money": {"type": "number"}}}
        assert "price" in load_types(write(tmp_path, price=inside)).by_name
        outside = tmp_path / "outside.txt"
        outside.write_text('{"type": "string"}')
        for reference in (outside.as_uri(), "outside.txt", "http://127.0.0.1:9/x.json", "price.json"):
            with pytest.raises(InvalidOptionError, match="nothing is fetched"):
                load_types(write(tmp_path, **{"order@1": {"properties": {"a": {"$ref": reference}}}}))

    def test_sizes_and_numbers_are_limited(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        write(tmp_path, a={}, b={})
        with monkeypatch.context() as patch:
            patch.setattr(types_module, "SCHEMAS_MAX", 1)
            with pytest.raises(TooLargeError, match="2 message types, the limit is 1"):
                load_types(tmp_path)
        write(tmp_path, a=properties(*map(str, range(COLUMNS_MAX + 1))))
        with pytest.raises(TooLargeError, match=str(COLUMNS_MAX)) as caught:
            load_types(tmp_path)
        assert caught.value.where == "type a"
        write(tmp_path, a={"title": "x" * SCHEMA_BYTES_MAX})
        with pytest.raises(TooLargeError, match="256 KiB"):
            load_types(tmp_path)

    def test_a_directory_or_file_that_cannot_be_read_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(InvalidOptionError, match="Name a directory"):
            load_types(tmp_path / "nowhere")
        (tmp_path / "a.json").write_bytes(b'"\xff"')
        with pytest.raises(InvalidOptionError, match="not JSON in UTF-8"):
            load_types(tmp_path)

    def test_each_type_gets_a_table_of_its_own(self) -> None:
        names = ("Order-Placed", "order.placed", "order_placed", "größe", "…")
        assert Types(tuple(RegisteredSchema(name, None, "{}") for name in names)).table_names == {
            "Order-Placed": "typed/order_placed_57ed7864",
            "order.placed": "typed/order_placed_c8311fb1",
            "order_placed": "typed/order_placed_08dc96cc",
            "größe": "typed/gr_e",
            "…": "typed/type",
        }


ORDER_1 = json.dumps({"type": "object", "required": ["sku"], "properties": {"sku": {"type": "string"}}})
ORDER_2 = json.dumps({"properties": {"lines": {"items": {"properties": {"n": {"type": "integer"}}}}}})
DATED = json.dumps({"properties": {"at": {"type": "string", "format": "date-time"}}})
ORDERS = Types(
    (
        RegisteredSchema("order", 1, ORDER_1),
        RegisteredSchema("order", 2, ORDER_2),
        RegisteredSchema("dated", None, DATED),
    )
)


class TestProblems:
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
    def test_nothing_is_wrong_with(self, type: str | None, version: int | None, data: str) -> None:
        assert problem(type, version, data) is None

    @pytest.mark.parametrize(
        "data",
        [
            *("", " ", "{", "NaN", "[Infinity]", "-Infinity", "{'a': 1}", '{"a": 1} x', "1 2", "[1,]", "01", '"\t"'),
            *('"\\ud800"', "1e400", "[" * 5000 + "]" * 5000),
        ],
    )
    def test_what_is_not_json_is_wrong_whatever_its_type(self, data: str) -> None:
        found = [problem("order", 1, data), problem(None, None, data), problem(None, None, data, Types())]
        assert all(each is not None and each.startswith("data is not JSON: ") for each in found)

    def test_no_data_is_wrong(self) -> None:
        assert problem(None, None, None) == problem(None, None, None, Types()) == "there is no data"

    def test_a_violation_says_where_and_why(self) -> None:
        assert problem("order", 1, "{}") == '$: "sku" is a required property'
        assert problem("order", 1, '{"sku": 5}') == '$.sku: 5 is not of type "string"'
        assert problem("order", 2, '{"lines": [{}, {"n": 1.5}]}') == '$.lines[1].n: 1.5 is not of type "integer"'
        assert problem("dated", 1, '{"at": "yesterday"}') == '$.at: "yesterday" is not a "date-time"'

    def test_an_unknown_version_of_a_known_type_is_wrong(self) -> None:
        assert problem("order", 3, "{}") == "version 3 of order is not registered; known: 1, 2"
        assert problem("order", None, "{}") == "order without a version is not registered; known: 1, 2"

    def test_of_very_many_versions_the_newest_are_named(self) -> None:
        found = problem("t", 500, "{}", registered(*[{}] * 100))
        assert found is not None
        assert found.startswith("version 500 of t is not registered; known: …, 81, 82")
        assert found.endswith("99, 100")

    def test_a_version_of_its_own_goes_before_any_version(self) -> None:
        types = Types((RegisteredSchema("a", None, "false"), RegisteredSchema("a", 1, "true")))
        assert [problem("a", version, "1", types) is None for version in (1, 2, None)] == [True, False, False]

    def test_a_problem_is_never_long(self) -> None:
        found = problem("order", 1, json.dumps({"sku": ["x" * 100_000]}))
        assert found is not None
        assert found.startswith('$.sku: ["xxx')
        assert len(found) == PROBLEM_CHARS_MAX

    def test_data_of_registered_types_is_decoded_once(self) -> None:
        rows = [("order", 2, "[1]"), (None, None, "2"), ("order", 9, "3"), ("dated", None, "{}"), ("order", 2, "5")]
        type, version, data = map(list, zip(*rows, strict=True))
        problems, values = check(ORDERS, pa.array(type), pa.array(version), pa.array(data))
        assert values == {"order": {0: [1], 4: 5}, "dated": {3: {}}}
        assert list(problems) == [2]

    JSON = st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
        max_leaves=10,
    )

    @given(JSON, st.booleans())
    def test_all_json_is_json_and_nothing_is_once_it_is_cut_short(self, value: object, ascii: bool) -> None:
        text = json.dumps([value], ensure_ascii=ascii)
        assert problem(None, None, text) is None
        assert problem(None, None, text[:-1]) is not None
        assert problem(None, None, text + "]") is not None


MONEY = {"type": "object", "properties": {"amount": {"type": "number"}, "unit": {"type": "string"}}}
MONEY_TYPE = "struct<amount: double, unit: string>"


class TestColumns:
    @pytest.mark.parametrize(
        ("schema", "expected"),
        [
            ({"type": "string"}, "string"),
            ({"type": "integer"}, "int64"),
            ({"type": "number"}, "double"),
            ({"type": "boolean"}, "bool"),
            ({"type": "string", "format": "date-time"}, "timestamp[us, tz=UTC]"),
            ({"type": "string", "format": "email"}, "string"),
            ({"type": ["integer", "null"]}, "int64"),
            ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "int64"),
            ({"allOf": [{"$ref": "#/$defs/money"}]}, MONEY_TYPE),
            ({"$ref": "#/$defs/money"}, MONEY_TYPE),
            ({"$ref": "#/$defs/a~1b"}, "bool"),
            ({"type": "array", "items": {"type": "integer"}}, "list<item: int64>"),
            ({"type": "array", "items": {"$ref": "#/$defs/money"}}, f"list<item: {MONEY_TYPE}>"),
            ({"type": "object", "properties": {"a b": {}, "a_b": {}, "A_B": {}}}, "struct<{}>"),
            # all else is text
            ({"type": ["integer", "string"]}, "string"),
            ({"anyOf": [{"type": "integer"}, {"type": "string"}]}, "string"),
            ({"type": "array"}, "string"),
            ({"type": "object"}, "string"),
            ({"enum": [1, 2]}, "string"),
            ({"$ref": "#/$defs/nowhere"}, "string"),
            (True, "string"),
            ({}, "string"),
        ],
    )
    def test_the_type_of_a_column_follows_from_the_schema(self, schema: Any, expected: str) -> None:
        root = {"properties": {"x": schema}, "$defs": {"money": MONEY, "a/b": {"type": "boolean"}}}
        assert columns(root) == {"x": expected.format("a_b: string, a_b_2: string, A_B_3: string")}

    def test_a_schema_that_contains_itself_ends_in_text(self) -> None:
        tree = {"type": "object", "properties": {"left": {"$ref": "#/$defs/tree"}, "right": {"$ref": "#/$defs/tree"}}}
        root = {"properties": {"x": {"$ref": "#/$defs/tree"}, "y": {"$ref": "#"}}, "$defs": {"tree": tree}}
        assert columns(root) == {"x": "struct<left: string, right: string>", "y": "string"}
        assert columns({**properties("x"), "$ref": "#/$defs/loop", "$defs": {"loop": {"$ref": "#/$defs/loop"}}}) == {}

    def test_a_reference_to_an_anchor_is_text(self) -> None:
        assert columns({"type": "object", "properties": {"x": {"$ref": "#anchor"}}}) == {"x": "string"}

    def test_properties_beside_a_condition_are_columns(self) -> None:
        assert columns({**properties("x"), "allOf": [{"required": ["x"]}]}) == {"x": "string"}

    def test_references_that_multiply_are_refused(self) -> None:
        def twice(name: str) -> dict[str, Any]:
            return {"type": "object", "properties": {side: {"$ref": f"#/$defs/{name}"} for side in ("l", "r")}}

        levels = {f"d{level}": twice(f"d{level + 1}") for level in range(15)}
        with pytest.raises(TooLargeError, match=str(COLUMNS_MAX)):
            columns({"properties": {"x": {"$ref": "#/$defs/d0"}}, "$defs": levels})

    def test_versions_are_united(self) -> None:
        old = {
            "gone": {"type": "boolean"},
            "same": {"type": "string"},
            "widened": {"type": "integer"},
            "other": {"type": "string"},
            "nested": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}},
            "many": {"type": "array", "items": {"type": "integer"}},
        }
        new = {
            "nested": {"type": "object", "properties": {"c": {"type": "boolean"}, "b": {"type": "integer"}}},
            "many": {"type": "array", "items": {"type": "number"}},
            "other": {"type": "array", "items": {}},
            "widened": {"type": "number"},
            "same": {"type": "string"},
            "added": {"type": "string", "format": "date-time"},
        }
        assert columns({"properties": old}, {"properties": new}) == {
            "gone": "bool",
            "same": "string",
            "widened": "double",
            "other": "string",
            "nested": "struct<a: int64, b: string, c: bool>",
            "many": "list<item: double>",
            "added": "timestamp[us, tz=UTC]",
        }

    def test_names_are_those_of_the_properties_where_delta_allows_it(self) -> None:
        names = ["Seq", "sku", "SKU", "Sku", "data_seq", "", "größe", "GRÖSSE", "GRÖßE", "day", "a, b", "a__b", "(=)"]
        found = typed_columns("t", registered(properties(*names)))
        assert [(each.column, each.name) for each in found] == [
            ("data_Seq", "Seq"),
            ("sku", "sku"),
            ("SKU_2", "SKU"),
            ("Sku_3", "Sku"),
            ("data_seq_2", "data_seq"),
            ("data_", ""),
            ("größe", "größe"),
            ("GRÖSSE", "GRÖSSE"),
            ("GRÖßE_2", "GRÖßE"),
            ("data_day", "day"),
            ("a__b", "a, b"),
            ("a__b_2", "a__b"),
            ("___", "(=)"),
        ]

    NAMES = st.lists(st.text("aAbB_2 ,{\n", max_size=3), unique=True)

    @given(NAMES, NAMES)
    def test_a_new_version_renames_no_column_and_no_two_are_alike(self, old: list[str], new: list[str]) -> None:
        before = typed_columns("t", registered(properties(*old)))
        after = typed_columns("t", registered(properties(*old), properties(*new)))
        assert after[: len(before)] == before
        assert {each.name for each in after} == {*old, *new}
        names = [name.lower() for name in typed_schema("t", registered(properties(*old, *new))).names]
        assert len(set(names)) == len(names)
        assert not set("".join(names)) & set(" ,;{}()\n\t=")


class TestValues:
    @pytest.mark.parametrize(
        ("schema", "values"),
        [
            ({}, [("a", "a"), (1.5, "1.5"), (True, "true"), ({"b": [1, "ü"]}, '{"b":[1,"ü"]}'), (None, None)]),
            ({"type": "string"}, [("", ""), ("ü", "ü"), (None, None)]),
            ({"type": "integer"}, [(1, 1), (None, None), (-(2**63), -(2**63)), (2**63 - 1, 2**63 - 1)]),
            ({"type": "integer"}, [(2.0, 2), (1.5, None), (True, None), ("1", None), (1e300, None)]),
            ({"type": "integer"}, [(1, 1), (2**63, None), (-(2**63) - 1, None), (10**30, None)]),
            ({"type": "number"}, [(1.5, 1.5), (None, None)]),
            ({"type": "number"}, [(1, 1.0), (10**30, 1e30), (10**400, None), (True, None), ("1", None)]),
            ({"type": "boolean"}, [(True, True), (False, False), (None, None)]),
            ({"type": "boolean"}, [(1, None), ("true", None), (True, True)]),
            ({"type": "array", "items": {"type": "integer"}}, [([1, 2.0, None, "x"], [1, 2, None, None]), ([], [])]),
            ({"type": "array", "items": {"type": "integer"}}, [(None, None), ([1], [1]), ("no", None), ({}, None)]),
            ({"type": "array", "items": MONEY}, [([{"unit": "EUR"}, 1], [{"amount": None, "unit": "EUR"}, None])]),
            (MONEY, [({"amount": 1, "more": 2}, {"amount": 1.0, "unit": None}), ([], None), (None, None)]),
            (MONEY, [({}, {"amount": None, "unit": None})]),
        ],
    )
    def test_values_are_null_where_they_are_of_another_kind(self, schema: Any, values: list[tuple[Any, Any]]) -> None:
        types = registered({"properties": {"x": schema}})
        (found,) = typed_arrays(typed_columns("t", types), [{"x": given} for given, _ in values])
        found.validate(full=True)
        assert found.type == typed_schema("t", types).field("x").type
        assert found.to_pylist() == [expected for _, expected in values]

    @pytest.mark.parametrize(
        ("text", "expected"),
        [
            ("2026-11-15T10:30:00Z", (2026, 11, 15, 10, 30)),
            ("2026-11-15t12:30:00.250+02:00", (2026, 11, 15, 10, 30, 0, 250_000)),
            ("2026-11-15T10:30:00z", (2026, 11, 15, 10, 30)),
            ("0001-01-02T00:00:00+10:00", (1, 1, 1, 14)),
            ("0001-01-01T00:00:00+10:00", None),
            ("9999-12-31T23:59:59-10:00", None),
            ("9999-12-31T23:59:59-00:00", (9999, 12, 31, 23, 59, 59)),
            ("2026-11-15T10:30:00", None),
            ("2026-11-15", None),
            ("not a time", None),
            (1_700_000_000, None),
            (None, None),
        ],
    )
    def test_times_are_those_of_rfc_3339(self, text: Any, expected: tuple[int, ...] | None) -> None:
        types = registered({"properties": {"x": {"type": "string", "format": "date-time"}}})
        (found,) = typed_arrays(typed_columns("t", types), [{"x": text}])
        assert found.to_pylist() == [expected and datetime(*expected, tzinfo=UTC)]

    def test_data_that_is_not_an_object_has_no_properties(self) -> None:
        (found,) = typed_arrays(typed_columns("t", registered(properties("x"))), [[1], "x", None, {"x": "there"}])
        assert found.to_pylist() == [None, None, None, "there"]


def test_a_type_without_properties_has_the_columns_of_every_typed_table() -> None:
    assert typed_schema("t", registered(True)) == typed_schema("no such type", Types()) == TYPED_SCHEMA


def write(directory: Path, **files: Any) -> Path:
    for name, content in files.items():
        (directory / f"{name}.json").write_text(content if isinstance(content, str) else json.dumps(content))
    return directory


def problem(type: str | None, version: int | None, data: str | None, types: Types = ORDERS) -> str | None:
    found = check(types, pa.array([type], pa.string()), pa.array([version], pa.int64()), pa.array([data], pa.string()))
    return found[0].get(0)


def properties(*names: str) -> dict[str, Any]:
    return {"properties": {name: {} for name in names}}


def columns(*schemas: dict[str, Any]) -> dict[str, str]:
    found = typed_schema("t", registered(*schemas))
    assert found.names[: len(TYPED_SCHEMA)] == TYPED_SCHEMA.names
    return {field.name: str(field.type) for field in list(found)[len(TYPED_SCHEMA) :]}
