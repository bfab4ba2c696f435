"""Does one pattern allow all that another asks for?

The worst topics for `wide` can be named. Where `narrow` has a wildcard, a token that `wide` does not mention
is the worst, since only a wildcard takes it. That leaves how many tokens each MANY of `narrow` stands for, and
there one of two choices is always the worst:

- so many that nothing spelled out in `wide` can reach across, or
- none at all, when `wide` has got so far that any tokens will do, and must take others that it needs later.

So no topics are tried: the two lists are compared part by part, in time that grows with their product.
"""

from __future__ import annotations

from headwater.topics.pattern import MANY, ONE, Part, Parts, Pattern


def covers(wide: Pattern, narrow: Pattern) -> bool:
    """Whether every topic that `narrow` matches is matched by `wide`, whatever they are spelled in.

    Topics are taken to be of any length. Where nothing but the limits on topics would make it true, the answer
    is False, which for a permission is the safe side.
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
