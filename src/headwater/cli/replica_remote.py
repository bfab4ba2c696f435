"""`headwater replica log|restore|verify` of a replica behind a server: what can be asked and pulled from there."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, NamedTuple

import msgspec
import typer

from headwater.errors import HeadwaterError, InvalidOption, RemoteError, UnknownReplica
from headwater.message.times import time_ms
from headwater.replication.host.records import Version
from headwater.replication.host.restoring import refuse_target
from headwater.replication.host.verifying import Check, Verdict, prove_content, prove_integrity
from headwater.replication.names import Remote, VersionName, place_of

if TYPE_CHECKING:
    from headwater.replication.outcome import Outcome

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

    def versions(self) -> list[Told]:
        """Newest first."""
        from headwater.replication.asking import ask, versions_url

        said = ask(versions_url(self.remote), key=self.key, ca=self.ca)
        try:
            return msgspec.json.decode(said, type=list[Told])
        except msgspec.MsgspecError as exc:
            raise UnknownReplica(f"the server's list of versions cannot be read ({exc})", where=self.url) from exc

    def pull(self, target: str) -> Outcome:
        from headwater.replication.synchronise import sync

        return sync(self.url, target, pull_key=self.key, ca=self.ca, overwrite=True)


def log(asked: Asked, *, limit: int, before: int | None) -> list[Version]:
    versions = [each for each in asked.versions() if before is None or each.version < before]
    return [_version(each) for each in versions[:limit]]


def restore(asked: Asked, target: str, *, overwrite: bool) -> Outcome:
    refuse_target(target, overwrite=overwrite)
    return asked.pull(target)


def verify(asked: Asked) -> Verdict:
    """One version, the newest if none is named: pulled to a file of its own, checked and hashed."""
    told = asked.versions()
    remote = asked.remote
    numbers = [each.version for each in told]
    number = (remote.version or VersionName()).pick(max(numbers, default=0), numbers)
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
                checks.append(Check(what, True, look()))
            except RemoteError:  # it says nothing about the version
                raise
            except HeadwaterError as exc:
                checks.append(Check(what, False, exc.why))
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
