"""What is said in the texts of a session: `CONFIG={…}`, both ways, each with its limits."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct, field

from headwater.message.times import iso
from headwater.replication.host.pages import PAGES_MAX
from headwater.replication.host.records import Replica, Version
from headwater.replication.host.scratch import PUSH_ID_CHARS_MAX
from headwater.replication.host.visit import Abort
from headwater.replication.names import CONFIG, ReportKind

NUMBER_MAX = 2**53

Number = Annotated[int, Meta(ge=0, le=NUMBER_MAX)]
PushId = Annotated[str, Meta(min_length=1, max_length=PUSH_ID_CHARS_MAX)]
DbHash = Annotated[str, Meta(pattern="^[0-9a-f]{40}$")]
PageSize = Literal[512, 1024, 2048, 4096, 8192, 16384, 32768, 65536]
Seconds = Annotated[float, Meta(ge=0, le=1e9)]
T = TypeVar("T")


class PushConfig(Struct, frozen=True, rename="camel"):
    """What comes: from which version it was made, and how large it is."""

    push_id: PushId = field(name="pushID")
    page_size: PageSize
    pages: Annotated[int, Meta(ge=1, le=PAGES_MAX)]
    base: Number | Literal["latest"]
    last_push_id: PushId | None = field(name="lastPushID", default=None)
    base_hash: DbHash | None = None
    """Of the base, as the client remembers it."""
    dry: bool = False


class PushComplete(Struct, frozen=True):
    """The client's end went well."""

    complete: bool
    dbhash: DbHash | None = None
    dry: bool = False


class PullConfig(Struct, frozen=True):
    dry: bool = False


class PullComplete(Struct, frozen=True):
    complete: bool


class SubscribeConfig(Struct, frozen=True, rename="camel"):
    coordinate: bool = False
    wait_idle: Seconds | None = None
    min_interval: Seconds | None = None
    max_interval: Seconds | None = None

    @property
    def has_timers(self) -> bool:
        return any(span is not None for span in (self.wait_idle, self.min_interval, self.max_interval))


class ReportBody(Struct, frozen=True):
    """What went wrong at a client. What else it tells is kept with it."""

    kind: ReportKind
    error: str


def config_of(text: str | bytes | None, kind: type[T]) -> T:
    """A frame that has to be a CONFIG of this kind."""
    if not isinstance(text, str) or not text.startswith(CONFIG):
        raise Abort("FAILED", f"CONFIG={{…}} has to come here, and {_what_came(text)} came")
    try:
        return msgspec.json.decode(text[len(CONFIG) :], type=kind)
    except (msgspec.MsgspecError, RecursionError) as exc:
        raise Abort("FAILED", f"CONFIG is not as expected: {exc}") from None


def _what_came(frame: str | bytes | None) -> str:
    if frame is None:
        return "nothing more"
    return "a binary frame" if isinstance(frame, bytes) else repr(frame[:20])


def config(**words: Any) -> str:
    return CONFIG + msgspec.json.encode(words).decode()


def document_of(replica: Replica, version: Version) -> dict[str, Any]:
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
