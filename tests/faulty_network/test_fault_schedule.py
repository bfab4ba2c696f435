"""Schedules: the same seed, the same bad luck; and whatever it was, healing ends it."""

from __future__ import annotations

import contextlib
import itertools
from unittest.mock import call, create_autospec

import pytest
from echo_client import connect, echoed
from echo_server import EchoServer
from fault_lane import Direction
from fault_proxy import FaultProxy
from fault_schedule import Fault, Kind, schedule


def test_a_schedule_repeats_itself_and_has_every_kind_in_every_round() -> None:
    first, again, other = (list(itertools.islice(schedule(seed), 40)) for seed in (7, 7, 8))
    assert first == again != other
    for start in range(0, 40, len(Kind)):
        assert {fault.kind for fault in first[start : start + len(Kind)]} == set(Kind)
    assert {fault.kind for fault in itertools.islice(schedule(7, [Kind.CUT, Kind.RESET]), 10)} == {Kind.CUT, Kind.RESET}
    assert str(Fault(Kind.CUT, Direction.TO_SERVER, 12)) == "cut, client → server, 12"


@pytest.mark.parametrize(
    ("fault", "orders"),
    [
        (Fault(Kind.LATENCY, Direction.TO_CLIENT, 0.5), [call.latency(0.5, 0.5, Direction.TO_CLIENT)]),
        (Fault(Kind.THROTTLE, Direction.TO_SERVER, 9.0), [call.throttle(9.0, Direction.TO_SERVER)]),
        (Fault(Kind.RESET), [call.reset()]),
        (Fault(Kind.CUT, Direction.TO_SERVER, 12), [call.cut_after(12, Direction.TO_SERVER)]),
        (Fault(Kind.BLACKHOLE), [call.blackhole(None)]),
        (Fault(Kind.REFUSE), [call.refuse(), call.reset()]),
        (Fault(Kind.CLOSE), [call.close_cleanly()]),
        (Fault(Kind.DUPLICATE, None, 5), [call.duplicate_late(5)]),
    ],
    ids=str,
)
def test_a_fault_orders_what_it_is_called(fault: Fault, orders: list[object]) -> None:
    proxy = create_autospec(FaultProxy, instance=True)
    fault.strike(proxy)
    assert proxy.method_calls == orders


@pytest.mark.parametrize("seed", range(3))
def test_after_any_schedule_a_healed_proxy_is_a_plain_one(seed: int) -> None:
    with EchoServer() as server, FaultProxy("127.0.0.1", server.port) as proxy, contextlib.ExitStack() as clients:
        for fault in itertools.islice(schedule(seed), 2 * len(Kind)):
            client = clients.enter_context(connect(proxy))
            assert echoed(client, b"before") == b"before", fault
            fault.strike(proxy)
            with contextlib.suppress(OSError):  # whatever happens to it
                client.sendall(b"during" * 100)
            proxy.heal()
            assert echoed(clients.enter_context(connect(proxy)), b"after") == b"after", fault
        proxy.reset()
        assert (proxy.counts.open, proxy.counts.held_bytes) == (0, 0)
