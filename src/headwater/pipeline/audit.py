"""The audit: bronze holds each seq of the log once, with the log's content, and a gap passes only if the log recorded
its deletion. It reads snapshots, so runs may continue meanwhile. A check is `ok`, `failed` or `skipped`; one that was
not made is never `ok`."""

from __future__ import annotations

import datetime as dt
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from headwater.delivery.retention import merged
from headwater.errors import CorruptError, ReadOnlyError, StoreError
from headwater.formats import iso
from headwater.pipeline.columns import LAKE_SCHEMA, MESSAGE_SCHEMA
from headwater.pipeline.delta import LOG, Table, entry_path, entry_versions, is_whole_entry, last_checkpoint
from headwater.pipeline.lake import BRONZE, QUARANTINE, SILVER, Lake
from headwater.pipeline.logs import backend_of, log_identity, open_reader
from headwater.pipeline.sql import files_frame
from headwater.pipeline.status_file import write_verdict
from headwater.pipeline.storage import DataFile, Storage

SHOWN_MAX = 100
BUCKET_SEQS = 32_768
"""What Spark's `bitmap_bucket_number` puts together: bucket 1 holds the seqs 1 to 32,768."""
THREADS = 8

SeqRange = tuple[int, int]
"""Seqs from the first to the last, both included."""
Step = Callable[[str], None]


class Fingerprint(NamedTuple):
    """The fingerprint of the messages of one bucket."""

    rows: int
    seqs: bytes
    checksum: int


class Comparison(NamedTuple):
    """The comparison of bronze, at one version, with the log."""

    bronze: Table
    position: int | None
    last_seq: int
    rows: int
    compared: int
    excused: Sequence[SeqRange]
    missing: Sequence[SeqRange]
    repeated: Sequence[SeqRange]
    different: Sequence[SeqRange]


def audit(spark: SparkSession, lake: Lake, log: str, on_step: Step = lambda step: None) -> dict[str, Any]:
    """Compare the lake with its log; returns the document that the audit's page shows, and records it in the lake, if
    that may be written."""
    began = time.monotonic()
    on_step("files")
    checks = [_check_entries(lake)]
    document: dict[str, Any] = {"log": backend_of(log).name, "lake": lake.name, "lake_seq": 0}
    try:
        lake.check_log(log_identity(log))
        position = _position(log, lake.subscription)  # before bronze: a concurrent run moves both
        bronze = lake.table(BRONZE)
        tables = [table for name in lake.tables() if (table := _loaded(lake, name)) is not None]
    except CorruptError as exc:
        skipped = ("files", "every seq is there", "no seq is there twice", "rows", "content", "derived tables")
        checks += [_check(name, None, f"not made, for a table cannot be read: {exc.why}") for name in skipped]
    else:
        files_missing, files_changed = _examine_files(tables)
        unreadable = {*files_missing, *files_changed}  # what they held counts as missing
        readable = [file for file in bronze.files if f"{BRONZE}/{file.path}" not in unreadable]
        found = _compare(spark, bronze, readable, log, position, on_step)
        twice = _files_with(bronze, readable, found.repeated)
        checks += [
            _check_files(tables, files_missing, files_changed),
            _check_seqs(found),
            _check_once(found, twice),
            _check_rows(found),
            _check_position(found),
            _check_log(found),
            _check_content(found),
            _check_derived(lake, bronze),
        ]
        document |= {
            "lake_seq": bronze.transaction(),
            "last_seq": found.last_seq,
            "rows": found.rows,
            "not_yet": max(0, found.last_seq - bronze.transaction()),
            "compared": found.compared,
            "gaps": [{"from": low, "to": high, "why": "retention"} for low, high in found.excused[:SHOWN_MAX]],
            "gaps_total": _total(found.excused),
            "files_missing": files_missing[:SHOWN_MAX],
            "files_changed": files_changed[:SHOWN_MAX],
            "files_repeated": twice[:SHOWN_MAX],
        }
        for name in ("missing", "repeated", "different"):
            spans: Sequence[SeqRange] = getattr(found, name)
            document |= {name: spans[:SHOWN_MAX], f"{name}_total": _total(spans)}
    now = dt.datetime.now(dt.UTC)
    document = {
        "whole": all(check["status"] != "failed" for check in checks),
        "checked_at": iso(int(now.timestamp() * 1000)),
        "seconds": round(time.monotonic() - began, 1),
        **document,
        "checks": checks,
    }
    try:
        lake.add_audit(document, now)
        write_verdict(lake, document)
    except ReadOnlyError:
        return document | {"recorded": False}
    return document | {"recorded": True}


