"""`drain` runs handlers as `log.start()` does, moves the clock, and comes to an end or says what is left."""

import asyncio
import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

import headwater
from headwater import Log, ManualClock, Reject, testing
from headwater.errors import InvalidOptionError, InvalidStateError, SubscriptionActiveError
from headwater.testing import NotDrainedError, clock_of, drain


@pytest.fixture
def log() -> Iterator[Log]:
    with testing.open_log() as log:
        yield log


def recording(log: Log, pattern: str, **options: Any) -> list[Any]:
    seen: list[Any] = []

    @log.on(pattern, **options)
    def handle(message: Any) -> None:
        seen.append(message.data)

    return seen


def test_handlers_run_in_the_calling_thread_until_nothing_is_left(log: Log) -> None:
    threads = set()

    @log.on("a", id="first", concurrency=8)
    def first(message: Any) -> None:
        threads.add(threading.current_thread())
        log.publish("b", message.data + 1)

    seen = recording(log, "b", id="second", mode="shared")
    log.publish_many([("a", number) for number in range(250)])
    drained = drain(log)
    assert (drained.handled, drained.errors, drained.elapsed) == (500, [], timedelta())
    assert seen == list(range(1, 251))
    assert threads == {threading.current_thread()}
    assert drain(log).handled == 0  # all of it is acked


def test_the_clock_moves_to_what_is_due_and_no_further(log: Log) -> None:
    seen = recording(log, ">", id="all")
    log.publish("a", "late", delay=3600)
    log.publish("a", "now")
    assert drain(log).elapsed == timedelta(hours=1)
    assert seen == ["now", "late"]


@pytest.mark.parametrize(
    "options",
    [{}, {"mode": "shared"}, {"mode": "shared", "order_key": "type"}, {"mode": "shared", "order": "priority"}],
    ids=["exclusive", "shared", "keyed", "by priority"],
)
def test_a_delayed_message_alone_is_waited_for(log: Log, options: dict[str, Any]) -> None:
    seen = recording(log, "a", id="all", **options)
    log.publish("a", 1, delay=3600, type="t")
    assert drain(log).elapsed == timedelta(hours=1)
    assert seen == [1]


@pytest.mark.parametrize("ends", [KeyboardInterrupt, pytest.fail.Exception])
def test_what_ends_a_test_ends_the_drain(log: Log, ends: type[BaseException]) -> None:
    @log.on("a", id="all")
    def handle(message: Any) -> None:
        raise ends

    log.publish("a", 1)
    with pytest.raises(ends):
        drain(log)
    with log.subscribe("all", "a"):  # it was released
        pass


def test_acks_under_way_do_not_move_the_clock(log: Log) -> None:
    """The deadline of a message that is being acked is no time to wait for."""
    recording(log, ">", id="all")
    for _ in range(200):
        log.publish("a", 1)
        assert drain(log).elapsed == timedelta()


def test_failures_are_retried_with_their_backoff_and_dead_lettered(log: Log) -> None:
    at: list[int] = []

    @log.on("a", id="failing", max_attempts=4, backoff=10, backoff_factor=3, jitter=0)
    def fail(message: Any) -> None:
        at.append(clock_of(log).now_ms())
        raise ValueError(f"attempt {message.attempt}")

    log.publish("a", {"n": 1})
    drained = drain(log)
    assert [(later - at[0]) / 1000 for later in at] == [0, 10, 40, 130]
    assert [(each.subscription, each.attempt, str(each.error)) for each in drained.errors] == [
        ("failing", n, f"attempt {n}") for n in (1, 2, 3, 4)
    ]
    assert drained.errors[0].message.data == {"n": 1}
    assert (drained.handled, drained.elapsed) == (0, timedelta(seconds=130))
    [letter] = log.dead_letters.list()
    assert (letter.reason, letter.handler) == ("max_attempts", fail.__qualname__)


def test_a_rejected_message_is_not_retried(log: Log) -> None:
    @log.on("a", id="picky")
    def refuse(message: Any) -> None:
        raise Reject("no")

    log.publish("a", 1)
    drained = drain(log)
    assert (len(drained.errors), drained.elapsed) == (1, timedelta())
    assert [letter.reason for letter in log.dead_letters.list()] == ["rejected"]


def test_a_message_that_is_never_settled_times_out(log: Log) -> None:
    attempts = []
    log.on("a", id="lazy", auto_ack=False, ack_wait=30, max_attempts=2)(
        lambda message: attempts.append(message.attempt)
    )
    log.publish("a", 1)
    assert drain(log).elapsed == timedelta(seconds=60)
    assert attempts == [1, 2]
    assert [letter.reason for letter in log.dead_letters.list()] == ["timeout"]


