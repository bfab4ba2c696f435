"""Dead letters: look, redrive, purge, take out and bring back."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import count
from typing import Any, Literal, NamedTuple, TypedDict, Unpack, get_args

import msgspec

from headwater.arguments import INT64_MAX, check_choice, check_optional_text, check_whole
from headwater.broker.committer import TransactionHooks, append
from headwater.broker.deliveries import Failure, dead_letter, dead_letters_by_id, key_of, replace
from headwater.broker.engine import Engine
from headwater.broker.flow import Flow
from headwater.broker.subscribe import check_subscription_id
from headwater.delivery.filters import Path, parse_path, parse_regex
from headwater.delivery.retry import REASONS, Reason
from headwater.errors import HeadwaterError, InvalidDataError, InvalidOptionError, UnknownDeadLetterError
from headwater.formats import iso, ms_of_iso
from headwater.message import Draft, Message, MessageDocument, check_limits, copy_draft, from_document, to_document
from headwater.ports.records import (
    DeadLetter,
    DeadLetterQuery,
    DeliveryRow,
    LetterColumn,
    LetterGroup,
    SubscriptionRecord,
    error_kind,
    letter_value,
)
from headwater.ports.store import SEQ_MAX, Reader, Writer
from headwater.topics import check_topic, parse_pattern

PAGE = 500
COUNTED_MAX = 1_000  # values of one column that are listed with their counts, the most frequent first
ERRORS_COUNTED_MAX = 50
LINES_GROUPED_MAX = 10_000  # different first lines of errors; rarer ones are in no group
GROUPS_MAX = 1_000
REDRIVEN_AT_ONCE = 100  # letters of one transaction, so that no publish waits for long
SEARCH_S = 0.1  # how long one look searches errors
IMPORT_BYTES = 1024 * 1024  # of lines that are brought back in one transaction


class LetterFilter(TypedDict, total=False):
    """Which dead letters: all conditions given hold together."""

    ids: Iterable[int]
    subscription: str
    topic: str
    type: str
    reason: str
    error: str


class GroupFilter(LetterFilter, total=False):
    """Also by group, as `groups` names them; "" for none."""

    handler: str
    error_kind: str


class RedriveResult(msgspec.Struct, frozen=True):
    """What a redrive did, or in a dry run would do: how many are on their way again, and which could not be, with the
    reason."""

    redriven: int
    failed: dict[int, str]


class LettersPage(NamedTuple):
    """`looked_to`: the id to go on after, also where none was found; None if there are no more."""

    letters: list[DeadLetter]
    looked_to: int | None


class Exported(msgspec.Struct, frozen=True):
    """`next` is the id to go on after; None: that was the last page."""

    lines: list[str]
    next: int | None = None


class ImportPage(NamedTuple):
    lines: list[str]
    letters: list[DeadLetter]


class LetterStatistics(msgspec.Struct, frozen=True):
    total: int
    redriving: int
    by_reason: dict[str, int]
    by_subscription: dict[str, int]
    by_topic: dict[str, int]
    by_type: dict[str, int]
    by_error: dict[str, int]


def make_query(given: Mapping[str, Any]) -> DeadLetterQuery:
    topic, ids, reason = given.get("topic"), given.get("ids"), given.get("reason")
    error = check_optional_text("error", given.get("error"))
    return DeadLetterQuery(
        ids=None if ids is None else _check_ids(ids),
        subscription=check_optional_text("subscription", given.get("subscription")),
        topic=parse_pattern(topic) if isinstance(topic, str) else topic,
        type=check_optional_text("type", given.get("type")),
        reason=None if reason is None else check_choice("reason", reason, REASONS),
        error=None if error is None else parse_regex(error, "error"),
        handler=given.get("handler"),
        error_kind=given.get("error_kind"),
    )


def _check_ids(ids: Iterable[int]) -> tuple[int, ...]:
    try:
        return tuple(check_whole("the id of a dead letter", id, 1, INT64_MAX) for id in ids)
    except TypeError:
        raise InvalidOptionError(f"ids must be a list of numbers, not {ids!r:.80}", next="Write ids=[1, 2]") from None


class DeadLetters:
    """Flows over the dead letters of one log."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def find(self, after: int = 0, limit: int = 100, **given: Unpack[GroupFilter]) -> Flow[list[DeadLetter]]:
        query = make_query(given)
        check_whole("after", after, 0, INT64_MAX)
        check_whole("limit", limit, 0, INT64_MAX)
        found: list[DeadLetter] = []
        while len(found) < limit:
            asked = limit - len(found)
            page = yield from self._page(query, after, max(asked, 100) if query.is_left_to_broker else asked)
            found += page.letters
            if page.looked_to is None:
                break
            after = page.looked_to
        return found[:limit]

    def page(self, after: int, limit: int, **given: Unpack[GroupFilter]) -> Flow[LettersPage]:
        """The next letters, as many as take LETTERS_BYTES_MAX, for an answer that must not become too large."""
        query = make_query(given)
        while True:
            page = yield from self._page(query, after, limit)
            if page.letters or page.looked_to is None:
                return page
            after = page.looked_to

    def _page(self, query: DeadLetterQuery, after: int, limit: int) -> Flow[LettersPage]:
        # One at a time: pages are large, and many of them at once would keep the interpreter from everything else.
        return self._engine.read(lambda reader: _page(reader, query, after, limit), self._engine.filters)

    def get(self, id: int) -> Flow[DeadLetter]:
        return self._engine.read(lambda reader: _one(reader, id), self._engine.statistics)

    def statistics(self, **given: Unpack[GroupFilter]) -> Flow[LetterStatistics]:
        query = make_query(given)
        return self._engine.read(lambda reader: _statistics(reader, query), self._engine.statistics)

    def count_by_reason(self) -> Flow[dict[str, int]]:
        every = DeadLetterQuery()
        return self._engine.read(
            lambda reader: reader.count_dead_letters(every, "reason", COUNTED_MAX), self._engine.statistics
        )

    def groups(self, **given: Unpack[GroupFilter]) -> Flow[list[LetterGroup]]:
        """The largest groups of letters that failed alike, the largest first; `error` is the kind of their errors."""
        query = make_query(given)
        return self._engine.read(lambda reader: _groups(reader, query), self._engine.statistics)

    def redrive(
        self, to_topic: str | None = None, dry_run: bool = False, **given: Unpack[GroupFilter]
    ) -> Flow[RedriveResult]:
        """Deliver again, to the subscription they died in, or as new messages on another topic.

        A hundred at most are one transaction. A letter stays until its redelivery is acked; if that fails again, or
        cannot be begun (the subscription is gone), it stays for good with its count one higher. A dry run
        changes nothing.
        """
        query = make_query(given)
        if to_topic is not None:
            check_topic(to_topic)
        redriven, failed = 0, dict[int, str]()
        after: int | None = 0
        while after is not None:
            page: LettersPage = yield from self._page(query, after, REDRIVEN_AT_ONCE)
            after = page.looked_to
            ids = [letter.id for letter in page.letters]
            if dry_run:
                checked = yield from self._engine.read(partial(_refusals, page.letters, to_topic), self._engine.filters)
                bad = {letter.id: why for letter, why in checked if why is not None}
                redriven += len(checked) - len(bad)
                failed.update(bad)
            elif ids:
                done, bad = yield from self._engine.write(
                    lambda writer, hooks, ids=ids: self._redrive(writer, hooks, ids, to_topic)  # type: ignore[misc]
                )
                redriven += done
                failed.update(bad)
        if not dry_run:
            self._engine.wakeups.wake_all()
        return RedriveResult(redriven, failed)

    def _redrive(
        self, writer: Writer, hooks: TransactionHooks, ids: Sequence[int], to_topic: str | None
    ) -> tuple[int, dict[int, str]]:
        now_ms = self._engine.clock.now_ms()
        failed: dict[int, str] = {}
        drafts: list[Draft] = []
        letters = _refusals(dead_letters_by_id(writer, ids), to_topic, writer)
        ids_of_subscriptions = {letter.subscription for letter, _ in letters} if to_topic is None else ()
        paths = {id: _key_path(writer.subscription(id)) for id in ids_of_subscriptions}
        for letter, why in letters:
            counted = replace(letter, redrives=letter.redrives + 1)
            if why is not None:
                failed[letter.id] = why
                writer.save_dead_letters([replace(counted, redrive_error=why)])
            elif to_topic is not None:
                drafts.append(copy_draft(letter.message, check_topic(to_topic)))
                writer.remove_dead_letters([letter.id])
            else:
                writer.save_dead_letters([replace(counted, redriving=True, redrive_error=None)])
                message, path = letter.message, paths[letter.subscription]
                key = None if path is None else key_of(message, path)
                row = DeliveryRow(message.seq, 0, now_ms, 0, message.priority, key, letter.id)
                writer.put_deliveries(letter.subscription, [row])
        if drafts:
            append(writer, hooks, drafts, now_ms, self._engine.dedupe)
        return len(letters) - len(failed), failed

    def purge(self, dry_run: bool = False, **given: Unpack[GroupFilter]) -> Flow[int]:
        """Returns how many are deleted; of a dry run, how many would be."""
        query = make_query(given)
        purged = 0
        after: int | None = 0
        while after is not None:
            page: LettersPage = yield from self._page(query, after, PAGE)
            after = page.looked_to
            ids = [letter.id for letter in page.letters]
            if ids and not dry_run:
                yield from self._engine.write(
                    lambda writer, hooks, ids=ids: writer.remove_dead_letters(ids)  # type: ignore[misc]
                )
            purged += len(ids)
        return purged

    def export(self, after: int = 0, limit: int = PAGE, **given: Unpack[GroupFilter]) -> Flow[Exported]:
        """A page of JSON documents, one per letter, oldest first."""
        query = make_query(given)

        def look(reader: Reader, after: int) -> Exported:
            page = _page(reader, query, after, limit)
            return Exported([msgspec.json.encode(_exported(each)).decode() for each in page.letters], page.looked_to)

        while True:
            page = yield from self._engine.read(partial(look, after=after), self._engine.filters)
            if page.lines or page.next is None:
                return page
            after = page.next

    def import_(self, lines: Iterable[str], allow: Callable[[str], object] | None = None) -> Flow[int]:
        """Bring exported letters back, a page of lines at a time: all of a page or none. They get new ids. If `allow`
        raises, because a topic is refused, nothing is imported."""
        pages: Iterable[ImportPage] = imported_pages(lines)
        if allow is not None:
            pages = [*pages]
            for topic in {letter.message.topic for page in pages for letter in page.letters}:
                allow(topic)
        imported = 0
        for page in pages:
            imported += yield from self._engine.write(
                lambda writer, hooks, letters=page.letters: len(writer.save_dead_letters(letters))  # type: ignore[misc]
            )
        return imported


