"""The same over TLS."""

from __future__ import annotations

import asyncio
import signal
import ssl
from pathlib import Path
from typing import Any

import pytest
import trustme
from foreign_client import PATIENCE_S, Serve, connect, turn
from raw_http import dial
from server_process import ServerProcess

import headwater
from headwater.errors import InvalidConfigurationError, UnreachableError
from headwater.server.auth import Scopes, TokenFile
from headwater.server.server import Server


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def serve_tls(serve: Serve, tmp_path: Path, authority: trustme.CA) -> Serve:
    certificate = authority.issue_cert("127.0.0.1", "localhost")
    certificate.private_key_pem.write_to_path(tmp_path / "key.pem")
    with (tmp_path / "certificate.pem").open("wb") as file:
        for blob in certificate.cert_chain_pems:
            file.write(blob.bytes())
    return lambda *log, **flags: serve(*log, tls_certificate="certificate.pem", tls_key="key.pem", **flags)


def trusting(authority: trustme.CA) -> ssl.SSLContext:
    context = ssl.create_default_context()
    authority.configure_trust(context)
    return context


async def test_everything_works_over_tls(serve_tls: Serve, authority: trustme.CA) -> None:
    async with serve_tls() as server:
        assert server.url.startswith("wss://")
        async with connect(server, ssl=trusting(authority)) as client:
            await client.publish_many("a", 100)
            await client.publish("a", "x" * 1_000_000)
            await client.subscribe("s", "a")
            assert await client.delivered_seqs(101) == list(range(1, 102))
            await client.ack("s", *range(1, 102))


async def test_http_too(serve_tls: Serve, authority: trustme.CA) -> None:
    async with serve_tls("memory:") as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port, ssl=trusting(authority))
        writer.write(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        assert (await reader.read()).startswith(b"HTTP/1.1 200 ")
        writer.close()
        await writer.wait_closed()


async def test_a_client_that_does_not_trust_the_authority_does_not_connect(serve_tls: Serve) -> None:
    async with serve_tls("memory:") as server:
        with pytest.raises(ssl.SSLCertVerificationError):
            async with connect(server, ssl=ssl.create_default_context()):
                pass
        assert not server.connections


async def test_old_protocols_are_refused(serve_tls: Serve, authority: trustme.CA) -> None:
    context = trusting(authority)
    context.set_ciphers("ALL:@SECLEVEL=0")
    with pytest.warns(DeprecationWarning, match="TLSv1"):
        context.minimum_version = ssl.TLSVersion.TLSv1
    with pytest.warns(DeprecationWarning, match="TLSv1_1"):
        context.maximum_version = ssl.TLSVersion.TLSv1_1
    async with serve_tls("memory:") as server:
        with pytest.raises((ssl.SSLError, ConnectionError)):
            async with connect(server, ssl=context):
                pass
        context.maximum_version = ssl.TLSVersion.TLSv1_2  # and nothing else was wrong with it
        async with connect(server, ssl=context) as client:
            assert await client.publish("a") == 1


async def test_plain_text_to_a_tls_port_gets_nowhere(serve_tls: Serve, authority: trustme.CA) -> None:
    async with serve_tls("memory:") as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
        async with asyncio.timeout(PATIENCE_S):
            assert b"200" not in await reader.read()
        writer.close()
        async with connect(server, ssl=trusting(authority)) as client:
            assert await client.publish("a") == 1


async def test_tls_to_a_plain_port_is_reported_at_once(serve: Serve) -> None:
    async with serve("memory:") as server:
        with pytest.raises(ssl.SSLError):
            async with connect(f"wss://127.0.0.1:{server.port}", ssl=ssl.create_default_context()):
                pass
        for first in (b"\x16", b"\x80", b"\x00", b" "):  # no request begins like this, whatever may follow
            async with dial(server) as raw:
                raw.send(first)
                assert (await raw.response()).status == 400
                assert await raw.ended() == b""
        async with dial(server) as raw:
            assert (await raw.get("/nothing", method="~own")).status == 404


async def test_a_slow_consumer_is_bounded_over_tls_as_well(serve_tls: Serve, authority: trustme.CA) -> None:
    outbound, large = 256 * 1024, "x" * 100_000
    tls = {"ssl": trusting(authority)}
    async with serve_tls(limits_outbound_bytes=outbound) as server, connect(server, **tls) as slow:
        [connection] = server.connections
        await slow.subscribe("s", "a")
        slow.stop_reading()
        async with connect(server, **tls) as quick:
            for _ in range(200):
                await quick.publish("a", large)
            async with asyncio.timeout(PATIENCE_S):
                while not connection.is_full and not connection._room_waiters:
                    await turn()
            assert connection._transport.buffered_bytes() <= outbound + 10 * len(large)
        slow.read_again()
        assert await slow.delivered_seqs(200) == list(range(1, 201))


async def test_a_connection_that_is_being_closed_can_be_flushed(serve_tls: Serve, authority: trustme.CA) -> None:
    """A second `close` would take its TLS from asyncio's transport, and the size of its buffer would be an error."""
    async with serve_tls("memory:") as server, connect(server, ssl=trusting(authority)):
        [connection] = server.connections
        transport = connection._transport
        connection.close(1000, "the end")
        async with asyncio.timeout(PATIENCE_S):
            while not transport._transport.is_closing():
                await turn()
        transport.eof_received()
        assert transport.buffered_bytes() >= 0


async def test_http_that_is_being_closed_is_closed_once(serve_tls: Serve, authority: trustme.CA) -> None:
    """Over TLS more may arrive then, which is no request; closed a second time, the connection could not be aborted."""
    async with serve_tls("memory:") as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port, ssl=trusting(authority))
        writer.write(b"GET /healthz HTTP/1.1\r\n\r\n")  # without a Host
        async with asyncio.timeout(PATIENCE_S):
            assert (await reader.readline()).startswith(b"HTTP/1.1 400 ")
            [incoming] = server.acceptor.connections
            assert incoming.transport.is_closing()
            incoming.transport.get_protocol().data_received(b"more\r\n\r\n")
            assert incoming.transport.get_write_buffer_size() >= 0
        writer.close()


