"""Reading a log at once."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, Filter, InputPartition

from headwater.pipeline.source.conditions import both, topics_condition
from headwater.pipeline.source.log import looking, starting_after, stored_range
from headwater.pipeline.source.options import SourceOptions
from headwater.pipeline.source.place import Range
from headwater.pipeline.source.pushdown import EVERY_SEQ, push
from headwater.pipeline.source.ranges import overlap, split
from headwater.pipeline.source.reading import read_range


class RangePartition(InputPartition):
    """Some neighbouring seqs for one task."""

    def __init__(self, part: Range) -> None:
        super().__init__(tuple(part))

    @property
    def range(self) -> Range:
        return Range(*self.value)


class MessagesReader(DataSourceReader):
    def __init__(self, options: SourceOptions, columns: tuple[str, ...]) -> None:
        self._options = options
        self._columns = columns
        self._condition = topics_condition(options.patterns)
        self._pushed = EVERY_SEQ

    def partitions(self) -> Sequence[InputPartition]:
        options = self._options
        with looking(options.path) as look:
            last = look.reader.last_seq()
            upto = last if options.ending_seq is None else min(options.ending_seq, last)
            asked = overlap(Range(starting_after(look.reader, options), upto), self._pushed)
            stored = stored_range(look, asked)
        return [RangePartition(part) for part in split(stored, options.partitions_min or parallel_tasks())]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        if not isinstance(partition, RangePartition):  # Spark makes one up where there are none
            return iter(())
        part = partition.range
        return read_range(self._options.path, part.after, part.upto, condition=self._condition, columns=self._columns)


class FilteredMessagesReader(MessagesReader):
    """Takes filters from Spark, only on request (`filterPushdown`): Spark 4.3 keeps what a filtered query planned in
    the DataFrame it came from, and the next query over the same DataFrame, or a second branch of the same query, then
    gets the rows of the first. Safe is a DataFrame that one query uses once."""

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:
        self._pushed, condition, unhandled = push(filters)
        self._condition = both(self._condition, condition)
        return unhandled


def parallel_tasks() -> int:
    """About as many as run at once; what a cluster has cannot be asked from here, `minPartitions` can say it."""
    return os.cpu_count() or 1
