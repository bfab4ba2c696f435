"""The log's figures: which snapshots stay, what the five reports make of them, and what a run writes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import headwater
from headwater import Log, ManualClock
from headwater.delivery.histogram import upper_bound_ms
from headwater.pipeline import logs
from headwater.pipeline.columns import GOLD_SCHEMAS, TABLE_SCHEMAS
from headwater.pipeline.lake import Lake
from headwater.pipeline.metrics import (
    KEPT_DAYS,
    SIGNATURE_CHARS_MAX,
    dead_letters,
    error_signature,
    forecast,
    lag,
    latency,
    record_metrics,
    retry_storms,
    thinned,
    update_reports,
    with_day,
)
from headwater.pipeline.storage import Storage

TODAY = date(2026, 11, 15)
NOW = datetime(2026, 11, 15, 10, 30, tzinfo=UTC)
EARLIER = NOW - timedelta(hours=1)
HOUR = timedelta(hours=1)
DAY_MS = 86_400_000


def at(text: str) -> datetime:
    return datetime.fromisoformat(f"2026-11-{text}").replace(tzinfo=UTC)


def ms(moment: datetime) -> int:
    return round(moment.timestamp() * 1000)


def table(name: str, columns: str, rows: list[tuple[Any, ...]]) -> pa.Table:
    """Rows of one of the log's tables; columns that are not named are null."""
    schema = GOLD_SCHEMAS["volume"] if name == "volume" else TABLE_SCHEMAS[name]
    return pa.Table.from_pylist([dict(zip(columns.split(), row, strict=True)) for row in rows], schema=schema)


def check(found: pa.Table, name: str, rows: list[tuple[Any, ...]]) -> None:
    """Whether a report has exactly its schema and these rows, in any order; `day` follows from a time of the row."""
    assert found.schema == GOLD_SCHEMAS[name]
    names = [each for each in found.column_names if name == "dead_letters" or each != "day"]
    made = [tuple(row[each] for each in names) for row in found.to_pylist()]
    assert Counter(made) == Counter(rows)


# --- which snapshots stay


def snapshots(moments: list[datetime]) -> pa.Table:
    rows = [(moment, topic, 1) for moment in moments for topic in ("b", "a")]
    return with_day(table("topics", "observed_at topic count", rows), "observed_at")


def kept(found: pa.Table) -> list[datetime]:
    moments = found["observed_at"].to_pylist()
    assert Counter(Counter(moments).values()).keys() <= {2}, "a snapshot stays or goes whole"
    return sorted(set(moments))


def test_the_last_hour_is_kept_whole_and_of_others_the_last_snapshot() -> None:
    moments = [
        at("15 10:29"),
        at("15 10:00"),
        at("15 09:59"),
        at("15 09:30"),
        at("15 09:00"),
        at("15 08:59:59.999"),
        at("15 08:00"),
        at("14 23:00"),
    ]
    gone = [at("15 08:00")]
    assert kept(thinned(snapshots(moments), NOW)) == sorted(set(moments) - set(gone))


moments_before_now = st.lists(
    st.integers(0, 100 * 24 * 60).map(lambda minutes: NOW - timedelta(minutes=minutes)), unique=True
)


@given(moments_before_now, st.integers(0, 3 * 24 * 60))
def test_thinning_by_and_by_keeps_what_thinning_at_the_end_does(moments: list[datetime], later: int) -> None:
    rows, end = snapshots(moments), NOW + timedelta(minutes=later)
    once = thinned(rows, NOW)
    assert thinned(once, NOW).equals(once)
    assert thinned(once, end).equals(thinned(rows, end))
    left = kept(once)
    assert {each for each in moments if each > NOW - HOUR} <= set(left)
    hours = {each.replace(minute=0) for each in moments}
    assert {each.replace(minute=0) for each in left} == hours
    assert len(left) <= len(hours) + 120


# --- reports


