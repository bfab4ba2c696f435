"""What the data directory knows: replicas, their versions and keys, and what clients reported."""

from __future__ import annotations

from typing import Literal, NamedTuple

import msgspec

from headwater.replication.names import ReplicaName

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
    """When a client last said that it has something to push."""


class Version(msgspec.Struct, frozen=True):
    """One accepted push. `wire_bytes` went over the wire for it, `size` is that of the database; `stored_bytes` is what
    it takes on disk: the whole file for the newest, what the next one changed for the others."""

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


class Facts(NamedTuple):
    """What the pusher says about a push that came through whole."""

    message: str = ""
    dbhash: str | None = None
    wire_bytes: int = 0


class Accepted(NamedTuple):
    """`is_new` is False when the pushed database is the newest version already."""

    version: Version
    is_new: bool


class Listed(NamedTuple):
    """A replica and its newest version, if it has one."""

    replica: Replica
    newest: Version | None


class Totals(NamedTuple):
    """Of all replicas."""

    replicas: int
    versions: int
    stored_bytes: int


class Unannounced(NamedTuple):
    replica: Replica
    version: Version


class Key(msgspec.Struct, frozen=True):
    """A key as it may be shown: everything but its secret."""

    id: str
    kind: KeyKind
    label: str
    created_ms: int


class Report(msgspec.Struct, frozen=True):
    """What went wrong at a client, in its own words."""

    at_ms: int
    client: str
    document: str
