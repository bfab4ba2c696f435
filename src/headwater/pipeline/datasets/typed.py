"""Silver: the messages of one registered type, one column for each property that any of its versions has.

Read from the VARIANT, not with `from_json`: that takes twice as long, and makes null of `1.0` where a whole number is
meant, which JSON Schema allows, and of a whole array that holds one.
"""

from __future__ import annotations

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from headwater.pipeline.datasets.columns import LONG, STRING, TIME, schema
from headwater.pipeline.datasets.json_types import Property, Simple, properties, quoted, sql_type
from headwater.pipeline.datasets.types import Types

SCHEMA = schema(("seq", LONG), ("id", STRING), ("topic", STRING), ("version", LONG), ("published_at", TIME))
"""What every typed table begins with; its other columns follow from the type."""

# The lake may partition by these, so that no property may be called so either.
PARTITION_COLUMNS = ("day", "topic_prefix")


def typed(silver: DataFrame, type: str, types: Types) -> DataFrame:
    is_of_the_type = F.col("type") == type
    columns = [_value(each).alias(each.column) for each in columns_of(type, types)]
    return silver.where(is_of_the_type).select(*SCHEMA.names, *columns)


def columns_of(type: str, types: Types) -> list[Property]:
    """The columns that follow from the type, beside those of SCHEMA."""
    documents = [each.document for each in types.schemas_of(type)]
    return properties(documents, taken=[*SCHEMA.names, *PARTITION_COLUMNS])


def _value(property: Property) -> Column:
    if property.kind is Simple.TIME:
        # RFC 3339 allows `t` and `z`, Spark does not.
        return F.upper(_read(property.name, sql_type(Simple.TEXT))).try_cast(sql_type(Simple.TIME))
    return _read(property.name, sql_type(property.kind))


def _read(name: str, kind: str) -> Column:
    """The property as that type; null where it is missing, null or something else."""
    if "'" not in name:
        return F.try_variant_get("payload", f"$['{name}']", kind)
    if '"' not in name:
        return F.try_variant_get("payload", f'$["{name}"]', kind)
    # A path cannot say a name with both kinds of quotes; a struct of one field can.
    return F.try_variant_get("payload", "$", f"struct<{quoted(name)}: {kind}>").getField(name)
