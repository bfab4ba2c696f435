"""A dedupe queue by its url. What needs an extra is imported when it is asked for."""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping
from typing import Any

from headwater.errors import InvalidOption
from headwater.ports.dedupe import DedupeQueue


def open_dedupe(url: str | os.PathLike[str], **options: Any) -> DedupeQueue:
    """`memory:`, a file path or `sqlite:path`, `postgres://…`, `redis://…`. Options: `max_count`, `max_age`, `clock`,
    and what its kind has besides."""
    text = os.fsdecode(url)
    scheme, found, rest = text.partition("://")
    if text == "memory:":
        from headwater.stores.dedupe.memory import MemoryDedupe

        _refuse_unknown(MemoryDedupe, options)
        return MemoryDedupe(**options)
    if scheme in ("postgres", "postgresql") and found:
        try:
            from headwater.stores.dedupe.postgres import PostgresDedupe
        except ImportError as exc:
            raise _missing("postgres", exc) from exc
        _refuse_unknown(PostgresDedupe, options)
        return PostgresDedupe(text, **options)
    if scheme in ("redis", "rediss") and found:
        try:
            from headwater.stores.dedupe.redis import RedisDedupe
        except ImportError as exc:
            raise _missing("redis", exc) from exc
        _refuse_unknown(RedisDedupe, options)
        return RedisDedupe(text, **options)
    if found and scheme != "sqlite":
        raise InvalidOption(
            f"there is no dedupe queue for {scheme}://", next="Use memory:, a file path, postgres:// or redis://"
        )
    from headwater.stores.dedupe.sqlite import SqliteDedupe

    _refuse_unknown(SqliteDedupe, options)
    return SqliteDedupe(rest.removeprefix("/") if found else text.removeprefix("sqlite:"), **options)


def _refuse_unknown(kind: type[DedupeQueue], options: Mapping[str, Any]) -> None:
    parameters = inspect.signature(kind).parameters.values()
    known = [each.name for each in parameters if each.kind is inspect.Parameter.KEYWORD_ONLY]
    unknown = next((name for name in options if name not in known), None)
    if unknown is not None:
        raise InvalidOption(f"unknown option {unknown!r}", where="dedupe", next=f"Known: {', '.join(known)}")


def _missing(extra: str, exc: ImportError) -> InvalidOption:
    return InvalidOption(
        f"this needs a package that is not installed ({exc})",
        where="dedupe",
        next=f"pip install 'headwater[{extra}]'",
    )
