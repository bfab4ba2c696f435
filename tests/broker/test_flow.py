"""One flow, two drivers: what a use case sees is the same under threads and under an event loop."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from headwater.broker.flow import Blocking, Call, Completion, Flow, WaitFor, complete, run_async, run_blocking


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as pool:
        yield pool


@pytest.fixture(params=["blocking", "async"])
def drive(request: pytest.FixtureRequest) -> Callable[[Flow[Any]], Any]:
    if request.param == "blocking":
        return run_blocking

    def drive_async(flow: Flow[Any]) -> Any:
        return asyncio.run(asyncio.wait_for(run_async(flow), 30))

    return drive_async


def done(value: Any = None, error: BaseException | None = None) -> Completion[Any]:
    completion: Completion[Any] = Completion()
    complete([(completion, value, error)])
    return completion


def test_outcomes_are_sent_back_in(drive: Any, pool: ThreadPoolExecutor) -> None:
    def flow() -> Flow[list[Any]]:
        return [
            (yield done("ticket")),
            (yield WaitFor(done(), 1.0)),
            (yield Blocking(lambda: "blocking", pool)),
            (yield Call(str.upper, "call")),
        ]

    assert drive(flow()) == ["ticket", True, "blocking", "CALL"]


@pytest.mark.parametrize("kind", ["ticket", "blocking", "call"])
def test_errors_are_thrown_in_and_may_be_caught_there(drive: Any, pool: ThreadPoolExecutor, kind: str) -> None:
    def fail(_: Any = None) -> None:
        raise KeyError("inside")

    steps = {"ticket": done(error=KeyError("inside")), "blocking": Blocking(fail, pool), "call": Call(fail, None)}

    def catching() -> Flow[str]:
        try:
            yield steps[kind]
        except KeyError:
            return (yield done("went on"))
        return "nothing was thrown"

    def failing() -> Flow[None]:
        yield steps[kind]

    assert drive(catching()) == "went on"
    with pytest.raises(KeyError):
        drive(failing())


def test_a_flow_that_waits_for_nothing(drive: Any) -> None:
    def flow() -> Flow[int]:
        return 5
        yield

    assert drive(flow()) == 5


def test_a_ticket_finished_by_another_thread(drive: Any) -> None:
    completion: Completion[str] = Completion()

    def flow() -> Flow[str]:
        threading.Thread(target=complete, args=([(completion, "from afar", None)],)).start()
        return (yield completion)

    assert drive(flow()) == "from afar"


def test_within_gives_up_when_time_is_over_and_may_be_waited_for_again(drive: Any) -> None:
    completion: Completion[None] = Completion()

    def flow() -> Flow[list[bool]]:
        came = [(yield WaitFor(completion, 0.0)), (yield WaitFor(completion, 0.01))]
        threading.Thread(target=complete, args=([(completion, None, None)],)).start()
        came.append((yield WaitFor(completion, None)))
        return came

    assert drive(flow()) == [False, False, True]


def test_a_ticket_may_be_finished_again_and_again(drive: Any) -> None:
    """Wake-ups are completions, and they come as often as they like, also long after the waiter has gone."""
    completion: Completion[None] = Completion()

    def flow() -> Flow[bool]:
        yield WaitFor(completion, 0.001)
        for _ in range(3):
            complete([(completion, None, None)])
        return (yield WaitFor(completion, 0.0))

    assert drive(flow()) is True


def test_an_event_loop_may_call_coroutine_functions() -> None:
    async def double(number: int) -> int:
        await asyncio.sleep(0)
        return 2 * number

    def flow() -> Flow[int]:
        return (yield Call(double, 21))

    assert asyncio.run(run_async(flow())) == 42


def test_an_event_loop_goes_on_while_work_blocks(pool: ThreadPoolExecutor) -> None:
    released = threading.Event()

    def flow() -> Flow[bool]:
        return (yield Blocking(lambda: released.wait(30), pool))

    async def both() -> bool:
        task = asyncio.create_task(run_async(flow()))
        await asyncio.sleep(0)
        released.set()  # would never be reached if the loop stood still
        return await task

    assert asyncio.run(both())


def test_cancelling_is_thrown_into_the_flow() -> None:
    cleaned_up = []

    def flow() -> Flow[None]:
        try:
            yield Completion()
        finally:
            cleaned_up.append(True)

    async def cancel() -> None:
        task = asyncio.create_task(run_async(flow()))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancel())
    assert cleaned_up == [True]


def test_a_completion_whose_loop_is_closed_does_no_harm() -> None:
    abandoned: Completion[None] = Completion()
    waited_for: Completion[str] = Completion()

    def flow(completion: Completion[Any]) -> Flow[Any]:
        return (yield completion)

    async def abandon() -> None:
        task = asyncio.create_task(run_async(flow(abandoned)))
        await asyncio.sleep(0)
        task.cancel()

    asyncio.run(abandon())
    complete([(abandoned, None, None), (waited_for, "still served", None)])
    assert run_blocking(flow(waited_for)) == "still served"


def test_many_threads_and_many_tickets() -> None:
    completions: list[Completion[int]] = [Completion() for _ in range(200)]
    outcomes: list[int] = []

    def flow(completion: Completion[int]) -> Flow[int]:
        return (yield completion)

    def wait(part: list[Completion[int]]) -> None:
        outcomes.extend(run_blocking(flow(completion)) for completion in part)

    threads = [threading.Thread(target=wait, args=(completions[start::4],)) for start in range(4)]
    for thread in threads:
        thread.start()
    for number, completion in enumerate(completions):
        complete([(completion, number, None)])
    for thread in threads:
        thread.join(30)
    assert sorted(outcomes) == list(range(200))


# --- then ---------------------------------------------------------------------------------------------------------


class Called:
    """Notes which completions called back, and on which thread."""

    def __init__(self, expected: int) -> None:
        self.completions: list[Completion[Any]] = []
        self.threads: set[int] = set()
        self.all_there = asyncio.Event()
        self._expected = expected

    def __call__(self, completion: Completion[Any]) -> None:
        self.completions.append(completion)
        self.threads.add(threading.get_ident())
        if len(self.completions) == self._expected:
            self.all_there.set()

    async def wait(self) -> None:
        await asyncio.wait_for(self.all_there.wait(), 30)
        for _ in range(3):
            await asyncio.sleep(0)  # a second call would have happened by now


async def test_then_calls_back_on_the_loop_when_another_thread_is_done() -> None:
    completion: Completion[str] = Completion()
    called = Called(1)
    completion.then(asyncio.get_running_loop(), called)
    await asyncio.sleep(0)
    assert called.completions == []
    thread = threading.Thread(target=complete, args=([(completion, "from afar", None)],))
    thread.start()
    await called.wait()
    thread.join(30)
    assert called.completions == [completion]
    assert called.threads == {threading.get_ident()}
    assert completion.result() == "from afar"


@pytest.mark.parametrize("error", [None, KeyError("inside")], ids=["a value", "an error"])
async def test_then_calls_back_for_what_is_done_already(error: BaseException | None) -> None:
    completion = done("value", error)
    called = Called(1)
    completion.then(asyncio.get_running_loop(), called)
    assert called.completions == [], "not from inside the call, which has not returned yet"
    await called.wait()
    assert called.completions == [completion]
    assert called.completions[0].error is error


class Meddled(list[Any]):
    """The waiters of a completion that is finished at the worst moment: just before, or just after, one is added."""

    def __init__(self, completion: Completion[Any], when: str) -> None:
        self._ticket = completion
        self._when = when

    def append(self, waiter: Any) -> None:
        if self._when == "just before":
            complete([(self._ticket, "value", None)])
        super().append(waiter)
        if self._when == "just after":
            complete([(self._ticket, "value", None)])


@pytest.mark.parametrize("when", ["just before", "just after"])
async def test_then_calls_back_once_at_the_worst_moment(when: str) -> None:
    completion: Completion[str] = Completion()
    completion._waiters = Meddled(completion, when)
    called = Called(1)
    completion.then(asyncio.get_running_loop(), called)
    await called.wait()
    assert called.completions == [completion]


async def test_then_may_be_called_several_times_and_beside_waiters() -> None:
    completion: Completion[str] = Completion()
    called = Called(2)
    waiting = asyncio.create_task(completion.wait_async())
    await asyncio.sleep(0)
    for _ in range(2):
        completion.then(asyncio.get_running_loop(), called)
    complete([(completion, "for all", None)])
    complete([(completion, "again", None)])
    assert await waiting
    await called.wait()
    assert called.completions == [completion, completion]


def test_tickets_finished_together_wake_the_loop_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        loop = asyncio.get_running_loop()
        completions: list[Completion[int]] = [Completion() for _ in range(100)]
        called = Called(len(completions))
        for completion in completions:
            completion.then(loop, called)
        calls = []
        wake = loop.call_soon_threadsafe

        def counted(*arguments: Any) -> Any:
            calls.append(1)
            return wake(*arguments)

        monkeypatch.setattr(loop, "call_soon_threadsafe", counted)
        await asyncio.to_thread(complete, [(completion, 1, None) for completion in completions])
        monkeypatch.undo()
        await called.wait()
        assert len(calls) == 2, "one for the tickets, one for the thread that finished them"
        assert called.completions == completions, "in the order they were finished"

    asyncio.run(story())


async def test_a_ticket_finished_on_its_own_loop_needs_no_wake_up(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = asyncio.get_running_loop()
    completion: Completion[int] = Completion()
    waiting = asyncio.ensure_future(completion.wait_async())
    await asyncio.sleep(0)
    monkeypatch.setattr(loop, "call_soon_threadsafe", None)
    complete([(completion, 1, None)])
    monkeypatch.undo()
    assert await waiting
    assert completion.result() == 1


def test_then_on_a_loop_that_is_closed_does_no_harm() -> None:
    completion: Completion[None] = Completion()
    called: list[Any] = []

    async def ask() -> None:
        completion.then(asyncio.get_running_loop(), called.append)

    asyncio.run(ask())
    complete([(completion, None, None)])
    assert completion.done
    assert called == []


def test_what_follows_a_ticket_may_fail_and_the_others_are_finished() -> None:
    first: Completion[int] = Completion()
    second: Completion[int] = Completion()

    def fail(completion: Completion[int]) -> None:
        raise RuntimeError("mine alone")

    async def story() -> None:
        first.watch(fail)
        first.then(asyncio.get_running_loop(), fail)
        waiting = asyncio.ensure_future(second.wait_async())
        await asyncio.sleep(0)
        complete([(first, 1, None), (second, 2, None)])
        assert await waiting

    asyncio.run(story())
    assert (first.result(), second.result()) == (1, 2)
