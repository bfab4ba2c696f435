"""A database that pushes itself."""

import asyncio
import errno
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
from fault_lane import Direction
from fault_proxy import FaultProxy
from followed import PATIENCE_S, SECOND, Database, Follow, names_in, store_of
from served import RunningServer
from server_process import ServerProcess

import headwater
from headwater.errors import InvalidOptionError, NotADatabaseError, UnreachableError, VersionConflictError
from headwater.replication import subscription
from headwater.replication.names import ReplicaName
from headwater.replication.outcome import Outcome
from headwater.replication.push import push as push_once
from headwater.replication.timers import Timers

NAME = ReplicaName("shop", "app.db")


async def test_it_pushes_at_the_start_and_after_each_quiet_second(
    server: RunningServer, database: Database, follow: Follow, tmp_path: Path
) -> None:
    database.write("first")
    remote = f"{server.url}/shop/app.db"
    async with follow(database.path, remote, timers=SECOND, message="by hand") as running:
        assert (await running.next()).version == 1
        for number in (2, 3):
            before_s = time.monotonic()
            database.write(f"later {number}")
            assert (await running.reached(number)).version == number
            assert time.monotonic() - before_s >= 1.0
    assert [outcome.version for outcome in running.seen if outcome.is_new] == [1, 2, 3]
    headwater.sync(remote, tmp_path / "pulled.db")
    assert names_in(tmp_path / "pulled.db") == ["first", "later 2", "later 3"]
    with store_of(tmp_path / "server") as store:
        assert [version.message for version in store.catalogue.versions(NAME)] == ["", "", "by hand"]


async def test_writes_in_a_row_are_one_push(
    server: RunningServer, database: Database, follow: Follow, tmp_path: Path
) -> None:
    remote = f"{server.url}/shop/app.db"
    async with follow(database.path, remote, timers=SECOND) as running:
        await running.next()
        last_s, longest_pause_s = time.monotonic(), 0.0
        for number in range(3):
            database.write(str(number))
            longest_pause_s, last_s = max(longest_pause_s, time.monotonic() - last_s), time.monotonic()
            await asyncio.wait({running.task}, timeout=0.3)  # so that each is seen
        assert (await running.reached(2)).version == 2
    await asyncio.to_thread(headwater.sync, f"{remote}@2", tmp_path / "pulled.db")
    # A machine that stood still made the database quiet.
    assert names_in(tmp_path / "pulled.db") == ["0", "1", "2"] or longest_pause_s > 0.9


async def test_a_busy_database_is_pushed_at_the_longest_interval(
    server: RunningServer, database: Database, follow: Follow
) -> None:
    timers = Timers.of("2s", "0s", "3s")
    began_s = last_s = time.monotonic()
    longest_pause_s = 0.0
    async with follow(database.path, f"{server.url}/shop/app.db", timers=timers) as running:
        await running.next()
        pushed = asyncio.create_task(running.reached(2))
        while not pushed.done():
            database.write()
            longest_pause_s, last_s = max(longest_pause_s, time.monotonic() - last_s), time.monotonic()
            await asyncio.wait({pushed}, timeout=0.3)
        assert (await pushed).version == 2
        # The first push began later than this test did; a machine that stood still made the database quiet.
        assert time.monotonic() - began_s >= 3 or longest_pause_s > 1


async def test_a_file_put_in_its_place_and_one_made_anew_are_pushed(
    server: RunningServer, database: Database, follow: Follow, tmp_path: Path
) -> None:
    remote = f"{server.url}/shop/app.db"
    async with follow(database.path, remote) as running:
        await running.next()
        other = Database(tmp_path / "other.db", mode="delete")
        other.write("put in its place")
        os.replace(other.path, database.path)
        assert (await running.reached(2)).version == 2
        anew = Database(tmp_path / "anew.db")
        anew.write("made anew")
        for ending in ("", "-wal", "-shm"):
            database.path.with_name(database.path.name + ending).unlink(missing_ok=True)
        os.rename(anew.path, database.path)
        assert (await running.reached(3)).version == 3
    headwater.sync(remote, tmp_path / "pulled.db")
    assert names_in(tmp_path / "pulled.db") == ["made anew"]


