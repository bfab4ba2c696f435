"""Regexes from outside: RE2's dialect, in linear time, within bounds."""

from __future__ import annotations

import time

import pytest

from headwater.delivery.regex import REGEX_CHARS_MAX, SEARCHED_CHARS_MAX, is_in, parse_regex
from headwater.errors import InvalidFilter


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
    with pytest.raises(InvalidFilter) as refused:
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
    with pytest.raises(InvalidFilter):
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
