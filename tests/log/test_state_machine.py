"""A log and its model live the same life: published to, read, failed, crashed, pruned; and always agree.

A long run: HEADWATER_EXAMPLES=2000 HEADWATER_STEPS=80 pytest tests/log/test_state_machine.py --timeout=0
"""

import itertools
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, note, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
)
from model import ACKED, DEAD, FLIGHT, LOST, UNSETTLED, Model, Reader
from postgres_server import PostgresServer

import headwater
from headwater import Gap, Log, ManualClock
from headwater.errors import LeaseLostError, SubscriptionActiveError

EXAMPLES = int(os.environ.get("HEADWATER_EXAMPLES", "60"))
STEPS = int(os.environ.get("HEADWATER_STEPS", "40"))

ACK_WAIT_MS, LEASE_MS, BACKOFF_MS = 30_000, 60_000, 1_000
MAX_ATTEMPTS = 3
DEDUPE_COUNT = 5
ADVANCES_MS = [100, 1_000, 4_000, 31_000]  # the longest ends every ack wait, and no lease

CONSUMERS = {"alone": "exclusive", "left": "shared", "right": "shared"}  # consumer -> its subscription, named by mode
Handle = tuple[str, Any, Any]  # the consumer, its subscription object, and the message
TOPICS = {"exclusive": frozenset({"a", "b"}), "shared": frozenset({"a", "c"})}


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    """Thousands of warnings about gaps and takeovers are the machine's daily life."""
    caplog.set_level("CRITICAL", logger="headwater")


