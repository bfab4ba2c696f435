"""`headwater forward`: copies of a log's messages to another system, for as long as it runs."""

from __future__ import annotations

import hashlib
import os
import re
import sys
from datetime import datetime
from typing import Annotated, Any
from urllib.parse import parse_qsl, unquote

import typer
from rich.status import Status

import headwater
from headwater.broker.forwarding import Forwarder, ForwarderStatus
from headwater.broker.forwarding.forwarder import BACKOFF_S, BATCH, BATCH_MAX
from headwater.broker.options import Start
from headwater.cli.opening import REMOTE, AsJson, existing_log, is_file, takes_log
from headwater.cli.output import console, count, note, printable, say, some, write_document
from headwater.cli.reading import EVERYTHING, Dialect, Where
from headwater.cli.stopping import FINDING, INTERRUPTED, Stop
from headwater.cli.times import SPAN_HELP, TIME_HELP, parse_span, parse_start
from headwater.delivery.breaker import BreakerPolicy
from headwater.errors import Closed, InvalidOption
from headwater.transports.opening import cut_wraps, shown_log, without_password

LOOK_S = 0.2
ONCE_FAILURES = 3  # whoever wants it once is not kept waiting for a target that is away
ONCE_BACKOFF_S = 0.5
ID_CHARS_MAX = 128

DIGEST_CHARS = 8

_SCHEME = re.compile(r"([a-z][a-z0-9+.-]+):(.*)", re.IGNORECASE | re.DOTALL)
_LOG_URLS = (*REMOTE, "postgres://", "postgresql://", "sqlite:", "memory:")
_TELLS_TARGETS_APART = ("stream", "stream_per_topic", "prefix", "table", "endpoint", "schema", "db")


