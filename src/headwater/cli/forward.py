"""`headwater forward`: copies messages of a log to another system, for as long as it runs."""

from __future__ import annotations

import hashlib
import os
import re
from contextlib import closing
from typing import TYPE_CHECKING, Annotated
from urllib.parse import parse_qsl, unquote

import typer

import headwater
from headwater.cli.arguments import REMOTE, START_HELP, AsJson, LogName, existing_log, is_file, parse_start
from headwater.cli.messages import EVERYTHING, Dialect, Where
from headwater.cli.output import StatusLine, count, note, say, write_document
from headwater.cli.parameters import argument, flag, option
from headwater.cli.stopping import FINDING, INTERRUPTED, Stop
from headwater.errors import ClosedError, InvalidOptionError
from headwater.formats import DURATION_HELP, parse_duration, plural, redact_url

if TYPE_CHECKING:
    from headwater.api.forwarder import Forwarder, ForwarderStatus
    from headwater.transports.base import BaseTransport

LOOK_S = 0.2
ONCE_FAILURES = 3  # with --once, a target that is away ends it soon
ONCE_BACKOFF_S = 0.5
ID_CHARS_MAX = 128

DIGEST_CHARS = 8

_SCHEME = re.compile(r"([a-z][a-z0-9+.-]+):(.*)", re.IGNORECASE | re.DOTALL)
_LOG_URLS = (*REMOTE, "postgres://", "postgresql://", "sqlite:", "memory:")
_TELLS_TARGETS_APART = ("stream", "stream_per_topic", "prefix", "table", "endpoint", "schema", "db")


