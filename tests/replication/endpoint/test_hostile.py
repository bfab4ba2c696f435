"""Rights that end during a push, clients that wait too long, and a log or a disk that refuses the push."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import struct
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from by_hand import NAME, PATIENCE_S, REPLICA, StartHost, children, make_database, rows_of, until, write
from websockets.exceptions import ConnectionClosed

from headwater.delivery.retry import RetryPolicy
from headwater.errors import DiskFullError, LockedError, StoreError, UnknownReplicaError
from headwater.replication.host import catalogue, disk, events, pull, push
from headwater.replication.host.catalogue import Catalogue
from headwater.replication.host.disk import new_replica_id
from headwater.replication.sqlite_tools import start
from headwater.server.auth import Scopes, TokenFile

# --- not any more -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["key revoked", "token revoked", "closed meanwhile"])
async def test_a_push_that_may_not_any_more_when_it_is_complete_is_no_version(
    hosted: StartHost, database: Path, tokens: TokenFile, how: str
) -> None:
    key, options = None, {}
    if how == "token revoked":
        key = tokens.create("ours", Scopes(publish=("replica.ns.>",)), now_ms=1)
        options = {"tokens": tokens}
    async with hosted(**options) as server:
        if how == "key revoked":
            key = server.store.catalogue.create_key(REPLICA, "push")
        async with server.session(f"push/{NAME}", key=key) as session:
            if how == "closed meanwhile":  # it had no key when the push came, and has one when it begins
                server.store.catalogue.create_key(REPLICA, "push")
            await session.begin(database)
            await session.move("--origin", str(database), "x")
            if how == "key revoked":
                server.store.catalogue.remove_key(REPLICA, str(key).split("_")[1])
            elif how == "token revoked":
                tokens.revoke(str(key).split("_")[1])
            assert "may not push any more" in await session.complete()
        replica = server.store.catalogue.find(REPLICA)
        assert replica is None or replica.newest == 0
        await until(lambda: server.files() == [] and children() == 0)


async def test_a_client_that_may_not_push_any_more_claims_no_more(hosted: StartHost) -> None:
    async with hosted() as server:
        key = server.store.catalogue.create_key(REPLICA, "push")
        async with server.session(f"subscribe/{NAME}", key=key) as session:
            await session.send({"coordinate": True})
            await session.config()
            assert await session.text() == "LATEST_VERSION 0"
            await session.send("SQLRSYNC_CLAIM 5")
            assert await session.text() == "SQLRSYNC_CLAIM"
            server.store.catalogue.remove_key(REPLICA, key.split("_")[1])
            await session.send("SQLRSYNC_CLAIM 9")
            assert (await session.text()).startswith("ABORT=UNAUTHORIZED:")


async def test_words_that_go_too_deep_are_reported_so(hosted: StartHost) -> None:
    async with hosted() as server, server.session(f"push/{NAME}") as session:
        await session.send('CONFIG={"x":' + "[" * 10_000 + "]" * 10_000 + "}")
        assert "CONFIG is not as expected" in await session.text()


# --- a stop that is impatient -----------------------------------------------------------------------------------------


async def test_a_server_that_cannot_wait_leaves_a_complete_push_to_its_end_and_the_directory_locked_until_then(
    hosted: StartHost, database: Path
) -> None:
    reached, go_on = threading.Event(), threading.Event()

    def checkpoint(step: str) -> None:
        if step == "checked":
            reached.set()
            assert go_on.wait(PATIENCE_S)

    impatient = hosted(checkpoint=checkpoint, shutdown_timeout=0.05)
    async with impatient as server, server.session(f"push/{NAME}") as session:
        await session.begin(database)
        await session.move("--origin", str(database), "x")
        await session.send({"complete": True})
        await until(reached.is_set)
        await server.server.stop()
        with pytest.raises(LockedError):
            await hosted().server.start()
        go_on.set()
        assert impatient.endpoint._closing is not None
        await impatient.endpoint._closing
    async with hosted() as server:
        assert server.files() == ["1.db"]
        await until(lambda: [data["version"] for _, _, data in server.messages()] == [1])


# --- a log or a disk that takes no more -------------------------------------------------------------------------------


async def test_versions_are_announced_in_order_and_a_replica_that_is_refused_keeps_no_other_waiting(
    hosted: StartHost, database: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "BACKOFF", RetryPolicy(base_ms=60_000, cap_ms=60_000))
    async with hosted() as server:
        announcer = server.endpoint._context.announcer  # type: ignore[union-attr]
        publish, refused = announcer._publish, {"replica.ns.app.db", "replica.ns.bad"}

        async def sometimes(topic: str, data: Any, id: str) -> None:
            if topic in refused:
                raise StoreError("not now")
            await publish(topic, data, id)

        announcer._publish = sometimes
        await server.push(database)
        await server.push(database, "ns/bad")
        refused.remove("replica.ns.app.db")
        write(database, 1)
        await server.push(database, base=1, pushID="push-2")
        reported = [(topic, data["version"]) for topic, _, data in server.messages()]
        assert reported == [("replica.ns.app.db", 1), ("replica.ns.app.db", 2)]
        assert [replica.name.name for replica, _ in server.store.catalogue.unannounced()] == ["bad"]


async def test_a_replica_whose_message_takes_too_long_keeps_no_other_waiting(
    hosted: StartHost, database: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = sorted(new_replica_id() for _ in range(2))  # the slow one comes first
    monkeypatch.setattr(catalogue, "new_replica_id", lambda: ids.pop(0))
    monkeypatch.setattr(events, "BACKOFF", RetryPolicy(base_ms=10, cap_ms=10))
    monkeypatch.setattr(events, "PUBLISH_S_MAX", 0.1)
    async with hosted() as server:
        announcer = server.endpoint._context.announcer  # type: ignore[union-attr]
        publish = announcer._publish

        async def sometimes(topic: str, data: Any, id: str) -> None:
            if topic == "replica.ns.slow":
                await asyncio.Event().wait()
            await publish(topic, data, id)

        announcer._publish = sometimes
        await server.push(database, "ns/slow")
        await server.push(database)
        await until(lambda: [topic for topic, _, _ in server.messages()] == ["replica.ns.app.db"])


async def test_the_last_room_of_the_disk_is_left_to_the_log(
    hosted: StartHost, database: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = 1 << 40
    monkeypatch.setattr(push, "SPACE_CHECK_BYTES", 1_000)
    monkeypatch.setattr(disk.shutil, "disk_usage", lambda _: SimpleNamespace(total=1 << 40, free=free))
    async with hosted() as server:
        await server.push(database)
        write(database, 1_000)
        await server.push(database, base=1, pushID="push-2")
        free = disk.FREE_BYTES_MIN + 1_000
        write(database, 1_000)
        assert (await server.push(database, base=2, pushID="push-3")).startswith("ABORT=DISK_FULL:")
        async with server.session(f"pull/{NAME}@1") as session:  # would have to be put together
            await session.send({"dry": False})
            assert (await session.text()).startswith("ABORT=DISK_FULL:")
        await server.pull(tmp_path / "back.db")
        free = 1 << 40
        async with server.session(f"push/{NAME}") as session:  # others take the room while the pages come
            await session.begin(database, base=2, pushID="push-4")
            free = disk.FREE_BYTES_MIN - 1
            await session.move("--origin", str(database), "x", in_vain=True)
            assert session.aborted.startswith("ABORT=DISK_FULL:")
        await until(lambda: server.files() == ["1.pages", "2.db"] and children() == 0)
    assert len(rows_of(tmp_path / "back.db")) == 1_500


# --- one that is too slow ---------------------------------------------------------------------------------------------


async def test_a_push_or_a_pull_that_drips_gives_its_slot_back(
    hosted: StartHost, database: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with hosted(pushes_max=1) as server:
        await server.push(database)
        await until(lambda: not server.endpoint._sessions)
        for module in (push, pull):
            monkeypatch.setattr(module, "patience_s", lambda *_: 0.1)
        async with server.session(f"push/{NAME}") as session:
            assert await server.refused(f"push/{NAME}") == 503
            await session.begin(database, base=1, pushID="push-2")
            assert (await session.text()).startswith("ABORT=FAILED:too slow")
        async with server.session(f"pull/{NAME}") as session:
            await session.send({"dry": False})
            await session.config()
            assert (await session.text()).startswith("ABORT=FAILED:too slow")
        monkeypatch.undo()
        await until(lambda: not server.endpoint._sessions and children() == 0)
        assert (await server.push(database, base=1, pushID="push-3"))["isNew"] is False
        assert server.files() == ["1.db"]


async def test_what_a_client_lets_our_end_complain_about_fills_no_disk(hosted: StartHost, database: Path) -> None:
    """An end of `sqlite3_rsync` prints the text given, into a file of ours."""
    words = b"x" * 100_000
    async with hosted() as server:
        await server.push(database)
        async with server.session(f"push/{NAME}") as session:
            await session.begin(database, base=1, pushID="push-2")
            with contextlib.suppress(ConnectionClosed):
                await session.send(b"\x41\x01\x0c" + struct.pack(">I", 10))
                for _ in range(200):
                    await session.send(b"\x46" + struct.pack(">I", len(words)) + words)
            assert (await session.text()).startswith("ABORT=FAILED:")
        async with server.session(f"pull/{NAME}") as session:
            await session.send({"dry": False})
            await session.config()
            with contextlib.suppress(ConnectionClosed):
                for _ in range(100):
                    await session.send(b"\x66" + struct.pack(">I", len(words)) + words)
            assert (await session.text()).startswith("ABORT=FAILED:")
        found = await asyncio.to_thread(server.store.catalogue.totals)
        assert found.versions == 1


async def test_a_push_needs_room_for_the_copy_that_it_is_written_into(
    hosted: StartHost, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    large = make_database(tmp_path / "large.db", 2_000)
    async with hosted() as server:
        await server.push(large)
        free = disk.FREE_BYTES_MIN + large.stat().st_size // 2
        monkeypatch.setattr(disk.shutil, "disk_usage", lambda _: SimpleNamespace(total=1 << 40, free=free))
        async with server.session(f"push/{NAME}") as session:
            assert (await session.begin(large, base=1, pushID="push-2", pages=1)).startswith("ABORT=DISK_FULL:")


async def test_two_that_are_about_to_take_room_do_not_take_the_same(
    hosted: StartHost, database: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def checkpoint(step: str) -> None:
        if step == "begun" and not begun.is_set():
            begun.set()
            assert go_on.wait(PATIENCE_S)

    free = disk.FREE_BYTES_MIN + database.stat().st_size * 3 // 2
    monkeypatch.setattr(disk.shutil, "disk_usage", lambda _: SimpleNamespace(total=1 << 40, free=free))
    async with hosted(checkpoint=checkpoint) as server:
        async with server.session(f"push/{NAME}") as one, server.session("push/ns/other") as other:
            beginning = asyncio.create_task(one.begin(database))
            await until(begun.is_set)
            assert (await other.begin(database)).startswith("ABORT=DISK_FULL:")
            go_on.set()
            assert (await beginning)["ready"]
        assert (await server.push(database, "ns/other"))["committedVersionID"] == 1


async def test_a_change_that_cannot_be_noted_ends_no_subscription(
    hosted: StartHost, database: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    noting = threading.Event()

    def full(*given: object) -> None:
        noting.set()
        raise DiskFullError("no room")

    async with hosted() as server, server.session(f"subscribe/{NAME}") as session:
        monkeypatch.setattr(Catalogue, "record_change", full)
        await session.send({})
        await session.config()
        assert await session.text() == "LATEST_VERSION 0"
        await session.send("SQLRSYNC_CHANGED 5")
        await until(noting.is_set)
        await server.push(database)
        assert await session.text() == "LATEST_VERSION 1"


@pytest.mark.skipif(not hasattr(resource, "prlimit"), reason="limits of another process are Linux's")
def test_what_kills_our_end_leaves_no_image_of_its_memory() -> None:
    with start(["sleep", "60"]) as process:
        found = resource.prlimit(process.pid, resource.RLIMIT_CORE)
        process.kill()
    assert found == (0, 0)


async def test_a_push_that_begins_while_the_newest_is_replaced_and_forgotten_goes_on(
    hosted: StartHost, database: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(*given: object) -> None:
        raise UnknownReplicaError("it has no version 1")

    async with hosted() as server:
        await server.push(database)
        monkeypatch.setattr(Catalogue, "get_version", gone)
        assert (await server.push(database, base=1, pushID="push-2"))["isNew"] is False
