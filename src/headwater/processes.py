"""The id of this process. A log is of the process that opened it: a forked child has none of its threads, and must not
use its connections."""

import os

from headwater.errors import ClosedError

pid = os.getpid()
"""For every verb: to ask the system takes longer than the rest of a check. A fork by C code, such as that of uWSGI,
calls no hook of Python: there it is renewed when a log is opened."""


def ask() -> int:
    """Asks the system, and renews `pid`: a log does so when it is opened."""
    global pid
    pid = os.getpid()
    return pid


if hasattr(os, "register_at_fork"):  # Windows has no fork
    os.register_at_fork(after_in_child=ask)


def is_forked(opened_by: int) -> bool:
    """Asks the system: for whatever uses a connection or wakes a thread."""
    return os.getpid() != opened_by


def refuse_forked(opened_by: int, where: str) -> None:
    if os.getpid() != opened_by:
        raise forked_error(where)


def forked_error(where: str) -> ClosedError:
    why = "the log was opened by the process that this one was forked from"
    return ClosedError(why, where=where, next="Open it again in this process")
