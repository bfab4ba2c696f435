"""A version copied to where its owner wants it: written under another name, checked, then renamed; or from there
written into the database that it replaces."""

from __future__ import annotations

import contextlib
import os
import shlex
import stat
import uuid

from headwater.errors import Corrupt, InvalidOption, NotADatabase
from headwater.replication.database_file import remove_database, replace_content, shape_of
from headwater.replication.host import disk
from headwater.replication.host.pages import sums_of
from headwater.replication.host.reading import Materialised
from headwater.replication.local_files import make_private, require_place_for
from headwater.replication.proof import check_integrity
from headwater.replication.shell import Shell

LOCKED_S_MAX = 5.0  # for a program that is using the database to end its transaction


def refuse_target(target: str, *, overwrite: bool) -> None:
    real = os.path.realpath(target)  # SQLite keeps its log beside the file itself, not beside a link to it
    require_place_for(real)
    is_there = os.path.exists(real)
    if is_there and not overwrite:
        raise InvalidOption("there is such a file", where=real, next="Name another one, or pass --overwrite")
    with disk.translated(real):
        left = disk.left_beside(real)
    if left and is_there:
        names = " and ".join(os.path.basename(each) for each in left)
        raise InvalidOption(
            "a log or journal lies beside it: the database is in use, or was not closed in order",
            where=real,
            next=f"End the programs that use it; one that opens and closes it in order takes {names} away. "
            "Or name another file",
        )
    if left:
        as_named = os.path.abspath(target) == real and not target.startswith("-")
        shown = [shlex.quote((target if as_named else real) + each.removeprefix(real)) for each in left]
        raise InvalidOption(
            "a log or journal lies here without its database", where=real, next=f"Nobody uses it? rm {' '.join(shown)}"
        )


def restore(made: Materialised, target: str, *, overwrite: bool = False) -> None:
    """A database that is there is written in one transaction, so that programs that have it open see what came; any
    other file is replaced."""
    refuse_target(target, overwrite=overwrite)
    target = os.path.realpath(target)
    writing = os.path.join(os.path.dirname(target), f".{os.path.basename(target)}.{uuid.uuid4().hex[:8]}.restoring")
    with disk.translated(target):
        try:
            make_private(writing)
            disk.copy(made.path, writing)
            if sums_of(writing).sha256 != made.version.sha256:
                raise Corrupt(
                    f"version {made.version.number} is not as it was accepted",
                    where=made.replica.name.path,
                    next="Run `headwater replica verify` to see which versions are",
                )
            check_integrity(writing, by_hand=True)
            if overwrite and _is_database(target):
                _write_into(writing, target)
                return
            disk.sync_file(writing)
            _take_rights(writing, target)
            _give_name(writing, target, overwrite=overwrite)
            disk.sync_directory(os.path.dirname(target))
        finally:
            remove_database(writing)


def _is_database(target: str) -> bool:
    """Which can be written. One that SQLite cannot read is of no use to any program that has it open."""
    try:
        return os.access(target, os.W_OK) and shape_of(target) is not None
    except (NotADatabase, Corrupt):
        return False


def _write_into(source: str, target: str) -> None:
    """In one transaction: also after a crash it is either what it was or what comes."""
    with Shell(target) as shell:
        shell.ask(f"PRAGMA busy_timeout = {LOCKED_S_MAX * 1000:.0f};")
        replace_content(source, shell)


def _take_rights(writing: str, target: str) -> None:
    """Who may read what is overwritten may read what comes, and nobody else; a file that is new is this user's."""
    with contextlib.suppress(FileNotFoundError):
        was = os.stat(target)
        with contextlib.suppress(PermissionError):  # only root gives files away
            os.chown(writing, was.st_uid, was.st_gid)
        os.chmod(writing, stat.S_IMODE(was.st_mode))


def _give_name(writing: str, target: str, *, overwrite: bool) -> None:
    if overwrite:
        disk.rename(writing, target)
        return
    try:
        os.link(writing, target)  # unlike a rename, refuses to replace what came to be there meanwhile
    except FileExistsError as exc:
        raise InvalidOption("there is such a file by now", where=target, next="Name another one") from exc
    except OSError:  # a file system without hard links
        with contextlib.suppress(FileNotFoundError):
            disk.rename(writing, target)
