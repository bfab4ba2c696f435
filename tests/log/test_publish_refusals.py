"""What cannot be published is refused by name, and nothing of it is stored."""

import dataclasses
import re
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import msgspec
import pytest

from headwater import Log
from headwater.errors import InvalidDataError, InvalidInputError, InvalidOptionError, InvalidTopicError, TooLargeError
from headwater.message import DATA_BYTES_MAX, HEADERS_BYTES_MAX, ID_CHARS_MAX, PRIORITY_MAX

NAN = float("nan")
PLACES = ("sqlite", "served")  # the refusal comes before the store is asked, so PostgreSQL would repeat it


@dataclasses.dataclass
class Measured:
    value: float


def assert_nothing_stored(log: Log) -> None:
    assert log.last_seq() == 0
    assert log.publish("after", 1) == 1, "the log goes on"


@pytest.mark.parametrize(
    "topic",
    ["", ".", "orders.", ".orders", "a..b", "a b", "a.*", "a.>", "a.#", "a\n", "\ud800", "x" * 10_000, None, 5, b"a"],
    ids=lambda topic: repr(topic)[:20],
)
def test_a_bad_topic(log: Log, topic: Any) -> None:
    with pytest.raises(InvalidTopicError):
        log.publish(topic, 1)
    with pytest.raises(InvalidTopicError):
        log.publish_many([("fine", 1), (topic, 1)])
    assert_nothing_stored(log)


@pytest.mark.parametrize(
    "data",
    [
        NAN,
        float("inf"),
        [1, -float("inf")],
        {"deep": [{"er": NAN}]},
        b"bytes",
        bytearray(b"bytes"),
        object(),
        {"a": object()},
        "\ud800",
        1j,
        msgspec.Raw(b'"\xff"'),
    ],
    ids=lambda data: re.sub(" at 0x[0-9a-f]+", "", repr(data)),
)
def test_data_that_is_not_json(log: Log, data: Any) -> None:
    with pytest.raises(InvalidDataError):
        log.publish("a", data)
    with pytest.raises(InvalidDataError):
        log.publish_many([("fine", 1), ("a", data)])
    assert_nothing_stored(log)


@pytest.mark.parametrize(
    "data",
    [
        {NAN},
        Measured(NAN),
        {"a": (Measured(NAN),)},
    ],
    ids=repr,
)
def test_data_that_would_be_changed_silently(log: Log, data: Any) -> None:
    with pytest.raises(InvalidDataError):
        log.publish("a", data)


def test_what_json_lacks_is_written_as_text(log: Log) -> None:
    """Inside data, as the README says; at the top, bytes are refused, because there a message of bytes is meant."""
    log.publish("a", {"bytes": b"x", "time": datetime(2024, 1, 2, tzinfo=UTC), "amount": Decimal("1.50")})
    (message,) = log.subscribe("s", "a").fetch()
    assert message.data == {"bytes": "eA==", "time": "2024-01-02T00:00:00Z", "amount": "1.50"}


def test_data_that_contains_itself(log: Log) -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(InvalidDataError):
        log.publish("a", loop)
    assert_nothing_stored(log)


def test_data_at_and_over_the_limit(log: Log) -> None:
    with pytest.raises(TooLargeError):
        log.publish("a", "x" * (DATA_BYTES_MAX - 1))
    assert log.last_seq() == 0
    assert log.publish("a", "x" * (DATA_BYTES_MAX - 2)) == 1  # and two quotes


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"id": ""}, InvalidOptionError),
        ({"id": 5}, InvalidOptionError),
        ({"id": "x" * (ID_CHARS_MAX + 1)}, TooLargeError),
        ({"from_": ""}, InvalidOptionError),
        ({"to": 5}, InvalidOptionError),
        ({"type": "x" * 1_000}, TooLargeError),
        ({"version": "1"}, InvalidOptionError),
        ({"version": True}, InvalidOptionError),
        ({"priority": 1.5}, InvalidOptionError),
        ({"priority": False}, InvalidOptionError),
        ({"priority": "high"}, InvalidOptionError),
        ({"priority": PRIORITY_MAX + 1}, InvalidOptionError),
        ({"delay": -1}, InvalidOptionError),
        ({"delay": "5 seconds"}, InvalidOptionError),
        ({"delay": NAN}, InvalidOptionError),
        ({"delay": 1e20}, InvalidOptionError),
        ({"ttl": -0.001}, InvalidOptionError),
        ({"deliver_at": datetime(2030, 1, 1)}, InvalidOptionError),
        ({"deliver_at": "tomorrow"}, InvalidOptionError),
        ({"deliver_at": -1}, InvalidOptionError),
        ({"delay": 1, "deliver_at": 2_000_000_000}, InvalidOptionError),
        ({"ttl": 1, "expires_at": 2_000_000_000}, InvalidOptionError),
        ({"headers": "text"}, InvalidDataError),
        ({"headers": {1: "x"}}, InvalidDataError),
        ({"headers": {"x": NAN}}, InvalidDataError),
        ({"headers": {"from": "x"}}, InvalidOptionError),
        ({"headers": {"traceparent": "x"}}, InvalidOptionError),
        ({"headers": {"x": "y" * HEADERS_BYTES_MAX}}, TooLargeError),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_bad_option(log: Log, options: dict[str, Any], error: type[InvalidInputError]) -> None:
    with pytest.raises(error) as refused:
        log.publish("a", 1, **options)
    assert isinstance(refused.value, ValueError)
    with pytest.raises(error):
        log.publish_many([("fine", 1), ("a", 1, options)])
    assert_nothing_stored(log)


@pytest.mark.parametrize("name", ["id", "from_", "to", "type", "correlation_id"])
def test_a_name_that_no_database_can_hold(log: Log, name: str) -> None:
    with pytest.raises(InvalidInputError):
        log.publish("a", 1, **{name: "\ud800"})


@pytest.mark.parametrize("wrong", [("a",), ("a", 1, {}, 2), "a", None, {"topic": "a"}, {"data": 1}, ["a", 1]], ids=repr)
def test_what_is_no_message_at_all(log: Log, wrong: Any) -> None:
    with pytest.raises(InvalidOptionError):
        log.publish_many([("fine", 1), wrong])
    assert_nothing_stored(log)


def test_the_error_of_a_batch_says_which_message(log: Log) -> None:
    with pytest.raises(InvalidDataError) as refused:
        log.publish_many([("a", 1), ("a", 2), ("b", NAN)])
    assert "message 2 of the batch" in str(refused.value)
    assert_nothing_stored(log)


def test_an_error_tells_where_why_and_what_next(log: Log) -> None:
    with pytest.raises(TooLargeError) as refused:
        log.publish("big.one", "x" * DATA_BYTES_MAX)
    assert refused.value.where == "big.one"
    assert str(DATA_BYTES_MAX) in refused.value.why
    assert refused.value.next
    assert all(part in str(refused.value) for part in (refused.value.where, refused.value.why, refused.value.next))
