"""The bench of the consumer runner: mixtures of handling, failing, cancelling, closing, killing and taking over. When
all is quiet, every message is acked, dead or available at once, and the counts add up."""

from __future__ import annotations

import asyncio
import logging
import threading
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any, NamedTuple

import hypothesis
import pytest
from client_states import States
from consumer_bench import OPTIONS, PATIENCE_S, Api, Place, place_of, take_all
from hypothesis import strategies as st

from headwater import Reject
from headwater.errors import ClosedError, HeadwaterError, LeaseLostError

LETTERS_MAX = 1_000
STALLED_S_MAX = 3 * PATIENCE_S

# --- what may happen --------------------------------------------------------------------------------------------------

WAYS = ("iterate", "fetch", "handle")
FATES = ("ack", "ack soon", "nack", "reject", "keep", "stall", "give up the ack", "cancelled")
DISTURBANCES = ("none", "cancel", "close", "close log", "take over", "cut")


class Round(NamedTuple):
    """Publish some, let all workers take some of what is there, and disturb them while they are at it.

    `fates` say in turn what a worker does with a message; those that "stall" hold it until the disturbance is over.
    `after` is how many messages are handed out before the disturbance comes."""

    publish: int
    way: str
    takes: int
    fates: tuple[str, ...]
    disturbance: str
    after: int


class Play(NamedTuple):
    mode: str
    max_attempts: int
    rounds: tuple[Round, ...]


ROUNDS = st.builds(
    Round,
    publish=st.integers(0, 12),
    way=st.sampled_from(WAYS),
    takes=st.integers(1, 6),
    fates=st.lists(st.sampled_from(FATES), min_size=1, max_size=5).map(tuple),
    disturbance=st.sampled_from(DISTURBANCES),
    after=st.integers(0, 8),
)
PLAYS = st.builds(
    Play,
    mode=st.sampled_from(["exclusive", "shared"]),
    max_attempts=st.sampled_from([1, 3, 50]),
    rounds=st.lists(ROUNDS, min_size=1, max_size=4).map(tuple),
)


def _closed_while_nacked_ones_come_again(mode: str, how: str) -> Play:
    """What was nacked is on its way to one of many waiting consumers when all is closed. Rare among random plays."""
    return Play(mode, 50, 4 * (Round(3, "iterate", 4, ("nack", "keep"), how, 5),))


# --- what is known ----------------------------------------------------------------------------------------------------


class Holder:
    """One subscription object, or one start of a handler: a message is in one hand of it at a time."""

    def __init__(self) -> None:
        self.in_flight: set[int] = set()
        self.unsure: set[int] = set()  # its nack did not return
        self.is_late = False  # taken over; what it hands out from now on proves nothing


