"""Messages from JSON lines: read as they come, published in batches, each problem told with its line."""

from __future__ import annotations

import os
import select
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NamedTuple

import msgspec

import headwater
from headwater.cli.times import parse_span, parse_time
from headwater.errors import InvalidData, InvalidInput, TooLarge

BATCH = 1_000
LINE_BYTES_MAX = 8 * 1024 * 1024
LINGER_S = 0.02  # a slow sender's lines do not wait for a full batch
READ_BYTES = 256 * 1024

# What `tail --json` prints besides what `publish` takes: copying a log is a pipe from one to the other.
_FOR_READERS = ("seq", "published_at", "size", "attempt")


class Line(NamedTuple):
    number: int
    text: bytes


@dataclass
class Tally:
    """What has been published so far. `known` is the log's last seq before: an id published earlier has one below."""

    known: int
    published: int = 0
    repeated: int = 0
    first_seq: int | None = None
    last_seq: int | None = None
    through_line: int = 0

    def add(self, seqs: list[int], through_line: int) -> None:
        for seq in seqs:
            if seq <= self.known:
                self.repeated += 1
                continue
            self.known = self.last_seq = seq
            self.first_seq = self.first_seq or seq
            self.published += 1
        self.through_line = through_line

    def to_json(self) -> dict[str, Any]:
        return {
            "published": self.published,
            "repeated": self.repeated,
            "first_seq": self.first_seq,
            "last_seq": self.last_seq,
            "lines": self.through_line,
        }


def read_batches(descriptor: int, on_bytes: Callable[[int], object]) -> Iterator[list[Line]]:
    """Lines that are not blank, as many as are there, up to a batch; waits only when it has none."""
    number, rest, lines = 0, b"", list[Line]()
    while True:
        if len(lines) >= BATCH:
            yield lines[:BATCH]
            del lines[:BATCH]
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
            raise TooLarge(f"longer than {LINE_BYTES_MAX:,} bytes", where=f"line {number + 1}", next="Split it")
        if not chunk:
            while lines:
                yield lines[:BATCH]
                del lines[:BATCH]
            return


def publish_batch(
    log: headwater.Log, lines: list[Line], outgoing_of: Callable[[bytes], Mapping[str, Any]], tally: Tally
) -> None:
    """Publish all of them in one transaction. If one is bad, those before it are published and the error names it."""
    good: list[Mapping[str, Any]] = []
    bad: tuple[Line, InvalidInput] | None = None
    for line in lines:
        try:
            good.append(outgoing_of(line.text))
        except InvalidInput as exc:
            bad = (line, exc)
            break
    _publish_good(log, good, lines, tally)
    if bad is not None:
        raise _with_line(*bad) from bad[1]


def _publish_good(log: headwater.Log, messages: list[Mapping[str, Any]], lines: list[Line], tally: Tally) -> None:
    if not messages:
        return
    try:
        tally.add(log.publish_many(messages), lines[len(messages) - 1].number)
    except InvalidInput as exc:
        # Nothing of it was published, and one of them is why. Halves find it in a few tries.
        if len(messages) == 1:
            raise _with_line(lines[0], exc) from exc
        half = len(messages) // 2
        _publish_good(log, messages[:half], lines, tally)
        _publish_good(log, messages[half:], lines[half:], tally)


def _with_line(line: Line, exc: InvalidInput) -> InvalidInput:
    next = "" if "batch" in exc.next else exc.next  # the batch is our own business
    return type(exc)(exc.why, where=f"line {line.number}", next=next)


def outgoing_reader(
    topic: str | None, defaults: Mapping[str, Any], now: datetime
) -> Callable[[bytes], Mapping[str, Any]]:
    """How to turn a line into a message: with a topic given, the line is the data; without, it says both itself."""
    decode = msgspec.json.Decoder().decode

    def read(text: bytes) -> Mapping[str, Any]:
        try:
            value = decode(text)
        except (msgspec.DecodeError, UnicodeDecodeError) as exc:
            raise InvalidData(f"not JSON ({exc})") from exc
        if topic is not None:
            return {**defaults, "topic": topic, "data": value}
        if not isinstance(value, dict) or "topic" not in value or "data" not in value:
            raise InvalidData(
                "not an object with topic and data",
                next='Write {"topic": …, "data": …}, or pass --topic to send each line as data',
            )
        return {**defaults, **_given(value, now)}

    return read


def _given(value: dict[str, Any], now: datetime) -> dict[str, Any]:
    given = {
        name: part for name, part in value.items() if name not in _FOR_READERS and (part is not None or name == "data")
    }
    for name in ("delay", "ttl"):
        if isinstance(given.get(name), str):
            given[name] = parse_span(given[name], name)
    for name in ("deliver_at", "expires_at"):
        if isinstance(given.get(name), str):
            given[name] = parse_time(given[name], name, now)
    return given
