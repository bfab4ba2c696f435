"""Operations on the delivery rows of a subscription, inside a transaction. Both durable consumers use them.

Each function takes a Reader or a Writer and the subscription as stored, changes delivery rows, and returns the
subscription as it has to be saved. A function that can refuse does so before it writes. Decisions come from `delivery`.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import msgspec

from headwater.broker.committer import TransactionHooks
from headwater.broker.logger import logger
from headwater.broker.shared_consumers import next_token
from headwater.delivery.filters import Path, parse_path, value_at
from headwater.delivery.lease import release, renew, take
from headwater.delivery.retry import GiveUp, Reason, Retry, decide_redelivery
from headwater.delivery.window import WindowState
from headwater.errors import (
    InvalidDataError,
    LeaseLostError,
    NotDeliveredError,
    SubscriptionActiveError,
    UnknownSubscriptionError,
)
from headwater.formats import storable
from headwater.message import NAME_CHARS_MAX, NO_HEADERS, Message
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
DEAD_LETTER_LINES_MAX = 100  # in the application's log, of one transaction
DEAD_LETTER_ERROR_CHARS_MAX = 200

DROPPED_PAYLOAD = msgspec.Raw(b"null")
PAYLOAD_GONE = "retention deleted the message while it was in flight, so its data is not here"

replace = msgspec.structs.replace


class Claimed(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """A delivery in flight: the message, which attempt this is, and the token that proves the right to settle it."""

    message: Message
    attempt: int
    token: int


class Failure(msgspec.Struct):
    """Why a delivery failed, as its dead letter records it. The text of an exception may be anything, so it is made
    storable: a message whose failure cannot be recorded would be delivered for ever."""

    reason: Reason
    error: str | None = None
    stack: str | None = None
    handler: str | None = None

    def __post_init__(self) -> None:
        self.error = self.error and storable(self.error)
        self.stack = self.stack and storable(self.stack)


def load(reader: Reader, id: str) -> SubscriptionRecord:
    record = reader.subscription(id)
    if record is None:
        raise unknown(id)
    return record


def unknown(id: str) -> UnknownSubscriptionError:
    return UnknownSubscriptionError(
        f"there is no subscription {id!r}",
        where=id,
        next="`headwater subscriptions LOG` lists them",
    )


def load_held(reader: Reader, id: str, owner: str, fence: int, created_ms: int | None = None) -> SubscriptionRecord:
    """The subscription, if this owner still holds it. `created_ms`: and if it has not been removed and created anew."""
    record = reader.subscription(id)
    if record is None:
        raise unknown(id)
    if record.spec.mode == "exclusive" and not record.lease.held_by(owner, fence):
        raise taken_over(id)
    if created_ms is not None and record.created_ms != created_ms:
        raise LeaseLostError("the subscription was removed and made anew", where=id, next="Subscribe again")
    return record


def taken_over(id: str) -> LeaseLostError:
    return LeaseLostError(
        f"subscription '{id}' has been taken over, or was closed here",
        where=id,
        next="Subscribe again; what was in flight here is delivered to its next consumer",
    )


def settled_to(reader: Reader, record: SubscriptionRecord) -> int:
    """The seq at and below which everything that matches is settled."""
    first_row = reader.delivery_counts(record.id).first_seq
    return record.window.floor if first_row is None else min(record.window.floor, first_row - 1)


# --- acquiring ------------------------------------------------------------------------------------------------------
#
# Without a resume, every broken connection would deliver again what the client is busy with, and count it as a failed
# attempt. The client names the messages it holds, by seq and attempt. A delivery that no other consumer was given since
# is the client's again. One without a row was settled: its ack arrived, and only the answer was lost. A delivery that
# was sent and never arrived is not an attempt.


class Resume(msgspec.Struct, frozen=True):
    """What a client says when it connects: a unique name of its own choice, and (seq, attempt) of all that it has not
    settled. The first time it holds nothing."""

    owner: str
    held: Sequence[tuple[int, int]] = ()


class Resumed(msgspec.Struct, frozen=True):
    """What became of the deliveries that a reconnecting client held: still its own, or settled before. All others have
    been passed on."""

    held: list[Claimed]
    settled: list[int]


NOTHING_RESUMED = Resumed([], [])
SERVED = "serve"  # begins the name that a server's engine has, behind its host and process


class LeftInFlight(NamedTuple):
    """What the last consumer of an exclusive subscription left unsettled; valid while the stored window is this one."""

    window: WindowState
    seqs: list[int]


def take_exclusive_lease(
    writer: Writer, record: SubscriptionRecord, owner: str, now_ms: int, left: LeftInFlight | None = None
) -> SubscriptionRecord:
    """Take the lease of an exclusive subscription, and turn what its last consumer left in flight into rows to be
    delivered again. `left` is that, read beforehand where the filter takes time."""
    lease = take(record.lease, owner, now_ms, record.spec.lease_ms)
    if lease is None:
        left_s = (record.lease.until_ms - now_ms) / 1000
        raise already_active(
            record,
            "Close it, wait for it with the option timeout (the lease of a dead consumer "
            f"ends in {left_s:.0f} s), or set the option mode to shared to share the work",
        )
    seqs = left.seqs if left is not None and left.window == record.window else [*left_in_flight(writer, record)]
    has_row = writer.deliveries(record.id, seqs)
    # The old token stays on the row: it marks a delivery whose consumer vanished.
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


def already_active(record: SubscriptionRecord, next: str) -> SubscriptionActiveError:
    why = f"Subscription '{record.id}' is already active on another connection"  # JROW's text
    return SubscriptionActiveError(why, where=f"held by {_holder(record.lease.owner)}", next=next)


def _holder(owner: str) -> str:
    """Where to look for a holder, by the name that its `Engine` gave it."""
    host, _, rest = owner.partition(":")
    pid, _, name = rest.partition(":")
    is_here = (host, pid) == (socket.gethostname(), str(os.getpid()))
    if not pid:  # a client of a server may have a name of its own, under which it resumes
        return "a client of the server"
    if name.startswith(SERVED):
        return "a client of this server" if is_here else f"a client of the server in process {pid} on {host}"
    return "this process" if is_here else f"process {pid} on {host}"


def resume(
    writer: Writer,
    record: SubscriptionRecord,
    asked: Resume,
    consumer: str,
    now_ms: int,
    left: LeftInFlight | None = None,
) -> tuple[SubscriptionRecord, Resumed]:
    """Continue a subscription. An exclusive one that another consumer has had since is acquired anew, or refused."""
    if record.spec.mode != "exclusive":  # the token of a claim is unique, so this client gets one of its own
        token = next_token(record.lease.fence, consumer)
        record = replace(record, lease=replace(record.lease, fence=token))
        return _reclaim(writer, record, asked.held, now_ms)
    # Not by the fence: the answer to an earlier resume may be lost, and then the client knows an old one.
    if record.lease.last_owner != asked.owner:
        return take_exclusive_lease(writer, record, asked.owner, now_ms, left), NOTHING_RESUMED
    old_fence = record.lease.fence
    record = take_exclusive_lease(writer, replace(record, lease=release(record.lease)), asked.owner, now_ms, left)
    _take_back_undelivered(writer, record, old_fence, asked.held, now_ms)
    return _reclaim(writer, record, asked.held, now_ms)


def _reclaim(
    writer: Writer, record: SubscriptionRecord, held: Sequence[tuple[int, int]], now_ms: int
) -> tuple[SubscriptionRecord, Resumed]:
    token = record.lease.fence
    rows = writer.deliveries(record.id, [seq for seq, _ in held])
    # Attempts begin with 1: a row that was never delivered, such as a delayed one, does not count.
    mine = [rows[seq] for seq, attempt in held if seq in rows and rows[seq].attempts == attempt > 0]
    messages = writer.heads(row.seq for row in mine)  # their data is with the client
    due = with_dead_letter_copies(writer, [Due(row, messages.get(row.seq)) for row in mine])
    taken = [
        Claimed(message, row.attempts, token) for row, message in due if message is not None
    ]  # one that retention deleted meanwhile is reported as a gap
    again = {claimed.message.seq for claimed in taken}
    until_ms = now_ms + record.spec.ack_wait_ms
    writer.put_deliveries(record.id, [replace(r, token=token, due_ms=until_ms) for r in mine if r.seq in again])
    settled = [seq for seq, _ in held if seq not in rows and seq <= record.window.delivered]
    return record, Resumed(taken, settled)


def _take_back_undelivered(
    writer: Writer, record: SubscriptionRecord, fence: int, held: Sequence[tuple[int, int]], now_ms: int
) -> None:
    """A delivery that has the token of the old connection and is not held never arrived, so it is not an attempt. An
    earlier attempt at the same message, which the client may still hold, is the last one again."""
    arrived = set(held)
    lost = [
        replace(row, attempts=max(0, row.attempts - 1), due_ms=now_ms, token=0)
        for row in writer.deliveries_by(record.id, fence)
        if (row.seq, row.attempts) not in arrived
    ]
    writer.put_deliveries(record.id, lost)


# --- claiming -------------------------------------------------------------------------------------------------------


class FetchPlan(NamedTuple):
    """What there is to claim, read without disturbing the writer. `saved_to` is the stored position of the cursor.
    `at_end`: there is nothing behind `scanned_to`, or no room for it; only told if nothing new is found. `is_current`:
    made inside the transaction that claims, and of new messages alone."""

    room: int
    fresh: list[Message]
    scanned_from: int
    scanned_to: int
    saved_to: int
    at_end: bool
    next_due_ms: int | None
    has_gaps: bool
    is_current: bool = False


class Claim(NamedTuple):
    """`look_again`: there may be more, though nothing was found this time."""

    found: list[Claimed]
    look_again: bool = False


NOTHING = Claim([])


class ClaimResult(NamedTuple):
    """`suspect`: a delivery whose last attempt was not settled, perhaps because it kills its consumer. `look_again`:
    some were dropped or dead-lettered instead, or another claim was quicker, so there may be more though nothing was
    found. `redriven`: seqs of former dead letters."""

    record: SubscriptionRecord
    claimed: list[Claimed]
    suspect: Claimed | None = None
    look_again: bool = False
    redriven: frozenset[int] = frozenset()

    @property
    def size(self) -> int:
        return len(self.claimed) + (self.suspect is not None)


def claim_due(
    writer: Writer,
    hooks: TransactionHooks,
    record: SubscriptionRecord,
    limit: int,
    now_ms: int,
    *,
    suspects: bool,
    bytes_max: int | None = None,
) -> ClaimResult:
    """Claim rows that are due: retries, delayed ones and, if `suspects`, one suspect. Suspects come one at a time among
    the others: a message that kills its consumer takes no other suspect with it, and one that is never settled does not
    hold up the rest."""
    spec, token = record.spec, record.lease.fence
    rows: list[DeliveryRow] = []
    claimed: list[Claimed] = []
    suspect: Claimed | None = None
    dead: list[DeadLetter] = []
    gone: list[int] = []
    due = writer.due(record.id, now_ms, limit, spec.order, bytes_max=bytes_max)
    if any(row.token for row, _ in due):
        one = writer.due(record.id, now_ms, 1, spec.order, suspects=True) if suspects else []
        room = limit - len(one)
        due = [
            *(writer.due(record.id, now_ms, room, spec.order, suspects=False, bytes_max=bytes_max) if room else []),
            *one,
        ]
    for row, message in with_dead_letter_copies(writer, due):
        if message is None:
            gone.append(row.seq)
            writer.add_gap(Gap(record.id, row.seq, row.seq, 1, "deleted", now_ms))
        elif isinstance(decision := decide_redelivery(spec.retry, row.attempts, row.token > 0), GiveUp):
            dead.append(dead_letter(record.id, message, row, Failure(decision.reason, _seen(record, row)), now_ms))
        elif is_expired(message, now_ms):
            gone.append(row.seq)
            if spec.dead_letter_expired or row.dead_letter is not None:
                dead.append(dead_letter(record.id, message, row, Failure("expired"), now_ms))
        else:
            rows.append(replace(row, attempts=row.attempts + 1, due_ms=now_ms + spec.ack_wait_ms, token=token))
            if row.token:
                suspect = Claimed(message, row.attempts + 1, token)
            else:
                claimed.append(Claimed(message, row.attempts + 1, token))
    writer.put_deliveries(record.id, rows)
    record = add_dead_letters(writer, hooks, record, dead)
    writer.remove_deliveries(record.id, gone + [each.message.seq for each in dead])
    redelivered = sum(1 for row in rows if row.attempts > 1)
    record = replace(record, redelivered=record.redelivered + redelivered)
    redriven = frozenset(row.seq for row in rows if row.dead_letter is not None)
    return ClaimResult(record, claimed, suspect, bool(gone or dead), redriven)


def _seen(record: SubscriptionRecord, row: DeliveryRow) -> str:
    """Why a message that has had all its attempts is dead. The rows of a shared subscription do not tell a slow
    consumer from one that is gone, so the text names both."""
    times = "once" if row.attempts == 1 else f"{row.attempts} times"
    if not row.token:
        return f"delivered {times}, and released unsettled the last time"
    if record.spec.mode == "shared":
        return f"not acked within ack_wait, {times}, or its consumer was gone"
    if row.token < record.lease.fence:
        return f"delivered {times}, and its consumer was gone the last time"
    return f"not acked within ack_wait, {times}"


def with_dead_letter_copies(reader: Reader, due: list[Due]) -> list[Due]:
    """A redriven dead letter may outlive its message; then the copy that it carries is delivered."""
    orphans = [row.dead_letter for row, message in due if message is None and row.dead_letter is not None]
    if not orphans:
        return due
    copies = {letter.id: letter.message for letter in dead_letters_by_id(reader, orphans)}
    return [
        Due(row, copies.get(row.dead_letter) if message is None and row.dead_letter is not None else message)
        for row, message in due
    ]


def dead_letters_by_id(reader: Reader, ids: Sequence[int]) -> Iterator[DeadLetter]:
    query, after = DeadLetterQuery(ids=tuple(ids)), 0
    while page := reader.dead_letters(query, after, len(ids)):
        yield from page
        after = page[-1].id


def claim_fresh(
    writer: Writer, hooks: TransactionHooks, record: SubscriptionRecord, fresh: Scan, now_ms: int
) -> tuple[SubscriptionRecord, list[Claimed]]:
    """Claim messages that were never delivered before, each with a row."""
    spec, (messages, cursor) = record.spec, fresh
    ready, rows, expired = sort_fresh(messages, now_ms)
    token = record.lease.fence
    rows += [DeliveryRow(message.seq, 1, now_ms + spec.ack_wait_ms, token) for message in ready]
    writer.put_deliveries(record.id, rows)
    record = dead_letter_expired(writer, hooks, record, expired, now_ms)
    return replace(record, window=WindowState(cursor, cursor)), [Claimed(message, 1, token) for message in ready]


def parking_room(reader: Reader, id: str, spec: SubscriptionSpec) -> int:
    """How many messages may become rows now: order by key or priority is decided among rows."""
    counts = reader.delivery_counts(id)
    most = PRIORITY_ROWS_MAX if spec.order == "priority" else KEYED_ROWS_MAX
    return max(0, most - counts.in_flight - counts.waiting)


def park_and_claim(
    writer: Writer,
    hooks: TransactionHooks,
    record: SubscriptionRecord,
    limit: int,
    fresh: Callable[[int], Scan],
    now_ms: int,
    *,
    suspects: bool,
    bytes_max: int | None,
) -> ClaimResult:
    """Claim in order of key or priority: messages become rows first, and the due rows decide which one is next."""
    spec = record.spec
    path = None if spec.order_key is None else parse_path(spec.order_key)
    room = parking_room(writer, record.id, spec)
    if room > 0:
        messages, cursor = fresh(room)
        ready, rows, expired = sort_fresh(messages, now_ms)
        rows += [DeliveryRow(message.seq, 0, 0, 0, message.priority) for message in ready]
        if path is not None:
            keys = {message.seq: key_of(message, path) for message in messages}
            rows = [replace(row, key=keys[row.seq]) for row in rows]
        writer.put_deliveries(record.id, rows)
        record = dead_letter_expired(writer, hooks, record, expired, now_ms)
        record = replace(record, window=WindowState(cursor, cursor))
    return claim_due(writer, hooks, record, limit, now_ms, suspects=suspects, bytes_max=bytes_max)


def key_of(message: Message, path: Path) -> str | None:
    """The key of a message, of which one at a time is in flight; None if it has none."""
    try:
        value = value_at(path, message.field)
    except InvalidDataError:  # unreadable: it has no key, and its handler fails
        return None
    return None if value is None else value if isinstance(value, str) else msgspec.json.encode(value).decode()


def sort_fresh(messages: Sequence[Message], now_ms: int) -> tuple[list[Message], list[DeliveryRow], list[Message]]:
    """Messages ready now, rows for those that are delayed, and messages that expired before their delivery."""
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


def released_row(claimed: Claimed, row: DeliveryRow | None, now_ms: int, *, is_suspect: bool) -> DeliveryRow:
    """The row of a delivery that is released before any code saw it: due now, and not an attempt. A token marks a
    suspect. A suspect stays one, but under an older token: a resume takes back the attempts of all rows that have the
    consumer's own."""
    row = row or DeliveryRow(claimed.message.seq, claimed.attempt, 0)
    token = max(1, claimed.token - 1) if is_suspect else 0
    return replace(row, attempts=claimed.attempt - 1, due_ms=now_ms, token=token)


