"""A table of the lake: a Delta table, its snapshots, and how a commit is made.

A commit is bound to the snapshot that its writer planned on: delta-rs is allowed no retry, so a table that has changed
since refuses it. Each commit carries an app transaction, the table's watermark: the last seq of its job. On a local
disk data files are synced before the commit names them, and the entry of the commit after it.
"""

from __future__ import annotations

import datetime as dt
import re
import uuid
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, PostCommitHookProperties, Transaction
from deltalake.exceptions import CommitFailedError, DeltaError, TableNotFoundError
from deltalake.transaction import AddAction, RemoveAction

from headwater.errors import ConflictError, CorruptError, InvalidOptionError, StoreError
from headwater.files import sync_file
from headwater.formats import iso
from headwater.pipeline.storage import (
    DataFile,
    Storage,
    TableWriter,
    read_rows,
    write_error,
    write_errors_translated,
)
from headwater.ports.clock import SystemClock

APP = "headwater"
LOG = "_delta_log"
RETENTION_DAYS = 7
"""How long a replaced file and the log's entries stay: so far back goes time travel."""
CHECKPOINT_COMMITS = 50
COMMIT_ID = "headwater.commit"
JOB, AFTER, UPTO, ROWS = "headwater.job", "headwater.after", "headwater.upto", "headwater.rows"
"""In the metadata of a commit, for the history: its job, its seqs, and how many rows it added."""
_PROPERTIES = {
    "delta.logRetentionDuration": f"interval {RETENTION_DAYS} days",
    "delta.deletedFileRetentionDuration": f"interval {RETENTION_DAYS} days",
}
_STRUCT = re.compile(r":? *\w+ \{.*")
# Hooks would write a checkpoint that is not synced, and remove the entries that it stands for.
_NO_HOOKS = PostCommitHookProperties(create_checkpoint=False, cleanup_expired_logs=False)


