import json
from typing import Any

import pytest

from headwater.delivery.where import Where, parse_where
from headwater.delivery.where_syntax import (
    ARRAY_INDEX_MAX,
    WHERE_CHARS_MAX,
    WHERE_DEPTH_MAX,
    WHERE_TERMS_MAX,
    OneOf,
    Or,
    Path,
)
from headwater.errors import InvalidWhere

MESSAGE: dict[str, Any] = {
    "topic": "orders.new",
    "type": "a",
    "version": None,
    "from": "shop",
    "priority": 7,
    "headers": {"tenant": "acme", "x-trace": "1"},
    "data": {
        "region": "us-west",
        "amount": 12.5,
        "count": 1,
        "digits": "1",
        "vip": True,
        "closed": False,
        "nothing": None,
        "tags": ["x", "y"],
        "user": {"name": "Ábel", "in": "list"},
        "odd key": 1,
        "": "empty",
        "0": "zero",
        "quote\"'\\": 1,
        "emoji": "😀",
        "private": "\ue000",
        "halves": "\ud800",
        "zero": "a\0b",
        "big": 2**63,
        "huge": 10**400,
        "least": -(2**63) - 1,
    },
}


def holds(text: str) -> bool:
    return parse_where(text).holds(MESSAGE.get)


@pytest.mark.parametrize(
    "text",
    [
        "priority >= 5 and data.region == 'us-west'",
        'not (data.amount < 10 or data.tags[0] == "z")',
        "type in ['a','b']",
        "data.user.name != null",
        "headers.tenant == 'acme'",
        "headers['x-trace'] == '1'",
        'data["odd key"] == 1',
        r'data["quote\"\'\\"] == 1',
        "data[''] == 'empty'",
        "data.vip",
        "data.vip == true",
        "not data.closed",
        "data.region starts with 'us'",
        "data.region starts with ''",
        "data.region contains 's-w'",
        "data.user.in == 'list'",
        "from == 'shop' and to == null and version == null",
        "data . tags [ 1 ]\n== 'y'",
        # a missing path is null
        "data.nothing == null and data.missing == null and data.missing.deeper[3] == null",
        "data.tags[2] == null and data.tags.x == null and data[0] == null and data.region[0] == null",
        "data.missing in [1, null]",
        # types stay apart
        "data.count == 1.0 and data.count != '1' and data.count != true",
        "data.digits == '1' and data.digits != 1",
        "data.vip != 1 and data.vip != 'true'",
        "data.tags != 'x' and data.user != null and data != 1",
        "data.count in ['1', 2, true, 1.0]",
        # order
        "data.amount > 12 and data.amount <= 12.5 and data.count > -1e2",
        "data.region >= 'us' and data.region < 'ut'",
        "not data.amount < '99' and not data.digits < 99 and not data.missing < 1 and not data.vip < 5",
        "data.emoji > '\ue000' and data.private < '😀' and data.halves < '\ue000'",
        # strings
        r"data.emoji == '\ud83d\ude00' and data.zero == 'a\u0000b'",
        "not data.tags contains 'x' and not data.count contains '1'",
        # integers beyond 64 bits are floats
        "data.big == 9223372036854775808.0 and data.big > 9223372036854775807",
        "data.huge > 1e308 and data.least == -9223372036854775808",
        # binding
        "data.vip or data.vip and data.closed",
        "not data.closed and data.vip",
        "(data.vip or data.vip) and not data.closed",
    ],
)
def test_holds(text: str) -> None:
    assert holds(text)
    assert not holds(f"not ({text})")


def test_data_is_decoded_once_and_only_if_the_condition_gets_there() -> None:
    asked: list[str] = []

    def lookup(field: str) -> object:
        asked.append(field)
        return MESSAGE[field]

    assert not parse_where("priority > 100 and data.vip").holds(lookup)
    assert asked == ["priority"]
    assert parse_where("data.vip and data.count == 1").holds(lookup)
    assert asked == ["priority", "data"]


