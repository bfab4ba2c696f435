"""The session protocol of replicas: paths, text frames `CONFIG={…}`, `MESSAGE=…`, `ABORT=…`, and their limits.

Pages move in binary frames, which are the streams of two `sqlite3_rsync` processes."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct, field

from headwater.errors import (
    CorruptError,
    DiskFullError,
    HeadwaterError,
    OverloadedError,
    TooLargeError,
    UnauthorizedError,
)

PREFIX = "/sapi/"
CONFIG, MESSAGE, ABORT = "CONFIG=", "MESSAGE=", "ABORT="
CLAIM, CHANGED, RELEASE, LATEST = "SQLRSYNC_CLAIM", "SQLRSYNC_CHANGED", "SQLRSYNC_RELEASE", "LATEST_VERSION"

ABORT_ERRORS: dict[str, type[HeadwaterError]] = {
    "TOO_LARGE": TooLargeError,
    "DISK_FULL": DiskFullError,
    "CORRUPT": CorruptError,
    "BUSY": OverloadedError,
    "UNAUTHORIZED": UnauthorizedError,
}
"""By the code of an ABORT. Besides, there are VERSION_CONFLICT, and FAILED for any other error."""

MESSAGE_CHARS_MAX = 4096
PUSH_ID_CHARS_MAX = 128
PAGES_MAX = 2**32 - 2  # of a SQLite database

SessionKind = Literal["push", "pull", "subscribe"]
ReportKind = Literal["network", "partial", "conflict", "local"]
"""Of an error report of a client."""

Number = Annotated[int, Meta(ge=0, lt=2**53)]
PushID = Annotated[str, Meta(min_length=1, max_length=PUSH_ID_CHARS_MAX)]
ReplicaID = Annotated[str, Meta(max_length=200)]
DbHash = Annotated[str, Meta(pattern="^[0-9a-f]{40}$")]
ServerHash = Annotated[str, Meta(max_length=200)]
"""A hash as a server sends it: the client only compares it."""
PageSize = Literal[512, 1024, 2048, 4096, 8192, 16384, 32768, 65536]
Seconds = Annotated[float, Meta(ge=0, le=1e9)]


# --- push -----------------------------------------------------------------------------------------------------------


class PushConfig(Struct, frozen=True, rename="camel"):
    """The client's first CONFIG: the base version, and the size of the database."""

    push_id: PushID = field(name="pushID")
    page_size: PageSize
    pages: Annotated[int, Meta(ge=1, le=PAGES_MAX)]
    base: Number | Literal["latest"]
    last_push_id: PushID | None = field(name="lastPushID", default=None)
    base_hash: DbHash | None = None
    """Of the base, as the client remembers it."""
    dry: bool = False


class PushReady(Struct, rename="camel"):
    """The server's answer, before the pages."""

    replica_id: ReplicaID | None = field(name="replicaID", default=None)
    base: Number = 0
    ready: bool = False


class PushComplete(Struct, frozen=True):
    """The client has sent all pages. `dry`: the server discards them."""

    complete: bool
    dbhash: DbHash | None = None
    dry: bool = False


class PushCommitted(Struct, rename="camel"):
    """The server has made a version of them, or found nothing new."""

    version: Number = field(name="committedVersionID")
    is_new: bool = False
    changed_pages: Number = 0
    replica_id: ReplicaID | None = field(name="replicaID", default=None)


# --- pull -----------------------------------------------------------------------------------------------------------


class PullConfig(Struct, frozen=True):
    """`dry` is refused: a client makes a dry run by pulling into a private file."""

    dry: bool = False


class PullOffer(Struct, rename="camel"):
    """The server's answer, before the pages."""

    version: Number
    size: Number
    page_size: PageSize
    pages: Number
    replica_id: ReplicaID | None = field(name="replicaID", default=None)
    dbhash: ServerHash | None = None


class PullComplete(Struct, frozen=True):
    """The client has written all pages."""

    complete: bool


# --- subscribe ------------------------------------------------------------------------------------------------------


class SubscribeConfig(Struct, frozen=True, rename="camel"):
    coordinate: bool = False
    wait_idle: Seconds | None = None
    min_interval: Seconds | None = None
    max_interval: Seconds | None = None

    @property
    def has_timers(self) -> bool:
        return any(span is not None for span in (self.wait_idle, self.min_interval, self.max_interval))


class SubscribeInfo(Struct, rename="camel"):
    """The server's answer."""

    replica_id: ReplicaID | None = field(name="replicaID", default=None)
    key_type: str = "none"
    warning: str | None = None


# --- plain HTTP -----------------------------------------------------------------------------------------------------


class NewestVersion(Struct, rename="camel"):
    """The first entry of a list of versions, as far as a push needs it."""

    version: Number
    replica_id: ReplicaID = field(name="replicaID")
    dbhash: ServerHash | None = None


class ReportBody(Struct, frozen=True):
    """An error report of a client. Other fields are kept with it."""

    kind: ReportKind
    error: str