class Table:
    """A snapshot, taken when the object is made. `at` is a version, or a time."""

    def __init__(self, storage: Storage, name: str, at: int | dt.datetime | None = None) -> None:
        self.storage, self.name = storage, name
        self._delta: DeltaTable | None = None
        try:
            version = at if isinstance(at, int) else None
            found = DeltaTable(storage.uri(name), version=version, storage_options=storage.options)
            self._delta = _as_of(found, at) if isinstance(at, dt.datetime) else found
        except TableNotFoundError:
            pass
        except InvalidOptionError:  # which is a ValueError too
            raise
        except (DeltaError, OSError, ValueError) as exc:
            if not storage.is_local and "Generic" in str(exc):
                raise StoreError(
                    f"the object store does not answer ({_first_line(exc)})",
                    where=storage.root,
                    next="Check the bucket and the environment: AWS_ENDPOINT_URL, AWS_REGION, credentials",
                ) from exc
            raise CorruptError(
                f"the table cannot be read ({_first_line(exc)})",
                where=storage.uri(name),
                next="headwater pipeline audit shows what is wrong; headwater pipeline run renames a torn log entry",
            ) from exc
        # Kept, for delta-rs moves its own object on with some of the commits that are made through it.
        self.version = -1 if self._delta is None else self._delta.version()

    @property
    def exists(self) -> bool:
        return self._delta is not None

    @property
    def delta(self) -> DeltaTable:
        if self._delta is None:
            raise StoreError("there is no such table", where=self.storage.uri(self.name))
        return self._delta

    @property
    def schema(self) -> pa.Schema:
        return pa.schema(self.delta.schema().to_arrow())

    @property
    def properties(self) -> dict[str, str]:
        return {} if self._delta is None else dict(self._delta.metadata().configuration)

    @property
    def id(self) -> str:
        return str(self.delta.metadata().id)

    def transaction(self, key: str = "") -> int:
        """The version of the table's last app transaction of this key."""
        return 0 if self._delta is None else self._delta.transaction_version(_app(self.name, key)) or 0

    def metadata(self, key: str) -> str | None:
        """What the newest commit that has this key noted under it."""
        return next((str(each[key]) for each in self.history() if key in each), None)

    @cached_property
    def files(self) -> list[DataFile]:
        """The data files, in the order of their seqs."""
        if self._delta is None:
            return []
        actions = pa.table(self._delta.get_add_actions(flatten=True))
        found = [
            DataFile(
                row["path"],
                row["size_bytes"],
                row["num_records"] or 0,
                row.get("min.seq") or 0,
                row.get("max.seq") or 0,
                None if row.get("partition.day") is None else str(row["partition.day"]),
            )
            for row in actions.to_pylist()
        ]
        return sorted(found, key=lambda file: (file.seq_from, file.path))

    @property
    def rows(self) -> int:
        return sum(file.rows for file in self.files)

    @property
    def bytes(self) -> int:
        return sum(file.size for file in self.files)

    def read(
        self,
        schema: pa.Schema | None = None,
        *,
        columns: Sequence[str] | None = None,
        days: Collection[str] | None = None,
    ) -> pa.Table:
        """Rows without Spark, for small tables; `schema` orders and fills the columns."""
        if schema is None:
            schema = self.schema
        if columns is not None:
            schema = pa.schema([schema.field(name) for name in columns])
        wanted = sorted(
            (file for file in self.files if days is None or file.day in days), key=lambda file: file.day or ""
        )
        return pa.concat_tables([schema.empty_table(), *(self.read_file(file, schema) for file in wanted)])

    def read_file(self, file: DataFile, schema: pa.Schema) -> pa.Table:
        parts = read_rows(self.storage, f"{self.name}/{file.path}", schema, file.day)
        return pa.concat_tables([schema.empty_table(), *parts])

    def is_intact(self, file: DataFile) -> bool | None:
        """Whether a file is as it was written, by its size and the digest in its name; None if it is gone. Another
        engine may have merged and named files of a derived table, but never of bronze."""
        path = f"{self.name}/{file.path}"
        try:
            size = self.storage.size(path)
            if size is None:
                return None
            is_named = file.sha256 is not None or not self.name.startswith("bronze/")
            return is_named and size == file.size and file.sha256 in (None, self.storage.digest(path))
        except OSError:
            return False

    # --- writing ----------------------------------------------------------------------------------------------------

    def append(self, rows: pa.Table, *, transaction: int) -> Table:
        """Add rows of a small table, without Spark. A clock that was put back does not move the transaction back."""
        transaction = max(transaction, self.transaction())
        return self.commit(self._written(rows), transaction=transaction, schema=rows.schema)

    def replace(
        self,
        rows: pa.Table,
        *,
        transaction: int,
        days: Collection[str] | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> bool:
        """Put rows in the place of the whole table, or of some of its days. False, and no commit, if they are there."""
        old = [file for file in self.files if days is None or file.day in days]
        if self.exists and rows.equals(self.read(rows.schema, days=days)):
            return False
        transaction = max(transaction, self.transaction())
        self.commit(self._written(rows), remove=old, transaction=transaction, metadata=metadata, schema=rows.schema)
        return True

    def _written(self, rows: pa.Table) -> list[DataFile]:
        with TableWriter(self.storage, self.name, by_day="day" in rows.schema.names) as writer:
            writer.write(rows.combine_chunks())
            return writer.finish()

    def commit(
        self,
        add: Sequence[DataFile],
        *,
        transaction: int | None,
        remove: Sequence[DataFile] = (),
        counters: Mapping[str, int] | None = None,
        metadata: Mapping[str, str] | None = None,
        schema: pa.Schema | None = None,
        data_change: bool = True,
    ) -> Table:
        """Let files take part in the table, and others no more, in one step; returns the snapshot after it. `schema`
        makes the table if it is not there, and adds the columns that it lacks."""
        table = self if schema is None else self.ensure(schema)
        # delta-rs takes a lower transaction; and `ensure` returns a newer snapshot than the one that was planned on.
        before = self.transaction()
        if (transaction is not None and transaction < before) or table.transaction() != before:
            raise self.conflict()
        table._check_files(add, remove)
        now_ms = SystemClock().now_ms()
        actions: list[AddAction | RemoveAction] = [
            AddAction(file.path, file.size, _partition(file), now_ms, data_change, file.stats) for file in add
        ]
        actions += [RemoveAction(file.path, data_change, now_ms, file.size, _partition(file)) for file in remove]
        keys = {**({} if transaction is None else {"": transaction}), **(counters or {})}
        commit_id = uuid.uuid4().hex
        properties = CommitProperties(
            custom_metadata={COMMIT_ID: commit_id, ROWS: str(sum(file.rows for file in add)), **(metadata or {})},
            max_commit_retries=0,
            app_transactions=[Transaction(_app(self.name, key), version) for key, version in keys.items()],
        )
        table.storage.sync(f"{self.name}/{file.path}" for file in add)
        table.sync_entry()  # a killed run may have left it to the page cache, and this commit stands on it
        try:
            table.delta.create_write_transaction(
                actions,
                "append",
                table.schema,
                list(table.delta.metadata().partition_columns),
                commit_properties=properties,
                post_commithook_properties=_NO_HOOKS,
            )
        except (CommitFailedError, DeltaError, OSError) as exc:
            after = Table(self.storage, self.name)
            mine = [each["version"] for each in after.delta.history() if each.get(COMMIT_ID) == commit_id]
            if not mine:  # an answer that was lost is no failure
                if after.version > table.version:
                    raise self.conflict() from exc
                raise write_error(exc, self.storage.root) or StoreError(
                    f"the commit to {self.name} failed ({_first_line(exc)})",
                    where=self.storage.root,
                    next="Run again: it continues from what the table has",
                ) from exc
        return self._after_commit()

    def conflict(self) -> ConflictError:
        return ConflictError(
            f"another run has changed the table {self.name} meanwhile",
            where=self.storage.root,
            next="Run again: it continues from what the table has",
        )

    def ensure(self, schema: pa.Schema) -> Table:
        """The table, made if need be, with at least these columns."""
        if self._delta is None:
            by_day = "day" in schema.names
            with write_errors_translated(self.storage.root):
                if self.storage.is_local:
                    Path(self.storage.root, self.name).mkdir(parents=True, exist_ok=True)
                DeltaTable.create(
                    self.storage.uri(self.name),
                    schema,
                    partition_by=["day"] if by_day else None,
                    configuration=_PROPERTIES,
                    storage_options=self.storage.options,
                    mode="ignore",  # another process may have been quicker
                    post_commithook_properties=_NO_HOOKS,
                )
            return self._after_commit()
        have = self.schema
        missing = [field for field in schema if field.name not in have.names]
        for field in schema:
            if field.name in have.names and have.field(field.name).type != field.type:
                raise StoreError(
                    f"the column {field.name} of {self.name} is {have.field(field.name).type}, not {field.type}",
                    where=self.storage.root,
                    next="headwater pipeline run --rebuild rebuilds the derived tables",
                )
        if not missing:
            return self
        from deltalake import Schema

        self.delta.alter.add_columns(Schema.from_arrow(pa.schema(missing)).fields, post_commithook_properties=_NO_HOOKS)
        return self._after_commit()

    def reset(self, schema: pa.Schema | None = None, *, counters: Mapping[str, int] | None = None) -> None:
        """Empty a derived table; its watermark is 0 again. Its columns become those of `schema`."""
        if self._delta is None:
            return
        keys = {"": 0, **(counters or {})}
        DeltaTable.create(
            self.storage.uri(self.name),
            schema or self.schema,
            partition_by=list(self.delta.metadata().partition_columns) or None,
            configuration=_PROPERTIES,
            storage_options=self.storage.options,
            mode="overwrite",
            commit_properties=CommitProperties(
                app_transactions=[Transaction(_app(self.name, key), version) for key, version in keys.items()],
                max_commit_retries=0,
            ),
            post_commithook_properties=_NO_HOOKS,
        )
        self._after_commit()

    def set_properties(self, properties: Mapping[str, str]) -> Table:
        """`create` refuses names that Delta does not know; `alter` takes them."""
        self.delta.alter.set_table_properties(
            dict(properties), raise_if_not_exists=False, post_commithook_properties=_NO_HOOKS
        )
        return self._after_commit()

    def _after_commit(self) -> Table:
        after = Table(self.storage, self.name)
        made = range(self.version + 1, after.version + 1)
        after.storage.sync(entry_path(self.name, version) for version in made)
        return after

    def sync_entry(self) -> None:
        """Make the newest commit durable, whichever process made it."""
        if self.exists:
            self.storage.sync([entry_path(self.name, self.version)])

    def _check_files(self, add: Sequence[DataFile], remove: Sequence[DataFile]) -> None:
        """delta-rs takes files that are not there, and paths that the table has or has not."""
        known = {file.path for file in self.files}
        for file in add:
            if file.path in known or self.storage.size(f"{self.name}/{file.path}") != file.size:
                raise StoreError(
                    f"{self.name}/{file.path} is not as it was written", where=self.storage.root, next="Run it again"
                )
            known.add(file.path)
        for file in remove:
            if file.path not in known:
                raise StoreError(f"{file.path} is not in {self.name}", where=self.storage.root, next="Run it again")

    # --- maintenance ------------------------------------------------------------------------------------------------

    def checkpoint_if_due(self) -> bool:
        """A checkpoint every so many commits, synced; then the entries that it stands for may expire."""
        try:
            last = last_checkpoint(self.storage, self.name) or 0
        except StoreError:  # torn by a power loss: made again
            last = -CHECKPOINT_COMMITS
        if self.version - last < CHECKPOINT_COMMITS:
            return False
        self.delta.create_checkpoint()
        written = [name for name in self.storage.names(f"{self.name}/{LOG}") if "checkpoint" in name]
        self.storage.sync(f"{self.name}/{LOG}/{name}" for name in written)
        self.delta.cleanup_metadata()
        return True

    def vacuum(self, hours: int, *, dry_run: bool = False) -> list[str]:
        """Remove files that no version of the last hours has; returns their paths."""
        found = self.delta.vacuum(
            retention_hours=hours,
            dry_run=dry_run,
            enforce_retention_duration=False,
            full=True,  # also what was written and never committed
            post_commithook_properties=_NO_HOOKS,
        )
        self._after_commit()  # vacuum notes itself in the log
        return found

    def history(self, limit: int | None = None) -> list[dict[str, Any]]:
        """Newest first."""
        return [] if self._delta is None else list(self._delta.history(limit))


def entry_path(name: str, version: int) -> str:
    return f"{name}/{LOG}/{version:020d}.json"


def entry_versions(storage: Storage, name: str) -> list[int]:
    """The versions whose entries are in a table's log, ascending."""
    names = storage.names(f"{name}/{LOG}")
    return [int(each[:-5]) for each in names if each.endswith(".json") and each[:-5].isdigit()]


def last_checkpoint(storage: Storage, name: str) -> int | None:
    """The version of a table's last checkpoint. Raises StoreError if the file that names it is damaged."""
    if "_last_checkpoint" not in storage.names(f"{name}/{LOG}"):
        return None
    try:
        return int(msgspec.json.decode(storage.read(f"{name}/{LOG}/_last_checkpoint"))["version"])
    except (msgspec.DecodeError, KeyError, TypeError, ValueError) as exc:
        raise StoreError("_last_checkpoint is damaged") from exc


def is_whole_entry(content: bytes) -> bool:
    """Whether an entry is lines of JSON objects, the last of them complete."""
    try:
        for line in content.splitlines():
            msgspec.json.decode(line, type=dict[str, Any])
    except msgspec.DecodeError:
        return False
    return content.endswith((b"}", b"}\n"))


def rename_torn_entries(storage: Storage, name: str) -> None:
    """Rename the newest entries of a table that are empty or cut off, as after a power loss. They were not synced, so
    the log's position has not moved on by them, and the run makes them again."""
    for version in reversed(entry_versions(storage, name) if storage.is_local else []):
        path = Path(storage.root, entry_path(name, version))
        if is_whole_entry(path.read_bytes()):
            return
        path.rename(path.with_name(f"{path.name}.torn"))
        sync_file(path.parent)


def _as_of(table: DeltaTable, at: dt.datetime) -> DeltaTable | None:
    """The table at a time, by the times in its commits; None before its first. delta-rs itself uses the times of the
    files, which a copy of a lake changes, and version 0 for an earlier time."""
    at_ms = round(at.timestamp() * 1000)
    history = table.history()
    version = next((each["version"] for each in history if each["timestamp"] <= at_ms), None)
    if version is not None:
        table.load_as_version(version)
        return table
    if history and history[-1]["version"] > 0:
        raise InvalidOptionError(
            f"the table no longer knows what it was at {iso(at_ms)}",
            where=table.table_uri,
            next=f"The oldest it knows is of {iso(history[-1]['timestamp'])}",
        )
    return None


def _app(name: str, key: str) -> str:
    return f"{APP}:{name}.{key}" if key else f"{APP}:{name}"


def _partition(file: DataFile) -> dict[str, str | None]:
    return {} if file.day is None else {"day": file.day}


def _first_line(exc: BaseException) -> str:
    """The first line of an error, without the structs that delta-rs shows."""
    line = next((line.strip() for line in str(exc).splitlines() if line.strip()), type(exc).__name__)
    return _STRUCT.sub("", line)
