"""What every dedupe queue must do. Beginning decides which handler gets a message; finishing records it."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import apsw
import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings

from headwater import ManualClock, open_dedupe
from headwater.errors import ClosedError, InvalidOptionError
from headwater.ports.dedupe import DedupeQueue

Open = Callable[..., DedupeQueue]
SHARED = ("sqlite", "postgres", "redis")
PATIENCE_S = 30
CLAIM_MS = 1_000

everywhere = pytest.mark.parametrize("url", ["memory", *SHARED], indirect=True)
between_processes = pytest.mark.parametrize("url", SHARED, indirect=True)


@everywhere
def test_the_first_handles_it_the_second_finds_it_busy_and_the_third_done(open_queue: Open, clock: ManualClock) -> None:
    queue = open_queue()
    assert queue.begin("h", "a", clock.now_ms(), CLAIM_MS) == "first"
    assert queue.begin("h", "a", clock.now_ms(), CLAIM_MS) == "busy"
    assert not queue.contains("h", "a")
    queue.finish("h", "a")
    assert queue.begin("h", "a", clock.now_ms(), CLAIM_MS) == "done"
    assert queue.contains("h", "a")


@everywhere
def test_a_claim_that_ran_out_can_be_taken_and_not_a_moment_sooner(open_queue: Open, clock: ManualClock) -> None:
    queue = open_queue()
    queue.begin("h", "a", clock.now_ms(), CLAIM_MS)
    clock.advance((CLAIM_MS - 1) / 1000)
    assert queue.begin("h", "a", clock.now_ms(), CLAIM_MS) == "busy"
    clock.advance(0.001)
    assert queue.begin("h", "a", clock.now_ms(), CLAIM_MS) == "first"
    assert queue.begin("h", "a", clock.now_ms(), CLAIM_MS) == "busy"


@everywhere
def test_a_claim_is_extended_by_its_owner_while_it_lasts(open_queue: Open, clock: ManualClock) -> None:
    queue, began_ms = open_queue(), clock.now_ms()
    assert not queue.extend("h", "a", began_ms, CLAIM_MS)
    queue.begin("h", "a", began_ms, CLAIM_MS)
    clock.advance((CLAIM_MS - 1) / 1000)
    assert queue.extend("h", "a", clock.now_ms(), CLAIM_MS)
    assert queue.entries("h") == [("a", began_ms, clock.now_ms() + CLAIM_MS)]
    clock.advance((CLAIM_MS - 1) / 1000)
    assert queue.begin("h", "a", clock.now_ms(), CLAIM_MS) == "busy"
    queue.finish("h", "a")
    assert not queue.extend("h", "a", clock.now_ms(), CLAIM_MS)


@between_processes
def test_a_claim_is_extended_by_its_owner_only(open_queue: Open, clock: ManualClock) -> None:
    first, second = open_queue(), open_queue()
    first.begin("h", "a", clock.now_ms(), CLAIM_MS)
    assert not second.extend("h", "a", clock.now_ms(), CLAIM_MS * 9)
    clock.advance(CLAIM_MS / 1000)
    assert second.begin("h", "a", clock.now_ms(), CLAIM_MS) == "first"


@everywhere
def test_after_a_failure_the_next_delivery_is_first_again(open_queue: Open, clock: ManualClock) -> None:
    queue = open_queue()
    queue.begin("h", "a", clock.now_ms(), CLAIM_MS)
    queue.release("h", "a")
    assert queue.entries("h") == []
    assert queue.begin("h", "a", clock.now_ms(), CLAIM_MS) == "first"


@everywhere
def test_what_is_done_cannot_be_released(open_queue: Open, clock: ManualClock) -> None:
    queue = open_queue()
    queue.begin("h", "a", clock.now_ms(), CLAIM_MS)
    queue.finish("h", "a")
    queue.release("h", "a")
    assert queue.contains("h", "a")


@everywhere
def test_releasing_or_finishing_what_was_never_begun_harms_nothing(open_queue: Open) -> None:
    queue = open_queue()
    queue.release("h", "a")
    assert not queue.contains("h", "a")
    queue.finish("h", "a")
    assert queue.contains("h", "a")


@between_processes
def test_a_late_worker_cannot_release_the_claim_of_another(open_queue: Open, clock: ManualClock) -> None:
    late, other = open_queue(), open_queue()
    late.begin("h", "a", clock.now_ms(), CLAIM_MS)
    clock.advance(CLAIM_MS / 1000)
    assert other.begin("h", "a", clock.now_ms(), CLAIM_MS) == "first"
    late.release("h", "a")
    assert late.begin("h", "a", clock.now_ms(), CLAIM_MS) == "busy"


@between_processes
def test_a_late_worker_that_got_there_has_handled_it_all_the_same(open_queue: Open, clock: ManualClock) -> None:
    late, other = open_queue(), open_queue()
    late.begin("h", "a", clock.now_ms(), CLAIM_MS)
    clock.advance(CLAIM_MS / 1000)
    other.begin("h", "a", clock.now_ms(), CLAIM_MS)
    late.finish("h", "a")
    assert other.begin("h", "a", clock.now_ms(), CLAIM_MS) == "done"
    other.release("h", "a")
    assert other.contains("h", "a")


@between_processes
def test_what_is_done_is_still_known_after_a_restart(open_queue: Open) -> None:
    queue = open_queue()
    queue.add("h", "a")
    queue.close()
    assert open_queue().contains("h", "a")


@everywhere
def test_adding_tells_whether_it_was_new(open_queue: Open, clock: ManualClock) -> None:
    queue = open_queue()
    assert queue.add("h", "a") is True
    assert queue.add("h", "a") is False
    queue.begin("h", "b", clock.now_ms(), CLAIM_MS)
    assert queue.add("h", "b") is False  # it is being handled
    clock.advance(CLAIM_MS / 1000)
    assert queue.add("h", "b") is True


@everywhere
def test_of_four_in_a_queue_of_three_the_first_is_forgotten(open_queue: Open) -> None:
    queue = open_queue(max_count=3)
    for id in "abcd":
        assert queue.add("h", id)
    assert [entry.id for entry in queue.entries("h")] == ["b", "c", "d"]
    assert not queue.contains("h", "a")
    assert queue.add("h", "a") is True
    assert [entry.id for entry in queue.entries("h")] == ["c", "d", "a"]


@everywhere
def test_when_the_clock_is_set_back_the_last_are_still_those_that_are_remembered(
    open_queue: Open, clock: ManualClock
) -> None:
    queue = open_queue(max_count=2)
    queue.begin("h", "last", clock.now_ms(), 10 * CLAIM_MS)  # begun first, done last
    queue.add("h", "a")
    queue.add("h", "b")
    clock.advance(-CLAIM_MS / 1000)
    queue.add("h", "c")
    queue.finish("h", "last")
    assert [id for id in ("a", "b", "c", "last") if queue.contains("h", id)] == ["c", "last"]


@everywhere
def test_what_is_being_handled_is_not_forgotten_however_many_are_done(open_queue: Open, clock: ManualClock) -> None:
    queue = open_queue(max_count=1)
    queue.begin("h", "long", clock.now_ms(), CLAIM_MS)
    for id in "abc":
        queue.begin("h", id, clock.now_ms(), CLAIM_MS)
        queue.finish("h", id)
    assert queue.begin("h", "long", clock.now_ms(), CLAIM_MS) == "busy"
    clock.advance(0.001)
    queue.finish("h", "long")
    assert [entry.id for entry in queue.entries("h")] == ["long"]


@everywhere
def test_what_was_done_too_long_ago_counts_as_never_seen(open_queue: Open, clock: ManualClock) -> None:
    queue = open_queue(max_age=60)
    queue.add("h", "a")
    clock.advance(59.999)
    queue.add("h", "b")
    assert queue.contains("h", "a")
    clock.advance(0.001)
    assert not queue.contains("h", "a")
    assert [entry.id for entry in queue.entries("h")] == ["b"]
    assert queue.stats().done == 1
    assert queue.begin("h", "a", clock.now_ms(), CLAIM_MS) == "first"


@everywhere
def test_abandoned_claims_are_forgotten_too(open_queue: Open, clock: ManualClock) -> None:
    queue = open_queue(max_age=60, max_count=3)
    queue.begin("h", "abandoned", clock.now_ms(), CLAIM_MS)
    clock.advance((60_000 + CLAIM_MS) / 1000)
    queue.add("h", "a")
    assert [entry.id for entry in queue.entries("h")] == ["a"]


@everywhere
def test_handlers_do_not_know_of_each_other(open_queue: Open) -> None:
    queue = open_queue(max_count=2)
    assert queue.add("h", "a")
    assert queue.add("i", "a")
    queue.add("i", "b")
    queue.add("i", "c")
    assert queue.contains("h", "a")
    assert not queue.contains("i", "a")


@everywhere
def test_entries_and_statistics_tell_what_is_done_and_what_begun(open_queue: Open, clock: ManualClock) -> None:
    queue = open_queue(max_count=5, max_age=60)
    start_ms = clock.now_ms()
    queue.add("h", "a")
    clock.advance(0.001)
    queue.begin("h", "b", clock.now_ms(), CLAIM_MS)
    clock.advance(0.001)
    queue.add("i", "c")
    queue.add("i", "c")
    queue.begin("h", "b", clock.now_ms(), CLAIM_MS)
    assert queue.entries("h") == [("a", start_ms, None), ("b", start_ms + 1, start_ms + 1 + CLAIM_MS)]
    assert queue.entries("nobody") == []
    all_of_it = queue.stats()
    assert (all_of_it.handlers, all_of_it.done, all_of_it.begun, all_of_it.oldest_ms) == (2, 2, 1, start_ms)
    assert (all_of_it.max_count, all_of_it.max_age_ms) == (5, 60_000)
    assert (all_of_it.first, all_of_it.duplicates, all_of_it.busy) == (3, 1, 1)
    assert queue.stats("i")[:4] == (1, 1, 0, start_ms + 2)
    assert queue.stats("nobody")[:4] == (0, 0, 0, None)


@everywhere
def test_clearing_forgets_one_handler_or_all(open_queue: Open, clock: ManualClock) -> None:
    queue = open_queue()
    queue.add("h", "a")
    queue.begin("h", "b", clock.now_ms(), CLAIM_MS)
    queue.add("i", "a")
    queue.add("j", "a")
    assert queue.clear("h") == 2
    assert not queue.contains("h", "a")
    assert queue.contains("i", "a")
    assert queue.clear() == 2
    assert queue.clear() == 0


@everywhere
def test_sizes_and_ids_that_cannot_be_are_refused(open_queue: Open, clock: ManualClock) -> None:
    for wrong in ({"max_count": 0}, {"max_count": 1.5}, {"max_age": 0}, {"max_age": -1}, {"max_age": "an hour"}):
        with pytest.raises(InvalidOptionError):
            open_queue(**wrong)
    queue = open_queue()
    wrong_texts: list[Any] = ["", None, 5, b"a", "a\0b", "\ud800", "x" * 513]
    for text in wrong_texts:
        with pytest.raises(InvalidOptionError):
            queue.add("h", text)
        with pytest.raises(InvalidOptionError):
            queue.add(text, "a")
    with pytest.raises(InvalidOptionError):
        queue.begin("h", "a", clock.now_ms(), 0)
    assert queue.stats().done == 0


@everywhere
def test_a_closed_queue_says_so(open_queue: Open) -> None:
    queue = open_queue()
    queue.close()
    queue.close()
    with pytest.raises(ClosedError):
        queue.add("h", "a")


@everywhere
def test_of_racing_threads_one_is_first_at_each(open_queue: Open, clock: ManualClock) -> None:
    queue = open_queue()
    firsts: list[int] = []
    together = threading.Barrier(4)

    def worker() -> None:
        together.wait(PATIENCE_S)
        for number in range(50):
            if queue.begin("h", str(number), clock.now_ms(), CLAIM_MS) == "first":
                firsts.append(number)
                queue.finish("h", str(number))

    threads = [threading.Thread(target=worker) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert sorted(firsts) == list(range(50))


@between_processes
def test_of_racing_processes_one_is_first_at_each(url: str) -> None:
    count = 100
    script = Path(__file__).with_name("racing_worker.py")
    workers = [
        subprocess.Popen(
            [sys.executable, str(script), url, str(count)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    try:
        for worker in workers:
            assert worker.stdout is not None
            assert worker.stdout.readline() == "ready\n"
        for worker in workers:
            assert worker.stdin is not None
            worker.stdin.write("go\n")
            worker.stdin.flush()
        firsts = [line for worker in workers for line in worker.communicate(timeout=PATIENCE_S)[0].split()]
    finally:
        for worker in workers:
            worker.kill()
            worker.wait(PATIENCE_S)
    assert sorted(map(int, firsts)) == list(range(count))


def test_a_file_that_another_process_is_making_is_waited_for(tmp_path: Path) -> None:
    """A change of the journal mode does not wait by itself."""
    path, opened = str(tmp_path / "dedupe.db"), threading.Event()

    def open_it() -> None:
        with open_dedupe(path):
            opened.set()

    with closing(apsw.Connection(path)) as maker:
        maker.execute("BEGIN IMMEDIATE; CREATE TABLE other (x)").fetchall()
        opening = threading.Thread(target=open_it)
        opening.start()
        assert not opened.wait(0.1)
        assert opening.is_alive()
        maker.execute("ROLLBACK")
    assert opened.wait(PATIENCE_S)
    opening.join(PATIENCE_S)


class Model:
    """The same in a few lines, for one handler."""

    def __init__(self, max_count: int, max_age_ms: int) -> None:
        self.max_count, self.max_age_ms = max_count, max_age_ms
        self.done: dict[str, int] = {}
        self.begun: dict[str, int] = {}

    def begin(self, id: str, now_ms: int) -> str:
        if id in self.done and self.done[id] > now_ms - self.max_age_ms:
            return "done"
        if id in self.begun and self.begun[id] > now_ms:
            return "busy"
        self.done.pop(id, None)
        self.begun[id] = now_ms + CLAIM_MS
        return "first"

    def finish(self, id: str, now_ms: int) -> None:
        self.begun.pop(id, None)
        self.done.pop(id, None)
        self.done[id] = now_ms
        alive = {each: at_ms for each, at_ms in self.done.items() if at_ms > now_ms - self.max_age_ms}
        self.done = dict(list(alive.items())[-self.max_count :])

    def contains(self, id: str, now_ms: int) -> bool:
        return id in self.done and self.done[id] > now_ms - self.max_age_ms


_steps = st.lists(
    st.tuples(
        st.sampled_from(["begin", "finish", "release", "add", "contains", "wait"]), st.sampled_from("abcde"),
        st.integers(1, 2_500),
    ),
    max_size=40,
)  # fmt: skip


@everywhere
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=_steps)
def test_whatever_happens_in_whatever_order_it_answers_as_the_model(
    open_queue: Open, clock: ManualClock, model_queue: list[DedupeQueue], steps: list[tuple[str, str, int]]
) -> None:
    if not model_queue:
        model_queue.append(open_queue(max_count=2, max_age=3))
    queue = model_queue[0]
    queue.clear()
    model = Model(2, 3_000)
    for step, id, ms in steps:
        clock.advance(0.001)  # so that which is the older is never a matter of taste
        now_ms = clock.now_ms()
        if step == "begin":
            assert queue.begin("h", id, now_ms, CLAIM_MS) == model.begin(id, now_ms)
        elif step == "add":
            is_new = model.begin(id, now_ms) == "first"
            if is_new:
                model.finish(id, now_ms)
            assert queue.add("h", id) is is_new
        elif step == "finish":
            queue.finish("h", id)
            model.finish(id, now_ms)
        elif step == "release":
            queue.release("h", id)
            model.begun.pop(id, None)
        elif step == "contains":
            assert queue.contains("h", id) is model.contains(id, now_ms)
        else:
            clock.advance(ms / 1000)
    done = [entry.id for entry in queue.entries("h") if entry.until_ms is None]
    assert done == [id for id in model.done if model.contains(id, clock.now_ms())]


@pytest.fixture
def model_queue() -> list[DedupeQueue]:
    """One queue for all examples."""
    return []
