"""Clients and a server, with a network between them that fails in every way: no promise breaks, and nobody hangs."""

from __future__ import annotations

import json
import random
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import apsw
import pytest
from fault_proxy import FaultProxy
from fault_schedule import Fault, Kind, schedule
from msgspec import structs
from server_process import ServerProcess
from witnessed_clients import Company

import headwater

from crash_checker import Ending, History, Row, check  # isort: skip
from crash_checker import figures as count_figures  # isort: skip
from crash_witness import SUBSCRIPTIONS, AnyEvent, Received, Settled, Settling  # isort: skip

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
    if not pytestconfig.getoption("markexpr"):
        pytest.skip("takes minutes; run it with -m long")
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
    events = without_acks_of_others(company.book.events)
    ending = ending_of(directory / "log.db")
    redelivered, without_reason = redeliveries(History(events))
    told = count_figures(events)
    figures(
        f"failing network (seed {seed}, {time.monotonic() - began_s:.0f} s): {struck.total()} faults, "
        f"{counts.connections} connections, {counts.orphaned} late duplicates; {told['published']} published, "
        f"{told['acked']} acks confirmed, {told['nacked']} nacks, {company.book.refused} refused; redelivered though nobody "
        f"asked for it: " + ", ".join(f"{count} in {id}" for id, count in redelivered.items())
    )
    complaints = check(events, ending) + without_reason
    assert not complaints, "\n".join([f"seed {seed}: {len(complaints)} complaints", *complaints[:20], server.errors()])
    assert set(struck) == set(Kind)
    assert told["published"] > 50 * struck.total() / len(Kind), "too little happened for this to mean anything"
    for client in company.clients:
        assert goes_round(client.states), f"{client.name} saw {client.states}"


def strike(fault: Fault, proxy: FaultProxy, company: Company, dice: random.Random) -> None:
    before = proxy.counts
    fault.strike(proxy)
    if fault.lasts:
        company.done.wait(dice.uniform(*LASTING_S))  # nobody sets it before the end
    elif fault.kind is Kind.CUT:
        proxy.wait_until(lambda counts: counts.cuts > before.cuts)
    elif fault.kind is Kind.DUPLICATE:
        proxy.wait_until(lambda counts: counts.late_bytes > before.late_bytes)
    proxy.heal()


def without_acks_of_others(events: list[AnyEvent]) -> list[AnyEvent]:
    """A shared consumer may come back with a message in hand that was passed on meanwhile, and acked by whom it was
    passed on to. The message is settled, so its own ack returns; but it was another's. Had the message been handed out
    once more after that, it would be a broken promise."""
    handed_out: dict[tuple[str, int], list[tuple[int, int]]] = defaultdict(list)
    for event in events:
        if isinstance(event, Received) and SUBSCRIPTIONS[event.subscription][0] == "shared":
            for seq, attempt, _ in event.found:
                handed_out[event.subscription, seq].append((attempt, event.t))

    def is_its_own(event: Settled, key: tuple[int, int]) -> bool:
        seq, attempt = key
        return not any(later > attempt and t < event.t for later, t in handed_out[event.subscription, seq])

    return [
        structs.replace(event, keys=tuple(key for key in event.keys if is_its_own(event, key)))
        if isinstance(event, Settled) and event.how == "ack"
        else event
        for event in events
    ]


def redeliveries(history: History) -> tuple[Counter[str], list[str]]:
    """What came again though nobody had nacked it, by subscription. A broken connection is a reason for that in shared
    mode, where others are waiting; an exclusive holder keeps what it has, and what was on its way to it does not count
    as an attempt."""
    nacked = {(event.subscription, *key) for event in history.of(Settling) if event.how == "nack" for key in event.keys}
    counts: Counter[str] = Counter(dict.fromkeys(SUBSCRIPTIONS, 0))
    without_reason: list[str] = []
    for event in history.of(Received):
        for seq, attempt, _ in event.found:
            if attempt > 1 and (event.subscription, seq, attempt - 1) not in nacked:
                counts[event.subscription] += 1
                if SUBSCRIPTIONS[event.subscription][0] == "exclusive":
                    without_reason.append(f"{event.holder} got message {seq} as attempt {attempt}")
    return counts, without_reason


def goes_round(states: list[str]) -> bool:
    rest = iter(states)
    return all(state in rest for state in ("connected", "reconnecting", "connected")) and "failed" not in states


def ending_of(path: Path) -> Ending:
    with headwater.open(path, housekeeping=None) as log:
        lags = {id: log.subscription(id).lag for id in SUBSCRIPTIONS}
    connection = apsw.Connection(str(path))
    rows = [
        Row(seq, topic, json.loads(data)["token"], id)
        for seq, topic, data, id in connection.execute("SELECT seq, topic, data, id FROM messages ORDER BY seq")
    ]
    integrity = "\n".join(line for (line,) in connection.execute("PRAGMA integrity_check"))
    dead_letters = connection.execute("SELECT count(*) FROM dead_letters").get
    connection.close()
    return Ending(rows, lags, dead_letters, integrity)
