"""The first connection, how a client says how it is, and what it does when there is no connection."""

from __future__ import annotations

import asyncio
import socket
import time
from pathlib import Path
from typing import Any

import pytest
import trustme
from client_states import States
from fault_lane import Direction

import headwater
from headwater.client.options import TOKEN_VARIABLE
from headwater.errors import (
    ClosedError,
    HeadwaterError,
    InvalidOptionError,
    RequestTimeoutError,
    UnauthorizedError,
    UnreachableError,
)
from headwater.protocol import methods as rpc
from headwater.server.auth import Scopes, TokenFile, id_of

QUICKLY_S = 8.0
NEVER = {"reconnect": "none"}


@pytest.fixture
def closed_url() -> Any:
    """A url without a listener."""
    with socket.socket() as placeholder:
        placeholder.bind(("127.0.0.1", 0))
        yield f"ws://127.0.0.1:{placeholder.getsockname()[1]}"


@pytest.fixture
def token(tmp_path: Path) -> str:
    tokens = TokenFile(tmp_path / "tokens.json")
    return tokens.create(
        "test", Scopes(publish=("a.>",), read=("a.>",), consume=("*",)), now_ms=int(time.time() * 1000)
    )


async def refusal(url: str, **options: Any) -> HeadwaterError:
    with pytest.raises(HeadwaterError) as raised:
        async with headwater.open_async(url, **options):
            pass
    return raised.value


# --- the first one --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [NEVER, {"reconnect_attempts": 2, "reconnect_min": 0.01}, {"connect_timeout": 0.2}])
async def test_no_server_there(closed_url: str, options: Any) -> None:
    began_s = time.monotonic()
    error = await refusal(closed_url, **options)
    assert time.monotonic() - began_s < QUICKLY_S
    assert isinstance(error, UnreachableError)
    assert error.where == closed_url
    assert "headwater serve" in error.next


def test_no_server_for_the_sync_api(closed_url: str) -> None:
    began_s = time.monotonic()
    with pytest.raises(UnreachableError):
        headwater.open(closed_url, connect_timeout=0.2)
    assert time.monotonic() - began_s < QUICKLY_S


async def test_a_server_that_comes_a_little_late_is_waited_for(serve: Any) -> None:
    with socket.socket() as placeholder:
        placeholder.bind(("127.0.0.1", 0))
        port = placeholder.getsockname()[1]
    connecting = asyncio.ensure_future(headwater.open_async(f"ws://127.0.0.1:{port}", reconnect_min=0.01))
    await asyncio.sleep(0)
    async with serve(port=port):
        log = await connecting
        assert await log.publish("a", 1) == 1
        await log.close()


async def test_a_server_that_never_answers() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        error = await refusal(f"ws://127.0.0.1:{silent.getsockname()[1]}", connect_timeout=0.2)
    assert isinstance(error, UnreachableError)


async def test_a_server_that_speaks_no_websocket() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi")
        writer.close()

    stranger = await asyncio.start_server(answer, "127.0.0.1", 0)
    error = await refusal(f"ws://127.0.0.1:{stranger.sockets[0].getsockname()[1]}", **NEVER)
    assert isinstance(error, UnreachableError)
    assert "200" in error.why
    stranger.close()


@pytest.mark.parametrize(
    ("url", "options"),
    [
        ("ws://", {}),
        ("ws://user:secret@host:1", {}),
        ("ws://host:99999999", {}),
        ("ws://my..host:1", {"connect_timeout": 0.2}),
        (f"ws://{64 * 'a'}:1", {}),
        ("ws://[::1", {}),
        ("ws://user:secret@ho\u2100st:1", {}),
        ("ws://host", {"durability": "relaxed"}),
        ("ws://host", {"reconnect": "now and then"}),
        ("ws://host", {"reconnect_min": 2, "reconnect_max": 1}),
        ("ws://host", {"token": "line\nbreak"}),
        ("wss://host", {"ca": "no/such/file"}),
    ],
)
def test_what_makes_no_sense_is_refused_before_anything_is_tried(url: str, options: Any) -> None:
    with pytest.raises(InvalidOptionError) as raised:
        headwater.open(url, **options)
    assert "secret" not in str(raised.value)
    assert isinstance(asyncio.run(refusal(url, **options)), InvalidOptionError)


# --- identity -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", ["hw_00000000_" + 64 * "0", None])
async def test_a_wrong_token_or_none_is_reported_at_once(serve: Any, token: str, given: str | None) -> None:
    began_s = time.monotonic()
    async with serve(tokens="tokens.json") as server:
        error = await refusal(server.url, token=given)
    assert time.monotonic() - began_s < QUICKLY_S
    assert isinstance(error, UnauthorizedError)
    assert token not in str(error)


async def test_the_token_may_stand_in_the_environment(serve: Any, token: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, token)
    async with serve(tokens="tokens.json") as server:
        async with headwater.open_async(server.url) as log:
            assert await log.publish("a.b", 1) == 1
        assert isinstance(
            await refusal(server.url, token="hw_00000000_" + 64 * "0"), UnauthorizedError
        )  # it goes before


