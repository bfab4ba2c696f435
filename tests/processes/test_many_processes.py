"""Several processes write, share and create one log at the same time."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import apsw
import pytest
from process_child import Child, drain
from process_roles import create, share, write

import headwater

WRITERS, MESSAGES = 4, 500
CONSUMERS, SHARED_MESSAGES = 8, 1_500


@pytest.mark.parametrize("together", [1, 25])
def test_writers_at_the_same_time(log: headwater.Log, path: str, spawn: Callable[..., Child], together: int) -> None:
    writers = {str(number): spawn(write, path, str(number), MESSAGES, together) for number in range(WRITERS)}
    for writer in writers.values():
        assert writer.hear() == "open"
    for writer in writers.values():
        writer.say("go")
    seqs = {name: writer.hear() for name, writer in writers.items()}
    for writer in writers.values():
        writer.end()
    found = drain(log.subscribe("s", ">"))
    assert [seq for seq, _, _ in found] == [*range(1, WRITERS * MESSAGES + 1)]
    for name in writers:
        assert [(seq, data) for seq, _, data in found if data[0] == name] == [
            (seq, [name, number]) for number, seq in enumerate(seqs[name])
        ]
        assert seqs[name] == sorted(seqs[name])


def test_shared_consumers_get_each_message_once(log: headwater.Log, path: str, spawn: Callable[..., Child]) -> None:
    consumers = [spawn(share, path) for _ in range(CONSUMERS)]
    for consumer in consumers:
        assert consumer.hear() == "open"
    for batch in range(0, SHARED_MESSAGES, 50):
        log.publish_many([("a", batch + number) for number in range(50)])
    acked = [0] * CONSUMERS
    for at in itertools.cycle(range(CONSUMERS)):
        if sum(acked) >= SHARED_MESSAGES:
            break
        acked[at] = consumers[at].hear()
    for consumer in consumers:
        consumer.say("end")
    done = [(*each, at) for at, consumer in enumerate(consumers) for each in last_word(consumer)]
    times = Counter(seq for seq, *_ in done)
    assert times == Counter(range(1, SHARED_MESSAGES + 1)), "lost, or acked more than once"
    assert {attempt for _, attempt, *_ in done} == {1}, "delivered again without reason"
    assert sum(count > 0 for count in acked) > 1, "only one consumer got messages"
    assert log.subscription("s").lag == 0
    assert log.subscription("s").acked == SHARED_MESSAGES


def last_word(consumer: Child) -> list[tuple[int, int, int, int]]:
    while not isinstance(word := consumer.hear(), list):
        pass
    consumer.end()
    return word


@pytest.mark.parametrize(("creators", "rounds"), [(2, 4), (8, 2)])
def test_creating_one_log_at_the_same_time(
    tmp_path: Path, spawn: Callable[..., Child], creators: int, rounds: int
) -> None:
    for number in range(rounds):
        path = str(tmp_path / f"log-{number}.db")
        children = [spawn(create, path, f"creator {each}") for each in range(creators)]
        for child in children:
            assert child.hear() == "ready"
        for child in children:
            child.say("go")
        assert {child.hear() for child in children} == {*range(1, creators + 1)}
        for child in children:
            child.end()
        connection = apsw.Connection(path)
        assert connection.execute("PRAGMA integrity_check").get == "ok"
        assert connection.execute("PRAGMA auto_vacuum").get == 2
        assert connection.execute("PRAGMA journal_mode").get == "wal"
        connection.close()
