"""The server's logger, and the formats of its lines: text for people, or JSON for programs, one object a line.

A field of a line comes from the message's own arguments, `("serving %(log)s", {"log": name})`, or from `extra`. Tokens
and the data of messages are in neither.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any, Literal, TextIO

logger = logging.getLogger("headwater.server")

TEXT_CHARS_MAX = 4_000  # of a message or a value: clients choose some of them
STACK_CHARS_MAX = 20_000

ALIKE_A_SECOND_MAX = 10  # lines of one kind; clients can cause some of them as often as they like
KINDS_MAX = 1_000
KIND_CHARS_MAX = 100

LOGGERS = ("headwater", "asyncio", "py.warnings")

_STANDARD = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName"}
_COLOURS = {"debug": "2", "info": "32", "warning": "33", "error": "31", "critical": "1;31"}


def set_up(format: Literal["text", "json"], level: str, stream: TextIO | None = None) -> logging.Handler:
    """Make the loggers of this process write to `stream` (default: stderr) only."""
    stream = stream or sys.stderr
    handler = logging.StreamHandler(stream)
    handler.addFilter(LineLimit())
    handler.setFormatter(JsonFormatter() if format == "json" else TextFormatter(in_colour=stream.isatty()))
    for name in LOGGERS:
        each = logging.getLogger(name)
        each.handlers[:] = [handler]
        each.propagate = False
        each.setLevel(level.upper() if name == "headwater" else logging.WARNING)
    logging.captureWarnings(True)
    return handler


class LineLimit(logging.Filter):
    """Passes ALIKE_A_SECOND_MAX lines of a kind a second. The next line has the number of those that were left out."""

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._now_s = now_s
        self._kinds: dict[tuple[str, int, str], list[int]] = {}  # the second, lines in it, lines left out

    def filter(self, record: logging.LogRecord) -> bool:
        second, kind = int(self._now_s()), (record.name, record.lineno, str(record.msg)[:KIND_CHARS_MAX])
        if kind not in self._kinds and len(self._kinds) >= KINDS_MAX:
            self._kinds.clear()
        seen = self._kinds.setdefault(kind, [second, 0, 0])
        if seen[0] != second:
            seen[0], seen[1] = second, 0
        seen[1] += 1
        if seen[1] > ALIKE_A_SECOND_MAX:
            seen[2] += 1
            return False
        if seen[2]:
            record.left_out, seen[2] = seen[2], 0
        return True


def _args(record: logging.LogRecord) -> Mapping[str, Any]:
    return record.args if isinstance(record.args, Mapping) else {}


def _extra(record: logging.LogRecord) -> dict[str, Any]:
    """The fields passed as `extra`, without empty ones."""
    return {name: value for name, value in record.__dict__.items() if name not in _STANDARD and value not in (None, "")}


class JsonFormatter(logging.Formatter):
    """Time (ISO 8601, UTC), level, logger and message, the fields of the record, and the stack of an error."""

    def format(self, record: logging.LogRecord) -> str:
        moment = datetime.fromtimestamp(record.created, UTC)
        line = {
            "time": moment.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": _cut(record.getMessage(), TEXT_CHARS_MAX),
            **{name: _cut(value, TEXT_CHARS_MAX) for name, value in {**_args(record), **_extra(record)}.items()},
        }
        if record.exc_info:
            line["stack"] = _cut(self.formatException(record.exc_info), STACK_CHARS_MAX)
        return _json(line)


class TextFormatter(logging.Formatter):
    """Local time, level, message, then key=value for each extra field."""

    def __init__(self, *, in_colour: bool = False) -> None:
        super().__init__()
        self._in_colour = in_colour

    def format(self, record: logging.LogRecord) -> str:
        moment = datetime.fromtimestamp(record.created).isoformat(" ", timespec="milliseconds")
        level = record.levelname.lower()
        padded = f"{level:<7}"
        if self._in_colour:
            moment, padded = f"\x1b[2m{moment}\x1b[0m", f"\x1b[{_COLOURS.get(level, '0')}m{padded}\x1b[0m"
        message = _cut(record.getMessage(), TEXT_CHARS_MAX)
        fields = [f"{name}={_word(_cut(value, TEXT_CHARS_MAX))}" for name, value in _extra(record).items()]
        lines = [" ".join([moment, padded, _one_line(message), *fields])]
        if record.exc_info:
            stack = _cut(self.formatException(record.exc_info), STACK_CHARS_MAX)
            lines += [f"    {_one_line(line)}" for line in stack.split("\n")]
        return "\n".join(lines)


def _cut(value: Any, chars_max: int) -> Any:
    return f"{value[:chars_max]}…" if isinstance(value, str) and len(value) > chars_max else value


def _word(value: Any) -> str:
    is_word = isinstance(value, str) and value.isprintable() and not any(mark in value for mark in ' "=')
    return value if is_word else _json(value)


def _json(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    # JSON may hold some line breaks and terminal control characters unescaped.
    return text if text.isprintable() else json.dumps(value, default=str)


def _one_line(text: str) -> str:
    """Text from clients must neither look like a line of its own nor control a terminal."""
    if text.isprintable():
        return text
    return "".join(mark if mark.isprintable() else mark.encode("unicode_escape").decode() for mark in text)
