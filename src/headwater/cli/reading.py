"""`headwater subscribe` and `headwater tail`: messages as they come."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from datetime import datetime
from itertools import chain
from typing import Annotated, Literal, NamedTuple

import typer

import headwater
from headwater.broker.options import Start, SubscribeOptions
from headwater.cli.opening import AsJson, LogPath, existing_log, log_or_new_one, takes_log
from headwater.cli.output import MessagePrinter, note
from headwater.cli.stopping import Stop
from headwater.cli.times import TIME_HELP, parse_start
from headwater.errors import LeaseLost

EVERYTHING = ">"
LAST = 10  # as tail(1)
STEP_BACK_MIN = 256
STEP_BACK_FACTOR = 8

Where = Annotated[
    str | None, typer.Option("--where", metavar="CONDITION", help="Only messages that fit, like \"from == 'shop'\".")
]
Dialect = Annotated[
    Literal["nats", "amqp"], typer.Option("--dialect", help="How the pattern is spelled: * and > or * and #.")
]


@takes_log
def subscribe(
    path: LogPath,
    id: Annotated[str, typer.Argument(metavar="ID", help="The subscription's name.", show_default=False)],
    pattern: Annotated[
        str, typer.Argument(metavar="PATTERN", help="Topics: orders.new, orders.*, orders.>", show_default=False)
    ],
    mode: Annotated[
        Literal["exclusive", "shared"],
        typer.Option("--mode", help="One holder at a time, or several that share the work."),
    ] = "exclusive",
    start: Annotated[
        str,
        typer.Option("--start", metavar="START", help="Where a new one begins: first, new, after a seq, or a time."),
    ] = "first",
    count: Annotated[
        int | None, typer.Option("--count", "-n", metavar="N", min=1, help="End after N messages.", show_default=False)
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow/--no-follow", help="Wait for more, or end when none is left.")
    ] = True,
    ack: Annotated[
        bool, typer.Option("--ack/--no-ack", help="Ack after printing, or give all back at the end.")
    ] = True,
    batch: Annotated[
        int, typer.Option("--batch", metavar="N", min=1, max=1_000, help="Print and ack N at a time: faster.")
    ] = 1,
    from_: Annotated[
        list[str] | None, typer.Option("--from", help="Only from this sender; repeatable.", show_default=False)
    ] = None,
    to: Annotated[
        list[str] | None, typer.Option("--to", help="Only to this receiver; repeatable.", show_default=False)
    ] = None,
    where: Where = None,
    dialect: Dialect = "nats",
    as_json: AsJson = False,
) -> None:
    """Begin or resume a durable subscription and print its messages.

    [dim]Follow:[/]    headwater subscribe events.db billing 'orders.>'
    [dim]Take five:[/] headwater subscribe events.db billing 'orders.>' --count 5

    Each message is acked when it is printed, so the next run goes on after
    it. Take a few with --count rather than with | head: what is in the pipe
    counts as printed. Ctrl-C gives the subscription back.
    """
    options: SubscribeOptions = {
        "mode": mode,
        "start": parse_start(start, "--start", datetime.now().astimezone()),
        "dialect": dialect,
        "from_": from_ or None,
        "to": to or None,
        "where": where,
    }
    printer = MessagePrinter(as_json=as_json)
    with log_or_new_one(path) as log, Stop() as stop, log.subscribe(id, pattern, **options) as subscription:
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
            self._print(chain(arrived, self._subscription.messages(wait=0.0)))
            if self._done or not follow:
                return
            arrived = self._stop.wait_for(lambda: self._subscription.fetch(1, wait=None)) or []
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
        except LeaseLost as exc:  # the reader of our output was slower than the ack wait
            note(f"warning: {exc.why}; it comes again")


class _View(NamedTuple):
    """What `tail` wants to see of a log."""

    pattern: str
    where: str | None
    dialect: Literal["nats", "amqp"]

    def of(self, log: headwater.Log, start: Start) -> headwater.Subscription:
        return log.subscribe(
            "tail", self.pattern, mode="ephemeral", start=start, where=self.where, dialect=self.dialect
        )


@takes_log
def tail(
    path: LogPath,
    pattern: Annotated[
        str, typer.Argument(metavar="PATTERN", help="Topics: orders.new, orders.*, orders.>")
    ] = EVERYTHING,
    from_: Annotated[
        str | None,
        typer.Option("--from", metavar="START", help=f"first, new, a seq, or a time {TIME_HELP}.", show_default=False),
    ] = None,
    last: Annotated[
        int | None,
        typer.Option("-n", "--last", metavar="N", min=0, help="Only the last N; 10 if --from is not given."),
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Wait for more; always so with --from new.")] = False,
    where: Where = None,
    dialect: Dialect = "nats",
    as_json: AsJson = False,
) -> None:
    """Print messages without a subscription: nothing is acked, nothing is kept.

    [dim]The last ten:[/]    headwater tail events.db
    [dim]The last hour:[/]   headwater tail events.db --from -1h
    [dim]What comes now:[/]  headwater tail events.db 'orders.>' --from new
    [dim]By content:[/]      headwater tail events.db --where "data.total > 100"

    --where compares fields of the message: data.x, topic, from, to, type,
    headers.x, priority … with == != < <= > >= in contains starts with, joined
    by and, or, not.
    """
    now = datetime.now().astimezone()
    start: Start = "first" if from_ is None else parse_start(from_, "--from", now)
    if isinstance(start, int):
        start = max(0, start - 1)  # `--from 7` shows message 7; the library begins after the seq it is given
    if from_ is None and last is None:
        last = LAST
    view = _View(pattern, where, dialect)
    printer = MessagePrinter(as_json=as_json)
    with existing_log(path) as log, Stop() as stop:
        begin = start
        if last is not None and start != "new":
            begin = _show_last(log, view, start, last, printer)
        if start == "new" or follow or last is None:
            with view.of(log, begin) as subscription:
                _Consumer(subscription, printer, stop, count=None, batch=100).run(follow=follow or start == "new")
    _end(stop)


def _show_last(log: headwater.Log, view: _View, start: Start, last: int, printer: MessagePrinter) -> int:
    """Print the last few messages at or after `start`; returns the seq up to which the log has been seen."""
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
        with view.of(log, after) as subscription:
            for message in subscription.messages(wait=0.0):
                if message.seq > end:
                    break
                found.append(message)
    for message in found:
        printer.show(message)
    printer.flush()
    return max(end, lowest)


def _end(stop: Stop) -> None:
    if stop.requested:
        raise typer.Exit(130)
