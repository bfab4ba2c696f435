"""Drafting, limits and derived ids of messages."""

import json
import math
import uuid
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.errors import InvalidDataError, InvalidInputError, InvalidOptionError, TooLargeError
from headwater.formats import TIME_MS_MAX, time_ms
from headwater.message import (
    DATA_BYTES_MAX,
    HEADERS_BYTES_MAX,
    ID_CHARS_MAX,
    NAME_CHARS_MAX,
    NAMED_HEADERS,
    PRIORITY_MAX,
    SALT_BITS,
    Draft,
    Message,
    MessageDocument,
    derived_id,
    from_document,
    make_draft,
    to_document,
)

NOW_MS = 1_700_000_000_000
LONGEST_SPAN_S = 100 * 365.25 * 24 * 3600

json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: (
        st.lists(inner, max_size=5)
        | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), inner, max_size=5)
    ),
    max_leaves=20,
)
names = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=NAME_CHARS_MAX)


def draft(data: Any = None, **options: Any) -> Draft:
    return make_draft("orders.new", data, options, NOW_MS)  # type: ignore[arg-type]


def stored(made: Draft, seq: int = 7, salt: int = 5) -> Message:
    """The message a store would give back for a draft."""
    extras = {} if made.extras is None else msgspec.structs.asdict(made.extras)
    headers_json = extras.pop("headers_json", None)
    return Message(
        seq=seq,
        topic=made.topic,
        raw=msgspec.Raw(made.data_json.encode()),
        published_ms=NOW_MS,
        size=made.size,
        identity=salt if made.id is None else made.id,
        raw_headers=msgspec.Raw(b"null" if headers_json is None else headers_json.encode()),
        **extras,
    )


# --- data -----------------------------------------------------------------------------------------------------------


@given(json_values)
def test_what_goes_in_comes_out(value: Any) -> None:
    made = draft(value)
    assert json.loads(made.data_json) == value
    assert stored(made).data == value
    assert made.size == len(made.data_json.encode())


def test_a_plain_draft_carries_nothing_else() -> None:
    assert draft({"order": 17}) == Draft("orders.new", '{"order":17}', 12)
    assert draft({"order": 17}, priority=0, headers={}, to=None).extras is None


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("wrap", [lambda it: it, lambda it: [1, it], lambda it: {"a": {"b": (it,)}}])
def test_numbers_that_json_has_not_are_refused(value: float, wrap: Any) -> None:
    with pytest.raises(InvalidDataError, match="is not JSON"):
        draft(wrap(value))


def test_null_beside_other_floats_is_fine() -> None:
    assert draft({"a": None, "b": 1.5, "c": "null"}).data_json == '{"a":null,"b":1.5,"c":"null"}'


@pytest.mark.parametrize("value", [b"raw", bytearray(b"raw"), memoryview(b"raw")])
def test_bytes_are_refused(value: object) -> None:
    with pytest.raises(InvalidDataError, match="bytes"):
        draft(value)


@pytest.mark.parametrize(
    "value", [object(), {1, object()}, "\ud800", {"\ud800": 1}, {(1, 2): 3}, msgspec.Raw(b'"\xff"')]
)
def test_what_json_cannot_say_is_refused_with_the_topic(value: object) -> None:
    with pytest.raises(InvalidDataError) as caught:
        draft(value)
    assert caught.value.where == "orders.new"
    assert caught.value.next


def test_a_value_that_holds_itself_is_refused() -> None:
    circle: list[Any] = []
    circle.append(circle)
    with pytest.raises(InvalidDataError):
        draft(circle)


def test_typed_values_are_written_as_their_fields() -> None:
    @dataclass
    class Order:
        id: int
        at: datetime

    class Model:  # what a pydantic model offers
        def model_dump(self, *, mode: str) -> dict[str, str]:
            return {"mode": mode}

    assert stored(draft(Order(1, datetime(2024, 1, 1, tzinfo=UTC)))).data == {"id": 1, "at": "2024-01-01T00:00:00Z"}
    assert stored(draft(Model())).data == {"mode": "json"}


