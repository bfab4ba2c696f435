"""The commands of the command line. The module of a command is imported when the command runs: help and completion
read the table alone."""

from __future__ import annotations

import importlib
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from headwater.cli.main import show_version

_EXITS = (
    "[dim]Exit codes: 0 success; 1 a check found a problem; 2 invalid arguments or input; 3 the log, a server or the "
    "disk refused, or could not be reached; 130 interrupted. With --json a command prints one object, with lists under "
    "items; a command that follows prints one object a line. An error is then an object too, the last line of stderr. "
    "HEADWATER_DEBUG=1 shows tracebacks.[/]"
)

# By help panel, the name of each command, `module:name` of its function or Typer below headwater.cli, and its help. The
# help repeats the first line of the command's own.
_PANELS = {
    "Messages": {
        "publish": ("messages:publish", "Publish a message, or many from JSON lines."),
        "subscribe": ("messages:subscribe", "Begin or resume a durable subscription and print its messages."),
        "tail": ("messages:tail", "Print messages without a subscription: no acks, no position."),
        "import": ("messages:import_", "Import messages with their own times from JSON lines, each line once."),
        "serve": ("serve:serve", "Serve a log: JSON-RPC over WebSocket, metrics and health, on one port."),
        "worker": ("worker:worker", "Run the handlers and schedules of a module, in processes of their own."),
        "forward": (
            "forward:forward",
            "Forward messages to another system; the next run continues where this one ended.",
        ),
        "pipeline": (
            "pipeline:pipeline",
            "The history of a log as Delta tables, written and queried with Apache Spark.",
        ),
    },
    "Inspect": {
        "topics": ("inspect:topics", "List the topics of a log with their counts and sizes."),
        "subscriptions": ("inspect:subscriptions", "Subscriptions: list, pause, move or remove them."),
        "lag": ("inspect:lag", "Show how far behind each subscription is."),
        "stats": ("inspect:stats", "Sum up a log: messages, topics, subscriptions, dead letters, disk."),
        "top": ("inspect:top", "Watch a log live: messages per second by topic, lag by subscription."),
        "schema": ("inspect:schema", "Write the message classes of a module as JSON Schemas or as AsyncAPI."),
    },
    "Operate": {
        "dlq": ("dead_letters:dlq", "Dead letters: messages that failed, with their errors."),
        "schedules": ("schedules:schedules", "Schedules: messages that are published at set times."),
        "retention": ("retention:retention", "Retention: how much history is kept, by topic pattern."),
        "replica": ("replica:replica", "Replicas: SQLite databases that a server keeps, with their versions."),
        "sync": ("sync:sync", "Make TARGET equal to SOURCE; only the pages that differ are transferred."),
        "token": ("tokens:token", "Tokens: the rights to use a server."),
        "config": ("config:config", "The configuration: headwater.toml, HEADWATER_… variables, flags."),
        "doctor": ("doctor:doctor", "Examine a log and its machine; each finding says what to do next."),
    },
    "Learn": {
        "demo": ("demo:demo", "Show the whole system in about a minute, with real processes, checked as it goes."),
        "bench": ("bench:bench", "Measure publishing and consuming on this machine, on a temporary log in DIR."),
        "version": ("config:version", "Show the versions of Headwater and of the libraries it uses."),
    },
}
TARGETS = {name: target for commands in _PANELS.values() for name, (target, _) in commands.items()}


class _LazyGroup(TyperGroup):
    """Its commands are placeholders with a name and a help text until one is called."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        for panel, commands in _PANELS.items():
            for name, (_, help) in commands.items():
                self.add_command(TyperCommand(name, help=help, rich_help_panel=panel, rich_markup_mode="rich"))

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        name, found, rest = super().resolve_command(ctx, args)
        return name, found if name is None else load_command(name), rest


def load_command(name: str) -> Any:
    module, _, attribute = TARGETS[name].partition(":")
    found = getattr(importlib.import_module(f"headwater.cli.{module}"), attribute)
    from headwater.cli.arguments import Command
    from headwater.cli.parameters import declared

    holder = typer.Typer(rich_markup_mode="rich")
    holder.callback()(lambda: None)
    if isinstance(found, typer.Typer):
        holder.add_typer(found, name=name)
    else:
        holder.command(name, cls=getattr(found, "command_class", Command))(declared(found))
    return typer.main.get_group(holder).commands[name]


app = typer.Typer(
    cls=_LazyGroup,
    name="headwater",
    help="Durable messaging where the database is the broker.\n\n"
    "Commands about a log take the LOG first: a file like events.db, a database like postgres://host/name, or a server "
    "like ws://host:8765. HEADWATER_LOG, or cli.log in headwater.toml, names it for all. "
    "worker, schema, sync, replica, token, config and bench take other arguments: see their --help.",
    epilog=_EXITS,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _on_version(wanted: bool) -> None:
    if wanted:
        show_version()
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", is_eager=True, callback=_on_version)
    ] = False,
) -> None:
    pass
