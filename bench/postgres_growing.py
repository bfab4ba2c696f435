"""A large log is as fast as a small one, and tables do not grow under load."""

from __future__ import annotations

import time
from typing import NamedTuple

import psycopg

import headwater
from common import MESSAGE, TOPIC, fill, median_columns, seconds
from growing import growth, publish_cost_us, resume_ms
from postgres_ground import Ground
from report import Line

SMALL = 10_000
REPEATS, BATCHES = 5, 20
MILLISECONDS_MAX = 30.0
CHURNED, ROUND, KEPT, QUARTERS = 2_000_000, 10_000, 50_000, 4
NAPTIMES = ("1min", "10s")  # the default, and the recommendation for a busy log
COUNTED_S = 1.0  # the server counts dead rows with some delay
TABLES = ("messages", "deliveries", "subscriptions")
SIZES_SQL = """
    SELECT relname, pg_table_size(relid), pg_indexes_size(relid), n_dead_tup, autovacuum_count
    FROM pg_stat_user_tables WHERE schemaname = 'headwater' AND relname = ANY(%s)
"""


def growing(ground: Ground) -> list[Line]:
    with ground.database() as small_url, ground.database() as large_url:
        fill(small_url, SMALL)
        filled_s = seconds(lambda: fill(large_url, ground.large))
        with headwater.open(small_url) as small, headwater.open(large_url) as large:
            large.run_maintenance()  # counts the topics
            rounds = [
                (
                    publish_cost_us(small, BATCHES),
                    publish_cost_us(large, BATCHES),
                    resume_ms(small, SMALL // 2),
                    resume_ms(large, ground.large // 2),
                    seconds(large.topics) * 1_000,
                )
                for _ in range(REPEATS)
            ]
    small_us, large_us, small_ms, large_ms, topics_ms = median_columns(rounds)
    return [
        Line(f"filled with {ground.large:,} in 10,000s, relaxed", f"{ground.large / filled_s:,.0f}/s", ""),
        growth(f"publish_many in a log of {ground.large:,}", large_us, f"in one of {SMALL:,}", small_us, 1.2),
        Line(
            "resume, fetch 1, ack, give back in it",
            f"{large_ms:.1f} ms",
            f"in the small one: {small_ms:.1f} ms",
            large_ms / small_ms,
            "milliseconds",
            large_ms < MILLISECONDS_MAX,
        ),
        Line(
            "messages and bytes by topic in it",
            f"{topics_ms:.1f} ms",
            "",
            None,
            "milliseconds",
            topics_ms < MILLISECONDS_MAX,
        ),
    ]


class Sizes(NamedTuple):
    table: int
    indexes: int
    dead: int
    vacuums: int


def churning(ground: Ground) -> list[Line]:
    """Publish, claim, ack and delete at full speed; the number of messages in the log stays the same."""
    lines = []
    for naptime in NAPTIMES:
        with ground.server.administration() as administration:
            administration.execute(f"ALTER SYSTEM SET autovacuum_naptime = '{naptime}'")
            administration.execute("SELECT pg_reload_conf()")
        with ground.database() as url, headwater.open(url) as log, psycopg.connect(url, autocommit=True) as looking:
            log.retain(">", max_count=KEPT)
            lines += churned_by(log, looking, naptime)
    return lines


def churned_by(log: headwater.Log, looking: psycopg.Connection, naptime: str) -> list[Line]:
    lines = []
    count = CHURNED // len(NAPTIMES) // QUARTERS
    with log.subscribe("worker", "orders.>", mode="shared") as subscription:
        before: int | None = None
        for quarter in range(1, QUARTERS + 1):
            rate = count / seconds(lambda: churn(log, subscription, count))
            sizes = sizes_of(looking)
            total = sum(each.table + each.indexes for each in sizes.values())
            lines.append(
                Line(
                    f"autovacuum every {naptime}, quarter {quarter}",
                    f"{rate:,.0f}/s",
                    "; ".join(f"{name} {reported(sizes[name])}" for name in TABLES),
                    None if before is None else total / before,
                )
            )
            before = total
    return lines


def churn(log: headwater.Log, subscription: headwater.Subscription, count: int) -> None:
    for _ in range(count // ROUND):
        log.publish_many([(TOPIC, MESSAGE)] * ROUND)
        while messages := subscription.fetch(1_000):
            subscription.ack_many(messages)
        log.run_maintenance()


def sizes_of(looking: psycopg.Connection) -> dict[str, Sizes]:
    time.sleep(COUNTED_S)
    return {name: Sizes(*numbers) for name, *numbers in looking.execute(SIZES_SQL, (list(TABLES),))}


def reported(now: Sizes) -> str:
    """The size with indexes, dead rows in thousands, and the number of vacuums."""
    return f"{(now.table + now.indexes) / 2**20:.1f} MiB {now.dead / 1_000:.0f}k dead {now.vacuums} vac."
