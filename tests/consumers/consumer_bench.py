"""What the tests of consumers share: places where a log lives, one way to call both APIs, and the check that nothing
is stranded."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

from fault_proxy import FaultProxy
from served import RunningServer

import headwater

PATIENCE_S = 20.0  # no test waits so long, unless something is wrong
THREADS_MAX = 40
LONG_S = 3_600  # for ack waits: a message that is stranded does not come back while the test looks
# Nacked messages are due at once, and stranded ones not at all.
OPTIONS: dict[str, Any] = {"ack_wait": LONG_S, "backoff": 0, "jitter": 0.0, "max_attempts": 50}


# --- places -----------------------------------------------------------------------------------------------------------


class Place:
    """Where a log lives. `direct_url` leads there past the proxy that `url` goes through, if there is one."""

    def __init__(self, kind: str, url: str, options: dict[str, Any], proxy: FaultProxy | None = None) -> None:
        self.kind, self.url, self.options, self.proxy = kind, url, options, proxy
        self.direct_url = url

    @property
    def lasts(self) -> bool:
        """Whether the log outlives the object that opened it."""
        return self.kind != "memory"


@contextmanager
def place_of(kind: str, directory: Path, database_url: str | None, *, with_proxy: bool = False) -> Iterator[Place]:
    # Relaxed: nothing here depends on the disk, and its syncs would take most of the time.
    here: dict[str, Any] = {"maintenance_interval": None, "durability": "relaxed"}
    if kind == "ws":
        with ExitStack() as stack:
            server = RunningServer(directory / "log.db", **here)
            stack.callback(server.stop)
            place = Place(kind, server.url, {"reconnect_min": 0.01, "reconnect_max": 0.05})
            if with_proxy:
                place.proxy = stack.enter_context(FaultProxy("127.0.0.1", int(server.url.rpartition(":")[2])))
                place.url = f"ws://127.0.0.1:{place.proxy.port}"
            yield place
    elif kind == "postgres":
        assert database_url is not None
        yield Place(kind, database_url, here)
    else:
        yield Place(kind, "memory:" if kind == "memory" else str(directory / "log.db"), here)


# --- both APIs --------------------------------------------------------------------------------------------------------


class Api:
    """One way to call both: `await api.do(log.publish, "a", 1)`. What blocks runs on a thread."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.awaits = name == "async"
        self._threads = ThreadPoolExecutor(THREADS_MAX, thread_name_prefix="test")

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def do(self, verb: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        if self.awaits:
            return await verb(*arguments, **options)
        return await self.on_a_thread(verb, *arguments, **options)

    async def on_a_thread(self, work: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._threads, lambda: work(*arguments, **options))

    async def open(self, place: Place, *, direct: bool = False, **options: Any) -> Any:
        url = place.direct_url if direct else place.url
        return await self.do(
            headwater.open_async if self.awaits else headwater.open, url, **{**place.options, **options}
        )

    @asynccontextmanager
    async def opened(self, place: Place, **options: Any) -> AsyncIterator[Any]:
        log = await self.open(place, **options)
        try:
            yield log
        finally:
            await self.do(log.close)

    async def each(self, subscription: Any, timeout: float | None = None) -> AsyncIterator[Any]:
        """Iterate over it, message after message. Under threads a task that does so must not be cancelled."""
        messages = subscription.messages(timeout=timeout)
        if self.awaits:
            try:
                async for message in messages:
                    yield message
            finally:
                await messages.aclose()
            return
        try:
            while (message := await self.on_a_thread(next, messages, None)) is not None:
                yield message
        finally:
            await self.on_a_thread(messages.close)

    def handler(self, begin: Callable[[Any], None], gate: threading.Event | None = None) -> Callable[[Any], Any]:
        """A handler that calls `begin` and then waits for the gate to open."""

        def handle(message: Any) -> None:
            begin(message)
            if gate is not None:
                assert gate.wait(PATIENCE_S)

        async def handle_async(message: Any) -> None:
            begin(message)
            if gate is not None:
                assert await self.on_a_thread(gate.wait, PATIENCE_S)

        return handle_async if self.awaits else handle


class Recorder:
    """What handlers and workers have seen so far; tests wait for more. Safe for threads."""

    def __init__(self) -> None:
        self.seen: list[Any] = []
        self.changed = threading.Condition()

    def __call__(self, what: Any) -> None:
        with self.changed:
            self.seen.append(what)
            self.changed.notify_all()

    def message(self, message: Any) -> None:
        self((message.seq, message.attempt))

    def wait_for(self, count: int) -> list[Any]:
        with self.changed:
            if not self.changed.wait_for(lambda: len(self.seen) >= count, PATIENCE_S):
                raise TimeoutError(f"{len(self.seen)} of {count} came: {self.seen}")
            return list(self.seen)

    async def reach(self, count: int) -> list[Any]:
        return await asyncio.to_thread(self.wait_for, count)


async def eventually_true(look: Callable[[], Any], what: str) -> None:
    """Look until it is so. `look` may be a coroutine function."""
    until = asyncio.get_running_loop().time() + PATIENCE_S
    while True:
        seen = look()
        if asyncio.iscoroutine(seen):
            seen = await seen
        if seen:
            return
        assert asyncio.get_running_loop().time() < until, f"never so: {what}"
        await asyncio.sleep(0.01)


# --- nothing is stranded ----------------------------------------------------------------------------------------------


async def take_all(api: Api, subscription: Any) -> list[tuple[int, int]]:
    """(seq, attempt) of all that is there at once. Acks them: what a vanished holder had comes one by one."""
    found: list[tuple[int, int]] = []
    while messages := await api.do(subscription.fetch, 100, timeout=0):
        found += [(message.seq, message.attempt) for message in messages]
        await api.do(subscription.ack_many, messages)
    return found


async def left_over(api: Api, place: Place, id: str, pattern: str, **options: Any) -> list[tuple[int, int]]:
    """(seq, attempt) of all that a fresh consumer gets at once from a subscription that nothing holds any more."""
    async with AsyncExitStack() as stack:
        log = await stack.enter_async_context(api.opened(place, direct=True))
        subscription = await api.do(log.subscribe, id, pattern, **{**OPTIONS, **options})
        stack.push_async_callback(api.do, subscription.close)
        return await take_all(api, subscription)
