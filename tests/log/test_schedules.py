"""Schedules over each log: on time, one publisher among many, each occurrence once, missed ones by their policy."""

from __future__ import annotations

import asyncio
import logging
import threading
import traceback
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from eventually import eventually

import headwater
from headwater import Log, ManualClock, Occurrence
from headwater.broker import schedules
from headwater.broker.flow import run_blocking
from headwater.errors import InvalidOptionError, InvalidStateError

START = datetime.fromtimestamp(1_700_000_000, UTC)  # of a ManualClock: 22:13:20
HOUR_S = 3600.0


@pytest.fixture
def open_scheduler(open_log: Callable[[], Log], clock: ManualClock) -> Callable[[], Log]:
    """A client waits by its own clock, which here is that of the server."""

    def open() -> Log:
        log = open_log()
        if log.name.startswith("ws://"):
            log._core._clock = clock  # type: ignore[attr-defined]
        return log

    return open


def stored(log: Log, topic: str = "t") -> list[tuple[str, Any]]:
    with log.subscribe("reader", topic, mode="ephemeral", start="first") as reader:
        return [(message.id, message.data) for message in reader.fetch(1_000)]


def at(text: str) -> str:
    return f"s@2023-11-{text}:00.000Z"


def test_an_occurrence_is_published_on_time(open_scheduler: Callable[[], Log], clock: ManualClock) -> None:
    log = open_scheduler()
    seen: list[Occurrence] = []

    @log.every("1h", id="s", topic="t")
    def report(occurrence: Occurrence) -> dict[str, str]:
        seen.append(occurrence)
        return {"hour": occurrence.at.strftime("%H")}

    log.start()
    clock.advance(2_799)  # 22:59:59
    [info] = log.schedules()
    assert (info.id, info.topic, info.timetable, info.missed) == ("s", "t", "every 1h", "once")
    assert (info.last_at, info.next_at) == (None, datetime(2023, 11, 14, 23, tzinfo=UTC))
    assert stored(log) == []
    clock.advance(1)
    eventually(lambda: stored(log), [(at("14T23:00"), {"hour": "23"})])
    clock.advance(HOUR_S)
    eventually(lambda: stored(log)[1:], [(at("15T00:00"), {"hour": "00"})])
    assert seen[0] == Occurrence("s", datetime(2023, 11, 14, 23, tzinfo=UTC))
    [message] = log.subscribe("headers", "t").fetch(1)
    assert message.headers == {"schedule": "s", "scheduled_at": "2023-11-14T23:00:00.000Z"}
    [info] = log.schedules()
    assert (info.last_at, info.next_at) == (datetime(2023, 11, 15, tzinfo=UTC), datetime(2023, 11, 15, 1, tzinfo=UTC))


def test_a_calendar_follows_the_clocks_of_its_zone(open_scheduler: Callable[[], Log], clock: ManualClock) -> None:
    clock.advance(datetime(2026, 3, 28, tzinfo=UTC) - START)
    log = open_scheduler()
    log.cron("30 2 * * *", id="s", topic="t", tz="Europe/Berlin")(lambda occurrence: occurrence.at.isoformat())
    log.start()
    expected = ["2026-03-28T02:30:00+01:00", "2026-03-29T03:00:00+02:00", "2026-03-30T02:30:00+02:00"]
    for number, text in enumerate(expected, 1):
        clock.advance(datetime.fromisoformat(text).astimezone(UTC) - now(clock))
        eventually(lambda number=number: [data for _, data in stored(log)][:number], expected[:number])
    assert len(stored(log)) == 3


def now(clock: ManualClock) -> datetime:
    return datetime.fromtimestamp(clock.now_ms() / 1000, UTC)


def test_none_publishes_nothing_and_counts_as_done(open_scheduler: Callable[[], Log], clock: ManualClock) -> None:
    log = open_scheduler()
    log.every(HOUR_S, id="s", topic="t")(lambda occurrence: occurrence.at.hour or None)
    log.start()
    for hour in (23, 0, 1):
        clock.advance(HOUR_S)
        eventually(lambda hour=hour: getattr(log.schedules()[0].last_at, "hour", None), hour)
    assert [data for _, data in stored(log)] == [23, 1]


