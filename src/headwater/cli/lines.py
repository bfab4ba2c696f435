"""JSON lines into a log: the work of `headwater publish`, which stores what a stream brings as it comes, and of
`headwater import`, which stores each line of a file once, with its own time."""

from __future__ import annotations

import hashlib
import os
import select
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import IO, Any, NamedTuple, cast

import msgspec
import typer

import headwater
from headwater.broker.flow import run_blocking
from headwater.broker.importing import ImportPosition, import_drafts, import_position
from headwater.broker.log import LocalLog
from headwater.broker.publish import Outgoing, parts_of
from headwater.broker.subscribe import check_subscription_id
from headwater.cli.arguments import is_new, is_remote, log_or_new_one, usable_file
from headwater.cli.output import LinesBar, Text, note, show_result
from headwater.cli.stopping import INTERRUPTED, Stop
from headwater.errors import (
    ConflictError,
    HeadwaterError,
    InvalidDataError,
    InvalidInputError,
    TooLargeError,
)
from headwater.formats import parse_duration, parse_time, plural
from headwater.message import Draft, make_draft
from headwater.ports.records import Appended
from headwater.topics import check_topic

LINE_BYTES_MAX = 8 * 1024 * 1024
BATCH_LINES = 1_000
BATCH_BYTES = 8 * 1024 * 1024
READ_BYTES = 256 * 1024
LINGER_S = 0.02  # a slow sender's lines do not wait for a full batch

_OF_THE_OTHER_LOG = ("seq", "size", "attempt")  # tail --json prints them, and a copy gets its own


class Line(NamedTuple):
    """`digest`: of the file up to here, where it is imported."""

    number: int
    text: bytes
    digest: int = 0


@dataclass
class Tally:
    """What has been stored so far."""

    verb: str
    stored: int = 0
    duplicates: int = 0
    first_seq: int | None = None
    last_seq: int | None = None
    lines: int = 0

    def add(self, seqs: Sequence[int], duplicates: Collection[int], through_line: int) -> None:
        """`duplicates`: which of them were stored before."""
        for at, seq in enumerate(seqs):
            if at in duplicates:
                self.duplicates += 1
                continue
            self.last_seq = seq
            self.first_seq = self.first_seq or seq
            self.stored += 1
        self.lines = through_line

    def show(self, *, as_json: bool, since: str = "", **more: int) -> None:
        document = {
            self.verb: self.stored,
            "duplicates": self.duplicates,
            "first_seq": self.first_seq,
            "last_seq": self.last_seq,
            "lines": self.lines,
            **more,
        }
        seqs = "" if self.first_seq is None else f"  seq {self.first_seq} to {self.last_seq}"
        again = "" if not self.duplicates else f"  {plural(self.duplicates, 'id')} known before"
        done = (f"{self.verb} {plural(self.stored, 'message')}", "green")
        show_result(document, Text.assemble(done, (seqs + again + since, "dim")), as_json=as_json)


@contextmanager
def _telling(so_far: Callable[[HeadwaterError], str]) -> Iterator[None]:
    """An error says besides what is done and how to continue."""
    try:
        yield
    except HeadwaterError as exc:
        next = f"{exc.next}. {so_far(exc)}" if exc.next else so_far(exc)
        raise type(exc)(exc.why, where=exc.where, next=next) from exc


def _opened(file: str, next: str, buffering: int = -1) -> IO[bytes]:
    with usable_file("read", file, next):
        return open(file, "rb", buffering=buffering)


def _too_long(where: str) -> TooLargeError:
    return TooLargeError(f"longer than {LINE_BYTES_MAX:,} bytes", where=where, next="Split it")


def _at(where: str, exc: HeadwaterError, next: str | None = None) -> HeadwaterError:
    return type(exc)(exc.why, where=where, next=exc.next if next is None else next)


_decode_json = msgspec.json.Decoder().decode


