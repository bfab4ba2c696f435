"""Made-up gold tables: rich ones of two weeks, and one row of everything. No Spark: a page is made of plain rows."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from datetime import UTC, date, datetime, timedelta
from typing import Any

import pytest

from headwater.pipeline.page import Report

MADE_AT = datetime(2025, 11, 15, 11, 20, tzinfo=UTC)
START = datetime(2025, 11, 1, tzinfo=UTC)
HOURS = 24 * 14 + 11

TOPICS = {
    "orders.created": 900, "orders.paid": 760, "orders.shipped": 610, "inventory.reserved": 540, "mail.sent": 420,
    "payments.captured": 380, "audit.login": 260, "search.indexed": 190, "carts.abandoned": 120, "reviews.posted": 60,
    "refunds.asked": 22, "newsletter.joined": 9,
}  # fmt: skip
SUBSCRIPTIONS = {"billing": 6.0, "mailer": 40.0, "search-index": 15.0, "warehouse.eu-west": 220.0, "fraud-check": 4.0}
ENTITIES = ["shop", "billing", "warehouse", "mailer", "search", "crm", "fraud", "partner-api", "mobile-app", None]
ERRORS = [
    ("mailer", "max_attempts", "mail.send", "ConnectionRefusedError: smtp #:#", 7, 1.1),
    ("billing", "rejected", "billing.charge", "CardDeclined: card ending #", 12, 0.8),
    ("warehouse.eu-west", "max_attempts", "stock.reserve", "KeyError: 'sku-#'", 3, 1.3),
    ("search-index", "expired", None, None, 1, 1.0),
    ("fraud-check", "crashed", "fraud.score", "the process died while handling", 1, 0.4),
]


def daily(at: datetime) -> float:
    """Quiet nights, quieter weekends."""
    wave = 0.55 + 0.45 * math.sin((at.hour - 8) / 24 * 2 * math.pi)
    return wave * (0.6 if at.weekday() >= 5 else 1.0)


def volume(luck: random.Random) -> list[dict[str, Any]]:
    rows = []
    for hour in range(HOURS):
        at = START + timedelta(hours=hour)
        for topic, pace in TOPICS.items():
            messages = round(pace * daily(at) * luck.uniform(0.8, 1.2) * (1 + hour / HOURS / 2))
            if messages:
                kind = topic.rsplit(".", 1)[-1]
                rows.append({"day": at.date(), "hour": at, "topic": topic, "type": kind, "messages": messages,
                             "bytes": messages * luck.randint(180, 420)})  # fmt: skip
    return rows


def latency(luck: random.Random) -> list[dict[str, Any]]:
    rows = []
    for subscription, usual in SUBSCRIPTIONS.items():
        for hour in range(HOURS):
            at = START + timedelta(hours=hour)
            slow = 25.0 if subscription == "mailer" and 150 < hour < 170 else 1.0
            for stage, factor in (("deliver", 1.0), ("ack", 4.5)):
                half = usual * factor * slow * luck.uniform(0.7, 1.4) * (0.6 + daily(at))
                rows.append({"subscription": subscription, "hour": at, "stage": stage, "count": luck.randint(50, 900),
                             "p50_ms": half, "p90_ms": half * 3.1, "p99_ms": half * luck.uniform(8, 30),
                             "max_ms": half * 60})  # fmt: skip
    return rows


def lag(luck: random.Random) -> list[dict[str, Any]]:
    rows = []
    for subscription, usual in SUBSCRIPTIONS.items():
        behind, position = usual * 10, 0
        for look in range(HOURS):
            at = START + timedelta(hours=look, minutes=4)
            storm = 900 if subscription == "mailer" and 150 < look < 170 else -700
            behind = max(usual * luck.uniform(2, 9), behind + storm)
            position += 4000
            rows.append({"subscription": subscription, "observed_at": at, "lag": round(behind), "position": position,
                         "in_flight": luck.randint(0, 64), "waiting": luck.randint(0, 9),
                         "oldest_unacked_ms": round(behind * 35)})  # fmt: skip
    return rows


def dead_letters(luck: random.Random) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for subscription, reason, handler, signature, pace, growth in ERRORS:
        for back in range(13, 3 if growth < 0.5 else -1, -1):
            day = (START + timedelta(days=14 - back)).date()
            letters = round(pace * growth ** (13 - back) * luck.uniform(0.5, 1.5) ** 2)
            if letters:
                noon = datetime(day.year, day.month, day.day, 12, tzinfo=UTC)
                rows.append({"day": day, "subscription": subscription, "reason": reason, "handler": handler,
                             "error_signature": signature, "letters": letters, "first_at": noon,
                             "last_at": noon + timedelta(hours=luck.randint(0, 9)),
                             "example_error": f"{signature} (at step 7)" if signature else None,
                             "trend": letters - pace})  # fmt: skip
    return rows


def retry_storms() -> list[dict[str, Any]]:
    told = [("mailer", 150, 20, 310, 2900), ("warehouse.eu-west", 60, 3, 80, 300), ("mailer", 240, 2, 40, 120),
            ("billing", 300, 1, 0, 75)]  # fmt: skip
    return [
        {"subscription": subscription, "from_at": START + timedelta(hours=hour),
         "to_at": START + timedelta(hours=hour + hours), "acked": acked, "redelivered": redelivered,
         "ratio": redelivered / acked if acked else None}
        for subscription, hour, hours, acked, redelivered in told
    ]  # fmt: skip


def traffic(luck: random.Random) -> list[dict[str, Any]]:
    return [
        {"day": (START + timedelta(days=day)).date(), "from": sender, "to": receiver,
         "messages": round(luck.paretovariate(0.6)), "bytes": 1000}
        for day in (0, 7) for sender in ENTITIES for receiver in ENTITIES
        if sender != receiver and luck.random() < 0.7
    ]  # fmt: skip


def forecast() -> list[dict[str, Any]]:
    told: list[tuple[str, int, int, float, str | None, int | None, float | None]] = [
        (">", 812_441, 241_000_000, 60_000.0, "max_bytes", 1_000_000_000, 41.6),
        ("orders.>", 402_000, 122_000_000, 31_000.0, "max_count", 500_000, 3.2),
        ("audit.>", 51_000, 9_000_000, 4_000.0, "max_age", 7_776_000_000, 76.0),
        ("mail.*", 77_000, 22_000_000, 6_000.0, None, None, None),
    ]
    return [
        {"pattern": pattern, "messages": messages, "bytes": held, "messages_per_day": pace,
         "bytes_per_day": pace * 300, "limit_kind": kind, "limit": limit, "days_left": left,
         "bytes_in_30_days": held + pace * 300 * 30}
        for pattern, messages, held, pace, kind, limit, left in told
    ]  # fmt: skip


def replication(luck: random.Random) -> list[dict[str, Any]]:
    return [
        {"replica": replica, "day": (START + timedelta(days=day)).date(), "pushes": luck.randint(1, 40),
         "bytes": luck.randint(10**5, 10**7), "last_version": 30 * day + 3,
         "last_at": START + timedelta(days=day, hours=20)}
        for replica in ("laptop", "backup.eu", "analytics") for day in range(15)
    ]  # fmt: skip


def whole_audit() -> dict[str, Any]:
    return {
        "whole": True, "checked_at": "2025-11-15T11:02:00+00:00", "log": "events.db", "lake": "./lake",
        "high_water": 831_200, "last_seq": 831_950, "rows": 812_441, "seconds": 3.41, "not_yet": 750,
        "compared": 812_441,
        "checks": [
            {"name": "each seq once", "ok": True, "what": "812,441 rows hold 812,441 different seqs"},
            {"name": "gaps are explained", "ok": True, "what": "2 gaps, each recorded by retention"},
            {"name": "checksums agree", "ok": True, "what": "64 ranges have the log's checksums"},
            {"name": "files are as sealed", "ok": True, "what": "128 files with the manifest's hashes"},
        ],
        "gaps": [{"from": 1, "to": 18_000, "why": "retention"}, {"from": 40_001, "to": 40_759, "why": "retention"}],
        "missing": [], "repeated": [], "different": [], "files_missing": [], "files_changed": [],
    }  # fmt: skip


def broken_audit() -> dict[str, Any]:
    broken = whole_audit()
    broken["whole"] = False
    broken["checks"][0] |= {"ok": False, "what": "1,203 seqs are missing and 40 are there twice"}
    broken["checks"][2] |= {"ok": False, "what": "1 of 64 ranges has another checksum than the log"}
    broken["missing"] = [[500_000, 501_199], [600_001, 600_003]]
    broken["repeated"] = [[700_010, 700_049]]
    broken["different"] = [[777_777, 777_777]]
    broken["files_missing"] = ["bronze/messages/day=2025-11-07/topic_prefix=orders/part-0007.parquet"]
    broken["files_changed"] = ["bronze/messages/day=2025-11-09/topic_prefix=mail/part-0031.parquet"]
    return broken


def make_report(tables: dict[str, list[dict[str, Any]]], audit: dict[str, Any] | None = None, **more: Any) -> Report:
    facts: dict[str, Any] = {
        "lake": "./lake", "log": "events.db", "made_at": MADE_AT, "high_water": 831_950, "messages": 813_191,
        "bytes": 241_400_000, "quarantined": 0, "notes": [],
    } | more  # fmt: skip
    return Report(tables=tables, audit=audit, **facts)


def rich_tables() -> dict[str, list[dict[str, Any]]]:
    luck = random.Random(4)
    return {
        "volume": volume(luck), "latency": latency(luck), "lag": lag(luck), "dead_letters": dead_letters(luck),
        "retry_storms": retry_storms(), "traffic": traffic(luck), "forecast": forecast(),
        "replication": replication(luck),
    }  # fmt: skip


def one_row_each(name: str = "orders.created", said: str = "ValueError: no") -> dict[str, list[dict[str, Any]]]:
    """One row of every table, with `name` wherever a name can stand and `said` wherever an error can."""
    at, day = datetime(2025, 11, 14, 9, tzinfo=UTC), date(2025, 11, 14)
    return {
        "volume": [{"day": day, "hour": at, "topic": name, "type": name, "messages": 1, "bytes": 190}],
        "latency": [{"subscription": name, "hour": at, "stage": stage, "count": 1, "p50_ms": 3.0, "p90_ms": 3.0,
                     "p99_ms": 3.0, "max_ms": 3.0} for stage in ("deliver", "ack")],
        "lag": [{"subscription": name, "observed_at": at, "lag": 1, "position": 1, "in_flight": 0, "waiting": 0,
                 "oldest_unacked_ms": None}],
        "dead_letters": [{"day": day, "subscription": name, "reason": name, "handler": name, "error_signature": name,
                          "letters": 1, "first_at": at, "last_at": at, "example_error": said, "trend": 1.0}],
        "retry_storms": [{"subscription": name, "from_at": at, "to_at": at, "acked": 0, "redelivered": 5,
                          "ratio": None}],
        "traffic": [{"day": day, "from": name, "to": name, "messages": 1, "bytes": 190}],
        "forecast": [{"pattern": name, "messages": 1, "bytes": 190, "messages_per_day": 1.0, "bytes_per_day": 190.0,
                      "limit_kind": None, "limit": None, "days_left": None, "bytes_in_30_days": 5890.0}],
        "replication": [{"replica": name, "day": day, "pushes": 1, "bytes": 4096, "last_version": 1, "last_at": at}],
    }  # fmt: skip


@pytest.fixture
def report_of() -> Callable[..., Report]:
    return make_report


@pytest.fixture
def one_row() -> Callable[..., dict[str, list[dict[str, Any]]]]:
    return one_row_each


@pytest.fixture(scope="session")
def rich() -> dict[str, list[dict[str, Any]]]:
    return rich_tables()


@pytest.fixture
def whole_document() -> dict[str, Any]:
    return whole_audit()


@pytest.fixture
def broken_document() -> dict[str, Any]:
    return broken_audit()
