"""A dedupe queue in Redis, for workers on several hosts. It remembers as well as the Redis does: one that forgets at a
restart (no appendonly) or evicts keys (maxmemory-policy) lets repeats through.

Per handler: `order`, a sorted set of done ids in the order in which they were done; `at`, their times; `begun`, a
sorted set of claimed ids by when the claim runs out; `claims`, since when and whose. Each step is one script, so
simultaneous callers are answered one after the other. All keys share a hash tag, so a cluster keeps them together. What
no handler has touched for `max_age` expires as a whole.
"""

from __future__ import annotations

from typing import Any, cast

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from headwater.errors import InvalidOptionError, StoreError, UnavailableError
from headwater.formats import Span, redact_url, split_url
from headwater.ports.clock import Clock
from headwater.ports.dedupe import DEDUPE_AGE_S, DEDUPE_COUNT, Begun, DedupeEntry
from headwater.stores.dedupe import BaseDedupe

CONNECTIONS_MAX = 32
CONNECT_S = 5.0
ANSWER_S = 10.0
HEALTH_CHECK_S = 30
FORGET_MAX = 1_000  # in one step: a queue that was made much smaller shrinks with the next ones
EXPIRE_SLACK_MS = 60_000  # keys live by the server's clock, entries by the caller's
PREFIX = "headwater:dedupe"

