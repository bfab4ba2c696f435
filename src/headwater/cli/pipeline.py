"""`headwater pipeline`: the history of a log as Delta tables, the lake."""

from __future__ import annotations

import csv
import logging
import math
import os
import signal
import sys
import tempfile
import time
import warnings
import webbrowser
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, redirect_stderr, suppress
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from functools import partial
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headwater.cli.arguments import (
    AsJson,
    Command,
    Group,
    default_lake,
    default_log,
    existing_log,
    file_of,
    is_file,
    is_remote,
    log_or_new_one,
    looks_like_log,
    require_log,
    shown_name,
    usable_file,
)
from headwater.cli.output import (
    Bars,
    Following,
    Text,
    clock,
    count,
    note,
    pairs,
    say,
    show_list,
    show_result,
    show_table,
    table,
    table_of,
    write_document,
    write_items,
)
from headwater.cli.parameters import Shared, argument, flag, option
from headwater.cli.stopping import FINDING, SAME_SIGNAL_S, is_debugged
from headwater.errors import CorruptError, HeadwaterError, InvalidOptionError, StoreError
from headwater.formats import (
    DURATION_HELP,
    TIME_HELP,
    format_seconds,
    format_size,
    ms_of_iso,
    parse_duration,
    parse_time,
    plural,
)
from headwater.version import install_hint, missing_for_spark

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from headwater.pipeline.lake import Lake
    from headwater.pipeline.report import Report
    from headwater.pipeline.session import Spark
    from headwater.pipeline.types import Types

ROWS_MAX = 1_000
SAMPLE = 10
HISTORY_MAX = 20
OLDER = "7d"
VACUUM_HOURS_MIN = 24
BEHIND = "Bronze has more than these tables: headwater pipeline run brings them up to it."

pipeline = Group(
    help="The history of a log as Delta tables, written and queried with Apache Spark.\n\n"
    "[dim]Begin:[/]  headwater pipeline run events.db --lake ./lake"
)
_MAKE, _INSPECT, _OPERATE = "Make", "Inspect", "Operate"


def _lake_or_default(lake: str) -> str:
    if found := lake or default_lake():
        return found
    raise InvalidOptionError("which lake?", next="Name it, like --lake ./lake, or set HEADWATER_LAKE")


LogArgument = Annotated[
    str,
    argument(
        "LOG", "The log: a file like events.db, or postgres://…. Else HEADWATER_LOG.", offers="log", show_default=False
    ),
]
_lake_option = partial(
    option, "DIR|URL", "The lake: a folder, or like s3://bucket/lake. Else HEADWATER_LAKE.", show_default=False
)
LakeOption = Annotated[str, _lake_option(callback=_lake_or_default)]


_spark = partial(option, rich_help_panel="Spark")


@dataclass
class SparkOptions(Shared):
    """Spark takes seconds to start, so what cannot be used is refused when the command begins."""

    master: Annotated[str | None, _spark("URL", "A cluster, like spark://host:7077.")] = None
    remote: Annotated[str | None, _spark("URL", "Spark Connect, like sc://host:15002.")] = None
    conf: Annotated[list[str] | None, _spark("NAME=VALUE", "A setting of Spark; repeatable.")] = None

    def __post_init__(self) -> None:
        require_extra()
        if self.master is not None and self.remote is not None:
            raise InvalidOptionError("--master and --remote exclude each other", next="Leave one of them out")
        for each in self.conf or ():
            if each.find("=") < 1:
                advice = "Write it like spark.driver.memory=2g"
                raise InvalidOptionError(f"a setting is NAME=VALUE, not {each!r}", where="--conf", next=advice)

    def start(self, *, short: bool) -> Spark:
        from headwater.pipeline.session import Spark

        conf = dict(each.split("=", 1) for each in self.conf or ())
        return Spark("headwater pipeline", master=self.master, remote=self.remote, conf=conf, short=short)


