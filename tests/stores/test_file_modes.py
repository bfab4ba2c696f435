"""Files that hold messages can be read by their user alone, unless they were there before with another mode."""

from __future__ import annotations

import asyncio
import os
import stat
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

import headwater
from headwater.stores.dedupe import open_dedupe
from headwater.wiring import open_transport


@pytest.fixture(autouse=True)
def generous_umask() -> Iterator[None]:
    before = os.umask(0o000)
    yield
    os.umask(before)


def modes(directory: Path) -> dict[str, int]:
    return {path.name: stat.S_IMODE(path.stat().st_mode) for path in directory.iterdir()}


def test_a_log_and_what_lies_beside_it(tmp_path: Path) -> None:
    with headwater.open(tmp_path / "log.db") as log:
        log.publish("a", 1)
        found = modes(tmp_path)
        assert {"log.db", "log.db-wal", "log.db-shm"} <= found.keys()
        assert set(found.values()) == {0o600}


def test_a_log_whose_file_others_may_read_stays_so(tmp_path: Path) -> None:
    (tmp_path / "log.db").touch(0o640)
    with headwater.open(tmp_path / "log.db") as log:
        log.publish("a", 1)
        assert set(modes(tmp_path).values()) == {0o640}


async def _announce(path: Path) -> None:
    async with headwater.serve(path, port=0):
        pass


def test_what_a_server_makes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    asyncio.run(_announce(tmp_path / "log.db"))
    folders = {name for name in modes(tmp_path) if (tmp_path / name).is_dir()}
    for name, mode in modes(tmp_path).items():
        assert mode == (0o700 if name in folders else 0o600), name


def test_which_messages_a_handler_has_had(tmp_path: Path) -> None:
    with open_dedupe(tmp_path / "had.db"):
        assert set(modes(tmp_path).values()) == {0o600}


def test_copies_in_a_file(tmp_path: Path) -> None:
    with closing(open_transport(f"file://{tmp_path}/copies.jsonl")):
        assert set(modes(tmp_path).values()) == {0o600}
