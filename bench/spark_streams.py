"""Spark's source in a warm session: whole rows into the noop sink; streams, with the cost of an idle trigger and the
effect of a reading stream on publishers."""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import headwater
from common import MESSAGE, TOPIC, Child, medians, seconds, wait_for_go
from processes import cpu_s, tree
from report import Line, against
from spark_ground import Ground
from spark_jdbc import PARTITIONS, jdbc

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.streaming.query import StreamingQuery

IDLE_S, IDLE_MS_MAX = 6.0, 200
SMALL_BATCHES, SMALL_BATCH = 15, 100
PUBLISH_S, PUBLISH_BATCH = 6.0, 100
RATIO_MIN = 0.8
WAIT_S_MAX = 120.0


def reading_once(ground: Ground) -> list[Line]:
    spark, log, messages = ground.spark, str(ground.log), ground.messages

    def rate(frame: DataFrame) -> float:
        return messages / seconds(frame.write.format("noop").mode("overwrite").save)

    measures = (
        lambda: rate(spark.read.format("headwater").options(path=log, minPartitions=str(PARTITIONS)).load()),
        lambda: rate(jdbc(spark, log, partitions=PARTITIONS, upto=messages)),
        lambda: rate(jdbc(spark, log)),
    )
    medians(1, *measures)  # warm up the JVM
    ours, two, one = medians(ground.repeats, *measures)
    return [
        against("whole rows, 2 partitions", ours, "JDBC in two partitions", two, 1.5),
        against("", ours, "JDBC as it comes", one, 3),
    ]


def measure(ground: Ground) -> list[Line]:
    return [*idle(ground), *while_publishing(ground)]


@contextmanager
def reading(ground: Ground, log: Path, trigger: str) -> Iterator[StreamingQuery]:
    """A stream from the source into the noop sink, running and idle."""
    stream = ground.spark.readStream.format("headwater").options(path=str(log), startingSeq="latest").load()
    with ground.passing("checkpoint") as checkpoint:
        writer = stream.writeStream.format("noop").option("checkpointLocation", str(checkpoint))
        query = writer.trigger(processingTime=trigger).start()
        try:
            _wait(lambda: len(query.recentProgress) > 1, query)
            yield query
        finally:
            query.stop()


def _wait(is_so: Any, query: StreamingQuery) -> None:
    until = time.monotonic() + WAIT_S_MAX
    while not is_so():
        if (failed := query.exception()) is not None:
            raise failed
        if time.monotonic() > until:
            raise TimeoutError(f"the stream did not get there; its last progress is {query.lastProgress}")
        time.sleep(0.02)


# --- nothing to do --------------------------------------------------------------------------------------------------


def idle(ground: Ground) -> list[Line]:
    with reading(ground, ground.small_log, "0 seconds") as query:
        time.sleep(IDLE_S)  # so long that all kept progress reports are from the idle, warm stream
        empty_ms = sorted(_took_ms(each) for each in query.recentProgress if not _had_work(each))
        small_ms = [_batch_ms(ground, query) for _ in range(SMALL_BATCHES)]
    p50, p95 = statistics.median(empty_ms), empty_ms[int(len(empty_ms) * 0.95)]
    wanted = f"< {IDLE_MS_MAX} ms"
    return [
        Line("a trigger with nothing to do", f"{p50:.0f} ms", f"p95 {p95:.0f} ms", None, wanted, p50 < IDLE_MS_MAX),
        Line(f"a batch of {SMALL_BATCH} messages, log → nowhere", f"{statistics.median(small_ms):.0f} ms", ""),
    ]


def _batch_ms(ground: Ground, query: StreamingQuery) -> float:
    before = query.recentProgress[-1]["batchId"]
    ground.publish(ground.small_log, SMALL_BATCH)
    batches: list[Any] = []

    def has_run() -> bool:
        batches[:] = [each for each in query.recentProgress if _had_work(each) and each["batchId"] >= before]
        return bool(batches)

    _wait(has_run, query)
    return _took_ms(batches[-1])


def _had_work(progress: Any) -> bool:
    return "addBatch" in progress["durationMs"]


def _took_ms(progress: Any) -> float:
    return float(progress["durationMs"]["triggerExecution"])


# --- publishing -----------------------------------------------------------------------------------------------------


def while_publishing(ground: Ground) -> list[Line]:
    """In turn on the same log: without a stream, with a stream at full speed, with one that triggers every second."""
    log = ground.directory / "published.db"
    ground.publish(log, PUBLISH_BATCH)
    kinds = {"alone": None, "as fast as it can": "0 seconds", "every second": "1 second"}
    rounds = [
        {name: _publish_round(ground, log, trigger) for name, trigger in kinds.items()}
        for _ in range(ground.repeats + 1)
    ][1:]  # the first one is the warm-up
    rates = {name: statistics.median(each[name][0] for each in rounds) for name in kinds}
    shares = {name: statistics.median(each[name][1] for each in rounds) for name in kinds}
    alone = rates.pop("alone")
    return [
        Line(
            f"publish, a stream reads {name}",
            f"{rate:,.0f}/s",
            f"alone {alone:,.0f}/s; the stream took {shares[name]:.0%} of the CPU",
            rate / alone,
            f"≥ {RATIO_MIN} ×",
            rate / alone >= RATIO_MIN,
        )
        for name, rate in rates.items()
    ]


def _publish_round(ground: Ground, log: Path, trigger: str | None) -> tuple[float, float]:
    """Messages per second, and the share of all cores that Spark used meanwhile."""
    with ExitStack() as stack:
        if trigger is not None:
            stack.enter_context(reading(ground, log, trigger))
        child = Child(__file__, str(log))
        stack.callback(child.end)
        spark = [pid for pid in tree(os.getpid()) if pid != child.process.pid]
        began, cpu = time.perf_counter(), cpu_s(spark)
        child.go(1)
        rate = float(child.line())
        return rate, (cpu_s(spark) - cpu) / (time.perf_counter() - began) / (os.cpu_count() or 1)


def publisher(path: str) -> None:
    with headwater.open(path) as log:
        batch = [(TOPIC, MESSAGE)] * PUBLISH_BATCH
        log.publish_many(batch)
        wait_for_go()
        began, done = time.perf_counter(), 0
        while (took := time.perf_counter() - began) < PUBLISH_S:
            log.publish_many(batch)
            done += PUBLISH_BATCH
        print(done / took, flush=True)


if __name__ == "__main__":
    publisher(sys.argv[1])
