"""Clients without a token: 64 KiB and ten seconds, in frames, heads, bodies and TLS handshakes alike."""

from __future__ import annotations

import contextlib
import socket
import ssl
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import trustme
from attacked import Attacked, call
from websockets.frames import Frame, Opcode

HEAD = (
    b"GET /rpc HTTP/1.1\r\nHost: 127.0.0.1\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
)
UNFINISHED = Frame(Opcode.TEXT, b"x" * (4 * 1024 * 1024 - 100)).serialize(mask=True)[:-1]
STRANGERS = 60


@contextlib.contextmanager
def dialled(server: Attacked, count: int) -> Iterator[list[socket.socket]]:
    with contextlib.ExitStack() as open_ones:
        yield [open_ones.enter_context(server.socket()) for _ in range(count)]


def is_ended(raw: socket.socket, seconds: float) -> bool:
    raw.settimeout(seconds)
    with contextlib.suppress(ConnectionError):
        while raw.recv(10_000):
            pass
    return True


def test_unfinished_frames(tmp_path: Path) -> None:
    with Attacked(tmp_path) as server, dialled(server, STRANGERS) as strangers:
        with server.victim() as victim:
            before_mb = server.rss_mb()
            for stranger in strangers:
                stranger.sendall(HEAD)
                assert b"101" in stranger.recv(1_000)
                with contextlib.suppress(ConnectionError, TimeoutError):
                    stranger.settimeout(0.5)
                    stranger.sendall(UNFINISHED)
        assert all(is_ended(stranger, 10) for stranger in strangers)
        server.assert_unharmed(victim, attack=f"{STRANGERS} strangers with unfinished frames")
        assert server.peak_mb() - before_mb < 40


@pytest.mark.parametrize(
    "begun",
    [
        b"",
        b"GET / HTTP/1.1\r\nX-Slow: ",
        b"POST /x HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 60000\r\n\r\nslowly",
        HEAD,
    ],
    ids=["nothing", "half a head", "half a body", "an upgrade and then nothing"],
)
def test_slow_strangers_are_let_go(tmp_path: Path, begun: bytes) -> None:
    with Attacked(tmp_path, limits_authenticate_timeout=1.0) as server, dialled(server, 20) as strangers:
        with server.victim() as victim:
            began_s = time.monotonic()
            for stranger in strangers:
                stranger.sendall(begun)
            assert all(is_ended(stranger, 20) for stranger in strangers)
            assert time.monotonic() - began_s < 12
        server.assert_unharmed(victim, attack="slow strangers")


def test_a_long_body_is_not_read_from_a_stranger(tmp_path: Path) -> None:
    with Attacked(tmp_path) as server, dialled(server, STRANGERS) as strangers:
        with server.victim() as victim:
            before_mb = server.rss_mb()
            for stranger in strangers:
                stranger.sendall(b"POST /x HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 1000000\r\n\r\n")
                stranger.settimeout(0.5)
                with contextlib.suppress(ConnectionError, TimeoutError):
                    stranger.sendall(b"x" * 999_999)
        assert all(is_ended(stranger, 10) for stranger in strangers)
        server.assert_unharmed(victim, attack=f"{STRANGERS} strangers with long bodies")
        assert server.peak_mb() - before_mb < 40


def test_strangers_give_way_to_new_ones(tmp_path: Path) -> None:
    with Attacked(tmp_path, limits_unauthenticated=10) as server, dialled(server, 30) as strangers:
        with server.victim() as victim:
            assert all(is_ended(stranger, 10) for stranger in strangers[:20])
            with server.connect(server.token(publish=["x"])) as known:
                assert call(known, "rpc.publish", {"topic": "x", "data": 1})["result"]
        server.assert_unharmed(victim, attack="more strangers than there may be")


def test_handshakes_that_never_end(tmp_path: Path) -> None:
    authority = trustme.CA()
    certificate, key = tmp_path / "server.pem", tmp_path / "server.key"
    issued = authority.issue_cert("127.0.0.1", "localhost")
    issued.cert_chain_pems[0].write_to_path(certificate)
    issued.private_key_pem.write_to_path(key)
    options = {"tls_certificate": str(certificate), "tls_key": str(key)}
    with Attacked(tmp_path, limits_authenticate_timeout=1.0, limits_unauthenticated=50, **options) as server:
        context = ssl.create_default_context()
        authority.configure_trust(context)
        with dialled(server, 100) as strangers:
            for stranger in strangers[:50]:
                with contextlib.suppress(ConnectionError):
                    stranger.send(b"\x16\x03\x01")
            with context.wrap_socket(server.socket(), server_hostname="localhost") as known:
                known.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
                assert b"200" in known.recv(1_000)
            assert all(is_ended(stranger, 10) for stranger in strangers)
        assert server.stop() < 10
