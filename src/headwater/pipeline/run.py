"""A run: the messages that bronze lacks, then what is derived from them. It can be killed at any point: each table has
its own watermark, an app transaction, and the next run continues from there.

One Spark job takes a slice of the log. A task reads a range of seqs as Arrow batches and writes the files of every
table itself; the driver commits them. Messages never enter the JVM. Commits go in one order: bronze, then the log's
position, then the derived tables, silver last. So everything derived is complete up to silver's watermark. After a
kill a derived table may be ahead of silver, never behind: the slice is derived again up to the same end, and a table
that has it already is not changed.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from headwater.errors import ConflictError, CorruptError, InvalidOptionError, LeaseLostError, StoreError
from headwater.pipeline.columns import EXPLICIT_IDS_SCHEMA, LAKE_SCHEMA, MESSAGE_SCHEMA, QUARANTINE_SCHEMA
from headwater.pipeline.delta import AFTER, JOB, UPTO, Table
from headwater.pipeline.derive import Deriver, Search, Sums, find_rows, merged, named_seqs, repeated_seqs, searches
from headwater.pipeline.lake import BRONZE, EXPLICIT_IDS, GOLD_BY_DAY, QUARANTINE, SILVER, Lake
from headwater.pipeline.logs import Range, backend_of, log_identity, read_range, seq_after, split
from headwater.pipeline.metrics import record_metrics, update_reports
from headwater.pipeline.position import Position
from headwater.pipeline.status_file import write_status
from headwater.pipeline.storage import DataFile, Storage, TableWriter, read_rows
from headwater.pipeline.types import Types, typed_schema
from headwater.ports.clock import SystemClock

if TYPE_CHECKING:
    from headwater.pipeline.session import Spark

SLICE_SEQS = 2_000_000
"""How much one job ingests: it bounds what a kill repeats, and what the driver holds."""
TASK_SEQS = 250_000
TASK_SEQS_MIN = 10_000
BATCH_ROWS = 32_768
SHORT_RUN_SEQS = 300_000
"""A run below it ends before the JVM's better compiler has paid for itself."""
METRICS_S = 300.0
REBUILD, REPEATED, ROWS = "rebuild", "repeated", "rows"
TYPES_DIGEST = "headwater.types"


class Progress(Protocol):
    def step(self, name: str, total: int | None = None) -> None:
        """A new step begins; `total` is how much there is to do, if that is known."""

    def reached(self, done: int) -> None:
        """Called with how much of the step is done."""


class NoProgress:
    def step(self, name: str, total: int | None = None) -> None:
        pass

    def reached(self, done: int) -> None:
        pass


NO_PROGRESS = NoProgress()
StartSpark = Callable[[bool], AbstractContextManager["Spark"]]
"""Begins to start Spark; True asks for settings that suit a short run."""


class RunResult(NamedTuple):
    """What a run has added to bronze."""

    messages: int
    last_seq: int


# --- tasks ----------------------------------------------------------------------------------------------------------


class Task(NamedTuple):
    """A range of seqs for one task of Spark: from the log into bronze too, or from files that bronze has."""

    storage: Storage
    range: Range
    log: str | None
    bronze: tuple[DataFile, ...]
    deriver: Deriver | None


class TaskResult(msgspec.Struct):
    """What a task has written, and its part of the sums as Arrow IPC."""

    after: int
    upto: int
    rows: int = 0
    files: dict[str, list[DataFile]] = {}
    sums: dict[str, bytes] = {}


