"""`headwater topics`, `stats`, `subscriptions`, `lag`, `top` and `schema`: what a log holds."""

from __future__ import annotations

import importlib
import os
import select
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import typer

import headwater
from headwater.cli.arguments import (
    START_HELP,
    AsJson,
    Group,
    ListsByDefault,
    LogName,
    existing_log,
    file_of,
    is_file,
    parse_start,
    shown_name,
    usable_file,
)
from headwater.cli.output import (
    LiveScreen,
    Table,
    Text,
    clock,
    count,
    note,
    pairs,
    show_list,
    show_result,
    show_table,
    table_of,
    write_document,
    write_line,
)
from headwater.cli.parameters import argument, flag, option
from headwater.errors import HeadwaterError, InvalidOptionError
from headwater.formats import DURATION_HELP, format_seconds, format_size, iso, parse_duration, plural

if TYPE_CHECKING:
    from headwater.broker.statistics import LogStatistics, SubscriptionInfo
    from headwater.ports.records import TopicCount


def topics(
    path: LogName,
    pattern: Annotated[str | None, argument("PATTERN", "Like orders.>", offers="topic")] = None,
    as_json: AsJson = False,
) -> None:
    """List the topics of a log with their counts and sizes."""
    from headwater.topics import parse_pattern

    wanted = None if pattern is None else parse_pattern(pattern)
    with existing_log(path) as log:
        found = [topic for topic in log.topics() if wanted is None or wanted.matches(topic.topic)]
    columns: dict[str, Callable[[TopicCount], str]] = {
        "~topic": lambda topic: topic.topic,
        ">messages": lambda topic: count(topic.count),
        ">size": lambda topic: format_size(topic.bytes),
        ">last seq": lambda topic: count(topic.last_seq),
        "last published": lambda topic: clock(topic.last_published_ms),
    }
    empty = "no topics" if pattern is None else f"no topics match {pattern}"
    show_list(found, topic_json, columns, empty=empty, as_json=as_json)


def stats(path: LogName, as_json: AsJson = False) -> None:
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
    held = sum(bool(held_by(info)) for info in found.subscriptions)
    rows = [
        ("log", file_of(path) if is_file(path) else file),
        ("messages", f"{found.messages:,} of {format_size(found.bytes)} in {plural(len(found.topics), 'topic')}"),
        ("last seq", count(found.last_seq)),
        ("subscriptions", f"{len(found.subscriptions):,}, {held} held, a lag of {plural(lag, 'message')}"),
        ("dead letters", f"{letters.total:,}, {letters.redriving:,} being redriven"),
        ("retention", plural(len(policies), "policy", "policies")),
    ]
    if sizes:  # the sizes of a server's files are not seen from here
        on_disk = f"{format_size(sizes['file_bytes'])} and {format_size(sizes['wal_bytes'])} of write-ahead log"
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


# --- subscriptions and lag --------------------------------------------------------------------------------------------


subscriptions = Group(
    cls=ListsByDefault,
    help="Subscriptions: list, pause, move or remove them.\n\n[dim]List:[/]  headwater subscriptions events.db",
)

# `-1h` is a START, not short options.
_TAKES_MINUS: dict[str, Any] = {"ignore_unknown_options": True, "help_option_names": ["--help"]}

LAKE_PREFIX = "lake:"
LAKE_IDLE_MS = 24 * 3_600_000

Id = Annotated[str, argument("ID", "The subscription.", offers="subscription")]


@subscriptions.command("ls")
def list_subscriptions(path: LogName, as_json: AsJson = False) -> None:
    """List the subscriptions of a log.

    The columns dead and gaps count from the creation of the subscription; a
    redrive does not lower them. The present dead letters: headwater dlq events.db
    """
    with existing_log(path) as log:
        infos = log.subscriptions()
    empty = f"no subscriptions yet; begin one: headwater subscribe {path} ID PATTERN"
    columns = {name: cell for name, cell in _COLUMNS.items() if name not in (">waiting", ">oldest")}
    show_list(infos, subscription_json, columns, empty=empty, as_json=as_json)


@subscriptions.command("rm")
def remove(path: LogName, id: Id, as_json: AsJson = False) -> None:
    """Remove a subscription with all its state. Its dead letters stay."""
    with existing_log(path) as log:
        log.delete_subscription(id)
    show_result({"removed": id}, f"removed subscription {id}", as_json=as_json)