def test_latency_has_percentiles_of_the_newest_counts() -> None:
    hour, seen, later = at("15 10:00"), at("15 10:10"), at("15 10:20")

    def reading(when: datetime, key: tuple[str, str], *counts: tuple[int, int | None]) -> list[tuple[Any, ...]]:
        return [(when, key[0], hour, key[1], bucket, count) for bucket, count in counts]

    rows = [
        # 100 in all; the 50th and the 90th are the last of their buckets
        *reading(later, ("s", "deliver"), (0, 50), (4, 40), (8, 9), (40, 1)),
        *reading(seen, ("s", "deliver"), (0, 50), (4, 1), (8, 9)),
        *reading(seen, ("s", "ack"), (5, 2), (7, 1)),
        *reading(later, ("s", "ack"), (9, 0), (10, None)),
        *reading(seen, ("one", "ack"), (1, 1)),
    ]
    found = latency(table("timings", "observed_at subscription hour stage bucket count", rows))
    check(
        found,
        "latency",
        [
            ("s", hour, "deliver", 100, 0.0, 2.0, 4.0, 1024.0),
            ("s", hour, "ack", 3, 2.0**1.25, 2.0**1.75, 2.0**1.75, 2.0**1.75),
            ("one", hour, "ack", 1, 2.0**0.25, 2.0**0.25, 2.0**0.25, 2.0**0.25),
        ],
    )
    assert set(found["day"].to_pylist()) == {TODAY}


counts_by_bucket = st.dictionaries(st.integers(0, 60), st.integers(1, 1000), min_size=1, max_size=12)


