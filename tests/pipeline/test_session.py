"""What a session is set to, how it starts, and how it ends."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from headwater.errors import InvalidOptionError
from headwater.pipeline.session import cores, session, settings_for, with_attempts

CHILD_S_MAX = 60
JAVA_OPTIONS = "spark.driver.defaultJavaOptions"


@pytest.mark.parametrize(
    ("asked", "master"),
    [
        (None, f"local[{cores()},4]"),
        ("local", "local[1,4]"),
        ("local[3]", "local[3,4]"),
        ("local[*]", "local[*,4]"),
        ("local[3,1]", "local[3,1]"),
        ("local-cluster[2,1,800]", "local-cluster[2,1,800]"),
        ("spark://host:7077", "spark://host:7077"),
    ],
)
def test_a_task_gets_more_than_one_attempt_unless_one_was_asked_for(asked: str | None, master: str) -> None:
    assert with_attempts(asked) == master


def test_what_is_given_wins(tmp_path: Path) -> None:
    ours = settings_for("local[3,4]", {}, tmp_path)
    assert (ours["spark.driver.memory"], ours["spark.sql.shuffle.partitions"]) == ("1g", "3")
    given = dict.fromkeys(ours, "given")
    assert settings_for("local[3,4]", given, tmp_path) == given


def test_a_cluster_keeps_its_own_places_and_sizes(tmp_path: Path) -> None:
    settings = settings_for("spark://host:7077", {}, tmp_path)
    assert settings["spark.sql.session.timeZone"] == "UTC"
    places = ("memory", "host", "bindAddress", "local.dir", "warehouse", "partitions", "checkpointFileManager")
    assert not [name for name in settings for place in places if place in name]
    assert "GC" not in settings[JAVA_OPTIONS]


def test_another_collector_or_other_logs_take_the_place_of_ours(tmp_path: Path) -> None:
    assert "-XX:+UseParallelGC" in settings_for("local[2]", {}, tmp_path)[JAVA_OPTIONS]
    assert "log4j2" in settings_for("local[2]", {}, tmp_path)[JAVA_OPTIONS]
    theirs = {"spark.driver.extraJavaOptions": "-XX:+UseG1GC -Dlog4j2.configurationFile=mine"}
    assert settings_for("local[2]", theirs, tmp_path)[JAVA_OPTIONS] == f"-Djava.io.tmpdir={tmp_path}"


def test_short_runs_compile_less(tmp_path: Path) -> None:
    short, long = (settings_for("local[2]", {}, tmp_path, short=short) for short in (True, False))
    assert "-XX:TieredStopAtLevel=1" in short[JAVA_OPTIONS]
    assert "-XX:TieredStopAtLevel=1" not in long[JAVA_OPTIONS]
    assert short["spark.sql.codegen.wholeStage"] == "false"
    assert "spark.sql.codegen.wholeStage" not in long
    assert "Tiered" not in settings_for("spark://host:7077", {}, tmp_path, short=True)[JAVA_OPTIONS]


def test_the_package_has_its_pipeline_without_importing_spark() -> None:
    code = "import sys, headwater; headwater.pipeline.session; assert 'pyspark' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=CHILD_S_MAX)


def test_a_master_and_a_remote_are_one_too_many() -> None:
    with pytest.raises(InvalidOptionError, match="both a master and a remote"):
        session(master="local[2]", remote="sc://host")


def test_without_pyspark_it_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InvalidOptionError, match=r"pip install '.*\[spark\]'"):
        session()


def test_a_second_session_is_the_first_with_more_settings(spark: SparkSession) -> None:
    again = session(conf={"spark.sql.shuffle.partitions": "7"})
    assert again.version == spark.version
    assert spark.conf.get("spark.sql.shuffle.partitions") == "7"
    spark.conf.set("spark.sql.shuffle.partitions", "2")


def test_the_session_is_set_and_its_gateway_is_not_inherited(spark: SparkSession) -> None:
    assert spark.conf.get("spark.sql.session.timeZone") == "UTC"
    assert spark.conf.get("spark.sql.python.filterPushdown.enabled") == "true"
    assert not [name for name in os.environ if name.startswith("PYSPARK_GATEWAY")]
    assert [row.asDict() for row in spark.sql("select sum(id) as s from range(10)").collect()] == [{"s": 45}]
