"""Getting at the log that a command names, and the arguments that all commands share."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer

import headwater
from headwater.cli.output import note
from headwater.errors import InvalidOption, NotALog
from headwater.wiring import OpenOptions

LogPath = Annotated[str, typer.Argument(metavar="LOG", help="The log: a file like events.db.", show_default=False)]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]


@contextmanager
def existing_log(path: str, **options: object) -> Iterator[headwater.Log]:
    """The log at `path`, which must be there: looking must not make one."""
    require_log(path)
    with _opened(path, **options) as log:
        yield log


@contextmanager
def log_or_new_one(path: str) -> Iterator[headwater.Log]:
    """The log at `path`, made if need be; a note says so, for it may have been a slip of the fingers."""
    is_new = not os.path.exists(file_of(path))
    with _opened(path) as log:
        if is_new:
            note(f"made a new log: {file_of(path)}")
        yield log


@contextmanager
def _opened(path: str, **options: object) -> Iterator[headwater.Log]:
    settings: OpenOptions = {"housekeeping": None}
    settings.update(options)  # type: ignore[typeddict-item]
    with headwater.open(file_of(path), **settings) as log:
        yield log


def require_log(path: str) -> str:
    """The path of a file that may be a log; a clear error if it is not there, or empty."""
    file = file_of(path)
    if not os.path.exists(file):
        raise InvalidOption(f"there is no log {file}", next=f"Publish to it first: headwater publish {file} TOPIC DATA")
    if os.path.isfile(file) and os.stat(file).st_size == 0:
        raise NotALog("the file is empty", where=file, next=f"Make it a log: headwater publish {file} TOPIC DATA")
    return file


def file_of(path: str) -> str:
    """The file behind `events.db`, `sqlite:events.db` or `sqlite://events.db`."""
    if path == "memory:" or not path:
        raise InvalidOption(f"{path!r} would be gone when the command ends", next="Name a file, like events.db")
    scheme, found, rest = path.partition("://")
    if found and scheme != "sqlite":
        raise InvalidOption(f"there is no store for {scheme}:// here", where=path, next="Name a file, like events.db")
    return rest if found else path.removeprefix("sqlite:")
