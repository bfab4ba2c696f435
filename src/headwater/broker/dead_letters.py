"""Dead letters: look, redrive, purge, take out and bring back."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, TypedDict, Unpack

import msgspec

from headwater.broker.claims import replace
from headwater.broker.committer import Undo
from headwater.broker.engine import Engine
from headwater.broker.flow import Flow
from headwater.broker.publish import draft_of
from headwater.delivery.retry import Reason
from headwater.errors import HeadwaterError, InvalidData, InvalidOption, UnknownDeadLetter
from headwater.message import Message, MessageDocument, from_document, iso, ms_of_iso, to_document
from headwater.ports.records import DeadLetter, DeadLetterQuery, DeliveryRow, LetterColumn, letter_value
from headwater.ports.store import Reader, Writer
from headwater.topics import check_topic, parse_pattern

PAGE = 500
COUNTED_MAX = 1_000  # values of one column that are told with their counts, the most frequent first
ERRORS_COUNTED_MAX = 50
ERROR_PATTERN_CHARS_MAX = 256


class LetterFilter(TypedDict, total=False):
    """Which dead letters: all conditions given hold together."""

    ids: Iterable[int]
    subscription: str
    topic: str
    type: str
    reason: str
    error: str


class Redriven(msgspec.Struct, frozen=True):
    """What a redrive did: how many are on their way again, and which could not be, with the reason."""

    redriven: int
    failed: dict[int, str]


class LetterStatistics(msgspec.Struct, frozen=True):
    total: int
    redriving: int
    by_reason: dict[str, int]
    by_subscription: dict[str, int]
    by_topic: dict[str, int]
    by_type: dict[str, int]
    by_error: dict[str, int]


def make_query(given: LetterFilter) -> DeadLetterQuery:
    unknown = given.keys() - LetterFilter.__annotations__.keys()
    if unknown:
        raise InvalidOption(
            f"unknown dead-letter filter {sorted(unknown)[0]!r}",
            next=f"Known ones: {', '.join(LetterFilter.__annotations__)}",
        )
    error = given.get("error")
    if error is not None:
        if len(error) > ERROR_PATTERN_CHARS_MAX:
            raise InvalidOption(f"the error pattern has more than {ERROR_PATTERN_CHARS_MAX} characters")
        try:
            re.compile(error)
        except re.error as exc:
            raise InvalidOption(f"the error pattern is no regular expression ({exc})", where=error) from exc
    topic, ids = given.get("topic"), given.get("ids")
    return DeadLetterQuery(
        ids=None if ids is None else tuple(ids),
        subscription=given.get("subscription"),
        topic=None if topic is None else parse_pattern(topic),
        type=given.get("type"),
        reason=given.get("reason"),
        error=error,
    )


class DeadLetters:
    """Flows over the dead letters of one log."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def find(self, after: int = 0, limit: int = 100, **given: Unpack[LetterFilter]) -> Flow[list[DeadLetter]]:
        query = make_query(given)
        return self._engine.read(lambda reader: reader.dead_letters(query, after, limit), self._engine.statistics)

    def get(self, id: int) -> Flow[DeadLetter]:
        return self._engine.read(lambda reader: _one(reader, id), self._engine.statistics)

    def statistics(self, **given: Unpack[LetterFilter]) -> Flow[LetterStatistics]:
        query = make_query(given)
        return self._engine.read(lambda reader: _statistics(reader, query), self._engine.statistics)

    def count_by_reason(self) -> Flow[dict[str, int]]:
        every = DeadLetterQuery()
        return self._engine.read(
            lambda reader: reader.count_dead_letters(every, "reason", COUNTED_MAX), self._engine.statistics
        )

    def redrive(self, to_topic: str | None = None, **given: Unpack[LetterFilter]) -> Flow[Redriven]:
        """Deliver again, to the subscription they died in, or as new messages on another topic.

        Each page is one transaction. A letter stays until its redelivery is acked; if that fails again, or cannot be
        begun (the subscription is gone), it stays for good with its count one higher.
        """
        query = make_query(given)
        if to_topic is not None:
            check_topic(to_topic)
        redriven, failed, after = 0, {}, 0
        while True:
            letters = yield from self._engine.read(
                lambda reader, after=after: reader.dead_letters(query, after, PAGE)  # type: ignore[misc]
            )
            if not letters:
                break
            after = letters[-1].id
            ids = [letter.id for letter in letters]
            done, bad = yield from self._engine.write(
                lambda writer, undo, ids=ids: self._redrive(writer, ids, to_topic)  # type: ignore[misc]
            )
            redriven += done
            failed.update(bad)
        self._engine.wakeups.wake_all()
        return Redriven(redriven, failed)

    def _redrive(self, writer: Writer, ids: Iterable[int], to_topic: str | None) -> tuple[int, dict[int, str]]:
        now_ms = self._engine.clock.now_ms()
        wanted = tuple(ids)
        letters = [
            letter
            for letter in writer.dead_letters(DeadLetterQuery(ids=wanted), 0, len(wanted))
            if not letter.redriving
        ]
        failed: dict[int, str] = {}
        for letter in letters:
            counted = replace(letter, redrives=letter.redrives + 1)
            try:
                if to_topic is not None:
                    self._republish(writer, letter, to_topic, now_ms)
                    continue
                _refuse_unwanted(writer, letter)
                _refuse_foreign(writer, letter)
                if writer.deliveries(letter.subscription, [letter.message.seq]):
                    raise UnknownDeadLetter("the message is being delivered already")
            except HeadwaterError as exc:
                failed[letter.id] = exc.why
                writer.bury([replace(counted, redrive_error=exc.why)])
                continue
            writer.bury([replace(counted, redriving=True, redrive_error=None)])
            row = DeliveryRow(letter.message.seq, 0, now_ms, 0, letter.message.priority, None, letter.id)
            writer.put_deliveries(letter.subscription, [row])
        return len(letters) - len(failed), failed

    def _republish(self, writer: Writer, letter: DeadLetter, topic: str, now_ms: int) -> None:
        writer.append([draft_of(letter.message, topic)], now_ms, self._engine.dedupe)
        writer.remove_dead_letters([letter.id])

    def purge(self, **given: Unpack[LetterFilter]) -> Flow[int]:
        query = make_query(given)
        purged = 0
        while True:
            letters = yield from self._engine.read(lambda reader: reader.dead_letters(query, 0, PAGE))
            if not letters:
                return purged
            ids = [letter.id for letter in letters]
            yield from self._engine.write(
                lambda writer, undo, ids=ids: writer.remove_dead_letters(ids)  # type: ignore[misc]
            )
            purged += len(ids)

    def export(self, **given: Unpack[LetterFilter]) -> Flow[list[str]]:
        """One JSON document per letter, oldest first."""
        query = make_query(given)
        letters = yield from self._engine.read(lambda reader: [*_all(reader, query)])
        return [msgspec.json.encode(_exported(letter)).decode() for letter in letters]

    def import_(self, lines: Iterable[str], allow: Callable[[str], object] | None = None) -> Flow[int]:
        """Bring exported letters back, all or none. They get new ids. `allow` raises for a topic that is refused."""
        letters = [_letter_of(line, number) for number, line in enumerate(lines, 1) if line.strip()]
        if allow is not None:
            for topic in {letter.message.topic for letter in letters}:
                allow(topic)

        def work(writer: Writer, undo: Undo) -> int:
            return len(writer.bury(letters))

        return self._engine.write(work)