def log_path(log: str) -> str:
    """A log that can be opened, as the pipeline names it: Spark takes seconds to start, so errors come before."""
    if is_remote(log):
        raise InvalidOptionError(
            "the pipeline reads the log itself, not through a server",
            where=shown_name(log),
            next="Name the log that the server serves: its file, on its machine, or postgres://…",
        )
    with existing_log(log):
        return str(Path(require_log(log)).resolve()) if is_file(log) else log


@contextmanager
def opened_lake(lake: str, *, create: bool = False, log: str | None = None) -> Iterator[Lake]:
    """The lake, which must be of this log if one is named."""
    require_extra()
    from pyarrow import ArrowInvalid

    from headwater.pipeline.lake import Lake
    from headwater.pipeline.logs import log_identity

    try:
        opened = Lake.open(lake, create=create)
        if log is not None:
            opened.check_log(log_identity(log))
        yield opened
    except (FileNotFoundError, ArrowInvalid) as exc:
        next = "headwater pipeline audit says what else is wrong; run --rebuild makes the derived tables anew"
        raise CorruptError(f"a file of the lake is gone or damaged ({exc})", where=str(lake), next=next) from exc


@contextmanager
def locked_lake(lake: str, *, create: bool = False) -> Iterator[Lake]:
    """The lake, locked, for a command that changes it."""
    with opened_lake(lake, create=create) as opened, opened.lock():
        yield opened


# --- run ------------------------------------------------------------------------------------------------------------


@pipeline.command(rich_help_panel=_MAKE)
def run(
    log: LogArgument,
    lake: LakeOption = "",
    continuous: Annotated[bool, flag("Follow the log until stopped.")] = False,
    once: Annotated[bool, flag("Ingest the stored messages, then exit; the default.")] = False,
    types: Annotated[
        Path | None, option("DIR", "JSON Schemas of message types: TYPE@VERSION.json. Default: LAKE/types.")
    ] = None,
    rebuild: Annotated[bool, flag("Rebuild the derived tables, for example after a change of the types.")] = False,
    trigger: Annotated[str, option("SPAN", f"With --continuous, how often to ingest: {DURATION_HELP}.")] = "5s",
    refresh: Annotated[str, option("SPAN", "With --continuous, how often to derive silver and gold.")] = "60s",
    *,
    options: SparkOptions,
    as_json: AsJson = False,
) -> None:
    """Bring the lake up to date with the log: bronze, silver, gold.

    [dim]Once:[/]     headwater pipeline run events.db --lake ./lake
    [dim]Always:[/]   headwater pipeline run events.db --lake ./lake --continuous

    Stop it or kill it at any time: the next run continues where this one
    stopped, and the lake holds every message once. With nothing new it ends
    in about a second, without Spark. Ctrl-C or SIGTERM ends --continuous with 0.
    """
    if continuous and once:
        raise InvalidOptionError("--once and --continuous exclude each other", next="Leave one of them out")
    trigger_s = parse_duration(trigger, "--trigger").total_seconds()
    refresh_s = parse_duration(refresh, "--refresh").total_seconds()
    source = log_path(log)
    registered = _registered(types, lake)
    began = time.monotonic()
    with ExitStack() as stack:
        from headwater.pipeline.run import Run

        opened = stack.enter_context(locked_lake(lake, create=True))
        stop = StopAtOnce(is_fine=continuous)
        following = stack.enter_context(Following(lambda: opened.last_seq)) if continuous else None
        progress = following or stack.enter_context(Bars())
        running = Run(opened, source, registered, lambda short: running_spark(options, stop, short=short), progress)
        with stop, running:
            if rebuild:
                running.rebuild()
            if following is not None:
                note(f"following {shown_name(log)}; Ctrl-C ends it")
                running.continuously(following.wait, trigger_s=trigger_s, refresh_s=refresh_s)
            else:
                running.once()
    ran = running.result
    seconds = round(time.monotonic() - began, 1)
    tables = {name: opened.table(name).rows for name in opened.tables()}
    if as_json:
        write_document({"messages": ran.messages, "last_seq": ran.last_seq, "seconds": seconds, "tables": tables})
        return
    up_to = f", up to seq {ran.last_seq:,}, in {format_seconds(seconds)}"
    say(Text.assemble((f"{plural(ran.messages, 'message')} ingested", "green"), (up_to, "dim")))
    bronze, silver, bad = (tables.get(name, 0) for name in ("bronze/messages", "silver/messages", "silver/quarantine"))
    say(Text(f"bronze {bronze:,}, silver {silver:,}, quarantined {bad:,}", "dim"))


