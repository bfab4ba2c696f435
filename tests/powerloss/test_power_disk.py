"""The disk model: what was synced stays, what was not may go in any part."""

from __future__ import annotations

import random

import pytest
from power_disk import EVERYTHING, NOTHING, Create, Delete, Disk, Fate, Sync, Truncate, Write


def replayed(*steps: object) -> Disk:
    disk = Disk()
    for step in steps:
        disk.replay(step)  # type: ignore[arg-type]
    return disk


@pytest.fixture
def dice() -> random.Random:
    return random.Random(1)


def test_synced_content_survives(dice: random.Random) -> None:
    disk = replayed(Create("a-wal"), Write("a-wal", 0, b"abc"), Sync("a-wal"), Write("a-wal", 1, b"XYZ"))
    assert disk.image(NOTHING, dice) == {"a-wal": b"abc"}
    assert disk.image(EVERYTHING, dice) == {"a-wal": b"aXYZ"}


def test_sectors_go_independently(dice: random.Random) -> None:
    disk = replayed(Create("a-wal"), Sync("a-wal"), Write("a-wal", 0, b"1" * 512 + b"2" * 512 + b"3" * 512))
    images = {disk.image(Fate(0.5), dice)["a-wal"][::512] for _ in range(200)}
    assert {b"\0\x002", b"12", b"\x002", b"1\x003", b"123", b"1", b""} & images >= {b"12", b"1\x003", b"123", b""}
    assert b"\0\x003" in images  # the last one without those before it


def test_an_older_write_can_be_all_that_is_left_of_a_sector(dice: random.Random) -> None:
    disk = replayed(Create("a-wal"), Sync("a-wal"), Write("a-wal", 0, b"old"), Write("a-wal", 0, b"new"))
    assert {disk.image(Fate(0.5), dice)["a-wal"] for _ in range(50)} == {b"", b"old", b"new"}


def test_torn_sectors_keep_a_beginning(dice: random.Random) -> None:
    disk = replayed(Create("a-wal"), Sync("a-wal"), Write("a-wal", 0, b"abcd"))
    assert {disk.image(Fate(0.9, torn=0.9), dice)["a-wal"] for _ in range(200)} == {b"", b"a", b"ab", b"abc", b"abcd"}


def test_truncation_is_at_risk_until_synced(dice: random.Random) -> None:
    disk = replayed(Create("a-wal"), Write("a-wal", 0, b"abcd"), Sync("a-wal"), Truncate("a-wal", 2))
    assert {disk.image(Fate(0.5), dice)["a-wal"] for _ in range(50)} == {b"ab", b"abcd"}
    disk.replay(Sync("a-wal"))
    assert disk.image(NOTHING, dice) == {"a-wal": b"ab"}


def test_names_are_at_risk_until_the_directory_is_synced(dice: random.Random) -> None:
    disk = replayed(Create("a.db"), Write("a.db", 0, b"x"), Sync("a.db"))
    assert disk.image(NOTHING, dice) == {}
    disk.replay(Create("a.db-wal"))
    disk.replay(Sync("a.db-wal"))
    assert disk.image(NOTHING, dice) == {"a.db": b"x", "a.db-wal": b""}
    disk.replay(Delete("a.db-wal", False))
    assert disk.image(NOTHING, dice).keys() == {"a.db", "a.db-wal"}
    assert disk.image(EVERYTHING, dice).keys() == {"a.db"}
    disk.replay(Create("a.db-wal"))
    disk.replay(Delete("a.db-wal", True))
    assert disk.image(NOTHING, dice).keys() == {"a.db"}
