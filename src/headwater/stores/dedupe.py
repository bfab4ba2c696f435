"""Dedupe queues: which messages a handler has handled already. The contract is `ports.dedupe`.

All kinds share `BaseDedupe`: limits, checks, the count of answers and the steps of each call. A step is one atomic
statement of dedupe.sql, in SQLite, also in memory, and PostgreSQL, or one script in Redis.
"""

from __future__ import annotations

import importlib
import inspect
import os
import threading
import uuid
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

from headwater.arguments import check_whole
from headwater.errors import ClosedError, ConflictError, InvalidOptionError
from headwater.formats import Span, is_unicode, span_ms, url_text
from headwater.ports.clock import Clock, SystemClock
from headwater.ports.dedupe import (
    DEDUPE_AGE_S,
    DEDUPE_COUNT,
    DEDUPE_COUNT_MAX,
    DEDUPE_ID_CHARS_MAX,
    HANDLER_CHARS_MAX,
    Begun,
    DedupeEntry,
    DedupeQueue,
    DedupeStats,
)
from headwater.stores.sql import load, text_of
from headwater.stores.sqlite.connection import (
    MEMORY,
    Durability,
    check_file,
    connect,
    immediate,
    refuse_unsafe_sqlite,
    translated,
    use_wal,
)
from headwater.version import install_hint

FORGET_MAX = 10_000  # entries a statement deletes at most
BEGIN_TRIES_MAX = 100
SURPLUS_SHARE = 100  # one in so many may be kept beyond the limit, since looking for the surplus reads the whole index
BUSY_TIMEOUT_S = 10.0
SQL = load(text_of("headwater.stores", "dedupe.sql"))

# scheme -> module, class, and the extra whose packages it needs
_OTHERS = {
    "postgres": ("dedupe_postgres", "PostgresDedupe", "postgres"),
    "postgresql": ("dedupe_postgres", "PostgresDedupe", "postgres"),
    "redis": ("dedupe_redis", "RedisDedupe", "redis"),
    "rediss": ("dedupe_redis", "RedisDedupe", "redis"),
}


def open_dedupe(url: str | os.PathLike[str], **options: Any) -> DedupeQueue:
    """Open a dedupe queue: `memory:`, a file path or `sqlite:path`, `postgres://…`, `redis://…`. Options: `max_count`,
    `max_age`, `clock`, and those of its kind. An optional package is imported when its url is opened."""
    text = url_text(url, "a dedupe queue")
    scheme, found, rest = text.partition("://")
    kind: type[BaseDedupe] = SqliteDedupe
    addresses = [rest.removeprefix("/") if found else text.removeprefix("sqlite:")]
    if text == "memory:":
        kind, addresses = MemoryDedupe, []
    elif found and scheme in _OTHERS:
        module, name, extra = _OTHERS[scheme]
        try:
            kind = getattr(importlib.import_module(f"headwater.stores.{module}"), name)
        except ImportError as exc:
            raise InvalidOptionError(
                f"this needs a package that is not installed ({exc})", where="dedupe", next=install_hint(extra)
            ) from exc
        addresses = [text]
    elif found and scheme != "sqlite":
        raise InvalidOptionError(
            f"there is no dedupe queue for {scheme}://", next="Use memory:, a file path, postgres:// or redis://"
        )
    _refuse_unknown(kind, options)
    return kind(*addresses, **options)


def _refuse_unknown(kind: type[DedupeQueue], options: Mapping[str, Any]) -> None:
    parameters = inspect.signature(kind).parameters.values()
    known = [each.name for each in parameters if each.kind is inspect.Parameter.KEYWORD_ONLY]
    unknown = next((name for name in options if name not in known), None)
    if unknown is not None:
        raise InvalidOptionError(f"unknown option {unknown!r}", where="dedupe", next=f"Known: {', '.join(known)}")