@subscriptions.command("pause")
def pause(path: LogName, id: Id, as_json: AsJson = False) -> None:
    """Pause a subscription: no process gets its messages until it is resumed.

    It keeps its position. Messages in flight may still be settled.
    """
    with existing_log(path) as log:
        log.pause(id)
    text = f"paused {id}; deliver again with: headwater subscriptions resume {path} {id}"
    show_result({"paused": id}, text, as_json=as_json)


@subscriptions.command("resume")
def resume(path: LogName, id: Id, as_json: AsJson = False) -> None:
    """Resume a paused subscription; delivery continues where it stopped."""
    with existing_log(path) as log:
        log.resume(id)
        lag = log.subscription(id).lag
    show_result({"resumed": id, "lag": lag}, f"resumed {id}; {plural(lag, 'message')} to come", as_json=as_json)


@subscriptions.command("seek", context_settings=_TAKES_MINUS)
def seek(
    path: LogName,
    id: Id,
    place: Annotated[str | None, argument("START", f"{START_HELP}.")] = None,
    start: Annotated[str | None, option("START", "The same as the argument START.")] = None,
    as_json: AsJson = False,
) -> None:
    """Move a subscription to another place in the log.

    Messages from START on are delivered, even if they were before; all
    earlier ones count as settled. The subscription must have no holder.

    [dim]Replay the last hour:[/]  headwater subscriptions seek events.db billing -1h
    """
    given = [each for each in (place, start) if each is not None]
    if len(given) != 1:
        why = "START is given twice" if given else "where to?"
        raise InvalidOptionError(why, next=f"Name one START: {START_HELP}")
    wanted = parse_start(given[0], "START")
    with existing_log(path) as log:
        position = log.seek(id, wanted)
        lag = log.subscription(id).lag
    text = f"{id} begins after seq {position:,}; {plural(lag, 'message')} to come"
    show_result({"id": id, "position": position, "lag": lag}, text, as_json=as_json)


