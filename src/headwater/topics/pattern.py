"""Patterns over topics: one AST, two spellings.

    spelling   exactly one token   zero or more tokens   one or more tokens
    nats       *                                         >  (last only, not together with *)
    amqp       *                   #  (anywhere)         *.#

Both are parsed into plain tokens, ONE and MANY (zero or more), in a canonical order in which every run of
wildcards is its ONEs and then at most one MANY. Patterns that mean the same therefore have the same parts:
`a.>` of NATS, and `a.*.#`, `a.#.*` and `a.#.*.#` of AMQP. Past the parser, spelling is forgotten.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal, TypeAlias

from headwater.errors import (
    CombinedWildcardError,
    EmptyPatternError,
    EmptyTokenError,
    InvalidOptionError,
    InvalidPatternError,
    MixedWildcardsError,
    MultiWildcardNotLastError,
)
from headwater.topics.topic import (
    TOPIC_BYTES_MAX,
    TOPIC_TOKENS_MAX,
    WILDCARD_CHARACTERS,
    flaw_of_any_spelling,
    quoted,
)

Dialect = Literal["nats", "amqp"]


class Wildcard(Enum):
    ONE = "exactly one token"
    MANY = "zero or more tokens"


Part: TypeAlias = str | Wildcard
Parts: TypeAlias = tuple[Part, ...]

ONE = Wildcard.ONE
MANY = Wildcard.MANY


@dataclass(frozen=True, slots=True)
class Pattern:
    """A parsed pattern; `parse_pattern` makes them. Equal if spelled equally in the same dialect.

    Its properties are computed once, because a pattern is parsed once and compared with every message:

    - `literal_prefix`: the longest text that every matching topic starts with. It ends in a dot where another
      token must follow: `orders.*` has `orders.`, but `orders.#` has `orders`.
    - `is_exact`: it matches one topic, its own text.
    - `is_all`: it matches every topic.
    - `exact_prefix_only`: a topic matches if, and only if, it starts with `literal_prefix`; after a prefix
      search a store need not ask `matches` again.
    """

    text: str
    dialect: Dialect
    parts: Parts = field(compare=False, repr=False)
    literal_prefix: str = field(init=False, compare=False, repr=False)
    is_exact: bool = field(init=False, compare=False, repr=False)
    is_all: bool = field(init=False, compare=False, repr=False)
    exact_prefix_only: bool = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        plain, rest = _split_at_first_wildcard(self.parts)
        prefix = ".".join(plain)
        if plain and not _may_end(rest, 0):
            prefix += "."
        is_all = self.parts in ((MANY,), (ONE, MANY))

        write = object.__setattr__  # the dataclass is frozen after its construction
        write(self, "literal_prefix", prefix)
        write(self, "is_exact", not rest)
        write(self, "is_all", is_all)
        write(self, "exact_prefix_only", is_all or rest == (ONE, MANY))

    def matches(self, topic: str) -> bool:
        """Whether `topic`, which `check_topic` accepts, is one of those meant."""
        if self.is_exact:
            return topic == self.literal_prefix
        if not topic.startswith(self.literal_prefix):
            return False
        return self.exact_prefix_only or _parts_match(self.parts, topic.split("."))


def parse_pattern(text: str, dialect: Dialect = "nats") -> Pattern:
    """Read `text` in the given spelling, or raise the InvalidPatternError that says what is wrong with it."""
    if dialect not in ("nats", "amqp"):
        raise InvalidOptionError(
            f"there is no dialect {quoted(dialect)}",
            where=f"pattern {quoted(text)}",
            next="Use 'nats' or 'amqp'",
        )
    where = f"{dialect} pattern {quoted(text)}"
    if not isinstance(text, str):
        raise InvalidPatternError(
            f"a pattern is a string, not {type(text).__name__}",
            where=where,
            next="Pass dot-separated text such as 'orders.*'",
        )
    if not text:
        everything = ">" if dialect == "nats" else "#"
        raise EmptyPatternError("it is empty", where=where, next=f"To match every topic use {everything!r}")
    if flaw := flaw_of_any_spelling(text):
        why, next_step = flaw
        raise InvalidPatternError(why, where=where, next=next_step)
    # A member of a (str, Enum) formats as its member name, so keep the text alone.
    text = str.__str__(text)
    tokens = text.split(".")
    parts = _parse_nats(tokens, where) if dialect == "nats" else _parse_amqp(tokens, where)
    return Pattern(text, dialect, _canonical(parts))


def overlaps(a: Pattern, b: Pattern) -> bool:
    """Whether some topic matches both.

    Walks both patterns at once, one token of an imagined topic per round, and keeps for each pair of
    positions the fewest bytes that lead there. Counting tokens and bytes is what makes the answer exact: a
    topic that would have to be longer than topics may be does not exist.
    """
    fewest_bytes = {(0, 0): 0}
    for dot_bytes in [0] + [1] * (TOPIC_TOKENS_MAX - 1):
        reached: dict[tuple[int, int], int] = {}
        for (at_a, at_b), size in fewest_bytes.items():
            for wanted_by_a, next_a in _moves(a.parts, at_a):
                for wanted_by_b, next_b in _moves(b.parts, at_b):
                    if ONE not in (wanted_by_a, wanted_by_b) and wanted_by_a != wanted_by_b:
                        continue
                    token_bytes = max(_bytes_min(wanted_by_a), _bytes_min(wanted_by_b))
                    longer = size + dot_bytes + token_bytes
                    if longer <= min(TOPIC_BYTES_MAX, reached.get((next_a, next_b), TOPIC_BYTES_MAX)):
                        reached[next_a, next_b] = longer
        if any(_may_end(a.parts, at_a) and _may_end(b.parts, at_b) for at_a, at_b in reached):
            return True
        fewest_bytes = reached
    return False


def _parse_nats(tokens: list[str], where: str) -> Iterator[Part]:
    for position, token in enumerate(tokens, start=1):
        if token == ">":
            if position < len(tokens):
                raise MultiWildcardNotLastError(
                    "'>' stands for the whole rest of a topic, so nothing can follow it",
                    where=where,
                    next="End the pattern there, or use the dialect amqp, whose '#' may stand anywhere",
                )
            if "*" in tokens:
                in_amqp = ".".join([*tokens[:-1], "*", "#"])
                raise MixedWildcardsError(
                    "'*' and '>' do not go together",
                    where=where,
                    next=f"Keep one of them, or use the dialect amqp and write {in_amqp!r}",
                )
            yield ONE
            yield MANY
        else:
            yield _one_or_plain(token, "*>", where, "'#' is a wildcard of the dialect amqp only; use that dialect")


def _parse_amqp(tokens: list[str], where: str) -> Iterator[Part]:
    for token in tokens:
        if token == "#":
            yield MANY
        else:
            yield _one_or_plain(token, "*#", where, "'>' is a wildcard of the nats dialect only; here write '*.#'")


def _one_or_plain(token: str, wildcards: str, where: str, next_if_foreign: str) -> Part:
    """What the dialects read alike: `*`, and plain tokens with their rules."""
    if token == "*":
        return ONE
    if not token:
        raise EmptyTokenError(
            "a token is empty", where=where, next="Put text or a wildcard before, between and after the dots"
        )
    for character in token:
        if character in wildcards:
            raise CombinedWildcardError(
                f"{character!r} is only part of the token {quoted(token)}",
                where=where,
                next=f"A wildcard stands for whole tokens: write {character!r} alone between dots",
            )
        if character in WILDCARD_CHARACTERS:
            raise InvalidPatternError(
                f"the token {quoted(token)} holds {character!r}", where=where, next=next_if_foreign
            )
    return token


def _canonical(parts: Iterator[Part]) -> Parts:
    """Move each MANY behind the ONEs that follow it, and make several of them one."""
    ordered: list[Part] = []
    many_pending = False
    for part in parts:
        if part is MANY:
            many_pending = True
            continue
        if many_pending and part is not ONE:
            ordered.append(MANY)
            many_pending = False
        ordered.append(part)
    if many_pending:
        ordered.append(MANY)
    return tuple(ordered)


def _split_at_first_wildcard(parts: Parts) -> tuple[list[str], Parts]:
    plain: list[str] = []
    for part in parts:
        if isinstance(part, Wildcard):
            break
        plain.append(part)
    return plain, parts[len(plain) :]


def _parts_match(parts: Parts, tokens: list[str]) -> bool:
    """Let each MANY take as little as it can, and one token more whenever what follows it fails.

    Only the latest MANY ever needs another try: the tokens an earlier one could take in addition, the latest
    can take as well. So the work is at most parts times tokens, however many of them there are.
    """
    at_part = at_token = 0
    after_many = retry_token = -1
    while at_token < len(tokens):
        part = parts[at_part] if at_part < len(parts) else None
        if part is MANY:
            at_part += 1
            after_many, retry_token = at_part, at_token
        elif part is ONE or part == tokens[at_token]:
            at_part += 1
            at_token += 1
        elif after_many >= 0:
            retry_token += 1
            at_part, at_token = after_many, retry_token
        else:
            return False
    return _may_end(parts, at_part)


def _may_end(parts: Parts, position: int) -> bool:
    # In canonical parts no MANY follows another, so only the last part can be one to skip.
    return position == len(parts) or (parts[position] is MANY and position + 1 == len(parts))


def _moves(parts: Parts, position: int) -> Iterator[tuple[Part, int]]:
    """Each way to take one token at `position`: what it must be (ONE: anything) and the position after."""
    if position < len(parts) and parts[position] is MANY:
        yield ONE, position
        position += 1
    if position < len(parts):
        yield parts[position], position + 1


def _bytes_min(part: Part) -> int:
    return len(part.encode()) if isinstance(part, str) else 1


def covers(wide: Pattern, narrow: Pattern) -> bool:
    """Whether every topic that `narrow` matches is matched by `wide`, in whatever dialect each is written.

    Topics are taken to be of any length. Where nothing but the limits on topics would make it true, the answer
    is False, which for a permission is the safe side.

    The worst topics for `wide` can be named. Where `narrow` has a wildcard, a token that `wide` does not mention
    is the worst, since only a wildcard takes it. That leaves how many tokens each MANY of `narrow` stands for, and
    there one of two choices is always the worst:

    - so many that nothing spelled out in `wide` can reach across, or
    - none at all, when `wide` has got so far that any tokens will do, and must take others that it needs later.

    So no topics are tried: the two lists are compared part by part, in time that grows with their product.
    """
    if wide.is_all:  # also where `#` is asked of `>`, which differ in the empty topic only, and there is none
        return True
    asked = narrow.parts
    first, *others = _blocks(wide.parts)
    if not others:
        return MANY not in asked and _end_of(first, asked, 0) == len(asked)
    *middle, last = others
    body_size = len(asked) - len(last)
    # The last block has to take the end of every topic. It begins with a plain token, as all behind a MANY do, so a
    # MANY among those parts can push it out of place; and then it finds too few of them.
    if body_size < 0 or _end_of(last, asked, body_size) is None:
        return False
    body = asked[:body_size]
    end = _end_of(first, body, 0)
    for block in middle:
        if end is None:
            return False
        # The leftmost place leaves most to the blocks that follow.
        ends = (_end_of(block, body, start) for start in range(end, len(body)))
        end = next((found for found in ends if found is not None), None)
    return end is not None


def _blocks(parts: Parts) -> list[Parts]:
    """What stands before, between and after the MANYs."""
    blocks: list[list[Part]] = [[]]
    for part in parts:
        if part is MANY:
            blocks.append([])
        else:
            blocks[-1].append(part)
    return [tuple(block) for block in blocks]


def _end_of(block: Parts, asked: Parts, start: int) -> int | None:
    """Where `block` ends if it takes what is asked from `start` on; None if some topic keeps it from that."""
    at = start
    for index, part in enumerate(block):
        if at < len(asked) and asked[at] is MANY:
            if any(later is not ONE for later in block[index:]):
                return None
            at += 1
        if at == len(asked) or part not in (ONE, asked[at]):
            return None
        at += 1
    return at
