"""Figures over time: what is recorded comes back as series, after a restart too, and takes no more room than it may."""

from collections.abc import Callable

import pytest

import headwater
from headwater import Log, ManualClock
from headwater.broker import history
from headwater.broker.flow import run_blocking
from headwater.broker.history import RINGS, SPANS, History, merged
from headwater.errors import InvalidOptionError
from headwater.ports.records import Sample, SubscriptionSample

pytestmark = pytest.mark.usefixtures("engine_here")

MINUTE_S = 60


def take(log: Log) -> None:
    run_blocking(log._core.take_sample())  # type: ignore[attr-defined]


def read(log: Log, span: str = "hour") -> History:
    engine = log._core.engine  # type: ignore[attr-defined]
    return run_blocking(engine.read(lambda reader: history.history(reader, span, engine.clock.now_ms())))


def rows(log: Log) -> dict[int, int]:
    engine = log._core.engine  # type: ignore[attr-defined]
    with engine.store.read() as reader:
        return {step_ms: len(reader.samples(step_ms)) for step_ms, _ in RINGS}


@pytest.fixture
def minutes(log: Log, clock: ManualClock) -> Callable[..., None]:
    """Minutes in which so many messages are published each, with a sample at the end of each."""

    def run(count: int, published: int = 0) -> None:
        for _ in range(count):
            log.publish_many([("a", None)] * published)
            take(log)
            clock.advance(MINUTE_S)

    return run


def test_rates_lags_and_sizes(log: Log, minutes: Callable[..., None]) -> None:
    subscription = log.subscribe("billing", "a")
    minutes(1)
    minutes(2, published=120)
    for message in subscription.fetch(60):
        message.ack()
    minutes(1)
    subscription.fetch(1)[0].reject("broken")
    minutes(1)
    found = read(log)
    assert (found.step_ms, len(found.published)) == (60_000, 60)
    assert found.published[-6:] == [None, 2.0, 2.0, 0.0, 0.0, None]  # the minute now has no sample yet
    billing = found.subscriptions["billing"]
    assert billing.lag[-6:] == [0, 120, 240, 180, 179, None]
    assert billing.acked[-6:] == [None, 0.0, 0.0, 1.0, 0.0, None]
    assert found.dead_letters[-6:] == [0, 0, 0, 0, 1, None]
    assert all(size > 0 for size in found.file_bytes[-6:-1] if size is not None)
    assert found.published[:54] == [None] * 54


def test_it_outlives_the_process_and_the_time_between_is_a_gap(
    open_log: Callable[..., Log], log: Log, clock: ManualClock, minutes: Callable[..., None]
) -> None:
    log.subscribe("billing", "a").close()
    minutes(3, published=60)
    log.close()
    clock.advance(5 * MINUTE_S)
    log = open_log()
    for _ in range(2):
        log.publish_many([("a", None)] * 60)
        take(log)
        clock.advance(MINUTE_S)
    found = read(log)
    assert found.published[-11:] == [None, 1.0, 1.0, *[None] * 5, None, 1.0, None]
    assert found.subscriptions["billing"].lag[-11:] == [60, 120, 180, *[None] * 5, 240, 300, None]


