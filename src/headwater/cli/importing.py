"""The work of `headwater import`: messages of a file into a log, with their own times, each line once."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import datetime
from typing import IO, Any, NamedTuple, cast

import msgspec
import typer

import headwater
from headwater.broker.flow import run_blocking
from headwater.broker.importing import ImportPosition, import_drafts, import_position
from headwater.broker.log import LocalLog
from headwater.broker.subscribe import check_subscription_id
from headwater.cli.arguments import is_remote, log_or_new_one
from headwater.cli.output import PublishBar, Text, note, say, write_document
from headwater.cli.stopping import Stop
from headwater.errors import (
    ConflictError,
    HeadwaterError,
    InvalidDataError,
    InvalidInputError,
    InvalidOptionError,
    TooLargeError,
)
from headwater.formats import parse_time, plural
from headwater.message import Draft, PublishOptions, make_draft
from headwater.topics import check_topic

LINE_BYTES_MAX = 8 * 1024 * 1024
BATCH_LINES = 1_000
BATCH_BYTES = 8 * 1024 * 1024
READ_BYTES = 1024 * 1024

_OF_THE_OTHER_LOG = ("seq", "size", "attempt")
_TIMES = ("published_at", "deliver_at", "expires_at")


def import_file(path: str, file: str, name: str | None, *, as_json: bool) -> None:
    with ExitStack() as stack:
        source = sys.stdin.buffer if file == "-" else stack.enter_context(_opened(file))
        lines = _Lines(source, "stdin" if file == "-" else file)
        log = stack.enter_context(log_or_new_one(path))
        stop = stack.enter_context(Stop())
        bar = stack.enter_context(PublishBar(0 if file == "-" else os.fstat(source.fileno()).st_size))
        key = check_subscription_id(name) if name is not None else lines.digest_of_first_line()
        target: _Local | _Server = _Server(log, key) if is_remote(path) else _Local(cast(LocalLog, log._core), key)
        tally = _Tally(lines.skip(target.position, bar.read))
        batches = lines.batches()
        try:
            while (batch := stop.wait_for(lambda: next(batches, None))) is not None:
                _store(target, batch, lines.name, tally)
                bar.read(batch.size)
                bar.published(tally.imported + tally.duplicates)
        except HeadwaterError as exc:
            raise _with_progress(exc, tally) from exc
    if as_json:
        write_document(tally.to_json())
    else:
        say(tally.text())
    if stop.requested:
        note(f"interrupted after line {tally.lines}; run it again to continue")
        raise typer.Exit(130)


def _opened(file: str) -> IO[bytes]:
    try:
        return open(file, "rb", buffering=READ_BYTES)
    except OSError as exc:
        raise InvalidOptionError(f"cannot be read ({exc.strerror})", where=file, next="Check the name") from exc


# --- lines ------------------------------------------------------------------------------------------------------------


class _Line(NamedTuple):
    """`digest`: of the file up to here."""

    number: int
    text: bytes
    digest: int


class _Batch(NamedTuple):
    """Lines that are not blank, and the position behind them."""

    lines: list[_Line]
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
            raise TooLargeError(
                f"longer than {LINE_BYTES_MAX:,} bytes", where=f"{self.name}, line {self._number + 1}", next="Split it"
            )
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
        lines: list[_Line] = []
        began = self._offset
        while True:
            line = self._readline() if self._first is None else self._first
            self._first = None
            if line:
                self._number += 1
                self._offset += len(line)
                self._digest.update(line)
                if not line.isspace():
                    lines.append(_Line(self._number, line, self._short_digest()))
            is_full = len(lines) >= BATCH_LINES or self._offset - began >= BATCH_BYTES
            if self._offset > began and (is_full or not line):
                yield _Batch(lines, self._offset - began, self._position())
                lines, began = [], self._offset
            if not line:
                return

    def _position(self) -> ImportPosition:
        return ImportPosition(self._offset, self._number, self._short_digest())

    def _short_digest(self) -> int:
        """As a number that a database keeps."""
        return int.from_bytes(self._digest.copy().digest()[:8]) >> 1


_decode = msgspec.json.Decoder().decode


def read_message(line: bytes, now: datetime) -> tuple[str, Any, dict[str, Any]]:
    """Topic, data and publish options of one line."""
    try:
        value = _decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise InvalidDataError(f"not JSON ({exc})") from exc
    if not isinstance(value, dict) or "topic" not in value or "data" not in value:
        raise InvalidDataError("not an object with topic and data", next='Write {"topic": …, "data": …}')
    topic, data = value.pop("topic"), value.pop("data")
    options = {
        "from_" if key == "from" else key: part
        for key, part in value.items()
        if part is not None and key not in _OF_THE_OTHER_LOG
    }
    for key in _TIMES:
        if isinstance(options.get(key), str):
            options[key] = parse_time(options[key], key, now)
    return topic, data, options


# --- into a log -------------------------------------------------------------------------------------------------------


class _Local:
    """A log of this process: the position is stored with the messages."""

    def __init__(self, core: LocalLog, name: str) -> None:
        self._engine, self._name = core.engine, name
        self.known = run_blocking(core.last_seq())
        self.position = run_blocking(import_position(self._engine, name))

    def prepare(self, line: _Line, topic: str, data: Any, options: dict[str, Any]) -> Draft:
        """Raises what a publish would."""
        return make_draft(check_topic(topic), data, cast(PublishOptions, options), self._engine.clock.now_ms())

    def store(self, messages: list[Any], after: ImportPosition) -> list[int]:
        appended = run_blocking(import_drafts(self._engine, self._name, messages, self.position, after))
        self.position = after
        return appended.seqs


class _Server:
    """A log behind a server: a line without an id gets one that follows from its number and from all that stands before
    it, so that only a file that begins alike has the same ids."""

    def __init__(self, log: headwater.Log, name: str) -> None:
        self._log, self._name = log, name
        self.known = log.last_seq()
        self.position: ImportPosition | None = None

    def prepare(self, line: _Line, topic: str, data: Any, options: dict[str, Any]) -> tuple[str, Any, dict[str, Any]]:
        return topic, data, {"id": f"import-{self._name[:64]}-{line.number}-{line.digest:x}", **options}

    def store(self, messages: list[Any], after: ImportPosition) -> list[int]:
        return self._log.publish_many(messages)


class _Tally:
    def __init__(self, resumed_after: int) -> None:
        self.resumed_after = self.lines = resumed_after
        self.imported = self.duplicates = 0
        self.first_seq: int | None = None
        self.last_seq: int | None = None

    def add(self, seqs: list[int], known: int, through_line: int) -> int:
        """Returns the last seq that is known now: an id that the log has has a lower one."""
        for seq in seqs:
            if seq <= known:
                self.duplicates += 1
                continue
            known = self.last_seq = seq
            self.first_seq = self.first_seq or seq
            self.imported += 1
        self.lines = through_line
        return known

    def to_json(self) -> dict[str, Any]:
        return {
            "imported": self.imported,
            "duplicates": self.duplicates,
            "first_seq": self.first_seq,
            "last_seq": self.last_seq,
            "lines": self.lines,
            "resumed_after_line": self.resumed_after,
        }

    def text(self) -> Text:
        seqs = "" if self.first_seq is None else f"  seq {self.first_seq} to {self.last_seq}"
        again = "" if not self.duplicates else f"  {plural(self.duplicates, 'id')} known before"
        since = "" if not self.resumed_after else f"  continued after line {self.resumed_after}"
        return Text.assemble((f"imported {plural(self.imported, 'message')}", "green"), (seqs + again + since, "dim"))


def _store(target: _Local | _Server, batch: _Batch, file: str, tally: _Tally) -> None:
    """All of a batch, or none of it."""
    now = datetime.now().astimezone()
    messages: list[Any] = []
    for line in batch.lines:
        try:
            messages.append(target.prepare(line, *read_message(line.text, now)))
        except InvalidInputError as exc:
            raise type(exc)(exc.why, where=f"{file}, line {line.number}", next=exc.next) from exc
    try:
        seqs = target.store(messages, batch.after)
    except InvalidInputError as exc:
        where = f"{file}, lines {batch.lines[0].number} to {batch.lines[-1].number}"
        raise type(exc)(exc.why, where=f"{where} ({exc.where})" if exc.where else where, next=exc.next) from exc
    target.known = tally.add(seqs, target.known, batch.after.lines)


def _with_progress(exc: HeadwaterError, tally: _Tally) -> HeadwaterError:
    so_far = f"Stored: the messages through line {tally.lines}. Run the import again, it continues after that"
    return type(exc)(exc.why, where=exc.where, next=f"{exc.next}. {so_far}" if exc.next else so_far)
