"""`headwater replica`: the replicas of a server, in its data directory or over the network."""

from __future__ import annotations

import glob
import os
import shlex
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple
from urllib.parse import quote

import msgspec
import typer
from rich.cells import cell_len

from headwater.cli.arguments import AsJson, ListsByDefault, is_remote
from headwater.cli.output import (
    PIPE_COLUMNS,
    Text,
    clock,
    console,
    count,
    is_terminal,
    note,
    printable,
    say,
    show_table,
    table,
    write_document,
)
from headwater.cli.stopping import FINDING, STORE
from headwater.errors import HeadwaterError, InvalidOptionError, RemoteError, UnknownReplicaError
from headwater.formats import TIME_HELP, format_size, iso, parse_duration, parse_time, plural, time_ms
from headwater.ports.clock import SystemClock
from headwater.replication.host.catalogue import (
    VERSIONS_PAGE,
    ClientReport,
    Key,
    Replica,
    ReplicaListing,
    Version,
    key_id_of,
)
from headwater.replication.host.disk import CATALOGUE, DIRECTORY_SUFFIX
from headwater.replication.host.store import ReplicaStore
from headwater.replication.host.verify import (
    Check,
    Finding,
    Missing,
    VersionVerdict,
    failed,
    passed,
    prove_content,
    prove_integrity,
    refuse_target,
)
from headwater.replication.host.versions import VersionRetention
from headwater.replication.names import Remote, ReplicaName, VersionName, place_of, split_version
from headwater.replication.protocol import PREFIX

if TYPE_CHECKING:
    from headwater.replication.outcome import Outcome

USUAL_DIRECTORIES = f"*{DIRECTORY_SUFFIX}"
REMOTE_LISTED_MAX = 100_000  # replicas that are asked for, a page at a time
NO_SUCH_REPLICA = "no such replica"  # in the answer of a server

HOST_CHARS_MAX = 16
NAME_COLUMNS_MIN = 32
TEXT_COLUMNS_MIN = 24  # with fewer, a text is shown under its row
GAP_COLUMNS = 2

_NEXT_WITHOUT: dict[Missing, str] = {
    "space": "Free some disk space, and verify again",
    "rights": "Verify as the user that the server runs as",
}
_FINDINGS: dict[Finding, tuple[str, str]] = {
    "proved": ("ok", "green"),
    "whole": ("whole, but no hash came with it", "yellow"),
    "not checked": ("not checked", "yellow"),
    "bad": ("bad", "bold red"),
}

replica = typer.Typer(
    cls=ListsByDefault,
    no_args_is_help=True,
    help="Replicas: databases that a server keeps by pages, with their versions.\n\n"
    "[dim]List:[/]  headwater replica ls events.db-replicas",
)
key_commands = typer.Typer(
    no_args_is_help=True,
    help="Keys: rights to push to or pull from one replica.\n\n"
    "[dim]A first one:[/]  headwater replica key create events.db-replicas shop/app.db --push",
)
replica.add_typer(key_commands, name="key")


# --- arguments ------------------------------------------------------------------------------------------------------


def _refuse_url(directory: str) -> str:
    if is_remote(directory):
        raise InvalidOptionError("this is done on the server's machine", next="Name the server's data directory")
    return directory


_PLACE_HELP = (
    f"The data directory of the server, else the only {USUAL_DIRECTORIES} here; or a replica like ws://host/ns/name."
)
DirectoryArgument = Annotated[
    str,
    typer.Argument(
        metavar="[DIR]",
        help=f"The data directory of the server, else the only {USUAL_DIRECTORIES} here.",
        show_default=False,
        callback=_refuse_url,
    ),
]
PlaceArgument = Annotated[str, typer.Argument(metavar="[DIR|URL]", help=_PLACE_HELP, show_default=False)]
NameArgument = Annotated[
    str | None, typer.Argument(metavar="NS/NAME", help="The replica, like shop/app.db.", show_default=False)
]
KeyOption = Annotated[
    str | None,
    typer.Option(
        "--key",
        metavar="KEY",
        help="A pull key, push key or token, for a URL.",
        envvar=["HEADWATER_PULL_KEY", "HEADWATER_PUSH_KEY", "HEADWATER_TOKEN"],
        show_default=False,
        show_envvar=False,
    ),
]
CaOption = Annotated[
    str | None, typer.Option("--ca", metavar="FILE", help="Certificates to trust for wss://.", show_default=False)
]