# --- the log of each table --------------------------------------------------------------------------------------------


def _check_entries(lake: Lake) -> dict[str, Any]:
    """delta-rs reads an empty entry as one that changes nothing."""
    names = lake.tables()
    problems: list[str] = []
    entries = 0
    for name in names:
        before = len(problems)
        try:
            first, last = _entries_needed(lake.storage, name)
            entries += last - first + 1
            wanted = [entry_path(name, version) for version in range(first, last + 1)]
            with ThreadPoolExecutor(THREADS) as pool:
                found = pool.map(lambda path: _entry_problem(lake.storage, path), wanted)
            problems += [problem for problem in found if problem]
            if len(problems) == before:
                lake.table(name)
        except StoreError as exc:
            problems.append(f"{name}: {exc.why}")
    what = f"{entries:,} entries of {len(names)} tables are contiguous and whole"
    return _check("log entries", not problems, _listed(problems) if problems else what)


def _entries_needed(storage: Storage, name: str) -> SeqRange:
    """The versions that a reader needs: from the last checkpoint on, or all."""
    versions, checkpoint = entry_versions(storage, name), last_checkpoint(storage, name)
    if checkpoint is None:
        return 0, max(versions, default=-1)
    file = f"{checkpoint:020d}.checkpoint.parquet"
    if not storage.size(f"{name}/{LOG}/{file}"):
        raise StoreError(f"{file} is gone or empty")
    return checkpoint + 1, max([checkpoint, *versions])


def _entry_problem(storage: Storage, path: str) -> str | None:
    if storage.size(path) is None:
        return f"{path} is gone"
    content = storage.read(path)
    if is_whole_entry(content):
        return None
    return f"{path} is {'not whole' if content.strip() else 'empty'}"


def _loaded(lake: Lake, name: str) -> Table | None:
    """The table; None if its log cannot be read, which the check of the entries reports."""
    try:
        return lake.table(name)
    except CorruptError:
        return None


# --- files ------------------------------------------------------------------------------------------------------------


def _examine_files(tables: Sequence[Table]) -> tuple[list[str], list[str]]:
    """The files that are gone, and those that are not as they were written."""
    files = [(table, file) for table in tables for file in table.files]
    with ThreadPoolExecutor(THREADS) as pool:
        intact = list(pool.map(lambda found: found[0].is_intact(found[1]), files))
    paths = [f"{table.name}/{file.path}" for table, file in files]
    missing = sorted(path for path, is_intact in zip(paths, intact, strict=True) if is_intact is None)
    changed = sorted(path for path, is_intact in zip(paths, intact, strict=True) if is_intact is False)
    return missing, changed


def _check_files(tables: Sequence[Table], missing: Sequence[str], changed: Sequence[str]) -> dict[str, Any]:
    total = sum(len(table.files) for table in tables)
    if not missing and not changed:
        return _check("files", True, f"all {total:,} are there, byte for byte as they were written")
    parts = [f"{len(missing):,} are gone: {_listed(missing)}"] if missing else []
    parts += [f"{len(changed):,} are not as they were written: {_listed(changed)}"] if changed else []
    return _check("files", False, f"of {total:,}, " + "; ".join(parts))


