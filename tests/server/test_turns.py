"""Reads that take time: the clients of a server take turns at the threads that do them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from foreign_client import Make, Serve, bearer, connect

from headwater.broker import engine
from headwater.broker.background import FairThreadPool
from headwater.server.auth import Scopes
from headwater.server.registry import CallContext, Middleware, Outcome

MANY = 30
CALLS: dict[str, tuple[str, dict[str, Any]]] = {
    "statistics": ("rpc.topic_max_seq", {"topic": "a.b"}),
    "filters": ("rpc.fetch", {"subscription_id": "s", "count": 1, "wait": 0}),
    "readers": ("rpc.last_seq", {}),
}


class Finished(Middleware):
    """The labels of the clients whose calls were answered, in order."""

    def __init__(self) -> None:
        self.labels: list[str] = []

    async def after(self, call: CallContext, outcome: Outcome) -> None:
        self.labels.append(call.peer.label)


@contextmanager
def thread_held(lanes: FairThreadPool) -> Iterator[None]:
    gate, began = threading.Event(), threading.Event()
    lanes.submit_for("the gate", lambda: (began.set(), gate.wait(30)))
    assert began.wait(30)
    try:
        yield
    finally:
        gate.set()


@pytest.mark.parametrize("lane", CALLS)
async def test_one_call_of_a_token_does_not_wait_for_the_many_of_another(
    serve_tokens: Serve, make: Make, lane: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "READERS_MAX", 1)  # as the others have: works end in the order of their turns
    method, params = CALLS[lane]
    scopes = Scopes(read=["a.>"], consume=["*"])
    greedy, modest = (make(label, scopes) for label in ("greedy", "modest"))
    server, finished = serve_tokens(), Finished()
    async with (
        server,
        connect(server, **bearer(greedy)) as one,
        connect(server, **bearer(greedy)) as two,
        connect(server, **bearer(modest)) as other,
    ):
        assert server._context is not None
        lanes: FairThreadPool = getattr(server._context.core.engine, lane)
        for client in (one, two, other):
            await client.subscribe("s", "a.>", mode="ephemeral", deliver="fetch", where="data.k == 1")
        server.use(finished)
        with thread_held(lanes):
            asked = [(client, await client.ask(method, params)) for _ in range(MANY) for client in (one, two)]
            for client in (one, two):
                await client.call("rpc.hello")  # it is answered when all before it wait for a thread
            asked.append((other, await other.ask(method, params)))
            await other.call("rpc.hello")
            assert finished.labels == ["greedy", "greedy", "modest"]
        for client, id in asked:
            await client.answer(id)
    assert finished.labels[3:6] == ["greedy", "modest", "greedy"]