@contextmanager
def _opened(directory: str) -> Iterator[ReplicaStore]:
    """A data directory, which a server may use at the same time."""
    _refuse_mistyped_url(directory)
    if os.path.isfile(directory):
        beside = directory + DIRECTORY_SUFFIX
        raise InvalidOptionError(
            "this is a file, and replicas are kept in a directory",
            where=directory,
            next=f"Name {beside}" if os.path.isdir(beside) else "Name the data directory of the server",
        )
    with ReplicaStore(_refuse_url(directory), VersionRetention(), SystemClock()).open() as store:
        yield store


def _refuse_mistyped_url(place: str) -> None:
    """The error does not repeat a text that may hold a secret."""
    if is_remote(place) or os.path.exists(place):
        return
    place_of(place if "/" in place else f"{place}/")  # a bare host:8765 is a server


def _directory_first(place: str | None, rest: Sequence[str | None], command: str) -> tuple[str, Sequence[str | None]]:
    """A directory or url, and the other arguments. If there is only one data directory, it may be left out before the
    name of a replica: then every argument has moved one place to the left, and the last one is missing."""
    if place is None:
        return _only_directory(command), rest
    _refuse_mistyped_url(place)
    if rest and rest[-1] is None and None not in rest[:-1] and _is_name(place):
        given = [place, *(word for word in rest if word is not None)]
        return _only_directory(command, given), given
    return place, rest


def _is_name(word: str) -> bool:
    if is_remote(word) or os.path.isdir(word) or os.path.isdir(word + DIRECTORY_SUFFIX):
        return False
    try:
        _parse_version(word)
    except InvalidOptionError:
        return False
    return True


def _only_directory(command: str, words: Sequence[str] = ()) -> str:
    """The data directory here, next to the log of its server, if there is exactly one."""
    found = [each for each in sorted(glob.glob(USUAL_DIRECTORIES)) if os.path.exists(os.path.join(each, CATALOGUE))]
    if len(found) != 1:
        why = f"there are {len(found)} of them here" if found else "there is none here"
        call = shlex.join(["headwater", "replica", *command.split(), found[0] if found else "DIR", *words])
        raise InvalidOptionError(f"which data directory? {why}", next=f"Name it: {call}")
    return found[0]


def _parse_name(text: str | None) -> ReplicaName:
    """A name without a version."""
    if text is None:
        raise InvalidOptionError("which replica?", next="Name it, like shop/app.db; headwater replica ls lists them")
    name, version = split_version(text)
    if version is not None:
        raise _about_the_whole(version, name)
    return ReplicaName.parse(name)


def _about_the_whole(version: VersionName, name: str) -> InvalidOptionError:
    return InvalidOptionError(f"this is about the whole replica, not about {version}", next=f"Name {name}")


def _parse_version(text: str) -> tuple[ReplicaName, VersionName]:
    """A name, and its version, by default the newest."""
    name, version = split_version(text)
    return ReplicaName.parse(name), version or VersionName()


def _refuse_name(name: str | None) -> None:
    if name is not None:
        raise InvalidOptionError(f"a URL says which replica it is, and {name!r} too", next="Leave the second one out")


# --- lists ----------------------------------------------------------------------------------------------------------


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
    key: KeyOption = None,
    ca: CaOption = None,
    as_json: AsJson = False,
) -> None:
    """List the replicas of a data directory, or those of a server that the key or token allows to pull."""
    span_ms = None if stale is None else parse_duration(stale, "--stale") / timedelta(milliseconds=1)
    remote = place is not None and is_remote(place)
    found: Sequence[ReplicaListing]
    is_cut = False
    if place is not None and remote:
        found, is_cut = _remote_replicas(place, key, ca)
    else:
        with _opened(place if place is not None else _only_directory("ls")) as store:
            found = store.catalogue.listing()
    listed = len(found)
    if span_ms is not None:
        before_ms = SystemClock().now_ms() - span_ms
        found = [each for each in found if _pushed_ms(each) < before_ms]
    if as_json:
        write_document([_replica_json(each, newest, remote=remote) for each, newest in found])
    elif found:
        show_replicas(found)
    else:
        say("no replicas" if stale is None else f"no replica was last pushed longer ago than {stale}")
    if is_cut:
        note(f"there are more than these {plural(listed, 'replica')}; name a namespace, like ws://host/ns")
    elif remote and key is None:
        note("replicas that have keys are listed only with one: --key")
    if stale is not None and found:
        raise typer.Exit(FINDING)


def _pushed_ms(listing: ReplicaListing) -> int:
    """The time of the last push; without one, that of the creation."""
    return listing.replica.created_ms if listing.newest is None else listing.newest.at_ms


