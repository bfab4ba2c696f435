"""Several clients that push one replica."""

import asyncio
import json
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path

import apsw
import pytest
from followed import PATIENCE_S, Database, Follow, names_in
from served import RunningServer

import headwater
from headwater.errors import VersionConflictError
from headwater.replication import schedule
from headwater.replication.names import Remote, place_of
from headwater.replication.outcome import Callbacks, TransferOptions
from headwater.replication.protocol import CLAIM, RELEASE, SubscribeInfo
from headwater.replication.subscription import PushSubscription, Subscription
from headwater.replication.timers import Timers

VECTORS = json.loads((Path(__file__).parents[2] / "vectors" / "claims.json").read_text())


class Overheard(Subscription):
    """What a client that coordinates hears of the claims of others."""

    def __init__(self, remote: Remote) -> None:
        options = TransferOptions(client_id="listener")
        super().__init__("", remote, options, {"coordinate": True}, Callbacks())
        self.words: asyncio.Queue[str] = asyncio.Queue()

    def on_connected(self, info: SubscribeInfo) -> None:
        self.words.put_nowait("connected")

    def on_word(self, word: str, rest: str) -> None:
        if word == CLAIM and rest:
            self.words.put_nowait("claimed")
        elif word == RELEASE:
            self.words.put_nowait("released")


@pytest.fixture
def claims_follow_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a client with long timers waits for 10 s between two of them."""
    monkeypatch.setattr(schedule, "LEAD_MS_MAX", 10)


@asynccontextmanager
async def overhearing(remote: str) -> AsyncIterator[Overheard]:
    place = place_of(remote)
    assert isinstance(place, Remote)
    overheard = Overheard(place)
    listening = asyncio.create_task(overheard.keep_connected())
    try:
        async with asyncio.timeout(PATIENCE_S):
            assert await overheard.words.get() == "connected"
            yield overheard
    finally:
        listening.cancel()
        await asyncio.gather(listening, return_exceptions=True)


async def test_two_that_coordinate_beside_one_file_push_each_change_once(
    server: RunningServer, database: Database, follow: Follow
) -> None:
    remote = f"{server.url}/shop/app.db"
    async with (
        follow(database.path, remote, coordinate=True) as one,
        follow(database.path, remote, coordinate=True) as other,
    ):
        both = [await one.next(), await other.next()]
        assert sorted(outcome.is_new for outcome in both) == [False, True]
        for number in (2, 3):
            database.write()
            both = [await one.reached(number), await other.reached(number)]
            assert [outcome.version for outcome in both] == [number, number]
            assert sorted(outcome.is_new for outcome in both) == [False, True]


@pytest.mark.usefixtures("claims_follow_at_once")
async def test_one_that_does_not_coordinate_goes_first_and_the_stale_one_is_refused(
    server: RunningServer, database: Database, follow: Follow, tmp_path: Path
) -> None:
    remote, theirs = f"{server.url}/shop/app.db", tmp_path / "theirs.db"
    async with (
        overhearing(remote) as overheard,
        follow(database.path, remote, timers=Timers.of("1h"), coordinate=True) as holder,
    ):
        await holder.next()
        assert [await overheard.words.get() for _ in range(2)] == ["claimed", "released"]
        await asyncio.to_thread(headwater.sync, remote, theirs)
        database.write("claimed")
        assert await overheard.words.get() == "claimed"
        Database.at(theirs).write("not claimed")
        outcome = await asyncio.to_thread(headwater.sync, theirs, remote)  # claims are advisory
        assert outcome.version == 2
        assert isinstance(holder.subscription, PushSubscription)
        holder.subscription.push_soon()
        with pytest.raises(VersionConflictError) as refused:
            await holder.next()
        assert refused.value.newest == 2


async def test_the_vector_of_a_stale_push(server: RunningServer, database: Database, tmp_path: Path) -> None:
    [case] = [each for each in VECTORS["cases"] if each["name"] == "stale push"]
    assert case["events"] == [["A and C hold version 3", "A pushes version 4"], ["C pushes from 3", ""]]
    assert case["expect"] == [["C is refused", "VERSION_CONFLICT, newest is 4"]]
    remote, held_by_c = f"{server.url}/shop/app.db", Database(tmp_path / "c.db")
    for number in (1, 2, 3):
        database.write(str(number))
        assert (await asyncio.to_thread(headwater.sync, database.path, remote)).version == number
    await asyncio.to_thread(headwater.sync, remote, held_by_c.path, overwrite=True)
    database.write("4")
    assert (await asyncio.to_thread(headwater.sync, database.path, remote)).version == 4
    held_by_c.write("mine")
    with pytest.raises(VersionConflictError) as refused:
        await asyncio.to_thread(headwater.sync, held_by_c.path, remote)
    assert refused.value.newest == 4
    assert names_in(held_by_c.path) == ["1", "2", "3", "mine"]


@pytest.mark.usefixtures("claims_follow_at_once")
async def test_a_stopped_client_releases_its_claim(server: RunningServer, database: Database, follow: Follow) -> None:
    remote = f"{server.url}/shop/app.db"
    async with overhearing(remote) as overheard:
        async with follow(database.path, remote, timers=Timers.of("1h"), coordinate=True) as running:
            await running.next()
            assert [await overheard.words.get() for _ in range(2)] == ["claimed", "released"]
            database.write()
            assert await overheard.words.get() == "claimed"
        assert await overheard.words.get() == "released"


async def test_numbers_that_come_again_are_not_taken_for_the_same_versions(tmp_path: Path) -> None:
    """An old data directory is put back, and another client makes a version of the number that was lost."""
    home, mine, theirs = tmp_path / "server", Database(tmp_path / "mine.db"), tmp_path / "theirs.db"
    home.mkdir()
    server = RunningServer(home / "log.db", port=0)
    remote, port = f"{server.url}/shop/app.db", int(server.url.rpartition(":")[2])
    await asyncio.to_thread(headwater.sync, mine.path, remote)
    await asyncio.to_thread(headwater.sync, remote, theirs)
    server.stop()
    shutil.copytree(home / "log.db-replicas", tmp_path / "old")
    server = RunningServer(home / "log.db", port=port)
    mine.write("lost with the directory")
    assert (await asyncio.to_thread(headwater.sync, mine.path, remote)).version == 2
    server.stop()
    shutil.rmtree(home / "log.db-replicas")
    shutil.copytree(tmp_path / "old", home / "log.db-replicas")
    server = RunningServer(home / "log.db", port=port)
    with closing(apsw.Connection(str(theirs))) as connection:
        connection.execute("INSERT INTO item (name) VALUES ('theirs')")
    assert (await asyncio.to_thread(headwater.sync, theirs, remote)).version == 2
    mine.write("based on the version 2 that was lost")
    with pytest.raises(VersionConflictError):
        await asyncio.to_thread(headwater.sync, mine.path, remote)
    server.stop()
