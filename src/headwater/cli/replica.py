"""`headwater replica`: the replicas of a server, in its data directory or over the network."""

from __future__ import annotations

import glob
import os
import shlex
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from headwater.cli.arguments import AsJson, Group, ListsByDefault, is_remote
from headwater.cli.output import (
    Text,
    clock,
    count,
    note,
    printable,
    say,
    show_list,
    show_result,
    write_items,
)
from headwater.cli.parameters import Shared, argument, flag, option
from headwater.cli.stopping import FINDING, STORE
from headwater.cli.sync import copy, follow, pull, push
from headwater.errors import InvalidOptionError, UnknownReplicaError
from headwater.formats import TIME_HELP, format_size, iso, ms_of_iso, parse_duration, parse_time, plural, time_ms
from headwater.replication import DIRECTORY_SUFFIX

if TYPE_CHECKING:
    from headwater.replication.host.catalogue import ClientReport, Key, Replica, ReplicaListing, Version
    from headwater.replication.host.store import ReplicaStore
    from headwater.replication.host.verify import Finding, Missing, VersionVerdict
    from headwater.replication.names import ReplicaName, VersionName

USUAL_DIRECTORIES = f"*{DIRECTORY_SUFFIX}"

HOST_CHARS_MAX = 16

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


_MOVE, _INSPECT, _OPERATE = "Move", "Inspect", "Operate"


class _ListsDirectory(ListsByDefault):
    has_log = False


replica = Group(
    cls=_ListsDirectory,
    help="Replicas: SQLite databases that a server keeps, with their versions.\n\n"
    "[dim]List:[/]  headwater replica ls events.db-replicas",
)
key_commands = Group(
    help="Keys: rights to push to or pull from one replica.\n\n"
    "[dim]A first one:[/]  headwater replica key create events.db-replicas shop/app.db --push"
)
replica.add_typer(key_commands, name="key", rich_help_panel=_OPERATE)
for _moves in (push, pull, follow, copy):
    replica.command(rich_help_panel=_MOVE)(_moves)


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
    argument(
        "[DIR]",
        f"The data directory of the server, else the only {USUAL_DIRECTORIES} here.",
        show_default=False,
        callback=_refuse_url,
        offers="replica",
    ),
]
PlaceArgument = Annotated[str, argument("[DIR|URL]", _PLACE_HELP, offers="replica")]
NameArgument = Annotated[str | None, argument("NS/NAME", "The replica, like shop/app.db.", offers="replica")]
KeyOption = Annotated[
    str | None,
    option(
        "KEY",
        "A pull key, push key or token, for a URL.",
        envvar=["HEADWATER_PULL_KEY", "HEADWATER_PUSH_KEY", "HEADWATER_TOKEN"],
        show_default=False,
        show_envvar=False,
    ),
]
CaOption = Annotated[str | None, option("FILE", "Certificates to trust for wss://.")]


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
    from headwater.ports.clock import SystemClock
    from headwater.replication.host.store import ReplicaStore
    from headwater.replication.host.versions import VersionRetention

    with ReplicaStore(_refuse_url(directory), VersionRetention(), SystemClock()).open() as store:
        yield store


def _refuse_mistyped_url(place: str) -> None:
    """The error does not repeat a text that may hold a secret."""
    if is_remote(place) or os.path.exists(place):
        return
    from headwater.replication.names import place_of

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
    from headwater.replication.host.disk import CATALOGUE

    found = [each for each in sorted(glob.glob(USUAL_DIRECTORIES)) if os.path.exists(os.path.join(each, CATALOGUE))]
    if len(found) != 1:
        why = f"there are {len(found)} of them here" if found else "there is none here"
        call = shlex.join(["headwater", "replica", *command.split(), found[0] if found else "DIR", *words])
        raise InvalidOptionError(f"which data directory? {why}", next=f"Name it: {call}")
    return found[0]


def _parse_name(text: str | None) -> ReplicaName:
    """A name without a version."""
    from headwater.cli.replica_remote import about_the_whole
    from headwater.replication.names import ReplicaName, split_version

    if text is None:
        raise InvalidOptionError("which replica?", next="Name it, like shop/app.db; headwater replica ls lists them")
    name, version = split_version(text)
    if version is not None:
        raise about_the_whole(version, name)
    return ReplicaName.parse(name)


