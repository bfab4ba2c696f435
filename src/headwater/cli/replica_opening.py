"""The arguments that the commands of `headwater replica` share, and getting at the data directory."""

from __future__ import annotations

import glob
import os
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated

import typer

from headwater.cli.opening import is_remote
from headwater.errors import InvalidOption
from headwater.ports.clock import SystemClock
from headwater.replication.host.catalogue import CATALOGUE
from headwater.replication.host.layout import BESIDE_A_LOG
from headwater.replication.host.policy import Policy
from headwater.replication.host.shelf import Shelf
from headwater.replication.names import ReplicaName, VersionName, place_of, split_version

USUAL_DIRECTORIES = f"*{BESIDE_A_LOG}"


def _refuse_url(directory: str) -> str:
    if is_remote(directory):
        raise InvalidOption("this is done on the server's machine", next="Name the server's data directory")
    return directory


Directory = Annotated[
    str,
    typer.Argument(
        metavar="[DIR]",
        help=f"The data directory of the server, else the only {USUAL_DIRECTORIES} here.",
        show_default=False,
        callback=_refuse_url,
    ),
]
Name = Annotated[
    str | None, typer.Argument(metavar="NS/NAME", help="The replica, like shop/app.db.", show_default=False)
]
Place = Annotated[
    str,
    typer.Argument(
        metavar="[DIR|URL]",
        help=f"The data directory of the server, else the only {USUAL_DIRECTORIES} here; "
        "or a replica like ws://host/ns/name.",
        show_default=False,
    ),
]


@contextmanager
def opened(directory: str) -> Iterator[Shelf]:
    """The replicas in a directory, which may be served at the same time."""
    refuse_slip(directory)
    if os.path.isfile(directory):
        beside = directory + BESIDE_A_LOG
        raise InvalidOption(
            "this is a file, and replicas are kept in a directory",
            where=directory,
            next=f"Name {beside}" if os.path.isdir(beside) else "Name the data directory of the server",
        )
    with Shelf(_refuse_url(directory), Policy(), SystemClock()).open() as shelf:
        yield shelf


def refuse_slip(place: str) -> None:
    """What is no directory, and was meant as a url. What may hold a secret is not repeated."""
    if is_remote(place) or os.path.exists(place):
        return
    place_of(place if "/" in place else f"{place}/")  # a bare host:8765 is a server


def directory_first(place: str | None, rest: Sequence[str | None], command: str) -> tuple[str, Sequence[str | None]]:
    """The words of a command: a directory or a url, and what follows. The directory may be left out before the name of
    a replica, where there is only one: then all words have come one place too early, and the last one is missing."""
    if place is None:
        return the_only_one(command), rest
    refuse_slip(place)
    if rest and rest[-1] is None and None not in rest[:-1] and _is_name(place):
        given = [place, *(word for word in rest if word is not None)]
        return the_only_one(command, given), given
    return place, rest


def _is_name(word: str) -> bool:
    if is_remote(word) or os.path.isdir(word) or os.path.isdir(word + BESIDE_A_LOG):
        return False
    try:
        parse_version(word)
    except InvalidOption:
        return False
    return True


def the_only_one(command: str, words: Sequence[str] = ()) -> str:
    """Of the data directories that lie here, beside the log of their server."""
    found = [each for each in sorted(glob.glob(USUAL_DIRECTORIES)) if os.path.exists(os.path.join(each, CATALOGUE))]
    if len(found) != 1:
        why = f"there are {len(found)} of them here" if found else "there is none here"
        call = shlex.join(["headwater", "replica", *command.split(), found[0] if found else "DIR", *words])
        raise InvalidOption(f"which data directory? {why}", next=f"Name it: {call}")
    return found[0]


def parse_name(text: str | None) -> ReplicaName:
    """A name without a version."""
    if text is None:
        raise InvalidOption("which replica?", next="Name it, like shop/app.db; headwater replica ls lists them")
    name, version = split_version(text)
    if version is not None:
        raise about_the_whole(version, name)
    return ReplicaName.parse(name)


def about_the_whole(version: VersionName, name: str) -> InvalidOption:
    return InvalidOption(f"this is about the whole replica, not about {version}", next=f"Name {name}")


def parse_version(text: str) -> tuple[ReplicaName, VersionName]:
    """A name, and the newest version if none is named."""
    name, version = split_version(text)
    return ReplicaName.parse(name), version or VersionName()


def refuse_name(name: str | None) -> None:
    if name is not None:
        raise InvalidOption(f"a URL says which replica it is, and {name!r} too", next="Leave the second one out")
