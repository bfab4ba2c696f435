"""Going on after a connection broke: a holder that still lives takes up what it had in its hands.

Without this, every broken connection would deliver again what the client is busy with, and count it as a failed
attempt. The client says which messages it holds, by seq and attempt. A delivery that nobody else was given since is the
client's again; one without a row was settled, its ack got through and only the answer was lost; and what was handed out
but never arrived counts as no attempt.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from headwater.broker.claims import Claimed, LeftInFlight, acquire, replace, with_buried_copies
from headwater.delivery.lease import release
from headwater.ports.records import Due, SubscriptionRecord
from headwater.ports.store import Writer


class Resume(msgspec.Struct, frozen=True):
    """What a holder says of itself: a name of its own choice that nobody else has, and (seq, attempt) of all that it
    has not settled. The first time it holds nothing."""

    owner: str
    held: Sequence[tuple[int, int]] = ()


class Resumed(msgspec.Struct, frozen=True):
    """What became of what it held: its own again, or settled before. All else has passed on to others."""

    held: list[Claimed]
    settled: list[int]


NOTHING_RESUMED = Resumed([], [])


def resume(
    writer: Writer, record: SubscriptionRecord, asked: Resume, now_ms: int, left: LeftInFlight | None = None
) -> tuple[SubscriptionRecord, Resumed]:
    """Take up a subscription again. An exclusive one that somebody else has had since is begun anew, or refused."""
    if record.spec.mode != "exclusive":
        return _take_up(writer, record, record.lease.fence, asked.held, now_ms)
    # Not by the fence: the answer to an earlier resume may be lost, and then the client knows an old one.
    if record.lease.last_owner != asked.owner:
        return acquire(writer, record, asked.owner, now_ms, left), NOTHING_RESUMED
    old_fence = record.lease.fence
    record = acquire(writer, replace(record, lease=release(record.lease)), asked.owner, now_ms, left)
    _unsee_what_never_arrived(writer, record, old_fence, asked.held, now_ms)
    return _take_up(writer, record, record.lease.fence, asked.held, now_ms)


def _take_up(
    writer: Writer, record: SubscriptionRecord, token: int, held: Sequence[tuple[int, int]], now_ms: int
) -> tuple[SubscriptionRecord, Resumed]:
    if record.spec.mode != "exclusive":  # a claim of its own, told apart from all others by its token
        record = replace(record, lease=replace(record.lease, fence=record.lease.fence + 1))
        token = record.lease.fence
    rows = writer.deliveries(record.id, [seq for seq, _ in held])
    # Attempts begin with 1: a row that was never handed out, such as a delayed one, is nobody's.
    mine = [rows[seq] for seq, attempt in held if seq in rows and rows[seq].attempts == attempt > 0]
    messages = writer.heads(row.seq for row in mine)  # their data is with the client
    due = with_buried_copies(writer, [Due(row, messages.get(row.seq)) for row in mine])
    taken = [
        Claimed(message, row.attempts, token) for row, message in due if message is not None
    ]  # one that retention took meanwhile is left to be told as a gap
    again = {claimed.message.seq for claimed in taken}
    until_ms = now_ms + record.spec.ack_wait_ms
    writer.put_deliveries(record.id, [replace(r, token=token, due_ms=until_ms) for r in mine if r.seq in again])
    settled = [seq for seq, _ in held if seq not in rows and seq <= record.window.delivered]
    return record, Resumed(taken, settled)


def _unsee_what_never_arrived(
    writer: Writer, record: SubscriptionRecord, fence: int, held: Sequence[tuple[int, int]], now_ms: int
) -> None:
    """What has the token of the old connection, and is not held: as if it had never been handed out. An earlier attempt
    at the same message, which the client may still have in its hands, is the last one again."""
    arrived = set(held)
    lost = [
        replace(row, attempts=max(0, row.attempts - 1), due_ms=now_ms, token=0)
        for row in writer.deliveries_by(record.id, fence)
        if (row.seq, row.attempts) not in arrived
    ]
    writer.put_deliveries(record.id, lost)
