"""What was published, found and compared; a failed assertion shows the difference."""

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from unittest.mock import ANY

import pytest
from served import ServedFile

import headwater
from headwater import Log, testing
from headwater.errors import InvalidStateError, InvalidWhereError
from headwater.testing import DIFF_LINES_MAX, PUBLISHED_PAGE, assert_published, clock_of, published


@pytest.fixture
def log() -> Iterator[Log]:
    with testing.open_log() as log:
        yield log


def test_published_finds_all_that_match(log: Log) -> None:
    log.publish_many([("a.b" if number % 2 else "a.c", number) for number in range(2 * PUBLISHED_PAGE + 10)])
    assert [message.data for message in published(log, "a.b")] == list(range(1, 2 * PUBLISHED_PAGE + 10, 2))
    assert len(published(log)) == 2 * PUBLISHED_PAGE + 10
    assert [message.data for message in published(log, "a.*", where="data < 3")] == [0, 1, 2]
    assert published(log, "nothing.>") == []


def test_published_finds_delayed_and_expired_messages(log: Log) -> None:
    log.publish("a", "delayed", delay=3600)
    log.publish("a", "expired", ttl=1)
    clock_of(log).advance(2)
    assert [message.data for message in published(log, "a")] == ["delayed", "expired"]


def test_data_is_compared_as_the_json_it_becomes(log: Log) -> None:
    at = datetime(2030, 1, 1, tzinfo=UTC)
    log.publish("a", {"pair": (1, 2), "at": at, "name": "x"})
    assert_published(log, "a", data={"name": "x", "pair": (1, 2), "at": at})
    assert_published(log, "a", data={"name": "x", "pair": [1, 2], "at": "2030-01-01T00:00:00Z"})
    assert_published(log, "a", data={"name": ANY, "pair": ANY, "at": ANY})
    with pytest.raises(AssertionError):
        assert_published(log, "a", data={"name": "x"})


def test_none_is_data(log: Log) -> None:
    log.publish("a", 1)
    with pytest.raises(AssertionError, match="with the data None"):
        assert_published(log, "a", data=None)
    log.publish("a", None)
    assert len(assert_published(log, "a", data=None)) == 1


def test_counts(log: Log) -> None:
    log.publish_many([("a", 1), ("a", 1), ("a", 2)])
    assert len(assert_published(log, "a")) == 3
    assert len(assert_published(log, "a", data=1, count=2)) == 2
    assert assert_published(log, "b", count=0) == []
    for pattern, count in (("a", 2), ("a", 0), ("b", 1)):
        with pytest.raises(AssertionError, match=f"expected {count} messages on {pattern}"):
            assert_published(log, pattern, count=count)


def test_a_failure_shows_the_closest_message(log: Log) -> None:
    log.publish("orders.new", {"order": 17, "amount": 9, "to": "a"})
    log.publish("orders.new", {"order": 18, "amount": 1, "to": "b"})
    with pytest.raises(AssertionError) as caught:
        assert_published(log, "orders.new", data={"order": 17, "amount": 10, "to": "a"})
    lines = str(caught.value).splitlines()
    assert lines[0] == (
        "expected a message on orders.new with the data {'order': 17, 'amount': 10, 'to': 'a'}; "
        "none of 2 on the pattern match"
    )
    assert "- expected, + message 1 on orders.new:" in lines
    assert '-   "amount": 10,' in lines
    assert '+   "amount": 9,' in lines
    assert '    "order": 17,' in lines
    assert lines[-2:] == [
        '  1 orders.new {"order":17,"amount":9,"to":"a"}',
        '  2 orders.new {"order":18,"amount":1,"to":"b"}',
    ]


def test_a_failure_with_nothing_on_the_pattern_shows_what_there_is(log: Log) -> None:
    with pytest.raises(AssertionError, match="the log is empty"):
        assert_published(log, "order.new")
    log.publish_many([("orders.new", number) for number in range(25)])
    with pytest.raises(AssertionError) as caught:
        assert_published(log, "order.new", where="data > 3")
    lines = str(caught.value).splitlines()
    assert lines[0] == "expected a message on order.new where data > 3; none of 0 on the pattern match"
    assert lines[2] == "  … and 15 before these"
    assert lines[-1] == "  25 orders.new 24"


def test_a_failure_with_large_data_stays_readable(log: Log) -> None:
    log.publish("a", {"rows": ["x" * 50] * 10_000})
    log.publish("b", list(range(500)))
    for topic, data in (("a", {"rows": []}), ("b", list(range(1, 500)))):
        with pytest.raises(AssertionError) as caught:
            assert_published(log, topic, data=data)
        assert len(str(caught.value)) < 5_000
        assert len(str(caught.value).splitlines()) < DIFF_LINES_MAX + 20


def test_data_that_is_no_json_is_shown_too(log: Log) -> None:
    log.publish("a", {"n": 1})
    with pytest.raises(AssertionError, match="<object object"):
        assert_published(log, "a", data={"n": object()})
    with pytest.raises(AssertionError, match="message 1 on a"):
        assert_published(log, "a", data={(1, 2): 3})


def test_a_wrong_condition_is_an_error_of_its_own(log: Log) -> None:
    with pytest.raises(InvalidWhereError):
        assert_published(log, "a", where="data.n ===")


def test_a_log_behind_a_server_is_refused(tmp_path: Path) -> None:
    served = ServedFile(tmp_path / "log.db")
    try:
        with served.open() as log, pytest.raises(InvalidStateError, match="behind a server"):
            published(log)
    finally:
        served.stop()


def test_a_failure_shows_only_the_frames_of_the_test() -> None:
    with headwater.open("memory:") as log, pytest.raises(AssertionError) as failed:
        testing.assert_published(log, "a")
    shown = [str(entry.path) for entry in failed.traceback.filter(failed)]
    assert shown == [__file__]


async def test_a_failure_in_asyncio_shows_only_the_frames_of_the_test() -> None:
    async with headwater.open_async("memory:") as log:
        with pytest.raises(AssertionError) as failed:
            await testing.assert_published(log, "a")
    shown = [str(entry.path) for entry in failed.traceback.filter(failed)]
    assert shown == [__file__]
