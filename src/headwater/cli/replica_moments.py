"""Which version of a replica is meant by a time: the one that was the newest then."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Annotated

import typer

from headwater.cli.output import clock
from headwater.cli.times import TIME_HELP, parse_time
from headwater.errors import UnknownReplica
from headwater.message.times import time_ms
from headwater.replication.host.records import Version

At = Annotated[
    str | None,
    typer.Option(
        "--at", metavar="TIME", help=f"The version that was the newest then: {TIME_HELP}.", show_default=False
    ),
]
VersionsBelow = Callable[[int | None], Sequence[Version]]  # newest first, a page of them; None: from the newest


def number_at(text: str, versions_below: VersionsBelow) -> int:
    at_ms = time_ms(parse_time(text, "--at", datetime.now().astimezone()))
    oldest: Version | None = None
    while versions := versions_below(None if oldest is None else oldest.number):
        for version in versions:
            if version.at_ms <= at_ms:
                return version.number
        oldest = versions[-1]
    if oldest is None:
        raise UnknownReplica("there is no version yet", where=text, next="Push one first")
    raise UnknownReplica(
        "no version that is kept is so old",
        where=text,
        next=f"The oldest is version {oldest.number}, pushed {clock(oldest.at_ms)}",
    )