class Ledger:
    """What was done with each message, as the workers saw it. Safe for threads."""

    def __init__(self, max_attempts: int) -> None:
        self.max_attempts = max_attempts
        self.published: set[int] = set()
        self.acked: set[int] = set()
        """The ack returned."""
        self.perhaps_acked: set[int] = set()
        """The ack did not return, or was not waited for."""
        self.dead: set[int] = set()
        """A reject returned, or a nack of the last attempt."""
        self.perhaps_dead: set[int] = set()
        """The reject did not return, or was not waited for."""
        self.given: Counter[int] = Counter()
        self.attempts: Counter[int] = Counter()
        """The attempt that was handed out last."""
        self.vanished: Counter[int] = Counter()
        """How often its holder was taken over or lost its connection: what that one had fetched ahead may count."""
        self.problems: list[str] = []
        self.handed_out = 0
        self._changed = threading.Condition()

    def give(self, holder: Holder, seq: int, attempt: int) -> None:
        with self._changed:
            if not holder.is_late:
                self._check(holder, seq, attempt)
                self.attempts[seq] = attempt
            holder.in_flight.add(seq)
            self.given[seq] += 1
            self.handed_out += 1
            self._changed.notify_all()

    def _check(self, holder: Holder, seq: int, attempt: int) -> None:
        where = f"message {seq}, attempt {attempt}"
        most = 1 + self.given[seq] + self.vanished[seq]
        if seq in holder.in_flight and not self.vanished[seq]:
            self.problems.append(f"{where}, is in two hands of one holder")
        if seq in self.acked or seq in self.dead:
            self.problems.append(f"{where}, was settled for good before")
        if attempt > most:
            self.problems.append(f"{where}, was handed out {self.given[seq]} times only")
        if attempt <= self.attempts[seq]:
            self.problems.append(f"{where}, comes after attempt {self.attempts[seq]}")

    def let_go(self, holder: Holder, seq: int) -> None:
        """Before it is settled, for then others may get it at once."""
        with self._changed:
            holder.in_flight.discard(seq)

    def vanish(self, holder: Holder, *, for_good: bool) -> None:
        with self._changed:
            holder.is_late = holder.is_late or for_good
            self.vanished.update(self.published - self.acked - self.dead)

    def complain(self, what: str) -> None:
        with self._changed:
            self.problems.append(what)
            self._changed.notify_all()

    def available(self, holder: Holder) -> int:
        """How many messages at least this holder must be able to hand out."""
        with self._changed:
            settled = self.acked | self.perhaps_acked | self.dead | self.perhaps_dead
            open_ones = self.published - settled - holder.in_flight - holder.unsure
            fresh = {seq for seq in open_ones if self.given[seq] + self.vanished[seq] < self.max_attempts}
            # What a holder had that vanished comes one at a time, so one that is kept may hold up the others.
            suspects = {seq for seq in fresh if self.vanished[seq]}
            is_held_up = any(self.vanished[seq] for seq in holder.in_flight)
            return len(fresh) - len(suspects) + (1 if suspects and not is_held_up else 0)

    def wait_for(self, count: int) -> bool:
        """Until so many were delivered, or a rule is broken."""
        with self._changed:
            return self._changed.wait_for(lambda: self.handed_out >= count or bool(self.problems), PATIENCE_S)


# --- the play ---------------------------------------------------------------------------------------------------------