def unsettled_row(claimed: Claimed, row: DeliveryRow | None, now_ms: int, *, vanished: bool) -> DeliveryRow:
    """The row of a delivery that was seen and not settled: due now, and a suspect if its consumer vanished."""
    row = row or DeliveryRow(claimed.message.seq, claimed.attempt, 0)
    return replace(row, attempts=claimed.attempt, due_ms=now_ms, token=claimed.token if vanished else 0)


def not_in_flight(reader: Reader, record: SubscriptionRecord, seq: int) -> NotDeliveredError | LeaseLostError:
    is_behind = seq <= record.window.delivered
    here = reader.heads([seq]).get(seq) if is_behind else None
    if not is_behind or (here is not None and not _may_be_wanted(record.spec, here)):
        return NotDeliveredError(
            f"message {seq} was never delivered to '{record.id}'",
            where=record.id,
            next="Settle only what was delivered",
        )
    return LeaseLostError(
        f"message {seq} is not in flight for '{record.id}' any more: it was settled already, or its time ran out "
        "and it was passed on",
        where=record.id,
        next="Drop it; if handling takes long, set a longer ack_wait, or extend it in time",
    )


def _may_be_wanted(spec: SubscriptionSpec, head: Message) -> bool:
    """Whether the subscription wants it, apart from its content, which is not read only to word an error."""
    return selection_of(replace(spec, where=None)).keeps(head)


