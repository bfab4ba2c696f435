"""Params become what a method's handler asks for, by name or by position, or an error that says what is wrong."""

from __future__ import annotations

import pickle
from typing import Any

import msgspec
import pytest
from frames import encoded, exchange_of

from headwater.protocol.jsonrpc import INVALID_PARAMS, Call, Fault, params_of
from headwater.protocol.session import Session


class Nack(msgspec.Struct, rename={"from_": "from"}, forbid_unknown_fields=True):
    subscription_id: str
    sequence_id: int
    delay: float = 0.0
    from_: str | None = None


class Nothing(msgspec.Struct):
    pass


class Pair(msgspec.Struct, array_like=True):
    left: int
    right: int


def call_with(params: str | None) -> Call:
    member = "" if params is None else f',"params":{params}'
    frame = f'{{"jsonrpc":"2.0","method":"rpc.nack","id":1{member}}}'
    return exchange_of(Session(), frame).calls[0]


def refused(params: str | None, type: Any) -> Fault:
    with pytest.raises(Fault) as caught:
        params_of(call_with(params), type)
    assert caught.value.code == INVALID_PARAMS
    assert caught.value.data.keys() == {"where", "why", "next"}
    assert all(caught.value.data.values())
    encoded(caught.value.data)
    return caught.value


@pytest.mark.parametrize(
    "params",
    [
        '{"subscription_id":"s","sequence_id":5,"delay":1.5,"from":"me"}',
        '["s",5,1.5,"me"]',
        '[ "s", 5, 1.5, "me" ]',
    ],
)
def test_params_come_by_name_or_by_position(params: str) -> None:
    assert params_of(call_with(params), Nack) == Nack("s", 5, 1.5, "me")


def test_positions_at_the_end_may_be_left_out_if_they_are_optional() -> None:
    assert params_of(call_with('["s",5]'), Nack) == Nack("s", 5)
    assert "sequence_id" in refused('["s"]', Nack).data["why"]


def test_more_positions_than_params_are_refused() -> None:
    assert "5 positions" in refused('["s",5,1.5,"me",0]', Nack).data["why"]


@pytest.mark.parametrize("params", [None, "{}", "[]"])
def test_no_params_are_as_good_as_empty_ones(params: str | None) -> None:
    assert params_of(call_with(params), Nothing) == Nothing()
    refused(params, Nack)


def test_other_types_than_structs_are_read_as_they_stand() -> None:
    assert params_of(call_with("[1,2,3]"), list[int]) == [1, 2, 3]
    assert params_of(call_with('{"a":1}'), dict[str, int]) == {"a": 1}
    assert params_of(call_with("[1,2]"), Pair) == Pair(1, 2)
    assert params_of(call_with('[{"subscription_id":"s","sequence_id":5}]'), list[Nack]) == [Nack("s", 5)]
    refused('{"a":1}', list[int])
    refused("[1]", Pair)


@pytest.mark.parametrize(
    ("params", "where", "why"),
    [
        ('{"subscription_id":"s","sequence_id":"5"}', "rpc.nack params.sequence_id", "Expected `int`, got `str`"),
        ('["s","5"]', "rpc.nack params.sequence_id", "Expected `int`, got `str`"),
        ('{"subscription_id":"s"}', "rpc.nack params", "Object missing required field `sequence_id`"),
        ('{"subscription_id":"s","sequence_id":5,"x":1}', "rpc.nack params", "Object contains unknown field `x`"),
    ],
)
def test_a_refusal_says_which_of_the_params_is_wrong(params: str, where: str, why: str) -> None:
    fault = refused(params, Nack)
    assert fault.message == f"Invalid params: {why}"
    assert fault.data == {
        "where": where,
        "why": why,
        "next": "It takes subscription_id, sequence_id and optionally delay, from",
    }


def test_numbers_out_of_every_range_are_refused() -> None:
    refused('{"subscription_id":"s","sequence_id":%s}' % ("9" * 5000), Nack)
    refused('{"subscription_id":"s","sequence_id":1,"delay":1e999}', Nack)


def test_nesting_that_was_read_but_is_too_deep_for_the_handler_is_refused() -> None:
    depth = 900
    call = call_with('{"subscription_id":%s}' % ("[" * depth + "]" * depth))

    def deeper(levels: int) -> Any:
        return deeper(levels - 1) if levels else params_of(call, dict[str, Any])

    with pytest.raises(Fault) as caught:
        deeper(200)
    assert caught.value.code == INVALID_PARAMS


def test_a_fault_says_itself_and_survives_a_pickle() -> None:
    fault = Fault(-32001, "taken", {"kind": "SubscriptionActiveError"})
    copy = pickle.loads(pickle.dumps(fault))
    assert (copy.code, copy.message, copy.data) == (-32001, "taken", {"kind": "SubscriptionActiveError"})
    assert str(copy) == "taken (-32001)"
