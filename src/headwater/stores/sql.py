"""What the SQL stores share: named statements, records out of rows, topic counts, seqs, and the part of a scan that the
database leaves to Python."""

from __future__ import annotations

import contextlib
import re
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import resources
from operator import attrgetter
from typing import Any, ClassVar, NamedTuple, TypeVar

import msgspec

from headwater.delivery.filters import Where
from headwater.delivery.lease import Lease
from headwater.delivery.publishing import DedupeWindow, Receipt
from headwater.delivery.retention import Kept, Limits, Run, merged, runs_of
from headwater.delivery.window import WindowState
from headwater.errors import InvalidDataError, NewerSchemaError
from headwater.message import (
    EXTRA_FIELDS,
    SALT_BITS,
    Draft,
    Message,
    MessageDocument,
    from_document,
    scoped_id,
    to_document,
)
from headwater.ports.records import (
    Appended,
    DeadLetter,
    DeadLetterQuery,
    DeliveryCounts,
    DeliveryRow,
    Found,
    Gap,
    LetterColumn,
    LetterGroup,
    Order,
    RetentionPolicy,
    Sample,
    Scan,
    Selection,
    SubscriptionRecord,
    SubscriptionSpec,
    Times,
    Timing,
    TopicCount,
)
from headwater.ports.store import LETTERS_BYTES_MAX, SEQ_MAX
from headwater.stores.conditions import SMALL_BYTES_MAX, Condition, Wanted, all_of, topic_condition
from headwater.topics import Dialect, Pattern
from headwater.version import UPGRADE

OWN_TABLES = frozenset(
    [
        "messages",
        "remembered_ids",
        "receipts",
        "subscriptions",
        "deliveries",
        "dead_letters",
        "gaps",
        "retention",
        "topic_counts",
        "pruned",
        "sinks",
        "timings",
        "samples",
        "leases",
        "headwater",
    ]
)
COUNT_PAGE = 1_000  # messages that are looked at together to be counted
LOADED_PAGE = 10  # whole messages that are loaded together to be counted

RUNS = msgspec.json.Decoder(list[tuple[int, int]])
_spec = msgspec.json.Decoder(SubscriptionSpec)
_settled = msgspec.json.Decoder(tuple[tuple[int, int], ...])
_document = msgspec.json.Decoder(MessageDocument)
_topic_counts = msgspec.json.Decoder(list[TopicCount])

ORDER_BY: dict[Order, str] = {"seq": "seq", "priority": "priority DESC, seq"}
WHICH: dict[bool | None, str] = {None: "TRUE", True: "token > 0", False: "token = 0"}  # suspects, or not
AnswerT = TypeVar("AnswerT")

_TimedCandidate = tuple[int, int, str, str | None, str | None]  # seq, time of publishing, topic, from, to
_times = msgspec.json.Decoder(list[tuple[int, int]])
_candidates = msgspec.json.Decoder(list[_TimedCandidate])
SEQS = msgspec.json.Decoder(list[int])
MESSAGES = msgspec.json.Decoder(list[Message])
DELIVERIES = msgspec.json.Decoder(list[DeliveryRow])
UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
_letter_counts = msgspec.json.Decoder(list[tuple[str, int]])
_letter_groups = msgspec.json.Decoder(list[LetterGroup])
_receipts = msgspec.json.Decoder(list[Receipt])
_texts = msgspec.json.Decoder(list[str])
_kept = msgspec.json.Decoder(list[tuple[int, str, int, int]])
_limits = msgspec.json.Decoder(Limits)
_timings = msgspec.json.Decoder(list[Timing])
_samples = msgspec.json.Decoder(list[Sample])
_extras, _id = map(attrgetter, ("extras", "id"))

SIFT_BYTES_MAX = 1024 * 1024  # of messages that were found or looked into
SIFT_S_MAX = 0.05
CANDIDATES_MAX = 10_000
SCAN_SEQS_MAX = 50_000  # how many rows one scan may walk past, so that no read transaction lasts long
DECODED_BYTES_MAX = 3 * 1024 * 1024  # of payloads that are kept decoded; in Python's objects up to 25 times as much

_HEADING = re.compile(r"^-- :(\w+): .*\n", re.MULTILINE)
_COMMENT = re.compile(r"^--.*\n?", re.MULTILINE)
_BLANK = re.compile(r"\{(\w+)\}")


def facts_of_new_log(schema_version: int) -> list[tuple[str, int]]:
    now_ms = time.time_ns() // 1_000_000
    salt = secrets.randbits(SALT_BITS)
    return [("schema_version", schema_version), ("salt", salt), ("created_at", now_ms), ("counted_to", 0)]


