"""Clients with a `PushSchedule` each at one `ClaimRegistry`, simulated: the claim vectors, and any traffic."""

from __future__ import annotations

import heapq
import itertools
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.replication.claims import ClaimRegistry
from headwater.replication.schedule import Changed, Claim, Push, PushSchedule, Release
from headwater.replication.timers import Timers

VECTORS = json.loads((Path(__file__).parents[2] / "vectors" / "claims.json").read_text())
EVENTS_MAX = 20_000  # of one simulation: more is a storm


class Client:
    """What the driver of a schedule does: carries actions out, tells what happened, comes back at `wake_ms`."""

    def __init__(self, world: World, name: str, timers: Timers, coordinate: bool = True) -> None:
        self.world, self.name, self.timers = world, name, timers
        self.schedule = PushSchedule(timers, coordinate, world.now, world.dice.random)
        self.alive = True
        self.connected = False
        self.link = 0  # which connection it is; what an older one carried is lost
        self.pushes: list[dict[str, Any]] = []
        self.writes: list[int] = []
        self.claims: list[int] = []
        self.fails_next = 0

    def write(self) -> None:
        self.writes.append(self.world.now)
        self.schedule.wrote(self.world.now)
        self.act()

    def connect(self) -> None:
        if not self.connected:
            self.connected, self.link = True, self.link + 1
            self.schedule.connected(self.world.now)
            self.world.server_hears(self, self.world.join)
            self.act()

    def disconnect(self) -> None:
        if self.connected:
            self.connected = False
            if self.pushes and self.pushes[-1]["end"] is None:
                self.pushes[-1]["polite"] = False
            self.world.registry.leave(self.name, self.world.now)
            self.schedule.disconnected(self.world.now)
            self.act()

    def die(self) -> None:
        self.disconnect()
        self.alive = False

    def act(self) -> None:
        world = self.world
        if not self.alive:
            return
        for action in self.schedule.step(world.now):
            match action:
                case Claim(span_ms):
                    assert self.connected
                    self.claims.append(world.now)
                    world.trace(f"{self.name} sends CLAIM {span_ms / 1000:g}")
                    world.server_hears(self, lambda client, span_ms=span_ms: world.claim(client, span_ms))
                case Release():
                    assert self.connected
                    world.trace(f"{self.name} releases")
                    world.server_hears(self, world.release)
                case Push():
                    self.push()
                case Changed(span_ms):
                    world.trace(f"{self.name} sends CHANGED {span_ms / 1000:g}")
        wake_ms = self.schedule.wake_ms()
        if wake_ms is not None:
            assert wake_ms > world.now, "a busy loop"
            world.at(wake_ms, self.act)

    def push(self) -> None:
        world = self.world
        assert not self.pushes or self.pushes[-1]["end"] is not None, "two pushes at once by one client"
        world.trace(f"{self.name} pushes")
        push = {"start": world.now, "end": None, "polite": self.connected, "ok": self.fails_next <= 0}
        self.fails_next -= 1
        self.pushes.append(push)
        latency_ms = world.latency_ms()
        took_ms = world.push_ms()
        world.at(world.now + min(latency_ms, took_ms), lambda: world.registry.push_began(self.name, world.now))
        world.at(world.now + took_ms, lambda: self.end_push(push))

    def end_push(self, push: dict[str, Any]) -> None:
        world = self.world
        push["end"] = world.now
        world.registry.push_ended(self.name, world.now)
        self.schedule.push_ended(world.now, push["ok"])
        self.act()


