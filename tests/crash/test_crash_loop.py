"""Processes publish and consume, are killed with SIGKILL at any moment, and what they witnessed must fit the log: in a
file, and in a database whose connections are cut besides."""

from __future__ import annotations

import json
import os
import random
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import apsw
import psycopg
import pytest
from crash_checker import Ending, Row, check
from crash_checker import figures as count_figures
from crash_witness import ACK_WAIT_S, LEASE_S, SUBSCRIPTIONS, read
from postgres_server import PostgresServer

import headwater

CHILD = Path(__file__).with_name("crash_child.py")
PATIENCE_S = 60.0  # the machine may be busy with other things
KILL_ALL, FREEZE, KILL_WHILE_OPENING = 0.12, 0.2, 0.25  # how often
CUT = 0.3  # how often the connections of a database are cut on the way
OPENING_S, WORKING_S = 0.35, 0.3  # at most so long after the spawn, or after the log is open
FROZEN_S = (0.5 * LEASE_S, 2 * ACK_WAIT_S)  # between these; most of the time past the leases

ROLES = {
    "publisher": "publish-1,publish-2,handle:hd",
    "mixed": "publish-3,consume:mix,share:sh",
    "rival-a": "share:ex,consume:mix",
    "rival-b": "consume:ex,consume:sh,handle:hd",
}


class Stage:
    """Where the log is, and where the witnesses write."""

    def __init__(self, directory: Path, server: PostgresServer | None) -> None:
        self.directory = directory
        self._server = server
        self.url = str(directory / "log.db") if server is None else server.new_database()
        self.cuts = 0

    def cut_connections(self, dice: random.Random) -> None:
        if self._server is not None and dice.random() < CUT:
            purpose = dice.choice(["writer", "reader", "listener"])
            self.cuts += self._server.cut_connections(self.url, f"headwater {purpose}")

    def ending(self) -> Ending:
        return ending_of(self.url)


class Place:
    """A role in the play; when its process is killed, another one takes it."""

    def __init__(self, name: str, stage: Stage, dice: random.Random) -> None:
        self.name = name
        self._stage = stage
        self._dice = dice
        self.sides: list[Path] = []
        self.opened = False
        self.process = self._spawn()

    def _spawn(self) -> subprocess.Popen[bytes]:
        before = self.sides[-1:]
        self.sides.append(self._stage.directory / f"{self.name}-{len(self.sides)}.jsonl")
        self.opened = False
        seed = str(self._dice.random())
        return subprocess.Popen(
            [sys.executable, CHILD, self._stage.url, self.sides[-1], ROLES[self.name], seed, *before],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=open(self._stage.directory / "stderr", "ab"),
        )

    def respawn(self) -> None:
        self.process = self._spawn()

    def wait_until_open(self) -> None:
        if not self.opened:
            readable, _, _ = select.select([self.process.stdout], [], [], PATIENCE_S)
            assert readable, f"{self.name} takes too long to open the log"
            assert os.read(self.process.stdout.fileno(), 1) == b"o", f"{self.name} did not open the log"
            self.opened = True

    def look_if_open(self) -> bool:
        if not self.opened and select.select([self.process.stdout], [], [], 0)[0]:
            self.wait_until_open()
        return self.opened

    def kill(self) -> None:
        assert self.process.poll() is None, f"{self.name} ended by itself ({self.process.returncode})"
        self.process.send_signal(signal.SIGKILL)
        self.reap()

    def stop(self) -> None:
        self.process.stdin.close()
        self.reap()

    def reap(self) -> None:
        self.process.wait(PATIENCE_S)
        self.process.stdin.close()
        self.process.stdout.close()


@pytest.fixture(params=["file", "database"])
def stage(request: pytest.FixtureRequest, tmp_path: Path) -> Stage:
    return Stage(tmp_path, request.getfixturevalue("postgres") if request.param == "database" else None)


@pytest.fixture
def places(stage: Stage, pytestconfig: pytest.Config) -> Iterator[list[Place]]:
    dice = random.Random(pytestconfig.getoption("--dice"))
    # All at once on a log that does not exist yet: even its creation is raced, and killed.
    found = [Place(name, stage, dice) for name in ROLES]
    yield found
    for place in found:
        if place.process.poll() is None:
            place.kill()


def roll_and_wait(dice: random.Random, place: Place, most_s: float, least_s: float = 0.0) -> None:
    """The parent's dice: nothing ever comes through this pipe, so this waits for a random time and sleeps nowhere."""
    readable, _, _ = select.select(
        [place.process.stdout] if place.opened else [], [], [], dice.uniform(least_s, most_s)
    )
    assert not readable, f"{place.name} ended by itself"


