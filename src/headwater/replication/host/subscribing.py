"""A subscription: new versions are told as they come, and claims go both ways."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable

from headwater.errors import HeadwaterError
from headwater.replication.host.access import Access, no_more
from headwater.replication.host.figures import SessionEnd
from headwater.replication.host.gathering import Gathering
from headwater.replication.host.hosting import Hosting
from headwater.replication.host.visit import Abort, Gone, Visit
from headwater.replication.host.words import SubscribeConfig, config, config_of
from headwater.replication.names import CHANGED, CLAIM, LATEST, RELEASE, ReplicaName

SPAN_S_MAX = 1e9
NOTE_S = 1.0  # at least, between two notes of changes
WORDS_A_SECOND_MAX = 50  # that are heard; who says more waits
PULL_ONLY = "this key can only pull: waitIdle, minInterval, maxInterval and coordinate are ignored"

logger = logging.getLogger("headwater")


class Subscription:
    """A `Member` of a gathering, too."""

    def __init__(
        self, hosting: Hosting, visit: Visit, name: ReplicaName, access: Access, may_push: Callable[[], bool]
    ) -> None:
        self.who = visit.who
        self.claims = False
        self.outcome: SessionEnd | None = None
        self._hosting = hosting
        self._visit = visit
        self._name = name
        self._access = access
        self._may_push = may_push
        self._next_note_s = 0.0
        self._waiting: list[str] | None = []
        """What is to be told, until the first words are said."""

    async def run(self) -> None:
        first = await self._visit.next(self._hosting.idle_s)
        if first is None:
            raise Gone
        asked = config_of(first, SubscribeConfig)
        self.claims = asked.coordinate and self._access.may_push
        # Joined before the newest version is looked up, so that none can come between the two.
        gathering = self._hosting.gatherings.join(self._name, self)
        try:
            await self._begin(asked)
            await self._listen(gathering)
        finally:
            self._hosting.gatherings.leave(self._name, self)

    async def _begin(self, asked: SubscribeConfig) -> None:
        replica = await self._hosting.threads.do(self._hosting.shelf.find, self._name)
        words: dict[str, object] = {
            "replicaID": None if replica is None else replica.id,
            "keyType": self._access.key_type,
        }
        if not self._access.may_push and (asked.has_timers or asked.coordinate):
            words["warning"] = PULL_ONLY
        waiting, self._waiting = self._waiting or [], None
        newest = 0 if replica is None else replica.newest
        self.tell(config(**words))
        self.tell(f"{LATEST} {newest}")
        for text in waiting:
            if not text.startswith(LATEST) or int(text.removeprefix(LATEST)) > newest:
                self.tell(text)

    def tell(self, text: str) -> None:
        if self._waiting is None:
            self._visit.tell(text)
        else:
            self._waiting.append(text)

    async def _listen(self, gathering: Gathering) -> None:
        loop = asyncio.get_running_loop()
        second, words = 0, 0
        while (frame := await self._visit.next(None)) is not None:
            if isinstance(frame, bytes):
                raise Abort("FAILED", "there are no pages in a subscription")
            await self._take(gathering, frame)
            if int(loop.time()) != second:
                second, words = int(loop.time()), 0
            words += 1
            if words >= WORDS_A_SECOND_MAX:
                await asyncio.sleep(1.0)

    async def _take(self, gathering: Gathering, frame: str) -> None:
        word, _, rest = frame.partition(" ")
        if word == CLAIM:
            span_ms = _span_ms(rest)
            if self.claims:
                if not await self._hosting.threads.do(self._may_push):
                    raise no_more("push")
                gathering.claim(self, span_ms)
        elif word == RELEASE and not rest:
            if self.claims:
                gathering.release(self)
        elif word == CHANGED:
            _span_ms(rest or "0")
            await self._note_change()
        else:
            raise Abort("FAILED", f"{frame[:40]!r} is no word of a subscription")

    async def _note_change(self) -> None:
        now_s = asyncio.get_running_loop().time()
        if self._access.may_push and now_s >= self._next_note_s:
            self._next_note_s = now_s + NOTE_S
            try:
                await self._hosting.threads.do(self._hosting.shelf.note_change, self._name)
            except HeadwaterError as exc:  # no reason to stop following
                logger.warning("a change of %s was not noted: %s", self._name.path, exc)


def _span_ms(text: str) -> int:
    try:
        span_s = float(text)
    except ValueError:
        span_s = math.nan
    if not 0 <= span_s <= SPAN_S_MAX:
        raise Abort("FAILED", f"{text[:40]!r} is no number of seconds")
    return round(span_s * 1000)
