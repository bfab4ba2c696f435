"""The archive of objects when a writer dies, an answer is lost, the endpoint is away, or an object is damaged."""

from __future__ import annotations

import base64
import gzip
import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import msgspec
import pytest
from s3_server import S3Server

from headwater import ManualClock
from headwater.errors import CorruptError, InvalidOptionError, TransportFailedError
from headwater.message import Message
from headwater.ports.clock import SystemClock
from headwater.transports.base import make_message
from headwater.transports.object_client import ObjectClient
from headwater.transports.object_manifest import entry_number
from headwater.transports.objects import ADOPT_WITHIN_MS, ObjectStorage, SweepReport, read_archive, verify

NOON = 1_794_744_000_000  # 2026-11-15T12:00Z
HOUR_MS = 3_600_000
DIES_BEFORE_THE_ENTRY = """
import os, sys
from headwater.transports.base import make_message
from headwater.transports.object_manifest import entry_number
from headwater.transports.objects import ObjectStorage
from headwater.transports.object_client import ObjectClient
create = ObjectClient.create
def dying(self, path, data):
    if entry_number(path) is not None:
        os.kill(os.getpid(), 9)
    return create(self, path, data)
ObjectClient.create = dying
ObjectStorage.from_url(sys.argv[1]).publish_many(
    [make_message("orders.new", {"n": n}, 1_794_744_000_000, id=f"id-{n}") for n in range(1, 6)]
)
"""


def batch(first: int, last: int) -> list[Message]:
    return [make_message("orders.new", {"n": n}, NOON, id=f"id-{n}") for n in range(first, last + 1)]


def ids(url: str) -> list[str]:
    return [message.id for message in read_archive(url)]


def objects_of(url: str) -> list[str]:
    return sorted(each.path for each in ObjectClient.from_url(url).everything() if each.path.startswith("day="))


def later(ms: int) -> ManualClock:
    return ManualClock(SystemClock().now_ms() + ms)


def before_each_entry(storage: ObjectStorage, do: Callable[[], None]) -> None:
    """Do something when the objects are written and their entry is not."""
    objects = storage._objects
    create = objects.create

    def creating(path: str, data: bytes) -> bool:
        if entry_number(path) is not None:
            do()
        return create(path, data)

    objects.create = creating  # type: ignore[method-assign]


@pytest.fixture
def half_written(bucket_url: str) -> str:
    """An archive in which one writer got no further than its objects."""
    done = subprocess.run([sys.executable, "-c", DIES_BEFORE_THE_ENTRY, bucket_url], check=False, timeout=60)
    assert done.returncode == -9
    return bucket_url


def test_what_a_killed_writer_left_is_not_read_and_is_swept_when_old(half_written: str) -> None:
    assert len(objects_of(half_written)) == 1
    assert ids(half_written) == []
    storage = ObjectStorage.from_url(half_written)
    storage.publish_many(batch(7, 8))
    assert storage.sweep(timedelta(hours=1)).objects == 0
    with pytest.raises(InvalidOptionError, match="hour"):
        storage.sweep(timedelta(minutes=59))
    swept = ObjectStorage.from_url(half_written, clock=later(2 * HOUR_MS)).sweep(timedelta(hours=1))
    assert swept.objects == 1
    assert swept.bytes > 0
    assert ids(half_written) == ["id-7", "id-8"]
    assert verify(half_written).whole


def test_a_repeat_soon_after_takes_up_what_a_killed_writer_left(half_written: str) -> None:
    left = objects_of(half_written)
    ObjectStorage.from_url(half_written).publish_many(batch(1, 5))
    assert objects_of(half_written) == left
    assert ids(half_written) == [f"id-{n}" for n in range(1, 6)]


def test_a_repeat_long_after_writes_another_object_because_the_old_one_may_be_swept(half_written: str) -> None:
    (left,) = objects_of(half_written)
    ObjectStorage.from_url(half_written, clock=later(ADOPT_WITHIN_MS + 60_000)).publish_many(batch(1, 5))
    ObjectClient.from_url(half_written).delete([left])
    assert ids(half_written) == [f"id-{n}" for n in range(1, 6)]
    assert verify(half_written).whole


def test_a_sweep_leaves_what_is_not_ours(tmp_path: Path) -> None:
    url = f"objects+file://{tmp_path}"
    ObjectStorage.from_url(url).publish_many(batch(1, 2))
    (tmp_path / "notes.txt").write_text("mine")
    assert ObjectStorage.from_url(url, clock=later(9 * HOUR_MS)).sweep(timedelta(hours=1)) == SweepReport(0, 0)
    assert (tmp_path / "notes.txt").exists()
    assert ids(url) == ["id-1", "id-2"]


def test_an_entry_whose_answer_was_lost_is_recognised_when_the_batch_comes_again(s3: S3Server, bucket_url: str) -> None:
    storage = ObjectStorage.from_url(bucket_url, timeout=0.3, retries=0)
    storage.publish_many(batch(1, 2))
    before_each_entry(storage, s3.pause)  # it will find the entry in its buffers when it goes on
    try:
        with pytest.raises(TransportFailedError, match="s3://"):
            storage.publish_many(batch(3, 6))
        assert not storage.connected
    finally:
        s3.resume()
    again = ObjectStorage.from_url(bucket_url)
    again.publish_many(batch(3, 4))
    again.publish_many(batch(5, 7))
    assert sorted(ids(bucket_url)) == [f"id-{n}" for n in range(1, 8)]
    assert verify(bucket_url).whole


