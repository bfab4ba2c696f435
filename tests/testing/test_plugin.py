"""The pytest plugin: fixtures for those that ask, and nothing for all others. Each run is a pytest of its own."""

import subprocess
import sys
from pathlib import Path

FIXTURES_USED = """
from headwater.testing import clock_of, drain

def test_one(log, clock):
    assert clock is clock_of(log)
    log.publish("a", 1, delay=3600)
    seen = []
    log.on("a", id="all")(lambda message: seen.append(message.data))
    drain(log)
    assert seen == [1]

def test_two(log):
    assert log.last_seq() == 0
"""

NOT_USED = """
import sys

def test_nothing_is_imported():
    assert not [name for name in sys.modules if name.split(".")[0] == "headwater"]
    assert "apsw" not in sys.modules
"""

FAILS = """
from headwater.testing import drain

def test_no_handler(log):
    drain(log)
"""

OWN_FIXTURES = """
import pytest

@pytest.fixture
def clock():
    return "my clock"

@pytest.fixture
def log(clock):
    return f"my log with {clock}"

def test_mine(log):
    assert log == "my log with my clock"
"""

OWN_CLOCK = """
import pytest

@pytest.fixture
def clock():
    return "my clock"

def test_mine(log, clock):
    assert (log.last_seq(), clock) == (0, "my clock")
"""


def run_pytest(directory: Path, program: str, *options: str) -> subprocess.CompletedProcess[str]:
    (directory / "test_it.py").write_text(program)
    words = [sys.executable, "-m", "pytest", "-q", "-W", "error", "-p", "no:cacheprovider", *options, "test_it.py"]
    return subprocess.run(words, cwd=directory, capture_output=True, text=True, timeout=60)


def test_the_fixtures_are_there(tmp_path: Path) -> None:
    ran = run_pytest(tmp_path, FIXTURES_USED)
    assert "2 passed" in ran.stdout, ran.stdout + ran.stderr


def test_nothing_is_imported_where_no_test_asks(tmp_path: Path) -> None:
    ran = run_pytest(tmp_path, NOT_USED)
    assert "1 passed" in ran.stdout, ran.stdout + ran.stderr


def test_fixtures_of_the_same_name_go_first(tmp_path: Path) -> None:
    for program in (OWN_FIXTURES, OWN_CLOCK):
        ran = run_pytest(tmp_path, program)
        assert "1 passed" in ran.stdout, ran.stdout + ran.stderr


def test_it_can_be_turned_off(tmp_path: Path) -> None:
    ran = run_pytest(tmp_path, FIXTURES_USED, "-p", "no:headwater")
    assert "fixture 'log' not found" in ran.stdout, ran.stdout + ran.stderr


def test_a_failure_shows_the_line_of_the_test_and_none_of_headwater(tmp_path: Path) -> None:
    ran = run_pytest(tmp_path, FAILS)
    assert (
        ">       drain(log)\nE       headwater.errors.InvalidStateError: memory: no handler is declared" in ran.stdout
    )
    assert "testing.py" not in ran.stdout
