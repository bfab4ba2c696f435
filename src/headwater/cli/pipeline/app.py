"""The commands of `headwater pipeline`."""

from __future__ import annotations

import typer

from headwater.cli.pipeline.keeping import compact, vacuum, warm
from headwater.cli.pipeline.looking import audit, report, sql, status
from headwater.cli.pipeline.replaying import replay
from headwater.cli.pipeline.running import run
from headwater.cli.pipeline.showing import demo

pipeline = typer.Typer(
    no_args_is_help=True,
    help="The whole history as tables on Apache Spark, kept in a folder: the lake.\n\n"
    "[dim]Begin:[/]  headwater pipeline run --log events.db --lake ./lake",
)

_MAKE, _LOOK, _KEEP, _TRY = "Make", "Look", "Keep", "Try"
pipeline.command(rich_help_panel=_MAKE)(run)
pipeline.command(rich_help_panel=_MAKE)(replay)
pipeline.command(rich_help_panel=_LOOK)(status)
pipeline.command(rich_help_panel=_LOOK)(report)
pipeline.command(rich_help_panel=_LOOK)(sql)
pipeline.command(rich_help_panel=_LOOK)(audit)
pipeline.command(rich_help_panel=_KEEP)(compact)
pipeline.command(rich_help_panel=_KEEP)(vacuum)
pipeline.command(rich_help_panel=_KEEP)(warm)
pipeline.command(rich_help_panel=_TRY)(demo)