class World:
    """Time goes from event to event. Messages of one connection keep their order."""

    def __init__(self, latency_ms: Callable[[], int] = lambda: 0, push_ms: Callable[[], int] = lambda: 0) -> None:
        self.now = 0
        self.registry = ClaimRegistry()
        self.clients: dict[str, Client] = {}
        self.dice = random.Random(1)
        self.latency_ms, self.push_ms = latency_ms, push_ms
        self.reported: list[tuple[int, str]] = []
        self._arrivals: dict[tuple[str, str], int] = {}
        self._events: list[tuple[int, int, Callable[[], None]]] = []
        self._order = itertools.count()

    def trace(self, text: str) -> None:
        self.reported.append((self.now, text))

    def at(self, when: int, what: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when, next(self._order), what))

    def run(self, until: int | None = None) -> None:
        for _ in range(EVENTS_MAX):
            if not self._events or (until is not None and self._events[0][0] > until):
                self.now = self.now if until is None else until
                return
            self.now, _, what = heapq.heappop(self._events)
            what()
        raise AssertionError(f"a storm of actions: {self.reported[-10:]}")

    def _arrival(self, client: Client, way: str) -> int:
        arrival = max(self.now + self.latency_ms(), self._arrivals.get((client.name, way), 0))
        self._arrivals[client.name, way] = arrival
        return arrival

    def server_hears(self, client: Client, what: Callable[[Client], None]) -> None:
        link = client.link
        self.at(self._arrival(client, "up"), lambda: what(client) if client.connected and client.link == link else None)

    def client_hears(self, client: Client, text: str, what: Callable[[PushSchedule], None]) -> None:
        link = client.link

        def hear() -> None:
            if client.connected and client.link == link:
                self.trace(f"{client.name} gets {text}")
                what(client.schedule)
                client.act()

        self.at(self._arrival(client, "down"), hear)

    def join(self, client: Client) -> None:
        remaining_ms = self.registry.join(client.name, self.now)
        if remaining_ms is not None:
            self.tell_claimed(client, remaining_ms)

    def claim(self, client: Client, span_ms: int) -> None:
        answer = self.registry.claim(client.name, span_ms, self.now)
        if not answer.granted:
            self.tell_claimed(client, answer.remaining_ms)
            return
        self.client_hears(client, "CLAIM (ack)", lambda schedule: schedule.granted(self.now))
        for other in self.others(client):
            self.tell_claimed(other, answer.remaining_ms)

    def release(self, client: Client) -> None:
        if self.registry.release(client.name, self.now):
            for other in self.others(client):
                self.client_hears(other, "RELEASE", lambda schedule: schedule.released_by_other(self.now))

    def tell_claimed(self, client: Client, span_ms: int) -> None:
        reported = f"CLAIM {span_ms / 1000:g}"
        self.client_hears(client, reported, lambda schedule: schedule.claimed_by_other(self.now, span_ms))

    def others(self, client: Client) -> list[Client]:
        return [other for other in self.clients.values() if other is not client and other.connected]


# --- the vectors ----------------------------------------------------------------------------------------------------

START_S = -36_000  # so that the pushes at the start are long over


class VectorWorld(World):
    """Plays the sentences of the vectors. Times there are seconds; 0 is ten hours after A and B began."""

    def __init__(self) -> None:
        super().__init__()
        for name in "AB":
            self.add(name)
        self.run(-START_S * 1000)
        self.reported.clear()

    def add(self, name: str) -> None:
        client = self.clients[name] = Client(self, name, Timers(60_000))
        client.connect()

    def play(self, events: list[list[Any]]) -> None:
        doings: dict[str, Callable[[str], None]] = {
            "writes": lambda name: self.clients[name].write(),
            "joins": self.add,
            "dies": lambda name: self.clients[name].die(),
        }
        for seconds, sentence in events:
            name, verb = sentence.split()
            self.at(self.ms(seconds), lambda name=name, verb=verb: doings[verb](name))  # type: ignore[misc]

    @staticmethod
    def ms(seconds: int) -> int:
        return (seconds - START_S) * 1000

    def seen(self) -> list[tuple[float, str]]:
        return [(at / 1000 + START_S, text) for at, text in self.reported]


CASES = {case["name"]: case for case in VECTORS["cases"]}


