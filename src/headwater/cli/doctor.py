"""`headwater doctor`: examines a log and the machine it lies on. Each finding says what to do next."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import apsw
import typer

import headwater
from headwater.cli.arguments import AsJson, LogName, existing_log, is_file, is_remote, require_log, shown_name
from headwater.cli.inspect import held_by, is_lake, is_late
from headwater.cli.output import Column, Table, Text, clock, say, show_table, write_items
from headwater.cli.parameters import option
from headwater.errors import HeadwaterError, NotALogError, StoreError
from headwater.formats import format_seconds, format_size, parse_duration, plural
from headwater.version import install_hint

if TYPE_CHECKING:
    from headwater.broker.statistics import SubscriptionInfo

SQLITE_SAFE = (3, 51, 3)
WAL_BYTES_ALARM = 64 * 1024 * 1024
FREE_PAGES_SHARE_NOTED = 0.25
FREE_BYTES_NOTED = 10 * 1024 * 1024
DISK_FREE_BYTES_ALARM = 200 * 1024 * 1024
CONNECTIONS_SHARE_NOTED = 0.8
OLD_TRANSACTION_S_NOTED = 60
DEAD_SHARE_NOTED = 0.5
DEAD_TUPLES_NOTED = 100_000
BUSY_TIMEOUT_S = 2.0  # a log that cannot be written for longer is a finding


Level = Literal["ok", "note", "wrong"]


class Finding(NamedTuple):
    check: str
    level: Level
    what: str
    next: str = ""


def doctor(
    context: typer.Context,
    path: LogName = LogName(""),  # noqa: B008
    lag_max: Annotated[int, option("N", "Report a subscription that is further behind.", "--max-lag", min=0)] = 100_000,
    age_max: Annotated[str, option("SPAN", "Report a subscription that has waited longer.", "--max-age")] = "1h",
    as_json: AsJson = False,
) -> None:
    """Examine a log and its machine; each finding says what to do next.

    Without LOG, only what is installed is examined: SQLite, Spark and Java.
    Of a log behind a server, what the server reports is examined; its disk and
    processes are examined only on the server's own machine.

    Exits with 1 if a finding is a problem.
    """
    age_ms_max = parse_duration(age_max, "--max-age").total_seconds() * 1000
    file: str | None
    source = context.get_parameter_source("path")
    # An empty word was meant to be a log: a script's variable that is not set must not pass for healthy.
    if not path and source is not None and source.name == "DEFAULT":
        file = None
        findings = [_sqlite_version(apsw.sqlite_lib_version()), *_spark()]
    elif is_file(path):
        file = require_log(path)
        findings = [*_environment(file), *_inside(file, lag_max, age_ms_max), *_spark()]
    else:
        file = shown_name(path)
        findings = list(_inside(path, lag_max, age_ms_max))
    wrong = [finding for finding in findings if finding.level == "wrong"]
    if as_json:
        write_items([finding._asdict() for finding in findings], path=file, healthy=not wrong)
    else:
        _show(findings, wrong)
    if wrong:
        raise typer.Exit(1)


def _show(findings: list[Finding], wrong: list[Finding]) -> None:
    marks = {"ok": Text("ok", "green"), "note": Text("note", "yellow"), "wrong": Text("wrong", "bold red")}
    columns = [Column(""), Column("", style="bold"), Column("", overflow="fold")]
    shown = Table(columns, has_header=False)
    for finding in findings:
        shown.add_row(marks[finding.level], finding.check, finding.what)
        if finding.next:
            shown.add_row("", "", Text(f"next: {finding.next}", "dim"))
    show_table(shown)
    verdict = Text(f"{plural(len(wrong), 'thing')} wrong", "bold red") if wrong else Text("healthy", "bold green")
    say(verdict)


# --- around the log -------------------------------------------------------------------------------------------------


def _environment(file: str) -> Iterator[Finding]:
    yield _sqlite_version(apsw.sqlite_lib_version())
    yield from _sqlite3_module(sqlite3.sqlite_version)
    yield _file_system(file)
    free = shutil.disk_usage(file).free
    if free < DISK_FREE_BYTES_ALARM:
        yield Finding("disk", "wrong", f"only {format_size(free)} free", "Free some, before publishing fails")
    else:
        yield Finding("disk", "ok", f"{format_size(free)} free")
    yield from _processes(file)


def _sqlite_version(version: str) -> Finding:
    if not _is_safe(version):
        return Finding(
            "sqlite",
            "wrong",
            f"{version} can lose commits in WAL mode",
            "Upgrade to 3.51.3 or newer: pip install -U apsw",
        )
    return Finding("sqlite", "ok", f"{version}, safe (3.51.3 or newer)")


def _sqlite3_module(version: str) -> Iterator[Finding]:
    """Headwater does not use Python's own module, but a program beside it may."""
    if not _is_safe(version):
        yield Finding(
            "sqlite3 module",
            "note",
            f"{version} in this Python; Headwater does not use it. A program that writes to this file through it can "
            "lose a commit, if another process writes or checkpoints at the same instant",
            "Only for such a program: use apsw, or a Python with SQLite 3.51.3 or newer",
        )


