"""A lake: the Delta tables of one log's history, in a folder or at a url."""

from __future__ import annotations

import bisect
import datetime as dt
import errno
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.fs as pafs

from headwater.errors import CorruptError, InvalidOptionError, LockedError, ReadOnlyError, StoreError
from headwater.formats import iso, time_ms
from headwater.pipeline.columns import AUDITS_SCHEMA, GOLD_SCHEMAS, LAKE_SCHEMA
from headwater.pipeline.delta import AFTER, JOB, LOG, RETENTION_DAYS, ROWS, UPTO, Table, rename_torn_entries
from headwater.pipeline.storage import DataFile, Storage, TableWriter, read_rows, write_errors_translated
from headwater.server.lake import STATUS_FILE
from headwater.version import install_hint

BRONZE = "bronze/messages"
SILVER = "silver/messages"
QUARANTINE = "silver/quarantine"
EXPLICIT_IDS = "silver/explicit_ids"
AUDITS = "audits"
REPLAYS = "replays"
GOLD_BY_DAY = ("volume", "traffic", "replication")
LAYERS = ("bronze", "silver", "typed", "gold", "metrics")

LOG_PROPERTY = "headwater.log"
LOG_NAME_PROPERTY = "headwater.log.name"
TYPES = "types"  # its folder of JSON Schemas, which may be there before the lake
LOCK = "lock.db"
PROBE = "if-none-match"
VACUUM_HOURS_MIN = 24
AUDITS_KEPT = 100
SMALL_FILE_BYTES = 16 * 1024 * 1024
SMALL_FILES_MAX = 32
"""So many small files of a day, or of a table without days, become one."""
_PAGES = ("report.html", "audit.html", STATUS_FILE)

Moment = int | dt.datetime


