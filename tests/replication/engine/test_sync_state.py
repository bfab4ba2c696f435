"""What is remembered beside a database, and one sync at a time."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from headwater.errors import DiskFullError, InputOutputError, LockedError
from headwater.replication.names import Remote, ReplicaName, VersionName
from headwater.replication.sync_state import REMOTES_MAX, SyncRecord, SyncState

REMOTE = Remote("ws://host:8765", ReplicaName("ns", "app.db"))
OTHER = Remote("ws://other", ReplicaName("ns", "app.db"))
NOTED = SyncRecord(replica_id="r1", base=3, dbhash="ab" * 20, last_push_id="p1")
HOLDER = """
import sys
from headwater.replication.sync_state import SyncState
with SyncState(sys.argv[1]):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_what_is_noted_is_known_by_remote_whatever_the_version(tmp_path: Path) -> None:
    database = str(tmp_path / "app.db")
    with SyncState(database) as beside:
        assert beside.load(REMOTE) == SyncRecord()
        beside.save(REMOTE, NOTED)
        beside.save(OTHER, SyncRecord(base=9), durable=False)
    with SyncState(database) as beside:
        assert beside.load(Remote(REMOTE.url_base, REMOTE.name, VersionName(number=1))) == NOTED
        assert beside.load(OTHER).base == 9
    assert sorted(os.listdir(database + "-headwater")) == ["lock", "state.json"]


def test_the_remotes_that_are_remembered_are_limited(tmp_path: Path) -> None:
    with SyncState(str(tmp_path / "app.db")) as beside:
        for n in range(REMOTES_MAX + 5):
            beside.save(Remote("ws://host", ReplicaName("ns", f"n{n}")), SyncRecord(base=n), durable=False)
        assert beside.load(Remote("ws://host", ReplicaName("ns", "n4"))).base == 0
        assert beside.load(Remote("ws://host", ReplicaName("ns", "n5"))).base == 5


def test_nothing_noted_leaves_nothing_behind(tmp_path: Path) -> None:
    with SyncState(str(tmp_path / "app.db")) as beside:
        Path(beside.snapshot_path).touch()
    assert os.listdir(tmp_path) == []


def test_an_unreadable_state_says_nothing(tmp_path: Path) -> None:
    with SyncState(str(tmp_path / "app.db")) as beside:
        beside.save(REMOTE, NOTED)
        for damage in (b"", b"{", b'{"remotes": 3}', b"\xff"):
            (tmp_path / "app.db-headwater" / "state.json").write_bytes(damage)
            assert beside.load(REMOTE) == SyncRecord()


def test_one_process_at_a_time_and_a_killed_one_is_swept_up(tmp_path: Path) -> None:
    database = str(tmp_path / "app.db")
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, database], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        left = Path(database + "-headwater") / "snapshot.db"
        left.touch()
        with pytest.raises(LockedError, match="another sync"), SyncState(database):
            pass
        assert left.exists(), "the refused process swept"
    finally:
        holder.kill()
        holder.communicate()
    with SyncState(database):
        assert not left.exists()
        with pytest.raises(LockedError), SyncState(database):  # nor twice in one process
            pass


def test_a_link_to_a_database_is_that_database(tmp_path: Path) -> None:
    (tmp_path / "link.db").symlink_to(tmp_path / "app.db")
    with SyncState(str(tmp_path / "app.db")), pytest.raises(LockedError), SyncState(str(tmp_path / "link.db")):
        pass


def test_a_place_that_cannot_be_written_is_reported(tmp_path: Path) -> None:
    with (
        pytest.raises(InputOutputError, match=r"does not exist.*mkdir -p"),
        SyncState(str(tmp_path / "away" / "app.db")),
    ):
        (tmp_path / "never").touch()
    with pytest.raises(InputOutputError, match="write access"), SyncState(str(tmp_path / ("x" * 250))):
        (tmp_path / "never").touch()
    assert not (tmp_path / "never").exists()


def test_a_full_disk_is_reported_and_what_was_noted_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with SyncState(str(tmp_path / "app.db")) as beside:
        beside.save(REMOTE, NOTED)

        def full(_: int) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        with monkeypatch.context() as broken:
            broken.setattr(os, "fsync", full)
            with pytest.raises(DiskFullError):
                beside.save(REMOTE, SyncRecord(base=4))
        assert beside.load(REMOTE) == NOTED
    assert sorted(os.listdir(beside.directory)) == ["lock", "state.json"]


def test_a_directory_that_points_nowhere_is_reported(tmp_path: Path) -> None:
    """It was moved to another disk, which is not mounted now."""
    os.symlink(tmp_path / "not mounted", tmp_path / "app.db-headwater")
    with pytest.raises(InputOutputError), SyncState(str(tmp_path / "app.db")):
        pass
    assert os.path.islink(tmp_path / "app.db-headwater")
