"""Reading a log into Spark: whole rows, to nowhere."""

from __future__ import annotations

from common import MESSAGE_JSON
from report import Line, against
from spark_ground import PARTITIONS, REPEATS, Ground, noop, warm_medians
from spark_jdbc import jdbc
from spark_made_up import NAME, MadeUp


def measure(ground: Ground) -> list[Line]:
    spark, log, messages = ground.spark, ground.log, ground.messages
    spark.dataSource.register(MadeUp)

    def ours() -> None:
        noop(spark.read.format("headwater").options(path=str(log), minPartitions=str(PARTITIONS)).load())

    def made_up() -> None:
        options = {"rows": str(messages), "partitions": str(PARTITIONS), "data": MESSAGE_JSON}
        noop(spark.read.format(NAME).options(**options).load())

    def through_jdbc(partitions: int, table: str = "history") -> None:
        noop(jdbc(spark, log, partitions=partitions, upto=messages, table=table))

    found = warm_medians(
        REPEATS,
        {
            "ours": ground.rate(ours),
            "made up": ground.rate(made_up),
            "two": ground.rate(lambda: through_jdbc(PARTITIONS)),
            "one": ground.rate(lambda: through_jdbc(1)),
            "two, no ids": ground.rate(lambda: through_jdbc(PARTITIONS, "messages")),
            "one, no ids": ground.rate(lambda: through_jdbc(1, "messages")),
        },
    )
    rate = found["ours"]
    return [
        against("whole rows, 2 partitions", rate, "JDBC in two partitions", found["two"], 1.5),
        against("", rate, "JDBC as it comes", found["one"], 3),
        against("", rate, "Python source, rows made up", found["made up"], 0.5),
        against("", rate, "JDBC, table `messages`: no ids, two", found["two, no ids"]),
        against("", rate, "JDBC, table `messages`: no ids", found["one, no ids"]),
    ]
