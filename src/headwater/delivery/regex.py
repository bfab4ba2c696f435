"""Regexes that come from outside, in the dialect of RE2: whatever the regex, a search takes time in proportion to the
text. Everything that tells one text from another by a regex does it here, so that the stores agree to the letter.

RE2 has no look-around and no backreferences; they are what an engine backtracks for.
"""

from __future__ import annotations

from functools import lru_cache

import re2

from headwater.errors import InvalidFilter

REGEX_CHARS_MAX = 256
REGEX_STEPS_MAX = 5_000  # of the compiled program; a search takes so many for each character at most
SEARCHED_CHARS_MAX = 2_048  # the beginning of a text, which is all that is searched
_MEMORY_BYTES = 128 * 1024
_COMPILED_KEPT = 1_024

_INSTEAD = {
    "(?=": "A look-ahead: match what follows as well",
    "(?!": "A negative look-ahead: name what is wanted, in a list",
    "(?<=": "A look-behind: match what comes before as well",
    "(?<!": "A negative look-behind: name what is wanted, in a list",
    "(?>": "An atomic group: use a plain one, (?:…)",
    "(?P": "A backreference: name what is wanted, in a list",
    "(?#": "A comment: leave it out",
    r"\Z": r"The end of the text is \z",
    r"\u": r"A character by its number is \x{…}",
}
_OPTIONS = re2.Options()
_OPTIONS.log_errors = False
_OPTIONS.max_mem = _MEMORY_BYTES
_OPTIONS.never_capture = True
_LITERAL = re2.Options()
_LITERAL.log_errors = False
_LITERAL.max_mem = _MEMORY_BYTES
_LITERAL.never_capture = True
_LITERAL.literal = True
_LITERAL.encoding = re2.Options.Encoding.LATIN1


class Regex:
    """Equal if it is spelled alike; what it is compiled to is kept apart, so that thousands of filters hold little."""

    __slots__ = ("source",)

    def __init__(self, source: str) -> None:
        self.source = source

    def finds(self, text: str) -> bool:
        """Whether it matches anywhere in the text's beginning."""
        return _compiled(self.source).search(text[:SEARCHED_CHARS_MAX].encode(errors="replace")) is not None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Regex) and other.source == self.source

    def __hash__(self) -> int:
        return hash(self.source)


def parse_regex(source: str, where: str) -> Regex:
    if len(source) > REGEX_CHARS_MAX:
        raise InvalidFilter(
            f"a regex of {len(source)} characters is longer than {REGEX_CHARS_MAX}",
            where=where,
            next="Shorten it, or split it into a list",
        )
    try:
        compiled = _compiled(source)
    except UnicodeEncodeError as exc:
        raise InvalidFilter("a regex holds half a surrogate pair", where=where, next="Write whole characters") from exc
    except re2.error as exc:
        why = exc.args[0].decode(errors="replace") if isinstance(exc.args[0], bytes) else str(exc)
        raise InvalidFilter(f"not a regular expression that RE2 takes: {why}", where=where, next=_instead(why)) from exc
    if compiled.programsize > REGEX_STEPS_MAX:
        raise InvalidFilter(
            f"a regex of {compiled.programsize:,} steps is larger than {REGEX_STEPS_MAX:,}",
            where=where,
            next="Repeat less, as in .* instead of .{300}, or split it into a list",
        )
    return Regex(source)


def is_in(text: str, whole: str) -> bool:
    """Whether a large text holds another one. Python would search it without letting other threads run."""
    return _compiled_text(text).search(whole.encode(errors="surrogatepass")) is not None


@lru_cache(maxsize=_COMPILED_KEPT)
def _compiled_text(text: str) -> re2._Regexp:
    return re2._Regexp(text.encode(errors="surrogatepass"), _LITERAL)


@lru_cache(maxsize=_COMPILED_KEPT)
def _compiled(source: str) -> re2._Regexp:
    # Not by re2.compile, which keeps a cache of its own.
    return re2._Regexp(source.encode(), _OPTIONS)


def _instead(why: str) -> str:
    what = why.rpartition(": ")[2]
    if what in _INSTEAD:
        return _INSTEAD[what]
    if what.startswith("\\") and what[1:].isdigit():
        return "A backreference: name what is wanted, in a list"
    return "Mend it (the spelling of RE2)"
