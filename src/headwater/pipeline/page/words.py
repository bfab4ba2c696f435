"""Numbers, sizes, spans and times as a reader wants them; names as a page can bear them. Pure."""

from __future__ import annotations

import math
import re
from datetime import UTC, date, datetime, timedelta

NAME_CHARS_MAX = 96  # of a topic, handler or subscription in a table
LABEL_CHARS_MAX = 32  # of the same in a legend, a tooltip or the head of a column
PATH_CHARS_MAX = 240  # of a log, a lake or a file
ERROR_CHARS_MAX = 600  # of an example of an error

_PASSWORD = re.compile(r"(?<=://)([^/@:\s]*):[^/@\s]*@")
_MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
_JOINERS = "\u200c\u200d"  # invisible, but words of some languages and many emoji are spelled with them
_THOUSANDS = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
_SIZES = ((2.0**50, "PiB"), (2.0**40, "TiB"), (2.0**30, "GiB"), (2.0**20, "MiB"), (2.0**10, "KiB"))
_SPANS = ((86_400_000.0, "d"), (3_600_000.0, "h"), (60_000.0, "min"), (1000.0, "s"))
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_FIRST_S = math.floor((datetime.min.replace(tzinfo=UTC) - _EPOCH).total_seconds())
_LAST_S = math.floor((datetime.max.replace(tzinfo=UTC) - _EPOCH).total_seconds()) - 1


# --- numbers --------------------------------------------------------------------------------------------------------


def count(number: float) -> str:
    return f"{round(number):,}"


def some(number: int, noun: str, many: str = "") -> str:
    """`1 message`, `2,000 messages`."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {many or noun + 's'}"


def short(number: float) -> str:
    """`950`, `12.3k`, `4M`: three digits that matter."""
    for factor, unit in _THOUSANDS:
        if abs(number) >= factor * 0.9995:
            return f"{_digits(number / factor)}{unit}"
    return _digits(number)


def size(number: float) -> str:
    """`512 B`, `1.5 MiB`."""
    for factor, unit in _SIZES:
        if abs(number) >= factor * 0.9995:
            return f"{_digits(number / factor)} {unit}"
    return f"{_digits(number)} B"


def span(ms: float) -> str:
    """`8 ms`, `1.2 s`, `12 min`, `3.5 d`."""
    for factor, unit in _SPANS:
        if abs(ms) >= factor * 0.9995:
            return f"{_digits(ms / factor)} {unit}"
    return f"{_digits(ms)} ms"


def days(number: float) -> str:
    """Days ahead, no finer than anybody plans with."""
    if number < 1:
        return "under a day"
    if number > 730:
        return f"{_digits(number / 365)} years"
    return some(math.floor(number), "day")


def share(part: float, whole: float) -> str:
    if whole <= 0 or part <= 0:
        return "0 %"
    percent = 100 * part / whole
    return "< 0.1 %" if percent < 0.1 else f"{percent:.1f} %" if percent < 10 else f"{percent:.0f} %"


def _digits(number: float) -> str:
    """Three digits that matter, no zeros behind the point."""
    if abs(number) >= 99.95 or number == round(number):
        return f"{number:,.0f}"
    kept = f"{number:.1f}" if abs(number) >= 9.995 else f"{number:.2f}" if abs(number) >= 0.01 else f"{number:.1g}"
    return kept.rstrip("0").rstrip(".") if "." in kept and "e" not in kept else kept


# --- times, all in UTC ----------------------------------------------------------------------------------------------


def in_utc(moment: datetime) -> datetime:
    """A moment without a zone is taken for UTC: it is what the lake writes."""
    return moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)


def epoch_seconds(moment: datetime) -> int:
    return math.floor((in_utc(moment) - _EPOCH).total_seconds())


def from_epoch(seconds: int) -> datetime:
    """Clamped to what a date can say: a message may carry any time."""
    return _EPOCH + timedelta(seconds=min(_LAST_S, max(_FIRST_S, seconds)))


def day(value: date) -> str:
    return f"{value.day} {_MONTHS[value.month - 1]}"


def day_and_year(value: date) -> str:
    return f"{day(value)} {value.year}"


def month(value: date) -> str:
    return f"{_MONTHS[value.month - 1]} {value.year}"


def clock(moment: datetime) -> str:
    return f"{moment.hour:02}:{moment.minute:02}"


def moment(value: datetime) -> str:
    """`14 Nov 2025, 09:00`: the page says once that its times are UTC."""
    value = in_utc(value)
    return f"{day_and_year(value)}, {clock(value)}"


def brief_moment(value: datetime) -> str:
    value = in_utc(value)
    return f"{day(value)} {clock(value)}"


def iso_moment(text: object) -> datetime | None:
    """The time an audit's document carries; None if it carries none that can be read."""
    if isinstance(text, datetime):
        return in_utc(text)
    try:
        return in_utc(datetime.fromisoformat(str(text)))
    except (ValueError, OverflowError):
        return None


# --- names ----------------------------------------------------------------------------------------------------------


def clean(text: str) -> str:
    """Control characters, direction marks and halves of characters are shown, not sent: nothing hides in a name."""
    if text.isprintable():
        return text
    return "".join(mark if mark.isprintable() or mark in "\n" or mark in _JOINERS else _shown(mark) for mark in text)


def _shown(mark: str) -> str:
    code = ord(mark)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def cut(text: str, chars_max: int = NAME_CHARS_MAX) -> str:
    """Long names lose their middle: what tells two of them apart stands at either end."""
    text = clean(" ".join(text.split("\n")))
    if len(text) <= chars_max:
        return text
    head = chars_max // 2
    return f"{text[:head]}…{text[-(chars_max - 1 - head) :]}"


def cut_end(text: str, chars_max: int) -> str:
    """Long prose loses its end."""
    return text if len(text) <= chars_max else f"{text[: chars_max - 1]}…"


def without_password(url: str) -> str:
    """A page is passed on more freely than the address of a database should be."""
    return _PASSWORD.sub(r"\1:***@", url)