@given(st.dictionaries(st.sampled_from([("s", 1), ("s", 2), ("t", 1)]), counts_by_bucket))
def test_a_percentile_is_the_bound_of_the_bucket_that_holds_it(series: dict[tuple[str, int], dict[int, int]]) -> None:
    rows = [
        (NOW, subscription, at(f"15 0{hour}:00"), "ack", bucket, count)
        for (subscription, hour), buckets in series.items()
        for bucket, count in buckets.items()
    ]
    expected = []
    for (subscription, hour), buckets in series.items():
        times = sorted(bucket for bucket, count in buckets.items() for _ in range(count))
        bounds = [upper_bound_ms(times[-(-len(times) * percent // 100) - 1]) for percent in (50, 90, 99, 100)]
        expected.append((subscription, at(f"15 0{hour}:00"), "ack", len(times), *bounds))
    check(latency(table("timings", "observed_at subscription hour stage bucket count", rows)), "latency", expected)


SUBSCRIPTIONS = "observed_at id position lag in_flight waiting oldest_unacked_ms acked redelivered created_at"


def subscription(when: str, id: str, acked: int | None, redelivered: int | None, created: str = "01 00:00") -> Any:
    return (at(when), id, 5, 3, 2, None, 900, acked, redelivered, at(created))


def test_lag_is_what_was_observed() -> None:
    rows = [
        subscription("14 23:59", "s", 1, 0),
        subscription("15 11:00", "s", 1, 0),
        subscription("15 11:00", "ü", 1, 0),
    ]
    found = lag(table("subscriptions", SUBSCRIPTIONS, rows))
    check(
        found,
        "lag",
        [
            ("s", at("14 23:59"), 3, 5, 2, None, 900),
            ("s", at("15 11:00"), 3, 5, 2, None, 900),
            ("ü", at("15 11:00"), 3, 5, 2, None, 900),
        ],
    )
    assert found["day"].to_pylist() == [date(2026, 11, 14), TODAY, TODAY]


def test_a_storm_is_an_interval_with_mostly_redeliveries() -> None:
    rows = [
        subscription("15 10:00", "storm", 100, 50),  # the first snapshot: when they came is not known
        subscription("15 10:10", "storm", 110, 60),  # exactly ten, exactly half
        subscription("15 10:20", "storm", 110, 69),  # too few
        subscription("15 10:30", "storm", 121, 79),  # less than half
        subscription("15 10:40", "storm", 121, 99),  # nothing acked at all
        subscription("15 10:50", "storm", 121, 99),  # nothing at all
        subscription("15 10:00", "anew", 1000, 500),
        subscription("15 10:10", "anew", 3, 30, created="15 10:05"),  # made anew: counts from zero
        subscription("15 10:20", "anew", 10, 35, created="15 10:15"),  # again, and higher than before
        subscription("15 10:00", "reset", 1000, 500),
        subscription("15 10:10", "reset", 0, 0),
        subscription("15 10:20", "reset", 0, 15),
        subscription("15 10:00", "unknown", None, None),
        subscription("15 10:10", "unknown", None, None),
    ]
    check(
        retry_storms(table("subscriptions", SUBSCRIPTIONS, [*reversed(rows)])),
        "retry_storms",
        [
            ("storm", at("15 10:00"), at("15 10:10"), 10, 10, 0.5),
            ("storm", at("15 10:30"), at("15 10:40"), 0, 20, 1.0),
            ("anew", at("15 10:00"), at("15 10:10"), 3, 30, 30 / 33),
            ("anew", at("15 10:10"), at("15 10:20"), 10, 35, 35 / 45),
            ("reset", at("15 10:10"), at("15 10:20"), 0, 15, 1.0),
        ],
    )


growths = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=20)


@given(st.dictionaries(st.sampled_from(["s", "t", "u"]), growths))
def test_each_storm_has_the_counts_and_the_ratio_of_its_interval(steps: dict[str, list[tuple[int, int]]]) -> None:
    rows, expected = [], []
    for id, grown in steps.items():
        acked = redelivered = 0
        for index, (more_acked, more_redelivered) in enumerate(grown):
            begin = NOW + index * HOUR
            acked, redelivered = acked + more_acked, redelivered + more_redelivered
            rows.append((begin, id, acked, redelivered, at("01 00:00")))
            if index and more_redelivered >= 10 and more_redelivered >= more_acked:
                ratio = more_redelivered / (more_acked + more_redelivered)
                expected.append((id, begin - HOUR, begin, more_acked, more_redelivered, ratio))
    found = retry_storms(table("subscriptions", "observed_at id acked redelivered created_at", rows))
    check(found, "retry_storms", expected)


LETTERS = "id subscription reason handler error died_at"
NO_LETTERS = GOLD_SCHEMAS["dead_letters"].empty_table()


def test_dead_letters_are_counted_by_what_their_errors_have_in_common() -> None:
    key = ("s", "max_attempts", "handle")
    rows = [
        (1, *key, "order 17 is gone", at("15 10:00")),
        (2, *key, "order 4 is gone", at("15 12:00")),
        (3, *key, "order 5 is gone", at("15 09:00")),
        (4, *key, "order 1 is gone", at("14 09:00")),
        *((number, *key, "order 1 is gone", at("08 09:00")) for number in range(10, 16)),
        (20, *key, "order 1 is gone", at("07 23:59")),  # eight days before the 15th
        (21, "s", "rejected", None, None, at("15 10:00")),
        (22, "s", "rejected", None, None, at("15 10:30")),
    ]
    gone = (*key, "order <n> is gone")
    check(
        dead_letters(table("dead_letters", LETTERS, rows), NO_LETTERS),
        "dead_letters",
        [
            (TODAY, *gone, 3, at("15 09:00"), at("15 12:00"), "order 4 is gone", 3 - 7 / 7),
            (date(2026, 11, 14), *gone, 1, at("14 09:00"), at("14 09:00"), "order 1 is gone", 1 - 7 / 7),
            (date(2026, 11, 8), *gone, 6, at("08 09:00"), at("08 09:00"), "order 1 is gone", 6 - 1 / 7),
            (date(2026, 11, 7), *gone, 1, at("07 23:59"), at("07 23:59"), "order 1 is gone", 1.0),
            (TODAY, "s", "rejected", None, None, 2, at("15 10:00"), at("15 10:30"), None, 2.0),
        ],
    )


some_letters = st.lists(
    st.tuples(
        st.sampled_from(["s", "t"]),
        st.sampled_from(["rejected", "expired"]),
        st.sampled_from([None, "handle"]),
        st.sampled_from([None, "order 1 is gone", "order 2 is gone", "x" * 3000]),
        st.integers(0, 20 * 24).map(lambda hours: NOW + hours * HOUR),
    )
)


@given(some_letters, st.integers(0, 20))
def test_letters_reported_by_and_by_are_reported_as_at_once(found: list[tuple[Any, ...]], split: int) -> None:
    rows = table("dead_letters", LETTERS, [(index + 1, *each) for index, each in enumerate(found)])
    at_once = dead_letters(rows, NO_LETTERS)
    assert dead_letters(rows.slice(split), dead_letters(rows.slice(0, split), NO_LETTERS)).equals(at_once)
    assert sum(at_once["letters"].to_pylist()) == len(found)


@pytest.mark.parametrize(
    ("error", "signature"),
    [
        ("timeout after 1.5 s, 3,000 rows, -2e-9", "timeout after <n> s, <n> rows, <n>"),
        ("no order 0190aaaa-bbbb-7ccc-8ddd-000000000001", "no order <uuid>"),
        ("object at 0x7F3e, commit 4f2a9c11b", "object at <hex>, commit <hex>"),
        ("can't read 'a b' or \"c 5\", won't", "can't read <text> or <text>, won't"),
        ("open /var/log/x.log: and/or ./y ~/z", "open <path>: and/or <path> <path>"),
        ("C:\\data\\x.db is locked", "<path> is locked"),
        ("GET https://h:80/a?b=1 failed", "GET <path> failed"),
        ("utf8 http2 line12 order-17 15ms", "utf8 http2 line12 order-<n> <n>ms"),
        ("größe 5\n\n  at  all ", "größe <n> at all"),
        ("deadbeef and 12345678", "deadbeef and <n>"),
        ("", ""),
        (None, None),
        ("x" * 5_000, "x" * SIGNATURE_CHARS_MAX),
    ],
)
def test_a_signature_keeps_what_stays_and_drops_what_changes(error: str | None, signature: str | None) -> None:
    assert error_signature(error) == signature


@given(st.text(max_size=300), st.integers(0, 10**12), st.integers(0, 10**12))
def test_errors_that_differ_in_a_number_are_of_one_kind(text: str, one: int, other: int) -> None:
    assert error_signature(f"order {one} {text}") == error_signature(f"order {other} {text}")


TOPICS = "observed_at topic count bytes"
RETENTION = "observed_at pattern dialect max_age_ms max_count max_bytes keep_unacked"
VOLUME = "day hour topic type messages bytes"


def test_limits_are_reached_at_the_pace_of_the_last_week() -> None:
    topics = [
        (EARLIER, "orders.new", 1, 1),
        (EARLIER, "gone", 1000, 1000),
        (NOW, "orders.new", 600, 6_000),
        (NOW, "orders", 100, 4_000),
        (NOW, "quiet", 50, 500),
    ]
    retention = [
        (EARLIER, "gone.policy", "nats", None, 1, None, False),
        (NOW, "orders.>", "nats", None, 1_000, 10_000, False),
        (NOW, "orders.#", "amqp", 2 * DAY_MS, None, None, True),
        (NOW, "orders", "nats", 300 * DAY_MS, None, None, False),
        (NOW, "quiet", "nats", None, 40, None, False),
        (NOW, "nothing.here", "nats", None, None, 5, None),
        (NOW, ">", "nats", None, 500, None, None),
    ]
    hour = at("15 10:00")
    week = hour - timedelta(days=7) + HOUR  # the first of the last 168 hours
    volume = [
        (hour.date(), hour, "orders.new", "a", 300, 3_000),
        (week.date(), week, "orders.new", None, 400, 4_000),
        (week.date(), week, "orders", None, 70, 2_800),
        (week.date(), week - HOUR, "orders.new", None, 99_999, 99_999),  # too long ago
        (date(2025, 1, 1), datetime(2025, 1, 1, tzinfo=UTC), "quiet", None, 50, 500),
        (None, None, None, None, 1, 1),
    ]
    check(
        forecast(
            table("topics", TOPICS, topics), table("retention", RETENTION, retention), table("volume", VOLUME, volume)
        ),
        "forecast",
        [
            (">", 750, 10_500, 110.0, 1_400.0, None, None, None, 10_500 + 30 * 1_400.0),
            (">", 750, 10_500, 110.0, 1_400.0, "max_count", 500, 0.0, 500 * 14.0),
            ("orders.>", 600, 6_000, 100.0, 1_000.0, "max_count", 1_000, 4.0, 10_000.0),
            ("orders.>", 600, 6_000, 100.0, 1_000.0, "max_bytes", 10_000, 4.0, 10_000.0),
            ("orders.#", 700, 10_000, 110.0, 1_400.0, "max_age", 2 * DAY_MS, None, 2_800.0),
            ("orders", 100, 4_000, 10.0, 400.0, "max_age", 300 * DAY_MS, None, 16_000.0),
            ("quiet", 50, 500, 0.0, 0.0, "max_count", 40, None, 400.0),
            ("nothing.here", 0, 0, 0.0, 0.0, "max_bytes", 5, None, 0.0),
        ],
    )


def test_a_young_log_is_not_taken_for_a_fast_one() -> None:
    hour = at("15 10:00")
    volume = table("volume", VOLUME, [(hour.date(), hour, "ü", None, 24, 240)])
    found = forecast(table("topics", TOPICS, [(NOW, "ü", 24, 240)]), table("retention", RETENTION, []), volume)
    check(found, "forecast", [(">", 24, 240, 24.0, 240.0, None, None, None, 7_440.0)])


def test_policies_that_the_newest_snapshot_of_topics_did_not_see_are_gone() -> None:
    topics, nothing = table("topics", TOPICS, [(NOW, "a", 2, 20)]), table("volume", "", [])
    policies = table("retention", RETENTION, [(EARLIER, "a", "nats", None, 1, None, False)])
    check(forecast(topics, policies, nothing), "forecast", [(">", 2, 20, 0.0, 0.0, None, None, None, 20.0)])


def test_of_nothing_there_is_only_the_whole_log() -> None:
    check(latency(table("timings", "", [])), "latency", [])
    check(lag(table("subscriptions", "", [])), "lag", [])
    check(retry_storms(table("subscriptions", "", [])), "retry_storms", [])
    check(dead_letters(table("dead_letters", "", []), NO_LETTERS), "dead_letters", [])
    found = forecast(table("topics", "", []), table("retention", "", []), table("volume", "", []))
    check(found, "forecast", [(">", 0, 0, 0.0, 0.0, None, None, None, 0.0)])


# --- what a run writes


class World:
    """A log at a time that the test decides, and a lake that observes it."""

    def __init__(self, folder: Path) -> None:
        self.clock = ManualClock(ms(NOW))
        self.path = str(folder / "log.db")
        self.log: Log = headwater.open(self.path, clock=self.clock, maintenance_interval=None, durability="relaxed")
        self.lake = Lake(Storage(folder / "lake"))

    def run(self, at: datetime | None = None) -> set[str]:
        """Observe and report; returns the tables that got a commit."""
        if at is not None:
            self.clock.advance((ms(at) - self.clock.now_ms()) / 1000)
        before = self.versions()
        record_metrics(self.lake, self.path, self.clock.now_ms())
        update_reports(self.lake)
        after = self.versions()
        return {name for name in after if after[name] != before[name]}

    def versions(self) -> dict[str, int]:
        names = [f"metrics/{name}" for name in ("subscriptions", "topics", "retention", "timings", "dead_letters")]
        names += [f"gold/{name}" for name in ("lag", "latency", "retry_storms", "dead_letters", "forecast")]
        return {name: self.lake.table(name).version for name in names}

    def moments(self, name: str = "metrics/subscriptions") -> list[datetime]:
        return sorted(self.lake.table(name).read()["observed_at"].to_pylist())

    def gold(self, name: str) -> list[dict[str, Any]]:
        return list(self.lake.table(f"gold/{name}").read().to_pylist())


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path)
    with made.log:
        yield made


def test_a_run_observes_and_reports_and_the_next_writes_only_what_changed(world: World) -> None:
    log = world.log
    log.publish_many([("orders.new", n) for n in range(40)])
    log.retain("orders.>", max_count=100)
    subscription = log.subscribe("work", "orders.>", mode="shared", max_attempts=100, backoff=0)
    world.run(NOW)
    for message in subscription.fetch(40):
        message.nack(error=f"order {message.data} is gone")
    first, *others = subscription.fetch(40)
    first.reject("order 1 is gone")
    for message in others[:9]:
        message.ack()
    subscription.close()
    log.close()  # saves the timings
    world.log = headwater.open(world.path, clock=world.clock, maintenance_interval=None, durability="relaxed")
    changed = world.run(NOW + timedelta(minutes=10))
    assert {
        "metrics/dead_letters",
        "metrics/timings",
        "gold/latency",
        "gold/dead_letters",
        "gold/retry_storms",
    } < changed
    assert [(row["lag"], row["observed_at"]) for row in world.gold("lag")] == [(40, NOW), (30, world.moments()[1])]
    storm = world.gold("retry_storms")
    assert [(row["acked"], row["redelivered"]) for row in storm] == [(9, 40)]
    assert storm[0]["ratio"] == pytest.approx(40 / 49)
    assert [(row["error_signature"], row["letters"]) for row in world.gold("dead_letters")] == [
        ("order <n> is gone", 1)
    ]
    assert {(row["stage"], row["count"]) for row in world.gold("latency")} == {("deliver", 40), ("ack", 9)}
    assert [(row["pattern"], row["messages"], row["limit"]) for row in world.gold("forecast")] == [
        (">", 40, None),
        ("orders.>", 40, 100),
    ]
    snapshots = {"metrics/subscriptions", "metrics/topics", "metrics/retention", "gold/lag"}
    assert world.run(NOW + timedelta(minutes=20)) == snapshots, "nothing else has changed"
    world.log.close()


def test_snapshots_of_months_are_thinned_and_only_days_that_change_are_written(world: World) -> None:
    world.log.subscribe("s", ">").close()
    asked = [NOW + timedelta(minutes=20) * n for n in range(8)]  # to 12:50
    asked += [
        at("15 23:40"),
        at("15 23:50"),
        at("16 00:10"),
        at("16 01:05"),
        at("16 02:00"),
        at("20 07:15"),
        at("20 08:00"),
    ]
    for index, moment in enumerate(asked):
        before = {file.path: file.day for file in world.lake.table("metrics/subscriptions").files}
        record_metrics(world.lake, world.path, ms(moment))
        if moment in (NOW, at("16 00:10")):  # the next snapshot thins the day before
            update_reports(world.lake)
        files = world.lake.table("metrics/subscriptions").files
        assert world.moments() == kept_of(asked[: index + 1], moment)
        touched = {day for path, day in before.items() if path not in {file.path for file in files}}
        assert touched <= {str(moment.date()), str((asked[index - 1] - 2 * HOUR).date())}
        if index and moment.replace(minute=0) == asked[index - 1].replace(minute=0):
            assert not touched, "within an hour a snapshot is appended"
    update_reports(world.lake)
    assert Counter(file.day for file in files) == {"2026-11-15": 1, "2026-11-16": 1, "2026-11-20": 1}
    assert [row["observed_at"] for row in world.gold("lag")] == world.moments()

    end = at("16 02:00") + timedelta(days=KEPT_DAYS)
    world.run(end)
    assert world.moments() == [each for each in kept_of(asked, end) if each.date() > TODAY] + [end]
    assert [row["observed_at"] for row in world.gold("lag")] == world.moments()
    world.run(end + timedelta(days=2 * KEPT_DAYS))
    assert world.moments() == [end + timedelta(days=2 * KEPT_DAYS)], "also if no run came for months"


def test_of_topics_each_day_has_its_last_snapshot(world: World) -> None:
    for n, moment in enumerate((NOW, NOW + timedelta(minutes=5), NOW + 3 * HOUR, at("16 01:00"), at("16 02:00"))):
        world.log.publish_many([(f"t{n}", n)])
        world.run(moment)
        assert world.gold("forecast")[0]["messages"] == n + 1
    assert Counter(world.moments("metrics/topics")) == {NOW + 3 * HOUR: 3, at("16 02:00"): 5}
    world.run(at("16 00:00") + timedelta(days=KEPT_DAYS))
    assert {each.date() for each in world.moments("metrics/topics")} == {
        date(2026, 11, 16),
        date(2026, 11, 16) + timedelta(days=KEPT_DAYS),
    }


def kept_of(moments: list[datetime], now: datetime) -> list[datetime]:
    in_full = now.replace(minute=0) - HOUR
    last = {each.replace(minute=0): each for each in moments}
    return [each for each in moments if each >= in_full or last[each.replace(minute=0)] == each]


def test_counts_of_an_hour_are_merged_and_outlive_the_log(world: World) -> None:
    def count(n: int) -> None:
        """So many are delivered and acked; the log saves its counts when it is closed."""
        with headwater.open(world.path, clock=world.clock, maintenance_interval=None, durability="relaxed") as log:
            log.publish_many([("t", each) for each in range(n)])
            with log.subscribe("s", ">") as subscription:
                for message in subscription.fetch(n):
                    message.ack()

    count(3)
    world.run()
    count(4)
    world.run(NOW + timedelta(minutes=5))
    hour = NOW.replace(minute=0)
    assert {(row["hour"], row["stage"], row["count"]) for row in world.gold("latency")} == {
        (hour, "deliver", 7),
        (hour, "ack", 7),
    }
    world.log.delete_subscription("s")
    assert "metrics/timings" not in world.run(NOW + timedelta(minutes=10))
    world.clock.advance((ms(NOW + timedelta(days=1)) - world.clock.now_ms()) / 1000)
    count(1)
    world.run()
    assert sorted((row["day"], row["count"]) for row in world.gold("latency") if row["stage"] == "ack") == [
        (TODAY, 7),
        (TODAY + timedelta(days=1), 1),
    ]
    world.run(NOW + timedelta(days=KEPT_DAYS + 1))
    assert {row["day"] for row in world.gold("latency")} == {TODAY + timedelta(days=1)}


def test_dead_letters_are_appended_by_id_and_stay(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(logs._STORED, "dead_letters", (("id",), 2))

    def reject(n: int) -> None:
        world.log.publish_many([("t", {"ü": each}) for each in range(n)])
        with world.log.subscribe("s", ">") as subscription:
            for message in subscription.fetch(n):
                message.reject(f"{message.data['ü']} is wrong")

    def letters() -> list[int]:
        return sorted(world.lake.table("metrics/dead_letters").read()["id"].to_pylist())

    reject(5)
    world.run()
    assert letters() == [1, 2, 3, 4, 5]
    assert world.lake.table("metrics/dead_letters").transaction() == 5
    world.log.dead_letters.purge()
    reject(1)
    later = NOW + timedelta(days=2 * KEPT_DAYS)
    assert {"metrics/dead_letters", "gold/dead_letters"} < world.run(later)
    assert letters() == [1, 2, 3, 4, 5, 6]
    assert [(row["error_signature"], row["letters"]) for row in world.gold("dead_letters")] == [("<n> is wrong", 6)]
    row = world.lake.table("metrics/dead_letters").read().to_pylist()[0]
    assert (row["topic"], row["reason"], '"ü":0' in row["message"]) == ("t", "rejected", True)


def test_a_report_that_was_left_behind_catches_up(world: World) -> None:
    world.log.subscribe("s", ">").close()
    world.run()
    for moment in (
        at("15 23:00"),
        at("16 05:00"),
        at("18 05:00"),
        at("19 05:00"),
    ):  # each run is killed before it reports
        record_metrics(world.lake, world.path, ms(moment))
    update_reports(world.lake)
    assert [row["observed_at"] for row in world.gold("lag")] == world.moments()


def test_the_pace_is_that_of_the_last_week_of_all_data(world: World) -> None:
    rows = [
        (date(2025, 1, 1), datetime(2025, 1, 1, tzinfo=UTC), "t", None, 7_000, 7_000),
        (date(2026, 11, 12), at("12 05:00"), "t", None, 7, 70),
        (TODAY, at("15 09:00"), "t", None, 14, 140),
    ]
    world.lake.table("gold/volume").replace(table("volume", VOLUME, rows), transaction=1)
    world.run()
    assert [(row["messages_per_day"], row["bytes_per_day"]) for row in world.gold("forecast")] == [(3.0, 30.0)]
