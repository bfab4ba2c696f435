"""Gold on hand-made inputs: volume, traffic, latency, lag, dead letters, retry storms, replication."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, date, datetime
from typing import Any

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from headwater.pipeline.datasets import dead_letters as dead_letters_dataset
from headwater.pipeline.datasets import lag as lag_dataset
from headwater.pipeline.datasets import latency as latency_dataset
from headwater.pipeline.datasets import replication as replication_dataset
from headwater.pipeline.datasets import retry_storms as retry_storms_dataset
from headwater.pipeline.datasets import traffic as traffic_dataset
from headwater.pipeline.datasets import volume as volume_dataset
from headwater.pipeline.datasets.dead_letters import dead_letters
from headwater.pipeline.datasets.error_signature import SIGNATURE_CHARS_MAX, error_signature
from headwater.pipeline.datasets.lag import lag
from headwater.pipeline.datasets.latency import latency
from headwater.pipeline.datasets.replication import replication
from headwater.pipeline.datasets.retry_storms import retry_storms
from headwater.pipeline.datasets.traffic import traffic
from headwater.pipeline.datasets.volume import volume

Frame = Callable[..., DataFrame]
Check = Callable[..., None]

TODAY, LONG_AGO = date(2026, 11, 15), date(2025, 1, 1)
LETTERS = "id long, subscription string, reason string, handler string, error string, died_at timestamp"
TIMINGS = "observed_at timestamp, subscription string, hour timestamp, stage string, bucket long, count long"
SUBSCRIPTIONS = (
    "observed_at timestamp, id string, position long, lag long, in_flight long, waiting long, oldest_unacked_ms long, "
    "acked long, redelivered long, created_at timestamp"
)


def at(text: str) -> datetime:
    return datetime.fromisoformat(f"2026-11-{text}").replace(tzinfo=UTC)


def test_volume_and_traffic_count_messages_and_bytes(messages: Frame, check: Check) -> None:
    late = datetime(2025, 1, 1, 23, 59, 59, 999000, tzinfo=UTC)
    found = messages(
        {"seq": 1, "type": "a", "size": 10, "from": "shop", "to": "bank"},
        {"seq": 2, "type": "a", "size": 5, "from": "shop", "published_at": at("15 10:59:59.999")},
        {"seq": 3, "type": None, "size": 1, "to": "bank"},
        {"seq": 4, "topic": "ü", "size": 7, "from": "shop", "to": "bank", "published_at": at("15 11:00")},
        {"seq": 5, "type": "a", "size": 2, "from": "shop", "to": "bank", "published_at": late},
        {"seq": 6, "topic": None, "size": None, "published_at": None, "from": "Shop"},
    )
    check(
        volume(found),
        volume_dataset.SCHEMA,
        [
            (TODAY, at("15 10:00"), "orders.new", "a", 2, 15),
            (TODAY, at("15 10:00"), "orders.new", None, 1, 1),
            (TODAY, at("15 11:00"), "ü", None, 1, 7),
            (LONG_AGO, datetime(2025, 1, 1, 23, tzinfo=UTC), "orders.new", "a", 1, 2),
            (None, None, None, None, 1, 0),
        ],
    )
    check(
        traffic(found),
        traffic_dataset.SCHEMA,
        [
            (TODAY, "shop", "bank", 2, 17),
            (TODAY, "shop", None, 1, 5),
            (TODAY, None, "bank", 1, 1),
            (LONG_AGO, "shop", "bank", 1, 2),
            (None, "Shop", None, 1, 0),
        ],
    )


def test_latency_has_percentiles_of_the_newest_counts(frame: Frame, check: Check) -> None:
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
    check(
        latency(frame(TIMINGS, rows)),
        latency_dataset.SCHEMA,
        [
            ("s", hour, "deliver", 100, 0.0, 2.0, 4.0, 1024.0),
            ("s", hour, "ack", 3, 2.0**1.25, 2.0**1.75, 2.0**1.75, 2.0**1.75),
            ("one", hour, "ack", 1, 2.0**0.25, 2.0**0.25, 2.0**0.25, 2.0**0.25),
        ],
    )


def subscription(when: str, id: str, acked: int | None, redelivered: int | None, created: str = "01 00:00") -> Any:
    return (at(when), id, 5, 3, 2, None, 900, acked, redelivered, at(created))


def test_lag_is_what_was_observed_once(frame: Frame, check: Check) -> None:
    rows = [
        subscription("15 10:00", "s", 1, 0),
        subscription("15 11:00", "s", 1, 0),
        subscription("15 11:00", "ü", 1, 0),
    ]
    check(
        lag(frame(SUBSCRIPTIONS, [*rows, rows[0]])),
        lag_dataset.SCHEMA,
        [
            ("s", at("15 10:00"), 3, 5, 2, None, 900),
            ("s", at("15 11:00"), 3, 5, 2, None, 900),
            ("ü", at("15 11:00"), 3, 5, 2, None, 900),
        ],
    )


def test_a_storm_is_an_interval_with_mostly_redeliveries(frame: Frame, check: Check) -> None:
    rows = [
        subscription("15 10:00", "storm", 100, 50),  # the first look: nobody knows since when
        subscription("15 10:10", "storm", 110, 60),  # exactly ten, exactly half
        subscription("15 10:20", "storm", 110, 69),  # too few
        subscription("15 10:30", "storm", 121, 79),  # less than half
        subscription("15 10:40", "storm", 121, 99),  # nothing acked at all
        subscription("15 10:50", "storm", 121, 99),  # nothing at all
        subscription("15 10:00", "anew", 1000, 500),
        subscription("15 10:10", "anew", 3, 30, created="15 10:05"),  # made anew: counts from zero
        subscription("15 10:20", "anew", 2000, 600, created="15 10:15"),  # again, and higher than before
        subscription("15 10:00", "reset", 1000, 500),
        subscription("15 10:10", "reset", 0, 0),
        subscription("15 10:20", "reset", 0, 15),
        subscription("15 10:00", "unknown", None, None),
        subscription("15 10:10", "unknown", None, None),
    ]
    check(
        retry_storms(frame(SUBSCRIPTIONS, [*reversed(rows), rows[1]])),
        retry_storms_dataset.SCHEMA,
        [
            ("storm", at("15 10:00"), at("15 10:10"), 10, 10, 0.5),
            ("storm", at("15 10:30"), at("15 10:40"), 0, 20, 1.0),
            ("anew", at("15 10:00"), at("15 10:10"), 3, 30, 30 / 33),
            ("reset", at("15 10:10"), at("15 10:20"), 0, 15, 1.0),
        ],
    )


def test_dead_letters_are_counted_by_what_their_errors_have_in_common(frame: Frame, check: Check) -> None:
    key = ("s", "max_attempts", "handle")
    rows = [
        (1, *key, "order 17 is gone", at("15 10:00")),
        (2, *key, "order 4 is gone", at("15 12:00")),
        (3, *key, "order 5 is gone", at("15 11:00")),
        (3, *key, "order 5 was redriven", at("14 11:00")),  # an earlier reading of the same letter
        (4, *key, "order 1 is gone", at("14 09:00")),
        *((number, *key, "order 1 is gone", at("08 09:00")) for number in range(10, 16)),
        (20, *key, "order 1 is gone", at("07 23:59")),  # eight days before the 15th
        (21, "s", "rejected", None, None, at("15 10:00")),
        (22, "s", "rejected", None, None, at("15 10:30")),
    ]
    gone = (*key, "order <n> is gone")
    check(
        dead_letters(frame(LETTERS, rows)),
        dead_letters_dataset.SCHEMA,
        [
            (TODAY, *gone, 3, at("15 10:00"), at("15 12:00"), "order 4 is gone", 3 - 7 / 7),
            (date(2026, 11, 14), *gone, 1, at("14 09:00"), at("14 09:00"), "order 1 is gone", 1 - 7 / 7),
            (date(2026, 11, 8), *gone, 6, at("08 09:00"), at("08 09:00"), "order 1 is gone", 6 - 1 / 7),
            (date(2026, 11, 7), *gone, 1, at("07 23:59"), at("07 23:59"), "order 1 is gone", 1.0),
            (TODAY, "s", "rejected", None, None, 2, at("15 10:00"), at("15 10:30"), None, 2.0),
        ],
    )


def test_a_signature_keeps_what_stays_and_drops_what_changes(frame: Frame) -> None:
    signatures = {
        "timeout after 1.5 s, 3,000 rows, -2e-9": "timeout after <n> s, <n> rows, <n>",
        "no order 0190aaaa-bbbb-7ccc-8ddd-000000000001": "no order <uuid>",
        "object at 0x7F3e, commit 4f2a9c11b": "object at <hex>, commit <hex>",
        "can't read 'a b' or \"c 5\", won't": "can't read <text> or <text>, won't",
        "open /var/log/x.log: and/or ./y ~/z": "open <path>: and/or <path> <path>",
        "C:\\data\\x.db is locked": "<path> is locked",
        "GET https://h:80/a?b=1 failed": "GET <path> failed",
        "utf8 http2 line12 order-17 15ms": "utf8 http2 line12 order-<n> <n>ms",
        "größe 5\n\n  at  all ": "größe <n> at all",
        "deadbeef and 12345678": "deadbeef and <n>",
        "": "",
        "x" * 5_000: "x" * SIGNATURE_CHARS_MAX,
    }
    found = frame("error string", [(text,) for text in signatures]).select(
        "error", error_signature(F.col("error")).alias("found")
    )
    assert {row.error: row.found for row in found.collect()} == signatures


def test_replication_counts_versions_and_what_moved(messages: Frame, check: Check) -> None:
    topic = "replica.acme.orders.db"
    found = messages(
        {"seq": 1, "topic": topic, "data": '{"version": 7, "bytes": 4096, "size": 900000}'},
        {"seq": 2, "topic": topic, "data": '{"version": 8, "bytes": 100}', "published_at": at("15 12:00")},
        {"seq": 3, "topic": topic, "data": '{"version": 9, "bytes": "many"}'},
        {"seq": 4, "topic": topic, "data": '{"version": 3}', "published_at": at("14 01:00")},
        {"seq": 5, "topic": "replica.ü.x", "data": "12"},
        {"seq": 6, "topic": "replica.ü.y", "data": "{broken"},
        {"seq": 7, "topic": "replica.acme", "data": '{"version": 1}'},
        {"seq": 8, "topic": "my.replica.acme.orders", "data": '{"version": 1}'},
    )
    check(
        replication(found),
        replication_dataset.SCHEMA,
        [
            ("acme/orders.db", TODAY, 3, 4196, 9, at("15 12:00")),
            ("acme/orders.db", date(2026, 11, 14), 1, None, 3, at("14 01:00")),
            ("ü/x", TODAY, 1, None, None, at("15 10:30")),
            ("ü/y", TODAY, 1, None, None, at("15 10:30")),
        ],
    )


def test_nothing_in_nothing_out(messages: Frame, frame: Frame) -> None:
    none, subscriptions = messages(), frame(SUBSCRIPTIONS, [])
    tables = [
        volume(none),
        traffic(none),
        replication(none),
        latency(frame(TIMINGS, [])),
        lag(subscriptions),
        retry_storms(subscriptions),
        dead_letters(frame(LETTERS, [])),
    ]
    assert [table.columns[0] for table in tables if table.collect()] == []
