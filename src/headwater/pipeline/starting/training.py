"""A little of everything that jobs do, run once so that a JVM can keep what it loaded (`train_archive` starts it)."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition

from headwater.pipeline.starting.archive import AOT_FEATURE_MIN, STEP, TRAINING_S_MAX, Archive
from headwater.pipeline.starting.java import find_java
from headwater.pipeline.starting.session import end_jvm, session_for_training

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import SparkSession

ROWS = 2_000
SCHEMA = "seq long, topic string, published_at timestamp, headers map<string,string>, data string"


class Lesson(DataSource):
    """Made-up messages through the same machinery as the log's."""

    @classmethod
    def name(cls) -> str:
        return "headwater_lesson"

    def schema(self) -> str:
        return SCHEMA

    def reader(self, schema: object) -> DataSourceReader:
        return LessonReader()


class LessonReader(DataSourceReader):
    def partitions(self) -> list[InputPartition]:
        return [InputPartition(number) for number in range(2)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        import pyarrow as pa

        seqs = range(partition.value * ROWS, (partition.value + 1) * ROWS)
        yield pa.RecordBatch.from_pydict(
            {
                "seq": pa.array(seqs, pa.int64()),
                "topic": pa.array([f"orders.{seq % 7}" for seq in seqs], pa.string()),
                "published_at": pa.array([seq * 1_000_000 for seq in seqs], pa.timestamp("us", "UTC")),
                "headers": pa.array([{"a": "b"}] * ROWS, pa.map_(pa.string(), pa.string())),
                "data": pa.array([f'{{"n": {seq}}}' for seq in seqs], pa.string()),
            }
        )


def run_lessons(spark: SparkSession, folder: Path) -> None:
    _say("querying")
    spark.range(10).selectExpr("sum(id)").collect()
    spark.dataSource.register(Lesson)
    frame = spark.read.format("headwater_lesson").load()
    frame.createOrReplaceTempView("lesson")
    spark.sql(
        "select topic, date_trunc('hour', published_at) as hour, count(*) as messages,"
        " percentile_approx(seq, 0.9) as p90, max(get_json_object(data, '$.n')) as most"
        " from lesson where seq > 10 group by 1, 2 order by messages desc"
    ).toArrow()
    spark.sql("select seq, row_number() over (partition by topic order by seq) as place from lesson").limit(5).collect()
    _say("writing and reading tables")
    tables = str(folder / "tables")
    frame.selectExpr("*", "to_date(published_at) as day").write.partitionBy("day").parquet(tables)
    stored = spark.read.parquet(tables)
    stored.join(frame.select("seq"), on="seq", how="left_anti").count()
    _say("streaming")
    stream = spark.readStream.schema(stored.schema).parquet(tables).dropDuplicates(["seq"])
    query = stream.writeStream.format("parquet").option("path", str(folder / "out"))
    query.option("checkpointLocation", str(folder / "checkpoint")).trigger(availableNow=True).start().awaitTermination()


def _say(step: str) -> None:
    print(f"{STEP}{step}", flush=True)


def main(file: str) -> None:
    archive = Archive(Path(file), is_aot=find_java().feature >= AOT_FEATURE_MIN)
    _say("starting Spark")
    spark = session_for_training(archive.flags_to_make())
    with TemporaryDirectory(prefix="headwater-training-") as folder:
        run_lessons(spark, Path(folder))
    _say("writing the archive")
    spark.stop()
    end_jvm(TRAINING_S_MAX)


if __name__ == "__main__":
    main(sys.argv[1])
