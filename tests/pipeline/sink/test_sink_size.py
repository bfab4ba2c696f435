"""A batch far larger than memory should be: it goes through in pieces."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.sql.types import StringType, StructField, StructType

from headwater.pipeline.sink.writers import StreamWriter
from headwater.stores.sqlite import SqliteStore

ROWS, ROWS_PER_ARROW_BATCH = 100_000, 10_000
DATA = '{"n":%d,"pad":"' + "x" * 1_970 + '"}'
GROWTH_MIB_MAX = 90  # the page cache, Arrow and one piece; the batch itself is twice that

PLAIN = StructType([StructField("topic", StringType()), StructField("data", StringType())])


def arrow_batches() -> Iterator[pa.RecordBatch]:
    for first in range(0, ROWS, ROWS_PER_ARROW_BATCH):
        numbers = range(first, first + ROWS_PER_ARROW_BATCH)
        yield pa.record_batch(
            [[f"orders.{number % 20}" for number in numbers], [DATA % number for number in numbers]],
            names=["topic", "data"],
        )


@pytest.mark.skipif(sys.platform != "linux", reason="asks /proc how much memory it took")
def test_a_large_batch_is_committed_in_constant_memory(tmp_path: Path, figures: Callable[[str], None]) -> None:
    path = tmp_path / "events.db"
    started = time.monotonic()
    staged = StreamWriter({"path": str(path), "sinkId": "s"}, PLAIN).write(arrow_batches())
    staged_at = time.monotonic()
    file = Path(f"{path}-staging") / (staged.name or "")
    size_mib = file.stat().st_size / 2**20
    script = Path(__file__).with_name("commit_once.py")
    child = subprocess.run(
        [sys.executable, str(script), str(path), str(staged.name), str(staged.rows)],
        capture_output=True, text=True, check=True, timeout=100,
    )  # fmt: skip
    committed_at = time.monotonic()
    store = SqliteStore(path)
    with store.read() as reader:
        assert reader.last_seq() == ROWS
        assert sum(count.count for count in reader.topic_counts()) == ROWS
    store.close()
    grown_mib = int(child.stdout)
    assert grown_mib < GROWTH_MIB_MAX < size_mib / 2
    figures(
        f"sink: {ROWS:,} rows of 2 kB staged at {ROWS / (staged_at - started):,.0f}/s, committed at "
        f"{ROWS / (committed_at - staged_at):,.0f}/s by a process that grew by {grown_mib} MiB"
    )