def test_order_by_key_is_drained_to_the_end(log: Log) -> None:
    seen = recording(log, "a", id="keyed", mode="shared", order_key="data.key")
    log.publish_many([("a", {"key": number % 3, "n": number}) for number in range(30)])
    assert drain(log).handled == 30
    assert [each["n"] for each in seen if each["key"] == 1] == list(range(1, 30, 3))


def test_within_handles_what_is_due_in_that_time(log: Log) -> None:
    seen = recording(log, "a", id="all")
    for seconds in (0, 10, 20):
        log.publish("a", seconds, delay=seconds)
    assert drain(log, within=0).elapsed == timedelta()
    assert seen == [0]
    assert drain(log, within=9.5).elapsed == timedelta(seconds=9.5)
    assert seen == [0]
    assert drain(log, within=timedelta(seconds=5)).elapsed == timedelta(seconds=5)
    assert seen == [0, 10]
    assert drain(log).elapsed == timedelta(seconds=5.5)
    assert seen == [0, 10, 20]


def test_a_drain_without_an_end_says_what_is_left(log: Log) -> None:
    @log.on("ping", id="echo")
    def echo(message: Any) -> None:
        log.publish("ping", message.data)
        if message.data == 2:
            raise ValueError("two")

    log.publish_many([("ping", 1), ("ping", 2)])
    with pytest.raises(NotDrainedError) as caught:
        drain(log, limit=20)
    text = str(caught.value)
    assert "it made more than 20 steps" in text
    assert "left for echo: " in text
    assert "messages on ping" in text
    assert "last error, of echo on ping: ValueError: two" in text
    assert caught.value.drained.handled + len(caught.value.drained.errors) == 21
    with log.subscribe("echo", "ping") as echo_again:  # it was released
        assert echo_again.fetch(1)


def test_a_delay_of_years_is_not_waited_for(log: Log) -> None:
    seen = recording(log, "a", id="all")
    log.publish("a", 1, delay=timedelta(days=800))
    with pytest.raises(NotDrainedError, match="the next message is due at 2026-01-22 22:13:20"):
        drain(log)
    assert drain(log, within=timedelta(days=800)).handled == 1
    assert seen == [1]


def test_ephemeral_handlers_get_what_was_published_since_the_last_drain(log: Log) -> None:
    seen = recording(log, "a", mode="ephemeral")
    for number in (1, 2, 3):
        log.publish("a", number)
        assert drain(log).handled == 1
    assert seen == [1, 2, 3]


def test_a_handler_may_declare_another(log: Log) -> None:
    late: list[Any] = []

    @log.on("a", id="first")
    def first(message: Any) -> None:
        log.on("a", id="late")(lambda message: late.append(message.data))

    log.publish("a", 1)
    assert drain(log).handled == 2
    assert late == [1]


def test_handlers_start_after_a_drain_and_are_not_drained_while_they_run(log: Log) -> None:
    handled = threading.Event()
    log.on("a", id="all")(lambda message: handled.set())
    drain(log)
    log.start()
    with pytest.raises(InvalidStateError, match="run in the background"):
        drain(log)
    log.publish("a", 1)
    assert handled.wait(10)
    log.stop()
    assert drain(log).errors == []


def test_a_subscription_that_is_held_is_named(log: Log) -> None:
    recording(log, "a", id="all")
    with log.subscribe("all", "a"), pytest.raises(SubscriptionActiveError, match="'all'"):
        drain(log)


def test_a_dedupe_queue_is_asked(log: Log) -> None:
    with headwater.open_dedupe("memory:") as queue:
        seen = recording(log, "a", id="once", dedupe=queue)
        log.publish("a", 1)
        drain(log)
        log.seek("once", "first")
        drain(log)
        assert seen == [1]


def test_a_file_with_the_clock_of_the_test(tmp_path: Path) -> None:
    clock = ManualClock()
    with headwater.open(tmp_path / "log.db", clock=clock, heartbeats=False) as log:
        seen = recording(log, "a", id="all")
        log.publish("a", 1, delay=100)
        assert drain(log).elapsed == timedelta(seconds=100)
        assert (seen, clock_of(log)) == ([1], clock)


def test_a_log_with_the_time_of_the_machine_is_refused(tmp_path: Path) -> None:
    with headwater.open(tmp_path / "log.db") as log, pytest.raises(InvalidStateError, match="cannot be moved"):
        drain(log)


