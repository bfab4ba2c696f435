"""Runs a command: errors become a line that says why and one that says what to do next, and an exit code."""

from __future__ import annotations

import logging
import os
import platform
import sys
from collections.abc import Sequence
from itertools import takewhile

import apsw

from headwater.cli.stopping import (
    INTERRUPTED,
    OK,
    STORE,
    USAGE,
    exit_code_of,
    is_debugged,
    treat_terminate_as_interrupt,
)
from headwater.errors import HeadwaterError
from headwater.version import VERSION

USAGE_ERROR = "UsageError"  # the kind of an error, under --json, that is none of ours


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code. With --json an error is one line of JSON."""
    given = sys.argv[1:] if arguments is None else arguments
    if list(given) == ["--version"]:  # without the command line's packages
        show_version()
        return OK

    import typer

    from headwater.cli.commands import app

    as_json = _wants_json(given)
    _show_warnings_as_notes()
    treat_terminate_as_interrupt()
    try:
        code = app(args=arguments, prog_name="headwater", standalone_mode=False)
        sys.stdout.flush()
        return code if isinstance(code, int) else OK
    except HeadwaterError as exc:
        if is_debugged():
            raise
        return _show_error(type(exc).__name__, exc.why, exc.where, exc.next, exit_code_of(exc), as_json)
    except typer.TyperException as exc:  # an unknown option, a missing argument
        context = getattr(exc, "ctx", None)
        command = context.command_path if context is not None else "headwater"
        if message := str(getattr(exc, "format_message", exc.__str__)()):
            from headwater.cli.hints import explained

            why, instead = explained(message.rstrip("."), context)
            next = f"{instead}; {command} --help" if instead else f"{command} --help"
            _show_error(USAGE_ERROR, why, "", next, USAGE, as_json)
        return USAGE
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    except (BrokenPipeError, SystemExit) as exc:
        # rich and typer turn a broken pipe into an exit. The reader has ended, as `| head` does: that is no error.
        if isinstance(exc, BrokenPipeError) or isinstance(exc.__context__, BrokenPipeError):
            # The interpreter's last flush needs somewhere to go.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return OK
        raise
    except Exception as exc:
        if is_debugged():
            raise
        kind = type(exc).__name__
        next = "HEADWATER_DEBUG=1 shows where; please report it"
        return _show_error(kind, f"unexpected {kind}: {exc}", "", next, STORE, as_json)


def versions() -> dict[str, str]:
    return {
        "headwater": VERSION,
        "python": platform.python_version(),
        "apsw": apsw.apsw_version(),
        "sqlite": apsw.sqlite_lib_version(),
    }


def show_version() -> None:
    found = versions()
    print("headwater {headwater} (Python {python}, apsw {apsw}, SQLite {sqlite})".format(**found))


def _wants_json(arguments: Sequence[str]) -> bool:
    """Whether --json is among the arguments, before they are parsed: a call that cannot be parsed is answered in JSON,
    too."""
    return "--json" in takewhile(lambda argument: argument != "--", arguments)


def _show_error(kind: str, why: str, where: str, next: str, code: int, as_json: bool) -> int:
    from headwater.cli.output import show_error

    return show_error(kind, why, where, next, code, as_json=as_json)


class _NoteHandler(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        from headwater.cli.output import note

        note(f"{record.levelname.lower()}: {record.getMessage()}")


def _show_warnings_as_notes() -> None:
    """The library's warnings (a gap, a lease that could not be released) go to stderr as notes."""
    logger = logging.getLogger("headwater")
    if not any(isinstance(handler, _NoteHandler) for handler in logger.handlers):
        logger.addHandler(_NoteHandler(logging.WARNING))
        logger.propagate = False
