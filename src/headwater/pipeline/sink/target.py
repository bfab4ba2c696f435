"""Which log a sink writes to."""

from __future__ import annotations

import os

from headwater.errors import InvalidOption
from headwater.stores.sqlite import Durability, SqliteStore

BUSY_TIMEOUT_MS = 60_000  # a batch job has more patience than a publish: giving up costs the whole batch again


def target_path(url: str) -> str:
    """The absolute path of the log's file, so that tasks and driver mean the same one wherever they run."""
    if url in ("memory:", ":memory:"):
        raise InvalidOption("a log in memory ends with its process", where=url, next="Name the file of a log")
    scheme, found, rest = url.partition("://")
    if found and scheme in ("ws", "wss"):
        raise InvalidOption(
            "Spark does not write through a server", where=url, next="Name the file of the log that the server serves"
        )
    if found and scheme not in ("sqlite", "file"):
        raise InvalidOption(f"Spark cannot write to {scheme}:// yet", where=url, next="Name the file of a log")
    if found:
        path = rest.removeprefix("/") if scheme == "sqlite" else rest  # sqlite:///relative, sqlite:////absolute
    else:
        path = url.removeprefix("sqlite:").removeprefix("file:")
    if not path:
        raise InvalidOption("no file is named", where=f"path {url!r}", next="Name the file of a log")
    return os.path.abspath(path)


def open_target(path: str, durability: Durability) -> SqliteStore:
    return SqliteStore(path, durability=durability, busy_timeout_ms=BUSY_TIMEOUT_MS)
