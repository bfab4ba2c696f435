"""Group commit: works that wait together are committed together, and one that fails, fails alone."""

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from headwater import ManualClock
from headwater.broker.committer import GROUP_BYTES_MAX, GROUP_WORKS_MAX, Committer
from headwater.broker.flow import Completion
from headwater.broker.wakeups import Wakeups
from headwater.delivery.publishing import DedupeWindow
from headwater.errors import ClosedError, DiskFullError, StoreError, UnknownSubscriptionError
from headwater.message import Draft
from headwater.ports.store import PUBLISHING
from headwater.stores.sqlite import MemoryStore


class Gate:
    """A store whose transactions wait at a gate, and tell what was in them. `failing`: the next commits fail."""

    def __init__(self) -> None:
        self.store = MemoryStore()
        self.commits = 0
        self.failing = 0
        self.error: type[StoreError] = StoreError
        self._open = threading.Event()
        self.arrived = threading.Semaphore(0)
        write = self.store.write

        @contextmanager
        def gated(*arguments: Any, **options: Any) -> Iterator[Any]:
            self.arrived.release()
            assert self._open.wait(30)
            with write(*arguments, **options) as writer:
                yield writer
                if self.failing:
                    self.failing -= 1
                    raise self.error("no")
            self.commits += 1

        self.store.write = gated  # type: ignore[method-assign]

    def open(self) -> None:
        self._open.set()


class Desk:
    """A committer behind a gate. `hold()` keeps the writer busy, so that what follows becomes one group."""

    def __init__(self) -> None:
        self.gate = Gate()
        self.announced: list[tuple[set[str], int, int]] = []
        wakeups = Wakeups()
        wakeups.published = lambda *news: self.announced.append(news)  # type: ignore[method-assign]
        self.committer = Committer(self.gate.store, ManualClock(), DedupeWindow(), wakeups)

    def hold(self) -> None:
        self.committer.submit(lambda writer, hooks: None)
        assert self.gate.arrived.acquire(timeout=30)

    def publish(self, *topics: str, id: str | None = None) -> Completion[Any]:
        drafts = [Draft(topic, "1", 1, id) for topic in topics]
        return self.committer.submit(drafts, len(drafts), bytes=len(drafts), touching=PUBLISHING)

    def publish_one(self, draft: Draft) -> Completion[Any]:
        return self.committer.submit(draft, bytes=draft.size, touching=PUBLISHING)


@pytest.fixture
def desk() -> Iterator[Desk]:
    desk = Desk()
    yield desk
    desk.gate.open()
    desk.committer.close()


def outcome(completion: Completion[Any]) -> Any:
    assert completion.wait(30)
    return completion.result()


def refuse(writer: Any, hooks: Any) -> None:
    raise UnknownSubscriptionError("no such thing")


def append(writer: Any) -> None:
    writer.append([Draft("written", "1", 1)], 0, DedupeWindow())


def test_what_waits_together_is_one_commit(desk: Desk) -> None:
    desk.hold()
    completions = [desk.publish("a") for _ in range(50)]
    works = [desk.committer.submit(lambda writer, hooks: writer.last_seq()) for _ in range(3)]
    desk.gate.open()
    assert [outcome(completion) for completion in completions] == [[seq] for seq in range(1, 51)]
    assert [outcome(work) for work in works] == [50, 50, 50], "each sees what came before it in its group"
    assert desk.gate.commits == 2, "the one that was held, and the group"


def test_a_group_has_a_limit(desk: Desk) -> None:
    desk.hold()
    completions = [desk.publish("a") for _ in range(GROUP_WORKS_MAX + 1)]
    desk.gate.open()
    assert outcome(completions[-1]) == [GROUP_WORKS_MAX + 1]
    assert desk.gate.commits == 3


