"""The options of a write, read once and checked before anything is written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, cast, get_args

from headwater.errors import InvalidOption
from headwater.pipeline.sink.target import staging_folder
from headwater.pipeline.source.place import Durability, log_path
from headwater.topics import check_topic

SINK_ID_CHARS_MAX = 256
BATCH_ID_MAX = 2**63 - 1

DataFormat = Literal["json", "text"]

# Spark passes on what is its own: these two.
_SPARKS_OWN = ("checkpointLocation", "queryName")
KNOWN = ("path", "topic", "dataFormat", "sinkId", "batchId", "staging", "durability")
_SPELLING = {name.lower(): name for name in (*KNOWN, *_SPARKS_OWN)}


@dataclass(frozen=True)
class SinkOptions:
    """`topic` goes before the column of that name. `sink_id` and `batch_id`: who published what, so that a repeat is
    recognised; a stream has the ids of its query. `path` may hold a password."""

    path: str = field(repr=False)
    staging: str
    topic: str | None = None
    data_format: DataFormat = "json"
    sink_id: str | None = None
    batch_id: int | None = None
    durability: Durability = "full"
    checkpoint: str | None = None


def read_options(options: Mapping[str, str]) -> SinkOptions:
    """Names in any case, as Spark has them."""
    given = {name.lower(): value for name, value in options.items()}
    unknown = given.keys() - _SPELLING.keys()
    if unknown:
        raise InvalidOption(
            f"unknown option {sorted(unknown)[0]!r}", where="headwater sink", next=f"Known ones: {', '.join(KNOWN)}"
        )
    if not given.get("path"):
        raise InvalidOption("no path is given", where="headwater sink", next='Add .option("path", "events.db")')
    path = log_path(given["path"])
    topic = given.get("topic")
    return SinkOptions(
        path=path,
        staging=staging_folder(path, given.get("staging")),
        topic=None if topic is None else check_topic(topic),
        data_format=cast(DataFormat, _one_of("dataFormat", given.get("dataformat", "json"), get_args(DataFormat))),
        sink_id=_sink_id(given.get("sinkid")),
        batch_id=_batch_id(given.get("batchid")),
        durability=cast(Durability, _one_of("durability", given.get("durability", "full"), get_args(Durability))),
        checkpoint=given.get("checkpointlocation"),
    )


def _one_of(name: str, value: str, choices: tuple[str, ...]) -> str:
    if value not in choices:
        raise InvalidOption(f"{name} is {' or '.join(choices)}, not {value!r}", where="headwater sink")
    return value


def _sink_id(value: str | None) -> str | None:
    if value is not None and not 0 < len(value) <= SINK_ID_CHARS_MAX:
        raise InvalidOption(
            f"sinkId has {len(value)} characters; 1 to {SINK_ID_CHARS_MAX} are allowed", where="headwater sink"
        )
    return value


def _batch_id(value: str | None) -> int | None:
    if value is None:
        return None
    if not (value.isascii() and value.isdigit() and int(value) <= BATCH_ID_MAX):
        raise InvalidOption(f"batchId is a whole number, not {value!r}", where="headwater sink")
    return int(value)
