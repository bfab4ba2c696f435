"""Where a log is: in a file, or in a PostgreSQL database. What the pipeline wants of either, and nothing else of it.

SQL that goes through here is what both databases understand, with a `?` for each bound parameter; where they have
different words for the same thing, `Words` has them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, NamedTuple, Protocol

import pyarrow as pa

from headwater.errors import InvalidOption
from headwater.ports.clock import Clock
from headwater.ports.records import TopicCount
from headwater.ports.store import Reader, Store
from headwater.topics import Pattern

POSTGRES = ("postgres://", "postgresql://")
BUSY_TIMEOUT_MS = 10_000

Durability = Literal["full", "relaxed"]
Param = str | int | float
Identity = tuple[int, int]


class Range(NamedTuple):
    """The messages with a seq above `after`, up to and with `upto`."""

    after: int
    upto: int


class Condition(NamedTuple):
    """Which messages of a range: SQL over the table `messages` that holds bound parameters only, and where that lets
    too much through, the patterns of which a topic must match one."""

    sql: str = "TRUE"
    params: tuple[Param, ...] = ()
    patterns: tuple[Pattern, ...] = ()


class Words(NamedTuple):
    """`columns`: the SQL of a message's column where its name is not enough. `topic_bytes`: a topic, which may be no
    UTF-8. `topics_in`: a topic is in a list, which is given as JSON."""

    columns: Mapping[str, str]
    topic_bytes: str
    topics_in: str


class Rows(Protocol):
    """A connection that turns rows into Arrow without a Python object for any of them. For tasks."""

    words: Words

    def batches(
        self, values: Mapping[str, str], asked: Range, condition: Condition, rows_at_once: int
    ) -> Generator[pa.RecordBatch, None, None]:
        """Messages of a range in seq order, `values` being the columns and their SQL: at least one batch, which may be
        empty. The transaction lasts until the iterator is exhausted or closed. Where rows come one by one,
        `rows_at_once` of them make a batch."""

    def table(self, sql: str, params: Sequence[Param] = (), *, like: pa.Schema | None = None) -> pa.Table:
        """All rows of a small result; `like` says its types, for databases that do not."""


class Look(NamedTuple):
    """A log at one moment: through the store's reader, and in SQL."""

    reader: Reader
    query: Callable[[str, Sequence[Param]], list[tuple[Any, ...]]]
    words: Words


class Opened(NamedTuple):
    """A log opened to write in, and whose time it goes by."""

    store: Store
    clock: Clock


class LogPlace(Protocol):
    @property
    def name(self) -> str:
        """What may be shown and kept: without a password."""

    def open(
        self, *, durability: Durability = "full", busy_timeout_ms: int = BUSY_TIMEOUT_MS, create: bool = False
    ) -> Opened:
        """For positions and sinks; brings an older log up to date."""

    def looking(self) -> AbstractContextManager[Look]:
        """Read-only, and without ever making a log or changing its schema. For the driver."""

    def rows(self) -> AbstractContextManager[Rows]: ...

    def identity(self) -> Identity:
        """What tells this log from others, wherever it is moved: its salt and its birth."""

    def topic_counts(self) -> list[TopicCount]:
        """Every topic ever published to."""


def log_at(path: str) -> LogPlace:
    """The log that `log_path` gave out."""
    if not path.startswith(POSTGRES):
        from headwater.pipeline.source.sqlite_place import SqlitePlace

        return SqlitePlace(path)
    try:
        from headwater.pipeline.source.postgres_place import PostgresPlace
    except ImportError as exc:
        raise InvalidOption(
            f"this needs a package that is not installed ({exc})",
            where="postgres://",
            next="pip install 'headwater[postgres,spark]'",
        ) from exc
    return PostgresPlace(path)


def log_path(url: str) -> str:
    """A log as `headwater.open` takes it: its file, absolute, so that tasks and driver mean the same one wherever they
    run; or the url of its database."""
    if not url.strip():
        raise InvalidOption(
            "no log is named", where="path", next='Say which: .option("path", "events.db") or .load("events.db")'
        )
    if url.startswith(POSTGRES):
        return url
    scheme, found, rest = url.partition("://")
    if url in ("memory:", ":memory:"):
        raise InvalidOption("a log in memory ends with its process", where=f"path {url!r}", next="Name the file of one")
    if found and scheme not in ("sqlite", "file"):
        raise InvalidOption(
            "Spark reads and writes logs in files and in PostgreSQL, not through a server",
            where=f"path {scheme}://…",  # what follows may hold a password
            next="Name the log that the server serves: its file, on its machine, or postgres://…",
        )
    if found:  # sqlite:///relative and sqlite:////absolute, as in headwater.open; Spark writes file:///absolute
        path = rest if scheme == "file" else rest.removeprefix("/")
    else:
        path = url.removeprefix("file:") if url.startswith("file:/") else url.removeprefix("sqlite:")
    if not path:
        raise InvalidOption("no file is named", where=f"path {url!r}", next="Name the file of a log")
    return os.path.abspath(path)
