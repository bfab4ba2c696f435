"""A pull that ends at a bad moment: what is recorded of the database is true, and no rows are lost."""

import asyncio
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import apsw
import pytest
from websockets.asyncio.server import ServerConnection
from websockets.exceptions import ConnectionClosed

from headwater.errors import LockedError, ReplicationFailedError
from headwater.replication import local_database as shell_module
from headwater.replication.integrity import dbhash
from headwater.replication.local_database import Shell
from headwater.replication.names import Remote, place_of
from headwater.replication.outcome import TransferOptions
from headwater.replication.pull import pull
from headwater.replication.rsync import RsyncProcess
from headwater.replication.sync import copy
from headwater.replication.sync_state import SyncRecord, SyncState

PULL = TransferOptions(client_id="here:1")


class Replicating:
    """A server with one version, which says what it has; and when our end has gone, `after_commit`."""

    def __init__(self, origin: Any, version: int) -> None:
        self._origin = origin
        self.noted = SyncRecord(replica_id="r", base=version, dbhash=dbhash(origin.path))
        self.after_commit = asyncio.Event()

    async def __call__(self, connection: ServerConnection) -> None:
        await connection.recv()
        noted = self.noted
        output = f'"replicaID":"r","version":{noted.base},"dbhash":"{noted.dbhash}"'
        await connection.send(f'CONFIG={{{output},"size":1,"pageSize":4096,"pages":1}}')
        end = await RsyncProcess.origin(self._origin.path)

        async def forth() -> None:
            while data := await end.read():
                await connection.send(data)

        async def cut() -> None:
            await self.after_commit.wait()
            connection.transport.abort()

        tasks = [asyncio.create_task(forth()), asyncio.create_task(cut())]
        try:
            async for frame in connection:
                await end.write(frame)  # type: ignore[arg-type]
        except ConnectionClosed:
            pass
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await end.gone()


@pytest.fixture
def noted_old(make: Any) -> Any:
    """A database with what is noted of it: version 5, while the server offers version 2."""
    database = make("copy.db", rows=500)
    return database, SyncRecord(replica_id="r", base=5, dbhash=dbhash(database.path))


@pytest.mark.parametrize("is_cancelled", [False, True])
def test_a_connection_that_breaks_after_the_commit_does_not_make_the_note_untrue(
    make: Any, misbehaving: Any, noted_old: Any, monkeypatch: pytest.MonkeyPatch, is_cancelled: bool
) -> None:
    """Our end has committed, and that is not known yet."""
    database, before = noted_old
    read = RsyncProcess.read

    async def session() -> tuple[SyncRecord, SyncRecord]:
        server = Replicating(make(), 2)

        async def late(end: RsyncProcess) -> bytes:
            data = await read(end)
            if not data and end._where == database.path:
                (pulling.cancel if is_cancelled else server.after_commit.set)()
                await asyncio.Event().wait()  # for ever
            return data

        monkeypatch.setattr(RsyncProcess, "read", late)
        async with misbehaving(server) as remote:
            note(database.path, remote, before)
            pulling = asyncio.create_task(pull(remote, database.path, PULL))
            await asyncio.wait({pulling})
            if not is_cancelled:
                with pytest.raises(ReplicationFailedError, match="cut off in the middle"):
                    pulling.result()
            return SyncState(database.path).load(remote), server.noted

    found, offered = asyncio.run(session())
    assert dbhash(database.path) == offered.dbhash
    if is_cancelled:  # there is no time for a look
        assert (found.base, found.pulling) == (5, offered.dbhash)
    else:
        assert found == offered
    assert not database.beside


def test_a_pull_that_is_cancelled_before_it_wrote_is_not_noted_as_one_that_did(
    make: Any, misbehaving: Any, noted_old: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    database, before = noted_old
    is_noting, may_go_on = threading.Event(), threading.Event()
    real = SyncState.save

    def slowly(beside: SyncState, remote: Remote, noted: SyncRecord, *, durable: bool = True) -> None:
        if noted.pulling is not None:
            is_noting.set()
            assert may_go_on.wait(60)
        real(beside, remote, noted, durable=durable)

    async def session() -> SyncRecord:
        async with misbehaving(Replicating(make(), 2)) as remote:
            note(database.path, remote, before)
            monkeypatch.setattr(SyncState, "save", slowly)
            pulling = asyncio.create_task(pull(remote, database.path, PULL))
            assert await asyncio.to_thread(is_noting.wait, 60)
            pulling.cancel()
            for _ in range(100):
                await asyncio.sleep(0)
            may_go_on.set()
            await asyncio.wait({pulling})
            assert pulling.cancelled()
            await asyncio.get_running_loop().shutdown_default_executor()  # whatever is still at work on a thread
            return SyncState(database.path).load(remote)

    assert asyncio.run(session()) == before


@pytest.mark.parametrize("way", ["pull", "copy"])
def test_a_cancelled_pull_does_not_wait_for_readers_of_the_database(
    make: Any, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    monkeypatch.setattr(shell_module, "BUSY_S_MAX", 3600.0)
    source, database = make(), make("copy.db", mode="delete")
    remote: Any = place_of("ws://127.0.0.1:9/ns/app.db")
    is_asking = threading.Event()
    ask = Shell.ask

    def asked(shell: Shell, sql: str) -> list[str]:
        if shell._path == database.path:
            is_asking.set()
        return ask(shell, sql)

    monkeypatch.setattr(Shell, "ask", asked)

    async def session() -> None:
        work = pull(remote, database.path, PULL) if way == "pull" else copy(source.path, database.path)
        working = asyncio.create_task(work)
        assert await asyncio.to_thread(is_asking.wait, 60)
        working.cancel()
        await asyncio.wait({working})
        assert working.cancelled()
        async with asyncio.timeout(60):
            await asyncio.get_running_loop().shutdown_default_executor()

    with closing(apsw.Connection(database.path)) as writer:
        writer.execute("begin exclusive")
        asyncio.run(session())


@pytest.mark.parametrize("mode", ["wal", "delete"])
def test_what_is_written_before_content_of_another_page_size_is_put_in_place_is_not_lost(
    client: Any, make: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, mode: str
) -> None:
    database = make(mode=mode, page_size=1024)
    client.push(database)
    client.pull("ns/app.db", "copy.db")
    database.run("pragma journal_mode = delete; pragma page_size = 4096; vacuum")
    client.push(database)
    noted = SyncState(str(tmp_path / "copy.db")).load(client.remote())
    database.path = str(tmp_path / "copy.db")
    ask = Shell.ask

    def a_moment_later(shell: Shell, sql: str) -> list[str]:
        if sql == "PRAGMA journal_mode;":  # the first thing of all
            monkeypatch.setattr(Shell, "ask", ask)
            database.write("never pushed")
        return ask(shell, sql)

    monkeypatch.setattr(Shell, "ask", a_moment_later)
    with pytest.raises(LockedError, match="wrote it meanwhile"):
        client.pull("ns/app.db", "copy.db")
    assert database.run("select note from t where id = 7") == [("never pushed",)]
    assert database.run("pragma journal_mode") == [(mode,)]
    assert SyncState(database.path).load(client.remote()) == noted


def note(path: str, remote: Remote, noted: SyncRecord) -> None:
    with SyncState(path) as beside:
        beside.save(remote, noted)
