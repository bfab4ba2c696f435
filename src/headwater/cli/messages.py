"""`headwater publish`, `import`, `subscribe` and `tail`: messages into a log and out of it."""

from __future__ import annotations

import os
import select
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from itertools import chain
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import typer

import headwater
from headwater.cli.arguments import (
    START_HELP,
    AsJson,
    LogName,
    existing_log,
    is_new,
    log_or_new_one,
    looks_like_log,
    parse_start,
)
from headwater.cli.output import MessagePrinter, PublishBar, Text, note, printable, say, write_document
from headwater.cli.parameters import argument, flag, option
from headwater.cli.stopping import Stop
from headwater.errors import (
    HeadwaterError,
    InvalidDataError,
    InvalidInputError,
    InvalidOptionError,
    LeaseLostError,
    TooLargeError,
    UnauthorizedError,
)
from headwater.formats import DURATION_HELP, parse_duration, parse_time, plural

if TYPE_CHECKING:
    from headwater.broker.publish import Outgoing
    from headwater.broker.subscribe import Start, SubscribeOptions
    from headwater.ports.records import Appended


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
        str | None, option("ID", "Your own id: a second message with it on the topic is not stored. For one message.")
    ] = None,
    header: Annotated[list[str] | None, option("NAME=VALUE", "A free header; repeatable.", "-H")] = None,
    from_: Annotated[str | None, option("SENDER", "The sender.")] = None,
    to: Annotated[str | None, option("RECEIVER", "The receiver.")] = None,
    reply_to: Annotated[str | None, option("TOPIC", "The topic for answers.")] = None,
    correlation_id: Annotated[str | None, option("ID", "Connects a reply to its request.")] = None,
    type: Annotated[str | None, option("TYPE", "The type of the message, like OrderPlaced.")] = None,
    priority: Annotated[int | None, option("N", "Higher first, for subscriptions ordered by priority.")] = None,
    delay: Annotated[str | None, option("SPAN", f"Deliver it this much later: {DURATION_HELP}.")] = None,
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
    ends the command; the lines before it are published. When the command ends
    with 0, everything is on disk.
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
    _publish_lines(path, topic, given, file, as_json=as_json)


def _no_log(name: str, *, is_topic: bool) -> InvalidOptionError:
    """For a name that no log has yet and that is not one of a file: LOG has been left out, or needs a clearer name."""
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
        appended = _append(log, [(topic, data, options)])
        [seq], duplicate = appended.seqs, bool(appended.duplicates)
    else:
        seq = log.publish(topic, data, **options)
    if as_json:
        write_document({"seq": seq, "topic": topic, "duplicate": duplicate})
    else:
        again = "  was published before with this id" if duplicate else ""
        say(Text.assemble((str(seq), "bold"), f"  {printable(topic)}", (again, "dim")))


def _append(log: headwater.Log, messages: Sequence[Outgoing]) -> Appended:
    """What the log answers to a publish reports duplicates: asking for its last seq would take the right to read."""
    from headwater.broker.flow import run_blocking

    return run_blocking(log._core.append(messages))


def _publish_lines(path: str, topic: str | None, given: dict[str, Any], file: str | None, *, as_json: bool) -> None:
    outgoing_of = outgoing_reader(topic, given, datetime.now().astimezone())
    with ExitStack() as stack:
        source = sys.stdin.fileno() if file is None else stack.enter_context(_opened_file(file)).fileno()
        stop = stack.enter_context(Stop())
        progress = stack.enter_context(PublishBar(os.fstat(source).st_size if file else 0))
        batches, tally = read_batches(source, progress.read), Tally()
        lines, makes_log = None, is_new(path)
        if makes_log:  # only when there is a message for it
            with _telling_progress(tally):
                lines = stop.wait_for(lambda: next(batches, None))
                if lines is not None:
                    _read_line(lines[0], outgoing_of)
        if lines is not None or not makes_log:
            log = stack.enter_context(log_or_new_one(path))
            with _telling_progress(tally):
                while lines := lines or stop.wait_for(lambda: next(batches, None)):
                    publish_batch(log, lines, outgoing_of, tally)
                    progress.published(tally.published + tally.duplicates)
                    lines = None
    if as_json:
        write_document(tally.to_json())
    else:
        _show_tally(tally)
    if stop.requested:
        note(f"interrupted after line {tally.through_line}; the lines up to it are published")
        raise typer.Exit(130)