class Lake:
    def __init__(self, storage: Storage) -> None:
        self.storage = storage
        self.name = storage.root

    @classmethod
    def open(cls, where: str | Path, *, create: bool = False) -> Lake:
        storage = Storage(where)
        if storage.is_local:
            _check_folder(Path(storage.root), create=create)
        lake = cls(storage)
        if not create and not lake._is_table(BRONZE):
            raise InvalidOptionError("there is no lake here", where=lake.name, next="headwater pipeline run makes one")
        return lake

    # --- tables -----------------------------------------------------------------------------------------------------

    def table(self, name: str, at: Moment | None = None) -> Table:
        """The table as it is now, or was at a version or a time."""
        return Table(self.storage, name, at)

    def tables(self) -> list[str]:
        """Names of all tables that are there."""
        found = [name for name in (AUDITS, REPLAYS) if self._is_table(name)]
        for layer in LAYERS:
            folders = [each for each in self.storage.entries(layer) if each.type == pafs.FileType.Directory]
            names = [f"{layer}/{each.base_name}" for each in folders]
            found += [name for name in names if self._is_table(name)]
        return sorted(found)

    def _is_table(self, name: str) -> bool:
        return bool(self.storage.names(f"{name}/{LOG}"))

    def moment(self, at: Moment) -> dt.datetime:
        """The time that a version (of bronze) or a time means for every table. A version lasts until the next one, so
        that what is derived from it is there."""
        history = self.table(BRONZE).history()
        times = {each["version"]: committed_at(each) for each in history}
        oldest = min(times.values())
        if isinstance(at, int):
            if at not in times:
                versions = f"{min(times)} to {max(times)}"
                raise InvalidOptionError(
                    f"bronze has no version {at}", where="--at", next=f"It has versions {versions}"
                )
            if at + 1 not in times:
                return dt.datetime.now(dt.UTC)
            return max(times[at], times[at + 1] - dt.timedelta(milliseconds=1))
        if at < oldest:
            raise InvalidOptionError(
                f"the lake has no state of {_time_text(at)}",
                where="--at",
                next=f"The oldest it can show is {_time_text(oldest)}",
            )
        return at

    def table_at(self, name: str, at: dt.datetime | None) -> Table:
        """The table as it is now, or was at a time, if all its files of that time are still there."""
        table = self.table(name, at)
        if at is None or not table.exists or self._has_files(table):
            return table
        history = {each["version"]: each for each in self.table(name).history()}
        later = range(table.version + 1, max(history) + 1)
        # Vacuum removes what only older versions have, so the versions that can be read are the newest ones.
        readable = bisect.bisect_left(later, True, key=lambda version: self._has_files(self.table(name, version)))
        if readable == len(later):
            raise CorruptError(
                f"files of {name} are gone", where=self.name, next="headwater pipeline audit shows which"
            )
        raise InvalidOptionError(
            f"vacuum has removed files that {name} had at {_time_text(at)}",
            where="--at",
            next=f"The oldest that can be read of it is {_time_text(committed_at(history[later[readable]]))}",
        )

    def _has_files(self, table: Table) -> bool:
        have = self.storage.paths(table.name)
        return all(f"{table.name}/{file.path}" in have for file in table.files)

    # --- the log it belongs to --------------------------------------------------------------------------------------

    def bind(self, identity: tuple[int, int], log_name: str) -> Table:
        """Bronze, made if need be. A lake belongs to one log for good, wherever that is moved: the seqs of two logs
        must not mix."""
        bronze = self.table(BRONZE).ensure(LAKE_SCHEMA)
        wanted = {LOG_PROPERTY: _identity_text(identity), LOG_NAME_PROPERTY: log_name}
        if LOG_PROPERTY not in bronze.properties:
            if self.storage.root.startswith(("s3://", "s3a://")):
                self._check_conditional_puts()
            return bronze.set_properties(wanted)
        self.check_log(identity, bronze)
        return bronze if bronze.properties.get(LOG_NAME_PROPERTY) == log_name else bronze.set_properties(wanted)

    def check_log(self, identity: tuple[int, int], bronze: Table | None = None) -> None:
        bronze = bronze or self.table(BRONZE)
        if bronze.properties.get(LOG_PROPERTY) != _identity_text(identity):
            raise InvalidOptionError(
                "this lake belongs to another log",
                where=self.name,
                next="Name the log it was made from, or another folder for the lake",
            )

    def _check_conditional_puts(self) -> None:
        """A store that ignores the condition of a put lets the commits of two runs replace each other. delta-rs lists
        the entries before it writes one, so it would show only in a race; a second put of the same name tells."""
        try:
            import obstore
        except ImportError as exc:
            raise InvalidOptionError(
                f"a lake on S3 needs a package that is not installed ({exc})",
                where=self.name,
                next=install_hint("s3", "spark"),
            ) from exc
        store = obstore.store.from_url(self.name.replace("s3a://", "s3://"))
        try:
            for _ in range(2):
                obstore.put(store, PROBE, b"", mode="create", use_multipart=False)
        except obstore.exceptions.AlreadyExistsError:
            return
        except (obstore.exceptions.BaseError, OSError) as exc:
            why = next(iter(str(exc).splitlines()), type(exc).__name__)
            raise StoreError(f"the object store does not answer as it should ({why})", where=self.name) from exc
        raise InvalidOptionError(
            "this object store ignores conditional puts, so two runs could overwrite each other's commits",
            where=self.name,
            next="Use a store that honours If-None-Match, as S3 does",
        )

    @property
    def log_name(self) -> str | None:
        return self.table(BRONZE).properties.get(LOG_NAME_PROPERTY)

    @property
    def subscription(self) -> str:
        """The lake's position in the log is the subscription of this name."""
        return f"lake:{self.table(BRONZE).id[:13]}"

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Advisory: without it, a second run on this machine has its commits refused. It ends with its process."""
        if not self.storage.is_local:
            yield
            return
        import apsw

        folder = Path(self.storage.root)
        with write_errors_translated(self.name):
            folder.mkdir(parents=True, exist_ok=True)
            for each in (folder, *(folder / layer for layer in LAYERS if (folder / layer).is_dir())):
                if not os.access(each, os.W_OK):  # before a run begins, not in its midst
                    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(each))
        try:
            connection = apsw.Connection(str(folder / LOCK))
        except apsw.CantOpenError as exc:
            raise ReadOnlyError(
                "the lake's lock cannot be made", where=self.name, next="Get write access to the folder"
            ) from exc
        try:
            connection.execute("BEGIN EXCLUSIVE")
            with write_errors_translated(self.name):
                for name in self.tables():
                    rename_torn_entries(self.storage, name)
                yield
        except apsw.BusyError as exc:
            raise LockedError(
                "another run is writing this lake",
                where=self.name,
                next="Wait for it, or stop it; reading needs no lock",
            ) from exc
        finally:
            connection.close()

    # --- audits -----------------------------------------------------------------------------------------------------

    def last_audit(self) -> dict[str, Any] | None:
        documents = self.table(AUDITS).read(AUDITS_SCHEMA).sort_by("at")["document"].to_pylist()
        found: dict[str, Any] | None = msgspec.json.decode(documents[-1]) if documents else None
        return found

    def add_audit(self, document: dict[str, Any], at: dt.datetime) -> None:
        table = self.table(AUDITS)
        new = pa.table({"at": [at], "document": [msgspec.json.encode(document).decode()]}, schema=AUDITS_SCHEMA)
        kept = pa.concat_tables([table.read(AUDITS_SCHEMA), new]).sort_by("at")
        table.replace(kept.slice(max(0, kept.num_rows - AUDITS_KEPT)), transaction=int(at.timestamp() * 1000))

    # --- keeping ----------------------------------------------------------------------------------------------------

    def maintain(self) -> None:
        """Tidy up after a run: many small files become one; where a checkpoint is due, what no version needs is removed
        too."""
        for name in self.tables():
            if crowded_days(self.table(name).files):
                self.optimize(name)
            if self.table(name).checkpoint_if_due():
                self.table(name).vacuum(RETENTION_DAYS * 24)

    def optimize(self, name: str, *, everything: bool = False) -> int:
        """Merges small files of a table; returns by how many their number shrinks. Not by delta-rs, which checks no
        digest, syncs nothing, and needs half as much memory again."""
        table = self.table(name)
        before = len(table.files)
        for group in _groups(table.files, everything=everything):
            table = _rewrite(table, group)
        return before - len(table.files)

    def vacuum(self, hours: int = RETENTION_DAYS * 24, *, dry_run: bool = False) -> tuple[int, int]:
        """Remove files that no version of a table within the last hours has, with what killed runs left; returns their
        number and bytes."""
        files = size = 0
        for name in self.tables():
            sizes = self.storage.paths(name)
            found = self.table(name).vacuum(hours, dry_run=dry_run)
            files += len(found)
            size += sum(sizes.get(f"{name}/{path}", 0) for path in found)
        return files, size

    def history(self, name: str, limit: int | None = None) -> list[dict[str, Any]]:
        """Versions of a table, newest first: when, by which operation and job, with how many new rows of which seqs."""
        numbers = {"rows": ROWS, "after": AFTER, "upto": UPTO}
        return [
            {
                "version": each["version"],
                "at": iso(each["timestamp"]),
                "operation": each["operation"],
                "job": each.get(JOB),
                **{word: int(each[key]) if key in each else None for word, key in numbers.items()},
            }
            for each in self.table(name).history(limit)
        ]

    @property
    def last_seq(self) -> int:
        """Bronze has every message up to it."""
        return self.table(BRONZE).transaction()

    def status(self) -> dict[str, Any]:
        bronze = self.table(BRONZE)
        tables = [self.table(name) for name in self.tables()]
        return {
            "lake": self.name,
            "log": self.log_name,
            "last_seq": bronze.transaction(),
            "derived_to": self.table(SILVER).transaction(),
            "last_commit": _last_commit(bronze),
            "audit": self.last_audit(),
            "tables": [
                {
                    "table": table.name,
                    "rows": table.rows,
                    "files": len(table.files),
                    "bytes": table.bytes,
                    "version": table.version,
                }
                for table in tables
            ],
        }

    def gold(self) -> dict[str, list[dict[str, Any]]]:
        """Rows of all reports."""
        return {name: self.table(f"gold/{name}").read(schema).to_pylist() for name, schema in GOLD_SCHEMAS.items()}


def committed_at(commit: Mapping[str, Any]) -> dt.datetime:
    """When a commit of a history was made."""
    return dt.datetime.fromtimestamp(commit["timestamp"] / 1000, dt.UTC)


def _time_text(at: dt.datetime) -> str:
    return iso(time_ms(at))


def _last_commit(bronze: Table) -> dict[str, Any] | None:
    """The newest commit that ingested messages."""
    for each in bronze.history(20):
        if UPTO in each:
            return {"rows": int(each[ROWS]), "at_ms": each["timestamp"], "version": each["version"]}
    return None


def _check_folder(folder: Path, *, create: bool) -> None:
    """A vacuum removes files that no table names: they must not be others'."""
    if not folder.exists():
        return
    if not folder.is_dir():
        raise InvalidOptionError("this is a file, and a lake is a folder", where=str(folder), next="Name a new folder")
    if (folder / "manifest.db").exists():
        raise InvalidOptionError(
            "this lake is of the kind before Delta tables",
            where=str(folder),
            next="Make a new one from the log: headwater pipeline run with another folder as --lake",
        )
    ours = {*LAYERS, AUDITS, REPLAYS, TYPES, *_PAGES}
    others = sorted(path.name for path in folder.iterdir() if path.name not in ours and not path.name.startswith(LOCK))
    if create and others and not (folder / BRONZE / LOG).exists():
        raise InvalidOptionError(
            f"this folder is no lake, and it holds other things, like {others[0]}",
            where=str(folder),
            next="Name a new or an empty folder",
        )


