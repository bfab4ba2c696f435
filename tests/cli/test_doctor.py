"""`headwater doctor`, and what it reads from the machine."""

import subprocess
import sys
from pathlib import Path

import apsw
import pytest

from headwater.cli.doctor import _sqlite_version
from headwater.cli.machine import LockHolders, Mount, find_lock_holders, find_mount

linux_only = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")

READER = """
import sys, apsw
connection = apsw.Connection(sys.argv[1])
connection.execute("BEGIN; SELECT count(*) FROM messages")
print("reading", flush=True)
sys.stdin.read()
"""


def findings(result) -> dict[str, dict[str, str]]:
    return {finding["check"]: finding for finding in result.json["findings"]}


def test_a_healthy_log(run, log, path: Path):
    result = run("doctor", path)
    assert result.code == 0
    assert result.out.splitlines()[-1] == "healthy"
    found = run("doctor", path, "--json")
    assert found.json["healthy"] is True
    checks = {"sqlite", "file system", "disk", "schema", "integrity", "wal", "oldest reader", "free pages", "lag"}
    assert checks <= findings(found).keys()


def test_lag_is_wrong(run, log, path: Path):
    log.subscribe("billing", "orders.>").close()
    result = run("doctor", path, "--lag-max", 2)
    assert result.code == 1
    assert "billing is 3 messages behind" in result.out
    assert "next: Start its consumer, or remove it" in result.out
    assert result.out.splitlines()[-1] == "1 thing wrong"


def test_a_lock_held_too_long_is_wrong(run, log, path: Path):
    holder = apsw.Connection(str(path))
    holder.execute("BEGIN IMMEDIATE")
    result = run("doctor", path, "--json")
    holder.close()
    assert result.code == 1
    assert findings(result)["log"]["level"] == "wrong"
    assert "write lock" in findings(result)["log"]["next"]


def test_a_broken_file_is_wrong(run, log, path: Path):
    log.publish_many([("n", "x" * 1_000)] * 500)
    log.close()
    with path.open("r+b") as file:
        file.seek(40 * 4096)
        file.write(b"\xff" * 4096 * 20)
    result = run("doctor", path)
    assert result.code == 1
    assert "wrong  integrity" in result.out or "wrong  log" in result.out


def test_another_file_is_no_patient(run, path: Path):
    path.write_text("no database" * 1_000)
    assert run("doctor", path).code == 3


@linux_only
def test_a_reader_in_another_process_is_named(run, log, path: Path):
    reader = subprocess.Popen(
        [sys.executable, "-c", READER, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with reader:
        assert reader.stdout.readline() == "reading\n"
        log.publish("orders.new", 1)
        found = findings(run("doctor", path, "--json"))
        reader.stdin.close()
    assert f"{reader.pid} has it open and is reading" in found["processes"]["what"]
    assert found["oldest reader"]["level"] == "note"
    assert str(reader.pid) in found["oldest reader"]["what"]


def test_mounts():
    mounts = "/dev/sda / ext4 rw 0 0\nserver:/x /mnt/my\\040share nfs4 rw 0 0\ntmpfs /mnt tmpfs rw 0 0\n"
    assert find_mount("/home/x", mounts) == Mount("/", "ext4")
    assert find_mount("/mnt/a.db", mounts).is_memory
    assert find_mount("/mnt/my share/a.db", mounts).is_network
    assert find_mount("/mntx/a.db", mounts) == Mount("/", "ext4")


def test_locks():
    locks = "\n".join(
        [
            "1: POSIX  ADVISORY  READ  11 fd:00:77 124 124",
            "2: POSIX  ADVISORY  WRITE 12 fd:00:77 120 120",
            "3: POSIX  ADVISORY  READ  13 fd:00:77 128 128",
            "4: POSIX  ADVISORY  READ  14 fd:00:78 124 124",
            "5: FLOCK  ADVISORY  WRITE 15 fd:00:77 0 EOF",
            "6: -> POSIX  ADVISORY  WRITE 16 fd:00:77 120 120",
        ]
    )
    assert find_lock_holders(77, locks) == LockHolders({12}, {11})


def test_old_sqlite_is_wrong():
    assert _sqlite_version("3.51.2").level == "wrong"
    assert _sqlite_version("3.51.3").level == "ok"