def why_not_acked(
    reader: Reader, record: SubscriptionRecord, seqs: Sequence[int]
) -> dict[int, NotDeliveredError | LeaseLostError]:
    """Why each of these seqs, which are not in flight, was not acked; without those that were acked before."""
    acked = acked_before(reader, record, seqs)
    return {seq: not_in_flight(reader, record, seq) for seq in seqs if seq not in acked}


def acked_before(reader: Reader, record: SubscriptionRecord, seqs: Sequence[int]) -> set[int]:
    """Which of these the subscription has settled, and not by a dead letter. A message that retention has deleted since
    counts: an ack may be repeated after that, too."""
    rows = reader.deliveries(record.id, seqs)
    settled = {seq for seq in seqs if seq > 0 and record.window.is_settled(seq) and seq not in rows}
    here = reader.heads(settled)
    settled = {seq for seq in settled if seq not in here or _may_be_wanted(record.spec, here[seq])}
    dead: set[int] = set()
    after = 0
    query = DeadLetterQuery(subscription=record.id, seqs=tuple(settled))
    while record.dead_lettered and (page := reader.dead_letters(query, after, RECOVERY_PAGE)):
        dead.update(letter.message.seq for letter in page)
        after = page[-1].id
    return settled - dead


def renewed(record: SubscriptionRecord, now_ms: int, **changes: Any) -> SubscriptionRecord:
    """The subscription with these changes and, since its consumer has just shown that it lives, a lease that begins
    anew."""
    if record.spec.mode == "exclusive" and "lease" not in changes:
        changes["lease"] = renew(record.lease, now_ms, record.spec.lease_ms)
    return replace(record, active_ms=now_ms, **changes)


