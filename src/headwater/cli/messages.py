"""`headwater publish`, `import`, `subscribe` and `tail`: messages into a log and out of it."""

from __future__ import annotations

import math
import sys
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

import headwater
from headwater.cli.arguments import (
    START_HELP,
    AsJson,
    LogName,
    existing_log,
    log_or_new_one,
    looks_like_log,
    parse_start,
)
from headwater.cli.output import MessagePrinter, Text, note, show_result
from headwater.cli.parameters import Shared, argument, flag, option
from headwater.cli.stopping import INTERRUPTED, Stop
from headwater.errors import InvalidDataError, InvalidOptionError, LeaseLostError, UnauthorizedError
from headwater.formats import DURATION_HELP, parse_duration

if TYPE_CHECKING:
    from headwater.broker.subscribe import Start


def publish(
    path: LogName,
    topic: Annotated[str | None, argument("TOPIC", "Like orders.new.", offers="topic")] = None,
    data: Annotated[str | None, argument("DATA", "The message, as JSON.")] = None,
    text: Annotated[bool, flag("DATA is plain text, not JSON.")] = False,
    topic_option: Annotated[
        str | None, option("TOPIC", "The same as the argument TOPIC.", "--topic", hidden=True)
    ] = None,
    file: Annotated[str | None, option("FILE", "Read JSON lines from a file, not stdin.")] = None,
    id: Annotated[
        str | None, option("ID", "An id: a second message with this id on the topic is not stored. For one message.")
    ] = None,
    header: Annotated[list[str] | None, option("NAME=VALUE", "A free header; repeatable.", "-H")] = None,
    from_: Annotated[str | None, option("SENDER", "The sender.")] = None,
    to: Annotated[str | None, option("RECEIVER", "The receiver.")] = None,
    reply_to: Annotated[str | None, option("TOPIC", "The topic for answers.")] = None,
    correlation_id: Annotated[str | None, option("ID", "Connects a reply to its request.")] = None,
    type: Annotated[str | None, option("TYPE", "The type of the message, like OrderPlaced.")] = None,
    priority: Annotated[int | None, option("N", "Higher first, for subscriptions ordered by priority.")] = None,
    delay: Annotated[str | None, option("SPAN", f"Deliver it after this delay: {DURATION_HELP}.")] = None,
    ttl: Annotated[str | None, option("SPAN", "Expire it after this long.")] = None,
    as_json: AsJson = False,
) -> None:
    """Publish a message, or many from JSON lines.

    [dim]One:[/]   headwater publish events.db orders.new '{"order": 17}'
    [dim]Many:[/]  headwater publish events.db orders.new < orders.jsonl
    [dim]Copy:[/]  headwater tail a.db --start first --json | headwater publish b.db

    With a TOPIC and no DATA each line is the data of one message. Without a
    TOPIC each line is {"topic": "orders.new", "data": {"order": 17}}, and may
    set the other options too (from, ttl, priority, …).

    Lines are stored in batches of up to 1,000, each all or none. A bad line
    ends the command; the lines before it are published. With exit code 0 all
    messages are on disk.
    """
    if topic is not None and topic_option is not None:
        # With --topic, the place of TOPIC is DATA's.
        if data is not None:
            raise InvalidOptionError("TOPIC is given twice", next="Leave one of them out")
        topic, data = topic_option, topic
    topic = topic if topic is not None else topic_option
    if path and not looks_like_log(path):
        raise _no_log(path, is_topic=data is None and (topic is None or _is_json(topic)))
    if topic is not None:
        from headwater.topics import check_topic

        check_topic(topic)  # before a log is made
    options: dict[str, Any] = {
        "headers": _headers(header or []),
        "from_": from_,
        "to": to,
        "reply_to": reply_to,
        "correlation_id": correlation_id,
        "type": type,
        "priority": priority,
        "delay": None if delay is None else parse_duration(delay, "--delay"),
        "ttl": None if ttl is None else parse_duration(ttl, "--ttl"),
    }
    given = {name: value for name, value in options.items() if value is not None}
    if topic is not None and data is not None:
        if file is not None:
            raise InvalidOptionError("DATA and --file exclude each other", next="Leave one of them out")
        value = data if text else _json_of(data)
        with log_or_new_one(path) as log:
            _publish_one(log, topic, value, given if id is None else {**given, "id": id}, as_json=as_json)
        return
    if id is not None or text:
        raise InvalidOptionError("--id and --text are for one message", next="Give TOPIC and DATA")
    if file is None and sys.stdin.isatty():
        raise InvalidOptionError(
            "there is nothing to publish",
            next="Give TOPIC and DATA, name a --file, or send JSON lines into it: … | headwater publish LOG",
        )
    from headwater.cli.lines import publish_lines

    publish_lines(path, topic, given, file, as_json=as_json)


