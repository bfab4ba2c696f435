"""The manifest is the truth: a stretch is in once, or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from headwater.errors import InvalidOption, StoreError
from headwater.pipeline.lake.manifest import LakeFile, Manifest

T = "bronze.messages"


def file(path: str, low: int = 1, high: int = 9, *, table: str = T, day: str | None = None) -> LakeFile:
    return LakeFile(path, table, high - low + 1, 100, "0" * 64, low, high, day)


@pytest.fixture
def manifest(tmp_path: Path) -> Manifest:
    return Manifest(tmp_path / "lake", create=True)


def test_looking_does_not_make_a_lake(tmp_path: Path) -> None:
    with pytest.raises(InvalidOption, match="no lake here"):
        Manifest(tmp_path / "lake")
    assert not (tmp_path / "lake").exists()


def test_files_and_mark_come_together(manifest: Manifest) -> None:
    assert manifest.take_in(T, 0, 9, [file("a")], 5)
    assert manifest.mark(T) == 9
    assert manifest.files(T) == [file("a")]
    assert [(batch.after, batch.upto, batch.rows) for batch in manifest.batches()] == [(0, 9, 9)]


def test_a_stretch_that_is_in_changes_nothing(manifest: Manifest) -> None:
    manifest.take_in(T, 0, 9, [file("a")], 5)
    assert not manifest.take_in(T, 0, 9, [file("again")], 6)
    assert [each.path for each in manifest.files(T)] == ["a"]


@pytest.mark.parametrize(("after", "upto"), [(10, 20), (5, 12)])
def test_a_stretch_must_begin_where_the_table_ends(manifest: Manifest, after: int, upto: int) -> None:
    manifest.take_in(T, 0, 9, [file("a")], 5)
    with pytest.raises(StoreError, match="up to seq 9"):
        manifest.take_in(T, after, upto, [file("b", after + 1, upto)], 6)
    assert manifest.mark(T) == 9
    assert [each.path for each in manifest.files(T)] == ["a"]


def test_what_is_left_of_a_killed_run_comes_too_late(manifest: Manifest) -> None:
    manifest.begin_run("one")
    assert manifest.take_in(T, 0, 9, [file("a")], 5, run="one")
    manifest.begin_run("two")
    with pytest.raises(StoreError, match="another run"):
        manifest.take_in(T, 9, 12, [file("b", 10, 12)], 6, run="one")
    assert manifest.mark(T) == 9


def test_the_clock_may_go_back(manifest: Manifest) -> None:
    manifest.add_audit({"n": 1}, 1_000)
    manifest.add_audit({"n": 2}, 500)
    assert manifest.last_audit() == {"n": 2}


def test_what_is_no_manifest_is_refused(tmp_path: Path) -> None:
    (tmp_path / "manifest.db").write_bytes(b"not a database, but long enough to be looked at" * 100)
    with pytest.raises(StoreError):
        Manifest(tmp_path)


def test_a_failed_swap_changes_nothing(manifest: Manifest) -> None:
    manifest.take_in(T, 0, 9, [file("a")], 5)
    with pytest.raises(StoreError, match="not in the lake any more"):
        manifest.swap([file("a"), file("gone")], [file("merged")], 6)
    assert [each.path for each in manifest.files(T)] == ["a"]
    assert manifest.dropped(10**15) == []


def test_replaced_files_are_remembered_for_the_sweep(manifest: Manifest) -> None:
    manifest.take_in(T, 0, 9, [file("a"), file("b")], 5)
    manifest.swap([file("a"), file("b")], [file("ab")], 100)
    assert manifest.dropped(100) == []
    assert manifest.dropped(101) == ["a", "b"]
    assert manifest.known_paths() == {"a", "b", "ab"}


def test_days_are_replaced_and_others_stay(manifest: Manifest) -> None:
    first = [file("v1", table="gold.volume", day="2026-03-01"), file("v2", table="gold.volume", day="2026-03-02")]
    manifest.publish([("gold.volume", first, None)], 1, marks={"gold": 9})
    again = file("v2b", table="gold.volume", day="2026-03-02")
    manifest.publish([("gold.volume", [again], ["2026-03-02"])], 2, marks={"gold": 12})
    assert [each.path for each in manifest.files("gold.volume")] == ["v1", "v2b"]
    assert manifest.mark("gold") == 12


def test_a_lake_stays_with_its_log(manifest: Manifest) -> None:
    manifest.bind_to_log("a.db", 1, 2, 3)
    manifest.bind_to_log("moved/a.db", 1, 2, 4)
    with pytest.raises(InvalidOption, match="belongs to another log"):
        manifest.bind_to_log("b.db", 1, 99, 5)


def test_the_last_audit_is_kept(manifest: Manifest) -> None:
    assert manifest.last_audit() is None
    manifest.add_audit({"whole": False}, 1)
    manifest.add_audit({"whole": True}, 2)
    assert manifest.last_audit() == {"whole": True}


def test_files_above_a_seq(manifest: Manifest) -> None:
    manifest.take_in(T, 0, 9, [file("a")], 5)
    manifest.take_in(T, 9, 20, [file("b", 10, 20)], 5)
    assert [each.path for each in manifest.files(T, after=9)] == ["b"]
