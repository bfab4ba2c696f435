"""Subscriptions, by hand: versions as they come, and whose turn it is."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from contextlib import AsyncExitStack
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from by_hand import NAME, REPLICA, Hosted, Session, StartHost, until, write

from headwater import ManualClock
from headwater.replication.claims import GRACE_MS
from headwater.replication.host import subscribe
from headwater.replication.host.subscribe import SubscriberRegistry
from headwater.replication.names import ReplicaName

COORDINATE = {"coordinate": True, "waitIdle": 60, "minInterval": 60, "maxInterval": 86400}


class Room:
    """Sessions that are open as long as the test."""

    def __init__(self, server: Hosted, stack: AsyncExitStack) -> None:
        self._server = server
        self._stack = stack

    async def enter(self, client: str, key: str | None = None, **words: object) -> Session:
        session = await self._stack.enter_async_context(
            self._server.session(f"subscribe/{NAME}", client=client, key=key)
        )
        await session.send({**COORDINATE, **words})
        return session


async def test_versions_are_reported_at_once_and_as_they_come(hosted: StartHost, database: Path) -> None:
    async with hosted() as server, AsyncExitStack() as stack:
        early = await Room(server, stack).enter("early", coordinate=False)
        assert await early.config() == {"replicaID": None, "keyType": "none"}
        assert await early.text() == "LATEST_VERSION 0"
        first = await server.push(database)
        assert await early.text() == "LATEST_VERSION 1"
        late = await Room(server, stack).enter("late", coordinate=False)
        assert (await late.config())["replicaID"] == first["replicaID"]
        assert await late.text() == "LATEST_VERSION 1"
        await server.push(database, base=1, pushID="same")  # makes no version
        write(database, 1)
        await server.push(database, base=1, pushID="push-2")
        for session in (early, late):
            assert await session.text() == "LATEST_VERSION 2"


async def test_versions_are_reported_in_order_and_anew_when_the_replica_is_another(hosted: StartHost) -> None:
    async with hosted() as server, AsyncExitStack() as stack:
        session = await Room(server, stack).enter("a", coordinate=False)
        await session.config()
        assert await session.text() == "LATEST_VERSION 0"
        registry = server.endpoint._context.subscribers  # type: ignore[union-attr]
        replica = server.store.catalogue.create(REPLICA)
        for number in (1, 3, 2, 4):
            registry.announce_version(replica, number)
        server.store.remove(REPLICA)
        registry.announce_version(server.store.catalogue.create(REPLICA), 1)
        assert [await session.text() for _ in range(4)] == [f"LATEST_VERSION {number}" for number in (1, 3, 4, 1)]


async def test_two_claim_and_the_first_has_it_until_it_releases(hosted: StartHost, database: Path) -> None:
    async with hosted() as server, AsyncExitStack() as stack:
        room = Room(server, stack)
        a, b = await room.enter("a"), await room.enter("b")
        aloof = await room.enter("aloof", coordinate=False)
        for session in (a, b, aloof):
            await session.config()
            assert await session.text() == "LATEST_VERSION 0"
        await a.send("SQLRSYNC_CLAIM 60")
        assert await a.text() == "SQLRSYNC_CLAIM"
        assert await b.text() == "SQLRSYNC_CLAIM 60"
        await b.send("SQLRSYNC_CLAIM 60")
        assert 55 < _seconds(await b.text()) <= 60
        await a.send("SQLRSYNC_CLAIM 90.5")  # the holder may extend
        assert await a.text() == "SQLRSYNC_CLAIM"
        assert 85 < _seconds(await b.text()) <= 90.5
        late = await room.enter("late")
        await late.config()
        assert await late.text() == "LATEST_VERSION 0"
        assert 85 < _seconds(await late.text()) <= 90.5
        await b.send("SQLRSYNC_RELEASE")  # of what is another's: nothing happens
        await aloof.send("SQLRSYNC_CLAIM 60")  # a client that does not coordinate takes no part
        await aloof.send("SQLRSYNC_CHANGED 60")
        await aloof.send("SQLRSYNC_CHANGED")
        await server.push(database, client="a")
        await a.send("SQLRSYNC_RELEASE")
        for session in (b, late):
            assert await session.text() == "LATEST_VERSION 1"
            assert await session.text() == "SQLRSYNC_RELEASE"
        await b.send("SQLRSYNC_CLAIM 5")
        assert await b.text() == "SQLRSYNC_CLAIM"
        assert await a.text() == "LATEST_VERSION 1"
        assert await a.text() == "SQLRSYNC_CLAIM 5"
        assert await aloof.text() == "LATEST_VERSION 1"
        await server.server.stop()
        assert await aloof.closed() == 1001


async def test_a_claim_outlives_its_holder(hosted: StartHost) -> None:
    async with hosted() as server, AsyncExitStack() as stack:
        gone = await Room(server, stack).enter("gone")
        await gone.send("SQLRSYNC_CLAIM 60")
        while await gone.text() != "SQLRSYNC_CLAIM":
            pass
        gone.vanish()
        await until(lambda: not server.endpoint._sessions)
        b = await Room(server, stack).enter("b")
        await b.config()
        assert await b.text() == "LATEST_VERSION 0"
        assert 0 < _seconds(await b.text()) <= 60


async def test_when_a_claim_has_ended_and_no_client_is_left_all_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headwater.replication.host.subscribe.CLEANUP_S_MIN", 0.0)
    clock = ManualClock(0)
    registry, gone = SubscriberRegistry(clock), Silent()
    with registry.of(REPLICA) as subscribers, subscribers.joined(gone):
        subscribers.claim(gone, 1)
    assert len(registry) == 1
    clock.advance(0.001)
    await until(lambda: len(registry) == 0)


async def test_a_claim_goes_on_as_long_as_the_push_of_its_holder(hosted: StartHost, database: Path) -> None:
    async with hosted() as server, AsyncExitStack() as stack:
        registry, clock = server.endpoint._context.subscribers, ManualClock(0)  # type: ignore[union-attr]
        registry._clock = clock
        room = Room(server, stack)
        a, b = await room.enter("a"), await room.enter("b")
        for session in (a, b):
            await session.config()
            assert await session.text() == "LATEST_VERSION 0"
        await a.send("SQLRSYNC_CLAIM 1")
        assert await a.text() == "SQLRSYNC_CLAIM"
        assert await b.text() == "SQLRSYNC_CLAIM 1"
        async with server.session(f"push/{NAME}", client="a") as pushing:
            await pushing.begin(database)
            clock.advance((1_000 + GRACE_MS) / 1000)
            await b.send("SQLRSYNC_CLAIM 60")
            assert _seconds(await b.text()) == GRACE_MS / 1000  # then it may ask again
        await until(lambda: registry._by_name[REPLICA].users == 2)
        await b.send("SQLRSYNC_CLAIM 60")
        assert await b.text() == "SQLRSYNC_CLAIM"


async def test_a_pull_key_with_timers_is_warned_and_takes_part_in_no_claims(hosted: StartHost) -> None:
    async with hosted() as server, AsyncExitStack() as stack:
        push_key, pull_key = (
            server.store.catalogue.create_key(REPLICA, "push"),
            server.store.catalogue.create_key(REPLICA, "pull"),
        )
        room = Room(server, stack)
        puller, pusher = await room.enter("puller", key=pull_key), await room.enter("pusher", key=push_key)
        reported = await puller.config()
        assert reported["keyType"] == "pull"
        assert "waitIdle" in reported["warning"]
        assert await puller.text() == "LATEST_VERSION 0"
        assert (await pusher.config())["keyType"] == "push"
        assert await pusher.text() == "LATEST_VERSION 0"
        await puller.send("SQLRSYNC_CLAIM 60")
        await pusher.send("SQLRSYNC_CLAIM 7")
        assert await pusher.text() == "SQLRSYNC_CLAIM"  # it was free
        quiet = await room.enter(
            "quiet", key=pull_key, coordinate=False, waitIdle=None, minInterval=None, maxInterval=None
        )
        assert "warning" not in await quiet.config()


@pytest.mark.parametrize(
    "output",
    [
        b"pages",
        "HELLO",
        "SQLRSYNC_CLAIM",
        "SQLRSYNC_CLAIM nan",
        "SQLRSYNC_CLAIM -1",
        "SQLRSYNC_CLAIM 1e99",
        "CONFIG={}",
    ],
)
async def test_what_is_no_word_of_a_subscription_ends_it(hosted: StartHost, output: str | bytes) -> None:
    async with hosted() as server, AsyncExitStack() as stack:
        session = await Room(server, stack).enter("a")
        await session.config()
        await session.text()
        await session.send(output)
        assert (await session.text()).startswith("ABORT=FAILED:")
        assert await session.closed() == 1000


async def test_a_client_that_sends_too_much_is_read_slowly_and_not_forgotten(
    hosted: StartHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subscribe, "FRAMES_A_SECOND_MAX", 5)
    async with hosted() as server, AsyncExitStack() as stack:
        session = await Room(server, stack).enter("a")
        await session.config()
        await session.text()
        for span in range(6):
            await session.send(f"SQLRSYNC_CLAIM {span + 1}")
        assert [await session.text() for _ in range(6)] == ["SQLRSYNC_CLAIM"] * 6


def _seconds(text: str) -> float:
    word, _, rest = text.partition(" ")
    assert word == "SQLRSYNC_CLAIM", text
    return float(rest)


class Silent:
    identity, coordinates = "a", True

    def send(self, text: str) -> None: ...


async def test_claims_that_their_holders_left_behind_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headwater.replication.host.subscribe.REPLICAS_MAX", 10)
    registry, loop = SubscriberRegistry(ManualClock(0)), asyncio.get_running_loop()
    for number in range(100):
        follower = Silent()
        name = ReplicaName("ns", f"app-{number % 20}")
        with registry.of(name) as subscribers, subscribers.joined(follower):
            subscribers.claim(follower, 1_000_000)
    assert len(registry) == 10
    assert len([timer for timer in loop._scheduled if not timer.cancelled()]) <= 11  # type: ignore[attr-defined]
    for gathering in registry._by_name.values():
        assert gathering.timer is not None
        gathering.timer.cancel()


async def test_the_list_of_replicas_names_the_holder_and_until_when(hosted: StartHost, database: Path) -> None:
    async with hosted() as server, AsyncExitStack() as stack:
        await server.push(database)

        async def claim() -> Any:
            url = f"{server.server.url.replace('ws:', 'http:')}/sapi/replicas"
            with await asyncio.to_thread(urllib.request.urlopen, url, timeout=10) as answer:
                [found] = json.load(answer)["replicas"]
            return found["claim"]

        assert await claim() is None
        laptop, unnamed = await Room(server, stack).enter("laptop"), await Room(server, stack).enter("")
        for session in (laptop, unnamed):
            await session.config()
            assert await session.text() == "LATEST_VERSION 1"
        await laptop.send("SQLRSYNC_CLAIM 50")
        assert await laptop.text() == "SQLRSYNC_CLAIM"
        found = await claim()
        assert found["client"] == "laptop"
        assert (
            timedelta(seconds=30) < datetime.fromisoformat(found["until"]) - datetime.now(UTC) <= timedelta(seconds=50)
        )
        await laptop.send("SQLRSYNC_RELEASE")
        assert (await unnamed.text()).startswith("SQLRSYNC_CLAIM ")
        assert await unnamed.text() == "SQLRSYNC_RELEASE"
        assert await claim() is None
        await unnamed.send("SQLRSYNC_CLAIM 5")
        assert await unnamed.text() == "SQLRSYNC_CLAIM"
        assert (await claim())["client"] == ""
