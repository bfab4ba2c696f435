"""Keeps a second SQLite library, such as the one behind the `sqlite3` module, from the file of a log.

POSIX drops all locks that a process has on a file when the process closes any descriptor of that file. SQLite knows its
own descriptors and avoids this; two SQLite libraries in one process do not know each other's. After the second one has
closed the file, another process may write while this one does; and taking itself for the last user, it removes the
write-ahead log. A mere SELECT has destroyed logs so. Nothing here opens or closes the file: device and inode are
compared.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import warnings
from collections import Counter
from typing import Any
from urllib.parse import unquote, urlsplit

import apsw

from headwater.errors import SecondLibraryError, SecondLibraryWarning

DANGER = (
    "That is a second SQLite library: when it closes the file, the log loses its locks and its write-ahead log, and "
    "the database can be damaged"
)
NEXT = (
    "In this process use apsw.Connection or log.transaction(); or open the log in another process, and publish here by "
    "INSERT INTO messages (see docs/howto/frameworks.md)"
)
DESCRIPTORS_MAX = 10_000  # beyond it, what is open already is not looked at

_open_logs: Counter[str] = Counter()  # paths, absolute
_lock = threading.Lock()
_is_hooked = False


def check_descriptors(path: str) -> None:
    """Warn, before a log is opened, if this process has the file open already, other than by apsw."""
    file = _file(path)
    if file is None or not _has_descriptor(file):
        return
    with contextlib.suppress(apsw.Error):  # a connection that is being closed
        if not any(_file(connection.filename) == file for connection in apsw.connections()):
            level, frame = 1, sys._getframe()
            while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("headwater."):
                level, frame = level + 1, frame.f_back
            warnings.warn(
                f"{path}: the file was opened in this process before the log, and not by apsw. {DANGER}. {NEXT}",
                SecondLibraryWarning,
                stacklevel=level,  # the caller's own line
            )


def watch(path: str) -> None:
    """Make `sqlite3.connect` on the file of a log raise SecondLibraryError while the log is open."""
    global _is_hooked
    with _lock:
        _open_logs[path] += 1
        if not _is_hooked:
            _is_hooked = True
            sys.addaudithook(_on_event)
            os.register_at_fork(after_in_child=_open_logs.clear)  # the locks are those of the parent


def unwatch(path: str) -> None:
    with _lock:
        _open_logs[path] -= 1
        if _open_logs[path] <= 0:
            del _open_logs[path]


def _on_event(event: str, arguments: tuple[Any, ...]) -> None:
    """Refuse `sqlite3.connect` on an open log. Called for every audit event of the process, so most calls end with the
    first line."""
    if event != "sqlite3.connect" or not _open_logs:
        return
    files = {_file(path) for path in _paths_of(arguments[0])} - {None}
    for path in list(_open_logs):
        if files and _file(path) in files:
            raise SecondLibraryError(
                f"sqlite3.connect() on a log that is open in this process is refused. {DANGER}", where=path, next=NEXT
            )


def _paths_of(database: object) -> list[str]:
    """The paths that `sqlite3.connect` may mean; whether a text is to be read as a URI, the event does not say."""
    if not isinstance(database, str | bytes | os.PathLike):
        return []
    path = os.fsdecode(database)
    return [path, unquote(urlsplit(path).path)] if path.startswith("file:") else [path]


def _file(path: str) -> tuple[int, int] | None:
    try:
        found = os.stat(path)
    except (OSError, ValueError):  # no such file; :memory:; a NUL within
        return None
    return found.st_dev, found.st_ino


def _has_descriptor(file: tuple[int, int]) -> bool:
    try:
        numbers = os.listdir("/dev/fd")
    except OSError:
        return False
    for number in numbers[:DESCRIPTORS_MAX]:
        with contextlib.suppress(OSError, ValueError):  # the one of the listing itself is closed
            found = os.fstat(int(number))
            if (found.st_dev, found.st_ino) == file:
                return True
    return False
