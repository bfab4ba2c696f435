"""What plain HTTP is for: error reports of clients, and the list of versions. See `listing` for that of replicas."""

from __future__ import annotations

from typing import Any

import msgspec

from headwater.errors import UnknownReplica
from headwater.ports.endpoint import HttpResponse
from headwater.replication.host.catalogue import REPORT_BYTES_MAX
from headwater.replication.host.records import Replica
from headwater.replication.host.scratch import CLIENT_CHARS_MAX
from headwater.replication.host.shelf import Shelf
from headwater.replication.host.words import ReportBody, document_of
from headwater.replication.names import VersionName

JSON = "application/json"


def store_report(shelf: Shelf, replica: Replica, client: str, body: bytes) -> HttpResponse:
    """Blocking."""
    if len(body) > REPORT_BYTES_MAX:
        return text(413, f"a report has at most {REPORT_BYTES_MAX:,} bytes")
    try:
        msgspec.json.decode(body, type=ReportBody)
        document = msgspec.json.encode(msgspec.json.decode(body, type=dict[str, Any]), order="deterministic").decode()
    except msgspec.MsgspecError as exc:
        return text(400, f"this is no report: {exc}")
    except (UnicodeDecodeError, RecursionError):
        return text(400, "this is no report")
    if len(document.encode()) > REPORT_BYTES_MAX:
        return text(413, f"a report has at most {REPORT_BYTES_MAX:,} bytes")
    shelf.add_report(replica, client, document)
    return HttpResponse(204, "text/plain; charset=utf-8", b"")


def list_versions(shelf: Shelf, replica: Replica, upto: VersionName) -> HttpResponse:
    """Newest first from `upto` on, a page of them. Blocking."""
    number = replica.newest - upto.back if upto.number is None else upto.number
    try:
        versions = shelf.versions(replica.name, below=number + 1)
    except UnknownReplica:  # removed just now
        versions = []
    documents = [document_of(replica, version) for version in versions]
    return HttpResponse(200, JSON, msgspec.json.encode(documents))


def client_of(headers: dict[str, str], address: str) -> str:
    """What a client calls itself, as far as it can be shown; else where it comes from."""
    said = headers.get("x-clientid", "").strip()[:CLIENT_CHARS_MAX]
    return said if said and said.isprintable() else address


def refused(status: int, why: str) -> HttpResponse:
    """Who came with nothing, or with nothing that is known, is told what to come with."""
    return text(status, why, *((("WWW-Authenticate", "Bearer"),) if status == 401 else ()))


def text(status: int, why: str, *headers: tuple[str, str]) -> HttpResponse:
    return HttpResponse(status, "text/plain; charset=utf-8", f"{why}\n".encode(), headers)
