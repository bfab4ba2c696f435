"""The truth about a lake: which files make up which table, and how far each has come, in one small SQLite file.

Files are written and on disk before the manifest names them, and it names them in one transaction together with the
mark that says how far the log has been taken in. Whatever is killed when, a file is either wholly in or not there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib.resources import files as package_files
from pathlib import Path
from typing import Any

import apsw
import msgspec

from headwater.errors import InvalidOption, NewerSchema, NotALog, StoreError
from headwater.stores.sqlite.connection import translated

MANIFEST = "manifest.db"
SCHEMA_VERSION = 1
BUSY_TIMEOUT_MS = 30_000
AUDITS_KEPT = 100
_NOT_IN_THE_WAY = ("types", "lock.db")


def refuse_foreign_folder(folder: Path) -> None:
    """A lake sweeps up data files that its manifest does not know: they must not be somebody else's."""
    if not folder.exists() or (folder / MANIFEST).exists():
        return
    if not folder.is_dir():
        raise InvalidOption("this is a file, and a lake is a folder", where=str(folder), next="Name a new folder")
    others = sorted(path.name for path in folder.iterdir() if not path.name.startswith(_NOT_IN_THE_WAY))
    if others:
        raise InvalidOption(
            f"this folder is no lake, and it holds other things, like {others[0]}",
            where=str(folder),
            next="Name a new or an empty folder",
        )


class LakeFile(msgspec.Struct, frozen=True):
    """One Parquet file. `day` and `prefix` are its place where the table is laid out by them; the seq range is 0 where
    the table does not go by seqs."""

    path: str
    table: str
    rows: int
    bytes: int
    sha256: str
    seq_from: int = 0
    seq_to: int = 0
    day: str | None = None
    prefix: str | None = None


class Batch(msgspec.Struct, frozen=True):
    """The stretch (after, upto] of the log as it was taken into bronze."""

    after: int
    upto: int
    rows: int
    bytes: int
    files: int
    at_ms: int


Change = tuple[str, Sequence[LakeFile], Sequence[str] | None]
"""A table, its new files, and the days they replace: None replaces the whole table, an empty list nothing."""


