"""From the lake back into a log: messages that match a condition are published again, in their order, once."""

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

from headwater.errors import ConflictError, InvalidInputError, InvalidOptionError
from headwater.message import HEADER_FIELDS, PublishOptions, make_draft
from headwater.pipeline.columns import COLUMNS, REPLAYS_SCHEMA
from headwater.pipeline.delta import CHECKPOINT_COMMITS
from headwater.pipeline.lake import BRONZE, REPLAYS, Lake
from headwater.pipeline.run import NO_PROGRESS, Progress
from headwater.pipeline.sql import frame, sql_error
from headwater.topics import check_topic

BATCH_MESSAGES = 1_000
COMMIT_TRIES_MAX = 10
_IDS = uuid.UUID("5b0c8f6e-2d1f-5f0a-9d5e-6a1f0d2c7b44")
_OPTIONS = {field.name: field.option for field in HEADER_FIELDS}

Publish = Callable[[Sequence[dict[str, Any]]], Sequence[int]]


class Replayed(NamedTuple):
    """`refused` are messages that no log takes, such as data that is not JSON, inserted by hand."""

    published: int
    refused: int
    through_seq: int


def replay_name(where: str, to: str) -> str:
    """The same condition and target are the same replay: it continues where it stopped, and when done it is done."""
    return hashlib.sha256(f"{where}\n{to}".encode()).hexdigest()[:16]


def replayed_to(lake: Lake, name: str) -> int:
    """The position of a replay: the last seq whose message was published."""
    return lake.table(REPLAYS).transaction(name)


def chosen_messages(spark: SparkSession, lake: Lake, where: str, after: int = 0) -> DataFrame:
    """What a replay would publish; `where` is a condition in Spark SQL over the columns of a message."""
    bronze = frame(spark, lake.table(BRONZE), COLUMNS).where(F.col("seq") > after)
    try:
        chosen = bronze.where(where)
        _ = chosen.columns  # Spark Connect analyses a condition only when its result is needed
    except (AnalysisException, ParseException) as exc:
        raise InvalidOptionError(
            f"{where!r} is no condition: {sql_error(exc)}",
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
    progress: Progress = NO_PROGRESS,
    sleep: Callable[[float], None] = time.sleep,
) -> Replayed:
    """Publish the chosen messages again, from where the replay of this name stopped. The position is committed after
    each batch. A batch that was published before a kill, but not committed, is published again with the same ids, which
    the log recognises."""
    end = f"{name}.end"
    if not lake.table(REPLAYS).transaction(end):  # what is published may come into this very lake: no circles
        _move(lake, end, 0, lake.table(BRONZE).transaction())
    after, upto = replayed_to(lake, name), lake.table(REPLAYS).transaction(end)
    chosen = chosen_messages(spark, lake, where, after).where(F.col("seq") <= upto)
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
        _move(lake, name, after, rows[-1]["seq"])
        after = rows[-1]["seq"]
        progress.reached(published + refused)
        if rate:
            sleep(max(0.0, began + published / rate - time.monotonic()))
    return Replayed(published, refused, after)


def _move(lake: Lake, key: str, before: int, to: int) -> None:
    """Commit a position. Other replays commit to the same table, so a refused commit is tried again; but this position
    must not have been moved by another process."""
    for attempt in range(COMMIT_TRIES_MAX):
        table = lake.table(REPLAYS)
        if table.transaction(key) != before:
            break
        try:
            after = table.commit([], transaction=None, counters={key: to}, schema=REPLAYS_SCHEMA)
        except ConflictError:
            if attempt == COMMIT_TRIES_MAX - 1:
                raise
            continue
        if after.version % CHECKPOINT_COMMITS == 0:
            after.checkpoint_if_due()
        return
    raise ConflictError(
        "another process runs this replay", where=lake.name, next="Wait for it, or give this one another --name"
    )


def _outgoing(row: Row, name: str) -> dict[str, Any] | None:
    """The message without its times: a past delay or expiry means nothing now. None if no log would accept it."""
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
    except (msgspec.DecodeError, InvalidInputError, RecursionError, TypeError):  # put in by hand, and quarantined
        return None
    return {"topic": row["topic"], "data": data, **options}
