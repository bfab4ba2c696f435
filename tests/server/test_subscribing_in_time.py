"""A subscribe that is cancelled, by its time limit or otherwise, leaves nothing behind: the next one succeeds."""

from __future__ import annotations

import asyncio
import threading
import types
from collections.abc import Coroutine, Generator
from contextlib import contextmanager
from typing import Any

import pytest
from foreign_client import PATIENCE_S, Serve, connect, turn

from headwater.protocol import methods as rpc
from headwater.server.server import Server


@types.coroutine
def cancelled_at(place: int, coroutine: Coroutine[Any, Any, Any]) -> Generator[Any, Any, bool]:
    """Run, and cancel where it waits for the nth time. Whether it waited so often."""
    running, passed, thrown = coroutine.__await__(), 0, None
    while True:
        try:
            step = next(running) if thrown is None else running.throw(thrown)
        except StopIteration:
            return passed > place
        except asyncio.CancelledError:
            return True
        if passed == place:
            task = asyncio.current_task()
            assert task is not None
            task.cancel()
        passed, thrown = passed + 1, None
        try:
            yield step
        except BaseException as exc:
            thrown = exc


@contextmanager
def busy_readers(server: Server) -> Generator[None, None, None]:
    """No look at the log comes to an end."""
    assert server._context is not None
    pool, over = server._context.core.engine.readers, threading.Event()
    for _ in range(pool._max_workers):
        pool.submit(over.wait, PATIENCE_S)
    try:
        yield
    finally:
        over.set()


async def held(server: Server) -> list[str]:
    """The ids that the log holds, when everything that was begun has ended."""
    assert server._context is not None
    [connection] = server.connections
    async with asyncio.timeout(PATIENCE_S):
        while connection.subscriptions._ending:
            await turn()
    return sorted(subscriber.id for subscriber in server._context.core._subscribers)


async def test_counting_what_waits_does_not_make_a_subscribe_fail(serve: Serve) -> None:
    async with serve(limits_request_timeout=0.4) as server, connect(server) as client:
        await client.publish_many("a", 3)
        with busy_readers(server):
            assert (await client.subscribe("s", "a"))["undelivered_count"] == 0
        assert await client.delivered_seqs(3) == [1, 2, 3]
        await client.release("s")
        assert (await client.subscribe("s", "a"))["undelivered_count"] == 3


@pytest.mark.parametrize("mode", ["exclusive", "shared", "ephemeral"])
async def test_a_subscribe_cancelled_anywhere_leaves_nothing_on_its_connection(serve: Serve, mode: str) -> None:
    async with serve() as server, connect(server) as client:
        await client.publish_many("a", 3)
        [connection] = server.connections
        params = rpc.Subscribe("s", "a", mode=mode, start="first")
        place = 0
        while await asyncio.create_task(cancelled_at(place, connection.subscriptions.begin(params))):  # type: ignore[arg-type]
            assert len(connection.subscriptions) == 0
            assert (await client.subscribe("s", "a", mode=mode, start="first"))["subscription_id"] == "s"
            assert await client.delivered_seqs(3) == [1, 2, 3]
            await client.release("s")
            assert await held(server) == []
            place += 1
        assert place >= 1 + (mode != "ephemeral")
        assert await held(server) == ["s"]


async def test_a_batch_of_subscribes_cancelled_anywhere_leaves_nothing_on_its_connection(serve: Serve) -> None:
    async with serve() as server, connect(server) as client:
        [connection] = server.connections
        params = rpc.SubscribeBatch([rpc.Subscribe("s", "a"), rpc.Subscribe("t", "a"), rpc.Subscribe("u", "a")])
        place = 0
        while await asyncio.create_task(cancelled_at(place, connection.subscriptions.begin_all(params))):  # type: ignore[arg-type]
            assert await held(server) == []
            for id in ("s", "t", "u"):
                await client.subscribe(id, "a")
                await client.release(id)
            place += 1
        assert place >= 5
        assert await held(server) == ["s", "t", "u"]


async def test_a_release_cancelled_anywhere_releases_all_the_same(serve: Serve) -> None:
    async with serve() as server, connect(server) as client:
        [connection] = server.connections
        place, waited = 0, True
        while waited:
            await client.subscribe("s", "a")
            waited = await asyncio.create_task(cancelled_at(place, connection.subscriptions.release("s")))  # type: ignore[arg-type]
            assert await held(server) == []
            place += 1
        assert place >= 2


async def test_a_subscribe_that_runs_into_its_time_limit_may_be_tried_again(serve: Serve) -> None:
    async with serve(limits_request_timeout=0.2) as server, connect(server) as client, connect(server) as other:
        await other.subscribe("s", "a")
        assert server._context is not None
        core, writing = server._context.core, threading.Event()
        core.engine.committer.submit(lambda writer, hooks: writing.wait(PATIENCE_S))
        try:
            assert await client.code("rpc.subscribe.persistent", {"subscription_id": "t", "topic": "a"}) == -32006
        finally:
            writing.set()
        await client.subscribe("t", "a")
        await client.publish("a")
        assert (await client.delivery())["subscription_id"] == "t"


async def test_a_subscription_ended_before_its_answer_takes_no_later_one_with_it(serve: Serve) -> None:
    """A client that does not wait for answers: subscribe, end it, subscribe again under the same id."""
    async with serve() as server, connect(server) as client:
        [connection] = server.connections
        subscriptions = connection.subscriptions
        params = rpc.Subscribe("s", "a", start="first")
        with busy_readers(server):  # the first one is at its counting
            first = asyncio.create_task(subscriptions.begin(params))
            async with asyncio.timeout(PATIENCE_S):
                while not subscriptions._held:
                    await turn()
            await client.release("s")
            again = asyncio.create_task(subscriptions.begin(params))
            async with asyncio.timeout(PATIENCE_S):
                while not subscriptions._held:
                    await turn()
        await asyncio.gather(first, again, return_exceptions=True)
        assert await held(server) == ["s"]
        assert len(subscriptions) == 1
        await client.publish_many("a", 3)
        assert await client.delivered_seqs(3) == [1, 2, 3]
        await client.release("s")
        assert await held(server) == []


async def test_what_ends_while_the_deliveries_stop_does_not_keep_them_from_stopping(serve: Serve) -> None:
    async with serve() as server, connect(server) as client:
        [connection] = server.connections
        for id in ("one", "two"):
            await client.subscribe(id, "a")
        stopping = asyncio.create_task(connection.subscriptions.stop_delivering())
        await asyncio.gather(stopping, connection.subscriptions.release("two"))
