"""Files of this machine: which one has a name now, and mistakes, found before anything is done and any server asked."""

from __future__ import annotations

import contextlib
import os
import shlex
import subprocess

from headwater.errors import DiskFull, InvalidOption, NotADatabase

Identity = tuple[int, int]  # device and inode
MAGIC = b"SQLite format 3\0"  # at the beginning of every database but an empty one


def identity_of(path: str) -> Identity | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def refuse_no_database(path: str) -> None:
    """Of a file, if it is there: before any tool of SQLite opens it, for some take a file by its name or its content
    for something else, like a script. An empty file is an empty database. Blocks.

    A child process reads it: closing it here would take the locks away that this process has on it."""
    if not os.path.exists(path) or os.path.getsize(path) == 0:
        return
    command = ["head", "-c", str(len(MAGIC)), "--", os.path.abspath(path)]
    try:
        read = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):  # no such tool, or no right to read it: SQLite looks for itself
        return
    if read != MAGIC:
        raise NotADatabase("this is no SQLite database", where=path, next="Name another file")


def private(path: str, flags: int) -> int:
    """An opener: a file that it makes is for this user alone."""
    return os.open(path, flags, 0o600)


def make_private(path: str) -> None:
    """An empty one, if there is none: what SQLite makes itself, others may read. If it cannot be made, who writes it
    says why."""
    with contextlib.suppress(OSError):
        os.close(private(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL))


def require_file(path: str) -> None:
    """For what is read."""
    if os.path.isdir(path):
        raise InvalidOption("this is a directory", where=path, next="Name a database file in it")
    if not os.path.exists(path):
        directory = os.path.dirname(os.path.realpath(path))
        where = f"it was looked for in {directory}" if os.path.isdir(directory) else f"there is no {directory} either"
        raise InvalidOption("there is no such file", where=path, next=f"Check the path; {where}")


def require_place_for(path: str) -> None:
    """For what is written, and may be new."""
    if os.path.isdir(path):
        raise InvalidOption("this is a directory", where=path, next="Name a file in it")
    directory = os.path.dirname(os.path.realpath(path))
    if not os.path.isdir(directory):
        mend = f"mkdir -p {shlex.quote(directory)}"
        raise InvalidOption("the directory does not exist", where=directory, next=mend)


def no_room(path: str) -> DiskFull:
    """For what was to be written there."""
    return DiskFull("there is no room for it", where=path, next="Free some disk space and try again")
