"""A read that is interrupted ends with the reason, and its connection serves the next one."""

from __future__ import annotations

import asyncio
import itertools
import random
import threading
from collections.abc import Callable
from typing import Any

import pytest

from headwater.broker.engine import READERS_MAX, Engine, SharedRead
from headwater.broker.flow import run_async, run_blocking
from headwater.delivery.publishing import DedupeWindow
from headwater.errors import ClosedError, RequestTimeoutError
from headwater.message import Draft
from headwater.ports.clock import ManualClock
from headwater.ports.records import Selection
from headwater.ports.store import Interruption, Reader, Store
from headwater.stores.postgres.reader import PostgresReader
from headwater.stores.sqlite.reader import SqliteReader
from headwater.topics import parse_pattern

PATIENCE_S = 30.0
REASON = RequestTimeoutError("its time is over")
ALL = Selection(parse_pattern(">"))


def endless(reader: Reader) -> None:
    """One statement that does not end."""
    if isinstance(reader, SqliteReader):
        sql = "WITH RECURSIVE n (n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM n) SELECT count(*) FROM n"
        reader._connection.execute(sql).fetchall()
    elif isinstance(reader, PostgresReader):
        reader.connection.execute("SELECT pg_sleep(600)")


def many_short(reader: Reader) -> None:
    for _ in itertools.count():
        reader.last_seq()


def filled(store: Store) -> Store:
    with store.write() as writer:
        writer.append([Draft("a", "1", 1) for _ in range(1_000)], 0, DedupeWindow(0, 0))
    return store


def begun(work: Callable[[Reader], object]) -> tuple[Callable[[Reader], object], threading.Event]:
    has_begun = threading.Event()

    def look(reader: Reader) -> None:
        reader.last_seq()
        has_begun.set()
        work(reader)

    return look, has_begun


@pytest.mark.parametrize("work", [endless, many_short])
def test_a_read_that_runs_ends_with_the_reason(store: Store, work: Callable[[Reader], object]) -> None:
    interruption, outcomes = Interruption(), []
    look, has_begun = begun(work)

    def read() -> None:
        try:
            with store.read(interruption) as reader:
                look(reader)
        except BaseException as exc:
            outcomes.append(exc)

    thread = threading.Thread(target=read)
    thread.start()
    assert has_begun.wait(PATIENCE_S)
    interruption.interrupt(REASON)
    thread.join(PATIENCE_S)
    assert outcomes == [REASON]
    for _ in range(3):
        with store.read() as reader:
            assert reader.last_seq() == 0


def test_an_interruption_between_two_statements(store: Store) -> None:
    interruption = Interruption()

    def look() -> None:
        with store.read(interruption) as reader:
            reader.last_seq()
            interruption.interrupt(REASON)
            reader.last_seq()

    with pytest.raises(RequestTimeoutError):
        look()
    with store.read() as reader:
        assert reader.last_seq() == 0


def test_an_interruption_before_it_begins_or_after_its_end(store: Store) -> None:
    early, late = Interruption(), Interruption()
    early.interrupt(REASON)
    with pytest.raises(RequestTimeoutError), store.read(early) as reader:
        reader.last_seq()
    with store.read(late) as reader:
        reader.last_seq()
    late.interrupt(REASON)
    with store.read(Interruption()) as reader:
        assert reader.last_seq() == 0


def engine_of(store: Store) -> Engine:
    return Engine(store, ManualClock(), dedupe=DedupeWindow(0, 0))


def test_closing_ends_what_is_read(store: Store) -> None:
    engine, outcomes = engine_of(store), []
    look, has_begun = begun(endless)

    def read() -> None:
        try:
            run_blocking(engine.read(look))
        except BaseException as exc:
            outcomes.append(exc)

    thread = threading.Thread(target=read)
    thread.start()
    assert has_begun.wait(PATIENCE_S)
    engine.close()
    thread.join(PATIENCE_S)
    assert [(type(error), error.why) for error in outcomes] == [(ClosedError, "the log was closed while it was read")]


