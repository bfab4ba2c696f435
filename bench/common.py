"""Shared by all measurements: the message, fresh files, filled logs, medians, and the description of the machine."""

from __future__ import annotations

import itertools
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import apsw
import msgspec

import headwater

MESSAGE = {
    "order_id": "o-1234567",
    "customer": "c-98765",
    "amount": 129.95,
    "currency": "EUR",
    "region": "us-west",
    "items": [{"sku": "A-1", "qty": 2}, {"sku": "B-2", "qty": 1}],
    "note": "leave at the door",
    "check": 1234567,
}
MESSAGE_JSON = msgspec.json.encode(MESSAGE).decode()
TOPIC = "orders.new"
CHILD_END_S = 20.0
SERVER = "import headwater, sys; headwater.serve(sys.argv[1], port=0).run(lambda server: print(server.url, flush=True))"


@contextmanager
def fresh_directory() -> Iterator[Path]:
    """On the disk of the working directory: a file system in memory would make fsync free."""
    with tempfile.TemporaryDirectory(prefix=".bench-", dir=Path.cwd()) as name:
        yield Path(name)


@contextmanager
def fresh_paths() -> Iterator[Iterator[Path]]:
    """Paths of new databases, all in one fresh directory."""
    with fresh_directory() as directory:
        yield (directory / f"{number}.db" for number in itertools.count())


@contextmanager
def served(directory: Path) -> Iterator[tuple[str, list[int]]]:
    """Start a server process for a log in this directory; yields its url, and its pid."""
    command = [sys.executable, "-c", SERVER, str(directory / "log.db")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process.stdout.readline().strip(), [process.pid]
    finally:
        process.terminate()
        process.wait(CHILD_END_S)


def fill(url: str | Path, count: int, batch: int = 10_000) -> None:
    """A log with this many messages. Filling it is not durable; the later measurements on it are."""
    messages = [(TOPIC, MESSAGE)] * batch
    with headwater.open(url, durability="relaxed") as log:
        while (missing := count - log.last_seq()) > 0:
            log.publish_many(messages[:missing])


class Child:
    """A measurement in its own process, which prints "ready", waits for its share, and answers."""

    def __init__(self, file: str, *arguments: str) -> None:
        command = [sys.executable, file, *arguments]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.line() == "ready"

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def go(self, share: int) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{share}\n")
        self.process.stdin.flush()

    def end(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(CHILD_END_S)


def wait_for_go() -> int:
    """The child's side: returns its share once it arrives."""
    print("ready", flush=True)
    return int(sys.stdin.readline())


def seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def medians(repeats: int, *measures: Callable[[], float]) -> list[float]:
    """Run the measures in turn, several times, so that a noisy minute affects all of them equally."""
    return median_columns([[measure() for measure in measures] for _ in range(repeats)])


def median_columns(rounds: Iterable[Sequence[float]]) -> list[float]:
    """Of each figure of several rounds the median."""
    return [statistics.median(column) for column in zip(*rounds, strict=True)]


def bare_connection(path: Path, page_bytes: int = 4096) -> apsw.Connection:
    connection = apsw.Connection(str(path))
    connection.execute(f"PRAGMA page_size = {page_bytes}")
    connection.execute("PRAGMA journal_mode = WAL; PRAGMA synchronous = FULL")
    return connection


def describe_machine() -> str:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return (
        f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores, {memory:.0f} GiB; "
        f"Python {platform.python_version()}, SQLite {apsw.sqlite_lib_version()}; "
        f"WAL, synchronous=FULL unless noted; message of {len(MESSAGE_JSON)} bytes of JSON"
    )
