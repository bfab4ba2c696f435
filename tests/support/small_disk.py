"""A file system that is soon full."""

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def small_file_system(at: Path, size: str, *options: str) -> Iterator[Path]:
    """In memory, at a directory that is made if need be. The test is skipped where it may not be mounted."""
    at.mkdir(exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", ",".join([f"size={size}", "mode=0700", *options]), "tmpfs", str(at)]
    try:
        mounted = subprocess.run(mount, capture_output=True, check=False)
    except FileNotFoundError:
        pytest.skip("there is no `mount` here")
    if mounted.returncode:
        pytest.skip("this user may not mount a file system")
    try:
        yield at
    finally:
        subprocess.run(["umount", "--lazy", str(at)], check=True)


def fill(directory: Path, name: str = "filler") -> Path:
    """Not a byte more."""
    with open(directory / name, "ab", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))
    return directory / name
