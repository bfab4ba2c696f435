"""The connection states of a client, recorded and waited for by sync and asyncio tests."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

from fault_proxy import FaultProxy

PATIENCE_S = 20.0  # no test waits so long, unless something is wrong


class States:
    def __init__(self, log: Any) -> None:
        self._changed = threading.Condition()
        self.seen: list[str] = [log.remote.state]
        log.remote.on_state(self._note)

    def _note(self, state: str) -> None:
        with self._changed:
            self.seen.append(state)
            self._changed.notify_all()

    def wait_for(self, *expected: str) -> None:
        """Until these have been seen in this order, whatever came between them."""
        with self._changed:
            if not self._changed.wait_for(lambda: _in_order(expected, self.seen), PATIENCE_S):
                raise TimeoutError(f"waited for {expected}, saw {self.seen}")

    async def reach(self, *expected: str) -> None:
        await asyncio.to_thread(self.wait_for, *expected)


async def cut_off(proxy: FaultProxy, log: Any) -> States:
    """Break the connection, and let there be no other."""
    states = States(log)
    proxy.refuse()
    proxy.reset()
    await states.reach("reconnecting")
    return states


async def break_off(proxy: FaultProxy, log: Any) -> None:
    """Break the connection, and wait until there is another."""
    states = States(log)
    proxy.reset()
    await states.reach("reconnecting", "connected")


def _in_order(expected: tuple[str, ...], seen: list[str]) -> bool:
    rest = iter(seen)
    return all(state in rest for state in expected)
