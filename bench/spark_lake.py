"""The pipeline's commands as processes, from start to exit, compared with plain PySpark that does as much."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path

from report import Line, at_most
from spark_ground import EXPLICIT_ID_EVERY, Ground, Took, in_turn, pipeline, rival

NOTHING_NEW_S_MAX, MILLION, MILLION_S_MAX = 2.0, 1_000_000, 30.0
RATIO_MAX, MEMORY_RATIO_MAX = 1.3, 1.2
MIB = 2**20
BARE = "bare Spark: start, write, group, dedupe"
JDBC = "PySpark + JDBC: bronze, silver, volume"
COUNT = "SELECT count(*) FROM bronze_messages"

Found = list[Took] | str


def run(log: Path, lake: Path, *, watched: bool = False) -> Took:
    return pipeline("run", "--log", log, "--lake", lake, watched=watched)


def first(ground: Ground) -> list[Line]:
    lines = [*first_runs(ground, ground.first, RATIO_MAX), *explicit_ids(ground)]
    log, lake = ground.log_of(ground.first), lake_of(ground, ground.first)
    found = in_turn(ground.repeats, {"ours": lambda: run(log, lake)})
    return [*lines, within("nothing new", found["ours"], NOTHING_NEW_S_MAX)]


def million(ground: Ground) -> list[Line]:
    lines = first_runs(ground, ground.small)
    lake, parquet = lake_of(ground, ground.small), ground.directory / f"jdbc-{ground.small}"
    return [*lines, size("the lake, all tables", lake, parquet), size("bronze", lake / "bronze", parquet / "bronze")]


def first_runs(ground: Ground, messages: int, most: float | None = None) -> list[Line]:
    """The first run into a lake. One lake and the script's Parquet are kept for later measurements."""
    log, directory = ground.log_of(messages), ground.directory
    rows = ground.rows_of(log)
    found = in_turn(
        ground.repeats,
        {
            "ours": _kept(ground, directory / f"lake-{messages}", lambda path: run(log, path)),
            BARE: _kept(ground, directory / f"bare-{messages}", lambda path: rival("bare", rows, path)),
            JDBC: _kept(ground, directory / f"jdbc-{messages}", lambda path: rival("jdbc", log, path)),
        },
    )
    what = f"first run, {messages:,} messages"
    lines = [beside(what, found["ours"], BARE, found[BARE], most), beside("", found["ours"], JDBC, found[JDBC])]
    if messages == MILLION:
        lines.insert(0, within(what, found["ours"], MILLION_S_MAX))
    return lines


def explicit_ids(ground: Ground) -> list[Line]:
    """Only messages with an explicit id can be duplicates, so only these are looked up."""
    log = ground.log_of(ground.first, explicit_ids=True)
    rows = ground.rows_of(log)
    found = in_turn(
        ground.repeats,
        {
            "ours": _kept(ground, None, lambda path: run(log, path)),
            BARE: _kept(ground, None, lambda path: rival("bare", rows, path)),
        },
    )
    what = f"the same, every {EXPLICIT_ID_EVERY}th has an explicit id"
    return [beside(what, found["ours"], BARE, found[BARE], RATIO_MAX)]


def some_new(ground: Ground) -> list[Line]:
    log, lake = ground.small_log, lake_of(ground, ground.small)

    def after_new() -> Took:
        ground.publish(log, ground.new)
        return run(log, lake)

    start, session = "bare Spark: start, range(1).count(), stop", "bare Spark: start, stop"
    found = in_turn(
        ground.repeats, {"ours": after_new, start: lambda: rival("start"), session: lambda: rival("session")}
    )
    what = f"{ground.new:,} new in a lake of {ground.small:,}"
    lines = [
        beside(what, found["ours"], start, found[start], RATIO_MAX),
        beside("", found["ours"], session, found[session]),
    ]
    if isinstance(starts := found[start], list):
        ready, job = (
            statistics.median(each.output[step] - each.began for each in starts) for step in ("session", "job")
        )
        lines.append(Line("", "", f"bare Spark: session ready after {ready:.1f} s, first job done after {job:.1f} s"))
    return lines


def counting(ground: Ground) -> list[Line]:
    lake = lake_of(ground, ground.small)
    found = in_turn(
        ground.repeats,
        {
            "ours": lambda: pipeline("sql", COUNT, "--lake", lake),
            "bare": lambda: rival("count", lake / "bronze" / "messages"),
        },
    )
    return [beside("pipeline sql, one count", found["ours"], "bare Spark: the same Parquet", found["bare"])]


def memory(ground: Ground) -> list[Line]:
    """One run each, with its memory sampled, each in its own process because a JVM keeps the memory it once had."""
    took = []
    for messages in (ground.messages, ground.small):
        with ground.passing("lake") as path:
            took.append(run(ground.log_of(messages), path, watched=True))
    large, small = took
    name = f"{ground.small:,} messages"
    return [
        beside(f"first run, {ground.messages:,} messages", [large], name, [small]),
        at_most(
            "most memory (PSS): driver, JVM, workers",
            f"{large.peak_bytes / MIB:,.0f} MiB",
            f"{name} {small.peak_bytes / MIB:,.0f} MiB",
            large.peak_bytes / small.peak_bytes,
            MEMORY_RATIO_MAX,
        ),
    ]


def size(what: str, ours: Path, other: Path) -> Line:
    ours_mib, other_mib = (
        sum(path.stat().st_size for path in each.rglob("*") if path.is_file()) / MIB for each in (ours, other)
    )
    name = "the JDBC script's Parquet (snappy)"
    ratio = ours_mib / other_mib if other_mib else None
    return Line(f"size of {what}", f"{ours_mib:,.1f} MiB", f"{name} {other_mib:,.1f} MiB", ratio)


# --- lines ----------------------------------------------------------------------------------------------------------


def beside(what: str, ours: Found, name: str, other: Found, most: float | None = None) -> Line:
    ratio = None if isinstance(ours, str) or isinstance(other, str) else _seconds(ours) / _seconds(other)
    wanted = "" if most is None else f"≤ {most:g} ×"
    met = None if most is None or ratio is None else ratio <= most
    return Line(what, _text(ours), f"{name} {_text(other)}", ratio, wanted, met)


def within(what: str, ours: Found, seconds_max: float) -> Line:
    met = False if isinstance(ours, str) else _seconds(ours) <= seconds_max
    return Line(what, _text(ours), "", None, f"≤ {seconds_max:g} s", met)


def _seconds(found: list[Took]) -> float:
    return statistics.median(each.seconds for each in found)


def _text(found: Found) -> str:
    if isinstance(found, str):
        return found
    all_s = [each.seconds for each in found]
    spread = f" ({min(all_s):.1f}–{max(all_s):.1f})" if len(found) > 1 else ""
    return f"{_seconds(found):.1f} s{spread}"


# --- folders --------------------------------------------------------------------------------------------------------


def lake_of(ground: Ground, messages: int) -> Path:
    """The lake with all messages of the log of that size; created unless an earlier measurement left one."""
    path = ground.directory / f"lake-{messages}"
    if not path.exists():
        run(ground.log_of(messages), path)
    return path


def _kept(ground: Ground, keep: Path | None, work: Callable[[Path], Took]) -> Callable[[], Took]:
    """Each run uses a new folder; with `keep`, the first one is kept."""

    def once() -> Took:
        if keep is not None and not keep.exists():
            return work(keep)
        with ground.passing("folder") as path:
            return work(path)

    return once