@replica.command("log")
def log(
    place: PlaceArgument,
    name: NameArgument = None,
    limit: Annotated[int, typer.Option("--limit", "-n", metavar="N", min=1, max=1000, help="At most so many.")] = 100,
    before: Annotated[
        int | None, typer.Option("--before", metavar="VERSION", min=1, help="Those before this one.")
    ] = None,
    key: KeyOption = None,
    ca: CaOption = None,
    as_json: AsJson = False,
) -> None:
    """List the versions of a replica, newest first."""
    directory, [name] = _directory_first(place, [name], "log")
    versions: Sequence[Version]
    if remote := is_remote(directory):
        _refuse_name(name)
        versions = _RemoteReplica(directory, key, ca).versions(limit=limit, before=before)
    else:
        wanted = _parse_name(name)
        with _opened(directory) as store:
            versions = store.catalogue.versions(wanted, below=before, limit=limit)
    if as_json:
        write_document([_version_json(version, remote=remote) for version in versions])
        return
    if not versions:
        say("no versions")
        return
    show_versions(versions, remote=remote)
    if len(versions) == limit:
        note(f"there may be more: --before {versions[-1].number}")


@replica.command("reports")
def reports(
    place: DirectoryArgument,
    name: NameArgument = None,
    limit: Annotated[int, typer.Option("--limit", "-n", metavar="N", min=1, max=1000, help="At most so many.")] = 20,
    as_json: AsJson = False,
) -> None:
    """List the error reports of clients: pushes cut off in the middle, or failing for long."""
    directory, [name] = _directory_first(place, [name], "reports")
    wanted = _parse_name(name)
    with _opened(directory) as store:
        found = store.catalogue.reports(wanted, limit)
    if as_json:
        write_document([_report_json(report) for report in found])
    elif found:
        show_reports(found)
    else:
        say("no reports")


# --- restore and remove ---------------------------------------------------------------------------------------------


@replica.command("restore")
def restore(
    place: PlaceArgument,
    words: Annotated[
        list[str], typer.Argument(metavar="[NS/NAME[@VERSION]] TARGET", help="Which, and where to.", show_default=False)
    ],
    at: Annotated[
        str | None,
        typer.Option(
            "--at",
            metavar="TIME",
            help=f"The version that was the newest then: {TIME_HELP}. A date is its first minute.",
            show_default=False,
        ),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace the file TARGET; a database, in one transaction.")
    ] = False,
    if_missing: Annotated[
        bool, typer.Option("--if-missing", help="If TARGET is there, do nothing and end with 0.")
    ] = False,
    if_replica_exists: Annotated[
        bool, typer.Option("--if-replica-exists", help="If nothing was pushed yet, do nothing and end with 0.")
    ] = False,
    key: KeyOption = None,
    ca: CaOption = None,
    as_json: AsJson = False,
) -> None:
    """Restore a version, the newest if none is named, to a file.

    It is written under another name and checked before it takes its place.

    [dim]An older one:[/]  headwater replica restore events.db-replicas shop/app.db@3 app-3.db

    [dim]That of yesterday:[/]  headwater replica restore ws://host/shop/app.db app.db --at -1d

    [dim]Before a program starts:[/]  headwater replica restore URL app.db --if-missing --if-replica-exists
    """
    if if_missing and overwrite:
        raise InvalidOptionError(
            "--if-missing keeps what is there, and --overwrite does not", next="Leave one of them out"
        )

    def say_nothing_done(why: str) -> None:
        if as_json:
            write_document({"target": os.path.abspath(target), "version": None, "why": why})
        else:
            say(f"{why}: nothing to restore")

    if is_remote(place):
        if len(words) != 1:
            raise _unclear("URL TARGET")
        target, remote = words[0], _RemoteReplica(place, key, ca)
        address = remote.address
        if if_missing and os.path.exists(target):
            say_nothing_done(f"{target} is there")
            return
        if if_replica_exists and not remote.has_version():
            say_nothing_done(f"there is no version of {address.key} yet")
            return
        refuse_target(target, overwrite=overwrite)
        if at is not None:
            if address.version is not None:
                raise _version_and_time(place)
            number = _number_at(at, lambda below: remote.versions(limit=VERSIONS_PAGE, before=below))
            remote = remote._replace(url=f"{address.key}@{number}")
        pulled = remote.pull(target)
        if as_json:
            write_document(pulled)
        else:
            say(f"restored version {pulled.version} of {pulled.remote} to {target}: {format_size(pulled.size)}")
        return
    directory, [name, into, *more] = _directory_first(place, [*words, None][: max(2, len(words))], "restore")
    if name is None or into is None or more:
        raise _unclear("DIR NS/NAME[@VERSION] TARGET")
    target = into
    wanted, version_name = _parse_version(name)
    if at is not None and "@" in name:
        raise _version_and_time(name)
    if if_missing and os.path.exists(target):
        say_nothing_done(f"{target} is there")
        return
    with _opened(directory) as store:
        catalogue = store.catalogue
        if if_replica_exists and ((found := catalogue.find(wanted)) is None or not found.newest):
            say_nothing_done(f"there is no version of {wanted.path} yet")
            return
        if at is not None:
            version_name = VersionName(_number_at(at, lambda below: catalogue.versions(wanted, below=below)))
        number = version_name.pick(catalogue.get(wanted).newest, catalogue.numbers(wanted))
        version = store.restore(wanted, number, target, overwrite=overwrite)
    if as_json:
        write_document({"target": os.path.abspath(target), **_version_json(version)})
    else:
        say(f"restored {wanted.path}@{number} to {target}: {format_size(version.size)}")


