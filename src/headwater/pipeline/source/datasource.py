"""`spark.read.format("headwater")` and its three sisters."""

from __future__ import annotations

import sys

from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
)
from pyspark.sql.types import StructType

from headwater.errors import InvalidOption
from headwater.pipeline.schema import TABLE_SCHEMAS
from headwater.pipeline.source.batch import FilteredMessagesReader, MessagesReader
from headwater.pipeline.source.options import SourceOptions, read_options, read_table_name
from headwater.pipeline.source.stream import MessagesStreamReader
from headwater.pipeline.source.tables import TableReader

_FILTERS_WORKER = "pyspark.sql.worker.data_source_pushdown_filters"


class HeadwaterDataSource(DataSource):
    """A log as a table. Options: see `source/options.py` for reading and `sink/options.py` for writing."""

    @classmethod
    def name(cls) -> str:
        return "headwater"

    def schema(self) -> StructType:
        return TABLE_SCHEMAS[read_table_name(self.options)]

    def reader(self, schema: StructType) -> DataSourceReader:
        options = read_options(self.options)
        columns = chosen_columns(options, schema)
        if options.table != "messages":
            return TableReader(options, columns)
        takes_filters = options.filter_pushdown and _spark_offers_filters()
        return FilteredMessagesReader(options, columns) if takes_filters else MessagesReader(options, columns)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        options = read_options(self.options)
        if options.table != "messages":
            raise InvalidOption(
                f"the table {options.table} changes in place, so it cannot be streamed",
                where="table",
                next="Read it with spark.read, again and again; what can be streamed is messages",
            )
        if options.ending_seq is not None:
            raise InvalidOption("a stream has no end", where="endingSeq", next="Use trigger(availableNow=True)")
        return MessagesStreamReader(options, chosen_columns(options, schema))

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        from headwater.pipeline.sink.writers import BatchWriter  # who only reads does without

        _refuse_overwrite(overwrite)
        return BatchWriter(self.options, schema)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:
        from headwater.pipeline.sink.writers import StreamWriter

        return StreamWriter(self.options, schema, overwrite)


def chosen_columns(options: SourceOptions, asked: StructType) -> tuple[str, ...]:
    """The names of the columns a user's schema picks, which may leave out and reorder, but not change them."""
    fixed = TABLE_SCHEMAS[options.table]
    types = {field.name: field.dataType for field in fixed}
    for field in asked:
        if field.name not in types:
            raise InvalidOption(
                f"there is no column {field.name!r} in {options.table}",
                where="schema",
                next=f"Choose from {', '.join(types)}",
            )
        if field.dataType != types[field.name]:
            raise InvalidOption(
                f"{field.name} is {types[field.name].simpleString()}, not {field.dataType.simpleString()}",
                where="schema",
                next=f"Read it as it is and convert it then, with col({field.name!r}).cast(…)",
            )
    return tuple(asked.names)


def _spark_offers_filters() -> bool:
    """Whether this process is the one in which Spark pushes filters down, which it starts only where its setting
    `spark.sql.python.filterPushdown.enabled` says so. A reader that takes filters is refused everywhere else."""
    main_spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    return _FILTERS_WORKER in sys.modules or getattr(main_spec, "name", None) == _FILTERS_WORKER


def _refuse_overwrite(overwrite: bool) -> None:
    if overwrite:
        raise InvalidOption("a log is only ever added to", where='mode "overwrite"', next='Write with .mode("append")')
