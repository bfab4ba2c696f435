"""Whatever ends what keeps the connection, each call that waits and each one that comes later has an outcome."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import msgspec
import pytest
from client_states import States, break_off, cut_off
from fault_lane import Direction

import headwater
from headwater.client import connection as connection_module
from headwater.client.outbox import Request, gather, outcomes_of
from headwater.client.transport import ClientTransport
from headwater.errors import ClosedError, RequestTimeoutError, UnreachableError
from headwater.protocol import methods as params
from headwater.protocol.jsonrpc import Answer

PATIENCE_S = 20.0
QUICKLY: Any = {"reconnect_min": 0.01, "reconnect_max": 0.02}


class Unexpected(Exception):
    """An error of no expected kind."""


def fail(*args: Any, **named: Any) -> Any:
    raise Unexpected("unexpected failure")


def connection_of(log: Any) -> Any:
    return log._core._connection


async def soon(awaitable: Any) -> Any:
    return await asyncio.wait_for(awaitable, PATIENCE_S)


# --- the first connection -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("url", ["ws://a\0b:1", "ws://127.0.0.1:1"])
def test_no_first_connection_for_an_unexpected_reason(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if "\0" not in url:  # which no resolver and no header takes
        monkeypatch.setattr(connection_module, "connect_transport", fail)
    outcomes: list[BaseException] = []

    def try_both() -> None:
        for attempt in (
            lambda: headwater.open(url, connect_timeout=0.2),
            lambda: asyncio.run(soon(headwater.open_async(url, connect_timeout=0.2))),
        ):
            with pytest.raises(UnreachableError) as raised:
                attempt()
            outcomes.append(raised.value)

    trying = threading.Thread(target=try_both, daemon=True)
    trying.start()
    trying.join(PATIENCE_S)
    assert [str(outcome.__cause__) in str(outcome) for outcome in outcomes] == [True, True]


async def test_an_open_that_is_cancelled_leaves_nothing_behind() -> None:
    server = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)  # never answers
    before = asyncio.all_tasks()
    opening = asyncio.ensure_future(headwater.open_async(f"ws://127.0.0.1:{server.sockets[0].getsockname()[1]}"))
    while len(asyncio.all_tasks()) < len(before) + 2:  # the reconnecting task is at work
        await asyncio.sleep(0)
    opening.cancel()
    await asyncio.gather(opening, return_exceptions=True)
    assert {task for task in asyncio.all_tasks() - before if "Link" in repr(task.get_coro())} == set()
    server.close()


# --- later ----------------------------------------------------------------------------------------------------------


async def test_what_ends_the_reconnecting_is_raised_by_all_calls_that_wait_and_come_later(proxied: Any) -> None:
    async with proxied(**QUICKLY) as (_, proxy, log):
        subscription = await log.subscribe("s", "a")
        fetching = asyncio.ensure_future(subscription.fetch(timeout=None))
        await cut_off(proxy, log)
        publishing = asyncio.ensure_future(log.publish("a", 1))
        await asyncio.sleep(0)
        subscription._consumer.resume = fail
        proxy.accept()
        for call in (publishing, fetching):
            with pytest.raises(UnreachableError, match="Unexpected: unexpected failure"):
                await soon(call)
        with pytest.raises(UnreachableError, match=r"no more attempts.*Unexpected: unexpected failure"):
            await soon(log.publish("a", 2))
        assert log.remote.state == "failed"


def test_the_same_with_the_sync_api(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with headwater.open(server.url, **QUICKLY) as log:
        states = States(log)
        subscription = log.subscribe("s", "a")
        outcomes: list[Any] = []

        def fetch() -> None:
            try:
                outcomes.append(subscription.fetch(timeout=None))
            except BaseException as exc:
                outcomes.append(exc)

        fetching = threading.Thread(target=fetch, daemon=True)
        fetching.start()
        monkeypatch.setattr(connection_module, "connect_transport", fail)
        connection = connection_of(log)
        connection.loop.call_soon_threadsafe(lambda: connection._transport.abort())
        states.wait_for("failed")
        fetching.join(PATIENCE_S)
        with pytest.raises(UnreachableError, match="Unexpected"):
            log.publish("a", 1)
        assert [type(outcome) for outcome in outcomes] == [UnreachableError]


async def test_a_keeper_that_is_cancelled_tells_why(proxied: Any) -> None:
    async with proxied() as (_, proxy, log):
        proxy.blackhole(Direction.TO_CLIENT)
        publishing = asyncio.ensure_future(log.publish("a", 1))
        await asyncio.sleep(0)
        connection_of(log)._supervisor.cancel()
        for call in (publishing, log.publish("a", 2)):
            with pytest.raises(UnreachableError, match="was cancelled"):
                await soon(call)
        proxy.heal()


async def test_a_loop_that_is_over_is_reported_every_time(server: Any) -> None:
    opened: list[Any] = []

    async def leave_it_open() -> None:
        opened.append(await headwater.open_async(server.url))

    thread = threading.Thread(target=lambda: asyncio.run(leave_it_open()))
    thread.start()
    thread.join(PATIENCE_S)
    for _ in range(3):
        with pytest.raises(ClosedError, match="event loop"):
            await soon(opened[0].publish("a", 1))


def test_a_callback_that_exits_does_not_end_the_loop_that_all_wait_for(server: Any) -> None:
    def leave(state: str) -> None:
        raise SystemExit

    with headwater.open(server.url) as log:
        states, connection = States(log), connection_of(log)
        connection.loop.call_soon_threadsafe(leave, "")
        assert log.publish("a", 1) == 1
        connection.on_state(leave)  # runs in the reconnecting task, and ends it
        connection.loop.call_soon_threadsafe(lambda: connection._transport.abort())
        states.wait_for("failed")
        for _ in range(2):
            with pytest.raises(UnreachableError, match="SystemExit"):
                log.publish("a", 2)


@pytest.mark.parametrize("mishap", [Unexpected, asyncio.CancelledError])
async def test_a_callback_that_fails_ends_nothing(proxied: Any, mishap: Any) -> None:
    def complain(state: str) -> None:
        raise mishap

    mishaps: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: mishaps.append(context))
    async with proxied(**QUICKLY) as (_, proxy, log):
        log.remote.on_state(complain)
        await break_off(proxy, log)  # which is told to the callback behind it
        assert await soon(log.publish("a", 1)) == 1
    assert {type(context["exception"]) for context in mishaps} == {mishap}


# --- one call at a time ---------------------------------------------------------------------------------------------


async def test_an_answer_that_cannot_be_read_is_an_outcome_and_harms_no_other(serve: Any) -> None:
    async with serve() as server, headwater.open_async(server.url) as log:
        connection = connection_of(log)
        unreadable = connection.enqueue(Request("rpc.last_seq", None, fail))
        readable = asyncio.ensure_future(log.last_seq())
        await soon(unreadable.wait_async())
        assert isinstance(unreadable.error, UnreachableError)
        assert "unexpected failure" in str(unreadable.error)
        assert await soon(readable) == 0


async def test_a_call_that_cannot_be_written_is_an_outcome_and_harms_no_other(serve: Any) -> None:
    async with serve() as server, headwater.open_async(server.url) as log:
        unwritable = connection_of(log).enqueue(Request("rpc.last_seq", fail, lambda raw: raw))
        assert await soon(log.last_seq()) == 0
        await soon(unwritable.wait_async())
        assert isinstance(unwritable.error, Unexpected)


def test_a_server_that_counts_wrongly_is_reported_to_each_of_its_publishers() -> None:
    publishes = [Request("rpc.publish", params.PlainPublish("a", msgspec.Raw(b"1")), fail, count=1) for _ in range(3)]
    answer = Answer(jsonrpc="2.0", id=1, result=msgspec.Raw(b'{"sequence_ids": [1, 2]}'))
    outcomes = outcomes_of(gather(publishes), answer)
    assert outcomes is not None
    assert [type(error) for _, _, error in outcomes] == 3 * [UnreachableError]


async def test_what_fails_while_it_is_taken_in_costs_a_connection_and_no_call(serve: Any) -> None:
    async with serve() as server, headwater.open_async(server.url, **QUICKLY) as log:
        states, connection = States(log), connection_of(log)
        connection._transport._receive = fail
        assert await soon(log.publish("a", 1)) == 1
        assert states.seen == ["connected", "reconnecting", "connected"]


async def test_a_connection_whose_end_fails_has_ended(serve: Any) -> None:
    async with serve() as server:
        transports: list[ClientTransport] = []

        class Ending(ClientTransport):
            def connection_made(self, transport: asyncio.BaseTransport) -> None:
                transports.append(self)
                self._socket.receive_eof = fail  # type: ignore[method-assign]
                self._has_received = True
                super().connection_made(transport)
                self.abort()  # before it is open

        asyncio.get_running_loop().set_exception_handler(lambda *_: None)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("headwater.client.transport.ClientTransport", Ending)
            with pytest.raises(UnreachableError, match="before it was open"):
                await soon(headwater.open_async(server.url, reconnect="none"))
        assert transports[0].lost.done()


async def test_time_limits_hold_when_looking_at_them_fails_once(proxied: Any) -> None:
    mishaps: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: mishaps.append(context))
    async with proxied(timeout=0.3) as (_, proxy, log):
        confirm_late = connection_of(log)._numbering.confirm_late

        def fail_once(now_s: float) -> None:
            connection_of(log)._numbering.confirm_late = confirm_late
            fail()

        connection_of(log)._numbering.confirm_late = fail_once
        proxy.blackhole(Direction.TO_CLIENT)
        for _ in range(2):
            with pytest.raises(RequestTimeoutError):
                await soon(log.publish("a", 1))
        proxy.heal()
    assert [str(context["exception"]) for context in mishaps] == ["unexpected failure"]
