"""`headwater replica restore`: a version to a file, from a data directory or a server."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from headwater.cli import replica_remote
from headwater.cli.opening import AsJson, is_remote
from headwater.cli.output import say, write_document
from headwater.cli.replica_json import version_json
from headwater.cli.replica_moments import At, number_at, two_answers
from headwater.cli.replica_opening import Place, directory_first, opened, parse_version
from headwater.cli.replica_remote import Asked, Ca, Key
from headwater.cli.times import say_size
from headwater.errors import InvalidOption
from headwater.replication.names import VersionName


def restore(
    place: Place,
    words: Annotated[
        list[str], typer.Argument(metavar="[NS/NAME[@VERSION]] TARGET", help="Which, and where to.", show_default=False)
    ],
    at: At = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace the file TARGET; a database, in one transaction.")
    ] = False,
    if_missing: Annotated[
        bool, typer.Option("--if-missing", help="If TARGET is there, do nothing and end with 0.")
    ] = False,
    if_replica_exists: Annotated[
        bool, typer.Option("--if-replica-exists", help="If nothing was pushed yet, do nothing and end with 0.")
    ] = False,
    key: Key = None,
    ca: Ca = None,
    as_json: AsJson = False,
) -> None:
    """Restore a version, the newest if none is named, to a file.

    It is written under another name and checked before it takes its place.

    [dim]An older one:[/]  headwater replica restore events.db-replicas shop/app.db@3 app-3.db

    [dim]That of yesterday:[/]  headwater replica restore ws://host/shop/app.db app.db --at -1d

    [dim]Before a program starts:[/]  headwater replica restore URL app.db --if-missing --if-replica-exists
    """
    if if_missing and overwrite:
        raise InvalidOption("--if-missing keeps what is there, and --overwrite does not", next="Leave one of them out")
    if is_remote(place):
        _restore_remote(Asked(place, key, ca), words, at, overwrite, if_missing, if_replica_exists, as_json)
        return
    directory, [name, target, *more] = directory_first(place, [*words, None][: max(2, len(words))], "restore")
    if name is None or target is None or more:
        raise _unclear("DIR NS/NAME[@VERSION] TARGET")
    wanted, version_name = parse_version(name)
    if at is not None and "@" in name:
        raise two_answers(name)
    if if_missing and os.path.exists(target):
        _say_nothing_done(target, f"{target} is there", as_json=as_json)
        return
    with opened(directory) as shelf:
        if if_replica_exists and ((found := shelf.find(wanted)) is None or not found.newest):
            _say_nothing_done(target, f"there is no version of {wanted.path} yet", as_json=as_json)
            return
        if at is not None:
            version_name = VersionName(number_at(at, lambda below: shelf.versions(wanted, below=below)))
        number = version_name.pick(shelf.get(wanted).newest, shelf.numbers(wanted))
        version = shelf.restore(wanted, number, target, overwrite=overwrite)
    if as_json:
        write_document({"target": os.path.abspath(target), **version_json(version)})
    else:
        say(f"restored {wanted.path}@{number} to {target}: {say_size(version.size)}")


def _restore_remote(
    asked: Asked,
    words: list[str],
    at: str | None,
    overwrite: bool,
    if_missing: bool,
    if_replica_exists: bool,
    as_json: bool,
) -> None:
    if len(words) != 1:
        raise _unclear("URL TARGET")
    [target], remote = words, asked.remote
    if if_missing and os.path.exists(target):
        _say_nothing_done(target, f"{target} is there", as_json=as_json)
        return
    if if_replica_exists and not replica_remote.has_version(asked):
        _say_nothing_done(target, f"there is no version of {remote.key} yet", as_json=as_json)
        return
    pulled = replica_remote.restore(asked, target, at=at, overwrite=overwrite)
    if as_json:
        write_document(pulled)
    else:
        say(f"restored version {pulled.version} of {pulled.remote} to {target}: {say_size(pulled.size)}")


def _say_nothing_done(target: str, why: str, *, as_json: bool) -> None:
    if as_json:
        write_document({"target": os.path.abspath(target), "version": None, "why": why})
    else:
        say(f"{why}: nothing to restore")


def _unclear(usage: str) -> InvalidOption:
    return InvalidOption("which version, and where to?", next=f"Write headwater replica restore {usage}")
