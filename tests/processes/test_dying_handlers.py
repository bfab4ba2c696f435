"""A message that kills its process ends among the dead letters; its neighbours and transactions come out whole."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import apsw
import pytest
from process_child import PATIENCE_S, Child, drain
from process_roles import handle, work_in_transaction

import headwater

OPTIONS: dict[str, Any] = {"lease": 0.4, "ack_wait": 0.4, "max_attempts": 3, "backoff": 0.01}
DEATHS_MAX = 20


@pytest.mark.parametrize("mode", ["exclusive", "shared"])
def test_poison_is_dead_lettered_and_its_neighbours_live(
    log: headwater.Log, path: str, spawn: Callable[..., Child], mode: str
) -> None:
    around = [f"neighbour {number}" for number in range(12)]
    log.publish_many([("a", data) for data in [*around[:6], "poison", *around[6:]]])
    deaths: int = 0
    poison_attempts: list[int] = []
    handled: Counter[str] = Counter()
    child = spawn(handle, path, mode, OPTIONS)
    while True:
        if not child.has_something_to_say(0.1):
            if [info.lag for info in log.subscriptions()] == [0]:  # none before the child has begun
                break
            continue
        try:
            data, attempt = child.hear()
        except EOFError:
            deaths += 1
            assert deaths < DEATHS_MAX, f"the poison is handed out for ever: {poison_attempts}"
            child = spawn(handle, path, mode, OPTIONS)
            continue
        handled[data] += 1
        if data == "poison":
            poison_attempts.append(attempt)
    child.say("end")
    child.end()
    assert poison_attempts == [1, 2, 3]
    assert deaths == 3
    (letter,) = log.dead_letters.list()
    assert (letter.message.data, letter.attempts, letter.reason) == ("poison", 3, "timeout")
    assert handled.keys() == {*around, "poison"}
    assert all(count <= 1 + deaths for count in handled.values()), handled


@pytest.fixture
def table(log: headwater.Log, path: str) -> Callable[[], list[int]]:
    connection = apsw.Connection(path)
    connection.set_busy_timeout(10_000)
    connection.execute("CREATE TABLE done (seq INTEGER)")
    connection.close()

    def rows() -> list[int]:
        reader = apsw.Connection(path)
        try:
            return [seq for (seq,) in reader.execute("SELECT seq FROM done")]
        finally:
            reader.close()

    return rows


@pytest.fixture
def worker(log: headwater.Log, path: str, spawn: Callable[..., Child], table: object) -> Child:
    log.publish("job", 1)
    child = spawn(work_in_transaction, path, OPTIONS)
    assert child.hear() == "inside"
    return child


def test_killed_inside_a_transaction(log: headwater.Log, worker: Child, table: Callable[[], list[int]]) -> None:
    worker.kill()
    assert table() == []
    assert log.last_seq() == 1, "its publish came through without it"
    assert drain(log.subscribe("s", ">", timeout=PATIENCE_S, **OPTIONS)) == [(1, 2, 1)]


def test_killed_after_a_transaction(log: headwater.Log, worker: Child, table: Callable[[], list[int]]) -> None:
    assert worker.hears_of("go on") == "outside"
    worker.kill()
    assert table() == [1]
    assert drain(log.subscribe("s", ">", timeout=PATIENCE_S, **OPTIONS)) == [(2, 1, 1)], (
        "the ack was lost, or its publish"
    )