def test_one_of_many_publishes(open_scheduler: Callable[[], Log], clock: ManualClock) -> None:
    """The function is called once for each occurrence, whichever publisher calls it."""
    logs = [open_scheduler() for _ in range(4)]
    calls: list[datetime] = []
    for log in logs:
        log.every("1h", id="s", topic="t")(lambda occurrence: calls.append(occurrence.at) or len(calls))
        log.start()
    for hours in range(1, 11):
        clock.advance(HOUR_S)
        eventually(lambda hours=hours: len(stored(logs[0])), hours)
    assert len({id for id, _ in stored(logs[0])}) == len(calls) == 10


def test_missed_occurrences_by_policy(open_scheduler: Callable[[], Log], clock: ManualClock) -> None:
    with open_scheduler() as log:
        for missed in ("once", "skip", "all"):
            log.every("1h", id=missed, topic=missed, missed=missed, missed_max=3)(lambda occurrence: occurrence.at.hour)
        log.start()
    clock.advance(timedelta(hours=5, minutes=10))  # 03:23:20
    log = open_scheduler()
    for missed in ("once", "skip", "all"):
        log.every("1h", id=missed, topic=missed, missed=missed, missed_max=3)(lambda occurrence: occurrence.at.hour)
    log.start()
    eventually(lambda: [info.last_at.hour if info.last_at else None for info in log.schedules()], [3, 3, 3])
    found = {missed: [data for _, data in stored(log, missed)] for missed in ("once", "skip", "all")}
    assert found == {"once": [3], "skip": [], "all": [1, 2, 3]}


def test_a_new_schedule_makes_up_for_nothing(open_scheduler: Callable[[], Log], clock: ManualClock) -> None:
    log = open_scheduler()
    log.every("1h", id="s", topic="t", missed="all")(lambda occurrence: 1)
    log.start()
    clock.advance(HOUR_S)
    eventually(lambda: len(stored(log)), 1)


