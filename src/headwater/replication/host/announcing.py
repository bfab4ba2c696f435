"""Every accepted version becomes a message of the log: at once, or again and again until it is one.

The message has an id of its own, by which the log knows it again: what was published, and not yet noted as such when
the server was killed, is published once more and stored once.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from headwater.delivery.retry import RetryPolicy, backoff_ms
from headwater.errors import HeadwaterError
from headwater.ports.annex import Publish
from headwater.replication.host.records import Replica, Unannounced, Version
from headwater.replication.host.words import document_of

PUBLISH_S_MAX = 10.0  # that a push waits for its message; the version stands, and the message comes later

logger = logging.getLogger("headwater")
BACKOFF = RetryPolicy(base_ms=1_000, factor=2.0, cap_ms=60_000, jitter=0.0)


class Marks(Protocol):
    """Which versions have been told of; see `Shelf`. Blocking."""

    def unannounced(self) -> Sequence[Unannounced]: ...

    def announced(self, replica_id: str, number: int) -> None: ...


class Announcer:
    def __init__(self, marks: Marks, publish: Publish, on_thread: Callable[..., Awaitable[object]]) -> None:
        self._marks = marks
        self._publish = publish
        self._on_thread = on_thread
        self._stirred = asyncio.Event()
        self._turn = asyncio.Lock()

    async def announce(self, replica: Replica, version: Version) -> None:
        """It, and before it what was left of its replica, for the log has them in order. Never raises: what cannot be
        published now is tried again by `run`."""
        try:
            async with asyncio.timeout(PUBLISH_S_MAX):
                await self._announce_all()
        except (HeadwaterError, TimeoutError) as exc:
            told = {"replica": replica.name.path, "version": version.number, "why": str(exc) or "it took too long"}
            logger.warning("version %(version)d of %(replica)s is not announced yet: %(why)s", told)
            self._stirred.set()
        except Exception:
            logger.exception("announcing versions failed, and will be tried again")
            self._stirred.set()

    async def run(self) -> None:
        """Until cancelled: what was left by the last run of the server, and what failed since."""
        failures = 0
        while True:
            if await self._announce_the_rest():
                failures = 0
                await self._stirred.wait()
            self._stirred.clear()
            failures += 1
            await asyncio.sleep(backoff_ms(BACKOFF, failures, 0.0) / 1000)

    async def _announce_the_rest(self) -> bool:
        try:
            await self._announce_all()
        except (HeadwaterError, TimeoutError) as exc:
            logger.debug("announcing will be tried again: %s", exc)
            return False
        except Exception:
            logger.exception("announcing versions failed, and will be tried again")
            return False
        return True

    async def _announce_all(self) -> None:
        """Raises the first refusal, but not before the other replicas had their turn."""
        refused: dict[str, HeadwaterError] = {}
        async with self._turn:
            left: list[Unannounced] = []
            await self._on_thread(lambda: left.extend(self._marks.unannounced()))
            for replica, version in left:
                if replica.id in refused:
                    continue
                try:
                    await self._announce(replica, version)
                except HeadwaterError as exc:
                    refused[replica.id] = exc
        if refused:
            raise next(iter(refused.values()))

    async def _announce(self, replica: Replica, version: Version) -> None:
        async with asyncio.timeout(PUBLISH_S_MAX):
            document = document_of(replica, version)
            await self._publish(replica.name.topic, document, f"replica-{replica.id}-{version.number}")
        await self._on_thread(self._marks.announced, replica.id, version.number)
