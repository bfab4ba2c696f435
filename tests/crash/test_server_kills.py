"""A server is killed with SIGKILL under load and started again on the same port and file. Its clients carry on."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from statistics import median

import pytest
from crash_checker import History
from crash_witness import SUBSCRIPTIONS, Received
from server_process import ServerProcess
from verdict import judge
from witnessed_clients import Company

WORKING_S = 0.25  # at most so long after every process is at work again
GOES_ON_S_MAX = 5.0  # from the restart to the first delivery, on a machine that has other things to do; a lease has 15
CLIENT = {"reconnect_min": 0.02, "reconnect_max": 0.1}  # a server that is not up yet is tried again soon


def test_clients_carry_on_when_their_server_is_killed(
    tmp_path: Path, pytestconfig: pytest.Config, figures: Callable[[str], None]
) -> None:
    seed = pytestconfig.getoption("--dice")
    kills = pytestconfig.getoption("--kills")
    dice = random.Random(f"server kills {seed}")
    restarts: list[int] = []
    began_s = time.monotonic()
    with ServerProcess(tmp_path / "log.db") as server:
        company = Company(server.url, seed, dict(CLIENT))
        company.start()
        for _ in range(kills):
            company.done.wait(dice.uniform(0, WORKING_S))  # set at the end only
            server.kill()
            server.start()
            restarts.append(time.monotonic_ns())
            company.wait_for_all()
        company.finish(server.url)
        server.stop()
    verdict = judge(company, server.path)
    waited_s = waits_for_the_first_delivery(verdict.history, restarts)
    slowest = {id: max(waits) for id, waits in waited_s.items()}
    figures(
        f"server kills (dice {seed}, {time.monotonic() - began_s:.0f} s): {kills} kills; {verdict}; "
        "from the restart to the first delivery, median and longest: "
        + ", ".join(f"{id} {median(waits):.2f}/{max(waits):.2f} s" for id, waits in waited_s.items())
    )
    assert not verdict.problems, "\n".join([*verdict.problems[:20], server.errors()])
    assert all(longest < GOES_ON_S_MAX for longest in slowest.values()), slowest
    assert verdict.counts["published"] > 10 * kills, "too little happened for this to mean anything"
    for client in company.clients:
        rounds = Counter(pairwise(client.states))["reconnecting", "connected"]
        # A kill that strikes while a client is still reconnecting makes no round of its own.
        assert rounds > kills // 2, f"{client.name} saw {client.states}"


def waits_for_the_first_delivery(history: History, restarts: list[int]) -> dict[str, list[float]]:
    """By subscription: after each restart, when its consumers got something again."""
    waits: dict[str, list[float]] = {}
    for id in SUBSCRIPTIONS:
        times = [event.t for event in history.of(Received) if event.subscription == id]
        waits[id] = [min(t - restart for t in times if t > restart) / 1e9 for restart in restarts]
    return waits
