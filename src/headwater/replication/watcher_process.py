"""Watches the database that is its argument, as a process of its own; ends when it is told to, or its parent has gone.

Says a line for each thing it has seen: that it is ready, that there was a write, or a warning.
"""

from __future__ import annotations

import logging
import os
import select
import sys

from headwater.replication.watcher import DatabaseWatcher

READY, WROTE, STOP = b"ready\n", b"wrote\n", b"stop\n"
PARENT_LOOK_S = 1.0  # between two looks whether it is still there


class _Warnings(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        _say(" ".join(record.getMessage().split()).encode(errors="backslashreplace") + b"\n")


def _say(line: bytes) -> None:
    os.write(sys.stdout.fileno(), line)


def _wait_for_the_end(parent: int) -> None:
    """The pipe alone would not tell that the parent has gone: what it forked has its end, too, and may live on."""
    waiting_on = select.poll()
    waiting_on.register(sys.stdin, select.POLLIN)
    while os.getppid() == parent and not waiting_on.poll(int(PARENT_LOOK_S * 1000)):
        pass


def main(path: str) -> None:
    parent = os.getppid()
    logger = logging.getLogger("headwater")
    logger.addHandler(_Warnings(logging.WARNING))
    logger.propagate = False
    watcher = DatabaseWatcher(path, lambda: _say(WROTE))
    watcher.start()
    try:
        _say(READY)
        _wait_for_the_end(parent)
    finally:
        watcher.stop()


if __name__ == "__main__":
    main(sys.argv[1])
