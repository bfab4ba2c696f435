"""`headwater replica verify`: what is proved of each version, and what could not be looked at."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Annotated

import typer
from rich.text import Text

from headwater.cli import replica_remote
from headwater.cli.opening import AsJson, is_remote
from headwater.cli.output import note, printable, say, some, write_document
from headwater.cli.replica_json import NEXT_WITHOUT, verdict_json
from headwater.cli.replica_opening import (
    USUAL_DIRECTORIES,
    directory_first,
    opened,
    parse_name,
    parse_version,
    refuse_name,
)
from headwater.cli.replica_remote import Asked, Ca, Key
from headwater.cli.stopping import FINDING, STORE
from headwater.errors import UnknownReplica
from headwater.replication.host.shelf import Shelf
from headwater.replication.host.verifying import Finding, Verdict
from headwater.replication.names import ReplicaName

_SHOWN: dict[Finding, tuple[str, str]] = {
    "proved": ("ok", "green"),
    "whole": ("whole, but no hash came with it", "yellow"),
    "not checked": ("not checked", "yellow"),
    "bad": ("bad", "bold red"),
}


def verify(
    place: Annotated[
        str | None,
        typer.Argument(
            metavar="[DIR|URL]",
            help=f"The data directory of the server, else the only {USUAL_DIRECTORIES} here; "
            "or a replica like ws://host/ns/name.",
            show_default=False,
        ),
    ] = None,
    name: Annotated[str | None, typer.Argument(metavar="[NS/NAME[@VERSION]]", show_default=False)] = None,
    key: Key = None,
    ca: Ca = None,
    as_json: AsJson = False,
) -> None:
    """Prove versions: bytes, integrity, content as it was pushed, and a restore drill.

    All of them, or those of one replica, or a single one; of a URL one, which is pulled.
    Ends with 1 if something was found, else with 3 if something could not be checked.
    """
    directory, [name] = directory_first(place, [name], "verify")
    verdicts: list[Verdict] = []
    is_one = name is not None and "@" in name

    def take(verdict: Verdict, *, every_check: bool) -> None:
        verdicts.append(verdict)
        if not as_json:
            _show_verdict(verdict, every_check=every_check)

    if is_remote(directory):
        refuse_name(name)
        take(replica_remote.verify(Asked(directory, key, ca)), every_check=True)
    else:
        with opened(directory) as shelf:
            for wanted, number in _versions_to_verify(shelf, name):
                try:
                    verdict = shelf.verify(wanted, number)
                except UnknownReplica:  # beside a server, it may go before its turn comes
                    if is_one:
                        raise
                    continue
                take(verdict, every_check=is_one)
    if as_json:
        write_document([verdict_json(verdict) for verdict in verdicts])
    else:
        say(_summary(verdicts))
        for lacking in sorted({verdict.lacks for verdict in verdicts if verdict.lacks is not None}):
            note(f"next: {NEXT_WITHOUT[lacking]}")
    findings = {verdict.finding for verdict in verdicts}
    if "bad" in findings:
        raise typer.Exit(FINDING)
    if "not checked" in findings:
        raise typer.Exit(STORE)


def _summary(verdicts: Sequence[Verdict]) -> str:
    number = Counter(verdict.finding for verdict in verdicts)
    if number["bad"]:
        parts = [f"{number['bad']:,} of {some(len(verdicts), 'version')} bad"]
    else:
        parts = [f"{some(number['proved'], 'version')} proved"]
    if number["whole"]:
        parts.append(f"{number['whole']:,} whole but without a hash")
    for lacking, times in Counter(each.lacks for each in verdicts if each.finding == "not checked").items():
        parts.append(f"{times:,} not checked: no {lacking}")
    return ", ".join(parts)


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
    line.append(*_SHOWN[verdict.finding])
    say(line)
    for check in verdict.checks:
        if every_check or not check.ok:
            said = Text(f"  {check.what}: ")
            said.append(printable(check.said), "" if check.ok else "red")
            say(said)
