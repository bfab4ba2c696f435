"""Streams: what a trigger with nothing to do costs, and what publishers notice of a stream that reads."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import headwater
from common import MESSAGE, TOPIC
from report import Line
from spark_ground import Ground
from spark_processes import cpu_s, tree

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.streaming.query import StreamingQuery

IDLE_S = 6.0
SMALL_BATCHES, SMALL_BATCH = 15, 100
PUBLISH_S, PUBLISH_ROUNDS, PUBLISH_BATCH = 6.0, 5, 100
WAIT_S_MAX = 120.0


def measure(ground: Ground) -> list[Line]:
    return [*idle(ground), *while_publishing(ground)]


@contextmanager
def reading(ground: Ground, log: Path, trigger: str, starting: str = "latest") -> Iterator[StreamingQuery]:
    """The source into nothing, up and idle."""
    stream = ground.spark.readStream.format("headwater").options(path=str(log), startingSeq=starting).load()
    with ground.passing("checkpoint") as checkpoint:
        query = _to_nowhere(stream, trigger, checkpoint)
        try:
            _wait(lambda: len(query.recentProgress) > 1, query)
            yield query
        finally:
            query.stop()


def _to_nowhere(stream: DataFrame, trigger: str, checkpoint: Path) -> StreamingQuery:
    writer = stream.writeStream.format("noop").option("checkpointLocation", str(checkpoint))
    return writer.trigger(processingTime=trigger).start()


def _wait(is_so: Any, query: StreamingQuery) -> None:
    until = time.monotonic() + WAIT_S_MAX
    while not is_so():
        if (failed := query.exception()) is not None:
            raise failed
        if time.monotonic() > until:
            raise TimeoutError(f"the stream did not get there; last it said {query.lastProgress}")
        time.sleep(0.02)


# --- nothing to do --------------------------------------------------------------------------------------------------


def idle(ground: Ground) -> list[Line]:
    log = ground.small_log
    with reading(ground, log, "0 seconds") as query:
        empty_ms = _idle_ms(query)
        small_ms = [_batch_ms(ground, log, query) for _ in range(SMALL_BATCHES)]
    p50, p95 = statistics.median(empty_ms), sorted(empty_ms)[int(len(empty_ms) * 0.95)]
    bronze = statistics.median(_bronze_idle_ms(ground))
    return [
        Line(
            "a trigger with nothing to do, log → nowhere",
            f"{p50:.0f} ms",
            f"p95 {p95:.0f} ms",
            None,
            "< 200 ms",
            p50 < 200,
        ),
        Line("the same, log → bronze", f"{bronze:.0f} ms", "", None, "< 200 ms", bronze < 200),
        Line(f"a batch of {SMALL_BATCH} messages, log → nowhere", f"{statistics.median(small_ms):.0f} ms", ""),
    ]


def _idle_ms(query: StreamingQuery) -> list[float]:
    time.sleep(IDLE_S)  # long enough that what is kept of the progress is all idle and warm
    return [_took_ms(each) for each in query.recentProgress if not _had_work(each)]


def _batch_ms(ground: Ground, log: Path, query: StreamingQuery) -> float:
    before = query.recentProgress[-1]["batchId"]
    ground.publish(log, SMALL_BATCH)
    batches: list[Any] = []

    def has_run() -> bool:
        batches[:] = [each for each in query.recentProgress if _had_work(each) and each["batchId"] >= before]
        return bool(batches)

    _wait(has_run, query)
    return _took_ms(batches[-1])


def _bronze_idle_ms(ground: Ground) -> list[float]:
    from spark_lake import bronze_started, new_lake

    with ground.passing("lake") as path, new_lake(path, ground.small_log) as lake:
        query = bronze_started(ground, lake, ground.small_log, continuous=True, trigger_s=0)
        try:
            _wait(lambda: lake.manifest.mark("bronze.messages") >= ground.small, query)
            return _idle_ms(query)
        finally:
            query.stop()


def _had_work(progress: Any) -> bool:
    return "addBatch" in progress["durationMs"]


def _took_ms(progress: Any) -> float:
    return float(progress["durationMs"]["triggerExecution"])


# --- publishing -----------------------------------------------------------------------------------------------------


def while_publishing(ground: Ground) -> list[Line]:
    """Turn by turn on the same log: alone, with a stream as fast as it can, with one that looks every second."""
    log = ground.directory / "published.db"
    ground.publish(log, PUBLISH_BATCH)
    kinds = {"alone": None, "as fast as it can": "0 seconds", "every second": "1 second"}
    for trigger in kinds.values():  # the warm-up
        _publish_round(ground, log, trigger)
    rounds = [
        {name: _publish_round(ground, log, trigger) for name, trigger in kinds.items()} for _ in range(PUBLISH_ROUNDS)
    ]
    rates = {name: statistics.median(each[name][0] for each in rounds) for name in kinds}
    shares = {name: statistics.median(each[name][1] for each in rounds) for name in kinds}
    alone = rates["alone"]
    lines = []
    for name in ("as fast as it can", "every second"):
        ratio = rates[name] / alone
        lines.append(
            Line(
                f"publish, a stream reads {name}",
                f"{rates[name]:,.0f}/s",
                f"alone {alone:,.0f}/s; the stream took {shares[name]:.0%} of the CPU",
                ratio,
                "≥ 0.8 ×",
                ratio >= 0.8,
            )
        )
    return lines


def _publish_round(ground: Ground, log: Path, trigger: str | None) -> tuple[float, float]:
    """Messages a second, and the share of all cores that Spark took meanwhile."""
    if trigger is None:
        return _published_beside(log)
    with reading(ground, log, trigger):
        return _published_beside(log)


def _published_beside(log: Path) -> tuple[float, float]:
    with subprocess.Popen(
        [sys.executable, __file__, str(log)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdout.readline()  # it is ready
        spark = [pid for pid in tree(os.getpid()) if pid != child.pid]
        began, cpu = time.perf_counter(), cpu_s(spark)
        child.stdin.write("go\n")
        child.stdin.flush()
        rate = float(child.stdout.readline())
        share = (cpu_s(spark) - cpu) / (time.perf_counter() - began) / (os.cpu_count() or 1)
    return rate, share


def publisher(path: str) -> None:
    with headwater.open(path) as log:
        batch = [(TOPIC, MESSAGE)] * PUBLISH_BATCH
        log.publish_many(batch)
        print("ready", flush=True)
        sys.stdin.readline()
        began, done = time.perf_counter(), 0
        while (took := time.perf_counter() - began) < PUBLISH_S:
            log.publish_many(batch)
            done += PUBLISH_BATCH
        print(done / took, flush=True)


if __name__ == "__main__":
    publisher(sys.argv[1])
