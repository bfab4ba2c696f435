"""The command of the JVM, and when it is Spark's own scripts that start it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from headwater.errors import HeadwaterError
from headwater.pipeline.starting.archive import Archive, archive_for, spark_folder
from headwater.pipeline.starting.flags import SPARK_FLAGS
from headwater.pipeline.starting.java import Java, find_java
from headwater.pipeline.starting.launch import can_launch, jvm_command, start_jvm

ASKED = "--add-modules=jdk.incubator.vector"
CONF = {
    "spark.driver.memory": "700m",
    "spark.driver.defaultJavaOptions": "'-Dours=a b' -XX:+UseParallelGC",
    "spark.driver.extraJavaOptions": '-Dtheirs="c d"',
    "spark.driver.extraClassPath": "/more/jars/*",
    "spark.app.name": "it's me",
}


@pytest.fixture(scope="module")
def spark_home() -> Path:
    folder = spark_folder()
    assert folder is not None
    return folder


def spark_class(java: Java, spark: Path) -> list[str]:
    """The command as Spark's own launcher makes it."""
    words = [word for name, value in CONF.items() for word in ("--conf", f"{name}={value}")]
    main = [java.executable, "-cp", f"{spark}/jars/*", "org.apache.spark.launcher.Main"]
    told = subprocess.run(
        [*main, "org.apache.spark.deploy.SparkSubmit", *words, "pyspark-shell"],
        env={"SPARK_HOME": str(spark), "SPARK_SCALA_VERSION": "2.13", "JAVA_HOME": str(java.home)},
        capture_output=True,
        check=True,
        timeout=60,
    )
    return told.stdout.decode().lstrip("\0\n").rstrip("\0").split("\0")


def test_it_is_the_command_of_spark_class_without_the_one_module(spark_home: Path) -> None:
    java = find_java()
    theirs, ours = spark_class(java, spark_home), jvm_command(Java(java.home, "17", "PATH"), spark_home, CONF, [])
    assert ASKED in theirs  # or the shim and the omission can go
    assert set(SPARK_FLAGS) < set(theirs)
    conf_folder = f"{spark_home}/conf:"  # there is none in what pip installs
    theirs = [word.replace(conf_folder, "") for word in theirs if word != ASKED]
    settings = ours.index("org.apache.spark.deploy.SparkSubmit") + 1
    assert theirs[:settings] == ours[:settings]
    assert sorted(theirs[settings:]) == sorted(ours[settings:])  # they come out of a hash map


def test_a_flag_that_newer_javas_warn_of_is_left_out(spark_home: Path) -> None:
    old, new = (jvm_command(Java(Path("/j"), version, "PATH"), spark_home, {}, []) for version in ("24", "25-ea"))
    assert [word for word in old if word not in new] == ["--add-opens=java.base/sun.security.action=ALL-UNNAMED"]


@pytest.mark.parametrize(
    ("master", "conf", "environ", "directly"),
    [
        ("local[2,4]", {}, {}, True),
        ("local", {}, {}, True),
        ("local[*]", {}, {"SPARK_HOME": ""}, True),
        ("local-cluster[2,1,800]", {}, {}, False),
        ("spark://host:7077", {}, {}, False),
        ("yarn", {}, {}, False),
        ("local[2]", {}, {"SPARK_HOME": "/opt/spark"}, False),
        ("local[2]", {}, {"SPARK_CONF_DIR": "/etc/spark"}, False),
        ("local[2]", {}, {"PYSPARK_SUBMIT_ARGS": "--jars x.jar pyspark-shell"}, False),
        ("local[2]", {"spark.driver.extraLibraryPath": "/lib"}, {}, False),
    ],
)
def test_only_a_local_spark_that_nobody_set_up_is_launched_directly(
    spark_home: Path, master: str, conf: dict[str, str], environ: dict[str, str], directly: bool
) -> None:
    assert can_launch(master, conf, environ, spark_home) is directly


def test_a_jvm_that_does_not_come_up_is_an_error_with_a_way_out(spark_home: Path, tmp_path: Path) -> None:
    with pytest.raises(HeadwaterError, match=r"ended with 1.*spark\.driver\.memory"):
        start_jvm(find_java(), spark_home, {"spark.driver.memory": "plenty"}, os.environ, tmp_path)


def test_a_jvm_that_ends_because_of_the_archive_is_started_without(tmp_path: Path) -> None:
    java = tmp_path / "jdk" / "bin" / "java"
    java.parent.mkdir(parents=True)
    java.write_text(
        '#!/bin/sh\ncase "$*" in *SharedArchiveFile*) exit 1;; esac\n'
        'printf "\\0\\0\\37\\220\\0\\0\\0\\3abc" > "$_PYSPARK_DRIVER_CONN_INFO_PATH.part"\n'
        'mv "$_PYSPARK_DRIVER_CONN_INFO_PATH.part" "$_PYSPARK_DRIVER_CONN_INFO_PATH"\n'
        "exec cat\n"
    )
    java.chmod(0o755)
    archive = Archive(tmp_path / "archive.jsa", is_aot=False)
    (tmp_path / "made").write_text("an archive")
    archive.keep(tmp_path / "made")
    jvm, gateway = start_jvm(
        Java(java.parent.parent, "17", "PATH"), tmp_path, {}, os.environ, tmp_path, archive=archive
    )
    assert gateway == (8080, "abc")
    assert not jvm.has_ended
    assert not archive.file.exists()  # it would be in the way of the next start too
    jvm.end()
    assert jvm.has_ended


def test_half_an_archive_is_none(tmp_path: Path) -> None:
    archive = Archive(tmp_path / "archive.jsa", is_aot=False)
    assert not archive.is_there
    (tmp_path / "made").write_text("an archive")
    archive.keep(tmp_path / "made")
    assert archive.is_there
    archive.file.write_text("an arch")
    assert not archive.is_there


def test_the_archive_of_another_java_or_other_jars_is_another_file(tmp_path: Path) -> None:
    jar = tmp_path / "spark" / "jars" / "a.jar"
    jar.parent.mkdir(parents=True)
    jar.write_bytes(b"1")
    names = {archive_for(Java(tmp_path, version, "PATH"), tmp_path / "spark").file for version in ("17.0.1", "17.0.2")}
    jar.write_bytes(b"22")
    names.add(archive_for(Java(tmp_path, "17.0.1", "PATH"), tmp_path / "spark").file)
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "modules").write_bytes(b"1")
    names.add(archive_for(Java(tmp_path, "17.0.1", "PATH"), tmp_path / "spark").file)
    assert len(names) == 4
    assert {name.suffix for name in names} == {".jsa"}
    assert archive_for(Java(tmp_path, "25", "PATH"), tmp_path / "spark").is_aot
