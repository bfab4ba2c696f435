"""What was not answered is sent again on the next connection, and done once."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from typing import Any

import pytest
from client_states import cut_off
from fault_lane import Direction
from fault_proxy import FaultProxy
from frame_tap import FrameTap

import headwater
from headwater.client import outbox
from headwater.errors import LeaseLostError, UnreachableError
from headwater.server.registry import CallContext, Middleware
from headwater.server.server import Server

PUBLISHING = ("rpc.publish", "rpc.publish.batch")


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients do not wait for a thousand messages to tell the server which receipts it may forget."""
    monkeypatch.setattr(outbox, "CONFIRM_EVERY", 1)


async def stored(server: Server) -> list[Any]:
    """What is in the log, asked for without a client."""
    async with headwater.open_async(server.url) as direct:
        subscription = await direct.subscribe("look", ">", mode="ephemeral", start="first")
        return [message.data for message in await subscription.fetch(10_000)]


async def test_a_publish_whose_answer_was_lost_is_stored_once(proxied: Any, tap: FrameTap) -> None:
    async with proxied() as (server, proxy, log):
        tap.then("rpc.publish", proxy.reset)
        assert await log.publish("a", "once") == 1
        first, second = tap.of(*PUBLISHING)
        assert first == second
        assert first["number"] == 1
        assert await log.publish("a", "next") == 2
        assert await stored(server) == ["once", "next"]


async def test_a_batch_whose_answer_was_lost_is_stored_once(proxied: Any, tap: FrameTap) -> None:
    async with proxied() as (server, proxy, log):
        tap.then("rpc.publish.batch", proxy.reset)
        assert await log.publish_many([("a", n) for n in range(50)]) == list(range(1, 51))
        assert len(tap.of("rpc.publish.batch")) == 2
        assert await stored(server) == list(range(50))


async def test_many_at_once_keep_their_order_and_are_stored_once(proxied: Any, tap: FrameTap) -> None:
    async with proxied() as (server, proxy, log):
        tap.then("rpc.publish", proxy.reset)
        reported: list[Any] = [
            log.publish("a", n) if n % 3 else log.publish("a", n, type="odd one") for n in range(300)
        ]
        assert await asyncio.gather(*reported) == list(range(1, 301))
        assert proxy.counts.connections == 2
        assert await stored(server) == list(range(300))


async def test_what_never_arrived_is_sent_again(proxied: Any, tap: FrameTap) -> None:
    async with proxied() as (server, proxy, log):
        proxy.cut_after(40, Direction.TO_SERVER)  # in the middle of the frame
        assert await log.publish("a", "x" * 1_000) == 1
        assert len(tap.of(*PUBLISHING)) == 1
        assert proxy.counts.cuts == 1
        assert len(await stored(server)) == 1


async def test_half_an_answer_is_none(proxied: Any, tap: FrameTap) -> None:
    async with proxied() as (server, proxy, log):
        proxy.cut_after(20, Direction.TO_CLIENT)
        assert await log.publish("a", "once") == 1
        assert len(tap.of(*PUBLISHING)) == 2
        assert await stored(server) == ["once"]


async def test_what_is_reported_while_there_is_no_connection_is_sent_on_the_next_one(proxied: Any) -> None:
    async with proxied() as (server, proxy, log):
        await cut_off(proxy, log)
        publishing = asyncio.ensure_future(asyncio.gather(*(log.publish("a", n) for n in range(10))))
        await asyncio.sleep(0)
        proxy.accept()
        assert await publishing == list(range(1, 11))
        assert await stored(server) == list(range(10))


async def test_a_late_copy_on_the_old_connection_is_recognised(proxied: Any) -> None:
    """The network kept the first copy back, and delivers it when the second has long been answered."""
    async with proxied() as (server, proxy, log):
        proxy.hold_back()
        publishing = asyncio.ensure_future(log.publish("a", "once"))
        await asyncio.to_thread(proxy.wait_until, lambda counts: counts.held_bytes > 0)
        await asyncio.to_thread(proxy.part_from_clients)
        assert await publishing == 1
        await deliver_late(proxy)
        assert await log.publish("a", "next") == 2
        assert await stored(server) == ["once", "next"]


class HoldFirst(Middleware):
    """Lets the first publish wait for ever, and all others pass."""

    def __init__(self) -> None:
        self.holding = asyncio.Event()

    async def before(self, call: CallContext) -> None:
        if call.method in PUBLISHING and not self.holding.is_set():
            self.holding.set()
            await asyncio.Event().wait()


async def test_what_is_sent_again_is_not_taken_for_what_was_answered_out_of_turn(serve: Any, proxied: Any) -> None:
    """Of three in a row the second is answered, the first is not, and the third comes when both others were sent: sent
    together, the first and the third must not look like the first and the second."""
    server = serve()
    middleware = server.use(HoldFirst())
    async with proxied(server) as (_, proxy, log):
        first = asyncio.ensure_future(log.publish("a", "first"))
        await middleware.holding.wait()
        assert await log.publish("a", "second") == 1
        await cut_off(proxy, log)
        third = asyncio.ensure_future(log.publish("a", "third"))
        await asyncio.sleep(0)
        proxy.accept()
        assert await asyncio.gather(first, third) == [2, 3]
        assert await stored(server) == ["second", "first", "third"]


