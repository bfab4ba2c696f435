"""Which of many patterns, of both dialects, match a topic."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Generic, TypeVar

from headwater.topics.pattern import Part, Pattern, Wildcard

T = TypeVar("T", bound=Hashable)


class TopicTrie(Generic[T]):
    """Values filed under patterns, found by topic. Patterns with equal parts are the same one, in whatever dialect.

    A match walks only the branches that the topic's own tokens open, so patterns that begin otherwise cost nothing.
    """

    __slots__ = ("_root",)

    def __init__(self) -> None:
        self._root: _Node[T] = _Node()

    def add(self, pattern: Pattern, value: T) -> None:
        node = self._root
        for part in pattern.parts:
            node = node.child(part) or node.grow(part)
        node.values[value] = None

    def remove(self, pattern: Pattern, value: T) -> None:
        """Take `value` from under `pattern`, if it is there, and prune the nodes this empties."""
        path = [self._root]
        for part in pattern.parts:
            child = path[-1].child(part)
            if child is None:
                return
            path.append(child)
        path[-1].values.pop(value, None)
        for parent, part in zip(path[-2::-1], reversed(pattern.parts), strict=True):
            if not parent.prune(part):
                return

    def match(self, topic: str) -> list[T]:
        """Every value with a pattern that matches `topic`; once, however many of its patterns do."""
        reached = _with_skipped_many([self._root])
        for token in topic.split("."):
            reached = _step(reached, token)
        found: dict[T, None] = {}
        for node in reached:
            found.update(node.values)
        return list(found)


class _Node(Generic[T]):
    """One place in the trie."""

    __slots__ = ("many", "one", "repeats", "tokens", "values")

    def __init__(self, *, repeats: bool = False) -> None:
        self.tokens: dict[str, _Node[T]] = {}
        self.one: _Node[T] | None = None
        self.many: _Node[T] | None = None
        self.repeats = repeats  # reached over a MANY, so that any token leads back to it
        self.values: dict[T, None] = {}  # not a set: the answer comes in the same order on every run

    def child(self, part: Part) -> _Node[T] | None:
        if isinstance(part, str):
            return self.tokens.get(part)
        return self.one if part is Wildcard.ONE else self.many

    def grow(self, part: Part) -> _Node[T]:
        grown: _Node[T] = _Node(repeats=part is Wildcard.MANY)
        if isinstance(part, str):
            self.tokens[part] = grown
        elif part is Wildcard.ONE:
            self.one = grown
        else:
            self.many = grown
        return grown

    def prune(self, part: Part) -> bool:
        """Drop the child behind `part` if nothing is left in or below it."""
        child = self.child(part)
        if child is None or child.values or child.tokens or child.one or child.many:
            return False
        if isinstance(part, str):
            del self.tokens[part]
        elif part is Wildcard.ONE:
            self.one = None
        else:
            self.many = None
        return True


def _step(reached: Iterable[_Node[T]], token: str) -> Iterable[_Node[T]]:
    """All nodes that one more token leads to."""
    following: list[_Node[T]] = []
    for node in reached:
        if node.repeats:
            following.append(node)
        if literal := node.tokens.get(token):
            following.append(literal)
        if node.one:
            following.append(node.one)
    return _with_skipped_many(following)


def _with_skipped_many(nodes: list[_Node[T]]) -> Iterable[_Node[T]]:
    """Add what stands behind a MANY that takes nothing.

    Each node is kept once: patterns such as `#.a.#.a` lead to one node along many ways, and to follow each
    would grow exponentially.
    """
    # Canonical parts never have MANY after MANY, so one look behind is enough.
    return dict.fromkeys([*nodes, *(node.many for node in nodes if node.many)])
