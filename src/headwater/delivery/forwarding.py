"""What a forwarder makes of a target that did not take a batch: is the target away, or does it refuse a message?

An error alone does not tell. A target that is away fails with everything, for as long as it takes, and must cost nobody
a dead letter; nor must one that refuses everything, because its disk is full or a permission is missing. So a message
counts as refused only if others got through when it failed. Until then it waits, and if there are no others, nobody
is kept waiting by it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import msgspec

from headwater.delivery.retry import RetryPolicy, backoff_ms

MISSES_AWAY_MAX = 3  # failures in a row after which a round ends, if the target seems to be away
MISSES_THERE_MAX = 10  # if it answers, or has just taken others
PROBE_ROUNDS = 3  # so many in vain end with their first failure, lest the end of an outage puts others before it
PATIENT_ROUNDS = 10  # after so many in vain, each round begins with others than the one before

Tried = Literal["sent", "unfit", "failed"]
"""Unfit: refused for what it is, by an error that says so; to try it again is no use."""


class Verdict(NamedTuple):
    """Positions in the batch. `suspects` failed while others behind them got through; all in no list stay in hand."""

    sent: list[int]
    unfit: list[int]
    suspects: list[int]


class Suspect(msgspec.Struct, frozen=True):
    """A message that is kept aside, so that it holds up no others. `refusals` counts how often others got through after
    it had failed; `failed` says that it did, and that nobody has got through since."""

    due_ms: int
    refusals: int = 1
    failed: bool = False


def order_of_tries(count: int, rounds_in_vain: int) -> list[int]:
    """One by one, from the front. If that has been in vain for long, the front may be all refused: begin elsewhere."""
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
    """It has had all its attempts, and others got through after each."""
    return suspect.refusals >= policy.max_attempts