def end_redrives(writer: Writer, subscription: str, why: str) -> None:
    """Letters on their way again whose delivery is about to be dropped: they stay, and may be redriven again."""
    letters = [letter for letter in _all(writer, DeadLetterQuery(subscription=subscription)) if letter.redriving]
    writer.bury([replace(letter, redriving=False, redrive_error=why) for letter in letters])


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
    reason: Reason
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
    reason: Reason
    attempts: int
    died_at: str
    message: MessageDocument
    error: str | None = None
    stack: str | None = None
    handler: str | None = None
    redrives: int = 0


_exported_letter = msgspec.json.Decoder(ExportedLetter)


def _exported(letter: DeadLetter) -> ExportedLetter:
    return ExportedLetter(
        letter.subscription,
        letter.reason,
        letter.attempts,
        iso(letter.died_ms),
        to_document(letter.message),
        letter.error,
        letter.stack,
        letter.handler,
        letter.redrives,
    )


def _checked(message: Message) -> Message:
    check_topic(message.topic)
    return message


def _letter_of(line: str, number: int) -> DeadLetter:
    try:
        found = _exported_letter.decode(line)
        return DeadLetter(
            0,
            found.subscription,
            _checked(from_document(found.message)),
            found.reason,
            found.attempts,
            ms_of_iso(found.died_at),
            found.error,
            found.stack,
            found.handler,
            found.redrives,
        )
    except (msgspec.DecodeError, ValueError) as exc:
        raise InvalidData(
            f"not an exported dead letter ({exc})",
            where=f"line {number}",
            next="Nothing was imported; mend the line and import again",
        ) from exc


def _refuse_unwanted(reader: Reader, letter: DeadLetter) -> None:
    """A letter may be imported with any topic; its subscription gets it only if it could have got it by a publish."""
    record = reader.subscription(letter.subscription)
    if record is None:
        raise UnknownDeadLetter(f"subscription '{letter.subscription}' is gone")
    if not parse_pattern(record.spec.pattern, record.spec.dialect).matches(letter.message.topic):
        raise UnknownDeadLetter(f"subscription '{letter.subscription}' does not read {letter.message.topic}")


def _refuse_foreign(reader: Reader, letter: DeadLetter) -> None:
    """A delivery goes by seq. A letter imported from another log has that log's seq, which here is another message."""
    here = reader.messages([letter.message.seq]).get(letter.message.seq)
    if letter.message.seq > reader.last_seq() or (here is not None and here.scoped_id != letter.message.scoped_id):
        raise UnknownDeadLetter("the letter comes from another log; redrive it to a topic, as a new message")


def _one(reader: Reader, id: int) -> DeadLetter:
    found = reader.dead_letters(DeadLetterQuery(ids=(id,)), 0, 1)
    if not found:
        raise unknown(id)
    return found[0]


def unknown(id: int) -> UnknownDeadLetter:
    return UnknownDeadLetter(f"there is no dead letter {id}", next="`headwater dlq ls` lists them")


def _all(reader: Reader, query: DeadLetterQuery) -> Iterable[DeadLetter]:
    after = 0
    while page := reader.dead_letters(query, after, PAGE):
        yield from page
        after = page[-1].id


def _statistics(reader: Reader, query: DeadLetterQuery) -> LetterStatistics:
    count: Callable[[LetterColumn, int], dict[str, int]]
    if query.error is None and (query.topic is None or query.topic.is_exact):
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


def _counted_one_by_one(letters: Iterable[DeadLetter]) -> Callable[[LetterColumn, int], dict[str, int]]:
    """Where the database cannot tell alone which letters match."""
    counts: dict[LetterColumn, Counter[str]] = {column: Counter() for column in get_args(LetterColumn)}
    for letter in letters:
        for column, counter in counts.items():
            counter[letter_value(letter, column)] += 1
    return lambda by, limit: dict(counts[by].most_common(limit))
