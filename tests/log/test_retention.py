"""How much stays. What a subscription thereby loses is in test_gaps.py."""

from datetime import timedelta
from typing import Any

import pytest
from fetched import everything, seqs

from headwater import Log, ManualClock
from headwater.errors import InvalidInputError, InvalidOptionError, InvalidPatternError


def left(log: Log) -> list[int]:
    return seqs(everything(log))


def test_by_count(log: Log) -> None:
    log.publish_many([("a", n) for n in range(5)])
    log.retain("a", max_count=3)
    assert left(log) == [1, 2, 3, 4, 5], "nothing happens before maintenance"
    assert log.run_maintenance().pruned == {"a": 2}
    assert left(log) == [3, 4, 5]
    assert log.run_maintenance().pruned == {}


def test_by_age_exactly_the_limit_stays(log: Log, clock: ManualClock) -> None:
    log.publish("a", "7200 s old")
    clock.advance(3_600)
    log.publish("a", "3600 s old")
    clock.advance(3_600)
    log.retain("a", max_age=timedelta(hours=1))
    assert log.run_maintenance().pruned == {"a": 1}
    assert left(log) == [2]
    clock.advance(0.001)
    log.run_maintenance()
    assert left(log) == []


def test_by_bytes(log: Log) -> None:
    log.publish_many([("a", "x" * 8) for _ in range(5)])  # ten bytes each, with the quotes
    log.retain("a", max_bytes=35)
    log.run_maintenance()
    assert left(log) == [3, 4, 5]
    log.retain("a", max_bytes=30)
    log.run_maintenance()
    assert left(log) == [3, 4, 5]


@pytest.mark.parametrize("limits", [{"max_count": 0}, {"max_bytes": 0}], ids=str)
def test_zero_keeps_nothing(log: Log, limits: dict[str, int]) -> None:
    log.publish_many([("a", n) for n in range(3)])
    log.retain(">", **limits)
    log.run_maintenance()
    assert left(log) == []


def test_an_age_of_zero_keeps_this_very_moment(log: Log, clock: ManualClock) -> None:
    log.publish("a", 1)
    log.retain(">", max_age=0)
    log.run_maintenance()
    assert left(log) == [1]
    clock.advance(0.001)
    log.run_maintenance()
    assert left(log) == []


def test_any_limit_is_enough(log: Log, clock: ManualClock) -> None:
    log.publish_many([("a", "x" * 8) for _ in range(6)])
    log.retain("a", max_count=100, max_bytes=40, max_age=3_600)
    log.run_maintenance()
    assert left(log) == [3, 4, 5, 6]
    log.retain("a", max_count=3, max_bytes=1_000, max_age=3_600)
    log.run_maintenance()
    assert left(log) == [4, 5, 6]
    clock.advance(3_600.001)
    log.run_maintenance()
    assert left(log) == []


def test_each_pattern_has_limits_of_its_own(log: Log) -> None:
    log.publish_many([(topic, None) for topic in ("a.x", "a.y", "b", "a.x", "b", "a.y", "c")])
    log.retain("a.*", max_count=2)
    log.retain("b", max_count=1)
    assert log.run_maintenance().pruned == {"a.*": 2, "b": 1}
    assert left(log) == [4, 5, 6, 7]


def test_overlapping_patterns_all_hold(log: Log) -> None:
    log.publish_many([("a", n) for n in range(6)])
    log.retain(">", max_count=4)
    log.retain("a", max_count=2)
    log.run_maintenance()
    assert left(log) == [5, 6]


def test_both_dialects(log: Log) -> None:
    log.publish_many([("a", 1), ("a.b", 2), ("b", 3)])
    log.retain("a.#", max_count=0, dialect="amqp")
    log.run_maintenance()
    assert left(log) == [3]


def test_policies_can_be_listed_replaced_and_removed(log: Log) -> None:
    log.retain("b", max_count=5)
    log.retain("a.>", max_age=60, keep_unacked=True)
    log.retain("b", max_bytes=7)
    policies = {policy.pattern: policy.limits for policy in log.retention()}
    assert list(policies) == ["a.>", "b"]
    assert (policies["a.>"].max_age_ms, policies["a.>"].keep_unacked) == (60_000, True)
    assert (policies["b"].max_count, policies["b"].max_bytes) == (None, 7)
    assert log.delete_retention("b") is True
    assert log.delete_retention("b") is False
    log.publish("b", "x" * 100)
    log.run_maintenance()
    assert left(log) == [1]


def test_policies_survive_reopening(open_log: Any) -> None:
    with open_log() as log:
        log.retain("a", max_count=1)
    with open_log() as log:
        log.publish_many([("a", 1), ("a", 2)])
        log.run_maintenance()
        assert left(log) == [2]


