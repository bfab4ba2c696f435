"""The log in one SQLite file: schema and queries in SQL files, a writer, readers, and a watcher for other processes."""

from headwater.stores.sqlite.connection import Durability
from headwater.stores.sqlite.store import MemoryStore, SqliteStore
from headwater.stores.sqlite.watcher import SqliteWatcher

__all__ = ["Durability", "MemoryStore", "SqliteStore", "SqliteWatcher"]
