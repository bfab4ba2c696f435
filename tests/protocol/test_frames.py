"""Frames at the edges of the rules: ids of every kind, wrong members, text that is none, and the limits."""

from __future__ import annotations

from typing import Any

import pytest
from frames import encoded, exchange_of, responses_in, serve, without_details

from headwater.errors import InvalidOptionError
from headwater.protocol.jsonrpc import BATCH_CALLS_MAX, FRAME_BYTES_MAX, FRAME_BYTES_MIN, ID_BYTES_MAX, METHOD_CHARS_MAX
from headwater.protocol.session import Session

ECHO = {"echo": lambda call: "done"}


def only_error(texts: list[bytes]) -> tuple[int, Any]:
    [text] = texts
    assert text.startswith(b"{")
    [response] = responses_in(text)
    return response["error"]["code"], response["id"]


@pytest.mark.parametrize(
    "id",
    [
        "0",
        "-7",
        "18446744073709551616",
        "9" * ID_BYTES_MAX,
        "1.50",
        "1e2",
        "1E400",
        "-0",
        '""',
        '"a"',
        r'"tab\tquote\"slash\/snow\u2603pair\ud83d\ude00"',
        '"снег ☃ 😀"',
        "null",
    ],
)
@pytest.mark.parametrize("shape", ["%s", "[%s]"], ids=["single", "batch"])
def test_an_id_of_any_kind_goes_back_byte_for_byte(id: str, shape: str) -> None:
    frame = shape % (f'{{"jsonrpc":"2.0","method":"echo","id":{id}}}')
    expected = shape % (f'{{"jsonrpc":"2.0","result":"done","id":{id}}}')
    assert serve(Session(), frame, ECHO) == [expected.encode()]


@pytest.mark.parametrize("id", ["true", "[1]", '{"a":1}', '"%s"' % ("x" * ID_BYTES_MAX)])
def test_what_cannot_be_an_id_is_refused_with_null(id: str) -> None:
    assert only_error(serve(Session(), f'{{"jsonrpc":"2.0","method":"echo","id":{id}}}', ECHO)) == (-32600, None)


@pytest.mark.parametrize(
    "members",
    [
        '"method":"echo"',
        '"jsonrpc":"1.0","method":"echo"',
        '"jsonrpc":2.0,"method":"echo"',
        '"jsonrpc":null,"method":"echo"',
        '"jsonrpc":"2.0"',
        '"jsonrpc":"2.0","method":7',
        '"jsonrpc":"2.0","method":null',
        '"jsonrpc":"2.0","method":["echo"]',
        '"jsonrpc":"2.0","method":"%s"' % ("m" * (METHOD_CHARS_MAX + 1)),
        '"jsonrpc":"2.0","method":"echo","params":7',
        '"jsonrpc":"2.0","method":"echo","params":"text"',
        '"jsonrpc":"2.0","method":"echo","params":null',
        '"jsonrpc":"2.0","method":"echo","params":true',
    ],
)
def test_an_invalid_request_is_refused_under_its_id_if_it_has_one(members: str) -> None:
    assert only_error(serve(Session(), f'{{{members},"id":"mine"}}', ECHO)) == (-32600, "mine")
    assert only_error(serve(Session(), f"{{{members}}}", ECHO)) == (-32600, None)


@pytest.mark.parametrize("frame", ["null", "7", '"text"', "true", "1e999", "9" * 5000, "{}"])
def test_json_that_is_no_call_is_an_invalid_request(frame: str) -> None:
    assert only_error(serve(Session(), frame, ECHO)) == (-32600, None)


@pytest.mark.parametrize(
    "members",
    ['"exchange":1,', '"exchange":null,', '"result":null,', '"error":{},', '"trace":"x",', '"id":7,"method":"gone",'],
)
def test_members_that_the_specification_does_not_know_and_repeated_ones_do_no_harm(members: str) -> None:
    frame = f'{{"jsonrpc":"2.0",{members}"method":"echo","id":1}}'
    assert serve(Session(), frame, ECHO) == [b'{"jsonrpc":"2.0","result":"done","id":1}']


def test_a_broken_call_is_no_answer_whatever_else_it_holds() -> None:
    for broken in ('"method":7', '"method":"echo","params":7', '"method":"echo","jsonrpc":"1.0"'):
        frame = f'{{"jsonrpc":"2.0","result":1,{broken},"id":1}}'
        assert only_error(serve(Session(), frame, ECHO)) == (-32600, 1)


def test_of_repeated_members_the_last_one_counts() -> None:
    frame = '{"jsonrpc":"1.0","method":1,"params":7,"id":true,"jsonrpc":"2.0","method":"echo","params":[],"id":1}'
    assert serve(Session(), frame, ECHO) == [b'{"jsonrpc":"2.0","result":"done","id":1}']


CALL = b'{"jsonrpc":"2.0","method":"echo","params":{"text":"%b"},"id":1}'


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b" ",
        b"{",
        b"[",
        b"nul",
        b"NaN",
        CALL % b"x" + b"x",
        CALL % b"x" + b"\x00",
        b"\xef\xbb\xbf" + CALL % b"x",
        CALL % b"\xff",
        CALL % b"\xc3",
        CALL % b"\xed\xa0\x80",
        CALL % b"\x01",
        CALL % b"\\q",
        CALL % b"\\ud800",
        CALL % b"\\udc00",
        CALL.replace(b"1", b"01") % b"x",
        "\ufeff" + (CALL % b"x").decode(),
        '"\ud800"',
        (CALL % b"x").decode().replace("x", "\udfff"),
    ],
    ids=ascii,
)
def test_what_is_not_json_is_a_parse_error(frame: str | bytes) -> None:
    assert only_error(serve(Session(), frame, ECHO)) == (-32700, None)


