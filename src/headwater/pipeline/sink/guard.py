"""Whether a batch is new, and the ids of its messages. Pure."""

from __future__ import annotations

from collections.abc import Callable
from hashlib import blake2b
from typing import NamedTuple

from headwater.errors import InvalidOption


class SinkKey(NamedTuple):
    """Who publishes: the name it was given, or its query's; and the query, where that can be told."""

    sink: str
    query: str | None = None

    @property
    def of_query(self) -> str | None:
        """Under which the log remembers what this very query published, if that is not the sink itself."""
        return None if self.query is None or self.query == self.sink else f"{self.sink}@{self.query}"


def is_repeat(key: SinkKey, batch: int, stored: int | None, stored_of_query: int | None) -> bool:
    """Whether this batch was published before. Refuses one that cannot be told from another: `stored` is the last one
    of the sink, `stored_of_query` the last one of it that came from this query."""
    if stored is None:
        return False
    if key.of_query is not None and stored_of_query != stored:
        raise InvalidOption(
            f"batch {stored} under this sinkId came from another query",
            where=f"sink {key.sink}, batch {batch}",
            next="Was the checkpoint deleted, or do two queries share the sinkId? Give each its own sinkId",
        )
    if batch < stored:
        raise InvalidOption(
            f"batch {stored} was published already, so this one comes from an older or a new checkpoint",
            where=f"sink {key.sink}, batch {batch}",
            next="Put back the checkpoint, or set another sinkId to publish from here again",
        )
    return batch == stored


def row_ids(sink: str, batch: int, partition: int) -> Callable[[int], str]:
    """The ids of a partition's rows: UUIDs (version 8) of 74 bits that follow from all three, and 48 of the row. The
    same row of the same batch has the same id whenever it is asked, so that the log knows it again."""
    digest = blake2b(f"{batch}/{partition}/{sink}".encode(), digest_size=10).hexdigest()
    variant = 0x8000 | (int(digest[15:19], 16) & 0x3FFF)
    prefix = f"{digest[:8]}-{digest[8:12]}-8{digest[12:15]}-{variant:04x}-"
    return lambda row: f"{prefix}{row:012x}"
