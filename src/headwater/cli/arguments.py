"""The arguments that commands share, and opening the log that a command names."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

import headwater
from headwater.cli.output import note
from headwater.errors import InvalidOptionError, NotALogError, UnauthorizedError
from headwater.formats import TIME_HELP, is_postgres, mask_url, parse_time

if TYPE_CHECKING:
    from headwater.broker.subscribe import Start
    from headwater.wiring import AllOptions, OpenOptions

CONNECT_S_MAX = 3.0  # a command gives up on a server that does not answer
REMOTE = ("ws://", "wss://")

LogPath = Annotated[
    str,
    typer.Argument(
        metavar="LOG",
        help="The log: a file like events.db, a database like postgres://host/name, or a server like ws://host:8765.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]

_PANEL = "With a server"
_Token = Annotated[
    str | None,
    typer.Option(
        "--token",
        metavar="TOKEN",
        help="Shown to the server. Better in HEADWATER_TOKEN: other users can see arguments.",
        rich_help_panel=_PANEL,
    ),
]
_Ca = Annotated[
    str | None,
    typer.Option(
        "--ca",
        metavar="FILE",
        help="Certificates to trust for wss://, instead of the system's.",
        rich_help_panel=_PANEL,
    ),
]


class LogName(str):
    """A LOG as it was named, with the credentials for a server."""

    token: str | None = None
    ca: str | None = None


def takes_log(command: Callable[..., None]) -> Callable[..., None]:
    """For commands whose parameter `path` is a LogPath: they get --token and --ca too, and a LogName."""

    @functools.wraps(command)
    def with_log_name(*, path: str, token: str | None, ca: str | None, **rest: Any) -> None:
        name = LogName(path)
        name.token, name.ca = token, ca
        if not is_remote(name) and (token or ca):
            given = "--token" if token else "--ca"
            kind = "a file" if is_file(path) else "a database"
            next = "Name it like ws://host:8765"
            raise InvalidOptionError(f"{given} is for a server, and {shown_name(path)} is {kind}", next=next)
        command(path=name, **rest)

    signature = inspect.signature(command, eval_str=True)
    kind = inspect.Parameter.KEYWORD_ONLY
    parameters = [parameter.replace(kind=kind) for parameter in signature.parameters.values()]
    ours = {"token": _Token, "ca": _Ca}
    parameters += [inspect.Parameter(name, kind, default=None, annotation=hint) for name, hint in ours.items()]
    with_log_name.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    with_log_name.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return with_log_name


def is_remote(path: str) -> bool:
    return path.startswith(REMOTE)


def shown_name(path: str) -> str:
    """The log as it was named, without a password."""
    return str(path) if is_file(path) else mask_url(path)


def is_file(path: str) -> bool:
    return not is_remote(path) and not is_postgres(path)


@contextmanager
def existing_log(path: str, **options: object) -> Iterator[headwater.Log]:
    """The log at `path`, which must exist: an inspection must not create one."""
    if is_remote(path):
        with _connected(path) as log:
            yield log
        return
    if is_file(path):
        require_log(path)
    with _opened(path, create=False, **options) as log:
        yield log


@contextmanager
def log_or_new_one(path: str) -> Iterator[headwater.Log]:
    """The log at `path`, created if it does not exist; a note says so, because the name may be a typo."""
    if is_remote(path):
        with _connected(path) as log:
            yield log
        return
    is_new = is_file(path) and not os.path.exists(file_of(path))
    with _opened(path) as log:
        if is_new:
            note(f"made a new log: {file_of(path)}")
        yield log


@contextmanager
def _opened(path: str, **options: object) -> Iterator[headwater.Log]:
    settings: OpenOptions = {"maintenance_interval": None}
    settings.update(options)  # type: ignore[typeddict-item]
    with headwater.open(file_of(path) if is_file(path) else str(path), **settings) as log:
        yield log


@contextmanager
def _connected(url: str) -> Iterator[headwater.Log]:
    options: AllOptions = {"connect_timeout": CONNECT_S_MAX}
    if isinstance(url, LogName):
        options |= {"token": url.token, "ca": url.ca}
    try:
        opened = headwater.open(str(url), **options)
    except UnauthorizedError as exc:
        next = "Pass --token, or set HEADWATER_TOKEN; on the server's machine, headwater token create makes one"
        raise UnauthorizedError(exc.why, where=str(url), next=next) from exc
    with opened as log:
        notes = _ConnectionNotes(log.name)
        log.remote.on_state(notes.on_state)
        try:
            yield log
        finally:
            notes.is_over = True


class _ConnectionNotes:
    """Notes while a command waits: the connection broke, and is back."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._is_broken = False
        self.is_over = False

    def on_state(self, state: str) -> None:
        if self.is_over:
            return
        if state == "reconnecting" and not self._is_broken:
            self._is_broken = True
            note(f"lost {self._url}; trying again")
        elif state == "connected" and self._is_broken:
            self._is_broken = False
            note(f"connected again to {self._url}")


