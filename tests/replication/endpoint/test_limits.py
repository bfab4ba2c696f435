"""What one client may take: slots, time, memory, and what it learns of the server."""

from __future__ import annotations

import asyncio
import contextlib
import os
import stat
import threading
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import apsw
import pytest
from by_hand import (
    ALL_REPLICAS,
    NAME,
    REPLICA,
    Hosted,
    StartHost,
    announcement,
    children,
    rows_of,
    until,
    write,
)
from child_processes import children_of
from websockets.exceptions import InvalidStatus

from headwater.replication import rsync, sqlite_tools
from headwater.replication.host import endpoint, push
from headwater.server.auth import TokenFile


def endless(path: Path) -> Path:
    """A small database whose check runs for very long."""
    with contextlib.closing(apsw.Connection(str(path))) as connection:
        connection.execute("CREATE TABLE t(a, b AS (1)); INSERT INTO t VALUES(x'01'); CREATE INDEX endless ON t(b)")
        connection.execute("PRAGMA writable_schema = ON")
        expression = "(instr(zeroblob(20000000) || a, zeroblob(10000000) || x'02'))"
        connection.execute("UPDATE sqlite_schema SET sql = replace(sql, '(1)', ?) WHERE name = 't'", (expression,))
    return path


def checks() -> int:
    return sum(child.name.startswith("sqlite3_shell") for child in children_of(os.getpid()))


async def why_refused(server: Hosted, path: str, key: str | None = None) -> tuple[int, str]:
    with pytest.raises(InvalidStatus) as caught:
        async with server.session(path, key=key):
            pass
    return caught.value.response.status_code, (caught.value.response.body or b"").decode()


