"""`headwater replica`: the databases that a server keeps, in its data directory."""

from __future__ import annotations

import glob
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Annotated

import typer
from rich.text import Text

from headwater.cli import replica_remote
from headwater.cli.groups import ListsByDefault
from headwater.cli.opening import AsJson, is_remote
from headwater.cli.output import clock, count, note, printable, say, show_table, some, table, write_document
from headwater.cli.replica_json import replica_json, report_json, verdict_json, version_json
from headwater.cli.replica_keys import key
from headwater.cli.replica_moments import At, number_at, two_answers
from headwater.cli.replica_opening import Directory, Place, opened, parse_name, parse_version
from headwater.cli.replica_remote import Asked, Ca, Key
from headwater.cli.stopping import FINDING
from headwater.cli.times import say_size
from headwater.errors import InvalidOption, UnknownReplica
from headwater.replication.host.catalogue import CATALOGUE
from headwater.replication.host.layout import BESIDE_A_LOG
from headwater.replication.host.records import Listed, Version
from headwater.replication.host.shelf import Shelf
from headwater.replication.host.verifying import Verdict
from headwater.replication.names import ReplicaName, VersionName

replica = typer.Typer(
    cls=ListsByDefault,
    no_args_is_help=True,
    help="Replicas: databases that a server keeps by pages, with their versions.\n\n"
    "[dim]List:[/]  headwater replica ls events.db-replicas",
)
replica.add_typer(key, name="key")

HOST_CHARS_MAX = 16
USUAL_DIRECTORIES = f"*{BESIDE_A_LOG}"


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
    key: Key = None,
    ca: Ca = None,
    as_json: AsJson = False,
) -> None:
    """List the replicas of a data directory, or those of a server that the key or token allows to pull."""
    from_afar = place is not None and is_remote(place)
    found: Sequence[Listed]
    is_cut = False
    if place is not None and from_afar:
        found, is_cut = replica_remote.ls(place, key, ca)
    else:
        with opened(place if place is not None else _the_only_one()) as shelf:
            found = shelf.listing()
    if as_json:
        write_document([replica_json(each, newest, from_afar=from_afar) for each, newest in found])
    elif found:
        _show_replicas(found)
    else:
        say("no replicas")
    if is_cut:
        note(f"there are more than these {some(len(found), 'replica')}; name a namespace, like ws://host/ns")
    elif from_afar and key is None:
        note("those that have keys are shown to who has one: --key")


def _show_replicas(found: Sequence[Listed]) -> None:
    shown = table("~replica", ">newest", "pushed", "changed", ">size", ">versions", ">on disk")
    for each, newest in found:
        shown.add_row(
            Text(each.name.path, "cyan"),
            count(each.newest) if newest else "-",
            clock(newest.at_ms) if newest else "never",
            clock(each.changed_ms) if each.changed_ms else "-",
            say_size(newest.size) if newest else "-",
            count(each.versions),
            say_size(each.stored_bytes),
        )
    show_table(shown)


@replica.command("log")
def log(
    place: Place,
    name: Annotated[str | None, typer.Argument(metavar="[NS/NAME]", show_default=False)] = None,
    limit: Annotated[int, typer.Option("--limit", "-n", metavar="N", min=1, max=1000, help="At most so many.")] = 100,
    before: Annotated[
        int | None, typer.Option("--before", metavar="VERSION", min=1, help="Those before this one.")
    ] = None,
    key: Key = None,
    ca: Ca = None,
    as_json: AsJson = False,
) -> None:
    """List the versions of a replica, newest first."""
    if is_remote(place):
        _refuse_name(name)
        versions: Sequence[Version] = replica_remote.log(Asked(place, key, ca), limit=limit, before=before)
    else:
        wanted = parse_name(name)
        with opened(place) as shelf:
            versions = shelf.versions(wanted, below=before, limit=limit)
    if as_json:
        write_document([version_json(version, from_afar=is_remote(place)) for version in versions])
        return
    if not versions:
        say("no versions")
        return
    shown = table(">version", "pushed", ">size", ">new pages", ">on disk", "from", "~message")
    for version in versions:
        shown.add_row(
            str(version.number),
            clock(version.at_ms),
            say_size(version.size),
            count(version.changed_pages),
            "-" if is_remote(place) else say_size(version.stored_bytes),  # a server does not tell
            _host(version.client),
            _first_line(version.message),
        )
    show_table(shown)
    if len(versions) == limit:
        note(f"there may be more: --before {versions[-1].number}")


@replica.command("restore")
def restore(
    place: Place,
    words: Annotated[
        list[str], typer.Argument(metavar="[NS/NAME[@VERSION]] TARGET", help="Which, and where to.", show_default=False)
    ],
    at: At = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the file TARGET.")] = False,
    key: Key = None,
    ca: Ca = None,
    as_json: AsJson = False,
) -> None:
    """Restore a version, the newest if none is named, to a file.

    It is written under another name, checked, and then renamed.

    [dim]An older one:[/]  headwater replica restore events.db-replicas shop/app.db@3 app-3.db

    [dim]That of yesterday:[/]  headwater replica restore ws://host/shop/app.db app.db --at -1d
    """
    if is_remote(place):
        [target] = _exactly(words, 1, "URL TARGET")
        pulled = replica_remote.restore(Asked(place, key, ca), target, at=at, overwrite=overwrite)
        if as_json:
            write_document(pulled)
        else:
            say(f"restored version {pulled.version} of {pulled.remote} to {target}: {say_size(pulled.size)}")
        return
    name, target = _exactly(words, 2, "DIR NS/NAME[@VERSION] TARGET")
    wanted, version_name = parse_version(name)
    if at is not None and "@" in name:
        raise two_answers(name)
    with opened(place) as shelf:
        if at is not None:
            version_name = VersionName(number_at(at, lambda below: shelf.versions(wanted, below=below)))
        number = version_name.pick(shelf.get(wanted).newest, shelf.numbers(wanted))
        version = shelf.restore(wanted, number, target, overwrite=overwrite)
    if as_json:
        write_document({"target": os.path.abspath(target), **version_json(version)})
    else:
        say(f"restored {wanted.path}@{number} to {target}: {say_size(version.size)}")


