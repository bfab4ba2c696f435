"""Redis Streams as a transport: for work that has to be done, by groups of consumers.

A message given twice is there once: beside its entry a key remembers its topic and id for the dedupe window, and both
are written by one script. Per message within the window that costs the topic and about 170 bytes of the server's
memory, besides the entry; a shorter window (`dedupe=3600`) costs less, `dedupe=0` nothing, but then repeats come
through. A Redis that evicts keys (maxmemory-policy other than noeviction) may forget ids early. What was published is
as safe as the Redis keeps it: with `appendfsync everysec`, its default, a crash can lose the last second, and a
forwarder does not send it again.

In a cluster an id lies with its stream. The dead stream does so if the name of the stream has a hash tag: `{orders}`.
"""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Mapping, Sequence
from typing import Any

from headwater.errors import InvalidOption, InvalidTopic
from headwater.message import NAME_CHARS_MAX, Message
from headwater.ports.transport import Handle
from headwater.topics import parse_pattern
from headwater.transports import redis_scripts
from headwater.transports.redis_connection import RedisAddress, flag, read_url, seconds_ms, whole
from headwater.transports.redis_entries import Entry, batches, to_entry
from headwater.transports.redis_group import GroupReader
from headwater.transports.redis_reading import LiveReader, StreamReader, StreamSettings
from headwater.transports.redis_transport import RedisTransport

RECLAIM_IDLE_MS_MIN = 40
_OPTIONS = {
    "stream": "name of the stream (headwater)",
    "stream_per_topic": "1 for a stream per topic, <stream>:<topic>",
    "maxlen": "about how many entries a stream keeps (all)",
    "dedupe": "seconds for which an id is remembered (86400), 0 for not at all",
    "reclaim_idle": "seconds after which an entry of a consumer that failed or died goes to another (60)",
    "max_deliveries": "how often an entry is tried before it goes to <stream>:dead (5)",
    "forget_consumers": "seconds after which a consumer that holds nothing and is not seen is removed (86400)",
    "start": "where a new group begins: first or new (first)",
}


class RedisStreams(RedisTransport):
    """`ports.transport.Transport` and `Subscribable`: `redis://host:6379/0?stream=orders`."""

    def __init__(self, address: RedisAddress, settings: StreamSettings) -> None:
        # To ask again is harmless where ids are recognised, and carries over connections that broke while idle.
        recognises_ids = settings.dedupe_ms > 0
        super().__init__(address, recognises_ids=recognises_ids, retries=1 if recognises_ids else 0)
        self._settings = settings
        self._add = self._redis.register_script(redis_scripts.ADD)

    @classmethod
    def from_url(cls, url: str, options: Mapping[str, Any] | None = None) -> RedisStreams:
        """Does not connect yet."""
        address, told = read_url(url, options or {}, _OPTIONS)
        return cls(address, _settings(told))

    def _send(self, messages: Sequence[Message]) -> None:
        by_stream: dict[str, list[Entry]] = {}
        for message in messages:
            by_stream.setdefault(self._stream_of(message.topic), []).append(to_entry(message))
        if self._settings.per_topic:
            self._send_to_many(by_stream, sorted({message.topic for message in messages}))
            return
        for stream, entries in by_stream.items():
            for batch in batches(entries):
                keys, args = self._arguments(stream, batch)
                self._add(keys=keys, args=args)

    def _send_to_many(self, by_stream: Mapping[str, Sequence[Entry]], topics: Sequence[str]) -> None:
        """One batch of each stream per round trip: never two of the same, of which the first might fail alone."""
        waiting = {stream: batches(entries) for stream, entries in by_stream.items()}
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

    def _arguments(self, stream: str, batch: Sequence[Entry]) -> tuple[list[str], list[str | bytes | int]]:
        settings = self._settings
        keys, args = [stream], [settings.maxlen, settings.dedupe_ms]
        told: list[str | bytes | int] = [*args]
        for entry in batch:
            if settings.dedupe_ms:
                keys.append(settings.key_of_id(stream, entry.topic, entry.id))
            told += (entry.id, entry.topic, entry.type, entry.doc)
        return keys, told

    def _stream_of(self, topic: str) -> str:
        if self._settings.per_topic and topic.endswith(":dead"):
            raise InvalidTopic(
                "its stream would be the dead stream of another topic",
                where=f"topic {topic!r}",
                next="Rename the topic, or use one stream for all",
            )
        return self._settings.stream_of(topic)

    def subscribe(
        self, pattern: str, handle: Handle, *, group: str | None = None, consumer: str | None = None
    ) -> StreamReader:
        """With a `group`: each entry to one of its consumers with this pattern, until a handler returned for it; a new
        group begins at the first entry there is (option `start`). In Redis its name is `group`, or `group|pattern` for
        other patterns than `>`. Without: everything from now on, each entry once. Raises
        TransportFailed if Redis is away now; if it goes later, the reader comes back by itself."""
        parsed = parse_pattern(pattern)
        _check_name("group", group)
        _check_name("consumer", consumer)
        reader: StreamReader
        if group is not None:
            reader = GroupReader(
                f"{self.name} group {group}",
                self._address,
                self._settings,
                parsed,
                handle,
                self._report,
                # Those of one group in Redis share all entries, so each pattern has a group of its own there.
                group=group if parsed.is_all else f"{group}|{parsed.text}",
                consumer=consumer or f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(4)}",
                leaves_nothing=consumer is None,
            )
        elif consumer is not None:
            raise InvalidOption("a consumer belongs to a group", where=self.name, next="Pass group= as well")
        else:
            reader = LiveReader(self.name, self._address, self._settings, parsed, handle, self._report)
        return self._follow(reader)


def _check_name(what: str, name: str | None) -> None:
    if name is not None and (not isinstance(name, str) or not 0 < len(name) <= NAME_CHARS_MAX):
        raise InvalidOption(f"{what} must be text of 1 to {NAME_CHARS_MAX} characters, not {name!r}")


def _settings(told: Mapping[str, Any]) -> StreamSettings:
    usual = StreamSettings()
    stream, start = str(told.get("stream", usual.stream)), str(told.get("start", usual.start))
    if not stream:
        raise InvalidOption("stream must not be empty", next="Leave it out for 'headwater'")
    if start not in ("first", "new"):
        raise InvalidOption(f"start is first or new, not {start!r}")

    def ms(name: str, otherwise: int, least: int) -> int:
        return seconds_ms(name, told[name], least) if name in told else otherwise

    return StreamSettings(
        stream=stream,
        per_topic=flag("stream_per_topic", told.get("stream_per_topic", "0")),
        maxlen=whole("maxlen", told.get("maxlen") or 0, 0),
        dedupe_ms=ms("dedupe", usual.dedupe_ms, 0),
        reclaim_idle_ms=ms("reclaim_idle", usual.reclaim_idle_ms, RECLAIM_IDLE_MS_MIN),
        max_deliveries=whole("max_deliveries", told.get("max_deliveries", usual.max_deliveries), 1),
        forget_consumers_ms=ms("forget_consumers", usual.forget_consumers_ms, 0),
        start=start,
    )
