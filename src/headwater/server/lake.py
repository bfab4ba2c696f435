"""What the console shows of a lake: the file that a run of the pipeline leaves in its folder or bucket."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec

from headwater.errors import CorruptError, InvalidStateError, TransportFailedError
from headwater.version import install_hint

STATUS_FILE = "status.json"  # a run writes it, with this version
VERSION = 1
STATUS_BYTES_MAX = 4 * 1024 * 1024
REQUEST_S = 5.0  # to a bucket
BUCKETS = ("s3://", "s3a://")
RUN = "headwater pipeline run LOG --lake"

of_buckets = ThreadPoolExecutor(1, "headwater-lake")
"""A bucket that does not answer keeps no statistics waiting."""


def is_bucket(lake: str) -> bool:
    return "://" in lake


def read_lake(lake: str, salt: int) -> dict[str, Any]:
    """Read what the last run left in a lake. `salt` is that of the server's log; the lake of another log is refused.
    Blocks."""
    again = f"{RUN} {lake} writes it anew"
    text = _read_object(lake) if is_bucket(lake) else _read_file(lake)
    if text is None:
        raise InvalidStateError("no run has finished in this lake yet", where=lake, next=again)
    path = f"{lake}/{STATUS_FILE}"
    try:
        found = msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.DecodeError as exc:
        raise CorruptError(f"the file is damaged ({exc})", where=path, next=again) from exc
    if len(text) > STATUS_BYTES_MAX or found.get("version") != VERSION:
        raise CorruptError("the file is of another version of Headwater", where=path, next=again)
    if found.get("log") != salt:
        next = "Name the lake of this log in server.lake"
        raise InvalidStateError("this is the lake of another log", where=lake, next=next)
    return found


def _read_file(folder: str) -> bytes | None:
    path = os.path.join(folder, STATUS_FILE)
    try:
        with open(path, "rb") as file:
            return file.read(STATUS_BYTES_MAX + 1)
    except FileNotFoundError:
        if not os.path.isdir(folder):
            raise InvalidStateError("there is no such folder", where=folder, next=f"{RUN} {folder}") from None
        return None
    except OSError as exc:
        raise InvalidStateError(f"the lake cannot be read ({exc.strerror})", where=path, next="Grant access") from exc


def _read_object(url: str) -> bytes | None:
    """Read the status file from S3, in one request. Credentials, the region and the endpoint come from the environment,
    as for the pipeline."""
    if not url.startswith(BUCKETS):
        next = "headwater pipeline report makes a page of any lake"
        raise InvalidStateError("a server shows a lake in a folder or on S3", where=url, next=next)
    try:
        from headwater.transports.object_client import open_objects
    except ImportError as exc:
        raise InvalidStateError("a lake on S3 needs an extra", where=url, next=install_hint("s3")) from exc
    endpoint = os.environ.get("AWS_ENDPOINT_URL")
    bucket = open_objects("s3://" + url.partition("://")[2], endpoint=endpoint, timeout=REQUEST_S, retries=0)
    try:
        found = bucket.get(STATUS_FILE, STATUS_BYTES_MAX)
    except TransportFailedError as exc:
        raise InvalidStateError(f"the lake cannot be read: {exc.why}", where=url, next=exc.next) from exc
    return None if found is None else found.data