def test_a_group_has_a_limit_in_bytes(desk: Desk) -> None:
    desk.hold()
    large = Draft("a", "1", GROUP_BYTES_MAX // 2)
    completions = [desk.publish_one(large) for _ in range(6)]
    desk.gate.open()
    assert [outcome(completion) for completion in completions] == [1, 2, 3, 4, 5, 6]
    assert desk.gate.commits == 4


class Written:
    """What was written, and how much of it when the work was that came last into the queue."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self.works: list[tuple[str, int]] = []

    def queue(self, source: str, count: int, bytes: int) -> Completion[int]:
        def work(number: int) -> Callable[[Any, Any], int]:
            return lambda writer, hooks: self.works.append((source, number)) or len(self.works)

        return [self._desk.committer.submit(work(n), bytes=bytes, source=source) for n in range(count)][-1]


def test_a_source_with_little_to_write_does_not_wait_for_one_with_much(desk: Desk) -> None:
    written = Written(desk)
    desk.hold()
    written.queue("much", 100, GROUP_BYTES_MAX)
    last = written.queue("little", 50, 100)
    desk.gate.open()
    assert outcome(last) == 51, "behind the group that was full before it came"


def test_sources_take_turns_by_bytes_and_each_keeps_its_order(desk: Desk) -> None:
    written = Written(desk)
    desk.hold()
    written.queue("large", 64, GROUP_BYTES_MAX // 4)
    done = outcome(_opened(desk, written.queue("small", 64, GROUP_BYTES_MAX // 16)))
    works = written.works[:done]
    large = [number for source, number in works if source == "large"]
    assert large == list(range(len(large)))
    assert [number for source, number in works if source == "small"] == list(range(64))
    assert 16 <= len(large) <= 24, "a quarter as many as of the small ones, and the first group"


def _opened(desk: Desk, completion: Completion[int]) -> Completion[int]:
    desk.gate.open()
    return completion


def test_no_completion_before_the_commit(desk: Desk) -> None:
    desk.hold()
    completion = desk.publish("a")
    assert not completion.done
    assert desk.announced == []
    desk.gate.open()
    outcome(completion)
    assert desk.announced == [({"a"}, 1, 1)]


def test_news_name_topics_and_seqs_of_the_group_and_leave_repeats_out(desk: Desk) -> None:
    desk.hold()
    completions = [desk.publish("a", id="x"), desk.publish("b", "c"), desk.publish("a", id="x")]
    desk.gate.open()
    assert [outcome(completion) for completion in completions] == [[1], [2, 3], [1]]
    assert desk.announced == [({"a", "b", "c"}, 1, 3)]
    outcome(desk.publish("a", id="x"))
    assert len(desk.announced) == 1, "nothing new, nothing to tell"


def test_one_message_has_one_seq_as_its_outcome(desk: Desk) -> None:
    desk.hold()
    single, several = desk.publish_one(Draft("a", "1", 1, "x")), desk.publish("a", "b")
    again = desk.publish_one(Draft("a", "1", 1, "x"))
    desk.gate.open()
    assert (outcome(single), outcome(several), outcome(again)) == (1, [2, 3], 1)


def test_a_refusal_reaches_its_caller_and_delays_no_other(desk: Desk) -> None:
    desk.hold()
    before, refused, after = desk.publish("a"), desk.committer.submit(refuse), desk.publish("a")
    desk.gate.open()
    assert (outcome(before), outcome(after)) == ([1], [2])
    with pytest.raises(UnknownSubscriptionError):
        outcome(refused)
    assert desk.gate.commits == 2


def test_a_work_that_breaks_fails_alone(desk: Desk) -> None:
    def broken(writer: Any, hooks: Any) -> None:
        append(writer)
        raise ZeroDivisionError

    desk.hold()
    before, bad, after = desk.publish("a"), desk.committer.submit(broken), desk.publish("a")
    desk.gate.open()
    assert (outcome(before), outcome(after)) == ([1], [2]), "what it had written was taken back"
    with pytest.raises(ZeroDivisionError):
        outcome(bad)


def test_a_failed_group_is_taken_back_in_memory_and_tried_one_by_one(desk: Desk) -> None:
    memory: list[str] = []

    def remember(what: str) -> Callable[[Any, Any], None]:
        def work(writer: Any, hooks: Any) -> None:
            memory.append(what)
            hooks.append(lambda: memory.remove(what) if memory[-1] == what else pytest.fail("undone out of order"))

        return work

    desk.hold()
    completions = [desk.committer.submit(remember(what)) for what in ("one", "two", "three")]
    published = desk.publish("a")
    desk.gate.failing = 2  # the one that is held, and the group
    desk.gate.open()
    for completion in completions:
        outcome(completion)
    assert outcome(published) == [1]
    assert memory == ["one", "two", "three"]


def test_a_disk_that_stays_full_fails_every_work_and_the_writer_lives_on(desk: Desk) -> None:
    desk.hold()
    completions = [desk.publish("a") for _ in range(3)]
    desk.gate.failing, desk.gate.error = 1_000, DiskFullError
    desk.gate.open()
    for completion in completions:
        with pytest.raises(DiskFullError):
            outcome(completion)
    assert desk.announced == []
    desk.gate.failing = 0
    assert outcome(desk.publish("a")) == [1]


def test_a_callback_that_fails_after_the_commit_costs_neither_the_others_nor_the_answer(
    desk: Desk, caplog: pytest.LogCaptureFixture
) -> None:
    done: list[str] = []

    def work(writer: Any, hooks: Any) -> int:
        hooks.then += [lambda: done.append("before"), lambda: 1 / 0, lambda: done.append("behind")]
        return 7

    desk.gate.open()
    assert outcome(desk.committer.submit(work)) == 7
    assert done == ["before", "behind"]
    assert "ZeroDivisionError" in caplog.text


@pytest.mark.parametrize("kind", [UnknownSubscriptionError, StoreError], ids=["refused", "broken"])
def test_a_failed_work_is_not_kept(desk: Desk, kind: type[Exception]) -> None:
    """Its error refers to the frames that ran it, and these to its completion, which has the error."""
    desk.gate.open()
    kept: list[weakref.ref[Exception]] = []

    def fail(writer: Any, hooks: Any) -> None:
        error = kind("no")
        kept.append(weakref.ref(error))
        raise error

    for work in (fail, lambda writer, hooks: None):  # the writer has the last group at hand until the next one
        desk.committer.submit(work).wait(30)
    gc.collect()

    assert kept[0]() is None


def test_closing_finishes_what_is_queued(desk: Desk) -> None:
    desk.hold()
    completions = [desk.publish("a") for _ in range(10)]
    closing = threading.Thread(target=desk.committer.close)
    closing.start()
    desk.gate.open()
    closing.join(30)
    assert [outcome(completion)[0] for completion in completions] == list(range(1, 11))
    with pytest.raises(ClosedError):
        desk.publish("a")
    with pytest.raises(ClosedError):
        desk.committer.submit(refuse)


def test_many_threads_get_their_own_seqs(desk: Desk) -> None:
    desk.gate.open()
    seqs: list[int] = []

    def publish() -> None:
        for _ in range(50):
            seqs.extend(outcome(desk.publish("a", "b")))

    threads = [threading.Thread(target=publish) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sorted(seqs) == list(range(1, 801))
