"""A copy that stays up to date."""

import asyncio
from functools import partial
from pathlib import Path

import apsw
import pytest
from fault_proxy import FaultProxy
from followed import PATIENCE_S, Database, Follow, names_in, store_of
from served import RunningServer
from websockets.asyncio.server import ServerConnection, serve

import headwater
from headwater.delivery.retry import RetryPolicy
from headwater.errors import InvalidOptionError, UnsyncedChangesError
from headwater.replication import subscription
from headwater.replication.names import Remote, ReplicaName
from headwater.replication.outcome import Callbacks, Outcome, TransferOptions
from headwater.replication.protocol import LATEST, SubscribeInfo
from headwater.replication.subscription import PullSubscription
from headwater.replication.sync_state import SyncState
from headwater.replication.timers import Timers

OUTCOME = partial(
    Outcome,
    kind="pull",
    local="copy.db",
    remote="shop/app.db",
    is_new=True,
    base=None,
    size=512,
    pages=1,
    page_size=512,
    sent=0,
    received=512,
    seconds=0.0,
    changed_pages=1,
    dbhash=None,
    dry=False,
)


async def push(database: Database, remote: str) -> None:
    await asyncio.to_thread(headwater.sync, database.path, remote)


async def test_each_version_is_pulled_also_the_first_that_is_not_there_yet(
    server: RunningServer, database: Database, follow: Follow, tmp_path: Path
) -> None:
    remote, copy = f"{server.url}/shop/app.db", tmp_path / "copy.db"
    async with follow(remote, copy) as running:
        for number in (1, 2, 3):
            database.write(f"version {number}")
            await push(database, remote)
            assert (await running.next()).version == number
            assert names_in(copy)[-1] == f"version {number}"


async def test_readers_of_the_copy_see_whole_versions_while_it_is_written(
    server: RunningServer, database: Database, follow: Follow, tmp_path: Path
) -> None:
    remote, copy = f"{server.url}/shop/app.db", tmp_path / "copy.db"
    database.write("one")
    await push(database, remote)
    async with follow(remote, copy) as running:
        await running.next()
        reader = apsw.Connection(str(copy))
        reader.set_busy_timeout(10_000)
        assert reader.execute("SELECT count(*) FROM item").get == 1
        database.write("two")
        await push(database, remote)
        await running.next()
        # The same connection, without opening the file anew.
        assert reader.execute("SELECT count(*) FROM item").get == 2
        reader.close()


async def test_versions_made_while_the_line_was_down_are_pulled(
    server: RunningServer, database: Database, follow: Follow, tmp_path: Path
) -> None:
    direct, copy = f"{server.url}/shop/app.db", tmp_path / "copy.db"
    await push(database, direct)
    with FaultProxy("127.0.0.1", int(server.url.rpartition(":")[2])) as proxy:
        async with follow(f"ws://127.0.0.1:{proxy.port}/shop/app.db", copy) as running:
            await running.next()
            proxy.refuse()
            proxy.reset()
            for number in range(3):
                database.write(str(number))
                await push(database, direct)
            proxy.accept()
            assert (await running.next()).version == 4
    assert names_in(copy) == ["0", "1", "2"]


async def test_changes_of_its_own_are_not_overwritten(
    server: RunningServer, database: Database, follow: Follow, tmp_path: Path
) -> None:
    remote, copy = f"{server.url}/shop/app.db", Database(tmp_path / "copy.db")
    copy.write("mine")
    await push(database, remote)
    async with follow(remote, copy.path) as running:
        with pytest.raises(UnsyncedChangesError):
            await running.next()
    assert names_in(copy.path) == ["mine"]


