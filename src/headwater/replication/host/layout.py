"""Where things lie in a data directory. Names that clients choose are no part of any path.

catalogue.db                      what there is
serving.lock                      held by the one server of this directory
removed-<replica id>/             a replica on its way out
<replica id>/new                  marks a replica without an accepted version (removed with the first one), or one that
                                  is being removed
<replica id>/<n>.db               its newest version, whole
<replica id>/<n>.pages            an older version, as a delta against the next
<replica id>/scratch-<uuid>.db    a push under way, and `.pages` its delta
<replica id>/reading-<uuid>/      a version as somebody reads it; `lock` in it is held as long as they do
"""

from __future__ import annotations

import os
import re
import secrets
import uuid

from headwater.errors import InvalidOption
from headwater.replication.host.catalogue import CATALOGUE

BESIDE_A_LOG = "-replicas"  # behind the name of the log that a server serves
SERVING_LOCK = "serving.lock"
READING = "reading-"
REMOVED = "removed-"
NEW = "new"
_ID_BYTES = 8
_ID = re.compile(r"[0-9a-f]{16}")


def new_replica_id() -> str:
    return secrets.token_hex(_ID_BYTES)


def is_replica_id(text: str) -> bool:
    return _ID.fullmatch(text) is not None


class Layout:
    def __init__(self, directory: str) -> None:
        self.directory = os.path.abspath(directory)
        self.serving_lock = os.path.join(self.directory, SERVING_LOCK)

    def home(self, replica_id: str) -> str:
        return os.path.join(self.directory, replica_id)

    def removed(self, replica_id: str) -> str:
        return os.path.join(self.directory, f"{REMOVED}{replica_id}")

    def new_mark(self, replica_id: str) -> str:
        return os.path.join(self.directory, replica_id, NEW)

    def head(self, replica_id: str, number: int) -> str:
        return os.path.join(self.directory, replica_id, f"{number}.db")

    def delta(self, replica_id: str, number: int) -> str:
        return os.path.join(self.directory, replica_id, f"{number}.pages")

    def new_scratch(self, replica_id: str) -> str:
        return os.path.join(self.directory, replica_id, f"scratch-{uuid.uuid4().hex}.db")

    def new_reading(self, replica_id: str) -> str:
        return os.path.join(self.directory, replica_id, f"{READING}{uuid.uuid4().hex}")


def refuse_foreign(directory: str) -> None:
    """A data directory is swept of what its catalogue does not know: that must not be somebody else's."""
    if not os.path.exists(directory) or os.path.exists(os.path.join(directory, CATALOGUE)):
        return
    if not os.path.isdir(directory):
        raise InvalidOption("this is a file, and replicas are kept in a directory", where=directory, next=_NEXT)
    others = sorted(name for name in os.listdir(directory) if name != SERVING_LOCK and not name.startswith(CATALOGUE))
    if others:
        raise InvalidOption(
            f"this directory has no replicas, and it holds other things, like {others[0]}", where=directory, next=_NEXT
        )


_NEXT = "Name a new or an empty directory"
