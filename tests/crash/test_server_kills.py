"""A server is killed under load and started again, over and over: its clients carry on by themselves, and no promise
breaks."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from crash_checker import History, check
from crash_checker import figures as count_figures
from crash_witness import Received
from server_process import ServerProcess
from test_through_faults import ending_of, redeliveries
from witnessed_clients import Company

KILLS = 20
LEASE_MS = 15_000  # how long a dead server's leases would keep others out
CLIENT = {"ping": 1.0, "reconnect_min": 0.01, "reconnect_max": 0.1}


@pytest.mark.timeout(240)
def test_clients_carry_on_when_their_server_is_killed(
    tmp_path: Path, pytestconfig: pytest.Config, figures: Callable[[str], None]
) -> None:
    dice = random.Random(pytestconfig.getoption("--dice"))
    began_s = time.monotonic()
    waits_ms: list[float] = []
    with ServerProcess(tmp_path / "log.db") as server:
        company = Company(server.url, 1, dict(CLIENT))
        company.start()
        for _ in range(KILLS):
            company.wait_for_all()
            company.done.wait(dice.uniform(0.0, 0.2))  # nobody sets it before the end
            server.kill()
            server.start()
            ready = time.monotonic_ns()
            company.wait_for_all()
            after = [each.t for each in list(company.book.events) if isinstance(each, Received) and each.t > ready]
            waits_ms.append((min(after) - ready) / 1e6)
        company.finish(server.url)
        server.stop()
    ending, history = ending_of(tmp_path / "log.db"), History(company.book.events)
    told, (redelivered, without_reason) = count_figures(company.book.events), redeliveries(history)
    figures(
        f"killed server ({time.monotonic() - began_s:.0f} s): {KILLS} kills, {told['published']} published, "
        f"{told['acked']} acks confirmed; first delivery {statistics.median(waits_ms):.0f} ms after a restart in "
        f"the median, {max(waits_ms):.0f} ms at most; redelivered though nobody asked for it: "
        + ", ".join(f"{count} in {id}" for id, count in redelivered.items())
    )
    assert not check(company.book.events, ending)
    assert not without_reason, without_reason[:10]
    assert ending.dead_letters == 0, "kills of the server are no failures of a message"
    assert max(waits_ms) < LEASE_MS, "a dead server's lease kept its own client out"
