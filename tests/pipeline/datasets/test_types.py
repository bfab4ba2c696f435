"""A directory of JSON Schemas as registered message types."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest

from headwater.errors import InvalidOption, TooLarge
from headwater.pipeline.datasets import types as types_module
from headwater.pipeline.datasets.types import SCHEMA_BYTES_MAX, RegisteredSchema, Types, load_types


def write(directory: Path, **files: Any) -> Path:
    for name, content in files.items():
        (directory / f"{name}.json").write_text(content if isinstance(content, str) else json.dumps(content))
    return directory


def test_types_and_versions_come_from_the_names_of_the_files(tmp_path: Path) -> None:
    write(tmp_path, **{"order_placed@10": {"title": "ten"}, "order_placed@2": {}, "note": True, "größe.v@0": {}})
    (tmp_path / "README.md").write_text("not a schema")

    types = load_types(tmp_path)

    assert {name: list(versions) for name, versions in types.by_name.items()} == {
        "order_placed": [2, 10],
        "note": [None],
        "größe.v": [0],
    }
    assert [each.document for each in types.schemas_of("order_placed")] == [{}, {"title": "ten"}]
    assert types.schemas_of("note")[0].document == {}
    assert types.schemas_of("never heard of") == ()


def test_an_empty_directory_registers_nothing(tmp_path: Path) -> None:
    assert load_types(tmp_path) == Types(())


def test_types_travel_to_executors(tmp_path: Path) -> None:
    types = load_types(write(tmp_path, **{"a@1": {"type": "object"}}))
    assert types.by_name  # what was worked out does not stand in the way
    assert pickle.loads(pickle.dumps(types)) == types


@pytest.mark.parametrize("name", ["@1", "a@", "a@01", "a@-1", "a@1.5", "a@x", "a@1000001", ".hidden"])
def test_a_name_that_says_no_type_and_version_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(InvalidOption, match=r"Call it TYPE@VERSION\.json") as caught:
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
def test_what_is_no_schema_is_refused_with_file_and_reason(tmp_path: Path, content: Any, why: str) -> None:
    with pytest.raises(InvalidOption, match=why.replace("$", r"\$")) as caught:
        load_types(write(tmp_path, **{"good@1": {}, "order@1": content}))
    assert caught.value.where == str(tmp_path / "order@1.json")
    assert caught.value.next


def test_a_schema_refers_to_nothing_outside_itself(tmp_path: Path) -> None:
    outside = tmp_path / "outside.txt"
    outside.write_text('{"type": "string"}')
    for reference in (outside.as_uri(), "outside.txt", "http://127.0.0.1:9/x.json", "good@1.json"):
        with pytest.raises(InvalidOption, match="nothing is fetched"):
            load_types(write(tmp_path, **{"good@1": {}, "order@1": {"properties": {"a": {"$ref": reference}}}}))


def test_a_schema_may_refer_to_its_own_parts(tmp_path: Path) -> None:
    inside = {"$ref": "#/$defs/money", "$defs": {"money": {"type": "number"}}}
    assert load_types(write(tmp_path, price=inside)).schemas_of("price")


def test_size_and_number_of_schemas_are_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, a={}, b={})
    monkeypatch.setattr(types_module, "SCHEMAS_MAX", 1)
    with pytest.raises(TooLarge, match="2 message types, the limit is 1"):
        load_types(tmp_path)
    monkeypatch.undo()
    write(tmp_path, a={"title": "x" * SCHEMA_BYTES_MAX})
    with pytest.raises(TooLarge, match=str(SCHEMA_BYTES_MAX)):
        load_types(tmp_path)


def test_what_cannot_be_read_is_said(tmp_path: Path) -> None:
    with pytest.raises(InvalidOption, match="Name a directory"):
        load_types(tmp_path / "nowhere")
    (tmp_path / "a.json").write_bytes(b'"\xff"')
    with pytest.raises(InvalidOption, match="not UTF-8"):
        load_types(tmp_path)


def test_each_type_gets_a_table_name_of_its_own() -> None:
    names = ("Order-Placed", "order.placed", "order_placed", "größe", "…")
    types = Types(tuple(RegisteredSchema(name, None, "{}") for name in names))
    assert types.table_names == {
        "Order-Placed": "order_placed",
        "order.placed": "order_placed_2",
        "order_placed": "order_placed_3",
        "größe": "gr_e",
        "…": "type",
    }
