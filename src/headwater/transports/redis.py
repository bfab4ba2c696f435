"""Redis as a transport: Streams, for work that has to be done, by groups of consumers; and Pub/Sub, for live fan-out.

**Streams.** A message given twice is there once: beside its entry a key remembers its topic and id for the dedupe
window, and one script writes both. Per message within the window that costs the topic and about 170 bytes of the
server's memory, besides the entry; a shorter window (`dedupe=3600`) costs less, `dedupe=0` nothing, but then repeats
are kept. A Redis that evicts keys (maxmemory-policy other than noeviction) may forget ids early. A published message is
as durable as the Redis makes it: with `appendfsync everysec`, its default, a crash can lose the last second, and a
forwarder does not send it again. In a cluster an id is in the slot of its stream. The dead stream is too if the name of
the stream has a hash tag: `{orders}`.

**Pub/Sub.** A message goes to the subscribers of that moment; without any, Redis and so this transport report success.
A subscriber that is away, too slow for the server's buffer, or reconnecting misses messages, and one given twice
arrives twice. For messages that must arrive, use Streams.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import threading
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, Self, TypeVar
from urllib.parse import parse_qs, urlencode, urlsplit

from headwater.arguments import check_whole
from headwater.errors import InvalidOptionError, InvalidTopicError, TransportFailedError
from headwater.formats import Span, redact_url, span_ms, split_url
from headwater.message import NAME_CHARS_MAX, Message
from headwater.ports.transport import Handle
from headwater.topics import parse_pattern
from headwater.transports.base import BaseTransport, batches
from headwater.transports.redis_connection import (
    BATCH_BYTES_MAX,
    BATCH_MESSAGES_MAX,
    CLIENT_OPTIONS,
    StreamEntry,
    client_url,
    make_client,
    to_doc,
    translated,
)
from headwater.transports.redis_consumer import (
    ConsumerSpec,
    GroupConsumer,
    LiveConsumer,
    PubSubConsumer,
    RedisConsumer,
    StreamConsumer,
    StreamSettings,
)

DAY_S = 24 * 3600.0
RECLAIM_IDLE_MS_MIN = 40
MAXLEN_MOST = 2**53
DELIVERIES_MOST = 1_000_000

ConsumerT = TypeVar("ConsumerT", bound=RedisConsumer)

# Add messages that are not known yet; an id is known while its key lives. The key is written after the entry: if the
# entry is refused, the message must not count as there.
# KEYS: stream, then one key per id. ARGV: maxlen (0: none), dedupe ms (0: none), then id, topic, type, doc of each.
_ADD = """
local added = 0
for n = 0, (#ARGV - 2) / 4 - 1 do
    local at = 3 + n * 4
    local known = ARGV[2] ~= '0' and redis.call('EXISTS', KEYS[2 + n]) == 1
    if not known then
        local fields = {'id', ARGV[at], 'topic', ARGV[at + 1], 'type', ARGV[at + 2], 'doc', ARGV[at + 3]}
        local entry
        if ARGV[1] == '0' then
            entry = redis.call('XADD', KEYS[1], '*', unpack(fields))
        else
            entry = redis.call('XADD', KEYS[1], 'MAXLEN', '~', ARGV[1], '*', unpack(fields))
        end
        if ARGV[2] ~= '0' then
            redis.call('SET', KEYS[2 + n], entry, 'PX', ARGV[2])
        end
        added = added + 1
    end
end
return added
"""

_WRITE = "Write redis://user:password@host:6379/0, with %-escapes in passwords"


class RedisTransport(BaseTransport):
    """Sends messages and runs consumers; `close` waits for sends under way and stops the consumers. `shown`: options
    that belong to its name. `retries`: how often the client may repeat a command by itself."""

    client_options = CLIENT_OPTIONS

    def __init__(self, url: str, shown: Mapping[str, str], *, recognises_ids: bool, retries: int) -> None:
        self._client_url = client_url(url)
        database = {name: values[0] for name, values in parse_qs(urlsplit(url).query).items() if name == "db"}
        query = urlencode({**database, **shown}, safe=":{}")
        self.name = redact_url(url) + (f"?{query}" if query else "")
        self.recognises_ids = recognises_ids
        self._redis: Any = make_client(self._client_url, retries=retries)
        self._connected = False
        self._sending = 0
        self._changed = threading.Condition()
        self._consumers: list[RedisConsumer] = []

    @classmethod
    def from_url(cls, url: str, **options: Any) -> Self:
        split_url(url, next=_WRITE)  # before its query is read: that may be a part of a password
        return super().from_url(url, **options)

    def _report(self, good: bool) -> None:
        self._connected = good and not self._closed

    def _publish(self, messages: Sequence[Message]) -> None:
        if not messages:
            self._check_open()
            return
        with self._in_flight():
            try:
                with translated(self.name, f"publishing {len(messages)} message{'s'[: len(messages) > 1]}"):
                    self._send(messages)
            except TransportFailedError:
                self._report(False)
                raise
            self._report(True)

    @abstractmethod
    def _send(self, messages: Sequence[Message]) -> None:
        """Send all of them, in order; raises the errors of Redis as they are."""

    def _start(self, consumer: ConsumerT) -> ConsumerT:
        """Start a consumer, which `close` stops at the latest. Raises TransportFailedError."""
        with self._in_flight():
            consumer.start()
            with self._changed:
                ended = [each for each in self._consumers if each.has_ended]
                self._consumers = [each for each in self._consumers if each not in ended] + [consumer]
        for each in ended:
            each.stop()  # one that its own handler stopped still has connections
        return consumer

    @contextlib.contextmanager
    def _in_flight(self) -> Iterator[None]:
        with self._changed:
            self._check_open()
            self._sending += 1
        try:
            yield
        finally:
            with self._changed:
                self._sending -= 1
                self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.wait_for(lambda: self._sending == 0)  # each call to Redis has its own limit
            consumers, self._consumers = self._consumers, []
        for consumer in consumers:
            consumer.stop()
        self._redis.connection_pool.disconnect()
        self._connected = False


class RedisStreams(RedisTransport):
    """`redis://host:6379/0?stream=orders`"""

    def __init__(
        self,
        url: str,
        *,
        stream: str = "headwater",
        stream_per_topic: bool = False,
        maxlen: int = 0,
        dedupe: Span = DAY_S,
        reclaim_idle: Span = 60.0,
        max_deliveries: int = 5,
        forget_consumers: Span = DAY_S,
        start: Literal["first", "new"] = "first",
    ) -> None:
        """`stream_per_topic`: a stream for each topic, `<stream>:<topic>`, instead of one for all. `maxlen`: about how
        many entries a stream keeps, 0 for all. `dedupe`: how long an id is remembered, 0 for not at all.
        `reclaim_idle`: after this long, an entry of a consumer that failed or died goes to another. `max_deliveries`:
        how often an entry is tried before it goes to `<stream>:dead`. `forget_consumers`: after this long, a consumer
        that holds nothing and is not seen is removed. `start`: where a new group begins. Does not connect yet."""
        if not stream or not isinstance(stream, str):
            raise InvalidOptionError("stream must not be empty", next="Leave it out for 'headwater'")
        if start not in ("first", "new"):
            raise InvalidOptionError(f"start is first or new, not {start!r}")
        if not isinstance(stream_per_topic, bool):
            raise InvalidOptionError(f"stream_per_topic is True or False, not {stream_per_topic!r}")
        settings = self._settings = StreamSettings(
            stream=stream,
            per_topic=stream_per_topic,
            maxlen=check_whole("maxlen", maxlen, 0, MAXLEN_MOST),
            dedupe_ms=span_ms(dedupe, "dedupe"),
            reclaim_idle_ms=span_ms(reclaim_idle, "reclaim_idle"),
            max_deliveries=check_whole("max_deliveries", max_deliveries, 1, DELIVERIES_MOST),
            forget_consumers_ms=span_ms(forget_consumers, "forget_consumers"),
            start=start,
        )
        if settings.reclaim_idle_ms < RECLAIM_IDLE_MS_MIN:
            raise InvalidOptionError(
                f"reclaim_idle is at least {RECLAIM_IDLE_MS_MIN / 1000:g} seconds, not {reclaim_idle!r}"
            )
        shown = {"stream": stream} if stream != StreamSettings().stream else {}
        if stream_per_topic:
            shown["stream_per_topic"] = "1"
        # Repeating is harmless where ids are recognised, and survives connections that broke while idle.
        recognises_ids = settings.dedupe_ms > 0
        super().__init__(url, shown, recognises_ids=recognises_ids, retries=1 if recognises_ids else 0)
        self._add = self._redis.register_script(_ADD)

    def _send(self, messages: Sequence[Message]) -> None:
        by_stream: dict[str, list[StreamEntry]] = {}
        for message in messages:
            entry = StreamEntry(message.id, message.topic, message.type or "", to_doc(message))
            by_stream.setdefault(self._stream_of(message.topic), []).append(entry)
        if self._settings.per_topic:
            self._send_to_many(by_stream, sorted({message.topic for message in messages}))
            return
        for stream, entries in by_stream.items():
            for batch in _batches(entries):
                keys, args = self._arguments(stream, batch)
                self._add(keys=keys, args=args)

    def _send_to_many(self, by_stream: Mapping[str, Sequence[StreamEntry]], topics: Sequence[str]) -> None:
        """Send to several streams, one batch of each per round trip: never two of the same, of which the first might
        fail alone."""
        waiting = {stream: _batches(entries) for stream, entries in by_stream.items()}
        while waiting:
            with self._redis.pipeline(transaction=False) as pipeline:
                pipeline.sadd(self._settings.topics_key, *topics)
                for stream, rest in list(waiting.items()):
                    batch = next(rest, None)
                    if batch is None:
                        del waiting[stream]
                        continue
                    keys, args = self._arguments(stream, batch)
                    self._add(keys=keys, args=args, client=pipeline)
                if waiting:
                    pipeline.execute()

    def _arguments(self, stream: str, batch: Sequence[StreamEntry]) -> tuple[list[str], list[str | bytes | int]]:
        settings = self._settings
        keys = [stream]
        args: list[str | bytes | int] = [settings.maxlen, settings.dedupe_ms]
        for entry in batch:
            if settings.dedupe_ms:
                keys.append(settings.key_of_id(stream, entry.topic, entry.id))
            args += (entry.id, entry.topic, entry.type, entry.doc)
        return keys, args

    def _stream_of(self, topic: str) -> str:
        if self._settings.per_topic and topic.endswith(":dead"):
            raise InvalidTopicError(
                "its stream would be the dead stream of another topic",
                where=f"topic {topic!r}",
                next="Rename the topic, or use one stream for all",
            )
        return self._settings.stream_of(topic)

    def subscribe(
        self, pattern: str, handle: Handle, *, group: str | None = None, consumer: str | None = None
    ) -> StreamConsumer:
        """With a `group`: each entry goes to one of its consumers with this pattern, until a handler returned for it; a
        new group begins at the first entry there is (option `start`). In Redis its name is `group`, or `group|pattern`
        for other patterns than `>`. Without: every entry from now on, once. Raises TransportFailedError if Redis is
        unreachable now; the consumer reconnects by itself later."""
        parsed = parse_pattern(pattern)
        _check_name("group", group)
        _check_name("consumer", consumer)
        spec = ConsumerSpec(self.name, self._client_url, parsed, handle, self._report)
        if group is None:
            if consumer is not None:
                raise InvalidOptionError("a consumer belongs to a group", where=self.name, next="Pass group= as well")
            return self._start(LiveConsumer(spec, self._settings))
        named = GroupConsumer(
            spec._replace(name=f"{self.name} group {group}"),
            self._settings,
            # A group in Redis shares all entries, so each pattern has a group of its own there.
            group=group if parsed.is_all else f"{group}|{parsed.text}",
            consumer=consumer or f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(4)}",
            removed_at_end=consumer is None,
        )
        return self._start(named)


def _batches(entries: Sequence[StreamEntry]) -> Iterator[list[StreamEntry]]:
    return batches(entries, lambda entry: entry.size, BATCH_MESSAGES_MAX, BATCH_BYTES_MAX)


def _check_name(what: str, name: str | None) -> None:
    if name is not None and (not isinstance(name, str) or not 0 < len(name) <= NAME_CHARS_MAX):
        raise InvalidOptionError(f"{what} must be text of 1 to {NAME_CHARS_MAX} characters, not {name!r}")


class RedisPubSub(RedisTransport):
    """`redis+pubsub://host:6379/0?prefix=live`: channels `<prefix>:<topic>`, which all databases of a server share."""

    def __init__(self, url: str, *, prefix: str = "headwater") -> None:
        if not prefix:
            raise InvalidOptionError("prefix must not be empty", next="Leave it out for 'headwater'")
        shown = {"prefix": prefix} if prefix != "headwater" else {}
        super().__init__(url, shown, recognises_ids=False, retries=0)  # a repeated message would arrive twice
        self._prefix = prefix

    def _send(self, messages: Sequence[Message]) -> None:
        for begin in range(0, len(messages), BATCH_MESSAGES_MAX):
            with self._redis.pipeline(transaction=False) as pipeline:
                for message in messages[begin : begin + BATCH_MESSAGES_MAX]:
                    pipeline.publish(f"{self._prefix}:{message.topic}", to_doc(message))
                pipeline.execute()

    def subscribe(
        self, pattern: str, handle: Handle, *, group: str | None = None, consumer: str | None = None
    ) -> PubSubConsumer:
        """Every message from now on, while the connection lasts. A handler's errors are logged."""
        if group is not None or consumer is not None:
            raise InvalidOptionError(
                "Pub/Sub has no groups: every subscriber gets every message",
                where=self.name,
                next="Use Redis Streams (redis://) to share messages among consumers",
            )
        parsed = parse_pattern(pattern)
        spec = ConsumerSpec(self.name, self._client_url, parsed, handle, self._report)
        return self._start(PubSubConsumer(spec, self._prefix))
