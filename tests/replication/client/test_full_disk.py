"""The local disk is full: the error names the right file, and nothing is left behind."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from small_disk import fill, small_file_system

import headwater
from headwater.errors import DiskFullError


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    with small_file_system(tmp_path / "small", "1m") as directory:
        yield directory


@pytest.mark.parametrize("is_full", [False, True], ids=["too small", "full"])
@pytest.mark.parametrize("mode", ["wal", "delete"])
def test_a_pull_and_a_copy_into_no_room(client: Any, make: Any, small: Path, mode: str, is_full: bool) -> None:
    database = make(mode=mode, rows=8_000)
    client.push(database)
    if is_full:
        fill(small)
    there = sorted(small.iterdir())
    for source in (f"{client.url}/ns/app.db", database.path):
        with pytest.raises(DiskFullError) as raised:
            headwater.sync(source, small / "new.db")
        assert (raised.value.where, raised.value.next[:20]) == (str(small / "new.db"), "Free some disk space")
        assert sorted(small.iterdir()) == there


def test_a_pull_that_grows_a_file_beyond_its_disk_leaves_it_as_it_was(client: Any, make: Any, small: Path) -> None:
    client.push(make(rows=100))
    headwater.sync(f"{client.url}/ns/app.db", small / "copy.db")
    content = (small / "copy.db").read_bytes()
    client.push(make("large.db", rows=8_000), "ns/app.db@latest")
    with pytest.raises(DiskFullError) as raised:
        headwater.sync(f"{client.url}/ns/app.db", small / "copy.db")
    assert raised.value.where == str(small / "copy.db")
    assert (small / "copy.db").read_bytes() == content
    fill(small).unlink()
    client.push(make("small.db", rows=200), "ns/app.db@latest")
    assert headwater.sync(f"{client.url}/ns/app.db", small / "copy.db").version == 3


@pytest.mark.parametrize("mode", ["wal", "delete"])
def test_a_push_from_a_full_disk(client: Any, make: Any, small: Path, mode: str) -> None:
    shutil.copy(make(mode=mode, rows=100).path, small / "app.db")
    filler = fill(small)
    with pytest.raises(DiskFullError) as raised:
        headwater.sync(small / "app.db", f"{client.url}/ns/app.db")
    assert "Free some disk space" in raised.value.next
    filler.unlink()
    if mode == "wal":  # with a rollback journal it takes more room than there ever is
        assert headwater.sync(small / "app.db", f"{client.url}/ns/app.db").version == 1
