"""Options of the format `headwater` as Spark passes them: names in any case, values as text."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from headwater.errors import HeadwaterError, InvalidOptionError

SEQ_MAX = 2**63 - 1
_LIKENESS_MIN = 0.75  # how much an unknown option must resemble a known one to be taken for a slip

T = TypeVar("T")
D = TypeVar("D")


class Options:
    def __init__(self, given: Mapping[str, str]) -> None:
        self._texts = {name.lower(): value for name, value in given.items()}
        self._known: dict[str, str] = {}

    def __contains__(self, name: str) -> bool:
        return name.lower() in self._texts

    def get(self, name: str, parse: Callable[[str], T], default: D) -> T | D:
        """The parsed option, or `default`; an error names the option."""
        self._known[name.lower()] = name
        text = self._texts.get(name.lower())
        try:
            return default if text is None else parse(text.strip())
        except HeadwaterError as exc:
            why = f"{exc.why} ({exc.where})" if exc.where else exc.why
            raise InvalidOptionError(why, where=name, next=exc.next) from exc

    def check_unknown(self, of_spark: Sequence[str] | None = None) -> None:
        """Refuse options that were never asked for; if Spark's own are not listed, only what resembles one that was."""
        for unknown in sorted(self._texts.keys() - self._known.keys() - {name.lower() for name in of_spark or ()}):
            meant = difflib.get_close_matches(unknown, self._known, n=1, cutoff=_LIKENESS_MIN)
            if meant or of_spark is not None:
                hint = f"Did you mean {self._known[meant[0]]}? " if meant else ""
                next = f"{hint}All: {', '.join(self._known.values())}"
                raise InvalidOptionError(f"there is no option {unknown!r}", where=unknown, next=next)


def whole(least: int, most: int = SEQ_MAX) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not (text.isdecimal() and text.isascii() and least <= int(text) <= most):
            raise InvalidOptionError(f"this is a whole number, at least {least} and at most {most}, not {text!r}")
        return int(text)

    return parse


def one_of(*choices: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text.lower() not in choices:
            raise InvalidOptionError(f"this is {' or '.join(choices)}, not {text!r}")
        return text.lower()

    return parse


def flag(text: str) -> bool:
    return one_of("true", "false")(text) == "true"
