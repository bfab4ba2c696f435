"""Redis Pub/Sub as a transport: live fan-out, and no memory at all.

A message goes to whoever listens at that moment. PUBLISH to nobody is a success, for Redis and so here; a listener that
is away, slow beyond the server's buffer, or reconnecting misses what comes meanwhile, and one given twice comes twice.
For what must arrive, use Streams.
"""

from __future__ import annotations

import contextlib
import logging
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import redis
from redis.client import PubSub

from headwater.errors import InvalidData, InvalidOption
from headwater.message import Message
from headwater.ports.transport import Handle
from headwater.topics import Pattern, parse_pattern
from headwater.transports.redis_connection import ANSWER_TIMEOUT_S, RedisAddress, read_url
from headwater.transports.redis_entries import from_doc, to_doc
from headwater.transports.redis_following import RedisFollowing
from headwater.transports.redis_transport import RedisTransport

WAIT_S = 1.0  # the longest wait for a message in one call
BATCH_MESSAGES_MAX = 500
_OPTIONS = {"prefix": "what channels begin with, <prefix>:<topic> (headwater)"}
_GLOB = re.compile(r"([*?\[\]\\^])")

logger = logging.getLogger("headwater")


class RedisPubSub(RedisTransport):
    """`ports.transport.Transport` and `Subscribable`: `redis+pubsub://host:6379/0?prefix=live`. Channels do not know of
    databases: all databases of a server share them."""

    def __init__(self, address: RedisAddress, prefix: str) -> None:
        if not prefix:
            raise InvalidOption("prefix must not be empty", next="Leave it out for 'headwater'")
        super().__init__(address, recognises_ids=False, retries=0)  # asked again, it could come twice
        self._prefix = prefix

    @classmethod
    def from_url(cls, url: str, options: Mapping[str, Any] | None = None) -> RedisPubSub:
        """Does not connect yet."""
        address, told = read_url(url, options or {}, _OPTIONS)
        return cls(address, str(told.get("prefix", "headwater")))

    def _send(self, messages: Sequence[Message]) -> None:
        for begin in range(0, len(messages), BATCH_MESSAGES_MAX):
            with self._redis.pipeline(transaction=False) as pipeline:
                for message in messages[begin : begin + BATCH_MESSAGES_MAX]:
                    pipeline.publish(f"{self._prefix}:{message.topic}", to_doc(message))
                pipeline.execute()

    def subscribe(
        self, pattern: str, handle: Handle, *, group: str | None = None, consumer: str | None = None
    ) -> Listener:
        """Everything that comes from now on, while the connection lasts. A handler's errors are logged."""
        if group is not None or consumer is not None:
            raise InvalidOption(
                "Pub/Sub has no groups: every listener gets everything",
                where=self.name,
                next="Use Redis Streams (redis://) to share messages among consumers",
            )
        parsed = parse_pattern(pattern)
        return self._follow(Listener(self.name, self._address, self._prefix, parsed, handle, self._report))


def channels_of(prefix: str, pattern: Pattern) -> str:
    """A pattern of Redis that lets through at least what ours does; ours then decides."""
    known = _GLOB.sub(r"\\\1", f"{prefix}:{pattern.literal_prefix}")
    return known if pattern.is_exact else f"{known}*"


class Listener(RedisFollowing):
    def __init__(
        self,
        name: str,
        address: RedisAddress,
        prefix: str,
        pattern: Pattern,
        handle: Handle,
        report: Callable[[bool], None],
    ) -> None:
        super().__init__(name, report)
        self._channels = channels_of(prefix, pattern)
        self._pattern = pattern
        self._handle = handle
        self._redis = address.connect(connections=1)
        self._pubsub: PubSub | None = None
        self._closing_lock = threading.Lock()

    def _open(self) -> None:
        """Returns when the server has confirmed, so that what is published after it arrives."""
        self._close()
        pubsub = self._redis.pubsub()
        self._pubsub = pubsub
        pubsub.psubscribe(self._channels)
        until = time.monotonic() + ANSWER_TIMEOUT_S
        while (remaining := until - time.monotonic()) > 0:
            said = pubsub.get_message(timeout=remaining)
            if said is not None and said["type"] == "psubscribe":
                # The client would come back by itself, at once and only once, and tell nobody.
                pubsub.patterns.clear()
                return
        raise redis.TimeoutError("the subscription was not confirmed")

    def _connected_again(self) -> None:
        logger.warning("%s: connected again; messages published in between are lost", self._name)

    def _round(self) -> None:
        assert self._pubsub is not None
        said = self._pubsub.get_message(timeout=WAIT_S)
        if said is None or said["type"] != "pmessage" or self._stopping.is_set():
            return
        try:
            message = from_doc(said["data"], f"channel {said['channel'].decode(errors='replace')}")
        except InvalidData as exc:
            logger.warning("%s: passed over what is no message (%s)", self._name, exc)
            return
        if self._pattern.matches(message.topic):
            try:
                self._handle(message)
            except (Exception, SystemExit):
                logger.exception("%s: the handler failed for message %s", self._name, message.id)

    def _wake(self) -> None:
        with self._closing_lock:
            pubsub: Any = self._pubsub
            # The server's word that nothing is subscribed any more is what ends the wait.
            if pubsub is not None and pubsub.subscribed:
                with contextlib.suppress(Exception):  # whatever its other user does to it meanwhile
                    pubsub.punsubscribe()

    def _close(self) -> None:
        with self._closing_lock, contextlib.suppress(redis.RedisError, OSError):
            pubsub, self._pubsub = self._pubsub, None
            if pubsub is not None:
                pubsub.close()
            self._redis.connection_pool.disconnect()
