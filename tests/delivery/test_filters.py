"""Regexes, entity filters and `where` conditions."""

from __future__ import annotations

import json
import pathlib
import time
from typing import Any

import pytest

from headwater.delivery.filters import (
    ARRAY_INDEX_MAX,
    ENTITIES_MAX,
    REGEX_CHARS_MAX,
    REGEXES_MAX,
    SEARCHED_CHARS_MAX,
    WHERE_CHARS_MAX,
    WHERE_DEPTH_MAX,
    WHERE_TERMS_MAX,
    EntityFilter,
    OneOf,
    Or,
    Path,
    Where,
    is_in,
    parse_entity_filter,
    parse_regex,
    parse_where,
)
from headwater.errors import InvalidFilterError, InvalidWhereError

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
    ("text", "problem"),
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
def test_refuses_and_says_where_and_why(text: str, problem: str) -> None:
    with pytest.raises(InvalidWhereError, match=f"^where, {problem}") as refused:
        parse_where(text)
    assert refused.value.next


def test_a_caret_stands_under_the_place() -> None:
    with pytest.raises(InvalidWhereError) as refused:
        parse_where("data.a\t== 1 and\n priority >> 5 and data.some_rather_long_name == 1")
    _, text, caret = str(refused.value).split("\n")
    assert text[caret.index("^") :].startswith("> 5")


def test_refuses_what_is_no_text() -> None:
    with pytest.raises(InvalidWhereError, match="a condition is text, not dict"):
        parse_where({"priority": 5})  # type: ignore[arg-type]


def test_limits_of_a_condition_are_inclusive() -> None:
    longest = "data.vip" + " " * (WHERE_CHARS_MAX - len("data.vip"))
    deepest = "(" * WHERE_DEPTH_MAX + "data.vip" + ")" * WHERE_DEPTH_MAX
    widest = " and ".join(["data.vip"] * WHERE_TERMS_MAX)
    assert holds(longest)
    assert holds(deepest)
    assert holds("not " * WHERE_DEPTH_MAX + "data.vip")
    assert holds(widest)
    for too_much in (longest + " ", f"({deepest})", f"not {deepest}", f"{widest} or data.vip"):
        with pytest.raises(InvalidWhereError):
            parse_where(too_much)


@pytest.mark.parametrize("number", [0, -1, 2**63 - 1, -(2**63), 0.1, -2.5e-7, 1.7976931348623157e308, 5e-324])
def test_numbers_are_read_as_json_reads_them(number: float) -> None:
    assert parse_where(f"data == {json.dumps(number)}").holds(lambda field: number)


VECTORS = json.loads((pathlib.Path(__file__).parents[1] / "vectors" / "filters.json").read_text())


@pytest.mark.parametrize("case", VECTORS["cases"], ids=lambda case: json.dumps(case["filter"]))
def test_keeps_what_the_vectors_say(case: dict[str, Any]) -> None:
    entities = EntityFilter.from_json(case["filter"])
    kept = [index for index, (from_, to) in enumerate(case["messages"]) if entities.keeps(from_, to)]
    assert kept == case["keeps"]


@pytest.mark.parametrize("document", VECTORS["refused"], ids=json.dumps)
def test_refuses_what_the_vectors_say(document: dict[str, Any]) -> None:
    with pytest.raises(InvalidFilterError) as refused:
        EntityFilter.from_json(document)
    assert refused.value.where == f"filter.{next(iter(document))}"
    assert refused.value.next


@pytest.mark.parametrize(
    "document",
    [
        {"from": ""},
        {"from": "//"},
        {"to": ["a", 1]},
        {"to": ["a", ["b"]]},
        {"to": "\ud800"},
        {"from": "/a{9999}/"},
        {"from": "/" + "a" * (REGEX_CHARS_MAX + 1) + "/"},
        {"from": ["a"] * (ENTITIES_MAX + 1)},
        {"from": ["/a/"] * (REGEXES_MAX + 1)},
        {"from": "a" * 300},
        {"broadcast": 1},
        {"broadcast": None},
        {"form": "admin"},
        ["admin"],
    ],
    ids=lambda document: ascii(document)[:40],
)
def test_refuses(document: object) -> None:
    with pytest.raises(InvalidFilterError):
        EntityFilter.from_json(document)


def test_limits_of_an_entity_filter_are_inclusive() -> None:
    longest = "/" + "a" * REGEX_CHARS_MAX + "/"
    most = [longest] * REGEXES_MAX + ["a"] * (ENTITIES_MAX - REGEXES_MAX)
    assert parse_entity_filter(from_=most).keeps("a" * REGEX_CHARS_MAX, None)


