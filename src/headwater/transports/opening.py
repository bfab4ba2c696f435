"""Picks a transport by its url. Each is imported when it is wanted, so that only its users need its packages."""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, cast
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from headwater.delivery.breaker import BreakerPolicy
from headwater.errors import InvalidOption
from headwater.message import span_ms
from headwater.ports.clock import Clock
from headwater.transports.base import BaseTransport
from headwater.transports.headwater_log import HeadwaterTransport, OpenedLog

Opener = Callable[..., OpenedLog]
Reader = Callable[[str, Any], Any]

# scheme -> module, class and extra of the transports that bring packages with them
_WITH_PACKAGES = {
    "redis": ("redis_streams", "RedisStreams", "redis"),
    "rediss": ("redis_streams", "RedisStreams", "redis"),
    "redis+pubsub": ("redis_pubsub", "RedisPubSub", "redis"),
    "rediss+pubsub": ("redis_pubsub", "RedisPubSub", "redis"),
    "s3": ("object_storage", "ObjectStorage", "s3"),
    "objects+file": ("object_storage", "ObjectStorage", "s3"),
    "archive+postgres": ("postgres_archive", "PostgresArchive", "postgres"),
    "archive+postgresql": ("postgres_archive", "PostgresArchive", "postgres"),
}
_LOGS = ("headwater", "ws", "wss", "postgres", "postgresql", "sqlite")
SCHEMES = ("memory", "stdout", "file", *_WITH_PACKAGES, *_LOGS)
_SCHEME = re.compile(r"([a-z][a-z0-9+.-]+):", re.IGNORECASE)


def open_transport(
    url: str | os.PathLike[str], *, clock: Clock, opener: Opener | None = None, **options: Any
) -> BaseTransport:
    """`memory:`, `stdout:`, `file:///path.jsonl` or a path that ends in .jsonl, `redis://…`, `redis+pubsub://…`,
    `archive+postgres://…`, `s3://bucket/prefix`, `objects+file:///directory`; or another log: `headwater:events.db`,
    `sqlite:…`, `postgres://…`, `ws://…`, which `opener` opens.

    Options may stand in the url's query. Two belong to all: `breaker` (True, or failures, within, open) puts a circuit
    breaker before it, `batch` (True, or size, wait, max_buffered) a buffer before that; in a query they read
    `breaker=on` or `batch=size:100,wait:5`.
    """
    text = os.fsdecode(url)
    where = without_secrets(text)
    text, wraps = cut_wraps(text)
    for name in ("breaker", "batch"):
        if name in options:
            _refuse_twice(name, wraps, where)
            wraps[name] = options.pop(name)
    policy = _breaker_policy(wraps.get("breaker"), where)
    batch = _batch_settings(wraps.get("batch"), where)
    transport = _open(text, where, clock, opener, options)
    if policy is not None:
        from headwater.transports.guarded import GuardedTransport

        transport = GuardedTransport(transport, policy, clock=clock)
    if batch is None:
        return transport
    from headwater.transports.batching import BatchingTransport

    try:
        return BatchingTransport(transport, clock=clock, **batch)
    except BaseException:
        transport.close()
        raise


def _open(url: str, where: str, clock: Clock, opener: Opener | None, options: dict[str, Any]) -> BaseTransport:
    found = _SCHEME.match(url)
    scheme = found[1].lower() if found else ""
    if scheme == "file" or (not found and url.endswith(".jsonl")):
        return _open_file(url, where, clock, options)
    if scheme == "memory":
        from headwater.transports.memory import MemoryTransport

        return MemoryTransport(**_read(url, where, options, {"max_messages": _whole, "overflow": _text}))
    if scheme == "stdout":
        from headwater.transports.stdout import StdoutTransport

        return StdoutTransport(**_read(url, where, options, {}))
    if scheme in _WITH_PACKAGES:
        module, kind, extra = _WITH_PACKAGES[scheme]
        try:
            made = getattr(importlib.import_module(f"headwater.transports.{module}"), kind)
        except ImportError as exc:
            raise InvalidOption(
                f"this needs a package that is not installed ({exc})",
                where=where,
                next=f"pip install 'headwater[{extra}]'",
            ) from exc
        return cast(BaseTransport, made.from_url(url, options))
    if scheme in _LOGS:
        if opener is None:
            raise InvalidOption("nothing is given that opens logs", where=where, next="Pass opener=headwater.open")
        log = url[len("headwater:") :] if scheme == "headwater" else url
        return HeadwaterTransport(shown_log(url), partial(opener, log, **options))
    meant = "" if scheme or not url else f"Did you mean headwater:{url}? "
    raise InvalidOption(
        f"there is no transport for {scheme}:" if scheme else "this names no transport",
        where=where,
        next=f"{meant}Known: {', '.join(f'{known}:' for known in SCHEMES)} and paths that end in .jsonl; "
        "a log in a file is headwater:path",
    )


def _open_file(url: str, where: str, clock: Clock, options: dict[str, Any]) -> BaseTransport:
    from headwater.transports.file import FileTransport

    known: dict[str, Reader] = {"max_bytes": _whole, "max_age": _seconds, "keep": _whole, "sync": _switch}
    if not url.lower().startswith("file:"):  # a plain path may hold any character, so it has no query
        return FileTransport(url, clock=clock, **_read("file:", where, options, known))
    parts = _split(url, where)
    if parts.netloc not in ("", "localhost"):
        raise InvalidOption(
            f"a file on {parts.netloc!r} cannot be reached", where=where, next="Write file:///path/to.jsonl"
        )
    if not parts.path or parts.path == "/":
        raise InvalidOption("the path is missing", where=where, next="Write file:///path/to.jsonl")
    return FileTransport(unquote(parts.path), clock=clock, **_read(url, where, options, known))


