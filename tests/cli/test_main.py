"""The root: version, help, exit codes, and what errors look like."""

import ast
import io
import json
import os
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import typer
from served import RunningServer

import headwater
from headwater.cli.commands import TARGETS, app, load_command
from headwater.cli.output import show_error
from headwater.cli.stopping import exit_code_of
from headwater.errors import (
    DiskFullError,
    InvalidTopicError,
    LeaseLostError,
    LockedError,
    SubscriptionActiveError,
    UnknownSubscriptionError,
)

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


LIBRARY = ["headwater.wiring", "headwater.broker", "headwater.stores", "headwater.api", "headwater.settings"]
SLOW = [*LIBRARY, "pydantic", "msgspec", "asyncio", "ssl", "rich", "pyspark", "pyarrow"]


def imported_by(program: str, of: list[str], **environment: str) -> list[str]:
    """Which of these modules are imported when a process has run the program."""
    code = f"import sys\n{program}\nprint([name for name in {of} if name in sys.modules], file=sys.stderr)"
    environment = {**os.environ, **environment}
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=environment)
    found: list[str] = ast.literal_eval(ended.stderr.splitlines()[-1])
    return found


def test_the_version_needs_no_package_of_the_command_line():
    assert imported_by("from headwater.cli import main; main(['--version'])", ["typer", "inspect", *SLOW]) == []


def test_importing_the_package_imports_none_of_its_parts():
    assert imported_by("import headwater", ["headwater.errors", "apsw", *SLOW]) == []
    assert imported_by("import headwater; headwater.open", ["pydantic", "headwater.api._async"]) == []
    assert "headwater.wiring" in imported_by("import headwater; headwater.open", LIBRARY)  # the look finds something


def test_help_imports_no_command():
    modules = [f"headwater.cli.{target.partition(':')[0]}" for target in TARGETS.values()]
    assert imported_by("from headwater.cli import main; main(['--help'])", [*modules, *LIBRARY, "pydantic"]) == []


@pytest.mark.parametrize("name", TARGETS)
def test_a_command_imports_the_library_when_it_runs_and_not_before(name):
    assert imported_by(f"from headwater.cli.commands import load_command; load_command({name!r})", SLOW) == []


def test_a_table_on_a_terminal_needs_no_rich(path: Path):
    with headwater.open(path) as log:
        log.publish("orders.new", 1)
    program = f"from headwater.cli import main; main(['topics', {str(path)!r}])"
    assert imported_by(program, ["rich", "pydantic", "headwater.server"], FORCE_COLOR="1") == []


@pytest.mark.parametrize("name", TARGETS)
def test_the_help_of_the_root_is_that_of_the_command(name):
    assert typer.main.get_command(app).commands[name].help == load_command(name).help.split("\n")[0]


def test_help_has_four_panels(run):
    lines = run("--help").out.splitlines()
    panels = [line.split()[1] for line in lines if line.startswith("╭─ ")]
    assert panels == ["Options", "Messages", "Inspect", "Operate", "Learn"]


def test_help_tells_the_exit_codes_and_no_escape_codes_go_into_a_pipe(finish):
    result = finish("--help", env={"COLUMNS": "100"})
    assert result.code == 0
    assert "130 interrupted" in " ".join(result.out.split())
    assert "\x1b" not in result.out


@pytest.mark.parametrize("command", LOOKING, ids=" ".join)
def test_looking_makes_no_log_and_leaves_an_empty_file_empty(run, path: Path, command):
    result = run(*command, path)
    assert result.code == 2
    assert result.err.splitlines() == [
        f"error: there is no log {path}",
        f"next: Check the name, or create the log: headwater publish {path} TOPIC DATA",
    ]
    assert not path.exists()
    path.touch()
    assert run(*command, path).code == 3
    assert path.stat().st_size == 0


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
    bad_input = (InvalidTopicError("x"), UnknownSubscriptionError("x"))
    refused = (LockedError("x"), DiskFullError("x"), SubscriptionActiveError("x"), LeaseLostError("x"))
    assert {exit_code_of(error) for error in bad_input} == {2}
    assert {exit_code_of(error) for error in refused} == {3}


