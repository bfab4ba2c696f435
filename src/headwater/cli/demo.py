"""`headwater demo` and `headwater version`."""

from __future__ import annotations

import sys
from contextlib import nullcontext, redirect_stdout
from typing import Annotated

from headwater.cli.arguments import AsJson
from headwater.cli.main import show_version, versions
from headwater.cli.output import write_document
from headwater.cli.parameters import option


def demo(
    directory: Annotated[
        str, option("DIR", "Where to put its files; those of an earlier demo are replaced.", "--dir")
    ] = "headwater-demo",
    as_json: AsJson = False,
) -> None:
    """Show the whole system in about a minute, with real processes, checked as it goes.

    A log and a crash, dead letters, SQL, a server with its console, a replica
    restored, forwarding, and a lake on Spark with its audit and report.
    Without the extra spark it leaves out the lake and says so.

    Ends with 0 only if everything it says was checked to be true, and with 1
    at the first claim that is not. Its files and the next commands stay.
    """
    from headwater.demo.story import run

    with redirect_stdout(sys.stderr) if as_json else nullcontext():
        result = run(directory)
    if as_json:
        write_document(result._asdict())


def version(as_json: AsJson = False) -> None:
    """Show the versions of Headwater and of the libraries it uses."""
    if as_json:
        write_document(versions())
    else:
        show_version()
