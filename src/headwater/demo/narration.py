"""Telling the story: what is about to happen, what happened, and whether it is true."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

COLUMNS_MAX = 92


class DemoFailed(Exception):
    """Something the demo says turned out not to be true."""


class Narrator:
    def __init__(self) -> None:
        self._screen = Console(file=sys.stdout, highlight=False)
        self._columns = min(self._screen.width, COLUMNS_MAX)
        self._chapter = 0
        self.checked = 0

    def chapter(self, title: str, told: str) -> None:
        self._chapter += 1
        self._print("", "", "")
        self._print(f"{self._chapter}  ", title, "bold cyan")
        self.tell(told)

    def tell(self, told: str) -> None:
        """What is going to happen, or what it means."""
        self._print("   ", told, "")

    def show(self, line: str, style: str = "dim") -> None:
        """What is happening, as it happens."""
        self._print("     ", line, style)

    def show_rows(self, rows: Sequence[Sequence[str]]) -> None:
        """Columns; the first row is their names."""
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        for row in rows:
            line = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
            self.show(line.rstrip(), "bold dim" if row is rows[0] else "")

    def check(self, holds: bool, claim: str) -> None:
        """A claim: printed if it holds, the end of the demo if it does not."""
        if not holds:
            self._print("   ✗ ", claim, "bold red")
            raise DemoFailed(claim)
        self.checked += 1
        self._print("   ✓ ", claim, "green")

    def _print(self, lead: str, text: str, style: str) -> None:
        """The lead, then the text, its further lines set in as far as the first."""
        lines = textwrap.wrap(text, self._columns - len(lead), break_on_hyphens=False) or [""]
        for number, line in enumerate(lines):
            indented = (lead if number == 0 else " " * len(lead)) + line
            self._screen.print(Text(indented.rstrip(), style), soft_wrap=True)