async def test_with_push_on_exit_the_end_begins_with_a_push(
    server: RunningServer, database: Database, follow: Follow, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    remote = f"{server.url}/shop/app.db"
    async with follow(database.path, remote, timers=Timers.of("1h"), push_on_exit=True) as running:
        assert (await running.next()).version == 1
        database.write("a moment before")
        await running.stop()
        assert (await running.next()).version == 2
    headwater.sync(remote, tmp_path / "pulled.db")
    assert names_in(tmp_path / "pulled.db") == ["a moment before"]
    assert "not pushed" not in caplog.text


async def test_a_last_push_that_does_not_come_through_is_not_waited_for_for_ever(
    server: RunningServer,
    database: Database,
    follow: Follow,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(subscription, "LAST_PUSH_S_MAX", 0.9)  # the first try fails at once, the next is in 1 s

    async def in_vain(*_: Any) -> Outcome:
        raise UnreachableError("connection refused")

    remote = f"{server.url}/shop/app.db"
    async with follow(database.path, remote, timers=Timers.of("1h"), push_on_exit=True) as running:
        await running.next()
        monkeypatch.setattr(subscription, "push", in_vain)
        await running.stop()
    assert "will be tried again in 1s: " in caplog.text
    assert "not pushed" in caplog.text


async def test_a_database_that_is_suddenly_small_is_worth_a_warning(
    server: RunningServer, database: Database, follow: Follow, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    database.write("x" * 500_000)
    async with follow(database.path, f"{server.url}/shop/app.db") as running:
        assert (await running.next()).version == 1
        database.write("y")
        assert (await running.reached(2)).version == 2
        assert "if that is a mistake" not in caplog.text
        small = Database(tmp_path / "small.db", mode="delete")
        os.replace(small.path, database.path)
        assert (await running.reached(3)).version == 3
    assert "if that is a mistake, version 2 has what was there" in caplog.text


async def test_what_another_pushed_meanwhile_ends_it_and_is_reported(
    server: RunningServer, database: Database, follow: Follow, tmp_path: Path
) -> None:
    remote = f"{server.url}/shop/app.db"
    async with follow(database.path, remote) as running:
        await running.next()
        other = Database(tmp_path / "other.db")
        other.write("by another")
        await asyncio.to_thread(headwater.sync, other.path, f"{remote}@latest")
        database.write("mine")
        with pytest.raises(VersionConflictError) as refused:
            await running.next()
    assert refused.value.newest == 2
    with store_of(tmp_path / "server") as store:
        [report] = store.catalogue.reports(NAME)
        assert json.loads(report.document)["kind"] == "conflict"
        assert store.catalogue.get(NAME).newest == 2


async def test_a_push_cut_off_in_the_middle_is_reported_and_made_again(
    server: RunningServer, database: Database, follow: Follow, tmp_path: Path
) -> None:
    database.write("x" * 500_000)
    with FaultProxy("127.0.0.1", int(server.url.rpartition(":")[2])) as proxy:
        remote = f"ws://127.0.0.1:{proxy.port}/shop/app.db"
        async with follow(database.path, remote) as running:
            assert (await running.next()).version == 1
            proxy.cut_after(100_000, Direction.TO_SERVER)
            database.write("y" * 500_000)
            again = await running.reached(2)
            assert (again.version, again.is_new) == (2, True)
    with store_of(tmp_path / "server") as store:
        assert [json.loads(report.document)["kind"] for report in store.catalogue.reports(NAME)] == ["partial"]
        assert all(store.verify(NAME, number).ok for number in (1, 2))


async def test_a_server_that_is_away_is_waited_for(server: RunningServer, database: Database, follow: Follow) -> None:
    port = int(server.url.rpartition(":")[2])
    with FaultProxy("127.0.0.1", 1) as proxy:  # without a listener
        async with follow(database.path, f"ws://127.0.0.1:{proxy.port}/shop/app.db") as running:
            await asyncio.to_thread(proxy.wait_until, lambda counts: counts.unreachable >= 3, PATIENCE_S)
            proxy.retarget("127.0.0.1", port)
            assert (await running.next()).version == 1


async def test_a_base_by_its_number_is_that_of_the_first_push(
    server: RunningServer, database: Database, follow: Follow, tmp_path: Path
) -> None:
    remote = f"{server.url}/shop/app.db"
    await asyncio.to_thread(headwater.sync, Database(tmp_path / "other.db").path, remote)
    database.write("over it")
    async with follow(database.path, f"{remote}@1") as running:
        for number in (2, 3, 4):
            assert (await running.reached(number)).version == number
            database.write()


async def test_an_outcome_whose_callback_fails_ends_it(
    server: RunningServer, database: Database, follow: Follow, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with follow(database.path, f"{server.url}/shop/app.db") as running:

        def refuse(_outcome: object) -> None:
            raise BrokenPipeError("the reader has gone")

        monkeypatch.setattr(running.subscription, "_on_outcome", refuse)
        with pytest.raises(BrokenPipeError):
            await running.next()


async def test_a_passing_fault_of_the_operating_system_is_waited_out(
    server: RunningServer, database: Database, follow: Follow, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults = [OSError(errno.EMFILE, "too many open files")]

    async def push(*arguments: Any) -> Outcome:
        if faults:
            raise faults.pop()
        return await push_once(*arguments)

    monkeypatch.setattr("headwater.replication.subscription.push", push)
    async with follow(database.path, f"{server.url}/shop/app.db") as running:
        assert (await running.next()).version == 1
    assert not faults


async def test_a_wrong_path_ends_it_at_once(
    server: RunningServer, follow: Follow, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    remote = f"{server.url}/shop/app.db"
    with pytest.raises(InvalidOptionError, match="no such file"):
        async with follow(tmp_path / "mistyped.db", remote):
            pass
    (tmp_path / "text.db").write_text("no database, but a text that is longer than a header " * 20)
    with pytest.raises(NotADatabaseError):
        async with follow(tmp_path / "text.db", remote):
            pass
    assert "not pushed" not in caplog.text


async def test_without_taking_turns_it_tells_the_server_of_changes(
    server: RunningServer, database: Database, follow: Follow, tmp_path: Path
) -> None:
    async with follow(database.path, f"{server.url}/shop/app.db") as running:
        await running.next()
        with store_of(tmp_path / "server") as store:
            assert store.catalogue.get(NAME).changed_ms is None
            database.write("second")
            await running.next()
            assert store.catalogue.get(NAME).changed_ms is not None


async def test_a_push_whose_server_was_killed_is_reported_when_it_is_back(
    database: Database, follow: Follow, tmp_path: Path
) -> None:
    (tmp_path / "server").mkdir()
    server = ServerProcess(tmp_path / "server" / "log.db")
    server.start()
    await asyncio.to_thread(headwater.sync, database.path, f"{server.url}/shop/app.db")
    database.write("x" * 5_000_000)
    with FaultProxy("127.0.0.1", server.port) as proxy:
        proxy.throttle(4_000_000, Direction.TO_SERVER)
        remote = f"ws://127.0.0.1:{proxy.port}/shop/app.db@latest"  # known here under another port
        async with follow(database.path, remote) as running:
            await asyncio.to_thread(proxy.wait_until, lambda counts: counts.to_server_bytes > 1_000_000, PATIENCE_S)
            server.kill()
            proxy.heal()
            server.start()
            assert (await running.next()).version == 2
    with store_of(tmp_path / "server") as store:
        assert [json.loads(report.document)["kind"] for report in store.catalogue.reports(NAME)] == ["partial"]
    server.stop()