class Bench:
    """Plays one play on one log, and says what is wrong with its end."""

    def __init__(self, api: Api, place: Place, workers: int, play: Play, name: str) -> None:
        self.api, self.place, self.workers, self.play = api, place, workers, play
        self.id, self.topic = f"s{name}", f"t{name}"
        self.ledger = Ledger(play.max_attempts)
        self.options = {**OPTIONS, "mode": play.mode, "max_attempts": play.max_attempts}
        self.log: Any = None
        self.subscription: Any = None
        self.holder = Holder()
        self.was_cut = False

    async def run(self) -> list[str]:
        self.log = await self.api.open(self.place)
        try:
            for each in self.play.rounds:
                await self._play(each)
        finally:
            await self._close_log()
        await self._reckon()
        return self.ledger.problems

    async def _play(self, round: Round) -> None:
        if self.log is None:
            self.log = await self.api.open(self.place)
        messages = [(self.topic, None) for _ in range(round.publish)]
        if messages:
            self.ledger.published.update(await self.api.do(self.log.publish_many, messages))
        company = Handlers(self, round) if round.way == "handle" else Takers(self, round)
        before = self.ledger.handed_out
        await company.start()
        wanted = before + min(round.after, company.takes_at_least())
        if not await self.api.on_a_thread(self.ledger.wait_for, wanted):
            self.ledger.complain(f"{self.ledger.handed_out} of {wanted} were handed out, the others are stranded")
        try:
            await self._disturb(round, company)
        finally:
            company.go_on.set()
        await company.join()

    async def _disturb(self, round: Round, company: Takers | Handlers) -> None:
        disturbance = self.disturbance(round)
        if disturbance == "cancel":
            company.cancel_some()
        elif disturbance == "close":
            await company.close()
        elif disturbance == "close log":
            company.go_on.set()  # closing waits for handlers
            await self._close_log()
        elif disturbance == "take over":
            await self._take_over()
            company.go_on.set()
            await company.close()
        elif disturbance == "cut":
            await self._cut()

    def disturbance(self, round: Round) -> str:
        if round.disturbance == "cut" and self.place.proxy is None:
            return "none"
        if round.disturbance == "cancel" and not self.api.awaits:
            return "none"  # threads cannot be cancelled
        return round.disturbance

    # --- the subscription -----------------------------------------------------------------------------------------

    async def subscribe(self) -> Any:
        if self.subscription is None:
            # A server may learn a moment later than the client that their connection is gone.
            wait = PATIENCE_S if self.was_cut else 0.0
            self.holder = Holder()
            self.subscription = await self.api.do(self.log.subscribe, self.id, self.topic, timeout=wait, **self.options)
        return self.subscription

    async def close_subscription(self) -> None:
        subscription, self.subscription = self.subscription, None
        if subscription is not None:
            await self.api.do(subscription.close)

    async def _close_log(self) -> None:
        log, self.log, self.subscription = self.log, None, None
        if log is not None:
            await asyncio.wait_for(self.api.do(log.close), PATIENCE_S)

    async def _take_over(self) -> None:
        """By another log object on the same database, which settles some and lets go. In shared mode it joins in."""
        async with self.api.opened(self.place, direct=True) as other:
            options = dict(self.options)
            if self.play.mode == "exclusive":
                self.ledger.vanish(self.holder, for_good=True)
                options["takeover"] = True
            holder = Holder()
            subscription = await self.api.do(other.subscribe, self.id, self.topic, **options)
            found = await self.api.do(subscription.fetch, 3, timeout=0)
            for message in found:
                self.ledger.give(holder, message.seq, message.attempt)
            for message, fate in zip(found, ("ack", "nack", "keep"), strict=False):
                await self.settle(holder, message, fate)
            await self.api.do(subscription.close)

    async def _cut(self) -> None:
        assert self.place.proxy is not None
        states = States(self.log)
        self.was_cut = True
        self.ledger.vanish(self.holder, for_good=False)
        await self.api.on_a_thread(self.place.proxy.reset)
        await states.reach("reconnecting", "connected")

    # --- settling -------------------------------------------------------------------------------------------------

    async def settle(self, holder: Holder, message: Any, fate: str) -> None:
        ledger, seq = self.ledger, message.seq
        if fate == "keep":
            return
        ledger.let_go(holder, seq)
        if fate == "nack":
            holder.unsure.add(seq)
            await self.api.do(message.nack)
            holder.unsure.discard(seq)
            if message.attempt >= self.play.max_attempts:
                ledger.dead.add(seq)
        elif fate == "reject":
            ledger.perhaps_dead.add(seq)
            await self.api.do(message.reject)
            ledger.dead.add(seq)
        elif fate == "ack soon":
            ledger.perhaps_acked.add(seq)
            await self.api.do(message.ack, confirm=False)
        elif fate == "give up the ack" and self.api.awaits:
            ledger.perhaps_acked.add(seq)
            acking = asyncio.create_task(message.ack())
            for _ in range(seq % 4):
                await asyncio.sleep(0)
            acking.cancel()
            await asyncio.gather(acking, return_exceptions=True)
        else:
            ledger.perhaps_acked.add(seq)
            await self.api.do(message.ack)
            ledger.acked.add(seq)

    # --- the end --------------------------------------------------------------------------------------------------

    async def _reckon(self) -> None:
        ledger, published = self.ledger, self.ledger.published
        async with self.api.opened(self.place, direct=True) as log:
            before = await self.api.do(log.subscription, self.id)
            wait = PATIENCE_S if self.was_cut else 0.0
            subscription = await self.api.do(log.subscribe, self.id, self.topic, timeout=wait, **self.options)
            if before.in_flight and not ledger.vanished:
                ledger.complain(f"{before.in_flight} are in flight, and nothing holds them")
            holder, rest = Holder(), await take_all(self.api, subscription)
            info = await self.api.do(log.subscription, self.id)
            for seq, attempt in rest:
                ledger.give(holder, seq, attempt)
            letters = await self.api.do(log.dead_letters.list, limit=LETTERS_MAX, subscription=self.id)
        dead = [letter.message.seq for letter in letters]
        available = [seq for seq, _ in rest]
        gone = published - {*available, *dead}
        for what, twice in (("available", available), ("dead", dead), ("available or dead", [*available, *dead])):
            if len(twice) != len(set(twice)):
                ledger.complain(f"{what} twice: {[seq for seq, count in Counter(twice).items() if count > 1]}")
        if missing := gone - ledger.acked - ledger.perhaps_acked:
            ledger.complain(f"neither acked nor dead nor available: {sorted(missing)}")
        if again := ledger.acked - gone:
            ledger.complain(f"acked, and not gone: {sorted(again)}")
        if undead := ledger.dead - set(dead):
            ledger.complain(f"dead, and no dead letters: {sorted(undead)}")
        counts = {"acked": info.acked - len(rest), "dead": info.dead, "lag before": before.lag, "lag": info.lag}
        expired_now = before.lag - len(rest)  # had all their attempts, and are found out when they are next claimed
        expected = {"acked": len(gone), "dead": len(dead), "lag before": len(rest) + max(0, expired_now), "lag": 0}
        if counts != expected or not 0 <= expired_now <= len(dead):
            ledger.complain(f"the subscription says {counts}, its messages {expected}")


