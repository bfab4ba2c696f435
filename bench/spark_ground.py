"""What the measurements on Spark share: the logs, one session for all of them, and the clock."""

from __future__ import annotations

import os
import random
import shutil
import statistics
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import cached_property
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

import headwater
from common import MESSAGE, fresh_directory, seconds
from spark_jdbc import JdbcDriver, find_driver

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

MESSAGES = 5_000_000
SMALL_LOG_PART = 5  # the small log has a fifth of them
REPEATS = 3
MASTER = "local[2,4]"
PARTITIONS = 2
TOPICS = [
    f"{prefix}.{verb}" for prefix in ("orders", "payments", "stock", "users") for verb in ("new", "changed", "done")
]
DIFFERENT = 50_000  # enough that no compressor has seen a message a page before
PUBLISHED_AT_ONCE = 10_000


def messages_to_publish() -> list[tuple[str, object]]:
    """As long as the message of the other measurements, but different: Parquet would fold equal ones to nothing."""
    chance = random.Random(4)

    def one(number: int) -> dict[str, object]:
        return MESSAGE | {
            "order_id": f"o-{chance.randrange(10**6, 10**7)}",
            "customer": f"c-{chance.randrange(10**4, 10**5)}",
            "amount": round(chance.uniform(100, 999), 2),
            "region": chance.choice(["us-west", "us-east", "eu-west"]),
            "note": "".join(chance.choices("abcdefghijklmnopqrstuvwxyz ", k=len(str(MESSAGE["note"])))),
            "check": chance.randrange(10**6, 10**7),
        }

    return [(chance.choice(TOPICS), one(number)) for number in range(DIFFERENT)]


class Ground:
    """Made piece by piece when a measurement asks for it, gone at the end."""

    def __init__(self, messages: int, stack: ExitStack) -> None:
        self.messages = messages
        self.small = messages // SMALL_LOG_PART
        self._stack = stack
        self._numbers = count()

    @cached_property
    def directory(self) -> Path:
        return self._stack.enter_context(fresh_directory())

    @cached_property
    def _different(self) -> list[tuple[str, object]]:
        return messages_to_publish()

    @cached_property
    def log(self) -> Path:
        return self._log("log.db", self.messages)

    @cached_property
    def small_log(self) -> Path:
        return self._log("small.db", self.small)

    def _log(self, name: str, messages: int) -> Path:
        path = self.directory / name
        self.publish(path, messages, durability="relaxed")
        return path

    def publish(self, path: Path, messages: int, durability: str = "full") -> None:
        """Opened and closed again: a process that has a log open must not read it through another SQLite."""
        with headwater.open(path, durability=durability) as log:  # type: ignore[arg-type]  # one of two words
            done = 0
            while done < messages:
                at = done % DIFFERENT
                batch = self._different[at : at + min(PUBLISHED_AT_ONCE, messages - done)]
                log.publish_many(batch)
                done += len(batch)

    @cached_property
    def driver(self) -> JdbcDriver:
        return find_driver()

    @cached_property
    def spark(self) -> SparkSession:
        from headwater.pipeline.starting.session import end_jvm, session

        conf = {**self.driver.conf(), "spark.sql.streaming.noDataProgressEventInterval": "0"}
        found = session("bench", master=MASTER, conf=conf, scratch=self.directory)
        self._stack.callback(end_jvm)
        self._stack.callback(found.stop)
        return found

    def new_path(self, kind: str) -> Path:
        return self.directory / f"{kind}-{next(self._numbers)}"

    @contextmanager
    def passing(self, kind: str) -> Iterator[Path]:
        """A place that is removed again: 5 M messages several times over would fill a disk."""
        path = self.new_path(kind)
        try:
            yield path
        finally:
            shutil.rmtree(path, ignore_errors=True)

    def rate(self, work: Callable[[], object], messages: int | None = None) -> Callable[[], float]:
        """Messages a second."""
        return lambda: (messages or self.messages) / seconds(work)

    def describe(self) -> str:
        import pyspark

        from headwater.pipeline.starting.java import find_java

        size = len(msgspec.json.encode(self._different[0][1]))
        return (
            f"Spark {pyspark.__version__} on Java {find_java().version}, {MASTER}, 1 GB of heap, one session for all; "
            f"{self.messages:,} messages of {size} bytes on {len(TOPICS)} topics, {DIFFERENT:,} different ones; "
            f"JDBC driver {self.driver.jar.name}; load before {os.getloadavg()[0]:.1f}"
        )


@contextmanager
def prepared(messages: int) -> Iterator[Ground]:
    with ExitStack() as stack:
        yield Ground(messages, stack)


def noop(frame: DataFrame) -> None:
    """Every column of every row, to nowhere."""
    frame.write.format("noop").mode("overwrite").save()


def warm_medians(repeats: int, measures: Mapping[str, Callable[[], float]]) -> dict[str, float]:
    """One round for the JVM to get warm, then the rounds that count, each measure in turn."""
    for measure in measures.values():
        measure()
    rounds = [{name: measure() for name, measure in measures.items()} for _ in range(repeats)]
    return {name: statistics.median(each[name] for each in rounds) for name in measures}


def run_child(command: list[str], environ: Mapping[str, str] | None = None) -> str:
    """The last line that a process of its own printed; what Spark says besides is shown only if it fails."""
    done = subprocess.run(command, env={**os.environ, **(environ or {})}, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{command} ended with {done.returncode}:\n{done.stderr}")
    return done.stdout.strip().splitlines()[-1]
