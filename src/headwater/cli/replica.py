"""`headwater replica`: the databases that a server keeps, in its data directory."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from datetime import timedelta
from typing import Annotated

import typer

from headwater.cli import replica_remote
from headwater.cli.groups import ListsByDefault
from headwater.cli.opening import AsJson, is_remote
from headwater.cli.output import note, say, some, write_document
from headwater.cli.replica_json import replica_json, report_json, version_json
from headwater.cli.replica_keys import key
from headwater.cli.replica_opening import (
    USUAL_DIRECTORIES,
    Directory,
    Name,
    Place,
    directory_first,
    opened,
    parse_name,
    refuse_name,
    the_only_one,
)
from headwater.cli.replica_remote import Asked, Ca, Key
from headwater.cli.replica_restore import restore
from headwater.cli.replica_shown import show_replicas, show_reports, show_versions
from headwater.cli.replica_verify import verify
from headwater.cli.stopping import FINDING
from headwater.cli.times import parse_span
from headwater.errors import InvalidOption
from headwater.ports.clock import SystemClock
from headwater.replication.host.records import Listed, Version

replica = typer.Typer(
    cls=ListsByDefault,
    no_args_is_help=True,
    help="Replicas: databases that a server keeps by pages, with their versions.\n\n"
    "[dim]List:[/]  headwater replica ls events.db-replicas",
)
replica.add_typer(key, name="key")


@replica.command("ls")
def list_replicas(
    place: Annotated[
        str | None,
        typer.Argument(
            metavar="[DIR|URL]",
            help=f"The data directory, else the only {USUAL_DIRECTORIES} here; or a server, or a namespace of one: ws://host/ns.",
            show_default=False,
        ),
    ] = None,
    stale: Annotated[
        str | None,
        typer.Option(
            "--stale",
            metavar="SPAN",
            help="Only those that were last pushed longer ago, like 1h or 2d; ends with 1 if there are any.",
            show_default=False,
        ),
    ] = None,
    key: Key = None,
    ca: Ca = None,
    as_json: AsJson = False,
) -> None:
    """List the replicas of a data directory, or those of a server that the key or token allows to pull."""
    span_ms = None if stale is None else parse_span(stale, "--stale") / timedelta(milliseconds=1)
    from_afar = place is not None and is_remote(place)
    found: Sequence[Listed]
    is_cut = False
    if place is not None and from_afar:
        found, is_cut = replica_remote.ls(place, key, ca)
    else:
        with opened(place if place is not None else the_only_one("ls")) as shelf:
            found = shelf.listing()
    listed = len(found)
    if span_ms is not None:
        before_ms = SystemClock().now_ms() - span_ms
        found = [each for each in found if _pushed_ms(each) < before_ms]
    if as_json:
        write_document([replica_json(each, newest, from_afar=from_afar) for each, newest in found])
    elif found:
        show_replicas(found)
    else:
        say("no replicas" if stale is None else f"no replica was last pushed longer ago than {stale}")
    if is_cut:
        note(f"there are more than these {some(listed, 'replica')}; name a namespace, like ws://host/ns")
    elif from_afar and key is None:
        note("replicas that have keys are shown to those who give one: --key")
    if stale is not None and found:
        raise typer.Exit(FINDING)


def _pushed_ms(listed: Listed) -> int:
    """When it was last pushed; one that never was has waited for that since it was made."""
    return listed.replica.created_ms if listed.newest is None else listed.newest.at_ms


@replica.command("log")
def log(
    place: Place,
    name: Name = None,
    limit: Annotated[int, typer.Option("--limit", "-n", metavar="N", min=1, max=1000, help="At most so many.")] = 100,
    before: Annotated[
        int | None, typer.Option("--before", metavar="VERSION", min=1, help="Those before this one.")
    ] = None,
    key: Key = None,
    ca: Ca = None,
    as_json: AsJson = False,
) -> None:
    """List the versions of a replica, newest first."""
    directory, [name] = directory_first(place, [name], "log")
    if from_afar := is_remote(directory):
        refuse_name(name)
        versions: Sequence[Version] = replica_remote.log(Asked(directory, key, ca), limit=limit, before=before)
    else:
        wanted = parse_name(name)
        with opened(directory) as shelf:
            versions = shelf.versions(wanted, below=before, limit=limit)
    if as_json:
        write_document([version_json(version, from_afar=from_afar) for version in versions])
        return
    if not versions:
        say("no versions")
        return
    show_versions(versions, from_afar=from_afar)
    if len(versions) == limit:
        note(f"there may be more: --before {versions[-1].number}")


replica.command("restore")(restore)


@replica.command("rm")
def remove(
    place: Directory,
    name: Name = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    as_json: AsJson = False,
) -> None:
    """Remove a replica for good, with all its versions, keys and reports."""
    directory, [name] = directory_first(place, [name], "rm")
    wanted = parse_name(name)
    with opened(directory) as shelf:
        found = shelf.get(wanted)
        if not yes:
            _ask(f"Remove {wanted.path} with {some(found.versions, 'version')} for good?")
        shelf.remove(wanted)
    if as_json:
        write_document({"removed": wanted.path, "id": found.id, "versions": found.versions})
    else:
        say(f"removed {wanted.path} with {some(found.versions, 'version')}")


replica.command("verify")(verify)


@replica.command("reports")
def reports(
    place: Directory,
    name: Name = None,
    limit: Annotated[int, typer.Option("--limit", "-n", metavar="N", min=1, max=1000, help="At most so many.")] = 20,
    as_json: AsJson = False,
) -> None:
    """List what clients reported: pushes cut off in the middle, or failing for long."""
    directory, [name] = directory_first(place, [name], "reports")
    wanted = parse_name(name)
    with opened(directory) as shelf:
        found = shelf.reports(wanted, limit)
    if as_json:
        write_document([report_json(report) for report in found])
        return
    if not found:
        say("no reports")
        return
    show_reports(found)


def _ask(question: str) -> None:
    if not sys.stdin.isatty():
        raise InvalidOption("nobody is here to be asked", next="Pass --yes to remove it all the same")
    if not typer.confirm(question, err=True):
        raise typer.Exit(1)
