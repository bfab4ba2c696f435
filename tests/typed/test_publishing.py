"""From an event to a message: headers, options, validation, binding, transactions."""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from enum import Enum
from pathlib import Path
from typing import Annotated, Any
from zoneinfo import ZoneInfo

import psycopg
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import (
    BaseModel,
    Field,
    PlainSerializer,
    PlainValidator,
    PrivateAttr,
    SecretStr,
    computed_field,
    field_serializer,
)

import headwater
from headwater.errors import InvalidDataError, InvalidMessageError, InvalidOptionError, InvalidStateError
from headwater.typed import Event, Registry, publish_many
from headwater.typed.codec import prepare


class Line(BaseModel):
    sku: str
    count: int


@pytest.fixture
def placed(base):
    class OrderPlaced(base, topic="orders.placed", version=2, from_="shop", to="billing", reply_to="orders.answers"):
        order_id: str
        amount: Decimal
        lines: list[Line] = Field(default_factory=list)

    return OrderPlaced


def stored(log) -> list[headwater.Message]:
    with log.subscribe("look", ">", mode="ephemeral", start="first") as subscription:
        return [each.message for each in subscription.fetch(100)]


def test_a_message_says_what_its_class_says(placed, log):
    assert placed(order_id="o-1", amount="9.90").publish(log) == 1
    [message] = stored(log)
    assert (message.topic, message.type, message.version) == ("orders.placed", "OrderPlaced", 2)
    assert (message.from_, message.to, message.reply_to) == ("shop", "billing", "orders.answers")
    assert (message.content_type, message.correlation_id) == (None, None)
    assert message.data == {"order_id": "o-1", "amount": "9.90", "lines": []}


def test_options_go_before_the_class(placed, log):
    order = placed(order_id="o-1", amount=1)
    seq = order.publish(
        log, id="x-1", from_="shop-2", to=None, reply_to="a.b", correlation_id="c", priority=3, headers={"a": 1}, ttl=60
    )
    [message] = stored(log)
    assert (message.id, message.from_, message.to, message.reply_to) == ("x-1", "shop-2", None, "a.b")
    assert (message.correlation_id, message.priority, message.headers) == ("c", 3, {"a": 1})
    assert message.expires_at is not None
    assert order.publish(log, id="x-1") == seq  # the log knows it
    with pytest.raises(TypeError, match="unexpected keyword argument 'colour'"):
        order.publish(log, colour="red")
    for name in ("type", "version", "content_type"):
        with pytest.raises(InvalidOptionError, match=f"OrderPlaced: {name} belongs to the class"):
            order.publish(log, **{name: "x"})


def test_an_unchecked_instance_is_checked(placed, log):
    with pytest.raises(InvalidMessageError) as caught:
        placed.model_construct(order_id="o-1", amount="much").publish(log)
    assert caught.value.where == "OrderPlaced.amount"
    assert caught.value.why == "input should be a valid decimal"
    assert caught.value.next.startswith("Nothing was published")
    with pytest.raises(InvalidMessageError, match="order_id: input should be a valid string; amount: field required"):
        placed.model_construct(order_id=7).publish(log)
    with pytest.raises(InvalidMessageError, match="OrderPlaced: Unable to serialize unknown type"):
        placed.model_construct(order_id="1", amount=1, lines=[object()]).publish(log)
    assert log.last_seq() == 0


def test_what_changed_since_it_was_checked_is_checked_again(placed, log):
    order = placed(order_id="o-1", amount=1, lines=[{"sku": "a", "count": 1}])
    order.lines[0].count = "many"
    with pytest.raises(InvalidMessageError) as caught:
        order.publish(log)
    assert caught.value.where == "OrderPlaced.lines.0.count"
    assert "many" not in str(caught.value)  # values may be secret
    assert log.last_seq() == 0


def test_numbers_that_are_none_are_refused_even_where_none_is_allowed(base, log):
    class Measured(base, topic="m"):
        value: float | None

    with pytest.raises(InvalidDataError, match="nan is not JSON"):
        Measured.model_construct(value=float("nan")).publish(log)


# --- what is read is what was published ------------------------------------------------------------------------------


class Kind(Enum):
    web = "web"


class GiftLine(Line):
    card: str = "congratulations"