# --- errors under --json ----------------------------------------------------------------------------------------------


def error_of(result: Any) -> dict[str, Any]:
    assert result.out == ""
    reported = json.loads(result.err.splitlines()[-1])
    assert list(reported) == ["error"]
    error: dict[str, Any] = reported["error"]
    assert list(error) == ["kind", "why", "where", "next", "exit"]
    assert error["exit"] == result.code
    return error


@pytest.mark.parametrize(
    ("arguments", "kind"),
    [
        (["sync", "a.db", "b.db", "--json", "--xyzzy"], "UsageError"),
        (["sync", "--json", "a.db"], "UsageError"),
        (["sync", "a.db", "http://h/n/a", "--json"], "InvalidOptionError"),
        (["sync", "no/such.db", "copy.db", "--json"], "InvalidOptionError"),
        (["stats", "no/such.db", "--json"], "InvalidOptionError"),
        (["subscriptions", "ls", "no/such.db", "--json"], "InvalidOptionError"),
        (["publish", "--json", "memory:", "a", "1"], "InvalidOptionError"),
    ],
)
def test_an_error_is_one_object_that_says_its_kind(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], kind: str
) -> None:
    monkeypatch.chdir(tmp_path)
    result = run(*arguments)
    error = error_of(result)
    assert error["kind"] == kind
    assert len(result.err.splitlines()) == 1
    assert error["why"]


def test_what_is_behind_two_dashes_is_no_flag(run: Any) -> None:
    assert run("stats", "--", "--json").err.startswith("error: ")


def test_an_unexpected_error_is_reported_as_json_too(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headwater.replication.names.place_of", lambda text: 1 / 0)
    error = error_of(run("sync", "a.db", "b.db", "--json"))
    assert (error["kind"], error["exit"]) == ("ZeroDivisionError", 3)


def test_a_path_that_is_no_text_is_reported_all_the_same(run: Any, tmp_path: Path) -> None:
    error = error_of(run("stats", f"{tmp_path}/\udcff\x1b.db", "--json"))
    assert "\\udcff" in error["why"] + error["where"]


def test_refusals_of_a_server_share_an_exit_code_but_not_a_kind(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    app, other, copy = (tmp_path / name for name in ("app.db", "other.db", "copy.db"))
    for path in (app, other, copy):
        with closing(sqlite3.connect(path)) as connection:
            connection.execute(f"CREATE TABLE {path.stem} (a)")
    (tmp_path / "server").mkdir()
    server = RunningServer(tmp_path / "server" / "log.db")
    remote = f"{server.url}/shop/app.db"
    try:
        assert run("sync", app, remote).code == 0
        conflict = error_of(run("sync", other, remote, "--json"))
        unsynced = error_of(run("sync", remote, copy, "--json"))
        assert run("replica", "key", "create", tmp_path / "server/log.db-replicas", "shop/app.db", "--push").code == 0
        monkeypatch.setenv("HEADWATER_PUSH_KEY", "hwpush_wrong")
        unauthorized = error_of(run("sync", app, remote, "--json"))
    finally:
        server.stop()
    away = error_of(run("sync", app, remote, "--json"))
    reported = [conflict, unsynced, unauthorized, away]
    assert [error["kind"] for error in reported] == [
        "VersionConflictError",
        "UnsyncedChangesError",
        "UnauthorizedError",
        "UnreachableError",
    ]
    assert {error["exit"] for error in reported} == {3}
    assert conflict["where"] == remote
    assert conflict["next"].endswith(f"{remote}@latest")
    assert "hwpush_wrong" not in str(reported)


def test_it_is_json_also_where_no_umlaut_can_be_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    printed = io.BytesIO()
    with io.TextIOWrapper(printed, "ascii", errors="backslashreplace", write_through=True) as stderr:
        monkeypatch.setattr(sys, "stderr", stderr)
        show_error("InvalidOptionError", "no log /tmp/\u00fc\udcff.db", "", "", 2, as_json=True)
        monkeypatch.undo()
        error = json.loads(printed.getvalue())["error"]
        assert (error["why"], error["exit"]) == ("no log /tmp/\u00fc\\udcff.db", 2)
