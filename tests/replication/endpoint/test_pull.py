"""Pulls, by hand: any kept version comes whole."""

from __future__ import annotations

from pathlib import Path

import pytest
from by_hand import NAME, StartHost, children, rows_of, until, write

from headwater.replication.host import pull


async def test_old_versions_come_as_they_were(hosted: StartHost, database: Path, tmp_path: Path) -> None:
    async with hosted() as server:
        expected = []
        for base in range(4):
            write(database, 30)
            await server.push(database, base=base, pushID=f"push-{base}", message=f"no. {base + 1}")
            expected.append(rows_of(database))
        for name, number in (("@1", 1), ("@v2", 2), ("@latest-1", 3), ("@latest", 4), ("", 4), ("%401", 1)):
            target = tmp_path / f"back{name or 'none'}.db"
            offer = await server.pull(target, NAME + name)
            assert (offer["version"], offer["message"]) == (number, f"no. {number}")
            assert offer["size"] == offer["pages"] * offer["pageSize"] == target.stat().st_size
            assert offer["at"].endswith("Z")
            assert offer["dbhash"] is None
            assert rows_of(target) == expected[number - 1]
        assert await server.refused(f"pull/{NAME}@5") == 404
        assert await server.refused(f"pull/{NAME}@latest-4") == 404
        await until(lambda: server.files() == ["1.pages", "2.pages", "3.pages", "4.db"] and children() == 0)


async def test_a_pull_over_an_older_copy_moves_what_differs(hosted: StartHost, database: Path, tmp_path: Path) -> None:
    async with hosted() as server:
        await server.push(database)
        await server.pull(tmp_path / "back.db")
        write(database, 5)
        await server.push(database, base=1, pushID="push-2")
        await server.pull(tmp_path / "back.db")
        assert rows_of(tmp_path / "back.db") == rows_of(database)


async def test_a_dry_pull_is_left_to_the_client(hosted: StartHost, database: Path) -> None:
    """A server that ignored it would send pages to a client that expects none."""
    async with hosted() as server:
        await server.push(database)
        async with server.session(f"pull/{NAME}") as session:
            await session.send({"dry": True})
            assert (await session.text()).startswith("ABORT=FAILED:a dry run is made by the client")


@pytest.mark.parametrize("how", ["vanishes", "lies", "says too much"])
async def test_a_pull_that_goes_wrong_leaves_nothing_on_the_server(
    hosted: StartHost, database: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pull, "SLACK_BYTES", 1000)
    async with hosted() as server:
        await server.push(database)
        async with server.session(f"pull/{NAME}") as session:
            await session.send({"dry": False})
            assert (await session.config())["ready"] is True
            assert children() == 1
            if how == "vanishes":
                session.vanish()
            elif how == "lies":
                await session.send("CONFIG={}")
                assert (await session.text()).startswith("ABORT=FAILED:")
            else:
                await session.send(bytes(100_000))
                assert (await session.text()).startswith("ABORT=FAILED:")
        await until(lambda: server.files() == ["1.db"] and children() == 0)
        await until(lambda: not server.endpoint._sessions)


async def test_an_end_that_complains_to_ours_is_no_complete_pull(hosted: StartHost, database: Path) -> None:
    async with hosted() as server:
        await server.push(database)
        async with server.session(f"pull/{NAME}") as session:
            await session.send({})
            assert (await session.config())["ready"] is True
            await session.send(b"\x62\x00\x00\x00\x05sorry")  # an ERROR of a replica
            await session.send({"complete": True})
            assert "sorry" in await session.text()


async def test_a_server_that_stops_ends_pulls(hosted: StartHost, database: Path) -> None:
    async with hosted() as server:
        await server.push(database)
        async with server.session(f"pull/{NAME}") as session:
            await session.send({})
            await session.config()
            await server.server.stop()
            assert await session.closed() == 1001
        assert server.files() == ["1.db"]
        assert children() == 0
