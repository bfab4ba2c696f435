"""`headwater serve`: a log behind a port."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
import signal
import socket
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

import headwater
from headwater.cli.arguments import Command, file_of, is_file, is_remote
from headwater.cli.config import ConfigFile, ProfileName
from headwater.cli.output import Text, say
from headwater.cli.parameters import argument, flag, option
from headwater.cli.stopping import SAME_SIGNAL_S, exit_code_of
from headwater.errors import HeadwaterError, InvalidConfigurationError, InvalidOptionError

if TYPE_CHECKING:
    import asyncio

    from headwater.server.server import Server
    from headwater.settings import Settings

IN_MEMORY = "memory:"

_ACCESS = {"rich_help_panel": "Access"}
_RUNNING = {"rich_help_panel": "Running"}
_LOGGING = {"rich_help_panel": "Logging"}

SECTIONS = ("limits", "log", "replicas")
_NO_SETTINGS = ("config", "profile", "demo", "as_json")  # all other parameters are settings of the server, by name
_KEPT = "headwater.settings"  # in the meta of a context: settings of other sections, by path


class SettingsCommand(Command):
    """Takes `--limits-burst 10` and its like out before typer parses: which exist is known by the settings alone."""

    def with_log(self, args: list[str]) -> list[str]:
        return args  # the settings of the server say more about it

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        declared = {spelling for parameter in self.params for spelling in parameter.opts}
        rest: list[str] = []
        found: dict[str, str] = {}
        words = iter(self.in_our_spelling(args))
        for word in words:
            flag, has_value, value = word.partition("=")
            path = None if flag in declared else setting_of(flag)
            if word == "--":
                rest += [word, *words]
            elif path is None:
                rest.append(word)
            else:
                given = value if has_value else next(words, None)
                if given is None:
                    raise InvalidOptionError(f"{flag} needs a value", next=f"{ctx.command_path} --help")
                found[path] = given
        ctx.meta[_KEPT] = found
        return super().parse_args(ctx, rest)


def setting_of(flag: str) -> str | None:
    """`--limits-frame-bytes` is `limits.frame_bytes`; None if the flag has no such form."""
    section, _, key = flag.removeprefix("--").partition("-")
    if not flag.startswith("--") or section not in SECTIONS or not key:
        return None
    return f"{section}.{key.replace('-', '_')}"


def serve(
    context: typer.Context,
    log: Annotated[
        str | None,
        argument("LOG", "A file, postgres://… or memory:, created if missing. Else HEADWATER_LOG, or events.db."),
    ] = None,
    host: Annotated[str | None, option("HOST", "The address to listen on; 127.0.0.1 by default.", **_RUNNING)] = None,
    port: Annotated[str | None, option("PORT", "The port; 8765 by default. 0 picks a free one.", **_RUNNING)] = None,
    config: ConfigFile = None,
    profile: ProfileName = None,
    tokens: Annotated[
        str | None, option("FILE", "Require a token of this file; `headwater token create` makes one.", **_ACCESS)
    ] = None,
    allow_anonymous: Annotated[
        bool | None, flag("Require no token: every client that can connect may do everything.", **_ACCESS)
    ] = None,
    origins: Annotated[
        list[str] | None,
        option(
            "ORIGIN",
            "Web pages of this origin may connect, like https://shop.example; *: any. Repeatable.",
            "--origin",
            "--origins",
            **_ACCESS,
        ),
    ] = None,
    tls_certificate: Annotated[
        str | None, option("FILE", "A PEM file; the server then speaks wss:// and https://.", **_ACCESS)
    ] = None,
    tls_key: Annotated[
        str | None, option("FILE", "The key, if it is not in the certificate's file.", **_ACCESS)
    ] = None,
    tls_client_ca: Annotated[
        str | None, option("FILE", "Require client certificates of these authorities.", **_ACCESS)
    ] = None,
    metrics_need_token: Annotated[
        bool | None,
        flag(
            "Whether /metrics requires a token; by default it does if there are tokens.",
            "--metrics-need-token/--metrics-for-all",
            **_ACCESS,
        ),
    ] = None,
    audit: Annotated[
        str | None,
        option("FILE", "Append refusals and changes, with their client, to this file as JSON lines.", **_ACCESS),
    ] = None,
    shutdown_timeout: Annotated[
        str | None, option("SPAN", "How long running requests may take to finish; 10s by default.", **_RUNNING)
    ] = None,
    console_pages: Annotated[
        bool | None, flag("Serve the console for browsers at /.", "--console/--no-console", **_RUNNING)
    ] = None,
    lake: Annotated[
        str | None, option("DIR|URL", "The lake that the console shows.", envvar="HEADWATER_LAKE", **_RUNNING)
    ] = None,
    tracing: Annotated[bool | None, flag("Record OpenTelemetry spans.", **_RUNNING)] = None,
    log_format: Annotated[str | None, option("FORMAT", "text, or json: one object a line.", **_LOGGING)] = None,
    log_level: Annotated[str | None, option("LEVEL", "debug, info, warning or error.", **_LOGGING)] = None,
    as_json: Annotated[bool, flag("The same as --log-format json.", "--json", **_LOGGING)] = False,
    demo: Annotated[bool, flag("Serve a demo: a log of its own with publishers and consumers.")] = False,
) -> None:
    """Serve a log: JSON-RPC over WebSocket, metrics and health, on one port.

    [dim]For this machine:[/]  headwater serve events.db
    [dim]For others:[/]        headwater serve --host 0.0.0.0 --tokens headwater.tokens
    [dim]Sample traffic:[/]    headwater serve --demo

    Clients use ws://HOST:PORT in place of the file.
    SQLite databases that `headwater sync` pushes are stored in LOG-replicas,
    or in --replicas-directory.

    Every setting of headwater.toml is a flag too, like --limits-connections 100
    or --log-durability relaxed; `headwater config show` lists them. Ctrl-C or
    SIGTERM stops the server in order, with exit code 0; a second one at once.
    """
    flags = {f"server.{name}": value for name, value in context.params.items() if name not in _NO_SETTINGS}
    flags["server.console"] = flags.pop("server.console_pages")
    flags["server.log_format"] = "json" if as_json else log_format
    flags["server.origins"] = tuple(origins) if origins else None
    given = {path: value for path, value in (flags | context.meta.get(_KEPT, {})).items() if value is not None}
    if demo:
        if given.keys() - {"server.host", "server.port", "server.allow_anonymous"}:
            raise InvalidOptionError("--demo brings its own log and settings", next="Give it --host and --port at most")
        from headwater.cli.demo_server import run

        run(given)
        return
    from headwater.settings import load_settings
    from headwater.settings.model import DEFAULT

    try:
        load = partial(load_settings, config=config, profile=profile)
        settings = load(flags=given)
        default = settings.cli.log
        if settings.source_of("server.log") == DEFAULT and default is not None and not is_remote(default):
            settings = load(flags={**given, "server.log": default})
        _Serving(settings).run()
    except InvalidConfigurationError as exc:
        raise InvalidConfigurationError(exc.why, where=exc.where, next=_in_flags(exc.next)) from exc


serve.command_class = SettingsCommand  # type: ignore[attr-defined]


def _in_flags(advice: str) -> str:
    """Advice about settings in terms of flags: `server.tokens` is `--tokens`."""
    return re.sub(r"\bserver\.([a-z_]+)(?: = true)?", lambda found: "--" + found[1].replace("_", "-"), advice)


class _Serving:
    """One run of a server in this process, with its banner and its signals."""

    def __init__(self, settings: Settings) -> None:
        from headwater.server import logging as logs
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
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it has ended well: a late signal must not fail it
        except HeadwaterError as exc:
            if not self._in_json:
                raise
            fields = {"where": exc.where, "next": exc.next}
            logging.getLogger("headwater.server").critical(exc.why, extra=fields)
            raise typer.Exit(exit_code_of(exc)) from None

    def _on_ready(self, server: Server) -> None:
        import asyncio

        loop = asyncio.get_running_loop()
        with contextlib.suppress(NotImplementedError):  # not on every system
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.add_signal_handler(number, self._stop, loop)
        if self._shows_banner:
            show_banner(server, is_new=self._is_new)
            self._handler.setLevel(logging.NOTSET)
        tell_service_manager("READY=1")

    def _stop(self, loop: asyncio.AbstractEventLoop) -> None:
        """Handle a signal: the first one asks the server to stop; a later one interrupts the wait for its clients."""
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
        raise InvalidOptionError("this is a server, not a log", where=log, next="Name a file, like events.db")
    return log != IN_MEMORY and is_file(log) and not os.path.exists(file_of(log))


# --- the banner -----------------------------------------------------------------------------------------------------


EVERYWHERE = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}


def this_command() -> str:
    """How to call `headwater` from here."""
    if shutil.which("headwater"):
        return "headwater"
    script = Path(sys.argv[0])
    if script.name != "headwater":
        return "python -m headwater"
    return min(os.path.relpath(script), os.path.abspath(script), key=len)


def reachable(url: str) -> str:
    """An address to connect to, where the server's own stands for all that the machine has."""
    scheme, _, address = url.partition("://")
    host, _, port = address.rpartition(":")
    return f"{scheme}://{EVERYWHERE.get(host.strip('[]'), host)}:{port}"


