"""JSON Schemas and AsyncAPI, and the command that writes them."""

import json
import re
import sys
from datetime import datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from pathlib import Path
from typing import Any, Literal
from uuid import UUID

import jsonschema_rs
import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import AwareDatetime, BaseModel, Field

from headwater.cli.inspect import schema
from headwater.errors import InvalidOptionError
from headwater.typed import Event, Registry, asyncapi, json_schema
from headwater.typed.codec import prepare


class Region(Enum):
    eu = "eu"
    us = "us"


class Line(BaseModel):
    sku: str
    count: int = Field(ge=1)


class Tree(Event, registry=Registry()):
    pass


class Placed(Tree, topic="orders.{region}.{kind}.placed", version=2):
    """An order was placed."""

    region: Region
    kind: Literal["web", "shop"]
    amount: Decimal
    at: datetime
    seen: AwareDatetime | None = None
    hour: time = time(12)
    span: timedelta = timedelta(0)
    key: UUID | None = None
    blob: bytes = b""
    lines: tuple[Line, ...] = ()
    note_: str = Field("", alias="note")


class Packed(Tree, topic="packed.{n}", serializer="msgpack"):
    n: int


class PlacedOld(Tree, topic="orders.placed", type="Placed", version=1):
    pass


values = st.fixed_dictionaries(
    {
        "region": st.sampled_from(Region),
        "kind": st.sampled_from(["web", "shop"]),
        "amount": st.decimals(allow_nan=False, allow_infinity=False),
        "at": st.datetimes(),
        "seen": st.none() | st.datetimes(timezones=st.timezones()),
        "hour": st.times(),
        "span": st.timedeltas(timedelta(days=-9999), timedelta(days=9999)),
        "key": st.none() | st.uuids(),
        "blob": st.binary(max_size=9),
        "lines": st.lists(st.fixed_dictionaries({"sku": st.text(max_size=3), "count": st.integers(1, 9)}), max_size=2),
        "note": st.text(max_size=3),
    }
)
# As the pipeline compiles them.
VALIDATORS = {
    name: jsonschema_rs.validator_for(json.dumps(each), validate_formats=True, offline=True)
    for name, each in json_schema(Tree.registry).items()
}


@given(values)
@example(
    {"region": "eu", "kind": "web", "amount": "-1E+3", "at": datetime(2024, 1, 1), "span": timedelta(microseconds=-1)}
)
def test_a_schema_accepts_what_its_class_publishes(given_values):
    try:
        event = Placed(**given_values)
        published = prepare(event, {}).data
    except ValueError:  # half a surrogate, or an offset with seconds, which is no valid time
        return
    VALIDATORS["Placed@2"].validate(published)


def test_a_schema_refuses_what_its_class_refuses():
    assert list(VALIDATORS) == ["Packed@1", "Placed@1", "Placed@2"]
    good = {"region": "eu", "kind": "web", "amount": "1", "at": "2024-01-01T00:00:00"}
    assert VALIDATORS["Placed@2"].is_valid(good)
    wrong: list[dict[str, Any]] = [
        {"region": "xx"},
        {"amount": None},
        {"x": 1},
        {"note_": "a"},
        {"lines": [{"sku": "a", "count": 0}]},
    ]
    for change in wrong:
        assert not VALIDATORS["Placed@2"].is_valid(good | change), change
        with pytest.raises(ValueError, match="validation error"):
            Placed.model_validate_json(msgspec.json.encode(good | change))


def references(document: Any) -> set[str]:
    if isinstance(document, dict):
        own = {document["$ref"]} if isinstance(document.get("$ref"), str) else set()
        return own.union(*map(references, document.values()))
    return set().union(*map(references, document)) if isinstance(document, list) else set()


def test_an_asyncapi_document_has_what_the_specification_requires():
    Placed.registry.note_handler(Placed, "billing/eu")
    document = asyncapi(Tree.registry, title="Shop", version="3.1")
    assert (document["asyncapi"], document["info"]) == ("3.0.0", {"title": "Shop", "version": "3.1"})
    assert {key: channel["address"] for key, channel in document["channels"].items()} == {
        "orders.placed": "orders.placed",
        "orders._region_._kind_.placed": "orders.{region}.{kind}.placed",
        "packed._n_": "packed.{n}",
    }
    for key, channel in document["channels"].items():
        assert re.fullmatch(r"[A-Za-z0-9._-]+", key)
        assert set(re.findall(r"\{(\w+)\}", channel["address"])) == set(channel.get("parameters", {}))
    parameters = document["channels"]["orders._region_._kind_.placed"]["parameters"]
    assert (parameters["region"]["enum"], parameters["kind"]["enum"]) == (["eu", "us"], ["web", "shop"])
    assert {key: each["action"] for key, each in document["operations"].items()} == {
        "send-Packed-v1": "send",
        "send-Placed-v1": "send",
        "send-Placed-v2": "send",
        "receive-Placed-v2-billing_eu": "receive",
    }
    placed = document["components"]["messages"]["Placed-v2"]
    assert (placed["name"], placed["contentType"], placed["description"]) == (
        "Placed",
        "application/json",
        "An order was placed.",
    )
    assert placed["headers"]["properties"]["version"] == {"const": 2}
    assert document["components"]["messages"]["Packed-v1"]["contentType"] == "application/msgpack"
    json.dumps(document)


