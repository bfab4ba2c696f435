"""`headwater subscriptions` and `headwater lag`: who reads, how far each is, and moving or removing one."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any

import typer
from rich.text import Text

from headwater.broker.statistics import SubscriptionInfo
from headwater.cli.groups import ListsByDefault
from headwater.cli.opening import AsJson, LogPath, existing_log, takes_log
from headwater.cli.output import clock, count, note, printable, say, show_table, some, table, write_document
from headwater.cli.times import SPAN_HELP, parse_span, parse_start, say_span
from headwater.message import iso

subscriptions = typer.Typer(
    cls=ListsByDefault,
    no_args_is_help=True,
    help="List subscriptions, move or remove one.\n\n[dim]List:[/]  headwater subscriptions events.db",
)

# `-1h` is a START, not a pile of options; no short option may stand in its way.
_TAKES_MINUS: dict[str, Any] = {"ignore_unknown_options": True, "help_option_names": ["--help"]}

Id = Annotated[str, typer.Argument(metavar="ID", help="The subscription.", show_default=False)]


@subscriptions.command("ls")
@takes_log
def list_subscriptions(path: LogPath, as_json: AsJson = False) -> None:
    """List the subscriptions of a log."""
    with existing_log(path) as log:
        infos = log.subscriptions()
    if as_json:
        write_document([subscription_json(info) for info in infos])
        return
    if not infos:
        say(f"no subscriptions yet; begin one: headwater subscribe {path} ID PATTERN")
        return
    shown = table("~subscription", "~pattern", "mode", ">position", ">lag", ">in flight", ">dead", ">gaps", "~held by")
    for info in infos:
        shown.add_row(
            printable(info.id),
            printable(info.pattern),
            info.mode,
            count(info.position),
            lag_text(info),
            count(info.in_flight),
            Text(count(info.dead), "red" if info.dead else ""),
            Text(count(info.gaps), "red" if info.gaps else ""),
            printable(info.holder) if info.holder else Text(f"nobody since {clock(info.active_ms)}", "dim"),
        )
    show_table(shown)


@subscriptions.command("rm")
@takes_log
def remove(path: LogPath, id: Id, as_json: AsJson = False) -> None:
    """Remove a subscription with all its state. Its dead letters stay."""
    with existing_log(path) as log:
        log.unsubscribe(id)
    if as_json:
        write_document({"removed": id})
    else:
        say(f"removed subscription {id}")


@subscriptions.command("seek", context_settings=_TAKES_MINUS)
@takes_log
def seek(
    path: LogPath,
    id: Id,
    start: Annotated[
        str,
        typer.Argument(metavar="START", help="first, new, a seq (after it), or a time like -1h.", show_default=False),
    ],
    as_json: AsJson = False,
) -> None:
    """Move a subscription to another place in the log.

    What comes after START is delivered, again if need be; all before it
    counts as done.

    [dim]Replay the last hour:[/]  headwater subscriptions seek events.db billing -1h

    Only while nobody holds it.
    """
    wanted = parse_start(start, "START", datetime.now().astimezone())
    with existing_log(path) as log:
        position = log.seek(id, wanted)
        info = log.subscription(id)
    if as_json:
        write_document({"id": id, "position": position, "lag": info.lag})
    else:
        say(f"{id} stands after seq {position:,}; {some(info.lag, 'message')} to come")


@takes_log
def lag(
    path: LogPath,
    id: Annotated[str | None, typer.Argument(metavar="ID", help="One subscription.", show_default=False)] = None,
    at_most: Annotated[
        int | None, typer.Option("--max", metavar="N", min=0, help="End with 1 if one is further behind.")
    ] = None,
    age_max: Annotated[
        str | None,
        typer.Option("--max-age", metavar="SPAN", help=f"End with 1 if one has waited longer: {SPAN_HELP}."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show how far behind each subscription is.

    [dim]As an alarm:[/]  headwater lag events.db --max 1000 --max-age 5m
    """
    age_ms_max = None if age_max is None else parse_span(age_max, "--max-age").total_seconds() * 1000
    with existing_log(path) as log:
        infos = log.subscriptions() if id is None else [log.subscription(id)]
        last_seq = log.last_seq()
    late = [info for info in infos if is_late(info, at_most, age_ms_max)]
    if as_json:
        write_document({"last_seq": last_seq, "subscriptions": [subscription_json(info) for info in infos]})
    elif infos:
        shown = table("~subscription", ">lag", ">in flight", ">waiting", ">oldest", ">position", ">of")
        for info in infos:
            shown.add_row(
                printable(info.id),
                lag_text(info, alarm=info in late),
                count(info.in_flight),
                count(info.waiting),
                "-" if info.oldest_unacked_ms is None else say_span(info.oldest_unacked_ms),
                count(info.position),
                count(last_seq),
            )
        show_table(shown)
    else:
        say("no subscriptions yet")
    if late:
        note(f"too far behind: {', '.join(info.id for info in late)}")
        raise typer.Exit(1)


def is_late(info: SubscriptionInfo, lag_max: int | None, age_ms_max: float | None) -> bool:
    behind = lag_max is not None and info.lag > lag_max
    waited = age_ms_max is not None and info.lag > 0 and (info.oldest_unacked_ms or 0) > age_ms_max
    return behind or waited


def lag_text(info: SubscriptionInfo, *, alarm: bool = False) -> Text:
    at_least = "≥ " if info.lag_is_least else ""
    return Text(f"{at_least}{info.lag:,}", "bold red" if alarm else "yellow" if info.lag else "green")


def subscription_json(info: SubscriptionInfo) -> dict[str, Any]:
    return {
        "id": info.id,
        "pattern": info.pattern,
        "mode": info.mode,
        "position": info.position,
        "lag": info.lag,
        "lag_is_least": info.lag_is_least,
        "in_flight": info.in_flight,
        "waiting": info.waiting,
        "oldest_unacked_ms": info.oldest_unacked_ms,
        "acked": info.acked,
        "redelivered": info.redelivered,
        "dead": info.dead,
        "gaps": info.gaps,
        "holder": info.holder,
        "created_at": iso(info.created_ms),
        "active_at": iso(info.active_ms),
    }
