"""A Python source with no database behind it: the same ready batch again and again. No Python source can be faster."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence

import pyarrow as pa
from pyspark import cloudpickle
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from headwater.pipeline.schema import ARROW_SCHEMA, MESSAGE_SCHEMA

NAME = "bench_made_up"
BATCH_ROWS = 10_000  # as ours
NOW_US = 1_790_000_000_000_000

# Workers cannot import what lies in this folder; so the classes travel to them whole.
cloudpickle.register_pickle_by_value(sys.modules[__name__])


class MadeUp(DataSource):
    @classmethod
    def name(cls) -> str:
        return NAME

    def schema(self) -> StructType:
        return MESSAGE_SCHEMA

    def reader(self, schema: StructType) -> MadeUpReader:
        return MadeUpReader(int(self.options["rows"]), int(self.options["partitions"]), self.options["data"])


class MadeUpReader(DataSourceReader):
    def __init__(self, rows: int, partitions: int, data: str) -> None:
        self._rows, self._partitions, self._data = rows, partitions, data

    def partitions(self) -> Sequence[InputPartition]:
        return [InputPartition(self._rows // self._partitions) for _ in range(self._partitions)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        batch = made_up_batch(self._data)
        left = partition.value
        while left > 0:
            yield batch.slice(0, left)
            left -= BATCH_ROWS


def made_up_batch(data: str) -> pa.RecordBatch:
    """What a message has of which only topic and data were said."""
    columns = {
        "seq": range(1, BATCH_ROWS + 1),
        "id": [f"01a1def4-f28d-79f1-b1c3-{number:012x}" for number in range(BATCH_ROWS)],
        "topic": ["orders.new"] * BATCH_ROWS,
        "priority": [0] * BATCH_ROWS,
        "published_at": [NOW_US] * BATCH_ROWS,
        "data": [data] * BATCH_ROWS,
        "size": [len(data)] * BATCH_ROWS,
    }
    nothing = [None] * BATCH_ROWS
    arrays = [pa.array(columns.get(field.name, nothing), field.type) for field in ARROW_SCHEMA]
    return pa.RecordBatch.from_arrays(arrays, schema=ARROW_SCHEMA)
