"""Small files become large ones, and every row stays."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from lake_data import on_one_day

from headwater.errors import Corrupt
from headwater.pipeline.lake import compaction
from headwater.pipeline.lake.compaction import MERGED_AT_ONCE, TARGET_BYTES, compact, plan_compaction, size_class
from headwater.pipeline.lake.manifest import LakeFile, Manifest
from headwater.pipeline.lake.sealing import seal

T = "bronze.messages"


def files_of(sizes: list[int], prefix: str = "orders") -> list[LakeFile]:
    return [
        LakeFile(f"{prefix}-{at}", T, 1, size, "", at + 1, at + 1, "2026-03-01", prefix)
        for at, size in enumerate(sizes)
    ]


def test_fewer_than_eight_small_ones_wait() -> None:
    assert plan_compaction(files_of([1_000] * 7)) == []
    assert plan_compaction(files_of([1_000] * 8)) == [files_of([1_000] * 8)]


def test_a_large_file_is_not_rewritten_for_small_neighbours() -> None:
    sizes = [50_000_000, *[1_000] * 7]
    assert plan_compaction(files_of(sizes)) == []


def test_prefixes_are_kept_apart() -> None:
    files = [*files_of([1_000] * 4, "a"), *files_of([1_000] * 4, "b")]
    assert plan_compaction(files) == []
    assert [len(group) for group in plan_compaction(files, everything=True)] == [4, 4]


@given(st.lists(st.integers(1, 200_000_000), max_size=60), st.booleans())
def test_a_plan_merges_neighbours_of_one_place_within_the_target(sizes: list[int], everything: bool) -> None:
    files = files_of(sizes)
    planned = plan_compaction(files, everything=everything)
    for group in planned:
        at = files.index(group[0])
        assert group == files[at : at + len(group)]
        assert len(group) >= 2
        assert sum(file.bytes for file in group) <= TARGET_BYTES


@given(st.lists(st.integers(1, 400_000), min_size=1, max_size=400))
def test_after_any_number_of_batches_few_files_are_left(sizes: list[int]) -> None:
    kept: list[int] = []
    written = 0
    for size in sizes:
        kept.append(size)
        while plan := plan_compaction(files_of(kept)):
            (group,) = plan
            low, high = group[0].seq_from - 1, group[-1].seq_from
            merged = sum(kept[low:high])
            kept[low:high] = [merged]
            written += merged
    classes = {size_class(size) for size in kept}
    assert len(kept) < MERGED_AT_ONCE * (len(classes) + 1) ** 2
    assert sum(kept) == sum(sizes)


def test_rows_survive_in_order_and_old_files_stay_until_the_sweep(tmp_path: Path) -> None:
    manifest = Manifest(tmp_path, create=True)
    for low in range(0, 80, 10):
        manifest.take_in(T, low, low + 10, seal([on_one_day(range(low + 1, low + 11))], tmp_path, T, low, low + 10), 1)
    before = manifest.files(T)
    assert compact(tmp_path, manifest, T) == 7
    (merged,) = manifest.files(T)
    assert (merged.seq_from, merged.seq_to, merged.rows) == (1, 80, 80)
    assert pq.ParquetFile(tmp_path / merged.path).read()["seq"].to_pylist() == list(range(1, 81))
    assert all((tmp_path / file.path).exists() for file in before)


def test_a_damaged_file_is_not_copied(tmp_path: Path) -> None:
    manifest = Manifest(tmp_path, create=True)
    for low in range(8):
        manifest.take_in(T, low, low + 1, seal([on_one_day([low + 1])], tmp_path, T, low, low + 1), 1)
    path = tmp_path / manifest.files(T)[3].path
    content = bytearray(path.read_bytes())
    content[20] ^= 1
    path.write_bytes(content)
    with pytest.raises(Corrupt, match="not as it was sealed"):
        compact(tmp_path, manifest, T)
    assert len(manifest.files(T)) == 8


def test_a_failed_merge_leaves_the_table_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = Manifest(tmp_path, create=True)
    for low in range(8):
        manifest.take_in(T, low, low + 1, seal([on_one_day([low + 1])], tmp_path, T, low, low + 1), 1)
    before = manifest.files(T)

    def fail(*args: object) -> str:
        raise OSError("disk full")

    monkeypatch.setattr(compaction, "finish", fail)
    with pytest.raises(OSError, match="disk full"):
        compact(tmp_path, manifest, T)
    assert manifest.files(T) == before
    assert list(tmp_path.rglob("*.writing")) == []
