"""What all sessions share: the shelf, the threads that work on it, and who is to hear of new versions."""

from __future__ import annotations

from typing import NamedTuple

from headwater.errors import ReplicationFailed
from headwater.replication.host.announcing import Announcer
from headwater.replication.host.figures import Figures
from headwater.replication.host.gathering import Gatherings
from headwater.replication.host.room import Room
from headwater.replication.host.shelf import Shelf
from headwater.replication.threads import Threads
from headwater.replication.tools import End


class Hosting(NamedTuple):
    shelf: Shelf
    threads: Threads
    announcer: Announcer
    gatherings: Gatherings
    figures: Figures
    room: Room
    bytes_max: int
    """Of one database."""
    idle_s: float
    """That a client may be silent."""


def end_is_well(end: End) -> None:
    """Raises what our end complained about, as soon as it does: it prints whatever the client lets it, without end."""
    if complaint := end.complaint():
        raise ReplicationFailed(complaint)
