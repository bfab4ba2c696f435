"""What the commands of the pipeline share: the log, the lake, and where Spark runs."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext, redirect_stderr, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headwater.cli.opening import existing_log, is_file, is_remote, require_log
from headwater.cli.output import console
from headwater.cli.pipeline.chatter import chatter_kept, is_debugged, warnings_kept
from headwater.cli.pipeline.stopping import StopAtOnce
from headwater.errors import Corrupt, InvalidOption

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from headwater.pipeline.lake.lake import Lake

TYPES = "types"  # its folder of JSON Schemas, which may be there before the lake

_SPARK = "Spark"
LogOption = Annotated[
    str,
    typer.Option("--log", metavar="LOG", help="The log: a file like events.db, or postgres://…", show_default=False),
]
LogIfAny = Annotated[
    str | None, typer.Option("--log", metavar="LOG", help="The log, to see what is live too.", show_default=False)
]
LakeOption = Annotated[Path, typer.Option("--lake", metavar="DIR", help="The folder of the lake.", show_default=False)]
Master = Annotated[
    str | None,
    typer.Option("--master", metavar="URL", help="A cluster, like spark://host:7077.", rich_help_panel=_SPARK),
]
Remote = Annotated[
    str | None,
    typer.Option("--remote", metavar="URL", help="Spark Connect, like sc://host:15002.", rich_help_panel=_SPARK),
]
Conf = Annotated[
    list[str] | None,
    typer.Option("--conf", metavar="NAME=VALUE", help="A setting of Spark; repeatable.", rich_help_panel=_SPARK),
]


def log_named(log: str) -> str:
    """A log that can be opened, as the pipeline names it: Spark takes long to start, and what is wrong is told
    before."""
    if is_remote(log):
        raise InvalidOption(
            "the pipeline reads the log itself, not through a server",
            where=log,
            next="Name the log that the server serves: its file, on its machine, or postgres://…",
        )
    with existing_log(log):
        return str(Path(require_log(log)).resolve()) if is_file(log) else log


@contextmanager
def opened_lake(lake: Path) -> Iterator[Lake]:
    """A lake that is there."""
    from headwater.pipeline.lake.lake import Lake

    with _told_plainly(lake), Lake(lake) as opened:
        yield opened


@contextmanager
def locked_lake(lake: Path, *, create: bool = False) -> Iterator[Lake]:
    """The same for a command that changes it, alone; made if need be and wished."""
    from headwater.pipeline.lake.lake import Lake
    from headwater.pipeline.lake.lock import LakeLock
    from headwater.pipeline.lake.manifest import refuse_foreign_folder

    if create:
        refuse_foreign_folder(lake)  # before the lock, which makes the folder
    else:
        with opened_lake(lake):
            pass  # the lock makes its folder: not where there is no lake
    with _told_plainly(lake), LakeLock(lake), Lake(lake, create=create) as opened:
        yield opened


@contextmanager
def _told_plainly(lake: Path) -> Iterator[None]:
    from pyarrow import ArrowInvalid

    try:
        yield
    except (FileNotFoundError, ArrowInvalid) as exc:
        next = "headwater pipeline audit tells what else is wrong; run --rebuild makes silver and gold anew"
        raise Corrupt(f"a file of the lake is gone or damaged ({exc})", where=str(lake), next=next) from exc


def pairs_of(conf: list[str] | None) -> dict[str, str]:
    found: dict[str, str] = {}
    for each in conf or []:
        name, equals, value = each.partition("=")
        if not equals or not name:
            raise InvalidOption(
                f"a setting is NAME=VALUE, not {each!r}", where="--conf", next="Write it like spark.driver.memory=2g"
            )
        found[name] = value
    return found


def needs_spark() -> None:
    """A clear word before anything is begun, if the extra is missing."""
    try:
        import pyarrow  # noqa: F401  # it comes with the same extra
        import pyspark  # noqa: F401
    except ImportError as exc:
        raise InvalidOption(
            f"this needs a package that is not installed ({exc})", next="pip install 'headwater[spark]'"
        ) from exc


def check_spark_options(master: str | None, remote: str | None, conf: list[str] | None) -> None:
    """What can be told before anything is begun."""
    needs_spark()
    pairs_of(conf)
    if master is not None and remote is not None:
        raise InvalidOption("--master and --remote exclude each other", next="Leave one of them out")


@contextmanager
def spark_session(
    master: str | None, remote: str | None, conf: list[str] | None, stop: StopAtOnce | None = None
) -> Iterator[SparkSession]:
    """Signals end it at once: as `stop` says, otherwise as an interruption."""
    from headwater import pipeline

    settings: dict[str, Any] = {"master": master, "remote": remote, "conf": pairs_of(conf)}
    if not is_debugged():
        logging.getLogger().addFilter(_is_no_interrupt)
        logging.getLogger("py4j").setLevel(logging.CRITICAL)
    stops = StopAtOnce() if stop is None else nullcontext(stop)
    with stops as stopping, warnings_kept(), ExitStack() as stack:
        with chatter_kept():
            screen = console(to_stderr=True)
            with screen.status("starting Spark …") if screen.is_terminal else nullcontext():
                spark = pipeline.session("headwater pipeline", **settings)
                stack.callback(_end, spark, stopping)
                pipeline.register(spark)
        stopping.listen()
        yield spark


def _end(spark: SparkSession, stopping: StopAtOnce) -> None:
    if not stopping.was_asked or is_debugged():
        spark.stop()
        return
    from headwater.pipeline.starting.session import end_jvm

    # Cut off in the middle, PySpark's threads complain about each other; the process ends, so the JVM can go now.
    with open(os.devnull, "w") as nowhere, redirect_stderr(nowhere), suppress(Exception):
        spark.stop()
        end_jvm()


def _is_no_interrupt(record: logging.LogRecord) -> bool:
    """Py4J logs Ctrl-C as an error with a traceback, though it then raises it like everybody."""
    return not str(record.msg).startswith("KeyboardInterrupt")
