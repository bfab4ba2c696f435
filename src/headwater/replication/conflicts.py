"""What to do about a conflict: it depends on how the database came to it."""

from __future__ import annotations

import shlex

from headwater.errors import VersionConflict
from headwater.replication.names import Remote


def no_such_base(conflict: VersionConflict, base: int, remote: Remote) -> VersionConflict:
    """The caller named a version that there never was."""
    newest = f"the newest is {conflict.newest}" if conflict.newest else "there is none yet"
    next = f"Name the version that this database comes from, or push over the newest one: {remote.key}@latest"
    if not conflict.newest:
        next = f"Leave @{base} out"
    return VersionConflict(f"there is no version {base}: {newest}", where=remote.key, next=next, newest=conflict.newest)


def nothing_written(conflict: VersionConflict, base: int, remote: Remote, local: str) -> VersionConflict:
    """There are newer versions, and nothing here that they lack."""
    return VersionConflict(
        f"the newest version is {conflict.newest}, and this database is version {base} unchanged: nothing to push",
        where=remote.key,
        next=f"A pull is all it needs: headwater sync {remote.key} {shlex.quote(local)}",
        newest=conflict.newest,
    )