def _registered(named: Path | None, lake: str) -> Types:
    from headwater.pipeline.lake import TYPES
    from headwater.pipeline.storage import Storage
    from headwater.pipeline.types import Types, load_types

    storage = Storage(lake)
    folder = named or Path(storage.root, TYPES)
    return load_types(folder) if named or (storage.is_local and folder.is_dir()) else Types()


# --- replay ---------------------------------------------------------------------------------------------------------


class _ReplayCommand(Command):
    log_flags = ("--log", "--to")


@pipeline.command(rich_help_panel=_MAKE, cls=_ReplayCommand)
def replay(
    to: Annotated[str, argument("LOG", "Where to publish: a file, postgres://…, or ws://host:8765.", offers="log")],
    where: Annotated[str, option("SQL", "An SQL condition, like \"topic like 'orders.%'\".")],
    lake: LakeOption = "",
    dry_run: Annotated[bool, flag("Show what would be published, and publish nothing.")] = False,
    rate: Annotated[float | None, option("N", "Publish at most N messages a second.", min=0.001)] = None,
    name: Annotated[
        str | None, option("NAME", "The name of this replay; another name publishes the messages again.")
    ] = None,
    *,
    options: SparkOptions,
    as_json: AsJson = False,
) -> None:
    """Publish messages from the lake into a log, in their original order.

    [dim]Look first:[/]  headwater pipeline replay events.db --where "priority > 5" --dry-run

    The condition and the target identify a replay. A replay that was stopped
    continues where it stopped; a finished one publishes nothing more. The new id
    of a message is derived from its old id and the replay, so no message is
    published twice. The header replayed_seq has the old seq.
    """
    if is_file(to):
        file_of(to)  # refuses a name that cannot be a file
    with ExitStack() as stack:
        opened = stack.enter_context(opened_lake(lake))
        bars, spark = stack.enter_context(spark_session(options, short=True))

        from headwater.pipeline.replay import chosen_messages, replay_name, replayed_to
        from headwater.pipeline.replay import replay as publish_again

        called = name or replay_name(where, shown_name(to))
        bars.step("query")
        chosen = chosen_messages(spark, opened, where, replayed_to(opened, called))  # before a log is made
        if dry_run:
            _show_choice(chosen, as_json=as_json)
            return
        log = stack.enter_context(log_or_new_one(to))
        done = publish_again(spark, opened, where, called, log.publish_many, rate=rate, progress=bars)
    if as_json:
        write_document(done._asdict() | {"replay": called})
        return
    say(Text.assemble((f"{plural(done.published, 'message')} published", "green"), (f", replay {called}", "dim")))
    if not done.published:
        note("this replay is finished; to publish the messages again, use another --name")
    if done.refused:
        note(f"{plural(done.refused, 'message')} left out: a log refuses such data")


def _show_choice(chosen: DataFrame, *, as_json: bool) -> None:
    total = chosen.count()
    first = chosen.orderBy("seq").limit(SAMPLE).collect()
    if as_json:
        write_document({"messages": total, "first": [{"seq": row["seq"], "topic": row["topic"]} for row in first]})
        return
    say(f"{plural(total, 'message')} would be published")
    if first:
        columns: dict[str, Callable[[Any], str]] = {
            ">seq": lambda row: str(row["seq"]),
            "~topic": lambda row: row["topic"],
            "~data": lambda row: (row["data"] or "")[:80],
        }
        show_table(table_of(first, columns))


# --- status, report, history ----------------------------------------------------------------------------------------


