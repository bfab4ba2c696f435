"""A dedupe queue in Redis, for workers on several hosts. It remembers as well as the Redis does: one that forgets at a
restart (no appendonly) or evicts keys (maxmemory-policy) lets repeats through.

Per handler: `order`, a sorted set of done ids in the order in which they were done; `at`, their times; `begun`, a
sorted set of claimed ids by when the claim runs out; `claims`, since when and whose. Each step is one script, so
simultaneous callers are answered one after the other. All keys share a hash tag, so a cluster keeps them together. What
no handler has touched for `max_age` expires as a whole.
"""

from __future__ import annotations

from operator import itemgetter
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from headwater.errors import InvalidOptionError, StoreError, UnavailableError
from headwater.formats import Span, redact_url, split_url
from headwater.ports.clock import Clock
from headwater.ports.dedupe import DEDUPE_AGE_S, DEDUPE_COUNT
from headwater.stores.dedupe import BaseDedupe

CONNECTIONS_MAX = 32
CONNECT_S = 5.0
ANSWER_S = 10.0
HEALTH_CHECK_S = 30
FORGET_MAX = 1_000  # in one step: a queue that was made much smaller shrinks with the next ones
EXPIRE_SLACK_MS = 60_000  # keys live by the server's clock, entries by the caller's
PREFIX = "headwater:dedupe"

_ARGUMENTS = ("handler", "id", "owner", "now_ms", "until_ms", "forgotten_ms", "max_count", "forget_max", "expire_ms")

# Each step is one script, which begins with this. What a step is not given is ''.
_PRELUDE = """
local order, at, begun, claims, handlers = unpack(KEYS)
local handler, id, owner, now_ms, until_ms, forgotten_ms, max_count, forget_max, expire_ms = unpack(ARGV)
local function is_own()
    local claim = redis.call('HGET', claims, id)
    return claim and string.match(claim, ' (.*)') == owner
end
local function note()
    redis.call('ZREM', begun, id)
    redis.call('HDEL', claims, id)
    local last = redis.call('ZREVRANGE', order, 0, 0, 'WITHSCORES')
    redis.call('ZADD', order, string.format('%.0f', (tonumber(last[2]) or 0) + 1), id)
    redis.call('HSET', at, id, now_ms)
    local count = redis.call('ZCARD', order)
    for _ = 1, tonumber(forget_max) do
        local oldest = redis.call('ZRANGE', order, 0, 0)[1]
        local at_ms = oldest and tonumber(redis.call('HGET', at, oldest))
        if not oldest or (count <= tonumber(max_count) and at_ms and at_ms > tonumber(forgotten_ms)) then
            break
        end
        redis.call('ZREM', order, oldest)
        redis.call('HDEL', at, oldest)
        count = count - 1
    end
    for _, gone in ipairs(redis.call('ZRANGEBYSCORE', begun, '-inf', forgotten_ms, 'LIMIT', 0, forget_max)) do
        redis.call('ZREM', begun, gone)
        redis.call('HDEL', claims, gone)
    end
end
local function touch()
    redis.call('SADD', handlers, handler)
    for n = 1, 4 do
        -- Only ever later: a long claim must not go with the keys of short ones.
        if redis.call('PTTL', KEYS[n]) < tonumber(expire_ms) then
            redis.call('PEXPIRE', KEYS[n], expire_ms)
        end
    end
end
"""
_STEPS = {
    "begin": """
        local at_ms = tonumber(redis.call('HGET', at, id) or nil)
        if at_ms and at_ms > tonumber(forgotten_ms) then
            return {{'done'}}
        end
        local claimed_until_ms = tonumber(redis.call('ZSCORE', begun, id) or nil)
        if claimed_until_ms and claimed_until_ms > tonumber(now_ms) then
            return {{'busy'}}
        end
        redis.call('ZREM', order, id)
        redis.call('HDEL', at, id)
        if until_ms == '' then
            note()
        else
            redis.call('ZADD', begun, until_ms, id)
            redis.call('HSET', claims, id, now_ms .. ' ' .. owner)
        end
        touch()
        return {{'first'}}
    """,
    "extend": """
        if not is_own() then
            return {}
        end
        redis.call('ZADD', begun, until_ms, id)
        touch()
        return {{1}}
    """,
    "finish": "note() touch()",
    "release": """
        if is_own() then
            redis.call('ZREM', begun, id)
            redis.call('HDEL', claims, id)
        end
    """,
    "contains": """
        local at_ms = tonumber(redis.call('HGET', at, id) or nil)
        return at_ms and at_ms > tonumber(forgotten_ms) and {{1}} or {}
    """,
    # Times as numbers, which Lua and RESP keep whole: they are below 2^53.
    "entries": """
        local rows = {}
        for _, done in ipairs(redis.call('ZRANGE', order, 0, -1)) do
            local at_ms = tonumber(redis.call('HGET', at, done))
            if at_ms > tonumber(forgotten_ms) then
                rows[#rows + 1] = {done, at_ms, false}
            end
        end
        local claimed = redis.call('ZRANGE', begun, 0, -1, 'WITHSCORES')
        for n = 1, #claimed, 2 do
            local at_ms = string.match(redis.call('HGET', claims, claimed[n]), '^(%S+) ')
            rows[#rows + 1] = {claimed[n], tonumber(at_ms), tonumber(claimed[n + 1])}
        end
        return rows
    """,
    # A handler of which nothing is left goes.
    "totals": """
        local done, claimed, oldest_ms = 0, 0, math.huge
        for _, at_ms in ipairs(redis.call('HVALS', at)) do
            if tonumber(at_ms) > tonumber(forgotten_ms) then
                done = done + 1
                oldest_ms = math.min(oldest_ms, tonumber(at_ms))
            end
        end
        for _, claim in ipairs(redis.call('HVALS', claims)) do
            claimed = claimed + 1
            oldest_ms = math.min(oldest_ms, tonumber(string.match(claim, '^(%S+) ')))
        end
        if done + claimed > 0 then
            return {{handler, done, claimed, oldest_ms}}
        end
        if redis.call('EXISTS', order, begun) == 0 then
            redis.call('SREM', handlers, handler)
        end
        return {}
    """,
    "clear": """
        local cleared = redis.call('ZCARD', order) + redis.call('ZCARD', begun)
        redis.call('DEL', order, at, begun, claims)
        redis.call('SREM', handlers, handler)
        return {{cleared}}
    """,
}