def _show_tally(tally: Tally) -> None:
    seqs = "" if tally.first_seq is None else f"  seq {tally.first_seq} to {tally.last_seq}"
    again = "" if not tally.duplicates else f"  {plural(tally.duplicates, 'id')} known before"
    say(Text.assemble((f"published {plural(tally.published, 'message')}", "green"), (seqs + again, "dim")))


@contextmanager
def _telling_progress(tally: Tally) -> Iterator[None]:
    try:
        yield
    except HeadwaterError as exc:
        raise _with_progress(exc, tally) from exc


def _with_progress(exc: HeadwaterError, tally: Tally) -> HeadwaterError:
    done = tally.published + tally.duplicates
    if isinstance(exc, InvalidInputError):
        so_far = f"Published before it: {plural(done, 'message')}. Correct the line and continue from it"
    else:
        so_far = (
            f"Published: {plural(done, 'message')}, through line {tally.through_line}. Continue from the line after it"
        )
    return type(exc)(exc.why, where=exc.where, next=f"{exc.next}. {so_far}" if exc.next else so_far)


def _opened_file(file: str) -> Any:
    try:
        return open(file, "rb", buffering=0)
    except OSError as exc:
        raise InvalidOptionError(
            f"cannot be read ({exc.strerror})", where=file, next="Check the name after --file"
        ) from exc


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


# --- JSON lines -------------------------------------------------------------------------------------------------------


BATCH = 1_000
LINE_BYTES_MAX = 8 * 1024 * 1024
LINGER_S = 0.02  # a slow sender's lines do not wait for a full batch
READ_BYTES = 256 * 1024

# What `tail --json` prints besides what `publish` takes: copying a log is a pipe from one to the other.
_FOR_READERS = ("seq", "published_at", "size", "attempt")


class Line(NamedTuple):
    number: int
    text: bytes


@dataclass
class Tally:
    """What has been published so far."""

    published: int = 0
    duplicates: int = 0
    first_seq: int | None = None
    last_seq: int | None = None
    through_line: int = 0

    def add(self, appended: Appended, has_id: Sequence[bool], through_line: int) -> None:
        for at, seq in enumerate(appended.seqs):
            # Without an id it is new: the answer was lost, and the client sent it again.
            if at in appended.duplicates and has_id[at]:
                self.duplicates += 1
                continue
            self.last_seq = seq
            self.first_seq = self.first_seq or seq
            self.published += 1
        self.through_line = through_line

    def to_json(self) -> dict[str, Any]:
        return {
            "published": self.published,
            "duplicates": self.duplicates,
            "first_seq": self.first_seq,
            "last_seq": self.last_seq,
            "lines": self.through_line,
        }


def read_batches(descriptor: int, on_bytes: Callable[[int], object]) -> Iterator[list[Line]]:
    """Lines that are not blank, as many as are there, up to a batch; waits only when it has none."""
    number, rest, lines = 0, b"", list[Line]()
    while True:
        if len(lines) >= BATCH:
            yield lines[:BATCH]
            del lines[:BATCH]
            continue
        if lines and not select.select([descriptor], [], [], LINGER_S)[0]:
            yield lines
            lines = []
        chunk = os.read(descriptor, READ_BYTES)
        on_bytes(len(chunk))
        *whole, rest = (rest + chunk).split(b"\n") if chunk else [rest, b""]
        for text in whole:
            number += 1
            if text.strip():
                lines.append(Line(number, text))
        if len(rest) > LINE_BYTES_MAX:
            raise TooLargeError(f"longer than {LINE_BYTES_MAX:,} bytes", where=f"line {number + 1}", next="Split it")
        if not chunk:
            while lines:
                yield lines[:BATCH]
                del lines[:BATCH]
            return