def _is_safe(version: str) -> bool:
    return tuple(int(part) for part in version.split(".")[:3]) >= SQLITE_SAFE


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
        yield Finding("environment", "note", what, f"On its machine: headwater doctor {health['path']}")
    else:
        yield Finding("log", "note", "in the server's memory: gone when the server stops", "Serve a file instead")


def _spark() -> Iterator[Finding]:
    """What the pipeline would run on. A log is healthy without it, so nothing here is wrong."""
    # Imported here: other commands have no use for it. Spark itself is looked at from outside; importing it takes long.
    from headwater.pipeline.jvm import JAVA_FEATURE_MIN, find_java, spark_folder

    if spark_folder() is None:
        yield Finding("spark", "note", "not installed; only the pipeline needs it", install_hint("spark"))
        return
    yield Finding("spark", "ok", f"PySpark {importlib.metadata.version('pyspark')}")
    try:
        java = find_java()
    except HeadwaterError as exc:
        yield Finding("java", "note", exc.why, exc.next)
        return
    for why in java.passed_over:
        yield Finding(
            "java", "note", f"passed over: {why}", f"Set JAVA_HOME to a Java that is {JAVA_FEATURE_MIN} or newer"
        )
    yield Finding("java", "ok", f"{java.version} in {java.home}, from {java.found_in}")


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
    except NotALogError:
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
        f"{format_size(size)} of write-ahead log",
        "End the oldest reader: while it reads, the log behind it cannot shrink" if too_large else "",
    )
    if left > 0:
        readers = ", ".join(map(str, sorted(lock_holders(file).readers))) or "not seen from here"
        yield Finding(
            "oldest reader",
            "wrong" if too_large else "note",
            f"a reader still needs {plural(left, 'page')} of the write-ahead log; processes that read now: {readers}",
            "A transaction left open? End it, or the process",
        )
    else:
        yield Finding("oldest reader", "ok", "none holds the write-ahead log back")


def _free_pages(health: dict[str, Any], file: str) -> Finding:
    free, pages = health["free_pages"], health["pages"]
    size = free * health["page_size"]
    if size > FREE_BYTES_NOTED and free > pages * FREE_PAGES_SHARE_NOTED:
        return Finding(
            "free pages", "note", f"{format_size(size)} of the file are unused", f"headwater retention run {file}"
        )
    return Finding("free pages", "ok", f"{free:,} of {pages:,}")