def to_json(letter: DeadLetter) -> dict[str, Any]:
    """All of a dead letter as plain JSON values, for showing."""
    return {
        "id": letter.id,
        "subscription": letter.subscription,
        "reason": letter.reason,
        "error": letter.error,
        "handler": letter.handler,
        "attempts": letter.attempts,
        "died_at": iso(letter.died_ms),
        "redrives": letter.redrives,
        "redriving": letter.redriving,
        "redrive_error": letter.redrive_error,
        "stack": letter.stack,
        "message": letter.message.to_json(),
    }


class LetterDocument(msgspec.Struct):
    """A dead letter as it travels: with its message as a document, for a payload that is not JSON must not spoil it."""

    id: int
    subscription: str
    message: MessageDocument
    reason: Reason | Literal["max_retries"]  # as `max_attempts` was called before 0.1
    attempts: int
    died_ms: int
    error: str | None
    stack: str | None
    handler: str | None
    redrives: int
    redriving: bool
    redrive_error: str | None


def to_wire(letter: DeadLetter) -> LetterDocument:
    fields = {name: getattr(letter, name) for name in DeadLetter.__struct_fields__}
    return LetterDocument(**{**fields, "message": to_document(letter.message)})


def from_wire(document: LetterDocument) -> DeadLetter:
    fields = {name: getattr(document, name) for name in DeadLetter.__struct_fields__}
    return DeadLetter(**{**fields, "message": from_document(document.message)})