def _decode(text: bytes) -> Any:
    try:
        return _decode_json(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise InvalidDataError(f"not JSON ({exc})") from exc


def read_message(text: bytes, now: datetime, left_out: Collection[str], instead: str = "") -> dict[str, Any]:
    """A message with its topic, data and options; `left_out`: fields that are not for the new message."""
    value = _decode(text)
    if not isinstance(value, dict) or "topic" not in value or "data" not in value:
        next = f'Write {{"topic": …, "data": …}}{instead}'
        raise InvalidDataError("not an object with topic and data", next=next)
    given = {
        name: part for name, part in value.items() if name not in left_out and (part is not None or name == "data")
    }
    for name in ("delay", "ttl"):
        if isinstance(given.get(name), str):
            given[name] = parse_duration(given[name], name)
    for name in ("published_at", "deliver_at", "expires_at"):
        if isinstance(given.get(name), str):
            given[name] = parse_time(given[name], name, now)
    return given


# --- publish ----------------------------------------------------------------------------------------------------------

Reader = Callable[[bytes], Mapping[str, Any]]


def publish_lines(path: str, topic: str | None, given: dict[str, Any], file: str | None, *, as_json: bool) -> None:
    read = message_reader(topic, given, datetime.now().astimezone())
    with ExitStack() as stack:
        if file is None:
            source = sys.stdin.fileno()
        else:
            source = stack.enter_context(_opened(file, "Check the name after --file", buffering=0)).fileno()
        stop = stack.enter_context(Stop())
        progress = stack.enter_context(LinesBar(os.fstat(source).st_size if file else 0))
        batches, tally = read_batches(source, progress.read), Tally("published")
        lines, makes_log = None, is_new(path)
        if makes_log:  # only when there is a message for it
            with _telling(lambda exc: _published_so_far(exc, tally)):
                lines = stop.wait_for(lambda: next(batches, None))
                if lines is not None:
                    _read_line(lines[0], read)
        if lines is not None or not makes_log:
            log = stack.enter_context(log_or_new_one(path))
            with _telling(lambda exc: _published_so_far(exc, tally)):
                while lines := lines or stop.wait_for(lambda: next(batches, None)):
                    publish_batch(log, lines, read, tally)
                    progress.published(tally.stored + tally.duplicates)
                    lines = None
    tally.show(as_json=as_json)
    if stop.requested:
        note(f"interrupted after line {tally.lines}; the lines up to it are published")
        raise typer.Exit(INTERRUPTED)


def _published_so_far(exc: HeadwaterError, tally: Tally) -> str:
    done = plural(tally.stored + tally.duplicates, "message")
    if isinstance(exc, InvalidInputError):
        return f"Published before it: {done}. Correct the line and continue from it"
    return f"Published: {done}, through line {tally.lines}. Continue from the line after it"


def message_reader(topic: str | None, defaults: Mapping[str, Any], now: datetime) -> Reader:
    """What reads a line as a message. With a topic, a line is the data of a message; without one it names the topic and
    may set all other options."""
    if topic is not None:
        return lambda text: {**defaults, "topic": topic, "data": _decode(text)}
    instead = ", or pass --topic to send each line as data"
    return lambda text: {**defaults, **read_message(text, now, (*_OF_THE_OTHER_LOG, "published_at"), instead)}


def read_batches(descriptor: int, on_bytes: Callable[[int], object]) -> Iterator[list[Line]]:
    """Lines that are not blank, as many as are there, up to a batch; waits only when it has none."""
    number, rest, lines = 0, b"", list[Line]()
    while True:
        if len(lines) >= BATCH_LINES:
            yield lines[:BATCH_LINES]
            del lines[:BATCH_LINES]
            continue
        if lines and not select.select([descriptor], [], [], LINGER_S)[0]:
            yield lines
            lines = []
        chunk = os.read(descriptor, READ_BYTES)
        on_bytes(len(chunk))
        *whole, rest = (rest + chunk).split(b"\n") if chunk else [rest, b""]
        for text in whole:
            number += 1
            if text.strip():
                lines.append(Line(number, text))
        if len(rest) > LINE_BYTES_MAX:
            raise _too_long(f"line {number + 1}")
        if not chunk:
            while lines:
                yield lines[:BATCH_LINES]
                del lines[:BATCH_LINES]
            return


def publish_batch(log: headwater.Log, lines: list[Line], read: Reader, tally: Tally) -> None:
    """Publish all of them in one transaction. If one is bad, those before it are published and the error names it."""
    good: list[Mapping[str, Any]] = []
    bad: InvalidInputError | None = None
    for line in lines:
        try:
            good.append(_read_line(line, read))
        except InvalidInputError as exc:
            bad = exc
            break
    _publish_good(log, good, lines, tally)
    if bad is not None:
        raise bad


def _read_line(line: Line, read: Reader) -> Mapping[str, Any]:
    try:
        return read(line.text)
    except InvalidInputError as exc:
        raise _with_line(line, exc) from exc


def _publish_good(log: headwater.Log, messages: list[Mapping[str, Any]], lines: list[Line], tally: Tally) -> None:
    if not messages:
        return
    try:
        appended = append(log, messages)
        # Without an id it is new: the answer was lost, and the client sent it again.
        duplicates = {at for at in appended.duplicates if "id" in messages[at]}
        tally.add(appended.seqs, duplicates, lines[len(messages) - 1].number)
    except InvalidInputError as exc:
        # Nothing of it was published, and one of them is why. Halves find it in a few tries.
        if len(messages) == 1:
            raise _with_line(lines[0], exc) from exc
        half = len(messages) // 2
        _publish_good(log, messages[:half], lines, tally)
        _publish_good(log, messages[half:], lines[half:], tally)


def _with_line(line: Line, exc: HeadwaterError) -> HeadwaterError:
    return _at(f"line {line.number}", exc, "" if "batch" in exc.next else exc.next)  # the batch is our own business


def append(log: headwater.Log, messages: Sequence[Outgoing]) -> Appended:
    """Publish, and return what the log answers: asking for its last seq would take the right to read."""
    return run_blocking(log._core.append(messages))


# --- import ----------------------------------------------------------------------------------------------------------


def import_file(path: str, file: str, name: str | None, *, as_json: bool) -> None:
    with ExitStack() as stack:
        source = sys.stdin.buffer if file == "-" else stack.enter_context(_opened(file, "Check the name"))
        lines = _Lines(source, "stdin" if file == "-" else file)
        log = stack.enter_context(log_or_new_one(path))
        stop = stack.enter_context(Stop())
        bar = stack.enter_context(LinesBar(0 if file == "-" else os.fstat(source.fileno()).st_size))
        key = check_subscription_id(name) if name is not None else lines.digest_of_first_line()
        target: _Local | _Server = _Server(log, key) if is_remote(path) else _Local(cast(LocalLog, log._core), key)
        resumed_after = lines.skip(target.position, bar.read)
        tally = Tally("imported", lines=resumed_after)
        batches = lines.batches()
        so_far = "Stored up to line {}. Run the import again to continue"
        with _telling(lambda exc: so_far.format(tally.lines)):
            while (batch := stop.wait_for(lambda: next(batches, None))) is not None:
                _store(target, batch, lines.name, tally)
                bar.read(batch.size)
                bar.published(tally.stored + tally.duplicates)
    since = "" if not resumed_after else f"  continued after line {resumed_after}"
    tally.show(as_json=as_json, since=since, resumed_after_line=resumed_after)
    if stop.requested:
        note(f"interrupted after line {tally.lines}; run it again to continue")
        raise typer.Exit(INTERRUPTED)


class _Batch(NamedTuple):
    """Lines that are not blank, and the position behind them."""

    lines: list[Line]
    size: int
    after: ImportPosition


class _Lines:
    """Lines of a stream, and a digest of all that was read."""

    def __init__(self, source: IO[bytes], name: str) -> None:
        self.name = name
        self._source = source
        self._first: bytes | None = None
        self._digest = hashlib.sha256()
        self._offset = self._number = 0

    def digest_of_first_line(self) -> str:
        self._first = self._readline()
        return hashlib.sha256(self._first).hexdigest()[:32]

    def _readline(self) -> bytes:
        line = self._source.readline(LINE_BYTES_MAX + 1)
        if len(line) > LINE_BYTES_MAX:
            raise _too_long(f"{self.name}, line {self._number + 1}")
        return line

    def skip(self, position: ImportPosition | None, on_bytes: Callable[[int], object]) -> int:
        """Pass over what is imported already; returns the number of its last line."""
        if position is None or position.offset == 0:
            return 0
        left = position.offset - len(self._first or b"")
        self._digest.update(self._first or b"")
        self._first = None
        while left > 0 and (chunk := self._source.read(min(READ_BYTES, left))):
            self._digest.update(chunk)
            left -= len(chunk)
        if left or self._short_digest() != position.digest:
            raise ConflictError(
                f"this is not the file whose first {plural(position.lines, 'line')} were imported under this name",
                where=self.name,
                next="Import it under a name of its own: --name NAME",
            )
        self._offset, self._number = position.offset, position.lines
        on_bytes(position.offset)
        return position.lines

    def batches(self) -> Iterator[_Batch]:
        lines: list[Line] = []
        began = self._offset
        while True:
            line = self._readline() if self._first is None else self._first
            self._first = None
            if line:
                self._number += 1
                self._offset += len(line)
                self._digest.update(line)
                if not line.isspace():
                    lines.append(Line(self._number, line, self._short_digest()))
            is_full = len(lines) >= BATCH_LINES or self._offset - began >= BATCH_BYTES
            if self._offset > began and (is_full or not line):
                yield _Batch(lines, self._offset - began, self._position())
                lines, began = [], self._offset
            if not line:
                return

    def _position(self) -> ImportPosition:
        return ImportPosition(self._offset, self._number, self._short_digest())

    def _short_digest(self) -> int:
        """The digest as a number that a database keeps."""
        return int.from_bytes(self._digest.copy().digest()[:8]) >> 1


class _Local:
    """A log of this process: the position is stored with the messages."""

    def __init__(self, core: LocalLog, name: str) -> None:
        self._engine, self._name = core.engine, name
        self.position = run_blocking(import_position(self._engine, name))

    def prepare(self, line: Line, message: dict[str, Any]) -> Draft:
        """Raises what a publish would."""
        topic, data, options = parts_of(message)
        return make_draft(check_topic(topic), data, options, self._engine.clock.now_ms())

    def store(self, messages: list[Any], after: ImportPosition) -> Appended:
        appended = run_blocking(import_drafts(self._engine, self._name, messages, self.position, after))
        self.position = after
        return appended


class _Server:
    """A log behind a server: a line without an id gets one that follows from its number and from all that stands before
    it, so that only a file that begins alike has the same ids."""

    def __init__(self, log: headwater.Log, name: str) -> None:
        self._log, self._name = log, name
        self._known = log.last_seq()
        self.position: ImportPosition | None = None

    def prepare(self, line: Line, message: dict[str, Any]) -> dict[str, Any]:
        return {"id": f"import-{self._name[:64]}-{line.number}-{line.digest:x}", **message}

    def store(self, messages: list[Any], after: ImportPosition) -> Appended:
        """An id that the log has has a seq that was known before; the log's own answer calls duplicates also what the
        client sent again because its answer was lost."""
        seqs, known_before = self._log.publish_many(messages), set[int]()
        for at, seq in enumerate(seqs):
            if seq <= self._known:
                known_before.add(at)
            self._known = max(self._known, seq)
        return Appended(seqs, frozenset(known_before))


def _store(target: _Local | _Server, batch: _Batch, file: str, tally: Tally) -> None:
    """Store all of a batch, or none of it."""
    now = datetime.now().astimezone()
    messages: list[Any] = []
    for line in batch.lines:
        try:
            messages.append(target.prepare(line, read_message(line.text, now, _OF_THE_OTHER_LOG)))
        except InvalidInputError as exc:
            raise _at(f"{file}, line {line.number}", exc) from exc
    try:
        appended = target.store(messages, batch.after)
    except InvalidInputError as exc:
        where = f"{file}, lines {batch.lines[0].number} to {batch.lines[-1].number}"
        raise _at(f"{where} ({exc.where})" if exc.where else where, exc) from exc
    tally.add(appended.seqs, appended.duplicates, batch.after.lines)