def _no_log(name: str, *, is_topic: bool) -> InvalidOptionError:
    """The error for a name that no log has yet and that is not one of a file: LOG has been left out, or needs a clearer
    name."""
    if is_topic:
        return InvalidOptionError(
            f"{name} looks like a topic, and no LOG is named",
            next=f"headwater publish events.db {name} '…', or set HEADWATER_LOG",
        )
    return InvalidOptionError(
        f"there is no log {name}, and a new one needs the name of a file", next=f"Name it {name}.db, or ./{name}"
    )


def _publish_one(log: headwater.Log, topic: str, data: Any, options: dict[str, Any], *, as_json: bool) -> None:
    duplicate = False
    if "id" in options:
        from headwater.cli.lines import append

        appended = append(log, [(topic, data, options)])
        [seq], duplicate = appended.seqs, bool(appended.duplicates)
    else:
        seq = log.publish(topic, data, **options)
    again = "  was published before with this id" if duplicate else ""
    text = Text.assemble((str(seq), "bold"), f"  {topic}", (again, "dim"))
    show_result({"seq": seq, "topic": topic, "duplicate": duplicate}, text, as_json=as_json)


def _json_of(data: str) -> Any:
    import msgspec

    try:
        return msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeError) as exc:
        raise InvalidDataError(
            f"DATA is not JSON ({exc})",
            next="""Quote it for JSON and the shell, like '{"order": 17}', or send it as text: --text""",
        ) from exc


def _is_json(text: str) -> bool:
    try:
        _json_of(text)
    except InvalidDataError:
        return False
    return True


def _headers(given: list[str]) -> dict[str, str] | None:
    headers: dict[str, str] = {}
    for each in given:
        name, found, value = each.partition("=")
        if not found or not name:
            raise InvalidOptionError(f"a header is NAME=VALUE, not {each!r}")
        headers[name] = value
    return headers or None


# --- import ----------------------------------------------------------------------------------------------------------


