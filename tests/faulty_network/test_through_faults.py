"""Clients and a server, with a network between them that fails in every way: no promise breaks, and no client hangs."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import pytest
from fault_proxy import FaultProxy
from fault_schedule import Fault, Kind, schedule
from server_process import ServerProcess
from verdict import judge
from witnessed_clients import Company

PING_S = 0.2
LASTING_S = (0.05, 0.6)  # how long a fault lasts: some shorter than it takes to notice, some longer
ROUNDS = 2  # in each of them every kind of fault comes once
ROUNDS_LONG = 40
CLIENT = {"ping": PING_S, "reconnect_min": 0.01, "reconnect_max": 0.1}
SERVER = {"limits_ping_interval": PING_S, "limits_ping_timeout": PING_S}


@pytest.mark.parametrize("offset", [0, 1, 2])
def test_no_promise_breaks_over_a_failing_network(
    offset: int, tmp_path: Path, pytestconfig: pytest.Config, figures: Callable[[str], None]
) -> None:
    play(pytestconfig.getoption("--dice") * 100 + offset, ROUNDS, tmp_path, figures)


@pytest.mark.long
@pytest.mark.timeout(1_800)
def test_no_promise_breaks_over_a_network_that_fails_for_long(
    tmp_path: Path, pytestconfig: pytest.Config, figures: Callable[[str], None]
) -> None:
    play(pytestconfig.getoption("--dice") * 100 + 99, ROUNDS_LONG, tmp_path, figures)


def play(seed: int, rounds: int, directory: Path, figures: Callable[[str], None]) -> None:
    began_s = time.monotonic()
    struck: Counter[Kind] = Counter()
    with ServerProcess(directory / "log.db", **SERVER) as server, FaultProxy("127.0.0.1", server.port) as proxy:
        company = Company(f"ws://127.0.0.1:{proxy.port}", seed, dict(CLIENT))
        company.start()
        dice = random.Random(f"lasting {seed}")
        for fault in islice(schedule(seed), rounds * len(Kind)):
            strike(fault, proxy, company, dice)
            struck[fault.kind] += 1
            company.wait_for_all()
        counts = proxy.counts
        company.finish(server.url)
        server.stop()
    verdict = judge(company, server.path)
    figures(
        f"failing network (seed {seed}, {time.monotonic() - began_s:.0f} s): {struck.total()} faults, "
        f"{counts.connections} connections, {counts.orphaned} late duplicates; {verdict}"
    )
    assert not verdict.problems, "\n".join([f"seed {seed}", *verdict.problems[:20], server.errors()])
    assert set(struck) == set(Kind)
    assert verdict.counts["published"] > 10 * struck.total(), "too little happened for this to mean anything"
    for client in company.clients:
        assert goes_round(client.states), f"{client.name} saw {client.states}"


def strike(fault: Fault, proxy: FaultProxy, company: Company, dice: random.Random) -> None:
    before = proxy.counts
    fault.strike(proxy)
    if fault.lasts:
        company.done.wait(dice.uniform(*LASTING_S))  # set at the end only
    elif fault.kind is Kind.CUT:
        proxy.wait_until(lambda counts: counts.cuts > before.cuts)
    elif fault.kind is Kind.DUPLICATE:
        proxy.wait_until(lambda counts: counts.late_bytes > before.late_bytes)
    proxy.heal()


def goes_round(states: list[str]) -> bool:
    rest = iter(states)
    return all(state in rest for state in ("connected", "reconnecting", "connected")) and "failed" not in states