class BaseDedupe(ABC):
    """`ports.dedupe.DedupeQueue` over named steps. Every object is an owner of its own: it releases only its own
    claims."""

    def __init__(
        self,
        name: str,
        *,
        max_count: int = DEDUPE_COUNT,
        max_age: Span = DEDUPE_AGE_S,
        clock: Clock | None = None,
    ) -> None:
        self.name = name
        self.clock: Clock = clock or SystemClock()
        self.max_count = check_whole("max_count", max_count, 1, DEDUPE_COUNT_MAX)
        self.max_age_ms = span_ms(max_age, "max_age")
        if self.max_age_ms < 1:
            raise InvalidOptionError("max_age must be longer than 0")
        self._owner = uuid.uuid4().hex
        self._answers: Counter[Begun] = Counter()
        self._answers_lock = threading.Lock()
        self._done_since: dict[str, int] = {}  # handler -> how many were done since the surplus was looked for
        self._done_lock = threading.Lock()
        self._closed = False

    @abstractmethod
    def _run(self, step: str, *, durable: bool = True, **values: Any) -> list[Any]:
        """The rows of one step, which is atomic. What is not `durable` may be lost with the machine's power."""

    @abstractmethod
    def _close(self) -> None: ...

    def begin(self, handler: str, id: str, now_ms: int, claim_ms: int) -> Begun:
        self._check(handler, id)
        return self._begin(handler, id, now_ms, now_ms + check_whole("claim_ms", claim_ms, 1, 2**53))

    def _begin(self, handler: str, id: str, now_ms: int, until_ms: int | None) -> Begun:
        """Begin a message, whose claim ends at `until_ms`; without it the message is done at once."""
        claim: dict[str, Any] = {
            "handler": handler,
            "id": id,
            "owner": self._owner,
            "until_ms": until_ms,
            "now_ms": now_ms,
            "forgotten_ms": self._forgotten_ms(now_ms),
        }
        for _ in range(BEGIN_TRIES_MAX):
            # A claim need not survive a power loss: its owner does not either.
            found = self._run("begin", durable=until_ms is None, **claim) or self._run("known", handler=handler, id=id)
            if found:
                answer: Begun = found[0][0]
                if answer == "first" and until_ms is None:
                    self._forget(handler, now_ms)
                with self._answers_lock:
                    self._answers[answer] += 1
                return answer
            # It was released, or forgotten, between the two steps.
        raise ConflictError(f"the entry of {id!r} changed at each try", where=self.name, next="Try again")

    def extend(self, handler: str, id: str, now_ms: int, claim_ms: int) -> bool:
        self._check(handler, id)
        until_ms = now_ms + check_whole("claim_ms", claim_ms, 1, 2**53)
        claim: dict[str, Any] = {"handler": handler, "id": id, "owner": self._owner}
        return bool(self._run("extend", durable=False, **claim, now_ms=now_ms, until_ms=until_ms))

    def finish(self, handler: str, id: str) -> None:
        self._check(handler, id)
        now_ms = self.clock.now_ms()
        entry: dict[str, Any] = {"handler": handler, "id": id, "owner": self._owner}
        self._run("finish", **entry, now_ms=now_ms, forgotten_ms=self._forgotten_ms(now_ms))
        self._forget(handler, now_ms)

    def _forget(self, handler: str, now_ms: int) -> None:
        """Forget the oldest beyond the limits, now and then."""
        with self._done_lock:
            done = self._done_since[handler] = self._done_since.get(handler, 0) + 1
            if done * SURPLUS_SHARE < self.max_count and done > 1:  # also after the first, for what others left
                return
            self._done_since[handler] = 1
        forgotten_ms = self._forgotten_ms(now_ms)
        self._run("forget_old", durable=False, handler=handler, forgotten_ms=forgotten_ms)
        self._run("forget_abandoned", durable=False, handler=handler, forgotten_ms=forgotten_ms)
        self._run("forget_surplus", durable=False, handler=handler, max_count=self.max_count, forget_max=FORGET_MAX)

    def release(self, handler: str, id: str) -> None:
        self._check(handler, id)
        self._run("release", durable=False, handler=handler, id=id, owner=self._owner)

    def contains(self, handler: str, id: str) -> bool:
        self._check(handler, id)
        return bool(self._run("contains", handler=handler, id=id, forgotten_ms=self._forgotten_ms()))

    def add(self, handler: str, id: str) -> bool:
        self._check(handler, id)
        return self._begin(handler, id, self.clock.now_ms(), None) == "first"

    def entries(self, handler: str) -> list[DedupeEntry]:
        self._check(handler)
        return [DedupeEntry(*row) for row in self._run("entries", handler=handler, forgotten_ms=self._forgotten_ms())]

    def stats(self, handler: str | None = None) -> DedupeStats:
        self._check(*(() if handler is None else (handler,)))
        totals = self._run("totals", handler=handler, forgotten_ms=self._forgotten_ms())
        totals = [row for row in totals if handler in (None, row[0])]
        with self._answers_lock:
            answers = self._answers.copy()
        return DedupeStats(
            len(totals),
            sum(done for _, done, _, _ in totals),
            sum(begun for _, _, begun, _ in totals),
            min((oldest_ms for _, _, _, oldest_ms in totals), default=None),
            self.max_count,
            self.max_age_ms,
            answers["first"],
            answers["done"],
            answers["busy"],
        )

    def clear(self, handler: str | None = None) -> int:
        self._check(*(() if handler is None else (handler,)))
        rows = self._run("clear_all") if handler is None else self._run("clear", handler=handler)
        return sum(count for (count,) in rows)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._close()

    def __enter__(self) -> BaseDedupe:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _forgotten_ms(self, now_ms: int | None = None) -> int:
        """The time up to which what was done counts as never seen."""
        return (self.clock.now_ms() if now_ms is None else now_ms) - self.max_age_ms

    def _check(self, *texts: str) -> None:
        if self._closed:
            raise ClosedError("this dedupe queue is closed", where=self.name)
        for what, text, limit in zip(("handler", "id"), texts, (HANDLER_CHARS_MAX, DEDUPE_ID_CHARS_MAX), strict=False):
            if not isinstance(text, str) or not text or "\0" in text or not is_unicode(text):
                raise InvalidOptionError(f"{what} must be non-empty text, not {text!r}", where=self.name)
            if len(text) > limit:
                raise InvalidOptionError(f"{what} has {len(text)} characters, the limit is {limit}", where=self.name)


