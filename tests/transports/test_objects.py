"""The archive of objects, on a real S3 endpoint and in a directory: layout, repeats, several writers, refusals."""

from __future__ import annotations

import base64
import threading
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
import pytest
from s3_server import S3Server

from headwater.errors import InvalidOptionError, TransportFailedError
from headwater.message import Message
from headwater.transports.base import make_message
from headwater.transports.object_client import ObjectClient
from headwater.transports.object_manifest import id_digest
from headwater.transports.objects import ObjectStorage, read_archive, verify

NOON = 1_794_744_000_000  # 2026-11-15T12:00Z


@pytest.fixture(params=["s3", "directory"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return request.getfixturevalue("bucket_url") if request.param == "s3" else f"objects+file://{tmp_path}/archive"


def batch(first: int, last: int, topic: str = "orders.new") -> list[Message]:
    return [
        msgspec.structs.replace(make_message(topic, {"n": seq}, NOON, id=f"id-{seq}"), seq=seq)
        for seq in range(first, last + 1)
    ]


def seqs(url: str) -> list[int]:
    return [message.seq for message in read_archive(url)]


def paths(url: str) -> list[str]:
    return sorted(each.path for each in ObjectClient.from_url(url).everything())


def test_what_was_published_is_read_back_equal_and_in_order(url: str) -> None:
    given = [
        *batch(1, 3),
        make_message("orders.new", {"text": "Grüße \0 \U0001f680 \u2028", "big": 2**70, "small": 1e-300}, NOON + 1),
        make_message("orders.new", "x" * (1024 * 1024 - 2), NOON + 2),
        make_message("orders.new", msgspec.json.decode(b"[" * 500 + b"]" * 500), NOON + 3),
        make_message(
            "orders.new", [1, None], NOON + 4, headers={"ü": [1]}, from_="a", to="b", reply_to="c", correlation_id="d",
            type="T", version=2, content_type="application/json", traceparent="00-1", priority=-5,
            deliver_at=NOON / 1000 + 60, expires_at=NOON / 1000 + 90,
        ),
    ]  # fmt: skip
    storage = ObjectStorage.from_url(url)
    assert not storage.connected
    storage.publish_many(given)
    assert storage.connected
    found = list(read_archive(url))
    assert found == given
    assert [each.data for each in found] == [each.data for each in given]
    verdict = verify(url)
    assert verdict.whole
    assert (verdict.first, verdict.last, verdict.objects, verdict.messages) == (1, 1, 1, len(given))


def test_objects_lie_by_day_and_first_token_and_the_manifest_beside_them(url: str) -> None:
    storage = ObjectStorage.from_url(url)
    storage.publish_many([*batch(1, 2), *batch(3, 3, "payments.done"), *batch(4, 5)])
    storage.publish(msgspec.structs.replace(batch(6, 6)[0], published_ms=NOON + 86_400_000))
    found = paths(url)
    assert found[:3] == [
        "_manifest/00000000000000000001.json",
        "_manifest/00000000000000000002.json",
        "_manifest/if-none-match",
    ]
    assert [path.rpartition("-")[0] for path in found[3:]] == [
        "day=2026-11-15/topic_prefix=orders/000000000000001-000000000000005",
        "day=2026-11-15/topic_prefix=payments/000000000000003-000000000000003",
        "day=2026-11-16/topic_prefix=orders/000000000000006-000000000000006",
    ]
    assert seqs(url) == [1, 2, 4, 5, 3, 6]


def test_the_same_batch_twice_is_there_once(url: str) -> None:
    storage = ObjectStorage.from_url(url)
    storage.publish_many(batch(1, 10))
    before = paths(url)
    storage.publish_many(batch(1, 10))
    ObjectStorage.from_url(url).publish_many(batch(1, 10))
    assert paths(url) == before
    assert seqs(url) == list(range(1, 11))


def test_an_archive_with_an_entry_of_format_1_is_whole_and_continues(tmp_path: Path) -> None:
    url = f"objects+file://{tmp_path}/archive"
    ObjectStorage.from_url(url).publish_many(batch(1, 3))
    [path] = (tmp_path / "archive" / "_manifest").glob("*1.json")
    digests = b"".join(id_digest(f"id-{seq}") for seq in (1, 2, 3))
    old = {**msgspec.json.decode(path.read_bytes()), "format": 1, "ids": base64.b64encode(digests).decode()}
    path.write_bytes(msgspec.json.encode(old))
    ObjectStorage.from_url(url).publish_many(batch(3, 4, topic="a.x"))
    assert seqs(url) == [1, 2, 3, 3, 4]
    assert verify(url).whole


def test_a_batch_cut_differently_by_another_writer_leaves_only_what_is_new(url: str) -> None:
    first = ObjectStorage.from_url(url)
    first.publish_many(batch(1, 10))
    first.publish_many(batch(11, 20))
    ObjectStorage.from_url(url).publish_many(batch(5, 25))
    first.publish_many([*batch(18, 27), *batch(26, 26)])  # it has not seen what the other wrote
    assert seqs(url) == list(range(1, 28))
    assert verify(url).last == 4


def test_ids_beyond_the_remembered_entries_are_written_again_as_the_promise_says(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headwater.transports.object_manifest.RECENT_ENTRIES_MAX", 2)
    storage = ObjectStorage.from_url(url)
    for seq in range(1, 5):
        storage.publish_many(batch(seq, seq))
    ObjectStorage.from_url(url).publish_many(batch(2, 4))
    assert seqs(url) == [1, 2, 3, 4, 2]


def test_writers_at_once_give_each_message_a_place_and_each_entry_a_number(url: str) -> None:
    rounds, writers = 6, 3
    begin = threading.Barrier(writers)
    failures: list[BaseException] = []

    def write(which: int) -> None:
        storage = ObjectStorage.from_url(url)
        begin.wait()
        try:
            for turn in range(rounds):
                own = 1000 * (which + 1) + turn
                storage.publish_many(
                    [*batch(own, own), *batch(turn * 5 + 1, turn * 5 + 5)]
                )  # and what all of them have
        except BaseException as exc:
            failures.append(exc)

    threads = [threading.Thread(target=write, args=(which,)) for which in range(writers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not failures
    own = [1000 * (which + 1) + turn for which in range(writers) for turn in range(rounds)]
    assert sorted(seqs(url)) == [*range(1, rounds * 5 + 1), *own]
    verdict = verify(url)
    assert verdict.whole
    assert (verdict.first, verdict.last) == (1, rounds * writers)


def test_a_large_batch_makes_several_entries_and_large_content_several_objects(url: str) -> None:
    storage = ObjectStorage.from_url(url, entry_messages_max=4, object_bytes_max=8 * 1024 * 1024)
    storage.publish_many(batch(1, 10))
    assert verify(url).last == 3
    large = [make_message("orders.new", "x" * 1_000_000, NOON, id=f"large-{n}") for n in range(12)]
    ObjectStorage.from_url(url, object_bytes_max=8 * 1024 * 1024).publish_many(large)
    verdict = verify(url)
    assert (verdict.last, verdict.objects, verdict.messages) == (4, 5, 22)


def test_nothing_published_is_nothing_written(url: str) -> None:
    ObjectStorage.from_url(url).publish_many([])
    assert paths(url) == []
    assert verify(url) == (0, 0, 0, 0, 0, ())


def test_a_bucket_that_is_not_there_is_named_with_what_to_do(s3: S3Server, bucket_url: str) -> None:
    storage = ObjectStorage.from_url(s3.url_of("no-such-bucket"))
    with pytest.raises(TransportFailedError, match=r"s3://no-such-bucket/archive.*NoSuchBucket.*Create it") as caught:
        storage.publish_many(batch(1, 1))
    assert caught.value.__cause__ is not None
    assert not storage.connected
    with pytest.raises(TransportFailedError, match="NoSuchBucket"):
        list(read_archive(s3.url_of("no-such-bucket")))


def test_credentials_are_taken_from_the_environment_and_appear_nowhere(
    bucket_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "very-secret")
    with pytest.raises(TransportFailedError, match="AWS_ACCESS_KEY_ID") as caught:
        ObjectStorage.from_url(bucket_url).publish_many(batch(1, 1))
    assert "very-secret" not in f"{caught.value} {caught.value.__cause__}"


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("s3://key:hush@bucket/prefix", "credentials"),
        ("s3://bucket/prefix?endpoint=http://key:hush@127.0.0.1:1", "without credentials"),
        ("s3://bucket/prefix?endpoint=127.0.0.1:1", "endpoint"),
        ("s3://bucket/prefix?secret=hush", "unknown option 'secret'"),
        ("s3://bucket/a//b", "prefix"),
        ("s3://bucket/../b", "prefix"),
        ("s3:///prefix", "bucket"),
        ("s3://bucket?timeout=soon", "timeout"),
        ("s3://bucket?retries=1000", "retries"),
        ("objects+file://host/directory", "absolute"),
        ("objects+file:///directory?region=x", "options of s3"),
        ("gs://bucket", "no object store"),
    ],
)
def test_a_url_that_cannot_be_used_is_refused_without_repeating_secrets(url: str, says: str) -> None:
    with pytest.raises(InvalidOptionError, match=says) as caught:
        ObjectStorage.from_url(url)
    assert "hush" not in str(caught.value)


@pytest.mark.parametrize("options", [{"object_bytes_max": 10}, {"entry_messages_max": 0}, {"colour": 1}])
def test_an_impossible_option_is_refused(options: dict[str, int]) -> None:
    with pytest.raises(InvalidOptionError):
        ObjectStorage.from_url("s3://bucket", **options)


def test_the_name_says_where_it_writes(bucket_url: str) -> None:
    parts = urlsplit(bucket_url)
    endpoint = parts.query.partition("&")[0]
    assert ObjectStorage.from_url(bucket_url).name == f"s3://{parts.netloc}/archive?{endpoint}"


def test_a_store_that_writes_over_what_is_there_is_refused(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    create = ObjectClient.create

    def careless(self: ObjectClient, path: str, data: bytes) -> bool:
        create(self, path, data)
        return True

    monkeypatch.setattr(ObjectClient, "create", careless)
    with pytest.raises(TransportFailedError, match="If-None-Match"):
        ObjectStorage.from_url(url).publish_many(batch(1, 1))