def _unclear(usage: str) -> InvalidOptionError:
    return InvalidOptionError("which version, and where to?", next=f"Write headwater replica restore {usage}")


def _version_and_time(where: str) -> InvalidOptionError:
    return InvalidOptionError(
        "a version and a time: only one of them", where=where, next="Leave --at out, or the version"
    )


def _number_at(text: str, versions_below: Callable[[int | None], Sequence[Version]]) -> int:
    """The version that was the newest at that time. `versions_below`: a page of versions, newest first."""
    now = datetime.now().astimezone()
    moment = parse_time(text, "--at", now)
    if moment > now:
        raise InvalidOptionError(f"--at is a time that has come: {_moment_text(moment)} has not")
    at_ms = time_ms(moment)
    oldest: Version | None = None
    while versions := versions_below(None if oldest is None else oldest.number):
        for version in versions:
            if version.at_ms <= at_ms:
                return version.number
        oldest = versions[-1]
    if oldest is None:
        raise UnknownReplicaError("there is no version yet", where=text, next="Push one first")
    pushed = datetime.fromtimestamp(oldest.at_ms / 1000, UTC)
    raise UnknownReplicaError(
        f"no version that is kept is as old as {_moment_text(moment)}",
        next=f"The oldest is version {oldest.number}, pushed {_moment_text(pushed)}",
    )


def _moment_text(moment: datetime) -> str:
    return moment.astimezone().isoformat(" ", "seconds")


@replica.command("rm")
def remove(
    place: DirectoryArgument,
    name: NameArgument = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    as_json: AsJson = False,
) -> None:
    """Remove a replica for good, with all its versions, keys and reports."""
    directory, [name] = _directory_first(place, [name], "rm")
    wanted = _parse_name(name)
    with _opened(directory) as store:
        found = store.catalogue.get(wanted)
        if not yes:
            if not sys.stdin.isatty():
                raise InvalidOptionError("the terminal cannot be asked", next="Pass --yes to remove it all the same")
            if not typer.confirm(f"Remove {wanted.path} with {plural(found.versions, 'version')} for good?", err=True):
                raise typer.Exit(1)
        store.remove(wanted)
    if as_json:
        write_document({"removed": wanted.path, "id": found.id, "versions": found.versions})
    else:
        say(f"removed {wanted.path} with {plural(found.versions, 'version')}")


# --- verify ---------------------------------------------------------------------------------------------------------


@replica.command("verify")
def verify(
    place: Annotated[str | None, typer.Argument(metavar="[DIR|URL]", help=_PLACE_HELP, show_default=False)] = None,
    name: Annotated[str | None, typer.Argument(metavar="[NS/NAME[@VERSION]]", show_default=False)] = None,
    key: KeyOption = None,
    ca: CaOption = None,
    as_json: AsJson = False,
) -> None:
    """Prove versions: bytes, integrity, content as it was pushed, and a restore drill.

    All of them, or those of one replica, or a single one; of a URL one, which is pulled.
    Ends with 1 if something was found, else with 3 if something could not be checked.
    """
    directory, [name] = _directory_first(place, [name], "verify")
    verdicts: list[VersionVerdict] = []
    is_one = name is not None and "@" in name

    def add(verdict: VersionVerdict, *, every_check: bool) -> None:
        verdicts.append(verdict)
        if not as_json:
            _show_verdict(verdict, every_check=every_check)

    if is_remote(directory):
        _refuse_name(name)
        add(_RemoteReplica(directory, key, ca).verify(), every_check=True)
    else:
        with _opened(directory) as store:
            for wanted, number in _versions_to_verify(store, name):
                try:
                    verdict = store.verify(wanted, number)
                except UnknownReplicaError:  # a running server may remove it before its turn
                    if is_one:
                        raise
                    continue
                add(verdict, every_check=is_one)
    if as_json:
        write_document([_verdict_json(verdict) for verdict in verdicts])
    else:
        say(_summary(verdicts))
        for missing in sorted({verdict.missing for verdict in verdicts if verdict.missing is not None}):
            note(f"next: {_NEXT_WITHOUT[missing]}")
    findings = {verdict.finding for verdict in verdicts}
    if "bad" in findings:
        raise typer.Exit(FINDING)
    if "not checked" in findings:
        raise typer.Exit(STORE)