# Every script has KEYS: order, at, begun, claims, handlers.
_NOTE = """
local function note(_, id, now_ms, forgotten_ms, max_count, forget_max)
    redis.call('ZREM', KEYS[3], id)
    redis.call('HDEL', KEYS[4], id)
    local last = redis.call('ZREVRANGE', KEYS[1], 0, 0, 'WITHSCORES')
    redis.call('ZADD', KEYS[1], string.format('%.0f', (tonumber(last[2]) or 0) + 1), id)
    redis.call('HSET', KEYS[2], id, now_ms)
    local count = redis.call('ZCARD', KEYS[1])
    for _ = 1, tonumber(forget_max) do
        local oldest = redis.call('ZRANGE', KEYS[1], 0, 0)[1]
        local at_ms = oldest and tonumber(redis.call('HGET', KEYS[2], oldest))
        if not oldest or (count <= tonumber(max_count) and at_ms and at_ms > tonumber(forgotten_ms)) then
            break
        end
        redis.call('ZREM', KEYS[1], oldest)
        redis.call('HDEL', KEYS[2], oldest)
        count = count - 1
    end
    for _, gone in ipairs(redis.call('ZRANGEBYSCORE', KEYS[3], '-inf', forgotten_ms, 'LIMIT', 0, forget_max)) do
        redis.call('ZREM', KEYS[3], gone)
        redis.call('HDEL', KEYS[4], gone)
    end
end
local function touch(handler, expire_ms)
    redis.call('SADD', KEYS[5], handler)
    for n = 1, 4 do
        -- Only ever later: a long claim must not go with the keys of short ones.
        if redis.call('PTTL', KEYS[n]) < tonumber(expire_ms) then
            redis.call('PEXPIRE', KEYS[n], expire_ms)
        end
    end
end
"""
# ARGV: handler, id, now, forgotten, max_count, forget_max, expire, until ('' for done at once), owner
_BEGIN = (
    _NOTE
    + """
local at_ms = tonumber(redis.call('HGET', KEYS[2], ARGV[2]) or nil)
if at_ms and at_ms > tonumber(ARGV[4]) then
    return 'done'
end
local until_ms = tonumber(redis.call('ZSCORE', KEYS[3], ARGV[2]) or nil)
if until_ms and until_ms > tonumber(ARGV[3]) then
    return 'busy'
end
redis.call('ZREM', KEYS[1], ARGV[2])
redis.call('HDEL', KEYS[2], ARGV[2])
if ARGV[8] == '' then
    note(unpack(ARGV, 1, 6))
else
    redis.call('ZADD', KEYS[3], ARGV[8], ARGV[2])
    redis.call('HSET', KEYS[4], ARGV[2], ARGV[3] .. ' ' .. ARGV[9])
end
touch(ARGV[1], ARGV[7])
return 'first'
"""
)
_FINISH = _NOTE + "note(unpack(ARGV, 1, 6)) touch(ARGV[1], ARGV[7])"
# ARGV: handler, id, owner, until, expire
_EXTEND = (
    _NOTE
    + """
local claim = redis.call('HGET', KEYS[4], ARGV[2])
if not claim or string.match(claim, ' (.*)') ~= ARGV[3] then
    return 0
end
redis.call('ZADD', KEYS[3], ARGV[4], ARGV[2])
touch(ARGV[1], ARGV[5])
return 1
"""
)
# ARGV: id, owner
_RELEASE = """
local claim = redis.call('HGET', KEYS[4], ARGV[1])
if claim and string.match(claim, ' (.*)') == ARGV[2] then
    redis.call('ZREM', KEYS[3], ARGV[1])
    redis.call('HDEL', KEYS[4], ARGV[1])
end
"""
# ARGV: none. Answers: done ids, their times, begun ids with until, their claims.
_ENTRIES = """
local done = redis.call('ZRANGE', KEYS[1], 0, -1)
local times = {}
for n, id in ipairs(done) do
    times[n] = redis.call('HGET', KEYS[2], id)
end
local begun = redis.call('ZRANGE', KEYS[3], 0, -1, 'WITHSCORES')
local claims = {}
for n = 1, #begun, 2 do
    claims[#claims + 1] = redis.call('HGET', KEYS[4], begun[n])
end
return {done, times, begun, claims}
"""
# ARGV: handler, forgotten. Answers: done, begun, the oldest time or ''. A handler of which nothing is left goes.
_TOTALS = """
local done, begun, oldest, oldest_ms = 0, 0, '', nil
local function see(text)
    local at_ms = tonumber(text)
    if not oldest_ms or at_ms < oldest_ms then
        oldest, oldest_ms = text, at_ms
    end
end
for _, at_ms in ipairs(redis.call('HVALS', KEYS[2])) do
    if tonumber(at_ms) > tonumber(ARGV[2]) then
        done = done + 1
        see(at_ms)
    end
end
for _, claim in ipairs(redis.call('HVALS', KEYS[4])) do
    begun = begun + 1
    see(string.match(claim, '^(%S+) '))
end
if done + begun == 0 and redis.call('EXISTS', KEYS[1], KEYS[3]) == 0 then
    redis.call('SREM', KEYS[5], ARGV[1])
end
return {done, begun, oldest}
"""
# ARGV: handler
_CLEAR = """
local count = redis.call('ZCARD', KEYS[1]) + redis.call('ZCARD', KEYS[3])
redis.call('DEL', KEYS[1], KEYS[2], KEYS[3], KEYS[4])
redis.call('SREM', KEYS[5], ARGV[1])
return count
"""


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
                retry=Retry(NoBackoff(), 0),  # asked twice, `begin` would find its own claim and call it another's
            )
        except (ValueError, TypeError) as exc:
            raise InvalidOptionError(f"this Redis url cannot be used ({type(exc).__name__})", where=self.name) from None
        self._redis: Any = redis.Redis(connection_pool=pool)
        self._scripts = {
            name: self._redis.register_script(text)
            for name, text in {
                "begin": _BEGIN,
                "extend": _EXTEND,
                "finish": _FINISH,
                "release": _RELEASE,
                "entries": _ENTRIES,
                "totals": _TOTALS,
                "clear": _CLEAR,
            }.items()
        }
        try:
            self._redis.ping()
        except TypeError:  # the client's way to say that a query has a name that it does not know
            raise InvalidOptionError("this Redis url has an option that there is not", where=self.name) from None
        except (redis.RedisError, OSError) as exc:
            pool.disconnect()
            raise self._translated(exc) from exc

    def _begin(self, handler: str, id: str, now_ms: int, until_ms: int | None) -> Begun:
        expire_ms = self.max_age_ms + EXPIRE_SLACK_MS + max(0, (until_ms or 0) - now_ms)
        limits = (now_ms, self._forgotten_ms(now_ms), self.max_count, FORGET_MAX, expire_ms)
        answer = self._run("begin", handler, handler, id, *limits, "" if until_ms is None else until_ms, self._owner)
        return cast(Begun, answer.decode())

    def _extend(self, handler: str, id: str, now_ms: int, until_ms: int) -> bool:
        expire_ms = self.max_age_ms + EXPIRE_SLACK_MS + max(0, until_ms - now_ms)
        return bool(self._run("extend", handler, handler, id, self._owner, until_ms, expire_ms))

    def _finish(self, handler: str, id: str, now_ms: int) -> None:
        expire_ms = self.max_age_ms + EXPIRE_SLACK_MS
        limits = (now_ms, self._forgotten_ms(now_ms), self.max_count, FORGET_MAX, expire_ms)
        self._run("finish", handler, handler, id, *limits)

    def _release(self, handler: str, id: str) -> None:
        self._run("release", handler, id, self._owner)

    def _contains(self, handler: str, id: str, forgotten_ms: int) -> bool:
        try:
            at_ms = self._redis.hget(self._keys(handler)[1], id)
        except (redis.RedisError, OSError) as exc:
            raise self._translated(exc) from exc
        return at_ms is not None and int(at_ms) > forgotten_ms

    def _entries(self, handler: str, forgotten_ms: int) -> list[DedupeEntry]:
        done, times, begun, claims = self._run("entries", handler)
        found = [DedupeEntry(id.decode(), int(at_ms), None) for id, at_ms in zip(done, times, strict=True)]
        found = [entry for entry in found if entry.at_ms > forgotten_ms]
        for id, until_ms, claim in zip(begun[::2], begun[1::2], claims, strict=True):
            found.append(DedupeEntry(id.decode(), int(claim.split()[0]), int(until_ms)))
        return sorted(found, key=lambda entry: entry.at_ms)

    def _totals(self, handler: str | None, forgotten_ms: int) -> tuple[int, int, int, int | None]:
        handlers, done, begun, times = 0, 0, 0, []
        for each in self._handlers() if handler is None else [handler]:
            done_here, begun_here, oldest = self._run("totals", each, each, forgotten_ms)
            if done_here or begun_here:
                handlers, done, begun = handlers + 1, done + done_here, begun + begun_here
                times.append(int(oldest))
        return handlers, done, begun, min(times, default=None)

    def _clear(self, handler: str | None) -> int:
        handlers = self._handlers() if handler is None else [handler]
        return sum(cast(int, self._run("clear", each, each)) for each in handlers)

    def _close(self) -> None:
        self._redis.connection_pool.disconnect()

    def _handlers(self) -> list[str]:
        try:
            return sorted(name.decode() for name in self._redis.smembers(f"{self._prefix}#handlers"))
        except (redis.RedisError, OSError) as exc:
            raise self._translated(exc) from exc

    def _keys(self, handler: str) -> list[str]:
        parts = [f"{self._prefix}:{handler}#{part}" for part in ("order", "at", "begun", "claims")]
        return [*parts, f"{self._prefix}#handlers"]

    def _run(self, script: str, handler: str, *args: str | int) -> Any:
        try:
            return self._scripts[script](keys=self._keys(handler), args=args)
        except (redis.RedisError, OSError) as exc:
            raise self._translated(exc) from exc

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
