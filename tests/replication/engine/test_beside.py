"""What is remembered beside a database, and one sync at a time."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from headwater.errors import DiskFull, InputOutput, Locked
from headwater.replication.beside import REMOTES_MAX, Beside, Noted
from headwater.replication.names import Remote, ReplicaName, VersionName

REMOTE = Remote("ws://host:8765", ReplicaName("ns", "app.db"))
OTHER = Remote("ws://other", ReplicaName("ns", "app.db"))
NOTED = Noted(replica_id="r1", base=3, dbhash="ab" * 20, last_push_id="p1")
HOLDER = """
import sys
from headwater.replication.beside import Beside
with Beside(sys.argv[1]):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_what_is_noted_is_known_by_remote_whatever_the_version(tmp_path: Path) -> None:
    database = str(tmp_path / "app.db")
    with Beside(database) as beside:
        assert beside.noted(REMOTE) == Noted()
        beside.note(REMOTE, NOTED)
        beside.note(OTHER, Noted(base=9), durable=False)
    with Beside(database) as beside:
        assert beside.noted(Remote(REMOTE.url_base, REMOTE.name, VersionName(number=1))) == NOTED
        assert beside.noted(OTHER).base == 9
    assert sorted(os.listdir(database + "-headwater")) == ["lock", "state.json"]


def test_the_remotes_that_are_remembered_are_limited(tmp_path: Path) -> None:
    with Beside(str(tmp_path / "app.db")) as beside:
        for n in range(REMOTES_MAX + 5):
            beside.note(Remote("ws://host", ReplicaName("ns", f"n{n}")), Noted(base=n), durable=False)
        assert beside.noted(Remote("ws://host", ReplicaName("ns", "n4"))).base == 0
        assert beside.noted(Remote("ws://host", ReplicaName("ns", "n5"))).base == 5


def test_nothing_noted_leaves_nothing_behind(tmp_path: Path) -> None:
    with Beside(str(tmp_path / "app.db")) as beside:
        Path(beside.snapshot_path).touch()
    assert os.listdir(tmp_path) == []


def test_an_unreadable_state_says_nothing(tmp_path: Path) -> None:
    with Beside(str(tmp_path / "app.db")) as beside:
        beside.note(REMOTE, NOTED)
        for damage in (b"", b"{", b'{"remotes": 3}', b"\xff"):
            (tmp_path / "app.db-headwater" / "state.json").write_bytes(damage)
            assert beside.noted(REMOTE) == Noted()


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
        with pytest.raises(Locked, match="another sync"), Beside(database):
            pass
        assert left.exists(), "the one who was refused swept"
    finally:
        holder.kill()
        holder.communicate()
    with Beside(database):
        assert not left.exists()
        with pytest.raises(Locked), Beside(database):  # nor twice in one process
            pass


def test_a_link_to_a_database_is_that_database(tmp_path: Path) -> None:
    (tmp_path / "link.db").symlink_to(tmp_path / "app.db")
    with Beside(str(tmp_path / "app.db")), pytest.raises(Locked), Beside(str(tmp_path / "link.db")):
        pass


def test_a_place_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    with pytest.raises(InputOutput, match=r"does not exist.*mkdir -p"), Beside(str(tmp_path / "away" / "app.db")):
        (tmp_path / "never").touch()
    with pytest.raises(InputOutput, match="write access"), Beside(str(tmp_path / ("x" * 250))):
        (tmp_path / "never").touch()
    assert not (tmp_path / "never").exists()


def test_a_full_disk_is_told_and_what_was_noted_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Beside(str(tmp_path / "app.db")) as beside:
        beside.note(REMOTE, NOTED)

        def full(_: int) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        with monkeypatch.context() as broken:
            broken.setattr(os, "fsync", full)
            with pytest.raises(DiskFull):
                beside.note(REMOTE, Noted(base=4))
        assert beside.noted(REMOTE) == NOTED
    assert sorted(os.listdir(beside.directory)) == ["lock", "state.json"]


def test_a_directory_that_points_nowhere_is_told(tmp_path: Path) -> None:
    """Somebody put it on another disk, which is not there now."""
    os.symlink(tmp_path / "not mounted", tmp_path / "app.db-headwater")
    with pytest.raises(InputOutput), Beside(str(tmp_path / "app.db")):
        pass
    assert os.path.islink(tmp_path / "app.db-headwater")
