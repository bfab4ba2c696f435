"""A key or token that is revoked ends what runs under it."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from by_hand import NAME, PATIENCE_S, REPLICA, StartHost, children, until

from headwater.replication.host import endpoint
from headwater.replication.host.session import Abort, ReplicaSession
from headwater.server.auth import Scopes, TokenFile


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "RIGHTS_S", 0.01)


@pytest.mark.parametrize("what", ["push", "pull", "subscribe"])
@pytest.mark.parametrize("how", ["key revoked", "token revoked", "closed meanwhile"])
async def test_what_runs_is_ended_and_its_client_gets_the_reason(
    hosted: StartHost, database: Path, tokens: TokenFile, what: str, how: str
) -> None:
    key: str | None = None
    options: dict[str, Any] = {}
    if how == "token revoked":
        key = tokens.create("a", Scopes(publish=("replica.ns.>",), read=("replica.ns.>",), consume=("*",)), now_ms=1)
        options = {"tokens": tokens}
    async with hosted(**options) as server:
        if how == "key revoked":
            key = server.store.catalogue.create_key(REPLICA, "push")
        await server.push(database, key=key)
        before = server.files()
        async with server.session(f"{what}/{NAME}", key=key) as session:
            await session.begin(database, base=1) if what == "push" else await session.send({})
            if what != "push":
                await session.config()
            if what == "subscribe":
                assert await session.text() == "LATEST_VERSION 1"
            if how == "key revoked":
                server.store.catalogue.remove_key(REPLICA, str(key).split("_")[1])
            elif how == "token revoked":
                tokens.revoke(str(key).split("_")[1])
            else:
                server.store.catalogue.create_key(REPLICA, "push")
            assert (await session.text()).startswith(f"ABORT=UNAUTHORIZED:this client may not {what} any more")
            assert await session.closed() == 1000
        await until(lambda: not server.endpoint._sessions)
        await until(lambda: server.files() == before and children() == 0)
        assert await server.refused(f"{what}/{NAME}", key) == 401


async def test_it_ends_no_other_session(hosted: StartHost, database: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = 0
    look = endpoint._unauthorized

    def counted(sessions: Any) -> Any:
        nonlocal looks
        looks += 1
        if looks == 1:
            raise OSError("a look that fails is made again")
        return look(sessions)

    monkeypatch.setattr(endpoint, "_unauthorized", counted)
    async with hosted() as server:
        push_key, other = (
            server.store.catalogue.create_key(REPLICA, "push"),
            server.store.catalogue.create_key(REPLICA, "pull"),
        )
        revoked = server.store.catalogue.create_key(REPLICA, "pull")
        async with (
            server.session(f"subscribe/{NAME}", key=other) as stays,
            server.session(f"subscribe/{NAME}", key=revoked) as goes,
            server.session(f"push/{NAME}", key=push_key) as pushing,
        ):
            for session in (stays, goes):
                await session.send({})
                await session.config()
                assert await session.text() == "LATEST_VERSION 0"
            await pushing.begin(database)
            server.store.catalogue.remove_key(REPLICA, revoked.split("_")[1])
            assert (await goes.text()).startswith("ABORT=UNAUTHORIZED:")
            await pushing.move("--origin", str(database), "x")
            assert (await pushing.complete())["committedVersionID"] == 1
            assert await stays.text() == "LATEST_VERSION 1"


async def test_a_push_whose_key_goes_while_it_is_checked_is_no_version(hosted: StartHost, database: Path) -> None:
    key = ""

    def revoke(step: str) -> None:
        if step == "checked":
            server.store.catalogue.remove_key(REPLICA, key.split("_")[1])

    async with hosted(checkpoint=revoke) as server:
        key = server.store.catalogue.create_key(REPLICA, "push")
        assert "may not push any more" in await server.push(database, key=key)
        assert server.store.catalogue.get(REPLICA).newest == 0
        await until(lambda: server.files() == [])


async def test_a_push_that_is_a_version_already_is_reported_so(
    hosted: StartHost, database: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key, is_withdrawn, withdraw = "", threading.Event(), ReplicaSession.revoke

    def withdrawn(client_session: ReplicaSession, abort: Abort) -> None:
        withdraw(client_session, abort)
        is_withdrawn.set()

    def revoke(step: str) -> None:
        if step == "committed":
            server.store.catalogue.remove_key(REPLICA, key.split("_")[1])
            assert is_withdrawn.wait(PATIENCE_S)

    monkeypatch.setattr(ReplicaSession, "revoke", withdrawn)
    async with hosted(checkpoint=revoke) as server:
        key = server.store.catalogue.create_key(REPLICA, "push")
        assert (await server.push(database, key=key))["committedVersionID"] == 1