async def test_asyncio() -> None:
    async with testing.open_log_async() as log:
        attempts: list[int] = []

        @log.on("a", id="coroutine", backoff=7, jitter=0)
        async def handle(message: Any) -> None:
            await asyncio.sleep(0)
            attempts.append(message.attempt)
            if message.attempt == 1:
                raise ValueError("once")
            await log.publish("b", message.data)

        log.on("b", id="function")(lambda message: attempts.append(99))
        await log.publish("a", {"n": 1}, delay=5)
        drained = await drain(log)
        assert (attempts, drained.handled, drained.elapsed) == ([1, 2, 99], 2, timedelta(seconds=12))
        assert [str(each.error) for each in drained.errors] == ["once"]
        [message] = await testing.assert_published(log, "b", data={"n": 1}, count=1)
        assert await testing.published(log, "b") == [message]


def test_typed_messages(log: Log) -> None:
    class Paid(headwater.Event, topic="orders.paid"):
        order: int
        tags: tuple[str, ...] = ()

    seen: list[Paid] = []

    @Paid.on(log, id="paid")
    def handle(paid: Paid) -> None:
        seen.append(paid)

    Paid(order=17).publish(log)
    assert drain(log).handled == 1
    assert seen == [Paid(order=17)]
    testing.assert_published(log, "orders.paid", data=Paid(order=17))


# --- schedules --------------------------------------------------------------------------------------------------------


def test_schedules_run_at_their_times_within_a_drain(log: Log) -> None:
    times: list[Any] = []

    @log.cron("0 3 * * *", id="nightly", topic="reports.due", tz="Europe/Berlin")
    def nightly(occurrence: headwater.Occurrence) -> str:
        times.append(occurrence.at.isoformat())
        return str(occurrence.at.date())

    seen = recording(log, "reports.>", id="reports")
    drained = drain(log, within="3d")
    assert (drained.occurrences, drained.handled, drained.elapsed) == (3, 3, timedelta(days=3))
    assert seen == ["2023-11-15", "2023-11-16", "2023-11-17"]
    assert times[0] == "2023-11-15T03:00:00+01:00"
    assert drain(log, within="3h").occurrences == 0
    assert drain(log, within="12h").occurrences == 1


def test_two_schedules_and_their_handlers_take_turns_by_the_clock(log: Log) -> None:
    seen = recording(log, "t", id="all")
    log.every("10m", id="ten", topic="t")(lambda occurrence: f"ten {occurrence.at:%M}")
    log.every("15m", id="fifteen", topic="t")(lambda occurrence: f"fifteen {occurrence.at:%M}")
    clock_of(log).advance(46 * 60 + 40)  # 23:00:00, when both begin
    assert drain(log, within="30m").occurrences == 5
    assert seen == ["ten 10", "fifteen 15", "ten 20", "ten 30", "fifteen 30"]


def test_without_a_limit_of_time_schedules_do_not_run(log: Log) -> None:
    log.every("1h", id="s", topic="t")(lambda occurrence: 1)
    with pytest.raises(InvalidStateError, match=r'drain\(log, within="1h"\)'):
        drain(log)
    seen = recording(log, "t", id="all")
    assert drain(log).occurrences == 0
    assert seen == []


def test_an_error_of_a_schedule_is_raised(log: Log) -> None:
    @log.every("1h", id="s", topic="t")
    def fails(occurrence: Any) -> None:
        raise KeyError("no such report")

    with pytest.raises(KeyError, match="no such report"):
        drain(log, within="1h")
    assert testing.published(log, "t") == []


def test_a_schedule_of_asyncio_runs_in_a_drain() -> None:
    async def main() -> None:
        async with testing.open_log_async() as log:

            @log.every("1h", id="s", topic="t")
            async def hourly(occurrence: Any) -> int:
                await asyncio.sleep(0)
                return int(occurrence.at.hour)

            assert (await drain(log, within="2h")).occurrences == 2
            assert [message.data for message in await testing.published(log)] == [23, 0]

    asyncio.run(main())


def test_a_log_without_handlers_is_refused(log: Log) -> None:
    with pytest.raises(InvalidStateError, match="no handler is declared on this log"):
        drain(log)


@pytest.mark.filterwarnings("error")
def test_a_log_that_is_not_awaited_is_refused() -> None:
    log: Any = testing.open_log_async()
    with pytest.raises(InvalidOptionError, match="the log is not awaited"):
        drain(log)