@takes_log
def forward(
    path: Annotated[
        str,
        typer.Argument(metavar="SRC", help="The log: a file, a database or a server.", show_default=False),
    ],
    target: Annotated[
        str,
        typer.Argument(
            metavar="DST",
            help="Where copies go: redis://host/0, s3://bucket/prefix, file:///copy.jsonl, headwater:other.db, …",
            show_default=False,
        ),
    ],
    topics: Annotated[
        str, typer.Option("--topics", metavar="PATTERN", help="Which messages: orders.new, orders.*, orders.>")
    ] = EVERYTHING,
    id: Annotated[
        str | None,
        typer.Option("--id", help="The subscription's name; made of DST if not given.", show_default=False),
    ] = None,
    batch: Annotated[
        int, typer.Option("--batch", metavar="N", min=1, max=BATCH_MAX, help="Send up to N at a time.")
    ] = BATCH,
    wait: Annotated[
        str, typer.Option("--wait", metavar="SPAN", help=f"How long a batch may wait for more: {SPAN_HELP}.")
    ] = "5s",
    once: Annotated[bool, typer.Option("--once", help="End when all is forwarded that is there now.")] = False,
    from_: Annotated[
        str,
        typer.Option("--from", metavar="START", help=f"Where a new one begins: first, new, a seq, a time {TIME_HELP}."),
    ] = "first",
    where: Where = None,
    dialect: Dialect = "nats",
    target_token: Annotated[
        str | None,
        typer.Option(
            "--target-token",
            metavar="TOKEN",
            help="For a DST like ws://host:8765; else HEADWATER_TOKEN.",
            show_default=False,
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Forward messages to another system, and go on where the last run ended.

    [dim]To Redis:[/]   headwater forward events.db redis://localhost/0 --topics 'orders.>'
    [dim]To files:[/]   headwater forward events.db file:///var/copies/events.jsonl
    [dim]Once:[/]       headwater forward events.db headwater:copy.db --once

    While the target is away, messages wait in the log; nothing is lost, and
    what it has already it knows by its id, if it can. One that it refuses
    while others get through goes to the dead letters. Ctrl-C or SIGTERM ends
    it after the batch in hand.
    """
    name = id or default_id(target)
    start = _start(from_)
    span = parse_span(wait, "--wait")
    with existing_log(path) as log, Stop() as stop, _Opened(target, target_token) as transport:
        forwarder = Forwarder(
            log,
            transport,
            id=name,
            pattern=topics,
            batch=batch,
            wait=span,
            start=start,
            where=where,
            dialect=dialect,
            backoff=ONCE_BACKOFF_S if once else BACKOFF_S,
            breaker=BreakerPolicy(failures=ONCE_FAILURES) if once else None,
        )
        source = str(path) if is_file(path) else shown_log(path)
        note(f"forwarding {topics} of {source} to {transport.name} as {name}")
        forwarder.start(once=once)
        try:
            _run(forwarder, stop)
        except Closed as exc:
            if isinstance(exc.__cause__, BrokenPipeError):  # `| head`: whoever reads has enough
                raise exc.__cause__ from None
            raise
        done = forwarder.status()
    _report(done, as_json=as_json, beside_copies=target.startswith("stdout:"))
    if once and stop.requested:
        raise typer.Exit(INTERRUPTED)
    if once and (done.lag or done.dead):
        raise typer.Exit(FINDING)


def _run(forwarder: Forwarder, stop: Stop) -> None:
    try:
        with _Line(forwarder) as line:
            while not stop.requested and not forwarder.join(LOOK_S):
                line.show()
    finally:
        forwarder.stop()


def default_id(target: str) -> str:
    """Names a subscription after its target, so that the next run goes on with it, whatever directory it begins in and
    however it is tuned. Where the name alone would not tell two targets apart, a digest does. No secrets."""
    text = f"forward-{_identity(cut_wraps(target)[0])}"
    name = re.sub("[^A-Za-z0-9._:@/-]+", "-", text)
    if name == text and len(name) <= ID_CHARS_MAX:
        return name
    digest = hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()[:DIGEST_CHARS]
    return f"{name[: ID_CHARS_MAX - DIGEST_CHARS - 1]}-{digest}"


def _identity(url: str) -> str:
    """What of a url says which target it is."""
    scheme, rest = (found[1].lower(), found[2]) if (found := _SCHEME.fullmatch(url)) else ("", url)
    if scheme == "headwater":
        log = rest if rest.startswith(_LOG_URLS) else f"sqlite:{rest}"  # else a path, which may hold any character
        return f"headwater:{_identity(log).removeprefix('sqlite:')}"
    if scheme in ("", "file"):
        path = unquote(rest.partition("?")[0].removeprefix("//").removeprefix("localhost")) if scheme else rest
        return f"file:{os.path.abspath(path)}"
    if scheme == "sqlite":
        return f"sqlite:{os.path.abspath(rest.removeprefix('///'))}"
    place, _, query = without_password(url).partition("?")
    told = sorted(
        f"{name}:{without_password(value)}" for name, value in parse_qsl(query) if name in _TELLS_TARGETS_APART
    )
    if place == f"{scheme}:":  # stdout: and memory: have no place beside their kind
        return "-".join([scheme, *told])
    return "-".join([place.replace("://", ":", 1).replace(":@", ":", 1), *told])


def _start(text: str) -> Start:
    start = parse_start(text, "--from", datetime.now().astimezone())
    # `--from 7` forwards message 7, as it shows it in tail; the library begins after the seq it is given.
    return max(0, start - 1) if isinstance(start, int) else start


class _Opened:
    """The target, for as long as the command runs."""

    def __init__(self, target: str, token: str | None) -> None:
        options: dict[str, Any] = {}
        if token is not None:
            if not target.startswith(REMOTE):
                raise InvalidOption("--target-token is for a server", where="DST", next="Name it like ws://host:8765")
            options["token"] = token
        self._transport = headwater.open_transport(target, **options)

    def __enter__(self) -> Any:
        return self._transport

    def __exit__(self, *exc: object) -> None:
        self._transport.close()


class _Line:
    """On a terminal a line that shows how it goes; elsewhere a line for each change. Errors are told by warnings."""

    def __init__(self, forwarder: Forwarder) -> None:
        self._forwarder = forwarder
        self._state = "running"
        screen = console(to_stderr=True)
        self._status = Status("", console=screen) if sys.stderr.isatty() else None

    def __enter__(self) -> _Line:
        if self._status is not None:
            self._status.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._status is not None:
            self._status.stop()

    def show(self) -> None:
        status = self._forwarder.status()
        if self._status is not None:
            self._status.update(printable(_words(status)))
        elif status.state not in (self._state, "stopped"):
            note(_words(status))
            self._state = status.state


def _words(status: ForwarderStatus) -> str:
    words = {"waiting": f"waiting: another process forwards as {status.id}", "retrying": "waiting for the target"}
    parts = [
        words.get(status.state, "forwarding"),
        f"{count(status.forwarded)} forwarded",
        f"{count(status.lag or 0)} left",
    ]
    if status.dead:
        parts.append(some(status.dead, "dead letter"))
    return " · ".join(parts)


def _report(done: ForwarderStatus, *, as_json: bool, beside_copies: bool) -> None:
    if as_json and not beside_copies:
        write_document(done)
        return
    text = f"forwarded {some(done.forwarded, 'message')} to {done.target}"
    if done.dead:
        text += f"; {some(done.dead, 'message')} refused there went to the dead letters"
    if done.lag:
        text += f"; {count(done.lag)} left"
    (note if beside_copies else say)(text)
    if done.dead:
        note(f"headwater dlq ls SRC --subscription {done.id} shows them")
