"""Silver: the messages that are right, each id once on its topic, with the payload as a VARIANT."""

from __future__ import annotations

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import StructType, VariantType

from headwater.pipeline.datasets.columns import DAY, STRING, schema, topic_prefix, utc_day
from headwater.pipeline.datasets.given_ids import SCHEMA as GIVEN
from headwater.pipeline.datasets.given_ids import given_ids, originals
from headwater.pipeline.schema import MESSAGE_SCHEMA

SCHEMA = StructType(
    [
        *MESSAGE_SCHEMA.fields,
        *schema(("payload", VariantType()), ("day", DAY), ("topic_prefix", STRING)).fields,
    ]
)


def silver_messages(checked: DataFrame, known_ids: DataFrame) -> DataFrame:
    """`known_ids` (id, topic, seq) are those that silver has already. Of an id on a topic, what silver has stays, else
    the lowest seq."""
    is_right = F.col("problem").isNull()
    right = checked.where(is_right)
    return (
        right.join(_repeated(right, known_ids), on="seq", how="left_anti")
        .withColumn("payload", _payload(F.col("data")))
        .withColumn("day", utc_day(F.col("published_at")))
        .withColumn("topic_prefix", topic_prefix(F.col("topic")))
        .select(*SCHEMA.names)
    )


def _repeated(right: DataFrame, known_ids: DataFrame) -> DataFrame:
    """The seqs whose id stands elsewhere on their topic: in silver already, or here at a lower seq; given there or
    derived."""
    given = given_ids(right)
    copied = right.join(originals(right), on="seq", how="left_semi").select(*GIVEN.names)
    here = given.unionByName(copied).withColumn("is_new", F.lit(True))
    known = known_ids.select(*GIVEN.names, F.lit(False).alias("is_new"))
    place = F.struct("is_new", "seq")
    first = here.unionByName(known).groupBy("id", "topic").agg(F.min(place).alias("first"))
    stands_elsewhere = F.col("seq") != F.col("first.seq")
    return given.join(first, on=["id", "topic"], how="inner").where(stands_elsewhere).select("seq").distinct()


def _payload(data: Column) -> Column:
    # A VARIANT cannot hold an object with a key twice; its text is then the payload, so that it is never null: Spark
    # 4.3 cannot convert a VARIANT that is null to Arrow.
    return F.coalesce(F.try_parse_json(data), data.cast(VariantType()))
