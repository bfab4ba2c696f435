"""The sweep takes what nobody needs, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest
from lake_data import on_one_day

from headwater.errors import Locked
from headwater.pipeline.lake.compaction import compact
from headwater.pipeline.lake.lock import LakeLock
from headwater.pipeline.lake.manifest import Manifest
from headwater.pipeline.lake.sealing import seal
from headwater.pipeline.lake.sweeping import vacuum

T = "bronze.messages"
HOUR_MS = 3_600_000


@pytest.fixture
def manifest(tmp_path: Path) -> Manifest:
    manifest = Manifest(tmp_path, create=True)
    for low in range(8):
        manifest.take_in(T, low, low + 1, seal([on_one_day([low + 1])], tmp_path, T, low, low + 1), 1)
    return manifest


def parquet_files(lake: Path) -> set[str]:
    return {path.relative_to(lake).as_posix() for path in lake.rglob("*.parquet*")}


def test_what_a_killed_run_left_goes(tmp_path: Path, manifest: Manifest) -> None:
    orphan = seal([on_one_day([9])], tmp_path, T, 8, 9)[0]
    half = tmp_path / "bronze/messages/.half.parquet.writing"
    half.write_bytes(b"PAR1")
    assert vacuum(tmp_path, manifest, 0, dry_run=True).files == 2
    assert half.exists()
    swept = vacuum(tmp_path, manifest, 0)
    assert (swept.files, swept.bytes) == (2, orphan.bytes + 4)
    assert parquet_files(tmp_path) == {file.path for file in manifest.files(T)}


def test_replaced_files_stay_for_running_queries_first(tmp_path: Path, manifest: Manifest) -> None:
    compact(tmp_path, manifest, T)
    dropped_ms = 10**14
    assert vacuum(tmp_path, manifest, 0).files == 0
    assert vacuum(tmp_path, manifest, dropped_ms).files == 8
    assert parquet_files(tmp_path) == {file.path for file in manifest.files(T)}
    assert manifest.dropped(dropped_ms) == []


def test_files_that_are_no_tables_are_not_touched(tmp_path: Path, manifest: Manifest) -> None:
    mine = tmp_path / "notes.parquet"
    mine.write_bytes(b"mine")
    vacuum(tmp_path, manifest, 10**14)
    assert mine.exists()


def test_one_run_at_a_time(tmp_path: Path) -> None:
    with LakeLock(tmp_path), pytest.raises(Locked, match="another run"), LakeLock(tmp_path):
        pass
    with LakeLock(tmp_path):
        pass
