"""How a transaction over dicts is taken back: for every change its inverse, done in reverse order."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


class UndoLog:
    def __init__(self) -> None:
        self._steps: list[Callable[[], object]] = []

    def add(self, step: Callable[[], object]) -> None:
        """Call this before the change itself, so that one that fails halfway is taken back too."""
        self._steps.append(step)

    def put(self, table: dict[K, V], key: K, value: V) -> None:
        if key in table:
            self._steps.append(partial(table.__setitem__, key, table[key]))
        else:
            self._steps.append(partial(table.pop, key, None))
        table[key] = value

    def drop(self, table: dict[K, V], key: K) -> bool:
        """Remove the key; False if it was not there."""
        if key not in table:
            return False
        self._steps.append(partial(table.__setitem__, key, table[key]))
        del table[key]
        return True

    def roll_back(self) -> None:
        while self._steps:
            self._steps.pop()()
