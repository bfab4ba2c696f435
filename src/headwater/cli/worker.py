"""`headwater worker`: the handlers and schedules of a module, in processes of their own."""

from __future__ import annotations

import signal
from typing import Annotated, Literal

import typer

from headwater.cli.parameters import argument, flag, option
from headwater.cli.serve import tell_service_manager
from headwater.errors import InvalidOptionError
from headwater.formats import DURATION_HELP, SIZE_HELP, parse_duration, parse_size

PROCESSES_MAX = 256
THREADS_MAX = 1_000
PORT_MAX = 65_535
MEMORY_MIN = 16 * 1024 * 1024


def worker(
    target: Annotated[str, argument("MODULE:LOG", "A log in a module, or a function that returns one.")],
    processes: Annotated[int, option("N", "How many processes.", min=1, max=PROCESSES_MAX)] = 1,
    threads: Annotated[
        int | None,
        option(
            "N",
            "How many messages a shared handler handles at a time in each process, unless it declares its own "
            "concurrency; 1 by default. An exclusive handler runs in one process only, one message at a time.",
            min=1,
            max=THREADS_MAX,
        ),
    ] = None,
    max_tasks: Annotated[int | None, option("N", "Replace a process after N messages.", min=1)] = None,
    max_memory: Annotated[
        str | None, option("SIZE", f"Replace a process that grows above this size: {SIZE_HELP}.")
    ] = None,
    shutdown_timeout: Annotated[str, option("SPAN", f"How long handlers have to finish: {DURATION_HELP}.")] = "30s",
    healthz: Annotated[
        str | None, option("HOST:PORT", "Serve /healthz there, with the state of the processes.")
    ] = None,
    reload: Annotated[bool, flag("Replace the processes when a file of the program changes.")] = False,
    log_format: Annotated[Literal["text", "json"], flag("text, or json: one object a line.")] = "text",
    as_json: Annotated[bool, flag("The same as --log-format json.", "--json")] = False,
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], flag("The lowest level that is logged.")
    ] = "info",
) -> None:
    """Run the handlers and schedules of a module, in processes of their own.

    [dim]Four processes:[/]  headwater worker shop.tasks:log --processes 4
    [dim]Development:[/]     headwater worker shop.tasks:log --reload

    LOG is a function without arguments that opens a log, declares handlers and
    returns the log (with asyncio, an async function), or a log in the module.
    Each process imports the module itself.

    Ctrl-C or SIGTERM lets handlers finish and releases the other messages; a
    second one kills the processes. A process that crashes is started again, and
    so is one that cannot start because its log is locked or unreachable.
    Exits with 0 if all processes ended in order, 1 if one had to be killed, 2 if
    the module cannot be run or its log cannot be used, 130 after a second
    signal.
    """
    import asyncio

    from headwater.server import logging as logs
    from headwater.worker.process import TARGET_HELP, WorkerOptions
    from headwater.worker.supervisor import Supervisor

    if ":" not in target:
        raise InvalidOptionError(f"not a module and a name: {target[:80]!r}", next=TARGET_HELP)
    log_format = "json" if as_json else log_format
    options = WorkerOptions(
        target=target,
        processes=processes,
        threads=threads,
        reload=reload,
        healthz=None if healthz is None else parse_address(healthz),
        max_tasks=max_tasks,
        max_memory=None if max_memory is None else _memory(max_memory),
        shutdown_timeout_s=parse_duration(shutdown_timeout, "--shutdown-timeout").total_seconds(),
        log_format=log_format,
        log_level=log_level,
    )
    logs.set_up(log_format, log_level)
    code = asyncio.run(Supervisor(options, tell_service_manager).run())
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it has ended: a late signal must not change the exit code
    raise typer.Exit(code)


def parse_address(text: str) -> tuple[str, int]:
    """`127.0.0.1:8080`, `[::1]:8080`, or `:8080` for this machine alone."""
    host, separator, port = text.rpartition(":")
    if not separator or not (port.isascii() and port.isdigit()) or int(port) > PORT_MAX:
        raise InvalidOptionError(f"--healthz is no address: {text[:80]!r}", next="Write it like 127.0.0.1:8080")
    return host.strip("[]") or "127.0.0.1", int(port)


def _memory(text: str) -> int:
    size = parse_size(text, "--max-memory")
    if size < MEMORY_MIN:
        raise InvalidOptionError(f"--max-memory is 16MiB at least, not {text}", next="Python alone needs that much")
    return size
