"""`headwater demo` and `headwater version`."""

from __future__ import annotations

import platform
from typing import Annotated

import apsw
import typer

import headwater
from headwater.cli.opening import AsJson
from headwater.cli.output import say, write_document


def demo(
    directory: Annotated[
        str | None,
        typer.Option("--dir", metavar="DIR", help="Where to make the log; a new temporary one if not given."),
    ] = None,
) -> None:
    """Show what Headwater promises, in a few seconds, with real processes.

    Ends with 0 only if everything it says was checked to be true.
    """
    from headwater.demo.narration import DemoFailed
    from headwater.demo.story import run

    try:
        run(directory)
    except DemoFailed:
        raise typer.Exit(1) from None


def version(as_json: AsJson = False) -> None:
    """Say the version of Headwater and of what it stands on."""
    if as_json:
        write_document(
            {
                "headwater": headwater.__version__,
                "python": platform.python_version(),
                "apsw": apsw.apsw_version(),
                "sqlite": apsw.sqlite_lib_version(),
            }
        )
    else:
        say(
            f"headwater {headwater.__version__} (Python {platform.python_version()}, apsw {apsw.apsw_version()}, "
            f"SQLite {apsw.sqlite_lib_version()})"
        )


def say_version(wanted: bool) -> None:
    if wanted:
        version()
        raise typer.Exit
