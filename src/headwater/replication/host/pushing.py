"""A push: pages come into a scratch copy of the newest version; when all are there and whole, it is the next version.

Whatever goes wrong before that, nothing is left of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
from collections.abc import Callable

from headwater.errors import HeadwaterError, ReplicationFailed, UnknownReplica
from headwater.replication.host.figures import SessionEnd
from headwater.replication.host.hosting import Hosting, end_is_well
from headwater.replication.host.pace import patience_s
from headwater.replication.host.records import Facts
from headwater.replication.host.room import refuse_to_fill
from headwater.replication.host.scratch import Scratch
from headwater.replication.host.visit import Abort, Gone, Visit
from headwater.replication.host.words import PushComplete, PushConfig, config, config_of
from headwater.replication.local_files import make_private
from headwater.replication.names import MESSAGE, MESSAGE_CHARS_MAX, ReplicaName
from headwater.replication.rsync_stream import END, LAST_BYTES, TXN
from headwater.replication.threads import together, wait_out
from headwater.replication.tools import End, cpu_s_for

SLACK_BYTES = 1024 * 1024  # of what a stream or a journal says besides its pages
HEADS_PART = 8  # by how much the pages grow at most with what goes before each: an eighth
LOOK_BYTES = 32 * 1024 * 1024  # between two looks at how much room there is
STOP_S = 3.0  # for a push that is being checked when the server stops

logger = logging.getLogger("headwater")


class Push:
    """`refuse_no_more`: raises Abort when the client may not any more, for pages can be on their way for hours, and be
    checked for minutes. Blocking."""

    def __init__(self, hosting: Hosting, visit: Visit, name: ReplicaName, refuse_no_more: Callable[[], None]) -> None:
        self._hosting = hosting
        self._visit = visit
        self._name = name
        self._refuse_no_more = refuse_no_more
        self._received = 0
        self._sent = 0
        self._last_heard = b""
        self._complete: PushComplete | None = None
        self._size = 0
        self._stop = threading.Event()
        self.outcome: SessionEnd | None = None

    async def run(self) -> None:
        message, coming = await self._announcement()
        if (size := coming.pages * coming.page_size) > self._hosting.bytes_max:
            raise Abort("TOO_LARGE", f"the database has {size:,} bytes and the limit is {self._hosting.bytes_max:,}")
        shelf, threads = self._hosting.shelf, self._hosting.threads
        scratch = await threads.do_or_undo(shelf.discard, self._begin, coming, size)
        self._hosting.gatherings.push_began(self._name, self._visit.who)
        try:
            complete = await self._receive(scratch, coming)
            if complete is None:
                self.outcome = "dry"
            else:
                await threads.do(self._refuse_no_more)
                await self._finished(scratch, Facts(message, complete.dbhash, self._received + self._sent))
        finally:
            self._hosting.gatherings.push_ended(self._name, self._visit.who)
            await threads.do(shelf.discard, scratch)

    def _begin(self, coming: PushConfig, size: int) -> Scratch:
        """Blocking."""
        shelf = self._hosting.shelf
        replica, copied = shelf.find(self._name), 0
        if replica is not None and replica.newest:
            with contextlib.suppress(UnknownReplica):  # replaced just now, or removed
                copied = shelf.version(self._name, replica.newest).size
        self._size = max(size, copied)
        with self._hosting.room.promised(self._size):
            return shelf.begin(
                self._name,
                base=coming.base,
                push_id=coming.push_id,
                last_push_id=coming.last_push_id,
                base_hash=coming.base_hash,
                client=self._visit.client,
                page_size=coming.page_size,
            )

    async def _announcement(self) -> tuple[str, PushConfig]:
        first = await self._visit.next(self._hosting.idle_s)
        message = ""
        if isinstance(first, str) and first.startswith(MESSAGE):
            message = first.removeprefix(MESSAGE)
            if len(message) > MESSAGE_CHARS_MAX:
                raise Abort("FAILED", f"the message has more than {MESSAGE_CHARS_MAX:,} characters")
            first = await self._visit.next(self._hosting.idle_s)
        if first is None:
            raise Gone
        return message, config_of(first, PushConfig)

    # --- the pages ----------------------------------------------------------------------------------------------

    async def _receive(self, scratch: Scratch, coming: PushConfig) -> PushComplete | None:
        """What the client says when its end went well and ours too; None after a dry run."""
        # What comes is not to be trusted: whatever it makes our end do, no file gets larger than a database may be, and
        # no text without end fills the memory. What our end complains about, it tells the client's, too.
        directory, name = os.path.split(scratch.path)
        make_private(scratch.path)
        end = End(
            "--replica",
            f"./{name}",
            cwd=directory,
            cpu_s=cpu_s_for(self._size),
            file_bytes=_with_heads(self._hosting.bytes_max),
        )
        try:
            self._visit.expect_pages(patience_s(self._hosting.idle_s, self._size))
            await self._visit.send_text(
                config(replicaID=scratch.replica.id, replicaPath=self._name.path, base=scratch.base, ready=True)
            )
            await together(self._hear(end), self._speak(end))
            complete = self._complete
            assert complete is not None
            if coming.dry:
                raise Abort("FAILED", "a dry run has to end as one")
            await end.wait()
            if not self._has_heard_all:
                raise Abort("FAILED", "the stream of pages did not come to its end")
            return complete
        except _DryRunEnded:
            return None
        except ReplicationFailed as exc:
            raise _failure(exc.why, scratch) from exc
        finally:
            await end.gone()

    async def _hear(self, end: End) -> None:
        """Until the client says that it has sent all."""
        most = _with_heads(self._hosting.bytes_max)
        looked_at = 0
        while True:
            frame = await self._visit.next()
            if frame is None:
                raise Gone
            if isinstance(frame, str):
                break
            self._received += len(frame)
            if self._received > most:
                raise Abort("TOO_LARGE", f"more came than a database of {self._hosting.bytes_max:,} bytes needs")
            if self._received - looked_at > LOOK_BYTES:
                looked_at = self._received
                await self._hosting.threads.do(refuse_to_fill, self._hosting.shelf.directory, 0)
            end_is_well(end)
            await end.write(frame)
            self._last_heard = (self._last_heard + frame[-LAST_BYTES:])[-LAST_BYTES:]
        complete = config_of(frame, PushComplete)
        if not complete.complete:
            raise Abort("FAILED", "a push is complete, or it is cut off")
        self._complete = complete
        if complete.dry:
            raise _DryRunEnded
        end.close_input()

    @property
    def _has_heard_all(self) -> bool:
        last = self._last_heard
        return len(last) == LAST_BYTES and last[0] == TXN and last[-1] == END

    async def _speak(self, end: End) -> None:
        while data := await end.read():
            self._sent += len(data)
            if self._complete is None:  # the client's end has gone by then, and hears no more
                await self._visit.send_binary(data)
        if self._complete is None:
            # Our end has gone first. It told the client's why, which is no excuse for not telling the client itself.
            await end.wait()
            if not self._has_heard_all:
                raise ReplicationFailed("the server's end gave up before all pages were there")

    # --- the version --------------------------------------------------------------------------------------------

    async def _finished(self, scratch: Scratch, facts: Facts) -> None:
        """While it is checked, a client that leaves or a server that stops ends it. Once it is, it becomes a version,
        whatever happens."""
        self._visit.on_end = self._stop.set
        if self._visit.is_over:
            raise Gone
        finishing = asyncio.ensure_future(self._finish(scratch, facts))
        try:
            await asyncio.shield(finishing)
        except asyncio.CancelledError:
            asyncio.get_running_loop().call_later(STOP_S, self._stop.set)
            await wait_out(finishing)
            finishing.exception()  # the server goes, and the client hears of that
            raise

    async def _finish(self, scratch: Scratch, facts: Facts) -> None:
        hosting = self._hosting
        began_s = asyncio.get_running_loop().time()
        try:
            version, is_new = await hosting.threads.do(
                hosting.shelf.accept, scratch, facts, self._refuse_no_more, self._stop
            )
        except HeadwaterError as exc:
            logger.info("a push of %s was refused: %s", self._name.path, exc.why)
            raise
        finally:
            hosting.figures.observe_acceptance(asyncio.get_running_loop().time() - began_s)
        self.outcome = "accepted" if is_new else "unchanged"
        if is_new:
            hosting.figures.stir()
            told = {"version": version.number, "replica": self._name.path, "size": version.size}
            logger.info("version %(version)d of %(replica)s: %(size)d bytes", told, extra={"client": scratch.client})
            await hosting.announcer.announce(scratch.replica, version)
            hosting.gatherings.tell_version(scratch.replica, version.number)
        if self._visit.is_over:
            return
        await self._visit.send_text(
            config(
                committedVersionID=version.number,
                isNew=is_new,
                size=version.size,
                changedPages=version.changed_pages if is_new else 0,
                pageSize=version.page_size,
                pages=version.pages,
                replicaID=scratch.replica.id,
            )
        )


class _DryRunEnded(Exception):
    """The client knows what would move."""


def _with_heads(bytes_max: int) -> int:
    """What a stream or a journal takes at most for a database of so many bytes."""
    return bytes_max + bytes_max // HEADS_PART + SLACK_BYTES


def _failure(why: str, scratch: Scratch) -> Abort:
    why = why.replace(f"./{os.path.basename(scratch.path)}", "the copy on the server")
    if "disk is full" in why:
        return Abort("DISK_FULL", "the server's disk is full")
    if "larger than is allowed" in why:
        return Abort("TOO_LARGE", "the database is larger than the server allows")
    return Abort("FAILED", why)
