"""The id of this process. The system is asked once, and again in a forked child: every verb of a log compares it, and a
question takes longer than the rest of the check."""

import os

pid = os.getpid()


def _ask_again() -> None:
    global pid
    pid = os.getpid()


if hasattr(os, "register_at_fork"):  # Windows has no fork
    os.register_at_fork(after_in_child=_ask_again)
