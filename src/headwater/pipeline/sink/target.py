"""Which log a sink writes to, and where its tasks put down what is to be written."""

from __future__ import annotations

import hashlib
import os
import tempfile

from headwater.errors import InputOutput
from headwater.pipeline.source.place import POSTGRES, Durability, Opened, log_at

BUSY_TIMEOUT_MS = 60_000  # a batch job has more patience than a publish: giving up costs the whole batch again


def staging_folder(path: str, named: str | None) -> str:
    """Beside a log's file. A database has no beside: then in this machine's folder for such things, which is enough
    where driver and tasks run on one."""
    if named:
        return os.path.abspath(named.removeprefix("file://").removeprefix("file:"))
    if not path.startswith(POSTGRES):
        return f"{path}-staging"
    user = os.getuid() if hasattr(os, "getuid") else 0
    digest = hashlib.sha256(log_at(path).name.encode()).hexdigest()[:16]
    folder = os.path.join(tempfile.gettempdir(), f"headwater-staging-{user}-{digest}")
    if os.path.exists(folder) and os.stat(folder).st_uid != user:
        raise InputOutput("this folder is somebody else's", where=folder, next="Name another one: the option staging")
    return folder


def open_target(path: str, durability: Durability) -> Opened:
    return log_at(path).open(durability=durability, busy_timeout_ms=BUSY_TIMEOUT_MS, create=True)
