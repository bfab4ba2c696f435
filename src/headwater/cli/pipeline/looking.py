"""`headwater pipeline status`, `report`, `sql` and `audit`: what the lake says."""

from __future__ import annotations

import csv
import sys
import webbrowser
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from headwater.cli.opening import AsJson
from headwater.cli.output import (
    clock,
    count,
    note,
    pairs,
    printable,
    say,
    show_table,
    some,
    table,
    write_document,
    write_line,
)
from headwater.cli.pipeline.options import (
    Conf,
    LakeOption,
    LogIfAny,
    LogOption,
    Master,
    Remote,
    check_spark_options,
    log_named,
    needs_spark,
    opened_lake,
    spark_session,
)
from headwater.cli.pipeline.progress import Bars
from headwater.cli.pipeline.values import plain_value
from headwater.cli.times import say_size
from headwater.errors import InvalidOption

ROWS_MAX = 1_000


def status(lake: LakeOption, as_json: AsJson = False) -> None:
    """What the lake holds, and how far it has come. Needs no Spark."""
    needs_spark()
    from headwater.pipeline.jobs.reporting import lake_status

    with opened_lake(lake) as opened:
        found = lake_status(opened)
    if as_json:
        write_document(found)
        return
    show_table(pairs([("lake", str(lake)), *_status_pairs(found)]))
    shown = table("~table", ">rows", ">files", ">size")
    for each in found["tables"]:
        shown.add_row(each["table"], count(each["rows"]), count(each["files"]), say_size(each["bytes"]))
    show_table(shown)


def _status_pairs(found: dict[str, Any]) -> list[tuple[str, str | Text]]:
    last = found["last_batch"]
    audit = found["audit"]
    verdict: str | Text = "not yet: headwater pipeline audit"
    if audit is not None:
        word = Text("whole", "green") if audit["whole"] else Text("broken", "bold red")
        verdict = Text.assemble(word, f", {audit['checked_at']}")
    return [
        ("taken in", f"up to seq {found['high_water']:,}"),
        ("last batch", "none yet" if last is None else f"{some(last['rows'], 'message')} at {clock(last['at_ms'])}"),
        ("audited", verdict),
    ]


def report(
    lake: LakeOption,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="Where to put the page. Default: LAKE/report.html.")
    ] = None,
    open_it: Annotated[bool, typer.Option("--open", help="Show it in the browser.")] = False,
) -> None:
    """Make one HTML page of the gold tables and the audit's verdict. Needs no Spark and no network."""
    needs_spark()
    from headwater.pipeline.jobs.reporting import report_of
    from headwater.pipeline.page.report import render_report

    with opened_lake(lake) as opened, Bars() as bars:
        bars.step("report")
        page = render_report(report_of(opened))
        target = (out or opened.path / "report.html").resolve()
    _write_page(target, page)
    say(str(target))
    if open_it:
        webbrowser.open(target.as_uri())


def sql(
    query: Annotated[
        str, typer.Argument(metavar="QUERY", help="Like 'select topic, count(*) from messages group by 1'.")
    ],
    lake: Annotated[
        Path | None, typer.Option("--lake", metavar="DIR", help="The folder of the lake.", show_default=False)
    ] = None,
    log: LogIfAny = None,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV.")] = False,
    limit: Annotated[int, typer.Option("--limit", metavar="N", min=1, help="Print at most so many rows.")] = ROWS_MAX,
    master: Master = None,
    remote: Remote = None,
    conf: Conf = None,
    as_json: AsJson = False,
) -> None:
    """Ask in SQL, over the lake and the live log.

    Tables: messages (everything there is: history from the lake, what came
    since from the log), bronze_messages, silver_messages, silver_quarantine,
    typed_…, gold_volume, gold_latency, …; with --log also live, live_subscriptions
    and live_dead_letters. 'show views' lists them.
    """
    if lake is None and log is None:
        raise InvalidOption("there is nothing to ask", next="Name a --lake, a --log, or both")
    check_spark_options(master, remote, conf)
    source = None if log is None else log_named(log)
    with ExitStack() as stack:
        from pyspark.errors import PySparkException

        from headwater.pipeline.jobs.running import bind
        from headwater.pipeline.jobs.views import make_views

        opened = None if lake is None else stack.enter_context(opened_lake(lake))
        if opened is not None and source is not None:
            bind(opened, source)
        spark = stack.enter_context(spark_session(master, remote, conf))
        bars = stack.enter_context(Bars())
        bars.step("query")
        views = make_views(spark, opened, source)
        try:
            frame = spark.sql(query)
            names, kinds = frame.columns, [field.dataType.simpleString() for field in frame.schema.fields]
            rows = frame.limit(limit + 1).collect()
        except PySparkException as exc:
            why = str(exc).splitlines()[0]
            raise InvalidOption(why, where="sql", next=f"Tables here: {', '.join(views)}") from exc
    plain = [[plain_value(*pair) for pair in zip(row, kinds, strict=True)] for row in rows[:limit]]
    _show_rows(names, plain, as_csv=as_csv, as_json=as_json)
    if len(rows) > limit:
        note(f"there are more than {limit:,} rows: --limit shows more")


