"""Pushes, by hand: a version for each, published to the log; and nothing of what is cut off, refused or a lie."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest
from by_hand import (
    NAME,
    PATIENCE_S,
    REPLICA,
    Hosted,
    StartHost,
    announcement,
    children,
    make_database,
    rows_of,
    until,
    write,
)
from websockets.frames import Frame, Opcode

from headwater.delivery.retry import RetryPolicy
from headwater.errors import StoreError
from headwater.replication.host import events, push
from headwater.replication.protocol import MESSAGE_CHARS_MAX
from headwater.replication.rsync import RsyncProcess


async def nothing_left(server: Hosted, *files: str) -> None:
    """No scratch file and no process; only these files."""
    await until(lambda: server.files() == sorted(files) and children() == 0, f"only {files}")


# --- versions ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("page_size", "wal"), [(4096, False), (512, True), (65536, False)])
async def test_a_push_makes_a_version_that_is_the_database(
    hosted: StartHost, tmp_path: Path, page_size: int, wal: bool
) -> None:
    database = make_database(tmp_path / "app.db", page_size=page_size, wal=wal)
    async with hosted() as server:
        reported = await server.push(database, message="the first\nof all ✓")
        assert reported["committedVersionID"] == 1
        assert reported["isNew"] is True
        assert reported["pageSize"] == page_size
        await server.pull(tmp_path / "back.db")
        assert rows_of(tmp_path / "back.db") == rows_of(database)
        [(topic, id, data)] = server.messages()
        assert (topic, id) == ("replica.ns.app.db", f"replica-{reported['replicaID']}-1")
        assert data["message"] == "the first\nof all ✓"
        assert data["bytes"] >= data["size"] == reported["size"] == reported["pages"] * page_size
        assert data["client"] == "hand:1"
        assert data["replica"] == NAME
        assert data["replicaID"] == reported["replicaID"]
        assert (data["version"], data["base"], data["dbhash"]) == (1, 0, None)
        await nothing_left(server, "1.db")


async def test_the_next_push_moves_what_changed_and_the_same_again_makes_no_version(
    hosted: StartHost, database: Path
) -> None:
    async with hosted() as server:
        first = await server.push(database, message="x" * MESSAGE_CHARS_MAX)
        write(database, 1)
        second = await server.push(database, base=1, pushID="push-2", dbhash="0" * 40)
        assert second["committedVersionID"] == 2
        assert 0 < second["changedPages"] < first["changedPages"]
        assert second["replicaID"] == first["replicaID"]
        same = await server.push(database, base=2, pushID="push-3")
        assert (same["committedVersionID"], same["isNew"], same["changedPages"]) == (2, False, 0)
        by_consent = await server.push(database, base="latest", pushID="push-4")
        assert (by_consent["committedVersionID"], by_consent["isNew"]) == (2, False)
        assert [data["version"] for _, _, data in server.messages()] == [1, 2]
        assert server.messages()[1][2]["bytes"] < first["size"]
        await nothing_left(server, "2.db", "1.pages")


async def test_a_push_from_another_base_is_refused_before_a_page_moves(hosted: StartHost, database: Path) -> None:
    async with hosted() as server:
        assert await server.push(database, base=3) == "ABORT=VERSION_CONFLICT:0"
        await server.push(database)
        assert await server.push(database, base=0, pushID="push-2") == "ABORT=VERSION_CONFLICT:1"
        async with server.session(f"push/{NAME}") as session:
            assert await session.begin(database, base=7, pushID="push-2") == "ABORT=VERSION_CONFLICT:1"
            assert await session.closed() == 1000
        await nothing_left(server, "1.db")


async def test_a_dry_push_leaves_nothing(hosted: StartHost, database: Path) -> None:
    async with hosted() as server:
        async with server.session(f"push/{NAME}") as session:
            assert (await session.begin(database, dry=True))["ready"] is True
            await session.send({"complete": True, "dry": True})
            assert await session.closed() == 1000
        async with server.session(f"push/{NAME}") as session:  # one that was to be dry makes no version
            await session.begin(database, dry=True)
            await session.move("--origin", str(database), "x")
            assert (await session.complete()).startswith("ABORT=FAILED:")
        await nothing_left(server)
        assert server.store.catalogue.find(REPLICA) is None


# --- announcing -------------------------------------------------------------------------------------------------------


async def test_a_version_that_cannot_be_announced_stands_and_is_announced_later(
    hosted: StartHost, database: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "BACKOFF", RetryPolicy(base_ms=10, cap_ms=10))
    async with hosted() as server:
        announcer = server.endpoint._context.announcer  # type: ignore[union-attr]
        publish, refusals = announcer._publish, [StoreError("no"), StoreError("not yet")]

        async def sometimes(topic: str, data: Any, id: str) -> None:
            if refusals:
                raise refusals.pop()
            await publish(topic, data, id)

        announcer._publish = sometimes
        assert (await server.push(database))["committedVersionID"] == 1
        await until(lambda: len(server.messages()) == 1 and not server.store.catalogue.unannounced())


@pytest.mark.parametrize("was_published", [True, False])
async def test_what_a_crash_left_unannounced_is_announced_once_at_the_next_start(
    hosted: StartHost, database: Path, was_published: bool
) -> None:
    async with hosted() as server:
        announcer = server.endpoint._context.announcer  # type: ignore[union-attr]
        publish = announcer._publish

        async def then_die(topic: str, data: Any, id: str) -> None:
            if was_published:
                await publish(topic, data, id)
            raise StoreError("the crash")

        announcer._publish = then_die
        await server.push(database)
        assert len(server.messages()) == was_published
    async with hosted() as server:
        await until(lambda: not server.store.catalogue.unannounced())
        [(_, _, data)] = server.messages()
        assert data["version"] == 1


# --- cut off ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["between frames", "in mid-frame", "before the pages", "closed in order"])
async def test_a_push_that_is_cut_off_leaves_nothing_and_the_next_one_succeeds(
    hosted: StartHost, database: Path, tmp_path: Path, how: str
) -> None:
    async with hosted() as server:
        await server.push(database)
        before = rows_of(database)
        write(database, 20_000)
        async with server.session(f"push/{NAME}") as session:
            begun = await session.begin(database, base=1, pushID="cut")
            assert begun["base"] == 1
            assert children() == 1
            if how != "before the pages":
                await session.send(b"\x41\x02\x0c\x00\x00\x01\x00")  # a BEGIN as an origin says it
                assert isinstance(await session.recv(), bytes)
            if how == "in mid-frame":
                frame = Frame(Opcode.BINARY, b"\x44" * 100_000).serialize(mask=True)
                session.socket.transport.write(frame[:50_000])
                session.socket.transport.close()
            elif how != "closed in order":
                session.vanish()
        await nothing_left(server, "1.db")
        await server.pull(tmp_path / "back.db")
        assert rows_of(tmp_path / "back.db") == before
        assert (await server.push(database, base=1, pushID="again"))["committedVersionID"] == 2
        await until(lambda: not server.endpoint._sessions)


async def test_a_server_that_stops_aborts_a_push_that_runs_and_tells_its_client(
    hosted: StartHost, database: Path
) -> None:
    async with hosted() as server, server.session(f"push/{NAME}") as session:
        await session.begin(database)
        assert children() == 1
        await server.server.stop()
        assert await session.closed() == 1001
        assert server.files() == []
        assert children() == 0


async def test_a_server_that_stops_finishes_a_push_that_is_complete(hosted: StartHost, database: Path) -> None:
    reached, go_on = threading.Event(), threading.Event()

    def checkpoint(step: str) -> None:
        if step == "checked":
            reached.set()
            assert go_on.wait(PATIENCE_S)

    async with hosted(checkpoint=checkpoint) as server, server.session(f"push/{NAME}") as session:
        await session.begin(database)
        await session.move("--origin", str(database), "x")
        await session.send({"complete": True})
        await until(reached.is_set)
        stopping = asyncio.create_task(server.server.stop())
        await asyncio.sleep(0)
        go_on.set()
        assert (await session.config())["committedVersionID"] == 1
        await stopping
        assert [data["version"] for _, _, data in server.messages()] == [1]
        assert server.files() == ["1.db"]


# --- refused ----------------------------------------------------------------------------------------------------------


async def test_a_database_larger_than_allowed_is_refused_by_what_it_says_and_by_what_it_sends(
    hosted: StartHost, tmp_path: Path
) -> None:
    database = make_database(tmp_path / "app.db", 30_000)
    async with hosted(bytes_max=500_000) as server:
        assert (await server.push(database)).startswith("ABORT=TOO_LARGE:")
        async with server.session(f"push/{NAME}") as session:
            assert (await session.begin(database, pages=1))["ready"] is True
            await session.move("--origin", str(database), "x", in_vain=True)
            assert session.aborted.startswith("ABORT=TOO_LARGE:")
            assert await session.closed() == 1000
        await nothing_left(server)


async def test_what_our_end_writes_has_a_limit_too(
    hosted: StartHost, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    database = make_database(tmp_path / "app.db", 30_000)
    monkeypatch.setattr(
        push, "RsyncProcess", lambda *given, **named: RsyncProcess(*given, **{**named, "file_bytes": 100_000})
    )
    async with hosted() as server, server.session(f"push/{NAME}") as session:
        await session.begin(database)
        await session.move("--origin", str(database), "x", in_vain=True)
        assert session.aborted.startswith("ABORT=TOO_LARGE:")
        await nothing_left(server)


async def test_why_our_end_gave_up_is_reported(hosted: StartHost, database: Path, tmp_path: Path) -> None:
    other = make_database(tmp_path / "other.db", page_size=8192)
    async with hosted() as server:
        await server.push(database)
        async with server.session(f"push/{NAME}") as session:
            assert (await session.begin(other, base=1, pushID="push-2", pageSize=4096))["ready"] is True
            await session.move("--origin", str(other), "x", in_vain=True)
            assert session.aborted.startswith("ABORT=FAILED:")
            assert "page size" in session.aborted
            assert await session.closed() == 1000
        await nothing_left(server, "1.db")
        larger = await server.push(other, base=1, pushID="push-3")  # sent as it is, it is a version
        assert (larger["committedVersionID"], larger["pageSize"]) == (2, 8192)


LIES: dict[str, list[str | bytes | dict[str, Any]]] = {
    "binary before CONFIG": [b"\x41"],
    "no CONFIG": ["HELLO"],
    "CONFIG that is no JSON": ["CONFIG={"],
    "a base of another type": ["CONFIG={'base'}", {"base": [1]}],
    "a negative base": [{"base": -1}],
    "a page size that is none": [{"pageSize": 1000}],
    "no pages": [{"pages": 0}],
    "an empty push id": [{"pushID": ""}],
    "a push id without end": [{"pushID": "x" * 129}],
    "a message without end": ["MESSAGE=" + "x" * (MESSAGE_CHARS_MAX + 1)],
    "a text without end": ["MESSAGE=" + "x" * 100_000],
    "a text that is not UTF-8": ["not utf-8"],
    "two messages": ["MESSAGE=a", "MESSAGE=b"],
    "two CONFIGs": [{}, {}],
    "complete without pages": [{}, {"complete": True}],
    "incomplete": [{}, {"complete": False}],
    "a hash that is none": [{}, {"complete": True, "dbhash": "../.."}],
    "garbage for pages": [{}, b"\xff" * 1000, {"complete": True}],
    "pages that do not end": [{}, b"\x41\x02\x0c\x00\x00\x00\x01", {"complete": True}],
    "a message in the middle": [{}, "MESSAGE=late"],
}


@pytest.mark.parametrize("lie", LIES)
async def test_a_client_that_lies_is_reported_so_and_leaves_nothing(
    hosted: StartHost, database: Path, lie: str
) -> None:
    async with hosted() as server:
        await server.push(database)
        async with server.session(f"push/{NAME}") as session:
            for output in LIES[lie]:
                if isinstance(output, dict) and "complete" not in output:
                    output = {**announcement(database), "base": 1, "pushID": "lie", **output}
                if output == "not utf-8":
                    session.socket.transport.write(Frame(Opcode.TEXT, b"\xff\xfe").serialize(mask=True))
                else:
                    await session.send(output)
            while not (text := await session.text()).startswith("ABORT="):
                assert '"ready":true' in text
            assert text.startswith("ABORT=FAILED:")
            assert len(text) < 700
            assert str(server.directory) not in text
            assert await session.closed() == 1000
        await nothing_left(server, "1.db")
        assert len(server.messages()) == 1


async def test_a_first_version_without_pages_makes_no_replica(hosted: StartHost, database: Path) -> None:
    async with hosted() as server:
        async with server.session(f"push/{NAME}") as session:
            await session.begin(database)
            assert (await session.complete()).startswith("ABORT=FAILED:")
        await nothing_left(server)
        assert server.store.catalogue.find(REPLICA) is None
