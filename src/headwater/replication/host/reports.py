"""Error reports of clients."""

from __future__ import annotations

from typing import Any

import msgspec

from headwater.ports.annex import HttpResponse
from headwater.replication.host.catalogue import REPORT_BYTES_MAX
from headwater.replication.host.http_answers import text
from headwater.replication.host.records import Replica
from headwater.replication.host.shelf import Shelf
from headwater.replication.host.words import ReportBody


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
