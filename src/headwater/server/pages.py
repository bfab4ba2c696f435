"""Plain HTTP of the server: Prometheus metrics, health and readiness, and the files of pages for browsers."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from headwater.broker.background import SOURCE
from headwater.broker.deliveries import Claimed
from headwater.broker.flow import run_async
from headwater.broker.statistics import LogStatistics
from headwater.errors import HeadwaterError
from headwater.server.auth import Grant
from headwater.server.mount import HttpRequest, HttpResponse, path_of, text_response
from headwater.settings import ServerSettings

if TYPE_CHECKING:
    from headwater.server.connection import ServerContext

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
SUBSCRIPTIONS_SHOWN_MAX = 1_000  # series of their own; more would make a scrape useless
_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_WAITS = (*_SECONDS, 30.0, 60.0, 300.0, 3600.0)
_PUBLISHES = frozenset({"rpc.publish", "rpc.publish.batch"})
Metric = TypeVar("Metric", Counter, Gauge, Histogram)
PROBE_SECONDS_MAX = 5.0
SCRAPE_SECONDS_MAX = 10.0
CACHED_S = 1.0  # how long the answer to a scrape or to a readiness probe is reused
Files = Mapping[str, tuple[str, bytes]]  # by path: content type and content

# A page may use files of its own origin only: no foreign and no inline scripts, no frame around it.
FILE_HEADERS = (
    (
        "Content-Security-Policy",
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    ),
    ("X-Frame-Options", "DENY"),
    ("Referrer-Policy", "no-referrer"),
    ("Cross-Origin-Opener-Policy", "same-origin"),
    ("Cross-Origin-Resource-Policy", "same-origin"),
    ("Cache-Control", "no-cache"),
    ("Vary", "Accept"),
)


class Metrics:
    """All metrics of the server, and those of its mounts."""

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
        self._calls_of = cache(self._calls.labels)
        for name in _PUBLISHES:  # there from the start, with 0
            self._calls_of(name, "done")
        self._duration_of = cache(histogram("request_duration", "Time to answer a call.", _SECONDS, "method").labels)
        self._published = counter("published_messages", "Messages stored.")
        self._duplicates = counter("duplicate_messages", "Duplicate messages, which were not stored again.")
        self._publish_duration = histogram("publish_duration", "Time from a publish frame to its commit.", _SECONDS)
        self._delivered = counter("delivered_messages", "Messages delivered to durable subscriptions.")
        self._redelivered = counter("redelivered_messages", "Redeliveries among the delivered messages.")
        self._delivery_delay = histogram("delivery_delay", "Time from a publish to the first delivery.", _WAITS)
        self._settled_by = cache(counter("settled_messages", "Messages settled by clients.", "how").labels)
        self._live = counter("live_messages", "Messages sent to live subscriptions.")
        self._live_dropped = counter("live_messages_dropped", "Messages that a slow live subscription missed.")
        self._log_seq = gauge("log_last_seq", "The seq of the last message.")
        self._log_messages = gauge("log_messages", "Messages in the log.")
        self._log_bytes = gauge("log_data_bytes", "Size of the data of the messages in the log.")
        self._wal_bytes = gauge("log_wal_bytes", "Size of the write-ahead log.")
        self._lag = gauge("subscription_lag", "Messages not yet settled.", "subscription")
        self._oldest = gauge("subscription_oldest_seconds", "Age of the oldest unsettled message.", "subscription")
        self._in_flight = gauge("subscription_in_flight", "Messages delivered and not settled.", "subscription")
        self._dead = gauge("dead_letters", "Dead letters by reason.", "reason")
        # A Counter takes five calls and a lock to add one: these are added up here until the page is asked for.
        self._counted: defaultdict[Counter, int] = defaultdict(int)

    def count_calls(self, method: str, outcome: str, count: int) -> None:
        self._counted[self._calls_of(method, outcome)] += count

    def observe_call(self, method: str, done: bool, seconds: float) -> None:
        self._counted[self._calls_of(method, "done" if done else "refused")] += 1
        self._duration_of(method).observe(seconds)

    def observe_in_place(self, method: str, calls: int, seconds: float) -> None:
        """Calls of one method and one transaction."""
        if method not in _PUBLISHES:
            self.observe_call(method, True, seconds)
        else:
            self._counted[self._calls_of(method, "done")] += calls
            self._publish_duration.observe(seconds)

    def count_published(self, messages: int, duplicates: int) -> None:
        self._counted[self._published] += messages - duplicates
        if duplicates:
            self._duplicates.inc(duplicates)

    def observe_delivered(self, found: Sequence[Claimed], now_ms: int) -> None:
        again = len([claimed for claimed in found if claimed.attempt > 1])
        self._counted[self._delivered] += len(found)
        if again:
            self._redelivered.inc(again)
        if found and not again:  # the oldest message stands for its batch, so that a batch is one observation
            self._delivery_delay.observe(max(0, now_ms - found[0].message.published_ms) / 1000)

    def count_settled(self, how: str, count: int) -> None:
        self._counted[self._settled_by(how)] += count

    def count_live(self, sent: int, dropped: int) -> None:
        self._live.inc(sent)
        self._live_dropped.inc(dropped)

    def note_log(self, log: LogStatistics, letters_by_reason: Mapping[str, int], wal_bytes: int) -> None:
        """Set the gauges of the log for a scrape, with SUBSCRIPTIONS_SHOWN_MAX subscriptions at most."""
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

    # --- for mounts: names come without the server's prefix and without a suffix (`_total`, `_seconds`) ---------------

    def counter(self, name: str, text: str) -> Callable[[float], None]:
        return self._lend(Counter, f"headwater_{name}", text).inc

    def counter_by(self, name: str, text: str, label: str, values: Sequence[str]) -> Callable[[str], None]:
        """One counter for each of these values, and no others: each is a series for its scraper."""
        family = self._lend(Counter, f"headwater_{name}", text, labelnames=(label,))
        by_value = {value: family.labels(value) for value in values}  # there from the start, with 0
        return lambda value: by_value[value].inc()

    def gauge(self, name: str, text: str, read: Callable[[], float]) -> None:
        """`read` is called at each scrape, on the event loop: it must not block."""
        self._lend(Gauge, f"headwater_{name}", text).set_function(read)

    def duration(self, name: str, text: str) -> Callable[[float], None]:
        """A histogram of seconds."""
        return self._lend(Histogram, f"headwater_{name}_seconds", text, buckets=_WAITS).observe

    def _lend(self, kind: type[Metric], name: str, text: str, **options: Any) -> Metric:
        """A metric continues when its mount is started again."""
        if name not in self._lent:
            self._lent[name] = kind(name, text, registry=self._registry, **options)
        lent = self._lent[name]
        assert isinstance(lent, kind)
        return lent

    def add_up(self) -> None:
        """Add what was counted to the metrics, on the event loop, which counts: before `text`, which takes longer and
        may run on a thread."""
        for counter, count in self._counted.items():
            counter.inc(count)
        self._counted.clear()

    def text(self) -> bytes:
        return generate_latest(self._registry)


class _Cached:
    """An expensive answer: computed once at a time, for all requests meanwhile and shortly after."""

    def __init__(self, compute: Callable[[], Coroutine[Any, Any, HttpResponse]]) -> None:
        self._compute = compute
        self._computing: asyncio.Task[HttpResponse] | None = None
        self._fresh_until_s = 0.0

    async def get(self) -> HttpResponse:
        loop = asyncio.get_running_loop()
        if self._computing is None or (self._computing.done() and loop.time() >= self._fresh_until_s):
            self._computing = loop.create_task(self._computed(loop))
        return await asyncio.shield(self._computing)  # a client that disconnects does not cancel it for others

    async def _computed(self, loop: asyncio.AbstractEventLoop) -> HttpResponse:
        try:
            return await self._compute()
        finally:
            self._fresh_until_s = loop.time() + CACHED_S


class Pages:
    def __init__(self, context: ServerContext, settings: ServerSettings, files: Files) -> None:
        self._context = context
        # By default, metrics need a token where clients need one.
        need = settings.metrics_need_token
        self._metrics_need_token = context.needs_token if need is None else need
        self._files = files
        self.ready = False
        self._scrape = _Cached(self._metrics)
        self._proof = _Cached(self._prove_writable)

    async def answer(self, request: HttpRequest, grant: Grant | None) -> HttpResponse:
        path = path_of(request.target)
        pages = {"/": self._root, "/metrics": self._scrape.get, "/healthz": self._health, "/readyz": self._readiness}
        page, file = pages.get(path), self._files.get(path)
        if page is None and file is None:
            return text_response(404, f"there is nothing at {path[:200]}; try {', '.join(pages)}, or JSON-RPC at /rpc")
        if request.method not in ("GET", "HEAD"):
            return text_response(405, "GET or HEAD")
        # The root answers programs with a line of text, and browsers, which accept HTML, with the console.
        if file is not None and (page is None or "text/html" in request.headers.get("accept", "")):
            return HttpResponse(200, *file, FILE_HEADERS)
        assert page is not None
        if path == "/metrics" and self._metrics_need_token and not (grant and grant.scopes.may_watch):
            return text_response(
                401, "a token with the admin right is needed, or manage of >", ("WWW-Authenticate", "Bearer")
            )
        return await page()

    async def _root(self) -> HttpResponse:
        return text_response(
            200, "This is a Headwater server. JSON-RPC over WebSocket is at /rpc, metrics at /metrics."
        )

    async def _metrics(self) -> HttpResponse:
        core, metrics = self._context.core, self._context.metrics
        SOURCE.set(self)
        try:
            async with asyncio.timeout(SCRAPE_SECONDS_MAX):
                log = await run_async(core.statistics(SUBSCRIPTIONS_SHOWN_MAX))
                letters = await run_async(core.dead_letters.count_by_reason())
        except (HeadwaterError, TimeoutError) as exc:
            why = exc.why if isinstance(exc, HeadwaterError) else f"not counted within {SCRAPE_SECONDS_MAX:g} s"
            return text_response(503, why)
        metrics.note_log(log, letters, core.engine.store.journal_bytes())
        metrics.add_up()
        return HttpResponse(200, CONTENT_TYPE, await asyncio.to_thread(metrics.text))

    async def _health(self) -> HttpResponse:
        """Alive: the process answers. Whether the log can be written is a matter of readiness."""
        return _json(200, {"status": "alive", "version": self._context.version})

    async def _readiness(self) -> HttpResponse:
        if not self.ready:
            return _json(503, {"status": "not ready", "why": "the server is starting or stopping"})
        return await self._proof.get()

    async def _prove_writable(self) -> HttpResponse:
        try:
            async with asyncio.timeout(PROBE_SECONDS_MAX):
                await run_async(self._context.core.prove_writable())
        except (HeadwaterError, TimeoutError) as exc:
            why = exc.why if isinstance(exc, HeadwaterError) else f"no write got through in {PROBE_SECONDS_MAX:g} s"
            return _json(503, {"status": "not ready", "why": why})
        return _json(200, {"status": "ready"})


def _json(status: int, value: dict[str, str]) -> HttpResponse:
    return HttpResponse(status, "application/json", msgspec.json.encode(value) + b"\n")