class RedisDedupe(BaseDedupe):
    """`redis://user:password@host:6379/0`; `prefix` begins the names of all its keys."""

    def __init__(
        self,
        url: str,
        *,
        max_count: int = DEDUPE_COUNT,
        max_age: Span = DEDUPE_AGE_S,
        clock: Clock | None = None,
        prefix: str = PREFIX,
    ) -> None:
        super().__init__(_shown(url), max_count=max_count, max_age=max_age, clock=clock)
        self._prefix = f"{{{prefix}}}"
        try:
            pool = redis.BlockingConnectionPool.from_url(
                url,
                max_connections=CONNECTIONS_MAX,
                timeout=ANSWER_S,
                socket_connect_timeout=CONNECT_S,
                socket_timeout=ANSWER_S,
                health_check_interval=HEALTH_CHECK_S,
                protocol=2,
                decode_responses=True,
                retry=Retry(NoBackoff(), 0),  # asked twice, `begin` would find its own claim and call it another's
            )
        except (ValueError, TypeError) as exc:
            raise InvalidOptionError(f"this Redis url cannot be used ({type(exc).__name__})", where=self.name) from None
        self._redis: Any = redis.Redis(connection_pool=pool)
        self._scripts = {step: self._redis.register_script(_PRELUDE + text) for step, text in _STEPS.items()}
        try:
            self._redis.ping()
        except TypeError:  # the client's way to say that a query has a name that it does not know
            raise InvalidOptionError("this Redis url has an option that there is not", where=self.name) from None
        except (redis.RedisError, OSError) as exc:
            pool.disconnect()
            raise self._translated(exc) from exc

    def _run(self, step: str, *, durable: bool = True, handler: str | None = None, **values: Any) -> list[Any]:
        claim_ms = 0 if values.get("until_ms") is None else values["until_ms"] - values["now_ms"]
        values.update(
            max_count=self.max_count,
            forget_max=FORGET_MAX,
            expire_ms=self.max_age_ms + EXPIRE_SLACK_MS + max(0, claim_ms),
        )
        script = self._scripts[step.removesuffix("_all")]
        all_handlers = f"{self._prefix}#handlers"
        rows: list[Any] = []
        try:
            for each in sorted(self._redis.smembers(all_handlers)) if handler is None else [handler]:
                values["handler"] = each
                keys = [f"{self._prefix}:{each}#{part}" for part in ("order", "at", "begun", "claims")]
                args = ["" if values.get(name) is None else values[name] for name in _ARGUMENTS]
                rows += script(keys=[*keys, all_handlers], args=args) or []
        except (redis.RedisError, OSError) as exc:
            raise self._translated(exc) from exc
        return sorted(rows, key=itemgetter(1)) if step == "entries" else rows

    def _forget(self, handler: str, now_ms: int) -> None:
        """The scripts do, with each that is done."""

    def _close(self) -> None:
        self._redis.connection_pool.disconnect()

    def _translated(self, exc: Exception) -> StoreError:
        why = f"{type(exc).__name__}: {exc}"
        if isinstance(exc, redis.AuthenticationError):
            return StoreError(why, where=self.name, next="Check the user and the password in the url")
        if isinstance(exc, (redis.ConnectionError, redis.TimeoutError, OSError)):
            return UnavailableError(why, where=self.name, next="Check that the server runs and can be reached")
        return StoreError(why, where=self.name)


def _shown(url: str) -> str:
    split_url(
        url,
        why="this Redis url cannot be read",
        next="Write redis://user:password@host:6379/0, with %-escapes in passwords",
    )
    return redact_url(url, keep=("db",))