def nack_row(
    writer: Writer,
    hooks: TransactionHooks,
    record: SubscriptionRecord,
    claimed: Claimed,
    row: DeliveryRow,
    failure: Failure,
    now_ms: int,
    decision: Retry | GiveUp,
) -> SubscriptionRecord:
    """Deliver it again at the time of the decision, or dead-letter it."""
    if isinstance(decision, GiveUp):
        return reject_row(writer, hooks, record, claimed, row, replace(failure, reason=decision.reason), now_ms)
    writer.put_deliveries(record.id, [replace(row, due_ms=decision.at_ms, token=0)])
    return record


def reject_row(
    writer: Writer,
    hooks: TransactionHooks,
    record: SubscriptionRecord,
    claimed: Claimed,
    row: DeliveryRow,
    failure: Failure,
    now_ms: int,
) -> SubscriptionRecord:
    """Dead-letter a delivery; its row, if it has one, is removed."""
    message = claimed.message
    if message.raw is DROPPED_PAYLOAD:
        [(_, stored)] = with_dead_letter_copies(writer, [Due(row, writer.messages([row.seq]).get(row.seq))])
        if stored is None:
            failure = replace(failure, error=f"{PAYLOAD_GONE}; {failure.error}" if failure.error else PAYLOAD_GONE)
        message = stored or message
    writer.remove_deliveries(record.id, [row.seq])
    return add_dead_letters(writer, hooks, record, [dead_letter(record.id, message, row, failure, now_ms)])


