"""Versions on disk: deltas, rebuilt versions, and which old ones are removed."""

from __future__ import annotations

import io
import random
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.errors import CorruptError
from headwater.replication.host import disk
from headwater.replication.host import versions as store_versions
from headwater.replication.host.versions import Shape, StoredDelta, rebuild, shape_of, write_delta

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer
from headwater.errors import InvalidOptionError
from headwater.replication.host.catalogue import Version
from headwater.replication.host.versions import VersionRetention, surplus

GROUP_OVERHEAD_BYTES = 64


def database(page_size: int, contents: list[int]) -> bytes:
    """Not a real one: pages of random bytes behind a header that names the page size."""
    body = bytearray(b"".join(random.Random(seed).randbytes(page_size) for seed in contents))
    body[16:18] = (1 if page_size == 65536 else page_size).to_bytes(2, "big")
    return bytes(body)


def stored(folder: Path, versions: list[bytes]) -> tuple[Path, list[StoredDelta]]:
    """The newest whole, and the deltas from the newest of them to the oldest."""
    deltas = []
    for number in range(len(versions) - 1):
        older, newer = versions[number : number + 2]
        (folder / "older").write_bytes(older)
        (folder / "newer").write_bytes(newer)
        into = folder / f"{number}.pages"
        made = write_delta(str(folder / "older"), str(folder / "newer"), str(into))
        if made.identical:
            versions[number + 1] = older  # what is identical makes no version
            continue
        assert into.stat().st_size == made.bytes
        deltas.append(StoredDelta(str(into), made.sha256, shape_of(str(folder / "older"))))
    head = folder / "head"
    head.write_bytes(versions[-1])
    return head, deltas[::-1]


Edits = st.lists(
    st.one_of(
        st.tuples(st.just("change"), st.lists(st.integers(0, 30), max_size=5)),
        st.tuples(st.just("grow"), st.integers(1, 12)),
        st.tuples(st.just("shrink"), st.integers(1, 12)),
        st.tuples(st.just("page size"), st.sampled_from([512, 1024, 4096])),
        st.tuples(st.just("counters"), st.just(0)),
    ),
    max_size=8,
)


def edited(edits: list[tuple[str, object]], page_size: int) -> list[bytes]:
    contents, fresh = list(range(10)), iter(range(1_000, 1_000_000))
    versions = [database(page_size, contents)]
    for kind, detail in edits:
        if kind == "change":
            for place in detail:  # type: ignore[attr-defined]
                contents[place % len(contents)] = next(fresh)
        elif kind == "grow":
            contents += [next(fresh) for _ in range(detail)]  # type: ignore[call-overload]
        elif kind == "shrink":
            del contents[max(1, len(contents) - detail) :]  # type: ignore[operator]
        elif kind == "page size":
            page_size = detail  # type: ignore[assignment]
        made = bytearray(database(page_size, contents))
        if kind == "counters":
            made[24:28] = made[92:96] = next(fresh).to_bytes(4, "big")
        versions.append(bytes(made))
    return versions


@settings(max_examples=60, deadline=None)
@given(Edits, st.sampled_from([512, 4096]), st.sampled_from([1, 3, 1024]))
def test_every_version_is_rebuilt_byte_for_byte(
    edits: list[tuple[str, object]], page_size: int, block_pages: int
) -> None:
    before = store_versions.BLOCK_BYTES, store_versions.GROUP_BYTES_MAX
    store_versions.BLOCK_BYTES = store_versions.GROUP_BYTES_MAX = (
        4096 * block_pages
    )  # so that edges of blocks come up in small files
    try:
        with tempfile.TemporaryDirectory() as folder:
            versions = edited(edits, page_size)
            head, deltas = stored(Path(folder), versions)
            kept = [each for at, each in enumerate(versions) if at == 0 or each != versions[at - 1]]
            assert len(kept) == len(deltas) + 1
            for back in range(len(kept)):
                into = Path(folder) / f"rebuilt-{back}"
                rebuild(str(head), deltas[:back], str(into))
                assert into.read_bytes() == kept[-1 - back]
    finally:
        store_versions.BLOCK_BYTES, store_versions.GROUP_BYTES_MAX = before


@settings(max_examples=25, deadline=None)
@given(st.sets(st.integers(0, 399), max_size=40))
def test_a_version_costs_its_changed_pages_and_no_more(changed: set[int]) -> None:
    contents = list(range(400))
    older = database(512, contents)
    newer = database(512, [seed + 10_000 if at in changed else seed for at, seed in enumerate(contents)])
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "older").write_bytes(older)
        (Path(folder) / "newer").write_bytes(newer)
        made = write_delta(f"{folder}/older", f"{folder}/newer", f"{folder}/delta")
    assert made.changed == len(changed)
    assert made.identical == (not changed)
    assert made.bytes <= len(changed) * (512 + 5 + 4) + GROUP_OVERHEAD_BYTES