def _subscriptions(infos: list[SubscriptionInfo], file: str, lag_max: int, age_ms_max: float) -> Iterator[Finding]:
    late = [info for info in infos if is_late(info, lag_max, age_ms_max)]
    for info in infos:
        if is_lake(info) and info.lag:
            yield Finding(
                "lake",
                "wrong" if info in late else "note",
                f"the lake of {info.id} is {plural(info.lag, 'message')} behind; it last moved {clock(info.active_ms)}",
                f"Run the pipeline; or, if that lake is gone: headwater subscriptions rm {file} {info.id}",
            )
    for info in late:
        if is_lake(info):
            continue
        at_least = "at least " if info.lag_is_least else ""
        waited = format_seconds(info.oldest_unacked_s or 0)
        yield Finding(
            "lag",
            "wrong",
            f"{info.id} is {at_least}{plural(info.lag, 'message')} behind, the oldest for {waited}",
            f"Start its consumer, or remove it: headwater subscriptions rm {file} {info.id}"
            if not held_by(info)
            else f"Speed up its consumer ({held_by(info)})",
        )
    for info in infos:
        if info.gaps:
            yield Finding(
                "gaps",
                "note",
                f"{info.id} lost {plural(info.gaps, 'message')} that retention deleted before they were acked",
                "Set the policy with --keep-unacked if that must not be",
            )
    if not late:
        yield Finding("lag", "ok", f"{plural(len(infos), 'subscription')}, none too far behind")


def _dead_letters(log: headwater.Log, file: str) -> Finding:
    total = log.dead_letters.statistics().total
    if total:
        return Finding("dead letters", "note", plural(total, "dead letter"), f"headwater dlq {file}")
    return Finding("dead letters", "ok", "none")


# --- PostgreSQL -------------------------------------------------------------------------------------------------------


def database_findings(health: dict[str, Any]) -> Iterator[Finding]:
    yield Finding(
        "postgres", "ok", f"{health['postgres']}, schema {health['schema']}, {format_size(health['file_bytes'])}"
    )
    yield Finding("writing", "ok", "a transaction could be committed")
    yield from _durability(health)
    yield _connections(health)
    yield _vacuum(health)
    yield _oldest(health)


def _durability(health: dict[str, Any]) -> Iterator[Finding]:
    level: Level = "ok" if health["durability"] == "full" else "note"
    yield Finding("durability", level, f"{health['durability']}, when opened like this; each process chooses its own")
    for setting in ("fsync", "full_page_writes"):
        if health[setting] != "on":
            what = f"the server runs with {setting} = {health[setting]}: a crash of the machine may lose everything"
            yield Finding(setting, "wrong", what, f"Set {setting} = on in postgresql.conf and restart")


def _connections(health: dict[str, Any]) -> Finding:
    used, most = health["connections"], health["max_connections"]
    what = f"{used} of at most {most}"
    if used > most * CONNECTIONS_SHARE_NOTED:
        return Finding("connections", "note", what, "Raise max_connections, or share logs within a process")
    return Finding("connections", "ok", what)


def _vacuum(health: dict[str, Any]) -> Finding:
    dead, live = sum(health["dead_tuples"].values()), sum(health["live_tuples"].values())
    what = f"{plural(dead, 'dead row')} beside {live:,} live ones"
    if health["autovacuum"] != "on":
        return Finding("vacuum", "wrong", f"autovacuum is off; {what}", "Set autovacuum = on")
    if dead > DEAD_TUPLES_NOTED and dead > live * DEAD_SHARE_NOTED:
        next = "Look for a transaction that is open for long; autovacuum cannot clean behind it"
        return Finding("vacuum", "note", what, next)
    return Finding("vacuum", "ok", what)


def _oldest(health: dict[str, Any]) -> Finding:
    age_s = health["oldest_reader_s"]
    if age_s > OLD_TRANSACTION_S_NOTED:
        what = f"{health['oldest_reader']} has been in a transaction for {format_seconds(age_s)}"
        return Finding("oldest transaction", "note", what, "End it: what was deleted since cannot be cleaned up")
    return Finding("oldest transaction", "ok", "none holds the clean-up back")


# --- the machine ------------------------------------------------------------------------------------------------------


