from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

import headwater
from headwater import Message
from headwater.errors import (
    InvalidOptionError,
    InvalidTopicError,
    TransportFailedError,
    UnauthorizedError,
    UnreachableError,
)
from headwater.message import HEADERS_BYTES_MAX
from headwater.protocol.jsonrpc import FRAME_BYTES_MAX
from headwater.transports import log as log_module
from headwater.transports.log import LogTransport

MAKE = Callable[..., Message]


@pytest.fixture
def origin(tmp_path: Path) -> Iterator[headwater.Log]:
    with headwater.open(tmp_path / "origin.db", maintenance_interval=None) as log:
        yield log


@pytest.fixture
def copy(tmp_path: Path) -> Iterator[headwater.Log]:
    with headwater.open(tmp_path / "copy.db", maintenance_interval=None) as log:
        yield log


def into(log: headwater.Log) -> LogTransport:
    return LogTransport("copy", lambda: log)


class Spy:
    """A log that does what the test says, and is opened as often as it is asked for."""

    def __init__(self, publish_many: Callable[[Any], object] = lambda messages: None) -> None:
        self.publish_many = publish_many
        self.opened = 0
        self.closed = 0
        self.away: Exception | None = None

    def open(self) -> "Spy":
        self.opened += 1
        if self.away is not None:
            raise self.away
        return self

    def close(self) -> None:
        self.closed += 1


def all_of(log: headwater.Log) -> list[Message]:
    with log.subscribe("reader", ">") as reading:
        found = [received.message for received in reading.messages()]
    log.delete_subscription("reader")
    return found


def test_a_copy_has_the_id_of_its_origin_and_says_where_it_came_from(
    origin: headwater.Log, copy: headwater.Log
) -> None:
    origin.publish("orders.new", 0)
    origin.publish("orders.new", {"a": 1}, headers={"tenant": "a"}, type="Order")
    copy.publish("something.else", 0)
    message = all_of(origin)[1]
    into(copy).publish(message)
    there = all_of(copy)[1]
    assert there.id == message.id
    assert (there.type, there.data_json) == ("Order", message.data_json)
    assert there.headers == {
        "tenant": "a",
        "origin-seq": message.seq,
        "origin-published-at": message.published_at.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
    }


def test_what_has_no_given_id_is_there_once_all_the_same(origin: headwater.Log, copy: headwater.Log) -> None:
    origin.publish_many([("a", number) for number in range(5)])
    messages = all_of(origin)
    into(copy).publish_many(messages[:3])
    into(copy).publish_many(messages)
    assert [message.data for message in all_of(copy)] == [0, 1, 2, 3, 4]


def test_a_copy_of_a_copy_names_the_first_origin(origin: headwater.Log, copy: headwater.Log, tmp_path: Path) -> None:
    origin.publish("a", 1)
    copy.publish("other", 0)
    into(copy).publish_many(all_of(origin))
    with headwater.open(tmp_path / "third.db", maintenance_interval=None) as third:
        into(third).publish_many(all_of(copy)[1:])
        assert all_of(third)[0].headers["origin-seq"] == 1


def test_numbers_keep_their_digits(make: MAKE, copy: headwater.Log) -> None:
    exact = b'{"price": 1.10, "big": 123456789012345678901234567890.5}'
    into(copy).publish(msgspec.structs.replace(make(0), raw=msgspec.Raw(exact), size=len(exact)))
    assert all_of(copy)[0].data_json.encode() == exact


def test_a_payload_that_no_parser_reads_goes_as_text_and_says_so(make: MAKE, copy: headwater.Log) -> None:
    into(copy).publish(msgspec.structs.replace(make(0), raw=msgspec.Raw(b"{not json null"), size=14))
    there = all_of(copy)[0]
    assert there.data == "{not json null"
    assert there.headers["origin-unreadable"] is True


def test_headers_at_their_limit_go_without_the_origin(make: MAKE, copy: headwater.Log) -> None:
    message = make(1, headers={"x": "y" * (HEADERS_BYTES_MAX - 8)})
    into(copy).publish(message)
    assert all_of(copy)[0].headers == message.headers