def without_secrets(url: str) -> str:
    """For names, errors and logs: no password, and nothing of the query."""
    return without_password(url).partition("?")[0]


def shown_log(url: str) -> str:
    """The same for a log, with the schema that tells it from others in its database."""
    schema = re.search(r"[?&](schema=[a-z0-9_]+)(?=&|$)", without_password(url))
    return without_secrets(url) + (f"?{schema[1]}" if schema else "")


def without_password(url: str) -> str:
    """Also if it holds characters that had to be escaped: up to the last @, all may be a part of it."""
    return re.sub(r"//([^:@/]*):.*@", r"//\1@", url, flags=re.DOTALL)


# --- options ----------------------------------------------------------------------------------------------------


def _read(url: str, where: str, options: Mapping[str, Any], known: Mapping[str, Reader]) -> dict[str, Any]:
    """The options of the query and those beside the url, each read by its kind."""
    given: dict[str, Any] = {}
    for name, value in [*_query(_split(url, where).query, where), *options.items()]:
        if name not in known:
            raise InvalidOption(
                f"unknown option {name!r}", where=where, next=f"Known: {', '.join([*known, 'breaker', 'batch'])}"
            )
        _refuse_twice(name, given, where)
        given[name] = known[name](name, value)
    return given


def _split(url: str, where: str) -> SplitResult:
    try:
        return urlsplit(url)
    except ValueError:
        raise InvalidOption("this url cannot be read", where=where) from None  # its text may quote a password


def _query(query: str, where: str) -> list[tuple[str, str]]:
    try:
        return parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query))
    except ValueError:
        raise InvalidOption("its query cannot be read", where=where, next="Write name=value, joined by &") from None


def _refuse_twice(name: str, given: Mapping[str, Any], where: str) -> None:
    if name in given:
        raise InvalidOption(f"{name} is given twice", where=where, next="Say it in the url or beside it")


def cut_wraps(url: str) -> tuple[str, dict[str, Any]]:
    """`breaker` and `batch` of the query, and the url without them: the rest is for the transport, as written."""
    before, mark, query = url.partition("?")
    parts = query.split("&")
    ours = [part for part in parts if part.partition("=")[0] in ("breaker", "batch")]
    if not mark or not ours:
        return url, {}
    rest = "&".join(part for part in parts if part not in ours)
    wraps: dict[str, Any] = {}
    for part in ours:
        name, _, value = part.partition("=")
        _refuse_twice(name, wraps, without_secrets(url))
        wraps[name] = unquote(value)
    return before + (f"?{rest}" if rest else ""), wraps


def _breaker_policy(value: Any, where: str) -> BreakerPolicy | None:
    if isinstance(value, BreakerPolicy):
        return value
    settings = _settings("breaker", value, {"failures": _whole, "within": _seconds, "open": _seconds}, where)
    if settings is None:
        return None
    for name in ("within", "open"):
        if name in settings:
            settings[f"{name}_ms"] = span_ms(settings.pop(name), f"breaker {name}")
    return BreakerPolicy(**settings)


def _batch_settings(value: Any, where: str) -> dict[str, Any] | None:
    known: dict[str, Reader] = {"size": _whole, "wait": _seconds, "max_buffered": _whole, "on_unsent": _as_it_is}
    return _settings("batch", value, known, where)


def _settings(option: str, value: Any, known: Mapping[str, Reader], where: str) -> dict[str, Any] | None:
    """None: not wanted. Empty: wanted as usual."""
    if value is None or value is False or value == "off":
        return None
    if value is True or value == "on":
        return {}
    if isinstance(value, str):
        value = dict(part.partition(":")[::2] for part in value.split(","))
    if not isinstance(value, Mapping):
        raise InvalidOption(f"{option} is on, off or a table, not {value!r}", where=where)
    unknown = next((name for name in value if name not in known), None)
    if unknown is not None:
        raise InvalidOption(f"{option} has no setting {unknown!r}", where=where, next=f"Known: {', '.join(known)}")
    return {name: known[name](f"{option} {name}", part) for name, part in value.items()}


def _whole(name: str, value: Any) -> Any:
    if not isinstance(value, str):
        return value  # the transport looks at it
    if not re.fullmatch(r"[0-9]{1,18}", value):
        raise InvalidOption(f"{name} must be a whole number, not {value!r}")
    return int(value)


def _seconds(name: str, value: Any) -> Any:
    if not isinstance(value, str):
        return value
    if not re.fullmatch(r"[0-9]{1,12}(\.[0-9]{1,6})?", value):
        raise InvalidOption(f"{name} must be a number of seconds, not {value!r}")
    return float(value)


def _switch(name: str, value: Any) -> Any:
    if not isinstance(value, str):
        return value
    if value not in ("true", "false", "on", "off"):
        raise InvalidOption(f"{name} is on or off, not {value!r}")
    return value in ("true", "on")


def _text(name: str, value: Any) -> Any:
    return value


_as_it_is = _text
