"""The root: version, help, exit codes, what errors look like."""

from pathlib import Path

import pytest

import headwater
from headwater.cli.app import exit_code_of
from headwater.errors import DiskFull, InvalidTopic, LeaseLost, Locked, SubscriptionActive, UnknownSubscription

LOOKING = (
    ["topics"],
    ["subscriptions"],
    ["subscriptions", "ls"],
    ["lag"],
    ["stats"],
    ["top", "--once"],
    ["tail"],
    ["dlq"],
    ["dlq", "stats"],
    ["dlq", "export"],
    ["retention"],
    ["doctor"],
)


def test_version(run):
    assert run("--version").out.startswith(f"headwater {headwater.__version__} ")
    assert run("version", "--json").json["headwater"] == headwater.__version__


def test_help_tells_the_exit_codes_and_no_escape_codes_go_into_a_pipe(finish):
    result = finish("--help", env={"COLUMNS": "100"})
    assert result.code == 0
    assert "130 when interrupted" in " ".join(result.out.split())
    assert "\x1b" not in result.out


@pytest.mark.parametrize("command", LOOKING, ids=" ".join)
def test_looking_makes_no_log(run, path: Path, command):
    result = run(*command, path)
    assert result.code == 2
    assert result.err.splitlines() == [
        f"error: there is no log {path}",
        f"next: Publish to it first: headwater publish {path} TOPIC DATA",
    ]
    assert not path.exists()


@pytest.mark.parametrize("command", LOOKING, ids=" ".join)
def test_looking_leaves_an_empty_file_empty(run, path: Path, command):
    path.touch()
    assert run(*command, path).code == 3
    assert path.stat().st_size == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["tail"], "error: Missing argument 'LOG'"),
        (["nope"], "error: No such command 'nope'"),
        (["dlq", "shwo", "x"], "error: No such command 'shwo'. Did you mean 'show'?"),
        (["tail", "x.db", "--xyzzy"], "error: No such option: --xyzzy"),
        (["publish", "memory:", "a", "1"], "error: 'memory:' would be gone when the command ends"),
        (["topics", "redis://x"], "error: there is no store for redis:// here"),
    ],
)
def test_a_call_that_cannot_be_used_ends_with_2(run, arguments, said):
    result = run(*arguments)
    assert (result.code, result.out) == (2, "")
    assert result.err.splitlines()[0] == said
    assert result.err.splitlines()[1].startswith("next: ")


def test_another_file_is_not_a_log(run, path: Path):
    path.write_text("plain text, and long enough to be no SQLite database" * 100)
    result = run("topics", path)
    assert result.code == 3
    assert "next: Name another file" in result.err


def test_debugging_shows_the_traceback(finish, path: Path):
    result = finish("topics", path, env={"HEADWATER_DEBUG": "1"})
    assert "Traceback" in result.err
    assert "Traceback" not in finish("topics", path, env={"HEADWATER_DEBUG": ""}).err


def test_exit_codes():
    bad_input = (InvalidTopic("x"), UnknownSubscription("x"))
    refused = (Locked("x"), DiskFull("x"), SubscriptionActive("x"), LeaseLost("x"))
    assert {exit_code_of(error) for error in bad_input} == {2}
    assert {exit_code_of(error) for error in refused} == {3}