def test_an_error_names_the_part_of_a_list() -> None:
    with pytest.raises(InvalidFilterError, match=r"^filter\.to\[1\]: not a regular expression"):
        parse_entity_filter(to=["a", "/(/"])


def test_a_message_without_sender_is_kept_only_if_senders_do_not_matter() -> None:
    assert not parse_entity_filter(from_="/.*/").keeps(None, "x")
    assert parse_entity_filter(to="x").keeps(None, "x")


def test_a_regex_searches_and_a_name_does_not() -> None:
    assert parse_entity_filter(from_="/ay/").keeps("payment", None)
    assert not parse_entity_filter(from_="ay").keeps("payment", None)
    assert parse_entity_filter(from_="/").keeps("/", None)


@pytest.mark.parametrize(
    ("filter_", "everything"),
    [
        (parse_entity_filter(), True),
        (parse_entity_filter(from_="a"), False),
        (parse_entity_filter(to="a"), False),
        (parse_entity_filter(broadcast=True), False),
    ],
)
def test_is_everything(filter_: EntityFilter, everything: bool) -> None:
    assert filter_.is_everything is everything


@pytest.mark.parametrize("case", VECTORS["cases"], ids=lambda case: json.dumps(case["filter"]))
def test_json_keeps_the_spelling(case: dict[str, Any]) -> None:
    entities = EntityFilter.from_json(case["filter"])
    assert entities.to_json() == case["filter"]
    assert EntityFilter.from_json(entities.to_json()) == entities


def test_a_list_of_one_is_the_same_filter_as_its_part() -> None:
    assert parse_entity_filter(to=["a"]) == parse_entity_filter(to="a")
    assert parse_entity_filter(to=["a"]).to_json() == {"to": "a"}


@pytest.mark.parametrize(
    ("source", "named", "instead"),
    [
        (r"(?=a)b", "(?=", "look-ahead"),
        (r"(?!a)b", "(?!", "negative look-ahead"),
        (r"(?<=a)b", "(?<=", "look-behind"),
        (r"(?<!a)b", "(?<!", "negative look-behind"),
        (r"(a)\1", r"\1", "backreference"),
        (r"(?P<x>a)(?P=x)", "(?P", "backreference"),
        (r"(?>a)b", "(?>", "atomic"),
        (r"a\Z", r"\Z", r"\z"),
        (r"\u00e9", r"\u", r"\x{"),
        ("(", "missing )", "RE2"),
    ],
)
def test_what_re2_lacks_is_refused_by_name(source: str, named: str, instead: str) -> None:
    with pytest.raises(InvalidFilterError) as refused:
        parse_regex(source, "filter.from")
    assert named in refused.value.why
    assert instead.lower() in refused.value.next.lower()
    assert refused.value.where == "filter.from"


@pytest.mark.parametrize(
    "bomb",
    ["((a{100}){100}){100}", "(((a{30}){30}){30}){30}", r"\pL{1000}", "(x.{99}){10}", "a" * (REGEX_CHARS_MAX + 1)],
    ids=lambda bomb: bomb[:20],
)
def test_a_regex_that_would_be_large_is_refused(bomb: str) -> None:
    began = time.monotonic()
    with pytest.raises(InvalidFilterError):
        parse_regex(bomb, "error")
    assert time.monotonic() - began < 1


@pytest.mark.parametrize("slow", ["(a+)+$", "(a|aa)+$", "(a*)*b", "((a?){20}){20}d", ".*.*.*.*.*x"])
def test_a_search_takes_time_in_proportion_to_the_text(slow: str) -> None:
    regex = parse_regex(slow, "filter.from")
    began = time.monotonic()
    assert not regex.finds("a" * (SEARCHED_CHARS_MAX - 1) + "c")
    assert time.monotonic() - began < 1


def test_the_dialect() -> None:
    def finds(source: str, text: str) -> bool:
        return parse_regex(source, "filter.from").finds(text)

    assert finds("(?i)ORDER", "my-order")
    assert finds("^é.$", "éa")
    assert finds(r"\x{e9}", "é")
    assert not finds(r"^\w$", "é"), "classes are ASCII"
    assert finds(r"^\pL$", "é")
    assert not finds("a$", "a\n"), "the end of the text, not of its last line"
    assert finds("b", "a" * (SEARCHED_CHARS_MAX - 1) + "b")
    assert not finds("b", "a" * SEARCHED_CHARS_MAX + "b"), "beyond what is searched"


def test_a_text_in_a_large_text() -> None:
    whole = "aé" * 20_000 + ".*\0z"
    for text in ("éaé", ".*", "\0", "z", "\0z", ""):
        assert is_in(text, whole), text
    for text in ("éé", ".+", "x", "zz"):
        assert not is_in(text, whole), text
