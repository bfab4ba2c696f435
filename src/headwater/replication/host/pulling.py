"""A pull: the pages of a version go out of a private file with it."""

from __future__ import annotations

from contextlib import nullcontext

from headwater.errors import ReplicationFailed
from headwater.message.times import iso
from headwater.replication.host.figures import SessionEnd
from headwater.replication.host.hosting import Hosting, end_is_well
from headwater.replication.host.pace import patience_s
from headwater.replication.host.reading import Materialised
from headwater.replication.host.shelf import Shelf
from headwater.replication.host.visit import Abort, Gone, Visit
from headwater.replication.host.words import PullComplete, PullConfig, config, config_of
from headwater.replication.names import ReplicaName
from headwater.replication.rsync_stream import OriginStream
from headwater.replication.threads import together
from headwater.replication.tools import End, cpu_s_for

HASHES_PART = 4  # a replica's hashes are far less than a quarter of the pages
SLACK_BYTES = 16 * 1024 * 1024


class Pull:
    def __init__(self, hosting: Hosting, visit: Visit, name: ReplicaName, number: int) -> None:
        self._hosting = hosting
        self._visit = visit
        self._name = name
        self._number = number
        self._is_complete = False
        self.outcome: SessionEnd | None = None

    async def run(self) -> None:
        first = await self._visit.next(self._hosting.idle_s)
        if first is None:
            raise Gone
        asked = config_of(first, PullConfig)
        threads = self._hosting.threads
        made = await threads.do_or_undo(Materialised.close, self._open, self._hosting.shelf)
        try:
            await self._send(made, asked)
            self.outcome = "dry" if asked.dry else "done"
        finally:
            await threads.do(made.close)

    def _open(self, shelf: Shelf) -> Materialised:
        """Blocking."""
        version, newest = shelf.version(self._name, self._number), shelf.get(self._name).newest
        is_whole = version.number == newest  # others are put together
        with nullcontext() if is_whole else self._hosting.room.promised(version.size):
            return shelf.open_version(self._name, self._number)

    async def _send(self, made: Materialised, asked: PullConfig) -> None:
        version = made.version
        # By an address that needs no files beside it: a full disk does not keep a client from restoring.
        directory, address = made.address
        end = End("--origin", address, cwd=directory, cpu_s=cpu_s_for(version.size))
        try:
            self._visit.expect_pages(patience_s(self._hosting.idle_s, version.size))
            await self._visit.send_text(
                config(
                    replicaID=made.replica.id,
                    replicaPath=self._name.path,
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
            if asked.dry:
                await self._count(end, version.size)
                return
            await together(self._hear(end, version.size), self._speak(end))
            await end.wait()
        except ReplicationFailed as exc:
            raise Abort("FAILED", exc.why.replace(address, "the copy on the server")) from exc
        finally:
            await end.gone()

    async def _hear(self, end: End, size: int) -> None:
        """Until the client says that its end went well."""
        received = 0
        while True:
            frame = await self._visit.next()
            if frame is None:
                raise Gone
            if isinstance(frame, str):
                break
            received += len(frame)
            if received > size // HASHES_PART + SLACK_BYTES:
                raise Abort("FAILED", "more came than a replica has to say")
            end_is_well(end)
            await end.write(frame)
        if not config_of(frame, PullComplete).complete:
            raise Abort("FAILED", "a pull is complete, or it is cut off")
        self._is_complete = True
        end.close_input()

    async def _speak(self, end: End) -> None:
        while data := await end.read():
            if not self._is_complete:
                await self._visit.send_binary(data)

    async def _count(self, end: End, size: int) -> None:
        """A dry run: everything up to the first page as in earnest; the pages are counted, and stay here."""
        stream = OriginStream()
        counting = self._visit_counted(end, stream)
        hearing = self._hear_dry(end, size)
        try:
            await together(counting, hearing)
        except _Counted:
            told = {"pages": stream.pages, "bytes": stream.page_bytes}
            await self._visit.send_text(config(wouldMove=told))

    async def _visit_counted(self, end: End, stream: OriginStream) -> None:
        while not stream.ended and (data := await end.read()):
            through = stream.feed(data)
            self._visit.worked()
            if through:
                await self._visit.send_binary(through)
        if not stream.ended and stream.error is None:
            await end.wait()  # which knows better why
        stream.finish()
        raise _Counted

    async def _hear_dry(self, end: End, size: int) -> None:
        await self._hear(end, size)
        raise Abort("FAILED", "a dry run is complete when all is counted")


class _Counted(Exception):
    """The dry run has come to its end."""
