"""What a forwarder does all day: fetch a batch, send it, ack it; and wait when the target does not take it."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from typing import Literal

import msgspec

from headwater.broker.claims import Claimed
from headwater.broker.forwarding.sending import Round, Sender, said
from headwater.broker.forwarding.source import Source
from headwater.broker.forwarding.status import ForwarderState
from headwater.broker.logger import logger
from headwater.delivery.forwarding import (
    Suspect,
    Tried,
    begin_to_suspect,
    failed_again,
    goes_on,
    is_refused,
    others_got_through,
)
from headwater.delivery.retry import RetryPolicy, backoff_ms
from headwater.errors import (
    LeaseLost,
    NotDelivered,
    Overloaded,
    RequestTimeout,
    StoreError,
    SubscriptionActive,
    TransportError,
    TransportFailed,
    Unreachable,
)
from headwater.ports.clock import Clock

SUSPECTS_MAX = 1_000
LOG_RETRY_S = 1.0

_LOG_IS_AWAY = (StoreError, RequestTimeout, Overloaded, Unreachable)  # it passes, and nothing is lost meanwhile


class Aside(msgspec.Struct):
    """A message that the target refused so far, with what it said."""

    claimed: Claimed
    suspect: Suspect
    error: str


class Work:
    """Runs on one thread; others may read its counts and ask it to stop."""

    def __init__(
        self,
        source: Source,
        sender: Sender,
        clock: Clock,
        *,
        batch: int,
        wait_s: float,
        policy: RetryPolicy,
        on_error: Callable[[Exception], None] | None,
    ) -> None:
        self.state: ForwarderState = "stopped"
        self.forwarded = self.retried = self.dead = self.changes = 0
        self.last_error: str | None = None
        self._source = source
        self._sender = sender
        self._clock = clock
        self._batch = batch
        self._wait_s = wait_s
        self._policy = policy
        self._on_error = on_error
        self._hand: list[Claimed] = []
        self._aside: dict[int, Aside] = {}  # by seq
        self._witness: Claimed | None = None  # the last that got through, if it may be sent again
        self._rounds_in_vain = 0
        self._stopping = threading.Event()
        self._nudge = threading.Event()
        self._news = threading.Condition()
        clock.on_advance(self._nudge.set)

    @property
    def stopping(self) -> bool:
        return self._stopping.is_set()

    @property
    def in_hand(self) -> int:
        return len(self._hand)

    @property
    def set_aside(self) -> int:
        return len(self._aside)

    def wait_for_change(self, seen: int, timeout_s: float) -> None:
        with self._news:
            self._news.wait_for(lambda: self.changes != seen, timeout_s)

    def ask_to_stop(self) -> None:
        self._stopping.set()
        self._nudge.set()
        self._source.interrupt()

    def run(self, last_seq: Callable[[], int] | None) -> None:
        """Until asked to stop; or until all is forwarded up to `last_seq`, as it is when this begins."""
        while not self.stopping:
            try:
                if self._take_up(waits=last_seq is None) and self._forward(None if last_seq is None else last_seq()):
                    return
            except (LeaseLost, NotDelivered) as exc:  # its new holder is at it
                logger.warning("forwarder %s begins again: %s", self._source.id, exc)
                self._let_go()

    def end(self, *, failed: bool) -> None:
        self._let_go()
        self._stopping.set()
        self._become("failed" if failed else "stopped")

    # --- the log ------------------------------------------------------------------------------------------------

    def _take_up(self, *, waits: bool) -> bool:
        while not self.stopping:
            try:
                self._source.take_up()
            except SubscriptionActive:
                if not waits:
                    raise
                self._become("waiting")
            except _LOG_IS_AWAY as exc:
                self._log_is_away(exc)
            else:
                self._become("running")
                return True
        return False

    def _let_go(self) -> None:
        self._source.give_back()
        self._hand, self._aside = [], {}
        self._rounds_in_vain = 0

    def _keep(self) -> None:
        try:
            self._source.keep([*self._hand, *(aside.claimed for aside in self._aside.values())])
        except _LOG_IS_AWAY as exc:
            self._log_is_away(exc)

    def _forward(self, upto: int | None) -> bool:
        """True: it is done, or was asked to stop."""
        while not self.stopping:
            if not self._hand:
                self._keep()
                self._fill(until_full=upto is None)
                if upto is not None and not self._hand:
                    return self._finish_those_aside()
            reached = max((claimed.message.seq for claimed in self._hand), default=0)
            if self._hand:
                self._round(gives_up=upto is not None)
            self._try_those_aside()
            if upto is not None and not self._hand and reached >= upto:
                return self._finish_those_aside()
        return True

    def _finish_those_aside(self) -> bool:
        """Nobody else comes who could show that the target is there. One that got through before can, if it is known
        there by its id; without such a one, those that still fail in the end stay in the log for the next time."""
        in_vain = 0
        while self._aside and in_vain < self._policy.max_attempts and not self.stopping:
            self._pause(round((self._idle_s() or 0.0) * 1000))
            self._keep()
            self._try_those_aside()
            if self._witness is not None and self._sender.try_all([self._witness])[0] == "sent":
                in_vain = 0
                self._count_refusals()
            else:
                in_vain += 1
        return True

    def _fill(self, *, until_full: bool) -> None:
        """A batch: full, or as much as came in the time that it may wait. What comes again is not kept waiting, and
        taken by itself: the log hands out one at a time of what a dead forwarder left."""
        try:
            self._hand += self._source.fetch(self._batch, self._idle_s() if until_full else 0.0)
            until = time.monotonic() + self._wait_s
            while until_full and 0 < len(self._hand) < self._batch and self._hand[-1].attempt == 1:
                left_s = until - time.monotonic()
                more = self._source.fetch(self._batch - len(self._hand), left_s) if left_s > 0 else []
                if not more:
                    break
                self._hand += more
        except _LOG_IS_AWAY as exc:
            if not until_full:
                raise
            self._log_is_away(exc)

    def _idle_s(self) -> float | None:
        if not self._aside:
            return None
        due_ms = max(min(aside.suspect.due_ms for aside in self._aside.values()), self._sender.open_until_ms or 0)
        return max(0.0, (due_ms - self._clock.now_ms()) / 1000)

    def _top_up(self) -> None:
        """Others beside those that fail: only they can show that the target is there."""
        if len(self._hand) < self._batch and not self.stopping:
            self._keep()  # a fetch gives up what is overdue
            try:
                self._hand += self._source.fetch(self._batch - len(self._hand), 0.0)
            except _LOG_IS_AWAY as exc:
                self._log_is_away(exc)

    def _ack(self, arrived: Sequence[Claimed]) -> None:
        if not arrived:
            return
        if self._sender.recognises_ids:
            self._witness = arrived[-1]
        self._count("forwarded", len(arrived), lambda: self._source.ack(arrived))

    def _count(self, name: Literal["forwarded", "dead"], count: int, settle: Callable[[], None]) -> None:
        """Tried while the log is away, unless asked to stop. Counted first, and taken back if it comes to nothing: who
        sees that nothing is left sees the count as well."""
        setattr(self, name, getattr(self, name) + count)
        settled = False
        try:
            while not settled:
                try:
                    settle()
                    settled = True
                except _LOG_IS_AWAY as exc:
                    self._log_is_away(exc)
                    if self.stopping:
                        return
        finally:
            if not settled:
                setattr(self, name, getattr(self, name) - count)

    def _bury(self, claimed: Claimed, error: str) -> None:
        logger.warning("forwarder %s gives up message %d: %s", self._source.id, claimed.message.seq, error)
        self._count("dead", 1, lambda: self._source.bury(claimed, error, f"forward to {self._sender.name}"))

    def _log_is_away(self, exc: Exception) -> None:
        logger.warning("forwarder %s waits for its log: %s", self._source.id, exc)
        self.last_error = said(exc)
        self._stopping.wait(LOG_RETRY_S)

    # --- the target ---------------------------------------------------------------------------------------------

    def _round(self, *, gives_up: bool) -> None:
        self._keep()
        if not self._sender.may_try():
            self._pause(0)
            return
        made = self._sender.send(self._hand, self._rounds_in_vain)
        self._hand = made.rest
        self._settle(made)
        if made.error is not None:
            self._tell(made.error)
        if made.sent:
            self._rounds_in_vain = 0
            self._become("running")
            self._count_refusals()
        elif made.rest:
            self._rounds_in_vain += 1
            self._become("retrying")
            if gives_up and self._sender.state == "open":
                raise _as_transport_error(made.error, self._sender.name)
            self._pause(backoff_ms(self._policy, self._rounds_in_vain, random.random()))
            self._top_up()

    def _settle(self, made: Round) -> None:
        self._ack(made.sent)
        for claimed, error in made.unfit:
            self._bury(claimed, error)
        for claimed, error in made.suspects:
            if len(self._aside) >= SUSPECTS_MAX:
                self._hand.append(claimed)
                continue
            suspect = begin_to_suspect(self._policy, self._clock.now_ms(), random.random())
            self._aside[claimed.message.seq] = Aside(claimed, suspect, error)
        self._hand.sort(key=_seq)

    def _tell(self, error: Exception) -> None:
        if not self._rounds_in_vain:  # then, the others are told by the circuit
            logger.warning("forwarder %s: %s", self._source.id, said(error))
        self.retried += 1
        self.last_error = said(error)
        if self._on_error is not None:
            try:
                self._on_error(error)
            except Exception:
                logger.exception("the on_error callback of forwarder %s failed", self._source.id)

    def _count_refusals(self) -> None:
        """Others got through: whoever of those aside failed before that was refused."""
        for seq, aside in list(self._aside.items()):
            aside.suspect = others_got_through(aside.suspect)
            if is_refused(aside.suspect, self._policy):
                del self._aside[seq]
                self._bury(aside.claimed, aside.error)

    def _try_those_aside(self) -> None:
        """Alone, when their time has come, unless the circuit is open. What they do says nothing about the target."""
        now_ms = self._clock.now_ms()
        tries: list[Tried] = []
        for seq, aside in sorted(self._aside.items()):
            if aside.suspect.due_ms > now_ms or (self._sender.open_until_ms or 0) > now_ms or self.stopping:
                continue
            if not goes_on(tries, target_answers=self._sender.target_answers):
                return
            tried, error = self._sender.try_all([aside.claimed])
            tries.append(tried)
            if tried == "failed":
                aside.error = said(error)
                aside.suspect = failed_again(aside.suspect, self._policy, now_ms, random.random())
                continue
            del self._aside[seq]
            if tried == "sent":
                self._ack([aside.claimed])
                self._count_refusals()
            else:
                self._bury(aside.claimed, said(error))
        if tries:
            self._become(self.state)

    # --- waiting ------------------------------------------------------------------------------------------------

    def _pause(self, ms: int) -> None:
        """So long, and while the circuit is open; no longer once asked to stop."""
        at_ms = max(self._clock.now_ms() + ms, self._sender.open_until_ms or 0)
        while not self.stopping:
            self._nudge.clear()
            left_ms = at_ms - self._clock.now_ms()
            if left_ms <= 0 or self.stopping:
                return
            self._nudge.wait(left_ms / 1000)

    def _become(self, state: ForwarderState) -> None:
        with self._news:
            self.state = state
            self.changes += 1
            self._news.notify_all()


def _seq(claimed: Claimed) -> int:
    return claimed.message.seq


def _as_transport_error(error: Exception | None, name: str) -> TransportError:
    if isinstance(error, TransportError):
        return error
    made = TransportFailed(said(error), where=name)
    made.__cause__ = error
    return made