def lag(
    path: LogName,
    id: Annotated[str | None, argument("ID", "One subscription.", offers="subscription")] = None,
    at_most: Annotated[
        int | None, option("N", "Exit with 1 if a subscription is further behind.", "--max-lag", min=0)
    ] = None,
    age_max: Annotated[
        str | None, option("SPAN", f"Exit with 1 if a message has waited longer: {DURATION_HELP}.", "--max-age")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show how far behind each subscription is.

    [dim]As an alarm:[/]  headwater lag events.db --max-lag 1000 --max-age 5m

    lag        messages that match and are not settled
    in flight  of these, delivered and not settled
    waiting    of these, failed and due for another attempt later
    oldest     the age of the oldest of them
    position   the seq up to which all messages are settled

    With a lag of 0, the position can be below the last seq of the log: the
    messages in between do not match the pattern.
    """
    age_ms_max = None if age_max is None else parse_duration(age_max, "--max-age").total_seconds() * 1000
    with existing_log(path) as log:
        infos = log.subscriptions() if id is None else [log.subscription(id)]
        last_seq = log.last_seq()
    late = [info for info in infos if is_late(info, at_most, age_ms_max)]
    names = ("~subscription", ">lag", ">in flight", ">waiting", ">oldest", ">position")
    columns = {name: _COLUMNS[name] for name in names}
    columns[">lag"] = lambda info: lag_text(info, alarm=info in late)
    show_list(infos, subscription_json, columns, empty="no subscriptions yet", as_json=as_json, last_seq=last_seq)
    # A log does not know where its lakes are, so it cannot know that one was deleted.
    idle_since_ms = time.time() * 1000 - LAKE_IDLE_MS
    for info in infos:
        if is_lake(info) and info.lag and info.active_ms < idle_since_ms and not as_json:
            note(
                f"{info.id} is the position of a lake, last moved {clock(info.active_ms)}; if that lake is gone: "
                f"headwater subscriptions rm {shown_name(path)} {info.id}"
            )
    if late:
        note(f"too far behind: {', '.join(info.id for info in late)}")
        raise typer.Exit(1)


def is_late(info: SubscriptionInfo, lag_max: int | None, age_ms_max: float | None) -> bool:
    behind = lag_max is not None and info.lag > lag_max
    waited = age_ms_max is not None and info.lag > 0 and (info.oldest_unacked_ms or 0) > age_ms_max
    return behind or waited


def is_lake(info: SubscriptionInfo) -> bool:
    """Whether it is the position of a lake (`headwater pipeline`)."""
    return info.id.startswith(LAKE_PREFIX)


def lag_text(info: SubscriptionInfo, *, alarm: bool = False) -> Text:
    at_least = "≥ " if info.lag_is_least else ""
    return Text(f"{at_least}{info.lag:,}", "bold red" if alarm else "yellow" if info.lag else "green")


def held_by(info: SubscriptionInfo) -> str:
    """The holder, or how many consumers share it and the processes that they are in; empty if there is none."""
    if not info.consumers:
        return info.holder or ""
    processes = dict.fromkeys(":".join(name.split(":")[:2]) for name in info.consumers)
    return f"{plural(len(info.consumers), 'consumer')}: {', '.join(processes)}"


_SHOWN = (
    "id", "pattern", "mode", "position", "lag", "lag_is_least", "in_flight", "waiting", "oldest_unacked_s", "acked",
    "redelivered", "dead", "gaps", "holder", "consumers",
)  # fmt: skip


def subscription_json(info: SubscriptionInfo) -> dict[str, Any]:
    fields = {name: getattr(info, name) for name in _SHOWN}
    return {**fields, "created_at": iso(info.created_ms), "active_at": iso(info.active_ms)}


def _count_of(name: str, style: str = "") -> Callable[[SubscriptionInfo], Text]:
    return lambda info: Text(count(getattr(info, name)), style if getattr(info, name) else "")


def _holder(info: SubscriptionInfo) -> str | Text:
    if info.paused_ms is not None:
        return Text(f"paused since {clock(info.paused_ms)}", "yellow")
    return held_by(info) or Text(f"free since {clock(info.active_ms)}", "dim")


Columns = dict[str, Callable[["SubscriptionInfo"], str | Text]]

_COLUMNS: Columns = {
    "~subscription": lambda info: info.id,
    "~pattern": lambda info: info.pattern,
    "mode": lambda info: info.mode,
    ">position": _count_of("position"),
    ">lag": lag_text,
    ">in flight": _count_of("in_flight"),
    ">waiting": _count_of("waiting"),
    ">oldest": lambda info: "-" if info.oldest_unacked_s is None else format_seconds(info.oldest_unacked_s),
    ">dead": _count_of("dead", "red"),
    ">gaps": _count_of("gaps", "red"),
    "~held by": _holder,
}


# --- top --------------------------------------------------------------------------------------------------------------


TOPICS_SHOWN_MAX = 20


class Sample(NamedTuple):
    at_s: float
    statistics: LogStatistics


class Rates(NamedTuple):
    """Per second, between two samples."""

    published: float
    topics: dict[str, float]
    acked: dict[str, float]


def top(
    path: LogName,
    once: Annotated[bool, flag("Print one interval and exit.")] = False,
    interval: Annotated[float, option("SECONDS", "The time between two samples.", "-i", min=0.1, max=3600)] = 1.0,
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
                show_table(*frame(log.name, before, after))
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
    before = take(log)
    with LiveScreen(frame(log.name, before, before)) as screen, _single_keys() as keys:
        while not _quit_pressed(keys, interval):
            after = take(log)
            screen.show(frame(log.name, before, after))
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
        # Retention lowers the counts; the rate of a topic is then too low, not negative.
        {t.topic: max(0, t.count - had.get(t.topic, 0)) / seconds for t in after.statistics.topics},
        {s.id: max(0, s.acked - acked.get(s.id, 0)) / seconds for s in after.statistics.subscriptions},
    )


def frame(name: str, before: Sample, after: Sample) -> list[Table | str | Text]:
    now, per_second = after.statistics, rates(before, after)
    title = Text()
    title.append(os.path.basename(name) if is_file(name) else name, "bold")
    title.append(f"   {_rate(per_second.published)} in", "green" if per_second.published else "dim")
    title.append(f"   {now.messages:,} messages, {format_size(now.bytes)}, last seq {now.last_seq:,}", "dim")
    busiest = sorted(now.topics, key=lambda topic: (-per_second.topics[topic.topic], -topic.last_seq))
    topic_columns: dict[str, Callable[[TopicCount], str | Text]] = {
        "~topic": lambda topic: Text(topic.topic, "cyan"),
        ">in": lambda topic: _speed(per_second.topics[topic.topic]),
        ">messages": lambda topic: count(topic.count),
        ">size": lambda topic: format_size(topic.bytes),
    }
    columns: Columns = {
        "~subscription": lambda info: Text(info.id, "cyan"),
        ">acked": lambda info: _speed(per_second.acked[info.id]),
        **{name: _COLUMNS[name] for name in (">lag", ">in flight", ">waiting", ">oldest", ">dead")},
        "~held by": lambda info: held_by(info) or Text("-", "dim"),
    }
    subscriptions = sorted(now.subscriptions, key=lambda info: (-info.lag, info.id))
    more = len(busiest) - TOPICS_SHOWN_MAX
    parts: list[Table | str | Text] = [title, "", table_of(busiest[:TOPICS_SHOWN_MAX], topic_columns)]
    if more > 0:
        parts.append(Text(f"and {more:,} more topics", "dim"))
    if now.subscriptions:
        parts += ["", table_of(subscriptions, columns)]
    if sys.stdout.isatty():
        parts += ["", Text("q quits", "dim")]
    return parts


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


# --- schema -----------------------------------------------------------------------------------------------------------


def schema(
    module: Annotated[str, argument("MODULE", "A Python module, like shop.events.")],
    format: Annotated[Literal["json-schema", "asyncapi"], flag("What to write.")] = "json-schema",
    output: Annotated[
        str | None,
        option("FILE", "The output file; for JSON Schemas a directory, with a file for each.", "--out", "-o"),
    ] = None,
    title: Annotated[str, option("TEXT", "Title of an AsyncAPI document.")] = "Events",
    api_version: Annotated[str, option("TEXT", "Version of an AsyncAPI document.")] = "1.0.0",
    as_json: Annotated[bool, flag("Print the names of the files as JSON.", "--json")] = False,
) -> None:
    """Write the message classes of a module as JSON Schemas or as AsyncAPI.

    The module is imported, from here or from where Python finds it.

    [dim]For the pipeline:[/]  headwater schema shop.events --out types/
    """
    # Imported when needed: pydantic takes longer to import than most commands take to run.
    from headwater.typed.export import asyncapi, classes_in, gaps_in, json_schema

    loaded = _import(module)
    if not classes_in(loaded):
        raise InvalidOptionError(
            "there is no message class with a topic in it",
            where=module,
            next="Name the module that has class OrderPlaced(headwater.Event, topic=…), or imports it",
        )
    for gap in gaps_in(loaded):
        note(f"warning: {gap}")
    if format == "asyncapi":
        document: dict[str, Any] = asyncapi(loaded, title=title, version=api_version)
    else:
        document = json_schema(loaded)
    if output is None:
        write_document(document)
    elif format == "json-schema" and (output.endswith(("/", os.sep)) or os.path.isdir(output)):
        files = [str(Path(output) / f"{name}.json") for name in document]
        for file, each in zip(files, document.values(), strict=True):
            _write(Path(file), each)
        show_result({"items": files}, f"{plural(len(document), 'schema')} in {output}", as_json=as_json)
    else:
        _write(Path(output), document)
        show_result({"items": [output]}, f"wrote {output}", as_json=as_json)


def _import(module: str) -> ModuleType:
    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        return importlib.import_module(module)
    except HeadwaterError:  # a class of the module is invalid, and the error names it
        raise
    except ModuleNotFoundError as exc:
        missing = exc.name or module
        if module == missing or module.startswith(f"{missing}."):
            next = "Name it as in an import, without .py; this directory and Python's path are searched"
        else:
            next = f"It imports {missing}: install that, or run this where it is"
        raise InvalidOptionError(f"there is no module {missing!r}", where=module, next=next) from exc
    except (Exception, SystemExit) as exc:
        raise InvalidOptionError(
            f"it cannot be imported: {type(exc).__name__}: {exc}", where=module, next="HEADWATER_DEBUG=1 shows where"
        ) from exc


def _write(path: Path, document: object) -> None:
    import msgspec

    with usable_file("written", str(path), "Name another"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(msgspec.json.format(msgspec.json.encode(document), indent=2) + b"\n")
