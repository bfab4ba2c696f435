"""What the console shows of a lake: the file that a run of the pipeline leaves in its folder."""

from __future__ import annotations

import os
from typing import Any

import msgspec

from headwater.errors import CorruptError, InvalidStateError

STATUS_FILE = "status.json"  # as the pipeline names it
VERSION = 1
STATUS_BYTES_MAX = 4 * 1024 * 1024
RUN = "headwater pipeline run LOG --lake"


def read_lake(folder: str, salt: int) -> dict[str, Any]:
    """`salt`: of the server's log, of which the lake must be. Blocks."""
    path = os.path.join(folder, STATUS_FILE)
    again = f"{RUN} {folder} writes it anew"
    if "://" in folder:
        next = "Name its folder in server.lake if it has one; headwater pipeline report makes a page of any lake"
        raise InvalidStateError("a server shows a lake in a folder, not one at a url", where=folder, next=next)
    try:
        with open(path, "rb") as file:
            text = file.read(STATUS_BYTES_MAX + 1)
    except FileNotFoundError:
        if not os.path.isdir(folder):
            raise InvalidStateError("there is no such folder", where=folder, next=f"{RUN} {folder}") from None
        raise InvalidStateError("no run has finished in this lake yet", where=folder, next=again) from None
    except OSError as exc:
        raise InvalidStateError(f"the lake cannot be read ({exc.strerror})", where=path, next="Grant access") from exc
    try:
        found = msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.DecodeError as exc:
        raise CorruptError(f"the file is damaged ({exc})", where=path, next=again) from exc
    if len(text) > STATUS_BYTES_MAX or found.get("version") != VERSION:
        raise CorruptError("the file is of another version of Headwater", where=path, next=again)
    if found.get("log") != salt:
        next = "Name the lake of this log in server.lake"
        raise InvalidStateError("this is the lake of another log", where=folder, next=next)
    return found