@pipeline.command(rich_help_panel=_INSPECT)
def status(lake: LakeOption = "", as_json: AsJson = False) -> None:
    """Show the tables of the lake and the last seq in it. Needs no Spark."""
    with opened_lake(lake) as opened:
        found = opened.status()
    if as_json:
        write_document(found)
        return
    last, audited = found["last_commit"], found["audit"]
    verdict: str | Text = "not yet: headwater pipeline audit"
    if audited is not None:
        word = Text("whole", "green") if audited["whole"] else Text("broken", "bold red")
        verdict = Text.assemble(word, f", {clock(ms_of_iso(audited['checked_at']))}")
    rows: list[tuple[str, str | Text]] = [
        ("lake", found["lake"]),
        ("log", found["log"] or ""),
        ("ingested", f"up to seq {found['last_seq']:,}"),
        ("derived", f"up to seq {found['derived_to']:,}"),
        ("last commit", "none yet" if last is None else f"{plural(last['rows'], 'message')} at {clock(last['at_ms'])}"),
        ("audited", verdict),
    ]
    show_table(pairs(rows))
    columns: dict[str, Callable[[Any], str]] = {
        "~table": lambda each: each["table"],
        ">rows": lambda each: count(each["rows"]),
        ">files": lambda each: count(each["files"]),
        ">size": lambda each: format_size(each["bytes"]),
        ">version": lambda each: str(each["version"]),
    }
    show_table(table_of(found["tables"], columns))


@pipeline.command(rich_help_panel=_INSPECT)
def report(
    lake: LakeOption = "",
    out: Annotated[
        Path | None,
        option(
            "FILE",
            "The output file. Default: report.html in the lake, or in this directory if the lake is a url.",
            "-o",
        ),
    ] = None,
    open_it: Annotated[bool, flag("Open it in the browser.", "--open")] = False,
    as_json: AsJson = False,
) -> None:
    """Write an HTML page of the gold tables and the last audit. Needs no Spark and no network."""
    with opened_lake(lake) as opened, Bars() as bars:
        from headwater.pipeline.report import render_report

        bars.step("report")
        target = _page_target(out, opened, "report.html")
        _write_page(render_report(report_of(opened)), target)
    show_result({"page": str(target)}, str(target), as_json=as_json)
    if open_it:
        webbrowser.open(target.as_uri())


def report_of(lake: Lake) -> Report:
    from headwater.pipeline.lake import QUARANTINE
    from headwater.pipeline.report import Report

    found = lake.status()
    rows = {each["table"]: each["rows"] for each in found["tables"]}
    tables = lake.gold()
    return Report(
        lake=found["lake"],
        log=found["log"] or "",
        made_at=datetime.now(UTC),
        lake_seq=found["last_seq"],
        messages=rows.get("bronze/messages", 0),
        bytes=sum(row["bytes"] for row in tables["volume"]),
        tables=tables,
        audit=found["audit"],
        quarantined=rows.get(QUARANTINE, 0),
        notes=[] if found["derived_to"] >= found["last_seq"] else [BEHIND],
    )


def _page_target(named: Path | None, lake: Lake, default: str) -> Path:
    """Where a page is written: in the lake's folder, if it has one and no other file is named. Refused before any work
    if it cannot be there."""
    target = (named or (Path(lake.storage.root, default) if lake.storage.is_local else Path(default))).resolve()
    if not os.access(target if target.exists() else target.parent, os.W_OK):
        raise InvalidOptionError(
            "the page cannot be written here", where=str(target), next="Name another file: --out FILE"
        )
    return target


def _write_page(page: str, target: Path) -> None:
    with usable_file("written", str(target), "Name a file elsewhere: --out FILE"):
        target.write_text(page, encoding="utf-8")