class Takers:
    """Tasks, or threads, that share one subscription object."""

    def __init__(self, bench: Bench, round: Round) -> None:
        self.bench, self.round = bench, round
        self.go_on = threading.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._disturbance = bench.disturbance(round)
        self._available = 0

    async def start(self) -> None:
        bench = self.bench
        subscription = await bench.subscribe()
        self._available = bench.ledger.available(bench.holder)
        body = self._iterate if self.round.way == "iterate" else self._fetch
        for number in range(bench.workers):
            wait = None if self._is_ended_by_disturbance(number) else 0
            self._tasks.append(asyncio.create_task(self._guarded(body, subscription, bench.holder, wait)))

    def _is_ended_by_disturbance(self, number: int) -> bool:
        """Such a worker waits for messages; the others leave when they find none."""
        return number < self._waiting_count

    @property
    def _waiting_count(self) -> int:
        if self._disturbance == "cancel":
            return (self.bench.workers + 1) // 2
        return self.bench.workers if self._disturbance in ("close", "close log", "take over") else 0

    def takes_at_least(self) -> int:
        if "stall" in self.round.fates or self.round.way == "fetch":
            return min(self._available, 1)
        return min(self._available, max(1, self._waiting_count) * self.round.takes)

    async def _guarded(self, body: Callable[..., Any], *arguments: Any) -> None:
        """A holder that was disturbed may find its right to settle gone; one that was not may not."""
        expected: dict[str, tuple[type[HeadwaterError], ...]] = {
            "close": (ClosedError, LeaseLostError),
            "close log": (ClosedError, LeaseLostError),
            "take over": (ClosedError, LeaseLostError),
            "cut": (LeaseLostError,) if self.bench.play.mode == "shared" else (),
        }
        try:
            await body(*arguments)
        except expected.get(self._disturbance, ()):
            pass
        except Exception as exc:
            self.bench.ledger.complain(f"a worker failed: {exc!r}")

    async def _iterate(self, subscription: Any, holder: Holder, wait: float | None) -> None:
        async with aclosing(self.bench.api.each(subscription, wait)) as messages:
            taken = 0
            async for message in messages:
                self.bench.ledger.give(holder, message.seq, message.attempt)
                await self._settle(holder, message, taken)
                taken += 1
                if taken == self.round.takes:
                    return

    async def _fetch(self, subscription: Any, holder: Holder, wait: float | None) -> None:
        found = await self.bench.api.do(subscription.fetch, self.round.takes, timeout=wait)
        for message in found:
            self.bench.ledger.give(holder, message.seq, message.attempt)
        for number, message in enumerate(found):
            await self._settle(holder, message, number)

    async def _settle(self, holder: Holder, message: Any, number: int) -> None:
        fate = self.round.fates[number % len(self.round.fates)]
        if fate == "stall":
            await self.bench.api.on_a_thread(self.go_on.wait, STALLED_S_MAX)
        await self.bench.settle(holder, message, fate)

    def cancel_some(self) -> None:
        for task in self._tasks[: self._waiting_count]:
            task.cancel()

    async def close(self) -> None:
        await self.bench.close_subscription()

    async def join(self) -> None:
        _, late = await asyncio.wait(self._tasks, timeout=PATIENCE_S)
        if late:
            self.bench.ledger.complain(f"{len(late)} workers hang")
            for task in late:
                task.cancel()


