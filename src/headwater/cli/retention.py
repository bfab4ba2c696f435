"""`headwater retention`: how much history stays."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import typer

from headwater.cli.groups import ListsByDefault
from headwater.cli.opening import AsJson, LogPath, existing_log, takes_log
from headwater.cli.output import count, note, printable, say, show_table, some, table, write_document
from headwater.cli.times import SPAN_HELP, parse_size, parse_span, say_size, say_span
from headwater.errors import InvalidOption
from headwater.ports.records import RetentionPolicy

retention = typer.Typer(
    cls=ListsByDefault,
    no_args_is_help=True,
    help="How much history stays, by topic pattern.\n\n[dim]List:[/]  headwater retention events.db",
)

Pattern = Annotated[str, typer.Argument(metavar="PATTERN", help="Topics, like logs.> or orders.*", show_default=False)]
Dialect = Annotated[Literal["nats", "amqp"], typer.Option("--dialect", help="How the pattern is spelled.")]


@retention.command("ls")
@takes_log
def list_policies(path: LogPath, as_json: AsJson = False) -> None:
    """List the retention rules of a log."""
    with existing_log(path) as log:
        policies = log.retention()
    if as_json:
        write_document([_policy_json(policy) for policy in policies])
        return
    if not policies:
        say(f"no rules: everything stays. Set one: headwater retention set {path} PATTERN --max-age 7d")
        return
    shown = table("~pattern", ">max age", ">max count", ">max bytes", "unacked")
    for policy in policies:
        limits = policy.limits
        shown.add_row(
            printable(policy.pattern),
            "-" if limits.max_age_ms is None else say_span(limits.max_age_ms),
            "-" if limits.max_count is None else count(limits.max_count),
            "-" if limits.max_bytes is None else say_size(limits.max_bytes),
            "stays" if limits.keep_unacked else "goes too",
        )
    show_table(shown)


@retention.command("set")
@takes_log
def set_policy(
    path: LogPath,
    pattern: Pattern,
    max_age: Annotated[str | None, typer.Option("--max-age", metavar="SPAN", help=f"{SPAN_HELP.capitalize()}.")] = None,
    max_count: Annotated[int | None, typer.Option("--max-count", metavar="N", help="So many messages.")] = None,
    max_bytes: Annotated[str | None, typer.Option("--max-bytes", metavar="SIZE", help="Like 500MB or 2GiB.")] = None,
    keep_unacked: Annotated[
        bool, typer.Option("--keep-unacked", help="Spare what a subscription has yet to settle.")
    ] = False,
    dialect: Dialect = "nats",
    as_json: AsJson = False,
) -> None:
    """Set the rule of a pattern. When any limit is exceeded, the oldest messages go.

    [dim]A week of logs:[/]  headwater retention set events.db 'logs.>' --max-age 7d --max-bytes 2GB
    """
    with existing_log(path) as log:
        log.retain(
            pattern,
            max_age=None if max_age is None else parse_span(max_age, "--max-age"),
            max_count=max_count,
            max_bytes=None if max_bytes is None else parse_size(max_bytes, "--max-bytes"),
            keep_unacked=keep_unacked,
            dialect=dialect,
        )
        policies = {(policy.pattern, policy.dialect): policy for policy in log.retention()}
    if as_json:
        write_document(_policy_json(policies[pattern, dialect]))
    else:
        say(f"set the rule of {printable(pattern)}; it is applied in the background, or now by `retention run`")


@retention.command("rm")
@takes_log
def remove_policy(path: LogPath, pattern: Pattern, dialect: Dialect = "nats", as_json: AsJson = False) -> None:
    """Remove the rule of a pattern: from now on everything stays."""
    with existing_log(path) as log:
        removed = log.unretain(pattern, dialect)
    if not removed:
        raise InvalidOption(f"there is no rule of {pattern!r}", next=f"`headwater retention {path}` lists them")
    if as_json:
        write_document({"removed": pattern})
    else:
        say(f"removed the rule of {printable(pattern)}")


@retention.command("run")
@takes_log
def run(path: LogPath, as_json: AsJson = False) -> None:
    """Apply the rules now, and do the other housekeeping."""
    with existing_log(path) as log:
        report = log.housekeep()
    if as_json:
        write_document(report)
        return
    if report.skipped:
        say("another process is at it right now")
        return
    say(f"deleted {some(sum(report.pruned.values()), 'message')}")
    for pattern, number in report.pruned.items():
        say(f"  {number:,} under {printable(pattern)}")
    if report.gaps:
        note(f"{some(report.gaps, 'message')} of them unacked; the subscriptions are told of the gap")
    for id in report.expired_subscriptions:
        note(f"dropped subscription {id}: nobody used it for longer than its inactive_timeout")


def _policy_json(policy: RetentionPolicy) -> dict[str, Any]:
    return {
        "pattern": policy.pattern,
        "dialect": policy.dialect,
        "max_age_ms": policy.limits.max_age_ms,
        "max_count": policy.limits.max_count,
        "max_bytes": policy.limits.max_bytes,
        "keep_unacked": policy.limits.keep_unacked,
    }
