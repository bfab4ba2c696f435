"""`headwater top`: what goes through a log right now."""

from __future__ import annotations

import os
import select
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any, NamedTuple

import typer
from rich.console import Group, RenderableType
from rich.live import Live
from rich.text import Text

import headwater
from headwater.broker.statistics import LogStatistics
from headwater.cli.opening import AsJson, LogPath, existing_log, is_file, takes_log
from headwater.cli.output import console, count, printable, show_table, table, write_document, write_line
from headwater.cli.subscriptions import lag_text, subscription_json
from headwater.cli.times import say_size, say_span

TOPICS_SHOWN_MAX = 20


class Sample(NamedTuple):
    at_s: float
    statistics: LogStatistics


class Rates(NamedTuple):
    """Per second, between two samples."""

    published: float
    topics: dict[str, float]
    acked: dict[str, float]


@takes_log
def top(
    path: LogPath,
    once: Annotated[bool, typer.Option("--once", help="Measure one interval, print it and end.")] = False,
    interval: Annotated[
        float, typer.Option("--interval", "-i", metavar="SECONDS", min=0.1, max=3600, help="Between two looks.")
    ] = 1.0,
    as_json: AsJson = False,
) -> None:
    """Watch a log live: messages per second by topic, lag by subscription.

    Ends with q or Ctrl-C.
    """
    with existing_log(path) as log:
        if once:
            before = take(log)
            time.sleep(interval)
            after = take(log)
            if as_json:
                write_document(frame_json(before, after))
            else:
                show_table(frame(log.name, before, after))
        elif as_json:
            _stream(log, interval)
        else:
            _live(log, interval)


def _stream(log: headwater.Log, interval: float) -> None:
    before = take(log)
    while True:
        time.sleep(interval)
        after = take(log)
        write_line(frame_json(before, after))
        sys.stdout.flush()
        before = after


def _live(log: headwater.Log, interval: float) -> None:
    screen = console()
    before = take(log)
    first = frame(log.name, before, before)
    with Live(first, console=screen, screen=screen.is_terminal, auto_refresh=False) as live, _single_keys() as keys:
        live.refresh()
        while not _quit_pressed(keys, interval):
            after = take(log)
            live.update(frame(log.name, before, after), refresh=True)
            before = after


@contextmanager
def _single_keys() -> Iterator[int | None]:
    """The terminal's descriptor, set to give keys without Enter; None where there is no terminal."""
    if not sys.stdin.isatty():
        yield None
        return
    import termios
    import tty

    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    try:
        tty.setcbreak(descriptor)
        yield descriptor
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


def _quit_pressed(keys: int | None, wait_s: float) -> bool:
    until = time.monotonic() + wait_s
    if keys is None:
        time.sleep(wait_s)
        return False
    while (left := until - time.monotonic()) > 0:
        if select.select([keys], [], [], left)[0]:
            pressed = os.read(keys, 1)
            if pressed in (b"q", b"Q", b""):
                return True
    return False


# --- one frame ------------------------------------------------------------------------------------------------------


def take(log: headwater.Log) -> Sample:
    return Sample(time.monotonic(), log.statistics())


def rates(before: Sample, after: Sample) -> Rates:
    seconds = max(after.at_s - before.at_s, 1e-9)
    had = {topic.topic: topic.count for topic in before.statistics.topics}
    acked = {info.id: info.acked for info in before.statistics.subscriptions}
    return Rates(
        (after.statistics.last_seq - before.statistics.last_seq) / seconds,
        # Retention makes counts smaller; what came in meanwhile is then not known by topic.
        {t.topic: max(0, t.count - had.get(t.topic, 0)) / seconds for t in after.statistics.topics},
        {s.id: max(0, s.acked - acked.get(s.id, 0)) / seconds for s in after.statistics.subscriptions},
    )


def frame(name: str, before: Sample, after: Sample) -> RenderableType:
    now, per_second = after.statistics, rates(before, after)
    title = Text()
    title.append(printable(os.path.basename(name) if is_file(name) else name), "bold")
    title.append(f"   {_rate(per_second.published)} in", "green" if per_second.published else "dim")
    title.append(f"   {now.messages:,} messages, {say_size(now.bytes)}, last seq {now.last_seq:,}", "dim")
    topics = table("~topic", ">in", ">messages", ">size")
    busiest = sorted(now.topics, key=lambda topic: (-per_second.topics[topic.topic], -topic.last_seq))
    for topic in busiest[:TOPICS_SHOWN_MAX]:
        speed = per_second.topics[topic.topic]
        topics.add_row(Text(printable(topic.topic), "cyan"), _speed(speed), count(topic.count), say_size(topic.bytes))
    subscriptions = table("~subscription", ">acked", ">lag", ">in flight", ">waiting", ">oldest", ">dead", "~held by")
    for info in sorted(now.subscriptions, key=lambda info: (-info.lag, info.id)):
        subscriptions.add_row(
            Text(printable(info.id), "cyan"),
            _speed(per_second.acked[info.id]),
            lag_text(info),
            count(info.in_flight),
            count(info.waiting),
            "-" if info.oldest_unacked_ms is None else say_span(info.oldest_unacked_ms),
            Text(count(info.dead), "red" if info.dead else ""),
            printable(info.holder) if info.holder else Text("nobody", "dim"),
        )
    more = len(busiest) - TOPICS_SHOWN_MAX
    parts: list[RenderableType] = [title, "", topics]
    if more > 0:
        parts.append(Text(f"and {more:,} more topics", "dim"))
    if now.subscriptions:
        parts += ["", subscriptions]
    if sys.stdout.isatty():
        parts += ["", Text("q quits", "dim")]
    return Group(*parts)


def frame_json(before: Sample, after: Sample) -> dict[str, Any]:
    now, per_second = after.statistics, rates(before, after)
    return {
        "seconds": round(after.at_s - before.at_s, 3),
        "last_seq": now.last_seq,
        "messages": now.messages,
        "bytes": now.bytes,
        "published_per_second": round(per_second.published, 1),
        "topics": [
            {
                "topic": topic.topic,
                "messages": topic.count,
                "bytes": topic.bytes,
                "published_per_second": round(per_second.topics[topic.topic], 1),
            }
            for topic in now.topics
        ],
        "subscriptions": [
            subscription_json(info) | {"acked_per_second": round(per_second.acked[info.id], 1)}
            for info in now.subscriptions
        ],
    }


def _rate(per_second: float) -> str:
    return f"{per_second:,.0f}/s" if per_second >= 10 or per_second == 0 else f"{per_second:.1f}/s"


def _speed(per_second: float) -> Text:
    return Text(_rate(per_second), "green" if per_second else "dim")