def newer_schema(version: int, known: int, where: str) -> NewerSchemaError:
    return NewerSchemaError(
        f"the log has schema {version}, this Headwater knows up to {known}",
        where=where,
        next=UPGRADE,
    )


# --- statements ------------------------------------------------------------------------------------------------------


def text_of(package: str, file: str) -> str:
    return resources.files(package).joinpath(file).read_text(encoding="utf-8")


def load(text: str, **pieces: str) -> dict[str, str]:
    """The statements of a file by name. {other} stands for the text of another one, or for one of the `pieces`."""
    _, *parts = _HEADING.split(text)
    found = {name: _COMMENT.sub("", body).strip() for name, body in zip(parts[::2], parts[1::2], strict=True)}
    known = {**pieces, **found}

    def filled(sql: str) -> str:
        return _BLANK.sub(lambda blank: filled(known[blank[1]]) if blank[1] in known else blank[0], sql)

    return {name: filled(sql) for name, sql in found.items()}


def extra_columns(form: str = "{}", *, headers: str | None = None, separator: str = ", ") -> str:
    """The columns of the fields that most messages do without, each in a `form`, the free headers in another."""
    return separator.join(
        (headers or form if field.kind == "json" else form).format(f'"{field.name}"') for field in EXTRA_FIELDS
    )


# --- records, counts and seqs ----------------------------------------------------------------------------------------


def record_of(row: tuple[Any, ...]) -> SubscriptionRecord:
    id, spec, floor, delivered, settled, holder, fence, until, created, active, acked, redelivered, dead_lettered = row
    return SubscriptionRecord(
        id,
        _spec.decode(spec),
        created,
        active,
        WindowState(floor, delivered, _settled.decode(settled)),
        Lease(holder, fence, until),
        acked,
        redelivered,
        dead_lettered,
    )


def declared_values(record: SubscriptionRecord) -> tuple[Any, ...]:
    """The first columns of `save_subscription`: what a subscription was declared with."""
    spec = record.spec
    return record.id, spec.pattern, spec.mode, to_json(spec), record.created_ms


def moved_values(record: SubscriptionRecord, storable: Callable[[str], Any] = lambda text: text) -> tuple[Any, ...]:
    """The other columns: what claims and acks change of it."""
    window, lease = record.window, record.lease
    return (
        window.floor,
        window.delivered,
        to_json(window.settled),
        storable(lease.owner),
        lease.fence,
        lease.until_ms,
        record.active_ms,
        record.acked,
        record.redelivered,
        record.dead_lettered,
    )


def letter_of(row: tuple[Any, ...]) -> DeadLetter:
    id, subscription, reason, attempts, died, error, stack, handler, redrives, redriving, redrive_error, message = row
    return DeadLetter(
        id,
        subscription,
        from_document(_document.decode(message)),
        reason,
        attempts,
        died,
        error,
        stack,
        handler,
        redrives,
        bool(redriving),
        redrive_error,
    )


def letter_values(letter: DeadLetter, storable: Callable[[str | None], Any] = lambda text: text) -> tuple[Any, ...]:
    """A dead letter as a row. `storable` is applied to texts that came from outside."""
    message = letter.message
    return (
        letter.id,
        letter.subscription,
        message.seq,
        message.topic,
        message.type,
        letter.reason,
        letter.attempts,
        letter.died_ms,
        storable(letter.error),
        storable(letter.stack),
        storable(letter.handler),
        letter.redrives,
        letter.redriving,
        storable(letter.redrive_error),
        to_json(to_document(message)),
    )