class Manifest:
    """Any number of processes may read it; one connection for one thread."""

    def __init__(self, lake: Path, *, create: bool = False) -> None:
        self.path = lake / MANIFEST
        if not create and not self.path.exists():
            raise InvalidOption("there is no lake here", where=str(lake), next="headwater pipeline run makes one")
        refuse_foreign_folder(lake)
        lake.mkdir(parents=True, exist_ok=True)
        with translated(str(self.path)):
            self._connection = apsw.Connection(str(self.path))
        try:
            self._prepare()
        except BaseException:
            self._connection.close()
            raise

    def close(self) -> None:
        self._connection.close()

    def _prepare(self) -> None:
        self._connection.set_busy_timeout(BUSY_TIMEOUT_MS)
        if not self._tables():
            self._query("PRAGMA journal_mode = WAL")
            with self._transaction():
                if not self._tables():  # another process may have been quicker
                    self._connection.execute((package_files(__package__) / "manifest.sql").read_text())
                    self._query("INSERT INTO facts VALUES ('schema_version', ?)", (SCHEMA_VERSION,))
        if "marks" not in self._tables():
            raise NotALog("a SQLite database that is no manifest of a lake", where=str(self.path))
        self._query("PRAGMA synchronous = FULL")
        version = self.fact("schema_version")
        if version is not None and version > SCHEMA_VERSION:
            raise NewerSchema(
                f"the lake has schema {version}, this Headwater knows up to {SCHEMA_VERSION}",
                where=str(self.path),
                next="Upgrade: pip install -U headwater",
            )

    def _tables(self) -> set[str]:
        return {name for (name,) in self._query("SELECT name FROM sqlite_schema WHERE type = 'table'")}

    # --- reading ----------------------------------------------------------------------------------------------------

    def fact(self, name: str) -> Any:
        return next((value for (value,) in self._query("SELECT value FROM facts WHERE name = ?", (name,))), None)

    def mark(self, table: str) -> int:
        return next((seq for (seq,) in self._query('SELECT seq FROM marks WHERE "table" = ?', (table,))), 0)

    def tables(self) -> list[str]:
        return [name for (name,) in self._query('SELECT DISTINCT "table" FROM files ORDER BY 1')]

    def files(self, table: str, after: int = -1) -> list[LakeFile]:
        """The files of a table, in seq order; those with rows above `after`."""
        found = self._query(
            'SELECT path, "table", rows, bytes, sha256, seq_from, seq_to, day, prefix FROM files '
            'WHERE "table" = ? AND seq_to > ? ORDER BY seq_from, path',
            (table, after),
        )
        return [LakeFile(*row) for row in found]

    def dropped(self, before_ms: int) -> list[str]:
        return [path for (path,) in self._query("SELECT path FROM dropped WHERE at < ? ORDER BY 1", (before_ms,))]

    def known_paths(self) -> set[str]:
        """Of everything that a sweep must spare."""
        return {path for (path,) in self._query("SELECT path FROM files UNION SELECT path FROM dropped")}

    def batches(self, limit: int = 20) -> list[Batch]:
        """The last ones, newest first."""
        found = self._query(
            "SELECT after, upto, rows, bytes, files, at FROM batches ORDER BY upto DESC LIMIT ?", (limit,)
        )
        return [Batch(*row) for row in found]

    def prefixes(self, table: str) -> frozenset[str]:
        return frozenset(
            prefix for (prefix,) in self._query('SELECT DISTINCT prefix FROM files WHERE "table" = ?', (table,))
        )

    def batch_totals(self) -> tuple[int, int, int]:
        """How many batches were taken in, how many of them begin where the one before ended, and their rows."""
        ((count, joined, rows),) = self._query(
            "SELECT count(*), sum(after = (SELECT coalesce(max(upto), 0) FROM batches AS b WHERE b.upto < a.upto)), "
            "coalesce(sum(rows), 0) FROM batches AS a"
        )
        return count, joined or 0, rows

    def last_audit(self) -> dict[str, Any] | None:
        for (document,) in self._query("SELECT document FROM audits ORDER BY number DESC LIMIT 1"):
            found: dict[str, Any] = msgspec.json.decode(document)
            return found
        return None

    # --- writing ----------------------------------------------------------------------------------------------------

    def bind_to_log(self, log: str, salt: int, created_ms: int, now_ms: int) -> None:
        """A lake belongs to one log for good, wherever that is moved: the seqs of two logs must not mix."""
        with self._transaction():
            bound = self.fact("log_salt"), self.fact("log_created_at")
            if bound == (None, None):
                facts = {"log_salt": salt, "log_created_at": created_ms, "created_at": now_ms}
                for fact in facts.items():
                    self._query("INSERT INTO facts VALUES (?, ?)", fact)
            else:
                self.refuse_other_log(salt, created_ms)
            self._query("INSERT OR REPLACE INTO facts VALUES ('log', ?)", (log,))

    def begin_run(self, run: str) -> None:
        """From now on only this run may take anything in: what is left of a killed one comes too late."""
        with self._transaction():
            self._query("INSERT OR REPLACE INTO facts VALUES ('run', ?)", (run,))

    def refuse_other_log(self, salt: int, created_ms: int) -> None:
        if (self.fact("log_salt"), self.fact("log_created_at")) != (salt, created_ms):
            raise InvalidOption(
                "this lake belongs to another log",
                where=str(self.path.parent),
                next="Name the log it was made from, or another folder for the lake",
            )

    def take_in(
        self, table: str, after: int, upto: int, new: Sequence[LakeFile], now_ms: int, *, run: str | None = None
    ) -> bool:
        """Publish the files that hold the stretch (after, upto] of the log. False if it was in before: nothing is
        changed then."""
        with self._transaction():
            if run != self.fact("run"):
                raise StoreError("another run has begun since", where=str(self.path), next="Leave it to that one")
            mark = self.mark(table)
            if upto <= mark:
                return False
            if after != mark:
                raise StoreError(
                    f"{table} has everything up to seq {mark}, and what comes now begins after {after}",
                    where=str(self.path),
                    next="Two runs at once, or a manifest from a backup? Run again: it goes on from the manifest",
                )
            self._add(new, now_ms)
            self._set_mark(table, upto)
            counts = sum(file.rows for file in new), sum(file.bytes for file in new), len(new)
            self._query("INSERT INTO batches VALUES (?, ?, ?, ?, ?, ?)", (upto, after, *counts, now_ms))
            return True

    def swap(self, old: Iterable[LakeFile], new: Sequence[LakeFile], now_ms: int) -> None:
        """Let files take the place of others that hold the same rows."""
        with self._transaction():
            self._drop([file.path for file in old], now_ms)
            self._add(new, now_ms)

    def publish(
        self,
        changes: Iterable[Change],
        now_ms: int,
        *,
        marks: dict[str, int] | None = None,
    ) -> None:
        """Several tables and marks in one step."""
        with self._transaction():
            for table, new, days in changes:
                replaced = [file.path for file in self.files(table) if days is None or file.day in days]
                self._drop(replaced, now_ms)
                self._add(new, now_ms)
            for table, seq in (marks or {}).items():
                self._set_mark(table, seq)

    def forget_dropped(self, paths: Iterable[str]) -> None:
        with self._transaction():
            for path in paths:
                self._query("DELETE FROM dropped WHERE path = ?", (path,))

    def add_audit(self, document: dict[str, Any], now_ms: int) -> None:
        with self._transaction():
            text = msgspec.json.encode(document).decode()
            self._query("INSERT INTO audits (at, document) VALUES (?, ?)", (now_ms, text))
            self._query("DELETE FROM audits WHERE number <= (SELECT max(number) FROM audits) - ?", (AUDITS_KEPT,))

    # --- inside -----------------------------------------------------------------------------------------------------

    def _add(self, new: Sequence[LakeFile], now_ms: int) -> None:
        for file in new:
            self._query(
                "INSERT INTO files VALUES "
                "(:path, :table, :day, :prefix, :seq_from, :seq_to, :rows, :bytes, :sha256, :at)",
                {**msgspec.structs.asdict(file), "at": now_ms},
            )

    def _drop(self, paths: Iterable[str], now_ms: int) -> None:
        for path in paths:
            if not self._query("DELETE FROM files WHERE path = ? RETURNING 1", (path,)):
                raise StoreError(f"{path} is not in the lake any more", where=str(self.path), next="Run it again")
            self._query("INSERT INTO dropped VALUES (?, ?)", (path, now_ms))

    def _set_mark(self, table: str, seq: int) -> None:
        self._query("INSERT OR REPLACE INTO marks VALUES (?, ?)", (table, seq))

    def _query(self, sql: str, bindings: Sequence[Any] | dict[str, Any] = ()) -> list[Any]:
        with translated(str(self.path)):
            return self._connection.execute(sql, bindings).fetchall()

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self._query("BEGIN IMMEDIATE")
        try:
            yield
            self._query("COMMIT")
        except BaseException:
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
            raise
