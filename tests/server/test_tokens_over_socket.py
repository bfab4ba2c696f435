"""Which clients may connect and what they may do, over a socket."""

from __future__ import annotations

import asyncio

import pytest
from foreign_client import PATIENCE_S, Make, Serve, bearer, connect, gone
from raw_http import get
from websockets.exceptions import InvalidStatus

from headwater import ManualClock
from headwater.server import server as server_module
from headwater.server.auth import EVERYTHING, Scopes, TokenFile, id_of

# --- getting in -------------------------------------------------------------------------------------------------------


async def test_a_token_in_the_head_lets_in(serve_tokens: Serve, make: Make) -> None:
    token = make("shop", EVERYTHING)
    async with serve_tokens() as server, connect(server, **bearer(token)) as client:
        welcome = await client.call("rpc.hello")
        assert (welcome["authenticated"], welcome["log"]) == (True, "log.db")
        assert welcome["salt"] != 0
        assert await client.publish("a") == 1
        [connection] = server.connections
        assert connection.label == "shop"


@pytest.mark.parametrize("token", ["nonsense", "hw_0123456789ab_" + "0" * 64, "hw_0123456789ab_" + "f" * 64 + "x"])
async def test_a_wrong_token_is_refused_with_401(serve_tokens: Serve, token: str) -> None:
    async with serve_tokens() as server:
        with pytest.raises(InvalidStatus) as refused:
            async with connect(server, **bearer(token)):
                pass
        assert refused.value.response.status_code == 401
        assert not server.connections


async def test_a_stranger_may_say_hello_and_nothing_else(serve_tokens: Serve) -> None:
    async with serve_tokens() as server, connect(server) as client:
        welcome = await client.call("rpc.hello")
        assert (welcome["authenticated"], welcome["log"], welcome["salt"]) == (False, "", 0)
        for method, params in [
            ("rpc.publish.batch", {"messages": []}),
            ("rpc.subscribe.batch", {"topics": []}),
            ("rpc.last_seq", {}),
        ]:
            error = await client.refusal(method, params)
            assert error["code"] == -32000, method
            assert "rpc.authenticate" in error["data"]["next"]


async def test_a_token_may_come_with_a_call(serve_tokens: Serve, make: Make) -> None:
    token = make("shop", EVERYTHING)
    async with serve_tokens() as server, connect(server) as client:
        assert await client.code("rpc.authenticate", {"token": token[:-1] + "x"}) == -32000
        assert await client.code("rpc.publish", {"topic": "a", "data": 1}) == -32000
        assert await client.call("rpc.authenticate", {"token": token}) == {"authenticated": True}
        assert await client.publish("a") == 1
        assert await client.code("rpc.authenticate", {"token": "nonsense"}) == -32000
        assert await client.publish("a") == 2  # a known token stays known


async def test_a_silent_client_is_disconnected(serve_tokens: Serve, make: Make) -> None:
    token = make("shop", EVERYTHING)
    async with serve_tokens(limits_authenticate_timeout=1.0) as server:
        async with connect(server) as known:
            await known.call("rpc.authenticate", {"token": token})
            async with connect(server) as silent:
                assert await silent.closing() == (1008, "no token came in time")
            assert await known.publish("a") == 1
        await gone(server)


async def test_a_stranger_takes_nobodys_name(serve_tokens: Serve, make: Make) -> None:
    token = make("shop", EVERYTHING)
    async with serve_tokens() as server, connect(server, **bearer(token)) as known, connect(server) as stranger:
        await known.call("rpc.hello", {"publisher": "till-7"})
        await stranger.call("rpc.hello", {"publisher": "till-7"})
        assert await known.publish("a", number=1) == 1  # still there, and still the publisher of this name
        assert await stranger.code("rpc.publish", {"topic": "a", "data": 1, "number": 2}) == -32000


# --- what it may do ---------------------------------------------------------------------------------------------------


async def test_scopes_hold_for_publishing(serve_tokens: Serve, make: Make) -> None:
    token = make("shop", publish=["orders.>", "logs.#"])
    async with serve_tokens() as server, connect(server, **bearer(token)) as client:
        assert [await client.publish(topic) for topic in ("orders.new", "logs", "logs.a.b")] == [1, 2, 3]
        for topic in ("orders", "other", "log"):
            assert await client.code("rpc.publish", {"topic": topic, "data": 1}) == -32000
        batch = {"messages": [{"topic": "orders.new", "data": 1}, {"topic": "other", "data": 1}]}
        assert await client.code("rpc.publish.batch", batch) == -32000


async def test_scopes_hold_for_subscribing(serve_tokens: Serve, make: Make) -> None:
    token = make("mail", read=["orders.*", "a.>"], consume=["*"])
    async with serve_tokens() as server, connect(server, **bearer(token)) as client:
        for pattern in ("orders.new", "orders.*", "a.b.c", "a.*"):
            await client.call("rpc.subscribe", {"topic": pattern})
            await client.subscribe(pattern.replace("*", "x"), pattern)
        for pattern in (">", "*.new", "orders.>", "orders", "a", "orders.#"):
            assert await client.code("rpc.subscribe", {"topic": pattern}) == -32000, pattern
            assert await client.code("rpc.subscribe.batch", {"topics": ["a.b", pattern]}) == -32000, pattern
        for pattern in (">", "*.new", "orders.>"):
            params = {"subscription_id": "s", "topic": pattern}
            assert await client.code("rpc.subscribe.persistent", params) == -32000, pattern
            assert await client.code("rpc.subscribe_persistent_batch", [params]) == -32000, pattern


