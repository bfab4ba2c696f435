"""Verification and restoration of versions.

A version is proved by its bytes, its integrity, the hash of its content, and a restore into a temporary file."""

from __future__ import annotations

import contextlib
import os
import shlex
import stat
import uuid
from collections.abc import Callable
from typing import Literal

import msgspec

from headwater.errors import (
    CorruptError,
    DiskFullError,
    HeadwaterError,
    InvalidOptionError,
    NotADatabaseError,
    ReadOnlyError,
    UnknownReplicaError,
)
from headwater.files import sync_file
from headwater.replication import local_database
from headwater.replication.host import disk
from headwater.replication.host.catalogue import Catalogue, Replica
from headwater.replication.host.disk import Layout
from headwater.replication.host.versions import OpenedVersion, open_version, refuse_removed, sha256_of, shape_of
from headwater.replication.integrity import check_integrity, dbhash
from headwater.replication.local_database import (
    Shell,
    make_private,
    remove_database,
    replace_content,
    require_place_for,
)

NO_HASH = "no hash came with it"

LOCKED_S_MAX = 5.0  # for other programs to end their transactions

Missing = Literal["space", "rights", "hash"]
Finding = Literal["proved", "whole", "not checked", "bad"]
_MISSING: dict[type[HeadwaterError], Missing] = {DiskFullError: "space", ReadOnlyError: "rights"}


class Check(msgspec.Struct, frozen=True):
    """`details`: the finding or the error. `missing`: what the check would have needed; without space or rights there
    is no finding, neither good nor bad."""

    what: str
    ok: bool
    details: str
    missing: Missing | None = None


class VersionVerdict(msgspec.Struct, frozen=True):
    name: str
    version: int
    checks: tuple[Check, ...]

    @property
    def ok(self) -> bool:
        return all(check.ok for check in self.checks)

    @property
    def finding(self) -> Finding:
        """`whole`: intact, but it was pushed without a hash that could prove its content."""
        if any(not check.ok and check.missing is None for check in self.checks):
            return "bad"
        if not self.ok:
            return "not checked"
        return "proved" if all(check.missing is None for check in self.checks) else "whole"

    @property
    def missing(self) -> Missing | None:
        """What the first check that could not be made would have needed."""
        return next((check.missing for check in self.checks if not check.ok and check.missing is not None), None)


def passed(what: str, details: str) -> Check:
    return Check(what, True, details, "hash" if details == NO_HASH else None)


def failed(what: str, error: HeadwaterError) -> Check:
    """A check that failed, or could not be made: neither a full disk nor a directory without write access says anything
    about the version."""
    missing = next((missing for kind, missing in _MISSING.items() if isinstance(error, kind)), None)
    return Check(what, False, error.why, missing)


def verify(layout: Layout, catalogue: Catalogue, replica: Replica, number: int) -> VersionVerdict:
    """Raises UnknownReplicaError when the version was removed, also meanwhile: that is no finding."""
    checks: list[Check] = []
    try:
        made = open_version(layout, catalogue, replica, number, check=False)
    except UnknownReplicaError:
        raise
    except HeadwaterError as exc:
        return VersionVerdict(replica.name.path, number, (failed("files", exc),))
    with made:
        is_newest = made.version.delta_bytes is None
        checks.append(passed("files", "the newest, whole" if is_newest else "rebuilt; every delta has its hash"))
        for what, check in _CHECKS.items():
            try:
                with disk.translated(made.path):
                    checks.append(passed(what, check(made)))
            except HeadwaterError as exc:
                checks.append(failed(what, exc))
    verdict = VersionVerdict(replica.name.path, number, tuple(checks))
    if not verdict.ok:
        refuse_removed(catalogue, replica)
    return verdict


def _bytes(made: OpenedVersion) -> str:
    size, version = os.stat(made.path).st_size, made.version
    if size != version.size:
        raise CorruptError(f"it has {size:,} bytes, and {version.size:,} were accepted")
    shape = shape_of(made.path)
    if shape != (version.page_size, version.pages):
        raise CorruptError(f"it has {shape.pages:,} pages of {shape.page_size:,}, and {version.pages:,} were accepted")
    if sha256_of(made.path) != version.sha256:
        raise CorruptError("bytes differ from those that were accepted")
    return f"as accepted: {shape.pages:,} pages of {shape.page_size:,} bytes"


def prove_integrity(path: str) -> str:
    check_integrity(path, interactive=True)
    return "integrity_check found nothing"