@dataclass(eq=False)
class Point:
    x: Any


class Memo(Event, topic="notes", registry=Registry()):
    value: Any = None
    line: Line | None = None
    lines: list[Line] = Field(default_factory=list)
    point: Point | None = None
    secret: SecretStr | None = None
    share: float = 0.0


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({"secret": "hidden"}, "secret"),
        ({"line": GiftLine(sku="a", count=1)}, "line"),
        ({"lines": [Line(sku="a", count=1), GiftLine(sku="a", count=1)]}, "lines.1"),
        ({"point": Point(Decimal(1))}, "point.x"),
        ({"value": Decimal("1.10")}, "value"),
        ({"value": {"a": [1, b"bytes"]}}, "value.a.1"),
        ({"value": {1: 2}}, "value"),
        ({"value": {1, 2}}, "value"),
        ({"value": datetime(2024, 1, 1)}, "value"),
        ({"value": Line(sku="a", count=1)}, "value"),
    ],
)
def test_what_would_be_read_as_something_else_is_refused(log, fields, path):
    with pytest.raises(InvalidMessageError) as caught:
        Memo(**fields).publish(log)
    assert caught.value.where == f"Memo.{path}"
    assert caught.value.why.startswith("it would be read as ")
    assert "hidden" not in str(caught.value)
    assert log.last_seq() == 0


@pytest.mark.parametrize("value", [float("inf"), [float("-inf")], {"a": float("nan")}])
def test_numbers_that_are_none_are_refused_in_a_field_of_any_kind(log, value):
    with pytest.raises(InvalidDataError, match="is not JSON"):
        Memo(value=value).publish(log)


def test_a_number_that_is_too_large_for_its_field_is_refused(log):
    with pytest.raises(InvalidMessageError, match=r"Memo: int too large to convert to float\. Nothing was published"):
        Memo.model_construct(share=10**400).publish(log)


texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=5)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
)


@given(json_values)
def test_json_in_a_field_of_any_kind_is_published(value):
    assert prepare(Memo(value=value), {}).data["value"] == value


class Meter:
    """Without an __eq__, so two cannot be compared."""

    def __init__(self, metres: int) -> None:
        self.metres = metres


class Odd(Event, topic="odd", registry=Registry(), arbitrary_types_allowed=True):
    at: datetime | None = None
    length: Annotated[Meter, PlainSerializer(lambda meter: meter.metres), PlainValidator(Meter)] | None = None
    point: Point | None = None
    pair: Any = None
    kind: Kind = "web"  # type: ignore[assignment]
    secret: SecretStr = SecretStr("")
    here: str = Field("", exclude=True)
    _seen: int = PrivateAttr(0)

    @field_serializer("secret")
    def _revealed(self, secret: SecretStr) -> str:
        return secret.get_secret_value()


def odd_ones() -> Iterator[Odd]:
    yield Odd(at=datetime(2024, 10, 27, 2, 30, tzinfo=ZoneInfo("Europe/Berlin")))  # an hour that is there twice
    yield Odd(length=5)
    yield Odd(point=Point(1))
    yield Odd(pair=(1, [2, (3,)]))
    yield Odd()
    yield Odd(secret="hidden")
    yield Odd(here="what is excluded stays here, as computed fields do")
    looked_at = Odd()
    looked_at._seen = 1
    yield looked_at


@pytest.mark.parametrize("event", list(odd_ones()))
def test_what_only_looks_different_is_published(log, event):
    assert event.publish(log) == 1


def test_names_on_the_wire_are_aliases_and_computed_fields_stay_here(base, log):
    class Memo(base, topic="notes"):
        on_: str = Field(alias="on")

        @computed_field
        @property
        def loud(self) -> str:
            return self.on_.upper()

    event = Memo(on="monday")
    event.publish(log)
    [message] = stored(log)
    assert message.data == {"on": "monday"}
    assert Memo.read(message) == event


def test_a_class_without_a_topic_is_not_published(base, log):
    class Shop(base):
        pass

    with pytest.raises(InvalidOptionError, match="class Shop: it has no topic"):
        Shop().publish(log)


# --- many, and transactions -----------------------------------------------------------------------------------------


