"""How many rows of `messages` a store looks at, as the database itself counts them; memory has nothing to count."""

from collections.abc import Callable
from typing import Any

from headwater.ports.store import Reader, Store
from headwater.stores.postgres.reader import PostgresReader
from headwater.stores.sqlite.reader import SqliteReader

_READ_BY_POSTGRES = """
SELECT coalesce(seq_tup_read, 0) + coalesce(idx_tup_fetch, 0) + (
    SELECT coalesce(sum(pg_stat_get_xact_tuples_returned(indexrelid)), 0) FROM pg_index WHERE indrelid = relid
) FROM pg_stat_xact_user_tables WHERE relid = 'messages'::regclass
"""


def rows_looked_at(store: Store, look: Callable[[Reader], object]) -> int:
    """Of SQLite the steps of its virtual machine, which takes several for each row."""
    with store.read() as reader:
        if isinstance(reader, SqliteReader):
            return _steps(reader, look)
        if isinstance(reader, PostgresReader):
            before = _tuples(reader)
            look(reader)
            return _tuples(reader) - before
        look(reader)
        return 0


def _steps(reader: SqliteReader, look: Callable[[Reader], object]) -> int:
    steps = 0

    def count() -> bool:
        nonlocal steps
        steps += 1
        return False

    connection: Any = reader._connection
    connection.set_progress_handler(count, 1)
    try:
        look(reader)
    finally:
        connection.set_progress_handler(None)
    return steps


def _tuples(reader: PostgresReader) -> int:
    row = reader.connection.execute(_READ_BY_POSTGRES.encode()).fetchone()
    assert row is not None
    return int(row[0])
