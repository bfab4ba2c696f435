"""Which dead letters a `headwater dlq` command means: the options that all of them share."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, cast

import typer

from headwater.broker.dead_letters import LetterFilter
from headwater.errors import InvalidOption

Ids = Annotated[list[int] | None, typer.Argument(metavar="ID", help="Dead letters by id.", show_default=False)]
Subscription = Annotated[str | None, typer.Option("--subscription", "-s", help="Of this subscription.")]
Topic = Annotated[str | None, typer.Option("--topic", "-t", metavar="PATTERN", help="Of topics that match.")]
Type = Annotated[str | None, typer.Option("--type", help="Of this type.")]
Reason = Annotated[str | None, typer.Option("--reason", "-r", help="Like max_retries, rejected, timeout, expired.")]
Error = Annotated[str | None, typer.Option("--error", "-e", metavar="REGEX", help="Whose error text fits.")]
All = Annotated[bool, typer.Option("--all", help="All of them; to be said if nothing else is.")]


def make_filter(
    ids: Iterable[int] | None,
    subscription: str | None,
    topic: str | None,
    type: str | None,
    reason: str | None,
    error: str | None,
) -> LetterFilter:
    given = {
        "ids": ids or None,
        "subscription": subscription,
        "topic": topic,
        "type": type,
        "reason": reason,
        "error": error,
    }
    return cast(LetterFilter, {name: value for name, value in given.items() if value is not None})


def require_choice(chosen: LetterFilter, all_of_them: bool) -> None:
    if not chosen and not all_of_them:
        raise InvalidOption("which dead letters?", next="Give their ids, a filter like --subscription, or --all")