def forward(
    path: LogName,
    target: Annotated[
        str,
        argument(
            "TARGET", "Where copies go: redis://host/0, s3://bucket/prefix, file:///copy.jsonl, headwater:other.db, …"
        ),
    ],
    topics: Annotated[str, option("PATTERN", "Which messages: orders.new, orders.*, orders.>")] = EVERYTHING,
    id: Annotated[str | None, option("ID", "The subscription's name; by default derived from TARGET.")] = None,
    batch: Annotated[int, option("N", "Send up to N at a time.", min=1, max=5_000)] = 100,
    wait: Annotated[str, option("SPAN", f"How long a batch may wait for more: {DURATION_HELP}.")] = "5s",
    once: Annotated[bool, flag("Exit when all messages stored at the start are forwarded.")] = False,
    start: Annotated[str, option("START", f"Where a new subscription begins: {START_HELP}.")] = "first",
    where: Where = None,
    dialect: Dialect = "nats",
    target_token: Annotated[
        str | None, option("TOKEN", "For a TARGET like ws://host:8765. Else HEADWATER_TOKEN.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Forward messages to another system; the next run continues where this one ended.

    [dim]To Redis:[/]   headwater forward events.db redis://localhost/0
    [dim]To files:[/]   headwater forward events.db file:///var/copies/events.jsonl
    [dim]Once:[/]       headwater forward events.db headwater:copy.db --once

    While the target is unreachable, messages wait in the log. A target that
    recognises ids stores each message once. A message that the target refuses
    while it accepts others becomes a dead letter. Ctrl-C or SIGTERM stops the
    command after the current batch.
    """
    from headwater.api.forwarder import BACKOFF_S, Forwarder
    from headwater.delivery.circuit import BreakerPolicy

    name = id or default_id(target)
    begin = parse_start(start)
    span = parse_duration(wait, "--wait")
    with existing_log(path) as log, Stop() as stop, closing(_open_target(target, target_token)) as transport:
        forwarder = Forwarder(
            log,
            transport,
            id=name,
            pattern=topics,
            batch=batch,
            wait=span,
            start=begin,
            where=where,
            dialect=dialect,
            backoff=ONCE_BACKOFF_S if once else BACKOFF_S,
            breaker=BreakerPolicy(failures=ONCE_FAILURES) if once else None,
        )
        source = str(path) if is_file(path) else redact_url(path, keep=("schema",))
        note(f"forwarding {topics} of {source} to {transport.name} as {name}")
        forwarder.start(once=once)
        try:
            _run(forwarder, stop)
        except ClosedError as exc:
            if isinstance(exc.__cause__, BrokenPipeError):  # the reader has ended, as `| head` does
                raise exc.__cause__ from None
            raise
        done = forwarder.status()
    _report(done, as_json=as_json, beside_copies=target.startswith("stdout:"))
    if once and stop.requested:
        raise typer.Exit(INTERRUPTED)
    if once and (done.lag or done.dead):
        raise typer.Exit(FINDING)


def _run(forwarder: Forwarder, stop: Stop) -> None:
    """Forward until a stop. On a terminal a line shows the progress; elsewhere there is a note for each change.
    Warnings name errors."""
    state = "running"
    try:
        with StatusLine() as line:
            while not stop.requested and not forwarder.join(LOOK_S):
                status = forwarder.status()
                line.show(_words(status))
                if not line.is_shown and status.state not in (state, "stopped"):
                    note(_words(status))
                    state = status.state
    finally:
        forwarder.stop()


def default_id(target: str) -> str:
    """Names the subscription after its target, so that the next run continues it from any directory and with other
    options. A digest distinguishes targets that the name alone does not. It holds no secrets."""
    from headwater.transports.open import cut_wraps

    text = f"forward-{_identity(cut_wraps(target)[0])}"
    name = re.sub("[^A-Za-z0-9._:@/-]+", "-", text)
    if name == text and len(name) <= ID_CHARS_MAX:
        return name
    digest = hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()[:DIGEST_CHARS]
    return f"{name[: ID_CHARS_MAX - DIGEST_CHARS - 1]}-{digest}"


def _identity(url: str) -> str:
    """The part of a url that identifies the target."""
    scheme, rest = (found[1].lower(), found[2]) if (found := _SCHEME.fullmatch(url)) else ("", url)
    if scheme == "headwater":
        log = rest if rest.startswith(_LOG_URLS) else f"sqlite:{rest}"  # a path may hold any character
        return f"headwater:{_identity(log).removeprefix('sqlite:')}"
    if scheme in ("", "file"):
        path = unquote(rest.partition("?")[0].removeprefix("//").removeprefix("localhost")) if scheme else rest
        return f"file:{os.path.abspath(path)}"
    if scheme == "sqlite":
        return f"sqlite:{os.path.abspath(rest.removeprefix('///'))}"
    place, _, query = redact_url(url, keep=None).partition("?")
    parameters = sorted(
        f"{name}:{redact_url(value, keep=None)}" for name, value in parse_qsl(query) if name in _TELLS_TARGETS_APART
    )
    if place == f"{scheme}:":  # stdout: and memory: are only a scheme
        return "-".join([scheme, *parameters])
    return "-".join([place.replace("://", ":", 1).replace(":@", ":", 1), *parameters])


def _open_target(target: str, token: str | None) -> BaseTransport:
    if token is None:
        return headwater.open_transport(target)
    if not target.startswith(REMOTE):
        raise InvalidOptionError("--target-token is for a server", where="TARGET", next="Name it like ws://host:8765")
    return headwater.open_transport(target, token=token)


def _words(status: ForwarderStatus) -> str:
    words = {"waiting": f"waiting: another process forwards as {status.id}", "retrying": "waiting for the target"}
    parts = [
        words.get(status.state, "forwarding"),
        f"{count(status.forwarded)} forwarded",
        f"{count(status.lag or 0)} left",
    ]
    if status.dead:
        parts.append(plural(status.dead, "dead letter"))
    return " · ".join(parts)


def _report(done: ForwarderStatus, *, as_json: bool, beside_copies: bool) -> None:
    if as_json and not beside_copies:
        write_document(done)
        return
    text = f"forwarded {plural(done.forwarded, 'message')} to {done.target}"
    if done.dead:
        text += f"; {plural(done.dead, 'message')} refused there went to the dead letters"
    if done.lag:
        text += f"; {count(done.lag)} left"
    (note if beside_copies else say)(text)
    if done.dead:
        note(f"headwater dlq ls LOG --subscription {done.id} shows them")
