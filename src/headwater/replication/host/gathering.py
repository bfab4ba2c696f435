"""Who follows a replica: they are told of new versions, and those who coordinate of each other's claims."""

from __future__ import annotations

import asyncio
from typing import Protocol

from headwater.ports.clock import Clock
from headwater.replication.claims import ClaimDesk, Who
from headwater.replication.host.records import Replica
from headwater.replication.names import CLAIM, LATEST, RELEASE, ReplicaName
from headwater.replication.spans import seconds_text

GATHERINGS_MAX = 20_000  # above it, a claim whose holder has left is forgotten at once
FORGET_S_MIN = 1.0  # between two looks whether a claim that nobody waits for has ended


class Member(Protocol):
    who: Who
    claims: bool
    """Whether it takes part in the claims."""

    def tell(self, text: str) -> None: ...


class Gathering:
    """Those who follow one replica, and the claims among them."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.desk = ClaimDesk()
        self.members: set[Member] = set()
        self.pushes = 0
        self.timer: asyncio.TimerHandle | None = None
        self._told = ("", 0)

    def tell_version(self, replica_id: str, number: int) -> None:
        """In order: of two pushes, the later one may have been announced first."""
        if self._told[0] == replica_id and number <= self._told[1]:
            return
        self._told = (replica_id, number)
        for member in list(self.members):
            member.tell(f"{LATEST} {number}")

    def join(self, member: Member) -> None:
        self.members.add(member)
        if member.claims:
            remaining_ms = self.desk.join(member.who, self._clock.now_ms())
            if remaining_ms is not None:
                member.tell(f"{CLAIM} {seconds_text(remaining_ms)}")

    def leave(self, member: Member) -> None:
        self.members.discard(member)
        if member.claims and self.desk.leave(member.who, self._clock.now_ms()):
            self._tell_when_it_is_free()

    def _tell_when_it_is_free(self) -> None:
        """Those who wait know how long the claim was to last; this one may end before."""
        remaining_ms = self.desk.remaining_ms(self._clock.now_ms())
        if remaining_ms and self.members:
            asyncio.get_running_loop().call_later(remaining_ms / 1000, self._tell_when_it_is_free)
        elif not remaining_ms:
            for member in list(self.members):
                if member.claims:
                    member.tell(RELEASE)

    def claim(self, member: Member, span_ms: int) -> None:
        answer = self.desk.claim(member.who, span_ms, self._clock.now_ms())
        if not answer.granted:
            member.tell(f"{CLAIM} {seconds_text(answer.remaining_ms)}")
            return
        member.tell(CLAIM)
        self._tell_others(member, f"{CLAIM} {seconds_text(answer.remaining_ms)}")

    def release(self, member: Member) -> None:
        if self.desk.release(member.who, self._clock.now_ms()):
            self._tell_others(member, RELEASE)

    def _tell_others(self, member: Member, text: str) -> None:
        for other in list(self.members):
            if other.claims and other.who != member.who:
                other.tell(text)

    def is_needed(self) -> bool:
        return bool(self.members or self.pushes or self.desk.holder(self._clock.now_ms()))


class Gatherings:
    """All of them, by replica; each is forgotten when nobody is there and nothing is claimed."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._by_name: dict[ReplicaName, Gathering] = {}

    def __len__(self) -> int:
        return len(self._by_name)

    def join(self, name: ReplicaName, member: Member) -> Gathering:
        gathering = self._of(name)
        gathering.join(member)
        return gathering

    def leave(self, name: ReplicaName, member: Member) -> None:
        self._of(name).leave(member)
        self._forget(name)

    def push_began(self, name: ReplicaName, who: Who) -> None:
        gathering = self._of(name)
        gathering.pushes += 1
        gathering.desk.push_began(who, self._clock.now_ms())

    def push_ended(self, name: ReplicaName, who: Who) -> None:
        gathering = self._of(name)
        gathering.pushes -= 1
        gathering.desk.push_ended(who, self._clock.now_ms())
        self._forget(name)

    def tell_version(self, replica: Replica, number: int) -> None:
        if replica.name in self._by_name:
            self._by_name[replica.name].tell_version(replica.id, number)

    def _of(self, name: ReplicaName) -> Gathering:
        if name not in self._by_name:
            self._by_name[name] = Gathering(self._clock)
        return self._by_name[name]

    def _forget(self, name: ReplicaName) -> None:
        gathering = self._by_name.get(name)
        if gathering is None or gathering.members or gathering.pushes:
            return
        if gathering.timer is not None:
            gathering.timer.cancel()
        if not gathering.is_needed() or len(self._by_name) > GATHERINGS_MAX:
            del self._by_name[name]
            return
        wait_s = max(FORGET_S_MIN, gathering.desk.remaining_ms(self._clock.now_ms()) / 1000)
        gathering.timer = asyncio.get_running_loop().call_later(wait_s, self._forget, name)
