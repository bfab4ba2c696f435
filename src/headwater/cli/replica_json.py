"""Replicas, versions, keys and verdicts as `--json` prints them."""

from __future__ import annotations

from typing import Any

import msgspec

from headwater.message import iso
from headwater.replication.host.records import Key, Replica, Report, Version
from headwater.replication.host.verifying import Lacking, Verdict

NEXT_WITHOUT: dict[Lacking, str] = {
    "room": "Free some disk space, and verify again",
    "rights": "Verify as the user that the server runs as",
}


def replica_json(replica: Replica, newest: Version | None, *, from_afar: bool = False) -> dict[str, Any]:
    return {
        "replica": replica.name.path,
        "id": replica.id,
        "created_at": iso(replica.created_ms),
        "newest": None if newest is None else version_json(newest, from_afar=from_afar),
        "changed_at": None if replica.changed_ms is None else iso(replica.changed_ms),
        "versions": replica.versions,
        "stored_bytes": replica.stored_bytes,
    }


def version_json(version: Version, *, from_afar: bool = False) -> dict[str, Any]:
    """`from_afar`: without what only the data directory tells."""
    told = {
        "version": version.number,
        "base": version.base,
        "at": iso(version.at_ms),
        "message": version.message,
        "client": version.client,
        "size": version.size,
        "page_size": version.page_size,
        "pages": version.pages,
        "changed_pages": version.changed_pages,
        "wire_bytes": version.wire_bytes,
        "stored_bytes": version.stored_bytes,
        "dbhash": version.dbhash,
        "sha256": version.sha256,
    }
    return {name: value for name, value in told.items() if not from_afar or name not in ("stored_bytes", "sha256")}


def key_json(key: Key) -> dict[str, Any]:
    return {"id": key.id, "kind": key.kind, "label": key.label, "created_at": iso(key.created_ms)}


def report_json(report: Report) -> dict[str, Any]:
    return {"at": iso(report.at_ms), "client": report.client, "report": msgspec.json.decode(report.document)}


def verdict_json(verdict: Verdict) -> dict[str, Any]:
    """`verdict` is proved, whole (there was no hash to prove it by), not checked or bad; `ok` the first two."""
    return {
        "replica": verdict.name,
        "version": verdict.version,
        "ok": verdict.ok,
        "verdict": verdict.finding,
        "next": None if verdict.lacks is None else NEXT_WITHOUT[verdict.lacks],
        "checks": [msgspec.structs.asdict(check) for check in verdict.checks],
    }
