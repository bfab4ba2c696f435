"""Answers: each call once, in the order of the frame, in one text, whenever the last of them comes."""

from __future__ import annotations

import gc
import random
import weakref

import msgspec
import pytest
from frames import encoded, exchange_of, parsed, responses_in

from headwater.protocol.jsonrpc import FRAME_BYTES_MIN, TOO_LARGE, Fault
from headwater.protocol.session import Exchange, Session


def request(id: object, method: str = "m") -> dict[str, object]:
    return {"jsonrpc": "2.0", "method": method, "id": id}


def notification(method: str = "n") -> dict[str, object]:
    return {"jsonrpc": "2.0", "method": method}


def batch_of(session: Session, *members: object) -> Exchange:
    return exchange_of(session, encoded(members))


def test_nothing_is_sent_until_every_call_is_answered_and_then_in_the_order_of_the_frame() -> None:
    session = Session()
    exchange = batch_of(session, *(request(number) for number in range(20)))
    calls = list(exchange.calls)
    random.Random(1).shuffle(calls)
    for answered, call in enumerate(calls):
        assert not session.has_something_to_send
        assert exchange.open == 20 - answered
        exchange.answer(call, {"for": parsed(bytes(call.id))})  # type: ignore[arg-type]
    assert exchange.open == 0
    [text] = session.texts_to_send()
    assert parsed(text) == [{"jsonrpc": "2.0", "result": {"for": number}, "id": number} for number in range(20)]


def test_frames_are_answered_apart_whichever_is_ready_first() -> None:
    session = Session()
    slow, quick = batch_of(session, request(1)), exchange_of(session, encoded(request(2)))
    quick.answer(quick.calls[0], "quick")
    assert session.texts_to_send() == [b'{"jsonrpc":"2.0","result":"quick","id":2}']
    slow.answer(slow.calls[0], "slow")
    assert session.texts_to_send() == [b'[{"jsonrpc":"2.0","result":"slow","id":1}]']


def test_notifications_are_given_to_the_handler_and_never_answered() -> None:
    session = Session()
    exchange = batch_of(session, notification("a"), request(1, "b"), notification("c"))
    assert [call.method for call in exchange.calls] == ["a", "b", "c"]
    assert [call.wants_answer for call in exchange.calls] == [False, True, False]
    assert exchange.open == 1
    for call in exchange.calls:
        exchange.answer(call, call.method)
        exchange.refuse(call, Fault(1, "late"))
    assert session.texts_to_send() == [b'[{"jsonrpc":"2.0","result":"b","id":1}]']


def test_a_frame_of_notifications_keeps_its_calls_and_sends_nothing() -> None:
    session = Session()
    exchange = batch_of(session, notification("a"), notification("b"))
    assert [call.method for call in exchange.calls] == ["a", "b"]
    assert exchange.open == 0
    exchange.answer_all(exchange.calls, [1, 2])
    exchange.refuse(exchange.calls[0], Fault(1, "no"))
    assert session.texts_to_send() == []


def test_the_first_answer_counts() -> None:
    session = Session()
    exchange = batch_of(session, request(1), request(2))
    first, second = exchange.calls
    exchange.refuse(first, Fault(-32006, "timed out"))
    exchange.answer(first, "too late")
    exchange.answer_all([first, second], ["too late", "in time"])
    exchange.answer(second, "again")
    [text] = session.texts_to_send()
    assert [each.get("result", "refused") for each in responses_in(text)] == ["refused", "in time"]
    assert exchange.open == 0


def test_equal_ids_are_answered_each_for_itself() -> None:
    session = Session()
    exchange = batch_of(session, request(1), request(1))
    exchange.answer_all(exchange.calls, ["a", "b"])
    [text] = session.texts_to_send()
    assert [each["result"] for each in responses_in(text)] == ["a", "b"]


def test_a_call_of_another_exchange_is_refused_as_a_mistake() -> None:
    session = Session()
    mine, other = batch_of(session, request(1)), batch_of(session, request(2))
    with pytest.raises(ValueError, match="another exchange"):
        mine.answer(other.calls[0], 1)
    with pytest.raises(ValueError, match="another exchange"):
        mine.answer_all(other.calls, [1])
    assert (mine.open, other.open) == (1, 1)


