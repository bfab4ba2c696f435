"""What happens to deliveries inside a transaction: claimed, settled, retried, buried. Decisions come from `delivery`.

Functions here take a Writer and a subscription as stored, change the delivery rows, and return the subscription as it
should be saved. Those that can refuse do so before they write.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import msgspec

from headwater.delivery.lease import renew, take
from headwater.delivery.retry import Bury, Reason, decide_redelivery
from headwater.delivery.where_eval import value_at
from headwater.delivery.where_syntax import Path, parse_path
from headwater.delivery.window import WindowState
from headwater.errors import InvalidData, LeaseLost, NotDelivered, SubscriptionActive, UnknownSubscription
from headwater.message import NAME_CHARS_MAX, Message
from headwater.ports.records import (
    DeadLetter,
    DeadLetterQuery,
    DeliveryRow,
    Due,
    Gap,
    Scan,
    SubscriptionRecord,
    SubscriptionSpec,
    selection_of,
)
from headwater.ports.store import Reader, Writer

PRIORITY_ROWS_MAX = 10_000  # how many messages are looked through for the highest priority
KEYED_ROWS_MAX = 1_000  # how many messages may be parked behind others of their key
RECOVERY_PAGE = 1_000
ERROR_CHARS_MAX = 2_000  # of a dead letter
STACK_CHARS_MAX = 8_000

replace = msgspec.structs.replace


class Claimed(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """A message handed out: which attempt it is, and the token that proves the right to settle it."""

    message: Message
    attempt: int
    token: int


class Failure(NamedTuple):
    """Why a delivery failed, as its dead letter will tell."""

    reason: Reason
    error: str | None = None
    stack: str | None = None
    handler: str | None = None


def load(reader: Reader, id: str) -> SubscriptionRecord:
    record = reader.subscription(id)
    if record is None:
        raise unknown(id)
    return record


def unknown(id: str) -> UnknownSubscription:
    return UnknownSubscription(
        f"there is no subscription {id!r}",
        where=id,
        next="Subscribe first, which creates it; `headwater subscriptions` lists those there are",
    )


def load_held(reader: Reader, id: str, owner: str, fence: int) -> SubscriptionRecord:
    """The subscription, if this owner still holds it."""
    record = load(reader, id)
    if record.spec.mode == "exclusive" and not record.lease.held_by(owner, fence):
        raise taken_over(id)
    return record


def taken_over(id: str) -> LeaseLost:
    return LeaseLost(
        f"subscription '{id}' has been taken over",
        where=id,
        next="Subscribe again; what was in flight here is delivered to its new holder",
    )


def settled_to(reader: Reader, record: SubscriptionRecord) -> int:
    """The seq at and below which everything that matches is settled."""
    first_row = reader.delivery_counts(record.id).first_seq
    return record.window.floor if first_row is None else min(record.window.floor, first_row - 1)


# --- holding --------------------------------------------------------------------------------------------------------


class LeftInFlight(NamedTuple):
    """What the last holder of an exclusive subscription left unsettled, as long as its window is this one."""

    window: WindowState
    seqs: list[int]


def acquire(
    writer: Writer, record: SubscriptionRecord, owner: str, now_ms: int, left: LeftInFlight | None = None
) -> SubscriptionRecord:
    """Take an exclusive subscription, and turn what its last holder left in flight into rows to be delivered again.
    `left` is what was looked for before, where that takes time."""
    lease = take(record.lease, owner, now_ms, record.spec.lease_ms)
    if lease is None:
        left_s = (record.lease.until_ms - now_ms) / 1000
        raise already_active(
            record,
            f"Close it there, or set the option wait to wait for it (a dead holder's lease ends in {left_s:.0f} s), "
            "or the option mode to shared to share the work",
        )
    seqs = left.seqs if left is not None and left.window == record.window else [*left_in_flight(writer, record)]
    has_row = writer.deliveries(record.id, seqs)
    # The old token stays on the row: it marks a delivery whose holder vanished.
    token = max(1, record.lease.fence)
    writer.put_deliveries(record.id, [DeliveryRow(seq, 1, now_ms, token) for seq in seqs if seq not in has_row])
    writer.end_leases(record.id, now_ms)
    end = record.window.delivered
    return replace(record, lease=lease, window=WindowState(end, end), active_ms=now_ms)


def left_in_flight(reader: Reader, record: SubscriptionRecord) -> Iterator[int]:
    window, selection = record.window, selection_of(record.spec)
    after = window.floor
    while after < window.delivered:
        found, after = reader.scan_times(selection, after, RECOVERY_PAGE, window.delivered)
        yield from (seq for seq, _ in found if not window.is_settled(seq))


def already_active(record: SubscriptionRecord, next: str) -> SubscriptionActive:
    why = f"Subscription '{record.id}' is already active on another connection"
    return SubscriptionActive(why, where=record.lease.owner, next=next)


# --- claiming -------------------------------------------------------------------------------------------------------


class Handed(NamedTuple):
    """`suspect`: one whose last delivery was not settled, perhaps because it kills its consumer. `dropped`: some were
    dropped or buried instead, so there may be more behind them. `redriven`: the seqs of those that were dead before."""

    record: SubscriptionRecord
    claimed: list[Claimed]
    suspect: Claimed | None = None
    dropped: bool = False
    redriven: frozenset[int] = frozenset()

    @property
    def size(self) -> int:
        return len(self.claimed) + (self.suspect is not None)


def claim_due(
    writer: Writer,
    record: SubscriptionRecord,
    limit: int,
    now_ms: int,
    *,
    suspects: bool,
    bytes_max: int | None = None,
) -> Handed:
    """Hand out rows that are due: retries, delayed ones, and a suspect, if it may have one. Suspects come one at a time
    among the others: a message that kills its consumer takes no other suspect with it, and one that is never settled
    does not hold up the rest."""
    spec, token = record.spec, record.lease.fence
    rows: list[DeliveryRow] = []
    claimed: list[Claimed] = []
    suspect: Claimed | None = None
    buried: list[DeadLetter] = []
    gone: list[int] = []
    due = writer.due(record.id, now_ms, limit, spec.order, bytes_max=bytes_max)
    if any(row.token for row, _ in due):
        one = writer.due(record.id, now_ms, 1, spec.order, suspects=True) if suspects else []
        room = limit - len(one)
        due = [
            *(writer.due(record.id, now_ms, room, spec.order, suspects=False, bytes_max=bytes_max) if room else []),
            *one,
        ]
    for row, message in with_buried_copies(writer, due):
        if message is None:
            gone.append(row.seq)
            writer.add_gap(Gap(record.id, row.seq, row.seq, 1, "deleted", now_ms))
        elif isinstance(decision := decide_redelivery(spec.retry, row.attempts, row.token > 0), Bury):
            buried.append(dead_letter(record.id, message, row, Failure(decision.reason, _seen(record, row)), now_ms))
        elif is_expired(message, now_ms):
            gone.append(row.seq)
            if spec.bury_expired or row.dead_letter is not None:
                buried.append(dead_letter(record.id, message, row, Failure("expired"), now_ms))
        else:
            rows.append(replace(row, attempts=row.attempts + 1, due_ms=now_ms + spec.ack_wait_ms, token=token))
            if row.token:
                suspect = Claimed(message, row.attempts + 1, token)
            else:
                claimed.append(Claimed(message, row.attempts + 1, token))
    writer.put_deliveries(record.id, rows)
    record = bury(writer, record, buried)
    writer.remove_deliveries(record.id, gone + [letter.message.seq for letter in buried])
    redelivered = sum(1 for row in rows if row.attempts > 1)
    record = replace(record, redelivered=record.redelivered + redelivered)
    redriven = frozenset(row.seq for row in rows if row.dead_letter is not None)
    return Handed(record, claimed, suspect, bool(gone or buried), redriven)


def _seen(record: SubscriptionRecord, row: DeliveryRow) -> str:
    """Why a message that has had all its attempts is dead. Sharers are not told apart, so of them both is said."""
    times = "once" if row.attempts == 1 else f"{row.attempts} times"
    if not row.token:
        return f"delivered {times}, and given back unsettled the last time"
    if record.spec.mode == "shared":
        return f"not acked within ack_wait, {times}, or its consumer was gone"
    if row.token < record.lease.fence:
        return f"delivered {times}, and its consumer was gone the last time"
    return f"not acked within ack_wait, {times}"


def with_buried_copies(reader: Reader, due: list[Due]) -> list[Due]:
    """Redriven dead letters may have outlived their message; then the copy they carry is delivered."""
    orphans = [row.dead_letter for row, message in due if message is None and row.dead_letter is not None]
    if not orphans:
        return due
    copies = {letter.id: letter.message for letter in letters_by_id(reader, orphans)}
    return [
        Due(row, copies.get(row.dead_letter) if message is None and row.dead_letter is not None else message)
        for row, message in due
    ]


def letters_by_id(reader: Reader, ids: Sequence[int]) -> Iterator[DeadLetter]:
    query, after = DeadLetterQuery(ids=tuple(ids)), 0
    while page := reader.dead_letters(query, after, len(ids)):
        yield from page
        after = page[-1].id


def claim_fresh(
    writer: Writer, record: SubscriptionRecord, fresh: Scan, now_ms: int
) -> tuple[SubscriptionRecord, list[Claimed]]:
    """Hand out messages never delivered before, each with a row of its own."""
    spec, (messages, cursor) = record.spec, fresh
    ready, rows, expired = sort_fresh(messages, now_ms)
    token = record.lease.fence
    rows += [DeliveryRow(message.seq, 1, now_ms + spec.ack_wait_ms, token) for message in ready]
    writer.put_deliveries(record.id, rows)
    record = bury_expired(writer, record, expired, now_ms)
    return replace(record, window=WindowState(cursor, cursor)), [Claimed(message, 1, token) for message in ready]


def parking_room(reader: Reader, id: str, spec: SubscriptionSpec) -> int:
    """How many messages may become rows now, so that the due ones of them say whose turn it is."""
    counts = reader.delivery_counts(id)
    most = PRIORITY_ROWS_MAX if spec.order == "priority" else KEYED_ROWS_MAX
    return max(0, most - counts.in_flight - counts.waiting)


def park_and_claim(
    writer: Writer,
    record: SubscriptionRecord,
    limit: int,
    fresh: Callable[[int], Scan],
    now_ms: int,
    *,
    suspects: bool,
    bytes_max: int | None,
) -> Handed:
    """Where order is by key or priority, messages become rows first and the due rows say whose turn it is."""
    spec = record.spec
    path = None if spec.order_key is None else parse_path(spec.order_key)
    room = parking_room(writer, record.id, spec)
    if room > 0:
        messages, cursor = fresh(room)
        ready, rows, expired = sort_fresh(messages, now_ms)
        rows += [DeliveryRow(message.seq, 0, 0, 0, message.priority) for message in ready]
        if path is not None:
            keys = {message.seq: _key_of(message, path) for message in messages}
            rows = [replace(row, key=keys[row.seq]) for row in rows]
        writer.put_deliveries(record.id, rows)
        record = bury_expired(writer, record, expired, now_ms)
        record = replace(record, window=WindowState(cursor, cursor))
    return claim_due(writer, record, limit, now_ms, suspects=suspects, bytes_max=bytes_max)


def _key_of(message: Message, path: Path) -> str | None:
    try:
        value = value_at(path, message.field)
    except InvalidData:  # unreadable: it has no key, and fails when it is handled
        return None
    return None if value is None else value if isinstance(value, str) else msgspec.json.encode(value).decode()


def sort_fresh(messages: Sequence[Message], now_ms: int) -> tuple[list[Message], list[DeliveryRow], list[Message]]:
    """Messages ready now, rows for those that are delayed, and messages that expired before anybody got them."""
    ready = [message for message in messages if message.deliver_ms is None and message.expires_ms is None]
    if len(ready) == len(messages):  # as a rule
        return ready, [], []
    ready, delayed, expired = [], [], []
    for message in messages:
        if message.deliver_ms is None and message.expires_ms is None:
            ready.append(message)
        elif is_expired(message, now_ms):
            expired.append(message)
        elif message.deliver_ms is not None and message.deliver_ms > now_ms:
            delayed.append(DeliveryRow(message.seq, 0, message.deliver_ms, 0, message.priority))
        else:
            ready.append(message)
    return ready, delayed, expired


def is_expired(message: Message, now_ms: int) -> bool:
    return message.expires_ms is not None and message.expires_ms <= now_ms


# --- settling -------------------------------------------------------------------------------------------------------


def rows_in_flight(
    reader: Reader, record: SubscriptionRecord, claims: Sequence[tuple[int, int, int]]
) -> list[DeliveryRow]:
    """The rows of claims (seq, attempt, token), or an error if one of them is not, or no longer, in flight there."""
    found = reader.deliveries(record.id, [seq for seq, _, _ in claims])
    rows: list[DeliveryRow] = []
    for seq, attempt, token in claims:
        row = found.get(seq)
        if row is None or row.token != token or row.attempts != attempt or row.token == 0:
            raise not_in_flight(reader, record, seq)
        rows.append(row)
    return rows


def not_in_flight(reader: Reader, record: SubscriptionRecord, seq: int) -> NotDelivered | LeaseLost:
    is_behind = seq <= record.window.delivered
    here = reader.heads([seq]).get(seq) if is_behind else None
    if not is_behind or (here is not None and not _may_be_wanted(record.spec, here)):
        return NotDelivered(
            f"message {seq} was never delivered to '{record.id}'",
            where=record.id,
            next="Settle only what was delivered",
        )
    return LeaseLost(
        f"message {seq} is not in flight for '{record.id}' any more: it was settled already, or its time ran out "
        "and it was passed on",
        where=record.id,
        next="Drop it; if handling takes long, set a longer ack_wait, or extend it in time",
    )


def _may_be_wanted(spec: SubscriptionSpec, head: Message) -> bool:
    """By all but its content, which is not looked at only to find the right words for an error."""
    return selection_of(replace(spec, where=None)).keeps(head)


def acked_before(reader: Reader, record: SubscriptionRecord, seqs: Sequence[int]) -> set[int]:
    """Which of these the subscription has settled, and not by a dead letter. A message that retention deleted meanwhile
    counts: an ack may be repeated after that, too."""
    rows = reader.deliveries(record.id, seqs)
    settled = {seq for seq in seqs if seq > 0 and record.window.is_settled(seq) and seq not in rows}
    here = reader.heads(settled)
    settled = {seq for seq in settled if seq not in here or _may_be_wanted(record.spec, here[seq])}
    dead: set[int] = set()
    after = 0
    query = DeadLetterQuery(subscription=record.id, seqs=tuple(settled))
    while record.buried and (page := reader.dead_letters(query, after, RECOVERY_PAGE)):
        dead.update(letter.message.seq for letter in page)
        after = page[-1].id
    return settled - dead


def renewed(record: SubscriptionRecord, now_ms: int) -> SubscriptionRecord:
    """The holder has just shown that it lives."""
    if record.spec.mode != "exclusive":
        return replace(record, active_ms=now_ms)
    return replace(record, active_ms=now_ms, lease=renew(record.lease, now_ms, record.spec.lease_ms))


# --- burying --------------------------------------------------------------------------------------------------------


def dead_letter(subscription: str, message: Message, row: DeliveryRow, failure: Failure, now_ms: int) -> DeadLetter:
    """What is told of a failure may come from anywhere; of a text that is too long the beginning is kept."""
    return DeadLetter(
        row.dead_letter or 0,
        subscription,
        message,
        failure.reason,
        row.attempts,
        now_ms,
        _cut(failure.error, ERROR_CHARS_MAX),
        _cut(failure.stack, STACK_CHARS_MAX),
        _cut(failure.handler, NAME_CHARS_MAX),
    )


def _cut(text: str | None, chars_max: int) -> str | None:
    return text if text is None or len(text) <= chars_max else f"{text[: chars_max - 1]}…"


def bury(writer: Writer, record: SubscriptionRecord, letters: Sequence[DeadLetter]) -> SubscriptionRecord:
    """Store dead letters. One that was redriven and failed again keeps its id and its count of redrives."""
    if not letters:
        return record
    again = [letter.id for letter in letters if letter.id]
    if again:
        known = {old.id: old for old in letters_by_id(writer, again)}
        letters = [
            replace(letter, redrives=known[letter.id].redrives, redrive_error=letter.error or letter.reason)
            if letter.id in known
            else replace(letter, id=0)
            for letter in letters
        ]
    writer.bury(letters)
    return replace(record, buried=record.buried + len(letters))


def bury_expired(
    writer: Writer, record: SubscriptionRecord, expired: Sequence[Message], now_ms: int
) -> SubscriptionRecord:
    if not record.spec.bury_expired:
        return record
    letters = [
        dead_letter(record.id, message, DeliveryRow(message.seq, 0, 0), Failure("expired"), now_ms)
        for message in expired
    ]
    return bury(writer, record, letters)