def _summary(verdicts: Sequence[VersionVerdict]) -> str:
    number = Counter(verdict.finding for verdict in verdicts)
    if number["bad"]:
        parts = [f"{number['bad']:,} of {plural(len(verdicts), 'version')} bad"]
    else:
        parts = [f"{plural(number['proved'], 'version')} proved"]
    if number["whole"]:
        parts.append(f"{number['whole']:,} whole but without a hash")
    for missing, times in Counter(each.missing for each in verdicts if each.finding == "not checked").items():
        parts.append(f"{times:,} not checked: no {missing}")
    return ", ".join(parts)


def _versions_to_verify(store: ReplicaStore, name: str | None) -> Iterator[tuple[ReplicaName, int]]:
    catalogue = store.catalogue
    if name is None:
        wanted = [each.name for each in catalogue.replicas()]
    elif "@" in name:
        one, version = _parse_version(name)
        yield one, version.pick(catalogue.get(one).newest, catalogue.numbers(one))
        return
    else:
        wanted = [_parse_name(name)]
    for each in wanted:
        try:
            numbers = catalogue.numbers(each)
        except UnknownReplicaError:  # removed just now
            if name is not None:
                raise
            continue
        for number in reversed(numbers):
            yield each, number


def _show_verdict(verdict: VersionVerdict, *, every_check: bool) -> None:
    line = Text(f"{verdict.name}@{verdict.version}  ")
    line.append(*_FINDINGS[verdict.finding])
    say(line)
    for check in verdict.checks:
        if every_check or not check.ok:
            details = Text(f"  {check.what}: ")
            details.append(printable(check.details), "" if check.ok else "red")
            say(details)


# --- keys -----------------------------------------------------------------------------------------------------------


@key_commands.command("create")
def create_key(
    place: DirectoryArgument,
    name: NameArgument = None,
    push: Annotated[bool, typer.Option("--push", help="It may push and pull.")] = False,
    pull: Annotated[bool, typer.Option("--pull", help="It may only pull.")] = False,
    label: Annotated[str, typer.Option("--label", metavar="TEXT", help="What it is for.", show_default=False)] = "",
    as_json: AsJson = False,
) -> None:
    """Make a key and print it, this once: only a hash of it is kept.

    From the first key on, the replica needs one. It need not have been pushed yet.
    """
    if push == pull:
        raise InvalidOptionError("a key is for pushes or for pulls", next="Pass either --push or --pull")
    directory, [name] = _directory_first(place, [name], "key create")
    wanted = _parse_name(name)
    with _opened(directory) as store:
        is_new = store.catalogue.find(wanted) is None
        text = store.create_key(wanted, "push" if push else "pull", label)
        [made] = [each for each in store.catalogue.keys(wanted) if each.id == key_id_of(text)]
    if as_json:
        write_document({"key": text, **_key_json(made)})
    else:
        say(text)
    if is_new:
        note(f"made {wanted.path}, which has no version yet")
    note("it will not be shown again; only a hash of it is kept")


@key_commands.command("ls")
def list_keys(place: DirectoryArgument, name: NameArgument = None, as_json: AsJson = False) -> None:
    """List the keys of a replica, oldest first; never their secrets."""
    directory, [name] = _directory_first(place, [name], "key ls")
    wanted = _parse_name(name)
    with _opened(directory) as store:
        found = store.catalogue.keys(wanted)
    if as_json:
        write_document([_key_json(each) for each in found])
        return
    if not found:
        say("no keys")
        return
    shown = table("id", "kind", "~label", "created")
    for each in found:
        shown.add_row(each.id, each.kind, printable(each.label) or "-", clock(each.created_ms))
    show_table(shown)


