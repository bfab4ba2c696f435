"""What only the dedupe queue in Redis has; the rest is in the contract."""

from __future__ import annotations

from typing import Any

import pytest
import redis as redis_client
from redis_server import RedisServer

from headwater.errors import InvalidOptionError, StoreError, UnavailableError
from headwater.stores.dedupe import open_dedupe


def keys_of(client: Any) -> dict[str, int]:
    return {key.decode(): client.pttl(key) for key in client.scan_iter()}


def test_unused_entries_expire_and_a_long_claim_is_not_cut_short(redis_url: str) -> None:
    with open_dedupe(redis_url, max_age=10) as queue, redis_client.Redis.from_url(redis_url) as client:
        queue.begin("h", "long", queue.clock.now_ms(), 3_600_000)
        queue.add("h", "a")
        left = keys_of(client)
        assert left.pop("{headwater:dedupe}#handlers") == -1
        assert {name.rpartition("#")[2]: ms > 3_600_000 for name, ms in left.items()} == {
            "begun": True,
            "claims": True,
            "order": False,
            "at": False,
        }
        assert all(ms > 10_000 for ms in left.values())


def test_a_handler_of_which_nothing_is_left_is_not_listed_for_ever(redis_url: str) -> None:
    with open_dedupe(redis_url) as queue, redis_client.Redis.from_url(redis_url) as client:
        queue.add("h", "a")
        queue.add("i", "a")
        client.delete(*(key for key in client.scan_iter() if b":h#" in key))  # as their end would
        assert queue.stats().handlers == 1
        assert client.smembers("{headwater:dedupe}#handlers") == {b"i"}


def test_queues_with_other_prefixes_do_not_meet(redis_url: str) -> None:
    with open_dedupe(redis_url, prefix="one") as one, open_dedupe(redis_url, prefix="two") as two:
        assert one.add("h", "a")
        assert two.add("h", "a")
        assert one.clear() == 1
        assert two.contains("h", "a")


def test_a_server_that_is_away_is_reported_and_what_was_done_is_known_after_it_was_killed() -> None:
    with RedisServer() as server:
        with open_dedupe(server.url) as queue:
            queue.add("h", "a")
            server.kill()
            for ask in (lambda: queue.add("h", "a"), lambda: queue.contains("h", "a"), queue.stats):
                with pytest.raises(UnavailableError):
                    ask()
            server.start()
            assert queue.contains("h", "a")
            assert queue.add("h", "a") is False
        server.kill()
        with pytest.raises(UnavailableError):
            open_dedupe(server.url)


def test_passwords_are_neither_shown_nor_guessed_at(redis_url: str) -> None:
    with pytest.raises(StoreError, match="password") as refused:
        open_dedupe(redis_url.replace("redis://", "redis://somebody:s3cret@"))
    assert "s3cret" not in str(refused.value)
    for wrong in ("redis://:s3c/ret@h", "redis://user:1#s3c@h", "redis://h?s3c=x", "redis://h?socket_timeout=s3c"):
        with pytest.raises(InvalidOptionError) as unreadable:
            open_dedupe(wrong)
        assert "s3c" not in unreadable.value.why
