"""A log in a PostgreSQL database. Passwords stay in here: errors, plans and lakes have the url without."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Any

from headwater.errors import NewerSchema, NotALog, StoreError
from headwater.pipeline.source.place import BUSY_TIMEOUT_MS, Durability, Identity, Look, Opened, Param, Words
from headwater.pipeline.source.postgres_rows import PostgresRows
from headwater.ports.records import TopicCount
from headwater.stores.postgres import DatabaseClock, PostgresStore
from headwater.stores.postgres.connection import connect, place_of, settings_of, translated
from headwater.stores.postgres.migrations import SCHEMA_VERSION
from headwater.stores.postgres.reader import PostgresReader

READERS_MAX = 2  # a stream asks one thing at a time, beside the thread that keeps its lease

# The log's narrow integers come as those of the fixed schema, and JSON as the text it is.
WORDS = Words(
    columns={
        "data": "data::text",
        "headers": "headers::text",
        "version": "version::bigint",
        "priority": "nullif(priority, 0)::bigint",
        "size": "coalesce(size, octet_length(data::text))::bigint",
    },
    topic_bytes="topic",
    topics_in="topic IN (SELECT json_array_elements_text(?::json))",
)


class PostgresPlace:
    """`place.LogPlace`."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._place = place_of(url)
        self.name = self._place.name

    def open(
        self, *, durability: Durability = "full", busy_timeout_ms: int = BUSY_TIMEOUT_MS, create: bool = False
    ) -> Opened:
        store = PostgresStore(
            self._url,
            durability=durability,
            busy_timeout_ms=busy_timeout_ms,
            create=create,
            readers_max=READERS_MAX,
        )
        return Opened(store, DatabaseClock(store))

    @contextmanager
    def looking(self) -> Iterator[Look]:
        with (
            translated(self.name),
            closing(connect(self._place, application="headwater pipeline", prepare=False)) as connection,
        ):
            connection.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
            connection.execute(settings_of(self._place, durability="full", lock_timeout_ms=BUSY_TIMEOUT_MS))

            def query(sql: str, params: Sequence[Param]) -> list[tuple[Any, ...]]:
                return connection.execute(sql.replace("?", "%s").encode(), tuple(params)).fetchall()

            self._refuse_absent(query)
            facts = dict(query("SELECT name, value FROM headwater", ()))
            _check_version(facts["schema_version"], self.name)
            yield Look(PostgresReader(connection, facts["salt"]), query, WORDS)

    @contextmanager
    def rows(self) -> Iterator[PostgresRows]:
        with PostgresRows(self._place, WORDS) as rows:
            yield rows

    def identity(self) -> Identity:
        with self.looking() as look:
            facts = dict(look.query("SELECT name, value FROM headwater WHERE name IN ('salt', 'created_at')", ()))
        return facts["salt"], facts.get("created_at", 0)

    def topic_counts(self) -> list[TopicCount]:
        with self.looking() as look:
            return look.reader.topic_counts()

    def _refuse_absent(self, query: Any) -> None:
        if query("SELECT to_regclass(?)", (f"{self._place.schema}.headwater",)) == [(None,)]:
            raise NotALog(
                f"there is no log in schema {self._place.schema!r} of this database",
                where=self.name,
                next="Check the option `path`; headwater.open() makes a log",
            )


def _check_version(version: int, name: str) -> None:
    if version > SCHEMA_VERSION:
        raise NewerSchema(
            f"the log has schema {version}, this Headwater knows up to {SCHEMA_VERSION}",
            where=name,
            next="Upgrade: pip install -U headwater",
        )
    if version < SCHEMA_VERSION:
        raise StoreError(
            f"the log has schema {version}, which is older than {SCHEMA_VERSION}",
            where=name,
            next="Open it once to bring it up to date: headwater doctor postgres://…",
        )
