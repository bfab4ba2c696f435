"""Proof of a version: that its bytes are those that were accepted, that they are a whole database, that its content is
what the client pushed, and that it can be restored."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Literal

import msgspec

from headwater.errors import Corrupt, DiskFull, HeadwaterError, ReadOnly, UnknownReplica
from headwater.replication.database_file import shape_seen_by
from headwater.replication.host import disk
from headwater.replication.host.catalogue import Catalogue
from headwater.replication.host.layout import Layout
from headwater.replication.host.pages import shape_of, sums_of
from headwater.replication.host.reading import Materialised, materialise, refuse_removed
from headwater.replication.host.records import Replica
from headwater.replication.host.restoring import restore
from headwater.replication.proof import check_integrity, dbhash
from headwater.replication.shell import Shell

NO_HASH = "no hash came with it"

Lacking = Literal["room", "rights", "hash"]
Finding = Literal["proved", "whole", "not checked", "bad"]
_LACKING: dict[type[HeadwaterError], Lacking] = {DiskFull: "room", ReadOnly: "rights"}


class Check(msgspec.Struct, frozen=True):
    """`said`: what was found, or why not. `lacks`: what it would have needed; without room or rights nothing was found,
    neither good nor bad."""

    what: str
    ok: bool
    said: str
    lacks: Lacking | None = None


class Verdict(msgspec.Struct, frozen=True):
    name: str
    version: int
    checks: tuple[Check, ...]

    @property
    def ok(self) -> bool:
        return all(check.ok for check in self.checks)

    @property
    def finding(self) -> Finding:
        """`whole`: nothing is wrong with it, but no hash came with it to prove its content by."""
        if any(not check.ok and check.lacks is None for check in self.checks):
            return "bad"
        if not self.ok:
            return "not checked"
        return "proved" if all(check.lacks is None for check in self.checks) else "whole"

    @property
    def lacks(self) -> Lacking | None:
        """What the first check that could not be made would have needed."""
        return next((check.lacks for check in self.checks if not check.ok and check.lacks is not None), None)


def passed(what: str, said: str) -> Check:
    return Check(what, True, said, "hash" if said == NO_HASH else None)


def failed(what: str, error: HeadwaterError) -> Check:
    """A full disk says nothing about the version, nor does a directory that may not be written."""
    lacks = next((lacks for kind, lacks in _LACKING.items() if isinstance(error, kind)), None)
    return Check(what, False, error.why, lacks)


def verify(layout: Layout, catalogue: Catalogue, replica: Replica, number: int) -> Verdict:
    """Raises UnknownReplica when it has gone, or goes meanwhile: that says nothing bad of it."""
    checks: list[Check] = []
    try:
        made = materialise(layout, catalogue, replica, number, check=False)
    except UnknownReplica:
        raise
    except HeadwaterError as exc:
        return Verdict(replica.name.path, number, (failed("files", exc),))
    with made:
        is_newest = made.version.delta_bytes is None
        checks.append(passed("files", "the newest, whole" if is_newest else "rebuilt; every delta has its hash"))
        for what, look in _CHECKS.items():
            try:
                with disk.translated(made.path):
                    checks.append(passed(what, look(made)))
            except HeadwaterError as exc:
                checks.append(failed(what, exc))
    verdict = Verdict(replica.name.path, number, tuple(checks))
    if not verdict.ok:
        refuse_removed(catalogue, replica)
    return verdict


def _bytes(made: Materialised) -> str:
    size, noted = os.stat(made.path).st_size, made.version
    if size != noted.size:
        raise Corrupt(f"it has {size:,} bytes, and {noted.size:,} were accepted")
    shape = shape_of(made.path)
    if shape != (noted.page_size, noted.pages):
        raise Corrupt(f"it has {shape.pages:,} pages of {shape.page_size:,}, and {noted.pages:,} were accepted")
    if sums_of(made.path).sha256 != noted.sha256:
        raise Corrupt("bytes are others than those that were accepted")
    return f"as accepted: {shape.pages:,} pages of {shape.page_size:,} bytes"


def prove_integrity(path: str) -> str:
    check_integrity(path, by_hand=True)
    return "integrity_check found nothing"


def prove_content(path: str, pushed: str | None) -> str:
    """`pushed`: the hash that came with the push."""
    if pushed is None:
        return NO_HASH
    if (found := dbhash(path)) != pushed:
        raise Corrupt(f"its content hashes to {found}, and the pushed database to {pushed}")
    return "hashes equal to the pushed database"


def _drill(made: Materialised) -> str:
    if made.directory is None:
        raise DiskFull("no room for it")
    target = os.path.join(made.directory, "drill.db")
    restore(made, target)
    with Shell(target) as shell:
        pages = shape_seen_by(shell).pages
        shell.ask("SELECT count(*) FROM sqlite_schema;")
    if pages != made.version.pages:
        raise Corrupt(f"the restored file has {pages:,} pages, and {made.version.pages:,} were accepted")
    return "restored elsewhere, opened and read"


_CHECKS: dict[str, Callable[[Materialised], str]] = {
    "bytes": _bytes,
    "integrity": lambda made: prove_integrity(made.path),
    "content": lambda made: prove_content(made.path, made.version.dbhash),
    "restore": _drill,
}