def test_only_the_change_counter_counts_as_identical(tmp_path: Path) -> None:
    older = bytearray(database(512, [1, 2, 3]))
    for place, identical in ((24, True), (27, True), (92, True), (99, True), (23, False), (28, False), (100, False)):
        newer = bytearray(older)
        newer[place] ^= 1
        (tmp_path / "older").write_bytes(older)
        (tmp_path / "newer").write_bytes(newer)
        made = write_delta(str(tmp_path / "older"), str(tmp_path / "newer"), str(tmp_path / "delta"))
        assert made.identical == identical, place
        assert (tmp_path / "delta").exists() != identical
    newer = older + database(512, [9])
    (tmp_path / "newer").write_bytes(newer)
    assert not write_delta(str(tmp_path / "older"), str(tmp_path / "newer"), str(tmp_path / "delta")).identical


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_a_damaged_delta_is_found_wherever_the_damage_is(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as folder:
        versions = [database(512, list(range(12))), database(512, [*range(6), *range(50, 54)])]
        head, [delta] = stored(Path(folder), versions)
        whole = Path(delta.path).read_bytes()
        if data.draw(st.booleans()):
            damaged = bytearray(whole)
            damaged[data.draw(st.integers(0, len(whole) - 1))] ^= data.draw(st.integers(1, 255))
        else:
            damaged = bytearray(whole[: data.draw(st.integers(0, len(whole) - 1))])
        Path(delta.path).write_bytes(damaged)
        with pytest.raises(CorruptError):
            rebuild(str(head), [delta], f"{folder}/rebuilt")
        assert not Path(folder, "rebuilt").exists()


def test_a_delta_of_another_version_is_not_taken(tmp_path: Path) -> None:
    head, [delta] = stored(tmp_path, [database(512, [1, 2, 3]), database(512, [1, 7, 3])])
    with pytest.raises(CorruptError, match="head"):
        rebuild(str(head), [delta._replace(shape=Shape(512, 4))], str(tmp_path / "into"))
    Path(delta.path).write_bytes(Path(delta.path).read_bytes() + b"\0")
    with pytest.raises(CorruptError, match="hash"):
        rebuild(str(head), [delta], str(tmp_path / "into"))


def test_a_page_that_would_go_to_another_place_is_found_by_the_hash_alone(tmp_path: Path) -> None:
    head, [delta] = stored(tmp_path, [database(512, [1, 2, 3]), database(512, [1, 7, 3])])
    content = bytearray(Path(delta.path).read_bytes())
    number = slice(8 + 4 + 4 + 1 + 4, 8 + 4 + 4 + 1 + 4 + 4)  # after the head and the count
    assert content[number] == b"\0\0\0\1"
    content[number] = b"\0\0\0\2"
    Path(delta.path).write_bytes(content)
    with pytest.raises(CorruptError, match="hash"):
        rebuild(str(head), [delta], str(tmp_path / "into"))
    assert not (tmp_path / "into").exists()


@pytest.mark.parametrize("content", [b"", b"x" * 99, bytes(512), database(512, [1, 2])[:-1], database(512, [1])[:100]])
def test_what_is_not_whole_pages_is_no_database(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(CorruptError):
        shape_of(str(tmp_path / "file"))


def test_the_largest_pages_are_known_by_a_one(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(database(65536, [1, 2]))
    assert shape_of(str(tmp_path / "file")) == (65536, 2)


def test_a_disk_that_takes_a_part_at_a_time_gets_all_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one does that is nearly full. Else what was rebuilt there looks damaged, and is not."""

    class Sparing(io.FileIO):
        def write(self, data: ReadableBuffer) -> int:
            return super().write(memoryview(data)[:700])

    def open_sparing(path: str, mode: str, buffering: int = -1, opener: Any = None) -> Any:
        return Sparing(path, mode, opener=opener) if buffering == 0 else open(path, mode, opener=opener)

    versions = [database(512, list(range(40))), database(512, [0, 1])]
    head, deltas = stored(tmp_path, versions)
    for module in (store_versions, disk):
        monkeypatch.setattr(module, "open", open_sparing, raising=False)
    monkeypatch.delattr(disk.os, "copy_file_range", raising=False)
    rebuild(str(head), deltas, str(tmp_path / "rebuilt"))
    assert (tmp_path / "rebuilt").read_bytes() == versions[0]


def versions_at(*times: int, announced: bool = True) -> list[Version]:
    return [
        Version(n, n - 1, "p", "", "", at, 1, 512, 1, 1, 1, None, "", announced=announced)
        for n, at in enumerate(times, 1)
    ]


def test_a_version_goes_when_it_is_beyond_either_limit() -> None:
    five = versions_at(10, 20, 30, 40, 50)
    assert surplus(five, VersionRetention(keep_last=None), 100) == []
    assert surplus(five, VersionRetention(keep_last=3), 100) == [1, 2]
    assert surplus(five, VersionRetention(keep_last=None, keep_age_ms=70), 100) == [1, 2]
    assert surplus(five, VersionRetention(keep_last=2, keep_age_ms=70), 100) == [1, 2, 3]
    assert surplus(five, VersionRetention(keep_last=4, keep_age_ms=60), 100) == [1, 2, 3]


def test_the_newest_stays_however_old_it_is() -> None:
    assert surplus(versions_at(10), VersionRetention(keep_last=1, keep_age_ms=1), 10**12) == []
    assert surplus(versions_at(10, 20), VersionRetention(keep_last=1, keep_age_ms=1), 10**12) == [1]
    assert surplus([], VersionRetention(), 0) == []


def test_what_was_not_announced_stays_until_it_is() -> None:
    assert surplus(versions_at(10, 20, 30, announced=False), VersionRetention(keep_last=1), 100) == []


@given(st.lists(st.integers(0, 100), max_size=12), st.integers(1, 14), st.integers(1, 120))
def test_only_the_oldest_go_and_in_one_piece_whatever_the_clocks(times: list[int], last: int, age_ms: int) -> None:
    gone = surplus(versions_at(*times), VersionRetention(keep_last=last, keep_age_ms=age_ms), 100)
    assert gone == list(range(1, len(gone) + 1))
    assert len(gone) < max(1, len(times))


def test_a_policy_that_keeps_nothing_is_refused() -> None:
    for impossible in ({"keep_last": 0}, {"keep_last": -1}, {"keep_age_ms": 0}):
        with pytest.raises(InvalidOptionError):
            VersionRetention(**impossible)
