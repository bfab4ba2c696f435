"""The audit: bronze holds each seq of the log once, with the content that the log has, and only recorded retention
explains what is not there."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from headwater.message.times import iso
from headwater.pipeline.audit.coverage import (
    BUCKET_SEQS,
    Run,
    bits_of,
    count_of,
    first_seq,
    in_both,
    joined,
    runs_held,
    without,
)
from headwater.pipeline.audit.fingerprints import different_rows, fingerprints
from headwater.pipeline.lake.disk import digest_of
from headwater.pipeline.lake.lake import Lake, now_ms
from headwater.pipeline.lake.layout import BRONZE
from headwater.pipeline.source.log import log_identity, log_name, reading

RUNS_SHOWN_MAX = 100
SEQS_COLLECTED_MAX = 10_000

Step = Callable[[str], None]


class Fingerprint(NamedTuple):
    rows: int
    seqs: bytes
    checksum: int


Fingerprints = Mapping[int, Fingerprint]


class LogFacts(NamedTuple):
    last_seq: int
    pruned: Sequence[Run]


def audit(spark: SparkSession, lake: Lake, log: str, on_step: Step = lambda step: None) -> dict[str, Any]:
    """Compare the lake with its log; returns the document that the audit's page shows, and keeps it in the lake. Nobody
    has to stop for it: it looks at what had been taken in when it began."""
    began = time.monotonic()
    lake.manifest.refuse_other_log(*log_identity(log))
    mark = lake.manifest.mark(BRONZE)
    on_step("files")
    files_missing, files_changed = _examine_files(lake)
    on_step("bronze")
    unreadable = {*files_missing, *files_changed}  # what they held is missing
    bronze = lake.bronze(spark, without=unreadable).where(F.col("seq") <= mark)
    ours = _collect(fingerprints(bronze))
    on_step("log")
    live = _live(spark, log, mark)
    theirs = _collect(fingerprints(live)) if mark else {}
    facts = _ask_log(log, mark)  # after reading the log: what was pruned meanwhile is told
    on_step("comparing")
    held = runs_held({bucket: each.seqs for bucket, each in ours.items()})
    absent = without([(1, mark)], held) if mark else []
    excused = in_both(absent, joined(facts.pruned))
    in_log = runs_held({bucket: each.seqs for bucket, each in theirs.items()})
    missing = joined([*without(absent, excused), *without(in_log, held)])
    repeated = _repeated(bronze, ours)
    different = _different(bronze, live, ours, theirs)
    rows = sum(each.rows for each in ours.values())
    compared = sum(each.rows for each in theirs.values())
    checks = [
        _check("files", not files_missing and not files_changed, _files_words(lake, files_missing, files_changed)),
        _check("every seq is there", not missing, _missing_words(mark, missing, excused)),
        _check("no seq is there twice", not repeated, f"{rows:,} rows, {_some(repeated)} more than once"),
        _check_batches(lake, mark, rows),
        _check_log(mark, facts.last_seq),
        _check(
            "content is the log's",
            not different,
            f"{compared:,} rows that the log still has were compared by checksum, {_some(different)} differ",
        ),
    ]
    document = {
        "whole": all(check["ok"] for check in checks),
        "checked_at": iso(now_ms()),
        "log": log_name(log),
        "lake": str(lake.path),
        "high_water": mark,
        "last_seq": facts.last_seq,
        "rows": rows,
        "seconds": round(time.monotonic() - began, 1),
        "not_yet": max(0, facts.last_seq - mark),
        "compared": compared,
        "checks": checks,
        "gaps": [{"from": low, "to": high, "why": "retention"} for low, high in excused[:RUNS_SHOWN_MAX]],
        "missing": missing[:RUNS_SHOWN_MAX],
        "repeated": repeated[:RUNS_SHOWN_MAX],
        "different": different[:RUNS_SHOWN_MAX],
        "files_missing": files_missing[:RUNS_SHOWN_MAX],
        "files_changed": files_changed[:RUNS_SHOWN_MAX],
    }
    lake.manifest.add_audit(document, now_ms())
    return document


def _check_batches(lake: Lake, mark: int, rows: int) -> dict[str, Any]:
    """What was taken in, batch by batch, is what is there: retention in the log does not excuse what was in once."""
    count, in_line, taken_in = lake.manifest.batch_totals()
    listed = sum(file.rows for file in lake.manifest.files(BRONZE))
    ok = lake.manifest.mark(BRONZE) != mark or (in_line == count and taken_in == listed == rows)
    what = f"{taken_in:,} rows were taken in by {count:,} batches, {listed:,} are listed, {rows:,} were counted"
    return _check("as many rows as were taken in", ok, what)


def _check_log(mark: int, last_seq: int) -> dict[str, Any]:
    what = f"the log goes up to seq {last_seq:,}, the lake up to {mark:,}"
    return _check("the log is not behind the lake", last_seq >= mark, what)


def _check(name: str, ok: bool, what: str) -> dict[str, Any]:
    return {"name": name, "ok": ok, "what": what}


def _examine_files(lake: Lake) -> tuple[list[str], list[str]]:
    missing, changed = [], []
    for file in lake.manifest.files(BRONZE):
        try:
            path = lake.path / file.path
            if path.stat().st_size != file.bytes or digest_of(path) != file.sha256:
                changed.append(file.path)
        except FileNotFoundError:
            missing.append(file.path)
        except OSError:  # there, and not to be read
            changed.append(file.path)
    still_listed = {file.path for file in lake.manifest.files(BRONZE)}  # a run may have merged some meanwhile
    missing = [path for path in missing if path in still_listed]
    return missing, changed


def _live(spark: SparkSession, log: str, upto: int) -> DataFrame:
    reader = spark.read.format("headwater").option("path", log).option("failOnDataLoss", "false")
    return reader.option("endingSeq", str(upto)).load()


def _ask_log(log: str, upto: int) -> LogFacts:
    with reading(log) as reader:
        return LogFacts(reader.last_seq(), reader.pruned(1, upto) if upto else [])


def _collect(frame: DataFrame) -> dict[int, Fingerprint]:
    return {
        row["bucket"]: Fingerprint(row["rows"], row["seqs"], row["checksum"]) for row in frame.toArrow().to_pylist()
    }


def _repeated(bronze: DataFrame, ours: Fingerprints) -> list[Run]:
    suspects = [bucket for bucket, each in ours.items() if each.rows != int(bits_of(each.seqs).sum())]
    if not suspects:
        return []
    twice = bronze.where(_in_buckets(suspects)).groupBy("seq").count().where(F.col("count") > 1).select("seq")
    return _runs(twice)


def _different(bronze: DataFrame, live: DataFrame, ours: Fingerprints, theirs: Fingerprints) -> list[Run]:
    suspects = [bucket for bucket, each in theirs.items() if bucket in ours and ours[bucket] != each]
    if not suspects:
        return []
    return _runs(different_rows(bronze.where(_in_buckets(suspects)), live.where(_in_buckets(suspects))))


def _in_buckets(buckets: Sequence[int]) -> Any:
    """As ranges of seqs, which files and logs can skip by."""
    ranges = joined((first_seq(bucket), first_seq(bucket) + BUCKET_SEQS - 1) for bucket in buckets)
    condition = F.lit(False)
    for low, high in ranges:
        condition = condition | F.col("seq").between(low, high)
    return condition


def _runs(seqs: DataFrame) -> list[Run]:
    found = [row["seq"] for row in seqs.distinct().limit(SEQS_COLLECTED_MAX).collect()]
    return joined((seq, seq) for seq in found)


def _some(runs: Sequence[Run]) -> str:
    return f"{count_of(runs):,}" if runs else "none"


def _files_words(lake: Lake, missing: Sequence[str], changed: Sequence[str]) -> str:
    total = len(lake.manifest.files(BRONZE))
    if not missing and not changed:
        return f"all {total:,} are there, byte for byte as they were sealed"
    return f"of {total:,}, {len(missing):,} are gone and {len(changed):,} are not as they were sealed"


def _missing_words(mark: int, missing: Sequence[Run], excused: Sequence[Run]) -> str:
    told = f"seqs 1 to {mark:,}: " if mark else "nothing has been taken in yet: "
    told += f"{_some(missing)} missing"
    return told + (f"; {count_of(excused):,} were deleted by retention before they were taken in" if excused else "")
