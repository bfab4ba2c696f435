"""Making a log in a file, and bringing an older one up to date."""

from __future__ import annotations

import apsw

from headwater.errors import NotALogError, ReadOnlyError
from headwater.stores.sql import facts_of_new_log, newer_schema
from headwater.stores.sqlite.connection import SCHEMA, SQL, immediate, use_wal

# The statements that lead from version N to N + 1 stand at index N - 1. A release never changes one that was shipped.
MIGRATIONS: list[str] = [
    """
    CREATE TABLE receipts (
        publisher TEXT NOT NULL,
        number    INTEGER NOT NULL,
        length    INTEGER NOT NULL,
        seq       INTEGER NOT NULL,
        at        INTEGER NOT NULL,
        PRIMARY KEY (publisher, number)
    ) STRICT, WITHOUT ROWID;
    """,
    # Seqs that are missing so far were deleted before deletions were noted, so they count as pruned.
    """
    CREATE TABLE pruned (
        from_seq INTEGER PRIMARY KEY,
        to_seq   INTEGER NOT NULL
    ) STRICT;

    CREATE TABLE sinks (
        sink  TEXT PRIMARY KEY,
        batch INTEGER NOT NULL,
        at    INTEGER NOT NULL
    ) STRICT, WITHOUT ROWID;

    CREATE TABLE timings (
        subscription TEXT NOT NULL,
        hour         INTEGER NOT NULL,
        stage        TEXT NOT NULL,
        bucket       INTEGER NOT NULL,
        count        INTEGER NOT NULL,
        PRIMARY KEY (subscription, hour, stage, bucket)
    ) STRICT, WITHOUT ROWID;
    CREATE INDEX timings_by_hour ON timings (hour);

    INSERT INTO pruned (from_seq, to_seq)
    SELECT before + 1, seq - 1
    FROM (SELECT seq, lag(seq, 1, 0) OVER (ORDER BY seq) AS before FROM messages WHERE seq > 0)
    WHERE seq > before + 1;
    INSERT INTO pruned (from_seq, to_seq)
    SELECT last_stored + 1, last_seq FROM (
        SELECT max(coalesce((SELECT max(seq) FROM messages), 0), 0) AS last_stored,
            coalesce((SELECT seq FROM sqlite_sequence WHERE name = 'messages'), 0) AS last_seq
    )
    WHERE last_seq > last_stored;
    """,
    # An id whose message is gone has no topic any more and is forgotten: to know it on every topic could swallow a
    # message of another publisher, to forget it can at worst store one twice that is sent again.
    """
    ALTER TABLE remembered_ids RENAME TO ids_by_log;
    CREATE TABLE remembered_ids (
        seq          INTEGER PRIMARY KEY,
        scoped_id    TEXT NOT NULL,
        published_at INTEGER NOT NULL
    ) STRICT;
    INSERT INTO remembered_ids (seq, scoped_id, published_at)
    SELECT known.seq, message.topic || '#' || known.id, known.published_at
    FROM ids_by_log AS known CROSS JOIN messages AS message ON message.seq = known.seq
    ORDER BY known.seq;
    CREATE UNIQUE INDEX remembered_ids_by_scoped_id ON remembered_ids (scoped_id);
    DROP TABLE ids_by_log;
    """,
    """
    CREATE TABLE samples (
        step    INTEGER NOT NULL,
        slot    INTEGER NOT NULL,
        at      INTEGER NOT NULL,
        figures TEXT NOT NULL,
        PRIMARY KEY (step, slot)
    ) STRICT, WITHOUT ROWID;
    """,
    "CREATE INDEX dead_letters_by_seq ON dead_letters (seq);",
]
SCHEMA_VERSION = 1 + len(MIGRATIONS)
PAGE_BYTES = 8192  # measured against 4096: some 5 to 10 % more in batches, no difference one by one


def prepare(connection: apsw.Connection, path: str, *, adopt: bool, busy_timeout_ms: int) -> None:
    """Create the log's tables in a new file, or check and migrate those that are there."""
    found = _tables(connection)
    version = _version(connection, found)
    if connection.readonly("main"):
        raise ReadOnlyError("the file may not be written", where=path, next="Give this user write access to it")
    if version is None and found and not adopt:
        raise NotALogError(
            f"a SQLite database with other tables ({', '.join(sorted(found)[:3])}, …) and no log",
            where=path,
            next="Name another file, or pass adopt=True to add the log's tables to this one",
        )
    if not found:
        connection.execute(f"PRAGMA page_size = {PAGE_BYTES}; PRAGMA auto_vacuum = INCREMENTAL")
    use_wal(connection, path, busy_timeout_ms)
    if version == SCHEMA_VERSION:
        return
    with immediate(connection):
        version = _version(connection, _tables(connection))  # another process may have been quicker
        if version is None:
            _create(connection, path)
        elif version > SCHEMA_VERSION:
            raise newer_schema(version, SCHEMA_VERSION, path)
        else:
            for statements in MIGRATIONS[version - 1 :]:
                _migrate(connection, statements, path)
            connection.execute(SQL["set_fact"], ("schema_version", SCHEMA_VERSION))


def check_readable(connection: apsw.Connection, path: str) -> None:
    """Refuse a log that is only read and not of this schema: it can be neither made nor migrated."""
    version = _version(connection, _tables(connection))
    if version is None:
        raise NotALogError("a SQLite database without a log", where=path, next="Name another file")
    if version > SCHEMA_VERSION:
        raise newer_schema(version, SCHEMA_VERSION, path)
    if version < SCHEMA_VERSION:
        raise ReadOnlyError(
            f"the log has schema {version} and must be brought up to {SCHEMA_VERSION}, but may not be written",
            where=path,
            next="Open it once as a user that may write it",
        )


def _migrate(connection: apsw.Connection, statements: str, path: str) -> None:
    try:
        connection.execute(statements)
    except apsw.SQLError as exc:
        raise NotALogError(
            f"a table of yours is in the way of the log's next version ({exc})",
            where=path,
            next="Rename it and open the log again; nothing was changed",
        ) from exc


def _create(connection: apsw.Connection, path: str) -> None:
    try:
        connection.execute(SCHEMA)
    except apsw.SQLError as exc:
        raise NotALogError(
            f"a table of the log's name is in the way ({exc})",
            where=path,
            next="Keep the log in a file of its own",
        ) from exc
    for fact in facts_of_new_log(SCHEMA_VERSION):
        connection.execute(SQL["set_fact"], fact)


def _tables(connection: apsw.Connection) -> set[str]:
    return {name for (name,) in connection.execute("SELECT name FROM sqlite_schema WHERE type = 'table'")}


def _version(connection: apsw.Connection, tables: set[str]) -> int | None:
    if "headwater" not in tables:
        return None
    found = connection.execute(SQL["fact"], ("schema_version",)).get
    return found if isinstance(found, int) else None
