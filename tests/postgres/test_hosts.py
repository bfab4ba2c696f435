"""Several hosts on one database: servers, exclusive holders, shared consumers, and which lock waits for which."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import psycopg
import pytest

import headwater
from headwater import ManualClock
from headwater.broker.committer import TransactionHooks
from headwater.errors import LeaseLostError, SubscriptionActiveError
from headwater.ports.store import Writer
from headwater.stores.postgres import DatabaseClock, PostgresStore

PATIENCE_S = 30.0
HOLDER = """
import sys, headwater
log = headwater.open(sys.argv[1], heartbeats=False)
log.subscribe("s", "a", lease=1.0)
print("held", flush=True)
sys.stdin.readline()
"""


async def test_two_servers_serve_one_log(postgres_url: str) -> None:
    async with (
        headwater.serve(postgres_url, port=0) as one,
        headwater.serve(postgres_url, port=0) as two,
        headwater.open_async(one.url) as publisher,
        headwater.open_async(two.url) as consumer,
    ):
        subscription = await consumer.subscribe("s", "orders.>")
        waiting = asyncio.create_task(subscription.fetch(timeout=PATIENCE_S))
        assert await publisher.publish("orders.new", 17) == 1
        (message,) = await waiting
        assert message.data == 17
        await message.ack()
        with pytest.raises(SubscriptionActiveError):
            await publisher.subscribe("s", "orders.>")
        await subscription.close()
        again = await publisher.subscribe("s", "orders.>")
        assert await again.fetch() == []


def test_shared_consumers_on_several_hosts_get_each_message_once(postgres_url: str) -> None:
    messages, hosts = 400, 4
    got: list[int] = []
    with headwater.open(postgres_url) as log:
        log.publish_many([("work", number) for number in range(messages)])
        log.subscribe("s", "work", mode="shared").close()
        logs = [headwater.open(postgres_url) for _ in range(hosts)]

        def work(mine: headwater.Log) -> None:
            with mine.subscribe("s", "work", mode="shared") as subscription:
                while found := subscription.fetch(7):
                    got.extend(message.data for message in found)
                    subscription.ack_many(found)

        threads = [threading.Thread(target=work, args=(mine,)) for mine in logs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)
        for mine in logs:
            mine.close()
        assert sorted(got) == list(range(messages))
        assert log.subscription("s").lag == 0


def test_hosts_that_touch_many_subscriptions_do_not_wait_for_each_other_in_circles(postgres_url: str) -> None:
    """Each host's groups touch all subscriptions; locked in whatever order they came, two hosts would deadlock."""
    hosts, rounds, names = 2, 40, [f"s{number}" for number in range(5)]
    logs = [headwater.open(postgres_url, durability="relaxed") for _ in range(hosts)]
    subscriptions = [[log.subscribe(name, "work", mode="shared") for name in names] for log in logs]
    start = threading.Barrier(hosts)

    def work(log: headwater.Log, mine: list[headwater.Subscription], order: list[int]) -> None:
        engine = log._core.engine  # type: ignore[attr-defined]
        for _ in range(rounds):
            start.wait(PATIENCE_S)
            with engine.store._turn:  # what comes meanwhile becomes one group, in this order
                beats = [engine.committer.submit(_touch(mine[number].id), touching=mine[number].id) for number in order]
            for beat in beats:
                beat.wait(PATIENCE_S)
                assert beat.error is None

    with ThreadPoolExecutor(hosts) as pool:
        working = [
            pool.submit(work, log, mine, list(range(len(names)))[:: 1 if turn else -1])
            for turn, (log, mine) in enumerate(zip(logs, subscriptions, strict=True))
        ]
        for each in working:
            each.result(PATIENCE_S)
    for log in logs:
        log.close()
    with psycopg.connect(postgres_url) as connection:
        row = connection.execute("SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()")
        assert row.fetchone() == (0,)


def _touch(id: str) -> Callable[[Writer, TransactionHooks], None]:
    def work(writer: Writer, hooks: TransactionHooks) -> None:
        record = writer.subscription(id)
        assert record is not None
        writer.save_subscription(record)

    return work


def test_a_holder_on_another_host_keeps_others_out_until_it_dies(postgres_url: str) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, postgres_url], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == b"held\n"
    with headwater.open(postgres_url) as log:
        with pytest.raises(SubscriptionActiveError):
            log.subscribe("s", "a")
        holder.kill()
        holder.wait(PATIENCE_S)
        log.subscribe("s", "a", timeout=PATIENCE_S)


def test_a_late_holder_on_another_host_is_refused(postgres_url: str) -> None:
    clock = ManualClock()
    options = {"clock": clock, "heartbeats": False, "maintenance_interval": None}
    with headwater.open(postgres_url, **options) as one, headwater.open(postgres_url, **options) as two:
        one.publish("a", 1)
        late = one.subscribe("s", "a", lease=10)
        (message,) = late.fetch()
        clock.advance(10.001)
        (again,) = two.subscribe("s", "a", lease=10).fetch()
        with pytest.raises(LeaseLostError):
            message.ack()
        again.ack()
        assert two.subscription("s").lag == 0


def test_hosts_whose_clocks_differ_go_by_the_databases_time(postgres_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store = PostgresStore(postgres_url)
    clock, real_ns = DatabaseClock(store), time.time_ns
    try:
        assert abs(clock.now_ms() - real_ns() // 10**6) < 1_000
        monkeypatch.setattr(time, "time_ns", lambda: real_ns() + 3_600 * 10**9)  # this host is an hour ahead now
        with store.write():
            pass
        assert abs(clock.now_ms() - real_ns() // 10**6) < 1_000
        monkeypatch.undo()
        other = PostgresStore(postgres_url)
        assert abs(DatabaseClock(other).now_ms() - real_ns() // 10**6) < 1_000
        other.close()
    finally:
        store.close()