def import_(
    path: LogName,
    file: Annotated[str, argument("FILE", "JSON lines, as tail --json prints them; - is stdin.")],
    name: Annotated[
        str | None,
        option("NAME", "The name of the import's position in the log; by default the first line of the file."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Import messages with their own times from JSON lines, each line once.

    [dim]A file:[/]  headwater import events.db history.jsonl
    [dim]A log:[/]   headwater tail a.db --start first --json | headwater import b.db -

    Each line is {"topic": …, "data": …} and may have published_at, id, from,
    headers and the other fields that tail --json prints. A message keeps its
    published_at and its id, and gets a new seq.

    Run an interrupted import again: it continues where it ended. The log stores
    the position with the messages, so no line is stored twice. A file that has
    grown is continued too. Lines are stored in batches of up to 1,000, each all
    or none; a bad line ends the import, and the error names it.

    Behind a server this needs the rights publish and manage. The position is
    not stored there: lines are recognised by their ids, for as long as the
    server remembers ids (a day, by default).
    """
    from headwater.cli.lines import import_file

    import_file(path, file, name, as_json=as_json)


# --- subscribe and tail -----------------------------------------------------------------------------------------------


EVERYTHING = ">"
LAST = 10  # as tail(1)
TOPICS_NAMED_MAX, TOPICS_COMPARED_MAX = 5, 1_000
STEP_BACK_MIN = 256
STEP_BACK_FACTOR = 8

Pattern = Annotated[str, argument("PATTERN", "Topics: orders.new, orders.*, orders.>", offers="topic")]
Where = Annotated[str | None, option("FILTER", 'Only messages that fit Headwater\'s filter, like "data.total > 100".')]
Dialect = Annotated[Literal["nats", "amqp"], flag("The wildcards of the pattern: nats has * and >, amqp has * and #.")]


@dataclass
class Selection(Shared):
    """Which messages of those that the pattern matches, by the names of `log.subscribe`."""

    from_: Annotated[list[str] | None, option("SENDER", "Only from this sender; repeatable.")] = None
    to: Annotated[list[str] | None, option("RECEIVER", "Only to this receiver; repeatable.")] = None
    where: Where = None
    dialect: Dialect = "nats"

    def __post_init__(self) -> None:
        self.from_, self.to = self.from_ or None, self.to or None


def subscribe(
    path: LogName,
    id: Annotated[str, argument("ID", "The subscription's name.", offers="subscription")],
    pattern: Pattern,
    mode: Annotated[
        Literal["exclusive", "shared"], flag("One holder at a time, or several that share the work.")
    ] = "exclusive",
    start: Annotated[str, option("START", f"Where a new subscription begins: {START_HELP}.")] = "first",
    count: Annotated[int | None, option("N", "Exit after N messages.", "-n", min=1)] = None,
    follow: Annotated[
        bool, flag("Wait for more messages, or exit when none is left.", "--follow/--no-follow", "-f")
    ] = True,
    ack: Annotated[
        bool, flag("Ack each message after printing it, or release all at the end.", "--ack/--no-ack")
    ] = True,
    batch: Annotated[int, option("N", "Print and ack N at a time: faster.", min=1, max=1_000)] = 1,
    *,
    selection: Selection,
    as_json: AsJson = False,
) -> None:
    """Begin or resume a durable subscription and print its messages.

    [dim]Follow:[/]    headwater subscribe events.db billing 'orders.>'
    [dim]Take five:[/] headwater subscribe events.db billing 'orders.>' --count 5

    Each message is acked when it is printed; the next run continues after it.
    To take a few messages, use --count, not `| head`: messages in the pipe count
    as printed. Ctrl-C releases the subscription.
    """
    options: dict[str, Any] = {"mode": mode, "start": parse_start(start), **vars(selection)}
    printer = MessagePrinter(as_json=as_json)
    with existing_log(path) as log, Stop() as stop, log.subscribe(id, pattern, **options) as subscription:
        _consume(subscription, printer, stop, follow=follow, count=count, batch=batch, ack=ack)
    _end(stop)


def _consume(
    subscription: headwater.Subscription,
    printer: MessagePrinter,
    stop: Stop,
    *,
    follow: bool,
    count: int | None = None,
    batch: int,
    ack: bool = False,
) -> None:
    """Print what a subscription delivers, and ack it once it is printed."""
    left = math.inf if count is None else count
    printed: list[headwater.ReceivedMessage] = []

    def settle() -> None:
        printer.flush()
        if ack and printed:
            try:
                subscription.ack_many(printed)
            except LeaseLostError as exc:  # the reader of our output was slower than the ack wait
                note(f"warning: {exc.why}; the message will be delivered again")
        printed.clear()

    arrived: list[headwater.ReceivedMessage] = []
    while True:
        for message in chain(arrived, subscription.messages(timeout=0.0)):
            printer.show(message)
            printed.append(message)
            left -= 1
            is_done = stop.requested or not left
            if is_done or len(printed) >= batch:
                settle()
            if is_done:
                return
        settle()
        if not follow or stop.requested:
            return
        arrived = stop.wait_for(lambda: subscription.fetch(1, timeout=None)) or []
        if not arrived:
            return


def tail(
    path: LogName,
    pattern: Pattern = EVERYTHING,
    start: Annotated[str | None, option("START", f"Where to begin: {START_HELP}.")] = None,
    last: Annotated[int | None, option("N", "Only the last N; 10 if --start is not given.", "-n", min=0)] = None,
    follow: Annotated[bool, flag("Wait for more; always so with --start new.", "-f")] = False,
    *,
    selection: Selection,
    as_json: AsJson = False,
) -> None:
    """Print messages without a subscription: no acks, no position.

    [dim]The last ten:[/]    headwater tail events.db
    [dim]The last hour:[/]   headwater tail events.db --start -1h
    [dim]New messages:[/]    headwater tail events.db 'orders.>' --start new
    [dim]By content:[/]      headwater tail events.db --where "data.total > 100"

    --where compares fields of the message: data.x, topic, from, to, type,
    headers.x, priority, …; operators: == != < <= > >=, in, contains, starts
    with; and, or, not and parentheses combine comparisons.
    """
    if start is None and last is None:
        last = LAST
    for sender in selection.from_ or ():
        if sender in ("first", "new") or sender.lstrip("-").isdigit():
            note(f"--from {sender} means the sender {sender!r}; a position is --start {sender}")
    begin = position = parse_start(start or "first")
    printer = MessagePrinter(as_json=as_json)
    with existing_log(path) as log, Stop() as stop:
        view = partial(log.subscribe, "tail", pattern, mode="ephemeral", **vars(selection))
        if pattern != EVERYTHING:
            view(start="new").close()  # refuses what may not be read, before a note says that it is not there
            _note_unmatched(log, pattern, selection.dialect)
        if last is not None and position != "new":
            begin = _show_last(log.last_seq(), view, position, last, printer)
        if position == "new" or follow or last is None:
            with view(start=begin) as subscription:
                _consume(subscription, printer, stop, follow=follow or position == "new", batch=100)
    _end(stop)


def _note_unmatched(log: headwater.Log, text: str, dialect: Literal["nats", "amqp"]) -> None:
    """A pattern that no topic matches may be a typo: a note names topics that there are."""
    from difflib import get_close_matches

    from headwater.topics import parse_pattern

    pattern = parse_pattern(text, dialect)
    with suppress(UnauthorizedError):  # a token may have the right to read some topics and not to list all
        names = [found.topic for found in log.topics()]
        if not any(map(pattern.matches, names)):
            nearest = get_close_matches(text, names[:TOPICS_COMPARED_MAX], TOPICS_NAMED_MAX, cutoff=0.0)
            more = ", …" if len(names) > len(nearest) else ""
            there = f"there are: {', '.join(nearest)}{more}" if names else "there are none yet"
            note(f"no topic matches {text}; {there}")


def _show_last(
    end: int, view: Callable[..., headwater.Subscription], start: Start, last: int, printer: MessagePrinter
) -> int:
    """Print the last few messages from `start` to `end`; returns the seq of the first message that was not there
    yet."""
    with view(start=start) as subscription:
        lowest = subscription.resumed_from
    step = max(STEP_BACK_MIN, last)
    found: deque[headwater.ReceivedMessage] = deque(maxlen=last)
    after = end
    # Nearly always the last messages are near the end: look there first, and in longer steps back from it.
    while len(found) < last and after > lowest and last > 0:
        after = max(lowest, after - step)
        step *= STEP_BACK_FACTOR
        found.clear()
        with view(start=after + 1) as subscription:
            for message in subscription.messages(timeout=0.0):
                if message.seq > end:
                    break
                found.append(message)
    for message in found:
        printer.show(message)
    printer.flush()
    return max(end, lowest) + 1


def _end(stop: Stop) -> None:
    if stop.requested:
        raise typer.Exit(INTERRUPTED)
