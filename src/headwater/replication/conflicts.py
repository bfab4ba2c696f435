"""What to do about a conflict: it depends on how the database came to it."""

from __future__ import annotations

import shlex

from headwater.errors import ReplicationFailed, VersionConflict
from headwater.replication.asking import Newest
from headwater.replication.beside import Beside, Noted
from headwater.replication.names import Remote


class Recognised(Exception):
    """There is perhaps no conflict, now that it is known what the database is."""

    def __init__(self, noted: Noted) -> None:
        super().__init__(f"version {noted.base}")
        self.noted = noted


def recognised(newest: Newest, here: str | None, noted: Noted, beside: Beside) -> Noted | None:
    """What a database is of which the notes under this address say nothing, or what is no longer true: the newest
    version, if its content is that one's, so that nothing can be lost; or what was noted last, under another address of
    this replica."""
    if here is not None and here == newest.dbhash:
        known = Noted(replica_id=newest.replica_id, base=newest.version, dbhash=here)
    else:
        known = beside.noted_of(newest.replica_id) or Noted()
    tells_more = (known.base, known.dbhash) != (noted.base, noted.dbhash)
    return known if known.base and tells_more else None


def half_pulled(remote: Remote, local: str) -> ReplicationFailed:
    """A pull has begun to write it, and nobody knows how far it came."""
    return ReplicationFailed(
        "a pull into this database was killed, so it is not known which version it comes from",
        where=local,
        next=f"Pull again, or push over the newest version: {remote.key}@latest",
    )


def another_replica(newest: int, remote: Remote) -> VersionConflict:
    """The name is the same, and what has it now is not what the database was synced with."""
    return VersionConflict(
        "this is another replica than the one that the database was synced with: it was made anew",
        where=remote.key,
        next=f"Pull it elsewhere and compare, or push over it: {remote.key}@latest",
        newest=newest,
    )


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
        f"the newest version is {conflict.newest}, and this database is version {base} unchanged",
        where=remote.key,
        next=f"To have the newest here: headwater sync {remote.key} {shlex.quote(local)}; "
        f"to make this one the newest: headwater sync {shlex.quote(local)} {remote.key}@latest",
        newest=conflict.newest,
    )


def stale(conflict: VersionConflict, base: int, remote: Remote) -> VersionConflict:
    """Both have what the other one lacks, for all that is known."""
    comes = f"comes from version {base}" if base else "was never synced with it"
    return VersionConflict(
        f"the newest version is {conflict.newest}, and this database {comes}",
        where=remote.key,
        next=f"Pull it elsewhere and merge by hand, or push over it: {remote.key}@latest",
        newest=conflict.newest,
    )
