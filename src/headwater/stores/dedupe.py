"""Dedupe queues: which messages a handler has handled already. The contract is `ports.dedupe`.

All kinds share limits, checks and the count of answers (`BaseDedupe`). SQLite, also in memory, and PostgreSQL share the
statements of dedupe.sql (`SqlDedupe`): the unique insert decides which caller is first.
"""

from __future__ import annotations

import inspect
import os
import threading
import uuid
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping
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


def open_dedupe(url: str | os.PathLike[str], **options: Any) -> DedupeQueue:
    """`memory:`, a file path or `sqlite:path`, `postgres://…`, `redis://…`. Options: `max_count`, `max_age`, `clock`,
    and those of its kind. An optional package is imported when its url is opened."""
    text = url_text(url, "a dedupe queue")
    scheme, found, rest = text.partition("://")
    if text == "memory:":
        _refuse_unknown(MemoryDedupe, options)
        return MemoryDedupe(**options)
    if scheme in ("postgres", "postgresql") and found:
        try:
            from headwater.stores.dedupe_postgres import PostgresDedupe
        except ImportError as exc:
            raise _missing("postgres", exc) from exc
        _refuse_unknown(PostgresDedupe, options)
        return PostgresDedupe(text, **options)
    if scheme in ("redis", "rediss") and found:
        try:
            from headwater.stores.dedupe_redis import RedisDedupe
        except ImportError as exc:
            raise _missing("redis", exc) from exc
        _refuse_unknown(RedisDedupe, options)
        return RedisDedupe(text, **options)
    if found and scheme != "sqlite":
        raise InvalidOptionError(
            f"there is no dedupe queue for {scheme}://", next="Use memory:, a file path, postgres:// or redis://"
        )
    _refuse_unknown(SqliteDedupe, options)
    return SqliteDedupe(rest.removeprefix("/") if found else text.removeprefix("sqlite:"), **options)


def _refuse_unknown(kind: type[DedupeQueue], options: Mapping[str, Any]) -> None:
    parameters = inspect.signature(kind).parameters.values()
    known = [each.name for each in parameters if each.kind is inspect.Parameter.KEYWORD_ONLY]
    unknown = next((name for name in options if name not in known), None)
    if unknown is not None:
        raise InvalidOptionError(f"unknown option {unknown!r}", where="dedupe", next=f"Known: {', '.join(known)}")


def _missing(extra: str, exc: ImportError) -> InvalidOptionError:
    return InvalidOptionError(
        f"this needs a package that is not installed ({exc})",
        where="dedupe",
        next=install_hint(extra),
    )


class BaseDedupe(ABC):
    """`ports.dedupe.DedupeQueue` over the few steps that differ between the kinds. Every object is an owner of its own:
    it releases only its own claims."""

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
        self._closed = False

    def begin(self, handler: str, id: str, now_ms: int, claim_ms: int) -> Begun:
        self._check(handler, id)
        check_whole("claim_ms", claim_ms, 1, 2**53)
        return self._count(self._begin(handler, id, now_ms, now_ms + claim_ms))

    def extend(self, handler: str, id: str, now_ms: int, claim_ms: int) -> bool:
        self._check(handler, id)
        check_whole("claim_ms", claim_ms, 1, 2**53)
        return self._extend(handler, id, now_ms, now_ms + claim_ms)

    def finish(self, handler: str, id: str) -> None:
        self._check(handler, id)
        self._finish(handler, id, self.clock.now_ms())

    def release(self, handler: str, id: str) -> None:
        self._check(handler, id)
        self._release(handler, id)

    def contains(self, handler: str, id: str) -> bool:
        self._check(handler, id)
        return self._contains(handler, id, self._forgotten_ms())

    def add(self, handler: str, id: str) -> bool:
        self._check(handler, id)
        return self._count(self._begin(handler, id, self.clock.now_ms(), None)) == "first"

    def entries(self, handler: str) -> list[DedupeEntry]:
        self._check(handler)
        return self._entries(handler, self._forgotten_ms())

    def stats(self, handler: str | None = None) -> DedupeStats:
        self._check(*(() if handler is None else (handler,)))
        handlers, done, begun, oldest_ms = self._totals(handler, self._forgotten_ms())
        with self._answers_lock:
            answers = self._answers.copy()
        return DedupeStats(
            handlers,
            done,
            begun,
            oldest_ms,
            self.max_count,
            self.max_age_ms,
            answers["first"],
            answers["done"],
            answers["busy"],
        )

    def clear(self, handler: str | None = None) -> int:
        self._check(*(() if handler is None else (handler,)))
        return self._clear(handler)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._close()

    def __enter__(self) -> BaseDedupe:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @abstractmethod
    def _begin(self, handler: str, id: str, now_ms: int, until_ms: int | None) -> Begun:
        """Without `until_ms` it is done at once, and the oldest beyond the limits are forgotten."""

    @abstractmethod
    def _extend(self, handler: str, id: str, now_ms: int, until_ms: int) -> bool: ...

    @abstractmethod
    def _finish(self, handler: str, id: str, now_ms: int) -> None: ...

    @abstractmethod
    def _release(self, handler: str, id: str) -> None: ...

    @abstractmethod
    def _contains(self, handler: str, id: str, forgotten_ms: int) -> bool: ...

    @abstractmethod
    def _entries(self, handler: str, forgotten_ms: int) -> list[DedupeEntry]: ...

    @abstractmethod
    def _totals(self, handler: str | None, forgotten_ms: int) -> tuple[int, int, int, int | None]:
        """Handlers, done, begun, and when the oldest was."""

    @abstractmethod
    def _clear(self, handler: str | None) -> int: ...

    @abstractmethod
    def _close(self) -> None: ...

    def _forgotten_ms(self, now_ms: int | None = None) -> int:
        """What was done then or earlier counts as never seen."""
        return (self.clock.now_ms() if now_ms is None else now_ms) - self.max_age_ms

    def _count(self, answer: Begun) -> Begun:
        with self._answers_lock:
            self._answers[answer] += 1
        return answer

    def _check(self, *texts: str) -> None:
        if self._closed:
            raise ClosedError("this dedupe queue is closed", where=self.name)
        for what, text, limit in zip(("handler", "id"), texts, (HANDLER_CHARS_MAX, DEDUPE_ID_CHARS_MAX), strict=False):
            if not isinstance(text, str) or not text or "\0" in text or not is_unicode(text):
                raise InvalidOptionError(f"{what} must be non-empty text, not {text!r}", where=self.name)
            if len(text) > limit:
                raise InvalidOptionError(f"{what} has {len(text)} characters, the limit is {limit}", where=self.name)


