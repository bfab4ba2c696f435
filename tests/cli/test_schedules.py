"""`headwater schedules`."""

from datetime import UTC, datetime
from pathlib import Path

import headwater


def declare(path: Path) -> None:
    with headwater.open(path, clock=headwater.ManualClock()) as log:
        log.every("1h", id="hourly", topic="ticks", missed="all")(lambda occurrence: None)
        log.cron("0 3 * * *", id="nightly", topic="reports", tz="Europe/Berlin")(lambda occurrence: None)
        log.start()


def test_ls_and_rm(run, log, path: Path):
    assert run("schedules", path).out == "no schedules; a program declares them with @log.every and @log.cron\n"
    declare(path)
    shown = run("schedules", path)
    assert shown.code == 0
    assert shown.out.splitlines()[0].split() == ["schedule", "timetable", "topic", "missed", "last", "next"]
    assert "nightly" in shown.out
    assert "0 3 * * * Europe/Berlin" in shown.out
    assert f"{datetime(2023, 11, 15, 2, tzinfo=UTC).astimezone():%Y-%m-%d %H:%M:%S %Z}\n" in shown.out
    assert "2 schedules overdue" in shown.err, "the clock of 2023 has stopped"
    hourly, nightly = run("schedules", "ls", path, "--json").items
    assert hourly.pop("publisher").count(":") == 2
    assert hourly == {
        "id": "hourly",
        "timetable": "every 1h",
        "topic": "ticks",
        "missed": "all",
        "last_at": None,
        "next_at": "2023-11-14T23:00:00.000Z",
    }
    assert nightly["next_at"] == "2023-11-15T02:00:00.000Z"
    assert run("schedules", "rm", path, "hourly").out == "removed schedule hourly\n"
    assert run("schedules", "rm", path, "hourly").code == 2
    assert run("schedules", "rm", path, "hourly", "--json").json == {"schedule": "hourly", "removed": False}
    assert [each["id"] for each in run("schedules", path, "--json").items] == ["nightly"]


def test_one_that_runs_is_not_overdue(run, path: Path):
    with headwater.open(path) as log:
        log.every("1h", id="hourly", topic="ticks")(lambda occurrence: {})
        log.start()
        shown = run("schedules", path)
        assert "overdue" not in shown.err
        [info] = log.schedules()
        assert info.next_at is not None
        assert info.next_at > datetime.now(UTC)
