"""Messages → one row for each bucket of seqs: how many rows, which seqs, and a checksum over every column."""

from __future__ import annotations

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from headwater.pipeline.schema import MESSAGE_SCHEMA


def row_hash() -> Column:
    """Over all columns; a map cannot be hashed, its JSON can. A null counts: it is not the same as a column less."""
    columns = [
        F.to_json(F.col(field.name)) if field.name == "headers" else F.col(field.name) for field in MESSAGE_SCHEMA
    ]
    nulls = [F.col(field.name).isNull() for field in MESSAGE_SCHEMA]
    return F.xxhash64(*columns, *nulls)


def fingerprints(messages: DataFrame) -> DataFrame:
    seq = F.col("seq")
    return (
        messages.groupBy(F.bitmap_bucket_number(seq).alias("bucket"))
        .agg(
            F.count("*").alias("rows"),
            F.bitmap_construct_agg(F.bitmap_bit_position(seq)).alias("seqs"),
            F.bit_xor(row_hash()).alias("checksum"),
        )
        .select("bucket", "rows", "seqs", "checksum")
    )


def different_rows(left: DataFrame, right: DataFrame) -> DataFrame:
    """The seqs that both hold, with other content."""
    ours = left.select("seq", row_hash().alias("ours"))
    theirs = right.select("seq", row_hash().alias("theirs"))
    return ours.join(theirs, on="seq", how="inner").where(F.col("ours") != F.col("theirs")).select("seq")
