"""Many small files of silver become one."""

from __future__ import annotations

import pytest
from lake_world import World

from headwater.pipeline.jobs import merging


def test_rows_stay_when_files_are_merged(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merging, "MERGED_FROM", 2)
    world.register({"order": {"type": "object", "properties": {"n": {"type": "integer"}}}})
    with world.log() as log:
        for turn in range(3):
            log.publish("orders.x", {"n": turn}, type="order", id=f"given-{turn}")
            world.take_in()
            world.make_silver()
            merging.merge_small_files(world.spark, world.lake)
    assert world.seqs("silver.messages") == [1, 2, 3]
    for table in ("silver.messages", "silver.given_ids", "typed.order"):
        assert len(world.lake.manifest.files(table)) == 1, table
    payloads = world.lake.table(world.spark, "silver.messages")
    assert payloads is not None
    assert [row["n"] for row in payloads.selectExpr("variant_get(payload, '$.n', 'long') as n").collect()] == [0, 1, 2]
