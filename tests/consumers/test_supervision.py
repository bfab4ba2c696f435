"""No worker of a handler ends silently: it goes on, or its error comes out of `run()` and is shown by `health()`."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from typing import Any

import pytest
from consumer_bench import OPTIONS, PATIENCE_S, Api, Place, Recorder, eventually_true, left_over
from eventually import eventually
from served import RunningServer

import headwater
from headwater import Reject
from headwater.errors import HeadwaterError, LeaseLostError, SubscriptionMismatchError

GIVES_A_COROUTINE = "InvalidOptionError: it returns a coroutine. Open the log for asyncio"


def declare(api: Api, log: Any, body: Callable[[Any], None], *, id: str = "h", **options: Any) -> None:
    log.on("a", id=id, **{**OPTIONS, **options})(api.handler(body))


async def state_of(api: Api, log: Any, id: str = "h") -> Any:
    return (await api.do(log.health))["handlers"][id]["state"]


def running(api: Api, log: Any, **options: Any) -> asyncio.Task[BaseException | None]:
    """`log.run()` under way; under threads on one that is not the main thread. Its result is what it raises, so that
    no KeyboardInterrupt ends the loop of the test."""

    def run() -> BaseException | None:
        try:
            log.run(**options)
        except BaseException as exc:
            return exc
        return None

    async def run_async() -> BaseException | None:
        try:
            await log.run(**options)
        except BaseException as exc:
            return exc
        return None

    return asyncio.create_task(run_async() if api.awaits else api.on_a_thread(run))


async def outcome_of(run: asyncio.Task[BaseException | None]) -> BaseException | None:
    """What it raises; it must end."""
    done, _ = await asyncio.wait([run], timeout=PATIENCE_S)
    assert done, "run() does not end"
    return run.result()


async def stop_and_join(api: Api, log: Any, run: asyncio.Task[BaseException | None]) -> None:
    await asyncio.wait_for(api.do(log.stop), PATIENCE_S)
    assert await outcome_of(run) is None


# --- handlers that raise what nothing should --------------------------------------------------------------------------


async def test_a_handler_that_raises_cancelled_error_has_failed_and_the_others_come(place: Place) -> None:
    async with headwater.open_async(place.url, **place.options) as log:
        seen = Recorder()

        @log.on("a", id="h", **{**OPTIONS, "max_attempts": 3})
        async def handle(message: Any) -> None:
            seen.message(message)
            if message.data == 0:
                raise asyncio.CancelledError

        await log.publish_many([("a", number) for number in range(6)])
        await log.start()
        await seen.reach(8)
        await asyncio.wait_for(log.stop(), PATIENCE_S)
        assert sorted(seen.seen) == [(1, 1), (1, 2), (1, 3), *((seq, 1) for seq in range(2, 7))]
        info = await log.subscription("h")
        assert (info.acked, info.dead, info.lag) == (5, 1, 0)
        [letter] = await log.dead_letters.list()
        assert (letter.attempts, letter.reason) == (3, "max_attempts")
        assert "CancelledError" in (letter.error or "")


async def test_a_handler_that_awaits_a_task_that_was_cancelled_has_failed(place: Place) -> None:
    """Such an error comes from the inside, with nothing cancelled from the outside."""
    async with headwater.open_async(place.url, **place.options) as log:
        seen = Recorder()

        @log.on("a", id="h", concurrency=2, **OPTIONS)
        async def handle(message: Any) -> None:
            seen.message(message)
            if message.attempt == 1:
                task = asyncio.create_task(asyncio.Event().wait())
                task.cancel()
                await task

        await log.publish_many([("a", number) for number in range(4)])
        await log.start()
        await seen.reach(8)
        await asyncio.wait_for(log.stop(), PATIENCE_S)
        assert (await log.subscription("h")).acked == 4


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt, GeneratorExit, asyncio.CancelledError, StopIteration])
@pytest.mark.parametrize("concurrency", [1, 3])
async def test_no_error_of_a_handler_ends_a_worker_silently(
    api: Api, near_place: Place, error: type[BaseException], concurrency: int
) -> None:
    """Either it has failed like any other handler, and all messages come; or `run()` raises it."""
    if api.awaits and error in (KeyboardInterrupt, StopIteration):
        pytest.skip("asyncio ends the loop with the one, and no coroutine can raise the other")
    async with api.opened(near_place) as log:
        seen = Recorder()

        def handle(message: Any) -> None:
            seen.message(message)
            if message.data == 0 and message.attempt == 1:
                raise error

        declare(api, log, handle, concurrency=concurrency)
        await api.do(log.publish_many, [("a", number) for number in range(6)])
        run = running(api, log)
        while len(seen.seen) < 7 and not run.done():
            count = len(seen.seen)
            await eventually_true(lambda count=count: len(seen.seen) > count or run.done(), f"all of {seen.seen}")
        if not run.done():
            await stop_and_join(api, log, run)
            assert sorted(seen.seen) == [(1, 1), (1, 2), *((seq, 1) for seq in range(2, 7))]
            assert (await api.do(log.subscription, "h")).acked == 6
        else:
            assert isinstance(run.result(), error)
            [shown] = (await api.do(log.health))["handlers"].values()
            assert shown["state"] == "failed"
            assert error.__name__ in shown["error"]


def test_a_plain_function_that_gives_a_coroutine_has_handled_nothing_under_threads() -> None:
    async def handle(message: Any) -> None: ...

    with headwater.open("memory:", maintenance_interval=None) as log:
        log.on("a", id="h", max_attempts=1)(lambda message: handle(message))
        log.start()
        log.publish("a", 1)
        eventually(lambda: [letter.error for letter in log.dead_letters.list()], [GIVES_A_COROUTINE])
        assert log.subscription("h").acked == 0


async def test_handlers_that_fail_and_reject_go_on(api: Api, place: Place) -> None:
    async with api.opened(place) as log:
        seen = Recorder()

        def handle(message: Any) -> None:
            seen.message(message)
            if message.data == 0:
                raise Reject("never")
            if message.attempt < 3:
                raise ValueError("not yet")

        declare(api, log, handle, concurrency=2)
        await api.do(log.publish_many, [("a", number) for number in range(4)])
        run = running(api, log)
        await seen.reach(10)
        await stop_and_join(api, log, run)
        info = await api.do(log.subscription, "h")
        assert (info.acked, info.dead, info.lag) == (3, 1, 0)


async def test_what_a_handler_failed_on_comes_again_while_others_wait(api: Api, place: Place) -> None:
    """The answer to the nack of one worker may come together with the message for another: neither undoes the other."""
    async with api.opened(place) as log:
        seen = Recorder()

        def handle(message: Any) -> None:
            seen.message(message)
            if message.attempt == 1:
                raise ValueError("not yet")

        declare(api, log, handle, concurrency=3)
        await api.do(log.start)
        for number in range(1, 101):
            await api.do(log.publish, "a", number)
            assert (await seen.reach(2 * number))[-2:] == [(number, 1), (number, 2)]
        await asyncio.wait_for(api.do(log.stop), PATIENCE_S)
        assert (await api.do(log.subscription, "h")).acked == 100


# --- run() raises what ended its workers ------------------------------------------------------------------------------


async def test_run_raises_when_the_subscription_was_taken_over(api: Api, lasting_place: Place) -> None:
    async with api.opened(lasting_place) as log, api.opened(lasting_place) as other:
        seen = Recorder()
        declare(api, log, seen.message, lease=1.0)
        await api.do(log.publish, "a", 0)
        run = running(api, log)
        await seen.reach(1)
        await eventually_true(lambda: _has_acked(api, other, "h"), "the first one is acked")
        rival = await api.do(other.subscribe, "h", "a", takeover=True, **OPTIONS)
        error = await outcome_of(run)
        assert isinstance(error, LeaseLostError), error
        shown = (await api.do(log.health))["handlers"]["h"]
        assert shown["state"] == "failed"
        assert "taken over" in shown["error"]
        await api.do(other.publish, "a", 1)
        [message] = await api.do(rival.fetch, 10, timeout=PATIENCE_S)
        assert (message.data, message.attempt) == (1, 1)
        await api.do(rival.close)


async def test_what_ends_one_handler_ends_run_and_the_others_finish_what_is_in_flight(
    api: Api, lasting_place: Place
) -> None:
    async with api.opened(lasting_place) as log, api.opened(lasting_place) as other:
        lost, kept, gate = Recorder(), Recorder(), threading.Event()
        declare(api, log, lost.message, id="lost", lease=1.0)
        log.on("b", id="kept", **OPTIONS)(api.handler(kept.message, gate))
        await api.do(log.publish_many, [("a", 0), *(("b", number) for number in range(10))])
        run = running(api, log)
        await lost.reach(1)
        await kept.reach(1)
        rival = await api.do(other.subscribe, "lost", "a", takeover=True, **OPTIONS)
        await eventually_true(lambda: _is_draining(api, other), "the buffer of the other handler is given back")
        gate.set()
        assert isinstance(await outcome_of(run), LeaseLostError)
        await api.do(rival.close)
        assert kept.seen == [(2, 1)]
        assert sorted(await left_over(api, lasting_place, "kept", "b")) == [(seq, 1) for seq in range(3, 12)]


async def _has_acked(api: Api, log: Any, id: str) -> bool:
    return bool((await api.do(log.subscription, id)).acked)


async def _is_draining(api: Api, log: Any) -> bool:
    return bool((await api.do(log.subscription, "kept")).in_flight == 1)


async def test_run_raises_when_there_is_no_more_hope_for_a_connection(api: Api, tmp_path: Any) -> None:
    server = RunningServer(tmp_path / "log.db", maintenance_interval=None)
    options = {"reconnect_min": 0.01, "reconnect_max": 0.02, "reconnect_attempts": 2}
    place = Place("ws", server.url, options)
    async with api.opened(place) as log:
        seen = Recorder()
        declare(api, log, seen.message)
        await api.do(log.publish, "a", 0)
        run = running(api, log)
        await seen.reach(1)
        await api.on_a_thread(server.stop)
        assert isinstance(await outcome_of(run), HeadwaterError)


async def test_run_can_be_called_again_after_it_raised(api: Api, lasting_place: Place) -> None:
    async with api.opened(lasting_place) as log, api.opened(lasting_place) as other:
        seen = Recorder()
        declare(api, log, seen.message, lease=1.0)
        await api.do(log.publish, "a", 0)
        run = running(api, log)
        await seen.reach(1)
        rival = await api.do(other.subscribe, "h", "a", takeover=True, **OPTIONS)
        assert isinstance(await outcome_of(run), LeaseLostError)
        await api.do(rival.close)
        run = running(api, log)
        await api.do(log.publish, "a", 1)
        await seen.reach(2)
        assert await state_of(api, log) == "running"
        await stop_and_join(api, log, run)


async def test_start_can_be_called_again_after_it_raised(api: Api, lasting_place: Place) -> None:
    async with api.opened(lasting_place) as log:
        seen = Recorder()
        await api.do((await api.do(log.subscribe, "h", "a", mode="shared")).close)
        declare(api, log, seen.message)
        with pytest.raises(SubscriptionMismatchError):
            await api.do(log.start)
        health = (await api.do(log.health))["handlers"]["h"]
        assert health["state"] == "failed"
        assert "SubscriptionMismatchError" in health["error"]
        await api.do(log.delete_subscription, "h")
        await api.do(log.start)
        await api.do(log.publish, "a", 1)
        await seen.reach(1)
        assert await state_of(api, log) == "running"


async def test_a_handler_that_was_asked_to_stop_and_is_not_done_starts_again(api: Api, place: Place) -> None:
    async with api.opened(place) as log:
        seen, gate = Recorder(), threading.Event()

        def ask(message: Any) -> None:
            log._handlers.ask_to_stop()  # as stop() does, called by a handler
            seen.message(message)

        declared = api.handler(lambda message: ask(message) if message.seq == 1 else seen.message(message), gate)
        log.on("a", id="h", **OPTIONS)(declared)
        await api.do(log.start)
        await api.do(log.publish, "a", 1)
        await seen.reach(1)
        run = running(api, log)
        await eventually_true(lambda: log._handlers._started, "it is started again")
        gate.set()
        await api.do(log.publish, "a", 2)
        assert await seen.reach(2) == [(1, 1), (2, 1)]
        await stop_and_join(api, log, run)


# --- stopping ---------------------------------------------------------------------------------------------------------


async def test_run_ends_by_stop_and_gives_back_what_no_handler_saw(api: Api, place: Place) -> None:
    async with api.opened(place) as log:
        seen, gate = Recorder(), threading.Event()
        log.on("a", id="h", concurrency=2, **OPTIONS)(api.handler(seen.message, gate))
        await api.do(log.publish_many, [("a", number) for number in range(20)])
        run = running(api, log)
        await seen.reach(2)
        assert await state_of(api, log) == "running"
        stopping = asyncio.create_task(api.do(log.stop))
        await eventually_true(lambda: _in_flight_is(api, log, 2), "the buffer is given back at once")
        gate.set()
        await asyncio.wait_for(stopping, PATIENCE_S)
        assert await outcome_of(run) is None
        assert await state_of(api, log) == "stopped"
        assert sorted(seen.seen) == [(1, 1), (2, 1)]
        subscription = await api.do(log.subscribe, "h", "a", **OPTIONS)
        found = await api.do(subscription.fetch, 100)
        assert [(message.seq, message.attempt) for message in found] == [(seq, 1) for seq in range(3, 21)]


async def _in_flight_is(api: Api, log: Any, count: int) -> bool:
    return bool((await api.do(log.subscription, "h")).in_flight == count)


async def test_a_handler_that_outlasts_the_timeout_of_stop_is_given_up(api: Api, place: Place) -> None:
    async with api.opened(place) as log:
        seen, gate = Recorder(), threading.Event()
        log.on("a", id="h", **OPTIONS)(api.handler(seen.message, gate))
        await api.do(log.publish_many, [("a", number) for number in range(5)])
        await api.do(log.start)
        await seen.reach(1)
        await asyncio.wait_for(api.do(log.stop, timeout=0.1), PATIENCE_S)
        try:
            subscription = await api.do(log.subscribe, "h", "a", **OPTIONS)
            found = await api.do(subscription.fetch, 100)
            assert sorted((message.seq, message.attempt) for message in found) == [
                (1, 2),
                *((seq, 1) for seq in range(2, 6)),
            ]
        finally:
            gate.set()


async def test_a_handler_that_outlasts_the_shutdown_timeout_of_run_is_given_up(api: Api, place: Place) -> None:
    async with api.opened(place) as log:
        seen, gate = Recorder(), threading.Event()
        log.on("a", id="h", **OPTIONS)(api.handler(seen.message, gate))
        await api.do(log.publish_many, [("a", number) for number in range(5)])
        run = running(api, log, shutdown_timeout=0.1)
        await seen.reach(1)
        stopping = asyncio.create_task(api.do(log.stop))
        try:
            assert await outcome_of(run) is None
        finally:
            gate.set()
        await asyncio.wait_for(stopping, PATIENCE_S)


async def test_stop_called_by_a_handler_ends_run(api: Api, place: Place) -> None:
    async with api.opened(place) as log:
        seen = Recorder()

        def handle(message: Any) -> None:
            seen.message(message)
            log.stop()

        async def handle_async(message: Any) -> None:
            seen.message(message)
            await log.stop()

        log.on("a", id="h", **OPTIONS)(handle_async if api.awaits else handle)
        await api.do(log.publish_many, [("a", number) for number in range(3)])
        run = running(api, log)
        assert await outcome_of(run) is None
        assert seen.seen == [(1, 1)]
        info = await api.do(log.subscription, "h")
        assert (info.acked, info.in_flight, info.lag) == (1, 0, 2)


async def test_stop_called_by_a_handler_of_another_log_waits(api: Api) -> None:
    place = Place("memory", "memory:", {"maintenance_interval": None})
    async with api.opened(place) as one, api.opened(place) as other:
        order = Recorder()
        gate = threading.Event()

        def begin(message: Any) -> None:
            order("began")

        async def stop_other(message: Any) -> None:
            await other.stop()
            order("stopped")

        def stop_other_blocking(message: Any) -> None:
            other.stop()
            order("stopped")

        other.on("a", id="h", **OPTIONS)(api.handler(begin, gate))
        one.on("a", id="h", **OPTIONS)(stop_other if api.awaits else stop_other_blocking)
        await api.do(other.start)
        await api.do(other.publish, "a", 1)
        await order.reach(1)
        await api.do(one.start)
        await api.do(one.publish, "a", 1)
        await eventually_true(lambda: not other._handlers._started, "it is asked to stop")
        assert order.seen == ["began"]
        gate.set()
        await order.reach(2)
        assert (await api.do(other.subscription, "h")).acked == 1


async def test_a_cancelled_run_gives_everything_back(place: Place) -> None:
    """A cancelled `run()` stops its handlers, as any end of it does."""
    async with headwater.open_async(place.url, **place.options) as log:
        seen = Recorder()

        async def work(message: Any) -> None:
            seen.message(message)
            await asyncio.sleep(0)

        log.on("a", id="h", concurrency=2, **OPTIONS)(work)
        await log.publish_many([("a", number) for number in range(40)])
        run = asyncio.create_task(log.run())
        await seen.reach(3)
        run.cancel()
        done, _ = await asyncio.wait([run], timeout=PATIENCE_S)
        assert done
        assert run.cancelled()
        subscription = await log.subscribe("h", "a", **OPTIONS)
        found = [(message.seq, message.attempt) for message in await subscription.fetch(100)]
        given = {seq for seq, _ in seen.seen}
        assert all(attempt == (2 if seq in given else 1) for seq, attempt in found)
        assert {seq for seq, _ in found} | given == set(range(1, 41))


# --- declared late ----------------------------------------------------------------------------------------------------


async def test_a_handler_declared_after_start_runs(api: Api, place: Place) -> None:
    async with api.opened(place) as log:
        early, late = Recorder(), Recorder()
        declare(api, log, early.message, id="early")
        await api.do(log.start)
        declare(api, log, late.message, id="late")
        await api.do(log.publish, "a", 0)
        await early.reach(1)
        assert await late.reach(1) == [(1, 1)]
        assert await state_of(api, log, "late") == "running"
        await asyncio.wait_for(api.do(log.stop), PATIENCE_S)
        for id in ("early", "late"):
            assert (await api.do(log.subscription, id)).acked == 1


async def test_a_handler_declared_while_run_is_under_way_runs_and_ends_with_it(api: Api, place: Place) -> None:
    async with api.opened(place) as log:
        early, late = Recorder(), Recorder()
        declare(api, log, early.message, id="early")
        await api.do(log.publish, "a", 0)
        run = running(api, log)
        await early.reach(1)
        declare(api, log, late.message, id="late")
        await late.reach(1)
        await stop_and_join(api, log, run)
        assert (await api.do(log.subscription, "late")).acked == 1


async def test_a_handler_declared_after_stop_waits_for_the_next_start(api: Api, place: Place) -> None:
    async with api.opened(place) as log:
        seen = Recorder()
        declare(api, log, seen.message, id="early")
        await api.do(log.start)
        await api.do(log.stop)
        declare(api, log, seen.message, id="late")
        await api.do(log.publish, "a", 0)
        assert seen.seen == []
        await api.do(log.start)
        await seen.reach(2)
        await api.do(log.stop)


# --- standing by ------------------------------------------------------------------------------------------------------


async def test_a_second_exclusive_handler_stands_by_and_takes_over(
    api: Api, lasting_place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="headwater")
    async with api.opened(lasting_place) as first, api.opened(lasting_place) as second:
        by_first, by_second = Recorder(), Recorder()
        declare(api, first, by_first.message)
        declare(api, second, by_second.message)
        await api.do(first.start)
        await api.do(first.publish, "a", 0)
        await by_first.reach(1)
        caplog.clear()
        run = running(api, second)
        await eventually_true(lambda: _stands_by(api, second), "the second one stands by")
        assert await state_of(api, first) == "running"
        await api.do(first.publish_many, [("a", number) for number in range(1, 4)])
        await by_first.reach(4)
        assert by_second.seen == []
        output = [record.getMessage() for record in caplog.records if "stand" in record.getMessage()]
        assert len(output) == 1, output
        await api.do(first.stop)
        await api.do(first.publish, "a", 4)
        assert await by_second.reach(1) == [(5, 1)]
        assert await state_of(api, second) == "running"
        await stop_and_join(api, second, run)


async def _stands_by(api: Api, log: Any) -> bool:
    handlers = (await api.do(log.health)).get("handlers", {})
    return "h" in handlers and handlers["h"]["state"] == "standby"


async def test_a_handler_that_stands_by_can_be_stopped(api: Api, lasting_place: Place) -> None:
    async with api.opened(lasting_place) as first, api.opened(lasting_place) as second:
        seen = Recorder()
        declare(api, first, seen.message)
        declare(api, second, seen.message)
        await api.do(first.start)
        run = running(api, second)
        await eventually_true(lambda: _stands_by(api, second), "the second one stands by")
        await stop_and_join(api, second, run)
        await api.do(first.publish, "a", 0)
        await seen.reach(1)


async def test_shared_handlers_do_not_stand_by(api: Api, lasting_place: Place) -> None:
    async with api.opened(lasting_place) as first, api.opened(lasting_place) as second:
        gate = threading.Event()
        seen = [Recorder(), Recorder()]
        for log, noted in zip((first, second), seen, strict=True):
            log.on("a", id="h", mode="shared", **OPTIONS)(api.handler(noted.message, gate))
            await api.do(log.start)
            assert await state_of(api, log) == "running"
        for number in range(2):
            await api.do(first.publish, "a", number)
        gate.set()
        await eventually_true(lambda: _acked(api, first, 2), "both are acked")


async def _acked(api: Api, log: Any, count: int) -> bool:
    return bool((await api.do(log.subscription, "h")).acked == count)