def _show_rows(names: list[str], rows: list[list[Any]], *, as_csv: bool, as_json: bool) -> None:
    if as_json:
        for row in rows:
            write_line(dict(zip(names, row, strict=True)))
    elif as_csv:
        writer = csv.writer(sys.stdout, lineterminator="\n")
        writer.writerow(names)
        writer.writerows(rows)
    else:
        are_numbers = [all(isinstance(row[at], int | float | None) for row in rows) for at in range(len(names))]
        marks = [">" if numbers and rows else "~" for numbers in are_numbers]
        shown = table(*(f"{mark}{printable(name)}" for mark, name in zip(marks, names, strict=True)))
        for row in rows:
            shown.add_row(*("" if value is None else printable(str(value)) for value in row))
        show_table(shown)


def audit(
    log: LogOption,
    lake: LakeOption,
    page: Annotated[
        Path | None, typer.Option("--page", metavar="FILE", help="Where to put its page. Default: LAKE/audit.html.")
    ] = None,
    master: Master = None,
    remote: Remote = None,
    conf: Conf = None,
    as_json: AsJson = False,
) -> None:
    """Prove that the lake holds each message of the log once, with the same content.

    What is not there must have been deleted by retention before it was taken in, by the
    log's own record. Ends with 1 if something is wrong.
    """
    check_spark_options(master, remote, conf)
    source = log_named(log)
    with ExitStack() as stack:
        from headwater.pipeline.audit.auditing import audit as examine
        from headwater.pipeline.jobs.running import bind
        from headwater.pipeline.page.audit import render_audit

        opened = stack.enter_context(opened_lake(lake))
        bind(opened, source)
        spark = stack.enter_context(spark_session(master, remote, conf))
        bars = stack.enter_context(Bars())
        document = examine(spark, opened, source, bars.step)
        target = (page or opened.path / "audit.html").resolve()
        _write_page(target, render_audit(document))
    if as_json:
        write_document(document)
    else:
        _show_verdict(document, target)
    if not document["whole"]:
        raise typer.Exit(1)


def _show_verdict(document: dict[str, Any], target: Path) -> None:
    shown = table("", "check", "~found")
    for check in document["checks"]:
        mark = Text("ok", "green") if check["ok"] else Text("wrong", "bold red")
        shown.add_row(mark, check["name"], printable(check["what"]))
    show_table(shown)
    verdict = Text("whole", "bold green") if document["whole"] else Text("broken", "bold red")
    not_yet = f"; {some(document['not_yet'], 'message')} not taken in yet" if document["not_yet"] else ""
    say(Text.assemble(verdict, (f" up to seq {document['high_water']:,} in {document['seconds']} s{not_yet}", "dim")))
    say(Text(str(target), "dim"))


def _write_page(target: Path, page: str) -> None:
    try:
        target.write_text(page, encoding="utf-8")
    except OSError as exc:
        raise InvalidOption(f"cannot be written ({exc.strerror})", where=str(target)) from exc
