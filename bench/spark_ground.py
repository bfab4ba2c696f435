"""Shared by the measurements on Spark: the logs, whole commands and their timing, and one warm session."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import cached_property
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

import headwater
from common import MESSAGE, fresh_directory
from processes import Peak
from spark_jdbc import MASTER, find_driver

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

MESSAGES = 5_000_000
SMALL_LOG_PART = 5  # the small log has a fifth of them
FIRST, NEW = 20_000, 10_000
EXPLICIT_ID_EVERY = 10
REPEATS = 3
COMMAND_S_MAX = 1_800
TOPICS = [
    f"{prefix}.{verb}" for prefix in ("orders", "payments", "stock", "users") for verb in ("new", "changed", "done")
]
DIFFERENT = 50_000  # so many that a compressor finds no equal message within a page
PUBLISHED_AT_ONCE = 10_000


def messages_to_publish() -> list[tuple[str, object]]:
    """As long as the message of the other measurements, but different: Parquet would compress equal ones to nothing."""
    chance = random.Random(4)

    def one() -> dict[str, object]:
        return MESSAGE | {
            "order_id": f"o-{chance.randrange(10**6, 10**7)}",
            "customer": f"c-{chance.randrange(10**4, 10**5)}",
            "amount": round(chance.uniform(100, 999), 2),
            "region": chance.choice(["us-west", "us-east", "eu-west"]),
            "note": "".join(chance.choices("abcdefghijklmnopqrstuvwxyz ", k=len(str(MESSAGE["note"])))),
            "check": chance.randrange(10**6, 10**7),
        }

    return [(chance.choice(TOPICS), one()) for _ in range(DIFFERENT)]


# --- whole commands -------------------------------------------------------------------------------------------------


class Took(NamedTuple):
    seconds: float
    began: float
    peak_bytes: int
    output: dict[str, Any]


def command(*arguments: object, watched: bool = False) -> Took:
    """A process from start to exit. `watched` samples its memory and that of its descendants."""
    with ExitStack() as stack:
        began, clock = time.time(), time.perf_counter()
        process = subprocess.Popen(
            [sys.executable, *map(str, arguments)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        peak = stack.enter_context(Peak(process.pid)) if watched else None
        try:
            out, err = process.communicate(timeout=COMMAND_S_MAX)
        except BaseException:
            process.kill()  # its JVM ends with its stdin
            process.wait()
            raise
        took = time.perf_counter() - clock
    if process.returncode:
        raise RuntimeError(_sentence(err or out, process.returncode))
    last = out.strip().rpartition("\n")[2]
    return Took(took, began, peak.bytes if peak else 0, json.loads(last) if last.startswith("{") else {})


def _sentence(output: str, code: int) -> str:
    """The last output of a failed process, beginning with the error if a line looks like one."""
    lines = [line.strip() for line in output.splitlines() if line.strip() and not line.startswith("next:")]
    lines = lines or [f"it ended with {code}"]
    errors = [line for line in lines if line.split(":")[0].endswith(("Error", "Exception"))]
    return (errors or lines)[-1][:200]


def pipeline(*arguments: object, watched: bool = False) -> Took:
    return command("-m", "headwater", "pipeline", *arguments, watched=watched)


def rival(*arguments: object) -> Took:
    return command(Path(__file__).with_name("spark_rivals.py"), *arguments)


def in_turn(repeats: int, contenders: Mapping[str, Callable[[], Took]]) -> dict[str, list[Took] | str]:
    """Run the measures in turn, several times, so that a noisy minute affects all of them equally. One that fails
    records its error and is not repeated."""
    found: dict[str, list[Took] | str] = {name: [] for name in contenders}
    for _ in range(repeats):
        for name, contender in contenders.items():
            if isinstance(taken := found[name], list):
                try:
                    taken.append(contender())
                except (RuntimeError, OSError, subprocess.SubprocessError) as exc:
                    found[name] = f"failed: {exc}"
    return found


# --- logs and the warm session --------------------------------------------------------------------------------------


class Ground:
    """Created on demand, removed at the end."""

    def __init__(self, messages: int, repeats: int, stack: ExitStack) -> None:
        self.messages, self.repeats = messages, repeats
        self.small = messages // SMALL_LOG_PART
        self.first, self.new = min(FIRST, self.small), min(NEW, self.small)
        self._stack = stack
        self._numbers = count()
        self._logs: dict[str, Path] = {}

    @cached_property
    def directory(self) -> Path:
        return self._stack.enter_context(fresh_directory())

    @cached_property
    def _different(self) -> list[tuple[str, object]]:
        return messages_to_publish()

    @property
    def log(self) -> Path:
        return self.log_of(self.messages)

    @property
    def small_log(self) -> Path:
        return self.log_of(self.small)

    def log_of(self, messages: int, *, explicit_ids: bool = False) -> Path:
        name = f"log-{messages}{'-ids' if explicit_ids else ''}.db"
        if name not in self._logs:
            self._logs[name] = self.directory / name
            self.publish(self._logs[name], messages, durability="relaxed", explicit_ids=explicit_ids)
        return self._logs[name]

    def publish(self, path: Path, messages: int, durability: str = "full", *, explicit_ids: bool = False) -> None:
        """Opened and closed at once: a process that has a log open must not read it through another SQLite."""
        with headwater.open(path, durability=durability) as log:  # type: ignore[arg-type]  # one of two words
            done = 0
            while done < messages:
                at = done % DIFFERENT
                batch: list[Any] = self._different[at : at + min(PUBLISHED_AT_ONCE, messages - done)]
                if explicit_ids:
                    batch = [
                        (*each, {"id": f"order-{done + number}"}) if number % EXPLICIT_ID_EVERY == 0 else each
                        for number, each in enumerate(batch)
                    ]
                log.publish_many(batch)
                done += len(batch)

    def rows_of(self, log: Path) -> Path:
        """The messages of a log as one Parquet file, for a Spark without Headwater's source."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        from headwater.pipeline.columns import MESSAGE_SCHEMA
        from headwater.pipeline.logs import read_range

        path = log.with_suffix(".parquet")
        if not path.exists():
            with pq.ParquetWriter(path, MESSAGE_SCHEMA) as writer:
                for batch in read_range(str(log), 0, sys.maxsize):
                    writer.write_table(pa.Table.from_batches([batch]))
        return path

    @cached_property
    def spark(self) -> SparkSession:
        from headwater.pipeline.session import end_jvm, session

        conf = {**find_driver().conf(), "spark.sql.streaming.noDataProgressEventInterval": "0"}
        found = session("bench", master=MASTER, conf=conf)
        self._stack.callback(end_jvm)
        self._stack.callback(found.stop)
        return found

    @contextmanager
    def passing(self, kind: str) -> Iterator[Path]:
        """A path that is removed at the end: several copies of 5 M messages would fill a disk."""
        path = self.directory / f"{kind}-{next(self._numbers)}"
        try:
            yield path
        finally:
            shutil.rmtree(path, ignore_errors=True)

    def describe(self) -> str:
        import pyspark

        from headwater.pipeline.jvm import find_java

        size = len(msgspec.json.encode(self._different[0][1]))
        return (
            f"Spark {pyspark.__version__} on Java {find_java().version}, {MASTER}, 1 GiB of heap; "
            f"{self.messages:,} messages of {size} bytes on {len(TOPICS)} topics, {DIFFERENT:,} different ones; "
            f"the lake's files are synced before a commit, those of Spark's own writer are not; "
            f"medians of {self.repeats}; load before {os.getloadavg()[0]:.1f}"
        )


@contextmanager
def prepared(messages: int, repeats: int = REPEATS) -> Iterator[Ground]:
    with ExitStack() as stack:
        yield Ground(messages, repeats, stack)