def test_a_thousand_reads_of_which_many_are_given_up(store: Store) -> None:
    """No thread and no connection stays behind, and none is left in a state that the next reader sees."""
    engine, roll = engine_of(filled(store)), random.Random(1)

    def look(reader: Reader) -> int:
        return sum(reader.count(ALL, 0, 1_000) for _ in range(5))

    async def one() -> int | None:
        lane = roll.choice([engine.readers, engine.statistics])
        task = asyncio.ensure_future(run_async(engine.read(look, lane)))
        await asyncio.sleep(roll.choice([0, 0, 0.001, 0.005]))
        if roll.random() < 0.7:
            task.cancel()
        [outcome] = await asyncio.gather(task, return_exceptions=True)
        assert isinstance(outcome, asyncio.CancelledError) or outcome == 5_000, outcome
        return None if isinstance(outcome, BaseException) else outcome

    async def all_of_them() -> list[int | None]:
        async with asyncio.timeout(PATIENCE_S):
            found: list[int | None] = []
            for _ in range(20):
                found += await asyncio.gather(*(one() for _ in range(50)))
            return found

    found = asyncio.run(all_of_them())
    assert 0 < sum(each is None for each in found) < 1_000
    assert run_blocking(engine.read(look)) == 5_000
    engine.close()
    assert not engine._reading


def test_a_shared_read_serves_all_callers_that_asked_before_it_began(store: Store) -> None:
    engine = engine_of(filled(store))
    runs: list[int] = []
    in_the_way, go_on = threading.Event(), threading.Event()

    def look(reader: Reader) -> int:
        runs.append(reader.last_seq())
        return reader.last_seq()

    shared = SharedRead(engine, look)

    async def ask() -> list[Any]:
        engine.statistics.submit(lambda: (in_the_way.set(), go_on.wait(PATIENCE_S)))
        assert in_the_way.wait(PATIENCE_S)
        asking = [asyncio.ensure_future(run_async(shared.get())) for _ in range(10)]
        await asyncio.sleep(0)
        asking[0].cancel()
        await asyncio.gather(asking[0], return_exceptions=True)
        go_on.set()
        return await asyncio.gather(*asking[1:])

    assert asyncio.run(ask()) == [1_000] * 9
    assert runs == [1_000]
    engine.close()


def test_a_shared_read_ends_when_all_have_left(store: Store) -> None:
    engine = engine_of(store)
    look, has_begun = begun(endless)
    shared = SharedRead(engine, look)

    async def ask() -> None:
        asking = [asyncio.ensure_future(run_async(shared.get())) for _ in range(3)]
        while not has_begun.is_set():
            await asyncio.sleep(0.001)
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)

    asyncio.run(ask())
    assert run_blocking(SharedRead(engine, lambda reader: reader.last_seq()).get()) == 0  # its thread is free again
    engine.close()


def test_reads_whose_callers_have_left_free_their_threads(store: Store) -> None:
    engine = engine_of(store)

    async def ask() -> int:
        for lane in (engine.readers, engine.statistics):
            for _ in range(READERS_MAX + 1):
                look, has_begun = begun(endless)
                asking = asyncio.ensure_future(run_async(engine.read(look, lane)))
                async with asyncio.timeout(PATIENCE_S):
                    while not has_begun.is_set():
                        await asyncio.sleep(0.001)
                asking.cancel()
                await asyncio.gather(asking, return_exceptions=True)
        return await run_async(engine.read(lambda reader: reader.last_seq()))

    assert asyncio.run(ask()) == 0
    engine.close()


def test_statistics_keep_no_delivery_waiting(concurrent_store: Store) -> None:
    engine = engine_of(concurrent_store)
    look, has_begun = begun(endless)

    async def ask() -> int:
        asking = [asyncio.ensure_future(run_async(engine.read(look, engine.statistics))) for _ in range(100)]
        while not has_begun.is_set():
            await asyncio.sleep(0.001)
        async with asyncio.timeout(PATIENCE_S):
            found = await run_async(engine.read(lambda reader: reader.last_seq()))
        for each in asking:
            each.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
        return found

    assert asyncio.run(ask()) == 0
    engine.close()
