"""`headwater retention`: how much history is kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from headwater.cli.arguments import AsJson, Group, ListsByDefault, LogName, existing_log
from headwater.cli.output import count, note, say, show_list, show_result, write_document
from headwater.cli.parameters import argument, flag, option
from headwater.errors import InvalidOptionError
from headwater.formats import DURATION_HELP, format_seconds, format_size, parse_duration, parse_size, plural

if TYPE_CHECKING:
    from headwater.ports.records import RetentionPolicy

T = TypeVar("T")

retention = Group(
    cls=ListsByDefault,
    help="Retention: how much history is kept, by topic pattern.\n\n[dim]List:[/]  headwater retention events.db",
)

Pattern = Annotated[str, argument("PATTERN", "Topics, like logs.> or orders.*", offers="topic")]
Dialect = Annotated[Literal["nats", "amqp"], flag("The wildcards of the pattern: nats has * and >, amqp has * and #.")]


@retention.command("ls")
def list_policies(path: LogName, as_json: AsJson = False) -> None:
    """List the retention policies of a log."""
    with existing_log(path) as log:
        policies = log.retention()
    empty = f"no policies: everything stays. Set one: headwater retention set {path} PATTERN --max-age 7d"
    show_list(policies, _policy_json, _COLUMNS, empty=empty, as_json=as_json)


@retention.command("set")
def set_policy(
    path: LogName,
    pattern: Pattern,
    max_age: Annotated[str | None, option("SPAN", f"Delete messages older than this: {DURATION_HELP}.")] = None,
    max_count: Annotated[int | None, option("N", "Keep at most N messages.")] = None,
    max_bytes: Annotated[str | None, option("SIZE", "Keep at most this size: like 500MiB or 2GiB.")] = None,
    keep_unacked: Annotated[bool, flag("Keep messages that a subscription has not settled.")] = False,
    dialect: Dialect = "nats",
    as_json: AsJson = False,
) -> None:
    """Set the policy of a pattern. When any limit is exceeded, the oldest messages are deleted.

    [dim]A week of logs:[/]  headwater retention set events.db 'logs.>' --max-age 7d --max-bytes 2GiB
    """
    with existing_log(path) as log:
        log.retain(
            pattern,
            max_age=None if max_age is None else parse_duration(max_age, "--max-age"),
            max_count=max_count,
            max_bytes=None if max_bytes is None else parse_size(max_bytes, "--max-bytes"),
            keep_unacked=keep_unacked,
            dialect=dialect,
        )
        policies = {(policy.pattern, policy.dialect): policy for policy in log.retention()}
    text = f"set the policy of {pattern}; it is applied in the background, or now by `retention run`"
    show_result(_policy_json(policies[pattern, dialect]), text, as_json=as_json)


@retention.command("rm")
def remove_policy(path: LogName, pattern: Pattern, dialect: Dialect = "nats", as_json: AsJson = False) -> None:
    """Remove the policy of a pattern; it deletes no more messages."""
    with existing_log(path) as log:
        removed = log.delete_retention(pattern, dialect)
    if not removed:
        raise InvalidOptionError(f"there is no policy of {pattern!r}", next=f"`headwater retention {path}` lists them")
    show_result({"removed": pattern}, f"removed the policy of {pattern}", as_json=as_json)


@retention.command("run")
def run(path: LogName, as_json: AsJson = False) -> None:
    """Apply the policies now, and run the other maintenance."""
    with existing_log(path) as log:
        report = log.run_maintenance()
    if as_json:
        write_document(report)
        return
    if report.skipped:
        say("another process runs the maintenance right now")
        return
    say(f"deleted {plural(sum(report.pruned.values()), 'message')}")
    for pattern, number in report.pruned.items():
        say(f"  {number:,} under {pattern}")
    if report.gaps:
        note(f"{plural(report.gaps, 'message')} of them unacked; their subscriptions get a gap")
    for id in report.expired_subscriptions:
        note(f"dropped subscription {id}: unused for longer than its inactive_timeout")


def _policy_json(policy: RetentionPolicy) -> dict[str, Any]:
    return {
        "pattern": policy.pattern,
        "dialect": policy.dialect,
        "max_age_s": policy.max_age_s,
        "max_count": policy.limits.max_count,
        "max_bytes": policy.limits.max_bytes,
        "keep_unacked": policy.limits.keep_unacked,
    }


_COLUMNS: dict[str, Callable[[RetentionPolicy], str]] = {
    "~pattern": lambda policy: policy.pattern,
    ">max age": lambda policy: _limit(policy.max_age_s, format_seconds),
    ">max count": lambda policy: _limit(policy.limits.max_count, count),
    ">max bytes": lambda policy: _limit(policy.limits.max_bytes, format_size),
    "unacked": lambda policy: "stays" if policy.limits.keep_unacked else "goes too",
}


def _limit(value: T | None, shown: Callable[[T], str]) -> str:
    return "-" if value is None else shown(value)
