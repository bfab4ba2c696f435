"""What a class may declare, and the errors of impossible declarations."""

import importlib
import sys
from enum import Enum
from typing import Generic, TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field, ValidationError

from headwater.errors import InvalidMessageError, InvalidOptionError
from headwater.topics import check_topic, parse_pattern
from headwater.typed import Event, Registry
from headwater.typed.declaration import common_pattern, parse_template


def declare(base: type[Event], **keywords: object) -> type[Event]:
    class OrderPlaced(base, **keywords):
        order_id: str
        region: str = "eu"

    return OrderPlaced


def test_defaults(base):
    declared = declare(base, topic="orders.placed").__headwater__
    assert (declared.type, declared.version, declared.topic.text) == ("OrderPlaced", 1, "orders.placed")
    assert (declared.from_, declared.to, declared.reply_to, declared.transports, declared.log) == (
        None,
        None,
        None,
        (),
        True,
    )
    assert declared.serializer.name == "json"


def test_keywords_are_inherited_and_can_be_overridden(base):
    class Shop(base, from_="shop", to="billing", serializer="msgpack", type="x", version=7):
        pass

    class Placed(Shop, topic="orders.placed"):
        pass

    class Cancelled(Placed, topic="orders.cancelled", to=None, version=2):
        pass

    assert (Placed.__headwater__.from_, Placed.__headwater__.to) == ("shop", "billing")
    assert Placed.__headwater__.serializer.name == "msgpack"
    assert (Cancelled.__headwater__.from_, Cancelled.__headwater__.to) == ("shop", None)
    # Type and version name one class alone.
    assert (Placed.__headwater__.type, Placed.__headwater__.version) == ("Placed", 1)
    assert (Cancelled.__headwater__.type, Cancelled.__headwater__.version) == ("Cancelled", 2)


def test_two_bases_say_what_they_say(base):
    class European(base, from_="eu"):
        pass

    class Order(base, topic="orders", from_="shop", to="billing"):
        pass

    class EuropeanOrder(European, Order):
        pass

    declared = EuropeanOrder.__headwater__
    assert (declared.topic.text, declared.from_, declared.to) == ("orders", "eu", "billing")


@pytest.mark.parametrize(
    ("keywords", "why", "next"),
    [
        ({"topci": "a"}, "there is no keyword 'topci'", "Known ones: topic, version, "),
        ({"topic": 1}, "topic is text, not 1", "Write it like"),
        ({"topic": "orders..new"}, "topic 'orders..new': a token is empty", "Put text"),
        ({"topic": "orders.*"}, "topic 'orders.*': it holds '*', which is kept for patterns", "Publish to one"),
        ({"topic": "orders.{regoin}"}, "topic 'orders.{regoin}' names 'regoin', and the class has no such field",
         "Its fields: order_id, region"),
        ({"topic": "orders.a-{region}"}, "in topic 'orders.a-{region}' a brace is not around a whole token", "Fields "),
        ({"topic": "orders.{region"}, "in topic 'orders.{region' a brace is not around a whole token", "Fields stand"),
        ({"version": 0}, "version is a whole number from 1 to 1,000,000, not 0", ""),
        ({"version": "2"}, "version is a whole number from 1 to 1,000,000, not '2'", ""),
        ({"type": "a b"}, "'a b' cannot be a type", "Use 1 to 128 letters"),
        ({"from_": ""}, "from_ is text of 1 to 256 characters, not ''", "Leave it out"),
        ({"to": 3}, "to is text of 1 to 256 characters, not 3", "Leave it out"),
        ({"reply_to": "a.*"}, "reply_to is a topic: it holds '*', which is kept for patterns", "Publish to one"),
        ({"serializer": "xml"}, "there is no serializer 'xml'", "Name one of json, msgpack"),
        ({"transports": "archive"}, "transports are names, not 'archive'", 'Write them like transports=("archive",)'),
        ({"transports": ("a", "a")}, "transports are up to 32 different names", ""),
        ({"log": 1}, "log is True or False, not 1", ""),
        ({"dedupe": 5}, "dedupe is a queue of handled messages, not 5", "Make one with "),
        ({"registry": {}}, "registry is a Registry", ""),
    ],
)  # fmt: skip
def test_wrong_keywords_are_refused_when_the_class_is_made(base, keywords, why, next):
    with pytest.raises(InvalidOptionError) as caught:
        declare(base, **keywords)
    assert (caught.value.where, caught.value.why) == ("class OrderPlaced", why)
    assert caught.value.next.startswith(next)
    assert len(base.registry) == 0


@pytest.mark.parametrize("name", ["publish", "request", "read", "on", "upgrade", "bind", "registry"])
@pytest.mark.filterwarnings("ignore:Field name")
def test_a_field_does_not_take_a_verb_away(base, name):
    with pytest.raises(InvalidOptionError, match=f"may not be called '{name}'.*alias"):
        type("Taken", (base,), {"__annotations__": {name: str}}, topic="a")


def test_events_are_frozen_and_refuse_unknown_fields_by_default(base):
    strict = declare(base, topic="a")
    with pytest.raises(ValidationError, match="extra_forbidden"):
        strict(order_id="1", colour="red")
    with pytest.raises(ValidationError, match="frozen"):
        strict(order_id="1").order_id = "2"
    assert len({strict(order_id="1"), strict(order_id="1")}) == 1

    class Loose(base, topic="b", extra="ignore", frozen=False):
        order_id: str

    loose = Loose(order_id="1", colour="red")
    loose.order_id = "2"
    assert loose == Loose(order_id="2")


