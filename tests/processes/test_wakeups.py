"""A reader that waits hears of another process's commit through the file watcher, long before its polls would."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable

import pytest
from process_child import Child
from process_roles import write_on_command

import headwater

MEDIAN_MS_MAX = 100
POLL_MS = 900  # what came later than this, came by the watcher's poll of one second
LATE_MAX = 1  # a machine may have its moments
ROUNDS = 40


def latencies_ms(log: headwater.Log, writer: Child, mode: str, bursts: list[int]) -> list[float]:
    """How long after the call of the last publish of each burst the reader had it."""
    subscription = log.subscribe("s", ">", mode=mode)
    subscription.fetch(1, timeout=0.1)  # the beginning has a test of its own
    found = []
    for count in bursts:
        writer.say(count)
        seen: dict[int, int] = {}
        while len(seen) < count:
            messages = subscription.fetch(100, timeout=20)
            assert messages, "not even the polls found it"
            now = time.monotonic_ns()
            seen.update((message.seq, now) for message in messages)
            subscription.ack_many(messages)
        began, seq = writer.hear()
        found.append((seen[seq] - began) / 1e6)
        if sum(latency > POLL_MS for latency in found) > LATE_MAX:
            break  # it is plain by now
    return found


@pytest.mark.parametrize("mode", ["exclusive", "shared", "ephemeral"])
def test_single_messages(
    log: headwater.Log, path: str, spawn: Callable[..., Child], mode: str, figures: Callable[[str], None]
) -> None:
    writer = spawn(write_on_command, path)
    writer.hear()
    found = latencies_ms(log, writer, mode, [1] * ROUNDS)
    figures(f"wake-up across processes, {mode}: median {statistics.median(found):.1f} ms, most {max(found):.1f} ms")
    assert statistics.median(found) < MEDIAN_MS_MAX
    assert sum(latency > POLL_MS for latency in found) <= LATE_MAX, found
    writer.say(0)
    writer.end()


@pytest.mark.parametrize("mode", ["exclusive", "ephemeral"])
def test_the_last_of_a_burst(
    log: headwater.Log, path: str, spawn: Callable[..., Child], mode: str, figures: Callable[[str], None]
) -> None:
    """While the reader is busy with the first ones, the hint for the last one must not be forgotten."""
    writer = spawn(write_on_command, path)
    writer.hear()
    dice = random.Random(1)
    found = latencies_ms(log, writer, mode, [dice.randint(2, 12) for _ in range(ROUNDS * 8)])
    late = sum(latency > POLL_MS for latency in found)
    figures(f"last of a burst, {mode}: median {statistics.median(found):.1f} ms, most {max(found):.1f} ms, {late} late")
    assert statistics.median(found) < MEDIAN_MS_MAX
    assert late <= LATE_MAX, (
        f"{late} of {len(found)} bursts waited for the poll: {[round(latency) for latency in found]}"
    )
    writer.say(0)
    writer.end()


def test_a_message_that_comes_while_the_watcher_starts(
    log: headwater.Log, path: str, spawn: Callable[..., Child], figures: Callable[[str], None]
) -> None:
    """The first subscription of a process starts the watcher; a commit at that very moment must not fall between."""
    writer = spawn(write_on_command, path)
    writer.hear()
    found = []
    for _ in range(6):
        with headwater.open(path, maintenance_interval=None) as reader:
            subscription = reader.subscribe("s", ">", mode="ephemeral", start="new")
            writer.say(1)
            assert subscription.fetch(1, timeout=20)
            received = time.monotonic_ns()
            found.append((received - writer.hear()[0]) / 1e6)
    figures(f"wake-up at the start of the watcher: median {statistics.median(found):.1f} ms, most {max(found):.1f} ms")
    assert sum(latency > POLL_MS for latency in found) <= LATE_MAX, [round(latency) for latency in found]
