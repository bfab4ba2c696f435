"""A copy from file to file."""

import errno
import os
import select
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headwater.errors import InvalidOption, NotADatabase
from headwater.replication import tools
from headwater.replication.proof import dbhash


@pytest.mark.parametrize("mode", ["wal", "delete"])
def test_a_copy_is_the_same_and_the_next_one_moves_only_what_changed(
    client_without_server: Any, make: Any, mode: str
) -> None:
    database = make(mode=mode)
    copied = client_without_server.copy("app.db", "copy.db")
    assert (copied.changed_pages, copied.version) == (copied.pages, None)
    for dry in (True, False):
        unchanged = client_without_server.copy("app.db", "copy.db", dry=dry)
        assert (unchanged.is_new, unchanged.changed_pages) == (False, 0)
    database.run("pragma user_version = 7")  # it is in the first page, and in no table
    for dry in (True, False):
        small = client_without_server.copy("app.db", "copy.db", dry=dry)
        assert (small.is_new, small.changed_pages) == (True, 1)
    database.write()
    dry = client_without_server.copy("app.db", "copy.db", dry=True)
    again = client_without_server.copy("app.db", "copy.db")
    assert (dry.changed_pages, dry.sent) == (again.changed_pages, again.sent)
    assert 1 <= again.changed_pages <= 2
    assert dbhash(again.remote) == dbhash(database.path)


def test_a_copy_takes_another_page_size(client_without_server: Any, make: Any) -> None:
    database, other = make(), make("other.db", page_size=1024, rows=10)
    assert (
        client_without_server.copy("app.db", "other.db", dry=True).changed_pages
        == client_without_server.copy("app.db", "other.db").pages
    )
    assert dbhash(other.path) == dbhash(database.path)
    assert other.run("pragma page_size") == [(4096,)]


def test_what_cannot_be_copied_is_refused_and_leaves_nothing(
    client_without_server: Any, make: Any, tmp_path: Path
) -> None:
    make()
    (tmp_path / "link.db").symlink_to(tmp_path / "app.db")
    with pytest.raises(InvalidOption, match="same file"):
        client_without_server.copy("app.db", "link.db")
    with pytest.raises(NotADatabase, match="no such file"):
        client_without_server.copy("missing.db", "copy.db")
    assert client_without_server.copy("app.db", "copy.db", dry=True).changed_pages > 10
    assert sorted(os.listdir(tmp_path)) == ["app.db", "link.db"]


def test_a_missing_source_is_told_also_when_there_is_a_target(client_without_server: Any, make: Any) -> None:
    make()
    with pytest.raises(NotADatabase, match="no such file"):
        client_without_server.copy("missing.db", "app.db")


@pytest.mark.parametrize("fails_at", [1, 2, 3, 4])
@pytest.mark.parametrize("dry", [False, True])
def test_a_machine_without_descriptors_or_processes_keeps_what_it_has(
    client_without_server: Any, make: Any, children: Any, monkeypatch: pytest.MonkeyPatch, fails_at: int, dry: bool
) -> None:
    make("source.db")
    pipe, calls, made = os.pipe, [0], []

    def scarce() -> tuple[int, int]:
        calls[0] += 1
        if calls[0] == fails_at:
            if fails_at > 2:  # there is an origin, and it has opened its database when it says something
                origin_says = made[1][0]
                assert select.select([origin_says], [], [], 10)[0]
            raise OSError(errno.EMFILE, "Too many open files")
        made.append(pipe())
        return made[-1]

    # For the two ends alone, which have two pipes each; not for others, nor for other threads.
    monkeypatch.setattr(tools, "os", SimpleNamespace(**{**vars(os), "pipe": scarce}))
    before = set(os.listdir("/proc/self/fd"))
    monkeypatch.setenv("TMPDIR", str(client_without_server._directory))
    monkeypatch.setattr(tempfile, "tempdir", None)
    there = sorted(os.listdir(client_without_server._directory))
    with pytest.raises(OSError, match="Too many"):
        client_without_server.copy("source.db", "target.db", dry=dry)
    monkeypatch.undo()
    assert calls == [fails_at]
    assert children() == []
    assert len(os.listdir("/proc/self/fd")) <= len(before)
    assert sorted(os.listdir(client_without_server._directory)) == there
