"""With --json a program reads errors, too: one line of JSON, the last on stderr; and they are told apart by `kind`."""

import io
import json
import sqlite3
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from served import RunningServer

from headwater.cli.output import write_error


def error_of(result: Any) -> dict[str, Any]:
    assert result.out == ""
    told = json.loads(result.err.splitlines()[-1])
    assert list(told) == ["error"]
    error: dict[str, Any] = told["error"]
    assert list(error) == ["kind", "why", "where", "next", "exit"]
    assert error["exit"] == result.code
    return error


@pytest.mark.parametrize(
    ("arguments", "kind"),
    [
        (["sync", "a.db", "b.db", "--json", "--xyzzy"], "UsageError"),
        (["sync", "--json", "a.db"], "UsageError"),
        (["sync", "a.db", "http://h/n/a", "--json"], "InvalidOption"),
        (["sync", "no/such.db", "copy.db", "--json"], "InvalidOption"),
        (["stats", "no/such.db", "--json"], "InvalidOption"),
        (["subscriptions", "ls", "no/such.db", "--json"], "InvalidOption"),
        (["publish", "--json", "memory:", "a", "1"], "InvalidOption"),
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


def test_an_error_of_nobody_is_told_as_json_too(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headwater.cli.sync.place_of", lambda text: 1 / 0)
    error = error_of(run("sync", "a.db", "b.db", "--json"))
    assert (error["kind"], error["exit"]) == ("ZeroDivisionError", 3)


def test_a_path_that_is_no_text_is_told_all_the_same(run: Any, tmp_path: Path) -> None:
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
    told = [conflict, unsynced, unauthorized, away]
    assert [error["kind"] for error in told] == ["VersionConflict", "UnsyncedChanges", "Unauthorized", "Unreachable"]
    assert {error["exit"] for error in told} == {3}
    assert conflict["where"] == remote
    assert conflict["next"].endswith(f"{remote}@latest")
    assert "hwpush_wrong" not in str(told)


def test_it_is_json_also_where_no_umlaut_can_be_said(monkeypatch: pytest.MonkeyPatch) -> None:
    said = io.BytesIO()
    with io.TextIOWrapper(said, "ascii", errors="backslashreplace", write_through=True) as stderr:
        monkeypatch.setattr(sys, "stderr", stderr)
        write_error({"why": "no log /tmp/\u00fc\udcff.db", "exit": 2})
        monkeypatch.undo()
        assert json.loads(said.getvalue())["error"] == {"why": "no log /tmp/\u00fc\\udcff.db", "exit": 2}
