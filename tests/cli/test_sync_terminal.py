"""`headwater sync` on a terminal: the bar is there while something moves, and no line shares its row."""

import os
import re
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import apsw
import pytest
from served import RunningServer

PATIENCE_S = 30.0
STILL_S = 0.5  # a bar is drawn ten times a second
BAR = "━"
_STEERING = re.compile(rb"\x1b\[(\??)([0-9;]*)([A-Za-z])")


class Terminal:
    """As much of one as it takes: rows, carriage returns, erasing, moving up, and whether the cursor is shown."""

    def __init__(self, *words: object) -> None:
        self._ours, theirs = os.openpty()
        environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "300", "LINES": "50"}
        command = [sys.executable, "-m", "headwater", *map(str, words)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=theirs, stderr=theirs, env=environment
        )
        os.close(theirs)
        self.rows: list[str] = [""]
        self.left: list[str] = []  # rows that were ended by a new line, as they looked then
        self.cursor_shown = True
        self.has_drawn_a_bar = False
        self._row = self._column = 0
        self._data = b""

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._ours)

    def read(self, seconds: float) -> bytes:
        """What comes next, in so much time."""
        if not select.select([self._ours], [], [], seconds)[0]:
            return b""
        try:
            data = os.read(self._ours, 65_536)
        except OSError:  # the process has gone
            return b""
        self._data += data
        self._draw()
        return data

    def until(self, text: str) -> str:
        """The row that has it."""
        while True:
            for row in self.left:
                if text in row:
                    return row
            assert self.read(PATIENCE_S), self.rows

    def _draw(self) -> None:
        text, self._data = self._data, b""
        at = 0
        while at < len(text):
            if text[at] == 0x1B:
                found = _STEERING.match(text, at)
                if found is None:
                    self._data = text[at:]
                    return
                self._steer(found[1] + found[3], found[2])
                at = found.end()
                continue
            width = 1 if text[at] < 0x80 else 2 if text[at] < 0xE0 else 3 if text[at] < 0xF0 else 4
            if at + width > len(text):
                self._data = text[at:]
                return
            self._put(text[at : at + width].decode())
            at += width

    def _steer(self, what: bytes, value: bytes) -> None:
        if what == b"K":
            self.rows[self._row] = ""
        elif what == b"A":
            self._row = max(0, self._row - int(value or b"1"))
        elif what in (b"?h", b"?l") and value == b"25":
            self.cursor_shown = what == b"?h"

    def _put(self, mark: str) -> None:
        if mark == "\r":
            self._column = 0
        elif mark == "\n":
            self.left.append(self.rows[self._row])
            self._row += 1
            if self._row == len(self.rows):
                self.rows.append("")
        else:
            row = self.rows[self._row].ljust(self._column)
            self.rows[self._row] = row[: self._column] + mark + row[self._column + 1 :]
            self._column += 1
            self.has_drawn_a_bar |= mark == BAR


@pytest.fixture
def terminals() -> Iterator[list[Terminal]]:
    opened: list[Terminal] = []
    yield opened
    for terminal in opened:
        terminal.close()


@pytest.fixture
def app(tmp_path: Path) -> Path:
    with closing(apsw.Connection(str(tmp_path / "app.db"))) as connection:
        connection.execute("PRAGMA journal_mode = WAL; CREATE TABLE item (name)").fetchall()
        with connection:
            connection.executemany("INSERT INTO item VALUES (?)", ((f"item {n}" * 20,) for n in range(5_000)))
    return tmp_path / "app.db"


def test_the_bar_is_gone_before_each_line_and_while_nothing_moves(
    tmp_path: Path, app: Path, terminals: list[Terminal]
) -> None:
    (tmp_path / "server").mkdir()
    log = tmp_path / "server" / "log.db"
    server = RunningServer(log)
    port = int(server.url.rpartition(":")[2])
    words = ["sync", app, f"{server.url}/shop/app.db", "--subscribe", "--waitIdle", "1s", "--verbose"]
    terminal = Terminal(*words)
    terminals.append(terminal)
    try:
        assert terminal.until("as version 1 ").startswith("pushed ")
        assert terminal.has_drawn_a_bar
        terminal.until("debug: version 1 is the newest")
        while terminal.read(0.0):
            pass
        assert (terminal.rows[-1], terminal.cursor_shown) == ("", True)
        assert terminal.read(STILL_S) == b"", terminal.rows
    finally:
        server.stop()
    with closing(apsw.Connection(str(app))) as connection:
        connection.execute("INSERT INTO item VALUES ('while it was away')")
    assert terminal.until("will be tried again").startswith("warning: the push failed")
    assert (terminal.rows[-1], terminal.cursor_shown) == ("", True)
    server = RunningServer(log, port)
    try:
        assert terminal.until("as version 2 ").startswith("pushed ")
        terminal.process.send_signal(signal.SIGTERM)
        while terminal.read(PATIENCE_S):
            pass
    finally:
        server.stop()
    assert terminal.process.wait(PATIENCE_S) == 0
    assert [row for row in terminal.rows if BAR in row] == []
    beginnings = ("pushing ", "pushed ", "nothing to push: ", "warning: ", "debug: ", "ending ")
    assert {row for row in terminal.rows if not row.startswith(beginnings)} == {""}
    assert terminal.cursor_shown


def test_one_sync_leaves_only_its_line(app: Path, tmp_path: Path, terminals: list[Terminal]) -> None:
    terminal = Terminal("sync", app, tmp_path / "copy.db")
    terminals.append(terminal)
    while terminal.read(PATIENCE_S):
        pass
    assert terminal.has_drawn_a_bar
    assert [row[:7] for row in terminal.rows] == ["copied ", ""]