@pipeline.command(rich_help_panel=_INSPECT)
def history(
    lake: LakeOption = "",
    name: Annotated[str, option("NAME", "Which table.", "--table")] = "bronze/messages",
    limit: Annotated[int, option("N", "Show at most N, newest first.", "-n", min=1)] = HISTORY_MAX,
    as_json: AsJson = False,
) -> None:
    """Show the versions of a table: when each was committed, and what it changed. Needs no Spark.

    [dim]As it was then:[/]  headwater pipeline sql "select count(*) from messages" --lake ./lake --at 3
    """
    with opened_lake(lake) as opened:
        tables = opened.tables()
        asked = name if name in tables else next((each for each in tables if each.replace("/", "_") == name), name)
        if asked not in tables:
            next_ = f"Tables here: {', '.join(tables)}"
            raise InvalidOptionError(f"the lake has no table {name}", where="--table", next=next_)
        versions = opened.history(asked, limit)
    columns: dict[str, Callable[[Any], str]] = {
        ">version": lambda each: str(each["version"]),
        "time": lambda each: each["at"],
        "operation": lambda each: each["operation"],
        "job": lambda each: each["job"] or "",
        ">rows": lambda each: "" if each["rows"] is None else count(each["rows"]),
        ">seqs": lambda each: "" if each["upto"] is None else f"{each['after'] + 1:,} to {each['upto']:,}",
    }
    show_list(versions, dict, columns, empty="", as_json=as_json, table=asked)


# --- sql ------------------------------------------------------------------------------------------------------------


@pipeline.command(rich_help_panel=_INSPECT)
def sql(
    log: Annotated[
        str, argument("LOG", "The log, for messages that are not in the lake yet. Else HEADWATER_LOG.", offers="log")
    ] = "",
    query: Annotated[str, argument("QUERY", "Like 'select topic, count(*) from messages group by 1'.")] = ...,  # type: ignore[assignment]
    lake: Annotated[str, _lake_option(callback=lambda lake: lake or default_lake() or "")] = "",
    at: Annotated[
        str | None,
        option("TIME|VERSION", f"The lake as it was: {TIME_HELP}; or a version of bronze, from `pipeline history`."),
    ] = None,
    as_csv: Annotated[bool, flag("Print CSV.", "--csv")] = False,
    limit: Annotated[int, option("N", "Print at most N rows.", "-n", min=1)] = ROWS_MAX,
    *,
    options: SparkOptions,
    as_json: AsJson = False,
) -> None:
    """Query the lake and the live log in SQL.

    Tables: messages (the lake's history, and with a LOG the newer messages of
    the log), bronze_messages, silver_messages, silver_quarantine, typed_…,
    gold_volume, gold_latency, …; with a LOG also live, live_subscriptions and
    live_dead_letters. 'show views' lists them.
    """
    if " " in log and looks_like_log(query):
        raise InvalidOptionError("LOG comes before QUERY", next=f"Write headwater pipeline sql {query} '…'")
    if at is not None and log and log == default_log():
        log = ""
    if not lake and not log:
        raise InvalidOptionError("there is nothing to query", next="Name a --lake, a LOG, or both")
    if at is not None and (not lake or log):
        raise InvalidOptionError(
            "--at is for a lake alone: a log has no earlier states", next="Name a --lake, and no LOG"
        )
    source = log_path(log) if log else None
    with ExitStack() as stack:
        opened = stack.enter_context(opened_lake(lake, log=source)) if lake else None
        moment = None if at is None or opened is None else opened.moment(_parse_moment(at))
        bars, spark = stack.enter_context(spark_session(options, short=True))

        from py4j.protocol import Py4JError  # type: ignore[import-untyped]
        from pyspark.errors import PySparkException

        from headwater.pipeline.sql import make_views, sql_error

        bars.step("query")
        views = make_views(spark, query, opened, source, moment)
        try:
            frame = spark.sql(query)
            names, kinds = frame.columns, [field.dataType.simpleString() for field in frame.schema.fields]
            rows = frame.limit(limit + 1).collect()
        except (PySparkException, Py4JError) as exc:  # some errors of a task come as the latter
            raise InvalidOptionError(
                sql_error(exc, views), where="QUERY", next=f"Correct it there. Tables: {', '.join(views)}"
            ) from exc
    plain = [[plain_value(*pair) for pair in zip(row, kinds, strict=True)] for row in rows[:limit]]
    _show_rows(names, plain, as_csv=as_csv, as_json=as_json)
    if len(rows) > limit:
        note(f"there are more than {limit:,} rows: --limit shows more")


