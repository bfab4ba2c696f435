"""What the kernel tells of the files in a directory: inotify through libc. No file is opened for it."""

from __future__ import annotations

import ctypes
import ctypes.util
import os
import struct
import sys
from collections.abc import Iterator

MODIFY = 0x2
CLOSE_WRITE = 0x8
MOVED_FROM = 0x40
MOVED_TO = 0x80
CREATE = 0x100
DELETE = 0x200
DIRECTORY_GONE = 0x400 | 0x800 | 0x2000 | 0x8000  # deleted, moved, unmounted, or not watched any more
LOST = 0x4000  # the queue ran over: something happened, nobody knows what

_READ_BYTES = 64 * 1024
_EVENT_HEAD = struct.Struct("iIII")


def watch_directory(directory: str, kinds: int) -> int | None:
    """A descriptor that is readable when something of these kinds happened; None where that is not possible."""
    if not sys.platform.startswith("linux"):
        return None
    libc = ctypes.CDLL(ctypes.util.find_library("c") or "libc.so.6", use_errno=True)
    descriptor = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
    if descriptor < 0:
        return None
    if libc.inotify_add_watch(descriptor, os.fsencode(directory), kinds) < 0:
        os.close(descriptor)
        return None
    return int(descriptor)


def take_events(descriptor: int) -> Iterator[tuple[int, bytes]]:
    """Empties the queue: the kinds and the name of each. The directory itself, and what was lost, has no name."""
    while True:
        try:
            buffer = os.read(descriptor, _READ_BYTES)
        except BlockingIOError:
            return
        offset = 0
        while offset < len(buffer):
            _watch, kinds, _cookie, length = _EVENT_HEAD.unpack_from(buffer, offset)
            offset += _EVENT_HEAD.size
            yield kinds, buffer[offset : offset + length].rstrip(b"\0")
            offset += length
