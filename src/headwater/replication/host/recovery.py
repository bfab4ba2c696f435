"""What a crash left behind goes. The catalogue is the truth: every file of a replica that it does not name was never
accepted, or is accepted no more. But whole replicas that it does not know stay, for it may be the catalogue that was
lost, or put back from an old backup."""

from __future__ import annotations

import contextlib
import os
import re
from typing import NamedTuple

from headwater.replication.host import disk
from headwater.replication.host.catalogue import Catalogue
from headwater.replication.host.layout import NEW, READING, REMOVED, Layout, is_replica_id
from headwater.replication.host.reading import LOCK
from headwater.replication.host.records import Replica

_VERSION_FILE = re.compile(r"\d+\.(db|pages)")


class Recovered(NamedTuple):
    """`removed` are paths below the data directory; `damaged` says which accepted files are missing or cut short."""

    removed: list[str]
    damaged: list[str]


def recover(layout: Layout, catalogue: Catalogue) -> Recovered:
    """Only for the one server of the directory, before it serves: pushes of another would look like left behind."""
    catalogue.check()
    found = Recovered([], [])
    replicas = {replica.id: replica for replica in catalogue.replicas()}
    with disk.translated(layout.directory):
        for name in sorted(os.listdir(layout.directory)):
            if name in replicas or not is_replica_id(name.removeprefix(REMOVED)):
                continue
            path = os.path.join(layout.directory, name)
            if is_replica_id(name) and _was_accepted(path):
                found.damaged.append(f"{name} has versions and is not in the catalogue; remove it if nobody misses it")
                continue
            disk.remove_tree(path)
            found.removed.append(name)
        for replica in replicas.values():
            _recover_one(layout, catalogue, replica, found)
    return found


def _was_accepted(home: str) -> bool:
    """Whether a version there may have been in a catalogue."""
    there = os.listdir(home) if os.path.isdir(home) else []
    return NEW not in there and any(_VERSION_FILE.fullmatch(name) for name in there)


def _recover_one(layout: Layout, catalogue: Catalogue, replica: Replica, found: Recovered) -> None:
    home = layout.home(replica.id)
    there = set(os.listdir(home)) if os.path.isdir(home) else set()
    wanted = {
        f"{version.number}.db" if version.number == replica.newest else f"{version.number}.pages": version.stored_bytes
        for version in catalogue.versions_from(replica.id, 0)
    }
    damaged = [
        f"{replica.name.path}: {name} is {'not as long as it was' if name in there else 'missing'}"
        for name, size in wanted.items()
        if name not in there or os.stat(os.path.join(home, name)).st_size != size
    ]
    found.damaged.extend(damaged)
    for name in sorted(there - set(wanted)):
        path = os.path.join(home, name)
        if damaged and _VERSION_FILE.fullmatch(name):
            continue  # somebody might mend it with this
        if name.startswith(READING) and not _is_left_behind(path):
            continue
        if os.path.isdir(path):
            disk.remove_tree(path)
        else:
            disk.remove(path)
        found.removed.append(f"{replica.id}/{name}")


def _is_left_behind(reading: str) -> bool:
    """A command may be reading there while the server starts."""
    with contextlib.suppress(OSError):
        held = disk.lock(os.path.join(reading, LOCK))
        if held is None:
            return False
        os.close(held)
    return True
