"""`headwater pipeline compact`, `vacuum` and `warm`: keeping a lake small and Spark quick."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.text import Text

from headwater.cli.opening import AsJson
from headwater.cli.output import say, some, write_document
from headwater.cli.pipeline.options import LakeOption, locked_lake, needs_spark
from headwater.cli.pipeline.progress import Bars
from headwater.cli.times import parse_span, say_size


def compact(
    lake: LakeOption,
    everything: Annotated[
        bool, typer.Option("--all", help="Merge all that fits into a large file, not just what is worth it.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Merge small files of bronze into larger ones. Runs do it by themselves.

    Queries that run meanwhile keep the files they began with.
    """
    needs_spark()
    from headwater.pipeline.lake.compaction import compact as merge
    from headwater.pipeline.lake.layout import BRONZE

    with locked_lake(lake) as opened, Bars() as bars:
        before = len(opened.manifest.files(BRONZE))
        bars.step("compacting", before)
        merged = 0

        def on_merged(files: int) -> None:
            nonlocal merged
            merged += files
            bars.reached(merged)

        merge(opened.path, opened.manifest, BRONZE, everything=everything, on_merged=on_merged)
        after = len(opened.manifest.files(BRONZE))
    if as_json:
        write_document({"files_before": before, "files_after": after})
    else:
        say(f"bronze had {some(before, 'file')} and has {after:,}")


def vacuum(
    lake: LakeOption,
    grace: Annotated[
        str, typer.Option("--grace", metavar="SPAN", help="Keep replaced files so long for queries that run.")
    ] = "1h",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would go, and remove nothing.")] = False,
    as_json: AsJson = False,
) -> None:
    """Remove files that no table needs: replaced ones, and what killed runs left. Runs do it by themselves."""
    needs_spark()
    grace_ms = int(parse_span(grace, "--grace").total_seconds() * 1000)
    from headwater.pipeline.lake.lake import now_ms
    from headwater.pipeline.lake.sweeping import vacuum as sweep

    with locked_lake(lake) as opened, Bars() as bars:
        bars.step("sweeping")
        swept = sweep(opened.path, opened.manifest, now_ms(), grace_ms=grace_ms, dry_run=dry_run)
    if as_json:
        write_document({"files": swept.files, "bytes": swept.bytes, "removed": not dry_run})
    else:
        verb = "would go" if dry_run else "removed"
        say(Text.assemble((f"{some(swept.files, 'file')} {verb}", "green"), (f", {say_size(swept.bytes)}", "dim")))


def warm() -> None:
    """Make an archive of Spark's classes, once, so that later commands start in about half the time.

    It takes about a minute, and some 200 MB in the cache folder. After an upgrade of
    Java or PySpark it no longer counts: run this again.
    """
    needs_spark()
    from headwater.pipeline.starting.archive import train_archive

    with Bars() as bars:
        trained = train_archive(on_step=bars.step)
    say(f"made {trained.file}")