def publish_batch(
    log: headwater.Log, lines: list[Line], outgoing_of: Callable[[bytes], Mapping[str, Any]], tally: Tally
) -> None:
    """Publish all of them in one transaction. If one is bad, those before it are published and the error names it."""
    good: list[Mapping[str, Any]] = []
    bad: InvalidInputError | None = None
    for line in lines:
        try:
            good.append(_read_line(line, outgoing_of))
        except InvalidInputError as exc:
            bad = exc
            break
    _publish_good(log, good, lines, tally)
    if bad is not None:
        raise bad


def _read_line(line: Line, outgoing_of: Callable[[bytes], Mapping[str, Any]]) -> Mapping[str, Any]:
    try:
        return outgoing_of(line.text)
    except InvalidInputError as exc:
        raise _with_line(line, exc) from exc


def _publish_good(log: headwater.Log, messages: list[Mapping[str, Any]], lines: list[Line], tally: Tally) -> None:
    if not messages:
        return
    try:
        appended = _append(log, messages)
        tally.add(appended, ["id" in message for message in messages], lines[len(messages) - 1].number)
    except InvalidInputError as exc:
        # Nothing of it was published, and one of them is why. Halves find it in a few tries.
        if len(messages) == 1:
            raise _with_line(lines[0], exc) from exc
        half = len(messages) // 2
        _publish_good(log, messages[:half], lines, tally)
        _publish_good(log, messages[half:], lines[half:], tally)


def _with_line(line: Line, exc: InvalidInputError) -> InvalidInputError:
    next = "" if "batch" in exc.next else exc.next  # the batch is our own business
    return type(exc)(exc.why, where=f"line {line.number}", next=next)


def outgoing_reader(
    topic: str | None, defaults: Mapping[str, Any], now: datetime
) -> Callable[[bytes], Mapping[str, Any]]:
    """How to turn a line into a message: with a topic given, the line is the data; without, it says both itself."""
    import msgspec

    decode = msgspec.json.Decoder().decode

    def read(text: bytes) -> Mapping[str, Any]:
        try:
            value = decode(text)
        except (msgspec.DecodeError, UnicodeDecodeError) as exc:
            raise InvalidDataError(f"not JSON ({exc})") from exc
        if topic is not None:
            return {**defaults, "topic": topic, "data": value}
        if not isinstance(value, dict) or "topic" not in value or "data" not in value:
            raise InvalidDataError(
                "not an object with topic and data",
                next='Write {"topic": …, "data": …}, or pass --topic to send each line as data',
            )
        return {**defaults, **_given(value, now)}

    return read


def _given(value: dict[str, Any], now: datetime) -> dict[str, Any]:
    given = {
        name: part for name, part in value.items() if name not in _FOR_READERS and (part is not None or name == "data")
    }
    for name in ("delay", "ttl"):
        if isinstance(given.get(name), str):
            given[name] = parse_duration(given[name], name)
    for name in ("deliver_at", "expires_at"):
        if isinstance(given.get(name), str):
            given[name] = parse_time(given[name], name, now)
    return given


# --- import ----------------------------------------------------------------------------------------------------------


