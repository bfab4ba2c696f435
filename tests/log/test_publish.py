"""Publishing: every message gets the next seq, once, with all its fields."""

import dataclasses
import uuid
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from fetched import everything
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headwater import Log, ManualClock


def test_seqs_count_up_across_topics(log: Log) -> None:
    assert [log.publish(topic, None) for topic in ("a", "b", "a.b", "a", "c")] == [1, 2, 3, 4, 5]
    assert log.last_seq() == 5


def test_an_empty_log_has_no_last_seq(log: Log) -> None:
    assert log.last_seq() == 0
    assert log.topics() == []


@pytest.mark.parametrize(
    "data",
    [None, True, 0, -1.5, "", "text", "é\u0000\U0001f600", [], {}, {"a": [1, {"b": None}]}, 2**63, -(2**63)],
    ids=repr,
)
def test_data_comes_back_as_it_went_in(log: Log, data: Any) -> None:
    log.publish("a", data)
    [message] = everything(log)
    assert message.data == data
    assert type(message.data) is type(data)


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(codec="utf-8")),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(st.characters(codec="utf-8")), inner, max_size=4)
    ),
    max_leaves=12,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=50, deadline=None)
@given(data=json_values)
def test_any_json_comes_back_as_it_went_in(log: Log, data: Any) -> None:
    seq = log.publish("a", data)
    [message] = log.subscribe("look", ">", mode="ephemeral", start=seq).fetch()
    assert message.data == data


def test_a_dataclass_is_published_as_its_fields(log: Log) -> None:
    @dataclasses.dataclass
    class Order:
        number: int
        lines: list[str]

    log.publish("a", Order(7, ["x"]))
    assert everything(log)[0].data == {"number": 7, "lines": ["x"]}


def test_a_message_without_an_id_gets_a_uuid_of_version_7(log: Log, clock: ManualClock) -> None:
    log.publish_many([("a", 1), ("a", 2)])
    ids = [uuid.UUID(message.id) for message in everything(log)]
    assert len(set(ids)) == 2
    assert [found.version for found in ids] == [7, 7]
    assert [found.int >> 80 for found in ids] == [clock.now_ms()] * 2


def test_all_that_was_reported_about_a_message_is_kept(log: Log, clock: ManualClock) -> None:
    named = {
        "from_": "shop",
        "to": "billing",
        "reply_to": "shop.replies",
        "correlation_id": "c-1",
        "type": "OrderPlaced",
        "version": 3,
        "content_type": "application/json",
        "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
        "priority": 7,
    }
    log.publish("orders.new", {"n": 1}, id="order-1", headers={"tenant": "acme", "retry": {"n": [1]}}, ttl=60, **named)
    [message] = everything(log)
    assert {name: getattr(message.message, name) for name in named} == named
    assert message.id == "order-1"
    assert message.headers == {"tenant": "acme", "retry": {"n": [1]}}
    assert message.topic == "orders.new"
    assert message.published_at == datetime.fromtimestamp(clock.now_ms() / 1000, UTC)
    assert message.expires_at == message.published_at + timedelta(seconds=60)
    assert message.message.size == len('{"n":1}')


def test_times_may_be_given_as_moments_or_spans(log: Log, clock: ManualClock) -> None:
    now = datetime.fromtimestamp(clock.now_ms() / 1000, UTC)
    log.publish("a", 1, deliver_at=now + timedelta(seconds=5), expires_at=now + timedelta(seconds=9))
    log.publish("a", 2, delay=timedelta(seconds=5), ttl=9)
    log.publish("a", 3, deliver_at=now.timestamp() + 5, expires_at=now.timestamp() + 9)
    assert {(m.message.deliver_ms, m.message.expires_ms) for m in everything(log)} == {
        (clock.now_ms() + 5_000, clock.now_ms() + 9_000)
    }


def test_publish_many_takes_tuples_and_mappings(log: Log) -> None:
    seqs = log.publish_many(
        [
            ("a", 1),
            ("b", 2, {"priority": 5, "from_": "x"}),
            {"topic": "c", "data": 3, "from": "y", "headers": {"h": 1}},
        ]
    )
    assert seqs == [1, 2, 3]
    assert [(m.topic, m.data, m.priority, m.from_, m.headers) for m in everything(log)] == [
        ("a", 1, 0, None, {}),
        ("b", 2, 5, "x", {}),
        ("c", 3, 0, "y", {"h": 1}),
    ]


def test_publish_many_of_nothing_is_nothing(log: Log) -> None:
    assert log.publish_many([]) == []
    assert log.last_seq() == 0


def test_publish_many_takes_any_iterable(log: Log) -> None:
    assert log.publish_many(("a", number) for number in range(500)) == list(range(1, 501))
    assert [message.data for message in everything(log)] == list(range(500))


# --- idempotent publish: what the store must do about ids is in tests/stores/test_contract_messages.py -------------


def test_the_same_id_is_stored_once_and_gets_the_first_seq(log: Log) -> None:
    assert log.publish("a", "first", id="x") == 1
    assert log.publish("a", "other", id="y") == 2
    assert log.publish("a", "second", id="x") == 1
    assert [message.data for message in everything(log)] == ["first", "other"]
    assert log.publish("a", None) == 3, "a repeat takes no seq"


def test_an_id_is_forgotten_when_its_time_is_over(open_log: Any, clock: ManualClock) -> None:
    log = open_log(dedupe=60)
    log.publish("a", 1, id="x")
    clock.advance(60)
    assert log.publish("a", 2, id="x") == 1
    clock.advance(0.001)
    assert log.publish("a", 3, id="x") == 2
    assert log.publish("a", 4, id="x") == 2, "the new one is remembered from now on"


def test_an_id_is_forgotten_behind_so_many_messages(open_log: Any) -> None:
    log = open_log(dedupe_count=3)
    log.publish("a", 1, id="x")
    log.publish_many([("a", 2), ("a", 3)])
    assert log.publish("a", 4, id="x") == 1
    log.publish("a", 5)
    assert log.publish("a", 6, id="x") == 5


def test_maintenance_forgets_ids_outside_the_window_only(open_log: Any, clock: ManualClock) -> None:
    log = open_log(dedupe=60)
    log.publish("a", 1, id="old")
    clock.advance(61)
    log.publish("a", 2, id="new")
    assert log.run_maintenance().forgotten_ids == 1
    assert log.publish("a", 3, id="new") == 2
    assert log.publish("a", 4, id="old") == 3


def test_ids_and_seqs_survive_reopening(open_log: Any) -> None:
    with open_log() as log:
        log.publish("a", 1, id="x")
        first = [message.id for message in everything(log)]
    with open_log() as log:
        assert log.publish("a", 2, id="x") == 1
        assert log.publish("a", 3) == 2
        assert [message.id for message in everything(log)][:1] == first
