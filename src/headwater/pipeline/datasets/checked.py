"""Silver, first step: every message with what is wrong with it, or null.

Spark has no function that reads JSON strictly: `try_parse_json` accepts text behind the value and refuses a key that
stands twice, `get_json_object` accepts single quotes. So the reader that the log itself uses decides, in the same
pass as the schemas. One Arrow function over three columns is faster than sending whole rows through `mapInArrow`, and
than parsing natively first and sending only what has a registered type.
"""

from __future__ import annotations

import pyarrow as pa
from pyspark.sql import Column, DataFrame
from pyspark.sql.pandas.functions import arrow_udf
from pyspark.sql.types import StructType

from headwater.pipeline.datasets.columns import STRING, schema
from headwater.pipeline.datasets.problems import problems
from headwater.pipeline.datasets.types import Types
from headwater.pipeline.schema import MESSAGE_SCHEMA

SCHEMA = StructType([*MESSAGE_SCHEMA.fields, *schema(("problem", STRING)).fields])


def checked(messages: DataFrame, types: Types) -> DataFrame:
    """Two datasets are made from this, silver and the quarantine: keep it (`persist`) in between."""
    return messages.withColumn("problem", _problem(types)).select(*SCHEMA.names)


def _problem(types: Types) -> Column:
    def find(type: pa.Array, version: pa.Array, data: pa.Array) -> pa.Array:
        rows = zip(type.to_pylist(), version.to_pylist(), data.to_pylist(), strict=True)
        return pa.array(problems(types, rows), pa.string())

    # Its kind follows from the type hints, which PySpark's own stubs do not know yet.
    return arrow_udf(find, STRING)("type", "version", "data")  # type: ignore[call-overload, no-any-return]
