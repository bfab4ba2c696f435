"""From a message to an event: serializers, versions, types."""

import base64
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from enum import Enum
from typing import Any
from uuid import UUID

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.errors import InvalidMessageError, InvalidOptionError, UnknownTypeError, VersionMismatchError
from headwater.message import Message
from headwater.typed import Event, Registry, register_serializer
from headwater.typed.bus import copy_of
from headwater.typed.codec import prepare


class Base(Event, registry=Registry()):
    pass


class Colour(Enum):
    red = "red"
    blue = 2


class Everything(Base, topic="everything"):
    amount: Decimal
    at: datetime
    day: date
    hour: time
    span: timedelta
    key: UUID
    blob: bytes
    colour: Colour
    number: float
    big: int
    text: str
    nested: dict[str, list[Decimal | None]]


class Packed(Everything, topic="packed", serializer="msgpack"):
    pass


zones = st.none() | st.builds(timezone, st.timedeltas(timedelta(hours=-23), timedelta(hours=23)).map(
    lambda span: timedelta(minutes=span // timedelta(minutes=1))))  # fmt: skip
decimals = st.decimals(allow_nan=False, allow_infinity=False)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
values = st.fixed_dictionaries(
    {
        "amount": decimals,
        "at": st.datetimes(timezones=zones),
        "day": st.dates(),
        "hour": st.times(),
        "span": st.timedeltas(timedelta(days=-99_999), timedelta(days=99_999)),
        "key": st.uuids(),
        "blob": st.binary(max_size=50),
        "colour": st.sampled_from(Colour),
        "number": st.floats(allow_nan=False, allow_infinity=False),
        "big": st.integers(-(2**63), 2**63 - 1),
        "text": texts,
        "nested": st.dictionaries(texts, st.lists(st.none() | decimals, max_size=3), max_size=3),
    }
)


def sent(event: Event, **changed: Any) -> Message:
    message = copy_of(prepare(event, {"id": "x"}), 5, 1_700_000_000_000)
    return msgspec.structs.replace(message, **changed)


@given(values, st.sampled_from([Everything, Packed]))
def test_every_value_comes_back_exactly(given_values, cls):
    event = cls(**given_values)
    read = cls.read(sent(event))
    assert read == event
    assert read.amount.as_tuple() == event.amount.as_tuple()
    assert read.at.utcoffset() == event.at.utcoffset()


def test_bytes_travel_in_json_as_base64():
    class Small(Base, topic="small", serializer="msgpack"):
        n: int

    message = sent(Small(n=300))
    assert message.content_type == "application/msgpack"
    assert list(message.data) == ["base64"]
    assert msgspec.msgpack.decode(base64.b64decode(message.data["base64"])) == {"n": 300}


def test_the_message_says_how_it_is_read_not_the_class():
    class Plain(Base, topic="plain"):
        n: int

    class Other(Base, topic="plain", serializer="msgpack"):
        n: int

    assert Plain.read(sent(Other(n=1), type="Plain")) == Plain(n=1)
    assert Other.read(sent(Plain(n=1), type="Other", content_type="application/json")) == Other(n=1)


@pytest.mark.parametrize("content_type", ["application/json; charset=utf-8", "Application/JSON", " application/json "])
def test_json_is_json_however_it_is_spelled(content_type):
    class Spelled(Base, topic="spelled", registry=Registry()):
        n: int

    assert Spelled.read(sent(Spelled(n=1), content_type=content_type)) == Spelled(n=1)


def test_a_content_type_with_parameters_is_read_like_one_without():
    class Spelled(Base, topic="spelled", serializer="msgpack", registry=Registry()):
        n: int

    assert Spelled.read(sent(Spelled(n=1), content_type="application/MsgPack;v=5")) == Spelled(n=1)


def test_a_serializer_of_ones_own():
    register_serializer(
        "reversed",
        "application/x-reversed",
        lambda plain: msgspec.json.encode(plain)[::-1],
        lambda data: msgspec.json.decode(data[::-1]),
    )

    class Backward(Base, topic="backward", serializer="reversed"):
        n: int

    message = sent(Backward(n=12))
    assert base64.b64decode(message.data["base64"]) == b'}21:"n"{'
    assert Backward.read(message) == Backward(n=12)
    for name, kind in (("reversed", "a/b"), ("other", "application/json")):
        with pytest.raises(InvalidOptionError, match="already"):
            register_serializer(name, kind, lambda _: b"", lambda _: {})
    with pytest.raises(InvalidOptionError, match="functions"):
        register_serializer("broken", "a/b", None, lambda _: {})


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"content_type": "application/xml"}, "no serializer reads 'application/xml'"),
        ({"raw": msgspec.Raw(b'{"base64": "!"}')}, "it cannot be read as application/msgpack: ValueError: not base64"),
        ({"raw": msgspec.Raw(b'{"base64": "wQ=="}')}, "it cannot be read as application/msgpack: DecodeError"),
        ({"raw": msgspec.Raw(b"5")}, "it cannot be read as application/msgpack: TypeError"),
    ],
)
def test_what_no_serializer_reads_is_no_event(changed, why):
    class Packet(Base, topic="packet", serializer="msgpack"):
        n: int

    with pytest.raises(InvalidMessageError) as caught:
        Packet.read(sent(Packet(n=1), **changed))
    assert caught.value.why.startswith(why)
    assert caught.value.where == "message 5 on packet"


# --- types ----------------------------------------------------------------------------------------------------------


