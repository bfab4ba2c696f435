"""The grammar that commands share: LOG and its default, spellings of flags, positions; and opening the named log."""

from __future__ import annotations

import glob
import math
import os
import re
import shlex
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from copy import copy
from datetime import datetime
from difflib import get_close_matches
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, cast

import typer
from typer.core import TyperCommand, TyperGroup

import headwater
from headwater.cli.completion import WORDS
from headwater.cli.output import note
from headwater.cli.parameters import Shared, argument, declared, flag, option
from headwater.errors import (
    HeadwaterError,
    InvalidConfigurationError,
    InvalidOptionError,
    NotALogError,
    UnauthorizedError,
)
from headwater.formats import TIME_HELP, is_postgres, mask_url, parse_time, refuse_mistyped_url

if TYPE_CHECKING:
    from headwater.broker.subscribe import Start

F = TypeVar("F", bound=Callable[..., Any])

CONNECT_S_MAX = 3.0  # a command gives up on a server that does not answer
REMOTE = ("ws://", "wss://")

LOG_VARIABLE, LAKE_VARIABLE = "HEADWATER_LOG", "HEADWATER_LAKE"
CONFIG_VARIABLE, PROFILE_VARIABLE, CONFIG_FILE = "HEADWATER_CONFIG", "HEADWATER_PROFILE", "headwater.toml"

START_HELP = f"first, new, a seq (7: from message 7 on), or a time {TIME_HELP}"

AsJson = Annotated[bool, flag("Print JSON for programs.", "--json")]

_with_server = partial(option, rich_help_panel="With a server")
LogPath = Annotated[
    str,
    argument(
        "LOG",
        "The log: a file like events.db, a database like postgres://host/name, or a server like ws://host:8765. "
        "Else HEADWATER_LOG.",
        offers="log",
        show_default=False,
    ),
]
Token = Annotated[
    str | None,
    _with_server("TOKEN", "The token for the server. HEADWATER_TOKEN is safer: other users can see arguments."),
]
Ca = Annotated[str | None, _with_server("FILE", "Certificates to trust for wss://, instead of the system's.")]


class LogName(Shared, str):
    """A LOG as it was named, with the credentials for a server."""

    token: str | None
    ca: str | None

    def __new__(cls, path: LogPath, token: Token = None, ca: Ca = None) -> LogName:
        name = super().__new__(cls, path)
        name.token, name.ca = token, ca
        if not is_remote(name) and (token or ca):
            given = "--token" if token else "--ca"
            kind = "a file" if is_file(path) else "a database"
            next = "Name it like ws://host:8765"
            raise InvalidOptionError(f"{given} is for a server, and {shown_name(path)} is {kind}", next=next)
        return name


def is_remote(path: str) -> bool:
    return path.startswith(REMOTE)


def shown_name(path: str) -> str:
    """The log as it was named, without a password."""
    return str(path) if is_file(path) else mask_url(path)


def is_file(path: str) -> bool:
    return not is_remote(path) and not is_postgres(path)


def existing_log(path: str, **options: Any) -> AbstractContextManager[headwater.Log]:
    """The log at `path`, which must exist: an inspection must not create one."""
    if is_remote(path):
        return _connected(path)
    if is_file(path) and not _may_be_written(require_log(path)):
        from headwater.wiring import open_read_only

        return open_read_only(file_of(path))
    return _opened(path, create=False, **options)


def _may_be_written(file: str) -> bool:
    """The file, and its write-ahead log: that is there, or may be made."""
    beside = file + "-wal" if os.path.exists(file + "-wal") else os.path.dirname(os.path.abspath(file))
    return os.access(file, os.W_OK) and os.access(beside, os.W_OK)


def log_or_new_one(path: str) -> AbstractContextManager[headwater.Log]:
    """The log at `path`, created if it does not exist; a note says so, because the name may be a typo."""
    if is_remote(path):
        return _connected(path)
    makes_log = is_new(path)
    log = _opened(path)
    if makes_log:
        note(f"made a new log: {file_of(path)}")
    return log


def is_new(path: str) -> bool:
    """Whether opening the log would make its file."""
    return is_file(path) and not os.path.exists(file_of(path))


def _opened(path: str, **options: Any) -> headwater.Log:
    return headwater.open(file_of(path) if is_file(path) else str(path), maintenance_interval=None, **options)


@contextmanager
def _connected(url: str) -> Iterator[headwater.Log]:
    credentials: dict[str, Any] = {"token": url.token, "ca": url.ca} if isinstance(url, LogName) else {}
    try:
        opened = headwater.open(str(url), connect_timeout=CONNECT_S_MAX, **credentials)
    except UnauthorizedError as exc:
        next = "Pass --token, or set HEADWATER_TOKEN; on the server's machine, headwater token create makes one"
        raise UnauthorizedError(exc.why, where=str(url), next=next) from exc
    is_broken = is_over = False

    def on_state(state: str) -> None:
        """Notes while a command waits: the connection broke, and is back."""
        nonlocal is_broken
        if is_over or state != ("connected" if is_broken else "reconnecting"):
            return
        is_broken = not is_broken
        note(f"lost {opened.name}; trying again" if is_broken else f"connected again to {opened.name}")

    with opened as log:
        log.remote.on_state(on_state)
        try:
            yield log
        finally:
            is_over = True


