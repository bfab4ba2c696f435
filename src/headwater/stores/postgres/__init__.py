"""A log in a PostgreSQL database."""

from headwater.stores.postgres.clock import DatabaseClock
from headwater.stores.postgres.listener import PostgresListener
from headwater.stores.postgres.store import PostgresStore

__all__ = ["DatabaseClock", "PostgresListener", "PostgresStore"]