def test_numbers_may_be_larger_than_any_column() -> None:
    assert stored(draft({"n": 2**70})).data == {"n": 2**70}


def test_data_may_be_as_large_as_its_limit_and_no_larger() -> None:
    quotes = 2
    assert draft("x" * (DATA_BYTES_MAX - quotes)).size == DATA_BYTES_MAX
    with pytest.raises(TooLargeError, match=str(DATA_BYTES_MAX)):
        draft("x" * (DATA_BYTES_MAX - quotes + 1))
    with pytest.raises(TooLargeError):  # bytes are counted, not characters
        draft("ü" * (DATA_BYTES_MAX // 2))


def test_a_stored_payload_that_is_no_json_is_reported_when_read() -> None:
    broken = stored(Draft("orders.new", "{oops", 5))
    with pytest.raises(InvalidDataError, match=r"message 7 on orders\.new"):
        _ = broken.data


# --- options --------------------------------------------------------------------------------------------------------


@given(names, st.integers(0, PRIORITY_MAX), st.dictionaries(names, json_values, max_size=3))
def test_headers_come_back_as_they_were_given(name: str, number: int, headers: dict[str, Any]) -> None:
    free = {key: value for key, value in headers.items() if key not in NAMED_HEADERS}
    message = stored(draft(1, from_=name, to=name, type=name, version=number, priority=number, headers=free))
    assert (message.from_, message.to, message.type, message.version, message.priority) == (
        name, name, name, number, number,
    )  # fmt: skip
    assert message.headers == free
    assert message.field("from") == name


def test_an_unknown_option_is_named_with_the_known_ones() -> None:
    with pytest.raises(InvalidOptionError, match=r"'prioritty'.*priority"):
        draft(1, prioritty=3)


@pytest.mark.parametrize("name", NAMED_HEADERS)
def test_a_named_header_among_the_free_ones_is_refused(name: str) -> None:
    with pytest.raises(InvalidOptionError, match="option of its own"):
        draft(1, headers={name: "x"})


@pytest.mark.parametrize("headers", [{1: "x"}, ["a"], "text"])
def test_headers_that_are_no_mapping_of_text_are_refused(headers: object) -> None:
    with pytest.raises(InvalidDataError):
        draft(1, headers=headers)


def test_headers_have_a_limit() -> None:
    overhead = len('{"k":""}')
    assert draft(1, headers={"k": "x" * (HEADERS_BYTES_MAX - overhead)}).extras is not None
    with pytest.raises(TooLargeError, match=str(HEADERS_BYTES_MAX)):
        draft(1, headers={"k": "x" * (HEADERS_BYTES_MAX - overhead + 1)})


@pytest.mark.parametrize(("option", "most"), [("id", ID_CHARS_MAX), ("from_", NAME_CHARS_MAX), ("to", NAME_CHARS_MAX)])
def test_names_have_a_limit_and_are_not_empty(option: str, most: int) -> None:
    draft(1, **{option: "x" * most})
    with pytest.raises(TooLargeError):
        draft(1, **{option: "x" * (most + 1)})
    for wrong in ("", 5, ["x"]):
        with pytest.raises(InvalidOptionError):
            draft(1, **{option: wrong})


@pytest.mark.parametrize("option", ["priority", "version"])
@pytest.mark.parametrize("wrong", [True, 1.5, "1", PRIORITY_MAX + 1, -PRIORITY_MAX - 1])
def test_whole_numbers_only(option: str, wrong: object) -> None:
    with pytest.raises(InvalidOptionError, match=option):
        draft(1, **{option: wrong})


def test_moments_and_spans() -> None:
    extras = draft(1, delay=2.5, ttl=timedelta(minutes=1)).extras
    assert extras is not None
    assert (extras.deliver_ms, extras.expires_ms) == (NOW_MS + 2_500, NOW_MS + 60_000)
    at = datetime(2030, 1, 1, tzinfo=UTC)
    extras = draft(1, deliver_at=at, expires_at=at.timestamp() + 1).extras
    assert extras is not None
    assert (extras.deliver_ms, extras.expires_ms) == (time_ms(at), time_ms(at) + 1_000)


@pytest.mark.parametrize("both", [{"delay": 1, "deliver_at": 1}, {"ttl": 1, "expires_at": 1}])
def test_a_moment_and_a_span_exclude_each_other(both: dict[str, int]) -> None:
    with pytest.raises(InvalidOptionError, match="exclude"):
        draft(1, **both)


# --- ids ------------------------------------------------------------------------------------------------------------


@given(
    published_ms=st.integers(0, TIME_MS_MAX),
    salt=st.integers(0, 2**SALT_BITS - 1),
    seq=st.integers(1, 2**48 - 1),
)
def test_a_derived_id_is_a_uuid7_that_says_where_it_comes_from(published_ms: int, salt: int, seq: int) -> None:
    text = derived_id(published_ms, salt, seq)
    parsed = uuid.UUID(text)
    assert str(parsed) == text
    assert parsed.version == 7
    assert parsed.variant == uuid.RFC_4122
    assert parsed.int >> 80 == published_ms
    assert parsed.int & (2**48 - 1) == seq


triples = st.tuples(st.integers(0, TIME_MS_MAX), st.integers(0, 2**SALT_BITS - 1), st.integers(1, 2**48 - 1))


@given(triples, triples)
def test_derived_ids_differ_unless_everything_is_the_same(
    one: tuple[int, int, int], other: tuple[int, int, int]
) -> None:
    assert (derived_id(*one) == derived_id(*other)) is (one == other)


@given(st.lists(st.tuples(st.integers(0, TIME_MS_MAX), st.integers(1, 2**48 - 1)), min_size=2))
def test_derived_ids_of_a_log_sort_by_time_then_seq(places: list[tuple[int, int]]) -> None:
    ids = [derived_id(published_ms, 77, seq) for published_ms, seq in places]
    assert sorted(ids) == [derived_id(published_ms, 77, seq) for published_ms, seq in sorted(places)]


def test_a_given_id_is_kept() -> None:
    assert stored(draft(1, id="payment-1")).id == "payment-1"
    assert stored(draft(1)).id == derived_id(NOW_MS, 5, 7)


# --- as plain JSON --------------------------------------------------------------------------------------------------


@given(
    data=json_values,
    headers=st.dictionaries(names, json_values, max_size=3),
    given_id=st.none() | st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=ID_CHARS_MAX),
    delay=st.none() | st.integers(0, 10**6),
    name=st.none() | names,
)
def test_a_message_survives_the_way_to_json_and_back(
    data: Any, headers: dict[str, Any], given_id: str | None, delay: int | None, name: str | None
) -> None:
    free = {key: value for key, value in headers.items() if key not in NAMED_HEADERS}
    before = stored(
        draft(data, id=given_id, headers=free, delay=delay, ttl=delay, from_=name, reply_to=name, traceparent=name)
    )
    document = msgspec.json.encode(to_document(before))
    after = from_document(msgspec.json.decode(document, type=MessageDocument))
    assert after.to_json() == before.to_json()
    assert (after.id, after.data, after.headers) == (before.id, before.data, before.headers)


def test_the_plain_form_leaves_out_named_headers_that_are_not_set() -> None:
    assert stored(draft({"a": 1}, type="order")).to_json() == {
        "seq": 7,
        "id": derived_id(NOW_MS, 5, 7),
        "topic": "orders.new",
        "data": {"a": 1},
        "headers": {},
        "type": "order",
        "priority": 0,
        "published_at": "2023-11-14T22:13:20.000Z",
        "deliver_at": None,
        "expires_at": None,
        "size": 7,
    }


def test_every_refusal_changes_nothing_and_is_one_family() -> None:
    for wrong in ({"id": ""}, {"priority": "high"}, {"headers": {"from": "x"}}, {"delay": -1}):
        with pytest.raises(InvalidInputError):
            draft(1, **wrong)
