"""The memory store: one set of tables behind one lock."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Any

from headwater.errors import Closed
from headwater.ports.store import Interruption, Reader, Writer
from headwater.stores.memory.reader import MemoryReader
from headwater.stores.memory.tables import Tables
from headwater.stores.memory.undo import UndoLog
from headwater.stores.memory.writer import MemoryWriter


class MemoryStore:
    """Readers and writers take turns: so a reader sees one moment, and nothing of an unfinished write.

    A thread must end its block before it begins another, or it waits for itself.
    """

    name = "memory"
    supports_sql = False
    supports_concurrent_reads = False
    shares_messages = True
    writes_beside_others = False
    outside = None

    def __init__(self) -> None:
        self._lock = Lock()
        self._tables = Tables()
        self.salt = self._tables.salt
        self._closed = False

    @contextmanager
    def write(self, on_rollback: Callable[[], None] | None = None, *, alone: bool = True) -> Iterator[Writer]:
        with self._turn():
            undo = UndoLog()
            try:
                yield MemoryWriter(self._tables, undo)
            except BaseException:
                undo.roll_back()
                if on_rollback is not None:
                    on_rollback()
                raise

    @contextmanager
    def read(self, interruption: Interruption | None = None) -> Iterator[Reader]:
        """Not interrupted: its callers bound how much they look at."""
        with self._turn():
            yield MemoryReader(self._tables)

    def announce(self) -> None:
        """Nothing outlives this process."""

    def is_gone(self, name: str) -> bool:
        return False

    def reclaim_space(self, pages: int) -> bool:
        """Python frees what is deleted by itself."""
        return False

    def journal_bytes(self) -> int:
        return 0

    def health(self, interruption: Interruption | None = None) -> dict[str, Any]:
        with self._turn():
            tables = self._tables
            return {
                "store": self.name,
                "messages": len(tables.messages.by_seq),
                "bytes": sum(counted.bytes for counted in tables.topic_counts.values()),
                "last_seq": tables.messages.last_seq,
                "subscriptions": len(tables.subscriptions),
                "deliveries": sum(len(rows) for rows in tables.deliveries.values()),
                "dead_letters": len(tables.dead_letters),
            }

    def close(self) -> None:
        """Waits for the block that is open; may be called again."""
        with self._lock:
            self._closed = True
            self._tables = Tables()

    @contextmanager
    def _turn(self) -> Iterator[None]:
        with self._lock:
            if self._closed:
                raise Closed("the log is closed", where="memory:", next="Its messages are gone; open a new one")
            yield