class LogMachine(RuleBasedStateMachine):
    store_survives_close = False

    handles = Bundle("handles")

    def __init__(self) -> None:
        super().__init__()
        self.clock = ManualClock()
        self.directory = Path(tempfile.mkdtemp(prefix="headwater-machine-"))
        self.abandoned: list[Log] = []
        self.reported: dict[str, int] = {"exclusive": 0, "shared": 0}
        self.model = Model(
            {mode: Reader(topics, ACK_WAIT_MS, MAX_ATTEMPTS, BACKOFF_MS) for mode, topics in TOPICS.items()}
        )
        self.subscriptions: dict[str, Any] = {}
        self.in_flight: dict[str, list[Any]] = {consumer: [] for consumer in CONSUMERS}
        self.log = self.open()

    def open(self) -> Log:
        raise NotImplementedError

    def teardown(self) -> None:
        for log in (self.log, *self.abandoned):
            log.close()
        shutil.rmtree(self.directory, ignore_errors=True)

    @property
    def now_ms(self) -> int:
        return self.clock.now_ms()

    def subscribe(self, consumer: str) -> None:
        mode = CONSUMERS[consumer]
        pattern, where = ">", " or ".join(f"topic == '{topic}'" for topic in sorted(TOPICS[mode]))
        subscription = self.log.subscribe(
            mode,
            pattern,
            where=where,
            mode=mode,  # type: ignore[arg-type]
            ack_wait=ACK_WAIT_MS / 1000,
            lease=LEASE_MS / 1000,
            max_attempts=MAX_ATTEMPTS,
            backoff=BACKOFF_MS / 1000,
            jitter=0,
        )

        @subscription.on_gap
        def reported(gap: Gap) -> None:
            assert gap.from_seq <= gap.to_seq
            self.reported[mode] += gap.count

        self.subscriptions[consumer] = subscription
        self.in_flight[consumer] = []

    @initialize()
    def begin(self) -> None:
        for consumer in CONSUMERS:
            self.subscribe(consumer)

    # --- publishing and reading -------------------------------------------------------------------------------------

    @rule(
        topic=st.sampled_from("aaabcd"),
        count=st.integers(1, 6),
        id=st.none() | st.sampled_from("xyz"),
        delay_ms=st.sampled_from([None, None, 3_000]),
        ttl_ms=st.sampled_from([None, None, 5_000]),
    )
    def publish(self, topic: str, count: int, id: str | None, delay_ms: int | None, ttl_ms: int | None) -> None:
        options = {
            "id": id,  # the same for all of them, so that one is stored
            "delay": None if delay_ms is None else delay_ms / 1000,
            "ttl": None if ttl_ms is None else ttl_ms / 1000,
        }
        seqs = self.log.publish_many([(topic, None, options)] * count)
        window = self.model.last_seq - DEDUPE_COUNT
        assert seqs == [self.model.publish(topic, id, window, self.now_ms, delay_ms, ttl_ms) for _ in range(count)]

    @rule(target=handles, consumer=st.sampled_from(sorted(CONSUMERS)), n=st.integers(1, 6))
    def fetch(self, consumer: str, n: int) -> Any:
        subscription = self.subscriptions[consumer]
        return multiple(*((consumer, subscription, message) for message in self._fetch(consumer, n)))

    def _fetch(self, consumer: str, n: int) -> list[Any]:
        mode = CONSUMERS[consumer]
        reader = self.model.readers[mode]
        found = self.subscriptions[consumer].fetch(n)
        self._note_burials(mode)
        assert len(found) <= n
        for handle in found:
            reader.delivered(handle, self.in_flight[consumer], self.now_ms)
            self.in_flight[consumer].append(handle)
        if not found:
            overlooked = reader.overlooked(self.in_flight[consumer], self.now_ms)
            assert overlooked == [], "an empty fetch, yet there was something"
        assert self.reported[mode] == reader.gaps
        return found

    def _note_burials(self, mode: str) -> None:
        reader = self.model.readers[mode]
        for letter in self.log.dead_letters.list(subscription=mode, limit=10_000):
            known = reader.letters.get(letter.message.seq)
            if not letter.redriving and (known is None or known.redriving):
                reader.dead_lettered_by_itself(letter.message.seq, letter.reason, self.now_ms)

    # --- settling ---------------------------------------------------------------------------------------------------

    @rule(handle=consumes(handles), verb=st.sampled_from(["ack", "ack", "nack", "nack 0", "nack 2", "reject"]))
    def settle(self, handle: Handle, verb: str) -> None:
        reader, message = self._judge(handle)
        name, *delay_s = verb.split()
        arguments = [int(delay_s[0])] if delay_s else []
        if reader is None:
            self._refused(handle, lambda: getattr(message, name)(*arguments))
        elif not self._done(reader, message, lambda: getattr(message, name)(*arguments)):
            return
        elif name == "nack":
            reader.nack(message, arguments[0] * 1_000 if arguments else None, self.now_ms)
        else:
            getattr(reader, name)(message)

    @rule(some=st.lists(consumes(handles), min_size=2, max_size=5))
    def ack_many(self, some: list[Handle]) -> None:
        for subscription in {subscription for _, subscription, _ in some}:
            mine = [handle for handle in some if handle[1] is subscription]
            stale = [handle for handle in mine if self._judge(handle)[0] is None]
            if stale:  # then none of them is acked
                self._refused(stale[0], lambda all=mine: all[0][1].ack_many([message for _, _, message in all]))
            judged = [(reader, message) for reader, message in map(self._judge, mine) if reader is not None]
            held = [(reader, message) for reader, message in judged if not reader.overdue(message, self.now_ms)]
            if held:
                subscription.ack_many([message for _, message in held])
            for reader, message in held:
                reader.ack(message)

    @rule(handle=handles)
    def extend(self, handle: Handle) -> None:
        reader, message = self._judge(handle)
        if reader is None:
            self._refused(handle, message.extend)
        elif self._done(reader, message, message.extend):
            reader.extend(message, self.now_ms)

    @rule(
        consumer=st.sampled_from(sorted(CONSUMERS)),
        n=st.integers(1, 4),
        times=st.integers(1, 3),
        delay_s=st.sampled_from([0, 2]),
    )
    def fail(self, consumer: str, n: int, times: int, delay_s: int) -> None:
        """A handler that raises."""
        reader = self.model.readers[CONSUMERS[consumer]]
        for _ in range(times):
            for message in self._fetch(consumer, n):
                message.nack(delay_s)
                reader.nack(message, delay_s * 1_000, self.now_ms)

    @rule(consumer=st.sampled_from(sorted(CONSUMERS)), n=st.integers(1, 4), times=st.integers(1, 4))
    def neglect(self, consumer: str, n: int, times: int) -> None:
        """A handler that hangs."""
        for _ in range(times):
            self._fetch(consumer, n)
            self.advance(ACK_WAIT_MS)

    @rule(late=st.sampled_from(sorted(CONSUMERS)), verb=st.sampled_from(["ack", "nack", "reject", "extend"]))
    def come_late(self, late: str, verb: str) -> None:
        """A handler that is done after its message was passed on."""
        subscription, messages = self.subscriptions[late], self._fetch(late, 3)
        if late == "alone":
            self._take_over()
        else:
            self.advance(ACK_WAIT_MS)
        reader = self.model.readers[CONSUMERS[late]]
        while found := self._fetch({"alone": "alone", "left": "right", "right": "left"}[late], 3):
            for message in found:
                message.ack()
                reader.ack(message)
        for message in messages:
            self._refused((late, subscription, message), getattr(message, verb))

    def _judge(self, handle: Handle) -> tuple[Reader | None, Any]:
        """The subscription in the model, if this handle may settle its message there."""
        consumer, subscription, message = handle
        reader = self.model.readers[CONSUMERS[consumer]]
        return (reader if subscription is self.subscriptions[consumer] and reader.holds(message) else None), message

    def _done(self, reader: Reader, message: Any, settle: Callable[[], None]) -> bool:
        """Settles what is in flight. Once its time is over it may still be settled, until it is given up."""
        try:
            settle()
        except LeaseLostError:
            assert reader.overdue(message, self.now_ms)
            return False
        return True

    def _refused(self, handle: Handle, settle: Callable[[], None]) -> None:
        _, subscription, message = handle
        its_process_is_gone = subscription._core is not self.log._core
        if not its_process_is_gone and not message.settled:
            with pytest.raises(LeaseLostError):
                settle()

    # --- time, crashes, closing -------------------------------------------------------------------------------------

    @rule(ms=st.sampled_from(ADVANCES_MS))
    def advance(self, ms: int) -> None:
        self.clock.advance(ms / 1000)
        self.log._core.heartbeat()

    @rule(how=st.sampled_from(["crash", "open again", "subscribe again", "take over"]), data=st.data())
    def restart(self, how: str, data: st.DataObject) -> None:
        if how == "crash" and self.store_survives_close:
            self._crash()
        elif how == "open again" and self.store_survives_close:
            self._close_and_open_again()
        elif how == "take over":
            self._take_over()
        else:
            consumer = data.draw(st.sampled_from(sorted(CONSUMERS)))
            self.subscriptions[consumer].close()
            self.model.readers[CONSUMERS[consumer]].given_back(self.in_flight[consumer], self.now_ms)
            self.subscribe(consumer)

    def _take_over(self) -> None:
        """The holder shows no life; another takes its place, but not before its lease has run out."""
        with pytest.raises(SubscriptionActiveError):
            self.subscribe("alone")
        self.clock.advance(LEASE_MS / 1000)
        self.subscribe("alone")
        self.model.readers["exclusive"].orphaned(self.now_ms)

    def _crash(self) -> None:
        """The process is gone; another opens the file, and has to wait for the leases of the dead."""
        self.abandoned.append(self.log)
        self.log = self.open()
        for consumer in ("left", "right"):
            self.subscribe(consumer)
        self.model.readers["shared"].orphaned(None)
        self._take_over()

    def _close_and_open_again(self) -> None:
        self.log.close()
        for consumer, mode in CONSUMERS.items():
            self.model.readers[mode].given_back(self.in_flight[consumer], self.now_ms)
        self.log = self.open()
        for consumer in CONSUMERS:
            self.subscribe(consumer)

    # --- retention and dead letters ---------------------------------------------------------------------------------

    @rule(
        keep=st.sampled_from([0, 6, 12, 24]),
        keep_unacked=st.booleans(),
        busy=st.none() | st.sampled_from(sorted(CONSUMERS)),
    )
    def prune(self, keep: int, keep_unacked: bool, busy: str | None) -> None:
        if busy is not None:
            self._fetch(busy, 3)
        before = self.model.stored()
        unsettled = {
            seq
            for reader in self.model.readers.values()
            for seq, delivery in reader.deliveries.items()
            if delivery.state in UNSETTLED
        }
        self.log.retain(">", max_count=keep, keep_unacked=keep_unacked)
        report = self.log.run_maintenance()
        self.log.delete_retention(">")
        with self.log._core.engine.store.read() as store:
            left = sorted(store.messages(before))
        gone = [seq for seq in before if seq not in left]
        note(f"pruned {gone}, left {left}")
        assert len(gone) <= max(0, len(before) - keep), "more went than had to"
        assert not (keep_unacked and unsettled.intersection(gone))
        if not unsettled and not keep_unacked:  # which also keeps what was not fetched yet
            assert len(left) == min(keep, len(before))
        spared = [seq for seq in left if gone and seq < gone[-1]]  # for what is in flight, and what lies between
        assert keep_unacked or not spared or unsettled.intersection(spared), "the oldest go first"
        for seq in gone:
            self.model.messages[seq].stored = False
        lost = [reader.deleted(gone, self.now_ms) for reader in self.model.readers.values()]
        assert report.gaps == sum(lost)

    @rule(mode=st.sampled_from(sorted(TOPICS)))
    def redrive(self, mode: str) -> None:
        redriven = self.log.dead_letters.redrive(subscription=mode)
        assert redriven.failed == {}
        assert redriven.redriven == self.model.readers[mode].redriven(self.now_ms)

    @precondition(lambda self: any(reader.lag() > 10 for reader in self.model.readers.values()))
    @rule(consumer=st.sampled_from(sorted(CONSUMERS)))
    def drain(self, consumer: str) -> None:
        """Nothing stands in the way for ever: all that is due comes, and can be acked."""
        reader = self.model.readers[CONSUMERS[consumer]]
        while found := self._fetch(consumer, 100):
            self.subscriptions[consumer].ack_many(found)
            for message in found:
                reader.ack(message)

    # --- always -----------------------------------------------------------------------------------------------------

    @invariant()
    def agree(self) -> None:
        if not self.subscriptions:
            return
        assert self.log.last_seq() == self.model.last_seq
        for mode, reader in self.model.readers.items():
            info = self.log.subscription(mode)
            assert (info.lag, info.acked, info.redelivered, info.gaps) == (
                reader.lag(),
                reader.acked,
                reader.redelivered,
                reader.gaps,
            )
            letters = {
                letter.message.seq: (letter.redriving, letter.redrives)
                for letter in self.log.dead_letters.list(subscription=mode, limit=10_000)
            }
            assert letters == {seq: (letter.redriving, letter.redrives) for seq, letter in reader.letters.items()}

    @invariant()
    def nothing_is_lost(self) -> None:
        """Every message that matches is on its way, settled, or in a counted gap."""
        for reader in self.model.readers.values():
            wanted = {seq for seq, message in self.model.messages.items() if message.topic in reader.topics}
            assert wanted == set(reader.deliveries)
            states = [delivery.state for delivery in reader.deliveries.values()]
            assert all(state in (*UNSETTLED, ACKED, DEAD, LOST) for state in states)
            assert states.count(FLIGHT) <= len(wanted)


