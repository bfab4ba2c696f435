"""The root of the command line: its commands, and what becomes of errors."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from itertools import takewhile
from typing import Annotated

import typer
from rich.text import Text

from headwater.cli.bench import bench
from headwater.cli.config import config
from headwater.cli.dead_letters import dlq
from headwater.cli.doctor import doctor
from headwater.cli.forward import forward
from headwater.cli.looking import stats, topics
from headwater.cli.output import console, note, printable, write_error
from headwater.cli.pipeline import pipeline
from headwater.cli.publish import publish
from headwater.cli.reading import subscribe, tail
from headwater.cli.replica import replica
from headwater.cli.retention import retention
from headwater.cli.schema import schema
from headwater.cli.serving import serve
from headwater.cli.setting_flags import SettingsCommand
from headwater.cli.showing import demo, say_version, version
from headwater.cli.stopping import INTERRUPTED, OK, STORE, USAGE, exit_code_of, treat_terminate_as_interrupt
from headwater.cli.subscriptions import lag, subscriptions
from headwater.cli.sync import sync
from headwater.cli.tokens import token
from headwater.cli.top import top
from headwater.errors import HeadwaterError

_EXITS = (
    "[dim]Ends with 0 if all went well; 1 if a check found something; 2 if the call or its input cannot be used; "
    "3 if the log said no (locked, full, not a log, held elsewhere, not reached); 130 when interrupted. "
    "With --json an error is a JSON object, the last line of stderr. HEADWATER_DEBUG=1 shows tracebacks.[/]"
)

UNUSABLE_CALL = "UsageError"  # the kind of an error, under --json, that is none of ours

app = typer.Typer(
    name="headwater",
    help="Durable messaging where the database is the broker.\n\n"
    "Commands take the LOG first: a file like events.db, a database like postgres://host/name, or a server like "
    "ws://host:8765.",
    epilog=_EXITS,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

_USE, _LOOK, _KEEP, _TRY = "Use", "Look", "Keep", "Try"
app.command(rich_help_panel=_USE)(publish)
app.command(rich_help_panel=_USE)(subscribe)
app.command(rich_help_panel=_USE)(tail)
app.command(rich_help_panel=_USE, cls=SettingsCommand)(serve)
app.command(rich_help_panel=_USE)(forward)
app.command(rich_help_panel=_USE)(sync)
app.command(rich_help_panel=_LOOK)(topics)
app.add_typer(subscriptions, name="subscriptions", rich_help_panel=_LOOK)
app.command(rich_help_panel=_LOOK)(lag)
app.command(rich_help_panel=_LOOK)(stats)
app.command(rich_help_panel=_LOOK)(top)
app.command(rich_help_panel=_LOOK)(schema)
app.add_typer(dlq, name="dlq", rich_help_panel=_KEEP)
app.add_typer(retention, name="retention", rich_help_panel=_KEEP)
app.add_typer(replica, name="replica", rich_help_panel=_KEEP)
app.add_typer(token, name="token", rich_help_panel=_KEEP)
app.add_typer(config, name="config", rich_help_panel=_KEEP)
app.command(rich_help_panel=_KEEP)(doctor)
app.add_typer(pipeline, name="pipeline", rich_help_panel=_USE)
app.command(rich_help_panel=_TRY)(demo)
app.command(rich_help_panel=_TRY)(bench)
app.command(rich_help_panel=_TRY)(version)


@app.callback()
def root(
    show_version: Annotated[
        bool, typer.Option("--version", help="Say the version and end.", is_eager=True, callback=say_version)
    ] = False,
) -> None:
    pass


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns its exit code. Errors become a line that says why, and one that says what next; or, with
    --json, one line of JSON."""
    as_json = _wants_json(sys.argv[1:] if arguments is None else arguments)
    _warn_in_our_words()
    treat_terminate_as_interrupt()
    try:
        code = app(args=arguments, prog_name="headwater", standalone_mode=False)
        sys.stdout.flush()
        return code if isinstance(code, int) else OK
    except HeadwaterError as exc:
        _reraise_for_debugging()
        return _say_error(type(exc).__name__, exc.why, exc.where, exc.next, exit_code_of(exc), as_json)
    except typer.TyperException as exc:  # a call that typer refuses: an unknown option, a missing argument
        context = getattr(exc, "ctx", None)
        command = context.command_path if context is not None else "headwater"
        if message := str(getattr(exc, "format_message", exc.__str__)()):
            _say_error(UNUSABLE_CALL, message.rstrip("."), "", f"{command} --help", USAGE, as_json)
        return USAGE
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    except (BrokenPipeError, SystemExit) as exc:
        # rich and typer turn a broken pipe into an exit; who reads us has had enough, and that is no error.
        if isinstance(exc, BrokenPipeError) or isinstance(exc.__context__, BrokenPipeError):
            _let_go_of_stdout()
            return OK
        raise
    except Exception as exc:
        _reraise_for_debugging()
        kind = type(exc).__name__
        next = "HEADWATER_DEBUG=1 shows where; please report it"
        return _say_error(kind, f"unexpected {kind}: {exc}", "", next, STORE, as_json)


def _wants_json(arguments: Sequence[str]) -> bool:
    """By the bare look of it: a call that cannot be read is to be answered in JSON, too."""
    return "--json" in takewhile(lambda argument: argument != "--", arguments)


def _say_error(kind: str, why: str, where: str, next: str, code: int, as_json: bool) -> int:
    if as_json:
        write_error({"kind": kind, "why": why, "where": where, "next": next, "exit": code})
        return code
    screen = console(to_stderr=True)
    screen.print(Text(f"error: {printable(f'{where}: {why}' if where else why)}", "red"), soft_wrap=True)
    if next:
        screen.print(Text(f"next: {printable(next)}", "dim"), soft_wrap=True)
    return code


def _reraise_for_debugging() -> None:
    if os.environ.get("HEADWATER_DEBUG") == "1":
        raise


class _Notes(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        note(f"{record.levelname.lower()}: {record.getMessage()}")


def _warn_in_our_words() -> None:
    """The library's warnings (a gap, a lease that could not be given back) go to stderr as notes."""
    logger = logging.getLogger("headwater")
    if not any(isinstance(handler, _Notes) for handler in logger.handlers):
        logger.addHandler(_Notes(logging.WARNING))
        logger.propagate = False


def _let_go_of_stdout() -> None:
    """So that the interpreter's last flush has somewhere to go."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
