"""What a user reads about a query that is wrong, and the tables that a query finds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
from lake_world import make_lake
from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

import headwater
from headwater.errors import InvalidOptionError
from headwater.pipeline.columns import COLUMNS
from headwater.pipeline.lake import BRONZE, Lake
from headwater.pipeline.sql import make_views, sql_error


@pytest.mark.parametrize(
    ("query", "sentence"),
    [
        ("selec 1", "syntax error at or near 'selec'; did you mean SELECT? (line 1, column 1)"),
        ("select 1,\n  2 frm x y", "syntax error at or near 'x' (line 2, column 9)"),
        ("", "Syntax error, unexpected empty statement (line 1, column 1)"),
        ("select toppic from asked", "there is no column `toppic`; did you mean `topic`? (line 1, column 8)"),
        ("select * from aksed", "there is no table `aksed`; did you mean asked? (line 1, column 15)"),
        ("select * from nothing_like_it", "there is no table `nothing_like_it` (line 1, column 15)"),
        ("drop table gone", "there is no table `gone`"),
        ("select nofn(1)", "there is no function `nofn` (line 1, column 8)"),
        (
            "select seq / 0 from asked",
            "Division by zero. Use `try_divide` to tolerate divisor being 0 and return NULL instead (line 1, column 8)",
        ),
        ("select parse_json('{')", "Malformed records are detected in record parsing: {"),
    ],
)
def test_an_error_of_a_query_is_one_sentence(
    spark: SparkSession, query: str, sentence: str, capfd: pytest.CaptureFixture[str]
) -> None:
    spark.range(3).selectExpr("id as seq", "'a' as topic").createOrReplaceTempView("asked")
    with pytest.raises((PySparkException, Py4JError)) as caught:
        spark.sql(query).collect()
    assert sql_error(caught.value, ["asked", "messages"]) == sentence
    assert '"logger": "SQLQueryContextLogger"' not in capfd.readouterr().err  # kilobytes of JSON for each


def test_an_error_that_is_not_of_spark_sql_is_its_first_line() -> None:
    assert sql_error(RuntimeError("\n  lost\n  at a.b.c")) == "lost"
    assert sql_error(RuntimeError()) == "RuntimeError"


# --- views ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def path(tmp_path: Path) -> Path:
    with headwater.open(tmp_path / "events.db", maintenance_interval=None) as log:
        log.publish_many([("orders.new", {"n": n}) for n in range(3)])
    return tmp_path / "events.db"


@pytest.fixture
def lake(path: Path, tmp_path: Path) -> Lake:
    return make_lake(path, tmp_path / "lake")


@pytest.fixture
def made(spark: SparkSession) -> Iterator[Callable[[], set[str]]]:
    """The views that there are: none before the test and none after it."""

    def views() -> set[str]:
        return {row["viewName"] for row in spark.sql("show views").collect()}

    for name in views():  # of other tests in this session
        spark.catalog.dropTempView(name)
    yield views
    for name in views():
        spark.catalog.dropTempView(name)


def test_only_the_views_that_a_query_names_are_made(
    spark: SparkSession, lake: Lake, made: Callable[[], set[str]]
) -> None:
    names = make_views(spark, "select count(*) from Silver_Messages, live_x", lake, log="nowhere.db")
    assert {"bronze_messages", "silver_messages", "gold_volume", "messages", "live", "live_dead_letters"} <= set(names)
    assert made() == {"silver_messages"}
    make_views(spark, "show views", lake)
    assert {"bronze_messages", "gold_volume", "messages", "metrics_subscriptions"} <= made()


def test_messages_are_those_of_the_lake_and_then_those_of_the_log(
    spark: SparkSession, path: Path, lake: Lake, made: Callable[[], set[str]]
) -> None:
    with headwater.open(path, maintenance_interval=None) as log:
        log.publish("orders.new", {"n": 3})
    make_views(spark, "select * from messages", lake, str(path))
    assert spark.sql("select * from messages").columns == list(COLUMNS)
    found = spark.sql("select seq, data from messages order by seq").collect()
    assert [(row["seq"], row["data"]) for row in found] == [(n + 1, f'{{"n":{n}}}') for n in range(4)]
    make_views(spark, "select * from live", log=str(path))
    assert spark.sql("select count(*) n from live").collect()[0]["n"] == 4


def test_every_table_is_as_it_was_at_one_moment(
    spark: SparkSession, path: Path, lake: Lake, tmp_path: Path, made: Callable[[], set[str]]
) -> None:
    version, before = lake.table(BRONZE).version, datetime.now(UTC)
    with headwater.open(path, maintenance_interval=None) as log:
        log.publish("orders.new", {"n": 3}, id="mine")
    make_lake(path, tmp_path / "lake")
    counts = "(select count(*) from messages) a, (select count(*) from silver_messages) b"
    query = f"select {counts}, sum(messages) c from gold_volume"
    for at in (before, lake.moment(version)):
        names = make_views(spark, query, lake, at=at)
        assert spark.sql(query).collect() == [(3, 3, 3)]
        assert "silver_explicit_ids" not in names, "it was not there yet"
    names = make_views(spark, query, lake)
    assert spark.sql(query).collect() == [(4, 4, 4)]
    assert "silver_explicit_ids" in names


def test_files_that_vacuum_removed_are_named_before_spark_misses_them(
    spark: SparkSession, path: Path, lake: Lake, tmp_path: Path
) -> None:
    before = datetime.now(UTC)
    with headwater.open(path, maintenance_interval=None) as log:
        log.publish("orders.new", {"n": 3})
    make_lake(path, tmp_path / "lake")  # gold's day is written anew
    lake.vacuum(0)
    with pytest.raises(InvalidOptionError, match="vacuum has removed files that gold/volume had"):
        make_views(spark, "select * from gold_volume", lake, at=before)
    make_views(spark, "select * from bronze_messages", lake, at=before)
