"""`headwater replica` of a replica behind a server."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import apsw
import pytest
from served import RunningServer

from headwater.cli import replica_remote
from headwater.replication import connection as client_connection
from headwater.replication.host import catalogue, endpoint


@pytest.fixture
def remote(run: Any, tmp_path: Path) -> Iterator[str]:
    """Two versions of a small database."""
    (tmp_path / "server").mkdir()
    server = RunningServer(tmp_path / "server" / "log.db")
    app, url = tmp_path / "app.db", f"{server.url}/shop/app.db"
    for number in (1, 2):
        with closing(apsw.Connection(str(app))) as connection:
            connection.execute(f"CREATE TABLE made_{number} (x)")
        run("sync", app, url, "-m", f"version {number}")
    yield url
    server.stop()


def test_log_restore_and_verify(run: Any, remote: str, tmp_path: Path) -> None:
    assert [(each["version"], each["message"]) for each in run("replica", "log", remote, "--json").items] == [
        (2, "version 2"),
        (1, "version 1"),
    ]
    assert "version 1" in run("replica", "log", remote, "--before", 2).out
    assert "not @1" in run("replica", "log", f"{remote}@1").err
    target = tmp_path / "restored.db"
    assert run("replica", "restore", f"{remote}@1", target).out.startswith("restored version 1 of ")
    assert run("replica", "restore", remote, target).code == 2  # it is there already
    assert run("replica", "restore", remote, target, "--overwrite").code == 0
    proved = run("replica", "verify", f"{remote}@latest-1")
    assert proved.code == 0
    assert "shop/app.db@1  ok" in proved.out
    assert "hashes equal to the pushed database" in proved.out


def test_restore_at_a_time(run: Any, remote: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalogue, "VERSIONS_PAGE", 1)
    first = run("replica", "log", remote, "--before", 2, "--json").items[0]["at"]
    for number, at in ((1, first), (2, "now")):
        result = run("replica", "restore", remote, tmp_path / f"{number}.db", "--at", at)
        assert result.out.startswith(f"restored version {number} of ")
    for url, at in ((f"{remote}@1", "now"), (remote, "-1h")):
        assert run("replica", "restore", url, tmp_path / "none.db", "--at", at).code == 2
    assert not (tmp_path / "none.db").exists()


def test_ls(run: Any, remote: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server, data = remote.removesuffix("/shop/app.db"), tmp_path / "server" / "log.db-replicas"
    key = run("replica", "key", "create", data, "shop/closed.db", "--pull").out.strip()
    for place in (server, f"{server}/", f"{server}/shop"):
        shown = run("replica", "ls", place)
        assert shown.code == 0
        assert [line.split()[:2] for line in shown.out.splitlines()[1:]] == [["shop/app.db", "2"]]
        assert shown.err == ""
    none = run("replica", f"{server}/none")
    assert (none.out, "--key" in none.err) == ("no replicas\n", True)
    keyed = run("replica", "ls", server, "--key", key)
    assert ("shop/closed.db" in keyed.out, "shop/app.db" in keyed.out, keyed.err) == (True, False, "")
    [local, _] = run("replica", "ls", data, "--json").items
    [afar] = run("replica", "ls", server, "--json").items
    for name in ("stored_bytes", "sha256"):
        del local["newest"][name]
    assert afar == local
    monkeypatch.setattr(endpoint, "LISTED_MAX", 0)
    assert "there are more than these 0 replicas" in run("replica", "ls", server).err
    assert run("replica", "ls", f"{server}/none", "--key", "wrong").code == 3
    wrong = run("replica", "ls", server, "--key", key[:-1] + ("0" if key[-1] == "1" else "1"))
    assert (wrong.code, "opens no replica here" in wrong.err) == (3, True)
    assert wrong.err.startswith(f"error: {server}: ")  # as it was named, and not the path of the request
    for place in (remote, f"{server}/a/b/c", f"{server}/shop@3", f"{server}/sh.op", f"{server}?x=1"):
        assert run("replica", "ls", place).code == 2, place


def test_ls_goes_on_until_it_has_all(run: Any, remote: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server, data = remote.removesuffix("/shop/app.db"), tmp_path / "server" / "log.db-replicas"
    for name in ("a/b.db", "shop/z.db"):
        run("sync", tmp_path / "app.db", f"{server}/{name}")
    assert [each["replica"] for each in run("replica", "ls", data, "--json").items] == [
        "a/b.db",
        "shop/app.db",
        "shop/z.db",
    ]
    monkeypatch.setattr(endpoint, "LISTED_MAX", 1)
    for place, names in (
        (server, ["a/b.db", "shop/app.db", "shop/z.db"]),
        (f"{server}/shop", ["shop/app.db", "shop/z.db"]),
    ):
        found = run("replica", "ls", place, "--json")
        assert ([each["replica"] for each in found.items], "there are more" in found.err) == (names, False)
    assert run("replica", "ls", server, "--stale", "5200w").code == 0
    assert len(run("replica", "ls", server, "--stale", "0s", "--json").items) == 3
    monkeypatch.setattr(replica_remote, "REMOTE_LISTED_MAX", 2)
    assert "there are more than these 2 replicas" in run("replica", "ls", server).err
    ask = client_connection.http_request
    monkeypatch.setattr(
        replica_remote, "http_request", lambda url, **more: ask(url.partition("?")[0], **more)
    )  # it cannot go on
    assert "there are more than these 1 replica;" in run("replica", "ls", server).err


def test_restore_before_a_program_starts(run: Any, remote: str, tmp_path: Path) -> None:
    target, flags = tmp_path / "restored.db", ["--if-missing", "--if-replica-exists"]
    none = run("replica", "restore", remote.replace("shop", "nowhere"), target, *flags)
    assert (none.code, none.out.endswith("nowhere/app.db yet: nothing to restore\n"), target.exists()) == (
        0,
        True,
        False,
    )
    assert run("replica", "restore", f"{remote}@9", target, *flags).code == 2
    assert run("replica", "restore", f"{remote}@1", target, *flags).code == 0
    before = target.read_bytes()
    again = run("replica", "restore", remote, target, *flags)
    assert (again.code, again.out, target.read_bytes()) == (0, f"{target} is there: nothing to restore\n", before)
    away = run("replica", "restore", "ws://127.0.0.1:1/shop/app.db", tmp_path / "other.db", *flags)
    assert away.code == 3  # which says nothing about what is there


def test_versions_beyond_the_first_page_are_there_too(run: Any, remote: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalogue, "VERSIONS_PAGE", 1)
    assert [each["version"] for each in run("replica", "log", remote, "--before", 2, "--json").items] == [1]
    assert run("replica", "log", remote, "--before", 1, "--json").items == []
    assert "shop/app.db@1  ok" in run("replica", "verify", f"{remote}@1").out
    assert "shop/app.db@1  ok" in run("replica", "verify", f"{remote}@latest-1").out
    assert run("replica", "verify", f"{remote}@3").code == 2


def test_a_replica_that_is_not_there(run: Any, remote: str) -> None:
    for command in ("log", "verify"):
        missing = run("replica", command, remote.replace("shop", "nowhere"))
        assert missing.code == 2
        assert "no such replica" in missing.err
    assert run("replica", "verify", f"{remote}@7").code == 2


def test_a_closed_replica_wants_a_key(run: Any, remote: str, tmp_path: Path) -> None:
    data = tmp_path / "server" / "log.db-replicas"
    key = run("replica", "key", "create", data, "shop/app.db", "--pull").out.strip()
    assert run("replica", "log", remote).code == 3
    assert run("replica", "log", remote, "--key", key).code == 0
    assert run("replica", "verify", remote, "--key", key).code == 0


def test_reports(run: Any, remote: str, tmp_path: Path) -> None:
    from headwater.replication.connection import http_request, http_url
    from headwater.replication.names import Remote, place_of

    data, place = tmp_path / "server" / "log.db-replicas", place_of(remote)
    assert isinstance(place, Remote)
    assert run("replica", "reports", data, "shop/app.db").out == "no reports\n"
    http_request(http_url(place), key=None, ca=None, body=b'{"kind": "partial", "error": "cut off", "since": 1.5}')
    assert "cut off" in run("replica", "reports", data, "shop/app.db").out
    [reported] = run("replica", "reports", data, "shop/app.db", "--json").items
    assert reported["report"] == {"kind": "partial", "error": "cut off", "since": 1.5}


@pytest.mark.parametrize("words", [("ls", "ws://host"), ("log", "ws://host/shop/app.db")])
def test_an_answer_without_bottom_is_reported(
    run: Any, words: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    head = b'{"x":' if words[0] == "ls" else b'[{"x":'
    monkeypatch.setattr(replica_remote, "http_request", lambda url, **_: head + b"[" * 200_000)
    asked = run("replica", *words, "--json")
    assert (asked.code, "cannot be read" in asked.err, "unexpected" in asked.err) == (2, True, False)
