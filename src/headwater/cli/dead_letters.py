"""`headwater dlq`: list, show, redrive, purge, export and import dead letters."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, cast

import typer

from headwater.cli.arguments import AsJson, Group, ListsByDefault, LogName, existing_log, usable_file
from headwater.cli.output import (
    Text,
    clock,
    count,
    headers_text,
    note,
    pairs,
    say,
    show_list,
    show_result,
    show_table,
    table,
    write_document,
)
from headwater.cli.parameters import Shared, argument, flag, option
from headwater.errors import InvalidOptionError, UnauthorizedError, UnknownSubscriptionError
from headwater.formats import plural

if TYPE_CHECKING:
    import headwater
    from headwater.broker.dead_letters import LetterFilter
    from headwater.ports.records import DeadLetter

Ids = Annotated[list[int] | None, argument("ID", "Dead letters by id.")]
DryRun = Annotated[bool, flag("Show what would change, and change nothing.")]
All = Annotated[bool, flag("All dead letters; required if no id and no filter is given.", "--all")]


@dataclass(frozen=True)
class Conditions(Shared):
    """Which dead letters: all conditions given hold together."""

    subscription: Annotated[str | None, option("ID", "Of this subscription.", "-s", offers="subscription")] = None
    topic: Annotated[str | None, option("PATTERN", "Of topics that match.", "-t", offers="topic")] = None
    type: Annotated[str | None, option("TYPE", "Of this type.")] = None
    reason: Annotated[str | None, option("REASON", "Like max_attempts, rejected or expired.", "-r")] = None
    error: Annotated[str | None, option("REGEX", "With an error text that matches.", "-e")] = None

    def filter(self) -> LetterFilter:
        return cast("LetterFilter", {name: value for name, value in vars(self).items() if value is not None})

    def choice(self, ids: list[int] | None, all_of_them: bool) -> LetterFilter:
        """The filter of a command that changes what it selects: no condition must not mean all by accident."""
        chosen = self.filter()
        if ids:
            chosen["ids"] = ids
        if not chosen and not all_of_them:
            raise InvalidOptionError(
                "which dead letters?", next="Give their ids, a filter like --subscription, or --all"
            )
        return chosen


dlq = Group(
    cls=ListsByDefault,
    help="Dead letters: messages that failed, with their errors.\n\n[dim]List:[/]  headwater dlq events.db",
)

Id = Annotated[int, argument("ID", "The dead letter.")]


@dlq.command("ls")
def list_letters(
    path: LogName,
    conditions: Conditions,
    limit: Annotated[int, option("N", "Show at most N.", "-n", min=1)] = 100,
    after: Annotated[int, option("ID", "Only those after this id.", min=0)] = 0,
    as_json: AsJson = False,
) -> None:
    """List dead letters, oldest first."""
    with existing_log(path) as log:
        _note_unknown(log, conditions)
        letters = log.dead_letters.list(after=after, limit=limit, **conditions.filter())
    from headwater.broker.dead_letters import to_json

    show_list(letters, to_json, _COLUMNS, empty="no dead letters", as_json=as_json)
    if letters and len(letters) == limit and not as_json:
        note(f"there may be more: --after {letters[-1].id}")


_COLUMNS: dict[str, Callable[[DeadLetter], str | Text]] = {
    ">id": lambda letter: str(letter.id),
    "died": lambda letter: clock(letter.died_ms),
    "~subscription": lambda letter: letter.subscription,
    ">seq": lambda letter: count(letter.message.seq),
    "~topic": lambda letter: Text(letter.message.topic, "cyan"),
    "reason": lambda letter: Text("redriving", "yellow") if letter.redriving else Text(letter.reason, "red"),
    ">attempts": lambda letter: str(letter.attempts),
    "~error": lambda letter: (letter.error or "-").split("\n", 1)[0],
}


@dlq.command("show")
def show(path: LogName, id: Id, as_json: AsJson = False) -> None:
    """Show one dead letter: its message, error and stack."""
    with existing_log(path) as log:
        letter = log.dead_letters.get(id)
    if as_json:
        from headwater.broker.dead_letters import to_json

        write_document(to_json(letter))
        return
    show_table(pairs(_details(letter)))
    if letter.stack:
        say(Text("stack", "dim"))
        say(letter.stack.rstrip())


def _details(letter: DeadLetter) -> list[tuple[str, str | Text]]:
    message = letter.message
    rows: list[tuple[str, str | Text]] = [
        ("dead letter", str(letter.id)),
        ("subscription", letter.subscription),
        ("reason", Text(letter.reason, "red")),
        ("error", letter.error or "-"),
        ("handler", letter.handler or "-"),
        ("attempts", str(letter.attempts)),
        ("died", clock(letter.died_ms)),
        ("redrives", str(letter.redrives) + (", one on its way" if letter.redriving else "")),
        ("message", f"seq {message.seq}, published {clock(message.published_ms)}"),
        ("id", message.id),
        ("topic", Text(message.topic, "cyan")),
        ("headers", headers_text(message) or "-"),
        ("data", message.data_json),
    ]
    if letter.redrive_error:
        rows.append(("redrive error", Text(letter.redrive_error, "red")))
    return rows


@dlq.command("stats")
def statistics(path: LogName, conditions: Conditions, as_json: AsJson = False) -> None:
    """Count dead letters by reason, subscription, topic, type and error."""
    with existing_log(path) as log:
        _note_unknown(log, conditions)
        found = log.dead_letters.statistics(**conditions.filter())
    if as_json:
        write_document(found)
        return
    say(f"{plural(found.total, 'dead letter')}, {found.redriving:,} being redriven")
    for name in ("reason", "subscription", "topic", "type", "error"):
        counts: dict[str, int] = getattr(found, f"by_{name}")
        if any(counts):  # the empty key alone counts those without a type or an error
            shown = table(">count", f"~by {name}")
            for key, number in counts.items():
                shown.add_row(count(number), key or Text("none", "dim"))
            say("")
            show_table(shown)


def _note_unknown(log: headwater.Log, conditions: Conditions, ids: list[int] | None = None) -> None:
    name, topic = conditions.subscription, conditions.topic
    with suppress(UnauthorizedError):  # a right for what is done is none for all that is looked at here
        if name is not None and not log.dead_letters.list(subscription=name, topic=topic, limit=1):
            try:
                log.subscription(name)
            except UnknownSubscriptionError:
                note(f"there is no subscription {name!r}; headwater subscriptions lists them")
        known = {letter.id for letter in log.dead_letters.list(ids=ids, limit=len(ids))} if ids else set()
        for id in sorted(set(ids or ()) - known):
            note(f"there is no dead letter {id}; headwater dlq ls lists them")


@dlq.command("redrive")
def redrive(
    path: LogName,
    conditions: Conditions,
    ids: Ids = None,
    to_topic: Annotated[str | None, option("TOPIC", "Publish them on this topic instead.")] = None,
    all_of_them: All = False,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Deliver dead letters to their subscription again.

    A dead letter stays until its redelivery is acked.

    [dim]By error:[/]  headwater dlq redrive events.db -s billing --error Timeout
    """
    chosen = conditions.choice(ids, all_of_them)
    with existing_log(path) as log:
        _note_unknown(log, conditions, ids)
        done = log.dead_letters.redrive(to_topic=to_topic, dry_run=dry_run, **chosen)
    if as_json:
        write_document(done)
    else:
        number = plural(done.redriven, "dead letter")
        say(f"{number} would be redriven" if dry_run else f"{number} redriven")
        for id, why in done.failed.items():
            note(f"dead letter {id} {'would stay' if dry_run else 'stays'}: {why}")
    if done.failed:
        raise typer.Exit(1)