class MemoryMachine(LogMachine):
    def open(self) -> Log:
        return headwater.open(
            "memory:", clock=self.clock, maintenance_interval=None, heartbeats=False, dedupe_count=DEDUPE_COUNT
        )


class SqliteMachine(LogMachine):
    store_survives_close = True

    def open(self) -> Log:
        return headwater.open(
            self.directory / "log.db",
            clock=self.clock,
            maintenance_interval=None,
            heartbeats=False,
            dedupe_count=DEDUPE_COUNT,
            durability="relaxed",
        )


class PostgresMachine(LogMachine):
    store_survives_close = True
    database: str
    schemas = itertools.count(1)

    def __init__(self) -> None:
        self.url = f"{self.database}?schema=machine_{next(self.schemas)}"
        super().__init__()

    def open(self) -> Log:
        return headwater.open(
            self.url, clock=self.clock, maintenance_interval=None, heartbeats=False, dedupe_count=DEDUPE_COUNT
        )


@pytest.fixture(scope="module", autouse=True)
def _database(postgres: PostgresServer) -> None:
    PostgresMachine.database = postgres.new_database()


CALM = settings(
    max_examples=EXAMPLES,
    stateful_step_count=STEPS,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
)

TestMemoryLog = MemoryMachine.TestCase
TestMemoryLog.settings = settings(CALM, max_examples=max(1, EXAMPLES // 5))  # SQLite too, without a file
TestSqliteLog = SqliteMachine.TestCase
TestSqliteLog.settings = CALM
TestPostgresLog = PostgresMachine.TestCase
TestPostgresLog.settings = settings(CALM, max_examples=max(1, EXAMPLES // 5))  # a log takes 60 ms to make there