def drop_payloads(sent: Iterable[Claimed]) -> None:
    """Drop the payloads of deliveries that were sent to a client: in flight they need none, and the log has them.
    Otherwise clients that do not settle decide how much memory the server needs."""
    for claimed in sent:
        claimed.message.raw, claimed.message.raw_headers = DROPPED_PAYLOAD, NO_HEADERS


# --- dead letters ---------------------------------------------------------------------------------------------------


def dead_letter(subscription: str, message: Message, row: DeliveryRow, failure: Failure, now_ms: int) -> DeadLetter:
    """The texts of a failure come from outside; of one that is too long the beginning is kept."""
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


def add_dead_letters(
    writer: Writer, hooks: TransactionHooks, record: SubscriptionRecord, letters: Sequence[DeadLetter]
) -> SubscriptionRecord:
    """Store dead letters. One that was redriven and failed again keeps its id and its count of redrives."""
    if not letters:
        return record
    again = [letter.id for letter in letters if letter.id]
    if again:
        known = {old.id: old for old in dead_letters_by_id(writer, again)}
        letters = [
            replace(letter, redrives=known[letter.id].redrives, redrive_error=letter.error or letter.reason)
            if letter.id in known
            else replace(letter, id=0)
            for letter in letters
        ]
    writer.save_dead_letters(letters)
    hooks.then.append(lambda: _log_dead_letters(letters))
    return replace(record, dead_lettered=record.dead_lettered + len(letters))


