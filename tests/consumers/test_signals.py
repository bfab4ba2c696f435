"""`log.run()` and signals: it takes nothing new, finishes what is in hand, gives the rest back and ends with 0."""

from __future__ import annotations

import asyncio
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from consumer_bench import LONG_S, OPTIONS, PATIENCE_S, Api, Place, Recorder, left_over
from eventually import eventually

import headwater
from headwater.api import _async, _sync

CHILD = Path(__file__).with_name("runner_child.py")
COUNT = 10
LEASE_S = 1.5  # of a holder that is killed
SIGNALS = [signal.SIGTERM, signal.SIGINT]


class Child:
    """A process that runs a handler; see `runner_child`."""

    def __init__(self, api: str, place: Place, stderr: Path, options: dict[str, Any], run: dict[str, Any]) -> None:
        self._stderr = stderr
        self._unread = b""
        command = [sys.executable, CHILD, api, place.url, json.dumps({**OPTIONS, **options}), json.dumps(run)]
        with open(stderr, "ab") as errors:
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, bufsize=0
            )

    def hear(self, *expected: Any, patience_s: float = PATIENCE_S) -> list[Any]:
        """Its next line, which begins with these words."""
        assert self.process.stdout is not None
        until = time.monotonic() + patience_s
        while b"\n" not in self._unread:
            readable, _, _ = select.select([self.process.stdout], [], [], max(0.0, until - time.monotonic()))
            assert readable, f"it does not say {expected}: {self.errors()}"
            more = os.read(self.process.stdout.fileno(), 65536)
            assert more, f"it ended before it printed {expected}: {self.errors()}"
            self._unread += more
        line, _, self._unread = self._unread.partition(b"\n")
        output: list[Any] = json.loads(line)
        assert output[: len(expected)] == list(expected), self.errors()
        return output[len(expected) :]

    def let_a_handler_end(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(b".")

    def end(self) -> int:
        """Its exit code; there is nothing more that it says."""
        code = self.process.wait(PATIENCE_S)
        assert self.process.stdout is not None
        assert self._unread + self.process.stdout.read() == b"", self.errors()
        return code

    def errors(self) -> str:
        return self._stderr.read_text(errors="replace")[-3_000:]

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(PATIENCE_S)
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


Spawn = Callable[..., Child]


@pytest.fixture
def spawn(api: Api, near_place: Place, tmp_path: Path) -> Iterator[Spawn]:
    children: list[Child] = []

    def start(run: dict[str, Any] | None = None, **options: Any) -> Child:
        children.append(Child(api.name, near_place, tmp_path / "stderr", options, run or {}))
        return children[-1]

    yield start
    for child in children:
        child.kill()


@pytest.fixture
def log(near_place: Place) -> Iterator[headwater.Log]:
    with headwater.open(near_place.url, **near_place.options) as log:
        yield log


def at_work(spawn: Spawn, log: headwater.Log, run: dict[str, Any] | None = None, **options: Any) -> Child:
    """A process with one message in hand and the others fetched ahead."""
    log.publish_many([("a", number) for number in range(COUNT)])
    child = spawn(run, **options)
    child.hear("ready")
    if options.get("concurrency", 1) == 1:
        child.hear("began", 1, 1)
        assert log.subscription("h").in_flight > 1
    return child


def rest(api: Api, place: Place) -> list[tuple[int, int]]:
    return sorted(asyncio.run(left_over(api, place, "h", "a")))


# --- one signal -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", SIGNALS)
def test_a_signal_in_the_middle_of_a_handler(
    api: Api, near_place: Place, spawn: Spawn, log: headwater.Log, how: signal.Signals
) -> None:
    child = at_work(spawn, log)
    child.process.send_signal(how)
    eventually(lambda: log.subscription("h").in_flight, 1)  # the rest is given back while the handler still runs
    log.publish("a", "later")
    child.let_a_handler_end()
    child.hear("ended", 1)
    assert child.hear("returned") == [[]], "the handlers of signals are not as they were"
    assert child.end() == 0, child.errors()
    assert log.subscription("h").acked == 1
    assert rest(api, near_place) == [(seq, 1) for seq in range(2, COUNT + 2)]


@pytest.mark.parametrize("how", SIGNALS)
def test_a_signal_while_nothing_is_in_flight(
    api: Api, near_place: Place, spawn: Spawn, log: headwater.Log, how: signal.Signals
) -> None:
    log.publish("a", 0)
    child = spawn()
    child.hear("ready")
    child.hear("began", 1, 1)
    child.let_a_handler_end()
    child.hear("ended", 1)
    eventually(lambda: log.subscription("h").acked, 1)
    child.process.send_signal(how)
    child.hear("returned", [])
    assert child.end() == 0, child.errors()
    log.publish("a", 1)
    assert rest(api, near_place) == [(2, 1)]


def test_several_handlers_at_work_all_finish(api: Api, near_place: Place, spawn: Spawn, log: headwater.Log) -> None:
    child = at_work(spawn, log, concurrency=3)
    in_flight = {child.hear("began")[0] for _ in range(3)}
    child.process.send_signal(signal.SIGTERM)
    eventually(lambda: log.subscription("h").in_flight, 3)
    for _ in in_flight:
        child.let_a_handler_end()
    assert {child.hear("ended")[0] for _ in in_flight} == in_flight
    child.hear("returned", [])
    assert child.end() == 0, child.errors()
    assert rest(api, near_place) == [(seq, 1) for seq in range(1, COUNT + 1) if seq not in in_flight]


def test_a_handler_that_outlasts_the_shutdown_timeout(
    api: Api, near_place: Place, spawn: Spawn, log: headwater.Log
) -> None:
    child = at_work(spawn, log, {"shutdown_timeout": 0.2})
    child.process.send_signal(signal.SIGTERM)
    child.hear("returned", [])
    assert child.end() == 0, child.errors()
    assert rest(api, near_place) == [(1, 2), *((seq, 1) for seq in range(2, COUNT + 1))]


# --- a second signal --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", SIGNALS)
def test_a_second_signal_ends_it_at_once(
    api: Api, near_place: Place, spawn: Spawn, log: headwater.Log, how: signal.Signals
) -> None:
    child = at_work(spawn, log, {"shutdown_timeout": LONG_S})
    child.process.send_signal(how)
    eventually(lambda: log.subscription("h").in_flight, 1)  # so the first one has been seen
    child.process.send_signal(how)
    assert child.process.wait(PATIENCE_S) != 0, child.errors()


# --- threads, and the signal handlers of the application --------------------------------------------------------------


def test_run_leaves_the_signal_handlers_as_they_were(tmp_path: Path) -> None:
    def mine(number: int, frame: Any) -> None: ...

    before = {each: signal.signal(each, mine) for each in SIGNALS}
    try:
        with headwater.open(tmp_path / "log.db") as log:

            @log.on("a", id="h")
            def handle(message: Any) -> None:
                log.stop()

            log.publish("a", 0)
            log.run()
            assert [signal.getsignal(each) for each in SIGNALS] == [mine, mine]
    finally:
        for each, had in before.items():
            signal.signal(each, had)


def test_run_under_asyncio_leaves_the_signal_handlers_as_they_were(tmp_path: Path) -> None:
    def mine(number: int, frame: Any) -> None: ...

    async def story() -> None:
        before = signal.getsignal(signal.SIGINT)  # of asyncio.run
        async with headwater.open_async(tmp_path / "log.db") as log:

            @log.on("a", id="h")
            async def handle(message: Any) -> None:
                await log.stop()

            await log.publish("a", 0)
            await log.run()
            assert signal.getsignal(signal.SIGTERM) is mine
            assert signal.getsignal(signal.SIGINT) == before

    had = signal.signal(signal.SIGTERM, mine)
    try:
        asyncio.run(story())
    finally:
        signal.signal(signal.SIGTERM, had)


def test_start_touches_no_signal_handlers(tmp_path: Path) -> None:
    before = [signal.getsignal(each) for each in SIGNALS]
    with headwater.open(tmp_path / "log.db") as log:
        log.on("a", id="h")(lambda message: None)
        log.start()
        assert [signal.getsignal(each) for each in SIGNALS] == before
        log.stop()
    assert [signal.getsignal(each) for each in SIGNALS] == before


def test_run_in_another_thread_touches_no_signal_handlers_and_ends_by_stop(near_place: Place) -> None:
    before = [signal.getsignal(each) for each in SIGNALS]
    raised: list[BaseException] = []
    with headwater.open(near_place.url, **near_place.options) as log:
        seen = Recorder()
        log.on("a", id="h", **OPTIONS)(seen.message)

        def run() -> None:
            try:
                log.run()
            except BaseException as exc:
                raised.append(exc)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        log.publish("a", 0)
        seen.wait_for(1)
        assert [signal.getsignal(each) for each in SIGNALS] == before
        log.stop()
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
        assert raised == []


# --- standing by ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["signal", "kill"])
def test_a_second_process_stands_by_and_takes_over(
    api: Api, near_place: Place, spawn: Spawn, log: headwater.Log, end: str
) -> None:
    first = at_work(spawn, log, lease=LEASE_S)
    second = spawn(lease=LEASE_S)
    second.hear("ready")
    eventually(lambda: second.errors().count("stands by:"), 1)  # it says so, once
    if end == "signal":
        first.process.send_signal(signal.SIGTERM)
        eventually(lambda: first.errors().count("are stopping"), 1)
        first.let_a_handler_end()
        first.hear("ended", 1)
        first.hear("returned", [])
        assert first.end() == 0, first.errors()
        second.hear("began", 2, 1)
        second.process.send_signal(signal.SIGTERM)
        eventually(lambda: log.subscription("h").in_flight, 1)
        second.let_a_handler_end()
        second.hear("ended", 2)
        second.hear("returned", [])
        assert second.end() == 0, second.errors()
    else:
        first.kill()
        second.hear("began", 1, 2)  # what was in the hands of the one that vanished comes first
    assert second.errors().count("stands by:") == 1, second.errors()


@pytest.mark.parametrize("awaits", [False, True])
def test_a_signal_at_the_very_beginning_of_run_is_not_overlooked(
    tmp_path: Path, awaits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes as soon as run() takes signals, also the second time."""

    @contextmanager
    def signalled(ask_to_stop: Callable[[], object]) -> Iterator[None]:
        ask_to_stop()
        yield

    monkeypatch.setattr(_async if awaits else _sync, "stopped_by_signals", signalled)

    async def run_twice() -> None:
        async with headwater.open_async(str(tmp_path / "log.db")) as log:
            log.on("a", id="h")(print)
            for _ in range(2):
                await asyncio.wait_for(log.run(), PATIENCE_S)

    def run_twice_blocking() -> None:
        with headwater.open(str(tmp_path / "log.db")) as log:
            log.on("a", id="h")(print)
            for _ in range(2):
                running = threading.Thread(target=log.run, daemon=True)
                running.start()
                running.join(PATIENCE_S)
                assert not running.is_alive()

    if awaits:
        asyncio.run(run_twice())
    else:
        run_twice_blocking()


def test_a_signal_stops_all_logs_that_run_on_one_event_loop(tmp_path: Path) -> None:
    async def run_two() -> None:
        async with (
            headwater.open_async(str(tmp_path / "a.db")) as one,
            headwater.open_async(str(tmp_path / "b.db")) as two,
        ):
            for log in (one, two):
                log.on("a", id="h")(print)
            runs = [asyncio.create_task(log.run()) for log in (one, two)]
            while not all(log._handlers._running for log in (one, two)):
                await asyncio.sleep(0)
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.wait_for(asyncio.gather(*runs), PATIENCE_S)

    before = [signal.getsignal(each) for each in SIGNALS]
    asyncio.run(run_two())
    assert [signal.getsignal(each) for each in SIGNALS] == before
