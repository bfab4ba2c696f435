"""The file that the console of a server reads: what runs and audits write into it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lake_world import World
from s3_server import S3Server

from headwater.errors import CorruptError, InvalidStateError
from headwater.pipeline import status_file
from headwater.pipeline.lake import Lake
from headwater.pipeline.logs import log_identity
from headwater.pipeline.status_file import DAY_MS, HOUR_MS, _chart, write_verdict
from headwater.pipeline.storage import Storage
from headwater.server import lake as reading

AUDIT = {
    "whole": False,
    "checked_at": "2026-01-02T03:04:05.000Z",
    "seconds": 1.5,
    "lake_seq": 3,
    "checks": [
        {"name": "files", "status": "ok", "what": "all there"},
        {"name": "rows", "status": "failed", "what": "x" * 1_000},
    ],
}


def run(world: World) -> None:
    with world.new_run() as running:
        running.once()


def found(world: World) -> dict[str, Any]:
    """As a server reads it."""
    return reading.read_lake(str(world.lake_path), log_identity(world.log)[0])


def test_a_run_writes_how_far_it_came_and_the_charts(world: World) -> None:
    world.publish_all_kinds()
    run(world)
    document = found(world)
    assert (document["last_seq"], document["messages"], document["audit"]) == (world.lake.last_seq, 23, None)
    assert document["quarantined"] > 0
    assert document["ran_at"].endswith("Z")
    volume, *_ = document["charts"]
    assert (volume["title"], len(volume["series"][0]["values"])) == ("Messages per hour", 1)  # without that of 2001
    assert {"orders.0", "orders.new", "mails.new"} <= {each["name"] for each in volume["series"]}
    [new] = [each["values"] for each in volume["series"] if each["name"] == "orders.new"]
    assert sum(value or 0 for value in new) == 5
    with world.open() as log:
        log.publish("a", 1)
    assert found(world) == document
    run(world)
    assert found(world)["messages"] == 24


def test_an_audit_writes_its_verdict_into_the_file_of_the_last_run(world: World) -> None:
    write_verdict(world.lake, AUDIT)
    assert not Path(world.lake_path, reading.STATUS_FILE).exists()  # nothing ran yet
    world.publish_all_kinds()
    run(world)
    before = found(world)
    write_verdict(world.lake, AUDIT)
    verdict = {"whole": False, "checked_at": AUDIT["checked_at"], "seconds": 1.5, "lake_seq": 3, "checks": 2}
    assert found(world) == before | {"audit": verdict | {"failed": ["rows: " + 294 * "x"]}}


def test_a_server_refuses_what_is_no_such_file(world: World) -> None:
    salt = log_identity(world.log)[0]
    with pytest.raises(InvalidStateError, match="no such folder"):
        reading.read_lake(str(world.folder / "gone"), salt)
    world.publish_all_kinds()
    run(world)
    with pytest.raises(InvalidStateError, match="another log"):
        reading.read_lake(str(world.lake_path), salt + 1)
    path = Path(world.lake_path, reading.STATUS_FILE)
    path.write_text(json.dumps({"version": 1, "padding": "x" * reading.STATUS_BYTES_MAX}))
    with pytest.raises(CorruptError, match="damaged"):
        reading.read_lake(str(world.lake_path), salt)


def test_a_lake_in_a_bucket_has_the_same_file(s3_lake: str) -> None:
    lake = Lake(Storage(s3_lake))
    write_verdict(lake, AUDIT)
    with pytest.raises(InvalidStateError, match="no run has finished"):
        reading.read_lake(lake.name, 7)
    document = {"version": 1, "log": 7, "last_seq": 3, "audit": None}
    status_file._write(lake, document)
    assert reading.read_lake(lake.name, 7) == document
    assert reading.read_lake(lake.name.replace("s3://", "s3a://"), 7) == document
    write_verdict(lake, AUDIT)
    assert reading.read_lake(lake.name, 7)["audit"]["failed"] == ["rows: " + 294 * "x"]
    with pytest.raises(InvalidStateError, match="another log"):
        reading.read_lake(lake.name, 8)
    status_file._write(lake, document | {"padding": "x" * reading.STATUS_BYTES_MAX})
    with pytest.raises(CorruptError, match="the limit"):
        reading.read_lake(lake.name, 7)


def test_a_bucket_that_does_not_answer_costs_a_bounded_time(
    lake_on: Callable[[S3Server], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "REQUEST_S", 0.5)
    with S3Server() as server:
        lake = lake_on(server)
        server.pause()
        began_s = time.monotonic()
        with pytest.raises(InvalidStateError, match="cannot be read") as refused:
            reading.read_lake(lake, 7)
        assert time.monotonic() - began_s < 10
    assert refused.value.where == lake
    with pytest.raises(InvalidStateError, match="in a folder or on S3"):
        reading.read_lake("gs://bucket/lake", 7)


def test_a_chart_has_the_greatest_series_and_steps_of_hours_or_days() -> None:
    rows = [{"at": HOUR_MS * hour, "name": f"t{n}", "value": n} for hour in (10, 12) for n in range(1, 9)]
    chart = _chart("Messages per {step}", "count", rows, 0)
    assert chart is not None
    assert (chart["title"], chart["from_ms"], chart["step_ms"], chart["more"]) == (
        "Messages per hour",
        10 * HOUR_MS,
        HOUR_MS,
        2,
    )
    assert chart["series"][0] == {"name": "t3", "values": [3, 0, 3]}
    late = [*rows, {"at": 10 * DAY_MS, "name": "t8", "value": 1}]
    chart = _chart("Messages per {step}", "count", late, None)
    assert chart is not None
    assert (chart["title"], len(chart["series"][-1]["values"])) == ("Messages per day", 11)
    assert chart["series"][-1]["values"][:2] == [8, None]  # a level is not added up
    assert _chart("x", "count", [], 0) is None
