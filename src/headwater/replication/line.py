"""The line that a subscription keeps open to `/sapi/subscribe/…`: new versions come in, claims go both ways.

A broken line is opened again, with pauses that grow; only a refusal ends it. Claims are politeness and versions are
told again at every opening, so nothing is lost with it.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Mapping
from typing import Protocol

import msgspec

from headwater.delivery.retry import backoff_ms
from headwater.errors import HeadwaterError, RemoteError, Unauthorized, UnknownReplica
from headwater.replication.link import UNREADABLE, Link, ReplicaID
from headwater.replication.names import CLAIM, CONFIG, LATEST, RELEASE, Remote
from headwater.replication.outcome import OnFailure
from headwater.replication.schedule import BACKOFF
from headwater.replication.spans import seconds_text

DIGITS_MAX = 18  # of the number of a version
LINE_PONG_S_MAX = 20.0  # it carries little: one that is gone is noticed soon
NO_LINE = "no line to %s, and it is tried again: %s"

logger = logging.getLogger("headwater")


class Listener(Protocol):
    """Who hears what comes over the line; called on the event loop."""

    def on_connected(self, told: Told) -> None: ...

    def on_disconnected(self) -> None: ...

    def on_version(self, number: int) -> None: ...

    def on_granted(self) -> None: ...

    def on_claimed(self, span_ms: int) -> None: ...

    def on_released(self) -> None: ...


class Told(msgspec.Struct, rename="camel"):
    """What the server says of the replica when the line opens."""

    replica_id: ReplicaID | None = msgspec.field(name="replicaID", default=None)
    key_type: str = "none"
    warning: str | None = None


class SubscriptionLine:
    def __init__(
        self,
        remote: Remote,
        config: Mapping[str, object],
        listener: Listener,
        connect: Callable[[str], Link],
        *,
        on_down: OnFailure | None = None,
    ) -> None:
        """`on_down`: for whoever would hear of it by nothing else, and tells it; once for many failures in a row."""
        self._remote = remote
        self._config = dict(config)
        self._listener = listener
        self._connect = connect
        self._on_down = on_down
        self._link: Link | None = None
        self._was_open = False

    async def send(self, word: str, span_ms: int | None = None) -> None:
        """Into the void when the line is down: its end was told to the listener."""
        if self._link is not None:
            try:
                await self._link.send_text(word if span_ms is None else f"{word} {seconds_text(span_ms)}")
            except HeadwaterError:
                logger.debug("the line to %s broke while sending", self._remote.key)

    async def run(self) -> None:
        """Until cancelled, or until the server says that it will never let us in."""
        failures = 0
        while True:
            try:
                async with self._connect(self._remote.endpoint("subscribe")) as link:
                    await link.send_config(self._config)
                    self._link, self._was_open = link, True
                    while (frame := await link.next()) is not None:
                        failures = 0
                        self._hear(frame)
            except Unauthorized:
                raise
            except UnknownReplica:
                if not self._was_open:  # a server that hosts none; later it is one that is being put up anew
                    raise
                logger.debug("nobody answers for %s just now", self._remote.key)
            except (RemoteError, *UNREADABLE) as exc:
                self._tell_of(exc, is_first=not failures)
            finally:
                if self._link is not None:
                    self._link = None
                    self._listener.on_disconnected()
            failures += 1
            await asyncio.sleep(backoff_ms(BACKOFF, failures, random.random()) / 1000)

    def _tell_of(self, exc: Exception, *, is_first: bool) -> None:
        if is_first and self._on_down is not None:
            self._on_down(exc)
        else:
            logger.debug(NO_LINE, self._remote.key, exc)

    def _hear(self, frame: str | bytes) -> None:
        if isinstance(frame, bytes):
            return
        if frame.startswith(CONFIG):
            self._listener.on_connected(msgspec.json.decode(frame.removeprefix(CONFIG), type=Told))
            return
        word, _, rest = frame.partition(" ")
        if word == LATEST and rest.isdecimal() and len(rest) <= DIGITS_MAX:
            self._listener.on_version(int(rest))
        elif word == CLAIM and not rest:
            self._listener.on_granted()
        elif word == CLAIM:
            self._listener.on_claimed(_ms(rest))
        elif word == RELEASE:
            self._listener.on_released()


def _ms(text: str) -> int:
    try:
        return max(0, round(float(text) * 1000))
    except (ValueError, OverflowError):
        return 0