async def test_a_late_copy_is_recognised_even_if_all_around_it_was_confirmed(proxied: Any, at_once: None) -> None:
    async with proxied() as (server, proxy, log):
        proxy.hold_back()
        publishing = asyncio.ensure_future(log.publish("a", "once"))
        await asyncio.to_thread(proxy.wait_until, lambda counts: counts.held_bytes > 0)
        await asyncio.to_thread(proxy.part_from_clients)
        assert await publishing == 1
        for n in range(3):
            await log.publish("a", n)  # which tells the server what may be forgotten
        await deliver_late(proxy)
        assert await stored(server) == ["once", 0, 1, 2]


async def deliver_late(proxy: FaultProxy) -> None:
    proxy.deliver_late()
    await asyncio.to_thread(proxy.wait_until, lambda counts: counts.late_bytes > 0 and counts.open == 1)


async def test_what_has_been_answered_is_confirmed_so_that_receipts_do_not_pile_up(
    serve: Any, tap: FrameTap, at_once: None
) -> None:
    async with serve() as server, headwater.open_async(server.url) as log:
        for n in range(3):
            await log.publish_many([("a", n), ("a", n)])
        assert [params.get("confirmed", 0) for params in tap.of("rpc.publish.batch")] == [1, 3, 5]
        with server._context.core.engine.store.read() as reader:  # type: ignore[union-attr]
            assert len(reader.receipts(log._core._connection._publisher, 1, 100)) == 1  # type: ignore[attr-defined]


async def test_one_that_was_given_up_does_not_keep_the_others_from_being_confirmed_for_ever(
    proxied: Any, tap: FrameTap, at_once: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outbox, "LATE_COPY_S", 0.0)
    async with proxied(timeout=0.3) as (_, proxy, log):
        proxy.blackhole(Direction.TO_CLIENT)
        with pytest.raises(headwater.HeadwaterError):
            await log.publish("a", 1)
        proxy.heal()
        proxy.reset()
        await log.publish_many([("a", 2)])
        assert max(params.get("confirmed", 0) for params in tap.of("rpc.publish.batch")) == 2


async def test_a_call_of_the_applications_own_is_not_made_twice(proxied: Any) -> None:
    made: Counter[str] = Counter()
    async with proxied() as (server, proxy, log):

        @server.method("pay")
        def pay() -> str:
            made["pay"] += 1
            proxy.reset()  # before the answer
            return "paid"

        with pytest.raises(UnreachableError) as raised:
            await log.remote.call("pay")
        assert "may have been done" in raised.value.why
        assert made == {"pay": 1}
        assert await log.publish("a", 1) == 1


async def test_a_question_is_asked_again(proxied: Any, tap: FrameTap) -> None:
    async with proxied() as (_, proxy, log):
        proxy.cut_after(20, Direction.TO_CLIENT)
        assert await log.last_seq() == 0
        assert len(tap.of("rpc.last_seq")) == 2


async def test_an_ack_whose_answer_was_lost_counts(proxied: Any, tap: FrameTap) -> None:
    async with proxied() as (_, proxy, log):
        await log.publish_many([("a", n) for n in range(3)])
        async with log.subscribe("s", "a") as subscription:
            first, second, third = await subscription.fetch(3)
            tap.then("rpc.acknowledge.persistent", proxy.reset)
            await subscription.ack_many([first, second])
            assert len(tap.of("rpc.acknowledge.persistent")) == 2
            await third.ack()
            info = await subscription.info()
            assert (info.lag, info.acked, info.redelivered) == (0, 3, 0)


async def test_a_shared_ack_whose_answer_was_lost_counts_too(proxied: Any, tap: FrameTap) -> None:
    """But it may have been acked by another consumer that it was passed on to, so an error is right too."""
    async with proxied() as (_, proxy, log):
        await log.publish("a", 1)
        async with log.subscribe("s", "a", mode="shared") as subscription:
            [message] = await subscription.fetch(1)
            tap.then("rpc.acknowledge.persistent", proxy.reset)
            with contextlib.suppress(LeaseLostError):
                await message.ack()
            assert await subscription.fetch(1) == []
            assert (await subscription.info()).lag == 0


@pytest.mark.parametrize("mode", ["exclusive", "shared"])
async def test_a_nack_whose_answer_was_lost_counts_once(proxied: Any, tap: FrameTap, mode: Any) -> None:
    async with proxied() as (_, proxy, log):
        await log.publish("a", 1)
        async with log.subscribe("s", "a", mode=mode) as subscription:
            [message] = await subscription.fetch(1)
            tap.then("rpc.nack", proxy.reset)
            await message.nack(0)
            assert len(tap.of("rpc.nack")) == 2
            [again] = await subscription.fetch(1, timeout=5)
            assert (again.seq, again.attempt) == (1, 2)


async def test_a_reject_whose_answer_was_lost_counts(proxied: Any, tap: FrameTap) -> None:
    async with proxied() as (_, proxy, log):
        await log.publish("a", 1)
        async with log.subscribe("s", "a") as subscription:
            [message] = await subscription.fetch(1)
            tap.then("rpc.reject", proxy.reset)
            await message.reject("no use")
            assert len(tap.of("rpc.reject")) == 1  # the server says that it is settled before it is sent again
            assert await subscription.fetch(1) == []
            [letter] = await log.dead_letters.list()
            assert letter.error == "no use"
