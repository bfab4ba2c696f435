"""A log is of the process that opened it."""

import ctypes
import os
import select
import signal
from collections.abc import Callable

import pytest
from waiting import TIME_LIMIT_S

from headwater import Log
from headwater.errors import ClosedError


@pytest.mark.parametrize("options", [{}, {"id": "x"}], ids=["plain", "with-an-id"])
@pytest.mark.parametrize("fork", [os.fork, ctypes.PyDLL(None).fork], ids=["python", "c"])
def test_a_forked_child_is_told_to_open_its_own(log: Log, fork: Callable[[], int], options: dict[str, str]) -> None:
    """It has none of the parent's threads, so it must not wait for them, nor close what the parent uses. C code, such
    as uWSGI, forks without Python's hooks."""
    assert log.publish("a", "parent") == 1
    reading, writing = os.pipe()
    child = fork()
    if child == 0:
        reported = b"published"
        try:
            log.publish("a", "child", **options)  # type: ignore[arg-type]
        except ClosedError as exc:
            reported = exc.why.encode()
        except BaseException as exc:
            reported = repr(exc).encode()
        log.close()
        os.write(writing, reported)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        found, _, _ = select.select([pipe], [], [], TIME_LIMIT_S)
        if not found:
            os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        assert b"forked" in pipe.read()
    assert log.publish("a", "parent again") == 2
