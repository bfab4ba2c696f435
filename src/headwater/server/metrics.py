"""What the server counts, for Prometheus."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from headwater.broker.claims import Claimed
from headwater.broker.statistics import LogStatistics

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
SUBSCRIPTIONS_SHOWN_MAX = 1_000  # series of their own; a scrape with more would help nobody
_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_WAITS = (*_SECONDS, 30.0, 60.0, 300.0, 3600.0)
Figure = TypeVar("Figure", Counter, Gauge, Histogram)


class Metrics:
    """A `Meter`, too."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        self._lent: dict[str, Counter | Gauge | Histogram] = {}

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"headwater_{name}", text, labels, registry=registry)

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(f"headwater_{name}", text, labels, registry=registry)

        def histogram(name: str, text: str, buckets: Sequence[float], *labels: str) -> Histogram:
            return Histogram(f"headwater_{name}_seconds", text, labels, buckets=buckets, registry=registry)

        self.connections = gauge("connections_active", "Clients connected now.")
        self.connected = counter("connections", "Clients that have connected.")
        self.refused = counter("connections_refused", "Connections refused.", "why")
        self._calls = counter("requests", "Calls by method and outcome.", "method", "outcome")
        self._duration = histogram("request_duration", "Time to answer a call.", _SECONDS, "method")
        self._published = counter("published_messages", "Messages stored.")
        self._repeated = counter("repeated_messages", "Messages sent again and recognised.")
        self._publish_duration = histogram("publish_duration", "From frame to commit.", _SECONDS)
        self._delivered = counter("delivered_messages", "Messages handed to durable subscriptions.")
        self._redelivered = counter("redelivered_messages", "Of these, not for the first time.")
        self._delivery_delay = histogram("delivery_delay", "From publish to first delivery.", _WAITS)
        self._settled = counter("settled_messages", "Messages settled by clients.", "how")
        self._live = counter("live_messages", "Messages sent to live subscriptions.")
        self._live_dropped = counter("live_messages_dropped", "Messages that a slow live subscription missed.")
        self._log_seq = gauge("log_last_seq", "The seq of the last message.")
        self._log_messages = gauge("log_messages", "Messages in the log.")
        self._log_bytes = gauge("log_data_bytes", "Their data in bytes.")
        self._wal_bytes = gauge("log_wal_bytes", "Size of the write-ahead log.")
        self._lag = gauge("subscription_lag", "Messages not yet settled.", "subscription")
        self._oldest = gauge("subscription_oldest_seconds", "Age of the oldest of them.", "subscription")
        self._in_flight = gauge("subscription_in_flight", "Delivered and not settled.", "subscription")
        self._dead = gauge("dead_letters", "Dead letters by reason.", "reason")

    def count_calls(self, method: str, outcome: str, count: int) -> None:
        self._calls.labels(method, outcome).inc(count)

    def observe_call(self, method: str, done: bool, seconds: float) -> None:
        self._calls.labels(method, "done" if done else "refused").inc()
        self._duration.labels(method).observe(seconds)

    def observe_publish(self, count: int, repeats: int, seconds: float) -> None:
        self._publish_duration.observe(seconds)
        self.count_published(count, repeats)

    def count_published(self, count: int, repeats: int) -> None:
        self._published.inc(count - repeats)
        self._repeated.inc(repeats)

    def observe_delivered(self, found: Sequence[Claimed], now_ms: int) -> None:
        again = sum(1 for claimed in found if claimed.attempt > 1)
        self._delivered.inc(len(found))
        self._redelivered.inc(again)
        if found and not again:  # the oldest of a batch stands for all: one look a batch, not one a message
            self._delivery_delay.observe(max(0, now_ms - found[0].message.published_ms) / 1000)

    def count_settled(self, how: str, count: int) -> None:
        self._settled.labels(how).inc(count)

    def count_live(self, sent: int, dropped: int) -> None:
        self._live.inc(sent)
        self._live_dropped.inc(dropped)

    def note_log(self, log: LogStatistics, letters_by_reason: Mapping[str, int], wal_bytes: int) -> None:
        """How the log is at the moment of a scrape, with SUBSCRIPTIONS_SHOWN_MAX subscriptions at most."""
        self._log_seq.set(log.last_seq)
        self._log_messages.set(log.messages)
        self._log_bytes.set(log.bytes)
        self._wal_bytes.set(wal_bytes)
        for family in (self._lag, self._oldest, self._in_flight, self._dead):
            family.clear()
        for info in log.subscriptions:
            self._lag.labels(info.id).set(info.lag)
            self._oldest.labels(info.id).set((info.oldest_unacked_ms or 0) / 1000)
            self._in_flight.labels(info.id).set(info.in_flight)
        for reason, count in letters_by_reason.items():
            self._dead.labels(reason).set(count)

    # --- for annexes ----------------------------------------------------------------------------------------------

    def counter(self, name: str, text: str) -> Callable[[float], None]:
        return self._lend(Counter, f"headwater_{name}", text).inc

    def counter_by(self, name: str, text: str, label: str, values: Sequence[str]) -> Callable[[str], None]:
        family = self._lend(Counter, f"headwater_{name}", text, labelnames=(label,))
        by_value = {value: family.labels(value) for value in values}  # there from the start, with 0
        return lambda value: by_value[value].inc()

    def gauge(self, name: str, text: str, read: Callable[[], float]) -> None:
        self._lend(Gauge, f"headwater_{name}", text).set_function(read)

    def duration(self, name: str, text: str) -> Callable[[float], None]:
        return self._lend(Histogram, f"headwater_{name}_seconds", text, buckets=_WAITS).observe

    def _lend(self, kind: type[Figure], name: str, text: str, **options: Any) -> Figure:
        """A figure goes on when its annex is started anew."""
        if name not in self._lent:
            self._lent[name] = kind(name, text, registry=self._registry, **options)
        lent = self._lent[name]
        assert isinstance(lent, kind)
        return lent

    def text(self) -> bytes:
        return generate_latest(self._registry)
