"""Removing what no table needs: replaced files when no query can read them any more, and what killed runs left."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from headwater.pipeline.lake.disk import WRITING
from headwater.pipeline.lake.manifest import Manifest

GRACE_MS = 3_600_000
"""How long a replaced file stays for queries that began before."""
CHECKPOINTS = "_checkpoints"
TABLE_ROOTS = ("bronze", "silver", "typed", "gold", "raw")


class Swept(NamedTuple):
    files: int
    bytes: int


def vacuum(lake: Path, manifest: Manifest, now_ms: int, *, grace_ms: int = GRACE_MS, dry_run: bool = False) -> Swept:
    """Must be called with the lake's lock in hand: what is not in the manifest then belongs to no run."""
    dropped = manifest.dropped(now_ms - grace_ms + 1)
    # By name alone, which is never used twice: some file systems give a directory back in another spelling.
    known = {path.rpartition("/")[2] for path in manifest.known_paths() - set(dropped)}
    useless = [path for path in _data_files(lake) if path.name not in known]
    size = sum(path.stat().st_size for path in useless)
    if not dry_run:
        for path in useless:
            path.unlink(missing_ok=True)
        manifest.forget_dropped(dropped)
        remove_checkpoints(lake)
        _remove_empty_directories(lake)
    return Swept(len(useless), size)


def sweep_dropped(lake: Path, manifest: Manifest, now_ms: int, grace_ms: int = GRACE_MS) -> None:
    """Replaced files alone: what a running stream has sealed and not yet published is not in the manifest."""
    dropped = manifest.dropped(now_ms - grace_ms + 1)
    for path in dropped:
        (lake / path).unlink(missing_ok=True)
    manifest.forget_dropped(dropped)


def remove_checkpoints(lake: Path) -> None:
    """Spark's own notes on a stream; where to go on is in the manifest."""
    shutil.rmtree(lake / CHECKPOINTS, ignore_errors=True)


def _data_files(lake: Path) -> Iterator[Path]:
    for root in TABLE_ROOTS:
        for directory, _, names in os.walk(lake / root):
            for name in names:
                if name.endswith((".parquet", ".crc", WRITING)) or name == "_SUCCESS":
                    yield Path(directory, name)


def _remove_empty_directories(lake: Path) -> None:
    for root in TABLE_ROOTS:
        for directory, _, _ in os.walk(lake / root, topdown=False):
            if directory != str(lake / root) and not os.listdir(directory):
                os.rmdir(directory)