async def test_one_that_may_not_publish_there_costs_its_neighbours_nothing(serve: Any, token: str) -> None:
    async with serve(tokens="tokens.json") as server, headwater.open_async(server.url, token=token) as log:
        async with asyncio.timeout(QUICKLY_S):
            outcomes = await asyncio.gather(
                *(log.publish(topic, topic) for topic in ("a.b", "forbidden", "a.c")), return_exceptions=True
            )
        assert outcomes[0] == 1
        assert isinstance(outcomes[1], UnauthorizedError)
        assert outcomes[2] == 2


async def test_a_token_that_is_revoked_ends_the_client(serve: Any, token: str, proxy_to: Any, tmp_path: Path) -> None:
    async with serve(tokens="tokens.json") as server:
        proxy = proxy_to(server.port)
        async with headwater.open_async(f"ws://127.0.0.1:{proxy.port}", token=token) as log:
            states = States(log)
            token_id = id_of(token)
            assert token_id is not None
            assert TokenFile(tmp_path / "tokens.json").revoke(token_id)
            proxy.reset()
            await states.reach("reconnecting", "failed")
            with pytest.raises((UnauthorizedError, UnreachableError)):
                await log.publish("a.b", 1)


async def test_tls_with_a_certificate_of_ones_own(serve: Any, tmp_path: Path) -> None:
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    issued = authority.issue_cert("127.0.0.1")
    issued.private_key_pem.write_to_path(tmp_path / "key.pem")
    issued.cert_chain_pems[0].write_to_path(tmp_path / "cert.pem")
    async with serve(tls_certificate="cert.pem", tls_key="key.pem") as server:
        assert server.url.startswith("wss://")
        async with headwater.open_async(server.url, ca=tmp_path / "ca.pem") as log:
            assert await log.publish("a", 1) == 1
        stranger = await refusal(server.url, **NEVER)
        assert isinstance(stranger, UnreachableError)
        assert "certificate" in stranger.why.lower()
        url = server.url
        plain = await refusal(url.replace("wss:", "ws:"), **NEVER)
    assert isinstance(plain, UnreachableError)
    assert (plain.why, plain.next) == (
        "it closed the connection without an answer",
        f"If it has a certificate, write {url}",
    )


async def test_a_certificate_for_another_host_is_refused(serve: Any, tmp_path: Path) -> None:
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    issued = authority.issue_cert("elsewhere.example")
    issued.private_key_pem.write_to_path(tmp_path / "key.pem")
    issued.cert_chain_pems[0].write_to_path(tmp_path / "cert.pem")
    async with serve(tls_certificate="cert.pem", tls_key="key.pem") as server:
        error = await refusal(server.url, ca=tmp_path / "ca.pem", **NEVER)
    assert isinstance(error, UnreachableError)
    assert "certificate is not trusted" in error.why


async def test_tls_to_a_server_that_has_none_is_reported_at_once(serve: Any) -> None:
    async with serve() as server:
        began_s, url = time.monotonic(), server.url
        error = await refusal(url.replace("ws:", "wss:"), reconnect_min=60.0, reconnect_max=60.0, connect_timeout=100)
        assert time.monotonic() - began_s < QUICKLY_S  # it would be tried again a minute later
    assert (error.why, error.next) == (
        "it does not speak TLS",
        f"Write {url}, or give the server a certificate",
    )


# --- states ---------------------------------------------------------------------------------------------------------


async def test_states_go_round_and_end(serve: Any, proxy_to: Any) -> None:
    async with serve() as server:
        proxy = proxy_to(server.port)
        async with headwater.open_async(f"ws://127.0.0.1:{proxy.port}", reconnect_min=0.01) as log:
            states = States(log)
            proxy.refuse()
            proxy.reset()
            await states.reach("connected", "reconnecting")
            assert log.remote.state == "reconnecting"
            proxy.accept()
            await states.reach("connected", "reconnecting", "connected")
        assert log.remote.state == "disconnected"
        assert states.seen == ["connected", "reconnecting", "connected", "disconnected"]


async def test_more_patterns_than_one_call_takes_are_live_again(
    serve: Any, proxy_to: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rpc, "NAMES_MAX", 2)
    heard: asyncio.Queue[str] = asyncio.Queue()
    async with serve() as server:
        proxy = proxy_to(server.port)
        async with headwater.open_async(f"ws://127.0.0.1:{proxy.port}", reconnect_min=0.01) as log:
            states = States(log)
            for number in range(5):
                log.live.subscribe("mine", f"a.{number}", lambda message: heard.put_nowait(message.topic))
            await log.publish("b", 1)  # the server has answered them by then
            proxy.refuse()
            proxy.reset()
            await states.reach("connected", "reconnecting")
            proxy.accept()
            await states.reach("connected", "reconnecting", "connected")
            for number in range(5):
                await log.publish(f"a.{number}", 1)
            async with asyncio.timeout(5):
                assert {await heard.get() for _ in range(5)} == {f"a.{number}" for number in range(5)}


