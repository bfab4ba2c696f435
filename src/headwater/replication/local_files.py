"""Files of this machine: which one has a name now, and mistakes, found before anything is done and any server asked."""

from __future__ import annotations

import os
import shlex

from headwater.errors import DiskFull, InvalidOption

Identity = tuple[int, int]  # device and inode


def identity_of(path: str) -> Identity | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino


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
