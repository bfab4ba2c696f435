"""`headwater demo` and `headwater version`."""

from __future__ import annotations

import sys
from contextlib import nullcontext, redirect_stdout
from typing import Annotated

import typer

from headwater.cli.arguments import AsJson
from headwater.cli.main import show_version, versions
from headwater.cli.output import write_document


def demo(
    directory: Annotated[
        str | None,
        typer.Option("--dir", metavar="DIR", help="Where to make the log; a new temporary one if not given."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show what Headwater promises, in a few seconds, with real processes.

    Ends with 0 only if everything it says was checked to be true.
    """
    from headwater.demo.story import DemoFailed, run

    try:
        with redirect_stdout(sys.stderr) if as_json else nullcontext():
            run(directory)
    except DemoFailed:
        raise typer.Exit(1) from None
    if as_json:
        write_document({"directory": directory, "ok": True})


def version(as_json: AsJson = False) -> None:
    """Show the version of Headwater and of what it stands on."""
    if as_json:
        write_document(versions())
    else:
        show_version()