# --- registries -----------------------------------------------------------------------------------------------------


def test_two_classes_of_one_type_and_version_are_refused(base):
    first = declare(base, topic="a")

    class Other(base, topic="b", type="OrderPlaced", version=2):
        pass

    with pytest.raises(InvalidOptionError, match=r"has type 'OrderPlaced', version 2 already.*registry=Registry\(\)"):

        class Third(base, topic="c", type="OrderPlaced", version=2):
            pass

    assert list(base.registry) == [first, Other]
    assert base.registry.find("OrderPlaced", 1) is first
    assert base.registry.find("OrderPlaced") is base.registry.find("OrderPlaced", 9) is Other
    assert base.registry.find("Other") is base.registry.find(None) is None


def test_trees_do_not_meddle(base):
    class Elsewhere(Event, registry=Registry()):
        pass

    assert declare(base, topic="a").registry is not declare(Elsewhere, topic="a").registry
    assert len(Event.registry) == len([cls for cls in Event.registry if cls.__module__ != __name__])


def test_classes_without_a_topic_are_in_no_registry(base):
    declare(base)
    assert len(base.registry) == 0


def test_a_module_may_be_loaded_again(tmp_path, monkeypatch):
    (tmp_path / "typed_reloaded.py").write_text(
        "from headwater.typed import Event, Registry\n"
        "tree = globals().get('tree') or Registry()\n"
        "class Memo(Event, topic='notes', registry=tree):\n    text: str\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("typed_reloaded")
    try:
        importlib.reload(module)
        assert list(module.tree) == [module.Memo]
    finally:
        del sys.modules["typed_reloaded"]


def test_a_generic_class_is_declared_by_what_is_made_of_it(base):
    Content = TypeVar("Content")

    class Envelope(base, Generic[Content], from_="shop"):
        content: Content

    class Number(Envelope[int], topic="numbers"):
        pass

    assert list(base.registry) == [Number]
    assert (Number.__headwater__.from_, Number(content="5").content) == ("shop", 5)


# --- topics ---------------------------------------------------------------------------------------------------------


class Region(Enum):
    eu = "eu"


@pytest.mark.parametrize(
    ("value", "topic"),
    [("eu", "orders.eu.placed"), (7, "orders.7.placed"), (Region.eu, "orders.eu.placed"), ("ü-1", "orders.ü-1.placed")],
)
def test_fields_stand_in_the_topic_by_their_python_name(base, log, value, topic):
    class Placed(base, topic="orders.{region_}.placed"):
        region_: Region | int | str = Field(alias="region", union_mode="left_to_right")

    Placed(region=value).publish(log)
    assert [each.topic for each in log.topics()] == [topic]
    assert Placed.__headwater__.topic.pattern == "orders.*.placed"


@pytest.mark.parametrize("value", ["", "a.b", "a b", "*", ">", "#", 1.5, True, None, "x" * 300])
def test_what_cannot_be_a_token_is_refused(base, log, value):
    class Placed(base, topic="orders.{region}"):
        region: str | int | float | bool | None

    with pytest.raises(InvalidMessageError) as caught:
        Placed(region=value).publish(log)
    assert caught.value.where == "Placed.region"
    assert log.last_seq() == 0


tokens = st.text(st.characters(exclude_categories=["Cs"]), max_size=20) | st.integers()


@given(st.lists(tokens, min_size=1, max_size=4))
def test_a_filled_topic_is_a_topic_of_the_pattern_or_is_refused(values):
    names = [f"f{number}" for number in range(len(values))]
    template = parse_template("a." + ".".join(f"{{{name}}}" for name in names), "class X", names)
    try:
        topic = template.fill(dict(zip(names, values, strict=True)), "X")
    except InvalidMessageError:
        return
    assert parse_pattern(template.pattern).matches(check_topic(topic))
    assert topic.split(".")[1:] == [str(value) for value in values]


letters = st.sampled_from(["a", "b", "*"])
patterns = st.lists(st.lists(letters, min_size=1, max_size=4).map(".".join), min_size=1, max_size=4)


@given(patterns, st.sampled_from(["nats", "amqp"]), st.lists(st.sampled_from(["a", "b", "c"]), min_size=1, max_size=5))
def test_a_common_pattern_has_all_topics_of_each(given_patterns, dialect, topic):
    common = parse_pattern(common_pattern(given_patterns, dialect), dialect)
    if any(parse_pattern(each).matches(".".join(topic)) for each in given_patterns):
        assert common.matches(".".join(topic))


@pytest.mark.parametrize(
    ("given_patterns", "common"),
    [
        (["orders.placed"], "orders.placed"),
        (["orders.placed", "orders.placed"], "orders.placed"),
        (["orders.placed", "orders.cancelled"], "orders.*"),
        (["orders.*.placed", "orders.eu.cancelled"], "orders.*.*"),
        (["orders.placed", "orders.placed.late"], "orders.>"),
        (["orders.*.placed", "orders.x"], "orders.>"),
        (["orders", "notes.new"], ">"),
    ],
)
def test_a_common_pattern_is_narrow(given_patterns, common):
    assert common_pattern(given_patterns, "nats") == common
