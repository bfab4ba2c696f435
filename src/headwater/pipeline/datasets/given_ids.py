"""Silver: the ids that publishers gave. Only these can repeat; all others follow from the row itself."""

from __future__ import annotations

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from headwater.pipeline.datasets.columns import LONG, STRING, schema

SCHEMA = schema(("id", STRING), ("topic", STRING), ("seq", LONG))
ORIGINALS_SCHEMA = schema(("seq", LONG))

# As message.model.derived_id writes them: time, the log's salt, and the seq in the last twelve digits.
_DERIVED = "^[0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}$"
_SEQ_DIGITS = 12


def given_ids(silver: DataFrame) -> DataFrame:
    """(id, topic, seq) of messages whose id was given."""
    return silver.where(is_given("id", "seq")).select(*SCHEMA.names)


def originals(silver: DataFrame) -> DataFrame:
    """The seqs that given ids may be copied from: a message published again under the id that the log had derived for
    it. Whether it is a copy, the topic and id of that seq tell."""
    is_like_derived = F.col("id").rlike(_DERIVED)
    named_seq = F.conv(_last_digits(F.col("id")), 16, 10).cast("long")
    return (
        given_ids(silver)
        .where(is_like_derived)
        .select(named_seq.alias("seq"))
        .distinct()
        .select(*ORIGINALS_SCHEMA.names)
    )


def is_given(id: str, seq: str) -> Column:
    """False for a message without an id, which is no repetition of anything."""
    own_digits = F.lpad(F.lower(F.hex(F.col(seq))), _SEQ_DIGITS, "0")
    follows_from_the_row = F.col(id).rlike(_DERIVED) & (_last_digits(F.col(id)) == own_digits)
    return F.col(id).isNotNull() & ~F.coalesce(follows_from_the_row, F.lit(False))


def _last_digits(id: Column) -> Column:
    return F.substring(id, -_SEQ_DIGITS, _SEQ_DIGITS)
