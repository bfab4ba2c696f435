"""The annexes of a server: whose a path is, who visits them, and what a visitor's token allows there."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from headwater.broker.core import Core
from headwater.broker.flow import run_async
from headwater.ports.annex import Annex, FrameGuest, Surroundings
from headwater.server.audit import Audit
from headwater.server.door import Admitted
from headwater.server.http import path_of
from headwater.server.logger import logger
from headwater.server.metrics import Metrics
from headwater.server.scopes import Scopes
from headwater.server.tokens import Grant
from headwater.topics import parse_pattern

# Not sent yet, to one visitor. What it asks by the way (a ping) is answered behind that, so it must not take long on a
# thin line.
OUTBOUND_BYTES_MAX = 512 * 1024


class Annexes:
    def __init__(self, annexes: Sequence[Annex], metrics: Metrics) -> None:
        self._annexes = annexes
        self._metrics = metrics
        self._started: list[Annex] = []
        self.visitors: set[Visitor] = set()

    def at(self, target: str) -> Annex | None:
        path = path_of(target)
        return next((annex for annex in self._annexes if path.startswith(annex.prefix)), None)

    async def start(self, core: Core, audit: Audit, *, needs_token: bool) -> None:
        async def publish(topic: str, data: Any, id: str) -> None:
            await run_async(core.publish(topic, data, {"id": id}))

        surroundings = Surroundings(publish, core.engine.clock, needs_token, self._metrics, audit.record)
        for annex in self._annexes:
            await annex.start(surroundings)
            self._started.append(annex)

    async def stop(self) -> None:
        annexes, self._started = self._started, []
        for told in await asyncio.gather(*(annex.stop() for annex in annexes), return_exceptions=True):
            if isinstance(told, Exception):
                logger.error("an annex did not stop well", exc_info=told)

    def welcome(self, annex: Annex, guest: FrameGuest) -> Admitted:
        visitor = Visitor(self, guest)
        self.visitors.add(visitor)
        self._metrics.connections.inc()
        self._metrics.connected.inc()
        return Admitted(visitor, guest.receive_binary, annex.message_bytes_max, OUTBOUND_BYTES_MAX)

    def left(self, visitor: Visitor) -> None:
        self.visitors.discard(visitor)
        self._metrics.connections.dec()


class Visitor:
    """A guest of an annex, counted. The annex has asked who it is."""

    is_stranger = False
    is_busy = False
    owner = ""

    def __init__(self, annexes: Annexes, guest: FrameGuest) -> None:
        self._annexes = annexes
        self._guest = guest
        self.receive_text = guest.receive_text
        self.on_drained = guest.on_drained

    def on_closed(self, *, vanished: bool) -> None:
        self._annexes.left(self)
        self._guest.on_closed(vanished=vanished)


class TokenRights:
    """`scopes`: of the token as it is now; None when it is one no more."""

    def __init__(self, grant: Grant, scopes: Callable[[], Scopes | None]) -> None:
        self.who = {"token": grant.token_id, "label": grant.label}
        self._scopes = scopes

    def may_publish(self, topic: str) -> bool:
        scopes = self._scopes()
        return scopes is not None and scopes.may_publish(topic)

    def may_read(self, topic: str) -> bool:
        scopes = self._scopes()
        return scopes is not None and scopes.may_read(parse_pattern(topic))
