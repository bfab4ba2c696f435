import json
from pathlib import Path
from typing import Any

import pytest

from headwater.delivery.entity_filter import ENTITIES_MAX, REGEXES_MAX, EntityFilter, parse_entity_filter
from headwater.delivery.regex import REGEX_CHARS_MAX
from headwater.errors import InvalidFilter

VECTORS = json.loads((Path(__file__).parents[1] / "vectors" / "filters.json").read_text())


@pytest.mark.parametrize("case", VECTORS["cases"], ids=lambda case: json.dumps(case["filter"]))
def test_keeps_what_the_vectors_say(case: dict[str, Any]) -> None:
    entities = EntityFilter.from_json(case["filter"])
    kept = [index for index, (from_, to) in enumerate(case["messages"]) if entities.keeps(from_, to)]
    assert kept == case["keeps"]


@pytest.mark.parametrize("document", VECTORS["refused"], ids=json.dumps)
def test_refuses_what_the_vectors_say(document: dict[str, Any]) -> None:
    with pytest.raises(InvalidFilter) as refused:
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
    with pytest.raises(InvalidFilter):
        EntityFilter.from_json(document)


def test_limits_are_inclusive() -> None:
    longest = "/" + "a" * REGEX_CHARS_MAX + "/"
    most = [longest] * REGEXES_MAX + ["a"] * (ENTITIES_MAX - REGEXES_MAX)
    assert parse_entity_filter(from_=most).keeps("a" * REGEX_CHARS_MAX, None)


def test_an_error_names_the_part_of_a_list() -> None:
    with pytest.raises(InvalidFilter, match=r"^filter\.to\[1\]: not a regular expression"):
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
