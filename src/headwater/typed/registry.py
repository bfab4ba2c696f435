"""Which class belongs to which type of message."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from headwater.errors import InvalidOption

if TYPE_CHECKING:
    from headwater.typed.event import Event


class Registry:
    """The classes with a topic of one tree, by type and version. `Event.registry` is the one that classes are in
    unless a base says `registry=Registry()`."""

    def __init__(self) -> None:
        self._classes: dict[str, dict[int, type[Event]]] = {}
        self._handlers: dict[type[Event], list[str]] = {}

    def __iter__(self) -> Iterator[type[Event]]:
        """By type, the oldest version first."""
        for _, versions in sorted(self._classes.items()):
            yield from (versions[version] for version in sorted(versions))

    def __len__(self) -> int:
        return sum(map(len, self._classes.values()))

    def add(self, cls: type[Event]) -> None:
        type_, version = cls.__headwater__.type, cls.__headwater__.version
        there = self._classes.setdefault(type_, {}).get(version)
        # The same class again is a module that was loaded anew, or a cell of a notebook.
        if there is not None and _place(there) != _place(cls):
            raise InvalidOption(
                f"{_place(there)} has type {type_!r}, version {version} already",
                where=_place(cls),
                next="Give one of them another type= or version=, or its base registry=Registry()",
            )
        self._classes[type_][version] = cls

    def find(self, type_: str | None, version: int | None = None) -> type[Event] | None:
        """The class of this type: of this version if there is one, else the newest."""
        versions = self._classes.get(type_ or "")
        if not versions:
            return None
        return versions[version if version in versions else max(versions)]

    def note_handler(self, cls: type[Event], id: str) -> None:
        """So that what is exported can say who receives."""
        ids = self._handlers.setdefault(cls, [])
        if id not in ids:
            ids.append(id)

    def handlers_of(self, cls: type[Event]) -> list[str]:
        return list(self._handlers.get(cls, ()))


def _place(cls: type[Event]) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"