async def test_beyond_the_limit_no_connection_slips_in_over_tls(serve_tls: Serve, authority: trustme.CA) -> None:
    """A refusal would cost a handshake, so there is none."""
    async with serve_tls("memory:", limits_connections=1) as server, connect(server, ssl=trusting(authority)):
        with pytest.raises(ConnectionError):
            await asyncio.open_connection("127.0.0.1", server.port, ssl=trusting(authority))
        assert len(server.connections) == 1


async def test_a_certificate_that_cannot_be_used_is_reported_at_the_start(serve: Serve, tmp_path: Path) -> None:
    (tmp_path / "broken.pem").write_text("nonsense")
    for certificate in ("broken.pem", "missing.pem"):
        with pytest.raises(InvalidConfigurationError, match="certificate"):
            await serve("memory:", tls_certificate=certificate).start()


def write_certificate(directory: Path, authority: trustme.CA, *names: str) -> None:
    """In place, key after certificate, as many tools do it."""
    certificate = authority.issue_cert(*names)
    (directory / "certificate.pem").write_bytes(b"".join(blob.bytes() for blob in certificate.cert_chain_pems))
    certificate.private_key_pem.write_to_path(directory / "key.pem")


async def shown_name(server: Server, authority: trustme.CA) -> str:
    context = trusting(authority)
    context.check_hostname = False
    _, writer = await asyncio.open_connection("127.0.0.1", server.port, ssl=context)
    names = writer.get_extra_info("peercert")["subjectAltName"]
    writer.close()
    return str(names[0][1])


