"""Opens a transport by its url. Each one is imported when it is wanted, so that only its users need its packages."""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, cast
from urllib.parse import unquote

from headwater.delivery.circuit import BreakerPolicy
from headwater.errors import InvalidOptionError
from headwater.formats import Span, redact_url, span_ms, url_text
from headwater.ports.clock import Clock
from headwater.transports.base import BaseTransport, given_twice, read_options
from headwater.transports.log import LogTransport, OpenedLog
from headwater.version import install_hint

Opener = Callable[..., OpenedLog]

# scheme -> module, class, and the extra whose packages it needs
_CLASSES = {
    "memory": ("memory", "MemoryTransport", ""),
    "stdout": ("file", "StdoutTransport", ""),
    "file": ("file", "FileTransport", ""),
    "redis": ("redis", "RedisStreams", "redis"),
    "rediss": ("redis", "RedisStreams", "redis"),
    "redis+pubsub": ("redis", "RedisPubSub", "redis"),
    "rediss+pubsub": ("redis", "RedisPubSub", "redis"),
    "s3": ("objects", "ObjectStorage", "s3"),
    "objects+file": ("objects", "ObjectStorage", "s3"),
    "archive+postgres": ("postgres", "PostgresArchive", "postgres"),
    "archive+postgresql": ("postgres", "PostgresArchive", "postgres"),
}
_TAKE_CLOCK = ("file", "s3", "objects+file")
_LOGS = ("headwater", "ws", "wss", "postgres", "postgresql", "sqlite")
SCHEMES = (*_CLASSES, *_LOGS)
_SCHEME = re.compile(r"([a-z][a-z0-9+.-]+):", re.IGNORECASE)


def open_transport(
    url: str | os.PathLike[str],
    *,
    clock: Clock,
    opener: Opener | None = None,
    breaker: BreakerPolicy | Mapping[str, Any] | str | bool | None = None,
    batch: Mapping[str, Any] | str | bool | None = None,
    **options: Any,
) -> BaseTransport:
    """`memory:`, `stdout:`, `file:///path.jsonl` or a path that ends in .jsonl, `redis://…`, `redis+pubsub://…`,
    `archive+postgres://…`, `s3://bucket/prefix`, `objects+file:///directory`; or another log: `headwater:events.db`,
    `sqlite:…`, `postgres://…`, `ws://…`, which `opener` opens.

    `breaker` (True, or failures, within, open) puts a circuit breaker in front of it, `batch` (True, or size, wait,
    max_buffered) a buffer in front of that. The other options are the keyword arguments of the transport's class, or
    of `opener`. All may stand in the url's query, these two as `breaker=on` or `batch=size:100,wait:5`.
    """
    text, wraps = cut_wraps(url_text(url, "a transport"))
    where = redact_url(text)
    for name, value in (("breaker", breaker), ("batch", batch)):
        if value is not None:
            if name in wraps:
                raise given_twice(name, where)
            wraps[name] = value
    policy = _breaker_policy(wraps.get("breaker"), where)
    batching = _settings("batch", wraps.get("batch"), where)
    transport = _open(text, where, clock, opener, options)
    try:
        if policy is not None:
            from headwater.transports.breaker import BreakerTransport

            transport = BreakerTransport(transport, policy, clock=clock)
        if batching is not None:
            from headwater.transports.batching import BatchingTransport

            _, read = read_options(BatchingTransport, "batch", batching)
            transport = BatchingTransport(transport, clock=clock, **read)
    except BaseException:
        transport.close()
        raise
    return transport


def _open(url: str, where: str, clock: Clock, opener: Opener | None, options: dict[str, Any]) -> BaseTransport:
    found = _SCHEME.match(url)
    scheme = found[1].lower() if found else "file" if url.endswith(".jsonl") else ""
    if scheme in _CLASSES:
        if scheme in _TAKE_CLOCK:
            options = {**options, "clock": clock}
        made = _class_of(scheme, where)
        if found:
            return made.from_url(url, **options)
        _, read = read_options(made, "file:", options)  # a path may hold any character, so it has no query
        return cast(BaseTransport, cast(Any, made)(url, **read))
    if scheme in _LOGS:
        if opener is None:
            raise InvalidOptionError(
                "no function to open logs was given", where=where, next="Pass opener=headwater.open"
            )
        log = url[len("headwater:") :] if scheme == "headwater" else url
        return LogTransport(redact_url(url, keep=("schema",)), partial(opener, log, **options))
    meant = "" if scheme or not url else f"Did you mean headwater:{url}? "
    raise InvalidOptionError(
        f"there is no transport for {scheme}:" if scheme else "this names no transport",
        where=where,
        next=f"{meant}Known: {', '.join(f'{known}:' for known in SCHEMES)} and paths that end in .jsonl; "
        "a log in a file is headwater:path",
    )


def _class_of(scheme: str, where: str) -> type[BaseTransport]:
    module, kind, extra = _CLASSES[scheme]
    try:
        return cast(type[BaseTransport], getattr(importlib.import_module(f"headwater.transports.{module}"), kind))
    except ImportError as exc:
        raise InvalidOptionError(
            f"this needs a package that is not installed ({exc})", where=where, next=install_hint(extra)
        ) from exc


# --- breaker and batch ------------------------------------------------------------------------------------------


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
        if name in wraps:
            raise given_twice(name, redact_url(url))
        wraps[name] = unquote(value)
    return before + (f"?{rest}" if rest else ""), wraps


def _breaker_policy(value: Any, where: str) -> BreakerPolicy | None:
    if isinstance(value, BreakerPolicy):
        return value
    settings = _settings("breaker", value, where)
    return None if settings is None else _make_policy(**read_options(_make_policy, "breaker", settings)[1])


def _make_policy(*, failures: int = 5, within: Span = 120.0, open: Span = 30.0) -> BreakerPolicy:
    return BreakerPolicy(failures, span_ms(within, "breaker within"), span_ms(open, "breaker open"))


def _settings(option: str, value: Any, where: str) -> Mapping[str, Any] | None:
    """None: not wanted. Empty: wanted with its defaults."""
    if value is None or value is False or value == "off":
        return None
    if value is True or value == "on":
        return {}
    if isinstance(value, str):
        return dict(part.partition(":")[::2] for part in value.split(","))
    if not isinstance(value, Mapping):
        raise InvalidOptionError(f"{option} is on, off or a table, not {value!r}", where=where)
    return value
