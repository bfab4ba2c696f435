"""A log is of the process that opened it."""

import ctypes
import os
import select
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from waiting import TIME_LIMIT_S

import headwater
from headwater import Log
from headwater.errors import ClosedError

FORKS = pytest.mark.parametrize("fork", [os.fork, ctypes.PyDLL(None).fork], ids=["python", "c"])
"""C code, such as uWSGI, forks without Python's hooks."""


@pytest.mark.parametrize("options", [{}, {"id": "x"}], ids=["plain", "with-an-id"])
@FORKS
def test_a_forked_child_is_told_to_open_its_own(log: Log, fork: Callable[[], int], options: dict[str, str]) -> None:
    """It has none of the parent's threads, so it must not wait for them, nor close what the parent uses."""
    assert log.publish("a", "parent") == 1

    def publish() -> None:
        try:
            log.publish("a", "child", **options)  # type: ignore[arg-type]
        finally:
            log.close()

    assert "forked" in what_happens_in_a(fork, publish)
    assert log.publish("a", "parent again") == 2


@pytest.mark.parametrize("options", [{}, {"id": "x"}], ids=["plain", "with-an-id"])
@FORKS
def test_a_forked_child_opens_its_own(
    open_log: Callable[[], Log], fork: Callable[[], int], options: dict[str, str]
) -> None:
    def publish() -> None:
        with open_log() as log:
            log.publish("a", "child", **options)  # type: ignore[arg-type]
            log.publish_many([("a", "child again")])

    assert what_happens_in_a(fork, publish) == ""


@FORKS
def test_a_forked_child_stores_nothing_at_once(tmp_path: Path, fork: Callable[[], int]) -> None:
    """Only a log on the real clock does: there the calling thread uses a connection of the parent."""
    with headwater.open(tmp_path / "log.db") as log:
        assert log.publish("a", "parent") == 1
        assert "forked" in what_happens_in_a(fork, lambda: log.publish("a", "child"))
        assert "forked" in what_happens_in_a(fork, lambda: log.publish_many([("a", "child")]))
        assert log.publish("a", "parent again") == 2


@FORKS
def test_a_forked_child_begins_no_transaction(engine_here: None, log: Log, fork: Callable[[], int]) -> None:
    def publish() -> None:
        with log.transaction() as tx:
            tx.publish("a", "child")

    assert "forked" in what_happens_in_a(fork, publish)
    assert log.publish("a", "parent") == 1


def what_happens_in_a(fork: Callable[[], int], work: Callable[[], object]) -> str:
    """The error of the work in the child, if any."""
    reading, writing = os.pipe()
    child = fork()
    if child == 0:
        reported = ""
        try:
            work()
        except ClosedError as exc:
            reported = exc.why
        except BaseException as exc:
            reported = repr(exc)
        os.write(writing, reported.encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        found, _, _ = select.select([pipe], [], [], TIME_LIMIT_S)
        if not found:
            os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        assert found
        return pipe.read().decode()