def run_task(task: Task) -> TaskResult:
    """Runs in a Python worker of Spark."""
    writers: dict[str, TableWriter] = {}

    def write(table: str, rows: pa.RecordBatch, *, by_day: bool = False) -> None:
        if rows.num_rows:
            if table not in writers:
                writers[table] = stack.enter_context(TableWriter(task.storage, table, by_day=by_day))
            writers[table].write(rows)

    written = TaskResult(*task.range)
    sums = Sums()
    with ExitStack() as stack:
        if gc.isenabled():
            gc.disable()  # decoded JSON is millions of objects in no cycle: to look for one takes a fifth of the time
            stack.callback(gc.enable)
        for batch in _batches(task):
            written.rows += batch.num_rows
            if task.log is not None:
                write(BRONZE, batch, by_day=True)
            if task.deriver is not None:
                derived = task.deriver.derive(batch)
                sums.add(batch, derived.silver)
                write(SILVER, derived.silver, by_day=True)
                write(QUARANTINE, derived.quarantine)
                write(EXPLICIT_IDS, derived.explicit_ids)
                for name, rows in derived.typed.items():
                    write(name, rows)
        written.files = {table: writer.finish() for table, writer in writers.items()}
    written.sums = {name: _ipc(table) for name, table in sums.tables().items() if table.num_rows}
    return written


def _batches(task: Task) -> Iterator[pa.RecordBatch]:
    after, upto = task.range
    if task.log is not None:
        yield from read_range(task.log, after, upto, batch_rows=BATCH_ROWS)
        return
    for file in task.bronze:
        for rows in read_rows(task.storage, f"{BRONZE}/{file.path}", MESSAGE_SCHEMA, batch_rows=BATCH_ROWS):
            seqs = rows["seq"].to_numpy()
            if seqs.min() <= after or seqs.max() > upto:
                rows = rows.filter(pa.array((seqs > after) & (seqs <= upto)))
            yield from rows.combine_chunks().to_batches()


