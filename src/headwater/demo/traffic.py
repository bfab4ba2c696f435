"""Two weeks of a shop's traffic, for `headwater demo` and for tests of the report."""

from __future__ import annotations

import itertools
import math
import random
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any

import headwater
from headwater import ReceivedMessage, Subscription

MESSAGES = 20_000
DAYS = 14
HOUR_MS = 3_600_000
OBSERVED_HOURS = 12
RUNS = DAYS * 24 // OBSERVED_HOURS
SLICES = 2  # of an hour: so often the shop publishes and its services consume
REFUSED_EVERY = 150  # orders: then a card is declined
SENDERS = ("web", "shop.north", "shop.south")
TOPICS = (
    ("orders.new", "order_placed", "billing"),
    ("orders.paid", "order_paid", "mailer"),
    ("orders.shipped", "order_shipped", "mailer"),
    ("stock.low", "stock_low", "warehouse"),
    ("returns.asked", "return_asked", "billing"),
)


def publish_traffic(
    path: str, *, messages: int = MESSAGES, days: int = DAYS, on_run: Callable[[int], None] = lambda now_ms: None
) -> int:
    """Fill a new log with `days` of a shop's traffic up to now, published and consumed through the ordinary API by a
    clock that is moved through these days: quiet nights and weekends, one sale, one outage of the mail server.
    `on_run` is called with the clock's time where a run would have been. Returns how many messages were published.
    """
    dice = random.Random(17)
    end_ms = time.time_ns() // 1_000_000 // HOUR_MS * HOUR_MS
    hours = days * 24
    start_ms = end_ms - hours * HOUR_MS
    clock = headwater.ManualClock(start_ms)
    paces = [_pace(hour, hours, start_ms + hour * HOUR_MS) for hour in range(hours)]
    noon = next(hour for hour in range(hours * 4 // 7, hours) if (start_ms // HOUR_MS + hour) % 24 == 12)
    outage = range(noon, noon + 5)
    published, billed = 0, itertools.count(1)
    for first in range(0, hours, OBSERVED_HOURS):
        with (
            headwater.open(path, clock=clock, durability="relaxed", maintenance_interval=None, heartbeats=False) as log,
            log.subscribe("billing", "orders.new") as billing,
            log.subscribe("mailer", "orders.paid", max_attempts=3) as mailer,
            log.subscribe("analytics", ">") as analytics,
        ):
            log.retain("stock.>", max_count=messages // 20)
            for hour in range(first, min(first + OBSERVED_HOURS, hours)):
                for _ in range(SLICES):
                    count = round(messages * paces[hour] / sum(paces) / SLICES + dice.random() - 0.5)
                    log.publish_many([_message(dice, published + number) for number in range(count)])
                    published += count
                    clock.advance(dice.randint(2, 60) / 1000)
                    for message in _fetched(billing):
                        clock.advance(0.001)
                        if next(billed) % REFUSED_EVERY == 0:
                            message.reject(f"card {message.data['order']} was declined")
                        else:
                            message.ack()
                    clock.advance(dice.randint(20, 400) / 1000)
                    for message in _fetched(mailer):
                        if hour in outage:
                            message.nack(delay=60, error="ConnectionRefusedError: mail.example:25")
                        else:
                            message.ack()
                    if hour < hours - 48:  # then it stops, and falls behind
                        clock.advance(dice.randint(1_000, 9_000) / 1000)
                        for message in _fetched(analytics):
                            message.ack()
                    clock.advance((HOUR_MS // SLICES - 10_000) / 1000)
            log.run_maintenance()
        on_run(clock.now_ms())
    return published


def _message(dice: random.Random, number: int) -> tuple[str, dict[str, Any], dict[str, Any]]:
    topic, kind, to = dice.choices(TOPICS, weights=(8, 7, 4, 2, 1))[0]
    options = {"type": kind, "version": 1, "from_": dice.choices(SENDERS, weights=(5, 3, 1))[0], "to": to}
    return topic, {"order": number, "amount": round(dice.uniform(5, 500), 2)}, options


def _pace(hour: int, hours: int, at_ms: int) -> float:
    """How much happens in an hour, relative to the others."""
    at = datetime.fromtimestamp(at_ms / 1000, UTC)
    wave = 0.12 + max(0.0, math.sin((at.hour - 6) / 18 * math.pi)) if at.hour >= 6 else 0.08
    weekend = 0.55 if at.weekday() >= 5 else 1.0
    sale = 3.0 if hour in range(hours * 5 // 7, hours * 5 // 7 + 2) else 1.0
    return wave * weekend * sale * (1 + 0.4 * hour / hours)


def _fetched(subscription: Subscription) -> Iterator[ReceivedMessage]:
    while batch := subscription.fetch(500):
        yield from batch