NETWORK_FILE_SYSTEMS = frozenset((
    "9p", "afs", "beegfs", "ceph", "cifs", "coda", "davfs", "fuse.ceph", "fuse.glusterfs", "fuse.rclone", "fuse.s3fs",
    "fuse.sshfs", "glusterfs", "gpfs", "lustre", "ncpfs", "nfs", "nfs4", "ocfs2", "prl_fs", "smb3", "smbfs", "vboxsf",
))  # fmt: skip
MEMORY_FILE_SYSTEMS = frozenset(("tmpfs", "ramfs"))

# Where SQLite's locks lie in the -shm file (wal.c): one byte for the writer, five for readers.
_WRITE_LOCK_BYTE = 120
_READ_LOCK_BYTES = range(123, 128)


class MountPoint(NamedTuple):
    point: str
    file_system: str

    @property
    def is_network(self) -> bool:
        return self.file_system in NETWORK_FILE_SYSTEMS

    @property
    def is_memory(self) -> bool:
        return self.file_system in MEMORY_FILE_SYSTEMS


class Process(NamedTuple):
    pid: int
    command: str


class LockHolders(NamedTuple):
    """Processes, by pid, that write or read through the write-ahead log at this moment."""

    writers: set[int]
    readers: set[int]


def mount_of(file: str) -> MountPoint | None:
    """The file system a file lies on; None where there is no /proc/mounts."""
    try:
        mounts = Path("/proc/mounts").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    return find_mount(os.path.realpath(file), mounts)


def find_mount(file: str, mounts: str) -> MountPoint | None:
    """The line of /proc/mounts with the longest mount point above `file`; of equal ones the last, which covers."""
    best: MountPoint | None = None
    for line in mounts.splitlines():
        _, point, file_system = line.split(" ")[:3]
        point = point.replace("\\040", " ")
        above = file == point or file.startswith(point.rstrip("/") + "/")
        if above and (best is None or len(point) >= len(best.point)):
            best = MountPoint(point, file_system)
    return best


def processes_with(file: str) -> list[Process] | None:
    """Other processes that have the log open, as far as this user may see; None where there is no /proc."""
    wanted = {os.path.realpath(file) + suffix for suffix in ("", "-wal", "-shm")}
    try:
        pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    except OSError:
        return None
    return [Process(pid, _command(pid)) for pid in sorted(pids) if pid != os.getpid() and _has_open(pid, wanted)]


def _has_open(pid: int, wanted: set[str]) -> bool:
    try:
        with os.scandir(f"/proc/{pid}/fd") as descriptors:
            for descriptor in descriptors:
                try:
                    if os.readlink(descriptor.path) in wanted:
                        return True
                except OSError:
                    continue
    except OSError:  # gone meanwhile, or another user's
        return False
    return False


def _command(pid: int) -> str:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return "?"
    return " ".join(words).strip()[:80] or "?"


def lock_holders(file: str) -> LockHolders:
    """The other processes that hold SQLite's locks on the log right now."""
    try:
        inode = os.stat(f"{file}-shm").st_ino
        locks = Path("/proc/locks").read_text(encoding="ascii", errors="replace")
    except OSError:
        return LockHolders(set(), set())
    found = find_lock_holders(inode, locks)
    return LockHolders(found.writers - {os.getpid()}, found.readers - {os.getpid()})


def find_lock_holders(inode: int, locks: str) -> LockHolders:
    """Lines of /proc/locks: `1: POSIX ADVISORY READ 4711 fd:00:131 124 124`; `->` marks one that waits."""
    holders = LockHolders(set(), set())
    for line in locks.splitlines():
        words = line.split()
        if len(words) < 8 or words[1] != "POSIX" or not words[5].endswith(f":{inode}") or words[7] == "EOF":
            continue
        kind, pid, first, last = words[3], int(words[4]), int(words[6]), int(words[7])
        if kind == "WRITE" and first <= _WRITE_LOCK_BYTE <= last:
            holders.writers.add(pid)
        if kind == "READ" and first <= _READ_LOCK_BYTES[-1] and last >= _READ_LOCK_BYTES[0]:
            holders.readers.add(pid)
    return holders