def test_a_new_timetable_begins_anew_and_ends_the_old_one(
    open_scheduler: Callable[[], Log], clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    old, new = open_scheduler(), open_scheduler()
    old.every("1h", id="s", topic="t")(lambda occurrence: "old")
    old.start()
    new.cron("30 * * * *", id="s", topic="t")(lambda occurrence: "new")
    new.start()
    clock.advance(HOUR_S)  # 23:13:20
    eventually(lambda: stored(new), [(at("14T22:30"), "new")])
    eventually(lambda: old.health()["handlers"]["schedule:s"]["state"], "standby")
    assert "declared anew elsewhere" in caplog.text
    assert [info.timetable for info in new.schedules()] == ["30 * * * * UTC"]


def test_a_timetable_that_no_process_publishes_is_replaced(
    open_scheduler: Callable[[], Log], clock: ManualClock
) -> None:
    """A former version starts again in the middle of a deployment, so its declaration is the newest. Then it ends."""
    new, old = open_scheduler(), open_scheduler()
    new.cron("30 * * * *", id="s", topic="t")(lambda occurrence: "new")
    new.start()
    old.every("1h", id="s", topic="t")(lambda occurrence: "old")
    old.start()
    clock.advance(HOUR_S)  # 23:13:20
    eventually(lambda: [data for _, data in stored(new)], ["old"])
    eventually(lambda: new.health()["handlers"]["schedule:s"]["state"], "standby")
    old.stop()

    def data_a_minute_later() -> set[str]:
        clock.advance(schedules.LOOK_S)
        return {data for _, data in stored(new)}

    eventually(data_a_minute_later, {"old", "new"})
    assert [info.timetable for info in new.schedules()] == ["30 * * * * UTC"]
    assert new.health()["handlers"]["schedule:s"]["state"] == "running"


def test_a_deleted_schedule_publishes_no_more(open_scheduler: Callable[[], Log], clock: ManualClock) -> None:
    log = open_scheduler()
    log.every("1h", id="s", topic="t")(lambda occurrence: 1)
    log.start()
    assert (log.delete_schedule("s"), log.delete_schedule("s")) == (True, False)
    assert log.schedules() == []
    clock.advance(HOUR_S)
    eventually(lambda: log.health()["handlers"]["schedule:s"]["state"], "stopped")
    assert stored(log) == []


def test_a_function_that_fails_is_called_again(
    open_scheduler: Callable[[], Log], clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    log = open_scheduler()
    tries: list[int] = []

    @log.every("1h", id="s", topic="t")
    def report(occurrence: Occurrence) -> Any:
        tries.append(1)
        return {1: {1, 2}, 2: {"fine": True}}[len(tries)] if len(tries) > 1 else 1 / 0

    log.start()
    clock.advance(HOUR_S)
    eventually(lambda: len(tries), 1)
    clock.advance(0)  # the wait ends when the clock is moved
    eventually(lambda: [data for _, data in stored(log)], [{"fine": True}])
    [failed, *_] = [record for record in caplog.records if record.exc_info]
    assert failed.getMessage() == "schedule s failed; the next try is in 1 s"
    assert failed.exc_info is not None
    assert [frame.name for frame in traceback.extract_tb(failed.exc_info[2])] == ["report"]


# --- crashes, and processes that are too late -------------------------------------------------------------------------


def test_a_publisher_that_died_at_work_is_followed_by_another(
    open_scheduler: Callable[[], Log], clock: ManualClock
) -> None:
    """It took the lease, and never came back."""
    dead, log = open_scheduler(), open_scheduler()
    schedule = schedules.Schedule("s", "t", every_ms=3_600_000)
    run_blocking(dead._core.declare_schedule(schedule))
    clock.advance(HOUR_S)
    due_ms = clock.now_ms() // 3_600_000 * 3_600_000
    fence = run_blocking(dead._core.take_schedule(schedule, due_ms)).fence
    assert fence is not None
    log.every("1h", id="s", topic="t")(lambda occurrence: "second")
    log.start()
    assert run_blocking(log._core.take_schedule(schedule, due_ms)).busy
    assert stored(log) == []
    clock.advance(schedules.LEASE_MS / 1000)
    eventually(lambda: stored(log), [(at("14T23:00"), "second")])
    assert run_blocking(dead._core.publish_occurrence(schedule, fence, due_ms, "late", True)) is False
    assert stored(log) == [(at("14T23:00"), "second")]


def test_of_functions_that_take_longer_than_the_lease_the_first_to_end_is_stored(
    open_scheduler: Callable[[], Log], clock: ManualClock
) -> None:
    """While one is at work, the other takes over, and so on: neither may wait for the other."""
    one, other = open_scheduler()._core, open_scheduler()._core
    schedule = schedules.Schedule("s", "t", every_ms=3_600_000)
    run_blocking(one.declare_schedule(schedule))
    clock.advance(HOUR_S)
    due_ms = clock.now_ms() // 3_600_000 * 3_600_000
    slow = run_blocking(one.take_schedule(schedule, due_ms)).fence
    assert slow is not None
    clock.advance(schedules.LEASE_MS / 1000)
    late = run_blocking(other.take_schedule(schedule, due_ms)).fence
    assert late is not None
    assert run_blocking(one.publish_occurrence(schedule, slow, due_ms, "first", True)) is True
    assert run_blocking(other.publish_occurrence(schedule, late, due_ms, "second", True)) is False
    assert stored(open_scheduler()) == [(at("14T23:00"), "first")]


def test_a_schedule_that_was_deleted_or_changed_publishes_no_more(
    open_scheduler: Callable[[], Log], clock: ManualClock
) -> None:
    log = open_scheduler()
    core = log._core
    schedule = schedules.Schedule("s", "t", every_ms=3_600_000)
    for change in (
        lambda: core.delete_schedule("s"),
        lambda: core.declare_schedule(schedules.Schedule("s", "t", every_ms=1_800_000)),
    ):
        run_blocking(core.declare_schedule(schedule))
        clock.advance(HOUR_S)
        due_ms = clock.now_ms() // 3_600_000 * 3_600_000
        fence = run_blocking(core.take_schedule(schedule, due_ms)).fence
        assert fence is not None
        run_blocking(change())  # type: ignore[no-untyped-call]
        assert run_blocking(core.publish_occurrence(schedule, fence, due_ms, 1, True)) is False
    assert stored(log) == []


def test_the_lease_is_renewed_while_the_function_runs(
    open_scheduler: Callable[[], Log], clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schedules, "RENEWALS_PER_LEASE", 10_000)  # as time passes, not as the clock is moved
    log, other = open_scheduler(), open_scheduler()
    began, may_end = threading.Event(), threading.Event()

    @log.every("1h", id="s", topic="t")
    def slow(occurrence: Occurrence) -> str:
        began.set()
        assert may_end.wait(30)
        return "first"

    log.start()
    clock.advance(HOUR_S)
    assert began.wait(30)
    schedule = schedules.Schedule("s", "t", every_ms=3_600_000)
    due_ms = clock.now_ms() // 3_600_000 * 3_600_000
    for _ in range(3):
        renewed = threading.Event()
        take = log._core.take_schedule

        def watched(*given: Any, take: Any = take, renewed: threading.Event = renewed) -> Any:
            turn = yield from take(*given)
            renewed.set()
            return turn

        clock.advance(schedules.LEASE_MS / 1000 * 0.9)
        monkeypatch.setattr(log._core, "take_schedule", watched)
        assert renewed.wait(30)
        assert run_blocking(other._core.take_schedule(schedule, due_ms)).busy
    may_end.set()
    eventually(lambda: stored(log), [(at("14T23:00"), "first")])


def test_an_occurrence_that_is_sent_again_is_stored_once(open_log: Callable[[], Log], clock: ManualClock) -> None:
    log = open_log()
    schedule = schedules.Schedule("s", "t", every_ms=3_600_000)
    core = log._core
    assert run_blocking(core.declare_schedule(schedule)).last_ms == clock.now_ms()
    clock.advance(HOUR_S)
    due_ms = clock.now_ms() // 3_600_000 * 3_600_000
    fence = run_blocking(core.take_schedule(schedule, due_ms)).fence
    assert fence is not None
    assert run_blocking(core.publish_occurrence(schedule, fence, due_ms, 1, False)) is True
    assert run_blocking(core.publish_occurrence(schedule, fence, due_ms, 1, False)) is False
    assert len(stored(log)) == 1


# --- declaring --------------------------------------------------------------------------------------------------------


def test_a_schedule_alone_is_something_to_run(open_scheduler: Callable[[], Log], clock: ManualClock) -> None:
    log = open_scheduler()
    log.every("1h", id="s", topic="t")(lambda occurrence: 1)
    thread = threading.Thread(target=log.run, daemon=True)
    thread.start()
    eventually(lambda: log.health().get("handlers", {}).get("schedule:s", {}).get("state"), "running")
    clock.advance(HOUR_S)
    eventually(lambda: len(stored(log)), 1)
    log.stop()
    thread.join(10)
    assert not thread.is_alive()


def test_with_asyncio(tmp_path: Any) -> None:
    async def story() -> list[Any]:
        clock = ManualClock()
        async with headwater.open_async(tmp_path / "log.db", clock=clock) as log:

            @log.cron("0 * * * *", id="s", topic="t")
            async def report(occurrence: Occurrence) -> int:
                await asyncio.sleep(0)
                return occurrence.at.hour

            await log.start()
            async with log.subscribe("reader", "t") as reader:
                clock.advance(HOUR_S)
                [message] = await reader.fetch(1, timeout=20)
                assert [info.id for info in await log.schedules()] == ["s"]
                return [message.id, message.data]

    assert asyncio.run(story()) == [at("14T23:00"), 23]


def test_refusals(log: Log) -> None:
    with pytest.raises(InvalidOptionError, match="not a cron expression"):
        log.cron("every day", id="s", topic="t")
    with pytest.raises(InvalidOptionError, match="Did you mean 5s"):
        log.every("5", id="s", topic="t")
    with pytest.raises(headwater.errors.InvalidTopicError):
        log.every("5s", id="s", topic="a.*")
    log.every("5s", id="s", topic="t")(lambda occurrence: 1)
    with pytest.raises(InvalidStateError, match="the schedule 's' is declared already"):
        log.cron("0 3 * * *", id="s", topic="t")(lambda occurrence: 1)

    async def coroutine(occurrence: Occurrence) -> int:
        return 1

    with pytest.raises(InvalidOptionError, match="is a coroutine function"):
        log.every("5s", id="other", topic="t")(coroutine)


def test_a_log_has_a_limited_number_of_schedules(
    log: Log, engine_here: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(schedules, "SCHEDULES_MAX", 2)
    caplog.set_level(logging.CRITICAL)
    for number in range(3):
        log.every("5s", id=f"s{number}", topic="t")(lambda occurrence: 1)
    with pytest.raises(InvalidOptionError, match="2 schedules already"):
        log.start()
