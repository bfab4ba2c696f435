"""Watches the database that is its argument, as a process of its own; ends when it is told to, or its parent has gone.

Says a line for each thing it has seen: that it is ready, that there was a write, or a warning.
"""

from __future__ import annotations

import logging
import os
import sys

from headwater.replication.watcher import DatabaseWatcher

READY, WROTE, STOP = b"ready\n", b"wrote\n", b"stop\n"


class _Warnings(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        _say(" ".join(record.getMessage().split()).encode(errors="backslashreplace") + b"\n")


def _say(line: bytes) -> None:
    os.write(sys.stdout.fileno(), line)


def main(path: str) -> None:
    logger = logging.getLogger("headwater")
    logger.addHandler(_Warnings(logging.WARNING))
    logger.propagate = False
    watcher = DatabaseWatcher(path, lambda: _say(WROTE))
    watcher.start()
    try:
        _say(READY)
        sys.stdin.buffer.readline()
    finally:
        watcher.stop()


if __name__ == "__main__":
    main(sys.argv[1])
