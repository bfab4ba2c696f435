"""The two ends of sqlite3_rsync: what they move, how they fail, and that nothing of them stays."""

import asyncio
import os
from contextlib import closing
from typing import Any

import apsw
import pytest

from headwater.errors import ReplicationFailedError
from headwater.replication.rsync import ERROR, REPLICA_ERROR, OriginStream, RsyncProcess, error_at_the_end, transfer
from headwater.replication.sync import copy


async def joined(origin: str, replica: str) -> int:
    stream = OriginStream()
    await transfer(origin, replica, stream)
    return stream.bytes


def test_a_local_copy_of_a_hammered_rollback_database_is_whole_too(
    make: Any, hammer: Any, look: Any, tmp_path: Any
) -> None:
    path, target = make(mode="delete"), str(tmp_path / "copy.db")
    stop = hammer(path)
    seen: list[int] = []
    while len(seen) < 5 or len(set(seen)) < 2:
        asyncio.run(copy(path, target))
        seen.append(look.moves(target))
    stop()
    assert seen == sorted(seen)


def test_a_replica_that_cannot_commit_is_reported_by_its_own_end(make: Any, tmp_path: Any) -> None:
    """It says so after the last page, when an origin far away has gone already."""
    target = str(tmp_path / "copy.db")

    async def moved() -> None:
        one, other = await RsyncProcess.origin(make(mode="delete", rows=10)), await RsyncProcess.replica(target)
        try:
            await other.write(await one.read())
            await one.write(await other.read())
            pages = b""
            while not pages.endswith(b"B") or pages[-6:-5] != b"E":
                pages += await one.read()
            with closing(apsw.Connection(target)) as reader:  # holds the file, so that the commit has to fail
                reader.execute("pragma locking_mode = exclusive; begin")
                reader.execute("select * from sqlite_schema").fetchall()
                await other.write(pages)
                while await other.read():
                    pass
            await other.wait()
        finally:
            await one.gone()
            await other.gone()

    with pytest.raises(ReplicationFailedError, match="COMMIT"):
        asyncio.run(moved())


@pytest.mark.parametrize(
    ("output", "kind", "reported"),
    [
        (b"d" + b"h" * 20 + b"e" + b"b\x00\x00\x00\x04full", REPLICA_ERROR, "full"),
        (b"d" + b"b" * 20 + b"e", REPLICA_ERROR, ""),
        (b"A\x02\x0c\x00\x00\x00\x02C\x00\x00\x00\x02no", ERROR, "no"),
        (b"DC\x00\x00\x00\x07pE\x00\x00\x00\x01B", ERROR, ""),
        (b"", ERROR, ""),
    ],
)
def test_an_error_is_the_last_thing_that_an_end_says(output: bytes, kind: int, reported: str) -> None:
    assert error_at_the_end(output, kind) == reported


def test_an_end_that_fails_is_reported_though_both_exit_with_0(make: Any, look: Any) -> None:
    path, other = make(page_size=4096), make("other.db", page_size=512)
    before = look.content(other)
    with pytest.raises(ReplicationFailedError, match="page size"):
        asyncio.run(joined(path, other))
    assert look.content(other) == before


def test_a_missing_origin_is_reported(make: Any, tmp_path: Any) -> None:
    with pytest.raises(ReplicationFailedError):
        asyncio.run(joined(str(tmp_path / "missing.db"), make()))


def test_a_replica_killed_in_the_middle_is_as_it_was(make: Any, look: Any, tmp_path: Any) -> None:
    path, replica = make(rows=20_000), make("replica.db", mode="delete", rows=500)
    before = look.content(replica)

    async def killed() -> None:
        one, other = await RsyncProcess.origin(path), await RsyncProcess.replica(replica)

        async def back() -> None:
            while data := await other.read():
                await one.write(data)

        answering = asyncio.create_task(back())
        written = 0
        while written < 2_000_000:
            data = await one.read()
            assert data, "the origin ended too early"
            written += len(data)
            await other.write(data)
        answering.cancel()
        await asyncio.gather(answering, return_exceptions=True)
        await other.gone()
        await one.gone()

    asyncio.run(killed())
    with closing(apsw.Connection(replica)) as connection:
        assert connection.pragma("integrity_check") == "ok"
    assert look.content(replica) == before


async def test_an_end_that_exits_releases_its_own_waiters_only(make: Any, tmp_path: Any) -> None:
    origin, gone = await RsyncProcess.origin(make()), await RsyncProcess.replica(str(tmp_path / "gone.db"))
    waiting = asyncio.create_task(gone.read())
    await asyncio.sleep(0)
    gone.kill()
    next = await RsyncProcess.replica(str(tmp_path / "next.db"))  # its pipes have the numbers of those that were closed
    reading = asyncio.create_task(next.read())
    await asyncio.sleep(0)
    assert await asyncio.wait_for(waiting, 60) == b""
    await next.write(await origin.read())
    assert await asyncio.wait_for(reading, 60)
    for end in (origin, gone, next):
        await end.gone()


def test_an_end_that_writes_nothing_but_newlines_complains_too(make: Any) -> None:
    async def look() -> str:
        end = await RsyncProcess.origin(make())
        try:
            os.write(end._stderr.fileno(), b"\n" * 10_000)
            return end.error_output()
        finally:
            await end.gone()

    assert asyncio.run(look())
