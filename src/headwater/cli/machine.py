"""What the machine says about a file: its file system, who has it open, who reads it. Only looks; opens nothing.

(Opening and closing a database file in a process that has SQLite connections on it would drop SQLite's locks.)
"""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import NamedTuple

NETWORK_FILE_SYSTEMS = frozenset(
    [
        "9p",
        "afs",
        "beegfs",
        "ceph",
        "cifs",
        "coda",
        "davfs",
        "fuse.ceph",
        "fuse.glusterfs",
        "fuse.rclone",
        "fuse.s3fs",
        "fuse.sshfs",
        "glusterfs",
        "gpfs",
        "lustre",
        "ncpfs",
        "nfs",
        "nfs4",
        "ocfs2",
        "prl_fs",
        "smb3",
        "smbfs",
        "vboxsf",
    ]
)
MEMORY_FILE_SYSTEMS = frozenset(("tmpfs", "ramfs"))

# Where SQLite's locks lie in the -shm file (wal.c): one byte for the writer, five for readers.
_WRITE_LOCK_BYTE = 120
_READ_LOCK_BYTES = range(123, 128)


class Mount(NamedTuple):
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


def mount_of(file: str) -> Mount | None:
    """The file system a file lies on; None where there is no /proc/mounts."""
    try:
        mounts = Path("/proc/mounts").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    return find_mount(os.path.realpath(file), mounts)


def find_mount(file: str, mounts: str) -> Mount | None:
    """The line of /proc/mounts with the longest mount point above `file`; of equal ones the last, which covers."""
    best: Mount | None = None
    for line in mounts.splitlines():
        _, point, file_system = line.split(" ")[:3]
        point = point.replace("\\040", " ")
        above = file == point or file.startswith(point.rstrip("/") + "/")
        if above and (best is None or len(point) >= len(best.point)):
            best = Mount(point, file_system)
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
    """Who holds SQLite's locks on the log right now, besides this process."""
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


def machine() -> str:
    """The processor and the system, in one line."""
    model = platform.processor() or platform.machine()
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                model = line.partition(":")[2].strip()
                break
    except OSError:
        pass
    return f"{model}, {os.cpu_count()} cores, {platform.system()} {platform.release()}"
