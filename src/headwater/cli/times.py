"""What users type for times, spans, sizes and places in a log. Pure: `now` is passed in."""

from __future__ import annotations

import re
from datetime import datetime, timedelta

from headwater.broker.options import Start
from headwater.configuration.durations import DURATION_HELP, duration_ms
from headwater.configuration.sizes import SIZE_HELP, size_bytes
from headwater.errors import InvalidOption

SPAN_HELP = DURATION_HELP
TIME_HELP = "like -1h (an hour ago), 2026-07-29, 2026-07-29T10:30 or 10:30"


def parse_span(text: str, name: str) -> timedelta:
    """A length of time: numbers with units, nothing else."""
    ms = duration_ms(text)
    if ms is None:
        raise InvalidOption(f"{name} is a length of time, not {text!r}", next=f"Write it {SPAN_HELP}")
    try:
        return timedelta(milliseconds=ms)
    except OverflowError as exc:
        raise InvalidOption(f"{name} is too long: {text!r}") from exc


def parse_time(text: str, name: str, now: datetime) -> datetime:
    """A moment: so long ago, or a date and time. Without a zone it is the zone of `now`."""
    if text == "now":
        return now
    if text.startswith("-"):
        try:
            return now - parse_span(text[1:], name)
        except OverflowError as exc:
            raise InvalidOption(f"{name} lies too far back: {text!r}") from exc
    try:
        if re.fullmatch(r"\d{1,2}:\d{2}(:\d{2})?", text):
            text = f"{now.date().isoformat()}T{text.zfill(len(text) + (text[1] == ':'))}"
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise InvalidOption(f"{name} is no time: {text!r}", next=f"Write it {TIME_HELP}") from None
    return moment if moment.tzinfo is not None else moment.replace(tzinfo=now.tzinfo)


def parse_start(text: str, name: str, now: datetime) -> Start:
    """`first`, `new`, a seq or a time."""
    if text == "first":
        return "first"
    if text == "new":
        return "new"
    if text.isascii() and text.isdigit():
        return int(text)
    try:
        return parse_time(text, name, now)
    except InvalidOption:
        raise InvalidOption(
            f"{name} is no place in a log: {text!r}", next=f"Write first, new, a seq, or a time {TIME_HELP}"
        ) from None


def parse_size(text: str, name: str) -> int:
    """A number of bytes: 4096, 10kB, 1.5GB, 512MiB."""
    size = size_bytes(text)
    if size is None:
        raise InvalidOption(f"{name} is a size, not {text!r}", next=f"Write it {SIZE_HELP}")
    return size


def say_span(ms: float) -> str:
    """A length of time for people, in at most two units: 35ms, 12s, 3m 20s, 2h 5m, 4d 3h."""
    if ms < 1_000:
        return f"{ms:.0f}ms"
    seconds = int(ms // 1_000)
    parts = [
        (seconds // 86_400, "d"),
        (seconds // 3_600 % 24, "h"),
        (seconds // 60 % 60, "m"),
        (seconds % 60, "s"),
    ]
    first = next(index for index, (number, _) in enumerate(parts) if number)
    return " ".join(f"{number}{unit}" for number, unit in parts[first : first + 2] if number)


def say_size(size: int) -> str:
    """Bytes for people: 812 B, 77.8 kB, 1.3 GB."""
    if size < 1_000:
        return f"{size} B"
    value = float(size)
    for unit in ("kB", "MB", "GB", "TB"):
        value /= 1_000
        if value < 999.95 or unit == "TB":
            break
    return f"{value:.1f} {unit}"