class Alike(Event, registry=Registry()):
    """Names that are alike once they are written as keys."""

    region: str = ""


class ByField(Alike, topic="orders.{region}"):
    pass


class ByName(Alike, topic="orders.region"):
    pass


class ByOddName(Alike, topic="orders._region_", type="shop:ByName"):
    pass


class ByUnderscore(Alike, topic="orders._region_", type="shop_ByName"):
    pass


def test_each_topic_and_each_class_has_a_key_of_its_own():
    for registered in (ByOddName, ByUnderscore):
        registered.registry.note_handler(registered, "all")
    document = asyncapi(Alike.registry)
    channels, messages = document["channels"], document["components"]["messages"]
    assert {key: channel["address"] for key, channel in channels.items()} == {
        "orders._region_": "orders.{region}",
        "orders.region": "orders.region",
        "orders._region_-2": "orders._region_",
    }
    assert {key: message["name"] for key, message in messages.items()} == {
        "ByField-v1": "ByField",
        "ByName-v1": "ByName",
        "shop_ByName-v1": "shop:ByName",
        "shop_ByName-v1-2": "shop_ByName",
    }
    assert list(channels["orders._region_-2"]["messages"]) == ["shop_ByName-v1", "shop_ByName-v1-2"]
    assert len(document["operations"]) == 4 + 2
    keys = {*channels, *messages, *document["operations"], *document["components"]["schemas"]}
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+", key) for key in keys)


@pytest.mark.parametrize("registry", [Tree.registry, Alike.registry])
def test_every_reference_of_a_document_leads_somewhere(registry):
    document = asyncapi(registry)
    found = references(document)
    assert len(found) > 8
    for reference in found:
        at: Any = document
        for part in reference.removeprefix("#/").split("/"):
            at = at[part]


def test_titles_are_text():
    with pytest.raises(InvalidOptionError, match="title is text"):
        asyncapi(Tree.registry, title="")


# --- the command ----------------------------------------------------------------------------------------------------

MODULE = """
from headwater.typed import Event, Registry
class Base(Event, registry=Registry()): pass
class Placed(Base, topic="orders.placed", version=4):
    order_id: str
@Placed.upgrade(from_version=2)
def two(fields): return fields
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend("unused")  # so that what the command puts there goes
    name = f"shop_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(MODULE)
    return name


def test_the_command_writes_schemas(module, capsys, tmp_path):
    schema(module)
    written = capsys.readouterr()
    assert list(json.loads(written.out)) == ["Placed@4"]
    assert written.err == "warning: Placed: nothing upgrades version 3 to 4\n"
    schema(module, output="all.json")
    assert list(json.loads((tmp_path / "all.json").read_text())) == ["Placed@4"]
    schema(module, output="types/")
    assert json.loads((tmp_path / "types" / "Placed@4.json").read_text())["title"] == "Placed"
    assert capsys.readouterr().out == "wrote all.json\n1 schema in types/\n"


def test_the_pipeline_reads_what_the_command_writes(module, tmp_path):
    from headwater.pipeline.types import load_types

    schema(module, output="types/")
    [registered] = load_types(tmp_path / "types").schemas
    assert (registered.type, registered.version) == ("Placed", 4)


def test_the_command_writes_asyncapi(module, capsys, tmp_path):
    schema(module, format="asyncapi", output="shop.json", title="Shop", api_version="2")
    document = json.loads((tmp_path / "shop.json").read_text())
    assert (document["info"], list(document["channels"])) == ({"title": "Shop", "version": "2"}, ["orders.placed"])


@pytest.mark.parametrize(
    ("text", "why", "next"),
    [
        (None, "there is no module 'shop_broken'", "Name it as in an import"),
        ("import nothing_like_it", "there is no module 'nothing_like_it'", "It imports nothing_like_it"),
        ("1/0", "it cannot be imported: ZeroDivisionError: division by zero", "HEADWATER_DEBUG=1"),
        ("raise SystemExit(3)", "it cannot be imported: SystemExit: 3", "HEADWATER_DEBUG=1"),
        ("x = 1", "there is no message class with a topic in it", "Name the module that has"),
    ],
)
def test_modules_that_cannot_be_used(tmp_path, monkeypatch, text, why, next):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend("unused")
    if text is not None:
        (tmp_path / "shop_broken.py").write_text(text)
    with pytest.raises(InvalidOptionError) as caught:
        schema("shop_broken")
    assert (caught.value.where, caught.value.why) == ("shop_broken", why)
    assert caught.value.next.startswith(next)
    sys.modules.pop("shop_broken", None)


def test_a_file_that_cannot_be_written(module, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidOptionError, match=r"file/x\.json: cannot be written"):
        schema(module, output="file/x.json")