def _files_with(table: Table, files: Sequence[DataFile], spans: Sequence[SeqRange]) -> list[str]:
    """The files that hold one of these seqs."""
    found: list[str] = []
    for file in files:
        if len(found) < SHOWN_MAX and any(low <= file.seq_to and high >= file.seq_from for low, high in spans):
            seqs = _seqs(table, file)
            if any(((seqs >= low) & (seqs <= high)).any() for low, high in spans):
                found.append(f"{table.name}/{file.path}")
    return found


def _seqs(table: Table, file: DataFile) -> np.ndarray[Any, np.dtype[np.int64]]:
    rows = table.read_file(file, pa.schema([LAKE_SCHEMA.field("seq")]))
    return np.asarray(rows["seq"].to_numpy())


# --- the messages -----------------------------------------------------------------------------------------------------


def _compare(
    spark: SparkSession, bronze: Table, readable: Sequence[DataFile], log: str, position: int | None, on_step: Step
) -> Comparison:
    upto = bronze.transaction()
    on_step("bronze")
    ours = files_frame(spark, bronze, readable, LAKE_SCHEMA).where(F.col("seq") <= upto)
    our_prints = fingerprints(ours)
    on_step("log")
    reader = spark.read.format("headwater").option("path", log).option("failOnDataLoss", "false")
    theirs = reader.option("endingSeq", str(upto)).load()
    their_prints = fingerprints(theirs) if upto else {}
    with open_reader(log) as snapshot:  # after the log was read: what was pruned meanwhile is in it
        last_seq = snapshot.last_seq()
        pruned = merged(snapshot.pruned(1, upto)) if upto else []
    on_step("comparing")
    held, in_log = _held(our_prints), _held(their_prints)
    absent = without([(1, upto)], held) if upto else []
    excused = in_both(absent, pruned)
    missing = merged([*without(absent, excused), *without(in_log, held)])
    return Comparison(
        bronze=bronze,
        position=position,
        last_seq=last_seq,
        rows=sum(each.rows for each in our_prints.values()),
        compared=count_of(in_both(in_log, held)),
        excused=excused,
        missing=missing,
        repeated=_repeated(ours, our_prints),
        different=_different(ours, theirs, our_prints, their_prints),
    )


def fingerprints(messages: DataFrame) -> dict[int, Fingerprint]:
    seq = F.col("seq")
    found = messages.groupBy(F.bitmap_bucket_number(seq).alias("bucket")).agg(
        F.count("*").alias("rows"),
        F.bitmap_construct_agg(F.bitmap_bit_position(seq)).alias("seqs"),
        F.bit_xor(_row_hash()).alias("checksum"),
    )
    rows = found.toArrow().to_pylist()
    return {row["bucket"]: Fingerprint(row["rows"], row["seqs"], row["checksum"]) for row in rows}


def _row_hash() -> Column:
    """The hash of a row over all columns; a map cannot be hashed, its JSON can. A null counts: it is not the same as a
    column less."""
    columns = [F.to_json(F.col(name)) if name == "headers" else F.col(name) for name in MESSAGE_SCHEMA.names]
    return F.xxhash64(*columns, *(F.col(name).isNull() for name in MESSAGE_SCHEMA.names))


def _repeated(ours: DataFrame, prints: Mapping[int, Fingerprint]) -> list[SeqRange]:
    suspects = [bucket for bucket, each in prints.items() if each.rows != int(_bits(each.seqs).sum())]
    if not suspects:
        return []
    counted = ours.where(_in_buckets(suspects)).groupBy("seq").count()
    return _spans_of(counted.where(F.col("count") > 1))


def _different(
    ours: DataFrame,
    theirs: DataFrame,
    our_prints: Mapping[int, Fingerprint],
    their_prints: Mapping[int, Fingerprint],
) -> list[SeqRange]:
    """The seqs that both hold, with other content."""
    suspects = [bucket for bucket, each in their_prints.items() if bucket in our_prints and our_prints[bucket] != each]
    if not suspects:
        return []
    left = ours.where(_in_buckets(suspects)).select("seq", _row_hash().alias("ours"))
    right = theirs.where(_in_buckets(suspects)).select("seq", _row_hash().alias("theirs"))
    return _spans_of(left.join(right, on="seq", how="inner").where(F.col("ours") != F.col("theirs")))