def test_the_tree_holds_its_text_and_compares() -> None:
    text = "type == 'a' or data.tags[0]"
    tree = Or((OneOf(Path("type"), ("a",)), OneOf(Path("data", ("tags", 0)), (True,))))
    assert parse_where(text) == Where(text, tree)
    assert hash(parse_where(text)) == hash(parse_where(text))


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "at 1: expected a field, found the end"),
        ("priority >=", "at 12: expected a number or a string, found the end"),
        ("priority >= and", "at 13: expected a number or a string, found `and`"),
        ("priority = 5", "at 10: `=` has no meaning here. Perhaps you meant `==`"),
        ("data.a && data.b", "at 8: `&` has no meaning here. Perhaps you meant `and`"),
        ("data.a AND data.b", "at 8: expected `and`, `or` or the end, found `AND`. Keywords are lower case"),
        ("data.a == True", "at 11: expected a number, a string, true, false or null, found `True`. Keywords"),
        ("region == 'x'", "at 1: expected a field, found `region`. .* data.region"),
        ("and data.a", "at 1: expected a field, found `and`"),
        ("5 < priority", "at 1: a value cannot come first. Put the field on the left"),
        ("topic == type", "at 10: expected a number, .* found `type`. .* never with another field"),
        ("topic.x == 1", "at 6: `topic` has nothing inside it"),
        ("headers == null", "at 9: expected a header's name"),
        ("headers[0] == null", "at 12: expected a header's name"),
        ("data. == 1", "at 7: expected a name"),
        ("data.x-y == 1", "at 7: `-` has no meaning here"),
        ("data[-1] == 1", "at 6: expected an index or a quoted name, found `-1`"),
        ("data[1.0] == 1", "at 6: expected an index"),
        (f"data[{ARRAY_INDEX_MAX + 1}]", "at 6: an index beyond 999999"),
        ("data[0 == 1", "at 8: expected `]`, found `==`"),
        ("data.a < null", "at 10: expected a number or a string, found `null`"),
        ("data.a starts 'x'", "at 15: expected `with` after `starts`"),
        ("data.a contains 5", "at 17: expected a string, found `5`"),
        ("type in 'a'", r"at 9: expected a list, found `'a'`. Like: type in"),
        ("type in []", "at 10: expected a number, a string"),
        ("type in ['a' 'b']", "at 14: expected `,` or `]`, found `'b'`"),
        ("(data.a", "at 8: expected `and`, `or` or `\\)`, found the end"),
        ("data.a)", "at 7: expected `and`, `or` or the end, found `\\)`"),
        ("data.a == 007", "at 12: expected `and`, `or` or the end, found `0`"),
        ("data.a == 9223372036854775808", "at 11: this integer needs more than 64 bits. Write it as a float"),
        ("data.a == 1e999", "at 11: this number is too large"),
        ("data.a == 'x", "at 11: this string is never closed"),
        (r"data.a == 'x\y'", r"at 13: unknown escape `\\y`"),
        (r"data.a == '\u12'", r"at 12: unknown escape `\\u`"),
        (r"data.a == '\ud800'", "at 11: half a surrogate pair is not text"),
        ("data.a == '\ud800'", "at 12: half a surrogate pair is not text"),
        ("data.a == ; DROP", "at 11: `;` has no meaning here"),
    ],
)
def test_refuses_and_says_where_and_why(text: str, complaint: str) -> None:
    with pytest.raises(InvalidWhere, match=f"^where, {complaint}") as refused:
        parse_where(text)
    assert refused.value.next


def test_a_caret_stands_under_the_place() -> None:
    with pytest.raises(InvalidWhere) as refused:
        parse_where("data.a\t== 1 and\n priority >> 5 and data.some_rather_long_name == 1")
    _, text, caret = str(refused.value).split("\n")
    assert text[caret.index("^") :].startswith("> 5")


def test_refuses_what_is_no_text() -> None:
    with pytest.raises(InvalidWhere, match="a condition is text, not dict"):
        parse_where({"priority": 5})  # type: ignore[arg-type]


def test_limits_are_inclusive() -> None:
    longest = "data.vip" + " " * (WHERE_CHARS_MAX - len("data.vip"))
    deepest = "(" * WHERE_DEPTH_MAX + "data.vip" + ")" * WHERE_DEPTH_MAX
    widest = " and ".join(["data.vip"] * WHERE_TERMS_MAX)
    assert holds(longest)
    assert holds(deepest)
    assert holds("not " * WHERE_DEPTH_MAX + "data.vip")
    assert holds(widest)
    for too_much in (longest + " ", f"({deepest})", f"not {deepest}", f"{widest} or data.vip"):
        with pytest.raises(InvalidWhere):
            parse_where(too_much)


@pytest.mark.parametrize("number", [0, -1, 2**63 - 1, -(2**63), 0.1, -2.5e-7, 1.7976931348623157e308, 5e-324])
def test_numbers_are_read_as_json_reads_them(number: float) -> None:
    assert parse_where(f"data == {json.dumps(number)}").holds(lambda field: number)
