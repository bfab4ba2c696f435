"""How results look: lines and tables for people, JSON for programs, plain text into a pipe.

rich draws what moves: bars, status lines, live screens. Lines and tables do without it, because importing it takes as
long as most commands.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Literal, Self, TextIO, TypeVar

from headwater.errors import InvalidDataError
from headwater.formats import format_size, plural

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.progress import Progress, TaskID
    from rich.text import Text as RichText

    from headwater.api.received import Received
    from headwater.message import Message

T = TypeVar("T")

PIPE_COLUMNS = 10_000  # lines into a pipe are not wrapped
TOPIC_COLUMNS_MAX = 32
POLL_S = 1.0

_around_lines: Callable[[], AbstractContextManager[object]] = nullcontext


def surround_lines(context: Callable[[], AbstractContextManager[object]] = nullcontext) -> None:
    """Write every line inside this context. A progress bar hides itself there, so that the two share no row."""
    global _around_lines
    _around_lines = context


def is_terminal(stream: TextIO) -> bool:
    return stream.isatty() or bool(os.environ.get("FORCE_COLOR"))


def console(*, to_stderr: bool = False) -> Console:
    """Made anew for each use: tests and pipes change what stdout is."""
    from rich.console import Console

    stream = sys.stderr if to_stderr else sys.stdout
    # No markup: topics and errors may hold brackets that mean nothing to us.
    width = None if stream.isatty() else PIPE_COLUMNS
    return Console(file=stream, highlight=False, markup=False, emoji=False, width=width)


def terminal_columns() -> int:
    """How wide stdout is; lines into a pipe are as long as they are."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else sys.maxsize


# --- text -------------------------------------------------------------------------------------------------------------


_CODES = {"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33", "cyan": "36"}


def _has_styles(stream: TextIO) -> bool:
    plain = "NO_COLOR" in os.environ or os.environ.get("TERM") == "dumb"
    return is_terminal(stream) and (not plain or bool(os.environ.get("FORCE_COLOR")))


class Text:
    """A line in parts, each with a style like `bold red`. In a pipe it is plain. It cannot control a terminal."""

    def __init__(self, text: str = "", style: str = "") -> None:
        self.parts = [(printable(text), style)]

    @classmethod
    def assemble(cls, *parts: str | tuple[str, str] | Text) -> Text:
        made = cls()
        for part in parts:
            made.parts += (
                Text(part) if isinstance(part, str) else part if isinstance(part, Text) else Text(*part)
            ).parts
        return made

    def append(self, text: str, style: str = "") -> Text:
        self.parts.append((printable(text), style))
        return self

    def __str__(self) -> str:
        return "".join(text for text, _ in self.parts)

    def ansi(self) -> str:
        """The text with its styles, for a terminal."""
        return "".join(
            f"\x1b[{';'.join(_CODES[word] for word in style.split())}m{text}\x1b[0m" if style and text else text
            for text, style in self.parts
        )

    def lines(self) -> list[Text]:
        made = [Text()]
        for text, style in self.parts:
            first, *others = text.expandtabs().split("\n")
            made[-1].append(first, style)
            made += [Text(other, style) for other in others]
        return made

    def folded(self, columns: int) -> list[Text]:
        """One line in several, each at most so wide; between words where that is possible."""
        if cell_width(str(self)) <= columns:
            return [self]
        marks = [(mark, style) for text, style in self.parts for mark in text]
        made: list[Text] = []
        while marks:
            taken, width, blank = 0, 0, 0
            while taken < len(marks) and (width := width + cell_width(marks[taken][0])) <= columns:
                blank = taken if marks[taken][0] == " " else blank
                taken += 1
            if taken < len(marks) and marks[taken][0] != " " and blank:
                taken = blank
            taken = max(taken, 1)
            made.append(Text.assemble(*marks[:taken]))
            marks = marks[taken:]
            while marks and marks[0][0] == " ":
                del marks[0]
        return made

    def cut(self, columns: int) -> Text:
        """One line, shortened to so many columns if need be."""
        if cell_width(str(self)) <= columns:
            return self
        made, left = Text(), columns - 1
        for mark, style in ((mark, style) for text, style in self.parts for mark in text):
            if (left := left - cell_width(mark)) < 0:
                return made.append("…", style)
            made.append(mark, style)
        return made

    def __rich__(self) -> RichText:
        from rich.text import Text as RichText

        return RichText.assemble(*self.parts)