def freeze(dice: random.Random, place: Place) -> None:
    place.process.send_signal(signal.SIGSTOP)
    roll_and_wait(dice, place, FROZEN_S[1], FROZEN_S[0])
    place.process.send_signal(signal.SIGCONT)


def test_no_promise_breaks_under_kills(
    places: list[Place], stage: Stage, pytestconfig: pytest.Config, figures: Callable[[str], None]
) -> None:
    kills_wanted, seed = pytestconfig.getoption("--kills"), pytestconfig.getoption("--dice")
    dice = random.Random(f"kills {seed}")
    kills = opening = frozen = 0
    started = time.monotonic()
    while kills < kills_wanted:
        stage.cut_connections(dice)
        place = dice.choice(places)
        roll = dice.random()
        if roll < KILL_WHILE_OPENING:
            roll_and_wait(dice, place, OPENING_S)
            opening += not place.look_if_open()
            victims = [place]
        else:
            freezing = roll < KILL_WHILE_OPENING + FREEZE
            if freezing:
                place = dice.choice(places[1:])  # those that hold something
            victims = places if roll > 1 - KILL_ALL else [place]
            for victim in victims:
                victim.wait_until_open()
            roll_and_wait(dice, place, WORKING_S)
            if freezing:  # a holder that comes back late must find its acks refused
                freeze(dice, place)
                frozen += 1
                continue
        for victim in victims:
            victim.kill()
        for victim in victims:
            victim.respawn()
        kills += len(victims)
    for place in places[:2]:
        place.wait_until_open()
        place.stop()  # some leave in good order
    for place in places[2:]:
        place.kill()
        kills += 1
    drain(stage)
    events = [event for path in stage.directory.glob("*.jsonl") for event in read(path)]
    counts = count_figures(events)
    took_s = time.monotonic() - started
    figures(
        f"crash loop (dice {seed}, {took_s:.0f} s): {kills} kills, {opening} of them while opening, {frozen} freezes, "
        f"{stage.cuts} connections cut; " + ", ".join(f"{count} {name}" for name, count in counts.items())
    )
    problems = check(events, stage.ending())
    assert not problems, report(problems, stage.directory)
    assert counts["published"] > kills, "too little happened for this to mean anything"
    assert counts["again"] > 0


def drain(stage: Stage) -> None:
    """Consume what is left, as the last witness. It waits for the leases of the dead."""
    roles = ",".join(f"drain:{id}" for id in SUBSCRIPTIONS)
    with open(stage.directory / "stderr", "ab") as stderr:
        command = [sys.executable, CHILD, stage.url, stage.directory / "drain-0.jsonl", roles, "0"]
        subprocess.run(command, stdin=subprocess.DEVNULL, stderr=stderr, stdout=subprocess.DEVNULL, check=True)


def ending_of(url: str | Path) -> Ending:
    """What is in the log at the end, seen past Headwater."""
    with headwater.open(url, maintenance_interval=None) as log:
        lags = {id: log.subscription(id).lag for id in SUBSCRIPTIONS}
    found, dead_letters, integrity = in_database(str(url)) if str(url).startswith("postgres:") else in_file(str(url))
    rows = [Row(seq, topic, data["token"], id) for seq, topic, data, id in found]
    return Ending(rows, lags, dead_letters, integrity)


def in_file(path: str) -> tuple[list[tuple[Any, ...]], int, str]:
    connection = apsw.Connection(path)
    found = connection.execute("SELECT seq, topic, data, id FROM messages ORDER BY seq")
    rows = [(seq, topic, json.loads(data), id) for seq, topic, data, id in found]
    integrity = "\n".join(line for (line,) in connection.execute("PRAGMA integrity_check"))
    dead_letters = connection.execute("SELECT count(*) FROM dead_letters").get
    connection.close()
    return rows, dead_letters, integrity


def in_database(url: str) -> tuple[list[tuple[Any, ...]], int, str]:
    with psycopg.connect(url) as connection:
        rows = connection.execute("SELECT seq, topic, data, id FROM headwater.messages ORDER BY seq").fetchall()
        dead_letters = connection.execute("SELECT count(*) FROM headwater.dead_letters").fetchall()[0][0]
    return rows, dead_letters, "ok"


def report(problems: list[str], directory: Path) -> str:
    stderr = (directory / "stderr").read_text()[-2000:]
    shown = "\n".join(problems[:20])
    return f"{len(problems)} violations; side logs in {directory}\n{shown}\n{stderr}"
