"""Shared by all measurements: the message, fresh files, medians, and the description of the machine."""

from __future__ import annotations

import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import apsw
import msgspec

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
SERVER = "import headwater, sys; headwater.serve(sys.argv[1], port=0).run(lambda server: print(server.url, flush=True))"


@contextmanager
def fresh_directory() -> Iterator[Path]:
    """On the disk of the working directory: a file system in memory would make fsync free."""
    with tempfile.TemporaryDirectory(prefix=".bench-", dir=Path.cwd()) as name:
        yield Path(name)


@contextmanager
def served(directory: Path) -> Iterator[str]:
    """Start a server process for a log in this directory; yields its url."""
    command = [sys.executable, "-c", SERVER, str(directory / "log.db")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
    finally:
        process.terminate()
        process.wait(20)


def seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def medians(repeats: int, *measures: Callable[[], float]) -> list[float]:
    """Run the measures in turn, several times, so that a noisy minute affects all of them equally."""
    rounds = [[measure() for measure in measures] for _ in range(repeats)]
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