async def test_a_callback_that_fails_keeps_no_other_from_being_called(serve: Any, proxy_to: Any) -> None:
    mishaps: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: mishaps.append(context))
    async with serve() as server:
        proxy = proxy_to(server.port)
        async with headwater.open_async(f"ws://127.0.0.1:{proxy.port}") as log:
            log.remote.on_state(lambda state: 1 / 0)
            states = States(log)
            proxy.reset()
            await states.reach("reconnecting", "connected")
    assert mishaps


async def test_without_reconnect_the_first_break_is_the_end(serve: Any, proxy_to: Any) -> None:
    async with serve() as server:
        proxy = proxy_to(server.port)
        async with headwater.open_async(f"ws://127.0.0.1:{proxy.port}", **NEVER) as log:
            states = States(log)
            proxy.reset()
            await states.reach("connected", "failed")
            with pytest.raises(UnreachableError):
                await log.publish("a", 1)
            assert states.seen == ["connected", "reconnecting", "failed"] or states.seen == ["connected", "failed"]
            assert proxy.counts.connections == 1


async def test_after_the_last_attempt_everything_that_waits_is_reported(serve: Any, proxy_to: Any) -> None:
    async with serve() as server:
        proxy = proxy_to(server.port)
        options = {"reconnect_min": 0.01, "reconnect_attempts": 3}
        async with headwater.open_async(f"ws://127.0.0.1:{proxy.port}", **options) as log:
            states = States(log)
            subscription = await log.subscribe("s", "a")
            fetching = asyncio.ensure_future(subscription.fetch(1, timeout=None))
            proxy.refuse()
            proxy.reset()
            await states.reach("reconnecting")
            publishing = asyncio.ensure_future(log.publish("a", 1))
            await states.reach("failed")
            with pytest.raises(UnreachableError):
                await publishing
            with pytest.raises(UnreachableError):
                await fetching
            with pytest.raises(UnreachableError):
                await log.publish("a", 1)
            proxy.accept()
            assert proxy.counts.connections == 1


async def test_a_silent_connection_is_noticed_and_replaced(serve: Any, proxy_to: Any) -> None:
    async with serve(shutdown_timeout=0.1) as server:
        proxy = proxy_to(server.port)
        async with headwater.open_async(f"ws://127.0.0.1:{proxy.port}", ping=0.1) as log:
            states = States(log)
            proxy.blackhole()
            publishing = asyncio.ensure_future(log.publish("a", 1))
            await states.reach("reconnecting")
            proxy.heal()
            assert await publishing == 1
        assert "failed" not in states.seen


async def test_an_idle_connection_is_not_taken_for_dead(serve: Any, proxy_to: Any) -> None:
    async with serve() as server:
        proxy = proxy_to(server.port)
        async with headwater.open_async(f"ws://127.0.0.1:{proxy.port}", ping=0.05) as log:
            states = States(log)
            asked = proxy.counts.to_client_bytes
            await asyncio.to_thread(proxy.wait_until, lambda counts: counts.to_client_bytes >= asked + 10 * 2)  # pongs
            assert await log.publish("a", 1) == 1
            assert states.seen == ["connected"]


# --- no answer ------------------------------------------------------------------------------------------------------


async def test_no_answer_in_time_says_what_may_have_happened(serve: Any, proxy_to: Any) -> None:
    async with serve() as server:
        proxy = proxy_to(server.port)
        async with headwater.open_async(f"ws://127.0.0.1:{proxy.port}", timeout=0.3) as log:
            proxy.blackhole(Direction.TO_CLIENT)
            with pytest.raises(RequestTimeoutError) as raised:
                await log.publish("a", 1)
            assert "may have been done" in raised.value.why
            assert raised.value.where == "rpc.publish"
            assert "id" in raised.value.next
            with pytest.raises(RequestTimeoutError) as raised:
                await log.last_seq()
            assert raised.value.next == "To be safe, call again"
            proxy.heal()
            proxy.reset()
            assert await log.last_seq() == 1  # it had been done


async def test_without_a_connection_a_call_waits_only_so_long(serve: Any, proxy_to: Any) -> None:
    async with serve() as server:
        proxy = proxy_to(server.port)
        options: Any = {"timeout": 0.5, "reconnect_min": 0.01, "reconnect_max": 0.02}
        async with headwater.open_async(f"ws://127.0.0.1:{proxy.port}", **options) as log:
            states = States(log)
            proxy.refuse()
            proxy.reset()
            await states.reach("reconnecting")
            with pytest.raises(RequestTimeoutError):
                await log.publish("a", 1)
            with pytest.raises(RequestTimeoutError):
                await log.remote.call("any", timeout=0.1)
            proxy.accept()
            assert await log.publish("a", 2) == 1  # what was given up is not sent any more


async def test_what_is_closed_is_closed(serve: Any) -> None:
    async with serve() as server:
        async with headwater.open_async(server.url) as log:
            subscription = await log.subscribe("s", "a")
        for attempt in (
            log.publish("a", 1),
            log.publish_many([("a", 1)]),
            log.last_seq(),
            log.subscribe("t", "a"),
            log.remote.call("any"),
            subscription.fetch(),
        ):
            with pytest.raises(ClosedError):
                await attempt
        await log.close()