def _parse_moment(text: str) -> int | datetime:
    if text.isascii() and text.isdigit():
        return int(text)
    return parse_time(text, "--at", datetime.now().astimezone())


def _show_rows(names: list[str], rows: list[list[Any]], *, as_csv: bool, as_json: bool) -> None:
    if as_json:
        write_items([dict(zip(names, row, strict=True)) for row in rows])
    elif as_csv:
        writer = csv.writer(sys.stdout, lineterminator="\n")
        writer.writerow(names)
        writer.writerows(rows)
    else:
        are_numbers = [all(isinstance(row[at], int | float | None) for row in rows) for at in range(len(names))]
        marks = [">" if numbers and rows else "~" for numbers in are_numbers]
        shown = table(*(f"{mark}{name}" for mark, name in zip(marks, names, strict=True)))
        for row in rows:
            shown.add_row(*("" if value is None else str(value) for value in row))
        show_table(shown)


def plain_value(value: Any, kind: str) -> Any:
    """A value of a row of Spark as JSON can hold it; `kind` is the column's type in Spark's words. Times are UTC, as
    everywhere in the lake: Spark returns them in the local zone, without naming it."""
    if isinstance(value, str | int | float | None):
        return value
    if isinstance(value, datetime):
        is_local = "timestamp_ntz" in kind
        return value.isoformat() if is_local else value.astimezone(UTC).isoformat().replace("+00:00", "Z")
    if isinstance(value, date):
        return value.isoformat()
    if isinstance(value, bytes | bytearray):
        return value.hex()
    if isinstance(value, dict):
        return {str(plain_value(name, kind)): plain_value(each, kind) for name, each in value.items()}
    if hasattr(value, "asDict"):
        return {name: plain_value(each, kind) for name, each in value.asDict().items()}
    if isinstance(value, list | tuple):
        return [plain_value(each, kind) for each in value]
    return str(value)


# --- audit ----------------------------------------------------------------------------------------------------------


@pipeline.command(rich_help_panel=_INSPECT)
def audit(
    log: LogArgument,
    lake: LakeOption = "",
    page: Annotated[
        Path | None,
        option(
            "FILE",
            "Where to put its page. Default: audit.html in the lake, or here if the lake is a url.",
            "--out",
            "-o",
        ),
    ] = None,
    *,
    options: SparkOptions,
    as_json: AsJson = False,
) -> None:
    """Prove that the lake holds each message of the log once, with the same content.

    A message may be missing only if the log recorded that retention deleted it
    before it was ingested. Exits with 1 if a check failed.
    """
    source = log_path(log)
    with ExitStack() as stack:
        from headwater.pipeline.logs import log_identity

        opened = stack.enter_context(opened_lake(lake))
        with suppress(CorruptError):  # which the audit is there to name
            opened.check_log(log_identity(source))
        target = _page_target(page, opened, "audit.html")
        bars, spark = stack.enter_context(spark_session(options))

        from headwater.pipeline.audit import audit as examine
        from headwater.pipeline.report import render_audit

        document = examine(spark, opened, source, bars.step)
        _write_page(render_audit(document), target)
    if as_json:
        write_document(document | {"page": str(target)})
    else:
        _show_audit(document, target)
    if not document["whole"]:
        raise typer.Exit(FINDING)


