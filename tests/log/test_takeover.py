"""`takeover=True` does not wait for a live holder; the holder learns of it at once."""

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest
from fetched import drain
from full_disk import full_disk
from waiting import TIME_LIMIT_S, until_it_waits

import headwater
from headwater import Log, ManualClock
from headwater.errors import DiskFullError, LeaseLostError, SubscriptionActiveError

# --- what each gets ------------------------------------------------------------------------------------------------


def test_it_is_let_in_at_once_and_goes_on_where_the_other_was(log: Log) -> None:
    log.publish_many([("a", n) for n in range(1, 6)])
    before = log.subscribe("s", "a")
    first, *_ = before.fetch(3)
    first.ack()
    with pytest.raises(SubscriptionActiveError):
        log.subscribe("s", "a")
    after = log.subscribe("s", "a", takeover=True)
    assert after.resumed_from == 1
    assert drain(after) == [(4, 1), (5, 1), (2, 2), (3, 2)], "one at a time, as after one that vanished"


def test_the_former_holder_is_refused_in_everything(log: Log) -> None:
    log.publish_many([("a", n) for n in range(1, 5)])
    before = log.subscribe("s", "a")
    messages = before.fetch(3)
    after = log.subscribe("s", "a", takeover=True)
    for settle in (messages[0].ack, messages[1].nack, messages[2].reject, messages[0].extend, before.fetch):
        with pytest.raises(LeaseLostError):
            settle()
    before.close()
    assert drain(after) == [(4, 1), (1, 2), (2, 2), (3, 2)], "nothing the former one did has moved anything"
    assert log.subscription("s").holder is not None


def test_in_another_process_too(open_log: Any) -> None:
    former, present = open_log(), open_log()
    former.publish("a", 1)
    [message] = former.subscribe("s", "a").fetch()
    after = present.subscribe("s", "a", takeover=True)
    with pytest.raises(LeaseLostError):
        message.ack()
    assert drain(after) == [(1, 2)]


def test_without_a_holder_it_is_a_plain_subscribe(log: Log) -> None:
    log.publish("a", 1)
    with log.subscribe("s", "a", takeover=True) as subscription:
        assert drain(subscription) == [(1, 1)]
    log.publish("a", 2)
    assert drain(log.subscribe("s", "a", takeover=True)) == [(2, 1)]


def test_it_is_asked_for_each_time(log: Log) -> None:
    log.subscribe("s", "a", takeover=True)
    with pytest.raises(SubscriptionActiveError):
        log.subscribe("s", "a")
    with pytest.raises(SubscriptionActiveError):
        log.subscribe("s", "a", takeover=False)


def test_two_consumers_take_it_from_each_other(log: Log) -> None:
    log.publish("a", 1)
    holders = [log.subscribe("s", "a", takeover=True) for _ in range(4)]
    for former in holders[:-1]:
        with pytest.raises(LeaseLostError):
            former.fetch()
    assert drain(holders[-1]) == [(1, 1)]


def test_it_does_not_wait(log: Log) -> None:
    """`timeout` has no effect with `takeover=True`."""
    log.subscribe("s", "a")
    log.subscribe("s", "a", takeover=True, timeout=None)


@pytest.mark.parametrize("mode", ["shared", "ephemeral"])
def test_modes_without_a_holder_have_nothing_to_take_over(log: Log, mode: Any) -> None:
    one = log.subscribe("s", "a", mode=mode, start="first")
    log.publish_many([("a", 1), ("a", 2)])
    [first] = one.fetch(1)
    two = log.subscribe("s", "a", mode=mode, start="new", takeover=True)
    first.ack()
    log.publish("a", 3)
    received = [message.seq for each in (two, one) for message in each.fetch()]
    assert sorted(received) == ([2, 3] if mode == "shared" else [2, 3, 3])


def test_a_takeover_that_fails_leaves_the_holder_be(log: Log) -> None:
    log.publish("a", 1)
    subscription = log.subscribe("s", "a")
    [message] = subscription.fetch()
    with full_disk(log), pytest.raises(DiskFullError):
        log.subscribe("s", "a", takeover=True)
    message.ack()
    log.publish("a", 2)
    assert drain(subscription) == [(2, 1)]


