"""What the server counts, read the way Prometheus reads it."""

from __future__ import annotations

from typing import Any

import pytest
from foreign_client import Serve, connect, gone
from prometheus_client.parser import text_string_to_metric_families
from raw_http import get

from headwater import ManualClock
from headwater.server import pages
from headwater.server.registry import Middleware
from headwater.server.server import Server


@pytest.fixture(autouse=True)
def scraped_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "CACHED_S", 0.0)


class Samples(dict[tuple[str, frozenset[tuple[str, str]]], float]):
    def of(self, name: str, **labels: str) -> float:
        return self.get((f"headwater_{name}", frozenset(labels.items())), 0.0)


async def scrape(server: Server) -> Samples:
    page = await get(server, "/metrics")
    assert page.status == 200
    assert page.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    samples = Samples()
    for family in text_string_to_metric_families(page.body.decode()):
        assert family.documentation
        for sample in family.samples:
            samples[sample.name, frozenset(sample.labels.items())] = sample.value
    return samples


async def test_connections_are_counted(serve: Serve) -> None:
    async with serve() as server:
        assert (await scrape(server)).of("connections_active") == 0  # this one asks by plain HTTP
        async with connect(server), connect(server):
            samples = await scrape(server)
            assert (samples.of("connections_active"), samples.of("connections_total")) == (2, 2)
        await gone(server)
        samples = await scrape(server)
        assert (samples.of("connections_active"), samples.of("connections_total")) == (0, 2)


async def test_refusals_are_counted_by_their_reason(serve: Serve) -> None:
    async with serve("memory:", limits_connections=2) as server:
        for path, more in (("/nowhere", ""), ("/rpc", "Origin: http://evil.example\r\n")):
            upgrade = "Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
            await get(server, path, f"{upgrade}Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n{more}")
        async with connect(server), connect(server):
            assert (await get(server, "/healthz")).status == 503
        await gone(server)
        samples = await scrape(server)
        assert [samples.of("connections_refused_total", why=why) for why in ("path", "origin", "full")] == [1, 1, 1]


async def known_traffic(server: Server) -> None:
    async with connect(server) as client:
        for _ in range(3):
            await client.publish("a", {"n": 1})
        await client.publish("a", 1, id="x")
        await client.publish("a", 1, id="x")
        await client.publish_many("b", 4)
        await client.refusal("rpc.publish", {"topic": "a..b", "data": 1})
        await client.refusal("no.such.method")
        await client.call("rpc.subscribe", {"topic": "live"})
        await client.refusal("rpc.subscribe", {"topic": "a..b"})
        await client.publish("live", 1)
        await client.note("rpc.notification")
        await client.subscribe("s", "a", backoff=0, jitter=0)
        await client.deliveries(4)
        await client.ack("s", 1, 2)
        await client.call("rpc.nack", {"subscription_id": "s", "sequence_id": 3, "delay": 0})
        await client.delivery()
        await client.call("rpc.reject", {"subscription_id": "s", "sequence_id": 4})


@pytest.mark.parametrize("has_middleware", [False, True], ids=["plain", "with middleware"])
async def test_known_traffic_gives_known_numbers(serve: Serve, has_middleware: bool) -> None:
    server = serve()
    if has_middleware:  # calls then go another way
        server.use(Middleware())
    async with server:
        await known_traffic(server)
        await gone(server)
        samples = await scrape(server)

    def requests(method: str) -> tuple[float, float]:
        done, refused = (samples.of("requests_total", method=method, outcome=o) for o in ("done", "refused"))
        return done, refused

    assert requests("rpc.publish") == (6, 1)
    assert requests("rpc.publish.batch") == (1, 0)
    assert requests("unknown") == (0, 1)
    assert requests("rpc.subscribe") == (1, 1)
    assert requests("rpc.subscribe.persistent") == (1, 0)
    assert requests("rpc.acknowledge.persistent") == (1, 0)
    assert samples.of("request_duration_seconds_count", method="rpc.acknowledge.persistent") == 1
    assert samples.of("published_messages_total") == 9
    assert samples.of("duplicate_messages_total") == 1
    assert samples.of("delivered_messages_total") == 5
    assert samples.of("redelivered_messages_total") == 1
    assert [samples.of("settled_messages_total", how=how) for how in ("ack", "nack", "reject")] == [2, 1, 1]
    assert samples.of("live_messages_total") == 1
    assert samples.of("log_last_seq") == samples.of("log_messages") == 9
    assert samples.of("dead_letters", reason="rejected") == 1
    assert samples.of("subscription_lag", subscription="s") == 1


async def test_lag_in_flight_and_age_are_those_of_the_moment(serve: Serve) -> None:
    clock = ManualClock()
    async with serve(clock=clock) as server, connect(server) as client:
        await client.publish_many("a", 10)
        await client.subscribe("s", "a", max_in_flight=4)
        await client.deliveries(4)
        await client.ack("s", 1)
        await client.delivery()
        clock.advance(7)
        samples = await scrape(server)
        of_s: dict[str, Any] = {"subscription": "s"}
        assert samples.of("subscription_lag", **of_s) == 9
        assert samples.of("subscription_in_flight", **of_s) == 4
        assert samples.of("subscription_oldest_seconds", **of_s) == 7
        await client.release("s")
        await client.call("rpc.subscription.remove", {"subscription_id": "s"})
        assert ("headwater_subscription_lag", frozenset(of_s.items())) not in await scrape(server)
