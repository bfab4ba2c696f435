"""Whatever is put in comes out in order, once; whatever arrives, nothing raises and every answer is one."""

from __future__ import annotations

import json
from typing import Any

from frames import encoded, parsed, responses_in
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.protocol.jsonrpc import FRAME_BYTES_MIN, METHOD_CHARS_MAX, Answer, Call, Fault, Notice
from headwater.protocol.session import Exchange, Session

# --- two sessions, joined -------------------------------------------------------------------------------------------

SIZES = st.one_of(st.integers(0, 40), st.integers(0, 4_000))
SENDING = st.one_of(
    st.tuples(st.just("call"), SIZES, st.booleans()),
    st.tuples(st.just("notify"), SIZES, st.booleans()),
    st.tuples(st.just("many"), st.lists(SIZES, max_size=6), st.booleans()),
    st.tuples(st.just("flush"), st.just(0), st.just(False)),
)


@settings(deadline=None)
@given(st.lists(SENDING, max_size=40), st.integers(1, 7), st.sampled_from(["all", "each", "backwards"]))
def test_calls_arrive_in_order_and_once_and_so_do_their_answers(
    sendings: list[tuple[str, Any, bool]], batch_max: int, how: str
) -> None:
    client = Session(frame_bytes_max=FRAME_BYTES_MIN, batch_max=batch_max)
    server = Session(frame_bytes_max=FRAME_BYTES_MIN, batch_max=batch_max)
    frames: list[bytes] = []
    put_in: list[tuple[int, bool]] = []
    ids: list[int] = []
    alone: set[int] = set()

    def params(size: int) -> dict[str, Any]:
        put_in.append((len(put_in), False))
        return {"place": len(put_in) - 1, "filling": "x" * size}

    for verb, size, flag in sendings:
        if verb == "call":
            alone |= {len(put_in)} if flag else set()
            ids.append(client.call("m", params(size), alone=flag))
            put_in[-1] = (len(put_in) - 1, True)
        elif verb == "notify":
            alone |= {len(put_in)} if flag else set()
            client.notify("m", params(size), alone=flag)
        elif verb == "many":
            alone |= set() if flag else {len(put_in) + place for place in range(len(size))}
            client.notify_many([Notice("m", params(each)) for each in size], batch=flag)
        else:
            frames += client.texts_to_send()
    frames += client.texts_to_send()

    arrived: list[tuple[int, bool]] = []
    answered: list[Any] = []
    for frame in frames:
        assert len(frame) <= FRAME_BYTES_MIN
        [exchange] = server.receive_text(frame)
        assert isinstance(exchange, Exchange)
        assert (len(exchange.calls) > 1) is frame.startswith(b"[")
        assert len(exchange.calls) <= batch_max
        places = [parsed(bytes(call.params))["place"] for call in exchange.calls]  # type: ignore[arg-type]
        assert len(places) == 1 or alone.isdisjoint(places)
        arrived += zip(places, (call.wants_answer for call in exchange.calls), strict=True)
        answer(exchange, how)
        for text in server.texts_to_send():
            assert len(text) <= FRAME_BYTES_MIN
            answered += [each.id for each in client.receive_text(text) if isinstance(each, Answer)]
    assert arrived == put_in
    assert answered == ids
    assert not client.has_something_to_send


def answer(exchange: Exchange, how: str) -> None:
    calls = list(exchange.calls)
    if how == "all":
        exchange.answer_all(calls, [bytes(call.params).decode() for call in calls])  # type: ignore[arg-type]
    elif how == "each":
        for call in calls:
            exchange.answer(call, 1)
    else:
        for call in reversed(calls):
            exchange.refuse(call, Fault(-32006, "too many"))


# --- whatever arrives -----------------------------------------------------------------------------------------------

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
MEMBERS = st.fixed_dictionaries(
    {},
    optional={
        "jsonrpc": st.just("2.0") | st.sampled_from(["1.0", 2.0, None]),
        "method": st.text(max_size=5) | st.just("m" * (METHOD_CHARS_MAX + 1)) | JSON,
        "params": st.lists(JSON, max_size=2) | st.dictionaries(st.text(max_size=3), JSON, max_size=2) | JSON,
        "id": st.integers(0, 5) | st.text(max_size=3) | JSON,
        "result": JSON,
        "error": JSON | st.just({"code": 1, "message": "x"}),
        "exchange": JSON,
    },
)
LIKELY = st.fixed_dictionaries(
    {"jsonrpc": st.just("2.0"), "method": st.text(max_size=5)},
    optional={"params": st.lists(JSON, max_size=2), "id": st.integers(0, 5) | st.text(max_size=3) | st.none()},
)
MEMBER = LIKELY | MEMBERS | JSON
FRAME = (MEMBER | st.lists(MEMBER, max_size=9)).map(lambda value: json.dumps(value, ensure_ascii=False))


