"""`headwater serve`: a log behind a port."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import signal
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

import headwater
from headwater.cli.config import ConfigFile, ProfileName
from headwater.cli.opening import file_of, is_file, is_remote
from headwater.cli.output import console, printable
from headwater.cli.service_manager import tell_service_manager
from headwater.cli.setting_flags import settings_given
from headwater.cli.stopping import exit_code_of
from headwater.demo.calling import EVERYWHERE, page_of, reachable, this_command
from headwater.errors import HeadwaterError, InvalidConfiguration, InvalidOption
from headwater.wiring import replicas_directory

if TYPE_CHECKING:  # pydantic and the server take longer to import than most commands take to run
    from headwater.configuration import Settings
    from headwater.server.serving import Server

IN_MEMORY = "memory:"
SAME_SIGNAL_S = 0.5  # a wrapper such as timeout(1) may pass on what the process got by itself

_WHO, _HOW, _SAY = "Who may come in", "How it runs", "What it says"


def _option(*spellings: str, metavar: str | None = None, help: str, panel: str) -> Any:
    return typer.Option(*spellings, metavar=metavar, help=help, rich_help_panel=panel, show_default=False)


def serve(
    context: typer.Context,
    log: Annotated[
        str | None,
        typer.Argument(
            metavar="LOG",
            help="A file, made if it is not there, or memory:; events.db if none is named.",
            show_default=False,
        ),
    ] = None,
    host: Annotated[
        str | None, _option("--host", metavar="HOST", help="Where to listen, if not on 127.0.0.1.", panel=_HOW)
    ] = None,
    port: Annotated[
        str | None, _option("--port", metavar="PORT", help="And the port, if not 8765; 0: any free one.", panel=_HOW)
    ] = None,
    config: ConfigFile = None,
    profile: ProfileName = None,
    tokens: Annotated[
        str | None,
        _option("--tokens", metavar="FILE", help="Only with a token of this file: headwater token create.", panel=_WHO),
    ] = None,
    allow_anonymous: Annotated[
        bool | None,
        _option(
            "--allow-anonymous",
            help="Everybody, also from other machines: whoever can reach it may do everything.",
            panel=_WHO,
        ),
    ] = None,
    origins: Annotated[
        list[str] | None,
        _option(
            "--origin",
            "--origins",
            metavar="ORIGIN",
            help="Web pages of this origin may connect, like https://shop.example; *: any. Can be repeated.",
            panel=_WHO,
        ),
    ] = None,
    tls_certificate: Annotated[
        str | None, _option("--tls-certificate", metavar="FILE", help="PEM; makes it wss:// and https://.", panel=_WHO)
    ] = None,
    tls_key: Annotated[
        str | None, _option("--tls-key", metavar="FILE", help="Its key, if not in the same file.", panel=_WHO)
    ] = None,
    tls_client_ca: Annotated[
        str | None,
        _option("--tls-client-ca", metavar="FILE", help="Only with a certificate of these authorities.", panel=_WHO),
    ] = None,
    metrics_need_token: Annotated[
        bool | None,
        _option(
            "--metrics-need-token/--metrics-for-all",
            help="Whether /metrics wants a token; as long as there are tokens, it does.",
            panel=_WHO,
        ),
    ] = None,
    audit: Annotated[
        str | None,
        _option(
            "--audit", metavar="FILE", help="Append who was refused and who changed what, as JSON lines.", panel=_WHO
        ),
    ] = None,
    shutdown_timeout: Annotated[
        str | None,
        _option("--shutdown-timeout", metavar="SPAN", help="How long to wait for clients to end; 10s.", panel=_HOW),
    ] = None,
    console_pages: Annotated[
        bool | None, _option("--console/--no-console", help="Pages for browsers at /.", panel=_HOW)
    ] = None,
    tracing: Annotated[bool | None, _option("--tracing", help="OpenTelemetry spans.", panel=_HOW)] = None,
    log_format: Annotated[
        str | None, _option("--log-format", metavar="FORMAT", help="text, or json: one object a line.", panel=_SAY)
    ] = None,
    log_level: Annotated[
        str | None, _option("--log-level", metavar="LEVEL", help="debug, info, warning or error.", panel=_SAY)
    ] = None,
    demo: Annotated[
        bool, typer.Option("--demo", help="Show it at work: a log of its own with publishers and consumers.")
    ] = False,
) -> None:
    """Serve a log: JSON-RPC over WebSocket, metrics and health, on one port.

    [dim]For this machine:[/]  headwater serve events.db
    [dim]For others:[/]        headwater serve --host 0.0.0.0 --tokens headwater.tokens
    [dim]To look at:[/]        headwater serve --demo

    Commands and programs then name ws://HOST:PORT where they named the file.
    SQLite databases that `headwater sync` pushes here are kept beside the log,
    in LOG-replicas or --replicas-directory.

    Every setting of headwater.toml is a flag too, like --limits-connections 100
    or --log-durability relaxed; `headwater config show` lists them. Ctrl-C or
    SIGTERM ends it in order, with 0; a second one at once.
    """
    flags: dict[str, Any] = {
        "server.log": log,
        "server.host": host,
        "server.port": port,
        "server.tokens": tokens,
        "server.allow_anonymous": allow_anonymous,
        "server.origins": tuple(origins) if origins else None,
        "server.tls_certificate": tls_certificate,
        "server.tls_key": tls_key,
        "server.tls_client_ca": tls_client_ca,
        "server.metrics_need_token": metrics_need_token,
        "server.audit": audit,
        "server.shutdown_timeout": shutdown_timeout,
        "server.console": console_pages,
        "server.tracing": tracing,
        "server.log_format": log_format,
        "server.log_level": log_level,
        **settings_given(context),
    }
    given = {path: value for path, value in flags.items() if value is not None}
    if demo:
        _show_demo(given)
        return
    from headwater.configuration import load_settings

    try:
        settings = load_settings(
            config=config, profile=profile, flags=given, environment=os.environ, directory=os.getcwd()
        )
        _Serving(settings).run()
    except InvalidConfiguration as exc:
        raise InvalidConfiguration(exc.why, where=exc.where, next=_in_flags(exc.next)) from exc


def _in_flags(advice: str) -> str:
    """Advice about settings, for somebody who is at a command line: `server.tokens` is `--tokens` here."""
    return re.sub(r"\bserver\.([a-z_]+)(?: = true)?", lambda found: "--" + found[1].replace("_", "-"), advice)


def _show_demo(given: dict[str, Any]) -> None:
    if given.keys() - {"server.host", "server.port", "server.allow_anonymous"}:
        raise InvalidOption("--demo brings its own log and settings", next="Give it --host and --port at most")
    from headwater.demo.serving import run

    run(given)


class _Serving:
    """One run of a server in this process, and what is said about it."""

    def __init__(self, settings: Settings) -> None:
        from headwater.server import logs
        from headwater.wiring import make_server

        self._settings = settings
        self._is_new = _is_new(settings.server.log)
        self._in_json = settings.server.log_format == "json"
        self._shows_banner = sys.stderr.isatty() and not self._in_json
        self._handler = logs.set_up(settings.server.log_format, settings.server.log_level)
        self._server = make_server(settings)
        self._asked_s: float | None = None

    def run(self) -> None:
        if self._shows_banner and self._settings.server.log_level != "debug":
            self._handler.setLevel(logging.WARNING)  # the banner says the same, and better
        try:
            self._server.run(on_ready=self._on_ready)
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it has ended well, whoever still wants it to
        except HeadwaterError as exc:
            if not self._in_json:
                raise
            fields = {"where": exc.where, "next": exc.next}
            logging.getLogger("headwater.server").critical(exc.why, extra=fields)
            raise typer.Exit(exit_code_of(exc)) from None

    def _on_ready(self, server: Server) -> None:
        loop = asyncio.get_running_loop()
        with contextlib.suppress(NotImplementedError):  # not on every system
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.add_signal_handler(number, self._stop, loop)
        if self._shows_banner:
            show_banner(console(to_stderr=True), server, is_new=self._is_new)
            self._handler.setLevel(logging.NOTSET)
        tell_service_manager("READY=1")

    def _stop(self, loop: asyncio.AbstractEventLoop) -> None:
        """The first signal asks; a later one interrupts, should somebody not want to wait for the clients."""
        if self._asked_s is not None:
            if loop.time() - self._asked_s >= SAME_SIGNAL_S:
                raise KeyboardInterrupt
            return
        self._asked_s = loop.time()
        if self._shows_banner:
            sys.stderr.write("\n")  # after the ^C that the terminal shows
        tell_service_manager("STOPPING=1")
        self._server.ask_to_stop()


def _is_new(log: str) -> bool:
    if is_remote(log):
        raise InvalidOption("this is a server, not a log", where=log, next="Name a file, like events.db")
    return log != IN_MEMORY and is_file(log) and not os.path.exists(file_of(log))


# --- the banner -----------------------------------------------------------------------------------------------------


def show_banner(screen: Console, server: Server, *, is_new: bool) -> None:
    """What is served, where, for whom, what to try and how to stop: what a newcomer wants to know."""
    settings = server.settings.server
    url = reachable(server.url)
    command = this_command() if settings.tokens is None else f"HEADWATER_TOKEN=hw_… {this_command()}"
    what = " (gone when this ends)" if settings.log == IN_MEMORY else " (a new log)" if is_new else ""
    title = Text(f"Headwater {headwater.__version__} serves ", "bold")
    title.append(printable(settings.log), "bold cyan").append(what, "dim")
    rows: list[tuple[str, str | Text]] = [
        ("address", Text.assemble((url, "cyan"), (_other_addresses(settings.host), "dim"))),
        ("open to", _who_may_come(server)),
        *([("console", page_of(url, "/"))] if settings.console else []),
        ("metrics", page_of(url, "/metrics")),
        ("health", page_of(url, "/readyz")),
        ("publish", f"""{command} publish {url} orders.new '{{"order": 17}}'"""),
        ("watch", f"{command} tail {url} -f"),
        *([("back up", f"{command} sync app.db {url}/shop/app.db")] if replicas_directory(server.settings) else []),
        ("stop", "Ctrl-C"),
    ]
    screen.print()
    screen.print(title, soft_wrap=True)
    for name, value in rows:
        screen.print(Text.assemble((f"  {name:<9}", "dim"), value), soft_wrap=True)
    screen.print()


def _other_addresses(host: str) -> str:
    return "  and every other address of this machine" if host in EVERYWHERE else ""


def _who_may_come(server: Server) -> Text:
    from headwater.configuration.kinds import is_loopback
    from headwater.server.tokens import TokenFile

    settings = server.settings.server
    if settings.tokens is not None:
        known = len(TokenFile(settings.tokens).list())
        make_one = f"{this_command()} token create --tokens {settings.tokens} --publish '>' --subscribe '>'"
        if not known:
            return Text(f"nobody yet; make a token: {make_one}", "yellow")
        return Text(f"whoever has a token; {printable(settings.tokens)} knows {known:,}")
    if is_loopback(settings.host):
        return Text("everybody on this machine, without a token")
    return Text("everybody who can reach it, without a token", "yellow")