def test_a_message_that_no_log_takes_is_refused_as_such(make: MAKE, copy: headwater.Log) -> None:
    transport = into(copy)
    with pytest.raises(InvalidTopicError, match="message 1 of the batch"):
        transport.publish_many([make(1), msgspec.structs.replace(make(2), topic="no topic")])
    assert transport.connected
    assert all_of(copy) == []


def test_a_log_that_is_away_is_a_failed_transport(make: MAKE) -> None:
    failures: list[Exception] = [UnreachableError("no connection", next="Start it"), RuntimeError("odd")]

    def publish_many(messages: Any) -> list[int]:
        if failures:
            raise failures[0]
        return [1]

    transport = LogTransport("ws://host", Spy(publish_many).open)
    for text in ("ws://host: no connection. Start it", "ws://host: RuntimeError: odd"):
        with pytest.raises(TransportFailedError) as failed:
            transport.publish(make(1))
        assert str(failed.value) == text
        assert failed.value.__cause__ is failures.pop(0)
        assert not transport.connected
    transport.publish(make(1))
    assert transport.connected


def test_a_large_batch_goes_in_parts_in_order(make: MAKE, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_module, "BATCH_BYTES_MAX", 250)
    monkeypatch.setattr(log_module, "ENVELOPE_BYTES", 0)
    batches: list[list[Any]] = []
    spy = Spy(lambda messages: batches.append([len(bytes(data)) for _, data, _ in messages]))
    transport = LogTransport("log", spy.open)
    transport.publish_many([make("x" * size) for size in (98, 98, 998, 8, 8)])
    assert batches == [[100, 100], [1000], [10, 10]]


def test_what_a_server_takes_in_a_frame_goes_in_parts() -> None:
    assert log_module.BATCH_BYTES_MAX * 2 <= FRAME_BYTES_MAX, "with room for what is around each message"


def test_the_log_is_closed_once() -> None:
    spy = Spy()
    transport = LogTransport("log", spy.open)
    transport.close()
    transport.close()
    assert (spy.opened, spy.closed) == (1, 1)


def test_a_log_that_is_away_at_first_is_opened_when_it_is_there(make: MAKE, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(log_module.time, "monotonic", lambda: now)
    spy = Spy()
    spy.away = UnreachableError("not there")

    def open_slowly() -> Spy:
        nonlocal now
        now += 10
        return spy.open()

    transport = LogTransport("ws://host", open_slowly)
    assert not transport.connected
    with pytest.raises(TransportFailedError, match="not there"):
        transport.publish(make(1))
    assert spy.opened == 1, "a publish does not wait for each try"
    now += 10
    spy.away = None
    transport.publish(make(1))
    assert (spy.opened, transport.connected) == (2, True)
    transport.close()


def test_a_wrong_token_fails_at_once() -> None:
    spy = Spy()
    spy.away = UnauthorizedError("no")
    with pytest.raises(UnauthorizedError):
        LogTransport("ws://host", spy.open)


def test_an_option_that_the_log_refuses_later_is_no_fault_of_the_message(
    make: MAKE, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_module.time, "monotonic", lambda: 0.0)
    spy = Spy()
    spy.away = UnreachableError("not there")
    transport = LogTransport("ws://host", spy.open)
    spy.away = InvalidOptionError("its certificates are gone")
    with pytest.raises(TransportFailedError, match="certificates"):
        transport.publish(make(1))


@pytest.mark.parametrize("error", [UnreachableError("given up"), UnauthorizedError("another token")])
def test_a_client_that_has_given_up_is_replaced(make: MAKE, error: Exception) -> None:
    failures = [error]

    def publish_many(messages: Any) -> None:
        if failures:
            raise failures.pop()

    spy = Spy(publish_many)
    transport = LogTransport("ws://host", spy.open)
    with pytest.raises(TransportFailedError):
        transport.publish(make(1))
    assert (spy.opened, spy.closed) == (1, 1)
    transport.publish(make(1))
    assert (spy.opened, spy.closed, transport.connected) == (2, 1, True)
