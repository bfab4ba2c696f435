"""`headwater publish`: one message from the arguments, or many from JSON lines."""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack
from datetime import datetime
from typing import Annotated, Any

import msgspec
import typer
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.text import Text

import headwater
from headwater.cli.lines import Tally, outgoing_reader, publish_batch, read_batches
from headwater.cli.opening import AsJson, LogPath, log_or_new_one, takes_log
from headwater.cli.output import console, note, printable, say, some, write_document
from headwater.cli.stopping import Stop
from headwater.cli.times import SPAN_HELP, parse_span
from headwater.errors import HeadwaterError, InvalidData, InvalidInput, InvalidOption


@takes_log
def publish(
    path: LogPath,
    topic: Annotated[str | None, typer.Argument(metavar="TOPIC", help="Like orders.new.", show_default=False)] = None,
    data: Annotated[str | None, typer.Argument(metavar="DATA", help="The message, as JSON.")] = None,
    text: Annotated[bool, typer.Option("--text", help="DATA is plain text, not JSON.")] = False,
    topic_option: Annotated[
        str | None, typer.Option("--topic", metavar="TOPIC", help="The same as the argument TOPIC.")
    ] = None,
    file: Annotated[
        str | None, typer.Option("--file", "-f", metavar="FILE", help="Read JSON lines from a file, not stdin.")
    ] = None,
    id: Annotated[
        str | None,
        typer.Option("--id", help="Your own id: stored once on its topic. One message only."),
    ] = None,
    header: Annotated[
        list[str] | None, typer.Option("--header", "-H", metavar="NAME=VALUE", help="A free header; repeatable.")
    ] = None,
    from_: Annotated[str | None, typer.Option("--from", help="Who sends it.")] = None,
    to: Annotated[str | None, typer.Option("--to", help="Whom it is for.")] = None,
    reply_to: Annotated[str | None, typer.Option("--reply-to", help="The topic for answers.")] = None,
    correlation_id: Annotated[str | None, typer.Option("--correlation-id", help="What it belongs to.")] = None,
    type: Annotated[str | None, typer.Option("--type", help="What kind of message it is.")] = None,
    priority: Annotated[
        int | None, typer.Option("--priority", help="Higher first, for subscriptions ordered by priority.")
    ] = None,
    delay: Annotated[
        str | None, typer.Option("--delay", metavar="SPAN", help=f"Deliver it so much later: {SPAN_HELP}.")
    ] = None,
    ttl: Annotated[str | None, typer.Option("--ttl", metavar="SPAN", help="It is worthless after so long.")] = None,
    as_json: AsJson = False,
) -> None:
    """Publish a message, or many from JSON lines.

    [dim]One:[/]   headwater publish events.db orders.new '{"order": 17}'
    [dim]Many:[/]  headwater publish events.db orders.new < orders.jsonl
    [dim]Copy:[/]  headwater tail a.db --from first --json | headwater publish b.db

    With a TOPIC and no DATA each line is the data of one message. Without a
    TOPIC each line is {"topic": "orders.new", "data": {"order": 17}}, and may
    set the other options too (from, ttl, priority, …).

    Lines go in batches of up to 1,000, each all or none. A bad line stops it;
    what stands before it is published. When the command ends with 0,
    everything is on disk.
    """
    if topic is not None and topic_option is not None:
        # With --topic, the place of TOPIC is DATA's.
        if data is not None:
            raise InvalidOption("TOPIC is given twice", next="Leave one of them out")
        topic, data = topic_option, topic
    topic = topic if topic is not None else topic_option
    options: dict[str, Any] = {
        "headers": _headers(header or []),
        "from_": from_,
        "to": to,
        "reply_to": reply_to,
        "correlation_id": correlation_id,
        "type": type,
        "priority": priority,
        "delay": None if delay is None else parse_span(delay, "--delay"),
        "ttl": None if ttl is None else parse_span(ttl, "--ttl"),
    }
    given = {name: value for name, value in options.items() if value is not None}
    if topic is not None and data is not None:
        if file is not None:
            raise InvalidOption("DATA and --file exclude each other", next="Leave one of them out")
        value = data if text else _json_of(data)
        with log_or_new_one(path) as log:
            _publish_one(log, topic, value, given if id is None else {**given, "id": id}, as_json=as_json)
        return
    if id is not None or text:
        raise InvalidOption("--id and --text are for one message", next="Give TOPIC and DATA")
    if file is None and sys.stdin.isatty():
        raise InvalidOption(
            "there is nothing to publish",
            next="Give TOPIC and DATA, name a --file, or send JSON lines into it: … | headwater publish LOG",
        )
    _publish_lines(path, topic, given, file, as_json=as_json)