class ExportedLetter(msgspec.Struct):
    """One line of an export. `id` and `redriving` are the old log's and are not brought back."""

    subscription: str
    reason: Reason | Literal["max_retries"]  # as `max_attempts` was called before 0.1
    attempts: int
    died_at: str
    message: MessageDocument
    error: str | None = None
    stack: str | None = None
    handler: str | None = None
    redrives: int = 0


_exported_letter = msgspec.json.Decoder(ExportedLetter)


def _exported(letter: DeadLetter) -> ExportedLetter:
    own = ("subscription", "reason", "attempts", "error", "stack", "handler", "redrives")
    fields: dict[str, Any] = {name: getattr(letter, name) for name in own}
    return ExportedLetter(died_at=iso(letter.died_ms), message=to_document(letter.message), **fields)


def _checked(message: Message) -> Message:
    check_topic(message.topic)
    check_whole("seq", message.seq, 0, SEQ_MAX)
    check_limits(message)
    return replace(message, size=len(message.raw))


def imported_pages(lines: Iterable[str]) -> Iterator[ImportPage]:
    """Lines of an export, checked; as many at a time as one transaction and one frame take."""
    page, size, first = ImportPage([], []), 0, 1
    for number, line in zip(count(1), lines, strict=False):
        if line.strip():
            page.letters.append(_letter_of(line, number, first))
            page.lines.append(line)
            size += len(line)
        if size >= IMPORT_BYTES or len(page.lines) >= PAGE:
            yield page
            page, size, first = ImportPage([], []), 0, number + 1
    if page.lines:
        yield page


