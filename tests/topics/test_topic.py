"""What a topic may look like, and what it costs to ask."""

from __future__ import annotations

from enum import Enum

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.errors import InvalidTopicError
from headwater.topics import TOPIC_BYTES_MAX, TOPIC_TOKENS_MAX, check_topic
from headwater.topics.topic import QUOTED_CHARS_MAX


@pytest.mark.parametrize(
    "topic",
    [
        "orders",
        "orders.new",
        "a+b.c-d_e/f:g@h",
        "заказы.新しい.🎉",
        "x" * TOPIC_BYTES_MAX,
        ".".join(["t"] * TOPIC_TOKENS_MAX),
    ],
)
def test_usable_topics_come_back_as_they_are(topic: str) -> None:
    assert check_topic(topic) == topic


@pytest.mark.parametrize(
    ("topic", "why"),
    [
        ("", "empty"),
        (".", "token is empty"),
        ("a..b", "token is empty"),
        (".a", "token is empty"),
        ("a.", "token is empty"),
        ("*", "kept for patterns"),
        ("orders.>", "kept for patterns"),
        ("orders.#", "kept for patterns"),
        ("ord*rs", "kept for patterns"),
        ("c#.new", "kept for patterns"),
        ("a->b", "kept for patterns"),
        ("two words", "whitespace"),
        ("a\u00a0b", "whitespace"),
        ("a\u2028b", "whitespace"),
        ("a.\n", "control"),
        ("a\x00", "control"),
        ("a\x9fb", "control"),
        ("a\ud800", "not writable as UTF-8"),
        ("x" * (TOPIC_BYTES_MAX + 1), "bytes"),
        ("é" * (TOPIC_BYTES_MAX // 2 + 1), "bytes"),
        (".".join(["t"] * (TOPIC_TOKENS_MAX + 1)), "tokens"),
    ],
)
def test_unusable_topics_are_refused_with_a_reason_and_a_next_step(topic: str, why: str) -> None:
    with pytest.raises(InvalidTopicError) as caught:
        check_topic(topic)
    assert why in caught.value.why
    assert caught.value.next
    str(caught.value).encode()  # the message itself can be stored and sent, whatever was in the topic


@pytest.mark.parametrize("topic", [None, 7, b"orders", ["orders"], {"orders": 1}])
def test_what_is_not_text_is_refused_even_if_it_cannot_be_cached(topic: object) -> None:
    with pytest.raises(InvalidTopicError, match=type(topic).__name__):
        check_topic(topic)  # type: ignore[arg-type]


def test_a_refusal_does_not_repeat_a_huge_topic() -> None:
    with pytest.raises(InvalidTopicError) as caught:
        check_topic("\x00" * 10_000_000)
    assert len(caught.value.where) <= len("topic ") + QUOTED_CHARS_MAX


def test_a_member_of_an_enum_becomes_plain_text() -> None:
    class Topic(str, Enum):  # noqa: UP042 - the older spelling is the one that formats as its name
        NEW = "orders.new"

    checked = check_topic(Topic.NEW)
    assert type(checked) is str
    assert f"{checked}" == "orders.new"


@given(st.text(max_size=40))
def test_what_is_accepted_has_the_promised_form(text: str) -> None:
    try:
        topic = check_topic(text)
    except InvalidTopicError:
        return
    tokens = topic.split(".")
    assert all(tokens)
    assert len(tokens) <= TOPIC_TOKENS_MAX
    assert len(topic.encode()) <= TOPIC_BYTES_MAX
    assert not any(character in "*>#" or character.isspace() for character in topic)
    assert all(ord(character) >= 32 and not 127 <= ord(character) <= 159 for character in topic)


@given(st.lists(st.from_regex(r"[a-z0-9_+-]{1,6}", fullmatch=True), min_size=1, max_size=TOPIC_TOKENS_MAX))
def test_every_ordinary_topic_is_accepted(tokens: list[str]) -> None:
    topic = ".".join(tokens)
    assert check_topic(topic) == topic