async def test_another_token_on_the_same_connection_has_other_rights(serve_tokens: Serve, make: Make) -> None:
    wide = make("wide", publish=[">"])
    narrow = make("narrow", publish=["b"])
    async with serve_tokens() as server, connect(server, **bearer(wide)) as client:
        await client.publish("a")
        await client.call("rpc.authenticate", {"token": narrow})
        assert await client.code("rpc.publish", {"topic": "a", "data": 1}) == -32000  # though it was allowed before
        await client.publish("b")


# --- losing it --------------------------------------------------------------------------------------------------------


async def test_a_revoked_token_closes_the_connection(
    serve_tokens: Serve, make: Make, tokens: TokenFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "SWEEP_S", 0.02)
    token = make("shop", EVERYTHING)
    other = make("other", EVERYTHING)
    async with serve_tokens() as server, connect(server, **bearer(other)) as stays:
        async with connect(server, **bearer(token)) as client:
            await client.subscribe("s", "a")
            TokenFile(tokens.path).revoke(str(id_of(token)))  # as the command does, in another process
            code, reason = await client.closing()
            assert code == 1008
            assert "revoked" in reason
        async with asyncio.timeout(PATIENCE_S):
            while len(server.connections) > 1 or server._context.closing:
                await stays.call("rpc.hello")
        await stays.subscribe("s", "a")  # what it held is free
        with pytest.raises(InvalidStatus):
            async with connect(server, **bearer(token)):
                pass


async def test_an_expired_token_closes_the_connection(
    serve_tokens: Serve, tokens: TokenFile, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "SWEEP_S", 0.02)
    now_ms = clock.now_ms()
    token = tokens.create("shop", EVERYTHING, now_ms=now_ms, expires_ms=now_ms + 60_000)
    async with serve_tokens() as server, connect(server, **bearer(token)) as client:
        clock.advance(59.999)
        assert await client.publish("a") == 1
        clock.advance(0.001)
        assert await client.close_code() == 1008
        with pytest.raises(InvalidStatus):
            async with connect(server, **bearer(token)):
                pass


async def test_metrics_want_a_token_where_there_are_tokens(serve: Serve, serve_tokens: Serve, make: Make) -> None:
    allowed = [Scopes(admin=True), Scopes(manage=(">",))]
    refused = [Scopes(publish=(">",), read=(">",), consume=("*",), call=(">",)), Scopes(manage=("orders.>",))]
    async with serve_tokens() as server:
        assert (await get(server, "/metrics")).status == 401
        for status, all_scopes in ((200, allowed), (401, refused)):
            for scopes in all_scopes:
                token = make("t", scopes)
                assert (await get(server, "/metrics", f"Authorization: bearer  {token}\r\n")).status == status
        assert (await get(server, "/healthz")).status == 200
    async with serve_tokens(metrics_need_token=False) as server:
        assert (await get(server, "/metrics")).status == 200
    async with serve("memory:") as server:
        assert (await get(server, "/metrics")).status == 200
    async with serve("memory:", metrics_need_token=True) as server:
        assert (await get(server, "/metrics")).status == 401


# --- which pages ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("origins", "origin", "welcome"),
    [
        ([], None, True),
        ([], "same", True),
        ([], "http://evil.example", False),
        ([], "null", False),
        ([], "http://127.0.0.1", False),  # another port is another origin
        (["https://shop.example"], "https://shop.example", True),
        (["https://shop.example"], "same", True),
        (["https://shop.example"], "http://shop.example", False),
        (["https://shop.example"], "https://shop.example.evil.example", False),
        (["*"], "http://anything.example", True),
    ],
)
async def test_only_welcome_origins_may_connect(
    serve: Serve, origins: list[str], origin: str | None, welcome: bool
) -> None:
    async with serve("memory:", origins=origins) as server:
        output = f"http://127.0.0.1:{server.port}" if origin == "same" else origin
        if welcome:
            async with connect(server, origin=output) as client:
                await client.call("rpc.hello")
        else:
            with pytest.raises(InvalidStatus) as refused:
                async with connect(server, origin=output):
                    pass
            assert refused.value.response.status_code == 403


async def test_hello_names_the_rights_once_the_token_is_known(serve_tokens: Serve, make: Make) -> None:
    scopes = Scopes(read=("orders.>",), consume=("*",), admin=True)
    token = make("console", scopes)
    async with serve_tokens() as server, connect(server) as client:
        welcome = await client.call("rpc.hello", {})
        assert not {"rights", "label"} & welcome.keys()
        await client.call("rpc.authenticate", {"token": token})
        welcome = await client.call("rpc.hello", {})
        assert welcome["rights"] == {"read": ["orders.>"], "consume": ["*"], "admin": True}
        assert welcome["label"] == "console"
