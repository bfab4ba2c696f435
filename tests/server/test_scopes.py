"""Scopes: what they allow, and what cannot be one."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.errors import CombinedWildcard, InvalidOption, InvalidPattern
from headwater.server.scopes import EVERYTHING, PATTERNS_PER_SCOPE_MAX, Scopes
from headwater.topics import parse_pattern


def test_publishing_is_allowed_where_some_pattern_matches() -> None:
    scopes = Scopes(publish=("orders.*", "logs.#.error"))
    assert scopes.may_publish("orders.new")
    assert scopes.may_publish("logs.error")
    assert scopes.may_publish("logs.shop.till.error")
    assert not scopes.may_publish("orders")
    assert not scopes.may_publish("orders.new.late")
    assert not scopes.may_publish("logs.shop")


def test_subscribing_is_allowed_where_some_pattern_covers_the_whole() -> None:
    scopes = Scopes(subscribe=("orders.>", "logs.#"))
    assert scopes.may_subscribe(parse_pattern("orders.new"))
    assert scopes.may_subscribe(parse_pattern("orders.*.#", "amqp"))
    assert scopes.may_subscribe(parse_pattern("logs"))
    assert not scopes.may_subscribe(parse_pattern("orders.#", "amqp"))
    assert not scopes.may_subscribe(parse_pattern("*.new"))
    assert not scopes.may_subscribe(parse_pattern(">"))


def test_two_halves_do_not_add_up() -> None:
    scopes = Scopes(subscribe=("orders", "orders.>"))
    assert not scopes.may_subscribe(parse_pattern("orders.#", "amqp"))


def test_each_right_stands_alone() -> None:
    anything = parse_pattern("a")
    for scopes in (Scopes(admin=True), Scopes(subscribe=(">",)), Scopes()):
        assert not scopes.may_publish("a")
    for scopes in (Scopes(admin=True), Scopes(publish=(">",)), Scopes()):
        assert not scopes.may_subscribe(anything)
    assert not Scopes(publish=(">",), subscribe=(">",)).admin


def test_scopes_that_allow_nothing_say_so() -> None:
    assert Scopes().allow_nothing
    assert not any(
        each.allow_nothing for each in (Scopes(publish=("a",)), Scopes(subscribe=("a",)), Scopes(admin=True))
    )


@given(st.lists(st.sampled_from(["a", "b", "*", "#"]), min_size=1, max_size=5).map(".".join))
def test_everything_is_everything(text: str) -> None:
    assert EVERYTHING.may_subscribe(parse_pattern(text, "amqp"))
    assert EVERYTHING.may_publish(text.replace("*", "x").replace("#", "y"))
    assert EVERYTHING.admin


@pytest.mark.parametrize("name", ["publish", "subscribe"])
def test_what_cannot_be_read_is_refused_with_its_place(name: str) -> None:
    with pytest.raises(CombinedWildcard) as caught:
        Scopes(**{name: ("orders.>", "orders.n*")})
    assert caught.value.where == f"{name} scope, nats pattern 'orders.n*'"
    assert caught.value.next


@pytest.mark.parametrize("name", ["publish", "subscribe"])
@pytest.mark.parametrize("given", ["orders.>", 7, None])
def test_a_scope_is_a_list(name: str, given: Any) -> None:
    with pytest.raises(InvalidOption, match=f"the {name} scope is a list of patterns"):
        Scopes(**{name: given})


@pytest.mark.parametrize("name", ["publish", "subscribe"])
def test_a_pattern_is_text(name: str) -> None:
    with pytest.raises(InvalidPattern, match="not int"):
        Scopes(**{name: [7]})  # type: ignore[arg-type]


def test_admin_is_true_or_false() -> None:
    with pytest.raises(InvalidOption, match="admin"):
        Scopes(admin="no")  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["publish", "subscribe"])
def test_the_number_of_patterns_is_limited(name: str) -> None:
    texts = tuple(f"t{number}" for number in range(PATTERNS_PER_SCOPE_MAX))
    assert len(getattr(Scopes(**{name: texts}), name)) == PATTERNS_PER_SCOPE_MAX
    with pytest.raises(InvalidOption, match=f"the limit is {PATTERNS_PER_SCOPE_MAX}"):
        Scopes(**{name: (*texts, "more")})


def test_scopes_are_values_and_travel_as_json() -> None:
    scopes = Scopes(publish=["orders.>"], admin=True)  # type: ignore[arg-type]
    assert scopes == Scopes(publish=("orders.>",), admin=True)
    assert hash(scopes) == hash(Scopes(publish=("orders.>",), admin=True))
    text = msgspec.json.encode(scopes)
    assert text == b'{"publish":["orders.>"],"subscribe":[],"admin":true}'
    assert msgspec.json.decode(text, type=Scopes) == scopes


@pytest.mark.parametrize("text", ['{"publish":["a..b"]}', '{"publsh":["a"]}', '{"admin":1}', '{"subscribe":"a"}'])
def test_json_that_is_no_scope_is_refused(text: str) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(text, type=Scopes)
