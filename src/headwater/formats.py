"""Durations, sizes, times, counts and urls as text: one grammar and one printer for each.

Inside, a time is whole milliseconds since 1970 UTC and a duration is whole milliseconds; the public API takes aware
datetimes or seconds for a time, and seconds, timedeltas or texts for a duration. `now` is passed in.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Collection
from datetime import UTC, datetime, timedelta
from urllib.parse import SplitResult, unquote, urlsplit

from headwater.errors import InvalidOptionError

TIME_MS_MAX = 253_402_300_799_999  # the last millisecond of year 9999, the latest that a datetime can hold
SPAN_S_MAX = 3_155_760_000  # a century; beyond it arithmetic on times would overflow

Moment = datetime | int | float
Span = timedelta | int | float | str

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


# --- times ------------------------------------------------------------------------------------------------------------

TIME_HELP = "like -1h (an hour ago), 2026-07-29, 2026-07-29T10:30 or 10:30"


def time_ms(at: Moment, name: str = "time") -> int:
    """Milliseconds of an aware datetime, or of seconds since 1970."""
    if isinstance(at, datetime):
        if at.tzinfo is None:
            raise InvalidOptionError(f"{name} has no time zone", next="Give it one, such as UTC: 2030-01-31T12:00:00Z")
        ms = round((at - _EPOCH) / timedelta(milliseconds=1))
    elif isinstance(at, (int, float)) and not isinstance(at, bool) and math.isfinite(at):
        ms = round(at * 1000)
    else:
        raise InvalidOptionError(
            f"{name} must be a datetime or seconds since 1970, not {at!r}",
            next="Give a date and time with its zone; a time from now is a duration: delay, ttl",
        )
    if not 0 <= ms <= TIME_MS_MAX:
        raise InvalidOptionError(
            f"{name} lies outside the years 1970 to 9999: {at!r}",
            next="A number is seconds since 1970, not milliseconds" if isinstance(at, int | float) and at > 0 else "",
        )
    return ms


def datetime_of(ms: int) -> datetime:
    # A float would be off by one in the far future. A row inserted by hand may hold any number, and must not raise.
    return _EPOCH + timedelta(milliseconds=min(max(ms, 0), TIME_MS_MAX))


def iso(ms: int) -> str:
    return datetime_of(ms).isoformat(timespec="milliseconds").replace("+00:00", "Z")


@functools.lru_cache(maxsize=1024)
def ms_of_iso(text: str) -> int:
    return time_ms(datetime.fromisoformat(text))


def parse_time(text: str, name: str, now: datetime) -> datetime:
    """`now`, a duration before it (`-1h`), or a date and time; without a zone in the zone of `now`."""
    if text == "now":
        return now
    if text.startswith("-"):
        try:
            return now - parse_duration(text[1:], name)
        except OverflowError as exc:
            raise InvalidOptionError(f"{name} lies too far back: {text!r}") from exc
    try:
        if re.fullmatch(r"\d{1,2}:\d{2}(:\d{2})?", text):
            text = f"{now.date().isoformat()}T{text.zfill(len(text) + (text[1] == ':'))}"
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise InvalidOptionError(f"{name} must be a time, not {text[:40]!r}", next=f"Write it {TIME_HELP}") from None
    return moment if moment.tzinfo is not None else moment.replace(tzinfo=now.tzinfo)


# --- durations --------------------------------------------------------------------------------------------------------

DURATION_CHARS_MAX = 100
DURATION_HELP = "like 500ms, 10s, 5m, 1h30m, 7d or 2w"

_UNITS_MS = {"w": 604_800_000, "d": 86_400_000, "h": 3_600_000, "m": 60_000, "s": 1_000, "ms": 1}
_DURATION = re.compile("".join(rf"(?:([0-9]+){unit})?" for unit in _UNITS_MS))


def span_ms(span: Span, name: str) -> int:
    """Milliseconds of a timedelta, of seconds, or of a text as `parse_duration` reads it; never negative."""
    if isinstance(span, str):
        span = parse_duration(span, name)
    if isinstance(span, timedelta):
        seconds = span.total_seconds()
    elif isinstance(span, (int, float)) and not isinstance(span, bool) and math.isfinite(span):
        seconds = float(span)
    else:
        raise InvalidOptionError(f"{name} must be seconds, a timedelta or a text like 1h30m, not {span!r}")
    if not 0 <= seconds <= SPAN_S_MAX:
        raise InvalidOptionError(f"{name} must lie between 0 and a hundred years, not {span!r}")
    return round(seconds * 1000)


def span_s(span: Span | None, name: str) -> float | None:
    """Seconds of the same; None is a wait without limit."""
    if span is None or (type(span) is float and 0 <= span <= SPAN_S_MAX):
        return span
    try:
        return span_ms(span, name) / 1000
    except InvalidOptionError as exc:
        raise InvalidOptionError(exc.why, next=exc.next or "None waits without limit") from None


def parse_duration(text: str, name: str = "") -> timedelta:
    """Weeks, days, hours, minutes, seconds and milliseconds in this order, each at most once: `1h30m`, `250ms`."""
    found = _DURATION.fullmatch(text) if 0 < len(text) <= DURATION_CHARS_MAX else None
    if found is None:
        is_number = 0 < len(text) < DURATION_CHARS_MAX and text.isascii() and text.isdigit()
        raise InvalidOptionError(
            f"{name} must be a duration, not {text[:40]!r}".strip(),
            next=f"Did you mean {text}s?" if is_number else f"Write it {DURATION_HELP}",
        )
    ms = sum(int(number or 0) * unit_ms for number, unit_ms in zip(found.groups(), _UNITS_MS.values(), strict=True))
    if ms > SPAN_S_MAX * 1000:
        raise InvalidOptionError(f"{name} must lie between 0 and a hundred years, not {text[:40]!r}".strip())
    return timedelta(milliseconds=ms)


def format_duration(ms: int) -> str:
    """The shortest text that `parse_duration` reads as this, without weeks: `10d` is easier to read than `1w3d`."""
    parts = []
    for unit, unit_ms in _UNITS_MS.items():
        if unit != "w":
            number, ms = divmod(ms, unit_ms)
            parts.append(f"{number}{unit}" if number else "")
    return "".join(parts) or "0s"


def format_seconds(seconds: float) -> str:
    """Rounded, for people: `0.035 s`, `12 s`, `3.33 min`, `2.5 h`, `4 d`."""
    return _in_units(seconds, ((86_400.0, "d"), (3_600.0, "h"), (60.0, "min")), "s")


# --- sizes and counts -------------------------------------------------------------------------------------------------

SIZE_DIGITS_MAX = 30
SIZE_HELP = "like 4096, 64KiB, 512MiB or 2GiB"

_DIGITS = f"[0-9]{{1,{SIZE_DIGITS_MAX}}}"
_SIZE = re.compile(rf"({_DIGITS})(?:\.({_DIGITS}))?\s*([kmgt]?)(i?)b?", re.IGNORECASE)
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
_SIZES = ((2.0**50, "PiB"), (2.0**40, "TiB"), (2.0**30, "GiB"), (2.0**20, "MiB"), (2.0**10, "KiB"))
_COUNTS = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def parse_size(text: str, name: str = "") -> int:
    """Bytes of `4096`, `64KiB` or `1.5GB`, to the nearest whole one."""
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise InvalidOptionError(
            f"{name} must be a size in bytes, not {text[:40]!r}".strip(), next=f"Write it {SIZE_HELP}"
        )
    whole, fraction, unit, binary = found.groups(default="")
    factor: int = (1024 if binary else 1000) ** _POWERS[unit.lower()]
    scale: int = 10 ** len(fraction)
    return (2 * int(whole + fraction) * factor + scale) // (2 * scale)  # a float would be off by one in large sizes


def format_size(size: float) -> str:
    """`512 B`, `77.8 KiB`, `1.5 GiB`."""
    return _in_units(size, _SIZES, "B")


def format_count(number: float) -> str:
    """`950`, `12.3k`, `4M`."""
    return _in_units(number, _COUNTS, "").replace(" ", "")


def format_number(number: float) -> str:
    """Three significant digits without trailing zeros; whole numbers stay whole."""
    if abs(number) >= 99.95 or number == round(number):
        return f"{number:,.0f}"
    decimals = 1 if abs(number) >= 9.995 else 2 if abs(number) >= 0.9995 else 3
    return f"{number:.{decimals}f}".rstrip("0").rstrip(".")


def storable(text: str) -> str:
    """Text as every store takes it: UTF-8 has no half of a surrogate pair, PostgreSQL no NUL."""
    return text.encode(errors="backslashreplace").decode().replace("\0", "\\x00")


def error_text(exc: BaseException) -> str:
    """The class and the text of an exception, storable."""
    try:
        text = str(exc)
    except Exception as unreadable:  # written by a user, it may fail in any way
        text = f"its text is not readable ({type(unreadable).__name__})"
    return storable(f"{type(exc).__name__}: {text}")


def plural(number: int, noun: str, nouns: str = "") -> str:
    """`1 message`, `2,000 messages`."""
    return f"{number:,} {noun if number == 1 else nouns or noun + 's'}"


def _in_units(number: float, units: tuple[tuple[float, str], ...], smallest: str) -> str:
    for factor, unit in units:
        if abs(number) >= factor * 0.9995:  # 1,023.9 B would be rounded to 1,024 B, and is 1 KiB
            return f"{format_number(number / factor)} {unit}"
    return f"{format_number(number)} {smallest}"


# --- urls -------------------------------------------------------------------------------------------------------------

_USER_INFO = re.compile(r"//([^:@/]*):.*@", re.DOTALL)  # an unescaped password may hold / ? and @: up to the last @
_SECRET_NAME = re.compile("pass|secret|token|key", re.IGNORECASE)


def split_url(url: str, *, why: str = "this url cannot be read", where: str = "", next: str = "") -> SplitResult:
    """Split like `urlsplit`, for a url that may hold a password: the error quotes none of it, and a url with an @
    behind its host is refused, because its password holds a character that had to be escaped."""
    try:
        parts = urlsplit(url)
        _ = parts.port  # raises ValueError
        if not parts.fragment and "@" not in parts.path + parts.query:
            return parts
    except ValueError:
        pass
    raise InvalidOptionError(why, where=where, next=next) from None


def url_text(url: object, noun: str) -> str:
    """The url or path as text. What is neither is refused, mostly a variable that is not set."""
    to_path = getattr(type(url), "__fspath__", None)
    text = url if to_path is None else to_path(url)
    if isinstance(text, bytes):
        text = text.decode("utf-8", "surrogateescape")
    if not isinstance(text, str) or not text:
        raise InvalidOptionError(
            f"{noun} is a path or a url, not {url!r}", next="" if text else "Is an environment variable unset?"
        )
    return text


def redact_url(url: str, *, keep: Collection[str] | None = (), user: bool = True) -> str:
    """The url for names, logs and errors, without its password; also of one that cannot be parsed. Of its query only
    the parameters `keep` stay; None keeps all but secrets."""
    place, _, query = _USER_INFO.sub(lambda found: f"//{found[1]}@" if found[1] else "//", url).partition("?")
    if not user:
        place = re.sub(r"//[^/]*@", "//", place)
    parameters = query.partition("#")[0].split("&") if query else []
    if keep is None:
        kept = [each for each in parameters if not _is_secret(each)]
    else:
        kept = [each for each in parameters if each.partition("=")[0] in keep]
    return f"{place}?{'&'.join(kept)}" if kept else place


_HOST_AND_PORT = re.compile(r"[A-Za-z0-9.-]+:[0-9]{1,5}")
_ONE_SLASH = re.compile(r"(wss?|https?|postgres(?:ql)?|redis):/?(?!/)(.*)", re.IGNORECASE | re.DOTALL)


def refuse_mistyped_url(url: str) -> None:
    """`ws:/host` would be a path. The error does not repeat what may hold a password."""
    if found := _ONE_SLASH.fullmatch(url):
        scheme, rest = found[1].lower(), found[2]
        address = rest if "@" not in rest else "…"
        raise InvalidOptionError(
            f"{scheme}: is followed by two slashes in an address",
            next=f"Write {scheme}://{address}; a file of that name is ./{scheme}:…",
        )
    if _HOST_AND_PORT.fullmatch(url):
        raise InvalidOptionError(
            f"{url} is a host and a port", next=f"Write ws://{url}; a file of that name is ./{url}"
        )
    if "dbname=" in url or "host=" in url:
        raise InvalidOptionError(
            "this looks like a connection string of PostgreSQL", next="Write postgres://user@host/database"
        )
    if url.startswith("file:"):
        raise InvalidOptionError(
            "a log in a file is named by its path", next=f"Write {url[5:].lstrip('/') or 'events.db'}"
        )


def is_postgres(url: str) -> bool:
    return url.startswith(("postgres://", "postgresql://"))


def mask_url(url: str) -> str:
    """The url as a setting is shown: whole, with `***` for each secret."""
    place, mark, query = _USER_INFO.sub(r"//\1:***@", url).partition("?")
    parameters = [each.partition("=")[0] + "=***" if _is_secret(each) else each for each in query.split("&")]
    return place + mark + "&".join(parameters)


def _is_secret(parameter: str) -> bool:
    """Whether a parameter holds a secret. Its name may be escaped, as in `p%61ssword=`."""
    name, has_value, _ = parameter.partition("=")
    return bool(has_value) and _SECRET_NAME.search(unquote(name)) is not None


def is_unicode(text: str) -> bool:
    """Half a surrogate pair is not."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