def _publish_one(log: headwater.Log, topic: str, data: Any, options: dict[str, Any], *, as_json: bool) -> None:
    last_seq = log.last_seq()
    seq = log.publish(topic, data, **options)
    repeated = seq <= last_seq
    if as_json:
        write_document({"seq": seq, "topic": topic, "repeated": repeated})
    else:
        again = "  was published before with this id" if repeated else ""
        say(Text.assemble((str(seq), "bold"), f"  {printable(topic)}", (again, "dim")))


def _publish_lines(path: str, topic: str | None, given: dict[str, Any], file: str | None, *, as_json: bool) -> None:
    outgoing_of = outgoing_reader(topic, given, datetime.now().astimezone())
    with ExitStack() as stack:
        source = sys.stdin.fileno() if file is None else stack.enter_context(_opened_file(file)).fileno()
        log = stack.enter_context(log_or_new_one(path))
        tally = Tally(known=log.last_seq())
        stop = stack.enter_context(Stop())
        progress = stack.enter_context(_Progress(os.fstat(source).st_size if file else 0))
        batches = read_batches(source, progress.read)
        try:
            while (lines := stop.wait_for(lambda: next(batches, None))) is not None:
                publish_batch(log, lines, outgoing_of, tally)
                progress.published(tally.published + tally.repeated)
        except HeadwaterError as exc:
            raise _told_how_far(exc, tally) from exc
    if as_json:
        write_document(tally.to_json())
    else:
        _say_tally(tally)
    if stop.requested:
        note(f"interrupted after line {tally.through_line}; the lines up to it are published")
        raise typer.Exit(130)


def _say_tally(tally: Tally) -> None:
    seqs = "" if tally.first_seq is None else f"  seq {tally.first_seq} to {tally.last_seq}"
    again = "" if not tally.repeated else f"  {some(tally.repeated, 'id')} known before"
    say(Text.assemble((f"published {some(tally.published, 'message')}", "green"), (seqs + again, "dim")))


def _told_how_far(exc: HeadwaterError, tally: Tally) -> HeadwaterError:
    done = tally.published + tally.repeated
    if isinstance(exc, InvalidInput):
        so_far = f"Published before it: {some(done, 'message')}. Mend the line and go on from it"
    else:
        so_far = f"Published: {some(done, 'message')}, through line {tally.through_line}. Go on from the line after it"
    return type(exc)(exc.why, where=exc.where, next=f"{exc.next}. {so_far}" if exc.next else so_far)


class _Progress:
    """A bar on a terminal, nothing elsewhere: by bytes if the size is known, else a count."""

    def __init__(self, total_bytes: int) -> None:
        shown = sys.stderr.isatty()
        columns = [BarColumn(), TaskProgressColumn()] if total_bytes else [MofNCompleteColumn()]
        self._bar = Progress(
            TextColumn("{task.description}"),
            *columns,
            TimeElapsedColumn(),
            console=console(to_stderr=True),
            transient=True,
            disable=not shown,
        )
        self._by_bytes = bool(total_bytes)
        self._task = self._bar.add_task("publishing", total=total_bytes or None)

    def read(self, size: int) -> None:
        if self._by_bytes:
            self._bar.advance(self._task, size)

    def published(self, messages: int) -> None:
        self._bar.update(self._task, description=some(messages, "message"))
        if not self._by_bytes:
            self._bar.update(self._task, completed=messages)

    def __enter__(self) -> _Progress:
        self._bar.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._bar.stop()


def _opened_file(file: str) -> Any:
    try:
        return open(file, "rb", buffering=0)
    except OSError as exc:
        raise InvalidOption(f"cannot be read ({exc.strerror})", where=file, next="Check the name after --file") from exc


def _json_of(data: str) -> Any:
    try:
        return msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeError) as exc:
        raise InvalidData(
            f"DATA is not JSON ({exc})",
            next="""Quote it for JSON and the shell, like '{"order": 17}', or send it as text: --text""",
        ) from exc


def _headers(given: list[str]) -> dict[str, str] | None:
    headers: dict[str, str] = {}
    for each in given:
        name, found, value = each.partition("=")
        if not found or not name:
            raise InvalidOption(f"a header is NAME=VALUE, not {each!r}")
        headers[name] = value
    return headers or None
