"""The catalogue of a data directory: its replicas, versions, keys and client reports, in one small SQLite file.

Files are whole and on disk before the catalogue names them, and it names them in one transaction. Whatever is killed
at any time, a version is either accepted or does not exist. A server and commands may use it at the same time.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import secrets
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Literal, NamedTuple

import apsw
import msgspec

from headwater.errors import (
    CorruptError,
    InvalidOptionError,
    NewerSchemaError,
    TooLargeError,
    UnknownReplicaError,
    VersionConflictError,
)
from headwater.formats import iso
from headwater.ports.clock import Clock
from headwater.replication.host.disk import CATALOGUE, new_replica_id
from headwater.replication.names import ReplicaName
from headwater.stores.sql import load, text_of
from headwater.stores.sqlite.connection import connect, keep_journal, refuse_unsafe_sqlite, translated
from headwater.version import UPGRADE

APPLICATION_ID = 0x48575250  # "HWRP"
SCHEMA_VERSION = 1
BUSY_TIMEOUT_MS = 10_000
CLIENT_CHARS_MAX = 300
REPLICAS_MAX = 1_000
VERSIONS_PAGE = 1_000
KEYS_MAX = 100
REPORTS_KEPT = 1_000
REPORTS_BYTES_KEPT = 1024 * 1024  # of a replica: every client that may pull may report
REPORT_BYTES_MAX = 64 * 1024
NUMBER_MAX = 2**62
KEY_SECRET_BYTES = 32  # 256 random bits need no slow hash: they cannot be guessed, however fast each try is
KEY_ID_BYTES = 6
LABEL_CHARS_MAX = 100

KeyKind = Literal["push", "pull"]


class Replica(msgspec.Struct, frozen=True):
    """`newest` is the number of its newest version, 0 as long as there is none."""

    id: str
    name: ReplicaName
    created_ms: int
    newest: int
    versions: int = 0
    stored_bytes: int = 0
    changed_ms: int | None = None
    """When a client last announced changes to push."""


class Version(msgspec.Struct, frozen=True):
    """One accepted push. `wire_bytes` moved over the network for it, `size` is that of the database; `stored_bytes` is
    its size on disk: the whole file for the newest, a delta for the others."""

    number: int
    base: int
    push_id: str
    message: str
    client: str
    at_ms: int
    size: int
    page_size: int
    pages: int
    changed_pages: int
    wire_bytes: int
    dbhash: str | None
    sha256: str
    delta_bytes: int | None = None
    delta_sha256: str | None = None
    announced: bool = False

    @property
    def stored_bytes(self) -> int:
        return self.size if self.delta_bytes is None else self.delta_bytes


class Accepted(NamedTuple):
    """`is_new` is False when the pushed database is the newest version already."""

    version: Version
    is_new: bool


class ReplicaListing(NamedTuple):
    """A replica and its newest version, if it has one."""

    replica: Replica
    newest: Version | None


class Totals(NamedTuple):
    """The totals of all replicas."""

    replicas: int
    versions: int
    stored_bytes: int


class Key(msgspec.Struct, frozen=True):
    """A key without its secret."""

    id: str
    kind: KeyKind
    label: str
    created_ms: int


class ClientReport(msgspec.Struct, frozen=True):
    """An error report of a client, as JSON."""

    at_ms: int
    client: str
    document: str


_PUT_BACK = "Put it back from a backup; the files of the replicas are as they were"
_COLUMNS_GIVEN = Version.__struct_fields__.index("delta_bytes")  # the others describe the delta
_REPLICA_COLUMNS = len(Replica.__struct_fields__) + 1  # its name takes two
_PACKAGE = "headwater.replication.host"
_SCHEMA = text_of(_PACKAGE, "catalogue.sql")
_SQL = load(text_of(_PACKAGE, "queries.sql"))
_KEY = re.compile(r"hw(push|pull)_([0-9a-f]{12})_([0-9a-f]{64})")
_NO_HASH = "0" * 64  # compared for unknown ids, so that these take as long to refuse as known ones


class Catalogue:
    """Safe to use from several threads: they take turns on one connection. Blocks."""

    def __init__(self, directory: str, clock: Clock, *, create: bool, replicas_max: int = REPLICAS_MAX) -> None:
        refuse_unsafe_sqlite()
        self._clock = clock
        self._replicas_max = replicas_max
        self._path = os.path.join(directory, CATALOGUE)
        self._lock = threading.RLock()
        if create:
            with suppress(FileExistsError):  # mode 0600; SQLite gives the files next to it the same
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
        # A full disk has no space for the index of the log. A single process needs none; beside a server it exists.
        connection = apsw.Connection(self._path, flags=apsw.SQLITE_OPEN_READWRITE)
        connection.set_busy_timeout(BUSY_TIMEOUT_MS)
        connection.execute("PRAGMA locking_mode = EXCLUSIVE; PRAGMA foreign_keys = ON; PRAGMA trusted_schema = OFF")
        return connection

    def close(self) -> None:
        with self._lock:
            self._connection.close()

    def _prepare(self, create: bool) -> None:
        """`create`: by one process at a time, a server that holds the lock of the directory."""
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
                # So that the file is recognised even without its log.
                self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
            version = self._connection.pragma("user_version")
        if version > SCHEMA_VERSION:
            raise NewerSchemaError(
                f"the catalogue has schema {version}, this Headwater knows up to {SCHEMA_VERSION}",
                where=self._path,
                next=UPGRADE,
            )

    def _nothing_here(self) -> InvalidOptionError:
        return InvalidOptionError("there are no replicas here", where=self._path, next="headwater serve makes some")

    def _refuse_orphans(self) -> None:
        """An empty catalogue next to replicas has lost its content; a new one would abandon them."""
        with os.scandir(os.path.dirname(self._path)) as entries:
            if any(entry.is_dir() for entry in entries):
                raise CorruptError("it is empty, and there are replicas next to it", where=self._path, next=_PUT_BACK)

    def check(self) -> None:
        """Raises CorruptError if it is damaged: then files that it does not name may belong to versions."""
        found = [line for (line,) in self._query("integrity")]
        if found != ["ok"]:
            raise CorruptError("; ".join(found).replace("\n", " "), where=self._path, next=_PUT_BACK)

    def _is_ours(self) -> bool:
        """False if the file is new."""
        if self._connection.pragma("application_id") == APPLICATION_ID:
            return True
        if self._query("tables") != [(0,)]:
            raise InvalidOptionError(
                "this is no catalogue of replicas", where=self._path, next="Name another directory"
            )
        return False

    # --- replicas ---------------------------------------------------------------------------------------------------

    def find(self, name: ReplicaName) -> Replica | None:
        return next(map(_replica, self._query("replica_named", (name.namespace, name.name))), None)

    def find_id(self, replica_id: str) -> Replica | None:
        return next(map(_replica, self._query("replica_with_id", (replica_id,))), None)

    def get(self, name: ReplicaName) -> Replica:
        if (found := self.find(name)) is None:
            raise UnknownReplicaError(
                "there is no such replica", where=name.path, next="`headwater replica ls` lists them"
            )
        return found

    def replicas(self) -> list[Replica]:
        return [_replica(row) for row in self._query("replicas")]

    def listing(
        self, *, namespace: str | None = None, after: ReplicaName | None = None, limit: int | None = None
    ) -> list[ReplicaListing]:
        """The replicas by name; all if `limit` is None."""
        behind = ("", "") if after is None else (after.namespace, after.name)
        rows = self._query("listing", (*behind, namespace, -1 if limit is None else limit))
        return [
            ReplicaListing(_replica(row[:_REPLICA_COLUMNS]), _version_or_none(row[_REPLICA_COLUMNS:])) for row in rows
        ]

    def totals(self) -> Totals:
        (found,) = self._query("totals")
        return Totals(*found)

    def refuse_one_more(self) -> None:
        ((count,),) = self._query("count_replicas")
        if count >= self._replicas_max:
            raise TooLargeError(
                f"there are {count:,} replicas and the limit is {self._replicas_max:,}",
                where=self._path,
                next="Remove an unused one, or raise max_replicas",
            )

    def new_replica(self, name: ReplicaName) -> Replica:
        """A replica that is not in the catalogue yet: `commit_version` adds it with its first version."""
        return Replica(new_replica_id(), name, self._clock.now_ms(), 0)

    def create(self, name: ReplicaName) -> Replica:
        """A replica without versions, so that it can have keys; or the existing one."""
        return self._add(self.new_replica(name))

    def _add(self, replica: Replica) -> Replica:
        """Add a new replica. Returns it, or the one of its name that is there."""
        with self._transaction():
            if (found := self.find(replica.name)) is not None:
                return found
            self.refuse_one_more()
            self._query("add_replica", (replica.id, replica.name.namespace, replica.name.name, replica.created_ms))
            return replica

    def record_change(self, name: ReplicaName) -> None:
        """A client announced changes to push; an unknown replica is ignored."""
        self._query("record_change", (name.namespace, name.name, self._clock.now_ms()))

    def remove(self, replica_id: str) -> None:
        self._query("remove_replica", (replica_id,))

    # --- versions ---------------------------------------------------------------------------------------------------

    def version(self, replica_id: str, number: int) -> Version | None:
        return next(map(_version, self._query("one_version", (replica_id, number))), None)

    def get_version(self, name: ReplicaName, number: int) -> Version:
        if (found := self.version(self.get(name).id, number)) is None:
            raise UnknownReplicaError(
                f"it has no version {number}", where=name.path, next="`headwater replica log` lists them"
            )
        return found

    def numbers(self, name: ReplicaName) -> list[int]:
        """The numbers of its versions, ascending."""
        return [number for (number,) in self._query("numbers", (self.get(name).id,))]

    def versions(self, name: ReplicaName, *, below: int | None = None, limit: int = VERSIONS_PAGE) -> list[Version]:
        """Newest first, at most VERSIONS_PAGE."""
        bindings = (self.get(name).id, NUMBER_MAX if below is None else below, min(limit, VERSIONS_PAGE))
        return [_version(row) for row in self._query("versions", bindings)]

    def versions_from(self, replica_id: str, number: int) -> list[Version]:
        return [_version(row) for row in self._query("versions_from", (replica_id, number))]

    def commit_version(
        self,
        replica: Replica,
        version: Version,
        delta: tuple[int, str] | None,
        *,
        with_replica: bool,
    ) -> None:
        """Make the version the newest, if its base still is: the commit point. `delta`: size and SHA-256 of the file
        that leads back to the base. `with_replica`: this push creates the replica; otherwise one that was removed
        meanwhile is not created again."""
        with self._transaction():
            if with_replica:
                self._add(replica)
            if not self._query("set_newest", (replica.id, version.base, version.number)):
                raise self.conflict(replica.name)
            if delta is not None:
                self._query("set_delta", (replica.id, version.base, *delta))
            self._query("add_version", (replica.id, *msgspec.structs.astuple(version)[:_COLUMNS_GIVEN]))

    def conflict(self, name: ReplicaName) -> VersionConflictError:
        found = self.find(name)
        newest = found.newest if found is not None else 0
        why = f"version {newest} is the newest" if newest else "it has no version yet"
        return VersionConflictError(
            f"pushed from another version than the newest: {why}",
            where=name.path,
            next="Pull first, or push to @latest to replace it with yours",
            newest=newest,
        )

    def remove_versions(self, replica_id: str, upto: int) -> None:
        self._query("remove_versions", (replica_id, upto))

    def unannounced(self) -> list[tuple[Replica, Version]]:
        rows = self._query("unannounced")
        return [(_replica(row[:_REPLICA_COLUMNS]), _version(row[_REPLICA_COLUMNS:])) for row in rows]

    def announced(self, replica_id: str, number: int) -> None:
        self._query("announced", (replica_id, number))

    # --- keys and reports -------------------------------------------------------------------------------------------

    def create_key(self, name: ReplicaName, kind: KeyKind, label: str = "") -> str:
        """The text of a new key, `hwpush_<id>_<secret>` or `hwpull_<id>_<secret>`, which cannot be read again: only the
        hash of its secret is kept. Creates the replica if needed."""
        if len(label) > LABEL_CHARS_MAX or not label.isprintable():
            raise InvalidOptionError(f"a label is one line of up to {LABEL_CHARS_MAX} characters that can be shown")
        key_id, secret = secrets.token_hex(KEY_ID_BYTES), secrets.token_hex(KEY_SECRET_BYTES)
        with self._transaction():
            replica = self.create(name)
            ((count,),) = self._query("count_keys", (replica.id,))
            if count >= KEYS_MAX:
                raise TooLargeError(
                    f"it has {count} keys and the limit is {KEYS_MAX}",
                    where=replica.name.path,
                    next="Revoke those that are not used",
                )
            self._query("set_keyed", (replica.id,))
            self._query("add_key", (replica.id, key_id, kind, _sha256(secret), label, self._clock.now_ms()))
        return f"hw{kind}_{key_id}_{secret}"

    def key_kind(self, replica_id: str, text: str) -> KeyKind | None:
        """The kind of this key of the replica; None for an unknown or revoked one."""
        if (found := _KEY.fullmatch(text)) is None:
            return None
        named_kind, key_id, secret = found.groups()
        kind, sha256 = next(iter(self._query("one_key", (replica_id, key_id))), (None, _NO_HASH))
        is_same = hmac.compare_digest(_sha256(secret), sha256)
        return kind if is_same and kind == named_kind else None

    def needs_key(self, replica_id: str) -> bool:
        """Whether the replica has a key, or had one: revoking the last one must not open it to every client."""
        return self._query("keyed", (replica_id,)) == [(1,)]

    def keys(self, name: ReplicaName) -> list[Key]:
        return [Key(*row) for row in self._query("keys", (self.get(name).id,))]

    def remove_key(self, name: ReplicaName, key_id: str) -> bool:
        return bool(self._query("remove_key", (self.get(name).id, key_id)))

    def add_report(self, replica_id: str, client: str, document: str) -> None:
        """`document`: JSON."""
        if (size := len(document.encode())) > REPORT_BYTES_MAX:
            raise TooLargeError(f"the report has {size:,} bytes and the limit is {REPORT_BYTES_MAX:,}")
        with self._transaction():
            self._query("add_report", (replica_id, self._clock.now_ms(), client[:CLIENT_CHARS_MAX], document))
            self._query("trim_reports", (replica_id, REPORTS_KEPT, REPORTS_BYTES_KEPT))

    def reports(self, name: ReplicaName, limit: int = REPORTS_KEPT) -> list[ClientReport]:
        """Newest first."""
        return [ClientReport(*row) for row in self._query("reports", (self.get(name).id, limit))]

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


def key_id_of(text: str) -> str | None:
    """The id in the text of a key; None if it is no such text."""
    found = _KEY.fullmatch(text)
    return found[2] if found else None


def is_key(text: str) -> bool:
    """Whether it has the form of a key, rather than that of a server's token."""
    return _KEY.fullmatch(text) is not None


def _sha256(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()


def version_document(replica: Replica, version: Version) -> dict[str, Any]:
    """A version as it is announced and listed."""
    return {
        "replica": replica.name.path,
        "replicaID": replica.id,
        "version": version.number,
        "base": version.base,
        "message": version.message,
        "client": version.client,
        "at": iso(version.at_ms),
        "size": version.size,
        "bytes": version.wire_bytes,
        "pages": version.pages,
        "pageSize": version.page_size,
        "changedPages": version.changed_pages,
        "dbhash": version.dbhash,
    }