def _identity_text(identity: tuple[int, int]) -> str:
    return f"{identity[0]}-{identity[1]}"


# --- merging files -----------------------------------------------------------------------------------------------


def crowded_days(files: Sequence[DataFile]) -> list[str | None]:
    small: dict[str | None, int] = {}
    for file in files:
        if file.size < SMALL_FILE_BYTES:
            small[file.day] = small.get(file.day, 0) + 1
    return [day for day, count in small.items() if count >= SMALL_FILES_MAX]


def _groups(files: Sequence[DataFile], *, everything: bool) -> Iterator[list[DataFile]]:
    """Small files of a day in seq order, as many as fit into one large file."""
    days = {file.day for file in files} if everything else set(crowded_days(files))
    for day in sorted(days, key=str):
        group: list[DataFile] = []
        for file in files:
            if file.day != day or file.size >= SMALL_FILE_BYTES * 4:
                continue
            if group and sum(each.size for each in group) + file.size > SMALL_FILE_BYTES * 8:
                if len(group) > 1:
                    yield group
                group = []
            group.append(file)
        if len(group) > 1:
            yield group


def _rewrite(table: Table, group: Sequence[DataFile]) -> Table:
    """Replaces several files by one, after a check of each: a copy of a damaged file would seem intact."""
    storage = table.storage
    with TableWriter(storage, table.name, by_day=group[0].day is not None) as writer:
        for file in group:
            path = f"{table.name}/{file.path}"
            if not table.is_intact(file):
                raise CorruptError(
                    "the file is not as it was written",
                    where=storage.uri(path),
                    next="Restore it from a backup; headwater pipeline audit shows more",
                )
            for rows in read_rows(storage, path, table.schema, file.day):
                writer.write(rows)
        written = writer.finish()
    if sum(file.rows for file in written) != sum(file.rows for file in group):
        raise CorruptError("the files hold other rows than the table lists", where=storage.uri(table.name))
    return table.commit(written, remove=group, transaction=None, metadata={JOB: "optimize"}, data_change=False)