def printable(text: str) -> str:
    """Text that cannot control a terminal: control characters are shown, not sent."""
    if text.isprintable():
        return text
    return "".join(mark if mark.isprintable() or mark in "\n\t" else f"\\x{ord(mark):02x}" for mark in text)


def count(number: int) -> str:
    return f"{number:,}"


def clock(ms: int, *, has_date: bool = False) -> str:
    """The local time; with the date if that is not today, or asked for."""
    moment = datetime.fromtimestamp(ms / 1000, UTC).astimezone()
    today = moment.date() == datetime.now().astimezone().date()
    return moment.strftime("%H:%M:%S" if today and not has_date else "%Y-%m-%d %H:%M:%S")


# --- lines and documents ----------------------------------------------------------------------------------------------


def say(text: str | Text, stream: TextIO | None = None) -> None:
    """A line of a command's result; on stderr if it is not one for a pipe."""
    _print(text, stream or sys.stdout)


def note(text: str) -> None:
    """Something beside the result, on stderr."""
    _print(Text(text, "dim"), sys.stderr)


def _print(text: str | Text, stream: TextIO) -> None:
    text = _text(text)
    with _around_lines():
        stream.write(f"{text.ansi() if _has_styles(stream) else text}\n")


def show_result(document: object, text: str | Text, *, as_json: bool) -> None:
    """The whole result of a command: a document for programs, a line for people."""
    if as_json:
        write_document(document)
    else:
        say(text)


def show_list(
    items: Sequence[T],
    to_json: Callable[[T], object],
    columns: Mapping[str, Callable[[T], str | Text]],
    *,
    empty: str,
    as_json: bool,
    **more: object,
) -> None:
    """The whole result of a command that lists. `more`: what the document has beside its items."""
    if as_json:
        write_items([to_json(each) for each in items], **more)
    elif items:
        show_table(table_of(items, columns))
    else:
        say(empty)


def write_document(value: object) -> None:
    """The whole result of a command under --json."""
    import msgspec

    with _around_lines():
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(value), indent=2).decode() + "\n")


def write_items(items: Sequence[object], **more: object) -> None:
    """The whole result of a command that lists, under --json."""
    write_document({**more, "items": items})


def write_line(value: object) -> None:
    """Write one of many results under --json."""
    import msgspec

    with _around_lines():
        sys.stdout.write(msgspec.json.encode(value).decode() + "\n")


def show_error(kind: str, why: str, where: str, next: str, code: int, *, as_json: bool) -> int:
    """Why a command failed, as the last lines of stderr; stdout has only results. Returns the exit code."""
    if not as_json:
        _print(Text(f"error: {f'{where}: {why}' if where else why}", "red"), sys.stderr)
        if next:
            _print(Text(f"next: {next}", "dim"), sys.stderr)
        return code
    texts = {"kind": kind, "why": why, "where": where, "next": next}
    # Paths may hold bytes that are no text, which JSON refuses.
    known = {name: text.encode(errors="backslashreplace").decode() for name, text in texts.items()}
    # In ASCII: characters that the encoding of stderr lacks would be escaped there, and not as JSON does.
    sys.stderr.write(json.dumps({"error": {**known, "exit": code}}, separators=(",", ":")) + "\n")
    return code


# --- tables -----------------------------------------------------------------------------------------------------------


GAP_COLUMNS = 2
SHORTENED_COLUMNS_MIN = 4
FOLDED_COLUMNS_MIN = 32
TEXT_COLUMNS_MIN = 24
INDENT_COLUMNS = 4


@dataclass
class Column:
    """Cells that are wider than their column are shortened, or folded into lines. A terminal is narrow if a column that
    has `wanted` would have less: then what `gives_way` is left out, or goes under its row."""

    header: str
    justify: Literal["left", "right"] = "left"
    overflow: Literal["cut", "fold"] = "cut"
    min_width: int | None = None
    style: str = ""
    wanted: int | None = None
    gives_way: Literal["", "left out", "below"] = ""

    def fit(self, lines: list[Text], width: int) -> list[Text]:
        if self.overflow == "fold":
            return [part for line in lines for part in line.folded(max(width, 1))]
        return [line.cut(width) for line in lines]


