"""Which streaming query a batch belongs to: Spark keeps the query's id in its checkpoint."""

from __future__ import annotations

import os
from urllib.parse import unquote, urlsplit

import msgspec

from headwater.errors import InvalidOption
from headwater.pipeline.sink.guard import SinkKey
from headwater.pipeline.sink.options import SinkOptions


class _Metadata(msgspec.Struct):
    id: str


def sink_key(options: SinkOptions) -> SinkKey:
    """Who publishes. To be asked on the driver: a checkpoint is a folder that it can see."""
    query = None if options.checkpoint is None else query_id(options.checkpoint)
    sink = options.sink_id or query
    if sink is None:
        raise InvalidOption(
            "the id of the query cannot be read"
            + (": no checkpointLocation is given" if options.checkpoint is None else " from its checkpoint"),
            where=options.checkpoint or "headwater sink",
            next='Name this query for the log: .option("sinkId", "…"), one that no other query uses',
        )
    return SinkKey(sink, query)


def query_id(checkpoint: str) -> str | None:
    """The id in `<checkpoint>/metadata`, None if this is no folder that we can read."""
    folder = _folder(checkpoint)
    if folder is None:
        return None
    try:
        with open(os.path.join(folder, "metadata"), "rb") as file:
            return msgspec.json.decode(file.read(), type=_Metadata).id
    except (OSError, msgspec.DecodeError):
        return None


def _folder(location: str) -> str | None:
    parts = urlsplit(location)
    if parts.scheme == "file":
        return unquote(parts.path)
    return location if len(parts.scheme) <= 1 else None  # C:\… has a scheme of one letter