def require_log(path: str) -> str:
    """The path of a file that may be a log; a clear error if it is not there, or empty."""
    file = file_of(path)
    if not os.path.exists(file):
        raise InvalidOptionError(
            f"there is no log {file}", next=f"Publish to it first: headwater publish {file} TOPIC DATA"
        )
    if os.path.isfile(file) and os.stat(file).st_size == 0:
        raise NotALogError("the file is empty", where=file, next=f"Make it a log: headwater publish {file} TOPIC DATA")
    return file


def file_of(path: str) -> str:
    """The file behind `events.db`, `sqlite:events.db` or `sqlite://events.db`."""
    if path == "memory:" or not path:
        raise InvalidOptionError(f"{path!r} would be gone when the command ends", next="Name a file, like events.db")
    scheme, found, rest = path.partition("://")
    if found and scheme != "sqlite":
        meant = {"http": f"Did you mean ws://{rest}?", "https": f"Did you mean wss://{rest}?"}
        next = meant.get(scheme, "Name a file, like events.db, postgres://host/name, or a server, like ws://host:8765")
        raise InvalidOptionError(f"there is no store for {scheme}:// here", next=next)  # the rest may hold a password
    return rest.removeprefix("/") if found else path.removeprefix("sqlite:")  # as headwater.open reads it


def parse_start(text: str, name: str, *, inclusive: bool = False) -> Start:
    """Where to begin reading: `first`, `new`, a seq or a time. The library begins after the seq it is given; with
    `inclusive` the message of that seq is read too."""
    if text == "first":
        return "first"
    if text == "new":
        return "new"
    if text.isascii() and text.isdigit():
        return max(0, int(text) - inclusive)
    try:
        return parse_time(text, name, datetime.now().astimezone())
    except InvalidOptionError:
        next = f"Write first, new, a seq, or a time {TIME_HELP}"
        raise InvalidOptionError(f"{name} is no place in a log: {text[:40]!r}", next=next) from None


# --- groups -----------------------------------------------------------------------------------------------------------


LISTING = "ls"
_WITH_VALUE = ("--token", "--key", "--ca", "--stale")  # options that take a value


class ListsByDefault(TyperGroup):
    """A group that lists when it is given just a log: `headwater dlq events.db`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        words = [arg for before, arg in pairwise(["", *args]) if not arg.startswith("-") and before not in _WITH_VALUE]
        asks_help = any(arg in ("--help", "-h") for arg in args)
        if words and words[0] not in self.commands and not asks_help and _names_a_file(words[0]):
            args = [LISTING, *args]
        return super().parse_args(ctx, args)


def _names_a_file(word: str) -> bool:
    """Rather than a misspelt command."""
    return os.path.exists(word) or any(mark in word for mark in "./:")
