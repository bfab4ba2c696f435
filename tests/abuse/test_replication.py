"""Attacks by way of replicas: databases that cost far more than they weigh, and sessions that keep slots in silence."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
from pathlib import Path

import apsw
import pytest
from attacked import PATIENCE_S, Attacked
from child_processes import children_of
from eventually import eventually
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from headwater.replication.names import Remote, place_of
from headwater.replication.outcome import Outcome, TransferOptions
from headwater.replication.push import push

REPLICAS = {"publish": ["replica.>"], "read": ["replica.>"], "consume": ["*"]}
SYNC = """
import sys, headwater
print(headwater.sync(sys.argv[1], sys.argv[2], token=sys.argv[3]).version)
"""
HUGE = "length(hex(zeroblob(a + 4e8)))"  # 1.2 GB
ENDLESS = "instr(zeroblob(20000000) || a, zeroblob(10000000) || x'02')"


def make(path: Path, index: str = "a + 1", rows: int = 1) -> Path:
    with contextlib.closing(apsw.Connection(str(path))) as connection:
        connection.execute("CREATE TABLE t (a); CREATE INDEX i ON t (a + 1)")
        connection.executemany("INSERT INTO t VALUES (?)", [(1,)] * rows)
        connection.execute("PRAGMA writable_schema = ON")
        connection.execute("UPDATE sqlite_schema SET sql = ? WHERE name = 'i'", (f"CREATE INDEX i ON t ({index})",))
    assert path.stat().st_size == 12_288
    return path


def sync(source: object, target: object, token: str) -> str:
    """By a client of its own, as a victim runs it: the version, or why not."""
    command = [sys.executable, "-c", SYNC, str(source), str(target), token]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    return done.stdout.strip() or done.stderr


def pushes(server: Attacked, database: Path, token: str, count: int) -> list[asyncio.Task[Outcome]]:
    tasks = []
    for number in range(count):
        copy = database.with_name(f"{number}-{database.name}")
        copy.write_bytes(database.read_bytes())
        remote = place_of(f"{server.url}/bad/{number}")
        assert isinstance(remote, Remote)
        tasks.append(
            asyncio.create_task(push(str(copy), remote, TransferOptions(client_id=f"bad:{number}", key=token)))
        )
    return tasks


def tools(server: Attacked) -> list[str]:
    return [child.name for child in children_of(server.pid) if child.name.startswith("sqlite3_")]


def test_a_database_that_costs_more_than_it_weighs(tmp_path: Path) -> None:
    database, app = make(tmp_path / "huge.db", HUGE, rows=50), make(tmp_path / "app.db")

    async def attack() -> None:
        for round in range(2):
            attacking = pushes(server, database, attacker, 4)
            assert await asyncio.to_thread(sync, app, f"{server.url}/good/{round}", other) == "1"
            for outcome in await asyncio.gather(*attacking, return_exceptions=True):
                assert "512 MiB" in str(outcome)

    with Attacked(tmp_path) as server:
        attacker, other = server.token(**REPLICAS), server.token("other", **REPLICAS)
        with server.victim() as victim:
            asyncio.run(attack())
        server.assert_unharmed(victim, attack="8 pushes whose check wants 1.2 GB")
        eventually(lambda: tools(server), [])


def test_checks_without_end_leave_with_their_clients_and_with_the_server(tmp_path: Path) -> None:
    database, app = make(tmp_path / "endless.db", ENDLESS), make(tmp_path / "app.db")

    async def attack(then: str = "") -> None:
        attacking = pushes(server, database, attacker, 4)
        await asyncio.to_thread(eventually, lambda: tools(server).count("sqlite3_shell"), 4)
        if then == "stop":
            took_s.append(await asyncio.to_thread(server.stop))
        else:
            assert await asyncio.to_thread(sync, app, f"{server.url}/good/app.db", other) == "1"
        for task in attacking:
            task.cancel()
        await asyncio.gather(*attacking, return_exceptions=True)

    took_s: list[float] = []
    with Attacked(tmp_path) as server:
        attacker, other = server.token(**REPLICAS), server.token("other", **REPLICAS)
        with server.victim() as victim:
            asyncio.run(attack())
            eventually(lambda: tools(server), [])
        server.assert_unharmed(victim, attack="4 pushes whose check has no end")
        asyncio.run(attack("stop"))
    print(f"SIGTERM with 4 such checks: {took_s[0]:.1f} s")
    assert took_s[0] < 8


@pytest.mark.parametrize("way", ["push", "pull"])
def test_silent_sessions_lock_no_client_out(tmp_path: Path, way: str) -> None:
    app = make(tmp_path / "app.db")
    with Attacked(tmp_path, replicas_idle_timeout=3.0) as server, contextlib.ExitStack() as stack:
        attacker, other = server.token(**REPLICAS), server.token("other", **REPLICAS)
        headers = {"Authorization": f"Bearer {attacker}"}
        assert sync(app, f"{server.url}/good/app.db", other) == "1"
        with server.victim() as victim:
            silent, refused = [], []
            for number in range(40):
                url = f"{server.url}/sapi/{'pull/good/app.db' if way == 'pull' else f'push/bad/{number}'}"
                try:
                    silent.append(stack.enter_context(connect(url, additional_headers=headers)))
                except InvalidStatus as exc:
                    refused.append(exc.response.status_code)
            assert len(silent) == {"push": 4, "pull": 16}[way]
            assert set(refused) == {429}
            if way == "pull":
                assert sync(f"{server.url}/good/app.db", tmp_path / "back.db", other) == "1"
            else:
                assert sync(app, f"{server.url}/good/next.db", other) == "1"
            for socket in silent:
                assert "nothing came for 3 s" in str(socket.recv(PATIENCE_S))
        server.assert_unharmed(victim, attack=f"40 silent sessions that {way}")
