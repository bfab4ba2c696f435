"""A SQLite database pushed to a server on loopback, compared with `sqlite3_rsync` between two files on one disk.

Headwater makes a snapshot, hashes it, transfers it through a WebSocket, checks it at the server and syncs it to disk
before it is a version; `sqlite3_rsync` makes the copy and does not sync it.
"""

from __future__ import annotations

import asyncio
import random
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import apsw
import apsw.sqlite_extra

import headwater
from common import fresh_directory, median_columns, seconds, served
from processes import cpu_s
from report import Line, at_most

COMMAND = [sys.executable, "-c", "import sys; from headwater.cli import main; sys.exit(main())", "sync"]
RSYNC = apsw.sqlite_extra.path("sqlite3_rsync")
ROWS, BODY_BYTES, CHANGED = 500_000, 95, 100
REPEATS, CHANGES, VISIBLE_ROUNDS = 5, 9, 7
WAIT_IDLE_S = 1
IDLE_S = 30.0


def make(path: Path) -> None:
    luck = random.Random(1)
    rows = ((n, f"name-{n}", luck.randbytes(BODY_BYTES).hex(), luck.randrange(10**9)) for n in range(ROWS))
    with closing(apsw.Connection(str(path))) as database:
        database.execute(
            "PRAGMA journal_mode = WAL; CREATE TABLE item (id INTEGER PRIMARY KEY, name, body, n)"
        ).fetchall()
        with database:
            database.executemany("INSERT INTO item VALUES (?, ?, ?, ?)", rows)


def change(path: Path, rows: int, luck: random.Random) -> None:
    with closing(apsw.Connection(str(path))) as database, database:
        chosen = [(n,) for n in luck.sample(range(ROWS), rows)]
        database.executemany("UPDATE item SET n = n + 1 WHERE id = ?", chosen)


def plain(origin: Path, replica: Path) -> tuple[float, int]:
    """Seconds, and bytes in both directions."""
    reported = ""

    def run() -> None:
        nonlocal reported
        reported = subprocess.run([RSYNC, "-v", origin, replica], capture_output=True, text=True, check=True).stdout

    took_s = seconds(run)
    sent, received = re.search(r"sent ([\d,]+) bytes, received ([\d,]+)", reported).groups()  # type: ignore[union-attr]
    return took_s, int(sent.replace(",", "")) + int(received.replace(",", ""))


def moving(directory: Path, url: str) -> list[Line]:
    origin, luck = directory / "origin.db", random.Random(2)
    make(origin)
    firsts: list[tuple[float, float]] = []
    for number in range(REPEATS):
        replica = directory / f"plain-{number}.db"
        firsts.append((plain(origin, replica)[0], seconds(lambda n=number: headwater.sync(origin, f"{url}/bench/{n}"))))
        if number:
            replica.unlink()
    replica, remote = directory / "plain-0.db", f"{url}/bench/{REPEATS - 1}"
    later: list[tuple[float, float, int, int]] = []
    for _ in range(CHANGES):
        change(origin, CHANGED, luck)
        took_s, moved = plain(origin, replica)
        began = time.perf_counter()
        outcome = headwater.sync(origin, remote)
        later.append((took_s, time.perf_counter() - began, moved, outcome.sent + outcome.received))
    change(origin, CHANGED, luck)
    by_command_s = seconds(lambda: subprocess.run([*COMMAND, origin, remote], check=True, stdout=subprocess.DEVNULL))
    size_mb = origin.stat().st_size / 1e6
    plain_first, ours_first = median_columns(firsts)
    plain_s, ours_s, plain_bytes, ours_bytes = median_columns(later)
    return [
        _times(f"first push, {size_mb:.0f} MB", ours_first, plain_first, 3),
        _times(f"{CHANGED} changed rows", ours_s, plain_s, 2),
        at_most(
            f"{CHANGED} changed rows, bytes",
            f"{ours_bytes / 1e3:,.0f} kB",
            f"sqlite3_rsync {plain_bytes / 1e3:,.0f} kB",
            ours_bytes / plain_bytes,
            1.2,
        ),
        Line("the same as a command, with the start of Python", f"{by_command_s:.2f} s", ""),
    ]


def _times(what: str, ours_s: float, plain_s: float, most: float) -> Line:
    return at_most(what, f"{ours_s:.2f} s", f"sqlite3_rsync {plain_s:.2f} s", ours_s / plain_s, most)


@contextmanager
def pushing(origin: Path, remote: str, wait_idle: str) -> Iterator[subprocess.Popen[str]]:
    """A push subscription whose first push is done."""
    command = [*COMMAND, str(origin), remote, "--subscribe", "--wait-idle", wait_idle, "--json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline()
        yield process
    finally:
        process.terminate()
        process.wait(20)


def idling(directory: Path, url: str) -> list[Line]:
    with pushing(directory / "origin.db", f"{url}/bench/idle", "1h") as process:
        time.sleep(2)  # for the work after the first push
        before_s = cpu_s([process.pid])
        time.sleep(IDLE_S)
        percent = (cpu_s([process.pid]) - before_s) / IDLE_S * 100
    return [Line("idle watcher", f"{percent:.3f} % CPU", "", None, "< 0.1 %", percent < 0.1)]


async def visible(directory: Path, url: str) -> list[Line]:
    """Time from the commit of a write until a subscriber of the server's log gets the message of its version."""
    origin, luck, delays_s = directory / "origin.db", random.Random(3), []
    async with headwater.open_async(url) as log:
        with pushing(origin, f"{url}/bench/seen", f"{WAIT_IDLE_S}s"):
            async with log.subscribe("seer", "replica.bench.seen", start="new") as versions:
                for _ in range(VISIBLE_ROUNDS):
                    await asyncio.to_thread(change, origin, CHANGED, luck)
                    began = time.perf_counter()
                    [message] = await versions.fetch(1, timeout=30)
                    delays_s.append(time.perf_counter() - began - WAIT_IDLE_S)
                    await message.ack()
    median, longest = statistics.median(delays_s), max(delays_s)
    what = "write to version at a subscriber, beyond waitIdle"
    return [Line(what, f"{median:.2f} s", f"longest of {VISIBLE_ROUNDS}: {longest:.2f} s", None, "≤ 1 s", longest <= 1)]


def measure() -> list[Line]:
    with fresh_directory() as directory, served(directory) as (url, _):
        return [*moving(directory, url), *idling(directory, url), *asyncio.run(visible(directory, url))]