async def test_a_renewed_certificate_is_shown_to_the_next_client(
    serve_tls: Serve, authority: trustme.CA, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with serve_tls("memory:") as server, connect(server, ssl=trusting(authority)) as before:
        write_certificate(tmp_path, authority, "renewed.example")
        server.reload()
        assert await shown_name(server, authority) == "renewed.example"
        (tmp_path / "key.pem").write_text("half of a key")
        server.reload()
        assert "the certificate read before stays in use" in caplog.text
        assert await shown_name(server, authority) == "renewed.example"
        write_certificate(tmp_path, authority, "again.example")
        server.reload()
        assert await shown_name(server, authority) == "again.example"
        assert await before.publish("a") == 1


async def test_a_renewed_certificate_is_found_without_a_signal(
    serve_tls: Serve, authority: trustme.CA, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headwater.server.server.SWEEP_S", 0.01)
    async with serve_tls("memory:") as server, asyncio.timeout(PATIENCE_S):
        write_certificate(tmp_path, authority, "renewed.example")
        while await shown_name(server, authority) != "renewed.example":
            await turn()


async def test_a_client_without_a_certificate_is_refused_where_one_is_wanted(
    serve_tls: Serve, authority: trustme.CA, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    authority.issue_cert("client").private_key_and_cert_chain_pem.write_to_path(tmp_path / "client.pem")
    trustme.CA().issue_cert("client").private_key_and_cert_chain_pem.write_to_path(tmp_path / "stranger.pem")
    async with serve_tls(tls_client_ca="ca.pem") as server:
        options: dict[str, Any] = {"ca": tmp_path / "ca.pem", "connect_timeout": 1}
        with pytest.raises(
            UnreachableError, match=r"hung up right after the TLS handshake\. If it asks for a certificate"
        ):
            async with headwater.open_async(server.url, **options):
                pass
        with pytest.raises(UnreachableError):
            async with headwater.open_async(server.url, certificate=tmp_path / "stranger.pem", **options):
                pass
        async with headwater.open_async(server.url, certificate=tmp_path / "client.pem", **options) as log:
            assert await log.publish("a", 1) == 1
        monkeypatch.setenv("HEADWATER_CERTIFICATE", str(tmp_path / "client.pem"))
        async with headwater.open_async(server.url, **options) as log:
            assert await log.publish("a", 1) == 2


async def test_authorities_of_clients_are_read_again_too(
    serve_tls: Serve, authority: trustme.CA, tmp_path: Path
) -> None:
    authority.cert_pem.write_to_path(tmp_path / "server-ca.pem")
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    authority.issue_cert("client").private_key_and_cert_chain_pem.write_to_path(tmp_path / "client.pem")
    options: dict[str, Any] = {"ca": tmp_path / "server-ca.pem", "certificate": tmp_path / "client.pem"}
    async with serve_tls(tls_client_ca="ca.pem") as server:
        async with headwater.open_async(server.url, **options) as log:
            assert await log.publish("a", 1) == 1
        trustme.CA().cert_pem.write_to_path(tmp_path / "ca.pem")
        server.reload()
        with pytest.raises(UnreachableError):
            async with headwater.open_async(server.url, connect_timeout=1, **options):
                pass


async def test_authorities_that_cannot_be_read_are_reported_at_the_start(serve_tls: Serve) -> None:
    with pytest.raises(InvalidConfigurationError, match="authorities cannot be read"):
        await serve_tls("memory:", tls_client_ca="missing.pem").start()


@pytest.mark.parametrize(
    ("host", "is_warned"), [("0.0.0.0", True), ("127.0.0.1", False)]
)  # addresses of this machine alone need no warning
async def test_tokens_in_clear_text_are_warned_about(
    serve: Serve, tmp_path: Path, caplog: pytest.LogCaptureFixture, host: str, is_warned: bool
) -> None:
    TokenFile(tmp_path / "tokens.json").create("a", Scopes(publish=("a",)), now_ms=1)
    async with serve("memory:", host=host, tokens=str(tmp_path / "tokens.json")):
        assert ("tokens are sent in clear text" in caplog.text) is is_warned


async def test_sighup_reads_the_certificate_again(authority: trustme.CA, tmp_path: Path) -> None:
    write_certificate(tmp_path, authority, "first.example")
    settings = {"tls_certificate": str(tmp_path / "certificate.pem"), "tls_key": str(tmp_path / "key.pem")}
    server = ServerProcess(tmp_path / "log.db", **settings)
    with server:
        write_certificate(tmp_path, authority, "second.example")
        assert server._process is not None
        server._process.send_signal(signal.SIGHUP)
        async with asyncio.timeout(PATIENCE_S):
            while await shown_name(server, authority) != "second.example":  # type: ignore[arg-type]
                await turn()
        server.stop()