@key_commands.command("revoke")
def revoke_key(
    place: DirectoryArgument,
    name: NameArgument = None,
    id: Annotated[
        str | None, typer.Argument(metavar="ID", help="The key's id, or the whole key.", show_default=False)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Revoke a key: a running server refuses it from now on."""
    directory, [name, id] = _directory_first(place, [name, id], "key revoke")
    wanted = _parse_name(name)
    if id is None:
        raise InvalidOptionError("which key?", next="`headwater replica key ls` lists them")
    key_id = key_id_of(id) or id
    with _opened(directory) as store:
        if not store.catalogue.remove_key(wanted, key_id):
            raise InvalidOptionError(
                f"{wanted.path} has no key {key_id!r}", next="`headwater replica key ls` lists them"
            )
        left = len(store.catalogue.keys(wanted))
    if as_json:
        write_document({"revoked": key_id, "left": left})
    else:
        say(f"revoked {key_id}")
    if not left:
        note("that was the last key: only a token of the server opens it now; key create makes another")


# --- over the network -----------------------------------------------------------------------------------------------


class _VersionDocument(msgspec.Struct, rename="camel"):
    """A version, as a server lists it."""

    version: int
    base: int
    message: str
    client: str
    at: datetime
    size: int
    pages: int
    page_size: int
    changed_pages: int
    bytes: int
    dbhash: str | None

    def as_version(self) -> Version:
        return Version(
            number=self.version,
            base=self.base,
            push_id="",
            message=self.message,
            client=self.client,
            at_ms=time_ms(self.at),
            size=self.size,
            page_size=self.page_size,
            pages=self.pages,
            changed_pages=self.changed_pages,
            wire_bytes=self.bytes,
            dbhash=self.dbhash,
            sha256="",
        )


class _ReplicaDocument(msgspec.Struct, rename="camel"):
    """A replica, as a server lists it."""

    replica: str
    replica_id: str = msgspec.field(name="replicaID")
    created_at: datetime
    changed_at: datetime | None
    versions: int
    stored_bytes: int
    newest: _VersionDocument | None

    def as_listing(self) -> ReplicaListing:
        newest = None if self.newest is None else self.newest.as_version()
        replica = Replica(
            id=self.replica_id,
            name=ReplicaName.parse(self.replica),
            created_ms=time_ms(self.created_at),
            newest=0 if newest is None else newest.number,
            versions=self.versions,
            stored_bytes=self.stored_bytes,
            changed_ms=None if self.changed_at is None else time_ms(self.changed_at),
        )
        return ReplicaListing(replica, newest)


class _ListingDocument(msgspec.Struct, rename="camel"):
    """`is_cut`: there are more."""

    replicas: list[_ReplicaDocument]
    is_cut: bool


def _remote_replicas(url: str, key: str | None, ca: str | None) -> tuple[list[ReplicaListing], bool]:
    """The replicas that the server lists, and whether there are more."""
    from headwater.replication.connection import UNREADABLE, http_request

    listing_url, found, is_cut = _listing_url(url), list[ReplicaListing](), True
    while is_cut and len(found) < REMOTE_LISTED_MAX:
        after = f"?after={quote(found[-1].replica.name.path)}" if found else ""
        answer = http_request(listing_url + after, key=key, ca=ca)
        try:
            listing = msgspec.json.decode(answer, type=_ListingDocument)
            page, is_cut = [each.as_listing() for each in listing.replicas], listing.is_cut
        except (*UNREADABLE, InvalidOptionError) as exc:
            raise UnknownReplicaError(f"the server's list of replicas cannot be read ({exc})", where=url) from exc
        if not page or (found and page[0].replica.name <= found[-1].replica.name):  # the server repeats itself
            break
        found += page
    return found, is_cut


def _listing_url(url: str) -> str:
    """The url of a server or a namespace, checked by the rules for names of replicas."""
    url = url.rstrip("/")
    names = url.partition("://")[2].count("/")
    if names > 1:
        raise InvalidOptionError(
            "a server or a namespace is wanted, and this names more",
            next="Write ws://host or ws://host/ns; headwater replica log lists the versions of one replica",
        )
    place = place_of(f"{url}/any" if names else f"{url}/any/any")
    assert isinstance(place, Remote)
    namespace = f"/{place.name.namespace}" if names else ""
    return f"http{place.url_base.removeprefix('ws')}{PREFIX}replicas{namespace}"


class _RemoteReplica(NamedTuple):
    """A replica on a server, with the key or token for it."""

    url: str
    key: str | None
    ca: str | None

    @property
    def address(self) -> Remote:
        place = place_of(self.url)
        if not isinstance(place, Remote):
            raise InvalidOptionError(
                "this is no replica on a server", where=self.url, next="Name it like ws://host/ns/name"
            )
        return place

    def versions(self, *, limit: int, before: int | None) -> list[Version]:
        """Newest first."""
        if self.address.version is not None:
            raise _about_the_whole(self.address.version, self.address.key)
        if before == 1:
            return []
        return self._page(None if before is None else before - 1)[:limit]

    def _page(self, upto: int | None = None) -> list[Version]:
        """One page of versions, as large as the server allows, newest first."""
        from headwater.replication.connection import UNREADABLE, http_request, http_url

        url = http_url(self.address, "versions/") + ("" if upto is None else f"@{upto}")
        answer = http_request(url, key=self.key, ca=self.ca)
        try:
            return [each.as_version() for each in msgspec.json.decode(answer, type=list[_VersionDocument])]
        except UNREADABLE as exc:
            raise UnknownReplicaError(f"the server's list of versions cannot be read ({exc})", where=self.url) from exc

    def has_version(self) -> bool:
        """False only if the server says that there is no such replica, or no version."""
        try:
            return bool(self._page())
        except UnknownReplicaError as exc:
            if NO_SUCH_REPLICA not in exc.why:
                raise
            return False

    def pull(self, target: str) -> Outcome:
        from headwater.replication.sync import sync

        return sync(self.url, target, pull_key=self.key, ca=self.ca, overwrite=True)

    def verify(self) -> VersionVerdict:
        """One version, by default the newest: pulled to a temporary file, checked and hashed."""
        versions = self._page()
        address = self.address
        newest, wanted = max((each.number for each in versions), default=0), address.version or VersionName()
        number = wanted.number_from(newest)
        if versions and 0 < number < versions[-1].number:
            versions += self._page(number)
        number = wanted.pick(newest, [each.number for each in versions])
        [version] = [each for each in versions if each.number == number]
        with tempfile.TemporaryDirectory(prefix="headwater-verify-") as directory:
            path = os.path.join(directory, "drill.db")

            def restore_drill() -> str:
                pulled = self._replace(url=f"{address.key}@{number}").pull(path)
                return f"pulled: {pulled.pages:,} pages of {pulled.page_size:,} bytes"

            steps: dict[str, Callable[[], str]] = {
                "restore": restore_drill,
                "integrity": lambda: prove_integrity(path),
                "content": lambda: prove_content(path, version.dbhash),
            }
            checks: list[Check] = []
            for what, check in steps.items():
                try:
                    checks.append(passed(what, check()))
                except RemoteError:  # it says nothing about the version
                    raise
                except HeadwaterError as exc:
                    checks.append(failed(what, exc))
                    break
        return VersionVerdict(address.name.path, number, tuple(checks))


# --- JSON -----------------------------------------------------------------------------------------------------------


def _replica_json(replica: Replica, newest: Version | None, *, remote: bool = False) -> dict[str, Any]:
    return {
        "replica": replica.name.path,
        "id": replica.id,
        "created_at": iso(replica.created_ms),
        "newest": None if newest is None else _version_json(newest, remote=remote),
        "changed_at": None if replica.changed_ms is None else iso(replica.changed_ms),
        "versions": replica.versions,
        "stored_bytes": replica.stored_bytes,
    }


def _version_json(version: Version, *, remote: bool = False) -> dict[str, Any]:
    """`remote`: without the fields that a server does not list."""
    fields = {
        "version": version.number,
        "base": version.base,
        "at": iso(version.at_ms),
        "message": version.message,
        "client": version.client,
        "size": version.size,
        "page_size": version.page_size,
        "pages": version.pages,
        "changed_pages": version.changed_pages,
        "wire_bytes": version.wire_bytes,
        "stored_bytes": version.stored_bytes,
        "dbhash": version.dbhash,
        "sha256": version.sha256,
    }
    return {name: value for name, value in fields.items() if not remote or name not in ("stored_bytes", "sha256")}


def _key_json(key: Key) -> dict[str, Any]:
    return {"id": key.id, "kind": key.kind, "label": key.label, "created_at": iso(key.created_ms)}


def _report_json(report: ClientReport) -> dict[str, Any]:
    return {"at": iso(report.at_ms), "client": report.client, "report": msgspec.json.decode(report.document)}


def _verdict_json(verdict: VersionVerdict) -> dict[str, Any]:
    """`verdict` is proved, whole (without a hash to prove it by), not checked or bad; `ok` the first two."""
    return {
        "replica": verdict.name,
        "version": verdict.version,
        "ok": verdict.ok,
        "verdict": verdict.finding,
        "next": None if verdict.missing is None else _NEXT_WITHOUT[verdict.missing],
        "checks": [
            {"what": check.what, "ok": check.ok, "details": check.details, "lacks": check.missing}
            for check in verdict.checks
        ],
    }


# --- tables: in a narrow terminal text gives way; times, numbers and sizes do not ------------------------------------


def show_replicas(found: Sequence[ReplicaListing]) -> None:
    heads = ["~replica", ">newest", "pushed", "changed", ">size", ">versions", ">on disk"]
    rows = [
        [
            each.name.path,
            count(each.newest) if newest else "-",
            clock(newest.at_ms) if newest else "never",
            clock(each.changed_ms) if each.changed_ms else "-",
            format_size(newest.size) if newest else "-",
            count(each.versions),
            format_size(each.stored_bytes),
        ]
        for each, newest in found
    ]
    longest = max(cell_len(name) for name, *_ in rows)
    if _width() < min(longest, NAME_COLUMNS_MIN) + _columns(heads[1:], [row[1:] for row in rows]):
        at = heads.index("changed")  # the least important one
        heads, rows = _without(heads, at), [_without(row, at) for row in rows]
    shown = table(*heads)
    shown.columns[0].no_wrap, shown.columns[0].overflow = False, "fold"
    for name, *rest in rows:
        shown.add_row(Text(name, "cyan"), *rest)
    show_table(shown)


def show_versions(versions: Sequence[Version], *, remote: bool) -> None:
    heads = [">version", "pushed", ">size", ">new pages", ">on disk", "from"]
    rows = [
        [
            f"{'' if version.dbhash else '*'}{version.number}",
            clock(version.at_ms),
            format_size(version.size),
            count(version.changed_pages),
            format_size(version.stored_bytes),
            _host(version.client),
        ]
        for version in versions
    ]
    if remote:
        at = heads.index(">on disk")
        heads, rows = _without(heads, at), [_without(row, at) for row in rows]
    _show_with_text(heads, rows, "message", [_first_line(version.message) for version in versions])
    if not all(version.dbhash for version in versions):
        note("* came without a hash: verify tells whether it is whole, not whether it is what was pushed")


def show_reports(reports: Sequence[ClientReport]) -> None:
    rows, errors = [], []
    for report in reports:
        fields = _report_json(report)["report"]
        rows.append([clock(report.at_ms), _first_line(str(fields.get("kind", "-"))), _host(report.client)])
        errors.append(_first_line(str(fields.get("error", ""))))
    _show_with_text(["at", "kind", "from"], rows, "error", errors)


def _show_with_text(heads: Sequence[str], rows: Sequence[Sequence[str]], name: str, texts: Sequence[str]) -> None:
    """Rows that are never cut, each with a text that is folded: in a last column, or under the row."""
    if _width() - _columns(heads, rows) >= min(TEXT_COLUMNS_MIN, max(map(cell_len, [name, *texts]))):
        shown = table(*heads, f"~{name}")
        shown.columns[-1].no_wrap, shown.columns[-1].overflow = False, "fold"
        for row, text in zip(rows, texts, strict=True):
            shown.add_row(*row, text)
        show_table(shown)
        return
    from rich.padding import Padding
    from rich.text import Text as RichText

    shown, screen = table(*heads), console()
    for row in rows:
        shown.add_row(*row)
    with screen.capture() as captured:
        screen.print(shown)
    for line, text in zip(captured.get().splitlines(), ["", *texts], strict=True):
        screen.file.write(f"{line}\n")
        if text not in ("", "-"):
            screen.print(Padding(RichText(text, overflow="fold"), (0, 0, 0, 4)))


def _width() -> int:
    return console().width if is_terminal(sys.stdout) else PIPE_COLUMNS


def _columns(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> int:
    """The width of these columns, with the gaps after them."""
    return sum(
        max(map(cell_len, cells)) + GAP_COLUMNS for cells in zip([h.lstrip(">~") for h in heads], *rows, strict=True)
    )


def _without(cells: Sequence[str], at: int) -> list[str]:
    return [*cells[:at], *cells[at + 1 :]]


def _host(client: str) -> str:
    """The machine of a client, without the id of its process."""
    return printable(client.rpartition(":")[0] or client)[:HOST_CHARS_MAX] or "-"


def _first_line(message: str) -> str:
    first, more, _ = message.partition("\n")
    return printable(first) + (" …" if more else "") or "-"
