"""Which messages a handler has had already: in memory, SQLite, PostgreSQL or Redis. The contract is `ports.dedupe`."""

from headwater.stores.dedupe.opening import open_dedupe

__all__ = ["open_dedupe"]
