"""Connections that are opened and not used: they take neither processor, nor disk, nor a victim's place."""

from __future__ import annotations

import contextlib
import resource
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from attacked import Attacked, call

CONNECTS = 1_100


@contextlib.contextmanager
def bare_connects(server: Attacked, count: int) -> Iterator[list[socket.socket]]:
    """As many as the server takes, which say nothing."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 2 * count)), hard))
    with contextlib.ExitStack() as open_ones:
        sockets = []
        for _ in range(count):
            bare = socket.socket()
            bare.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                bare.connect(("127.0.0.1", server.port))
            sockets.append(open_ones.enter_context(bare))
        yield sockets


def processor_s(server: Attacked) -> float:
    fields = Path(f"/proc/{server.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100


def newcomers_are_served(server: Attacked, seconds: float) -> int:
    """Clients that come meanwhile, authenticate and publish, one after the other."""
    token, served, until_s = server.token("newcomer", publish=["new"]), 0, time.monotonic() + seconds
    while time.monotonic() < until_s:
        with server.connect(token) as newcomer:
            assert call(newcomer, "rpc.publish", {"topic": "new", "data": 1})["result"]
        served += 1
    return served


@pytest.mark.parametrize("files", [None, 400], ids=["few files to begin with", "few files"])
def test_bare_connects(tmp_path: Path, files: int | None) -> None:
    """`files`: as many as the process may have at most, which it learns too late."""
    with Attacked(tmp_path, descriptors=1_024) as server:
        if files is not None:
            resource.prlimit(server.pid, resource.RLIMIT_NOFILE, (files, files))
        with server.victim() as victim, bare_connects(server, CONNECTS):
            began_s, logged_bytes = processor_s(server), server._errors.stat().st_size
            if files is None:
                assert newcomers_are_served(server, 2.0) > 5
            else:
                time.sleep(2.0)  # of the attack; there is nothing to wait for
            spent_s = processor_s(server) - began_s
            assert server._errors.stat().st_size - logged_bytes < 5_000
        server.assert_unharmed(victim, attack=f"{CONNECTS} bare connects{'' if files is None else ', no files left'}")
        assert spent_s < 1.8
        assert server.stop() < 10


def test_connections_have_a_limit_below_that_of_open_files(tmp_path: Path) -> None:
    """The hard limit cannot be raised: then there are fewer connections, and files for the rest."""
    with Attacked(tmp_path, descriptors=300) as server:
        soft, _ = resource.prlimit(server.pid, resource.RLIMIT_NOFILE)
        assert soft > 300, "it is raised as far as it is needed"


def test_one_address_cannot_take_all_places(tmp_path: Path) -> None:
    with Attacked(tmp_path, limits_connections=100, limits_connections_per_address=20) as server:
        token = server.token(publish=["mine"])
        with contextlib.ExitStack() as open_ones:
            for _ in range(20):
                open_ones.enter_context(server.connect(token))
            with server.socket() as refused:
                assert refused.recv(1_000).startswith(b"HTTP/1.1 503 ")
            elsewhere = socket.create_connection(("127.0.0.1", server.port), 10, ("127.0.0.2", 0))
            with server.connect(token, sock=elsewhere) as other:
                assert call(other, "rpc.publish", {"topic": "mine", "data": 1})["result"]
