"""A dedupe queue in a table, whichever database has it: the unique insert decides who is first."""

from __future__ import annotations

import re
import threading
from abc import abstractmethod
from importlib import resources
from typing import Any

from headwater.errors import Conflict
from headwater.message import Span
from headwater.ports.clock import Clock
from headwater.ports.dedupe import Begun, DedupeEntry
from headwater.stores.dedupe.queue import CheckedQueue

FORGET_MAX = 10_000  # entries a statement deletes at most
BEGIN_TRIES_MAX = 100
SURPLUS_SHARE = 100  # one in so many may be kept beyond the limit, since looking for the surplus reads the whole index

_HEADING = re.compile(r"^-- :(\w+): .*\n", re.MULTILINE)
_pieces = _HEADING.split(resources.files(__package__).joinpath("dedupe.sql").read_text(encoding="utf-8"))
SQL = {name: body.strip() for name, body in zip(_pieces[1::2], _pieces[2::2], strict=True)}


class SqlQueue(CheckedQueue):
    def __init__(self, name: str, *, max_count: int, max_age: Span, clock: Clock | None) -> None:
        super().__init__(name, max_count=max_count, max_age=max_age, clock=clock)
        self._done_since: dict[str, int] = {}  # handler -> how many were done since the surplus was looked for
        self._done_lock = threading.Lock()

    @abstractmethod
    def _run(self, name: str, *, durable: bool = True, **bindings: Any) -> list[tuple[Any, ...]]:
        """One statement in a transaction of its own. What is not `durable` may be lost with the machine's power."""

    def _begin(self, handler: str, id: str, now_ms: int, until_ms: int | None) -> Begun:
        claim: dict[str, Any] = {
            "handler": handler,
            "id": id,
            "owner": self._owner,
            "until_ms": until_ms,
            "now_ms": now_ms,
            "forgotten_ms": self._forgotten_ms(now_ms),
        }
        for _ in range(BEGIN_TRIES_MAX):
            # A claim need not outlive the power: who made it does not either.
            if self._run("begin", durable=until_ms is None, **claim):
                if until_ms is None:
                    self._forget(handler, now_ms)
                return "first"
            found = self._run("is_done", handler=handler, id=id)
            if found:
                return "done" if found[0][0] else "busy"
            # It was released, or forgotten, between the two statements.
        raise Conflict(f"the entry of {id!r} comes and goes", where=self.name, next="Try again")

    def _extend(self, handler: str, id: str, now_ms: int, until_ms: int) -> bool:
        return bool(self._run("extend", durable=False, handler=handler, id=id, owner=self._owner, until_ms=until_ms))

    def _finish(self, handler: str, id: str, now_ms: int) -> None:
        self._run("finish", handler=handler, id=id, owner=self._owner, now_ms=now_ms)
        self._forget(handler, now_ms)

    def _forget(self, handler: str, now_ms: int) -> None:
        with self._done_lock:
            done = self._done_since[handler] = self._done_since.get(handler, 0) + 1
            if done * SURPLUS_SHARE < self.max_count and done > 1:  # also after the first, for what others left
                return
            self._done_since[handler] = 1
        forgotten_ms = self._forgotten_ms(now_ms)
        self._run("forget_old", durable=False, handler=handler, forgotten_ms=forgotten_ms)
        self._run("forget_abandoned", durable=False, handler=handler, forgotten_ms=forgotten_ms)
        self._run("forget_surplus", durable=False, handler=handler, max_count=self.max_count, forget_max=FORGET_MAX)

    def _release(self, handler: str, id: str) -> None:
        self._run("release", durable=False, handler=handler, id=id, owner=self._owner)

    def _contains(self, handler: str, id: str, forgotten_ms: int) -> bool:
        return bool(self._run("contains", handler=handler, id=id, forgotten_ms=forgotten_ms))

    def _entries(self, handler: str, forgotten_ms: int) -> list[DedupeEntry]:
        return [DedupeEntry(*row) for row in self._run("entries", handler=handler, forgotten_ms=forgotten_ms)]

    def _totals(self, handler: str | None, forgotten_ms: int) -> tuple[int, int, int, int | None]:
        rows = [row for row in self._run("totals", forgotten_ms=forgotten_ms) if handler in (None, row[0])]
        oldest_ms = min((row[3] for row in rows), default=None)
        return len(rows), sum(row[1] for row in rows), sum(row[2] for row in rows), oldest_ms

    def _clear(self, handler: str | None) -> int:
        return len(self._run("clear_all") if handler is None else self._run("clear", handler=handler))
