"""Reading Redis streams as they grow, everybody everything (for groups see redis_group.py); and which streams exist."""

from __future__ import annotations

import contextlib
import logging
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator

import msgspec
import redis

from headwater.errors import InvalidData
from headwater.message import scoped_id
from headwater.ports.transport import Handle
from headwater.topics import Pattern
from headwater.transports.redis_connection import RedisAddress
from headwater.transports.redis_entries import Fields, from_fields
from headwater.transports.redis_following import RedisFollowing

BLOCK_MS = 1_000  # the longest wait for entries in one call; also how late the first message of a new topic may come
DISCOVER_S = 1.0
HELD_ENTRIES_MAX = 64  # read and not handled yet, over all streams of a reader
STREAMS_MAX = 1_000
BEGINNING = "0-0"

logger = logging.getLogger("headwater")


class StreamSettings(msgspec.Struct, frozen=True):
    """`per_topic`: a stream for each topic, `<stream>:<topic>`, instead of one for all."""

    stream: str = "headwater"
    per_topic: bool = False
    maxlen: int = 0
    dedupe_ms: int = 24 * 3600 * 1000
    reclaim_idle_ms: int = 60_000
    max_deliveries: int = 5
    forget_consumers_ms: int = 24 * 3600 * 1000
    start: str = "first"

    def stream_of(self, topic: str) -> str:
        return f"{self.stream}:{topic}" if self.per_topic else self.stream

    @property
    def topics_key(self) -> str:
        """The set of topics that have streams. No topic can hold '#', so no stream has this name."""
        return f"{self.stream}#topics"

    @property
    def groups_key(self) -> str:
        """The set of groups that have begun: to them, each stream that turns up is new, even after a restart."""
        return f"{self.stream}#groups"

    def key_of_id(self, stream: str, topic: str, id: str) -> str:
        """Where an id is remembered: in the same slot of a cluster as its stream. One for all topics tells their ids
        apart."""
        tagged = stream if _has_hash_tag(stream) else f"{{{stream}}}"
        return f"{tagged}#id:{id if self.per_topic else scoped_id(topic, id)}"

    @staticmethod
    def dead_of(stream: str) -> str:
        return f"{stream}:dead"


def _has_hash_tag(key: str) -> bool:
    _, opened, rest = key.partition("{")
    tag, closed, _ = rest.partition("}")
    return bool(opened and closed and tag)


class StreamReader(RedisFollowing):
    """What readers of streams share: their connections, and which streams there are for a pattern."""

    def __init__(
        self,
        name: str,
        address: RedisAddress,
        settings: StreamSettings,
        pattern: Pattern,
        handle: Handle,
        report: Callable[[bool], None],
    ) -> None:
        super().__init__(name, report)
        self._settings = settings
        self._pattern = pattern
        self._handle = handle
        # One connection that waits for entries, and others beside it that never do.
        self._client = address.connect(connections=1)
        self._aside = address.connect(connections=2)
        self._client_id = 0
        self._streams: list[str] = []
        self._looked_at = -DISCOVER_S
        self._began = False
        answer_s = self._client.connection_pool.connection_kwargs.get("socket_timeout") or 3600.0
        self._block_ms = min(BLOCK_MS, int(answer_s * 500))

    @property
    def _count(self) -> int:
        """How many entries to ask of each stream."""
        return max(1, HELD_ENTRIES_MAX // max(1, len(self._streams)))

    def _open(self) -> None:
        self._client_id = self._client.client_id()
        self._look_for_streams(at_once=True)
        self._began = True

    def _look_for_streams(self, at_once: bool = False) -> None:
        now = time.monotonic()
        if not at_once and (now - self._looked_at < DISCOVER_S or self._is_complete()):
            return
        found = self._find_streams()
        new = [stream for stream in found if stream not in self._streams]
        if len(self._streams) + len(new) > STREAMS_MAX:
            logger.warning("%s: over %d streams; the others are not read", self._name, STREAMS_MAX)
            new = new[: STREAMS_MAX - len(self._streams)]
        for stream in new:
            self._begin(stream)
            self._streams.append(stream)
        self._looked_at = now

    def _is_complete(self) -> bool:
        return bool(self._streams) and (not self._settings.per_topic or self._pattern.is_exact)

    def _find_streams(self) -> list[str]:
        if not self._settings.per_topic:
            return [self._settings.stream]
        if self._pattern.is_exact:
            return [self._settings.stream_of(self._pattern.literal_prefix)]
        topics = sorted(topic.decode(errors="replace") for topic in self._client.smembers(self._settings.topics_key))
        return [self._settings.stream_of(topic) for topic in topics if self._pattern.matches(topic)]

    @abstractmethod
    def _begin(self, stream: str) -> None:
        """A stream is read from now on. Those that turn up after the beginning are new, and read from their first."""

    def _wake(self) -> None:
        with contextlib.suppress(redis.RedisError, OSError):
            self._aside.client_unblock(self._client_id)

    def _close(self) -> None:
        with contextlib.suppress(redis.RedisError, OSError):
            self._client.connection_pool.disconnect()

    def _dispose(self) -> None:
        with contextlib.suppress(redis.RedisError, OSError):
            self._aside.connection_pool.disconnect()


class LiveReader(StreamReader):
    """Everything from now on. After a lost connection it goes on where it was; a message whose handler fails is not
    tried again, for nobody keeps a record of it: that is what groups are for."""

    def __init__(
        self,
        name: str,
        address: RedisAddress,
        settings: StreamSettings,
        pattern: Pattern,
        handle: Handle,
        report: Callable[[bool], None],
    ) -> None:
        super().__init__(name, address, settings, pattern, handle, report)
        self._after: dict[str, str] = {}

    def _begin(self, stream: str) -> None:
        last = [] if self._began else self._client.xrevrange(stream, count=1)
        self._after[stream] = last[0][0].decode() if last else BEGINNING

    def _round(self) -> None:
        self._look_for_streams()
        if not self._streams:
            self._stopping.wait(DISCOVER_S)
            return
        answer = self._client.xread(dict(self._after), count=self._count, block=self._block_ms)
        for stream, entry_id, fields in read_entries(answer):
            if self._stopping.is_set():
                return
            self._deliver(stream, entry_id, fields)
            self._after[stream] = entry_id

    def _deliver(self, stream: str, entry_id: str, fields: Fields) -> None:
        try:
            message = from_fields(fields, f"{stream} {entry_id}")
        except InvalidData as exc:
            logger.warning("%s: skipped an entry (%s)", self._name, exc)
            return
        if self._pattern.matches(message.topic):
            try:
                self._handle(message)
            except (Exception, SystemExit):
                logger.exception("%s: the handler failed for message %s", self._name, message.id)


def read_entries(answer: list[tuple[bytes, list[tuple[bytes, Fields | None]]]]) -> Iterator[tuple[str, str, Fields]]:
    """(stream, entry id, fields) of what XREAD and XREADGROUP answer."""
    for stream, entries in answer:
        for entry_id, fields in entries:
            yield stream.decode(), entry_id.decode(), fields or {}