def test_answering_all_at_once_says_the_same_as_one_by_one() -> None:
    members = [request(1), request("two"), request(None), request(4.5)]
    results = [{"a": 1}, None, msgspec.Raw(b"[1, 2]"), "text"]
    one_by_one, at_once, in_parts = Session(), Session(), Session()
    exchange = batch_of(one_by_one, *members)
    for call, result in zip(exchange.calls, results, strict=True):
        exchange.answer(call, result)
    exchange = batch_of(at_once, *members)
    exchange.answer_all(exchange.calls, results)
    assert exchange.open == 0
    exchange = batch_of(in_parts, *members)
    exchange.answer_all(exchange.calls[2:], results[2:])
    exchange.answer_all(exchange.calls[:2], results[:2])
    expected = one_by_one.texts_to_send()
    assert len(expected) == 1
    assert at_once.texts_to_send() == in_parts.texts_to_send() == expected


def test_answering_all_in_another_order_still_answers_in_the_order_of_the_frame() -> None:
    session = Session()
    exchange = batch_of(session, request(1), request(2), notification(), request(3))
    exchange.answer_all(list(reversed(exchange.calls)), ["c", "nothing", "b", "a"])
    [text] = session.texts_to_send()
    assert [each["result"] for each in responses_in(text)] == ["a", "b", "c"]


def test_the_same_call_twice_in_place_of_another_does_not_answer_both() -> None:
    session = Session()
    exchange = batch_of(session, request(1), request(2))
    first = exchange.calls[0]
    exchange.answer_all([first, first], ["a", "b"])
    assert exchange.open == 1
    assert not session.has_something_to_send


def test_answers_and_calls_must_be_as_many() -> None:
    exchange = batch_of(Session(), request(1), request(2))
    with pytest.raises(ValueError, match="2 calls, but 1 results"):
        exchange.answer_all(exchange.calls, [1])


def test_a_single_call_may_be_answered_through_all_too() -> None:
    session = Session()
    exchange = exchange_of(session, encoded(request(1)))
    exchange.answer_all(exchange.calls, ["a"])
    assert session.texts_to_send() == [b'{"jsonrpc":"2.0","result":"a","id":1}']


def test_what_was_invalid_is_answered_in_its_place() -> None:
    session = Session()
    nameless = {"jsonrpc": "2.0", "method": 5, "id": 7}
    exchange = batch_of(session, 1, request(1), nameless, notification(), request(2), {})
    assert [call.method for call in exchange.calls] == ["m", "n", "m"]
    assert not session.has_something_to_send
    exchange.answer_all(exchange.calls, ["a", "-", "b"])
    [text] = session.texts_to_send()
    reported = [(each["id"], each.get("result", "invalid")) for each in responses_in(text)]
    assert reported == [(None, "invalid"), (1, "a"), (7, "invalid"), (2, "b"), (None, "invalid")]


def test_what_was_invalid_among_notifications_is_answered_at_once() -> None:
    session = Session()
    exchange = batch_of(session, notification("a"), 1)
    assert [call.method for call in exchange.calls] == ["a"]
    [text] = session.texts_to_send()
    assert len(responses_in(text)) == 1


# --- what cannot be sent --------------------------------------------------------------------------------------------


def test_a_result_that_is_not_json_leaves_the_call_open() -> None:
    session = Session()
    exchange = batch_of(session, request(1), request(2))
    for unfit in (object(), "\ud800"):
        with pytest.raises((TypeError, ValueError)):
            exchange.answer(exchange.calls[0], unfit)
        with pytest.raises((TypeError, ValueError)):
            exchange.answer_all(exchange.calls, ["fine", unfit])
    assert exchange.open == 2
    for call in exchange.calls:
        exchange.refuse(call, Fault(-32603, "internal error"))
    [text] = session.texts_to_send()
    assert len(responses_in(text)) == 2


@pytest.mark.parametrize("fault", [Fault(-1, "half \ud800 a pair", {"a": 1}), Fault(-1, "half ? a pair", object())])
def test_a_fault_that_is_not_json_is_reported_without_its_data(fault: Fault) -> None:
    session = Session()
    exchange = exchange_of(session, encoded(request(1)))
    exchange.refuse(exchange.calls[0], fault)
    [text] = session.texts_to_send()
    [response] = responses_in(text)
    assert response == {"jsonrpc": "2.0", "error": {"code": -1, "message": "half ? a pair"}, "id": 1}