def test_many_are_published_together_or_not_at_all(placed, log):
    orders = [placed(order_id=f"o-{number}", amount=number) for number in range(3)]
    assert publish_many(log, orders) == [1, 2, 3]
    assert [placed.read(message) for message in stored(log)] == orders
    with pytest.raises(InvalidMessageError):
        publish_many(log, [orders[0], placed.model_construct(order_id="x")])
    assert log.last_seq() == 3


def test_an_event_is_published_in_a_transaction(placed, tmp_path: Path):
    with headwater.open(tmp_path / "log.db") as log:
        with pytest.raises(InvalidMessageError), log.transaction() as tx:
            publish_two(tx, placed(order_id="o-1", amount=1), placed.model_construct())
        assert log.last_seq() == 0
        with log.transaction() as tx:
            placed(order_id="o-1", amount=1).publish(tx, to="x")
        assert [message.to for message in stored(log)] == ["x"]


def publish_two(target, one, two) -> None:
    one.publish(target)
    two.publish(target)


def test_a_connection_of_the_users_own_is_passed_on(placed):
    class Recorder:
        def publish(self, topic, data, **options):
            return options["tx"]

    assert placed(order_id="o-1", amount=1).publish(Recorder(), tx="connection") == "connection"


# --- binding --------------------------------------------------------------------------------------------------------


def test_without_a_log_the_class_must_be_bound(placed):
    with pytest.raises(InvalidStateError, match=r"class OrderPlaced: it is not bound to a log\. Pass the log, or bind"):
        placed(order_id="o-1", amount=1).publish()
    with pytest.raises(InvalidOptionError, match="cannot be published to"):
        placed.bind("events.db")


def test_a_name_is_no_open_log_and_is_not_repeated(placed):
    order, name = placed(order_id="o-1", amount=1), "postgres://app:secret@db/shop"
    for publish in (order.publish, placed.bind, lambda target: publish_many(target, [order])):
        with pytest.raises(InvalidOptionError, match=r"a str cannot be published to\. Pass an open log") as refused:
            publish(name)
        assert "secret" not in str(refused.value)
    with pytest.raises(InvalidOptionError, match="'postgres://app@db/shop' is no log"):
        order.request(name, reply=placed)


def test_the_nearest_and_latest_binding_counts(base, placed, log):
    order = placed(order_id="o-1", amount=1)
    with headwater.open("memory:") as other, base.bind(other):
        assert order.publish(to="a") == 1
        binding = placed.bind(log)
        assert order.publish(to="b") == 1
        with placed.bind(other):
            assert order.publish(to="c") == 2
        assert order.publish(to="d") == 2
        binding.undo()
        binding.undo()
        assert order.publish(to="e") == 3
        assert [message.to for message in stored(other)] == ["a", "c", "e"]
    assert [message.to for message in stored(log)] == ["b", "d"]
    with pytest.raises(InvalidStateError, match="not bound"):
        order.publish()


def test_the_same_verbs_are_awaited_for_asyncio(placed):
    async def story() -> list[int]:
        async with headwater.open_async("memory:") as log:
            order = placed(order_id="o-1", amount=1)
            seqs = [await order.publish(log), *await publish_many(log, [order, order])]
            with placed.bind(log):
                seqs.append(await order.publish())
            return seqs

    assert asyncio.run(story()) == [1, 2, 3, 4]


def test_an_event_is_published_with_the_users_rows_or_not_at_all(base, postgres_schema_url):
    class OrderPlaced(base, topic="orders.{region}.placed", version=2):
        region: str
        amount: Decimal

    with headwater.open(postgres_schema_url, maintenance_interval=None) as log:
        with psycopg.connect(postgres_schema_url) as mine:
            mine.execute("CREATE TABLE orders (amount numeric)")
            OrderPlaced(region="eu", amount="1.10").publish(log, tx=mine)
            mine.rollback()
            mine.execute("CREATE TABLE orders (amount numeric)")
            assert OrderPlaced(region="eu", amount="9.90").publish(log, tx=mine, to="billing") == 1
            assert log.last_seq() == 0
        with log.subscribe("look", "orders.>") as look:
            [message] = look.fetch(10)
            assert (OrderPlaced.read(message), message.to) == (OrderPlaced(region="eu", amount="9.90"), "billing")
