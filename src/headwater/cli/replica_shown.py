"""Tables of replicas, versions and reports. Where room is short, text gives way; times, numbers and sizes do not."""

from __future__ import annotations

from collections.abc import Sequence

from rich.cells import cell_len
from rich.padding import Padding
from rich.text import Text

from headwater.cli.output import clock, console, count, note, printable, show_table, table
from headwater.cli.replica_json import report_json
from headwater.cli.times import say_size
from headwater.replication.host.records import Listed, Report, Version

HOST_CHARS_MAX = 16
NAME_COLUMNS_MIN = 32
TEXT_COLUMNS_MIN = 24  # with fewer, a text stands under its row
GAP_COLUMNS = 2


def show_replicas(found: Sequence[Listed]) -> None:
    heads = ["~replica", ">newest", "pushed", "changed", ">size", ">versions", ">on disk"]
    rows = [
        [
            each.name.path,
            count(each.newest) if newest else "-",
            clock(newest.at_ms) if newest else "never",
            clock(each.changed_ms) if each.changed_ms else "-",
            say_size(newest.size) if newest else "-",
            count(each.versions),
            say_size(each.stored_bytes),
        ]
        for each, newest in found
    ]
    longest = max(cell_len(name) for name, *_ in rows)
    if console().width < min(longest, NAME_COLUMNS_MIN) + _columns(heads[1:], [row[1:] for row in rows]):
        at = heads.index("changed")  # the one that tells least
        heads, rows = _without(heads, at), [_without(row, at) for row in rows]
    shown = table(*heads)
    shown.columns[0].no_wrap, shown.columns[0].overflow = False, "fold"  # the only one that gives way
    for name, *rest in rows:
        shown.add_row(Text(name, "cyan"), *rest)
    show_table(shown)


def show_versions(versions: Sequence[Version], *, from_afar: bool) -> None:
    heads = [">version", "pushed", ">size", ">new pages", ">on disk", "from"]
    rows = [
        [
            f"{'' if version.dbhash else '*'}{version.number}",
            clock(version.at_ms),
            say_size(version.size),
            count(version.changed_pages),
            say_size(version.stored_bytes),
            _host(version.client),
        ]
        for version in versions
    ]
    if from_afar:  # a server does not tell
        at = heads.index(">on disk")
        heads, rows = _without(heads, at), [_without(row, at) for row in rows]
    _show_with_text(heads, rows, "message", [_first_line(version.message) for version in versions])
    if not all(version.dbhash for version in versions):
        note("* came without a hash: verify tells whether it is whole, not whether it is what was pushed")


def show_reports(reports: Sequence[Report]) -> None:
    rows, errors = [], []
    for report in reports:
        said = report_json(report)["report"]
        rows.append([clock(report.at_ms), _first_line(str(said.get("kind", "-"))), _host(report.client)])
        errors.append(_first_line(str(said.get("error", ""))))
    _show_with_text(["at", "kind", "from"], rows, "error", errors)


def _show_with_text(heads: Sequence[str], rows: Sequence[Sequence[str]], name: str, texts: Sequence[str]) -> None:
    """Rows that are never cut, each with a text that is folded: in a last column, or under the row."""
    screen = console()
    if screen.width - _columns(heads, rows) >= min(TEXT_COLUMNS_MIN, max(map(cell_len, [name, *texts]))):
        shown = table(*heads, f"~{name}")
        shown.columns[-1].no_wrap, shown.columns[-1].overflow = False, "fold"
        for row, text in zip(rows, texts, strict=True):
            shown.add_row(*row, text)
        show_table(shown)
        return
    shown = table(*heads)
    for row in rows:
        shown.add_row(*row)
    with screen.capture() as captured:
        screen.print(shown)
    for line, text in zip(captured.get().splitlines(), ["", *texts], strict=True):
        screen.file.write(f"{line}\n")
        if text not in ("", "-"):
            screen.print(Padding(Text(text, overflow="fold"), (0, 0, 0, 4)))


def _columns(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> int:
    """That they take, with the gaps behind them."""
    return sum(
        max(map(cell_len, cells)) + GAP_COLUMNS for cells in zip([h.lstrip(">~") for h in heads], *rows, strict=True)
    )


def _without(cells: Sequence[str], at: int) -> list[str]:
    return [*cells[:at], *cells[at + 1 :]]


def _host(client: str) -> str:
    """Where it was pushed from; what follows tells the programs of one machine apart."""
    return printable(client.rpartition(":")[0] or client)[:HOST_CHARS_MAX] or "-"


def _first_line(message: str) -> str:
    first, more, _ = message.partition("\n")
    return printable(first) + (" …" if more else "") or "-"
