"""`headwater bench`: measures a log on this disk in a few seconds. The full benchmark is in `bench/`."""

from __future__ import annotations

import os
import platform
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import apsw

import headwater
from headwater.cli.arguments import AsJson, is_file
from headwater.cli.doctor import mount_of
from headwater.cli.output import note, pairs, show_table, table_of, write_items
from headwater.cli.parameters import argument, flag, option
from headwater.errors import InvalidOptionError, UnreachableError

BATCH = 1_000
THREADS = 100
FSYNCS_S = 0.3
CONSUMED_MAX = 100_000
STAGES = 4


class Measured(NamedTuple):
    name: str
    messages: int
    seconds: float
    p50_ms: float | None = None
    p99_ms: float | None = None

    @property
    def per_second(self) -> float:
        return self.messages / self.seconds


def bench(
    directory: Annotated[str, argument("DIR", "Where to measure: the disk your log would be on.")] = ".",
    seconds: Annotated[float, option("SECONDS", "In all.", min=0.4, max=120)] = 5.0,
    size: Annotated[int, option("BYTES", "JSON per message.", min=16, max=500_000)] = 190,
    durability: Annotated[Literal["full", "relaxed"], flag("An fsync per commit, or none.")] = "full",
    through_server: Annotated[bool, flag("Through a server in another process.", "--server")] = False,
    as_json: AsJson = False,
) -> None:
    """Measure publishing and consuming on this machine, on a temporary log in DIR."""
    if not is_file(directory):
        raise InvalidOptionError(
            "this would fill a log that others use",
            where=directory,
            next="Measure through a server of its own: headwater bench DIR --server",
        )
    if not os.path.isdir(directory):
        raise InvalidOptionError(f"{directory} is no directory", next="Name one on the disk your log would be on")
    each_s = max(0.1, (seconds - FSYNCS_S) / STAGES)
    with tempfile.TemporaryDirectory(prefix="headwater-bench-", dir=directory) as scratch:
        fsync_ms = _fsync_ms(scratch)
        with _log_in(scratch, durability, through_server=through_server) as log:
            note("measuring: one by one, in batches, from 100 threads, consuming")
            payload = {"order": 17, "note": "x" * max(0, size - 22)}
            measured = [
                _one_by_one(log, payload, each_s),
                _in_batches(log, payload, each_s),
                _from_threads(log, payload, each_s),
                _consumed(log, each_s),
            ]
        mount = mount_of(directory)
    facts = {
        "machine": _machine(),
        "file_system": mount.file_system if mount else None,
        "python": platform.python_version(),
        "sqlite": apsw.sqlite_lib_version(),
        "durability": durability,
        "through_server": through_server,
        "fsync_ms": round(fsync_ms, 3),
        "message_bytes": size,
    }
    if as_json:
        write_items([_json(result) for result in measured], **facts)
    else:
        _show(facts, measured)


