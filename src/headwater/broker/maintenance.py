"""Keeping the log within its limits: retention, forgotten ids, old timings, idle subscriptions, disk space.

Every process that has a log open may do it; a lease in the database lets one at a time. All work is cut into small
transactions, so that publishers and `close()` wait for one of them at most.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import msgspec

from headwater.broker.committer import TransactionHooks
from headwater.broker.deliveries import settled_to
from headwater.broker.engine import Engine
from headwater.broker.flow import Blocking, Flow
from headwater.broker.logger import logger
from headwater.broker.shared_consumers import forget_consumers
from headwater.broker.statistics import look_upto
from headwater.delivery.lease import release, take
from headwater.delivery.retention import Kept, Total, surplus
from headwater.errors import ClosedError, InvalidFilterError
from headwater.ports.records import Gap, RetentionPolicy, Selection, SubscriptionRecord, pattern_of, selection_of
from headwater.ports.store import COUNTERS, Reader, Writer
from headwater.topics import Pattern, overlaps, parse_pattern

LEASE = "housekeeping"  # as stored
LEASE_MS = 60_000
PRUNE_PAGE = 2_000
LOOKED_AT_MAX = 50_000  # messages, matching or not, in which a page of what has to go is looked for
COUNT_PAGE = 50_000
IDS_PAGE = 20_000
VACUUM_PAGES = 256
TIMINGS_PAGE = 20_000
TIMINGS_KEPT_MS = 90 * 24 * 3_600_000


class MaintenanceReport(msgspec.Struct):
    """What one round did."""

    pruned: dict[str, int] = {}
    """How many messages each retention policy deleted, by its pattern."""

    gaps: int = 0
    """How many messages were deleted before a subscription had settled them, summed over the subscriptions."""

    expired_subscriptions: list[str] = []
    """The subscriptions deleted after their `inactive_timeout`."""

    forgotten_ids: int = 0
    """How many ids are no longer remembered."""

    skipped: bool = False
    """Nothing was done, because another process runs the maintenance."""


def run_maintenance(engine: Engine, stopping: Callable[[], bool]) -> Flow[MaintenanceReport]:
    """One round of pages. When `stopping` returns True it begins no further page and gives its lease back."""
    report = MaintenanceReport()
    if engine.timings:
        yield from engine.write(engine.timings.save, touching=COUNTERS)
    if not (yield from engine.write(partial(_take_turn, engine))):
        report.skipped = True
        return report
    yield from _until(stopping, _round(engine, report))
    yield from engine.write(partial(_end_turn, engine))
    return report


def _until(stopping: Callable[[], bool], flow: Flow[None]) -> Flow[None]:
    outcome: Any = None
    try:
        while not stopping():
            try:
                outcome = yield flow.send(outcome)
            except ClosedError:  # a read that was interrupted because the log is being closed
                if not stopping():
                    raise
    except StopIteration:
        pass
    finally:
        flow.close()


def _round(engine: Engine, report: MaintenanceReport) -> Flow[None]:
    while (yield from engine.write(lambda writer, _: writer.fold_topic_counts(COUNT_PAGE))) == COUNT_PAGE:
        pass
    policies = yield from engine.read(lambda reader: reader.retention(), engine.statistics)
    for policy in policies:
        yield from _enforce(engine, policy, report)
    if report.gaps:
        engine.wakeups.wake_all()  # so that readers see the gaps now, not with their next message
    report.expired_subscriptions = yield from engine.write(partial(_drop_idle_subscriptions, engine))
    while True:
        forgotten = yield from engine.write(
            lambda writer, _: writer.forget_ids(engine.dedupe, engine.clock.now_ms(), IDS_PAGE)
        )
        report.forgotten_ids += forgotten
        if forgotten < IDS_PAGE:
            break
    oldest_ms = engine.dedupe.oldest_ms(engine.clock.now_ms())
    while (yield from engine.write(lambda writer, _: writer.forget_old_receipts(oldest_ms, IDS_PAGE))) == IDS_PAGE:
        pass
    kept_ms = engine.clock.now_ms() - TIMINGS_KEPT_MS
    while (yield from engine.write(lambda writer, _: writer.forget_old_timings(kept_ms, TIMINGS_PAGE))) == TIMINGS_PAGE:
        pass
    while (yield Blocking(lambda: engine.store.reclaim_space(VACUUM_PAGES), engine.statistics)):
        pass


def _take_turn(engine: Engine, writer: Writer, hooks: TransactionHooks) -> bool:
    lease = take(writer.lease(LEASE), engine.owner, engine.clock.now_ms(), LEASE_MS)
    if lease is not None:
        writer.save_lease(LEASE, lease)
    return lease is not None


def _end_turn(engine: Engine, writer: Writer, hooks: TransactionHooks) -> None:
    lease = writer.lease(LEASE)
    if lease.owner == engine.owner:
        writer.save_lease(LEASE, release(lease))


# --- retention ------------------------------------------------------------------------------------------------------


def _enforce(engine: Engine, policy: RetentionPolicy, report: MaintenanceReport) -> Flow[None]:
    after: int | None = 0
    spared = Total(0, 0)
    while after is not None:
        place = _Place(policy, after, spared, engine.clock.now_ms())
        # Looked for beside the writers: in a large log, to find that nothing is too much can take a second.
        too_much, after = yield from engine.read(partial(_too_much, place=place), engine.statistics)
        if not too_much:
            continue
        wanted = yield from _asked(engine, place, too_much)
        after, pruned, gaps, spared = yield from engine.write(partial(_prune_page, place=place, wanted=wanted))
        report.gaps += gaps
        if pruned:
            report.pruned[policy.pattern] = report.pruned.get(policy.pattern, 0) + pruned


class _Place(NamedTuple):
    """How far a policy has got: what lies above `after` is yet to be looked at, what was `spared` lies below."""

    policy: RetentionPolicy
    after: int
    spared: Total
    now_ms: int

    @property
    def pattern(self) -> Pattern:
        return parse_pattern(self.policy.pattern, self.policy.dialect)


def _too_much(reader: Reader, *, place: _Place) -> tuple[list[Kept], int | None]:
    """A page of what has to go, and where to go on; None if that is all of it."""
    upto = look_upto(reader, place.after, LOOKED_AT_MAX)
    rest = None if upto == reader.last_seq() else upto
    page = reader.oldest(place.pattern, place.after, PRUNE_PAGE, upto)
    if not page:
        return [], rest
    stored = _total(reader, place.pattern)
    total = Total(stored.messages - place.spared.messages, stored.bytes - place.spared.bytes)
    too_much = page[: surplus(place.policy.limits, page, total, place.now_ms)]
    if len(too_much) < len(page):
        return too_much, None
    return too_much, rest if len(page) < PRUNE_PAGE else page[-1].seq


_Wanted = dict[Selection, dict[int, bool]]
"""Of filters that take time, and so are asked beside the writers: which seqs they want, and which not."""


def _asked(engine: Engine, place: _Place, too_much: Sequence[Kept]) -> Flow[_Wanted]:
    records = yield from engine.read(lambda reader: reader.subscriptions())
    slow = [(selection, record.window) for record in records if (selection := _selection(record)).takes_time]
    wanted: _Wanted = {selection: {} for selection, _ in slow}

    def ask(reader: Reader, seq: int, asking: set[Selection]) -> None:
        for message in reader.messages([seq]).values():
            field = cache(message.field)  # each is decoded once for all
            for selection in asking:
                wanted[selection][seq] = selection.keeps(message, field)

    for kept in too_much:
        asking = {
            selection
            for selection, window in slow
            if selection.pattern.matches(kept.topic) and not window.is_settled(kept.seq)
        }
        if asking:
            yield from engine.read(partial(ask, seq=kept.seq, asking=asking), engine.filters)
    return wanted


def _selection(record: SubscriptionRecord) -> Selection:
    """What a subscription wants; if its filter cannot be used, all of its pattern."""
    try:
        return selection_of(record.spec)
    except InvalidFilterError:
        return Selection(pattern_of(record.spec))


def _prune_page(
    writer: Writer, hooks: TransactionHooks, *, place: _Place, wanted: _Wanted
) -> tuple[int | None, int, int, Total]:
    """Delete up to a page of surplus messages. Returns where to continue (or None), how many were deleted, how many of
    them a subscription had not settled, and the total of those spared so far."""
    too_much, go_on = _too_much(writer, place=place)
    if not too_much:
        return go_on, 0, 0, place.spared
    subscriptions = [record for record in writer.subscriptions() if overlaps(pattern_of(record.spec), place.pattern)]
    gone = _deletable(writer, place.policy, too_much, subscriptions, place.now_ms)
    lost = _record_gaps(writer, gone, subscriptions, wanted, place.now_ms)
    writer.delete_messages(gone)
    spared = Total(
        place.spared.messages + len(too_much) - len(gone),
        place.spared.bytes + sum(kept.size for kept in too_much) - sum(kept.size for kept in gone),
    )
    return go_on, len(gone), lost, spared


def _total(reader: Reader, pattern: Pattern) -> Total:
    matching = [count for count in reader.topic_counts() if pattern.matches(count.topic)]
    return Total(sum(count.count for count in matching), sum(count.bytes for count in matching))


def _deletable(
    reader: Reader,
    policy: RetentionPolicy,
    candidates: Sequence[Kept],
    subscriptions: Sequence[SubscriptionRecord],
    now_ms: int,
) -> list[Kept]:
    """Spares messages in flight, and with `keep_unacked` all that a subscription has not settled."""
    busy = reader.leased_seqs(candidates[0].seq, candidates[-1].seq, now_ms)
    spared_above = candidates[-1].seq
    if policy.limits.keep_unacked:
        for record in subscriptions:
            spared_above = min(spared_above, settled_to(reader, record))
    held = [record.window for record in subscriptions if record.lease.live(now_ms)]
    return [
        kept
        for kept in candidates
        if kept.seq <= spared_above
        and kept.seq not in busy
        and not any(window.floor < kept.seq <= window.delivered for window in held)
    ]


def _record_gaps(
    writer: Writer,
    gone: Sequence[Kept],
    subscriptions: Sequence[SubscriptionRecord],
    wanted: _Wanted,
    now_ms: int,
) -> int:
    """Tell each subscription what it will never get. Must run before the messages are deleted."""
    if not gone:
        return 0
    seqs = {kept.seq for kept in gone}
    lost_in_all = 0
    for record in subscriptions:
        # One that is being redriven carries its own copy of the message.
        rows = writer.deliveries(record.id, seqs).values()
        waiting = sorted(row.seq for row in rows if row.dead_letter is None)
        writer.remove_deliveries(record.id, waiting)
        lost = set(waiting) | _undelivered(writer, record, gone, wanted)
        if lost:
            writer.add_gap(Gap(record.id, min(lost), max(lost), len(lost), "retention", now_ms))
            lost_in_all += len(lost)
    return lost_in_all


def _undelivered(reader: Reader, record: SubscriptionRecord, gone: Sequence[Kept], wanted: _Wanted) -> set[int]:
    """Those that the subscription wants and has not come to yet, or lost when its holder vanished."""
    selection = _selection(record)
    ahead = [kept for kept in gone if not record.window.is_settled(kept.seq) and selection.pattern.matches(kept.topic)]
    known = wanted.get(selection, {})
    found = {kept.seq for kept in ahead if selection.is_topics_only or known.get(kept.seq)}
    rest = [] if selection.is_topics_only else [kept.seq for kept in ahead if kept.seq not in known]
    return found | {message.seq for message in reader.messages(rest).values() if selection.keeps(message)}


def _drop_idle_subscriptions(engine: Engine, writer: Writer, hooks: TransactionHooks) -> list[str]:
    now_ms = engine.clock.now_ms()
    idle = [
        record.id
        for record in writer.subscriptions()
        if record.spec.inactive_ms is not None
        and now_ms - record.active_ms > record.spec.inactive_ms
        and not record.lease.live(now_ms)
        and record.spec.paused_ms is None  # it keeps its position until it is resumed
    ]
    for id in idle:
        writer.end_redrives(id, "the subscription was dropped")
        writer.delete_subscription(id)
        forget_consumers(writer, id)
        logger.warning("subscription %s was deleted: it was not used for longer than its inactive_timeout", id)
    return idle