@pytest.mark.parametrize("data", [0, "", [], {"retry_after": 2.5}])
def test_the_data_of_a_fault_is_any_value(data: object) -> None:
    session = Session()
    exchange = exchange_of(session, encoded(request(1)))
    exchange.refuse(exchange.calls[0], Fault(-1, "no", data))
    [text] = session.texts_to_send()
    assert responses_in(text)[0]["error"] == {"code": -1, "message": "no", "data": data}


def test_an_answer_that_fits_no_frame_becomes_an_error_and_spares_the_others() -> None:
    session = Session(frame_bytes_max=FRAME_BYTES_MIN)
    exchange = batch_of(session, request(1), request(2))
    exchange.answer_all(exchange.calls, ["x" * FRAME_BYTES_MIN, "small"])
    [text] = session.texts_to_send()
    large, small = responses_in(text)
    assert large["error"]["code"] == TOO_LARGE
    assert small["result"] == "small"


def test_a_fault_that_fits_no_frame_keeps_its_code() -> None:
    session = Session(frame_bytes_max=FRAME_BYTES_MIN)
    exchange = exchange_of(session, encoded(request("i" * 1000)))
    exchange.refuse(exchange.calls[0], Fault(-32007, "\x00" * FRAME_BYTES_MIN, {"why": "x" * FRAME_BYTES_MIN}))
    [text] = session.texts_to_send()
    assert len(text) <= FRAME_BYTES_MIN
    assert responses_in(text)[0]["error"]["code"] == -32007


def test_answers_too_many_for_one_frame_come_in_several_arrays() -> None:
    session = Session(frame_bytes_max=FRAME_BYTES_MIN)
    exchange = batch_of(session, *(request(number) for number in range(20)))
    exchange.answer_all(exchange.calls, ["x" * 1000] * 20)
    texts = session.texts_to_send()
    assert all(len(text) <= FRAME_BYTES_MIN and text.startswith(b"[") for text in texts)
    assert [each["id"] for text in texts for each in responses_in(text)] == list(range(20))


# --- memory ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "result",
    [[[]] * 600, [{}] * 600, ["[" * 1_200], ['"[' * 600], ["\\[" * 600]],
    ids=["arrays", "objects", "text", "quotes", "\\"],
)
def test_long_answers_that_are_not_deep_stay_in_one_array(result: object) -> None:
    session = Session()
    exchange = batch_of(session, request(1), request(2), request(3))
    for call, value in zip(exchange.calls, ("before", result, "after"), strict=True):
        exchange.answer(call, value)
    [text] = session.texts_to_send()
    assert [response["result"] for response in responses_in(text)] == ["before", result, "after"]


def test_a_deep_answer_goes_in_an_array_of_its_own_in_its_place() -> None:
    """Its reader may not be able to read it, and would lose the others."""
    session = Session()
    exchange = batch_of(session, *map(request, range(4)))
    deep = msgspec.Raw(b'{"]":[' * 300 + b'"]"' + b"]}" * 300)
    exchange.answer_all(exchange.calls[:2], ["first", deep])
    exchange.answer_all(exchange.calls[2:], [deep, "last"])
    assert [[each["id"] for each in responses_in(text)] for text in session.texts_to_send()] == [[0], [1], [2], [3]]


def test_what_is_answered_goes_at_once_and_what_is_given_up_with_the_next_collection() -> None:
    members = [request(1), request(2), notification()]
    gc.collect()
    gc.disable()
    try:
        answered, at_once, given_up = Session(), Session(), Session()
        exchange = batch_of(answered, *members)
        for call in exchange.calls:
            exchange.answer(call, 1)
        exchange = batch_of(at_once, *members[:2])
        exchange.answer_all(exchange.calls, [1, 2])
        exchange = batch_of(given_up, *members)
        exchange.answer(exchange.calls[0], 1)
        watched = [weakref.ref(session) for session in (answered, at_once, given_up)]
        del answered, at_once, given_up, exchange, call
        assert [ref() is None for ref in watched] == [True, True, False]
        gc.collect()
        assert watched[2]() is None
    finally:
        gc.enable()