def _letter_of(line: str, number: int, first: int) -> DeadLetter:
    try:
        found = _exported_letter.decode(line)
        message = _checked(from_document(found.message))
        check_subscription_id(found.subscription)
        reason: Reason = "max_attempts" if found.reason == "max_retries" else found.reason
        failure = Failure(reason, found.error, found.stack, found.handler)
        row = DeliveryRow(message.seq, check_whole("attempts", found.attempts, 0, SEQ_MAX), 0)
        letter = dead_letter(found.subscription, message, row, failure, ms_of_iso(found.died_at))
        return replace(letter, redrives=check_whole("redrives", found.redrives, 0, SEQ_MAX))
    except (msgspec.DecodeError, ValueError) as exc:
        imported = f"The lines before line {first} are imported" if first > 1 else "Nothing was imported"
        raise InvalidDataError(
            f"not an exported dead letter ({exc})",
            where=f"line {number}",
            next=f"{imported}; fix the line and import {'the rest' if first > 1 else 'again'}",
        ) from exc


def _refusals(
    letters: Iterable[DeadLetter], to_topic: str | None, reader: Reader
) -> list[tuple[DeadLetter, str | None]]:
    """Each letter that is not on its way already, with why it cannot be redriven; None if it can."""
    found: list[tuple[DeadLetter, str | None]] = []
    going: set[tuple[str, int]] = set()
    for letter in letters:
        if letter.redriving:
            continue
        try:
            if to_topic is not None:
                copy_draft(letter.message, check_topic(to_topic))
            else:
                record = _subscription_of(reader, letter)
                _refuse_foreign(reader, letter)
                delivery = (letter.subscription, letter.message.seq)
                if delivery in going or _is_on_its_way(reader, record, letter.message.seq):
                    raise UnknownDeadLetterError("the message is being delivered already")
                going.add(delivery)
        except HeadwaterError as exc:
            found.append((letter, exc.why))
        else:
            found.append((letter, None))
    return found


def _key_path(record: SubscriptionRecord | None) -> Path | None:
    order_key = None if record is None else record.spec.order_key
    return None if order_key is None else parse_path(order_key)


def _is_on_its_way(reader: Reader, subscription: SubscriptionRecord, seq: int) -> bool:
    """Whether the message is in flight or waits for another attempt, or the subscription has yet to come to it: after a
    seek. Redriven besides, it would be delivered to two consumers at once."""
    if reader.deliveries(subscription.id, [seq]):
        return True
    return not subscription.window.is_settled(seq) and bool(reader.heads([seq]))


def _subscription_of(reader: Reader, letter: DeadLetter) -> SubscriptionRecord:
    """A letter may be imported with any topic; its subscription gets it only if it could have got it by a publish."""
    record = reader.subscription(letter.subscription)
    if record is None:
        raise UnknownDeadLetterError(f"subscription '{letter.subscription}' is gone")
    if not parse_pattern(record.spec.pattern, record.spec.dialect).matches(letter.message.topic):
        raise UnknownDeadLetterError(f"subscription '{letter.subscription}' does not read {letter.message.topic}")
    return record