def test_other_types_are_refused_and_subclasses_are_read_as_what_they_are(base):
    class Placed(base, topic="orders"):
        n: int

    class Gift(Placed):
        card: str

    class Cancelled(base, topic="orders"):
        n: int

    with pytest.raises(UnknownTypeError, match=r"message 5 on orders: its type is 'Cancelled', and this wants Placed"):
        Placed.read(sent(Cancelled(n=1)))
    with pytest.raises(UnknownTypeError, match="it has no type, and this wants Placed"):
        Placed.read(sent(Placed(n=1), type=None))
    with pytest.raises(UnknownTypeError):
        Gift.read(sent(Placed(n=1)))
    gift = Gift(n=1, card="hi")
    assert Placed.read(sent(gift)) == gift
    assert isinstance(Placed.read(sent(gift)), Gift)


@pytest.mark.parametrize(
    ("payload", "where", "why"),
    [
        (b'{"n": "x"}', "message 5 on orders, Placed.n", "input should be a valid integer, unable to parse"),
        (b'{"n": 1, "m": 2}', "message 5 on orders, Placed.m", "extra inputs are not permitted"),
        (b"[1]", "message 5 on orders, Placed", "input should be an object"),
        (b"{", "message 5 on orders, Placed", "invalid JSON"),
        (b'{"a":1,"b":1,"c":1,"d":1}', "message 5 on orders, Placed",
         "n: field required; a: extra inputs are not permitted; b: extra inputs are not permitted; and 2 more"),
    ],
)  # fmt: skip
def test_fields_that_do_not_fit_are_named_in_short(base, payload, where, why):
    class Placed(base, topic="orders"):
        n: int

    with pytest.raises(InvalidMessageError) as caught:
        Placed.read(sent(Placed(n=1), raw=msgspec.Raw(payload)))
    assert caught.value.where == where
    assert caught.value.why.startswith(why)


# --- versions -------------------------------------------------------------------------------------------------------


def versions(base, newest: int) -> type[Event]:
    class Placed(base, topic="orders", version=newest):
        steps: list[int]

    return Placed


def test_upgraders_are_chained_from_the_message_to_the_class(base):
    placed = versions(base, 4)
    for version in (3, 1, 2):
        placed.upgrade(from_version=version)(lambda fields, at=version: {"steps": [*fields["steps"], at]})
    old = sent(placed(steps=[]), version=1)
    assert placed.read(old).steps == [1, 2, 3]
    assert placed.read(sent(placed(steps=[]), version=3)).steps == [3]
    assert placed.read(sent(placed(steps=[]), version=4)).steps == []
    assert placed.read(sent(placed(steps=[]), version=None)).steps == [1, 2, 3]  # no version: the first
    assert old.data == {"steps": []}


def test_upgraders_also_read_what_was_packed(base):
    class Packed(base, topic="packed", version=2, serializer="msgpack"):
        amount: Decimal

    @Packed.upgrade(from_version=1)
    def with_cents(fields):
        return {"amount": Decimal(fields["amount"]) / 100}

    assert Packed.read(sent(Packed(amount=990), version=1)).amount == Decimal("9.90")


def test_a_missing_link_and_a_newer_version_say_what_to_do(base):
    placed = versions(base, 4)
    placed.upgrade(from_version=1)(lambda fields: fields)
    placed.upgrade(from_version=3)(lambda fields: fields)
    with pytest.raises(VersionMismatchError) as caught:
        placed.read(sent(placed(steps=[]), version=1))
    assert str(caught.value) == (
        "message 5 on orders: the message is version 1 of Placed, the class here is version 4, and nothing upgrades 2 "
        "to 3. Declare @Placed.upgrade(from_version=2), then redrive this"
    )
    with pytest.raises(VersionMismatchError, match="version 5 of Placed, and the class here is version 4"):
        placed.read(sent(placed(steps=[]), version=5))


@pytest.mark.parametrize(
    ("upgrader", "why"),
    [
        (lambda fields: fields["gone"], "its upgrade from version 1 failed: KeyError: 'gone'"),
        (lambda fields: [1], "its upgrade from version 1 gave a list"),
        (lambda fields: {}, "field required"),
    ],
)
def test_an_upgrade_that_fails_makes_no_event(base, upgrader, why):
    placed = versions(base, 2)
    placed.upgrade(from_version=1)(upgrader)
    with pytest.raises(InvalidMessageError) as caught:
        placed.read(sent(placed(steps=[]), version=1))
    assert caught.value.why == why


def test_impossible_upgraders_are_refused_when_declared(base):
    placed = versions(base, 2)
    for version in (0, 2, "1", True):
        with pytest.raises(
            InvalidOptionError, match=r"Placed.upgrade: from_version is a whole number from 1 to 1, not"
        ):
            placed.upgrade(from_version=version)
    placed.upgrade(from_version=1)(lambda fields: fields)
    with pytest.raises(InvalidOptionError, match="there is one from version 1 already"):
        placed.upgrade(from_version=1)

    class First(base, topic="first"):
        pass

    with pytest.raises(InvalidOptionError, match="the class is version 1, and there is none before it"):
        First.upgrade(from_version=1)


def test_subclasses_have_versions_of_their_own(base):
    placed = versions(base, 2)
    placed.upgrade(from_version=1)(lambda fields: fields)

    class Gift(placed, version=2):
        pass

    with pytest.raises(VersionMismatchError):
        Gift.read(sent(Gift(steps=[]), version=1))