def _log_dead_letters(letters: Sequence[DeadLetter]) -> None:
    """A line for each, up to DEAD_LETTER_LINES_MAX at a time."""
    for letter in letters[:DEAD_LETTER_LINES_MAX]:
        error = (letter.error or "").partition("\n")[0][:DEAD_LETTER_ERROR_CHARS_MAX]
        logger.warning(
            "message %d on %s is dead-lettered in subscription %s: %s, attempt %d%s",
            letter.message.seq,
            letter.message.topic,
            letter.subscription,
            letter.reason,
            letter.attempts,
            f": {error}" if error else "",
        )
    if len(letters) > DEAD_LETTER_LINES_MAX:
        more = len(letters) - DEAD_LETTER_LINES_MAX
        logger.warning("%d more messages are dead-lettered in subscription %s", more, letters[0].subscription)


def dead_letter_expired(
    writer: Writer, hooks: TransactionHooks, record: SubscriptionRecord, expired: Sequence[Message], now_ms: int
) -> SubscriptionRecord:
    if not record.spec.dead_letter_expired:
        return record
    letters = [
        dead_letter(record.id, message, DeliveryRow(message.seq, 0, 0), Failure("expired"), now_ms)
        for message in expired
    ]
    return add_dead_letters(writer, hooks, record, letters)