def test_a_day_and_a_week_are_read_in_longer_steps(log: Log, clock: ManualClock, minutes: Callable[..., None]) -> None:
    minutes(60, published=60)
    day, week = read(log, "day"), read(log, "week")
    assert (day.step_ms, len(day.published)) == (300_000, 288)
    assert (week.step_ms, len(week.published)) == (900_000, 672)
    for found in (day, week):
        known = [rate for rate in found.published if rate is not None]
        assert len(known) in (3600_000 // found.step_ms - 1, 3600_000 // found.step_ms)
        assert set(known) == {1.0}
    clock.advance(25 * 3600)
    assert not any(read(log, "day").published)
    assert any(read(log, "week").published)


def test_no_more_is_kept_than_the_rings_hold(
    log: Log, clock: ManualClock, monkeypatch: pytest.MonkeyPatch, minutes: Callable[..., None]
) -> None:
    monkeypatch.setattr(history, "RINGS", ((60_000, 20), (900_000, 3)))
    minutes(100)
    assert rows(log) == {60_000: 20, 900_000: 3}
    assert sum(size is not None for size in read(log).file_bytes) in (19, 20)


@pytest.mark.parametrize("span", SPANS)
def test_a_span_is_in_its_ring(span: str) -> None:
    ring_ms, step_ms, steps = SPANS[span]
    assert step_ms % ring_ms == 0
    assert step_ms * steps <= ring_ms * dict(RINGS)[ring_ms]


def test_a_deleted_subscription_is_forgotten_and_a_new_one_of_its_name_begins_anew(
    log: Log, minutes: Callable[..., None]
) -> None:
    log.subscribe("billing", "a").close()
    minutes(2, published=1)
    log.delete_subscription("billing")
    assert read(log).subscriptions == {}
    log.subscribe("billing", "a", start="new").close()
    minutes(1, published=1)
    assert [lag for lag in read(log).subscriptions["billing"].lag if lag is not None] == [1]


def test_the_peaks_of_a_step_stay(log: Log, clock: ManualClock) -> None:
    clock.advance(MINUTE_S - clock.now_ms() / 1000 % MINUTE_S)  # to the beginning of a minute
    subscription = log.subscribe("billing", "a")
    log.publish_many([("a", None)] * 10)
    take(log)
    for message in subscription.fetch(10):
        message.ack()
    clock.advance(30)
    take(log)
    found = read(log)
    assert found.subscriptions["billing"].lag[-1] == 10
    assert rows(log) == {60_000: 1, 900_000: 1}


def test_merging_takes_the_later_totals() -> None:
    one = Sample(1_000, 10, 5, 100, 50, {"a": SubscriptionSample(9, 1), "gone": SubscriptionSample(1, 1)})
    two = Sample(2_000, 20, 3, 200, 20, {"a": SubscriptionSample(4, 7), "new": SubscriptionSample(2, 0)})
    assert merged(one, two) == Sample(
        2_000, 20, 5, 200, 50, {"a": SubscriptionSample(9, 7), "new": SubscriptionSample(2, 0)}
    )
    assert merged(None, two) == two


def test_a_clock_that_was_set_back_gives_no_rate(log: Log, clock: ManualClock) -> None:
    take(log)
    log.publish("a", None)
    clock.advance(-30 * MINUTE_S)
    take(log)
    assert not any(read(log).published)


def test_an_unknown_span_is_refused(log: Log) -> None:
    with pytest.raises(InvalidOptionError, match="hour, day, week"):
        read(log, "year")


def test_a_log_in_memory_is_not_locked_by_its_own_sample(clock: ManualClock) -> None:
    """It has one connection: a second read inside the first would wait for the busy timeout, and fail."""
    with headwater.open("memory:", clock=clock, maintenance_interval=None, busy_timeout=0.1) as log:
        log.publish("a", 1)
        take(log)
        assert read(log).file_bytes[-1]


def test_of_many_subscriptions_those_with_the_greatest_lag_are_kept(
    log: Log, minutes: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headwater.broker.history.SUBSCRIPTIONS_MAX", 2)
    for id in ("a", "b", "c"):
        log.subscribe(id, f"{id}.>").close()
    assert read(log).subscriptions_left_out == 1
    log.publish_many([("b.x", 1), ("c.x", 1), ("c.x", 2)])
    minutes(1)
    assert read(log).subscriptions.keys() == {"b", "c"}
    log.publish_many([("a.x", n) for n in range(3)])
    minutes(1)
    found = read(log)
    assert found.subscriptions.keys() == {"a", "c"}, "no more are answered than are kept at one time"
    assert found.subscriptions["c"].lag[-3:] == [2, 2, None]
    log.delete_subscription("b")
    assert read(log).subscriptions_left_out == 0
