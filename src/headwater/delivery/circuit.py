"""When a target is tried: the circuit breaker, and what a forwarder concludes from a target that refused a batch.

**The breaker** is closed, and the target is tried, until `failures` of the tries fail within `within_ms`. Then it is
open, and the target is not tried, for `open_ms`. Then it is half open: one try goes through, and its outcome closes or
opens the circuit.

**The forwarder's verdict**: an error alone does not tell whether the target is away or refuses this message. A target
that is away fails with everything, for as long as the outage lasts, and must cause no dead letter; nor must one that
refuses everything because its disk is full or a permission is missing. So a message counts as refused only if others
got through when it failed. Until then it waits; without others, nothing waits behind it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import msgspec

from headwater.arguments import check_whole
from headwater.delivery.retry import RetryPolicy, backoff_ms
from headwater.errors import InvalidOptionError

FAILURES_MAX = 1_000
SPAN_MS_MAX = 30 * 24 * 3600 * 1000

BreakerState = Literal["closed", "open", "half-open"]
TryOutcome = Literal["succeeded", "failed", "not tried"]
"""Not tried: the target was not asked, or did not get to answer."""


class BreakerPolicy(msgspec.Struct, frozen=True, omit_defaults=True):
    failures: int = 5
    within_ms: int = 120_000
    open_ms: int = 30_000

    def __post_init__(self) -> None:
        check_whole("failures", self.failures, 1, FAILURES_MAX)
        for name, span in (("within", self.within_ms), ("open", self.open_ms)):
            if type(span) is not int or not 1 <= span <= SPAN_MS_MAX:
                raise InvalidOptionError(f"{name} lies between a millisecond and 30 days, not {span!r} ms")


class Breaker(msgspec.Struct, frozen=True):
    """`turn` grows with every change of state. The outcome of a try counts only in the turn in which the try began."""

    state: BreakerState = "closed"
    turn: int = 0
    since_ms: int = 0
    failed_at_ms: tuple[int, ...] = ()


def until_ms(policy: BreakerPolicy, breaker: Breaker) -> int | None:
    """When an open circuit lets the next try through; None if it is not open."""
    return breaker.since_ms + policy.open_ms if breaker.state == "open" else None


def ask(policy: BreakerPolicy, breaker: Breaker, now_ms: int) -> tuple[Breaker, int | None]:
    """The turn with which to report the outcome of a try; None if the target may not be tried now."""
    if breaker.state == "closed":
        return breaker, breaker.turn
    # A clock that was set back must not keep the circuit open for longer than it was meant to be.
    if breaker.state == "open" and not 0 <= now_ms - breaker.since_ms < policy.open_ms:
        trying = Breaker("half-open", breaker.turn + 1, now_ms)
        return trying, trying.turn
    return breaker, None


def ended(policy: BreakerPolicy, breaker: Breaker, turn: int, outcome: TryOutcome, now_ms: int) -> Breaker:
    """The circuit after a try that began in this turn. Successes between failures change nothing: failures count by
    their time alone. When the one try of a half-open circuit ended without an answer of the target, the next one goes
    through."""
    if turn != breaker.turn:
        return breaker
    if outcome == "failed":
        recent = (*(at for at in breaker.failed_at_ms if 0 <= now_ms - at < policy.within_ms), now_ms)
        if breaker.state == "half-open" or len(recent) >= policy.failures:
            return Breaker("open", breaker.turn + 1, now_ms)
        return msgspec.structs.replace(breaker, failed_at_ms=recent)
    if breaker.state != "half-open":
        return breaker
    if outcome == "succeeded":
        return Breaker("closed", breaker.turn + 1, now_ms)
    return Breaker("open", breaker.turn + 1, breaker.since_ms - policy.open_ms)


# --- the forwarder's verdict ------------------------------------------------------------------------------------------

MISSES_AWAY_MAX = 3  # failures in a row after which a round ends, if the target seems to be away
MISSES_THERE_MAX = 10  # if it answers, or has just taken others
PROBE_ROUNDS = 3  # in vain, that end with their first failure: others must not overtake it when an outage ends
PATIENT_ROUNDS = 10  # after so many in vain, each round begins with others than the one before

Tried = Literal["sent", "unfit", "failed"]
"""Unfit: the error says that the target can never take this message, so a retry would not help."""


class Verdict(NamedTuple):
    """Positions in the batch. `suspects` failed while others behind them got through; those in no list stay in
    flight."""

    sent: list[int]
    unfit: list[int]
    suspects: list[int]


class Suspect(msgspec.Struct, frozen=True):
    """A message that is kept aside, so that it holds up no others. `refusals` counts how often others got through after
    it had failed; `failed`: it has failed, and no other has got through since."""

    due_ms: int
    refusals: int = 1
    failed: bool = False


def order_of_tries(count: int, rounds_in_vain: int) -> list[int]:
    """The order in which messages are tried one by one: from the front. If that has been in vain for long, the front
    may be all refused: begin elsewhere."""
    late = max(0, rounds_in_vain - PATIENT_ROUNDS)
    first = late * MISSES_AWAY_MAX % count if count else 0
    return [*range(first, count), *range(first)]


def goes_on(tries: Sequence[Tried], *, target_answers: bool, rounds_in_vain: int = PROBE_ROUNDS) -> bool:
    """Whether to try the next one: not after too many failures in a row, and at first not after any, if the target
    seems to be away."""
    if rounds_in_vain < PROBE_ROUNDS and not target_answers and "sent" not in tries and "failed" in tries:
        return False
    most = MISSES_THERE_MAX if target_answers or "sent" in tries else MISSES_AWAY_MAX
    return len(tries) < most or any(each != "failed" for each in tries[-most:])


def judge(positions: Sequence[int], tries: Sequence[Tried]) -> Verdict:
    """What became of messages that were tried one by one, in this order."""
    done = list(zip(positions, tries, strict=False))
    last_sent = max((position for position, tried in done if tried == "sent"), default=-1)
    return Verdict(
        sent=sorted(position for position, tried in done if tried == "sent"),
        unfit=sorted(position for position, tried in done if tried == "unfit"),
        suspects=sorted(position for position, tried in done if tried == "failed" and position < last_sent),
    )


def begin_to_suspect(policy: RetryPolicy, now_ms: int, roll: float) -> Suspect:
    return Suspect(now_ms + backoff_ms(policy, 1, roll))


def failed_again(suspect: Suspect, policy: RetryPolicy, now_ms: int, roll: float) -> Suspect:
    due_ms = now_ms + backoff_ms(policy, suspect.refusals + 1, roll)
    return msgspec.structs.replace(suspect, failed=True, due_ms=due_ms)


def others_got_through(suspect: Suspect) -> Suspect:
    if not suspect.failed:
        return suspect
    return msgspec.structs.replace(suspect, refusals=suspect.refusals + 1, failed=False)


def is_refused(suspect: Suspect, policy: RetryPolicy) -> bool:
    """Whether the message has had all its attempts, and others got through after each."""
    return suspect.refusals >= policy.max_attempts