async def test_push_timers_with_a_pull_key_are_warned_about_and_ignored(
    server: RunningServer, database: Database, follow: Follow, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    remote, copy = f"{server.url}/shop/app.db", tmp_path / "copy.db"
    await push(database, remote)
    with store_of(tmp_path / "server") as store:
        key = store.catalogue.create_key(ReplicaName("shop", "app.db"), "pull")
    async with follow(remote, copy, pull_key=key, timers=Timers.of("10m")) as running:
        assert (await running.next()).version == 1
    assert "waitIdle" in caplog.text


@pytest.mark.parametrize("line", ["open", "down"])
async def test_a_replica_made_anew_with_the_same_number_is_pulled(
    server: RunningServer, database: Database, follow: Follow, tmp_path: Path, line: str
) -> None:
    direct, copy, other = f"{server.url}/shop/app.db", tmp_path / "copy.db", Database(tmp_path / "other.db")
    other.write("made anew")
    await push(database, direct)
    with FaultProxy("127.0.0.1", int(server.url.rpartition(":")[2])) as proxy:
        async with follow(f"ws://127.0.0.1:{proxy.port}/shop/app.db", copy) as running:
            assert (await running.next()).version == 1
            if line == "down":
                proxy.refuse()
                proxy.reset()
            with store_of(tmp_path / "server") as store:
                store.remove(ReplicaName("shop", "app.db"))
            await push(other, direct)
            proxy.accept()
            assert (await running.next()).version == 1
    assert names_in(copy) == ["made anew"]


def happen(subscription: PullSubscription, *events: int | str) -> None:
    """Versions that are announced, and connections, each with the id of the replica and its newest version."""
    for each in events:
        *replica_id, number = str(each).split()
        if replica_id:
            subscription.on_connected(SubscribeInfo(None if replica_id == ["none"] else replica_id[0]))
        subscription.on_word(LATEST, number)


@pytest.mark.parametrize(
    ("before", "meanwhile", "pulls"),
    [
        (["old 5"], [1], [5, 1]),
        (["old 1"], [1], [1, 1]),
        (["old 5"], [1, 2, 3, 4, 5], [5, 5]),
        (["old 5"], [1, 2, 3, 4, 5, 6], [5, 6]),
        (["old 5"], ["new 5"], [5, 5]),
        (["old 5"], ["new 6"], [5, 6]),
        (["old 5"], ["old 5"], [5]),
        (["old 5"], [6], [6]),
        (["old 5"], [6, 7], [5, 7]),
        (["none 0", 1], ["none 0", 1], [1, 1]),
    ],
    ids=str,
)
async def test_a_replica_made_anew_during_a_pull_is_pulled_too(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    before: list[int | str],
    meanwhile: list[int | str],
    pulls: list[int],
) -> None:
    pulled: list[int | None] = []

    async def pull(*_: object) -> Outcome:
        if not pulled:
            happen(following, *meanwhile)
        return OUTCOME(version=pulls[len(pulled)])

    def note(outcome: Outcome) -> None:
        pulled.append(outcome.version)
        if len(pulled) == len(pulls):
            following.stop()

    monkeypatch.setattr(subscription, "pull", pull)
    monkeypatch.setattr(subscription, "BACKOFF", RetryPolicy(base_ms=1, factor=1.0, cap_ms=1, jitter=0.0))
    remote = Remote("ws://127.0.0.1:1", ReplicaName("shop", "app.db"))
    options = TransferOptions(client_id="here:1")
    following = PullSubscription(str(tmp_path / "copy.db"), remote, options, Callbacks(note), {})
    happen(following, *before)
    async with asyncio.timeout(PATIENCE_S):
        await following.run()
    assert pulled == pulls
    assert following._have == following._newest


async def test_a_stop_ends_a_running_pull(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def pull(*_: object) -> Outcome:
        following.stop()
        await asyncio.Event().wait()
        raise AssertionError

    monkeypatch.setattr(subscription, "pull", pull)
    remote = Remote("ws://127.0.0.1:1", ReplicaName("shop", "app.db"))
    options = TransferOptions(client_id="here:1")
    following = PullSubscription(str(tmp_path / "copy.db"), remote, options, Callbacks(print), {})
    happen(following, "old 1")
    async with asyncio.timeout(PATIENCE_S):
        await following.run()
    assert following._have == 0


async def test_another_sync_of_the_copy_is_waited_for(
    server: RunningServer, database: Database, follow: Follow, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    remote, copy = f"{server.url}/shop/app.db", tmp_path / "copy.db"
    await push(database, remote)
    with SyncState(str(copy)):
        async with follow(remote, copy) as running, asyncio.timeout(PATIENCE_S):
            while "another sync of this database is running" not in caplog.text:
                assert not running.task.done()
                await asyncio.sleep(0.01)
    async with follow(remote, copy) as running:
        assert (await running.next()).version == 1


@pytest.mark.parametrize("config", ["{this is no JSON", '{"new":' + "[" * 100_000, '{"keyType":7}'])
async def test_a_line_that_says_what_cannot_be_read_is_opened_again(
    follow: Follow, tmp_path: Path, config: str
) -> None:
    opened: asyncio.Queue[None] = asyncio.Queue()

    async def babble(connection: ServerConnection) -> None:
        opened.put_nowait(None)
        await connection.send("LATEST_VERSION " + "9" * 5000)
        await connection.send(f"CONFIG={config}")
        await connection.wait_closed()

    async with serve(babble, "127.0.0.1", 0) as babbling:
        port = next(iter(babbling.sockets)).getsockname()[1]
        async with follow(f"ws://127.0.0.1:{port}/shop/app.db", tmp_path / "copy.db"), asyncio.timeout(PATIENCE_S):
            await opened.get()
            await opened.get()


async def test_a_server_that_is_stopped_as_a_pull_begins_does_not_end_it(follow: Follow, tmp_path: Path) -> None:
    pulls: asyncio.Queue[None] = asyncio.Queue()

    async def stopping(connection: ServerConnection) -> None:
        assert connection.request is not None
        if "/pull/" in connection.request.path:
            await connection.recv()  # now it is the server's turn
            pulls.put_nowait(None)
            await connection.close(1001, "the server is going away")
        else:
            await connection.send("LATEST_VERSION 1")
            await connection.wait_closed()

    async with serve(stopping, "127.0.0.1", 0) as server:
        port = next(iter(server.sockets)).getsockname()[1]
        async with follow(f"ws://127.0.0.1:{port}/shop/app.db", tmp_path / "copy.db") as running:
            for _ in range(2):
                pulled = asyncio.create_task(pulls.get())
                await asyncio.wait({pulled, running.task}, return_when=asyncio.FIRST_COMPLETED)
                assert not running.task.done()


@pytest.mark.parametrize("version", ["@1", "@latest-1"])
async def test_an_older_version_cannot_be_followed(follow: Follow, tmp_path: Path, version: str) -> None:
    with pytest.raises(InvalidOptionError, match="newest"):
        async with follow(f"ws://127.0.0.1:1/shop/app.db{version}", tmp_path / "copy.db"):
            pass


async def test_a_directory_that_is_not_there_is_reported_at_the_start_and_waited_for_later(
    server: RunningServer, database: Database, follow: Follow, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    remote, away = f"{server.url}/shop/app.db", tmp_path / "away"
    await push(database, remote)
    with pytest.raises(InvalidOptionError, match=f"mkdir -p {away}"):
        async with follow(remote, away / "copy.db"):
            pass
    away.mkdir()
    async with follow(remote, away / "copy.db") as running:
        await running.next()
        away.rename(tmp_path / "moved")
        database.write("later")
        await push(database, remote)
        async with asyncio.timeout(PATIENCE_S):
            while "will be tried again" not in caplog.text:
                await asyncio.sleep(0.01)
        (tmp_path / "moved").rename(away)
        assert (await running.next()).version == 2