class SqlDedupe(BaseDedupe):
    def __init__(self, name: str, *, max_count: int, max_age: Span, clock: Clock | None) -> None:
        super().__init__(name, max_count=max_count, max_age=max_age, clock=clock)
        self._done_since: dict[str, int] = {}  # handler -> how many were done since the surplus was looked for
        self._done_lock = threading.Lock()

    @abstractmethod
    def _run(self, name: str, *, durable: bool = True, **bindings: Any) -> list[tuple[Any, ...]]:
        """One statement in a transaction of its own. What is not `durable` may be lost with the machine's power."""

    def _begin(self, handler: str, id: str, now_ms: int, until_ms: int | None) -> Begun:
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
            if self._run("begin", durable=until_ms is None, **claim):
                if until_ms is None:
                    self._forget(handler, now_ms)
                return "first"
            found = self._run("is_done", handler=handler, id=id)
            if found:
                return "done" if found[0][0] else "busy"
            # It was released, or forgotten, between the two statements.
        raise ConflictError(f"the entry of {id!r} comes and goes", where=self.name, next="Try again")

    def _extend(self, handler: str, id: str, now_ms: int, until_ms: int) -> bool:
        return bool(self._run("extend", durable=False, handler=handler, id=id, owner=self._owner, until_ms=until_ms))

    def _finish(self, handler: str, id: str, now_ms: int) -> None:
        self._run("finish", handler=handler, id=id, owner=self._owner, now_ms=now_ms)
        self._forget(handler, now_ms)

    def _forget(self, handler: str, now_ms: int) -> None:
        with self._done_lock:
            done = self._done_since[handler] = self._done_since.get(handler, 0) + 1
            if done * SURPLUS_SHARE < self.max_count and done > 1:  # also after the first, for what others left
                return
            self._done_since[handler] = 1
        forgotten_ms = self._forgotten_ms(now_ms)
        self._run("forget_old", durable=False, handler=handler, forgotten_ms=forgotten_ms)
        self._run("forget_abandoned", durable=False, handler=handler, forgotten_ms=forgotten_ms)
        self._run("forget_surplus", durable=False, handler=handler, max_count=self.max_count, forget_max=FORGET_MAX)

    def _release(self, handler: str, id: str) -> None:
        self._run("release", durable=False, handler=handler, id=id, owner=self._owner)

    def _contains(self, handler: str, id: str, forgotten_ms: int) -> bool:
        return bool(self._run("contains", handler=handler, id=id, forgotten_ms=forgotten_ms))

    def _entries(self, handler: str, forgotten_ms: int) -> list[DedupeEntry]:
        return [DedupeEntry(*row) for row in self._run("entries", handler=handler, forgotten_ms=forgotten_ms)]

    def _totals(self, handler: str | None, forgotten_ms: int) -> tuple[int, int, int, int | None]:
        rows = [row for row in self._run("totals", forgotten_ms=forgotten_ms) if handler in (None, row[0])]
        oldest_ms = min((row[3] for row in rows), default=None)
        return len(rows), sum(row[1] for row in rows), sum(row[2] for row in rows), oldest_ms

    def _clear(self, handler: str | None) -> int:
        return len(self._run("clear_all") if handler is None else self._run("clear", handler=handler))


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


class SqliteDedupe(SqlDedupe):
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
                self._transact(_SCHEMA, {})
            except BaseException:
                self._connection.close()
                raise

    def _run(self, name: str, *, durable: bool = True, **bindings: Any) -> list[tuple[Any, ...]]:
        with self._turn, translated(self.name):
            self._connection.pragma("synchronous", self._synchronous[durable])
            return self._transact(SQL[name], bindings)

    def _transact(self, sql: str, bindings: dict[str, Any]) -> list[tuple[Any, ...]]:
        """Begun as a writer, for a reader that becomes one may be refused however long it would wait."""
        connection = self._connection
        if sql.startswith("SELECT"):
            return connection.execute(sql, bindings).fetchall()
        connection.execute("BEGIN IMMEDIATE")
        try:
            rows = connection.execute(sql, bindings).fetchall()
            connection.execute("COMMIT")
        except BaseException:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise
        return rows

    def _close(self) -> None:
        with self._turn, translated(self.name):
            self._connection.close()


class MemoryDedupe(SqliteDedupe):
    """For one process; its entries are gone when it is closed."""

    def __init__(
        self, *, max_count: int = DEDUPE_COUNT, max_age: Span = DEDUPE_AGE_S, clock: Clock | None = None
    ) -> None:
        SqlDedupe.__init__(self, "memory:", max_count=max_count, max_age=max_age, clock=clock)
        self._open(MEMORY, "relaxed", 0)
