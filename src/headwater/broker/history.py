"""The log's figures over time. A server takes a sample twice a minute and keeps it in rings of fixed size in the log;
they are read as series for an hour, a day or a week."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from heapq import nlargest
from typing import NamedTuple

import msgspec

from headwater.broker.committer import TransactionHooks
from headwater.broker.engine import Engine
from headwater.broker.flow import Flow
from headwater.broker.statistics import describe_all
from headwater.errors import InvalidOptionError
from headwater.ports.records import DeadLetterQuery, Sample, SubscriptionSample
from headwater.ports.store import COUNTERS, Reader, Writer

MINUTE_MS = 60_000
SAMPLE_S = 30.0  # half of the shortest step, so that no step is left without one
RINGS = ((MINUTE_MS, 1_440), (15 * MINUTE_MS, 1_344))  # the step and the rows of each: a day, and two weeks
SUBSCRIPTIONS_MAX = 100  # of one sample, and of one answer: those with the greatest lag
REASONS_MAX = 1_000


class Span(NamedTuple):
    ring_ms: int
    step_ms: int
    steps: int


SPANS = {
    "hour": Span(MINUTE_MS, MINUTE_MS, 60),
    "day": Span(MINUTE_MS, 5 * MINUTE_MS, 288),
    "week": Span(15 * MINUTE_MS, 15 * MINUTE_MS, 672),
}


class SubscriptionHistory(msgspec.Struct, frozen=True):
    lag: list[int | None]
    acked: list[float | None]


class History(msgspec.Struct, frozen=True):
    """One value for each step from `from_ms` on; None where nothing was recorded. `published` and `acked` are rates per
    second. Of a subscription that was deleted nothing is shown. `subscriptions_left_out`: how many there are beyond
    SUBSCRIPTIONS_MAX; those with the greatest lag are shown."""

    from_ms: int
    step_ms: int
    published: list[float | None]
    dead_letters: list[int | None]
    file_bytes: list[int | None]
    journal_bytes: list[int | None]
    subscriptions: dict[str, SubscriptionHistory]
    subscriptions_left_out: int = 0


def take_sample(engine: Engine) -> Flow[None]:
    """The commit is not synced to disk by itself: a power cut loses the figures of a moment."""
    sample = yield from engine.read(partial(_sample, engine), engine.statistics)
    yield from engine.write(partial(_save, sample), touching=COUNTERS, synced=False)


def _sample(engine: Engine, reader: Reader) -> Sample:
    now_ms = engine.clock.now_ms()
    infos = nlargest(SUBSCRIPTIONS_MAX, describe_all(reader, now_ms), key=lambda info: info.lag)
    return Sample(
        at_ms=now_ms,
        last_seq=reader.last_seq(),
        dead_letters=sum(reader.count_dead_letters(DeadLetterQuery(), "reason", REASONS_MAX).values()),
        file_bytes=reader.file_bytes(),
        journal_bytes=engine.store.journal_bytes(),
        subscriptions={info.id: SubscriptionSample(info.lag, info.acked) for info in infos},
    )


def _save(sample: Sample, writer: Writer, hooks: TransactionHooks) -> None:
    for step_ms, rows in RINGS:
        step = sample.at_ms // step_ms
        before = (each for each in writer.samples(step_ms, step * step_ms) if each.at_ms // step_ms == step)
        writer.save_sample(step_ms, step % rows, merged(next(before, None), sample))


def merged(before: Sample | None, after: Sample) -> Sample:
    """Two samples of one step as one: the later totals and sizes, and the greater lags, so that peaks stay visible."""
    if before is None:
        return after
    lags = {id: each.lag for id, each in before.subscriptions.items()}
    subscriptions = {
        id: SubscriptionSample(max(each.lag, lags.get(id, 0)), each.acked) for id, each in after.subscriptions.items()
    }
    return msgspec.structs.replace(
        after,
        dead_letters=max(before.dead_letters, after.dead_letters),
        journal_bytes=max(before.journal_bytes, after.journal_bytes),
        subscriptions=subscriptions,
    )


def history(reader: Reader, span: str, now_ms: int) -> History:
    if span not in SPANS:
        raise InvalidOptionError(f"span must be one of {', '.join(SPANS)}, not {span!r}")
    ring_ms, step_ms, steps = SPANS[span]
    first = now_ms // step_ms - steps + 1
    found: dict[int, Sample] = {}
    for sample in reader.samples(ring_ms, (first - 1) * step_ms):  # one step more, for the first rate
        at = sample.at_ms // step_ms - first
        found[at] = merged(found.get(at), sample)
    created = {record.id: record.created_ms for record in reader.subscriptions()}
    lags: dict[str, int] = {}
    for sample in found.values():
        for id, each in sample.subscriptions.items():
            if id in created:
                lags[id] = max(each.lag, lags.get(id, 0))
    names = nlargest(SUBSCRIPTIONS_MAX, sorted(lags), key=lags.__getitem__)

    def values(of: Callable[[Sample], int | None]) -> list[int | None]:
        return [of(found[at]) if at in found else None for at in range(steps)]

    def of_subscription(id: str) -> SubscriptionHistory:
        def part(sample: Sample) -> SubscriptionSample | None:
            """An earlier subscription of the same name is another one."""
            return sample.subscriptions.get(id) if sample.at_ms >= created[id] else None

        return SubscriptionHistory(
            lag=values(lambda sample: None if (each := part(sample)) is None else each.lag),
            acked=_rates(found, steps, lambda sample: None if (each := part(sample)) is None else each.acked),
        )

    return History(
        from_ms=first * step_ms,
        step_ms=step_ms,
        published=_rates(found, steps, lambda sample: sample.last_seq),
        dead_letters=values(lambda sample: sample.dead_letters),
        file_bytes=values(lambda sample: sample.file_bytes),
        journal_bytes=values(lambda sample: sample.journal_bytes),
        subscriptions={id: of_subscription(id) for id in sorted(names)},
        subscriptions_left_out=max(0, len(created) - SUBSCRIPTIONS_MAX),
    )


def _rates(found: Mapping[int, Sample], steps: int, total_of: Callable[[Sample], int | None]) -> list[float | None]:
    """By how much a total grew per second since the step before. None after a gap, and where the total became smaller,
    so that it began anew."""

    def rate(at: int) -> float | None:
        before, after = found.get(at - 1), found.get(at)
        if before is None or after is None or after.at_ms <= before.at_ms:
            return None
        least, most = total_of(before), total_of(after)
        if least is None or most is None or most < least:
            return None
        return round((most - least) * 1000 / (after.at_ms - before.at_ms), 3)

    return [rate(at) for at in range(steps)]
