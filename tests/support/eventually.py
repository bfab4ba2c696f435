"""What is so a moment after something else: looked at until it is."""

import contextlib
import time
from collections.abc import Callable
from typing import TypeVar

PATIENCE_S = 60.0  # the machine may be busy with other things
LOOK_S = 0.005

T = TypeVar("T")


def eventually(look: Callable[[], T], expected: T) -> None:
    """Fails with what it sees in the end."""
    until_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < until_s:
        with contextlib.suppress(OSError):  # a file went away while it was looked at
            if look() == expected:
                return
        time.sleep(LOOK_S)
    seen = look()
    assert seen == expected, f"{seen!r}, not {expected!r}, after {PATIENCE_S} s"