@dataclass
class Table:
    columns: list[Column]
    has_header: bool = True
    rows: list[tuple[str | Text, ...]] = field(default_factory=list)

    def add_row(self, *cells: str | Text) -> None:
        self.rows.append(cells)

    def lines(self, columns: int = sys.maxsize, *, styled: bool = False) -> Iterator[str]:
        """The table as lines, at most so wide, columns two blanks apart, without trailing blanks."""
        rows = [
            [_text(cell, each.style).lines() for each, cell in zip(self.columns, cells, strict=True)]
            for cells in self.rows
        ]
        if self.has_header:
            rows.insert(0, [[Text(each.header, "bold dim")] for each in self.columns])
        every = range(len(self.columns))
        widths = [max((cell_width(str(line)) for row in rows for line in row[at]), default=0) for at in every]
        wanted = [min(width, each.wanted or width) for each, width in zip(self.columns, widths, strict=True)]
        is_narrow = sum(wanted) + GAP_COLUMNS * (len(wanted) - 1) > columns
        beside = [at for at, each in enumerate(self.columns) if not (is_narrow and each.gives_way)]
        below = [at for at, each in enumerate(self.columns) if is_narrow and each.gives_way == "below"]
        shown = [self.columns[at] for at in beside]
        widths = _fitted([widths[at] for at in beside], shown, columns)
        for number, row in enumerate(rows):
            cells = [each.fit(row[at], width) for at, each, width in zip(beside, shown, widths, strict=True)]
            for line in range(max(map(len, cells), default=0)):
                yield _row(cells, line, shown, widths, styled=styled)
            if number or not self.has_header:
                texts = [row[at][0] for at in below if str(row[at][0]) != "-"]
                for line_below in (part for text in texts for part in text.folded(columns - INDENT_COLUMNS)):
                    yield f"{' ' * INDENT_COLUMNS}{line_below}".rstrip()

    def __rich__(self) -> RichText:
        """On a live screen."""
        from rich.text import Text as RichText

        lines = self.lines(terminal_columns(), styled=_has_styles(sys.stdout))
        return RichText("\n").join(RichText.from_ansi(line) for line in lines)


def _text(cell: str | Text, style: str = "") -> Text:
    return cell if isinstance(cell, Text) else Text(cell, style)


def _fitted(widths: list[int], shown: list[Column], columns: int) -> list[int]:
    """The widths of the columns: as wide as the cells, if there is room. Otherwise columns without a minimum give way
    first, the widest of them first, then the others down to their minimum."""
    excess = sum(widths) + GAP_COLUMNS * (len(widths) - 1) - columns
    least = [each.min_width or SHORTENED_COLUMNS_MIN for each in shown]
    for with_minimum in (False, True):
        able = [at for at, each in enumerate(shown) if (each.min_width is not None) == with_minimum]
        while excess > 0 and (able := [at for at in able if widths[at] > least[at]]):
            widths[max(able, key=lambda at: widths[at])] -= 1
            excess -= 1
    return widths


def _row(cells: list[list[Text]], number: int, columns: list[Column], widths: list[int], *, styled: bool) -> str:
    made = Text()
    for cell, column, width in zip(cells, columns, widths, strict=True):
        text = cell[number] if number < len(cell) else Text()
        blanks = " " * (width - cell_width(str(text)))
        parts = (blanks, text) if column.justify == "right" else (text, blanks)
        made = Text.assemble(made, *parts, " " * GAP_COLUMNS)
    while made.parts and not (rest := made.parts[-1][0].rstrip(" ")):
        made.parts.pop()
    if made.parts:
        made.parts[-1] = (rest, made.parts[-1][1])
    return made.ansi() if styled else str(made)


def cell_width(text: str) -> int:
    """Columns of a terminal that it takes."""
    if text.isascii():
        return len(text)
    return sum(2 if unicodedata.east_asian_width(mark) in "WF" else not unicodedata.combining(mark) for mark in text)