@pytest.mark.parametrize("name", [name for name in CASES if name != "stale push"])  # that one is the store's to refuse
def test_claims_go_as_the_vectors_say(name: str) -> None:
    case = CASES[name]
    world = VectorWorld()
    world.play(case["events"])
    for when, sentence in case["expect"]:
        if sentence == "A's claim is gone":
            world.run(world.ms(when) - 1)
            assert world.registry.holder(world.now) == "A"
            world.run(world.ms(when))
            assert world.registry.holder(world.now) != "A"
    world.run()
    seen = world.seen()
    for when, sentence in case["expect"]:
        if when == "after A's push":
            assert sentence == "B may claim and push"
            of_b = [each for each in seen if each[1].startswith(("B sends CLAIM", "B pushes"))]
            assert of_b[-2][1].startswith("B sends CLAIM")
            assert of_b[-1][1] == "B pushes"
            assert seen.index(of_b[-1]) > seen.index((60, "A releases"))
        elif sentence.endswith(" claims"):
            assert [at for at, text in seen if text.startswith(sentence.replace("claims", "sends CLAIM"))] == [when]
        elif sentence != "A's claim is gone":
            assert (when, sentence) in seen
    expected_claims = [(when, text) for when, text in case["expect"] if text.startswith("A sends")]
    if expected_claims:
        assert [(at, text) for at, text in seen if text.startswith("A sends")] == expected_claims


def test_one_write_makes_no_other_claim_traffic_than_its_own() -> None:
    world = VectorWorld()
    world.play(CASES["one write"]["events"])
    world.run()
    of_b = [(0, "B gets CLAIM 60"), (60, "B gets RELEASE")]
    expected = [tuple(each) for each in CASES["one write"]["expect"]]
    assert [each for each in world.seen() if each not in of_b] == expected
    assert set(of_b) <= set(world.seen())


# --- any traffic ----------------------------------------------------------------------------------------------------

OPERATIONS = st.sampled_from(["write"] * 5 + ["disconnect", "connect", "fail"])
TRAFFIC = st.lists(st.tuples(st.integers(0, 25_000), st.sampled_from("AB"), OPERATIONS), max_size=30)


@st.composite
def some_timers(draw: st.DrawFn) -> Timers:
    idle_ms = draw(st.sampled_from([1_000, 3_000, 30_000, 60_000]))
    min_ms = draw(st.sampled_from([0, 1_000, 45_000]))
    return Timers(idle_ms, min_ms, max(idle_ms, min_ms) + draw(st.sampled_from([0, 10_000, 3_600_000])))


def simulated(
    traffic: list[tuple[int, str, str]],
    timers: Timers,
    coordinate: str,
    seed: int,
    latency_ms_max: int,
    push_ms_max: int,
) -> World:
    dice = random.Random(seed)
    world = World(lambda: dice.randint(0, latency_ms_max), lambda: dice.randint(0, push_ms_max))
    for name in "AB":
        world.clients[name] = Client(world, name, timers, name in coordinate)
    for client in world.clients.values():
        client.connect()
    now = 0
    for after, name, operation in traffic:
        now += after
        client = world.clients[name]
        world.at(
            now,
            {"write": client.write, "connect": client.connect, "disconnect": client.disconnect}.get(
                operation,
                lambda client=client: setattr(client, "fails_next", 2),  # type: ignore[misc]
            ),
        )
    world.run()
    return world


