"""Three hosts live on one log, in bursts, because a store knows a subscription only while no other host writes to it.
Connections break, answers of commits get lost, users' transactions are rolled back. A model in plain dicts says what
each host may be given and may settle.

A long run: HEADWATER_SEEDS=200 HEADWATER_STEPS=600 pytest tests/postgres/test_rival_hosts.py --timeout=0
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest

import headwater
from headwater import Log, ManualClock
from headwater.errors import ClosedError, ConflictError, LeaseLostError, SubscriptionActiveError, SubscriptionError
from headwater.stores.postgres.pipelined import PipelinedConnection

SEEDS = int(os.environ.get("HEADWATER_SEEDS", "4"))
FIRST_SEED = int(os.environ.get("HEADWATER_FIRST_SEED", "10"))
STEPS = int(os.environ.get("HEADWATER_STEPS", "250"))

HOSTS = 3
BURSTS = (0.75, 0.9, 0.96)  # how often the next step is the same host's
ACK_WAIT_S, LEASE_S = 5.0, 20.0
OPTIONS: dict[str, Any] = {"ack_wait": ACK_WAIT_S, "lease": LEASE_S, "max_attempts": 1_000, "backoff": 0.5, "jitter": 0}
MODES = ("shared", "exclusive")  # the subscriptions are called so

OPEN, FLIGHT, DONE = "open", "flight", "done"


class Delivery:
    """One message for one subscription. `holder`: the only message object that may settle it."""

    def __init__(self) -> None:
        self.state, self.attempts, self.due_ms = OPEN, 0, 0
        self.holder: Any = None

    def wait(self, due_ms: int) -> None:
        self.state, self.due_ms, self.holder = OPEN, due_ms, None

    def end(self) -> None:
        self.state, self.holder = DONE, None


class Expected:
    """One subscription: what is promised of it."""

    def __init__(self) -> None:
        self.deliveries: dict[int, Delivery] = {}
        self.letters: set[int] = set()
        self.redriving: set[int] = set()
        self.busy: int | None = None  # is being acked by a user's transaction that is open

    def given(self, message: Any, now_ms: int) -> None:
        delivery = self.deliveries[message.seq]
        assert delivery.state != DONE, f"{message.seq} came after it was settled"
        assert delivery.due_ms <= now_ms, f"{message.seq} came while it was {delivery.state}"
        assert message.attempt == delivery.attempts + 1, f"{message.seq} came as attempt {message.attempt}"
        assert message.seq != self.busy
        delivery.state, delivery.attempts, delivery.holder = FLIGHT, message.attempt, message
        delivery.due_ms = now_ms + round(ACK_WAIT_S * 1_000)

    def overlooked(self, now_ms: int) -> list[int]:
        return [seq for seq, each in self.deliveries.items() if each.state == OPEN and each.due_ms <= now_ms]

    def lag(self) -> int:
        return sum(each.state != DONE for each in self.deliveries.values())


class Faults:
    """Breaks the connection of a store in its next commit: before it was sent, or when its answer is on its way."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.next: tuple[PipelinedConnection, str] | None = None
        real = PipelinedConnection.send_queued

        def send_queued(connection: PipelinedConnection) -> None:
            if self.next is None or self.next[0] is not connection or connection.queued[-1].sql != "COMMIT":
                return real(connection)
            (_, how), self.next = self.next, None
            if how == "answer":
                real(connection)
            connection.queued = []
            connection.close()
            raise psycopg.OperationalError("the connection was cut")

        monkeypatch.setattr(PipelinedConnection, "send_queued", send_queued)