def _in_buckets(buckets: Iterable[int]) -> Column:
    """A condition for these buckets: ranges of seqs, by which files and logs can skip."""
    condition = F.lit(False)
    for low, high in merged((_first_seq(bucket), _first_seq(bucket) + BUCKET_SEQS - 1) for bucket in buckets):
        condition = condition | F.col("seq").between(low, high)
    return condition


def _spans_of(rows: DataFrame) -> list[SeqRange]:
    seq = F.col("seq")
    found = rows.groupBy(F.bitmap_bucket_number(seq).alias("bucket")).agg(
        F.bitmap_construct_agg(F.bitmap_bit_position(seq)).alias("seqs")
    )
    return spans_held({row["bucket"]: row["seqs"] for row in found.toArrow().to_pylist()})


# --- verdicts ---------------------------------------------------------------------------------------------------------


def _check_seqs(found: Comparison) -> dict[str, Any]:
    upto = found.bronze.transaction()
    what = f"seqs 1 to {upto:,}: {_some(found.missing)} missing" if upto else "no message has been ingested yet"
    if found.missing:
        what += f" ({_ranges(found.missing)})"
    if found.excused:
        what += f"; retention deleted {count_of(found.excused):,} before they were ingested"
    return _check("every seq is there", not found.missing, what)


def _check_once(found: Comparison, files: Sequence[str]) -> dict[str, Any]:
    what = f"{found.rows:,} rows, {_some(found.repeated)} more than once"
    if found.repeated:
        what += f" ({_ranges(found.repeated)}, in {_listed(files)})"
    return _check("no seq is there twice", not found.repeated, what)


def _check_rows(found: Comparison) -> dict[str, Any]:
    """Retention in the log does not excuse what was ingested once."""
    ingested, listed = found.bronze.transaction("rows"), found.bronze.rows
    what = f"{ingested:,} rows were ingested, the table lists {listed:,}, {found.rows:,} were counted"
    return _check("rows", ingested == listed == found.rows, what)


def _check_position(found: Comparison) -> dict[str, Any]:
    name, upto = "position", found.bronze.transaction()
    if found.position is None:
        return _check(name, None, "the log has no position of this lake: nothing to compare with")
    if found.position <= upto:
        return _check(name, True, f"the lake's position in the log is {found.position:,}, bronze goes up to {upto:,}")
    entry = entry_path(BRONZE, found.bronze.version + 1)
    what = f"the lake's position in the log is {found.position:,}, and bronze goes only up to {upto:,}: {entry} is gone"
    return _check(name, False, what)


def _check_log(found: Comparison) -> dict[str, Any]:
    upto = found.bronze.transaction()
    what = f"the log goes up to seq {found.last_seq:,}, the lake up to {upto:,}"
    return _check("the log is not behind the lake", found.last_seq >= upto, what)


def _check_content(found: Comparison) -> dict[str, Any]:
    name = "content"
    if not found.compared:
        return _check(name, None, "the log no longer has any of the lake's messages: nothing to compare with")
    what = f"{found.compared:,} rows that the log still has were compared by checksum, {_some(found.different)} differ"
    if found.different:
        what += f" ({_ranges(found.different)})"
    return _check(name, not found.different, what)