_MARKS: dict[str, dict[str, Any]] = {
    ">": {"justify": "right"},
    "~": {"min_width": None},
    "=": {"min_width": None, "overflow": "fold", "wanted": FOLDED_COLUMNS_MIN},
    "+": {"min_width": None, "overflow": "fold", "wanted": TEXT_COLUMNS_MIN, "gives_way": "below"},
    "?": {"gives_way": "left out"},
}


def table(*columns: str) -> Table:
    """The mark before a name: `>` for numbers; `~` for what is shortened first on a narrow terminal, `=` for what is
    folded; there `+`, a text, goes under its row, and `?` is left out."""
    made = []
    for name in columns:
        marked = _MARKS.get(name[:1])
        bare = name if marked is None else name[1:]
        made.append(Column(bare, **{"min_width": len(bare), **(marked or {})}))
    return Table(made)


def table_of(items: Iterable[T], columns: Mapping[str, Callable[[T], str | Text]]) -> Table:
    """A row for each item; `columns` makes its cells, by the names that `table` takes."""
    made = table(*columns)
    for each in items:
        made.add_row(*(cell(each) for cell in columns.values()))
    return made


def pairs(rows: Sequence[tuple[str, str | Text]]) -> Table:
    """Names and values, one below the other."""
    made = Table([Column("", style="dim"), Column("", overflow="fold")], has_header=False)
    for row in rows:
        made.add_row(*row)
    return made


def show_table(*parts: Table | str | Text) -> None:
    columns, styled = terminal_columns(), _has_styles(sys.stdout)
    for part in parts:
        if isinstance(part, Table):
            sys.stdout.writelines(f"{line}\n" for line in part.lines(columns, styled=styled))
        else:
            say(part)


# --- messages ---------------------------------------------------------------------------------------------------------


class MessagePrinter:
    """Prints messages as they come, as lines for people or as JSON lines."""

    def __init__(self, *, as_json: bool) -> None:
        self._as_json = as_json
        self._console = console() if is_terminal(sys.stdout) and not as_json else None
        self._topic_columns = 0

    def show(self, received: Received) -> None:
        if self._as_json:
            write_line(received.message.to_json() | {"attempt": received.attempt})
        elif self._console is None:
            before, after = self._ends(received)
            sys.stdout.write(f"{before}{_one_line(received.message.data_json)}{after}\n")
        else:
            from rich.highlighter import JSONHighlighter

            data = JSONHighlighter()(_one_line(received.message.data_json))
            before, after = self._ends(received)
            self._console.print(before.__rich__().append_text(data).append_text(after.__rich__()), soft_wrap=True)

    def flush(self) -> None:
        sys.stdout.flush()

    def _ends(self, received: Received) -> tuple[Text, Text]:
        """What stands before the data, and behind it."""
        message = received.message
        self._topic_columns = min(TOPIC_COLUMNS_MAX, max(self._topic_columns, len(message.topic)))
        before = Text.assemble(
            (f"{message.seq:>6}  ", "bold"),
            (f"{clock(message.published_ms)}.{message.published_ms % 1000:03d}  ", "dim"),
            (printable(message.topic).ljust(self._topic_columns), "cyan"),
            "  ",
        )
        headers = headers_text(message)
        return before, Text.assemble(
            (f"  {headers}" if headers else "", "dim"),
            (f"  attempt {received.attempt}" if received.attempt > 1 else "", "yellow"),
        )


def headers_text(message: Message) -> str:
    """The headers that are set, named ones first: `from=shop type=order`."""
    import msgspec

    from headwater.message import NAMED_HEADERS

    named: list[tuple[str, Any]] = [(name, message.field(name)) for name in NAMED_HEADERS]
    try:
        free: Mapping[str, Any] = message.headers
    except InvalidDataError:
        free = {"headers": "not JSON"}
    given = [(name, value) for name, value in [*named, *free.items()] if value is not None]
    if message.priority:
        given.append(("priority", message.priority))
    texts = [value if isinstance(value, str) else msgspec.json.encode(value).decode() for _, value in given]
    return _one_line(" ".join(f"{name}={text}" for (name, _), text in zip(given, texts, strict=True)))


def _one_line(text: str) -> str:
    return printable(text).replace("\n", " ").replace("\t", " ")


# --- progress ---------------------------------------------------------------------------------------------------------