def require_log(path: str) -> str:
    """The path of a file that may be a log; a clear error if it is not there, or empty."""
    file = file_of(path)
    if not os.path.exists(file):
        beside = glob.glob("*.db", root_dir=os.path.dirname(file) or ".")
        near = get_close_matches(os.path.basename(file), beside, 1, 0.8)
        next = f"Did you mean {os.path.join(os.path.dirname(file), near[0])}?" if near else ""
        if not next and looks_like_log(path):
            next = f"Check the name, or create the log: headwater publish {shlex.quote(file)} TOPIC DATA"
        elif not next:
            next = "LOG is the first argument: name a file like events.db, or set HEADWATER_LOG"
        raise InvalidOptionError(f"there is no log {file}", next=next)
    if os.path.isfile(file) and os.stat(file).st_size == 0:
        next = f"Make it a log: headwater publish {shlex.quote(file)} TOPIC DATA"
        raise NotALogError("the file is empty", where=file, next=next)
    return file


def file_of(path: str) -> str:
    """The file behind `events.db`, `sqlite:events.db` or `sqlite://events.db`."""
    if path == "memory:" or not path:
        raise InvalidOptionError(f"{path!r} would be gone when the command ends", next="Name a file, like events.db")
    refuse_mistyped_url(path)
    scheme, found, rest = path.partition("://")
    if found and scheme != "sqlite":
        meant = {"http": f"Did you mean ws://{rest}?", "https": f"Did you mean wss://{rest}?"}
        next = meant.get(scheme, "Name a file, like events.db, postgres://host/name, or a server, like ws://host:8765")
        raise InvalidOptionError(f"there is no store for {scheme}:// here", next=next)  # the rest may hold a password
    return rest.removeprefix("/") if found else path.removeprefix("sqlite:")  # as headwater.open reads it


@contextmanager
def usable_file(use: Literal["read", "written"], file: str, next: str) -> Iterator[None]:
    """Around the use of a file that the call names."""
    try:
        yield
    except HeadwaterError:
        raise
    except (OSError, UnicodeDecodeError) as exc:
        why = exc.strerror if isinstance(exc, OSError) else "not UTF-8"
        raise InvalidOptionError(f"cannot be {use} ({why})", where=file, next=next) from exc


def parse_start(text: str, name: str = "--start") -> Start:
    """Where to begin reading: `first`, `new`, the seq of the first message to read, or a time."""
    if text in ("first", "new"):
        return cast("Start", text)
    if text.isascii() and text.isdigit():
        return int(text)
    try:
        return parse_time(text, name, datetime.now().astimezone())
    except InvalidOptionError:
        next = f"Write {START_HELP}"
        raise InvalidOptionError(f"{name} is not a position: {text[:40]!r}", next=next) from None


# --- LOG and its default ----------------------------------------------------------------------------------------------


def default_log() -> str | None:
    """HEADWATER_LOG, or `log` in the section [cli] of headwater.toml."""
    return _default("log", LOG_VARIABLE)


def default_lake() -> str | None:
    return _default("lake", LAKE_VARIABLE)


def _default(key: str, variable: str) -> str | None:
    """Read without `headwater.settings`, which takes longer to import than most commands take to run."""
    if value := os.environ.get(variable):
        return value
    file = os.environ.get(CONFIG_VARIABLE, CONFIG_FILE)
    if not os.path.isfile(file):
        return None
    import tomllib

    try:
        with open(file, "rb") as opened:
            document = tomllib.load(opened)
    except (OSError, ValueError) as exc:
        raise InvalidConfigurationError(
            f"it cannot be read for [cli] {key}: {exc}", where=file, next=f"Correct it, or set {variable}"
        ) from exc
    profile = os.environ.get(PROFILE_VARIABLE, document.get("profile"))
    places = [("profiles", profile, "cli"), ("cli",)]
    for place in places:
        found: Any = document
        for name in (*place, key):
            found = found.get(name) if isinstance(found, dict) else None
        if found:
            if not isinstance(found, str):
                why = f"[cli] {key} must be text, not {found!r}"
                raise InvalidConfigurationError(why, where=file, next=f'Write {key} = "…"')
            return found
    return None


def looks_like_log(word: str) -> bool:
    """Rather than a topic, a pattern or a name. Asked only where LOG may have been left out."""
    return ":" in word or "/" in word or word.endswith((".db", ".sqlite", ".sqlite3")) or os.path.exists(word)


