"""`headwater doctor`: is this log, and the place it lies in, as it should be? Each finding says what to do next."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from typing import Annotated, Any

import apsw
import typer
from rich.table import Table
from rich.text import Text

import headwater
from headwater.broker.statistics import SubscriptionInfo
from headwater.cli.doctor_database import database_findings
from headwater.cli.findings import Finding
from headwater.cli.machine import lock_holders, mount_of, processes_with
from headwater.cli.opening import AsJson, LogPath, existing_log, is_remote, require_log, shown_name, takes_log
from headwater.cli.output import printable, say, show_table, some, write_document
from headwater.cli.subscriptions import is_late
from headwater.cli.times import parse_span, say_size, say_span
from headwater.errors import NotALog, StoreError
from headwater.wiring import is_postgres

SQLITE_SAFE = (3, 51, 3)
WAL_BYTES_ALARM = 64 * 1024 * 1024
FREE_PAGES_SHARE_NOTED = 0.25
FREE_BYTES_NOTED = 10 * 1024 * 1024
DISK_FREE_BYTES_ALARM = 200 * 1024 * 1024
BUSY_TIMEOUT_S = 2.0  # a log that cannot be written for longer is a finding


@takes_log
def doctor(
    context: typer.Context,
    path: LogPath = "",
    lag_max: Annotated[
        int, typer.Option("--lag-max", metavar="N", min=0, help="A subscription further behind is wrong.")
    ] = 100_000,
    age_max: Annotated[
        str, typer.Option("--age-max", metavar="SPAN", help="A subscription that has waited longer is wrong.")
    ] = "1h",
    as_json: AsJson = False,
) -> None:
    """Examine a log and the place it lies in; each finding says what to do next.

    Without LOG, only what is installed is examined: SQLite, Spark and Java.
    Of a server it sees what the server tells; the disk and the processes around
    the file are seen only on the machine that has it.

    Ends with 1 if something is wrong.
    """
    age_ms_max = parse_span(age_max, "--age-max").total_seconds() * 1000
    file: str | None
    source = context.get_parameter_source("path")
    # An empty word was meant to be a log: a script's variable that is not set must not pass for healthy.
    if not path and source is not None and source.name == "DEFAULT":
        file = None
        findings = [_sqlite_version(apsw.sqlite_lib_version()), *_spark()]
    elif is_remote(path):
        file = str(path)
        findings = list(_inside(path, lag_max, age_ms_max))
    elif is_postgres(path):
        file = shown_name(path)
        findings = list(_inside(path, lag_max, age_ms_max))
    else:
        file = require_log(path)
        findings = [*_surroundings(file), *_inside(file, lag_max, age_ms_max), *_spark()]
    wrong = [finding for finding in findings if finding.level == "wrong"]
    if as_json:
        write_document({"path": file, "healthy": not wrong, "findings": [finding._asdict() for finding in findings]})
    else:
        _show(findings, wrong)
    if wrong:
        raise typer.Exit(1)


def _show(findings: list[Finding], wrong: list[Finding]) -> None:
    marks = {"ok": Text("ok", "green"), "note": Text("note", "yellow"), "wrong": Text("wrong", "bold red")}
    shown = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    shown.add_column(no_wrap=True)
    shown.add_column(no_wrap=True, style="bold")
    shown.add_column(overflow="fold")
    for finding in findings:
        shown.add_row(marks[finding.level], finding.check, Text(printable(finding.what)))
        if finding.next:
            shown.add_row("", "", Text(f"next: {printable(finding.next)}", "dim"))
    show_table(shown)
    verdict = Text(f"{some(len(wrong), 'thing')} wrong", "bold red") if wrong else Text("healthy", "bold green")
    say(verdict)


# --- around the log -------------------------------------------------------------------------------------------------


def _surroundings(file: str) -> Iterator[Finding]:
    yield _sqlite_version(apsw.sqlite_lib_version())
    yield _file_system(file)
    free = shutil.disk_usage(file).free
    if free < DISK_FREE_BYTES_ALARM:
        yield Finding("disk", "wrong", f"only {say_size(free)} free", "Free some, before publishing fails")
    else:
        yield Finding("disk", "ok", f"{say_size(free)} free")
    yield from _processes(file)


def _sqlite_version(version: str) -> Finding:
    if tuple(int(part) for part in version.split(".")[:3]) < SQLITE_SAFE:
        return Finding(
            "sqlite",
            "wrong",
            f"{version} can lose commits in WAL mode",
            "Upgrade to 3.51.3 or newer: pip install -U apsw",
        )
    return Finding("sqlite", "ok", f"{version}, safe (3.51.3 or newer)")


def _file_system(file: str) -> Finding:
    mount = mount_of(file)
    if mount is None:
        return Finding(
            "file system", "note", "unknown: this system has no /proc/mounts", "Make sure it is a local disk"
        )
    where = f"{mount.file_system} at {mount.point}"
    if mount.is_network:
        return Finding(
            "file system",
            "wrong",
            f"{where}: a network file system breaks SQLite's locks",
            "Move the log to a local disk",
        )
    if mount.is_memory:
        return Finding("file system", "note", f"{where}: gone when the machine stops", "Move the log to a disk")
    return Finding("file system", "ok", f"{where}, local")


def _processes(file: str) -> Iterator[Finding]:
    found = processes_with(file)
    if found is None:
        return
    if not found:
        yield Finding("processes", "ok", "no other process that this user can see has it open")
        return
    holders = lock_holders(file)
    for process in found:
        doing = [
            *(["writing"] if process.pid in holders.writers else []),
            *(["reading"] if process.pid in holders.readers else []),
        ]
        what = f"{process.pid} has it open{' and is ' + ' and '.join(doing) if doing else ''}: {process.command}"
        yield Finding("processes", "ok", what)


def _server(log: headwater.Log, health: dict[str, Any]) -> Iterator[Finding]:
    version = log.remote.call("rpc.hello", {})["version"]
    yield Finding("server", "ok", f"ready, with Headwater {version}")
    if health["store"] == "postgres":
        return
    if health["store"] == "sqlite":
        yield _sqlite_version(health["sqlite"])
        what = "its file system, disk and processes are not seen from here: that takes the file"
        yield Finding("surroundings", "note", what, f"On its machine: headwater doctor {health['path']}")
    else:
        yield Finding("log", "note", "in the server's memory: gone when the server stops", "Serve a file instead")


def _spark() -> Iterator[Finding]:
    """What the pipeline would run on. A log is healthy without it, so nothing here is wrong."""
    # Imported here: other commands have no use for it. Spark itself is looked at from outside; importing it takes long.
    from headwater.pipeline.starting.archive import archive_for, spark_folder, spark_version
    from headwater.pipeline.starting.java import HOW_TO_GET_JAVA, look_for_java

    folder = spark_folder()
    if folder is None:
        yield Finding("spark", "note", "not installed; only the pipeline needs it", "pip install 'headwater[spark]'")
        return
    yield Finding("spark", "ok", f"PySpark {spark_version()}")
    java, passed_over = look_for_java(os.environ)
    for why in passed_over if java else ():
        yield Finding("java", "note", f"passed over: {why}", "Set JAVA_HOME to a Java that is 17 or newer")
    if java is None:
        yield Finding("java", "note", f"none that Spark can run on: {'; '.join(passed_over)}", HOW_TO_GET_JAVA)
        return
    yield Finding("java", "ok", f"{java.version} in {java.home}, from {java.found_in}")
    archive = archive_for(java, folder)
    if archive.is_there:
        yield Finding("spark start", "ok", f"shortened by an archive of {say_size(archive.size)}: {archive.file}")
    else:
        next = "To halve it, once: headwater pipeline warm"
        yield Finding("spark start", "note", "without an archive of classes it takes twice as long", next)


# --- inside the log -------------------------------------------------------------------------------------------------


def _inside(file: str, lag_max: int, age_ms_max: float) -> Iterator[Finding]:
    try:
        with existing_log(file, busy_timeout=BUSY_TIMEOUT_S) as log:
            health = log.health()
            if is_remote(file):
                yield from _server(log, health)
            if health["store"] == "sqlite":
                yield from _health(health, file)
            elif health["store"] == "postgres":
                yield from database_findings(health)
            yield from _subscriptions(log.subscriptions(), shown_name(file), lag_max, age_ms_max)
            yield _dead_letters(log, shown_name(file))
    except NotALog:
        raise
    except StoreError as exc:
        yield Finding("log", "wrong", exc.why, exc.next)


def _health(health: dict[str, Any], file: str) -> Iterator[Finding]:
    yield Finding("schema", "ok", f"version {health['schema']}")
    yield Finding("writing", "ok", "the write lock could be taken, and a transaction committed")
    yield Finding(
        "durability",
        "ok" if health["durability"] == "full" else "note",
        f"{health['durability']}, "
        + ("as the server has it" if is_remote(file) else "when opened like this; each process chooses its own"),
    )
    if health["integrity"] == "ok":
        yield Finding("integrity", "ok", "SQLite's quick check found nothing")
    else:
        yield Finding(
            "integrity", "wrong", "; ".join(health["integrity"]), "Restore a replica or a backup; keep this file aside"
        )
    yield from _write_ahead_log(health, file)
    yield _free_pages(health, file)


def _write_ahead_log(health: dict[str, Any], file: str) -> Iterator[Finding]:
    size, left = health["wal_bytes"], health["wal_pages"] - health["wal_pages_moved"]
    too_large = size > WAL_BYTES_ALARM
    yield Finding(
        "wal",
        "wrong" if too_large else "ok",
        f"{say_size(size)} of write-ahead log",
        "End the oldest reader: while it reads, the log behind it cannot shrink" if too_large else "",
    )
    if left > 0:
        readers = ", ".join(map(str, sorted(lock_holders(file).readers))) or "not seen from here"
        yield Finding(
            "oldest reader",
            "wrong" if too_large else "note",
            f"some reader still needs {some(left, 'page')} of the write-ahead log; processes that read now: {readers}",
            "A transaction left open? End it, or the process",
        )
    else:
        yield Finding("oldest reader", "ok", "none holds the write-ahead log back")


def _free_pages(health: dict[str, Any], file: str) -> Finding:
    free, pages = health["free_pages"], health["pages"]
    size = free * health["page_size"]
    if size > FREE_BYTES_NOTED and free > pages * FREE_PAGES_SHARE_NOTED:
        return Finding(
            "free pages", "note", f"{say_size(size)} of the file are unused", f"headwater retention run {file}"
        )
    return Finding("free pages", "ok", f"{free:,} of {pages:,}")


def _subscriptions(infos: list[SubscriptionInfo], file: str, lag_max: int, age_ms_max: float) -> Iterator[Finding]:
    late = [info for info in infos if is_late(info, lag_max, age_ms_max)]
    for info in late:
        at_least = "at least " if info.lag_is_least else ""
        waited = say_span(info.oldest_unacked_ms or 0)
        yield Finding(
            "lag",
            "wrong",
            f"{info.id} is {at_least}{some(info.lag, 'message')} behind, the oldest for {waited}",
            f"Start its consumer, or remove it: headwater subscriptions rm {file} {info.id}"
            if info.holder is None
            else f"Speed up its consumer ({info.holder})",
        )
    for info in infos:
        if info.gaps:
            yield Finding(
                "gaps",
                "note",
                f"{info.id} lost {some(info.gaps, 'message')} that retention deleted before they were acked",
                "Set the rule with --keep-unacked if that must not be",
            )
    if not late:
        yield Finding("lag", "ok", f"{some(len(infos), 'subscription')}, none too far behind")


def _dead_letters(log: headwater.Log, file: str) -> Finding:
    total = log.dead_letters.statistics().total
    if total:
        return Finding("dead letters", "note", some(total, "dead letter"), f"headwater dlq {file}")
    return Finding("dead letters", "ok", "none")
