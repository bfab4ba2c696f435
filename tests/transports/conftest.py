"""What the tests of transports share: messages, a clock, and a target that fails on command."""

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import redis

from headwater import ManualClock, Message
from headwater.errors import ClosedError, TransportFailedError, UnsentError
from headwater.transports.base import make_message
from headwater.transports.redis import RedisStreams


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def make(clock: ManualClock) -> Callable[..., Message]:
    """A message: `make(17)` has data 17."""
    return lambda data=None, topic="orders.new", **options: make_message(topic, data, clock.now_ms(), **options)


class Target:
    """A transport under the test's control: `failure` is raised while it is set, `refused` are data it never takes,
    `gate` holds calls up, `calls` are the batches that it took, `tried` and `took` say when it
    was asked and when it took one."""

    def __init__(self, name: str = "target") -> None:
        self.name = name
        self.recognises_ids = True
        self.failure: Exception | None = None
        self.refused: dict[Any, Exception] = {}
        self.close_failure: Exception | None = None
        self.gate = threading.Event()
        self.gate.set()
        self.tried = threading.Semaphore(0)
        self.took = threading.Semaphore(0)
        self.calls: list[list[Message]] = []
        self.asked = 0
        self.closes = 0

    @property
    def connected(self) -> bool:
        return self.failure is None

    @property
    def data(self) -> list[Any]:
        return [message.data for call in self.calls for message in call]

    def fail(self, why: str = "away") -> Exception:
        self.failure = TransportFailedError(why, where=self.name)
        return self.failure

    def publish(self, message: Message) -> None:
        self.publish_many([message])

    def publish_many(self, messages: Sequence[Message]) -> None:
        self.asked += 1
        self.tried.release()
        assert self.gate.wait(20)
        if self.closes:
            raise ClosedError("closed", where=self.name)
        if self.failure is not None:
            raise self.failure
        for message in messages:
            if message.data in self.refused:
                raise self.refused[message.data]
        self.calls.append(list(messages))
        self.took.release()

    def close(self) -> None:
        self.closes += 1
        if self.close_failure is not None:
            raise self.close_failure


@pytest.fixture
def target() -> Target:
    return Target()


@pytest.fixture
def targets() -> Callable[..., list[Target]]:
    return lambda *names: [Target(name) for name in names]


@pytest.fixture
def unsent() -> Callable[[list[Message]], UnsentError]:
    return lambda messages: UnsentError("left", messages=messages)


@pytest.fixture
def client(redis_url: str) -> Iterator[Any]:
    with redis.Redis.from_url(redis_url, protocol=2) as client:
        yield client


@pytest.fixture
def open_streams(redis_url: str) -> Iterator[Callable[..., RedisStreams]]:
    opened: list[RedisStreams] = []

    def open_one(url: str = redis_url, **options: Any) -> RedisStreams:
        opened.append(RedisStreams.from_url(url, **options))
        return opened[-1]

    yield open_one
    for transport in opened:
        transport.close()
