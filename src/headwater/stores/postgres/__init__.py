"""A log in a PostgreSQL database."""

from headwater.stores.postgres.listener import PostgresListener
from headwater.stores.postgres.store import DatabaseClock, PostgresStore

__all__ = ["DatabaseClock", "PostgresListener", "PostgresStore"]
