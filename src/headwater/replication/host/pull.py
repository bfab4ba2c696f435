"""The server's side of a pull: an origin process reads a version from a private file and sends its pages."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass

from headwater.errors import ReplicationFailedError
from headwater.formats import iso
from headwater.replication.host.events import SessionOutcome
from headwater.replication.host.session import (
    Abort,
    Gone,
    HostContext,
    ReplicaSession,
    config,
    config_of,
    patience_s,
)
from headwater.replication.host.versions import OpenedVersion
from headwater.replication.names import ReplicaName
from headwater.replication.protocol import PullComplete, PullConfig
from headwater.replication.rsync import RsyncProcess
from headwater.replication.sqlite_tools import cpu_s_for
from headwater.replication.threads import together

HASHES_PART = 4  # a replica's hashes are far less than a quarter of the pages
SLACK_BYTES = 16 * 1024 * 1024


@dataclass(eq=False)
class PullSession:
    context: HostContext
    session: ReplicaSession
    name: ReplicaName
    number: int
    outcome: SessionOutcome | None = None
    _is_complete: bool = False

    async def run(self) -> None:
        if config_of(await self.session.first(self.context.idle_s), PullConfig).dry:
            raise Abort("FAILED", "a dry run is made by the client: it pulls into a private file")
        threads = self.context.threads
        opened = await threads.do_or_undo(OpenedVersion.close, self._open)
        try:
            await self._send_all(opened)
            self.outcome = "done"
        finally:
            await threads.do(opened.close)

    def _open(self) -> OpenedVersion:
        """Blocks."""
        store = self.context.store
        version = store.catalogue.get_version(self.name, self.number)
        is_newest = version.number == store.catalogue.get(self.name).newest  # older ones are rebuilt, in a new file
        with nullcontext() if is_newest else self.context.space.reserved(version.size):
            return store.open_version(self.name, self.number)

    async def _send_all(self, opened: OpenedVersion) -> None:
        version = opened.version
        directory, url = opened.url
        origin = RsyncProcess("--origin", url, cwd=directory, cpu_s=cpu_s_for(version.size))
        try:
            self.session.expect_pages(patience_s(self.context.idle_s, version.size))
            await self.session.send_text(
                config(
                    replicaID=opened.replica.id,
                    replicaPath=self.name.path,
                    version=version.number,
                    size=version.size,
                    pageSize=version.page_size,
                    pages=version.pages,
                    dbhash=version.dbhash,
                    message=version.message,
                    at=iso(version.at_ms),
                    ready=True,
                )
            )
            await together(self._receive(origin, version.size), self._send(origin))
            await origin.wait()
        except ReplicationFailedError as exc:
            raise Abort("FAILED", exc.why.replace(url, "the copy on the server")) from exc
        finally:
            await origin.gone()

    async def _receive(self, origin: RsyncProcess, size: int) -> None:
        """Receive until the client's process has succeeded."""
        received = 0
        while True:
            frame = await self.session.next()
            if frame is None:
                raise Gone
            if isinstance(frame, str):
                break
            received += len(frame)
            if received > size // HASHES_PART + SLACK_BYTES:
                raise Abort("FAILED", "more came than a replica has to say")
            origin.refuse_error_output()
            await origin.write(frame)
        if not config_of(frame, PullComplete).complete:
            raise Abort("FAILED", "a pull is complete, or it is cut off")
        self._is_complete = True
        origin.close_input()

    async def _send(self, origin: RsyncProcess) -> None:
        while data := await origin.read():
            if not self._is_complete:
                await self.session.send_binary(data)
