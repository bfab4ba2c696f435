"""Older versions of a class: pure functions from the fields of one version to those of the next."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from headwater.errors import InvalidMessage, InvalidOption, VersionMismatch
from headwater.typed.keywords import Declared, Upgrader


def add_upgrader(declared: Declared, from_version: object) -> Callable[[Upgrader], Upgrader]:
    newest = declared.version - 1
    where = f"{declared.where}.upgrade"
    if isinstance(from_version, bool) or not isinstance(from_version, int) or not 1 <= from_version <= newest:
        raise InvalidOption(
            f"from_version is a whole number from 1 to {newest}, not {from_version!r}"
            if newest
            else "the class is version 1, and there is none before it",
            where=where,
            next="Raise the version of the class when its fields change",
        )
    if from_version in declared.upgraders:
        raise InvalidOption(f"there is one from version {from_version} already", where=where, next="Keep one of them")

    def add(upgrader: Upgrader) -> Upgrader:
        declared.upgraders[from_version] = upgrader
        return upgrader

    return add


def upgraded(declared: Declared, version: int, fields: Any, where: str) -> Any:
    """The fields of `version` as those of the class's own version."""
    if version > declared.version:
        raise VersionMismatch(
            f"the message is version {version} of {declared.type}, and the class here is version {declared.version}",
            where=where,
            next="Give consumers the new class before publishers, then redrive this",
        )
    missing = next((each for each in range(version, declared.version) if each not in declared.upgraders), None)
    if missing is not None:
        raise VersionMismatch(
            f"the message is version {version} of {declared.type}, the class here is version {declared.version}, and "
            f"nothing upgrades {missing} to {missing + 1}",
            where=where,
            next=f"Declare @{declared.type}.upgrade(from_version={missing}), then redrive this",
        )
    for each in range(version, declared.version):
        try:
            fields = declared.upgraders[each](fields)
        except Exception as exc:
            raise InvalidMessage(
                f"its upgrade from version {each} failed: {type(exc).__name__}: {exc}", where=where
            ) from exc
        if not isinstance(fields, dict):
            raise InvalidMessage(
                f"its upgrade from version {each} gave a {type(fields).__name__}",
                where=where,
                next="An upgrader returns the fields as a dict",
            )
    return fields


def missing_links(declared: Declared) -> list[int]:
    """Versions above the oldest that can be upgraded which have no upgrader."""
    oldest = min(declared.upgraders, default=declared.version)
    return [version for version in range(oldest, declared.version) if version not in declared.upgraders]
