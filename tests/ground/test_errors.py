"""The tree drawn in errors.py is the real one, every leaf of it is used, and errors survive a pickle."""

import ast
import pickle
import re
from functools import cache
from pathlib import Path

import pytest

from headwater import errors
from headwater.errors import HeadwaterError, VersionConflictError

SOURCE = Path(errors.__file__).parent


def drawn_tree() -> dict[str, str | None]:
    """Class name -> name of its parent, as the docstring draws it."""
    assert errors.__doc__ is not None
    parents: dict[str, str | None] = {}
    path: list[str] = []
    for line in errors.__doc__.splitlines():
        found = re.match(r"([│ ├└─]*)([A-Z]\w+)(\s{2,}|\s*\(|$)", line)
        if found is None or (not found[1] and found[2] != "HeadwaterError"):
            continue
        depth = len(found[1]) // 4
        parents[found[2]] = path[depth - 1] if depth else None
        path[depth:] = [found[2]]
    return parents


def classes() -> list[type[HeadwaterError]]:
    return [value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, HeadwaterError)]


def real_tree() -> dict[str, str | None]:
    return {
        each.__name__: next((base.__name__ for base in each.__bases__ if issubclass(base, HeadwaterError)), None)
        for each in classes()
    }


def leaves() -> list[str]:
    parents = set(real_tree().values())
    return [name for name in real_tree() if name not in parents]


@cache
def names_in_use() -> set[str]:
    """Names that the source loads other than to catch them or to annotate with them."""
    used: set[str] = set()
    for path in SOURCE.rglob("*.py"):
        if path.name == "errors.py":
            continue
        tree = ast.parse(path.read_text())
        idle = {
            id(inner)
            for node in ast.walk(tree)
            for part in _idle_parts(node)
            if part is not None
            for inner in ast.walk(part)
        }
        used |= {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and id(node) not in idle}
        used |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and id(node) not in idle}
    return used


def _idle_parts(node: ast.AST) -> list[ast.expr | None]:
    if isinstance(node, ast.ExceptHandler):
        return [node.type]
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return [node.returns]
    if isinstance(node, ast.arg | ast.AnnAssign):
        return [node.annotation]
    return []


def test_the_drawn_tree_is_the_real_one() -> None:
    assert len(drawn_tree()) > 20
    assert drawn_tree() == real_tree()


def test_what_the_caller_did_wrong_is_a_value_error() -> None:
    assert issubclass(errors.InvalidInputError, ValueError)
    assert not issubclass(errors.StoreError, ValueError)


@pytest.mark.parametrize("name", leaves())
def test_every_leaf_is_raised_somewhere(name: str) -> None:
    assert name in names_in_use()


@pytest.mark.parametrize("kind", classes(), ids=lambda kind: kind.__name__)
def test_an_error_survives_a_pickle(kind: type[HeadwaterError]) -> None:
    error = kind("it is empty", where="topic ''", next="Name at least one token")
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is kind
    assert (copy.why, copy.where, copy.next) == ("it is empty", "topic ''", "Name at least one token")
    assert str(copy) == "topic '': it is empty. Name at least one token"


def test_what_a_class_adds_survives_a_pickle_too() -> None:
    error = VersionConflictError("stale", newest=7)
    error.add_note("on the second try")
    copy = pickle.loads(pickle.dumps(error))
    assert (copy.newest, copy.__notes__, str(copy)) == (7, ["on the second try"], "stale")


@pytest.mark.parametrize(
    ("where", "next", "sentence"),
    [
        ("", "", "why"),
        ("here", "", "here: why"),
        ("", "Do this", "why. Do this"),
        ("here", "Do this", "here: why. Do this"),
    ],
)
def test_an_error_says_what_it_knows(where: str, next: str, sentence: str) -> None:
    assert str(HeadwaterError("why", where=where, next=next)) == sentence


def test_a_leaf_that_is_only_caught_does_not_count_as_raised() -> None:
    tree = ast.parse("try:\n    f()\nexcept QueueOverflow:\n    pass")
    handler = next(node for node in ast.walk(tree) if isinstance(node, ast.ExceptHandler))
    assert _idle_parts(handler) == [handler.type]