_SCHEMA = """
CREATE TABLE IF NOT EXISTS dedupe (
    position INTEGER PRIMARY KEY,
    handler TEXT NOT NULL,
    id TEXT NOT NULL,
    owner TEXT NOT NULL,
    until_ms INTEGER,
    at_ms INTEGER NOT NULL,
    turn INTEGER NOT NULL,
    UNIQUE (handler, id)
) STRICT;
CREATE INDEX IF NOT EXISTS dedupe_done ON dedupe (handler, turn, position) WHERE until_ms IS NULL;
CREATE INDEX IF NOT EXISTS dedupe_begun ON dedupe (handler, until_ms) WHERE until_ms IS NOT NULL;
"""


class SqliteDedupe(BaseDedupe):
    """In a file of its own, or in the log's, beside the log's tables."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        max_count: int = DEDUPE_COUNT,
        max_age: Span = DEDUPE_AGE_S,
        clock: Clock | None = None,
        durability: Durability = "full",
        busy_timeout: Span = BUSY_TIMEOUT_S,
    ) -> None:
        file = check_file(os.fspath(path))
        super().__init__(file, max_count=max_count, max_age=max_age, clock=clock)
        self._open(file, durability, span_ms(busy_timeout, "busy_timeout"))

    def _open(self, file: str, durability: Durability, busy_timeout_ms: int) -> None:
        refuse_unsafe_sqlite()
        self._turn = threading.Lock()
        self._synchronous = {True: "FULL" if durability == "full" else "NORMAL", False: "NORMAL"}
        with translated(self.name):
            self._connection = connect(file, durability=durability, busy_timeout_ms=busy_timeout_ms)
            try:
                use_wal(self._connection, file, busy_timeout_ms)
                with immediate(self._connection):
                    self._connection.execute(_SCHEMA)
            except BaseException:
                self._connection.close()
                raise

    def _run(self, step: str, *, durable: bool = True, **values: Any) -> list[Any]:
        statement = SQL[step]
        with self._turn, translated(self.name):
            self._connection.pragma("synchronous", self._synchronous[durable])
            with nullcontext() if statement.startswith("SELECT") else immediate(self._connection):
                return self._connection.execute(statement, values).fetchall()

    def _close(self) -> None:
        with self._turn, translated(self.name):
            self._connection.close()


class MemoryDedupe(SqliteDedupe):
    """For one process; its entries are gone when it is closed."""

    def __init__(
        self, *, max_count: int = DEDUPE_COUNT, max_age: Span = DEDUPE_AGE_S, clock: Clock | None = None
    ) -> None:
        BaseDedupe.__init__(self, "memory:", max_count=max_count, max_age=max_age, clock=clock)
        self._open(MEMORY, "relaxed", 0)
