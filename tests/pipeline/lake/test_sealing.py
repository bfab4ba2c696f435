"""Batches in, finished files out."""

from __future__ import annotations

import datetime as dt
import hashlib
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from lake_data import DAY, batch_of, on_one_day

from headwater.pipeline.lake import sealing
from headwater.pipeline.lake.sealing import Prefixes, seal, split_by_place
from headwater.pipeline.schema import ARROW_SCHEMA

T = "bronze.messages"


def test_files_lie_by_day_and_prefix_and_say_what_they_hold(tmp_path: Path) -> None:
    rows = [(1, "orders.new", DAY), (2, "logs.x", DAY), (3, "orders.old", DAY + dt.timedelta(days=1))]
    files = seal([batch_of(rows)], tmp_path, T, 0, 3)
    assert [(each.day, each.prefix, each.rows, each.seq_from, each.seq_to) for each in files] == [
        ("2026-03-01", "orders", 1, 1, 1),
        ("2026-03-01", "logs", 1, 2, 2),
        ("2026-03-02", "orders", 1, 3, 3),
    ]
    for each in files:
        content = (tmp_path / each.path).read_bytes()
        assert len(content) == each.bytes
        assert hashlib.sha256(content).hexdigest() == each.sha256
    assert pq.read_metadata(tmp_path / files[0].path).metadata[b"headwater.schema"] == b"1"


def test_what_was_sealed_comes_back(tmp_path: Path) -> None:
    batches = [on_one_day(range(1, 100)), on_one_day(range(100, 150))]
    (file,) = seal(batches, tmp_path, T, 0, 149)
    found = pq.ParquetFile(tmp_path / file.path).read().cast(ARROW_SCHEMA)
    assert found.equals(pa.Table.from_batches(batches))


def test_no_messages_no_files(tmp_path: Path) -> None:
    assert seal([], tmp_path, T, 0, 10) == []
    assert seal([on_one_day([])], tmp_path, T, 0, 10) == []
    assert list(tmp_path.rglob("*.parquet*")) == []


def test_a_failure_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sealing, "OPEN_FILES_MAX", 1)  # so that one is finished when it fails

    def failing() -> Iterator[pa.RecordBatch]:
        yield on_one_day([1], "a.x")
        yield on_one_day([2], "b.x")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        seal(failing(), tmp_path, T, 0, 2)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_more_places_than_open_files_lose_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sealing, "OPEN_FILES_MAX", 3)
    monkeypatch.setattr(sealing, "BUFFERED_BYTES_MAX", 2_000)
    batches = [batch_of([(seq, f"t{seq % 10}.x", DAY) for seq in range(low, low + 20)]) for low in range(1, 200, 20)]
    files = seal(batches, tmp_path, T, 0, 200)
    seqs = [seq for each in files for seq in pq.ParquetFile(tmp_path / each.path).read()["seq"].to_pylist()]
    assert sorted(seqs) == list(range(1, 201))


@given(st.lists(st.tuples(st.sampled_from(["a.x", "b.y", "b", "ü.z"]), st.integers(-3, 3)), max_size=40))
def test_splitting_keeps_every_row_in_order(rows: list[tuple[str, int]]) -> None:
    batch = batch_of([(seq, topic, DAY + dt.timedelta(days=days)) for seq, (topic, days) in enumerate(rows, 1)])
    seen: list[int] = []
    for place, part in split_by_place(batch, Prefixes()):
        seqs = part.column("seq").to_pylist()
        assert seqs == sorted(seqs)
        assert {str(at.date()) for at in part.column("published_at").to_pylist()} == {place.day}
        assert {topic.split(".")[0] for topic in part.column("topic").to_pylist()} == {place.prefix}
        seen += seqs
    assert sorted(seen) == list(range(1, len(rows) + 1))


def test_first_tokens_that_are_ids_share_a_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sealing, "PREFIXES_MAX", 3)
    batch = batch_of([(seq, f"id{seq}.x", DAY) for seq in range(1, 51)])
    files = seal([batch], tmp_path, T, 0, 50, {"id7"})
    assert {file.prefix for file in files} == {"id7", "id1", "id2", "~"}
    assert sum(file.rows for file in files) == 50
