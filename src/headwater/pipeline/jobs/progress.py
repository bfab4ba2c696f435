"""How a job tells how far it is."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    def step(self, name: str, total: int | None = None) -> None:
        """A new step begins; `total` is how much there is to do, if that is known."""

    def reached(self, done: int) -> None:
        """So much of the step is done."""


class Silent:
    def step(self, name: str, total: int | None = None) -> None:
        pass

    def reached(self, done: int) -> None:
        pass


SILENT = Silent()
