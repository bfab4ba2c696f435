"""Only matching waiters are woken; and a wake-up that is lost costs time, never a message."""

import threading
from pathlib import Path
from typing import Any

import apsw
import pytest

import headwater
from headwater import Log, ManualClock
from headwater.broker import consumer as consumers
from headwater.broker.flow import Completion
from headwater.broker.wakeups import Wakeups
from headwater.topics import parse_pattern

LONG_S = 30.0  # longer than any test; the fetches below end because they are woken


@pytest.fixture
def no_net(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the net under lost wake-ups, so that only a wake-up can end a wait."""
    monkeypatch.setattr(consumers, "FALLBACK_POLL_S", LONG_S)


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> threading.Semaphore:
    """Counts the waits that threads have begun."""
    begun = threading.Semaphore(0)
    wait = Completion.wait

    def counted(completion: Completion[Any], timeout_s: float | None = None) -> bool:
        begun.release()
        return wait(completion, timeout_s)

    monkeypatch.setattr(Completion, "wait", counted)
    return begun


class Waiting:
    """A fetch on a thread of its own."""

    def __init__(self, subscription: Any, n: int = 100) -> None:
        self.found: list[Any] = []
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(subscription, n), daemon=True)
        self._thread.start()

    def _run(self, subscription: Any, n: int) -> None:
        try:
            self.found = subscription.fetch(n, timeout=LONG_S)
        except BaseException as exc:
            self.error = exc

    def came(self, within_s: float = LONG_S / 2) -> bool:
        self._thread.join(within_s)
        return not self._thread.is_alive()

    @property
    def seqs(self) -> list[int]:
        return [message.seq for message in self.found]


# --- by themselves ------------------------------------------------------------------------------------------------


def test_only_those_whose_pattern_matches_are_woken() -> None:
    wakeups = Wakeups()
    waiters = {
        pattern: wakeups.add(parse_pattern(pattern), "s", wake_on_settle=False) for pattern in ("a.*", "a.b", ">", "c")
    }
    completions = {pattern: waiter.arm() for pattern, waiter in waiters.items()}
    wakeups.published({"a.b"}, 1, 1)
    assert {pattern for pattern, completion in completions.items() if completion.done} == {"a.*", "a.b", ">"}


def test_a_wake_up_between_arming_and_waiting_is_not_lost() -> None:
    wakeups = Wakeups()
    waiter = wakeups.add(parse_pattern("a"), "s", wake_on_settle=False)
    completion = waiter.arm()
    wakeups.published({"a"}, 1, 1)
    assert completion.wait(0.0)
    assert not waiter.arm().done, "armed anew"


def test_settling_wakes_waiters_that_wait_for_it() -> None:
    wakeups = Wakeups()
    minds = wakeups.add(parse_pattern("a"), "s", wake_on_settle=True).arm()
    does_not = wakeups.add(parse_pattern("a"), "s", wake_on_settle=False).arm()
    wakeups.settled()
    assert (minds.done, does_not.done) == (True, False)
    elsewhere = wakeups.add(parse_pattern("a"), "t", wake_on_settle=True).arm()
    wakeups.settled("s")
    assert not elsewhere.done
    wakeups.wake_all()
    assert does_not.done


def test_a_removed_waiter_is_not_woken() -> None:
    wakeups = Wakeups()
    waiter = wakeups.add(parse_pattern("a"), "s", wake_on_settle=True)
    completion = waiter.arm()
    wakeups.remove(waiter)
    wakeups.published({"a"}, 1, 1)
    wakeups.settled()
    wakeups.wake_all()
    assert not completion.done
    assert not wakeups.has_waiters


def test_what_others_published_below_ours_stays_unannounced() -> None:
    wakeups = Wakeups()
    wakeups.published({"a"}, 1, 3)
    assert wakeups.announced == 3
    wakeups.published({"a"}, 6, 7)  # 4 and 5 are another process's
    assert wakeups.announced == 3
    wakeups.published({"a"}, 4, 7)
    assert wakeups.announced == 7


def test_what_a_waiter_is_yet_to_be_woken_for_stays_unannounced() -> None:
    """The thread that stored it may be interrupted before it wakes anybody: then the watcher does."""
    wakeups = Wakeups()
    assert not wakeups.note_stored([1])
    assert (wakeups.announced, wakeups.last_known) == (1, 1)
    assert not wakeups.note_stored([2, 3])
    assert (wakeups.announced, wakeups.last_known) == (3, 3)
    wakeups.add(parse_pattern("a"), "reader", wake_on_settle=False)
    assert wakeups.note_stored([4])
    assert (wakeups.announced, wakeups.last_known) == (3, 4)


# --- in a log -----------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("no_net")
@pytest.mark.parametrize("mode", ["exclusive", "shared", "ephemeral"])
def test_a_publish_wakes_a_waiting_fetch(log: Log, mode: Any) -> None:
    waiting = Waiting(log.subscribe("s", "a", mode=mode))
    log.publish("b", 1)
    log.publish("a", 2)
    assert waiting.came()
    assert waiting.seqs == [2]


@pytest.mark.usefixtures("no_net")
@pytest.mark.parametrize("mode", ["exclusive", "shared"])
def test_time_that_passes_wakes_for_what_has_become_due(log: Log, clock: ManualClock, mode: Any) -> None:
    subscription = log.subscribe("s", "a", mode=mode, ack_wait=5)
    log.publish("a", 1, delay=60)
    waiting = Waiting(subscription)
    clock.advance(60)
    assert waiting.came()
    waiting_again = Waiting(subscription)
    clock.advance(5)
    assert waiting_again.came()
    assert [(message.seq, message.attempt) for message in waiting_again.found] == [(1, 2)]


@pytest.mark.usefixtures("no_net")
@pytest.mark.parametrize("mode", ["exclusive", "shared"])
def test_room_in_the_window_wakes(log: Log, mode: Any) -> None:
    log.publish_many([("a", 1), ("a", 2)])
    subscription = log.subscribe("s", "a", mode=mode, max_in_flight=1)
    [first] = subscription.fetch()
    waiting = Waiting(subscription)
    first.ack()
    assert waiting.came()
    assert waiting.seqs == [2]


@pytest.mark.usefixtures("no_net")
def test_what_one_consumer_gives_back_by_closing_wakes_the_other(log: Log) -> None:
    log.publish("a", 1)
    one, two = log.subscribe("s", "a", mode="shared"), log.subscribe("s", "a", mode="shared")
    one.fetch()
    waiting = Waiting(two)
    one.close()
    assert waiting.came()
    assert waiting.seqs == [1]


@pytest.mark.usefixtures("no_net")
def test_what_one_consumer_nacks_wakes_the_other(log: Log) -> None:
    log.publish("a", 1)
    one, two = log.subscribe("s", "a", mode="shared"), log.subscribe("s", "a", mode="shared")
    [message] = one.fetch()
    waiting = Waiting(two)
    message.nack(0)
    assert waiting.came(1)
    assert waiting.seqs == [1]


@pytest.mark.usefixtures("no_net")
def test_an_ack_wakes_a_consumer_that_waits_for_the_key(log: Log) -> None:
    log.publish_many([("a", {"k": 1}), ("a", {"k": 1})])
    one = log.subscribe("s", "a", mode="shared", order_key="data.k")
    two = log.subscribe("s", "a", mode="shared", order_key="data.k")
    [message] = one.fetch()
    waiting = Waiting(two)
    message.ack()
    assert waiting.came(1)
    assert waiting.seqs == [2]


@pytest.mark.usefixtures("no_net")
def test_a_redrive_wakes(log: Log) -> None:
    log.publish("a", 1)
    subscription = log.subscribe("s", "a")
    subscription.fetch()[0].reject()
    waiting = Waiting(subscription)
    log.dead_letters.redrive()
    assert waiting.came()
    assert waiting.seqs == [1]


@pytest.mark.usefixtures("no_net")
def test_two_threads_may_wait_on_one_subscription(log: Log, waits: threading.Semaphore) -> None:
    subscription = log.subscribe("s", "a", mode="shared")
    while waits.acquire(blocking=False):
        pass  # of the subscribing itself
    waiting = [Waiting(subscription, 1), Waiting(subscription, 1)]
    assert waits.acquire(timeout=LONG_S)
    assert waits.acquire(timeout=LONG_S)
    log.publish("a", 1)
    log.publish("a", 2)
    assert all(each.came() for each in waiting)
    assert sorted(seq for each in waiting for seq in each.seqs) == [1, 2]


def test_a_lost_wake_up_costs_time_and_no_message(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(consumers, "FALLBACK_POLL_S", 0.05)
    subscription = log.subscribe("s", "a")
    wakeups = log._core.engine.wakeups
    for lost in ("published", "claim_published"):
        monkeypatch.setattr(wakeups, lost, lambda *news: None)
    monkeypatch.setattr(wakeups, "wake_all", lambda: None)
    waiting = Waiting(subscription)
    log.publish("a", 1)
    assert waiting.came()
    assert waiting.seqs == [1]


def test_a_wait_ends_when_its_time_is_over(log: Log) -> None:
    assert log.subscribe("s", "a").fetch(timeout=0.01) == []


# --- from elsewhere -----------------------------------------------------------------------------------------------


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "log.db"


def open_at(path: Path, clock: ManualClock) -> Log:
    return headwater.open(path, clock=clock, maintenance_interval=None, heartbeats=False)


@pytest.mark.usefixtures("no_net")
def test_another_log_on_the_same_file_wakes(path: Path, clock: ManualClock) -> None:
    with open_at(path, clock) as here, open_at(path, clock) as there:
        waiting = Waiting(here.subscribe("s", "a"))
        there.publish("a", 1)
        assert waiting.came()
        assert waiting.seqs == [1]


@pytest.mark.usefixtures("no_net")
def test_plain_sql_from_elsewhere_wakes(path: Path, clock: ManualClock) -> None:
    with open_at(path, clock) as log:
        waiting = Waiting(log.subscribe("s", "a"))
        other = apsw.Connection(str(path))
        other.set_busy_timeout(5_000)
        other.execute("BEGIN; INSERT INTO messages (topic, data) VALUES ('a', '0'); ROLLBACK")
        other.execute("INSERT INTO messages (topic, data) VALUES ('a', '{\"n\": 1}')")
        other.close()
        assert waiting.came()
        assert [message.data for message in waiting.found] == [{"n": 1}]


@pytest.mark.usefixtures("no_net")
def test_a_message_given_back_in_another_log_wakes(path: Path, clock: ManualClock) -> None:
    with open_at(path, clock) as here, open_at(path, clock) as there:
        there.publish("a", 1)
        consumer = there.subscribe("s", "a", mode="shared")
        consumer.fetch()
        waiting = Waiting(here.subscribe("s", "a", mode="shared"))
        consumer.close()
        assert waiting.came()
        assert waiting.seqs == [1]
