"""The truth about a data directory: which replicas and versions there are, in one small SQLite file.

Files are whole and on disk before the catalogue names them, and it names them in one transaction. Whatever is killed
when, a version is either accepted or not there. A server and commands may use it at the same time.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import apsw
import msgspec

from headwater.errors import Corrupt, InvalidOption, NewerSchema, TooLarge, VersionConflict
from headwater.replication.host.pages import Delta
from headwater.replication.host.records import Key, KeyKind, Listed, Replica, Report, Totals, Unannounced, Version
from headwater.replication.names import ReplicaName
from headwater.stores.named_queries import load, text_of
from headwater.stores.sqlite.connection import connect, keep_journal, refuse_unsafe_sqlite, translated

CATALOGUE = "catalogue.db"
APPLICATION_ID = 0x48575250  # "HWRP"
SCHEMA_VERSION = 1
BUSY_TIMEOUT_MS = 10_000
REPLICAS_MAX = 1_000
VERSIONS_PAGE = 1_000
KEYS_MAX = 100
REPORTS_KEPT = 1_000
REPORTS_BYTES_KEPT = 1024 * 1024  # of a replica's, for anybody who may pull may report
REPORT_BYTES_MAX = 64 * 1024
NUMBER_MAX = 2**62

_PUT_BACK = "Put it back from a backup; the files of the replicas are as they were"
_COLUMNS_GIVEN = Version.__struct_fields__.index("delta_bytes")  # what comes later is about the delta
_REPLICA_COLUMNS = len(Replica.__struct_fields__) + 1  # its name has two
_PACKAGE = "headwater.replication.host"
_SCHEMA = text_of(_PACKAGE, "catalogue.sql")
_SQL = load(_PACKAGE)


class Catalogue:
    """May be used from several threads: they take turns on one connection."""

    def __init__(self, directory: str, *, create: bool) -> None:
        refuse_unsafe_sqlite()
        self._path = os.path.join(directory, CATALOGUE)
        self._lock = threading.RLock()
        if create:
            with suppress(FileExistsError):  # for this user alone; SQLite gives the files beside it the same rights
                os.close(os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
        elif not os.path.exists(self._path):
            raise self._nothing_here()
        with translated(self._path):
            self._connection = self._connected(create)
        try:
            self._prepare(create)
        except BaseException:
            self._connection.close()
            raise

    def _connected(self, create: bool) -> apsw.Connection:
        try:
            connection = connect(self._path, durability="full", busy_timeout_ms=BUSY_TIMEOUT_MS)
            keep_journal(connection)
            return connection
        except apsw.IOError:
            if create:
                raise
        # A full disk has no room for the index of its log. One who is alone needs none; beside a server it is there.
        connection = apsw.Connection(self._path, flags=apsw.SQLITE_OPEN_READWRITE)
        connection.set_busy_timeout(BUSY_TIMEOUT_MS)
        connection.execute("PRAGMA locking_mode = EXCLUSIVE; PRAGMA foreign_keys = ON; PRAGMA trusted_schema = OFF")
        return connection

    def close(self) -> None:
        with self._lock:
            self._connection.close()

    def _prepare(self, create: bool) -> None:
        """Only one process at a time may create: a server, which holds the lock of the directory."""
        with translated(self._path):
            if not self._is_ours():
                if not create:
                    raise self._nothing_here()
                self._refuse_orphans()
                self._connection.execute("PRAGMA journal_mode = WAL")
                with self._transaction():
                    self._connection.execute(_SCHEMA)
                    self._connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
                    self._connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
                # So that the file says what it is even to those who get it without its log.
                self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
            version = self._connection.pragma("user_version")
        if version > SCHEMA_VERSION:
            raise NewerSchema(
                f"the catalogue has schema {version}, this Headwater knows up to {SCHEMA_VERSION}",
                where=self._path,
                next="Upgrade: pip install -U headwater",
            )

    def _nothing_here(self) -> InvalidOption:
        return InvalidOption("there are no replicas here", where=self._path, next="headwater serve makes some")

    def _refuse_orphans(self) -> None:
        """An empty catalogue beside replicas has lost its content. A new one would disown them."""
        with os.scandir(os.path.dirname(self._path)) as entries:
            if any(entry.is_dir() for entry in entries):
                raise Corrupt("it is empty, and replicas lie beside it", where=self._path, next=_PUT_BACK)

    def check(self) -> None:
        """Raises Corrupt if it is damaged: then what it does not name may be there all the same."""
        found = [line for (line,) in self._query("integrity")]
        if found != ["ok"]:
            raise Corrupt("; ".join(found).replace("\n", " "), where=self._path, next=_PUT_BACK)

    def _is_ours(self) -> bool:
        """False if the file is new."""
        if self._connection.pragma("application_id") == APPLICATION_ID:
            return True
        if self._query("tables") != [(0,)]:
            raise InvalidOption("this is no catalogue of replicas", where=self._path, next="Name another directory")
        return False

    # --- replicas ---------------------------------------------------------------------------------------------------

    def find(self, name: ReplicaName) -> Replica | None:
        return next(map(_replica, self._query("replica_named", (name.namespace, name.name))), None)

    def find_id(self, replica_id: str) -> Replica | None:
        return next(map(_replica, self._query("replica_with_id", (replica_id,))), None)

    def replicas(self) -> list[Replica]:
        return [_replica(row) for row in self._query("replicas")]

    def listing(self, namespace: str | None, after: ReplicaName | None, limit: int | None) -> list[Listed]:
        """By name; `limit` None: all."""
        behind = ("", "") if after is None else (after.namespace, after.name)
        rows = self._query("listing", (*behind, namespace, -1 if limit is None else limit))
        return [Listed(_replica(row[:_REPLICA_COLUMNS]), _version_or_none(row[_REPLICA_COLUMNS:])) for row in rows]

    def totals(self) -> Totals:
        (found,) = self._query("totals")
        return Totals(*found)

    def refuse_one_more(self, replicas_max: int) -> None:
        ((count,),) = self._query("count_replicas")
        if count >= replicas_max:
            raise TooLarge(
                f"there are {count:,} replicas and the limit is {replicas_max:,}",
                where=self._path,
                next="Remove one that nobody uses, or raise max_replicas",
            )

    def add(self, replica_id: str, name: ReplicaName, now_ms: int, replicas_max: int = REPLICAS_MAX) -> Replica:
        """A new replica, or the one of this name that is there."""
        with self._transaction():
            if (found := self.find(name)) is not None:
                return found
            self.refuse_one_more(replicas_max)
            self._query("add_replica", (replica_id, name.namespace, name.name, now_ms))
            return Replica(replica_id, name, now_ms, 0)

    def note_change(self, name: ReplicaName, now_ms: int) -> None:
        self._query("note_change", (name.namespace, name.name, now_ms))

    def remove(self, replica_id: str) -> None:
        self._query("remove_replica", (replica_id,))

    # --- versions ---------------------------------------------------------------------------------------------------

    def version(self, replica_id: str, number: int) -> Version | None:
        return next(map(_version, self._query("one_version", (replica_id, number))), None)

    def numbers(self, replica_id: str) -> list[int]:
        return [number for (number,) in self._query("numbers", (replica_id,))]

    def versions(self, replica_id: str, below: int | None = None, limit: int = VERSIONS_PAGE) -> list[Version]:
        bindings = (replica_id, NUMBER_MAX if below is None else below, min(limit, VERSIONS_PAGE))
        return [_version(row) for row in self._query("versions", bindings)]

    def versions_from(self, replica_id: str, number: int) -> list[Version]:
        return [_version(row) for row in self._query("versions_from", (replica_id, number))]

    def accept(
        self,
        replica: Replica,
        version: Version,
        delta: Delta | None,
        *,
        with_replica: bool,
        replicas_max: int = REPLICAS_MAX,
    ) -> None:
        """The point of no return: the version is the newest from now on, if its base still is. `with_replica`: this
        push brings the replica too; otherwise one that was removed meanwhile does not come back."""
        with self._transaction():
            if with_replica:
                self.add(replica.id, replica.name, replica.created_ms, replicas_max)
            if not self._query("set_newest", (replica.id, version.base, version.number)):
                raise self.conflict(replica.name)
            if delta is not None:
                self._query("set_delta", (replica.id, version.base, delta.bytes, delta.sha256))
            self._query("add_version", (replica.id, *msgspec.structs.astuple(version)[:_COLUMNS_GIVEN]))

    def conflict(self, name: ReplicaName) -> VersionConflict:
        found = self.find(name)
        newest = found.newest if found is not None else 0
        why = f"version {newest} is the newest" if newest else "it has no version yet"
        return VersionConflict(
            f"pushed from another version than the newest: {why}",
            where=name.path,
            next="Pull first, or push to @latest to replace it with yours",
            newest=newest,
        )

    def remove_versions(self, replica_id: str, upto: int) -> None:
        self._query("remove_versions", (replica_id, upto))

    def unannounced(self) -> list[Unannounced]:
        found = []
        for replica_id, number in self._query("unannounced"):
            replica, version = self.find_id(replica_id), self.version(replica_id, number)
            if replica is not None and version is not None:
                found.append(Unannounced(replica, version))
        return found

    def announced(self, replica_id: str, number: int) -> None:
        self._query("announced", (replica_id, number))

    # --- keys and reports -------------------------------------------------------------------------------------------

    def add_key(self, replica: Replica, key: Key, sha256: str) -> None:
        with self._transaction():
            if (count := self.count_keys(replica.id)) >= KEYS_MAX:
                raise TooLarge(
                    f"it has {count} keys and the limit is {KEYS_MAX}",
                    where=replica.name.path,
                    next="Revoke those that nobody uses",
                )
            self._query("set_keyed", (replica.id,))
            self._query("add_key", (replica.id, key.id, key.kind, sha256, key.label, key.created_ms))

    def keys(self, replica_id: str) -> list[Key]:
        return [Key(*row) for row in self._query("keys", (replica_id,))]

    def key(self, replica_id: str, key_id: str) -> tuple[KeyKind, str] | None:
        return next(iter(self._query("one_key", (replica_id, key_id))), None)

    def count_keys(self, replica_id: str) -> int:
        ((count,),) = self._query("count_keys", (replica_id,))
        return int(count)

    def is_keyed(self, replica_id: str) -> bool:
        return self._query("keyed", (replica_id,)) == [(1,)]

    def remove_key(self, replica_id: str, key_id: str) -> bool:
        return bool(self._query("remove_key", (replica_id, key_id)))

    def add_report(self, replica_id: str, report: Report) -> None:
        if (size := len(report.document.encode())) > REPORT_BYTES_MAX:
            raise TooLarge(f"the report has {size:,} bytes and the limit is {REPORT_BYTES_MAX:,}")
        with self._transaction():
            self._query("add_report", (replica_id, report.at_ms, report.client, report.document))
            self._query("trim_reports", (replica_id, REPORTS_KEPT, REPORTS_BYTES_KEPT))

    def reports(self, replica_id: str, limit: int = REPORTS_KEPT) -> list[Report]:
        return [Report(*row) for row in self._query("reports", (replica_id, limit))]

    # --- inside -----------------------------------------------------------------------------------------------------

    def _query(self, name: str, bindings: Sequence[Any] = ()) -> list[Any]:
        with self._lock, translated(self._path):
            return self._connection.execute(_SQL[name], bindings).fetchall()

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        with self._lock, translated(self._path):
            if self._connection.in_transaction:  # part of a larger one
                yield
                return
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._connection.execute("COMMIT")
            except BaseException:
                if self._connection.in_transaction:  # some errors make SQLite roll back by itself
                    self._connection.execute("ROLLBACK")
                raise


def _replica(row: Sequence[Any]) -> Replica:
    id, namespace, name, *rest = row
    return Replica(id, ReplicaName(namespace, name), *rest)


def _version_or_none(row: Sequence[Any]) -> Version | None:
    return None if row[0] is None else _version(row)


def _version(row: Sequence[Any]) -> Version:
    *columns, announced = row
    return msgspec.structs.replace(Version(*columns), announced=bool(announced))