@settings(deadline=None, max_examples=150)
@given(
    TRAFFIC,
    some_timers(),
    st.sampled_from(["AB", "A", ""]),
    st.integers(0, 9),
    st.sampled_from([0, 1_500]),
    st.sampled_from([0, 500, 90_000]),
)
def test_every_write_is_pushed_and_no_two_push_at_once(
    traffic: list[tuple[int, str, str]], timers: Timers, coordinate: str, seed: int, latency_ms: int, push_ms: int
) -> None:
    world = simulated(traffic, timers, coordinate, seed, latency_ms, push_ms)
    lead_ms = min(10_000, timers.wait_idle_ms // 2)
    for client in world.clients.values():
        arrived = [push for push in client.pushes if push["ok"]]
        assert arrived, "the push at the start"
        assert all(push["end"] is not None for push in client.pushes)
        assert not client.writes or arrived[-1]["start"] >= client.writes[-1], "a write that no push follows"
        assert len(client.pushes) <= 1 + len(client.writes) + sum(not push["ok"] for push in client.pushes)
        assert all(second - first >= lead_ms for first, second in itertools.pairwise(client.claims)), (
            "a storm of claims"
        )
        if client.name not in coordinate:
            assert not client.claims
    if coordinate == "AB":
        of_a, of_b = (client.pushes for client in world.clients.values())
        for one, other in itertools.product(of_a, of_b):
            overlap = max(one["start"], other["start"]) < min(one["end"], other["end"])
            assert not (overlap and one["polite"] and other["polite"]), (one, other)


# --- single decisions -----------------------------------------------------------------------------------------------


def schedule_after_its_first_push(*, coordinate: bool, timers: Timers | None = None) -> PushSchedule:
    schedule = PushSchedule(timers or Timers(60_000), coordinate, 0, lambda: 0.0)
    schedule.connected(0)
    if coordinate:
        assert schedule.step(0) == [Claim(1_000)]
        schedule.granted(0)
    assert schedule.step(0) == [Push()]
    schedule.push_ended(0, ok=True)
    assert schedule.step(0) == ([Release()] if coordinate else [])
    assert schedule.wake_ms() is None
    return schedule


def test_it_pushes_at_the_start_without_waiting_for_idle() -> None:
    schedule_after_its_first_push(coordinate=False)
    schedule_after_its_first_push(coordinate=True)


def test_the_first_push_waits_a_little_for_a_connection_to_claim_through() -> None:
    schedule = PushSchedule(Timers(60_000), True, 0, lambda: 0.0)
    assert (schedule.step(0), schedule.wake_ms()) == ([], 5_000)
    assert schedule.step(5_000) == [Push()]


def test_a_push_that_is_wanted_comes_whatever_the_timers_say_and_in_its_turn() -> None:
    schedule = schedule_after_its_first_push(coordinate=True)
    schedule.claimed_by_other(70_000, 5_000)
    schedule.want_push(70_000)
    assert schedule.owes_push
    assert (schedule.step(70_000), schedule.wake_ms()) == ([], 75_000)
    assert schedule.step(75_000) == [Claim(1_000)]
    schedule.granted(75_000)
    assert schedule.step(75_000) == [Push()]
    assert schedule.owes_push
    schedule.push_ended(75_500, ok=False)
    assert (schedule.owes_push, schedule.retry_ms) == (True, 76_500)
    schedule.want_push(75_600)  # now is now
    assert schedule.step(75_600) == [Release()]
    assert schedule.step(86_000) == [Claim(1_000)]
    schedule.granted(86_000)
    assert schedule.step(86_000) == [Push()]
    schedule.push_ended(86_100, ok=True)
    assert not schedule.owes_push


def test_a_push_that_is_wanted_while_one_runs_is_another_one() -> None:
    schedule = schedule_after_its_first_push(coordinate=False)
    schedule.want_push(100)
    assert schedule.step(100) == [Push()]
    schedule.want_push(200)
    assert schedule.step(200) == []
    schedule.push_ended(300, ok=True)
    assert schedule.owes_push
    assert schedule.step(300) == [Push()]


def test_without_coordination_it_tells_of_the_first_write_only() -> None:
    schedule = schedule_after_its_first_push(coordinate=False)
    schedule.wrote(70_000)
    assert schedule.step(70_000) == [Changed(60_000)]
    schedule.wrote(100_000)
    assert (schedule.step(100_000), schedule.wake_ms()) == ([], 160_000)
    assert schedule.step(160_000) == [Push()]
    schedule.wrote(160_500)  # while it pushes
    assert (schedule.step(160_500), schedule.wake_ms()) == ([], None)
    schedule.push_ended(161_000, ok=True)
    assert (schedule.step(161_000), schedule.wake_ms()) == ([Changed(59_500)], 220_500)


def test_failed_pushes_back_off_to_five_minutes_and_recover() -> None:
    schedule = schedule_after_its_first_push(coordinate=False)
    schedule.wrote(0)
    schedule.step(0)
    now = 60_000
    waits = []
    for _ in range(11):
        assert schedule.step(now - 1) == []
        assert schedule.step(now) == [Push()]
        schedule.push_ended(now, ok=False)
        schedule.step(now)
        wake_ms = schedule.wake_ms()
        assert wake_ms is not None
        waits.append((wake_ms - now) // 1000)
        now = wake_ms
    assert waits == [1, 2, 4, 8, 16, 32, 64, 128, 256, 300, 300]
    assert schedule._failures == 11
    assert schedule.step(now) == [Push()]
    schedule.push_ended(now, ok=True)
    assert (schedule.step(now), schedule.wake_ms(), schedule._failures) == ([], None, 0)


def test_a_turn_is_given_up_while_it_backs_off() -> None:
    schedule = schedule_after_its_first_push(coordinate=True)
    schedule.wrote(100_000)
    assert schedule.step(100_000) == [Claim(60_000)]
    schedule.granted(100_000)
    assert schedule.step(160_000) == [Push()]
    schedule.push_ended(160_000, ok=False)
    assert (schedule.step(160_000), schedule.wake_ms()) == ([Release()], 161_000)
    assert schedule.step(161_000) == [Claim(1_000)]
    schedule.granted(161_000)
    assert schedule.step(161_000) == [Push()]


def test_an_unanswered_claim_holds_a_push_up_for_ten_seconds_at_most() -> None:
    schedule = schedule_after_its_first_push(coordinate=True, timers=Timers(2_000))
    schedule.wrote(100_000)
    assert (schedule.step(100_000), schedule.wake_ms()) == ([Claim(2_000)], 110_000)
    assert schedule.step(110_000) == [Push()]


def test_a_write_after_the_check_still_extends_the_claim() -> None:
    schedule = schedule_after_its_first_push(coordinate=True)
    schedule.wrote(100_000)
    schedule.step(100_000)
    schedule.granted(100_000)
    assert (schedule.step(150_000), schedule.wake_ms()) == ([], 160_000)
    schedule.wrote(155_000)
    assert (schedule.step(155_000), schedule.wake_ms()) == ([Claim(60_000)], 215_000)


def test_a_claim_slept_through_is_asked_for_again() -> None:
    schedule = schedule_after_its_first_push(coordinate=True)
    schedule.wrote(100_000)
    schedule.step(100_000)
    schedule.granted(100_000)
    assert schedule.step(900_000) == [Claim(1_000)]


def test_cut_off_it_pushes_without_a_claim_and_gives_back_what_it_held() -> None:
    schedule = schedule_after_its_first_push(coordinate=True)
    schedule.wrote(100_000)
    schedule.step(100_000)
    schedule.granted(100_000)
    schedule.disconnected(120_000)
    assert schedule.step(120_000) == []
    assert schedule.step(160_000) == [Push()]
    schedule.push_ended(161_000, ok=True)
    assert schedule.step(161_000) == []
    schedule.connected(170_000)
    assert schedule.step(170_000) == [Release()]
    schedule.granted(170_001)  # an answer that comes too late
    schedule.wrote(170_002)
    assert schedule.step(170_002) == [Claim(60_000)]


def test_nothing_is_claimed_or_pushed_while_another_holds() -> None:
    schedule = schedule_after_its_first_push(coordinate=True)
    schedule.claimed_by_other(100_000, 90_000)
    schedule.wrote(100_000)
    assert (schedule.step(100_000), schedule.wake_ms()) == ([], 190_000)
    assert schedule.step(189_999) == []
    schedule.released_by_other(189_999)
    assert schedule.step(189_999) == [Claim(1_000)]
    schedule.claimed_by_other(190_000, 0)  # a server that says so again and again
    for now in range(190_000, 199_000, 1_000):
        assert schedule.step(now) == []
