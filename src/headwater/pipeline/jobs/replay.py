"""From the lake back into a log: messages that fit a condition are published again, in their old order, once."""

from __future__ import annotations

import hashlib
import time
import uuid
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any, NamedTuple, cast

import msgspec
from pyspark.errors import AnalysisException, ParseException
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F

from headwater.errors import InvalidInput, InvalidOption
from headwater.message import PublishOptions, make_draft
from headwater.pipeline.jobs.progress import SILENT, Progress
from headwater.pipeline.lake.lake import Lake
from headwater.pipeline.lake.layout import BRONZE
from headwater.pipeline.schema import COLUMNS
from headwater.topics import check_topic

BATCH_MESSAGES = 1_000
_IDS = uuid.UUID("5b0c8f6e-2d1f-5f0a-9d5e-6a1f0d2c7b44")
_OPTIONS = {
    "from": "from_",
    "to": "to",
    "reply_to": "reply_to",
    "correlation_id": "correlation_id",
    "type": "type",
    "version": "version",
    "content_type": "content_type",
    "traceparent": "traceparent",
}

Publish = Callable[[Sequence[dict[str, Any]]], Sequence[int]]


class Replayed(NamedTuple):
    """`refused` are those that a log does not take, such as data that is not JSON, put in by hand."""

    published: int
    refused: int
    through_seq: int


def replay_name(where: str, to: str) -> str:
    """The same condition and target are the same replay: it goes on where it stopped, and when done it is done."""
    return hashlib.sha256(f"{where}\n{to}".encode()).hexdigest()[:16]


def chosen_messages(spark: SparkSession, lake: Lake, where: str, after: int = 0) -> DataFrame:
    """What a replay would publish; `where` is a condition in Spark SQL over the columns of a message."""
    bronze = lake.bronze(spark, after).select(*COLUMNS)
    try:
        chosen = bronze.where(where)
        _ = chosen.columns  # over Spark Connect a condition is not looked at before somebody asks
    except (AnalysisException, ParseException) as exc:
        raise InvalidOption(
            f"{where!r} is no condition ({str(exc).splitlines()[0]})",
            where="--where",
            next=f"""Write it like "topic like 'orders.%' and seq > 1000"; columns: {", ".join(COLUMNS)}""",
        ) from exc
    return chosen


def replay(
    spark: SparkSession,
    lake: Lake,
    where: str,
    name: str,
    publish: Publish,
    *,
    rate: float | None = None,
    progress: Progress = SILENT,
    sleep: Callable[[float], None] = time.sleep,
) -> Replayed:
    """How far it came is kept in the lake after each batch. A batch that was published and not noted, because the
    process died in between, is published again with the same ids, and the log knows them."""
    mark_name, end_name = f"replay.{name}", f"replay.{name}.end"
    if not lake.manifest.mark(end_name):  # what it publishes may come into this very lake: it must not go round
        lake.publish([], marks={end_name: lake.manifest.mark(BRONZE)})
    after = lake.manifest.mark(mark_name)
    chosen = chosen_messages(spark, lake, where, after).where(F.col("seq") <= lake.manifest.mark(end_name))
    progress.step("replay", chosen.count())
    published = refused = 0
    began = time.monotonic()
    in_order = chosen.orderBy("seq").toLocalIterator(prefetchPartitions=True)
    while rows := list(islice(in_order, BATCH_MESSAGES)):
        outgoing = [found for row in rows if (found := _outgoing(row, name)) is not None]
        refused += len(rows) - len(outgoing)
        if outgoing:
            publish(outgoing)
        published += len(outgoing)
        after = rows[-1]["seq"]
        lake.publish([], marks={mark_name: after})
        progress.reached(published + refused)
        if rate:
            sleep(max(0.0, began + published / rate - time.monotonic()))
    return Replayed(published, refused, after)


def _outgoing(row: Row, name: str) -> dict[str, Any] | None:
    """The message as it was, but for its times: what was once delayed or worthless after a while is wanted now. None if
    no log would take it."""
    options = {option: row[column] for column, option in _OPTIONS.items() if row[column] is not None}
    headers = {**(row["headers"] or {}), "replayed_seq": row["seq"]}
    options |= {
        "id": str(uuid.uuid5(_IDS, f"{name}:{row['id']}")),
        "headers": headers,
        "priority": row["priority"] or 0,
    }
    try:
        data = msgspec.json.decode(row["data"])
        make_draft(check_topic(row["topic"]), data, cast(PublishOptions, options), 0)
    except (msgspec.DecodeError, InvalidInput):
        return None
    return {"topic": row["topic"], "data": data, **options}