def _ipc(table: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(table)
    return bytes(sink.getvalue())


# --- the run --------------------------------------------------------------------------------------------------------


class Run:
    """One lake and its log; Spark is started when there is something for it to do."""

    def __init__(
        self, lake: Lake, log: str, types: Types, start_spark: StartSpark, progress: Progress = NO_PROGRESS
    ) -> None:
        self.lake, self.log, self._types, self._progress = lake, log, types, progress
        self._start_spark = start_spark
        self._spark: Spark | None = None
        self._position: Position | None = None
        self._opened = ExitStack()
        self._last_seq, position = bind(lake, log)
        self._salt = log_identity(log)[0]
        bronze = lake.table(BRONZE)
        self._rows_before = bronze.transaction(ROWS)
        bronze.sync_entry()  # a run that was killed may have left it to the page cache
        if position is None or position < bronze.transaction():
            # From now on retention that keeps what is unread waits for the lake, or no longer for what it has.
            self._open_position(bronze.transaction()).commit(bronze.transaction())

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *exc: Any) -> None:
        self._opened.__exit__(*exc)

    @property
    def result(self) -> RunResult:
        bronze = self.lake.table(BRONZE)
        return RunResult(bronze.transaction(ROWS) - self._rows_before, bronze.transaction())

    def once(self) -> RunResult:
        """Ingests what the log has now, brings every table up to date, and runs maintenance."""
        bronze, silver = self.lake.last_seq, self.lake.table(SILVER).transaction()
        if bronze < self._last_seq or silver != bronze:
            self._spark_for(self._last_seq - silver)
            self.ingest(self._last_seq)
        self._progress.step("reports")
        record_metrics(self.lake, self.log, SystemClock().now_ms())  # now that the lake's own position has moved
        update_reports(self.lake)
        self._progress.step("maintenance")
        self.lake.maintain()
        write_status(self.lake, SystemClock().now_ms())
        return self.result

    def continuously(
        self,
        wait: Callable[[float], bool],
        *,
        trigger_s: float,
        refresh_s: float,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> RunResult:
        """Follows the log: bronze at each trigger, the derived tables at each refresh. `wait` waits so many seconds and
        returns whether to continue."""
        self._spark_for(SHORT_RUN_SEQS)
        refreshed = measured = -float("inf")
        while True:
            now = monotonic()
            is_due = now - refreshed >= refresh_s
            with backend_of(self.log).snapshot() as snapshot:
                last_seq = snapshot.reader.last_seq()
            self.ingest(last_seq, derive=is_due)
            if is_due:
                if now - measured >= METRICS_S:
                    record_metrics(self.lake, self.log, SystemClock().now_ms())
                    measured = now
                update_reports(self.lake)
                self.lake.maintain()
                write_status(self.lake, SystemClock().now_ms())
                refreshed = now
            if not wait(trigger_s):
                return self.result

    def rebuild(self) -> None:
        """Empties the derived tables. Silver records it with its own reset, so that a kill leaves no table that looks
        complete: the next run continues it."""
        self._check_not_taken_over()
        self.lake.table(SILVER).ensure(LAKE_SCHEMA).reset(LAKE_SCHEMA, counters={REPEATED: 0, REBUILD: 1})
        self._finish_rebuild()

    def _finish_rebuild(self) -> None:
        if not self.lake.table(SILVER).transaction(REBUILD):
            return
        schemas = {name: typed_schema(type, self._types) for type, name in self._types.table_names.items()}
        for table in self._derived():
            self._check_not_taken_over()
            table.reset(schemas.get(table.name))
        self.lake.table(SILVER).commit([], transaction=0, counters={REBUILD: 0})

    # --- slices -----------------------------------------------------------------------------------------------------

    def ingest(self, upto: int, *, derive: bool = True) -> None:
        """Bring bronze up to a seq, and the derived tables too. A slice that bronze lacks goes into all of them in one
        pass, if they are as far as bronze."""
        self._finish_rebuild()
        bronze, silver = self.lake.table(BRONZE), self.lake.table(SILVER)
        if silver.transaction() > bronze.transaction():
            raise CorruptError(
                f"silver has messages up to {silver.transaction()}, and bronze only up to {bronze.transaction()}",
                where=self.lake.name,
                next="Restore bronze from a newer backup; or headwater pipeline run --rebuild rebuilds silver",
            )
        begun_at = (silver if derive else bronze).transaction()
        if upto > begun_at:
            self._progress.step("messages", upto - begun_at)
        while True:
            bronze, silver = self.lake.table(BRONZE), self.lake.table(SILVER)
            done = (silver if derive else bronze).transaction() - begun_at
            if derive and silver.transaction() < bronze.transaction():
                self._derive_slice(silver, bronze, done)
            elif bronze.transaction() < upto:
                self._ingest_slice(bronze, silver if derive else None, upto, done)
            else:
                return

    def _ingest_slice(self, bronze: Table, silver: Table | None, upto: int, done: int) -> None:
        """Ingest one slice into bronze and silver. Both are committed on the snapshots that the slice is planned on: a
        run beside this one, which no lock keeps away from an object store, has one of the two refused."""
        after = bronze.transaction()
        with backend_of(self.log).snapshot() as snapshot:
            following = seq_after(snapshot, after)
        begin = upto if following is None else max(after, following - 1)  # seqs may be far apart
        end = min(upto, begin + SLICE_SEQS)
        deriver = None if silver is None else Deriver(self._types, self._salt)
        self._open_position(after).begin(after, end)
        tasks = [Task(self.lake.storage, part, self.log, (), deriver) for part in self._ranges(Range(begin, end))]
        written = self._run(tasks, done)
        rows = sum(each.rows for each in written)
        bronze.commit(
            _files(written, BRONZE),
            transaction=end,
            counters={ROWS: bronze.transaction(ROWS) + rows},
            metadata={JOB: "ingest", AFTER: str(after), UPTO: str(end)},
        )
        self._open_position(end).commit(end)
        if silver is not None:
            self._commit_derived(written, silver, end)

    def _derive_slice(self, silver: Table, bronze: Table, done: int) -> None:
        after = silver.transaction()
        self._open_position(bronze.transaction())
        ahead = [table for table in self._derived() if table.transaction() > after]
        for table in ahead:
            if table.metadata(TYPES_DIGEST) not in (None, self._types.digest):
                raise InvalidOptionError(
                    f"the message types have changed since a run that committed to {table.name} alone",
                    where=self.lake.name,
                    next="headwater pipeline run --rebuild rebuilds the derived tables",
                )
        upto = min([bronze.transaction(), after + SLICE_SEQS, *(table.transaction() for table in ahead)])
        deriver = Deriver(self._types, self._salt)
        written = self._run(self._from_bronze(self._ranges(Range(after, upto)), deriver), done)
        self._commit_derived(written, silver, upto)

    def _from_bronze(self, ranges: Iterable[Range], deriver: Deriver) -> list[Task]:
        files = self.lake.table(BRONZE).files
        return [
            Task(self.lake.storage, part, None, tuple(file for file in files if file.overlaps(*part)), deriver)
            for part in ranges
        ]

    def _commit_derived(self, written: list[TaskResult], silver: Table, upto: int) -> None:
        after = silver.transaction()
        repeated = self._repeated(written)
        if len(repeated):
            written = self._without(written, repeated)
        note = {TYPES_DIGEST: self._types.digest, JOB: "derive", AFTER: str(after), UPTO: str(upto)}
        schemas = {
            **{name: typed_schema(type, self._types) for type, name in self._types.table_names.items()},
            QUARANTINE: QUARANTINE_SCHEMA,
            EXPLICIT_IDS: EXPLICIT_IDS_SCHEMA,
        }
        for name, schema in schemas.items():
            if files := _files(written, name):
                table = self.lake.table(name)
                if self._needs(table, after, upto):
                    table.commit(files, transaction=upto, metadata=note, schema=schema)
        for name in GOLD_BY_DAY:
            parts = [pa.ipc.open_stream(each.sums[name]).read_all() for each in written if name in each.sums]
            table = self.lake.table(f"gold/{name}")
            if parts and self._needs(table, after, upto):
                new = merged(name, parts)
                days = sorted({str(day) for day in new["day"].to_pylist()})
                rows = merged(name, [table.read(new.schema, days=days), new])
                table.replace(rows, transaction=upto, days=days, metadata=note)
        silver.commit(
            _files(written, SILVER),
            transaction=upto,
            counters={REPEATED: silver.transaction(REPEATED) + len(repeated)},
            metadata=note,
            schema=LAKE_SCHEMA,
        )

    def _needs(self, table: Table, after: int, upto: int) -> bool:
        """Whether a table has nothing of a slice; it can have a part of it only if another run writes too."""
        if after < table.transaction() < upto:
            raise table.conflict()
        self._check_not_taken_over()
        return table.transaction() < upto

    def _repeated(self, written: Sequence[TaskResult]) -> npt.NDArray[np.int64]:
        """Seqs of this slice whose id is in silver already, or at a lower seq of it. Only explicit ids can repeat. A
        table of ids that is ahead has those of this slice at the same seqs, and no message repeats itself."""
        files = _files(written, EXPLICIT_IDS)
        if not files:
            return np.empty(0, np.int64)
        new = self._find(Search(self.lake.storage, EXPLICIT_IDS, tuple(files)))
        ids = self.lake.table(EXPLICIT_IDS).files
        known = self._find(Search(self.lake.storage, EXPLICIT_IDS, tuple(ids), ids=pc.unique(new["id"])))
        originals = new.slice(0, 0)
        if len(seqs := named_seqs(new, self._salt)):
            rows = (*self.lake.table(SILVER).files, *_files(written, SILVER))
            originals = self._find(Search(self.lake.storage, SILVER, rows, seqs=seqs))
        return repeated_seqs(new, known, originals)

    def _find(self, search: Search) -> pa.Table:
        parts = searches(search)
        if len(parts) <= 1:
            return find_rows(parts[0] if parts else search)
        from headwater.pipeline.tasks import run_tasks

        return pa.concat_tables(run_tasks(self._spark_for(0), find_rows, parts))

    def _without(self, written: list[TaskResult], repeated: npt.NDArray[np.int64]) -> list[TaskResult]:
        """Derive the ranges that hold repeated messages once more, without those."""
        has_some = [
            bool(np.searchsorted(repeated, each.upto, "right") - np.searchsorted(repeated, each.after, "right"))
            for each in written
        ]
        ranges = [Range(each.after, each.upto) for each, again in zip(written, has_some, strict=True) if again]
        deriver = Deriver(self._types, self._salt, repeated)
        again_written = iter(self._run(self._from_bronze(ranges, deriver), None))
        found = []
        for each, again in zip(written, has_some, strict=True):
            if again:
                for name, files in each.files.items():
                    for file in files if name != BRONZE else ():
                        self.lake.storage.delete(f"{name}/{file.path}")
            found.append(next(again_written) if again else each)
        return found

    def _run(self, tasks: list[Task], done: int | None) -> list[TaskResult]:
        from headwater.pipeline.tasks import run_tasks

        sizes = [task.range.upto - task.range.after for task in tasks]

        def on_progress(finished: int, total: int) -> None:
            if done is not None:
                self._progress.reached(done + sum(sizes[:finished]))

        written = run_tasks(self._spark_for(sum(sizes)), run_task, tasks, on_progress)
        if [(each.after, each.upto) for each in written] != [tuple(task.range) for task in tasks]:
            raise StoreError("Spark lost a task's answer", where=self.lake.name, next="Run it again")
        return written

    def _ranges(self, whole: Range) -> list[Range]:
        seqs = whole.upto - whole.after
        found = split(whole, max(os.cpu_count() or 2, -(-seqs // TASK_SEQS)), TASK_SEQS_MIN)
        return found or [whole]

    # --- state ------------------------------------------------------------------------------------------------------

    def _derived(self) -> list[Table]:
        """Derived tables but silver, as far as they are there."""
        known = [QUARANTINE, EXPLICIT_IDS, *(f"gold/{name}" for name in GOLD_BY_DAY)]
        names = [name for name in self.lake.tables() if name in known or name.startswith("typed/")]
        return [self.lake.table(name) for name in names]

    def _spark_for(self, seqs: int) -> Spark:
        if self._spark is None:
            self._progress.step("starting Spark")
            self._spark = self._opened.enter_context(self._start_spark(seqs < SHORT_RUN_SEQS))
        return self._spark

    def _open_position(self, start: int) -> Position:
        if self._position is None:
            position = Position.open(self.log, self.lake.subscription, (), start=start)
            self._position = self._opened.enter_context(position)
        return self._position

    def _check_not_taken_over(self) -> None:
        """Raise ConflictError if another run has taken over. Without a lock, as on an object store, a run that begins
        takes the log's position over; this one then ends before it commits to a table that the other may have
        emptied."""
        try:
            self._open_position(self.lake.last_seq).renew()
        except LeaseLostError as exc:
            raise ConflictError(
                "another run has taken over meanwhile",
                where=self.lake.name,
                next="Run again: it continues from what the tables have",
            ) from exc


def _files(written: Sequence[TaskResult], table: str) -> list[DataFile]:
    return [file for each in written for file in each.files.get(table, ())]


def bind(lake: Lake, log: str) -> tuple[int, int | None]:
    """Make sure that the lake is this log's, and that neither was put back to an earlier state; returns the log's last
    seq, and the lake's position in it, if it has one."""
    backend = backend_of(log)
    with closing(backend.open().store) as store:  # brings an older log up to date
        bronze = lake.bind(log_identity(log), backend.name)
        taken = bronze.transaction()
        with store.read() as reader:
            last_seq = reader.last_seq()
            record = reader.subscription(lake.subscription)
            floor = 0 if record is None else record.window.floor
            lost = reader.pruned(taken + 1, floor) if floor > taken else []
    if last_seq < taken:
        raise InvalidOptionError(
            f"the log ends at seq {last_seq}, and the lake has everything up to {taken}",
            where=backend.name,
            next="A log from a backup? Its new messages would get seqs that the lake has: begin another lake",
        )
    if lost:
        raise InvalidOptionError(
            f"the lake has everything up to seq {taken}, but its position in the log is {floor}, and retention deleted "
            "some of what is between",
            where=lake.name,
            next="Restore the newer tables; or, to continue without them, headwater subscriptions rm "
            f"{backend.name} {lake.subscription}",
        )
    return last_seq, None if record is None else floor
