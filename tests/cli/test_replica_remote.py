"""`headwater replica` of a replica behind a server."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import apsw
import pytest
from served import RunningServer


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
    assert [(each["version"], each["message"]) for each in run("replica", "log", remote, "--json").json] == [
        (2, "version 2"),
        (1, "version 1"),
    ]
    assert "version 1" in run("replica", "log", remote, "--before", 2).out
    target = tmp_path / "restored.db"
    assert run("replica", "restore", f"{remote}@1", target).out.startswith("restored version 1 of ")
    assert run("replica", "restore", remote, target).code == 2  # it is there already
    assert run("replica", "restore", remote, target, "--overwrite").code == 0
    proved = run("replica", "verify", f"{remote}@latest-1")
    assert proved.code == 0
    assert "shop/app.db@1  ok" in proved.out
    assert "hashes equal to the pushed database" in proved.out


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
    from headwater.replication.asking import ask, report_url
    from headwater.replication.names import Remote, place_of

    data, place = tmp_path / "server" / "log.db-replicas", place_of(remote)
    assert isinstance(place, Remote)
    assert run("replica", "reports", data, "shop/app.db").out == "no reports\n"
    ask(report_url(place), key=None, ca=None, body=b'{"kind": "partial", "error": "cut off", "since": 1.5}')
    assert "cut off" in run("replica", "reports", data, "shop/app.db").out
    [told] = run("replica", "reports", data, "shop/app.db", "--json").json
    assert told["report"] == {"kind": "partial", "error": "cut off", "since": 1.5}
