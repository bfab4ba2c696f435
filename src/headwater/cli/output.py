"""How results look: tables and lines for people, JSON for programs, nothing but text into a pipe."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import UTC, datetime
from typing import Any

import msgspec
from rich.console import Console, RenderableType
from rich.highlighter import JSONHighlighter
from rich.table import Table
from rich.text import Text

from headwater.broker.received import Received
from headwater.errors import InvalidData
from headwater.message import NAMED_HEADERS, Message

PIPE_COLUMNS = 10_000  # nobody wraps lines for a program that reads them

_row_of_its_own: Callable[[], AbstractContextManager[object]] = nullcontext
_json_colours = JSONHighlighter()


def surround_lines(room: Callable[[], AbstractContextManager[object]] = nullcontext) -> None:
    """Every line is written inside of it. Whoever draws something that moves takes it away there, and keeps it away
    until the line is written, so that the two share no row."""
    global _row_of_its_own
    _row_of_its_own = room


def console(*, to_stderr: bool = False) -> Console:
    """Made when needed: tests and pipes change what stdout is."""
    stream = sys.stderr if to_stderr else sys.stdout
    # No markup: topics and errors may hold brackets that mean nothing to us. What is styled is a Text.
    width = None if stream.isatty() else PIPE_COLUMNS
    return Console(file=stream, highlight=False, markup=False, emoji=False, width=width)


def say(text: str | Text) -> None:
    """A line of a command's answer."""
    with _row_of_its_own():
        console().print(text, soft_wrap=True)


def note(text: str) -> None:
    """Something beside the answer; never mixed into it."""
    with _row_of_its_own():
        console(to_stderr=True).print(Text(printable(text), style="dim"), soft_wrap=True)


def write_document(value: object) -> None:
    """The whole answer of a command under --json."""
    with _row_of_its_own():
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(value), indent=2).decode() + "\n")


def write_line(value: object) -> None:
    """One of many under --json."""
    with _row_of_its_own():
        sys.stdout.write(msgspec.json.encode(value).decode() + "\n")


def write_error(told: Mapping[str, str | int]) -> None:
    """Under --json: why a command failed, as the last line of stderr; stdout has only results."""
    # Paths may hold bytes that are no text; JSON takes none.
    known = {name: _as_text(value) if isinstance(value, str) else value for name, value in told.items()}
    # In ASCII: what the encoding of stderr lacks would be escaped there, and not as JSON has it.
    sys.stderr.write(json.dumps({"error": known}, separators=(",", ":")) + "\n")


def _as_text(value: str) -> str:
    return value.encode(errors="backslashreplace").decode()


def printable(text: str) -> str:
    """Text that cannot steer a terminal: control characters are shown, not sent."""
    if text.isprintable():
        return text
    return "".join(mark if mark.isprintable() or mark in "\n\t" else f"\\x{ord(mark):02x}" for mark in text)


def table(*columns: str, title: str | None = None) -> Table:
    """Columns whose name begins with '>' are numbers; those with '~' are cut first when room is short."""
    lined = sys.stdout.isatty()
    made = Table(
        title=title, title_justify="left", title_style="bold", box=None, header_style="bold dim" if lined else "none"
    )
    made.pad_edge = False
    made.padding = (0, 2, 0, 0)
    for name in columns:
        bare = name.lstrip(">~")
        made.add_column(
            bare,
            justify="right" if name.startswith(">") else "left",
            no_wrap=True,
            overflow="ellipsis",
            min_width=None if name.startswith("~") else len(bare),
            ratio=None,
        )
    return made


def show_table(shown: RenderableType) -> None:
    """As a table on a terminal; into a pipe as columns without trailing blanks."""
    screen = console()
    if screen.is_terminal:
        screen.print(shown)
        return
    with screen.capture() as captured:
        screen.print(shown)
    sys.stdout.write("".join(f"{line.rstrip()}\n" for line in captured.get().splitlines()))


def count(number: int) -> str:
    return f"{number:,}"


def some(number: int, noun: str) -> str:
    """`1 message`, `2,000 messages`."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def clock(ms: int) -> str:
    """The user's own time; with the date if that is not today's."""
    moment = datetime.fromtimestamp(ms / 1000, UTC).astimezone()
    today = moment.date() == datetime.now().astimezone().date()
    return moment.strftime("%H:%M:%S" if today else "%Y-%m-%d %H:%M:%S")


def clock_ms(ms: int) -> str:
    return f"{clock(ms)}.{ms % 1000:03d}"


def pairs(rows: Sequence[tuple[str, str | Text]]) -> Table:
    """Names and values, one under another."""
    made = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    made.add_column(style="dim" if sys.stdout.isatty() else "none", no_wrap=True)
    made.add_column(overflow="fold")
    for name, value in rows:
        made.add_row(name, value)
    return made


# --- messages -------------------------------------------------------------------------------------------------------


class MessagePrinter:
    """Prints messages as they come, as lines for people or as JSON lines."""

    def __init__(self, *, as_json: bool) -> None:
        self._as_json = as_json
        self._console = console() if sys.stdout.isatty() and not as_json else None
        self._topic_columns = 0

    def show(self, received: Received) -> None:
        if self._as_json:
            write_line(received.message.to_json() | {"attempt": received.attempt})
        elif self._console is None:
            sys.stdout.write(self._line(received).plain + "\n")
        else:
            self._console.print(self._line(received), soft_wrap=True)

    def flush(self) -> None:
        sys.stdout.flush()

    def _line(self, received: Received) -> Text:
        message = received.message
        self._topic_columns = min(32, max(self._topic_columns, len(message.topic)))
        line = Text()
        line.append(f"{message.seq:>6}  ", "bold")
        line.append(f"{clock_ms(message.published_ms)}  ", "dim")
        line.append(printable(message.topic).ljust(self._topic_columns), "cyan")
        line.append("  ")
        data = Text(_one_line(message.data_json))
        if self._console is not None:
            _json_colours.highlight(data)
        line.append_text(data)
        if headers := headers_text(message):
            line.append(f"  {headers}", "dim")
        if received.attempt > 1:
            line.append(f"  attempt {received.attempt}", "yellow")
        return line


def headers_text(message: Message) -> str:
    """The headers that are set, named ones first: `from=shop type=order`."""
    named: list[tuple[str, Any]] = [(name, message.field(name)) for name in NAMED_HEADERS]
    try:
        free: Mapping[str, Any] = message.headers
    except InvalidData:
        free = {"headers": "not JSON"}
    given = [(name, value) for name, value in [*named, *free.items()] if value is not None]
    if message.priority:
        given.append(("priority", message.priority))
    return _one_line(" ".join(f"{name}={_bare(value)}" for name, value in given))


def _bare(value: Any) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


def _one_line(text: str) -> str:
    return printable(text).replace("\n", " ").replace("\t", " ")
