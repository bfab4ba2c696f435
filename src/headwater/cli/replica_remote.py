"""Replicas on a server: listed, pulled and verified over the network."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from datetime import datetime
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import quote

import msgspec

from headwater.errors import HeadwaterError, InvalidOptionError, RemoteError, UnknownReplicaError
from headwater.formats import time_ms
from headwater.replication.connection import UNREADABLE, http_request, http_url
from headwater.replication.host.catalogue import Replica, ReplicaListing, Version
from headwater.replication.host.verify import Check, VersionVerdict, failed, passed, prove_content, prove_integrity
from headwater.replication.names import Remote, ReplicaName, VersionName, place_of
from headwater.replication.protocol import PREFIX
from headwater.replication.sync import sync

if TYPE_CHECKING:
    from headwater.replication.outcome import Outcome

REMOTE_LISTED_MAX = 100_000  # replicas that are asked for, a page at a time
NO_SUCH_REPLICA = "no such replica"  # in the answer of a server


def about_the_whole(version: VersionName, name: str) -> InvalidOptionError:
    return InvalidOptionError(f"the command takes the whole replica, not {version}", next=f"Name {name}")


class _VersionDocument(msgspec.Struct, rename="camel"):
    """A version, as a server lists it."""

    version: int
    base: int
    message: str
    client: str
    at: datetime
    size: int
    pages: int
    page_size: int
    changed_pages: int
    bytes: int
    dbhash: str | None

    def as_version(self) -> Version:
        return Version(
            number=self.version,
            base=self.base,
            push_id="",
            message=self.message,
            client=self.client,
            at_ms=time_ms(self.at),
            size=self.size,
            page_size=self.page_size,
            pages=self.pages,
            changed_pages=self.changed_pages,
            wire_bytes=self.bytes,
            dbhash=self.dbhash,
            sha256="",
        )


class _ReplicaDocument(msgspec.Struct, rename="camel"):
    """A replica, as a server lists it."""

    replica: str
    replica_id: str = msgspec.field(name="replicaID")
    created_at: datetime
    changed_at: datetime | None
    versions: int
    stored_bytes: int
    newest: _VersionDocument | None

    def as_listing(self) -> ReplicaListing:
        newest = None if self.newest is None else self.newest.as_version()
        replica = Replica(
            id=self.replica_id,
            name=ReplicaName.parse(self.replica),
            created_ms=time_ms(self.created_at),
            newest=0 if newest is None else newest.number,
            versions=self.versions,
            stored_bytes=self.stored_bytes,
            changed_ms=None if self.changed_at is None else time_ms(self.changed_at),
        )
        return ReplicaListing(replica, newest)


class _ListingDocument(msgspec.Struct, rename="camel"):
    """`is_cut`: there are more."""

    replicas: list[_ReplicaDocument]
    is_cut: bool


def remote_replicas(url: str, key: str | None, ca: str | None) -> tuple[list[ReplicaListing], bool]:
    """The replicas that the server lists, and whether there are more."""
    listing_url, found, is_cut = _listing_url(url), list[ReplicaListing](), True
    while is_cut and len(found) < REMOTE_LISTED_MAX:
        after = f"?after={quote(found[-1].replica.name.path)}" if found else ""
        answer = http_request(listing_url + after, key=key, ca=ca)
        try:
            listing = msgspec.json.decode(answer, type=_ListingDocument)
            page, is_cut = [each.as_listing() for each in listing.replicas], listing.is_cut
        except (*UNREADABLE, InvalidOptionError) as exc:
            raise UnknownReplicaError(f"the server's list of replicas cannot be read ({exc})", where=url) from exc
        if not page or (found and page[0].replica.name <= found[-1].replica.name):  # the server repeats itself
            break
        found += page
    return found, is_cut


def _listing_url(url: str) -> str:
    """The url of the list of a server or a namespace, checked by the rules for names of replicas."""
    url = url.rstrip("/")
    names = url.partition("://")[2].count("/")
    if names > 1:
        raise InvalidOptionError(
            "a server or a namespace is wanted, and this names more",
            next="Write ws://host or ws://host/ns; headwater replica log lists the versions of one replica",
        )
    place = place_of(f"{url}/any" if names else f"{url}/any/any")
    assert isinstance(place, Remote)
    namespace = f"/{place.name.namespace}" if names else ""
    return f"http{place.url_base.removeprefix('ws')}{PREFIX}replicas{namespace}"


class RemoteReplica(NamedTuple):
    """A replica on a server, with the key or token for it."""

    url: str
    key: str | None
    ca: str | None

    @property
    def address(self) -> Remote:
        place = place_of(self.url)
        if not isinstance(place, Remote):
            raise InvalidOptionError(
                "this is no replica on a server", where=self.url, next="Name it like ws://host/ns/name"
            )
        return place

    def versions(self, *, limit: int, before: int | None) -> list[Version]:
        """Newest first."""
        if self.address.version is not None:
            raise about_the_whole(self.address.version, self.address.key)
        if before == 1:
            return []
        return self._page(None if before is None else before - 1)[:limit]

    def _page(self, upto: int | None = None) -> list[Version]:
        """A page of versions, as many as the server lists at once, newest first."""
        url = http_url(self.address, "versions/") + ("" if upto is None else f"@{upto}")
        answer = http_request(url, key=self.key, ca=self.ca)
        try:
            return [each.as_version() for each in msgspec.json.decode(answer, type=list[_VersionDocument])]
        except UNREADABLE as exc:
            raise UnknownReplicaError(f"the server's list of versions cannot be read ({exc})", where=self.url) from exc

    def has_version(self) -> bool:
        """False only if the server says that there is no such replica, or no version."""
        try:
            return bool(self._page())
        except UnknownReplicaError as exc:
            if NO_SUCH_REPLICA not in exc.why:
                raise
            return False

    def pull(self, target: str) -> Outcome:
        return sync(self.url, target, pull_key=self.key, ca=self.ca, overwrite=True)

    def verify(self) -> VersionVerdict:
        """Verify one version, by default the newest: it is pulled to a temporary file, checked and hashed."""
        versions = self._page()
        address = self.address
        newest, wanted = max((each.number for each in versions), default=0), address.version or VersionName()
        number = wanted.number_from(newest)
        if versions and 0 < number < versions[-1].number:
            versions += self._page(number)
        number = wanted.pick(newest, [each.number for each in versions])
        [version] = [each for each in versions if each.number == number]
        with tempfile.TemporaryDirectory(prefix="headwater-verify-") as directory:
            path = os.path.join(directory, "drill.db")

            def restore_drill() -> str:
                pulled = self._replace(url=f"{address.key}@{number}").pull(path)
                return f"pulled: {pulled.pages:,} pages of {pulled.page_size:,} bytes"

            steps: dict[str, Callable[[], str]] = {
                "restore": restore_drill,
                "integrity": lambda: prove_integrity(path),
                "content": lambda: prove_content(path, version.dbhash),
            }
            checks: list[Check] = []
            for what, check in steps.items():
                try:
                    checks.append(passed(what, check()))
                except RemoteError:  # it says nothing about the version
                    raise
                except HeadwaterError as exc:
                    checks.append(failed(what, exc))
                    break
        return VersionVerdict(address.name.path, number, tuple(checks))
