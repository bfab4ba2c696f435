"""How many sessions of each kind run at a time: in all, for one replica, and for one holder, a token, a key or, without
either, an address. A replica and a holder have up to half of the slots, so that no single one locks the others out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from headwater.ports.annex import Refusal
from headwater.replication.names import ReplicaName, Session


class Slots:
    def __init__(self, most: Mapping[Session, int]) -> None:
        self._most = most
        self._taken: Counter[tuple[Session, ReplicaName | str | None]] = Counter()

    def running(self, session: Session) -> int:
        return self._taken[session, None]

    def refusal(self, session: Session, name: ReplicaName, holder: str) -> Refusal | None:
        """Why there is no slot for it now, if there is none."""
        most = self._most[session]
        share = max(1, most // 2)
        if self._taken[session, None] >= most:
            return Refusal(503, "the server has as many sessions of this kind as it takes; try again\n")
        if self._taken[session, holder] >= share:
            return Refusal(429, f"this token, key or address has {share} of them running here already; try again\n")
        if self._taken[session, name] >= share:
            return Refusal(429, f"of this replica {share} of them are running already; try again\n")
        return None

    def take(self, session: Session, name: ReplicaName, holder: str) -> None:
        self._taken.update((session, whose) for whose in (None, name, holder))

    def give_back(self, session: Session, name: ReplicaName, holder: str) -> None:
        for whose in (None, name, holder):
            self._taken[session, whose] -= 1
            if not self._taken[session, whose]:
                del self._taken[session, whose]
