"""Messages to seal, without a log."""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence

import pyarrow as pa

from headwater.pipeline.schema import ARROW_SCHEMA

DAY = dt.datetime(2026, 3, 1, 12, tzinfo=dt.UTC)


def batch_of(rows: Sequence[tuple[int, str, dt.datetime]]) -> pa.RecordBatch:
    """Messages by (seq, topic, published_at)."""
    full = [
        dict.fromkeys(ARROW_SCHEMA.names)
        | {"seq": seq, "id": f"id-{seq}", "topic": topic, "published_at": at, "data": f'{{"n": {seq}}}', "priority": 0}
        for seq, topic, at in rows
    ]
    return pa.RecordBatch.from_pylist(full, schema=ARROW_SCHEMA)


def on_one_day(seqs: Sequence[int], topic: str = "orders.new") -> pa.RecordBatch:
    return batch_of([(seq, topic, DAY) for seq in seqs])
