"""Who may not any more, who waits for too much to end, and a log or a disk that does not take it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from by_hand import NAME, PATIENCE_S, Hosted, children, make_database, rows_of, until, write

from headwater.delivery.retry import RetryPolicy
from headwater.errors import Locked, StoreError
from headwater.replication.host import announcing, pushing, room
from headwater.replication.names import ReplicaName
from headwater.server.scopes import Scopes
from headwater.server.tokens import TokenFile

Hosting = Callable[..., Hosted]
REPLICA = ReplicaName("ns", "app.db")


@pytest.fixture
def database(tmp_path: Path) -> Path:
    return make_database(tmp_path / "app.db", 10)


# --- not any more -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["key revoked", "token revoked", "closed meanwhile"])
async def test_a_push_that_may_not_any_more_when_it_is_complete_is_no_version(
    hosted: Hosting, database: Path, tmp_path: Path, how: str
) -> None:
    key, options = None, {}
    if how == "token revoked":
        tokens = TokenFile(tmp_path / "tokens.json")
        key = tokens.create("ours", Scopes(publish=("replica.ns.>",)), now_ms=1)
        options = {"tokens": tmp_path / "tokens.json"}
    async with hosted(**options) as server:
        if how == "key revoked":
            key = server.shelf.create_key(REPLICA, "push")
        async with server.session(f"push/{NAME}", key=key) as session:
            if how == "closed meanwhile":  # it was nobody's when the push came, and is somebody's when it begins
                server.shelf.create_key(REPLICA, "push")
            await session.begin(database)
            await session.move("--origin", str(database), "x")
            if how == "key revoked":
                server.shelf.revoke_key(REPLICA, str(key).split("_")[1])
            elif how == "token revoked":
                tokens.revoke(str(key).split("_")[1])
            assert "may not push any more" in await session.complete()
        replica = server.shelf.find(REPLICA)
        assert replica is None or replica.newest == 0
        await until(lambda: server.files() == [] and children() == 0)


async def test_who_may_not_push_any_more_claims_no_more(hosted: Hosting) -> None:
    async with hosted() as server:
        key = server.shelf.create_key(REPLICA, "push")
        async with server.session(f"subscribe/{NAME}", key=key) as session:
            await session.send({"coordinate": True})
            await session.config()
            assert await session.text() == "LATEST_VERSION 0"
            await session.send("SQLRSYNC_CLAIM 5")
            assert await session.text() == "SQLRSYNC_CLAIM"
            server.shelf.revoke_key(REPLICA, key.split("_")[1])
            await session.send("SQLRSYNC_CLAIM 9")
            assert (await session.text()).startswith("ABORT=FAILED:")


async def test_words_that_go_too_deep_are_told_so(hosted: Hosting) -> None:
    async with hosted() as server, server.session(f"push/{NAME}") as session:
        await session.send('CONFIG={"x":' + "[" * 10_000 + "]" * 10_000 + "}")
        assert "CONFIG is not as expected" in await session.text()


# --- a stop that is impatient -----------------------------------------------------------------------------------------


async def test_a_server_that_cannot_wait_leaves_a_complete_push_to_its_end_and_the_directory_locked_until_then(
    hosted: Hosting, database: Path
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
        with pytest.raises(Locked):
            await hosted().server.start()
        go_on.set()
        assert impatient.endpoint._closing is not None
        await impatient.endpoint._closing
    async with hosted() as server:
        assert server.files() == ["1.db"]
        await until(lambda: [data["version"] for _, _, data in server.messages()] == [1])


# --- a log or a disk that takes no more -------------------------------------------------------------------------------


async def test_versions_are_announced_in_order_and_a_replica_that_is_refused_keeps_no_other_waiting(
    hosted: Hosting, database: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(announcing, "BACKOFF", RetryPolicy(base_ms=60_000, cap_ms=60_000))
    async with hosted() as server:
        announcer = server.endpoint._hosting.announcer  # type: ignore[union-attr]
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
        told = [(topic, data["version"]) for topic, _, data in server.messages()]
        assert told == [("replica.ns.app.db", 1), ("replica.ns.app.db", 2)]
        assert [replica.name.name for replica, _ in server.shelf.unannounced()] == ["bad"]


async def test_the_last_room_of_the_disk_is_left_to_the_log(
    hosted: Hosting, database: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = 1 << 40
    monkeypatch.setattr(pushing, "LOOK_BYTES", 1_000)
    monkeypatch.setattr(room.shutil, "disk_usage", lambda _: SimpleNamespace(total=1 << 40, free=free))
    async with hosted() as server:
        await server.push(database)
        write(database, 1_000)
        await server.push(database, base=1, pushID="push-2")
        free = room.ROOM_KEPT_BYTES + 1_000
        write(database, 1_000)
        assert (await server.push(database, base=2, pushID="push-3")).startswith("ABORT=DISK_FULL:")
        async with server.session(f"pull/{NAME}@1") as session:  # would have to be put together
            await session.send({"dry": False})
            assert (await session.text()).startswith("ABORT=DISK_FULL:")
        await server.pull(tmp_path / "back.db")
        free = 1 << 40
        async with server.session(f"push/{NAME}") as session:  # others take the room while the pages come
            await session.begin(database, base=2, pushID="push-4")
            free = room.ROOM_KEPT_BYTES - 1
            await session.move("--origin", str(database), "x", in_vain=True)
            assert session.aborted.startswith("ABORT=DISK_FULL:")
        await until(lambda: server.files() == ["1.pages", "2.db"] and children() == 0)
    assert len(rows_of(tmp_path / "back.db")) == 1_010