def test_the_same_writer_goes_on_after_the_endpoint_was_silent(s3: S3Server, bucket_url: str) -> None:
    storage = ObjectStorage.from_url(bucket_url, timeout=0.3, retries=0)
    storage.publish_many(batch(1, 2))
    s3.pause()
    try:
        with pytest.raises(TransportFailedError, match="Check that the endpoint"):
            storage.publish_many(batch(2, 4))
    finally:
        s3.resume()
    ObjectStorage.from_url(bucket_url).publish_many(batch(1, 1))  # answered, so the endpoint is at work again
    storage.publish_many(batch(2, 5))
    assert storage.connected
    assert ids(bucket_url) == [f"id-{n}" for n in range(1, 6)]


def test_an_endpoint_that_was_stopped_and_started_gets_the_whole_batch(bucket_url: str) -> None:
    with S3Server() as server:
        url = server.new_bucket()
        storage = ObjectStorage.from_url(url, retries=0)
        before_each_entry(storage, server.stop)
        with pytest.raises(TransportFailedError, match="Check that the endpoint"):
            storage.publish_many(batch(1, 5))
        server.start()  # with nothing in it
        with pytest.raises(TransportFailedError, match="NoSuchBucket"):
            storage.publish_many(batch(1, 5))
        server._request("PUT", "/" + url.split("/")[2])
        del storage._objects.create  # type: ignore[method-assign]
        storage.publish_many(batch(1, 5))
        assert ids(url) == [f"id-{n}" for n in range(1, 6)]


def test_a_damaged_object_is_named_and_nothing_of_it_is_read(tmp_path: Path) -> None:
    url = f"objects+file://{tmp_path}"
    storage = ObjectStorage.from_url(url)
    storage.publish_many(batch(1, 3))
    storage.publish_many(batch(4, 6))
    damaged = tmp_path / objects_of(url)[0]
    whole = damaged.read_bytes()
    for spoiled in (whole[:-1], whole[:20] + bytes([whole[20] ^ 1]) + whole[21:], whole * 50, b""):
        damaged.write_bytes(spoiled)
        read: list[Message] = []
        with pytest.raises(CorruptError, match=damaged.name):
            read.extend(read_archive(url))
        assert not [each.id for each in read if each.id.encode() in gzip.decompress(whole)]
        verdict = verify(url)
        assert not verdict.whole
        assert (verdict.messages, len(verdict.damage)) == (3, 1)
        assert damaged.name in verdict.damage[0]
    damaged.unlink()
    assert "not there" in verify(url).damage[0]
    damaged.write_bytes(whole)
    assert verify(url).whole


def test_a_damaged_or_missing_entry_is_named(tmp_path: Path) -> None:
    url = f"objects+file://{tmp_path}"
    storage = ObjectStorage.from_url(url)
    for n in range(1, 4):
        storage.publish_many(batch(n, n))
    second = tmp_path / "_manifest" / "00000000000000000002.json"
    whole = second.read_bytes()
    other_ids = msgspec.json.decode(whole) | {"ids": base64.b64encode(bytes(16)).decode()}
    for spoiled in (b"{}", msgspec.json.encode(other_ids)):
        second.write_bytes(spoiled)
        assert not verify(url).whole
    second.unlink()
    with pytest.raises(CorruptError, match=r"00000000000000000002\.json: this entry is missing"):
        ids(url)
    assert len(verify(url).damage) == 1
    second.write_bytes(whole)
    assert verify(url).whole


def test_a_writer_says_so_when_the_newest_entry_is_damaged(tmp_path: Path) -> None:
    url = f"objects+file://{tmp_path}"
    ObjectStorage.from_url(url).publish_many(batch(1, 1))
    (tmp_path / "_manifest" / "00000000000000000001.json").write_bytes(b"?")
    with pytest.raises(TransportFailedError, match=r"00000000000000000001\.json"):
        ObjectStorage.from_url(url).publish_many(batch(2, 2))


def test_entries_and_objects_that_a_rule_of_the_bucket_removed_from_the_front_are_not_missed(tmp_path: Path) -> None:
    url = f"objects+file://{tmp_path}"
    storage = ObjectStorage.from_url(url)
    for n in range(1, 5):
        storage.publish_many(batch(n, n))
    for n in (1, 2):
        (tmp_path / "_manifest" / f"{n:020d}.json").unlink()
    ObjectStorage.from_url(url).publish_many(batch(4, 5))
    assert ids(url) == ["id-3", "id-4", "id-5"]
    verdict = verify(url)
    assert (verdict.first, verdict.last, verdict.whole) == (3, 5, True)


def test_a_writer_that_took_too_long_does_not_commit_what_may_be_swept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"objects+file://{tmp_path}"
    monkeypatch.setattr("headwater.transports.objects.COMMIT_WITHIN_MS", -1)
    with pytest.raises(TransportFailedError, match="in time"):
        ObjectStorage.from_url(url).publish_many(batch(1, 1))
    assert ids(url) == []


def test_the_writer_of_a_manifest_that_others_fill_leaves_out_what_they_wrote(tmp_path: Path) -> None:
    """Between its objects and its entry, another writer archives a part of the same messages."""
    url = f"objects+file://{tmp_path}"
    slow = ObjectStorage.from_url(url)
    others = iter([batch(2, 3), batch(9, 9), []])
    before_each_entry(slow, lambda: ObjectStorage.from_url(url).publish_many(next(others)))
    slow.publish_many(batch(1, 4))
    assert ids(url) == ["id-2", "id-3", "id-9", "id-1", "id-4"]
    assert len(objects_of(url)) == 4  # and the one that no entry names any more
