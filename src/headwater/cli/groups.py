"""Command groups whose listing is what you get when you name just a log: `headwater dlq events.db`."""

from __future__ import annotations

import os
from itertools import pairwise
from typing import Any

from typer.core import TyperGroup

LISTING = "ls"
_WITH_VALUE = ("--token", "--key", "--ca", "--stale")  # options whose value is no word of the command


class ListsByDefault(TyperGroup):
    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        words = [arg for before, arg in pairwise(["", *args]) if not arg.startswith("-") and before not in _WITH_VALUE]
        asks_help = any(arg in ("--help", "-h") for arg in args)
        if words and words[0] not in self.commands and not asks_help and _names_a_file(words[0]):
            args = [LISTING, *args]
        return super().parse_args(ctx, args)


def _names_a_file(word: str) -> bool:
    """Rather than a misspelt command."""
    return os.path.exists(word) or any(mark in word for mark in "./:")
