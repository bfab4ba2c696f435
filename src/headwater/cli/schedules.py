"""`headwater schedules`: the schedules that processes have declared in a log."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headwater.cli.arguments import AsJson, Group, ListsByDefault, LogName, existing_log
from headwater.cli.output import clock, note, show_list, show_result
from headwater.cli.parameters import argument
from headwater.cli.stopping import USAGE
from headwater.formats import format_seconds, iso, plural, time_ms

if TYPE_CHECKING:
    from headwater.broker.schedules import ScheduleInfo

OVERDUE_S = 60.0  # that the next occurrence of a schedule may be late

schedules = Group(
    cls=ListsByDefault,
    help="Schedules: messages that are published at set times.\n\n[dim]List:[/]  headwater schedules events.db",
)


@schedules.command("ls")
def list_schedules(path: LogName, as_json: AsJson = False) -> None:
    """List the schedules of a log, with their last and next occurrence.

    Programs declare them with @log.every and @log.cron. A schedule is overdue
    if no process runs it.
    """
    with existing_log(path) as log:
        found = log.schedules()
    columns: dict[str, Callable[[ScheduleInfo], str]] = {
        "~schedule": lambda info: info.id,
        "timetable": lambda info: info.timetable,
        "~topic": lambda info: info.topic,
        "missed": lambda info: info.missed,
        "last": lambda info: _moment(info.last_at),
        "next": lambda info: _moment(info.next_at),
    }
    empty = "no schedules; a program declares them with @log.every and @log.cron"
    show_list(found, _schedule_json, columns, empty=empty, as_json=as_json)
    late = [info for info in found if _overdue_s(info) > OVERDUE_S]
    if late and not as_json:
        longest = format_seconds(max(map(_overdue_s, late)))
        note(f"{plural(len(late), 'schedule')} overdue, by {longest} at most: does a worker run them?")


@schedules.command("rm")
def remove_schedule(
    path: LogName, id: Annotated[str, argument("ID", "The schedule's id.")], as_json: AsJson = False
) -> None:
    """Remove a schedule; processes that run it stop publishing until they are started again."""
    with existing_log(path) as log:
        removed = log.delete_schedule(id)
    text = f"removed schedule {id}" if removed else f"there is no schedule {id}; headwater schedules lists them"
    show_result({"schedule": id, "removed": removed}, text, as_json=as_json)
    if not removed:
        raise typer.Exit(USAGE)


def _moment(at: datetime | None) -> str:
    """A time with its zone, because a timetable may have another one."""
    return "-" if at is None else f"{clock(time_ms(at))} {at.astimezone():%Z}"


def _overdue_s(info: ScheduleInfo) -> float:
    return 0.0 if info.next_at is None else (datetime.now(UTC) - info.next_at).total_seconds()


def _schedule_json(info: ScheduleInfo) -> dict[str, Any]:
    return {
        "id": info.id,
        "timetable": info.timetable,
        "topic": info.topic,
        "missed": info.missed,
        "last_at": None if info.last_at is None else iso(time_ms(info.last_at)),
        "next_at": None if info.next_at is None else iso(time_ms(info.next_at)),
        "publisher": info.publisher,
    }