def import_(
    path: LogName,
    file: Annotated[str, argument("FILE", "JSON lines, as tail --json prints them; - is stdin.")],
    name: Annotated[
        str | None, option("NAME", "What the log remembers the file by, instead of its first line.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Import messages with their own times from JSON lines, each line once.

    [dim]A file:[/]  headwater import events.db history.jsonl
    [dim]A log:[/]   headwater tail a.db --start first --json | headwater import b.db -

    Each line is {"topic": …, "data": …} and may have published_at, id, from,
    headers and the other fields that tail --json prints. A message keeps its
    published_at and its id, and gets a new seq.

    An import that was interrupted continues where it ended: run it again. The
    log stores the position with the messages, so no line is stored twice. A
    file that has grown is continued too. A bad line ends the import and is
    named; batches of up to 1,000 lines are stored, each all or none.

    Behind a server this needs the rights publish and manage. The position is
    not stored there: lines are recognised by their ids, for as long as the
    server remembers ids (a day, by default).
    """
    from headwater.cli.importing import import_file

    import_file(path, file, name, as_json=as_json)


# --- subscribe and tail -----------------------------------------------------------------------------------------------


EVERYTHING = ">"
LAST = 10  # as tail(1)
TOPICS_NAMED_MAX, TOPICS_COMPARED_MAX = 5, 1_000
STEP_BACK_MIN = 256
STEP_BACK_FACTOR = 8

Pattern = Annotated[str, argument("PATTERN", "Topics: orders.new, orders.*, orders.>", offers="topic")]
Senders = Annotated[list[str] | None, option("SENDER", "Only from this sender; repeatable.")]
Receivers = Annotated[list[str] | None, option("RECEIVER", "Only to this receiver; repeatable.")]
Where = Annotated[str | None, option("FILTER", 'Only messages that fit Headwater\'s filter, like "data.total > 100".')]
Dialect = Annotated[Literal["nats", "amqp"], flag("How the pattern is spelled: * and > or * and #.")]


def subscribe(
    path: LogName,
    id: Annotated[str, argument("ID", "The subscription's name.", offers="subscription")],
    pattern: Pattern,
    mode: Annotated[
        Literal["exclusive", "shared"], flag("One holder at a time, or several that share the work.")
    ] = "exclusive",
    start: Annotated[str, option("START", f"Where a new one begins: {START_HELP}.")] = "first",
    count: Annotated[int | None, option("N", "End after N messages.", "-n", min=1)] = None,
    follow: Annotated[bool, flag("Wait for more, or end when none is left.", "--follow/--no-follow", "-f")] = True,
    ack: Annotated[bool, flag("Ack after printing, or give all back at the end.", "--ack/--no-ack")] = True,
    batch: Annotated[int, option("N", "Print and ack N at a time: faster.", min=1, max=1_000)] = 1,
    from_: Senders = None,
    to: Receivers = None,
    where: Where = None,
    dialect: Dialect = "nats",
    as_json: AsJson = False,
) -> None:
    """Begin or resume a durable subscription and print its messages.

    [dim]Follow:[/]    headwater subscribe events.db billing 'orders.>'
    [dim]Take five:[/] headwater subscribe events.db billing 'orders.>' --count 5

    Each message is acked when it is printed, so the next run goes on after
    it. Take a few with --count rather than with | head: what is in the pipe
    counts as printed. Ctrl-C releases the subscription.
    """
    options: SubscribeOptions = {
        "mode": mode,
        "start": parse_start(start),
        "dialect": dialect,
        "from_": from_ or None,
        "to": to or None,
        "where": where,
    }
    printer = MessagePrinter(as_json=as_json)
    with existing_log(path) as log, Stop() as stop, log.subscribe(id, pattern, **options) as subscription:
        _Consumer(subscription, printer, stop, count=count, batch=batch, ack=ack).run(follow=follow)
    _end(stop)


class _Consumer:
    """Prints what a subscription delivers, and acks it once it is printed."""

    def __init__(
        self,
        subscription: headwater.Subscription,
        printer: MessagePrinter,
        stop: Stop,
        *,
        count: int | None,
        batch: int = 1,
        ack: bool = False,
    ) -> None:
        self._subscription = subscription
        self._printer = printer
        self._stop = stop
        self._left = count
        self._batch = batch
        self._ack = ack

    def run(self, *, follow: bool) -> None:
        arrived: list[headwater.ReceivedMessage] = []
        while True:
            self._print(chain(arrived, self._subscription.messages(timeout=0.0)))
            if self._done or not follow:
                return
            arrived = self._stop.wait_for(lambda: self._subscription.fetch(1, timeout=None)) or []
            if not arrived:
                return

    @property
    def _done(self) -> bool:
        return self._stop.requested or self._left == 0

    def _print(self, messages: Iterable[headwater.ReceivedMessage]) -> None:
        printed: list[headwater.ReceivedMessage] = []
        for message in messages:
            self._printer.show(message)
            printed.append(message)
            if self._left is not None:
                self._left -= 1
            if len(printed) >= self._batch or self._done:
                self._settle(printed)
                printed = []
            if self._done:
                return
        self._settle(printed)

    def _settle(self, printed: list[headwater.ReceivedMessage]) -> None:
        self._printer.flush()
        if not self._ack or not printed:
            return
        try:
            self._subscription.ack_many(printed)
        except LeaseLostError as exc:  # the reader of our output was slower than the ack wait
            note(f"warning: {exc.why}; it comes again")


class _View(NamedTuple):
    """What `tail` wants to see of a log."""

    pattern: str
    from_: list[str] | None
    to: list[str] | None
    where: str | None
    dialect: Literal["nats", "amqp"]

    def of(self, log: headwater.Log, start: Start) -> headwater.Subscription:
        return log.subscribe(
            "tail",
            self.pattern,
            mode="ephemeral",
            start=start,
            from_=self.from_,
            to=self.to,
            where=self.where,
            dialect=self.dialect,
        )


def tail(
    path: LogName,
    pattern: Pattern = EVERYTHING,
    start: Annotated[str | None, option("START", f"Where to begin: {START_HELP}.")] = None,
    last: Annotated[int | None, option("N", "Only the last N; 10 if --start is not given.", "-n", min=0)] = None,
    follow: Annotated[bool, flag("Wait for more; always so with --start new.", "-f")] = False,
    from_: Senders = None,
    to: Receivers = None,
    where: Where = None,
    dialect: Dialect = "nats",
    as_json: AsJson = False,
) -> None:
    """Print messages without a subscription: nothing is acked, nothing is kept.

    [dim]The last ten:[/]    headwater tail events.db
    [dim]The last hour:[/]   headwater tail events.db --start -1h
    [dim]What comes now:[/]  headwater tail events.db 'orders.>' --start new
    [dim]By content:[/]      headwater tail events.db --where "data.total > 100"

    --where compares fields of the message: data.x, topic, from, to, type,
    headers.x, priority … with == != < <= > >= in contains starts with, joined
    by and, or, not.
    """
    if start is None and last is None:
        last = LAST
    for sender in from_ or ():
        if sender in ("first", "new") or sender.lstrip("-").isdigit():
            note(f"--from {sender} means the sender {sender!r}; a position is --start {sender}")
    begin = position = parse_start(start or "first")
    view = _View(pattern, from_, to, where, dialect)
    printer = MessagePrinter(as_json=as_json)
    with existing_log(path) as log, Stop() as stop:
        _note_unmatched(log, view)
        if last is not None and position != "new":
            begin = _show_last(log, view, position, last, printer)
        if position == "new" or follow or last is None:
            with view.of(log, begin) as subscription:
                _Consumer(subscription, printer, stop, count=None, batch=100).run(follow=follow or position == "new")
    _end(stop)


def _note_unmatched(log: headwater.Log, view: _View) -> None:
    """A pattern that no topic matches may be a typo: a note names topics that there are."""
    if view.pattern == EVERYTHING:
        return
    from difflib import get_close_matches

    from headwater.topics import parse_pattern

    pattern = parse_pattern(view.pattern, view.dialect)
    view.of(log, "new").close()  # refuses what may not be read, before a note says that it is not there
    with suppress(UnauthorizedError):  # a token may have the right to read some topics and not to list all
        names = [found.topic for found in log.topics()]
        if not any(map(pattern.matches, names)):
            nearest = get_close_matches(view.pattern, names[:TOPICS_COMPARED_MAX], TOPICS_NAMED_MAX, cutoff=0.0)
            more = ", …" if len(names) > len(nearest) else ""
            there = f"there are: {', '.join(nearest)}{more}" if names else "there are none yet"
            note(f"no topic matches {view.pattern}; {there}")


def _show_last(log: headwater.Log, view: _View, start: Start, last: int, printer: MessagePrinter) -> int:
    """Print the last few messages at or after `start`; returns the seq of the first message that was not there yet."""
    end = log.last_seq()
    with view.of(log, start) as subscription:
        lowest = subscription.resumed_from
    step = max(STEP_BACK_MIN, last)
    found: deque[headwater.ReceivedMessage] = deque(maxlen=last)
    after = end
    # Nearly always the last messages are near the end: look there first, and in longer steps back from it.
    while len(found) < last and after > lowest and last > 0:
        after = max(lowest, after - step)
        step *= STEP_BACK_FACTOR
        found.clear()
        with view.of(log, after + 1) as subscription:
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
        raise typer.Exit(130)