@contextmanager
def _log_in(scratch: str, durability: Literal["full", "relaxed"], *, through_server: bool) -> Iterator[headwater.Log]:
    file = os.path.abspath(os.path.join(scratch, "bench.db"))
    if not through_server:
        with headwater.open(file, durability=durability, maintenance_interval=None) as log:
            yield log
        return
    flags = ["--port", "0", "--log-durability", durability, "--log-format", "json"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HEADWATER_")}
    command = [sys.executable, "-m", "headwater", "serve", file, *flags]
    with subprocess.Popen(command, cwd=scratch, env=environment, stderr=subprocess.PIPE) as server:
        assert server.stderr is not None
        try:
            with headwater.open(_url_in(server.stderr.readline())) as log:
                yield log
        finally:
            server.terminate()


def _url_in(line: bytes) -> str:
    """The first thing a server logs is where it serves."""
    import msgspec

    try:
        url: str = msgspec.json.decode(line)["url"]
    except (msgspec.DecodeError, KeyError) as exc:
        output = line.decode(errors="replace").strip() or "no output"
        raise UnreachableError(
            f"the server did not start: {output}", next="`headwater serve` shows whether a server starts here"
        ) from exc
    return url


def _show(facts: dict[str, Any], measured: list[Measured]) -> None:
    meaning = (
        "FULL: each commit is on disk" if facts["durability"] == "full" else "NORMAL: safe from crashes of the process"
    )
    show_table(
        pairs(
            [
                ("machine", facts["machine"]),
                ("disk", f"{facts['file_system'] or 'unknown'}, one fsync takes {facts['fsync_ms']:.2f} ms"),
                ("software", f"Python {facts['python']}, SQLite {facts['sqlite']}"),
                ("durability", f"{facts['durability']} (synchronous={meaning})"),
                ("message", f"{facts['message_bytes']} bytes of JSON"),
                ("by way of", "a server on this machine" if facts["through_server"] else "the file itself"),
                ("", ""),
            ]
        )
    )
    columns: dict[str, Callable[[Measured], str]] = {
        "what": lambda result: result.name,
        ">messages/s": lambda result: f"{result.per_second:,.0f}",
        ">p50": lambda result: _ms_text(result.p50_ms),
        ">p99": lambda result: _ms_text(result.p99_ms),
        ">messages": lambda result: f"{result.messages:,}",
    }
    show_table(table_of(measured, columns))


def _ms_text(ms: float | None) -> str:
    return "-" if ms is None else f"{ms:.2f} ms"


def _json(result: Measured) -> dict[str, Any]:
    rounded = {"seconds": round(result.seconds, 3), "per_second": round(result.per_second)}
    return {**result._asdict(), **rounded}


def _fsync_ms(scratch: str) -> float:
    """The time of one fsync of 4 kB: no log can publish one by one faster than that."""
    with open(os.path.join(scratch, "fsync"), "wb", buffering=0) as file:

        def write() -> None:
            file.write(b"x" * 4096)
            os.fsync(file.fileno())

        return statistics.median(_repeat(write, FSYNCS_S))


def _repeat(work: Callable[[], object], seconds: float) -> list[float]:
    """Milliseconds of each run; at least one."""
    took_ms: list[float] = []
    until = time.perf_counter() + seconds
    while not took_ms or time.perf_counter() < until:
        began = time.perf_counter()
        work()
        took_ms.append((time.perf_counter() - began) * 1000)
    return took_ms


def _measured(name: str, took_ms: list[float], seconds: float, messages_each: int = 1) -> Measured:
    ordered = sorted(took_ms)
    p99 = ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)]
    return Measured(name, len(ordered) * messages_each, seconds, round(statistics.median(ordered), 3), round(p99, 3))


def _one_by_one(log: headwater.Log, payload: Any, seconds: float) -> Measured:
    began = time.perf_counter()
    took_ms = _repeat(lambda: log.publish("bench.one", payload), seconds)
    return _measured("publish, one by one", took_ms, time.perf_counter() - began)


def _in_batches(log: headwater.Log, payload: Any, seconds: float) -> Measured:
    batch = [("bench.many", payload)] * BATCH
    began = time.perf_counter()
    took_ms = _repeat(lambda: log.publish_many(batch), seconds)
    return _measured(f"publish_many, {BATCH:,} at a time", took_ms, time.perf_counter() - began, BATCH)


def _from_threads(log: headwater.Log, payload: Any, seconds: float) -> Measured:
    took_ms: list[list[float]] = [[] for _ in range(THREADS)]

    def work(number: int) -> None:
        took_ms[number] = _repeat(lambda: log.publish("bench.threads", payload), seconds)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(THREADS)]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return _measured(
        f"publish, {THREADS} threads", [ms for each in took_ms for ms in each], time.perf_counter() - began
    )


def _consumed(log: headwater.Log, seconds: float) -> Measured:
    consumed, until = 0, time.perf_counter() + seconds
    began = time.perf_counter()
    with log.subscribe("bench", "bench.many") as subscription:
        while consumed < CONSUMED_MAX and time.perf_counter() < until:
            messages = subscription.fetch(BATCH)
            if not messages:
                break
            for message in messages:
                message.data  # noqa: B018 - decoding is part of consuming
            subscription.ack_many(messages)
            consumed += len(messages)
    return Measured(f"consume and ack, {BATCH:,} at a time", consumed, time.perf_counter() - began)


def _machine() -> str:
    """The processor and the system, in one line."""
    model = platform.processor() or platform.machine()
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                model = line.partition(":")[2].strip()
                break
    except OSError:
        pass
    return f"{model}, {os.cpu_count()} cores, {platform.system()} {platform.release()}"
