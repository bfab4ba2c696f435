"""What users type for times, spans, sizes and places in a log. Pure: `now` is passed in."""

from __future__ import annotations

import re
from datetime import datetime, timedelta

from headwater.broker.options import Start
from headwater.errors import InvalidOption

_SPAN = re.compile(r"(?:\d+(?:ms|[smhdw]))+")
_SPAN_PART = re.compile(r"(\d+)(ms|[smhdw])")
_UNIT_MS = {"ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000, "w": 604_800_000}

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?", re.IGNORECASE)
_POWER = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}

SPAN_HELP = "like 500ms, 10s, 5m, 1h30m, 7d or 2w"
TIME_HELP = "like -1h (an hour ago), 2026-07-29, 2026-07-29T10:30 or 10:30"


def parse_span(text: str, name: str) -> timedelta:
    """A length of time: numbers with units, nothing else."""
    if not _SPAN.fullmatch(text):
        raise InvalidOption(f"{name} is a length of time, not {text!r}", next=f"Write it {SPAN_HELP}")
    try:
        return timedelta(milliseconds=sum(int(n) * _UNIT_MS[unit] for n, unit in _SPAN_PART.findall(text)))
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
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise InvalidOption(f"{name} is a size, not {text!r}", next="Write it like 4096, 10kB, 500MB, 2GB or 512MiB")
    number, unit, binary = found.groups()
    factor: int = (1024 if binary else 1000) ** _POWER[unit.lower()]
    return round(float(number) * factor)


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
