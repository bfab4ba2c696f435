"""The same verbs under asyncio."""

# ruff: noqa: PT012 (what a transaction refuses, it may refuse at the end of its block)

import asyncio
from contextlib import AbstractAsyncContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
from fetched import seqs

import headwater
from headwater import AsyncLog, ManualClock
from headwater.errors import (
    ClosedError,
    InvalidDataError,
    InvalidStateError,
    LeaseLostError,
    SubscriptionActiveError,
)

Opening = AbstractAsyncContextManager[AsyncLog]


@pytest.fixture
def url(tmp_path: Path) -> str:
    return str(tmp_path / "log.db")


@pytest.fixture
def opening(url: str, clock: ManualClock) -> Opening:
    return headwater.open_async(url, clock=clock, maintenance_interval=None, heartbeats=False)


async def test_publish_fetch_ack(opening: Opening) -> None:
    async with opening as log:
        assert await log.publish("a", {"n": 1}, id="x") == 1
        assert await log.publish("a", {"n": 2}, id="x") == 1
        assert await log.publish_many([("a", 2), ("b", 3)]) == [2, 3]
        with pytest.raises(InvalidDataError):
            await log.publish("a", float("nan"))
        async with log.subscribe("s", "a") as subscription:
            first, second = await subscription.fetch()
            assert first.data == {"n": 1}
            await first.ack()
            await first.ack()
            await second.nack(0)
            [again] = await subscription.fetch()
            assert (again.seq, again.attempt) == (2, 2)
            with pytest.raises(LeaseLostError):
                await subscription.ack_many([second])
            await again.reject("no use")
            assert (await subscription.info()).lag == 0
        [letter] = await log.dead_letters.list()
        assert letter.error == "no use"
        assert (await log.dead_letters.redrive()).redriven == 1
        assert (await log.subscription("s")).lag == 1


async def test_the_rest_of_the_verbs(opening: Opening, clock: ManualClock) -> None:
    async with opening as log:
        await log.publish_many([("a", n, {"ttl": 0}) for n in range(3)])
        subscription = await log.subscribe("s", "a", ack_wait=5)
        assert await subscription.fetch() == []
        assert (await log.dead_letters.statistics()).by_reason == {"expired": 3}
        lines = [line async for line in log.dead_letters.export()]
        assert await log.dead_letters.purge() == 3
        assert await log.dead_letters.import_(lines) == 3
        assert (await log.dead_letters.get(4)).message.data == 0
        await log.publish("a", 4)
        [message] = await subscription.fetch()
        clock.advance(4)
        await message.extend(10)
        clock.advance(9)
        assert await subscription.fetch() == []
        await subscription.close()
        assert await log.seek("s", "new") == 4
        await log.delete_subscription("s")
        await log.retain("a", max_count=1)
        assert (await log.run_maintenance()).pruned == {"a": 3}
        assert [policy.pattern for policy in await log.retention()] == ["a"]
        assert await log.delete_retention("a")
        assert (await log.last_seq(), await log.topic_max_seq("a")) == (4, 4)
        assert [topic.count for topic in await log.topics()] == [1]
        assert (await log.statistics()).messages == 1
        assert (await log.health())["store"] in ("memory", "sqlite")
        assert await log.subscriptions() == []


async def test_a_hundred_publishers_share_commits(opening: Opening, monkeypatch: pytest.MonkeyPatch) -> None:
    async with opening as log:
        store = log._core.engine.store
        write, commits = store.write, []

        @contextmanager
        def counted(*arguments: Any, **options: Any) -> Any:
            with write(*arguments, **options) as writer:
                yield writer
            commits.append(1)

        monkeypatch.setattr(store, "write", counted)
        published = await asyncio.gather(*(log.publish("a", n) for n in range(100)))
        assert sorted(published) == list(range(1, 101))
        assert len(commits) <= 20, "publishes that wait together are written together"
        subscription = await log.subscribe("s", "a")
        assert [message.data for message in await subscription.fetch()] == list(range(100)), "in the order of asking"


async def test_async_iteration(opening: Opening) -> None:
    async with opening as log:
        await log.publish_many([("a", n) for n in range(250)])
        subscription = await log.subscribe("s", "a")
        received = []
        async for message in subscription.messages():
            received.append(message.seq)
            await message.ack()
        assert received == list(range(1, 251))

        last = asyncio.Event()

        async def consume() -> None:
            async for message in subscription:
                received.append(message.seq)
                await message.ack()
                last.set()

        task = asyncio.create_task(consume())
        await log.publish("a", "last")
        await last.wait()
        await subscription.close()
        await task
        assert received == list(range(1, 252))


