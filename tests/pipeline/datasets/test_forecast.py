"""The forecast, and patterns of topics in SQL."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from headwater.pipeline.datasets import forecast as forecast_dataset
from headwater.pipeline.datasets import volume as volume_dataset
from headwater.pipeline.datasets.forecast import forecast
from headwater.pipeline.datasets.topic_patterns import pattern_regex
from headwater.topics import Dialect, parse_pattern

Frame = Callable[..., DataFrame]
Check = Callable[..., None]

TOPICS = "observed_at timestamp, topic string, count long, bytes long"
RETENTION = (
    "observed_at timestamp, pattern string, dialect string, max_age_ms long, max_count long, max_bytes long, "
    "keep_unacked boolean"
)
NOW = datetime(2026, 11, 15, 10, 30, tzinfo=UTC)
EARLIER = NOW - timedelta(hours=1)
DAY_MS = 86_400_000


def test_limits_are_reached_at_the_pace_of_the_last_week(frame: Frame, check: Check) -> None:
    topics = frame(
        TOPICS,
        [
            (EARLIER, "orders.new", 1, 1),
            (EARLIER, "gone", 1000, 1000),
            (NOW, "orders.new", 600, 6_000),
            (NOW, "orders", 100, 4_000),
            (NOW, "quiet", 50, 500),
        ],
    )
    retention = frame(
        RETENTION,
        [
            (EARLIER, "gone.policy", "nats", None, 1, None, False),
            (NOW, "orders.>", "nats", None, 1_000, 10_000, False),
            (NOW, "orders.#", "amqp", 2 * DAY_MS, None, None, True),
            (NOW, "orders", "nats", 300 * DAY_MS, None, None, False),
            (NOW, "quiet", "nats", None, 40, None, False),
            (NOW, "nothing.here", "nats", None, None, 5, None),
            (NOW, ">", "nats", None, 500, None, None),
        ],
    )
    hour = datetime(2026, 11, 15, 10, tzinfo=UTC)
    week = hour - timedelta(days=7) + timedelta(hours=1)  # the first of the last 168 hours
    volume = frame(
        volume_dataset.SCHEMA,
        [
            (hour.date(), hour, "orders.new", "a", 300, 3_000),
            (week.date(), week, "orders.new", None, 400, 4_000),
            (week.date(), week, "orders", None, 70, 2_800),
            (week.date(), week - timedelta(hours=1), "orders.new", None, 99_999, 99_999),  # too long ago
            (datetime(2025, 1, 1).date(), datetime(2025, 1, 1, tzinfo=UTC), "quiet", None, 50, 500),
        ],
    )
    check(
        forecast(topics, retention, volume),
        forecast_dataset.SCHEMA,
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


def test_a_young_log_is_not_taken_for_a_fast_one(frame: Frame, check: Check) -> None:
    hour = datetime(2026, 11, 15, 10, tzinfo=UTC)
    volume = frame(volume_dataset.SCHEMA, [(hour.date(), hour, "ü", None, 24, 240)])
    found = forecast(frame(TOPICS, [(NOW, "ü", 24, 240)]), frame(RETENTION, []), volume)
    check(found, forecast_dataset.SCHEMA, [(">", 24, 240, 24.0, 240.0, None, None, None, 7_440.0)])


def test_an_empty_log_does_not_grow(frame: Frame, check: Check) -> None:
    found = forecast(frame(TOPICS, []), frame(RETENTION, []), frame(volume_dataset.SCHEMA, []))
    check(found, forecast_dataset.SCHEMA, [(">", 0, 0, 0.0, 0.0, None, None, None, 0.0)])


def test_patterns_mean_in_sql_what_they_mean_elsewhere(frame: Frame) -> None:
    nats = [">", "*", "*.*", "a", "a.b", "a.>", "a.*", "*.b", "a.*.c", "*.*.c", "a+.(b)", "a\\.b$", "ü.*", "[a].{b}"]
    amqp = [
        "#",
        "*",
        "a.#",
        "#.c",
        "a.#.c",
        "#.b.#",
        "*.#",
        "#.*",
        "a.*.#",
        "*.#.c",
        "a.b",
        "#.#",
        "a+.#",
        "x|y.#",
        "^",
    ]
    topics = ["a", "b", "c", "ab", "a.b", "a.c", "b.c", "a.b.c", "a.x.c", "a.b.b.c", "a.b.c.d", "aa.(b)", "a+.(b)"]
    topics += ["a\\.b$", "ü.x", "ü", "[a].{b}", "x", "x|y", "x|y.z", "^", "a-b", "\\Qa\\E.b", "A.b"]
    patterns: list[tuple[str, Dialect]] = [*((each, "nats") for each in nats), *((each, "amqp") for each in amqp)]
    meant = {
        (pattern, dialect, topic)
        for pattern, dialect in patterns
        for topic in topics
        if parse_pattern(pattern, dialect).matches(topic)
    }
    matches = F.rlike("topic", pattern_regex(F.col("pattern"), F.col("dialect")))
    found = (
        frame("pattern string, dialect string", patterns)
        .join(frame("topic string", [(each,) for each in topics]), how="cross")
        .where(matches)
    )
    assert {(row.pattern, row.dialect, row.topic) for row in found.collect()} == meant
    assert len(meant) > 100
