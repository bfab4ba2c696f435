"""A disk that is full: readers are served, writers get the reason, and all goes on when there is space."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from attacked import PATIENCE_S, Attacked, call
from small_disk import fill, small_file_system
from test_scrapes import get

WRITER = {"publish": ["a"], "read": ["a"], "consume": ["*"]}


def test_a_server_on_a_full_disk(tmp_path: Path) -> None:
    with small_file_system(tmp_path / "disk", "16m") as disk, Attacked(tmp_path, log=str(disk / "log.db")) as server:
        admin, writer = server.token("admin", manage=[">"], admin=True), server.token("writer", **WRITER)
        with server.connect(writer) as client:
            for number in range(20):
                call(client, "rpc.publish", {"topic": "a", "data": number}, number)
        assert get(server, "/readyz")[0] == 200
        fillers = [fill(disk, "first")]
        refused_and_readable(server, admin, writer, 20)

        server.stop()
        fillers.append(fill(disk, "second"))  # what the end of the server set free
        server.start()
        refused_and_readable(server, admin, writer, 20)

        server.kill()
        fillers.append(fill(disk, "third"))
        server.start()
        refused_and_readable(server, admin, writer, 20)

        for filler in fillers:
            filler.unlink()
        ready(server)
        with server.connect(writer) as client:
            assert call(client, "rpc.publish", {"topic": "a", "data": 1})["result"]
        with server.victim() as victim:
            pass
        server.assert_unharmed(victim, attack="a disk that was full")


def refused_and_readable(server: Attacked, admin: str, writer: str, messages: int) -> None:
    status, body = get(server, "/readyz")
    until = time.monotonic() + 10
    while status == 200 and time.monotonic() < until:  # an answer from before the disk was full
        status, body = get(server, "/readyz")
    assert (status, b"disk is full" in body) == (503, True)
    with server.connect(writer) as client:
        text = "x" * 100_000  # more than what the journal had room for already
        answer = call(client, "rpc.publish", {"topic": "a", "data": text})
        assert answer["error"]["data"]["kind"] == "DiskFullError", answer
    with server.connect(admin) as client:
        assert call(client, "rpc.last_seq")["result"] == {"sequence_id": messages}
        assert [topic[1] for topic in call(client, "rpc.topics", id=2)["result"]] == [messages]
    assert get(server, "/metrics", admin)[0] == 200


def ready(server: Attacked) -> None:
    until = time.monotonic() + 10
    while get(server, "/readyz")[0] != 200:
        assert time.monotonic() < until, "it is not ready though there is room"


def test_commands_read_what_a_server_left_on_a_full_disk(tmp_path: Path) -> None:
    with small_file_system(tmp_path / "disk", "16m") as disk:
        log = str(disk / "log.db")
        with Attacked(tmp_path, log=log) as server:
            with server.connect(server.token(**WRITER)) as client:
                call(client, "rpc.publish", {"topic": "a", "data": 1})
            server.stop()
        fill(disk)
        for command in (["topics", log], ["lag", log], ["tail", log, "a", "--last", "1"]):
            done = subprocess.run(
                [sys.executable, "-m", "headwater", *command], capture_output=True, text=True, timeout=PATIENCE_S
            )
            assert done.returncode == 0, done.stderr