class Command(TyperCommand):
    """Every command: flags may be spelled in camelCase, and a LOG that is left out is put in from its default."""

    log_flags: Sequence[str] = ("--log",)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        args = self.with_log(self.in_our_spelling(args))
        if ctx.resilient_parsing:  # completion: an option without its value spoils the rest
            ctx.meta[WORDS] = [args[at] for at in self._positionals(args)]
        return super().parse_args(ctx, args)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Without the types of Python beside the names of arguments, and with LOG as what may be left out."""
        for each in self.params:
            if each.param_type_name == "argument":
                each.required = each.required and each.metavar != "LOG"
                each.type = copy(each.type)
                each.type.get_metavar = lambda **_: ""  # type: ignore[method-assign]
        super().format_help(ctx, formatter)

    def in_our_spelling(self, args: list[str]) -> list[str]:
        """`--waitIdle` is `--wait-idle`, and flags that had another name before are known by it."""
        declared = {spelling for each in self.params for spelling in (*each.opts, *each.secondary_opts)}
        end = args.index("--") if "--" in args else len(args)
        return [*(_spelled(word, declared) for word in args[:end]), *args[end:]]

    def with_log(self, args: list[str]) -> list[str]:
        """LOG is the first argument. It may be given as --log too, and where it has a default it may be left out: it
        has been if the others would otherwise be too few, or if the first argument does not look like a log."""
        arguments = [each for each in self.params if each.param_type_name == "argument"]
        if not arguments or arguments[0].metavar != "LOG":
            return args
        args, named = _cut_option(args, self.log_flags)
        at = self._positionals(args)
        if named is None:
            wanted = sum(each.required for each in arguments[1:])
            most = math.inf if any(each.nargs < 0 for each in arguments) else len(arguments)
            left_out = len(at) <= wanted or (len(at) < most and not looks_like_log(args[at[0]]))
            named = default_log() if left_out else None
            if named is None and left_out and wanted and not arguments[0].required:
                named = ""
        if named is None:
            return args
        place = at[0] if at else args.index("--") if "--" in args else len(args)
        return [*args[:place], named, *args[place:]]

    def _positionals(self, args: Sequence[str]) -> list[int]:
        """Where arguments stand that are no options and no values of options."""
        options = {spelling: each for each in self.params for spelling in (*each.opts, *each.secondary_opts)}
        at: list[int] = []
        is_value = False
        for number, word in enumerate(args):
            if is_value:
                is_value = False
            elif word == "--":
                return [*at, *range(number + 1, len(args))]
            elif word.startswith("--"):
                is_value = "=" not in word and _takes_value(options.get(word))
            elif word.startswith("-") and len(word) > 1 and word[:2] in options:
                values = [place for place in range(1, len(word)) if _takes_value(options.get(f"-{word[place]}"))]
                is_value = bool(values) and values[0] == len(word) - 1
            else:
                at.append(number)
        return at


_BEFORE = {
    "--age-max": "--max-age",
    "--dry": "--dry-run",
    "--lag-max": "--max-lag",
    "--max": "--max-lag",
    "--output": "--out",
    "--page": "--out",
}


def _spelled(word: str, declared: Container[str]) -> str:
    flag, equals, value = word.partition("=")
    if re.fullmatch("--[a-z]+([A-Z][a-z]*)+", flag):
        flag = re.sub("[A-Z]", lambda found: f"-{found[0].lower()}", flag)
    if flag not in declared and _BEFORE.get(flag) in declared:
        flag = _BEFORE[flag]
    return flag + equals + value


def _cut_option(args: list[str], spellings: Sequence[str]) -> tuple[list[str], str | None]:
    for at, word in enumerate(args):
        if word == "--":
            break
        flag, equals, value = word.partition("=")
        if flag in spellings and (equals or at + 1 < len(args)):
            return [*args[:at], *args[at + (1 if equals else 2) :]], value if equals else args[at + 1]
    return args, None


def _takes_value(option: Any) -> bool:
    return option is not None and not option.is_flag and not option.count


# --- groups -----------------------------------------------------------------------------------------------------------


LISTING = "ls"
_WITH_VALUE = ("--token", "--key", "--ca", "--stale")  # options that take a value


class ListsByDefault(TyperGroup):
    """A group that lists when it is given just a log, or nothing where LOG has a default: `headwater dlq events.db`."""

    has_log = True

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        words = [arg for before, arg in pairwise(["", *args]) if not arg.startswith("-") and before not in _WITH_VALUE]
        asks_help = any(arg in ("--help", "-h") for arg in args)
        if words:
            lists = words[0] not in self.commands and _names_a_file(words[0])
        else:
            lists = self.has_log and not ctx.resilient_parsing and default_log() is not None
        return super().parse_args(ctx, [LISTING, *args] if lists and not asks_help else args)


class Group(typer.Typer):
    """A group of commands of our kind."""

    def __init__(self, help: str, *, cls: type[TyperGroup] = TyperGroup) -> None:
        super().__init__(help=help, cls=cls, no_args_is_help=True, rich_markup_mode="rich")

    def command(
        self, name: str | None = None, *, cls: type[TyperCommand] | None = None, **settings: Any
    ) -> Callable[[F], F]:
        register = super().command(name, cls=cls or Command, **settings)

        def add(command: F) -> F:
            register(declared(command))
            return command

        return add


def _names_a_file(word: str) -> bool:
    """Rather than a misspelt command."""
    return os.path.exists(word) or any(mark in word for mark in "./:")
