"""Reading along with the origin of a sqlite3_rsync, for a dry run."""

from __future__ import annotations

import subprocess
from pathlib import Path

import apsw
import apsw.sqlite_extra
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.errors import ReplicationFailed
from headwater.replication.rsync_stream import OriginStream


def u32(number: int) -> bytes:
    return number.to_bytes(4, "big")


TALK = b"\x41\x02\x0c" + u32(9) + b"\x46" + u32(5) + b"\x44ello" + b"\x47" + u32(1) + u32(3) + b"\x48"
PAGES = b"".join(b"\x44" + u32(number) + b"\x44" * 4096 for number in (1, 7))
TAIL = b"\x45" + u32(9) + b"\x42"


@settings(deadline=None)
@given(st.lists(st.integers(1, 3000), min_size=1, max_size=30))
def test_however_it_is_cut_the_talk_passes_and_the_pages_are_counted(sizes: list[int]) -> None:
    stream, passed = OriginStream(), b""
    whole = TALK + PAGES + TAIL
    at = 0
    while at < len(whole):
        size = sizes[at % len(sizes)]
        passed += stream.feed(whole[at : at + size])
        at += size
    assert passed == TALK
    assert stream.first_page_at == stream.passed_bytes == len(TALK)
    assert (stream.pages, stream.page_bytes, stream.page_size, stream.origin_pages) == (2, len(PAGES), 4096, 9)
    assert (stream.ended, stream.error) == (True, None)


def test_an_end_without_pages_writes_nothing_either() -> None:
    stream = OriginStream()
    assert stream.feed(TALK + TAIL) == TALK
    assert (stream.pages, stream.ended) == (0, True)


def test_an_error_of_the_origin_is_heard_and_passed_on() -> None:
    stream = OriginStream()
    text = b"page size mismatch"
    parts = [TALK, b"\x43", u32(len(text)) + text[:4], text[4:], b"\x43" + u32(0)]
    assert b"".join(map(stream.feed, parts[:-1])) == b"".join(parts[:-1])
    assert stream.error == "page size mismatch"
    stream.feed(parts[-1])
    assert stream.error == "the origin failed without a word"


@pytest.mark.parametrize("garbage", [b"\x00", b"\x61", b"\x44" + u32(1), b"\x43" + u32(2**31)])
def test_what_is_no_origin_is_refused(garbage: bytes) -> None:
    with pytest.raises(ReplicationFailed):
        OriginStream().feed(garbage)


def database(path: Path, rows: int) -> bytes:
    connection = apsw.Connection(str(path))
    connection.execute("PRAGMA page_size = 1024; CREATE TABLE IF NOT EXISTS t (id INTEGER PRIMARY KEY, x)")
    connection.executemany("INSERT INTO t (x) VALUES (?)", [(number.to_bytes(4) * 200,) for number in range(rows)])
    connection.close()
    return path.read_bytes()


def test_between_two_real_ends_it_makes_a_dry_run(tmp_path: Path) -> None:
    origin_path, replica_path = tmp_path / "origin.db", tmp_path / "replica.db"
    replica_path.write_bytes(database(origin_path, 300))
    database(origin_path, 5)
    before = replica_path.read_bytes()
    binary = str(apsw.sqlite_extra.path("sqlite3_rsync"))
    pipe = subprocess.PIPE
    replica = subprocess.Popen([binary, "--replica", "x", str(replica_path)], stdin=pipe, stdout=pipe)
    assert replica.stdin is not None
    origin = subprocess.Popen([binary, "--origin", str(origin_path), "x"], stdin=replica.stdout, stdout=pipe)
    assert origin.stdout is not None
    stream = OriginStream()
    try:
        while not stream.ended:
            chunk = origin.stdout.read1(1000)
            assert chunk, "the origin stopped talking"
            replica.stdin.write(stream.feed(chunk))
            replica.stdin.flush()
    finally:
        for end in (origin, replica):
            end.kill()
            end.communicate(timeout=20)
    assert (stream.page_size, stream.error) == (1024, None)
    assert 5 <= stream.pages < 20, "the five new rows, and the pages that lead to them"
    assert stream.page_bytes == stream.pages * 1029
    assert replica_path.read_bytes() == before