class RivalHosts:
    def __init__(self, url: str, faults: Faults, seed: int) -> None:
        self.url, self.faults = url, faults
        self.dice = random.Random(seed)
        self.clock = ManualClock(1_700_000_000_000)
        self.hosts = [self.open() for _ in range(HOSTS)]
        self.host = 0
        self.expected = {mode: Expected() for mode in MODES}
        self.consumers: dict[tuple[str, int], Any] = {}  # by mode and host
        self.holder: int | None = None  # the host of the exclusive one, as far as is known
        self.handles: list[tuple[str, int, Any]] = []  # mode, host, message; also late ones
        self.user = psycopg.connect(url)
        self.users_ack: tuple[str, int] | None = None
        self.sql = psycopg.connect(f"{url}?options=-csearch_path%3Dheadwater", autocommit=True)
        self.trail: list[str] = []
        for host in range(HOSTS):
            self.consumers["shared", host] = self.subscribe("shared", host)
        self.take_exclusive()
        self.burst, self.verbs = self.dice.choice(BURSTS), self.weights()

    def open(self) -> Log:
        return headwater.open(
            self.url, clock=self.clock, heartbeats=False, maintenance_interval=None, durability="relaxed"
        )

    def close(self) -> None:
        self.faults.next = None
        for each in (self.user, self.sql, *self.hosts):
            each.close()

    @property
    def now_ms(self) -> int:
        return self.clock.now_ms()

    @property
    def log(self) -> Log:
        return self.hosts[self.host]

    def subscribe(self, mode: Any, host: int) -> Any:
        return self.hosts[host].subscribe(mode, "work", mode=mode, **OPTIONS)

    def note(self, *what: Any) -> None:
        self.trail.append(" ".join(map(str, (f"host {self.host}:", *what))))

    # --- one step ---------------------------------------------------------------------------------------------------

    def weights(self) -> dict[Callable[[], None], int]:
        """How often each verb comes. Of the rare ones each life has some, and has them often enough to meet."""
        rare: dict[Callable[[], None], int] = {
            self.own_transaction: 4,
            self.users_transaction: 6,
            self.take_exclusive: 3,
            self.join: 4,
            self.subscribe_again: 2,
            self.pause: 2,
            self.seek: 1,
            self.remove: 1,
            self.retain: 1,
            self.redrive: 2,
            self.cut: 2,
        }
        often = {self.publish: 8, self.fetch: 30, self.settle: 30, self.settle_many: 10, self.advance: 10, self.look: 1}
        return (
            often
            | {verb: weight * self.dice.choice([0, 1, 2]) for verb, weight in rare.items()}
            | {self.settle_late: 8}
        )

    def step(self) -> None:
        if self.dice.random() > self.burst:
            self.host = self.dice.randrange(HOSTS)
        [verb] = self.dice.choices([*self.verbs], [*self.verbs.values()])
        verb()

    def publish(self) -> None:
        how = self.dice.choice(["host", "host", "user", "rolled back"])
        count = self.dice.randint(1, 10)
        delay_s = self.dice.choice([None, None, None, 3.0])
        self.note("publishes", count, how, delay_s)
        if how == "host" or self.users_ack is not None:
            self.stored(self.log.publish_many([("work", None, {"delay": delay_s})] * count), delay_s)
        else:
            seqs = [self.log.publish("work", None, tx=self.user, delay=delay_s) for _ in range(count)]
            if how == "user":
                self.user.commit()
                self.stored(seqs, delay_s)
            else:
                self.user.rollback()

    def stored(self, seqs: list[int], delay_s: float | None) -> None:
        for seq in seqs:
            for expected in self.expected.values():
                assert seq not in expected.deliveries
                delivery = expected.deliveries[seq] = Delivery()
                delivery.due_ms = 0 if delay_s is None else self.now_ms + round(delay_s * 1_000)

    def fetch(self) -> None:
        mode, n = self.dice.choice(MODES), self.dice.choice([1, 1, 1, 2, 5, 20])
        consumer = self.consumers.get((mode, self.host))
        if consumer is None:
            return
        try:
            found = consumer.fetch(n)
        except LeaseLostError:
            assert mode == "exclusive"
            assert self.holder != self.host, "a holder was refused"
            del self.consumers[mode, self.host]
            return
        self.note("fetches", mode, [(message.seq, message.attempt) for message in found])
        assert not found or mode == "shared" or self.holder == self.host, "a former holder was given messages"
        for message in found:
            self.expected[mode].given(message, self.now_ms)
            self.handles.append((mode, self.host, message))
        if not found and (mode == "shared" or self.holder == self.host):
            assert self.expected[mode].overlooked(self.now_ms) == []

    # --- settling ---------------------------------------------------------------------------------------------------

    def pick(self, *, late: bool) -> tuple[str, int, Any] | None:
        """A handle that this burst's host was given; a `late` one has lost its right."""
        mine = [
            at
            for at, (mode, host, message) in enumerate(self.handles)
            if host == self.host and late is not self.holds(mode, message)
        ]
        return self.handles.pop(self.dice.choice(mine[-3:] if late else mine[:3])) if mine else None

    def holds(self, mode: str, message: Any) -> bool:
        delivery = self.expected[mode].deliveries.get(message.seq)
        return delivery is not None and delivery.holder is message

    def settle(self) -> None:
        if (handle := self.pick(late=False)) is None:
            return
        mode, _, message = handle
        verb = self.dice.choice(["ack", "ack", "ack", "ack", "nack", "extend", "reject"])
        delivery = self.expected[mode].deliveries[message.seq]
        self.note(verb, mode, message.seq, message.attempt)
        arguments = [self.dice.choice([0.0, 2.0])] if verb == "nack" else []
        if not self.allowed(delivery, lambda: getattr(message, verb)(*arguments)):
            return
        if verb == "extend":
            delivery.due_ms = self.now_ms + round(ACK_WAIT_S * 1_000)
            self.handles.append(handle)
        elif verb == "nack":
            delivery.wait(self.now_ms + round(arguments[0] * 1_000))
        else:
            self.settled(mode, message.seq, rejected=verb == "reject")

    def allowed(self, delivery: Delivery, settle: Callable[[], object]) -> bool:
        """Settles what is in flight. Once its time is over it may still be settled, or be refused."""
        try:
            settle()
        except LeaseLostError:
            assert delivery.due_ms <= self.now_ms, "refused in its time"
            return False
        return True

    def settled(self, mode: str, seq: int, *, rejected: bool = False) -> None:
        expected = self.expected[mode]
        expected.deliveries[seq].end()
        expected.redriving.discard(seq)
        if rejected:
            expected.letters.add(seq)

    def settle_many(self) -> None:
        """In one transaction of this host: acks of several messages, and the works of others that wait with them."""
        handles = [handle for _ in range(self.dice.randint(2, 5)) if (handle := self.pick(late=False)) is not None]
        in_time = [each for each in handles if self.expected[each[0]].deliveries[each[2].seq].due_ms > self.now_ms]
        self.note("together", [(mode, message.seq) for mode, _, message in in_time])
        with self.log._core.engine.store._turn:
            acks = [
                self.consumers[mode, self.host]._consumer.ack([message._claimed])
                for mode, _, message in in_time
                if (mode, self.host) in self.consumers
            ]
        for ack in acks:
            ack.wait(30.0)
            if ack.error is not None:
                raise ack.error
        for mode, _, message in in_time:
            self.settled(mode, message.seq)

    def settle_late(self) -> None:
        if (handle := self.pick(late=True)) is None:
            return
        mode, _, message = handle
        if message.settled:
            return
        self.note("comes late", mode, message.seq, message.attempt)
        verb = self.dice.choice([message.ack, message.nack, message.extend, message.reject, message.ack])
        with pytest.raises((SubscriptionError, ClosedError)):
            verb()

    def own_transaction(self) -> None:
        if (handle := self.pick(late=False)) is None:
            return
        mode, _, message = handle
        delivery, commits = self.expected[mode].deliveries[message.seq], self.dice.random() < 0.7
        self.note("own transaction", mode, message.seq, commits)

        def run() -> None:
            with message.transaction() as tx:
                tx.execute("SELECT 1")
                seq = tx.publish("work", None)
                if not commits:
                    raise RuntimeError
            self.stored([seq], None)

        try:
            if self.allowed(delivery, run):
                self.settled(mode, message.seq)
        except (RuntimeError, ConflictError):
            self.handles.append(handle)

    def users_transaction(self) -> None:
        """An ack in a transaction that stays open for a while."""
        if self.users_ack is not None:
            self.end_users_transaction()
            return
        if (handle := self.pick(late=False)) is None:
            return
        mode, _, message = handle
        delivery = self.expected[mode].deliveries[message.seq]
        self.note("user acks", mode, message.seq, message.attempt)
        if not self.allowed(delivery, lambda: message.ack(tx=self.user)):
            self.user.rollback()
            return
        delivery.due_ms, delivery.holder = self.now_ms + round(ACK_WAIT_S * 1_000), None
        self.users_ack = mode, message.seq
        self.expected[mode].busy = message.seq

    def end_users_transaction(self) -> None:
        if self.users_ack is not None:
            (mode, seq), self.users_ack = self.users_ack, None
            self.expected[mode].busy = None
            commits = self.dice.random() < 0.5
            self.note("user ends", mode, seq, commits)
            if commits:
                self.user.commit()
                self.settled(mode, seq)
            else:
                self.user.rollback()

    # --- time, holders ----------------------------------------------------------------------------------------------

    def advance(self) -> None:
        seconds = self.dice.choice([0.1, 0.5, 2.0, ACK_WAIT_S, ACK_WAIT_S, LEASE_S])
        self.note("clock", seconds)
        self.clock.advance(seconds)

    def take_exclusive(self) -> None:
        row = self.sql.execute("SELECT holder, lease_until FROM subscriptions WHERE id = 'exclusive'").fetchone()
        is_held = row is not None and row[0] != "" and row[1] > self.now_ms
        self.note("takes the exclusive one", is_held)
        if is_held:
            with pytest.raises(SubscriptionActiveError):
                self.subscribe("exclusive", self.host)
            return
        self.consumers["exclusive", self.host] = self.subscribe("exclusive", self.host)
        self.holder = self.host
        for delivery in self.expected["exclusive"].deliveries.values():
            if delivery.state == FLIGHT and delivery.holder is not None:
                delivery.holder, delivery.due_ms = None, self.now_ms
            elif delivery.state == FLIGHT:
                delivery.due_ms = min(delivery.due_ms, self.now_ms)

    def join(self) -> None:
        """One more consumer, for a moment: a transaction that excludes all others saves what is stored."""
        self.note("joins")
        self.subscribe("shared", self.host).close()

    def subscribe_again(self) -> None:
        mode = self.dice.choice(MODES)
        consumer = self.consumers.pop((mode, self.host), None)
        if consumer is None:
            return
        self.note("closes", mode)
        consumer.close()
        is_holder = mode == "shared" or self.holder == self.host
        for its_mode, host, message in self.handles:
            if (its_mode, host) == (mode, self.host) and is_holder and self.holds(mode, message):
                delivery = self.expected[mode].deliveries[message.seq]
                delivery.holder, delivery.due_ms = None, min(self.now_ms, delivery.due_ms)
        if mode == "shared":
            self.consumers[mode, self.host] = self.subscribe(mode, self.host)
        elif is_holder:
            self.holder = None

    def pause(self) -> None:
        mode = self.dice.choice(MODES)
        self.note("pauses", mode)
        self.log.pause(mode)
        for host in range(HOSTS):
            consumer = self.consumers.get((mode, host))
            if consumer is not None and (mode == "shared" or self.holder == host):
                assert consumer.fetch(3) == []
        for _ in range(2):
            self.settle()
        self.hosts[self.dice.randrange(HOSTS)].resume(mode)

    # --- what moves, removes and brings back ------------------------------------------------------------------------

    def stored_seqs(self) -> set[int]:
        return {seq for (seq,) in self.sql.execute("SELECT seq FROM messages")}

    def seek(self) -> None:
        mode = self.dice.choice(MODES)
        expected = self.expected[mode]
        if expected.letters or expected.redriving:
            return
        self.end_users_transaction()
        start = self.dice.randint(1, len(expected.deliveries) + 1)
        self.note("seeks", mode, start)
        try:
            self.log.seek(mode, start)
        except SubscriptionActiveError:
            return
        there = self.stored_seqs()
        for seq, delivery in expected.deliveries.items():
            if seq >= start and seq in there:
                delivery.attempts = 0
                delivery.wait(self.published_due_ms(seq))
            else:
                delivery.end()
        if mode == "exclusive":
            self.holder = None

    def published_due_ms(self, seq: int) -> int:
        row = self.sql.execute("SELECT deliver_at FROM messages WHERE seq = %s", (seq,)).fetchone()
        assert row is not None
        return row[0] or 0

    def remove(self) -> None:
        mode = self.dice.choice(MODES)
        if any(expected.redriving for expected in self.expected.values()):
            return
        self.note("removes", mode)
        self.end_users_transaction()
        self.log.dead_letters.purge()
        for expected in self.expected.values():
            expected.letters.clear()
        try:
            self.log.delete_subscription(mode)
        except SubscriptionActiveError:
            return
        self.clock.advance(0.001)
        expected = self.expected[mode] = Expected()
        for seq in sorted(self.stored_seqs()):
            expected.deliveries[seq] = Delivery()
            expected.deliveries[seq].due_ms = self.published_due_ms(seq)
        for host in range(HOSTS):
            self.consumers.pop((mode, host), None)
            if mode == "shared":
                self.consumers[mode, host] = self.subscribe(mode, host)
        self.holder = None if mode == "exclusive" else self.holder
        if mode == "exclusive":
            self.take_exclusive()

    def retain(self) -> None:
        self.end_users_transaction()
        self.take_exclusive()  # unless its holder lives: what a dead one had in flight may go
        keep = self.dice.choice([5, 20, 50])
        self.log.retain(">", max_count=keep)
        self.log.run_maintenance()
        self.log.delete_retention(">")
        there = self.stored_seqs()
        self.note("keeps", keep, sorted(there))
        for expected in self.expected.values():
            for seq, delivery in expected.deliveries.items():
                if seq not in there and delivery.state != DONE and seq not in expected.redriving:
                    is_held = delivery.holder is not None and delivery.due_ms > self.now_ms
                    assert not is_held, f"{seq} was deleted while it was handled"
                    delivery.end()

    def redrive(self) -> None:
        mode = self.dice.choice(MODES)
        expected = self.expected[mode]
        done = self.log.dead_letters.redrive(subscription=mode)
        self.note("redrives", mode, expected.letters)
        assert (done.redriven, done.failed) == (len(expected.letters), {})
        for seq in expected.letters:
            expected.deliveries[seq].attempts = 0
            expected.deliveries[seq].wait(self.now_ms)
        expected.redriving |= expected.letters
        expected.letters = set()

    # --- what breaks ------------------------------------------------------------------------------------------------

    def cut(self) -> None:
        how = self.dice.choice(["writer", "commit", "answer", "answer"])
        self.note("cut", how)
        connection = self.log._core.engine.store._connection
        if how == "writer":
            self.sql.execute("SELECT pg_terminate_backend(%s)", (connection.backend_pid,))
        else:
            self.faults.next = connection, how

    def look(self) -> None:
        for mode, expected in self.expected.items():
            there = [seq for seq, each in expected.deliveries.items() if each.state != DONE]
            rows = self.sql.execute(
                "SELECT seq FROM deliveries WHERE subscription = %s ORDER BY seq", (mode,)
            ).fetchall()
            assert self.log.subscription(mode).lag == len(there), f"{mode}: {there} are not settled, rows {rows}"

    def drain(self) -> None:
        """Nothing stands in the way for ever: all that is not settled comes, and can be acked."""
        self.end_users_transaction()
        self.faults.next = None
        self.clock.advance(LEASE_S + ACK_WAIT_S)
        self.take_exclusive()
        for mode, expected in self.expected.items():
            for _ in range(1_000):
                if not expected.lag():
                    break
                found = self.consumers[mode, self.host].fetch(100)
                for message in found:
                    expected.given(message, self.now_ms)
                    message.ack()
                    self.settled(mode, message.seq)
                if not found:
                    self.clock.advance(ACK_WAIT_S)
            assert not expected.lag(), "messages are lost"
            assert self.log.subscription(mode).lag == 0


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> Faults:
    return Faults(monkeypatch)


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("CRITICAL", logger="headwater")


@pytest.fixture(params=range(FIRST_SEED, FIRST_SEED + SEEDS))
def rivals(request: pytest.FixtureRequest, postgres_url: str, faults: Faults) -> Iterator[RivalHosts]:
    found = RivalHosts(postgres_url, faults, request.param)
    yield found
    found.close()


def test_hosts_share_a_log_as_the_model_says(rivals: RivalHosts) -> None:
    try:
        for _ in range(STEPS):
            rivals.step()
        rivals.drain()
    except BaseException:
        print("\n".join(rivals.trail))
        raise