def test_a_handler_may_ask_for_it(log: Log) -> None:
    handled = threading.Event()
    former = log.subscribe("h", "a")
    log.on("a", id="h", takeover=True)(lambda message: handled.set())
    log.start()
    log.publish("a", 1)
    assert handled.wait(TIME_LIMIT_S)
    log.stop()
    with pytest.raises(LeaseLostError):
        former.fetch()


# --- waiting calls -------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("engine_here")
def test_a_waiting_fetch_is_woken_and_reported(log: Log) -> None:
    before: Any = log.subscribe("s", "a")._consumer
    waiting = before.take(1, None)
    bell = until_it_waits(waiting)
    log.subscribe("s", "a", takeover=True)
    assert bell.done
    with pytest.raises(LeaseLostError) as raised:
        waiting.send(True)
    assert raised.value.where == "s"
    assert raised.value.next


@pytest.mark.parametrize("verb", ["fetch", "messages"])
def test_a_waiting_thread_ends(log: Log, verb: str) -> None:
    before = log.subscribe("s", "a")
    outcomes: list[BaseException] = []

    def wait() -> None:
        try:
            list(getattr(before, verb)(timeout=None))
        except LeaseLostError as exc:
            outcomes.append(exc)

    thread = threading.Thread(target=wait)
    thread.start()
    log.subscribe("s", "a", takeover=True)
    thread.join(TIME_LIMIT_S)
    assert len(outcomes) == 1


def test_a_waiting_iterator_ends(log: Log) -> None:
    """Behind a server messages are sent to it unasked, so nothing that it asks is refused."""
    log.publish("a", 1)
    before = log.subscribe("s", "a", start="first")
    has_begun = threading.Event()
    outcomes: list[BaseException] = []

    def wait() -> None:
        try:
            for message in before.messages(timeout=None):
                message.ack()
                has_begun.set()
        except LeaseLostError as exc:
            outcomes.append(exc)

    thread = threading.Thread(target=wait)
    thread.start()
    assert has_begun.wait(TIME_LIMIT_S)
    log.subscribe("s", "a", takeover=True)
    thread.join(TIME_LIMIT_S)
    assert len(outcomes) == 1


async def test_a_waiting_task_ends(tmp_path: Path, clock: ManualClock) -> None:
    async with headwater.open_async(
        tmp_path / "log.db", clock=clock, maintenance_interval=None, heartbeats=False
    ) as log:
        before = await log.subscribe("s", "a")
        waiting = asyncio.create_task(before.fetch(timeout=None))
        await asyncio.sleep(0)
        await log.subscribe("s", "a", takeover=True)
        with pytest.raises(LeaseLostError):
            await waiting


@pytest.mark.usefixtures("engine_here")
def test_one_whose_lease_ran_out_learns_it_from_its_successor(log: Log, clock: ManualClock) -> None:
    before: Any = log.subscribe("s", "a", lease=10)._consumer
    clock.advance(10)
    waiting = before.take(1, None)
    bell = until_it_waits(waiting)
    log.subscribe("s", "a", lease=10)
    assert bell.done
    with pytest.raises(LeaseLostError):
        waiting.send(True)


def test_bystanders_are_left_alone(log: Log) -> None:
    """Holders of other subscriptions, shared consumers, and ephemeral ones."""
    others = [
        log.subscribe("t", "a"),
        log.subscribe("u", "a", mode="shared"),
        log.subscribe("s", "a", mode="ephemeral"),
    ]
    log.subscribe("s", "a")
    log.subscribe("s", "a", takeover=True)
    log.subscribe("u", "a", mode="shared", takeover=True)
    log.publish("a", 1)
    assert [[message.seq for message in each.fetch()] for each in others] == [[1], [1], [1]]


def test_in_another_process_it_is_reported_by_its_heartbeat(engine_here: None, open_log: Any) -> None:
    former, present = open_log(), open_log()
    waiting = former.subscribe("s", "a")._consumer.take(1, None)
    bell = until_it_waits(waiting)
    present.subscribe("s", "a", takeover=True)
    former._core.heartbeat()
    assert bell.done
    with pytest.raises(LeaseLostError):
        waiting.send(True)
