"""The arguments that the commands of `headwater replica` share, and getting at the data directory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer

from headwater.cli.opening import is_remote
from headwater.errors import InvalidOption
from headwater.ports.clock import SystemClock
from headwater.replication.host.layout import BESIDE_A_LOG
from headwater.replication.host.policy import Policy
from headwater.replication.host.shelf import Shelf
from headwater.replication.names import ReplicaName, VersionName, split_version


def _refuse_url(directory: str) -> str:
    if is_remote(directory):
        raise InvalidOption("this is done on the server's machine", next="Name the server's data directory")
    return directory


Directory = Annotated[
    str,
    typer.Argument(metavar="DIR", help="The data directory of the server.", show_default=False, callback=_refuse_url),
]
Place = Annotated[
    str,
    typer.Argument(
        metavar="DIR|URL",
        help="The data directory of the server, or a replica like ws://host/ns/name.",
        show_default=False,
    ),
]


@contextmanager
def opened(directory: str) -> Iterator[Shelf]:
    """The replicas in a directory, which may be served at the same time."""
    if os.path.isfile(directory):
        beside = directory + BESIDE_A_LOG
        raise InvalidOption(
            "this is a file, and replicas are kept in a directory",
            where=directory,
            next=f"Name {beside}" if os.path.isdir(beside) else "Name the data directory of the server",
        )
    with Shelf(_refuse_url(directory), Policy(), SystemClock()).open() as shelf:
        yield shelf


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
