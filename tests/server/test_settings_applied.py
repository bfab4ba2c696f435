"""What the settings say is what the server does."""

from __future__ import annotations

from pathlib import Path

import pytest
from foreign_client import Serve, connect, gone, without_settings

import headwater
from headwater import ManualClock
from headwater.errors import InvalidConfigurationError

RULES = """
[server]
port = 0

[[topics]]
pattern = "orders.>"
max_count = 3

[[topics]]
pattern = "logs.#"
max_age = "1h"
dialect = "amqp"
keep_unacked = true
"""


async def test_retention_of_topics_is_set_and_enforced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_settings(monkeypatch, tmp_path)
    (tmp_path / "headwater.toml").write_text(RULES)
    clock = ManualClock()
    async with headwater.serve("log.db", clock=clock) as server, connect(server) as client:
        rules = {rule["pattern"]: rule for rule in await client.call("rpc.retention")}
        assert rules["orders.>"]["limits"] == {"max_count": 3}
        assert rules["logs.#"]["limits"] == {"max_age_ms": 3_600_000, "keep_unacked": True}
        assert rules["logs.#"]["dialect"] == "amqp"
        await client.publish_many("orders.new", 5)
        await client.publish("logs", "old")
        clock.advance(3_600.001)
        await client.publish("logs", "new")
        report = await client.call("rpc.maintenance.run")
        assert report["pruned"] == {"orders.>": 2, "logs.#": 1}
        await client.subscribe("s", ">")
        assert await client.delivered_seqs(4) == [3, 4, 5, 7]


async def test_unused_subscriptions_are_dropped_after_the_timeout(serve: Serve) -> None:
    clock = ManualClock()
    async with serve(clock=clock, log_subscription_timeout=1.0) as server:
        async with connect(server) as client:
            await client.subscribe("sub1", "a")
            await client.subscribe("longer", "a", inactive_timeout=10)
            await client.subscribe("together", "a", mode="shared")
        await gone(server)
        async with connect(server) as client:
            clock.advance(1)
            assert (await client.call("rpc.maintenance.run"))["expired_subscriptions"] == []
            clock.advance(1)
            report = await client.call("rpc.maintenance.run")
            assert sorted(report["expired_subscriptions"]) == ["sub1", "together"]
            assert [each["id"] for each in await client.call("rpc.subscriptions")] == ["longer"]


async def test_a_subscription_without_a_timeout_stays(serve: Serve) -> None:
    clock = ManualClock()
    async with serve(clock=clock, log_subscription_timeout=1.0) as server, headwater.open_async(server.url) as log:
        async with log.subscribe("kept", "a", inactive_timeout=None), log.subscribe("dropped", "a"):
            pass
        clock.advance(2)
        assert (await log.run_maintenance()).expired_subscriptions == ["dropped"]


@pytest.mark.parametrize(
    "flags",
    [{"port": -1}, {"limits_frame_bytes": 10}, {"host": "0.0.0.0"}],
)
def test_settings_that_make_no_sense_are_refused_before_anything_is_opened(
    serve: Serve, tmp_path: Path, flags: dict[str, object]
) -> None:
    with pytest.raises(InvalidConfigurationError):
        serve(**flags)
    assert not (tmp_path / "log.db").exists()


async def test_the_smallest_frames_that_are_accepted_can_be_used(serve: Serve) -> None:
    smallest = 1024
    try:
        server = serve("memory:", limits_frame_bytes=smallest)
    except InvalidConfigurationError:
        server = serve("memory:", limits_frame_bytes=4_096)
    async with server, connect(server) as client:
        assert await client.publish("a") == 1


async def test_a_port_that_is_taken_is_reported(serve: Serve) -> None:
    async with serve("memory:") as server:
        with pytest.raises(InvalidConfigurationError, match="listen"):
            await serve("memory:", port=server.port).start()


async def test_logging_settings_are_settings_of_the_server(serve: Serve) -> None:
    assert serve("memory:", log_level="debug").settings.server.log_level == "debug"
    assert serve("memory:", log_format="json").settings.server.log_format == "json"
    assert serve("memory:", log_durability="relaxed").settings.log.durability == "relaxed"
