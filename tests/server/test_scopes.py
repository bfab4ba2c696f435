"""Scopes: what they allow, and what cannot be one."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.errors import CombinedWildcardError, InvalidOptionError, InvalidPatternError
from headwater.server.auth import EVERYTHING, PATTERNS_PER_SCOPE_MAX, RIGHTS, Right, Scopes
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
    scopes = Scopes(read=("orders.>", "logs.#"))
    assert scopes.may_read(parse_pattern("orders.new"))
    assert scopes.may_read(parse_pattern("orders.*.#", "amqp"))
    assert scopes.may_read(parse_pattern("logs"))
    assert not scopes.may_read(parse_pattern("orders.#", "amqp"))
    assert not scopes.may_read(parse_pattern("*.new"))
    assert not scopes.may_read(parse_pattern(">"))


def test_two_halves_do_not_add_up() -> None:
    scopes = Scopes(read=("orders", "orders.>"))
    assert not scopes.may_read(parse_pattern("orders.#", "amqp"))


@pytest.mark.parametrize("right", RIGHTS)
def test_each_right_stands_alone(right: Right) -> None:
    everything = {"consume": ("*",), "admin": True}.get(right, (">",))
    scopes = Scopes(**{right: everything})  # type: ignore[arg-type]
    anything = parse_pattern("a")
    allowed = {
        "publish": scopes.may_publish("a"),
        "read": scopes.may_read(anything),
        "consume": scopes.may_consume("a"),
        "manage": scopes.may_manage(anything),
        "call": scopes.may_call("a"),
        "admin": scopes.admin,
    }
    assert [name for name, is_allowed in allowed.items() if is_allowed] == [right]
    assert [name for name in RIGHTS if scopes.has(name)] == [right]
    assert scopes.may_look_at("a") == (right in ("read", "manage"))
    assert scopes.may_watch == (right in ("manage", "admin"))
    assert not scopes.allow_nothing


def test_scopes_that_allow_nothing_say_so() -> None:
    assert Scopes().allow_nothing


def test_the_figures_of_the_server_are_for_managers_of_everything() -> None:
    assert not Scopes(manage=("orders.>", "logs.#")).may_watch
    assert Scopes(manage=("#",)).may_watch


def test_names_are_whole_or_begin_alike() -> None:
    scopes = Scopes(consume=("billing", "mail-*"))
    assert all(map(scopes.may_consume, ("billing", "mail-", "mail-1", "mail-a/b.c")))
    assert not any(map(scopes.may_consume, ("billing2", "billin", "mail", "xmail-1", "*", "")))


@pytest.mark.parametrize("name", ["", "a*b", "**", "a b", "-a", "orders.>", "#", "x" * 129, "a\n", 7, None])
def test_what_names_no_subscription_is_refused(name: Any) -> None:
    with pytest.raises(InvalidOptionError, match="names no subscriptions"):
        Scopes(consume=(name,))


@given(st.lists(st.sampled_from(["a", "b", "*", "#"]), min_size=1, max_size=5).map(".".join))
def test_everything_is_everything(text: str) -> None:
    assert EVERYTHING.may_read(parse_pattern(text, "amqp"))
    assert EVERYTHING.may_publish(text.replace("*", "x").replace("#", "y"))
    assert EVERYTHING.may_manage(parse_pattern(text, "amqp"))
    assert all(map(EVERYTHING.has, RIGHTS))
    assert EVERYTHING.may_call(text)
    assert EVERYTHING.may_consume("any/name")


@pytest.mark.parametrize("name", ["publish", "read", "manage", "call"])
def test_what_cannot_be_read_is_refused_with_its_place(name: str) -> None:
    with pytest.raises(CombinedWildcardError) as caught:
        Scopes(**{name: ("orders.>", "orders.n*")})
    assert caught.value.where == f"{name} scope, nats pattern 'orders.n*'"
    assert caught.value.next


@pytest.mark.parametrize("name", ["publish", "read", "manage", "call"])
@pytest.mark.parametrize("given", ["orders.>", 7, None])
def test_a_scope_is_a_list(name: str, given: Any) -> None:
    with pytest.raises(InvalidOptionError, match=f"the {name} scope is a list of patterns"):
        Scopes(**{name: given})


@pytest.mark.parametrize("name", ["publish", "read", "manage", "call"])
def test_a_pattern_is_text(name: str) -> None:
    with pytest.raises(InvalidPatternError, match="not int"):
        Scopes(**{name: [7]})  # type: ignore[arg-type]


def test_admin_is_true_or_false() -> None:
    with pytest.raises(InvalidOptionError, match="admin"):
        Scopes(admin="no")  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["publish", "read", "manage", "call"])
def test_the_number_of_patterns_is_limited(name: str) -> None:
    texts = tuple(f"t{number}" for number in range(PATTERNS_PER_SCOPE_MAX))
    assert len(getattr(Scopes(**{name: texts}), name)) == PATTERNS_PER_SCOPE_MAX
    with pytest.raises(InvalidOptionError, match=f"the limit is {PATTERNS_PER_SCOPE_MAX}"):
        Scopes(**{name: (*texts, "more")})


def test_scopes_are_values_and_travel_as_json() -> None:
    scopes = Scopes(publish=["orders.>"], admin=True)  # type: ignore[arg-type]
    assert scopes == Scopes(publish=("orders.>",), admin=True)
    assert hash(scopes) == hash(Scopes(publish=("orders.>",), admin=True))
    text = msgspec.json.encode(scopes)
    assert text == b'{"publish":["orders.>"],"read":[],"consume":[],"manage":[],"call":[],"admin":true}'
    assert msgspec.json.decode(text, type=Scopes) == scopes


@pytest.mark.parametrize(
    "text", ['{"publish":["a..b"]}', '{"publsh":["a"]}', '{"admin":1}', '{"subscribe":["a"]}', '{"read":"a"}']
)
def test_json_that_is_no_scope_is_refused(text: str) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(text, type=Scopes)