def _check_derived(lake: Lake, bronze: Table) -> dict[str, Any]:
    name = "derived tables"
    silver, quarantine = _loaded(lake, SILVER), _loaded(lake, QUARANTINE)
    if silver is None or quarantine is None:
        return _check(name, None, "not made, for a table cannot be read")
    upto = silver.transaction()
    if not upto or silver.transaction("rebuild") or lake.table(SILVER).transaction() < upto:
        return _check(name, None, "they are not made yet, or being rebuilt")
    if upto > bronze.transaction():
        bronze = lake.table(BRONZE)  # a run has gone on meanwhile
    repeated = silver.transaction("repeated")
    try:
        have, quarantined = _rows_upto(bronze, upto), _rows_upto(quarantine, upto)
    except (OSError, pa.ArrowInvalid) as exc:
        return _check(name, None, f"not made, for a file cannot be read ({exc})")
    what = (
        f"up to seq {upto:,}: bronze has {have:,} rows; silver {silver.rows:,}, the quarantine {quarantined:,}, and "
        f"{repeated:,} repeated an id"
    )
    return _check(name, upto <= bronze.transaction() and have == silver.rows + quarantined + repeated, what)


def _rows_upto(table: Table, upto: int) -> int:
    return sum(
        file.rows if file.seq_to <= upto else int((_seqs(table, file) <= upto).sum())
        for file in table.files
        if file.seq_from <= upto
    )


def _position(log: str, subscription: str) -> int | None:
    with open_reader(log) as snapshot:
        record = snapshot.subscription(subscription)
        return None if record is None else record.window.floor


def _check(name: str, is_right: bool | None, what: str) -> dict[str, Any]:
    status = "skipped" if is_right is None else "ok" if is_right else "failed"
    return {"name": name, "status": status, "what": what}


def _total(spans: Sequence[SeqRange]) -> dict[str, int]:
    return {"runs": len(spans), "messages": count_of(spans)}


def _some(spans: Sequence[SeqRange]) -> str:
    return f"{count_of(spans):,}" if spans else "none"


def _ranges(spans: Sequence[SeqRange]) -> str:
    return _listed([f"{low:,}" if low == high else f"{low:,} to {high:,}" for low, high in spans])


def _listed(words: Sequence[str], shown: int = 3) -> str:
    more = f" and {len(words) - shown:,} more" if len(words) > shown else ""
    return ", ".join(words[:shown]) + more


# --- spans of seqs ----------------------------------------------------------------------------------------------------


def _held(prints: Mapping[int, Fingerprint]) -> list[SeqRange]:
    return spans_held({bucket: each.seqs for bucket, each in prints.items()})


def spans_held(bitmaps: Mapping[int, bytes]) -> list[SeqRange]:
    return merged(span for bucket in sorted(bitmaps) for span in _spans(bucket, _bits(bitmaps[bucket])))


def _bits(bitmap: bytes) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """The bits as Spark's `bitmap_construct_agg` sets them: bit 0 of byte 0 is the bucket's first seq."""
    return np.unpackbits(np.frombuffer(bitmap, dtype=np.uint8), bitorder="little")


def _spans(bucket: int, bits: np.ndarray[Any, np.dtype[np.uint8]]) -> Iterator[SeqRange]:
    edges = np.flatnonzero(np.diff(np.concatenate(([0], bits, [0])).astype(np.int8)))
    first = _first_seq(bucket)
    for low, high in zip(edges[::2], edges[1::2], strict=True):
        yield first + int(low), first + int(high) - 1


def _first_seq(bucket: int) -> int:
    return (bucket - 1) * BUCKET_SEQS + 1


def without(spans: Sequence[SeqRange], taken: Sequence[SeqRange]) -> list[SeqRange]:
    """What is in the first and not in the second. Both are merged; it walks through each once."""
    left: list[SeqRange] = []
    at = 0
    for low, high in spans:
        while at < len(taken) and taken[at][1] < low:
            at += 1
        here = at
        while low <= high and here < len(taken) and taken[here][0] <= high:
            if low < taken[here][0]:
                left.append((low, taken[here][0] - 1))
            low = taken[here][1] + 1
            here += 1
        if low <= high:
            left.append((low, high))
    return left


def in_both(spans: Sequence[SeqRange], others: Sequence[SeqRange]) -> list[SeqRange]:
    return without(spans, without(spans, others))


def count_of(spans: Iterable[SeqRange]) -> int:
    return sum(high - low + 1 for low, high in spans)
