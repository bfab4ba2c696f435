"""Changing a log in one transaction, as positions and sinks do."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from headwater.errors import Conflict
from headwater.ports.store import Store, Writer

TRIES_MAX = 5

_Answer = TypeVar("_Answer")


def changed(store: Store, change: Callable[[Writer], _Answer], *, alone: bool = False) -> _Answer:
    """Run `change` in a transaction, and again if the database made it give way: nothing of it stayed then. `alone` if
    it adds a subscription; who publishes, or moves on what is there, keeps nobody else out."""
    for _ in range(TRIES_MAX - 1):
        try:
            return _once(store, change, alone)
        except Conflict:
            continue
    return _once(store, change, alone)


def _once(store: Store, change: Callable[[Writer], _Answer], alone: bool) -> _Answer:
    with store.write(alone=alone) as writer:
        return change(writer)