def test_the_two_faces_share_a_file(tmp_path: Path, clock: ManualClock) -> None:
    path = tmp_path / "log.db"
    blocking = headwater.open(path, clock=clock, maintenance_interval=None, heartbeats=False)
    blocking.publish("a", 1)

    async def story() -> None:
        async with headwater.open_async(path, clock=clock, maintenance_interval=None, heartbeats=False) as log:
            subscription = await log.subscribe("s", "a")
            assert seqs(await subscription.fetch()) == [1]
            with pytest.raises(SubscriptionActiveError):
                blocking.subscribe("s", "a")
            blocking.publish("a", 2)
            assert seqs(await asyncio.wait_for(subscription.fetch(timeout=None), 30)) == [2]

    asyncio.run(story())
    blocking.close()


async def test_transactions(tmp_path: Path, clock: ManualClock) -> None:
    async with headwater.open_async(
        tmp_path / "log.db", clock=clock, maintenance_interval=None, heartbeats=False
    ) as log:
        await log.publish_many([("a", 1), ("a", 2)])
        first, second = await (await log.subscribe("s", "a")).fetch()
        async with first.transaction() as tx:
            await tx.execute("CREATE TABLE mine (n)")
            await tx.execute("INSERT INTO mine VALUES (?)", (1,))
            assert await tx.publish("b", "from inside") == 3
            with pytest.raises(InvalidStateError):
                await log.publish("a", 3)
        with pytest.raises(RuntimeError):
            async with second.transaction() as tx:
                await tx.execute("INSERT INTO mine VALUES (2)")
                raise RuntimeError
        async with second.transaction() as tx:
            assert await tx.execute("SELECT n FROM mine") == [(1,)]
        assert (await log.subscription("s")).lag == 0
        assert await log.last_seq() == 3


async def test_a_transaction_refuses_its_own_task_and_log_alone(tmp_path: Path) -> None:
    async def publish_after(ended: asyncio.Event, log: AsyncLog) -> int:
        await ended.wait()
        async with log.transaction() as tx:
            return await tx.publish("a", "from a task that was created inside")

    async with (
        headwater.open_async(tmp_path / "log.db", maintenance_interval=None) as log,
        headwater.open_async("memory:", maintenance_interval=None) as other,
    ):
        async with log.transaction() as tx:
            assert await other.publish("a", 1) == 1
            with pytest.raises(InvalidStateError, match="would wait for the transaction"):
                await log.publish("a", 1)
            with pytest.raises(InvalidStateError, match="would wait for the transaction"):
                async with log.transaction():
                    pytest.fail("no transaction inside another")
            during = asyncio.create_task(log.publish("a", "its turn comes after the block"))
            ended = asyncio.Event()
            after = asyncio.create_task(publish_after(ended, log))
            assert await tx.publish("a", "from inside") == 1
        assert await during == 2
        ended.set()
        assert await after == 3


async def test_a_closed_log_says_so(url: str, clock: ManualClock) -> None:
    async with headwater.open_async(url, clock=clock, maintenance_interval=None, heartbeats=False) as log:
        subscription = await log.subscribe("s", "a")
        waiting = asyncio.create_task(subscription.fetch(timeout=None))
        await asyncio.sleep(0)
    with pytest.raises(ClosedError):
        await waiting
    for verb in (log.publish("a", 1), log.subscribe("t", "a"), log.retain("a", max_count=1)):
        with pytest.raises(ClosedError):
            await verb
    await log.close()


async def test_an_unconfirmed_ack_is_done_after_close(opening: Opening) -> None:
    async with opening as log:
        await log.publish_many([("a", n) for n in range(4)])
        async with log.subscribe("s", "a") as subscription:
            first, *others = await subscription.fetch()
            # Driven by hand: it must end without ever giving way to the event loop.
            for acking in (first.ack(confirm=False), subscription.ack_many(others, confirm=False)):
                with pytest.raises(StopIteration):
                    acking.send(None)
            assert all(message.settled for message in (first, *others))
        assert (await log.subscription("s")).acked == 4
        assert await (await log.subscribe("s", "a")).fetch() == []


async def test_a_log_in_this_process_has_no_remote_end(opening: Opening) -> None:
    async with opening as log:
        with pytest.raises(InvalidStateError, match="ws://"):
            _ = log.remote
