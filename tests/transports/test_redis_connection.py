"""Reading urls, without a server: what is understood, what is refused, what is never shown."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import redis
from hypothesis import given
from hypothesis import strategies as st

from headwater.errors import InvalidOptionError, TransportFailedError
from headwater.topics import parse_pattern
from headwater.transports.base import batches
from headwater.transports.redis import RedisPubSub, RedisStreams
from headwater.transports.redis_connection import (
    translated,
)
from headwater.transports.redis_consumer import StreamSettings, channels_of, read_claim


@pytest.mark.parametrize(
    "url",
    [
        "redis://user:s3cret@localhost:6379/2?stream=orders",
        "redis://:s3cret@localhost/0",
        "redis://localhost?password=s3cret",
        "redis://user:s3cret@[::1]:6379/0",
        "rediss://user:a%2Fs3cret@host/0",
    ],
)
def test_a_password_is_used_and_never_shown(url: str) -> None:
    with_options = RedisStreams.from_url(url)
    assert "s3cret" not in with_options.name
    assert "s3cret" in with_options._redis.connection_pool.connection_kwargs["password"]


@pytest.mark.parametrize(
    "url",
    [
        "redis://:s3cr/et@host:6379",
        "redis://user:s3c#ret@host",
        "redis://[s3cret/0",
        "redis://:12#s3cret@host",
        "redis://user:12/s3cret@host",
        "redis://user:12?s3cret@host",
    ],
)
def test_a_password_that_had_to_be_escaped_is_not_shown_either(url: str) -> None:
    with pytest.raises(InvalidOptionError) as refused:
        RedisStreams.from_url(url)
    assert "s3c" not in str(refused.value)
    assert refused.value.__cause__ is None


def test_the_name_is_the_url_with_its_options() -> None:
    assert RedisStreams.from_url("redis://user:x@host:1/2", stream="a:b").name == "redis://user@host:1/2?stream=a:b"
    assert RedisPubSub.from_url("redis+pubsub://host:1/2?prefix=p").name == "redis+pubsub://host:1/2?prefix=p"
    assert RedisStreams.from_url("redis://[::1]:1/2").name == "redis://[::1]:1/2"


def test_options_stand_in_the_url_or_beside_it() -> None:
    there = {"stream": "s", "maxlen": "7", "dedupe": "1.5", "reclaim_idle": "2", "max_deliveries": "3", "start": "new"}
    in_url = RedisStreams.from_url("redis://h?" + "&".join(f"{name}={value}" for name, value in there.items()))
    beside = RedisStreams.from_url(
        "redis://h", stream="s", maxlen=7, dedupe=timedelta(seconds=1.5), reclaim_idle=2, max_deliveries=3, start="new"
    )
    assert in_url._settings == beside._settings
    assert in_url._settings.dedupe_ms == 1_500
    assert in_url._redis.connection_pool.connection_kwargs.keys().isdisjoint(there)


@pytest.mark.parametrize(
    ("url", "options"),
    [
        ("redis://h?strean=x", {}),
        ("redis://h?stream=x", {"stream": "y"}),
        ("redis://h", {"strean": "x"}),
        ("redis://h", {"max_deliveries": 0}),
        ("redis://h", {"max_deliveries": "many"}),
        ("redis://h", {"reclaim_idle": 0}),
        ("redis://h", {"dedupe": "nan"}),
        ("redis://h", {"dedupe": -1}),
        ("redis://h", {"start": "middle"}),
        ("redis://h", {"stream": ""}),
        ("redis://h", {"stream_per_topic": "perhaps"}),
        ("redis://h?socket_timeout=soon", {}),
        ("http://h", {}),
    ],
)
def test_what_cannot_be_meant_is_refused(url: str, options: dict[str, Any]) -> None:
    with pytest.raises(InvalidOptionError):
        RedisStreams.from_url(url, **options)


def test_a_url_may_set_the_clients_own_limits() -> None:
    transport = RedisStreams.from_url("redis://h?socket_timeout=0.5", client_name="me")
    settings = transport._redis.connection_pool.connection_kwargs
    assert (settings["socket_timeout"], settings["client_name"]) == (0.5, "me")


@pytest.mark.parametrize(
    "error",
    [redis.ConnectionError("x"), redis.TimeoutError("x"), redis.ResponseError("x"), redis.DataError("x"), OSError("x")],
)
def test_errors_of_redis_become_ours_with_the_cause(error: Exception) -> None:
    with pytest.raises(TransportFailedError) as failed, translated("redis://h", "publishing"):
        raise error
    assert failed.value.__cause__ is error
    assert failed.value.where == "redis://h"
    assert failed.value.next


@given(st.lists(st.integers(0, 200), max_size=20), st.integers(0, 200), st.integers(1, 50))
def test_batches_keep_the_order_and_the_limits(large: list[int], small: int, items_max: int) -> None:
    items = list(enumerate([*large, *[1] * small]))
    found = list(batches(items, lambda item: item[1], items_max, 100))
    assert [item for batch in found for item in batch] == items
    for batch in found:
        assert 0 < len(batch) <= items_max
        assert len(batch) == 1 or sum(size for _, size in batch) <= 100


@pytest.mark.parametrize(
    ("stream", "key"), [("s", "{s}#id:1"), ("{s}", "{s}#id:1"), ("a{b}c", "a{b}c#id:1"), ("{}", "{{}}#id:1")]
)
def test_in_a_cluster_an_id_lies_with_its_stream(stream: str, key: str) -> None:
    assert StreamSettings(per_topic=True).key_of_id(stream, "a.x", "1") == key
    assert StreamSettings().key_of_id(stream, "a.x", "1") == key.replace("#id:1", "#id:a.x#1")


def test_both_answers_of_xautoclaim_are_read() -> None:
    entry = (b"1-1", {b"doc": b"x"})
    of_6 = read_claim([b"0-0", [entry, (None, None)]])
    assert (of_6.cursor, of_6.deleted, of_6.still_pending) == ("0-0", 1, True)
    of_7 = read_claim([b"9-9", [entry], [b"2-2", b"3-3"]])
    assert (of_7.cursor, of_7.deleted, of_7.still_pending) == ("9-9", 2, False)
    assert of_6.entries == of_7.entries == [("1-1", {b"doc": b"x"})]


@pytest.mark.parametrize(
    ("prefix", "pattern", "channels"),
    [
        ("headwater", ">", "headwater:*"),
        ("headwater", "orders.*", "headwater:orders.*"),
        ("headwater", "orders.new", "headwater:orders.new"),
        ("a*[b]?", "x[y]", "a\\*\\[b\\]\\?:x\\[y\\]"),
    ],
)
def test_redis_is_asked_for_the_channels_of_a_pattern_and_few_others(prefix: str, pattern: str, channels: str) -> None:
    assert channels_of(prefix, parse_pattern(pattern)) == channels
