"""Lists: the replicas, as far as the one who asks may know of them: those that it may pull; and the versions of one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from urllib.parse import parse_qs

import msgspec

from headwater.errors import UnknownReplica
from headwater.message.times import iso
from headwater.ports.annex import HttpResponse, Rights
from headwater.replication.host.access import Access
from headwater.replication.host.http_answers import JSON, refused, text
from headwater.replication.host.records import Listed, Replica
from headwater.replication.host.shelf import Shelf
from headwater.replication.host.words import document_of
from headwater.replication.names import ReplicaName, VersionName

LISTED_MAX = 1_000  # in one answer; `?after=` asks for the next
AFTER = "after"
PAGE = 200  # that are looked at in one go


def list_replicas(
    shelf: Shelf,
    access: Callable[[Replica], Access],
    namespace: str | None,
    bearer: str | None,
    rights: Rights | None,
    *,
    after: ReplicaName | None,
    needs_token: bool,
) -> HttpResponse:
    """By name, those behind `after`; `isCut` in the answer says that there are more. Blocking."""
    if namespace is not None:
        ReplicaName(namespace, "any")  # refuses what is none
    is_first, found = after is None, list[Listed]()
    while len(found) <= LISTED_MAX:
        page = shelf.listing(namespace=namespace, after=after, limit=PAGE)
        found.extend(each for each in page if access(each.replica).may_pull)
        if len(page) < PAGE:
            break
        after = page[-1].replica.name
    if not found and is_first and (refusal := _refusal(namespace, bearer, rights, needs_token=needs_token)) is not None:
        return refusal
    shown = [_document(each) for each in found[:LISTED_MAX]]
    return HttpResponse(200, JSON, msgspec.json.encode({"replicas": shown, "isCut": len(found) > LISTED_MAX}))


def list_versions(shelf: Shelf, replica: Replica, upto: VersionName) -> HttpResponse:
    """Newest first from `upto` on, a page of them. Blocking."""
    number = upto.number_from(replica.newest)
    try:
        versions = shelf.versions(replica.name, below=number + 1)
    except UnknownReplica:  # removed just now
        versions = []
    documents = [document_of(replica, version) for version in versions]
    return HttpResponse(200, JSON, msgspec.json.encode(documents))


def after_of(query: str) -> ReplicaName | None:
    """`after=ns/name`. Raises InvalidOption for a name that is none."""
    after = parse_qs(query).get(AFTER)
    return None if after is None else ReplicaName.parse(after[-1])


def _refusal(
    namespace: str | None, bearer: str | None, rights: Rights | None, *, needs_token: bool
) -> HttpResponse | None:
    """For one who sees nothing. What it says does not depend on what others may see."""
    if rights is not None:
        everything = "replica.>" if namespace is None else f"replica.{namespace}.>"
        return None if rights.may_read(everything) else text(403, "this token allows to pull no replica here")
    if bearer is not None:
        return refused(401, "this key or token opens no replica here: it is wrong, or was revoked")
    return refused(401, "to list replicas needs a token of the server, or a key of one") if needs_token else None


def _document(listed: Listed) -> dict[str, Any]:
    replica, newest = listed
    return {
        "replica": replica.name.path,
        "replicaID": replica.id,
        "createdAt": iso(replica.created_ms),
        "changedAt": None if replica.changed_ms is None else iso(replica.changed_ms),
        "versions": replica.versions,
        "storedBytes": replica.stored_bytes,
        "newest": None if newest is None else document_of(replica, newest),
    }
