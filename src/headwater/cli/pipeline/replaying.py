"""`headwater pipeline replay`: from the lake back into a log."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Annotated, Any

import typer
from rich.text import Text

from headwater.cli.opening import AsJson, file_of, is_file, log_or_new_one, shown_name
from headwater.cli.output import note, printable, say, show_table, some, table, write_document
from headwater.cli.pipeline.options import (
    Conf,
    LakeOption,
    Master,
    Remote,
    check_spark_options,
    opened_lake,
    spark_session,
)
from headwater.cli.pipeline.progress import Bars

SAMPLE = 10


def replay(
    lake: LakeOption,
    to: Annotated[
        str,
        typer.Option(
            "--to", metavar="LOG", help="Where to publish: a file, postgres://…, or ws://host:8765.", show_default=False
        ),
    ],
    where: Annotated[
        str,
        typer.Option(
            "--where", metavar="SQL", help="Which messages, like \"topic like 'orders.%'\".", show_default=False
        ),
    ],
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would be published, and publish nothing.")
    ] = False,
    rate: Annotated[
        float | None, typer.Option("--rate", metavar="N", min=0.001, help="At most so many messages a second.")
    ] = None,
    name: Annotated[
        str | None,
        typer.Option("--name", help="Of this replay; another name publishes the same again.", show_default=False),
    ] = None,
    master: Master = None,
    remote: Remote = None,
    conf: Conf = None,
    as_json: AsJson = False,
) -> None:
    """Publish messages from the lake into a log, in their old order.

    [dim]Look first:[/]  headwater pipeline replay --lake ./lake --to events.db --where "topic = 'orders.new'" --dry-run

    The same condition and target are the same replay: stopped, it goes on where it stopped; done, it publishes nothing
    more. Each message gets an id that follows from its own and the replay's, so that none is published twice. The
    header replayed_seq tells where it came from.
    """
    check_spark_options(master, remote, conf)
    if is_file(to):
        file_of(to)  # says if it cannot be one
    with ExitStack() as stack:
        from headwater.pipeline.jobs.replay import chosen_messages, replay_name
        from headwater.pipeline.jobs.replay import replay as publish_again

        opened = stack.enter_context(opened_lake(lake))
        spark = stack.enter_context(spark_session(master, remote, conf))
        called = name or replay_name(where, shown_name(to))
        if dry_run:
            _show_choice(
                chosen_messages(spark, opened, where, opened.manifest.mark(f"replay.{called}")), as_json=as_json
            )
            return
        chosen_messages(spark, opened, where)  # a bad condition must not make a log
        log = stack.enter_context(log_or_new_one(to))
        bars = stack.enter_context(Bars())
        done = publish_again(spark, opened, where, called, log.publish_many, rate=rate, progress=bars)
    if as_json:
        write_document(done._asdict() | {"replay": called})
        return
    say(Text.assemble((f"{some(done.published, 'message')} published", "green"), (f", replay {called}", "dim")))
    if not done.published:
        note("everything that fits was published by this replay before; --name another publishes it again")
    if done.refused:
        note(f"{some(done.refused, 'message')} left out: a log takes no such data")


def _show_choice(chosen: Any, *, as_json: bool) -> None:
    total = chosen.count()
    first = chosen.orderBy("seq").limit(SAMPLE).collect()
    if as_json:
        write_document({"messages": total, "first": [{"seq": row["seq"], "topic": row["topic"]} for row in first]})
        return
    say(f"{some(total, 'message')} would be published")
    shown = table(">seq", "~topic", "~data")
    for row in first:
        shown.add_row(str(row["seq"]), printable(row["topic"]), printable(row["data"][:80]))
    if first:
        show_table(shown)
