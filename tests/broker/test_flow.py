"""One flow, two drivers: what a use case sees is the same under threads and under an event loop."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from headwater.broker.flow import Blocking, Call, Flow, Ticket, Within, finish, run_async, run_blocking


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


def done(value: Any = None, error: BaseException | None = None) -> Ticket[Any]:
    ticket: Ticket[Any] = Ticket()
    finish([(ticket, value, error)])
    return ticket


def test_outcomes_are_sent_back_in(drive: Any, pool: ThreadPoolExecutor) -> None:
    def flow() -> Flow[list[Any]]:
        return [
            (yield done("ticket")),
            (yield Within(done(), 1.0)),
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
    ticket: Ticket[str] = Ticket()

    def flow() -> Flow[str]:
        threading.Thread(target=finish, args=([(ticket, "from afar", None)],)).start()
        return (yield ticket)

    assert drive(flow()) == "from afar"


def test_within_gives_up_when_time_is_over_and_may_be_waited_for_again(drive: Any) -> None:
    ticket: Ticket[None] = Ticket()

    def flow() -> Flow[list[bool]]:
        came = [(yield Within(ticket, 0.0)), (yield Within(ticket, 0.01))]
        threading.Thread(target=finish, args=([(ticket, None, None)],)).start()
        came.append((yield Within(ticket, None)))
        return came

    assert drive(flow()) == [False, False, True]


def test_a_ticket_may_be_finished_again_and_again(drive: Any) -> None:
    """Wake-ups are tickets, and they come as often as they like, also long after the waiter has gone."""
    ticket: Ticket[None] = Ticket()

    def flow() -> Flow[bool]:
        yield Within(ticket, 0.001)
        for _ in range(3):
            finish([(ticket, None, None)])
        return (yield Within(ticket, 0.0))

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
            yield Ticket()
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


def test_finishing_a_ticket_whose_loop_is_closed_harms_nobody() -> None:
    abandoned: Ticket[None] = Ticket()
    waited_for: Ticket[str] = Ticket()

    def flow(ticket: Ticket[Any]) -> Flow[Any]:
        return (yield ticket)

    async def abandon() -> None:
        task = asyncio.create_task(run_async(flow(abandoned)))
        await asyncio.sleep(0)
        task.cancel()

    asyncio.run(abandon())
    finish([(abandoned, None, None), (waited_for, "still served", None)])
    assert run_blocking(flow(waited_for)) == "still served"


def test_many_threads_and_many_tickets() -> None:
    tickets: list[Ticket[int]] = [Ticket() for _ in range(200)]
    outcomes: list[int] = []

    def flow(ticket: Ticket[int]) -> Flow[int]:
        return (yield ticket)

    def wait(part: list[Ticket[int]]) -> None:
        outcomes.extend(run_blocking(flow(ticket)) for ticket in part)

    threads = [threading.Thread(target=wait, args=(tickets[start::4],)) for start in range(4)]
    for thread in threads:
        thread.start()
    for number, ticket in enumerate(tickets):
        finish([(ticket, number, None)])
    for thread in threads:
        thread.join(30)
    assert sorted(outcomes) == list(range(200))