def _parse_version(text: str) -> tuple[ReplicaName, VersionName]:
    """A name, and its version, by default the newest."""
    from headwater.replication.names import ReplicaName, VersionName, split_version

    name, version = split_version(text)
    return ReplicaName.parse(name), version or VersionName()


@dataclass
class LocalReplica(Shared):
    """A replica in the data directory of a server."""

    place: DirectoryArgument
    name: NameArgument = None

    @contextmanager
    def opened(self, command: str) -> Iterator[tuple[ReplicaStore, ReplicaName]]:
        directory, [name] = _directory_first(self.place, [self.name], command)
        wanted = _parse_name(name)
        with _opened(directory) as store:
            yield store, wanted


def _refuse_name(name: str | None) -> None:
    if name is not None:
        raise InvalidOptionError(f"the replica is named twice: by the URL, and as {name!r}", next=f"Leave {name} out")


# --- lists ----------------------------------------------------------------------------------------------------------


@replica.command("ls", rich_help_panel=_INSPECT)
def list_replicas(
    place: Annotated[
        str | None,
        argument(
            "[DIR|URL]",
            f"The data directory, else the only {USUAL_DIRECTORIES} here; or a server, or a namespace of one: ws://host/ns.",
            show_default=False,
        ),
    ] = None,
    stale: Annotated[
        str | None,
        option(
            "SPAN",
            "Only replicas whose last push is longer ago, like 1h or 2d; exits with 1 if there are any.",
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
        from headwater.cli.replica_remote import remote_replicas

        found, is_cut = remote_replicas(place, key, ca)
    else:
        with _opened(place if place is not None else _only_directory("ls")) as store:
            found = store.catalogue.listing()
    listed = len(found)
    if span_ms is not None:
        before_ms = time_ms(datetime.now(UTC)) - span_ms
        found = [each for each in found if _pushed_ms(each) < before_ms]
    empty = "no replicas" if stale is None else f"no replica was last pushed longer ago than {stale}"
    show_list(found, lambda each: _replica_json(*each, remote=remote), _REPLICA_COLUMNS, empty=empty, as_json=as_json)
    if is_cut:
        note(f"there are more than these {plural(listed, 'replica')}; name a namespace, like ws://host/ns")
    elif remote and key is None and not listed:
        note("replicas that have keys are listed only with one: --key")
    if stale is not None and found:
        raise typer.Exit(FINDING)


def _pushed_ms(listing: ReplicaListing) -> int:
    """The time of the last push; without one, that of the creation."""
    return listing.replica.created_ms if listing.newest is None else listing.newest.at_ms


@replica.command("log", rich_help_panel=_INSPECT)
def log(
    place: PlaceArgument,
    name: NameArgument = None,
    limit: Annotated[int, option("N", "Show at most N.", "-n", min=1, max=1000)] = 100,
    before: Annotated[int | None, option("VERSION", "Only versions before this one.", min=1)] = None,
    key: KeyOption = None,
    ca: CaOption = None,
    as_json: AsJson = False,
) -> None:
    """List the versions of a replica, newest first."""
    directory, [name] = _directory_first(place, [name], "log")
    versions: Sequence[Version]
    if remote := is_remote(directory):
        from headwater.cli.replica_remote import RemoteReplica

        _refuse_name(name)
        versions = RemoteReplica(directory, key, ca).versions(limit=limit, before=before)
    else:
        wanted = _parse_name(name)
        with _opened(directory) as store:
            versions = store.catalogue.versions(wanted, below=before, limit=limit)
    columns = {name: cell for name, cell in _VERSION_COLUMNS.items() if not remote or name != ">on disk"}
    to_json = partial(_version_json, remote=remote)
    show_list(versions, to_json, columns, empty="no versions", as_json=as_json)
    if as_json or not versions:
        return
    if not all(version.dbhash for version in versions):
        note("* pushed without a hash: verify can prove that it is intact, not that it is what was pushed")
    if len(versions) == limit:
        note(f"there may be more: --before {versions[-1].number}")


@replica.command("reports", rich_help_panel=_INSPECT)
def reports(
    local: LocalReplica,
    limit: Annotated[int, option("N", "Show at most N.", "-n", min=1, max=1000)] = 20,
    as_json: AsJson = False,
) -> None:
    """List the error reports of clients: pushes that were interrupted, or fail for minutes."""
    with local.opened("reports") as (store, wanted):
        found = [_report_json(report) for report in store.catalogue.reports(wanted, limit)]
    show_list(found, dict, _REPORT_COLUMNS, empty="no reports", as_json=as_json)


# --- restore and remove ---------------------------------------------------------------------------------------------


@replica.command("restore", rich_help_panel=_MOVE)
def restore(
    place: PlaceArgument,
    words: Annotated[
        list[str], argument("[NS/NAME[@VERSION]] TARGET", "The replica, its version, and the file to write.")
    ],
    at: Annotated[
        str | None,
        option(
            "TIME",
            f"The newest version at this time: {TIME_HELP}. A date is its first minute.",
            show_default=False,
        ),
    ] = None,
    overwrite: Annotated[
        bool, flag("Replace TARGET if it exists; a database is overwritten in one transaction.")
    ] = False,
    if_missing: Annotated[bool, flag("If TARGET exists, do nothing and exit with 0.")] = False,
    if_replica_exists: Annotated[bool, flag("If the replica has no version yet, do nothing and exit with 0.")] = False,
    key: KeyOption = None,
    ca: CaOption = None,
    as_json: AsJson = False,
) -> None:
    """Restore a version, the newest if none is named, to a file.

    The version is written to a temporary file and checked before it replaces TARGET.

    [dim]An older one:[/]  headwater replica restore events.db-replicas shop/app.db@3 app-3.db
    [dim]Yesterday's:[/]   headwater replica restore ws://host/shop/app.db app.db --at -1d
    [dim]At a start:[/]    headwater replica restore URL app.db --if-missing --if-replica-exists
    """
    if if_missing and overwrite:
        raise InvalidOptionError("--if-missing and --overwrite exclude each other", next="Leave one of them out")

    def end_without(why: str) -> NoReturn:
        document = {"target": os.path.abspath(target), "version": None, "why": why}
        show_result(document, f"{why}: nothing to restore", as_json=as_json)
        raise typer.Exit

    if is_remote(place):
        from headwater.cli.replica_remote import RemoteReplica
        from headwater.replication.host.catalogue import VERSIONS_PAGE
        from headwater.replication.host.verify import refuse_target

        if len(words) != 1:
            raise _unclear("URL TARGET")
        target, remote = words[0], RemoteReplica(place, key, ca)
        address = remote.address
        if if_missing and os.path.exists(target):
            end_without(f"{target} is there")
        if if_replica_exists and not remote.has_version():
            end_without(f"there is no version of {address.key} yet")
        refuse_target(target, overwrite=overwrite)
        if at is not None:
            if address.version is not None:
                raise _version_and_time(place)
            number = _number_at(at, lambda below: remote.versions(limit=VERSIONS_PAGE, before=below))
            remote = remote._replace(url=f"{address.key}@{number}")
        pulled = remote.pull(target)
        text = f"restored version {pulled.version} of {pulled.remote} to {target}: {format_size(pulled.size)}"
        show_result(pulled, text, as_json=as_json)
        return
    directory, [name, into, *more] = _directory_first(place, [*words, None][: max(2, len(words))], "restore")
    if name is None or into is None or more:
        raise _unclear("DIR NS/NAME[@VERSION] TARGET")
    target = into
    wanted, version_name = _parse_version(name)
    if at is not None and "@" in name:
        raise _version_and_time(name)
    if if_missing and os.path.exists(target):
        end_without(f"{target} is there")
    with _opened(directory) as store:
        catalogue = store.catalogue
        if if_replica_exists and ((found := catalogue.find(wanted)) is None or not found.newest):
            end_without(f"there is no version of {wanted.path} yet")
        if at is not None:
            version_name = type(version_name)(_number_at(at, lambda below: catalogue.versions(wanted, below=below)))
        number = version_name.pick(catalogue.get(wanted).newest, catalogue.numbers(wanted))
        version = store.restore(wanted, number, target, overwrite=overwrite)
    document = {"target": os.path.abspath(target), **_version_json(version)}
    show_result(document, f"restored {wanted.path}@{number} to {target}: {format_size(version.size)}", as_json=as_json)


def _unclear(usage: str) -> InvalidOptionError:
    return InvalidOptionError("which version, and where to?", next=f"Write headwater replica restore {usage}")


def _version_and_time(where: str) -> InvalidOptionError:
    return InvalidOptionError("--at and a version exclude each other", where=where, next="Leave one of them out")


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


@replica.command("rm", rich_help_panel=_OPERATE)
def remove(
    local: LocalReplica,
    yes: Annotated[bool, flag("Do not ask.", "-y")] = False,
    as_json: AsJson = False,
) -> None:
    """Remove a replica for good, with all its versions, keys and reports."""
    with local.opened("rm") as (store, wanted):
        found = store.catalogue.get(wanted)
        if not yes:
            if not sys.stdin.isatty():
                raise InvalidOptionError(
                    "there is no terminal to ask on", next="Pass --yes to remove it without a question"
                )
            if not typer.confirm(f"Remove {wanted.path} with {plural(found.versions, 'version')} for good?", err=True):
                raise typer.Exit(1)
        store.remove(wanted)
    document = {"removed": wanted.path, "id": found.id, "versions": found.versions}
    show_result(document, f"removed {wanted.path} with {plural(found.versions, 'version')}", as_json=as_json)


# --- verify ---------------------------------------------------------------------------------------------------------


@replica.command("verify", rich_help_panel=_INSPECT)
def verify(
    place: Annotated[str | None, argument("[DIR|URL]", _PLACE_HELP, offers="replica")] = None,
    name: Annotated[
        str | None, argument("[NS/NAME[@VERSION]]", "One replica, or one version of it.", offers="replica")
    ] = None,
    key: KeyOption = None,
    ca: CaOption = None,
    as_json: AsJson = False,
) -> None:
    """Verify versions: bytes, integrity and content hash, with a trial restore of each.

    All versions are verified, or those of one replica, or a single one. From a
    URL one version is pulled and verified. Exits with 1 if a problem was found,
    else with 3 if a version could not be checked.
    """
    directory, [name] = _directory_first(place, [name], "verify")
    verdicts: list[VersionVerdict] = []
    is_one = name is not None and "@" in name

    def add(verdict: VersionVerdict, *, every_check: bool) -> None:
        verdicts.append(verdict)
        if not as_json:
            _show_verdict(verdict, every_check=every_check)

    if is_remote(directory):
        from headwater.cli.replica_remote import RemoteReplica

        _refuse_name(name)
        add(RemoteReplica(directory, key, ca).verify(), every_check=True)
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
        write_items([_verdict_json(verdict) for verdict in verdicts])
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
        parts = [f"{plural(number['proved'], 'version')} verified"]
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
    say(Text.assemble(f"{verdict.name}@{verdict.version}  ", _FINDINGS[verdict.finding]))
    for check in verdict.checks:
        if every_check or not check.ok:
            say(Text.assemble(f"  {check.what}: ", (check.details, "" if check.ok else "red")))


# --- keys -----------------------------------------------------------------------------------------------------------


@key_commands.command("create")
def create_key(
    local: LocalReplica,
    push: Annotated[bool, flag("The key may push and pull.")] = False,
    pull: Annotated[bool, flag("The key may only pull.")] = False,
    label: Annotated[str, option("TEXT", "What it is for.")] = "",
    as_json: AsJson = False,
) -> None:
    """Create a key and print it once: only its hash is stored.

    Once a replica has a key, each push and pull requires one. A key may be
    created before the first push.
    """
    from headwater.replication.host.catalogue import key_id_of

    if push == pull:
        raise InvalidOptionError("which right?", next="Pass either --push or --pull")
    with local.opened("key create") as (store, wanted):
        is_new = store.catalogue.find(wanted) is None
        text = store.catalogue.create_key(wanted, "push" if push else "pull", label)
        [made] = [each for each in store.catalogue.keys(wanted) if each.id == key_id_of(text)]
    show_result({"key": text, **_key_json(made)}, text, as_json=as_json)
    if is_new:
        note(f"made {wanted.path}, which has no version yet")
    note("it will not be shown again; only a hash of it is kept")


@key_commands.command("ls")
def list_keys(local: LocalReplica, as_json: AsJson = False) -> None:
    """List the keys of a replica by id and label, oldest first."""
    with local.opened("key ls") as (store, wanted):
        found = store.catalogue.keys(wanted)
    columns: dict[str, Callable[[Key], str]] = {
        "id": lambda each: each.id,
        "kind": lambda each: each.kind,
        "~label": lambda each: each.label or "-",
        "created": lambda each: clock(each.created_ms),
    }
    show_list(found, _key_json, columns, empty="no keys", as_json=as_json)


@key_commands.command("revoke")
def revoke_key(
    place: DirectoryArgument,
    name: NameArgument = None,
    id: Annotated[str | None, argument("ID", "The key's id, or the whole key.")] = None,
    as_json: AsJson = False,
) -> None:
    """Revoke a key: a running server refuses it from now on."""
    from headwater.replication.host.catalogue import key_id_of

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
    show_result({"revoked": key_id, "left": left}, f"revoked {key_id}", as_json=as_json)
    if not left:
        note("that was the last key: without a token of the server, the replica is closed until `key create`")


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


_LISTED = (
    "base", "message", "client", "size", "page_size", "pages", "changed_pages", "wire_bytes", "stored_bytes", "dbhash",
    "sha256",
)  # fmt: skip
_NOT_BY_A_SERVER = ("stored_bytes", "sha256")


def _version_json(version: Version, *, remote: bool = False) -> dict[str, Any]:
    names = [name for name in _LISTED if not remote or name not in _NOT_BY_A_SERVER]
    found = {name: getattr(version, name) for name in names}
    return {"version": version.number, "at": iso(version.at_ms), **found}


def _key_json(key: Key) -> dict[str, Any]:
    return {"id": key.id, "kind": key.kind, "label": key.label, "created_at": iso(key.created_ms)}


def _report_json(report: ClientReport) -> dict[str, Any]:
    import msgspec

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


# --- columns: in a narrow terminal text gives way; times, numbers and sizes do not -----------------------------------


_REPLICA_COLUMNS: dict[str, Callable[[ReplicaListing], str | Text]] = {
    "=replica": lambda each: Text(each.replica.name.path, "cyan"),
    ">newest": lambda each: count(each.replica.newest) if each.newest else "-",
    "pushed": lambda each: clock(each.newest.at_ms) if each.newest else "never",
    "?changed": lambda each: clock(each.replica.changed_ms) if each.replica.changed_ms else "-",
    ">size": lambda each: format_size(each.newest.size) if each.newest else "-",
    ">versions": lambda each: count(each.replica.versions),
    ">on disk": lambda each: format_size(each.replica.stored_bytes),
}
_VERSION_COLUMNS: dict[str, Callable[[Version], str]] = {
    ">version": lambda version: f"{'' if version.dbhash else '*'}{version.number}",
    "pushed": lambda version: clock(version.at_ms),
    ">size": lambda version: format_size(version.size),
    ">new pages": lambda version: count(version.changed_pages),
    ">on disk": lambda version: format_size(version.stored_bytes),
    "from": lambda version: _host(version.client),
    "+message": lambda version: _first_line(version.message),
}
_REPORT_COLUMNS: dict[str, Callable[[dict[str, Any]], str]] = {
    "at": lambda report: clock(ms_of_iso(report["at"])),
    "kind": lambda report: _first_line(str(report["report"].get("kind", "-"))),
    "from": lambda report: _host(report["client"]),
    "+error": lambda report: _first_line(str(report["report"].get("error", ""))),
}


def _host(client: str) -> str:
    """The machine of a client, without the id of its process."""
    return printable(client.rpartition(":")[0] or client)[:HOST_CHARS_MAX] or "-"


def _first_line(message: str) -> str:
    first, more, _ = message.partition("\n")
    return printable(first) + (" …" if more else "") or "-"
