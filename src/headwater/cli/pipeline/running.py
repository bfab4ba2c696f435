"""`headwater pipeline run`: bring the lake up to date, once or for ever."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from headwater.cli.opening import AsJson, shown_name
from headwater.cli.output import note, say, some, write_document
from headwater.cli.pipeline.options import (
    TYPES,
    Conf,
    LakeOption,
    LogOption,
    Master,
    Remote,
    check_spark_options,
    locked_lake,
    log_named,
    spark_session,
)
from headwater.cli.pipeline.progress import Bars, Following
from headwater.cli.pipeline.stopping import StopAtOnce
from headwater.cli.times import SPAN_HELP, parse_span
from headwater.errors import InvalidOption

if TYPE_CHECKING:
    from headwater.pipeline.datasets.types import Types
    from headwater.pipeline.lake.lake import Lake


def run(
    log: LogOption,
    lake: LakeOption,
    continuous: Annotated[bool, typer.Option("--continuous", help="Follow the log until stopped.")] = False,
    once: Annotated[bool, typer.Option("--once", help="Take in what there is, and end. This is the default.")] = False,
    types: Annotated[
        Path | None,
        typer.Option(
            "--types", metavar="DIR", help="JSON Schemas of message types: TYPE@VERSION.json. Default: LAKE/types."
        ),
    ] = None,
    rebuild: Annotated[
        bool, typer.Option("--rebuild", help="Make silver and gold anew from bronze, as after a change of the types.")
    ] = False,
    trigger: Annotated[
        str, typer.Option("--trigger", metavar="SPAN", help=f"With --continuous, how often bronze looks: {SPAN_HELP}.")
    ] = "5s",
    refresh: Annotated[
        str, typer.Option("--refresh", metavar="SPAN", help="With --continuous, how often silver and gold are made.")
    ] = "60s",
    master: Master = None,
    remote: Remote = None,
    conf: Conf = None,
    as_json: AsJson = False,
) -> None:
    """Bring the lake up to date with the log: bronze, silver, gold.

    [dim]Once:[/]     headwater pipeline run --log events.db --lake ./lake
    [dim]For ever:[/] headwater pipeline run --log events.db --lake ./lake --continuous

    Stop it or kill it whenever you like: the next run goes on where this
    one stopped, and the lake holds every message once. Ctrl-C or SIGTERM
    ends --continuous in order, with 0.
    """
    if continuous and once:
        raise InvalidOption("--once and --continuous exclude each other", next="Leave one of them out")
    trigger_s = parse_span(trigger, "--trigger").total_seconds()
    refresh_s = parse_span(refresh, "--refresh").total_seconds()
    check_spark_options(master, remote, conf)
    source = log_named(log)
    registered = _registered(types, lake / TYPES)
    began = time.monotonic()
    with locked_lake(lake, create=True) as opened:
        from headwater.pipeline.jobs.running import bind, run_continuously, run_once
        from headwater.pipeline.jobs.silver import forget_silver
        from headwater.pipeline.lake.layout import BRONZE

        bind(opened, source)  # before anything is forgotten: another log must not cost it
        begun_at = opened.manifest.mark(BRONZE)
        if continuous:
            with StopAtOnce(is_fine=True) as stop, spark_session(master, remote, conf, stop) as spark:
                if rebuild:
                    forget_silver(opened)
                note(f"following {shown_name(log)}; Ctrl-C ends it")
                with Following(lambda: opened.manifest.mark(BRONZE)) as shown:
                    spans = {"trigger_s": trigger_s, "refresh_s": refresh_s}
                    run_continuously(spark, opened, source, registered, shown.wait, shown, **spans)
        else:
            with spark_session(master, remote, conf) as spark, Bars() as bars:
                if rebuild:
                    forget_silver(opened)
                run_once(spark, opened, source, registered, bars)
        reached = opened.manifest.mark(BRONZE)
        told = {
            "messages": reached - begun_at,
            "high_water": reached,
            "seconds": round(time.monotonic() - began, 1),
            "tables": table_rows(opened),
        }
    _say(told, as_json=as_json)


def _registered(named: Path | None, otherwise: Path) -> Types:
    from headwater.pipeline.datasets.types import Types, load_types

    if named is not None:
        return load_types(named)
    return load_types(otherwise) if otherwise.is_dir() else Types()


def table_rows(lake: Lake) -> dict[str, int]:
    return {table: sum(file.rows for file in lake.manifest.files(table)) for table in lake.manifest.tables()}


def _say(told: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        write_document(told)
        return
    tables: dict[str, int] = told["tables"]
    say(
        Text.assemble(
            (f"{some(told['messages'], 'message')} taken in", "green"),
            (f", up to seq {told['high_water']:,}, in {told['seconds']} s", "dim"),
        )
    )
    silver, bad = tables.get("silver.messages", 0), tables.get("silver.quarantine", 0)
    say(Text(f"bronze {tables.get('bronze.messages', 0):,}, silver {silver:,}, quarantined {bad:,}", "dim"))