class StatusLine:
    """One line on a terminal that says what is being done; nothing elsewhere."""

    def __init__(self, text: str = "") -> None:
        self._line = console(to_stderr=True).status(text) if is_terminal(sys.stderr) else None
        self.is_shown = self._line is not None

    def __enter__(self) -> Self:
        if self._line is not None:
            self._line.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._line is not None:
            self._line.stop()

    def show(self, text: str) -> None:
        if self._line is not None:
            self._line.update(printable(text))


class Bars:
    """`pipeline.run.Progress` on a terminal: one line a step, a bar where its length is known; finished ones stay until
    the end."""

    def __init__(self, screen: Console | None = None) -> None:
        self._bars: Progress | None = None
        self._task: TaskID | None = None
        if screen is None and not is_terminal(sys.stderr):
            return
        from rich.console import Console
        from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        self._bars = Progress(
            SpinnerColumn(finished_text="✓"),
            TextColumn("{task.description:<14}"),
            BarColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[of]}", style="dim"),
            # It finds stderr anew for each line: while Spark starts, `suppress_jvm_output` replaces it.
            console=screen or Console(stderr=True, highlight=False, markup=False, emoji=False),
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )

    def __enter__(self) -> Self:
        if self._bars is not None:
            self._bars.start()
            surround_lines(self._hidden)
        return self

    def __exit__(self, *exc: object) -> None:
        surround_lines()
        if self._bars is not None:
            self._bars.stop()

    @contextmanager
    def _hidden(self) -> Iterator[None]:
        """Lines of the command are written while the bars are not drawn."""
        assert self._bars is not None
        self._bars.stop()
        try:
            yield
        finally:
            self._bars.start()

    def step(self, name: str, total: int | None = None) -> None:
        if self._bars is None:
            return
        if self._task is not None:
            length = self._bars.tasks[self._task].total
            self._bars.update(self._task, total=length or 1, completed=length or 1, of=self._of(length, length))
        self._task = self._bars.add_task(name, total=total or None, of=self._of(0, total))

    def reached(self, done: int, name: str | None = None) -> None:
        """`name`: what the step is called from now on."""
        if self._bars is not None and self._task is not None:
            of = self._of(done, self._bars.tasks[self._task].total)
            self._bars.update(self._task, completed=done, of=of, description=name)

    def _of(self, done: float | None, total: float | None) -> str:
        return f"{self._amount(done or 0)} of {self._amount(total)}" if total else ""

    def _amount(self, number: float) -> str:
        return f"{number:,.0f}"


class LinesBar(Bars):
    """Lines that are read, by their bytes, and the messages that they become."""

    def __init__(self, total_bytes: int) -> None:
        super().__init__()
        self._bytes = 0
        self.step("publishing", total_bytes)

    def read(self, size: int) -> None:
        self._bytes += size
        self.reached(self._bytes)

    def published(self, messages: int) -> None:
        self.reached(self._bytes, plural(messages, "message"))

    def _amount(self, number: float) -> str:
        return format_size(number)


class Following(StatusLine):
    """`pipeline.run.Progress` of a run without an end: one line that says what is being done, or how far it is."""

    def __init__(self, upto: Callable[[], int]) -> None:
        super().__init__("beginning …")
        self._upto = upto

    def step(self, name: str, total: int | None = None) -> None:
        self.show(f"{name} …")

    def reached(self, done: int) -> None:
        pass

    def wait(self, seconds: float) -> bool:
        """Wait until then, or until a signal ends it."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            self.show(f"up to seq {count(self._upto())}")
            time.sleep(min(left, POLL_S) if self.is_shown else left)
        return True


class LiveScreen:
    """A screen that is drawn anew, on a terminal as large as that."""

    def __init__(self, first: Sequence[Table | str | Text]) -> None:
        from rich.live import Live

        screen = console()
        self._live = Live(self._group(first), console=screen, screen=screen.is_terminal, auto_refresh=False)

    def __enter__(self) -> LiveScreen:
        self._live.__enter__()
        self._live.refresh()
        return self

    def __exit__(self, *exc: object) -> None:
        self._live.stop()

    def show(self, parts: Sequence[Table | str | Text]) -> None:
        self._live.update(self._group(parts), refresh=True)

    def _group(self, parts: Sequence[Table | str | Text]) -> RenderableType:
        from rich.console import Group

        return Group(*parts)
