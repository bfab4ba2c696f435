"""Work on threads whose caller is cancelled."""

import asyncio
import threading

import pytest

from headwater.replication.threads import Threads

PATIENCE_S = 20.0


async def test_what_a_cancelled_caller_would_have_got_is_undone() -> None:
    threads, begun, may_end, undone = Threads(1), threading.Event(), threading.Event(), list[str]()

    def work() -> str:
        begun.set()
        may_end.wait(PATIENCE_S)
        return "made"

    caller = asyncio.create_task(threads.do_or_undo(undone.append, work))
    assert await asyncio.to_thread(begun.wait, PATIENCE_S)
    for _ in range(3):  # however often: it waits for the thread
        caller.cancel()
        await asyncio.sleep(0)
    assert not caller.done()
    may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert undone == ["made"]
    threads.close()