class Handlers:
    """A handler, run by so many workers of the log itself."""

    def __init__(self, bench: Bench, round: Round) -> None:
        self.bench, self.round = bench, round
        self.go_on = threading.Event()
        self._returned: set[int] = set()
        self._available = 0

    async def start(self) -> None:
        bench = self.bench
        await bench.close_subscription()
        bench.holder = Holder()
        self._available = bench.ledger.available(bench.holder)
        handler = self._handle_async if bench.api.awaits else self._handle
        bench.log.on(bench.topic, id=bench.id, concurrency=bench.workers, **bench.options)(handler)
        await bench.api.do(bench.log.start)

    def takes_at_least(self) -> int:
        return min(self._available, 1 if "stall" in self.round.fates else self._available)

    def _begin(self, message: Any) -> str:
        bench = self.bench
        bench.ledger.give(bench.holder, message.seq, message.attempt)
        return self.round.fates[(message.seq + message.attempt) % len(self.round.fates)]

    def _end(self, message: Any, fate: str) -> None:
        bench = self.bench
        bench.ledger.let_go(bench.holder, message.seq)
        if fate == "nack":
            raise ValueError("no")
        if fate == "reject":
            bench.ledger.perhaps_dead.add(message.seq)
            raise Reject("no")
        if fate == "cancelled":
            raise asyncio.CancelledError if bench.api.awaits else ValueError("no")
        bench.ledger.perhaps_acked.add(message.seq)
        self._returned.add(message.seq)

    def _handle(self, message: Any) -> None:
        fate = self._begin(message)
        if fate == "stall":
            self.go_on.wait(STALLED_S_MAX)
        self._end(message, fate)

    async def _handle_async(self, message: Any) -> None:
        fate = self._begin(message)
        if fate == "stall":
            await self.bench.api.on_a_thread(self.go_on.wait, STALLED_S_MAX)
        self._end(message, fate)

    def cancel_some(self) -> None:
        """Handlers are cancelled by themselves alone."""

    async def close(self) -> None:
        self.go_on.set()
        if self.bench.log is not None:
            await asyncio.wait_for(self.bench.api.do(self.bench.log.stop), PATIENCE_S)

    async def join(self) -> None:
        await self.close()
        if self.bench.disturbance(self.round) in ("none", "cancel", "close"):  # then the acks have been waited for
            self.bench.ledger.acked.update(self._returned)


# --- the test ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["sqlite", "postgres", "ws"])
def stage(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """One log for many plays, each on a topic and a subscription of its own."""
    database = request.getfixturevalue("postgres").new_database() if request.param == "postgres" else None
    directory: Path = tmp_path_factory.mktemp(request.param)
    with place_of(request.param, directory, database, with_proxy=True) as place:
        yield place


@pytest.fixture
def quiet() -> Iterator[None]:
    """Hundreds of handlers fail here on purpose."""
    logger = logging.getLogger("headwater")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    yield
    logger.setLevel(level)


@pytest.mark.timeout(0)
@pytest.mark.parametrize("workers", [1, 3, 10])
def test_every_message_is_acked_dead_or_available_at_once(
    api: Api, stage: Place, workers: int, quiet: None, pytestconfig: pytest.Config
) -> None:
    case = f"{stage.kind}-{api.name}-{workers}"
    played = 0

    @hypothesis.seed(zlib.crc32(f"{case} {pytestconfig.getoption('--dice')}".encode()))
    @hypothesis.settings(
        max_examples=pytestconfig.getoption("--bench-examples"),
        database=None,
        phases=[
            hypothesis.Phase.explicit,
            hypothesis.Phase.generate,
        ],  # a play that fails is small already, and one that hangs takes long
        print_blob=True,
    )
    @hypothesis.given(play=PLAYS)
    @hypothesis.example(_closed_while_nacked_ones_come_again("exclusive", "close"))
    @hypothesis.example(_closed_while_nacked_ones_come_again("exclusive", "close log"))
    @hypothesis.example(_closed_while_nacked_ones_come_again("shared", "close"))
    @hypothesis.example(_closed_while_nacked_ones_come_again("shared", "close log"))
    def perform(play: Play) -> None:
        nonlocal played
        played += 1
        bench = Bench(api, stage, workers, play, f"-{case}-{played}")
        problems = asyncio.run(bench.run())
        assert not problems, "\n".join([str(play.rounds), *problems[:10]])

    perform()
