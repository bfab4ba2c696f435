"""What both transports to Redis are: they send, they are followed, and they are closed when both have ended."""

from __future__ import annotations

import contextlib
import threading
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

from headwater.errors import Closed, TransportFailed
from headwater.message import Message
from headwater.transports.base import BaseTransport
from headwater.transports.redis_connection import RedisAddress, translated
from headwater.transports.redis_following import RedisFollowing

FollowingT = TypeVar("FollowingT", bound=RedisFollowing)


class RedisTransport(BaseTransport):
    """`ports.transport.Transport`. `retries`: how often the client may ask again by itself."""

    def __init__(self, address: RedisAddress, *, recognises_ids: bool, retries: int) -> None:
        self.name = address.name
        self.recognises_ids = recognises_ids
        self._address = address
        self._redis: Any = address.connect(retries=retries)
        self._connected = False
        self._closed = False
        self._sending = 0
        self._changed = threading.Condition()
        self._followings: list[RedisFollowing] = []

    @property
    def connected(self) -> bool:
        return self._connected

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
            except TransportFailed:
                self._report(False)
                raise
            self._report(True)

    @abstractmethod
    def _send(self, messages: Sequence[Message]) -> None:
        """All of them, in order; errors of Redis come out as they are."""

    def _follow(self, following: FollowingT) -> FollowingT:
        """Started, and stopped at the latest when this is closed. Raises TransportFailed."""
        with self._in_flight():
            following.start()
            with self._changed:
                ended = [each for each in self._followings if each.has_ended]
                self._followings = [each for each in self._followings if each not in ended] + [following]
        for each in ended:
            each.stop()  # those that their own handler stopped have something to let go of
        return following

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

    def _check_open(self) -> None:
        if self._closed:
            raise Closed("this transport is closed", where=self.name)

    def close(self) -> None:
        """Waits for what is being sent, and stops its subscriptions."""
        with self._changed:
            self._closed = True
            self._changed.wait_for(lambda: self._sending == 0)  # each call to Redis has its own limit
            followings, self._followings = self._followings, []
        for following in followings:
            following.stop()
        self._redis.connection_pool.disconnect()
        self._connected = False
