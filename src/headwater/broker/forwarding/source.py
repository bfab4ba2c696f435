"""A forwarder's end at the log: a subscription whose messages stay in its hands until they are acked or buried."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from urllib.parse import parse_qsl, urlsplit

from headwater.broker.claims import Claimed, Failure
from headwater.broker.consumer import Consumer
from headwater.broker.flow import run_blocking
from headwater.broker.logger import logger
from headwater.broker.options import IN_FLIGHT_MAX, SubscribeOptions
from headwater.broker.verbs import LogVerbs
from headwater.delivery.retry import ATTEMPTS_MAX
from headwater.errors import Closed, HeadwaterError, LeaseLost, NotDelivered
from headwater.ports.clock import Clock

TAKE_UP_S = 0.5  # how long one try to become the holder waits; then it looks whether it should stop
KEEPS_PER_WAIT = 3

_LOOPBACK = ("localhost", "127.0.0.1", "::1", "")
_PORTS = {"ws": 80, "wss": 443, "postgres": 5432}


class Source:
    """Attempts say little here: a restart in the middle of an outage is one, too. How often the target refused a
    message is counted elsewhere; the log's own limit stays as a last net, for a message that kills its forwarder."""

    def __init__(self, log: LogVerbs, clock: Clock, id: str, pattern: str, options: SubscribeOptions) -> None:
        self.id = id
        self._log = log
        self._clock = clock
        self._pattern = pattern
        self._options: SubscribeOptions = {
            **options,
            "mode": "exclusive",
            "wait": TAKE_UP_S,
            "max_in_flight": IN_FLIGHT_MAX,
            "max_attempts": ATTEMPTS_MAX,
        }
        self._consumer: Consumer | None = None
        self._interrupted = False
        self._kept_ms = 0

    def take_up(self) -> None:
        """Become the holder. Raises SubscriptionActive if another is, and does not let go in time."""
        self._consumer = run_blocking(self._log.subscribe(self.id, self._pattern, **self._options))
        self._kept_ms = self._clock.now_ms()
        if self._interrupted:
            self._consumer.interrupt()

    @property
    def held(self) -> Consumer:
        if self._consumer is None:
            raise Closed(f"subscription '{self.id}' is not held", where=self.id)
        return self._consumer

    def fetch(self, limit: int, wait_s: float | None) -> list[Claimed]:
        found = run_blocking(self.held.take(limit, wait_s))
        for claimed in found:
            self.held.began(claimed)  # the log's heartbeats keep it from now on
        return found

    def keep(self, in_hand: Sequence[Claimed]) -> None:
        """Before each round: what is in hand stays so, however long the target is away."""
        now_ms = self._clock.now_ms()
        for claimed in in_hand:
            self.held.began(claimed)
        if in_hand and not 0 <= now_ms - self._kept_ms < self.held.spec.ack_wait_ms // KEEPS_PER_WAIT:
            run_blocking(self.held.extend(in_hand, None))
            self._kept_ms = now_ms

    def ack(self, arrived: Sequence[Claimed]) -> None:
        """One whose time ran out does not keep the others from being acked; it comes again, and the target may know
        it by its id."""
        ticket = self.held.submit_ack(arrived)
        ticket.wait()
        late = ticket.result()
        if late:
            logger.warning("forwarder %s was too late to ack %s", self.id, late)
        self._ended(arrived)

    def bury(self, claimed: Claimed, error: str, handler: str) -> None:
        try:
            run_blocking(self.held.reject(claimed, Failure("processing_error", error, None, handler)))
        except (LeaseLost, NotDelivered) as exc:
            if self.held.lost:
                raise
            logger.warning("forwarder %s: %s", self.id, exc)
        self._ended([claimed])

    def _ended(self, settled: Iterable[Claimed]) -> None:
        for claimed in settled:
            self.held.ended(claimed)

    def interrupt(self) -> None:
        """A fetch that waits returns, as does every later one. From any thread."""
        self._interrupted = True
        if self._consumer is not None:
            self._consumer.interrupt()

    def give_back(self) -> None:
        """Let go of the subscription. What is in hand counts as not looked at."""
        consumer, self._consumer = self._consumer, None
        if consumer is None:
            return
        try:
            run_blocking(consumer.close(seen=()))
        except HeadwaterError as exc:  # its lease runs out by itself
            logger.warning("forwarder %s could not give back its subscription: %s", self.id, exc)


def same_log(one: str, other: str) -> bool:
    """Whether two names are those of one log, as far as names tell: a host may have others that nobody knows here."""
    if "memory" in (one, other):  # all in memory are called so, and none is another
        return False
    if "://" in one or "://" in other:
        try:
            return "://" in one and "://" in other and _address(one) == _address(other)
        except ValueError:  # several hosts with ports of their own
            return one == other
    try:
        return os.path.samefile(one, other)
    except OSError:  # one is not there (yet)
        return os.path.realpath(one) == os.path.realpath(other)


def _address(url: str) -> tuple[object, ...]:
    """Of a PostgreSQL with its schema; who connects does not matter."""
    parts = urlsplit(url)
    scheme = parts.scheme.replace("postgresql", "postgres")
    said = dict(parse_qsl(parts.query)) if scheme == "postgres" else {}
    host = said.get("host") or parts.hostname or ""
    return (
        scheme,
        "localhost" if host in _LOOPBACK else host,
        int(said.get("port") or parts.port or _PORTS.get(scheme, 0)),
        said.get("dbname") or parts.path.strip("/"),
        said.get("schema", "headwater"),
    )