def prove_content(path: str, pushed: str | None) -> str:
    """`pushed`: the hash that came with the push."""
    if pushed is None:
        return NO_HASH
    if (found := dbhash(path)) != pushed:
        raise CorruptError(f"its content hashes to {found}, and the pushed database to {pushed}")
    return "hashes equal to the pushed database"


def _restore_drill(made: OpenedVersion) -> str:
    if made.directory is None:
        raise DiskFullError("the disk is full")
    target = os.path.join(made.directory, "drill.db")
    restore(made, target)
    with Shell(target) as shell:
        pages = shell.shape().pages
        shell.ask("SELECT count(*) FROM sqlite_schema;")
    if pages != made.version.pages:
        raise CorruptError(f"the restored file has {pages:,} pages, and {made.version.pages:,} were accepted")
    return "restored elsewhere, opened and read"


_CHECKS: dict[str, Callable[[OpenedVersion], str]] = {
    "bytes": _bytes,
    "integrity": lambda made: prove_integrity(made.path),
    "content": lambda made: prove_content(made.path, made.version.dbhash),
    "restore": _restore_drill,
}


# --- restore --------------------------------------------------------------------------------------------------------


def refuse_target(target: str, *, overwrite: bool) -> None:
    real = os.path.realpath(target)  # SQLite keeps its log next to the file itself, not next to a link
    require_place_for(real)
    is_there = os.path.exists(real)
    if is_there and not overwrite:
        raise InvalidOptionError("the file exists", where=real, next="Name another one, or pass --overwrite")
    with disk.translated(real):
        left = disk.sidecars_in_use(real)
    if left and is_there:
        names = " and ".join(os.path.basename(each) for each in left)
        raise InvalidOptionError(
            "a log or journal is next to it: the database is in use, or was not closed in order",
            where=real,
            next=f"End the programs that use it; one that opens and closes it in order removes {names}. "
            "Or name another file",
        )
    if left:
        as_named = os.path.abspath(target) == real and not target.startswith("-")
        shown = [shlex.quote((target if as_named else real) + each.removeprefix(real)) for each in left]
        raise InvalidOptionError(
            "a log or journal is here without its database",
            where=real,
            next=f"If no program uses it: rm {' '.join(shown)}",
        )


def restore(made: OpenedVersion, target: str, *, overwrite: bool = False) -> None:
    """Copy a version to `target`: written under another name, checked, then renamed. An existing database is written in
    one transaction instead, so that programs that have it open see the new content."""
    refuse_target(target, overwrite=overwrite)
    target = os.path.realpath(target)
    draft = os.path.join(os.path.dirname(target), f".{os.path.basename(target)}.{uuid.uuid4().hex[:8]}.restoring")
    with disk.translated(target):
        try:
            make_private(draft)
            disk.copy(made.path, draft)
            if sha256_of(draft) != made.version.sha256:
                raise CorruptError(
                    f"version {made.version.number} is not as it was accepted",
                    where=made.replica.name.path,
                    next="Run `headwater replica verify` to see which versions are",
                )
            check_integrity(draft, interactive=True)
            if overwrite and _is_database(target):
                _write_into(draft, target)
                return
            sync_file(draft)
            _copy_mode(draft, target)
            _give_name(draft, target, overwrite=overwrite)
            sync_file(os.path.dirname(target))
        finally:
            remove_database(draft)


def _is_database(target: str) -> bool:
    """Whether it is a readable and writable database."""
    try:
        return os.access(target, os.W_OK) and local_database.shape_of(target) is not None
    except (NotADatabaseError, CorruptError):
        return False


def _write_into(source: str, target: str) -> None:
    """Write in one transaction: after a crash the file has either the old content or the new one."""
    with Shell(target) as shell:
        shell.ask(f"PRAGMA busy_timeout = {LOCKED_S_MAX * 1000:.0f};")
        replace_content(source, shell)


def _copy_mode(draft: str, target: str) -> None:
    """Give the new file the owner and the mode of the one that it replaces."""
    with contextlib.suppress(FileNotFoundError):
        was = os.stat(target)
        with contextlib.suppress(PermissionError):  # only root gives files away
            os.chown(draft, was.st_uid, was.st_gid)
        os.chmod(draft, stat.S_IMODE(was.st_mode))


def _give_name(draft: str, target: str, *, overwrite: bool) -> None:
    if overwrite:
        os.replace(draft, target)
        return
    try:
        os.link(draft, target)  # unlike a rename, never replaces a file
    except FileExistsError as exc:
        raise InvalidOptionError("the file exists now", where=target, next="Name another one") from exc
    except OSError:  # a file system without hard links
        with contextlib.suppress(FileNotFoundError):
            os.replace(draft, target)