@pytest.mark.parametrize("depth", [1_100, 100_000])
@pytest.mark.parametrize(
    "shape", ["%s", '{"jsonrpc":"2.0","method":"echo","id":1,"params":%s}', '[{"x":%s}]', '{"id":%s}', '{"result":%s}']
)
def test_deep_nesting_is_an_error_and_nothing_worse(shape: str, depth: int) -> None:
    for nest in ("[" * depth, "[" * depth + "]" * depth, '{"a":' * depth + "1" + "}" * depth):
        assert only_error(serve(Session(), shape % nest, ECHO)) == (-32700, None)


DEEP = f'"params":{"[" * 1_100 + "]" * 1_100}'


@pytest.mark.parametrize("id", ["7", "0", "9007199254740991"])
def test_a_deep_call_as_our_own_end_writes_it_is_refused_under_its_id(id: str) -> None:
    assert only_error(serve(Session(), f'{{"jsonrpc":"2.0","method":"echo",{DEEP},"id":{id}}}', ECHO)) == (
        -32602,
        int(id),
    )


@pytest.mark.parametrize(
    "members",
    [
        '{"jsonrpc":"2.0","method":"echo","id":1},{"jsonrpc":"2.0","method":"echo",%s,"id":2}',
        '{"jsonrpc":"2.0","method":"echo",%s,"id":1},{"jsonrpc":"2.0","method":"echo","id":2}',
        '{"jsonrpc":"2.0","method":"echo",%s},{"jsonrpc":"2.0","method":"echo","id":2}',
    ],
)
def test_a_batch_with_a_deep_member_fails_as_a_whole(members: str) -> None:
    """None of its calls is carried out, and which one is too deep is not known."""
    assert only_error(serve(Session(), f"[{members % DEEP}]", ECHO)) == (-32700, None)


def test_what_is_no_id_is_not_sent_back() -> None:
    frame = f'{{"jsonrpc":"2.0","method":"echo",{DEEP},"id":007}}'
    assert only_error(serve(Session(), frame, ECHO)) == (-32700, None)


def test_an_error_says_where_why_and_what_next() -> None:
    [text] = serve(Session(), "[1]", ECHO)
    [response] = responses_in(text)
    assert response["error"]["data"].keys() == {"where", "why", "next"}


# --- limits ---------------------------------------------------------------------------------------------------------


def batch_of(count: int) -> bytes:
    return encoded([{"jsonrpc": "2.0", "method": "echo", "id": number} for number in range(count)])


def test_a_batch_up_to_the_limit_is_served_and_one_over_it_gets_a_single_error() -> None:
    [text] = serve(Session(), batch_of(BATCH_CALLS_MAX), ECHO)
    assert len(responses_in(text)) == BATCH_CALLS_MAX
    session = Session()
    assert session.receive_text(batch_of(BATCH_CALLS_MAX + 1)) == []
    assert only_error(session.texts_to_send()) == (-32600, None)


def test_the_limit_counts_what_is_invalid_too() -> None:
    assert only_error(serve(Session(batch_max=3), "[1,2,3,4]", ECHO)) == (-32600, None)
    [text] = serve(Session(batch_max=3), "[1,2,3]", ECHO)
    assert len(responses_in(text)) == 3


@pytest.mark.parametrize("limit", [FRAME_BYTES_MIN, FRAME_BYTES_MAX])
def test_a_frame_up_to_the_limit_is_served_and_a_longer_one_is_refused(limit: int) -> None:
    fits = CALL % (b"x" * (limit - len(CALL % b"")))
    assert len(fits) == limit
    assert exchange_of(Session(frame_bytes_max=limit), fits).open == 1
    assert only_error(serve(Session(frame_bytes_max=limit), fits + b" ", ECHO)) == (-32600, None)
    assert only_error(serve(Session(frame_bytes_max=limit), (fits + b" ").decode(), ECHO)) == (-32600, None)


def test_a_frame_is_measured_in_bytes_not_in_characters() -> None:
    text = (CALL % b"").decode().replace('""', '"%s"' % ("é" * (FRAME_BYTES_MIN // 2)))
    assert len(text) < FRAME_BYTES_MIN
    assert only_error(serve(Session(frame_bytes_max=FRAME_BYTES_MIN), text, ECHO)) == (-32600, None)


@pytest.mark.parametrize("options", [{"frame_bytes_max": FRAME_BYTES_MIN - 1}, {"batch_max": 0}])
def test_limits_under_which_nothing_could_be_sent_are_refused(options: dict[str, int]) -> None:
    with pytest.raises(InvalidOptionError):
        Session(**options)


def test_a_method_of_the_longest_name_is_served() -> None:
    name = "é" * METHOD_CHARS_MAX
    [text] = serve(Session(), encoded({"jsonrpc": "2.0", "method": name, "id": 1}), {name: lambda call: 1})
    assert without_details(text) == {"jsonrpc": "2.0", "result": 1, "id": 1}
