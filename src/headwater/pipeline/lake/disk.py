"""Files that are whole on disk before anybody hears of them."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

WRITING = ".writing"
"""What a file is called until it is whole. Begins with a dot in full, so that Spark and others do not see it."""


def name_while_writing(path: Path) -> Path:
    return path.with_name(f".{path.name}{WRITING}")


def finish(written: Path, path: Path) -> str:
    """Make a written file durable and give it its name; returns its SHA-256."""
    digest = settle(written)
    os.rename(written, path)
    sync_directory(path.parent)
    return digest


def settle(path: Path) -> str:
    """Make a file's content durable; returns its SHA-256."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        return hashlib.file_digest(file, "sha256").hexdigest()


def digest_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_directories(root: Path, path: Path) -> None:
    """Make a directory below `root`, and its name durable in each one above it."""
    missing = [each for each in (path, *path.parents) if each.is_relative_to(root) and not each.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for each in missing:
        sync_directory(each.parent)
