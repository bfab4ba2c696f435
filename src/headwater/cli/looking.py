"""`headwater topics` and `headwater stats`: what is in a log."""

from __future__ import annotations

import os
from typing import Annotated, Any

import typer

from headwater.cli.opening import AsJson, LogPath, existing_log, file_of, is_file, takes_log
from headwater.cli.output import clock, count, pairs, printable, say, show_table, some, table, write_document
from headwater.cli.subscriptions import subscription_json
from headwater.cli.times import say_size
from headwater.message import iso
from headwater.ports.records import TopicCount
from headwater.topics import parse_pattern


@takes_log
def topics(
    path: LogPath,
    pattern: Annotated[str | None, typer.Argument(metavar="PATTERN", help="Like orders.>", show_default=False)] = None,
    as_json: AsJson = False,
) -> None:
    """List the topics of a log with what they hold."""
    wanted = None if pattern is None else parse_pattern(pattern)
    with existing_log(path) as log:
        found = [topic for topic in log.topics() if wanted is None or wanted.matches(topic.topic)]
    if as_json:
        write_document([topic_json(topic) for topic in found])
        return
    if not found:
        say("no topics" if pattern is None else f"no topics match {pattern}")
        return
    shown = table("~topic", ">messages", ">size", ">last seq", "last published")
    for topic in found:
        shown.add_row(
            printable(topic.topic),
            count(topic.count),
            say_size(topic.bytes),
            count(topic.last_seq),
            clock(topic.last_published_ms),
        )
    show_table(shown)


@takes_log
def stats(path: LogPath, as_json: AsJson = False) -> None:
    """Sum up a log: messages, topics, subscriptions, dead letters, disk."""
    with existing_log(path) as log:
        found = log.statistics()
        letters = log.dead_letters.statistics()
        policies = log.retention()
        file = log.name
    sizes = {"file_bytes": size_of(file), "wal_bytes": size_of(f"{file}-wal")} if is_file(path) else {}
    if as_json:
        write_document(
            {
                "path": file,
                "last_seq": found.last_seq,
                "messages": found.messages,
                "bytes": found.bytes,
                **sizes,
                "dead_letters": letters.total,
                "retention_policies": len(policies),
                "topics": [topic_json(topic) for topic in found.topics],
                "subscriptions": [subscription_json(info) for info in found.subscriptions],
            }
        )
        return
    lag = sum(info.lag for info in found.subscriptions)
    held = sum(info.holder is not None for info in found.subscriptions)
    rows = [
        ("log", printable(file_of(path) if is_file(path) else file)),
        ("messages", f"{found.messages:,} of {say_size(found.bytes)} in {some(len(found.topics), 'topic')}"),
        ("last seq", count(found.last_seq)),
        ("subscriptions", f"{len(found.subscriptions):,}, {held} held, {some(lag, 'message')} to go"),
        ("dead letters", f"{letters.total:,}, {letters.redriving:,} on their way again"),
        ("retention", some(len(policies), "rule")),
    ]
    if sizes:  # those of a server's files are its own business
        on_disk = f"{say_size(sizes['file_bytes'])} and {say_size(sizes['wal_bytes'])} of write-ahead log"
        rows.append(("on disk", on_disk))
    show_table(pairs(rows))


def topic_json(topic: TopicCount) -> dict[str, Any]:
    return {
        "topic": topic.topic,
        "messages": topic.count,
        "bytes": topic.bytes,
        "last_seq": topic.last_seq,
        "last_published_at": iso(topic.last_published_ms),
    }


def size_of(file: str) -> int:
    try:
        return os.stat(file).st_size
    except FileNotFoundError:
        return 0