# --- slots ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["push", "pull"])
async def test_a_token_has_half_of_the_slots_and_the_others_go_on(
    hosted: StartHost, tokens: TokenFile, database: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    monkeypatch.setattr(endpoint, "PULLS_MAX", 4)
    greedy, other = (tokens.create(label, ALL_REPLICAS, now_ms=1) for label in ("greedy", "other"))
    async with hosted(pushes_max=4, tokens=tokens) as server, contextlib.AsyncExitStack() as stack:
        for name in "abc":
            await server.push(database, f"ns/{name}", key=other)
        await until(lambda: not server.endpoint._sessions)
        for name in "ab":
            await stack.enter_async_context(server.session(f"{way}/ns/{name}", key=greedy))
        status, why = await why_refused(server, f"{way}/ns/c", key=greedy)
        assert (status, "token, key or address has 2" in why) == (429, True)
        if way == "push":
            assert (await server.push(database, "ns/c", key=other, base=1, pushID="next"))["isNew"] is False
        else:
            await server.pull(tmp_path / "back.db", "ns/c", key=other)
        await until(lambda: len(server.endpoint._sessions) == 2)
        await stack.enter_async_context(server.session(f"{way}/ns/c", key=other))
        await stack.enter_async_context(server.session(f"{way}/ns/c", key=other))
        status, why = await why_refused(server, f"{way}/ns/a", key=other)
        assert (status, "as many sessions" in why) == (503, True)
        assert await server.refused("subscribe/ns/a", other) == 101
    assert server.endpoint._slots._taken == {}


async def test_a_replica_has_three_quarters_of_the_slots_at_most(
    hosted: StartHost, database: Path, tokens: TokenFile
) -> None:
    one, two, three = (tokens.create(label, ALL_REPLICAS, now_ms=1) for label in ("one", "two", "three"))
    async with (
        hosted(pushes_max=4, tokens=tokens) as server,
        server.session(f"push/{NAME}", key=one),
        server.session(f"push/{NAME}", key=one),
        server.session(f"push/{NAME}", key=two),
    ):
        status, why = await why_refused(server, f"push/{NAME}", key=three)
        assert (status, "of this replica" in why) == (429, True)
        assert (await server.push(database, "ns/other", key=three))["committedVersionID"] == 1


async def test_without_tokens_an_address_is_the_holder_whatever_it_sends_as_one(hosted: StartHost) -> None:
    async with (
        hosted(pushes_max=4) as server,
        server.session("push/ns/a", key="x1"),
        server.session("push/ns/b", key="x2"),
    ):
        assert (await why_refused(server, "push/ns/c", key="x3"))[0] == 429


# --- what a push lets us compute --------------------------------------------------------------------------------------


async def test_a_check_that_takes_too_long_is_ended_and_says_so(
    hosted: StartHost, database: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite_tools, "CPU_S_MIN", 1.0)
    async with hosted() as server:
        output = await server.push(endless(tmp_path / "endless.db"))
        assert output.startswith("ABORT=FAILED:to check it takes more than 1 s of a processor and 512 MiB")
        await until(lambda: server.files() == [] and checks() == 0)
        assert (await server.push(database))["committedVersionID"] == 1


@pytest.mark.parametrize("how", ["vanishes", "is revoked", "server stops"])
async def test_a_check_ends_with_its_client_and_with_the_server(
    hosted: StartHost, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setattr(push, "STOP_S", 0.1)
    monkeypatch.setattr(endpoint, "RIGHTS_S", 0.1)
    database = endless(tmp_path / "endless.db")
    async with hosted() as server:
        key = server.store.catalogue.create_key(REPLICA, "push")
        async with server.session(f"push/{NAME}", key=key) as session:
            await session.begin(database)
            await session.move("--origin", str(database), "x")
            await session.send({"complete": True})
            await until(lambda: checks() == 1)
            began_s = asyncio.get_running_loop().time()
            if how == "vanishes":
                session.vanish()
            elif how == "is revoked":
                server.store.catalogue.remove_key(REPLICA, key.split("_")[1])
                assert (await session.text()).startswith("ABORT=UNAUTHORIZED:")
            else:
                await server.server.stop()
            await until(lambda: checks() == 0 and not server.endpoint._sessions)
            assert asyncio.get_running_loop().time() - began_s < 5
        assert server.files() == []


async def test_what_breaks_a_check_constraint_is_no_version(hosted: StartHost, tmp_path: Path) -> None:
    path = tmp_path / "checked.db"
    with contextlib.closing(apsw.Connection(str(path))) as connection:
        connection.execute("CREATE TABLE t (a CHECK (a > 0)); PRAGMA ignore_check_constraints = ON")
        connection.execute("INSERT INTO t VALUES (-1)")
    async with hosted() as server:
        assert await server.push(path) == "ABORT=CORRUPT:CHECK constraint failed in t"


# --- silence ----------------------------------------------------------------------------------------------------------


async def test_a_silent_client_gives_its_slot_back_in_either_direction(
    hosted: StartHost, database: Path, tmp_path: Path
) -> None:
    async with hosted(idle_s=0.5, pushes_max=1) as server:
        await server.push(database)
        await until(lambda: not server.endpoint._sessions)
        async with server.session(f"push/{NAME}") as session:
            assert (await session.text()).startswith("ABORT=FAILED:nothing came")
        await until(lambda: not server.endpoint._sessions)
        async with server.session(f"push/{NAME}") as session:
            await session.send({**announcement(database), "base": 1})
            await session.config()
            assert (await session.text()).startswith("ABORT=FAILED:too slow: nothing moved")
        async with server.session(f"pull/{NAME}") as session:
            await session.send({"dry": False})
            await session.config()
            assert (await session.text()).startswith("ABORT=FAILED:too slow: nothing moved")
        async with server.session(f"subscribe/{NAME}") as session:
            assert (await session.text()).startswith("ABORT=FAILED:nothing came")
        await until(lambda: not server.endpoint._sessions and children() == 0)
        assert (await server.push(database, base=1, pushID="push-2"))["isNew"] is False


# --- claims -----------------------------------------------------------------------------------------------------------


async def test_clients_that_name_themselves_alike_or_not_at_all_have_claims_of_their_own(
    hosted: StartHost, tokens: TokenFile
) -> None:
    one, two = (tokens.create(label, ALL_REPLICAS, now_ms=1) for label in ("one", "two"))
    path = f"subscribe/{NAME}"
    async with hosted(tokens=tokens) as server:
        for client, keys in (("", (one, one)), ("laptop", (one, two))):
            async with (
                server.session(path, key=keys[0], client=client) as holder,
                server.session(path, key=keys[1], client=client) as other,
            ):
                for session in (holder, other):
                    await session.send({"coordinate": True})
                    await session.config()
                    assert await session.text() == "LATEST_VERSION 0"
                await holder.send("SQLRSYNC_CLAIM 50")
                assert await holder.text() == "SQLRSYNC_CLAIM"
                assert (await other.text()).startswith("SQLRSYNC_CLAIM ")
                await other.send("SQLRSYNC_RELEASE")
                await other.send("SQLRSYNC_CLAIM 5")
                verb, _, seconds = (await other.text()).partition(" ")
                assert (verb, 10 < float(seconds) <= 50) == ("SQLRSYNC_CLAIM", True)
                await holder.send("SQLRSYNC_RELEASE")
                assert await other.text() == "SQLRSYNC_RELEASE"


async def test_a_claim_dies_when_its_holder_does_not_come_back_and_waiting_clients_are_notified(
    hosted: StartHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headwater.replication.claims.RETURN_MS", 300)
    path = f"subscribe/{NAME}"
    async with hosted() as server, server.session(path, client="waiting") as waiting:
        async with server.session(path, client="gone") as gone:
            for session in (waiting, gone):
                await session.send({"coordinate": True})
                await session.config()
                assert await session.text() == "LATEST_VERSION 0"
            await gone.send("SQLRSYNC_CLAIM 2000000")
            assert await gone.text() == "SQLRSYNC_CLAIM"
            gone.vanish()
        assert await waiting.text() == "SQLRSYNC_CLAIM 2000000"
        assert await waiting.text() == "SQLRSYNC_RELEASE"
        await waiting.send("SQLRSYNC_CLAIM 5")
        assert await waiting.text() == "SQLRSYNC_CLAIM"


# --- paths, files and words -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("slash", ["%2f", "%2F", "%5c", "%5C", "%252f", "%255c", "\\"])
async def test_an_encoded_slash_is_no_slash(hosted: StartHost, database: Path, slash: str) -> None:
    async with hosted() as server:
        await server.push(database)
        for path in (
            f"push/ns{slash}app.db",
            f"pull/ns/app.db{slash}",
            f"push/ns{slash}x/app.db",
            f"push{slash}ns/app.db",
        ):
            assert await server.refused(path) == 400
        for path in (
            f"versions/ns{slash}app.db",
            f"versions{slash}ns/app.db",
            f"replicas/ns{slash}app.db",
            f"ns{slash}app.db",
        ):
            url = f"{server.server.url}/sapi/{path}".replace("ws:", "http:", 1)
            with pytest.raises(urllib.error.HTTPError) as caught:
                await asyncio.to_thread(urllib.request.urlopen, url, timeout=10)
            with caught.value:
                assert caught.value.code == 400


def modes(directory: Path) -> dict[str, int]:
    """Of what others could read or enter."""
    found = {str(path.relative_to(directory)): stat.S_IMODE(path.lstat().st_mode) for path in directory.rglob("*")}
    return {name: mode for name, mode in found.items() if mode & 0o077}


async def test_what_the_server_keeps_is_its_user_s_alone(hosted: StartHost, database: Path, tmp_path: Path) -> None:
    seen: list[dict[str, int]] = []
    before = os.umask(0o000)
    try:
        async with hosted(checkpoint=lambda step: seen.append(modes(tmp_path / "replicas"))) as server:
            await server.push(database)
            write(database, 100)
            async with server.session(f"push/{NAME}") as session:
                await session.begin(database, base=1, pushID="push-2")
                seen.append(modes(tmp_path / "replicas"))
                await session.move("--origin", str(database), "x")
                await session.complete()
            async with server.session(f"pull/{NAME}@1") as session:
                await session.send({"dry": False})
                await session.config()
                seen.append(modes(tmp_path / "replicas"))
        seen.append(modes(tmp_path / "replicas"))
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "replicas").stat().st_mode) == 0o700
    assert len(seen) > 8
    assert [each for each in seen if each] == []


async def test_no_answer_names_a_directory_of_the_server(
    hosted: StartHost, database: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers: list[Any] = []
    async with hosted() as server:
        await server.push(database)
        write(database, 100)
        await server.push(database, base=1, pushID="push-2")
        await until(lambda: not server.endpoint._sessions)
        garbage = tmp_path / "garbage.db"
        whole = database.read_bytes()
        garbage.write_bytes(whole[:4096] + os.urandom(4096) + whole[8192:])
        [home] = [path for path in server.replicas.iterdir() if path.is_dir()]

        async def hear(path: str, *output: Any) -> None:
            async with server.session(path) as session:
                for each in output:
                    await session.send(each)
                with contextlib.suppress(Exception):
                    while True:
                        answers.append(await session.recv())

        answers.append(await server.push(garbage, base=2, pushID="push-3"))
        begin = {**announcement(database), "base": 2, "pushID": "push-4"}
        await hear(f"push/{NAME}", begin, b"\x41\x01\x0c\x00\x00\x00\x0a" + os.urandom(100))
        await hear(f"push/{NAME}", begin, {"complete": True})
        (home / "1.pages").rename(home / "1.away")
        await hear(f"pull/{NAME}@1", {"dry": False})
        (home / "1.pages").write_bytes(os.urandom(100))
        await hear(f"pull/{NAME}@1", {"dry": False})
        (home / "2.db").write_bytes(os.urandom(8192))
        await hear(f"pull/{NAME}", {"dry": False})
        await hear(f"push/{NAME}", begin)
        (home / "2.db").unlink()
        await hear(f"pull/{NAME}", {"dry": False})
        monkeypatch.setattr(rsync, "tool_path", lambda name: str(tmp_path / "nothing"))
        await hear("push/ns/other", {**announcement(database)})
    assert len(answers) > 8
    reported = [each if isinstance(each, bytes) else str(each).encode() for each in answers]
    assert [each for each in reported if os.fsencode(tmp_path) in each or b"/tmp" in each] == []


async def test_our_end_cannot_tell_where_it_is(
    hosted: StartHost, database: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An end of `sqlite3_rsync` tells the other one what it could not open."""
    heard = b""
    async with hosted() as server:
        await server.push(database)
        begun = threading.Event()
        make = push.make_private

        def spoiled(path: str) -> None:
            Path(path).unlink(missing_ok=True)
            Path(path).mkdir()
            begun.set()

        monkeypatch.setattr(push, "make_private", spoiled)
        async with server.session("push/ns/other") as session:
            await session.send(announcement(database))
            with contextlib.suppress(Exception):
                await session.send(b"\x41\x02\x0c\x00\x00\x00\x0a")
                while True:
                    frame = await session.recv()
                    heard += frame if isinstance(frame, bytes) else frame.encode()
        assert begun.is_set()
        monkeypatch.setattr(push, "make_private", make)
    assert b"ABORT=" in heard
    assert os.fsencode(server.directory) not in heard
    assert rows_of(database)