@pytest.mark.usefixtures("no_store_asked")
@pytest.mark.parametrize(
    ("pattern", "limits", "error"),
    [
        ("a", {}, InvalidOptionError),
        ("a", {"keep_unacked": True}, InvalidOptionError),
        ("a", {"max_count": -1}, InvalidOptionError),
        ("a", {"max_bytes": -1}, InvalidOptionError),
        ("a", {"max_age": -1}, InvalidOptionError),
        ("a", {"max_age": "an hour"}, InvalidOptionError),
        ("a..b", {"max_count": 1}, InvalidPatternError),
    ],
    ids=str,
)
def test_an_impossible_policy_is_refused(
    log: Log, pattern: str, limits: dict[str, Any], error: type[Exception]
) -> None:
    with pytest.raises(error):
        log.retain(pattern, **limits)
    assert log.retention() == []


@pytest.mark.usefixtures("no_store_asked")
@pytest.mark.parametrize("limits", [{"max_count": "3"}, {"max_count": 1.5}, {"max_bytes": True}], ids=str)
def test_a_limit_of_the_wrong_type_is_refused(log: Log, limits: dict[str, Any]) -> None:
    with pytest.raises(InvalidInputError):
        log.retain("a", **limits)


def test_seqs_and_the_last_of_a_topic_survive_pruning(log: Log) -> None:
    log.publish_many([("a", 1), ("b", 2), ("a", 3)])
    log.retain(">", max_count=0)
    log.run_maintenance()
    assert log.last_seq() == 3
    assert (log.topic_max_seq("a"), log.topic_max_seq("b"), log.topic_max_seq("never")) == (3, 2, 0)
    assert {(count.topic, count.count, count.bytes) for count in log.topics()} == {("a", 0, 0), ("b", 0, 0)}
    assert log.publish("a", 4) == 4
    assert log.topic_max_seq("a") == 4


def test_seqs_are_not_used_again_after_pruning_and_reopening(open_log: Any) -> None:
    with open_log() as log:
        log.publish_many([("a", 1), ("a", 2)])
        log.retain(">", max_count=0)
        log.run_maintenance()
    with open_log() as log:
        assert log.publish("a", 3) == 3


def test_topic_counts_agree_with_what_is_there(log: Log) -> None:
    log.publish_many([(f"t.{n % 3}", "x" * n) for n in range(30)])
    log.retain("t.1", max_count=4)
    log.run_maintenance()
    log.publish("t.1", "xx")
    counted = {count.topic: (count.count, count.bytes) for count in log.topics()}
    assert counted["t.0"] == (10, sum(n + 2 for n in range(0, 30, 3)))
    assert counted["t.1"] == (5, sum(n + 2 for n in (19, 22, 25, 28)) + 4)
    assert log.statistics().messages == len(left(log)) == 25


def test_more_than_a_page_goes_in_one_round(log: Log) -> None:
    log.publish_many([("a", n) for n in range(5_000)])
    log.retain("a", max_count=10)
    assert log.run_maintenance().pruned == {"a": 4_990}
    assert left(log) == list(range(4_991, 5_001))


# --- unused subscriptions -------------------------------------------------------------------------------


def test_an_idle_subscription_is_dropped_and_reported(log: Log, clock: ManualClock) -> None:
    log.subscribe("sub1", "a", inactive_timeout=1).close()
    log.subscribe("forever", "a").close()
    clock.advance(1)
    assert log.run_maintenance().expired_subscriptions == []
    clock.advance(1)
    assert log.run_maintenance().expired_subscriptions == ["sub1"]
    assert [info.id for info in log.subscriptions()] == ["forever"]


@pytest.mark.parametrize("mode", ["exclusive", "shared"])
def test_a_subscription_in_use_is_not_idle(log: Log, clock: ManualClock, mode: Any) -> None:
    subscription = log.subscribe("s", "a", mode=mode, inactive_timeout=5, lease=1)
    for _ in range(5):
        clock.advance(4)
        log._core.heartbeat()
        assert log.run_maintenance().expired_subscriptions == []
    log.publish("a", 1)
    assert [message.data for message in subscription.fetch()] == [1]


def test_a_dropped_subscription_no_longer_keeps_messages(log: Log, clock: ManualClock) -> None:
    log.subscribe("s", "a", inactive_timeout=1).close()
    log.publish("a", 1)
    log.retain("a", max_count=0, keep_unacked=True)
    log.run_maintenance()
    assert left(log) == [1]
    clock.advance(2)
    log.run_maintenance()
    log.run_maintenance()
    assert left(log) == []


def test_maintenance_is_one_processs_business_at_a_time(open_log: Any) -> None:
    one, two = open_log(), open_log()
    reports = [one.run_maintenance(), two.run_maintenance(), one.run_maintenance()]
    assert [report.skipped for report in reports] == [False] * 3, "each ends its turn"