@replica.command("rm")
def remove(
    directory: Directory,
    name: Annotated[str, typer.Argument(metavar="NS/NAME", show_default=False)],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    as_json: AsJson = False,
) -> None:
    """Remove a replica for good, with all its versions, keys and reports."""
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


@replica.command("verify")
def verify(
    place: Place,
    name: Annotated[str | None, typer.Argument(metavar="[NS/NAME[@VERSION]]", show_default=False)] = None,
    key: Key = None,
    ca: Ca = None,
    as_json: AsJson = False,
) -> None:
    """Prove versions: bytes, integrity, content as it was pushed, and a restore drill.

    All of them, or those of one replica, or a single one; of a URL one, which is pulled.
    Ends with 1 if something was found.
    """
    verdicts: list[Verdict] = []
    is_one = name is not None and "@" in name

    def take(verdict: Verdict, *, every_check: bool) -> None:
        verdicts.append(verdict)
        if not as_json:
            _show_verdict(verdict, every_check=every_check)

    if is_remote(place):
        _refuse_name(name)
        take(replica_remote.verify(Asked(place, key, ca)), every_check=True)
    else:
        with opened(place) as shelf:
            for wanted, number in _versions_to_verify(shelf, name):
                try:
                    verdict = shelf.verify(wanted, number)
                except UnknownReplica:  # beside a server, it may go before its turn comes
                    if is_one:
                        raise
                    continue
                take(verdict, every_check=is_one)
    bad = sum(not verdict.ok for verdict in verdicts)
    if as_json:
        write_document([verdict_json(verdict) for verdict in verdicts])
    else:
        say(
            f"{some(len(verdicts), 'version')} proved"
            if not bad
            else f"{bad:,} of {some(len(verdicts), 'version')} bad"
        )
    if bad:
        raise typer.Exit(FINDING)


@replica.command("reports")
def reports(
    directory: Directory,
    name: Annotated[str, typer.Argument(metavar="NS/NAME", show_default=False)],
    limit: Annotated[int, typer.Option("--limit", "-n", metavar="N", min=1, max=1000, help="At most so many.")] = 20,
    as_json: AsJson = False,
) -> None:
    """List what clients reported: pushes cut off in the middle, or failing for long."""
    with opened(directory) as shelf:
        found = shelf.reports(parse_name(name), limit)
    if as_json:
        write_document([report_json(report) for report in found])
        return
    if not found:
        say("no reports")
        return
    shown = table("at", "kind", "~client", "~error")
    for report in found:
        said = report_json(report)
        words = (said["report"].get("kind", "-"), report.client, said["report"].get("error", ""))
        shown.add_row(clock(report.at_ms), *(printable(str(word)).split("\n", 1)[0] for word in words))
    show_table(shown)


def _versions_to_verify(shelf: Shelf, name: str | None) -> Iterator[tuple[ReplicaName, int]]:
    if name is None:
        wanted = [each.name for each in shelf.list()]
    elif "@" in name:
        one, version = parse_version(name)
        yield one, version.pick(shelf.get(one).newest, shelf.numbers(one))
        return
    else:
        wanted = [parse_name(name)]
    for each in wanted:
        try:
            numbers = shelf.numbers(each)
        except UnknownReplica:  # removed just now
            if name is not None:
                raise
            continue
        for number in reversed(numbers):
            yield each, number


def _show_verdict(verdict: Verdict, *, every_check: bool) -> None:
    line = Text(f"{verdict.name}@{verdict.version}  ")
    line.append("ok" if verdict.ok else "bad", "green" if verdict.ok else "bold red")
    say(line)
    for check in verdict.checks:
        if every_check or not check.ok:
            said = Text(f"  {check.what}: ")
            said.append(printable(check.said), "" if check.ok else "red")
            say(said)


def _ask(question: str) -> None:
    if not sys.stdin.isatty():
        raise InvalidOption("nobody is here to be asked", next="Pass --yes to remove it all the same")
    if not typer.confirm(question, err=True):
        raise typer.Exit(1)


def _host(client: str) -> str:
    """Where it was pushed from; what follows tells the programs of one machine apart."""
    return printable(client.rpartition(":")[0] or client)[:HOST_CHARS_MAX] or "-"


def _first_line(message: str) -> str:
    first, more, _ = message.partition("\n")
    return printable(first) + (" …" if more else "") or "-"


def _refuse_name(name: str | None) -> None:
    if name is not None:
        raise InvalidOption(f"a URL says which replica it is, and {name!r} too", next="Leave the second one out")


def _exactly(words: list[str], number: int, usage: str) -> list[str]:
    if len(words) != number:
        raise InvalidOption("which version, and where to?", next=f"Write headwater replica restore {usage}")
    return words


def _the_only_one() -> str:
    found = [each for each in glob.glob(USUAL_DIRECTORIES) if os.path.exists(os.path.join(each, CATALOGUE))]
    if len(found) != 1:
        why = f"there are {len(found)} of them here" if found else "there is none here"
        raise InvalidOption(f"which data directory? {why}", next="Name it: headwater replica ls DIR")
    return found[0]
