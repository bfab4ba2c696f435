"""How many sessions of each kind run at a time: in all, for one replica, and for one holder, a token, a key or, without
either, an address. A holder has up to half of the slots and a replica up to three quarters, so that no single holder
locks the others out, neither of the server nor of a replica."""

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
        of_holder, of_replica = max(1, most // 2), most - most // 4
        if self._taken[session, None] >= most:
            return Refusal(503, "the server has as many sessions of this kind as it takes; try again\n")
        if self._taken[session, holder] >= of_holder:
            return Refusal(429, f"this token, key or address has {of_holder} of them running already; try again\n")
        if self._taken[session, name] >= of_replica:
            return Refusal(429, f"of this replica {of_replica} of them are running already; try again\n")
        return None

    def take(self, session: Session, name: ReplicaName, holder: str) -> None:
        self._taken.update((session, whose) for whose in (None, name, holder))

    def give_back(self, session: Session, name: ReplicaName, holder: str) -> None:
        for whose in (None, name, holder):
            self._taken[session, whose] -= 1
            if not self._taken[session, whose]:
                del self._taken[session, whose]