def _show_audit(document: dict[str, Any], target: Path) -> None:
    marks = {"ok": Text("ok", "green"), "failed": Text("failed", "bold red"), "skipped": Text("skipped", "yellow")}
    shown = table("verdict", "check", "~found")
    shown.columns[1].min_width = max(len(check["name"]) for check in document["checks"])
    for check in document["checks"]:
        shown.add_row(marks[check["status"]], check["name"], check["what"])
    show_table(shown)
    verdict = ("whole", "bold green") if document["whole"] else ("broken", "bold red")
    not_yet = f"; {plural(document['not_yet'], 'message')} not ingested yet" if document.get("not_yet") else ""
    up_to = f" up to seq {document['lake_seq']:,} in {format_seconds(document['seconds'])}{not_yet}"
    say(Text.assemble(verdict, (up_to, "dim")))
    say(Text(str(target), "dim"))
    if not document["recorded"]:
        note("the lake may not be written, so this audit is not recorded in it")


# --- optimize, vacuum -----------------------------------------------------------------------------------------------


@pipeline.command(rich_help_panel=_OPERATE)
def optimize(
    lake: LakeOption = "",
    everything: Annotated[
        bool, flag("Merge wherever files can be merged, not only where there are many.", "--all")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Merge small files into larger ones. Runs do it by themselves. Needs no Spark.

    Running queries and time travel use the old files until a vacuum.
    """
    with locked_lake(lake) as opened, Bars() as bars:
        names = opened.tables()
        before = {name: len(opened.table(name).files) for name in names}
        bars.step("optimizing", len(names))
        for done, name in enumerate(names, 1):
            opened.optimize(name, everything=everything)
            bars.reached(done)
        after = {name: len(opened.table(name).files) for name in names}
    changed = {name: {"before": before[name], "after": after[name]} for name in names if before[name] != after[name]}
    if as_json:
        totals = {"files_before": sum(before.values()), "files_after": sum(after.values())}
        write_document(totals | {"tables": changed})
        return
    for name, files in changed.items():
        say(f"{name} had {plural(files['before'], 'file')} and has {files['after']:,}")
    if not changed:
        say("no table has files to merge")


pipeline.command("compact", hidden=True)(optimize)


@pipeline.command(rich_help_panel=_OPERATE)
def vacuum(
    lake: LakeOption = "",
    older: Annotated[str, option("SPAN", "Keep the files of all versions since this long ago; at least 24h.")] = OLDER,
    force: Annotated[bool, flag("Allow less than 24h, while no run and no query is active.")] = False,
    dry_run: Annotated[bool, flag("Show what would be removed, and remove nothing.")] = False,
    as_json: AsJson = False,
) -> None:
    """Remove files that no recent version of a table references, and those of killed runs. Needs no Spark.

    Time travel reaches no further back than the last vacuum's --older.
    """
    hours = math.ceil(parse_duration(older, "--older") / timedelta(hours=1))
    if hours < VACUUM_HOURS_MIN and not force:
        raise InvalidOptionError(
            f"files younger than {VACUUM_HOURS_MIN} h may belong to a run or a query that is active",
            where="--older",
            next="Name 24h or more; or, if nothing reads or writes this lake now, add --force",
        )
    with locked_lake(lake) as opened, Bars() as bars:
        bars.step("vacuum")
        files, size = opened.vacuum(hours, dry_run=dry_run)
    verb = "would be removed" if dry_run else "removed"
    text = Text.assemble((f"{plural(files, 'file')} {verb}", "green"), (f", {format_size(size)}", "dim"))
    show_result({"files": files, "bytes": size, "removed": not dry_run}, text, as_json=as_json)


# --- Spark ------------------------------------------------------------------------------------------------------------


SHOWN_BYTES_MAX = 20_000
STDERR = 2
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def require_extra() -> None:
    """A clear error before anything is begun, if the extra is not installed."""
    if package := missing_for_spark():
        raise InvalidOptionError(f"this needs {package}, which is not installed", next=install_hint("spark"))


@contextmanager
def running_spark(options: SparkOptions, stop: StopAtOnce | None = None, *, short: bool = False) -> Iterator[Spark]:
    """A Spark that is starting. Signals end it at once: as `stop` says, otherwise as an interruption."""
    if not is_debugged():
        # Py4J logs what it raises, too, and what its thread for garbage meets when the JVM ends; in part as the root
        # logger.
        logging.getLogger().addFilter(is_not_py4j)
        logging.getLogger("py4j").setLevel(logging.CRITICAL)
    unwarned = warnings.catch_warnings(action=None if is_debugged() else "ignore")  # PySpark's are for programmers
    with StopAtOnce() if stop is None else nullcontext(stop) as stopping, unwarned, suppress_jvm_output():
        spark = options.start(short=short)
        try:
            spark.wait()  # so that its start is not shown as work
            yield spark
        except Exception as exc:
            if type(exc).__module__.partition(".")[0] not in ("pyspark", "py4j"):
                raise
            from headwater.pipeline.sql import sql_error

            # Its text is in the JVM, which is about to end.
            raise StoreError(sql_error(exc), where="Spark", next="HEADWATER_DEBUG=1 shows where") from exc
        finally:
            if is_debugged() or not stopping.was_asked:
                spark.close()
            else:  # interrupted in a conversation with the JVM, PySpark's threads complain about each other
                with open(os.devnull, "w") as nowhere, redirect_stderr(nowhere), suppress(Exception):
                    spark.close()


def is_not_py4j(record: logging.LogRecord) -> bool:
    return "py4j" not in Path(record.pathname).parts


@contextmanager
def spark_session(options: SparkOptions, *, short: bool = False) -> Iterator[tuple[Bars, SparkSession]]:
    """Start Spark for a command that does one thing on it, with bars from its start on."""
    with Bars() as bars:
        bars.step("starting Spark")
        with running_spark(options, short=short) as spark:
            yield bars, spark.session


@contextmanager
def suppress_jvm_output() -> Iterator[None]:
    """Processes that are started in this block have a file for their stderr: a JVM's logs are not for a terminal, and
    its errors arrive as exceptions. The file is shown if the JVM does not come up, or fails in an unknown way."""
    if is_debugged() or sys.__stderr__ is None:
        yield
        return
    with tempfile.TemporaryFile() as file, os.fdopen(os.dup(STDERR), "w", encoding="utf-8", errors="replace") as real:
        before = sys.stderr
        if before is sys.__stderr__:
            sys.stderr = real  # for what the command itself says
        os.dup2(file.fileno(), STDERR)
        try:
            yield
        except Exception as exc:
            if isinstance(exc, HeadwaterError) and type(exc) is not HeadwaterError:
                raise
            file.seek(max(0, file.seek(0, os.SEEK_END) - SHOWN_BYTES_MAX))
            real.write(file.read().decode(errors="replace"))
            raise
        finally:
            sys.stderr = before
            os.dup2(real.fileno(), STDERR)


class StopAtOnce:
    """For work that may be cut off anywhere, as a lake's is. In its `with` block the first signal interrupts the work.
    A signal right after it counts as the same one; a later one interrupts the clean-up too. Where stopping is how the
    work ends (`is_fine`), the block ends as if it were done; elsewhere it ends with KeyboardInterrupt.

    Any other exception after a signal is taken for its consequence: Spark's client is left in the middle of a
    conversation, and its next error means little.
    """

    def __init__(self, *, is_fine: bool = False, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._is_fine = is_fine
        self._monotonic = monotonic
        self._asked_s: float | None = None
        self._is_impatient = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopAtOnce:
        self._before = {number: signal.signal(number, self._on_signal) for number in _SIGNALS}
        return self

    @property
    def was_asked(self) -> bool:
        return self._asked_s is not None

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, at: TracebackType | None) -> bool:
        if self._asked_s is None or self._is_impatient:
            for number, handler in self._before.items():
                signal.signal(number, handler)
            return False
        for number in _SIGNALS:
            signal.signal(number, signal.SIG_IGN)  # the process is ending: further signals must not disturb that
        if exc is not None and not self._is_fine:
            raise KeyboardInterrupt from exc
        return True

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        now_s = self._monotonic()
        if self._asked_s is None:
            self._asked_s = now_s
        elif now_s - self._asked_s < SAME_SIGNAL_S:
            return
        else:
            self._is_impatient = True
        raise KeyboardInterrupt
