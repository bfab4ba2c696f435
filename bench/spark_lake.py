"""The log into the lake, and questions to the lake, beside the same through JDBC."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyspark.sql import functions as F

from common import seconds
from headwater.pipeline.jobs.bronze import start_bronze
from headwater.pipeline.jobs.running import bind
from headwater.pipeline.lake.compaction import compact
from headwater.pipeline.lake.lake import Lake
from headwater.pipeline.lake.layout import BRONZE
from report import Line, against
from spark_ground import PARTITIONS, REPEATS, Ground, noop, warm_medians
from spark_jdbc import jdbc
from spark_memory import peak_memory

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.streaming.query import StreamingQuery

NEW_MESSAGES = 10_000
INCREMENTS = 5
MICRO_BATCHES = 200
QUESTIONS = 7  # repeats of what takes less than a second


def measure(ground: Ground) -> list[Line]:
    with ground.passing("lake") as path, ground.passing("small-lake") as small_path:
        lines = first_run(ground)
        with new_lake(path, ground.log) as lake, new_lake(small_path, ground.small_log) as small:
            taken_in(ground, lake, ground.log)
            taken_in(ground, small, ground.small_log)
            lines += grouping(ground, lake)
            lines += micro_batches(ground, small)
            lines += incremental(ground, lake, small)  # last: it adds to the logs
    return [*lines, *memory(ground)]


@contextmanager
def new_lake(path: Path, log: Path) -> Iterator[Lake]:
    with Lake(path, create=True) as lake:
        bind(lake, str(log))
        yield lake


def bronze_started(ground: Ground, lake: Lake, log: Path, **options: Any) -> StreamingQuery:
    return start_bronze(ground.spark, lake, str(log), **options)


def taken_in(ground: Ground, lake: Lake, log: Path, **options: Any) -> None:
    bronze_started(ground, lake, log, **options).awaitTermination()


# --- the first run --------------------------------------------------------------------------------------------------


def first_run(ground: Ground) -> list[Line]:
    def ours() -> None:
        with ground.passing("lake") as path, new_lake(path, ground.log) as lake:
            taken_in(ground, lake, ground.log)

    def through_jdbc(is_laid_out: bool) -> None:
        frame = jdbc(ground.spark, ground.log, partitions=PARTITIONS, upto=ground.messages)
        with ground.passing("parquet") as path:
            if is_laid_out:
                day = F.to_date(F.timestamp_millis("published_at"))
                frame = frame.withColumns({"day": day, "topic_prefix": F.substring_index("topic", ".", 1)})
                frame.write.option("compression", "zstd").partitionBy("day", "topic_prefix").parquet(str(path))
            else:
                frame.write.option("compression", "zstd").parquet(str(path))

    found = warm_medians(
        REPEATS,
        {
            "ours": ground.rate(ours),
            "plain": ground.rate(lambda: through_jdbc(False)),
            "laid out": ground.rate(lambda: through_jdbc(True)),
        },
    )
    return [
        against("log → bronze, first run", found["ours"], "JDBC, two partitions, Parquet", found["plain"], 1.3),
        against("", found["ours"], "the same by day and topic prefix", found["laid out"]),
    ]


def memory(ground: Ground) -> list[Line]:
    """Each in a Spark of its own, for a JVM keeps what it once had."""
    peaks = {}
    for messages, log in ((ground.small, ground.small_log), (ground.messages, ground.log)):
        with ground.passing("lake") as path:
            peaks[messages] = peak_memory(log, path)
    small, large = peaks[ground.small], peaks[ground.messages]
    ratio = large / small
    what = f"most memory of all processes, {ground.messages:,}"
    return [
        Line(what, f"{large / 1e6:,.0f} MB", f"{ground.small:,}: {small / 1e6:,.0f} MB", ratio, "≤ 1.2 ×", ratio <= 1.2)
    ]


def incremental(ground: Ground, lake: Lake, small: Lake) -> list[Line]:
    """Runs in a warm session, the large log and the small one in turn."""

    def after_new(lake: Lake, log: Path) -> float:
        ground.publish(log, NEW_MESSAGES)
        return seconds(lambda: taken_in(ground, lake, log))

    found = warm_medians(
        INCREMENTS,
        {
            "large": lambda: after_new(lake, ground.log),
            "small": lambda: after_new(small, ground.small_log),
            "nothing": lambda: seconds(lambda: taken_in(ground, lake, ground.log)),
        },
    )
    large, few = found["large"], found["small"]
    what = f"a run after {NEW_MESSAGES:,} new, log of {ground.messages:,}"
    beside = f"log of {ground.small:,}: {few:.2f} s; nothing new: {found['nothing']:.2f} s"
    return [Line(what, f"{large:.2f} s", beside, large / few, "≤ 1.2 ×", large / few <= 1.2)]


# --- questions ------------------------------------------------------------------------------------------------------


def by_topic(frame: DataFrame) -> list[Any]:
    return frame.groupBy("topic").agg(F.count("*").alias("messages"), F.sum("size").alias("bytes")).collect()


def grouping(ground: Ground, lake: Lake) -> list[Line]:
    spark, log, messages = ground.spark, ground.log, ground.messages
    asked: dict[str, Callable[[], list[Any]]] = {
        "ours": lambda: by_topic(lake.bronze(spark)),
        "two": lambda: by_topic(jdbc(spark, log, partitions=PARTITIONS, upto=messages)),
        "one": lambda: by_topic(jdbc(spark, log)),
    }
    answers = [sorted(tuple(row) for row in ask()) for ask in asked.values()]
    assert answers[0] == answers[1] == answers[2], "the lake and the log say different things"
    found = warm_medians(REPEATS, {name: ground.rate(ask) for name, ask in asked.items()})
    return [
        against("count and size by topic, over the lake", found["ours"], "JDBC, two partitions", found["two"], 5),
        against("", found["ours"], "JDBC as it comes", found["one"], 5),
    ]


def micro_batches(ground: Ground, at_once: Lake) -> list[Line]:
    """The same messages, once in one run and once in many small batches, before and after compaction."""
    with ground.passing("batches-lake") as path, new_lake(path, ground.small_log) as lake:
        began = time.perf_counter()
        taken_in(ground, lake, ground.small_log, batch_messages=-(-ground.small // MICRO_BATCHES))
        took_s = time.perf_counter() - began
        batches = len(lake.manifest.batches(limit=MICRO_BATCHES * 2))
        batch_ms = took_s / batches * 1000
        many, before = _asked(ground, lake, at_once)
        files_before = len(lake.manifest.files(BRONZE))
        compact_s = seconds(lambda: compact(lake.path, lake.manifest, BRONZE))
        some, after = _asked(ground, lake, at_once)
        files = len(lake.manifest.files(BRONZE))
    ratio = some["by topic"] / after["by topic"]
    return [
        Line(
            f"by topic after {batches} batches, compacted",
            f"{some['by topic'] * 1e3:,.0f} ms, {files} files",
            f"written at once {after['by topic'] * 1e3:,.0f} ms, {len(at_once.manifest.files(BRONZE))} files",
            ratio,
            "≤ 1.3 ×",
            ratio <= 1.3,
        ),
        Line(
            "whole rows, compacted",
            f"{some['rows'] * 1e3:,.0f} ms",
            f"written at once {after['rows'] * 1e3:,.0f} ms",
            some["rows"] / after["rows"],
        ),
        Line(
            "by topic before compaction",
            f"{many['by topic'] * 1e3:,.0f} ms, {files_before} files",
            f"written at once {before['by topic'] * 1e3:,.0f} ms",
            many["by topic"] / before["by topic"],
        ),
        Line("compaction", f"{compact_s:.1f} s", f"one of the {batches} batches took {batch_ms:.0f} ms"),
    ]


def _asked(ground: Ground, lake: Lake, at_once: Lake) -> tuple[dict[str, float], dict[str, float]]:
    """Seconds of the two questions over the two lakes, in turn."""
    spark = ground.spark
    found = warm_medians(
        QUESTIONS,
        {
            "by topic": lambda: seconds(lambda: by_topic(lake.bronze(spark))),
            "by topic at once": lambda: seconds(lambda: by_topic(at_once.bronze(spark))),
            "rows": lambda: seconds(lambda: noop(lake.bronze(spark))),
            "rows at once": lambda: seconds(lambda: noop(at_once.bronze(spark))),
        },
    )
    ours = {name: found[name] for name in ("by topic", "rows")}
    return ours, {name: found[f"{name} at once"] for name in ours}
