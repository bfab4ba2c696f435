"""Proof of a version: that its bytes are those that were accepted, that they are a whole database, that its content is
what the client pushed, and that it can be restored."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import closing

import apsw
import msgspec

from headwater.errors import Corrupt, HeadwaterError, UnknownReplica
from headwater.replication.host import disk
from headwater.replication.host.catalogue import Catalogue
from headwater.replication.host.layout import Layout
from headwater.replication.host.pages import shape_of, sums_of
from headwater.replication.host.reading import Materialised, materialise, refuse_removed
from headwater.replication.host.records import Replica
from headwater.replication.host.restoring import BY_HAND_S_MAX, restore
from headwater.replication.proof import check_integrity, dbhash
from headwater.stores.sqlite.connection import translated as translated_sqlite


class Check(msgspec.Struct, frozen=True):
    """`said`: what was found, or why not."""

    what: str
    ok: bool
    said: str


class Verdict(msgspec.Struct, frozen=True):
    name: str
    version: int
    checks: tuple[Check, ...]

    @property
    def ok(self) -> bool:
        return all(check.ok for check in self.checks)


def verify(layout: Layout, catalogue: Catalogue, replica: Replica, number: int) -> Verdict:
    """Raises UnknownReplica when it has gone, or goes meanwhile: that says nothing bad of it."""
    checks: list[Check] = []
    try:
        made = materialise(layout, catalogue, replica, number, check=False)
    except UnknownReplica:
        raise
    except HeadwaterError as exc:
        return Verdict(replica.name.path, number, (Check("files", False, exc.why),))
    with made:
        is_newest = made.version.delta_bytes is None
        checks.append(Check("files", True, "the newest, whole" if is_newest else "rebuilt; every delta has its hash"))
        for what, look in _CHECKS.items():
            try:
                with disk.translated(made.path):
                    checks.append(Check(what, True, look(made)))
            except HeadwaterError as exc:
                checks.append(Check(what, False, exc.why))
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
    check_integrity(path, BY_HAND_S_MAX)
    return "integrity_check found nothing"


def prove_content(path: str, pushed: str | None) -> str:
    """`pushed`: the hash that came with the push."""
    if pushed is None:
        return "no hash came with it"
    if (found := dbhash(path)) != pushed:
        raise Corrupt(f"its content hashes to {found}, and the pushed database to {pushed}")
    return "hashes equal to the pushed database"


def _drill(made: Materialised) -> str:
    target = os.path.join(made.directory, "drill.db")
    restore(made, target)
    with translated_sqlite(target), closing(apsw.Connection(target, flags=apsw.SQLITE_OPEN_READWRITE)) as connection:
        pages = connection.pragma("page_count")
        connection.execute("SELECT count(*) FROM sqlite_schema").fetchall()
    if pages != made.version.pages:
        raise Corrupt(f"the restored file has {pages:,} pages, and {made.version.pages:,} were accepted")
    return "restored elsewhere, opened and read"


_CHECKS: dict[str, Callable[[Materialised], str]] = {
    "bytes": _bytes,
    "integrity": lambda made: prove_integrity(made.path),
    "content": lambda made: prove_content(made.path, made.version.dbhash),
    "restore": _drill,
}