def page_of(url: str, path: str) -> str:
    """The same server for a browser: ws:// is http://, wss:// is https://."""
    return url.replace("ws", "http", 1) + path


def show_banner(server: Server, *, is_new: bool) -> None:
    """The log, the addresses, the access, commands to try and how to stop."""
    from headwater.wiring import replicas_directory

    settings = server.settings.server
    url = reachable(server.url)
    command = this_command() if settings.tokens is None else f"HEADWATER_TOKEN=hw_… {this_command()}"
    what = " (gone when this ends)" if settings.log == IN_MEMORY else " (a new log)" if is_new else ""
    title = Text(f"Headwater {headwater.__version__} serves ", "bold")
    title.append(settings.log, "bold cyan").append(what, "dim")
    others = "  and every other address of this machine" if settings.host in EVERYWHERE else ""
    rows: list[tuple[str, str | Text]] = [
        ("address", Text.assemble((url, "cyan"), (others, "dim"))),
        ("open to", _access_text(server)),
        *([("console", page_of(url, "/"))] if settings.console else []),
        ("metrics", page_of(url, "/metrics")),
        ("health", page_of(url, "/readyz")),
        ("publish", f"""{command} publish {url} orders.new '{{"order": 17}}'"""),
        ("watch", f"{command} tail {url} -f"),
        *([("back up", f"{command} sync app.db {url}/shop/app.db")] if replicas_directory(server.settings) else []),
        ("stop", "Ctrl-C"),
    ]
    for line in (Text(), title, *(Text.assemble((f"  {name:<9}", "dim"), value) for name, value in rows), Text()):
        say(line, sys.stderr)


def _access_text(server: Server) -> Text:
    from headwater.server.auth import TokenFile
    from headwater.settings.model import is_loopback

    settings = server.settings.server
    if settings.tokens is not None:
        known = len(TokenFile(settings.tokens).list())
        make_one = f"{this_command()} token create --tokens {settings.tokens} --publish '>' --read '>' --consume '*'"
        if not known:
            return Text(f"no client yet; make a token: {make_one}", "yellow")
        return Text(f"clients with a token; {settings.tokens} has {known:,}")
    if is_loopback(settings.host):
        return Text("every client on this machine, without a token")
    return Text("every client that can reach it, without a token", "yellow")


# --- systemd ----------------------------------------------------------------------------------------------------------


SOCKET_VARIABLE = "NOTIFY_SOCKET"


def tell_service_manager(state: Literal["READY=1", "STOPPING=1"]) -> None:
    address = os.environ.get(SOCKET_VARIABLE, "")
    if not address:
        return
    if address.startswith("@"):  # a name that is no file
        address = "\0" + address[1:]
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as out:
        out.sendto(state.encode(), address)
