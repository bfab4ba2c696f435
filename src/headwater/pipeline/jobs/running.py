"""A run: bronze, then what is made from it. Restartable at any point, for every step goes by what the manifest says."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import NamedTuple

from pyspark.errors import StreamingQueryException
from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from headwater import errors
from headwater.errors import InvalidOption
from headwater.pipeline.datasets.types import Types
from headwater.pipeline.jobs.bronze import TRIGGER_S, lake_subscription, start_bronze
from headwater.pipeline.jobs.gold import advance_gold
from headwater.pipeline.jobs.merging import merge_small_files
from headwater.pipeline.jobs.observing import observe
from headwater.pipeline.jobs.progress import SILENT, Progress
from headwater.pipeline.jobs.silver import advance_silver
from headwater.pipeline.lake.compaction import compact
from headwater.pipeline.lake.lake import Lake, now_ms
from headwater.pipeline.lake.layout import BRONZE
from headwater.pipeline.lake.sweeping import remove_checkpoints, sweep_dropped, vacuum
from headwater.pipeline.source.place import log_at
from headwater.ports.store import Store

REFRESH_S = 60.0
POLL_S = 1
_PYTHON_ERROR = re.compile(r"^[\w.]*(?:Error|Exception): .+$", re.MULTILINE)
_OURS = re.compile(r"headwater\.errors\.(\w+): ([^\n]+)")


class Ran(NamedTuple):
    """What a run has added to bronze."""

    messages: int
    high_water: int


def bind(lake: Lake, log: str) -> int:
    """Make sure that the lake is this log's, and that neither was put back to an earlier state; returns the log's last
    seq."""
    place = log_at(log)
    with closing(place.open().store) as store:  # brings an older log up to date
        with store.read() as reader:
            last_seq = reader.last_seq()
        lake.manifest.bind_to_log(place.name, *place.identity(), now_ms())
        mark = lake.manifest.mark(BRONZE)
        if last_seq < mark:
            raise InvalidOption(
                f"the log ends at seq {last_seq}, and the lake has taken in everything up to {mark}",
                where=place.name,
                next="A log from a backup? Its new messages would get seqs that the lake has: begin another lake",
            )
        _refuse_lost_position(lake, store, place.name, mark)
        return last_seq


def _refuse_lost_position(lake: Lake, store: Store, log_name: str, mark: int) -> None:
    """A manifest from a backup is behind the lake's own position in the log, and retention may have gone by that."""
    with store.read() as reader:
        record = reader.subscription(lake_subscription(lake))
        floor = 0 if record is None else record.window.floor
        lost = reader.pruned(mark + 1, floor) if floor > mark else []
    if lost:
        raise InvalidOption(
            f"the lake has taken in everything up to seq {mark}, but had said {floor}, and retention deleted some of "
            "what lies between",
            where=str(lake.path),
            next="Restore the newer manifest; or, to go on without them, headwater subscriptions rm "
            f"{log_name} {lake_subscription(lake)}",
        )


def run_once(spark: SparkSession, lake: Lake, log: str, types: Types, progress: Progress = SILENT) -> Ran:
    """Take in what there is, bring every table up to date, tidy up. The caller has the lake's lock."""
    last_seq = bind(lake, log)
    vacuum(lake.path, lake.manifest, now_ms())
    begun_at = lake.manifest.mark(BRONZE)
    progress.step("bronze", max(0, last_seq - begun_at))
    query = start_bronze(spark, lake, log)
    try:
        with _translated():
            while not query.awaitTermination(POLL_S):
                progress.reached(lake.manifest.mark(BRONZE) - begun_at)
    finally:
        query.stop()
        remove_checkpoints(lake.path)
    refresh(spark, lake, log, types, progress)
    return _ran(lake, begun_at)


def run_continuously(
    spark: SparkSession,
    lake: Lake,
    log: str,
    types: Types,
    wait: Callable[[float], bool],
    progress: Progress = SILENT,
    *,
    trigger_s: float = TRIGGER_S,
    refresh_s: float = REFRESH_S,
) -> Ran:
    """The same for ever: bronze follows the log, and the tables made from it follow bronze every `refresh_s`. `wait`
    waits so many seconds and says whether to go on."""
    last_seq = bind(lake, log)
    vacuum(lake.path, lake.manifest, now_ms())
    begun_at = lake.manifest.mark(BRONZE)
    query = start_bronze(spark, lake, log, continuous=True, trigger_s=trigger_s)
    try:
        while lake.manifest.mark(BRONZE) < last_seq:  # reports of a lake that is far behind would be of no use
            if not _goes_on(query, wait, POLL_S):
                return _ran(lake, begun_at)
        while True:
            refresh(spark, lake, log, types, progress)
            sweep_dropped(lake.path, lake.manifest, now_ms())
            if not _goes_on(query, wait, refresh_s):
                return _ran(lake, begun_at)
    finally:
        query.stop()
        remove_checkpoints(lake.path)


def _goes_on(query: StreamingQuery, wait: Callable[[float], bool], seconds: float) -> bool:
    """Wait, and notice soon if the stream has failed."""
    with _translated():
        while seconds > 0:
            if not wait(min(POLL_S, seconds)):
                return False
            if (failure := query.exception()) is not None:
                raise failure
            seconds -= POLL_S
    return True


def _ran(lake: Lake, begun_at: int) -> Ran:
    reached = lake.manifest.mark(BRONZE)
    return Ran(reached - begun_at, reached)


def refresh(spark: SparkSession, lake: Lake, log: str, types: Types, progress: Progress = SILENT) -> None:
    progress.step("observing")
    observe(lake, log)
    advance_silver(spark, lake, types, progress)
    advance_gold(spark, lake, progress)
    progress.step("compacting")
    compact(lake.path, lake.manifest, BRONZE)
    merge_small_files(spark, lake)


@contextmanager
def _translated() -> Iterator[None]:
    """An error of ours comes out of Spark as text inside another; say what it said."""
    try:
        yield
    except StreamingQueryException as exc:
        told = str(exc)
        ours, any_error = _OURS.search(told), _PYTHON_ERROR.findall(told)
        kind = getattr(errors, ours[1], errors.StoreError) if ours else errors.StoreError
        why = ours[2] if ours else any_error[-1] if any_error else told.splitlines()[0]
        raise kind(why, where="bronze", next="Run it again: it goes on where it stopped") from exc