def to_json(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def letters_page(letters: Iterable[DeadLetter], query: DeadLetterQuery, limit: int) -> list[DeadLetter]:
    """The first of these whose topic is asked for, as many as a page takes."""
    page: list[DeadLetter] = []
    size = 0
    for letter in letters:
        if query.topic is None or query.topic.matches(letter.message.topic):
            page.append(letter)
            size += letter_bytes(letter)
            if len(page) >= limit or size >= LETTERS_BYTES_MAX:
                break
    return page


def letter_bytes(letter: DeadLetter) -> int:
    message = letter.message
    texts = (letter.error, letter.stack, letter.handler, letter.redrive_error)
    return len(message.raw) + len(message.raw_headers) + sum(len(text) for text in texts if text)


class _Tail(NamedTuple):
    """The messages in (counted_to, upto] by topic; `mark` is what tells the message `upto` from another one there."""

    counted_to: int = 0
    upto: int = 0
    mark: str | None = None
    counts: Mapping[str, TopicCount] = {}


class TopicTail:
    """Counts by topic: those stored, and the tail above them as far as this store object has counted it, so that each
    call looks only at what came since the last one. A message of the tail does not change, and before one is deleted
    the tail up to it is stored, which moves `counted_to`: as long as that stays, so does what was counted. The mark
    detects a server that lost its last commits and gave their seqs to other messages. A DELETE by hand of a message in
    the tail shows when maintenance stores the tail."""

    def __init__(self) -> None:
        self._tail = _Tail()

    def topic_counts(self, row: Callable[..., tuple[Any, ...]], *, keep: bool) -> list[TopicCount]:
        """`row` runs a named query; `keep` is for what has been committed."""
        stored, tail = self._stored_and_tail(row, "topic_counts", keep=keep)
        counts = _topic_counts.decode(stored)
        if not tail.counts:
            return counts
        by_topic = _added({each.topic: each for each in counts}, tail.counts.values())
        return sorted(by_topic.values(), key=lambda each: each.topic)

    def max_seq(self, row: Callable[..., tuple[Any, ...]], topic: str, *, keep: bool) -> int:
        stored, tail = self._stored_and_tail(row, "topic_max_seq", topic, keep=keep)
        counted = tail.counts.get(topic)
        return (stored or 0) if counted is None else counted.last_seq

    def _stored_and_tail(
        self, row: Callable[..., tuple[Any, ...]], query: str, *params: str, keep: bool
    ) -> tuple[Any, _Tail]:
        """The stored answer of the query, and the counts of the messages above it."""
        tail = self._tail
        counted_to, last, mark, stored = row(query, tail.upto, *params)
        if (counted_to, mark) != (tail.counted_to, tail.mark) or tail.upto > last:
            tail = _Tail(counted_to, counted_to)
        if tail.upto < last:
            new, mark = row("topic_counts_between", last, tail.upto, last)
            tail = _Tail(counted_to, last, mark, _added(tail.counts, _topic_counts.decode(new)))
            if keep:
                self._tail = tail
        return stored, tail


def _added(counts: Mapping[str, TopicCount], later: Iterable[TopicCount]) -> dict[str, TopicCount]:
    total = dict(counts)
    for new in later:
        old = total.get(new.topic)
        total[new.topic] = (
            new
            if old is None
            else TopicCount(
                new.topic,
                old.count + new.count,
                old.bytes + new.bytes,
                new.last_seq,
                max(old.last_published_ms, new.last_published_ms),
            )
        )
    return total


def kept_times(selection: Selection, candidates: list[_TimedCandidate], limit: int, end: int) -> Times:
    """Those of the candidates whose topic and entities match; the database has looked at their content."""
    known: dict[tuple[str, str | None, str | None], bool] = {}
    found: list[tuple[int, int]] = []
    for seq, published_ms, topic, from_, to in candidates:
        keeps = known.get((topic, from_, to))
        if keeps is None:
            keeps = known[topic, from_, to] = selection.pattern.matches(topic) and selection.entities.keeps(from_, to)
        if keeps:
            found.append((seq, published_ms))
    return Times(found, candidates[-1][0] if len(candidates) == limit else end)


class AssignedSeqs(NamedTuple):
    """Drafts with their seqs: those that are new, and which of all were known already, by position."""

    seqs: list[int]
    fresh: list[Draft]
    fresh_seqs: list[int]
    duplicates: frozenset[int]
    to_remember: dict[str, int]
    """The seqs of those that are new and were given an id, by their scoped ids."""


def scoped_ids(drafts: Sequence[Draft]) -> list[str | None]:
    return [None if draft.id is None else scoped_id(draft.topic, draft.id) for draft in drafts]


def assign_seqs(
    drafts: Sequence[Draft], scoped: Sequence[str | None], last: int, known: Mapping[str, int]
) -> AssignedSeqs:
    """The seqs after `last`; a draft whose scoped id is known, also from earlier in the same batch, gets that
    one's."""
    seqs: list[int] = []
    fresh: list[Draft] = []
    fresh_seqs: list[int] = []
    duplicates: list[int] = []
    new: dict[str, int] = {}
    for position, (draft, id) in enumerate(zip(drafts, scoped, strict=True)):
        seq = None if id is None else known.get(id) or new.get(id)
        if seq is None:
            seq = last = last + 1
            fresh.append(draft)
            fresh_seqs.append(seq)
            if id is not None:
                new[id] = seq
        else:
            duplicates.append(position)
        seqs.append(seq)
    return AssignedSeqs(seqs, fresh, fresh_seqs, frozenset(duplicates), new)


UNORDERED_FACTS = ("unordered_from", "unordered_to")


def unordered_by(
    drafts: Sequence[Draft], seqs: Sequence[int], now_ms: int, last: tuple[int, int], known: Run | None
) -> Run | None:
    """The seqs between which the times of the log do not ascend, once these drafts are stored: from the first that is
    older than one before it, or ahead of now, to the last that was published with such a time. `last` is the last
    message so far, with its time. Behind the run all times are those of the log's clock, so `last` is the newest unless
    it ends the run."""
    first, end = known or (0, 0)
    newest_ms = last[1]
    is_inside = known is not None and end >= last[0]
    for draft, seq in zip(drafts, seqs, strict=True):
        if draft.published_ms is None:
            newest_ms, is_inside = max(newest_ms, now_ms), False
        elif is_inside or not newest_ms <= draft.published_ms <= now_ms:  # what follows one ahead of now may be older
            first, end, is_inside = first or seq, seq, True
        else:
            newest_ms = draft.published_ms
    return (first, end) if first else None


def seq_before(
    first: int,
    high: int,
    at_ms: int,
    at_or_after: Callable[[int], tuple[int, int] | None],
    unordered: Run | None = None,
    first_since: Callable[[int, int], tuple[int] | None] = lambda low, high: None,
) -> int:
    """The last position in [first, high] up to which all messages were published before a time. `at_or_after` tells the
    first message at or after a seq, and when it was published: a binary search, where times ascend. Between the seqs
    `unordered` they do not, and `first_since` looks at each for the first that is not older."""
    if unordered is None or high < unordered[0] or unordered[1] < first:
        return _search(first, high, at_ms, at_or_after)
    start, end = max(first, unordered[0]), min(high, unordered[1])
    before = _search(first, start - 1, at_ms, at_or_after)
    if before < start - 1:
        return before
    found = first_since(start, end)
    return found[0] - 1 if found is not None else max(end, _search(end + 1, high, at_ms, at_or_after))


def _search(first: int, high: int, at_ms: int, at_or_after: Callable[[int], tuple[int, int] | None]) -> int:
    low = first
    while low <= high:  # the first message at or after the time lies in [low, high + 1]
        middle = (low + high) // 2
        found = at_or_after(middle)
        if found is None or found[1] >= at_ms:
            high = middle - 1
        else:
            low = found[0] + 1
    return low - 1 if low > first else max(first - 1, 0)


# --- sifting: what the database leaves to Python ---------------------------------------------------------------------


# Regexes, and conditions over large payloads. One scan is bounded by the bytes it looks through and by time, whatever
# was found until then; the next one continues where it ended. A large payload is decoded once for all conditions that
# ask about it, not once for each.


class Candidate(NamedTuple):
    """A message that may be wanted. `is_judged`: the database has found that its content fits."""

    seq: int
    topic: str
    from_: str | None
    to: str | None
    size: int
    published_ms: int
    is_judged: bool


class Sifted(NamedTuple):
    """`stopped_at`: the seq behind which to go on; None if all candidates were looked at. `is_empty`: there were
    none."""

    seqs: list[int]
    stopped_at: int | None
    is_empty: bool = False


def sift(
    selection: Selection,
    candidates: Iterable[Candidate],
    limit: int,
    log: object,
    load: Callable[[int], Message | None],
) -> Sifted:
    """`log` identifies the open log in the cache. Its salt would not: a copy of a log has the same."""
    found: list[int] = []
    weight, until_s = 0, time.monotonic() + SIFT_S_MAX
    for each in candidates:
        fits = selection.pattern.matches(each.topic) and selection.entities.keeps(each.from_, each.to)
        if fits and selection.where is not None and not each.is_judged:
            weight += each.size
            fits = _holds(selection.where, each, log, load)
        if fits:
            found.append(each.seq)
            weight += each.size
        if len(found) >= limit or weight >= SIFT_BYTES_MAX or time.monotonic() > until_s:
            return Sifted(found, each.seq)
    return Sifted(found, None)


def _holds(where: Where, candidate: Candidate, log: object, load: Callable[[int], Message | None]) -> bool:
    key = (log, candidate.seq, candidate.published_ms)
    decoded = _decoded_cache.get(key)
    if decoded is None:
        message = load(candidate.seq)
        if message is None:
            return False
        decoded = Decoded(message)
        if candidate.size > SMALL_BYTES_MAX:
            _decoded_cache.put(key, decoded)
    try:
        return where.holds(decoded.field)
    except InvalidDataError:
        return True  # unreadable: better delivered, failed and dead-lettered with a reason than silently left out


class Decoded:
    """A message whose fields are worked out once."""

    def __init__(self, message: Message) -> None:
        self.size = len(message.raw)
        self._message = message
        self._fields: dict[str, object] = {}

    def field(self, name: str) -> object:
        if name not in self._fields:
            self._fields[name] = self._message.field(name)
        return self._fields[name]


class _DecodedCache:
    """The last large messages that were decoded."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._messages: OrderedDict[tuple[object, int, int], Decoded] = OrderedDict()
        self._bytes = 0

    def get(self, key: tuple[object, int, int]) -> Decoded | None:
        with self._lock:
            found = self._messages.get(key)
            if found is not None:
                self._messages.move_to_end(key)
            return found

    def put(self, key: tuple[object, int, int], decoded: Decoded) -> None:
        with self._lock:
            if key in self._messages:
                return
            self._messages[key] = decoded
            self._bytes += decoded.size
            while self._bytes > DECODED_BYTES_MAX and len(self._messages) > 1:
                self._bytes -= self._messages.popitem(last=False)[1].size


_decoded_cache = _DecodedCache()


class SqlReader:
    """The part of `ports.store.Reader` whose statements have the same names and rows in each store."""

    _sql: ClassVar[Mapping[str, str]]
    _error_line: ClassVar[str]
    """The first line of an error, in SQL."""
    _among: ClassVar[str]
    """Compares a column with numbers, in SQL."""
    _topics: TopicTail
    _keeps_counts = True

    def _rows(self, name: str, *bindings: Any) -> Iterable[tuple[Any, ...]]:
        raise NotImplementedError

    def _row(self, name: str, *bindings: Any) -> Any:
        """The first row, or None."""
        raise NotImplementedError

    def _value(self, name: str, *bindings: Any) -> Any:
        """The only column of the first row."""
        raise NotImplementedError

    def _text(self, sql: str, bindings: Sequence[Any]) -> Any:
        """The same of a statement that is given itself, as JSON."""
        raise NotImplementedError

    def _numbers(self, numbers: Iterable[int]) -> str:
        """The numbers as the binding of {among}."""
        raise NotImplementedError

    @staticmethod
    def _wanted(selection: Selection) -> Wanted:
        raise NotImplementedError

    def _tried(self, selection: Selection, ask: Callable[[Wanted], AnswerT]) -> AnswerT | None:
        """The answer; None where the database cannot read some payload, so that `where` is left to Python, which can.
        The transaction goes on."""
        raise NotImplementedError

    def _found_candidates(self, sql: str, bindings: Sequence[Any]) -> list[Candidate]:
        raise NotImplementedError

    def last_seq(self) -> int:
        raise NotImplementedError

    def scan(
        self, selection: Selection, after: int, limit: int, upto: int | None = None, bytes_max: int | None = None
    ) -> Scan:
        raise NotImplementedError

    def messages(self, seqs: Iterable[int]) -> dict[int, Message]:
        raise NotImplementedError

    def find(self, selection: Selection, after: int, upto: int, limit: int, *, newest_first: bool = False) -> Found:
        upto = min(upto, self.last_seq())
        if upto <= after or limit < 1:
            return Found([], upto if newest_first else after)
        low, high = max(after, upto - SCAN_SEQS_MAX), min(upto, after + SCAN_SEQS_MAX)
        if newest_first:  # the message at which the sifting stopped is the last one that was looked at
            seqs, stopped_at, _ = self._sifted(selection, low, upto, limit, newest_first=True)
            return Found(seqs, low if stopped_at is None else stopped_at - 1)
        seqs, stopped_at, _ = self._sifted(selection, after, high, limit)
        return Found(seqs, high if stopped_at is None else stopped_at)

    def _sifted(self, selection: Selection, after: int, end: int, limit: int, *, newest_first: bool = False) -> Sifted:
        most = min(CANDIDATES_MAX, max(limit, 100))
        rows = self._candidates(selection, after, end, most, "DESC" if newest_first else "")
        seqs, stopped_at, _ = sift(selection, rows, limit, self._topics, lambda seq: self.messages([seq]).get(seq))
        if stopped_at is None and len(rows) == most:
            stopped_at = rows[-1].seq
        return Sifted(seqs, stopped_at, is_empty=not rows)

    def _candidates(self, selection: Selection, after: int, end: int, limit: int, direction: str) -> list[Candidate]:
        def ask(condition: Condition, judged: str) -> list[Candidate]:
            sql = self._sql["candidates"].replace("{judged}", judged).replace("{direction}", direction)
            return self._found_candidates(condition.into(sql), (after, end, *condition.params, limit))

        found = self._tried(selection, lambda wanted: ask(wanted.sieve, wanted.judged))
        return ask(self._wanted(selection).without_where, "FALSE") if found is None else found

    def scan_times(self, selection: Selection, after: int, limit: int, upto: int) -> Times:
        end = min(upto, self.last_seq(), after + SCAN_SEQS_MAX)
        if end <= after or limit < 1:
            return Times([], after)

        def ask(wanted: Wanted) -> Times:
            sql = self._sql["scan_times" if wanted.exact else "scan_candidates"]
            text = self._text(wanted.condition.into(sql), (after, end, *wanted.condition.params, limit))
            if not wanted.exact:
                return kept_times(selection, _candidates.decode(text), limit, end)
            found = _times.decode(text)
            return Times(found, found[-1][0] if len(found) == limit else end)

        times = None
        if self._wanted(selection).judges_content:
            with contextlib.suppress(*UNREADABLE):  # rows by hand, which `scan` knows how to read
                times = self._tried(selection, ask)
        if times is None:  # whole messages must be loaded to tell which match: a few at a time
            messages, scanned_to = self.scan(selection, after, min(limit, LOADED_PAGE), end)
            times = Times([(message.seq, message.published_ms) for message in messages], scanned_to)
        return times

    def count(self, selection: Selection, after: int, upto: int) -> int:
        def ask(wanted: Wanted) -> int:
            condition = wanted.condition
            return int(self._text(condition.into(self._sql["count"]), (after, upto, *condition.params)))

        counted = self._tried(selection, ask) if self._wanted(selection).exact else None
        if counted is None:
            counted, upto = 0, min(upto, self.last_seq())
            while after < upto:
                found, after = self.scan_times(selection, after, COUNT_PAGE, upto)
                counted += len(found)
        return counted

    def oldest(self, pattern: Pattern, after: int, limit: int, upto: int = SEQ_MAX) -> list[Kept]:
        condition, exact = topic_condition(pattern)
        sql = condition.into(self._sql["oldest"])
        found: list[Kept] = []
        while len(found) < limit:
            text = self._text(sql, (after, upto, *condition.params, limit))
            page = [Kept(*kept) for kept in _kept.decode(text)] if text else []
            found += page if exact else [kept for kept in page if pattern.matches(kept.topic)]
            if len(page) < limit:
                break
            after = page[-1].seq
        return found[:limit]

    def seq_before(self, at_ms: int) -> int:
        first, high = self._row("bounds")
        return seq_before(
            first,
            high,
            at_ms,
            lambda seq: self._row("at_or_after", seq),
            self.unordered(),
            lambda low, high: self._row("first_published_since", low, high, at_ms),
        )

    def unordered(self) -> Run | None:
        facts = [self._row("fact", name) for name in UNORDERED_FACTS]
        return None if None in facts else (int(facts[0][0]), int(facts[1][0]))

    def topics_between(self, after: int, upto: int) -> list[str]:
        return _texts.decode(self._value("distinct_topics", after, upto))

    def topic_counts(self) -> list[TopicCount]:
        return self._topics.topic_counts(self._row, keep=self._keeps_counts)

    def topic_max_seq(self, topic: str) -> int:
        return self._topics.max_seq(self._row, topic, keep=self._keeps_counts)

    def subscription(self, id: str) -> SubscriptionRecord | None:
        row = self._row("subscription", id)
        return None if row is None else record_of(row)

    def subscriptions(self) -> list[SubscriptionRecord]:
        return [record_of(row) for row in self._rows("subscriptions")]

    def owned_subscriptions(self, owner: str) -> int:
        return int(self._value("owned_subscriptions", owner))

    def deliveries(self, subscription: str, seqs: Iterable[int]) -> dict[int, DeliveryRow]:
        wanted = list(seqs)
        text = self._text(self._sql["deliveries"], (subscription, self._numbers(wanted))) if wanted else None
        return {row.seq: row for row in DELIVERIES.decode(text)} if text else {}

    def deliveries_by(self, subscription: str, token: int) -> list[DeliveryRow]:
        text = self._text(self._sql["deliveries_by"], (subscription, token))
        return DELIVERIES.decode(text) if text else []

    def delivery_counts(self, subscription: str, upto: int = SEQ_MAX) -> DeliveryCounts:
        return DeliveryCounts(*self._row("delivery_counts", subscription, upto))

    def leased_seqs(self, low: int, high: int, now_ms: int) -> set[int]:
        return set(SEQS.decode(self._value("leased_seqs", low, high, now_ms)))

    def _letters(self, query: DeadLetterQuery) -> Condition:
        """Leaves out `error` and `error_kind`, and may be wider than `topic`: the caller checks them."""
        parts = [] if query.topic is None else [topic_condition(query.topic)[0]]
        for column, numbers in (("id", query.ids), ("seq", query.seqs)):
            if numbers is not None:
                parts.append(Condition(f"{column} {self._among}", (self._numbers(numbers),)))
        texts = {
            "subscription": query.subscription,
            "type": query.type,
            "reason": query.reason,
            "coalesce(handler, '')": query.handler,
        }
        return all_of(
            *parts, *(Condition(f"{column} = ?", (text,)) for column, text in texts.items() if text is not None)
        )

    def count_dead_letters(self, query: DeadLetterQuery, by: LetterColumn, limit: int) -> dict[str, int]:
        condition = self._letters(query)
        column = {"error": self._error_line, "redriving": "CAST(redriving AS integer)"}.get(by, by)
        sql = self._sql["count_dead_letters"].replace("{column}", f"coalesce(CAST({column} AS text), '')")
        return dict(_letter_counts.decode(self._text(condition.into(sql), (*condition.params, limit))))

    def group_dead_letters(self, query: DeadLetterQuery, limit: int) -> list[LetterGroup]:
        condition = self._letters(query)
        sql = self._sql["group_dead_letters"].replace("{line}", self._error_line)
        return _letter_groups.decode(self._text(condition.into(sql), (*condition.params, limit)))

    def gaps(self, subscription: str) -> list[Gap]:
        return [Gap(*row) for row in self._rows("gaps", subscription)]

    def gap_total(self, subscription: str) -> int:
        return int(self._value("gap_total", subscription))

    def receipts(self, publisher: str, first: int, count: int) -> list[Receipt]:
        near = _receipts.decode(self._value("receipts", publisher, first, publisher, first, first + count))
        return [each for each in near if each.number < first + count and each.number + each.length > first]

    def pruned(self, low: int, high: int) -> list[Run]:
        return RUNS.decode(self._value("pruned", low, high))

    def sink_batch(self, sink: str) -> int | None:
        found = self._value("sink_batch", sink)
        return None if found is None else int(found)

    def timings(self, since_ms: int = 0) -> list[Timing]:
        return _timings.decode(self._value("timings", since_ms))

    def samples(self, step_ms: int, since_ms: int = 0) -> list[Sample]:
        return _samples.decode(self._value("samples", step_ms, since_ms))

    def file_bytes(self) -> int:
        return int(self._value("file_bytes"))

    def retention(self) -> list[RetentionPolicy]:
        return [
            RetentionPolicy(pattern, _limits.decode(limits), dialect)
            for pattern, dialect, limits in self._rows("retention")
        ]

    def lease(self, resource: str) -> Lease:
        row = self._row("lease", resource)
        return Lease() if row is None else Lease(*row)

    def leases(self, prefix: str) -> dict[str, Lease]:
        return {resource: Lease(*lease) for resource, *lease in self._rows("leases", prefix, prefix)}


class SqlWriter(SqlReader):
    """The same of `ports.store.Writer`."""

    _keeps_counts = False  # it may yet be rolled back

    def _later(self, name: str, bindings: Sequence[Any]) -> object:
        """A statement whose outcome decides nothing."""
        raise NotImplementedError

    def _changed(self, name: str, *bindings: Any) -> int:
        """How many rows a statement has changed."""
        raise NotImplementedError

    def _last_to_publish_after(self) -> int:
        raise NotImplementedError

    def _refuse_unstorable(self, drafts: Sequence[Draft]) -> None:
        raise NotImplementedError

    def _store(self, drafts: Sequence[Draft], seqs: Sequence[int], now_ms: int, plain: bool) -> None:
        raise NotImplementedError

    def _known_ids(self, scoped: list[str]) -> Iterable[tuple[str, int, int]]:
        """The ids of these that are remembered, with their seqs and times."""
        raise NotImplementedError

    def _remember(self, new: dict[str, int], now_ms: int) -> None:
        raise NotImplementedError

    def _add_pruned(self, runs: Sequence[Run]) -> None:
        raise NotImplementedError

    def _delete(self, seqs: list[int]) -> list[int]:
        """Delete messages. Returns the seqs of those that were there; the stored counts go down by them."""
        raise NotImplementedError

    def append(self, drafts: Sequence[Draft], now_ms: int, window: DedupeWindow) -> Appended:
        if not drafts:
            return Appended([], frozenset())
        last = self._last_to_publish_after()
        plain = {*map(_extras, drafts), *map(_id, drafts)} == {None}
        if not plain:
            self._refuse_unstorable(drafts)
        if plain or not any(draft.id is not None for draft in drafts):
            seqs = list(range(last + 1, last + 1 + len(drafts)))
            self._store(drafts, seqs, now_ms, plain)
            return Appended(seqs, frozenset())
        scoped = scoped_ids(drafts)
        assigned = assign_seqs(drafts, scoped, last, self._remembered(scoped, last, now_ms, window))
        if assigned.fresh:
            self._store(assigned.fresh, assigned.fresh_seqs, now_ms, plain=False)
        if assigned.to_remember:
            self._remember(assigned.to_remember, now_ms)
        return Appended(assigned.seqs, assigned.duplicates)

    def _remembered(self, scoped: Sequence[str | None], last: int, now_ms: int, window: DedupeWindow) -> dict[str, int]:
        known = self._known_ids([id for id in scoped if id is not None])
        return {id: seq for id, seq, published_ms in known if window.remembers(seq, published_ms, last, now_ms)}

    def _note_unordered(self, drafts: Sequence[Draft], seqs: Sequence[int], now_ms: int) -> None:
        """Record where messages with times of their own are out of order."""
        known = self.unordered()
        seq, published_ms = self._row("last_published") or (0, 0)
        found = unordered_by(drafts, seqs, now_ms, (seq, published_ms), known)
        if found is not None and found != known:
            for name, value in zip(UNORDERED_FACTS, found, strict=True):
                self._later("set_fact", (name, value))

    def forget_receipts(self, publisher: str, below: int) -> None:
        self._later("forget_receipts", (publisher, below))

    def forget_old_receipts(self, before_ms: int, limit: int) -> int:
        return self._changed("forget_old_receipts", before_ms, limit)

    def delete_subscription(self, id: str) -> None:
        for statement in ("delete_subscription", "clear_deliveries", "delete_gaps", "delete_timings"):
            self._later(statement, (id,))

    def clear_deliveries(self, subscription: str) -> None:
        self._later("clear_deliveries", (subscription,))

    def remove_dead_letters(self, ids: Sequence[int]) -> None:
        self._later("remove_dead_letters", (self._numbers(ids),))

    def end_redrives(self, subscription: str, why: str) -> None:
        self._later("end_redrives", (why, subscription))

    def add_gap(self, gap: Gap) -> None:
        self._later("add_gap", (gap.subscription, gap.from_seq, gap.to_seq, gap.count, gap.why, gap.at_ms))

    def mark_gaps_reported(self, subscription: str) -> None:
        self._later("mark_gaps_reported", (subscription,))

    def set_retention(self, policy: RetentionPolicy) -> None:
        self._later("set_retention", (policy.pattern, policy.dialect, to_json(policy.limits)))

    def remove_retention(self, pattern: str, dialect: Dialect) -> bool:
        return self._changed("remove_retention", pattern, dialect) > 0

    def delete_messages(self, gone: Sequence[Kept]) -> None:
        if not gone:
            return
        counted_to = self._counted_to()
        seqs = sorted({kept.seq for kept in gone})
        if seqs[-1] > counted_to:  # count them in first, or their topic's last seq would be forgotten
            self._fold(counted_to, min(seqs[-1], self.last_seq()))
        self._note_pruned(self._delete(seqs))

    def _note_pruned(self, seqs: Sequence[int]) -> None:
        """Record deleted seqs as runs. Only the runs right beside are looked at, so that it costs the same however many
        there are."""
        if not seqs:
            return
        runs = runs_of(seqs)
        nearest_end = self._value("last_pruned", seqs[-1] + 1)
        if nearest_end is not None and nearest_end >= seqs[0] - 1:  # else all that are stored lie below
            ends, starts = [first - 1 for first, _ in runs], [last + 1 for _, last in runs]
            beside = RUNS.decode(self._value("pruned_beside", self._numbers(ends), self._numbers(starts)))
            runs = merged([*runs, *beside])
            self._later("forget_pruned", (self._numbers(first for first, _ in beside),))
        self._add_pruned(runs)

    def fold_topic_counts(self, limit: int) -> int:
        counted_to = self._counted_to()
        upto = min(self.last_seq(), counted_to + limit)
        if upto > counted_to:
            self._fold(counted_to, upto)
        return max(0, upto - counted_to)

    def _counted_to(self) -> int:
        return int(self._value("fact", "counted_to"))

    def _fold(self, counted_to: int, upto: int) -> None:
        self._later("fold_topic_counts", (counted_to, upto))
        self._later("set_fact", ("counted_to", upto))

    def forget_ids(self, window: DedupeWindow, now_ms: int, limit: int) -> int:
        return self._changed("forget_ids", window.oldest_seq(self.last_seq()), window.oldest_ms(now_ms), limit)

    def save_sink_batch(self, sink: str, batch: int, now_ms: int) -> None:
        self._later("save_sink_batch", (sink, batch, now_ms))

    def delete_sink(self, sink: str) -> None:
        self._later("delete_sink", (sink,))

    def forget_old_timings(self, before_ms: int, limit: int) -> int:
        return self._changed("forget_old_timings", before_ms, limit)

    def save_sample(self, step_ms: int, slot: int, sample: Sample) -> None:
        self._later("save_sample", (step_ms, slot, sample.at_ms, to_json(sample)))

    def save_lease(self, resource: str, lease: Lease) -> None:
        self._later("save_lease", (resource, lease.owner, lease.fence, lease.until_ms))

    def delete_lease(self, resource: str) -> None:
        self._later("delete_lease", (resource,))