@dlq.command("purge")
def purge(
    path: LogName,
    conditions: Conditions,
    ids: Ids = None,
    all_of_them: All = False,
    yes: Annotated[bool, flag("Do not ask.", "-y")] = False,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Delete dead letters for good."""
    chosen = conditions.choice(ids, all_of_them)
    with existing_log(path) as log:
        if not (yes or dry_run) and sys.stdin.isatty():
            total = log.dead_letters.purge(dry_run=True, **chosen)
            if not typer.confirm(f"Delete {plural(total, 'dead letter')} for good?", err=True):
                raise typer.Exit(1)
        _note_unknown(log, conditions, ids)
        purged = log.dead_letters.purge(dry_run=dry_run, **chosen)
    text = f"{'would delete' if dry_run else 'deleted'} {plural(purged, 'dead letter')}"
    show_result({"purged": purged}, text, as_json=as_json)


@dlq.command("export")
def export(
    path: LogName,
    conditions: Conditions,
    out: Annotated[str | None, option("FILE", "The output file, instead of stdout.", "-o")] = None,
    as_json: Annotated[bool, flag("The default: one JSON object a line.", "--json")] = False,
) -> None:
    """Write dead letters as JSON lines; they stay in the log. `dlq import` reads them."""
    written = 0
    with existing_log(path) as log:
        _note_unknown(log, conditions)
        lines = log.dead_letters.export(**conditions.filter())
        if out is None:
            sys.stdout.writelines(f"{line}\n" for line in lines)
            return
        with usable_file("written", out, "Name another file"), open(out, "w", encoding="utf-8") as file:
            for line in lines:
                file.write(f"{line}\n")
                written += 1
    note(f"{plural(written, 'dead letter')} in {out}")


@dlq.command("import")
def import_letters(
    path: LogName,
    file: Annotated[str | None, argument("FILE", "From `dlq export`; stdin if not given.")] = None,
    as_json: AsJson = False,
) -> None:
    """Import exported dead letters into a log. They get new ids."""
    with (
        existing_log(path) as log,
        usable_file("read", file or "stdin", "Name a file of `dlq export`"),
        nullcontext(sys.stdin) if file is None else open(file, encoding="utf-8") as lines,
    ):
        imported = log.dead_letters.import_(lines)
    show_result({"imported": imported}, f"imported {plural(imported, 'dead letter')}", as_json=as_json)
