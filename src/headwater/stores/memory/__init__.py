"""A log in plain Python structures: for tests, and for `memory:` where nothing need outlive the process."""

from headwater.stores.memory.store import MemoryStore

__all__ = ["MemoryStore"]