def _refuse_foreign(reader: Reader, letter: DeadLetter) -> None:
    """A delivery is identified by its seq. A letter imported from another log has that log's seq, which is another
    message here."""
    here = reader.messages([letter.message.seq]).get(letter.message.seq)
    if letter.message.seq > reader.last_seq() or (here is not None and here.scoped_id != letter.message.scoped_id):
        raise UnknownDeadLetterError("the letter comes from another log; redrive it to a topic, as a new message")


def _one(reader: Reader, id: int) -> DeadLetter:
    found = reader.dead_letters(DeadLetterQuery(ids=(id,)), 0, 1)
    if not found:
        raise unknown(id)
    return found[0]


def unknown(id: int) -> UnknownDeadLetterError:
    return UnknownDeadLetterError(f"there is no dead letter {id}", next="`headwater dlq ls` lists them")


def _page(reader: Reader, query: DeadLetterQuery, after: int, limit: int) -> LettersPage:
    letters = reader.dead_letters(query, after, limit)
    if not letters or not query.is_left_to_broker:
        return LettersPage(letters, letters[-1].id if letters else None)
    found: list[DeadLetter] = []
    until_s = time.monotonic() + SEARCH_S
    for letter in letters:
        after = letter.id
        if query.fits(letter):
            found.append(letter)
        if time.monotonic() > until_s:
            break
    return LettersPage(found, after)


def _all(reader: Reader, query: DeadLetterQuery) -> Iterable[DeadLetter]:
    after: int | None = 0
    while after is not None:
        letters, after = _page(reader, query, after, PAGE)
        yield from letters


def _statistics(reader: Reader, query: DeadLetterQuery) -> LetterStatistics:
    count: Callable[[LetterColumn, int], dict[str, int]]
    if _is_for_store(query):
        count = partial(reader.count_dead_letters, query)
    else:
        count = _counted_one_by_one(_all(reader, query))
    redriving = count("redriving", 2)
    return LetterStatistics(
        sum(redriving.values()),
        redriving.get("1", 0),
        count("reason", COUNTED_MAX),
        count("subscription", COUNTED_MAX),
        count("topic", COUNTED_MAX),
        count("type", COUNTED_MAX),
        count("error", ERRORS_COUNTED_MAX),
    )


def _is_for_store(query: DeadLetterQuery) -> bool:
    """Whether the database can tell alone which letters match."""
    topic = query.topic
    return not query.is_left_to_broker and (topic is None or topic.is_exact or topic.exact_prefix_only)


def _groups(reader: Reader, query: DeadLetterQuery) -> list[LetterGroup]:
    """The lines of errors differ by numbers; what is left of them without is one group."""
    merged: dict[tuple[str, str, str, str], LetterGroup] = {}
    lines: Iterable[LetterGroup] = (
        reader.group_dead_letters(query, LINES_GROUPED_MAX)
        if _is_for_store(query)
        else map(_group_of_one, _all(reader, query))
    )
    for line in lines:
        kind = error_kind(line.error)
        key = (line.subscription, line.reason, line.handler, kind)
        known = merged.get(key)
        merged[key] = replace(line, error=kind) if known is None else _joined(known, line)
    return sorted(merged.values(), key=lambda group: (-group.count, -group.last_id))[:GROUPS_MAX]


def _group_of_one(letter: DeadLetter) -> LetterGroup:
    at_ms, line = letter.died_ms, letter_value(letter, "error")
    return LetterGroup(
        letter.subscription, letter.reason, letter.handler or "", line, 1, letter.redriving, at_ms, at_ms, letter.id
    )


def _joined(group: LetterGroup, other: LetterGroup) -> LetterGroup:
    return replace(
        group,
        count=group.count + other.count,
        redriving=group.redriving + other.redriving,
        first_ms=min(group.first_ms, other.first_ms),
        last_ms=max(group.last_ms, other.last_ms),
        last_id=max(group.last_id, other.last_id),
    )


def _counted_one_by_one(letters: Iterable[DeadLetter]) -> Callable[[LetterColumn, int], dict[str, int]]:
    """Count the letters here, where the database cannot tell alone which of them match."""
    counts: dict[LetterColumn, Counter[str]] = {column: Counter() for column in get_args(LetterColumn)}
    for letter in letters:
        for column, counter in counts.items():
            counter[letter_value(letter, column)] += 1
    return lambda by, limit: dict(counts[by].most_common(limit))
