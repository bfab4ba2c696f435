"""What a session sends of its own accord, and what becomes of the answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from frames import answers_of, encoded, exchange_of, parsed

from headwater.errors import InvalidDataError, TooLargeError
from headwater.protocol.jsonrpc import (
    FRAME_BYTES_MAX,
    FRAME_BYTES_MIN,
    INTERNAL_ERROR,
    METHOD_CHARS_MAX,
    Answer,
    Notice,
)
from headwater.protocol.session import Exchange, Session


class Ack(msgspec.Struct):
    subscription_id: str
    sequence_id: int


def notices(method: str, params: list[Any]) -> list[Notice]:
    return [Notice(method, each) for each in params]


def result(id: Any, value: Any = "done") -> dict[str, Any]:
    return {"jsonrpc": "2.0", "result": value, "id": id}


# --- frames ---------------------------------------------------------------------------------------------------------


def test_one_call_is_a_plain_object_and_several_are_an_array() -> None:
    session = Session()
    assert session.call("rpc.ack", Ack("s", 5)) == 1
    expected = b'{"jsonrpc":"2.0","method":"rpc.ack","params":{"subscription_id":"s","sequence_id":5},"id":1}'
    assert session.texts_to_send() == [expected]
    assert session.call("a", [1, 2]) == 2
    session.notify("b", {})
    assert session.call("c") == 3
    [text] = session.texts_to_send()
    assert parsed(text) == [
        {"jsonrpc": "2.0", "method": "a", "params": [1, 2], "id": 2},
        {"jsonrpc": "2.0", "method": "b", "params": {}},
        {"jsonrpc": "2.0", "method": "c", "id": 3},
    ]
    assert session.texts_to_send() == []


def test_params_may_be_encoded_already() -> None:
    session = Session()
    session.call("a", msgspec.Raw(b'{"x": 1}'))
    session.call("b", {"data": msgspec.Raw(b"[1, 2]")})
    [text] = session.texts_to_send()
    assert b'"params":{"x": 1}' in text
    assert b'{"data":[1, 2]}' in text


def methods(text: bytes) -> list[str]:
    found = parsed(text)
    return [each["method"] for each in found] if isinstance(found, list) else [found["method"]]


def test_what_goes_alone_has_a_frame_of_its_own_and_order_is_kept() -> None:
    session = Session()
    session.call("a")
    session.call("b")
    session.call("poll", alone=True)
    session.call("c")
    session.notify("hint", alone=True)
    session.notify("d")
    session.notify("e")
    texts = session.texts_to_send()
    assert [methods(text) for text in texts] == [["a", "b"], ["poll"], ["c"], ["hint"], ["d", "e"]]
    assert [text.startswith(b"[") for text in texts] == [True, False, False, False, True]


def test_a_frame_holds_no_more_calls_than_the_limit() -> None:
    session = Session(batch_max=3)
    for _ in range(7):
        session.call("m")
    assert [len(methods(text)) for text in session.texts_to_send()] == [3, 3, 1]


def test_a_frame_is_filled_to_the_byte() -> None:
    empty = len(b'{"jsonrpc":"2.0","method":"m","params":[""]}')
    half = "x" * ((FRAME_BYTES_MIN - len("[,]")) // 2 - empty)
    session = Session(frame_bytes_max=FRAME_BYTES_MIN)
    odd = "x" * ((FRAME_BYTES_MIN - len("[,]")) % 2)
    session.notify("m", [half + odd])
    session.notify("m", [half])
    [text] = session.texts_to_send()
    assert len(text) == FRAME_BYTES_MIN
    session.notify("m", [half + odd + "x"])
    session.notify("m", [half])
    assert len(session.texts_to_send()) == 2


def test_a_call_that_fits_no_frame_is_refused_and_leaves_no_trace() -> None:
    session = Session(frame_bytes_max=FRAME_BYTES_MIN)
    size = FRAME_BYTES_MIN - len(b'{"jsonrpc":"2.0","method":"m","params":[""],"id":1}')
    with pytest.raises(TooLargeError) as caught:
        session.call("m", ["x" * (size + 1)])
    assert caught.value.where == "m"
    assert not session.has_something_to_send
    assert session.call("m", ["x" * size]) == 1
    assert [len(text) for text in session.texts_to_send()] == [FRAME_BYTES_MIN]
    with pytest.raises(TooLargeError):
        session.notify("m", ["x" * FRAME_BYTES_MIN])
    with pytest.raises(TooLargeError):
        session.notify_many(notices("m", [["fine"], ["x" * FRAME_BYTES_MIN]]), batch=True)
    assert not session.has_something_to_send


@pytest.mark.parametrize("params", [7, "text", b"bytes", True, object(), {"a": object()}, ["\ud800"]])
def test_params_that_are_no_structure_of_json_are_refused_at_once(params: Any) -> None:
    session = Session()
    for send in (session.call, session.notify):
        with pytest.raises(InvalidDataError) as caught:
            send("m", params)
        assert caught.value.where == "m"
    assert not session.has_something_to_send
    assert session.call("m") == 1


def test_a_call_with_raw_json_that_is_no_utf8_is_refused_at_once() -> None:
    """The other end could not read its id, and the caller would wait for an answer in vain."""
    session = Session()
    with pytest.raises(InvalidDataError, match="not UTF-8"):
        session.call("m", [msgspec.Raw(b'"\xff"')])
    assert not session.has_something_to_send
    assert session.call("m", ["\xff"]) == 1


@pytest.mark.parametrize("params", [object(), {"a": object()}, ["\ud800"]])
def test_many_notifications_are_refused_together_if_one_is_not_json(params: Any) -> None:
    session = Session()
    with pytest.raises(InvalidDataError) as caught:
        session.notify_many(notices("m", [{}, params]), batch=True)
    assert caught.value.where == "m"
    assert not session.has_something_to_send


def test_a_method_has_a_name_that_the_other_end_takes() -> None:
    session = Session()
    with pytest.raises(TooLargeError):
        session.call("m" * (METHOD_CHARS_MAX + 1))
    with pytest.raises(InvalidDataError):
        session.call("\ud800")
    session.call('quo"te')
    assert exchange_of(Session(), session.texts_to_send()[0]).calls[0].method == 'quo"te'


def test_the_other_ends_limits_are_respected_where_they_are_lower() -> None:
    session = Session(batch_max=5)
    session.respect(frame_bytes_max=FRAME_BYTES_MIN, batch_max=2)
    for _ in range(3):
        session.call("m")
    assert [len(methods(text)) for text in session.texts_to_send()] == [2, 1]
    with pytest.raises(TooLargeError):
        session.call("m", ["x" * FRAME_BYTES_MIN])
    session.respect(frame_bytes_max=10**9, batch_max=10**9)
    for _ in range(7):
        session.call("m", ["x" * FRAME_BYTES_MIN])
    assert [len(methods(text)) for text in session.texts_to_send()] == [5, 2]
    with pytest.raises(TooLargeError):
        session.call("m", ["x" * FRAME_BYTES_MAX])


def test_limits_too_low_to_say_anything_are_not_believed() -> None:
    session = Session()
    session.respect(frame_bytes_max=0, batch_max=0)
    session.call("m", ["x" * (FRAME_BYTES_MIN // 2)])
    session.call("m")
    assert [len(methods(text)) for text in session.texts_to_send()] == [1, 1]


def test_many_notifications_go_in_arrays_or_each_alone() -> None:
    session = Session(batch_max=4)
    deliveries = [{"sequence_id": number} for number in range(6)]
    session.notify_many(notices("n", deliveries), batch=True)
    session.notify_many(notices("n", deliveries[:2]), batch=False)
    session.notify_many(notices("n", []), batch=True)
    session.notify_many(notices("n", []), batch=False)
    session.notify("n", {"sequence_id": 9})
    found = [parsed(text) for text in session.texts_to_send()]
    assert [type(each) for each in found] == [list, list, dict, dict, dict]
    reported = [each for frame in found for each in (frame if isinstance(frame, list) else [frame])]
    assert [each["params"]["sequence_id"] for each in reported] == [0, 1, 2, 3, 4, 5, 0, 1, 9]
    assert all(each.keys() == {"jsonrpc", "method", "params"} for each in reported)


def test_many_notifications_join_what_waits_already() -> None:
    session = Session()
    session.notify("first", {})
    session.notify_many(notices("n", [{}, {}]), batch=True)
    session.notify("last", {})
    assert [methods(text) for text in session.texts_to_send()] == [["first", "n", "n", "last"]]
    session.notify_many(notices("n", [{}, {}]), batch=True)
    session.notify("last", {})
    assert [methods(text) for text in session.texts_to_send()] == [["n", "n", "last"]]


def test_answers_go_before_calls() -> None:
    session = Session()
    session.notify("event", {})
    exchange = exchange_of(session, encoded({"jsonrpc": "2.0", "method": "m", "id": 1}))
    exchange.answer(exchange.calls[0], "done")
    answer, event = session.texts_to_send()
    assert parsed(answer) == result(1)
    assert methods(event) == ["event"]


# --- the hint that there is something -------------------------------------------------------------------------------


def test_the_shell_is_reported_once_each_time_there_is_something_to_send() -> None:
    session = Session()
    reported: list[bool] = []
    session.on_outgoing = lambda: reported.append(session.has_something_to_send)
    assert not session.has_something_to_send
    session.call("a")
    session.call("b")
    session.notify("c", alone=True)
    session.notify_many(notices("d", [{}]), batch=True)
    session.receive_text("not JSON")
    assert reported == [True]
    session.texts_to_send()
    assert not session.has_something_to_send
    occasions: list[Callable[[], object]] = [
        lambda: session.notify("c", alone=True),
        lambda: session.notify_many(notices("d", [{}]), batch=True),
        lambda: session.notify_many(notices("d", [{}]), batch=False),
        lambda: session.receive_text("not JSON"),
        lambda: session.receive_text("[1]"),
    ]
    for number, send in enumerate(occasions):
        send()
        assert reported == [True] * (number + 2)
        session.texts_to_send()
    session.notify_many(notices("d", []), batch=True)
    session.receive_text('{"jsonrpc":"2.0","method":"m","id":1}')
    assert len(reported) == 6


def test_the_shell_may_send_while_it_is_being_reported() -> None:
    session = Session()
    sent: list[bytes] = []
    session.on_outgoing = lambda: sent.extend(session.texts_to_send())
    session.call("a")
    session.call("b")
    session.receive_text("[]")
    assert [parsed(text).get("id") for text in sent] == [1, 2, None]
    assert not session.has_something_to_send


# --- answers --------------------------------------------------------------------------------------------------------


def asked(session: Session, count: int) -> list[int]:
    ids = [session.call("m") for _ in range(count)]
    session.texts_to_send()
    return ids


def test_answers_come_with_their_ids_one_by_one_or_in_arrays() -> None:
    session = Session()
    assert asked(session, 3) == [1, 2, 3]
    [first] = answers_of(session, encoded(result(2, {"sequence_id": 1})))
    assert first.id == 2
    assert first.result is not msgspec.UNSET
    assert msgspec.json.decode(first.result) == {"sequence_id": 1}
    assert first.error is msgspec.UNSET
    error = {"jsonrpc": "2.0", "error": {"code": -32001, "message": "taken", "data": {"kind": "x"}}, "id": 3}
    second, third = answers_of(session, encoded([result(1, None), error]))
    assert (second.id, second.result) == (1, msgspec.Raw(b"null"))
    assert third.id == 3
    assert third.error is not msgspec.UNSET
    assert (third.error.code, third.error.message, third.error.data) == (-32001, "taken", msgspec.Raw(b'{"kind":"x"}'))
    assert not session.has_something_to_send


def test_calls_and_answers_may_share_an_array() -> None:
    session = Session()
    asked(session, 2)
    mixed = [result(2), {"jsonrpc": "2.0", "method": "m", "id": "theirs"}, 7, result(99), result(1)]
    found = session.receive_text(encoded(mixed))
    [exchange] = [each for each in found if isinstance(each, Exchange)]
    assert [each.id for each in found if isinstance(each, Answer)] == [2, 99, 1]
    exchange.answer(exchange.calls[0], "ours")
    [text] = session.texts_to_send()
    assert [each["id"] for each in parsed(text)] == ["theirs", None]


@pytest.mark.parametrize(
    "broken",
    [
        '{"jsonrpc":"2.0","result":1,"error":{"code":1,"message":"x"},"id":1}',
        '{"jsonrpc":"2.0","result":1,"error":null,"id":1}',
        '{"jsonrpc":"2.0","error":null,"id":1}',
        '{"jsonrpc":"2.0","error":"no","id":1}',
        '{"jsonrpc":"2.0","error":{"code":"x","message":"x"},"id":1}',
        '{"jsonrpc":"2.0","error":{"code":1.5,"message":"x"},"id":1}',
        '{"jsonrpc":"2.0","error":{"code":1},"id":1}',
        '{"jsonrpc":"1.0","result":1,"id":1}',
        '{"result":1,"id":1}',
    ],
)
@pytest.mark.parametrize("shape", ["%s", "[%s]"], ids=["single", "batch"])
def test_a_broken_answer_fails_its_call_and_is_not_answered(broken: str, shape: str) -> None:
    session = Session()
    asked(session, 1)
    [answer] = answers_of(session, shape % broken)
    assert answer.id == 1
    assert answer.result is msgspec.UNSET
    assert answer.error is not msgspec.UNSET
    assert answer.error.code == INTERNAL_ERROR
    assert not session.has_something_to_send


@pytest.mark.parametrize("id", ["", ',"id":true', ',"id":[1]', ',"id":1e999', ',"id":"1"', ',"id":null'])
def test_a_broken_unexpected_answer_answers_no_call_and_is_not_answered(id: str) -> None:
    session = Session()
    asked(session, 1)
    [answer] = answers_of(session, f'{{"result":1{id}}}')
    assert answer.id in (None, "1")
    assert not session.has_something_to_send


def test_an_error_without_an_id_answers_no_call_and_is_never_answered() -> None:
    session = Session()
    asked(session, 1)
    other = Session()
    other.receive_text("not JSON")
    [text] = other.texts_to_send()
    assert [answer.id for answer in answers_of(session, text)] == [None]
    assert not session.has_something_to_send
