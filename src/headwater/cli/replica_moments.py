"""Which version of a replica is meant by a time: the one that was the newest then."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Annotated

import typer

from headwater.cli.times import TIME_HELP, parse_time
from headwater.errors import InvalidOption, UnknownReplica
from headwater.message.times import time_ms
from headwater.replication.host.records import Version

At = Annotated[
    str | None,
    typer.Option(
        "--at",
        metavar="TIME",
        help=f"The version that was the newest then: {TIME_HELP}. A date is its first minute.",
        show_default=False,
    ),
]
VersionsBelow = Callable[[int | None], Sequence[Version]]  # newest first, a page of them; None: from the newest


def number_at(text: str, versions_below: VersionsBelow) -> int:
    now = datetime.now().astimezone()
    moment = parse_time(text, "--at", now)
    if moment > now:
        raise InvalidOption(f"--at is a time that has come: {_shown(moment)} has not")
    at_ms = time_ms(moment)
    oldest: Version | None = None
    while versions := versions_below(None if oldest is None else oldest.number):
        for version in versions:
            if version.at_ms <= at_ms:
                return version.number
        oldest = versions[-1]
    if oldest is None:
        raise UnknownReplica("there is no version yet", where=text, next="Push one first")
    pushed = datetime.fromtimestamp(oldest.at_ms / 1000, UTC)
    raise UnknownReplica(
        f"no version that is kept is as old as {_shown(moment)}",
        next=f"The oldest is version {oldest.number}, pushed {_shown(pushed)}",
    )


def two_answers(where: str) -> InvalidOption:
    return InvalidOption("a version and a time: only one of them", where=where, next="Leave --at out, or the version")


def _shown(moment: datetime) -> str:
    return moment.astimezone().isoformat(" ", "seconds")