def is_id(value: Any) -> bool:
    return value is None or type(value) in (int, float, str)


def is_request(member: dict[str, Any]) -> bool:
    return (
        member.get("jsonrpc") == "2.0"
        and type(member.get("method")) is str
        and len(member["method"]) <= METHOD_CHARS_MAX
        and type(member.get("params", [])) in (list, dict)
        and is_id(member.get("id"))
    )


def expected_answers(members: list[Any]) -> list[tuple[Any, bool]]:
    """What the specification asks for: the id and whether the call was valid, for each that is to be answered."""
    expected: list[tuple[Any, bool]] = []
    for member in members:
        if not isinstance(member, dict):
            expected.append((None, False))
        elif "method" in member or ("result" not in member and "error" not in member):
            id = member.get("id") if is_id(member.get("id")) else None
            if not is_request(member):
                expected.append((id, False))
            elif "id" in member:
                expected.append((id, True))
    return expected


@settings(deadline=None, max_examples=300)
@given(FRAME, st.booleans())
def test_any_json_is_answered_as_the_specification_says(frame: str, at_once: bool) -> None:
    session = Session()
    value = json.loads(frame)
    members = value if isinstance(value, list) else [value]
    calls: list[Call] = []
    for found in session.receive_text(frame):
        if isinstance(found, Answer):
            continue
        calls += found.calls
        if at_once:
            found.answer_all(found.calls, ["done"] * len(found.calls))
        else:
            for call in found.calls:
                found.answer(call, "done")
        assert found.open == 0
    valid = [member for member in members if isinstance(member, dict) and is_request(member)]
    assert [(call.method, call.wants_answer) for call in calls] == [(each["method"], "id" in each) for each in valid]
    texts = session.texts_to_send()
    expected = expected_answers(members) if value != [] else [(None, False)]
    assert len(texts) == (1 if expected else 0)
    for text in texts:
        assert text.startswith(b"[") is (isinstance(value, list) and value != [])
        reported = [(each["id"], "result" in each) for each in responses_in(text)]
        assert reported == expected
        assert [type(id) for id, _ in reported] == [type(id) for id, _ in expected]


CUTS = st.tuples(FRAME, st.integers(0, 200), st.binary(max_size=3), st.integers(0, 5)).map(
    lambda parts: parts[0].encode()[: parts[1]] + parts[2] + parts[0].encode()[parts[1] + parts[3] :]
)


@settings(deadline=None, max_examples=400)
@given(st.lists(st.one_of(st.text(), st.binary(), FRAME, CUTS), max_size=4), st.data())
def test_whatever_arrives_nothing_raises_and_each_call_is_answered_once(
    frames: list[str | bytes], data: st.DataObject
) -> None:
    session = Session(batch_max=5)
    for _ in range(3):
        session.call("m")
    session.texts_to_send()
    wanted = 0
    for frame in frames:
        for found in session.receive_text(frame):
            if isinstance(found, Exchange):
                for call in found.calls:
                    wanted += call.wants_answer
                    for _ in range(data.draw(st.integers(1, 2))):
                        if data.draw(st.booleans()):
                            found.answer(call, "done")
                        else:
                            found.refuse(call, Fault(-1, "done"))
                assert found.open == 0
    done = 0
    for text in session.texts_to_send():
        for response in responses_in(text):
            done += response.get("result") == "done" or response.get("error", {}).get("code") == -1
    assert done == wanted


@given(st.integers(1, 6), st.integers(0, 12))
def test_the_limit_of_a_batch_is_exact(batch_max: int, count: int) -> None:
    session = Session(batch_max=batch_max)
    found = session.receive_text(encoded([{"jsonrpc": "2.0", "method": "m", "id": each} for each in range(count)]))
    assert bool(found) is (1 <= count <= batch_max)
    assert session.has_something_to_send is not bool(found)
