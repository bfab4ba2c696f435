"""What the checker of the crash loop says of what clients wrote down, and how much was redelivered without a nack."""

from __future__ import annotations

from collections import Counter, defaultdict
from pathlib import Path
from typing import NamedTuple

from crash_checker import History, check, figures
from crash_witness import SUBSCRIPTIONS, AnyEvent, Received, Settled, Settling
from msgspec import structs
from test_crash_loop import ending_of
from witnessed_clients import Company


class Verdict(NamedTuple):
    problems: list[str]
    counts: dict[str, int]
    redelivered: dict[str, int]
    """By subscription, without what was nacked."""
    history: History

    def __str__(self) -> str:
        again = ", ".join(f"{count} in {id}" for id, count in self.redelivered.items())
        reported = ", ".join(f"{self.counts[name]} {name}" for name in ("published", "acked", "nacked"))
        return f"{reported}; redelivered without a nack: {again}"


def judge(company: Company, path: Path) -> Verdict:
    events = without_acks_of_others(company.book.events)
    history = History(events)
    redelivered, without_reason = redeliveries(history)
    return Verdict(check(events, ending_of(path)) + without_reason, figures(events), redelivered, history)


def without_acks_of_others(events: list[AnyEvent]) -> list[AnyEvent]:
    """A shared consumer may come back with a message in hand that was passed on meanwhile, and acked by whom it was
    passed on to. The message is settled, so its own ack returns; but it was another's. Had the message been handed out
    once more after that, it would be a broken promise."""
    handed_out: dict[tuple[str, int], list[tuple[int, int]]] = defaultdict(list)
    for event in events:
        if isinstance(event, Received) and SUBSCRIPTIONS[event.subscription][0] == "shared":
            for seq, attempt, _ in event.found:
                handed_out[event.subscription, seq].append((attempt, event.t))

    def is_its_own(event: Settled, key: tuple[int, int]) -> bool:
        seq, attempt = key
        return not any(later > attempt and t < event.t for later, t in handed_out[event.subscription, seq])

    return [
        structs.replace(event, keys=tuple(key for key in event.keys if is_its_own(event, key)))
        if isinstance(event, Settled) and event.how == "ack"
        else event
        for event in events
    ]


def redeliveries(history: History) -> tuple[Counter[str], list[str]]:
    """What was redelivered without a nack, by subscription. A broken connection is a reason for that in shared
    mode, where others are waiting; an exclusive holder keeps what it has, and what was on its way to it does not count
    as an attempt."""
    nacked = {(event.subscription, *key) for event in history.of(Settling) if event.how == "nack" for key in event.keys}
    counts: Counter[str] = Counter(dict.fromkeys(SUBSCRIPTIONS, 0))
    without_reason: list[str] = []
    for event in history.of(Received):
        for seq, attempt, _ in event.found:
            if attempt > 1 and (event.subscription, seq, attempt - 1) not in nacked:
                counts[event.subscription] += 1
                if SUBSCRIPTIONS[event.subscription][0] == "exclusive":
                    without_reason.append(f"{event.holder} got message {seq} as attempt {attempt}")
    return counts, without_reason
