"""Work as a user without rights: root may write everywhere, so a forked child becomes another user."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

NO_RIGHTS = 65534  # the user and the group `nobody`


def printed_without_rights(work: Callable[[], object]) -> str:
    """What a forked child without rights prints; all that it needs has been imported before."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setgid(NO_RIGHTS)
            os.setuid(NO_RIGHTS)
            os.dup2(write, 1)
            os.dup2(write, 2)
            sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1) for number in (1, 2))
            print(f"ended with {work()}")
            sys.stdout.flush()
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        shown = pipe.read()
    os.waitpid(child, 0)
    return shown
