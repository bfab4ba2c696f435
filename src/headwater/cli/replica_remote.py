"""`headwater replica ls|log|restore|verify` of replicas behind a server: what can be asked and pulled from there."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, NamedTuple
from urllib.parse import quote

import msgspec
import typer

from headwater.cli.replica_moments import number_at, two_answers
from headwater.cli.replica_opening import about_the_whole
from headwater.errors import HeadwaterError, InvalidOption, RemoteError, UnknownReplica
from headwater.message.times import time_ms
from headwater.replication.host.catalogue import VERSIONS_PAGE
from headwater.replication.host.listing import AFTER
from headwater.replication.host.records import Listed, Replica, Version
from headwater.replication.host.restoring import refuse_target
from headwater.replication.host.verifying import Check, Verdict, failed, passed, prove_content, prove_integrity
from headwater.replication.names import PREFIX, Remote, ReplicaName, VersionName, place_of

if TYPE_CHECKING:
    from headwater.replication.outcome import Outcome

LISTED_MAX = 100_000  # replicas that are asked for, a page at a time
NOT_THERE = "no such replica"  # what a server says of it

Key = Annotated[
    str | None,
    typer.Option(
        "--key",
        metavar="KEY",
        help="A pull key, push key or token, for a URL.",
        envvar=["HEADWATER_PULL_KEY", "HEADWATER_PUSH_KEY", "HEADWATER_TOKEN"],
        show_default=False,
        show_envvar=False,
    ),
]
Ca = Annotated[
    str | None, typer.Option("--ca", metavar="FILE", help="Certificates to trust for wss://.", show_default=False)
]


class Told(msgspec.Struct, rename="camel"):
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


class ToldReplica(msgspec.Struct, rename="camel"):
    """A replica, as a server lists it."""

    replica: str
    replica_id: str = msgspec.field(name="replicaID")
    created_at: datetime
    changed_at: datetime | None
    versions: int
    stored_bytes: int
    newest: Told | None


class ToldReplicas(msgspec.Struct, rename="camel"):
    """`is_cut`: there are more."""

    replicas: list[ToldReplica]
    is_cut: bool


class Asked(NamedTuple):
    """A replica behind a server, and what opens the door."""

    url: str
    key: str | None
    ca: str | None

    @property
    def remote(self) -> Remote:
        place = place_of(self.url)
        if not isinstance(place, Remote):
            raise InvalidOption("this is no replica on a server", where=self.url, next="Name it like ws://host/ns/name")
        return place

    def versions(self, upto: int | None = None) -> list[Told]:
        """Newest first, as many as the server gives at a time."""
        from headwater.replication.asking import ask, versions_url
        from headwater.replication.link import UNREADABLE

        said = ask(versions_url(self.remote) + ("" if upto is None else f"@{upto}"), key=self.key, ca=self.ca)
        try:
            return msgspec.json.decode(said, type=list[Told])
        except UNREADABLE as exc:
            raise UnknownReplica(f"the server's list of versions cannot be read ({exc})", where=self.url) from exc

    def pull(self, target: str) -> Outcome:
        from headwater.replication.synchronise import sync

        return sync(self.url, target, pull_key=self.key, ca=self.ca, overwrite=True)


def ls(url: str, key: str | None, ca: str | None) -> tuple[list[Listed], bool]:
    """What the server shows, and whether there is more than that."""
    from headwater.replication.asking import ask
    from headwater.replication.link import UNREADABLE

    listing_url, found, is_cut = _listing_url(url), list[Listed](), True
    while is_cut and len(found) < LISTED_MAX:
        behind = f"?{AFTER}={quote(found[-1].replica.name.path)}" if found else ""
        said = ask(listing_url + behind, key=key, ca=ca)
        try:
            told = msgspec.json.decode(said, type=ToldReplicas)
            page, is_cut = [_listed(each) for each in told.replicas], told.is_cut
        except (*UNREADABLE, InvalidOption) as exc:
            raise UnknownReplica(f"the server's list of replicas cannot be read ({exc})", where=url) from exc
        if not page or (found and page[0].replica.name <= found[-1].replica.name):  # it gives no others
            break
        found += page
    return found, is_cut


def _listing_url(url: str) -> str:
    """Of a server or a namespace. The rules for names of replicas say what is none."""
    url = url.rstrip("/")
    names = url.partition("://")[2].count("/")
    if names > 1:
        raise InvalidOption(
            "a server or a namespace is wanted, and this names more",
            next="Write ws://host or ws://host/ns; headwater replica log lists the versions of one replica",
        )
    place = place_of(f"{url}/any" if names else f"{url}/any/any")
    assert isinstance(place, Remote)
    namespace = f"/{place.name.namespace}" if names else ""
    return f"http{place.url_base.removeprefix('ws')}{PREFIX}replicas{namespace}"


def _listed(told: ToldReplica) -> Listed:
    newest = None if told.newest is None else _version(told.newest)
    replica = Replica(
        id=told.replica_id,
        name=ReplicaName.parse(told.replica),
        created_ms=time_ms(told.created_at),
        newest=0 if newest is None else newest.number,
        versions=told.versions,
        stored_bytes=told.stored_bytes,
        changed_ms=None if told.changed_at is None else time_ms(told.changed_at),
    )
    return Listed(replica, newest)


def log(asked: Asked, *, limit: int, before: int | None) -> list[Version]:
    if asked.remote.version is not None:
        raise about_the_whole(asked.remote.version, asked.remote.key)
    if before == 1:
        return []
    versions = asked.versions(None if before is None else before - 1)
    return [_version(each) for each in versions[:limit]]


def has_version(asked: Asked) -> bool:
    """False: nothing was pushed there yet. A server that says anything else than that is no reason to go on without."""
    try:
        return bool(asked.versions())
    except UnknownReplica as exc:
        if NOT_THERE not in exc.why:
            raise
        return False


def restore(asked: Asked, target: str, *, at: str | None, overwrite: bool) -> Outcome:
    refuse_target(target, overwrite=overwrite)
    if at is not None:
        if asked.remote.version is not None:
            raise two_answers(asked.url)
        number = number_at(at, lambda below: log(asked, limit=VERSIONS_PAGE, before=below))
        asked = asked._replace(url=f"{asked.remote.key}@{number}")
    return asked.pull(target)


def verify(asked: Asked) -> Verdict:
    """One version, the newest if none is named: pulled to a file of its own, checked and hashed."""
    told = asked.versions()
    remote = asked.remote
    newest, wanted = max((each.version for each in told), default=0), remote.version or VersionName()
    number = wanted.number_from(newest)
    if told and 0 < number < told[-1].version:
        told += asked.versions(number)
    number = wanted.pick(newest, [each.version for each in told])
    [noted] = [each for each in told if each.version == number]
    with tempfile.TemporaryDirectory(prefix="headwater-verify-") as directory:
        path = os.path.join(directory, "drill.db")
        steps: dict[str, Callable[[], str]] = {
            "restore": lambda: _drill(Asked(f"{remote.key}@{number}", asked.key, asked.ca), path),
            "integrity": lambda: prove_integrity(path),
            "content": lambda: prove_content(path, noted.dbhash),
        }
        checks: list[Check] = []
        for what, look in steps.items():
            try:
                checks.append(passed(what, look()))
            except RemoteError:  # it says nothing about the version
                raise
            except HeadwaterError as exc:
                checks.append(failed(what, exc))
                break
    return Verdict(remote.name.path, number, tuple(checks))


def _drill(asked: Asked, path: str) -> str:
    pulled = asked.pull(path)
    return f"pulled: {pulled.pages:,} pages of {pulled.page_size:,} bytes"


def _version(told: Told) -> Version:
    return Version(
        number=told.version,
        base=told.base,
        push_id="",
        message=told.message,
        client=told.client,
        at_ms=time_ms(told.at),
        size=told.size,
        page_size=told.page_size,
        pages=told.pages,
        changed_pages=told.changed_pages,
        wire_bytes=told.bytes,
        dbhash=told.dbhash,
        sha256="",
    )
