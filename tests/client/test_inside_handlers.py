"""A callback of the client may use the client: nothing there waits for itself."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
from client_states import States
from served import RunningServer

import headwater
from headwater import AsyncLog, Log

QUICKLY_S = 10.0


class Recorder:
    """Values from any thread, waited for by threads and tasks."""

    def __init__(self) -> None:
        self.values: list[Any] = []
        self._changed = threading.Condition()

    def add(self, value: Any) -> None:
        with self._changed:
            self.values.append(value)
            self._changed.notify_all()

    def wait_for(self, count: int) -> list[Any]:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.values) >= count, QUICKLY_S), f"heard only {self.words}"
            return self.values

    async def reach(self, count: int) -> list[Any]:
        return await asyncio.to_thread(self.wait_for, count)


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture
def log(server: RunningServer) -> Any:
    server._server.method("add")(lambda a, b: a + b)
    with headwater.open(server.url, timeout=QUICKLY_S) as log:
        yield log


# --- the sync API ---------------------------------------------------------------------------------------------------


def use_everything(log: Log, answer_topic: str) -> list[Any]:
    """One verb of each kind that waits for the server."""
    with log.subscribe("inner", "inner.*", mode="shared") as inner:
        seq = log.publish(answer_topic, "from inside")
        log.publish_many([("inner.a", 1), ("inner.b", 2)])
        for message in inner.fetch(2, timeout=QUICKLY_S):
            message.ack()
        return [seq > 0, log.remote.call("add", [1, 2]), log.last_seq() > seq, inner.info().lag]


EVERYTHING = [True, 3, True, 0]


def test_in_a_handler(log: Log, recorder: Recorder) -> None:
    @log.on("work.*", id="outer")
    def handle(message: headwater.ReceivedMessage) -> None:
        message.extend()
        outcome = use_everything(log, "answers.a")
        message.ack()
        recorder.add(outcome)

    log.start()
    log.publish("work.a", 1)
    assert recorder.wait_for(1) == [EVERYTHING]
    log.stop()


def test_in_many_handlers_at_once(log: Log, recorder: Recorder) -> None:
    @log.on("work.*", id="outer", mode="shared", concurrency=8)
    def handle(message: headwater.ReceivedMessage) -> None:
        recorder.add((log.publish("answers.a", message.seq), log.remote.call("add", [message.data, 1])))

    log.start()
    log.publish_many([("work.a", n) for n in range(40)])
    assert sorted(sum for _, sum in recorder.wait_for(40)) == list(range(1, 41))
    log.stop()
    assert log.subscription("outer").lag == 0


def test_in_a_live_callback(log: Log, recorder: Recorder) -> None:
    log.live.subscribe("me", "work.*", lambda message: recorder.add(use_everything(log, "answers.a")))
    log.publish("work.a", 1)
    assert recorder.wait_for(1) == [EVERYTHING]


def test_in_a_method_that_the_server_calls(server: RunningServer, log: Log) -> None:
    log.remote.method("ask me")(lambda: use_everything(log, "answers.a"))
    [peer] = server._server.connections
    asking = asyncio.run_coroutine_threadsafe(peer.call("ask me"), server._loop)
    assert asking.result(QUICKLY_S) == EVERYTHING


def test_in_a_gap_callback(server: RunningServer, log: Log, recorder: Recorder) -> None:
    log.publish_many([("work.a", n) for n in range(10)])
    with log.subscribe("outer", "work.*", start="first") as subscription:
        subscription.on_gap(lambda gap: recorder.add((gap.count, use_everything(log, "answers.a"))))
        log.retain("work.*", max_count=3)
        log.run_maintenance()
        assert len(subscription.fetch(10, timeout=QUICKLY_S)) == 3
        assert recorder.wait_for(1) == [(7, EVERYTHING)]


def test_in_a_state_callback(server: RunningServer, proxy_to: Any, recorder: Recorder) -> None:
    proxy = proxy_to(int(server.url.rpartition(":")[2]))
    with headwater.open(f"ws://127.0.0.1:{proxy.port}", reconnect_min=0.01) as log:

        def callback(state: str) -> None:
            if state == "connected":
                recorder.add(log.publish("answers.a", "back again"))

        log.remote.on_state(callback)
        proxy.reset()
        assert recorder.wait_for(1) == [1]


def test_a_handler_may_stop_what_runs_it(log: Log, recorder: Recorder) -> None:
    @log.on("work.*", id="outer")
    def handle(message: headwater.ReceivedMessage) -> None:
        log.stop()
        recorder.add(message.seq)

    running = threading.Thread(target=log.run)
    running.start()
    log.publish("work.a", 1)
    running.join(QUICKLY_S)
    assert not running.is_alive()
    assert log.subscription("outer").lag == 0


# --- the asyncio API ------------------------------------------------------------------------------------------------


async def use_everything_there_is(log: AsyncLog) -> list[Any]:
    async with log.subscribe("inner", "inner.*", mode="shared") as inner:
        seq = await log.publish("answers.a", "from inside")
        await log.publish_many([("inner.a", 1), ("inner.b", 2)])
        for message in await inner.fetch(2, timeout=QUICKLY_S):
            await message.ack()
        return [seq > 0, await log.remote.call("add", [1, 2]), await log.last_seq() > seq, (await inner.info()).lag]


@pytest.fixture
def adding(serve: Any) -> Any:
    server = serve()
    server.method("add")(lambda a, b: a + b)
    return server


async def test_awaiting_in_a_handler(adding: Any, recorder: Recorder) -> None:
    async with adding, headwater.open_async(adding.url) as log:

        @log.on("work.*", id="outer")
        async def handle(message: headwater.AsyncReceivedMessage) -> None:
            await message.extend()
            outcome = await use_everything_there_is(log)
            await message.ack()
            recorder.add(outcome)

        await log.start()
        await log.publish("work.a", 1)
        assert await recorder.reach(1) == [EVERYTHING]
        await log.stop()
        assert (await log.subscription("outer")).lag == 0


async def test_awaiting_in_many_handlers_at_once(adding: Any, recorder: Recorder) -> None:
    async with adding, headwater.open_async(adding.url) as log:

        @log.on("work.*", id="outer", mode="shared", concurrency=8)
        async def handle(message: headwater.AsyncReceivedMessage) -> None:
            recorder.add((await log.publish("answers.a", message.seq), await log.remote.call("add", [message.data, 1])))

        await log.start()
        await log.publish_many([("work.a", n) for n in range(40)])
        assert sorted(sum for _, sum in await recorder.reach(40)) == list(range(1, 41))
        await log.stop()


async def test_awaiting_in_a_live_callback(adding: Any, recorder: Recorder) -> None:
    async with adding, headwater.open_async(adding.url) as log:

        async def hear(message: headwater.Message) -> None:
            recorder.add(await use_everything_there_is(log))

        log.live.subscribe("me", "work.*", hear)
        await log.publish("work.a", 1)
        assert await recorder.reach(1) == [EVERYTHING]


async def test_awaiting_in_a_method_that_the_server_calls(adding: Any) -> None:
    async with adding, headwater.open_async(adding.url) as log:

        @log.remote.method("ask me")
        async def ask_me() -> list[Any]:
            return await use_everything_there_is(log)

        [peer] = adding.connections
        assert await asyncio.wait_for(peer.call("ask me"), QUICKLY_S) == EVERYTHING


async def test_calls_may_go_to_and_fro(adding: Any) -> None:
    """Each asks the other until the number is used up."""

    @adding.method("down")
    async def down(call: Any, n: int) -> int:
        return 1 + await call.peer.call("down", [n - 1]) if n else 0

    async with adding, headwater.open_async(adding.url) as log:

        @log.remote.method("down")
        async def and_up(n: int) -> int:
            return 1 + await log.remote.call("down", [n - 1]) if n else 0

        assert await asyncio.wait_for(log.remote.call("down", [20]), QUICKLY_S) == 20


async def test_a_task_may_be_begun_in_a_state_callback(proxied: Any, recorder: Recorder) -> None:
    async with proxied() as (_, proxy, log):
        states = States(log)
        tasks: list[asyncio.Task[int]] = []
        log.remote.on_state(lambda state: tasks.append(asyncio.create_task(log.publish("a", state))))
        proxy.reset()
        await states.reach("reconnecting", "connected")
        assert sorted(await asyncio.gather(*tasks)) == [1, 2]
