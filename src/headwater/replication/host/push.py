"""The server's side of a push: pages are written into a scratch copy of the newest version, which becomes the next one.

Whatever fails before that, nothing of it is left.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass

from headwater.errors import HeadwaterError, ReplicationFailedError, UnknownReplicaError
from headwater.replication.host.disk import refuse_to_fill
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
from headwater.replication.host.store import Scratch
from headwater.replication.local_database import make_private
from headwater.replication.names import ReplicaName
from headwater.replication.protocol import MESSAGE, MESSAGE_CHARS_MAX, PushComplete, PushConfig
from headwater.replication.rsync import OriginStream, RsyncProcess
from headwater.replication.sqlite_tools import cpu_s_for
from headwater.replication.threads import together, wait_out

SLACK_BYTES = 1024 * 1024  # of a stream or a journal, besides its pages
HEADS_PART = 8  # the headers of pages add an eighth at most
SPACE_CHECK_BYTES = 32 * 1024 * 1024  # between two looks at the free space
STOP_S = 3.0  # for a push that is being checked when the server stops

logger = logging.getLogger("headwater")


@dataclass(eq=False)
class PushSession:
    """`check_rights` raises Abort when the client may not push any more: pages may move for hours, and be checked for
    minutes. Blocks."""

    context: HostContext
    session: ReplicaSession
    name: ReplicaName
    check_rights: Callable[[], None]
    outcome: SessionOutcome | None = None

    def __post_init__(self) -> None:
        self._received = OriginStream()
        self._sent = 0
        self._complete: PushComplete | None = None
        self._size = 0
        self._stop = threading.Event()

    async def run(self) -> None:
        message, asked = await self._first_frames()
        if (size := asked.pages * asked.page_size) > self.context.bytes_max:
            raise Abort("TOO_LARGE", f"the database has {size:,} bytes and the limit is {self.context.bytes_max:,}")
        store, threads = self.context.store, self.context.threads
        scratch = await threads.do_or_undo(store.discard_push, self._begin, asked, size)
        try:
            with (
                self.context.subscribers.of(self.name) as subscribers,
                subscribers.pushing(self.session.identity),
            ):
                complete = await self._receive_all(scratch, asked)
                if complete is None:
                    self.outcome = "dry"
                else:
                    await threads.do(self.check_rights)
                    await self._accept(scratch, message, complete.dbhash)
        finally:
            await threads.do(store.discard_push, scratch)

    def _begin(self, asked: PushConfig, size: int) -> Scratch:
        """Blocks."""
        store = self.context.store
        replica, copied = store.catalogue.find(self.name), 0
        if replica is not None and replica.newest:
            with contextlib.suppress(UnknownReplicaError):  # replaced just now, or removed
                copied = store.catalogue.get_version(self.name, replica.newest).size
        self._size = max(size, copied)
        with self.context.space.reserved(self._size):
            return store.begin_push(
                self.name,
                base=asked.base,
                push_id=asked.push_id,
                last_push_id=asked.last_push_id,
                base_hash=asked.base_hash,
                client=self.session.client,
                page_size=asked.page_size,
            )

    async def _first_frames(self) -> tuple[str, PushConfig]:
        first, message = await self.session.first(self.context.idle_s), ""
        if isinstance(first, str) and first.startswith(MESSAGE):
            message = first.removeprefix(MESSAGE)
            if len(message) > MESSAGE_CHARS_MAX:
                raise Abort("FAILED", f"the message has more than {MESSAGE_CHARS_MAX:,} characters")
            first = await self.session.first(self.context.idle_s)
        return message, config_of(first, PushConfig)

    # --- the pages ----------------------------------------------------------------------------------------------

    async def _receive_all(self, scratch: Scratch, asked: PushConfig) -> PushComplete | None:
        """The client's last CONFIG, when both processes have succeeded; None after a dry run."""
        # The pages are not trusted: whatever they make the replica process do, no file exceeds the size limit, and its
        # error output is limited. Its error messages, which the client sees, name the file without its directory.
        directory, name = os.path.split(scratch.path)
        make_private(scratch.path)
        replica = RsyncProcess(
            "--replica",
            f"./{name}",
            cwd=directory,
            cpu_s=cpu_s_for(self._size),
            file_bytes=_with_heads(self.context.bytes_max),
        )
        try:
            self.session.expect_pages(patience_s(self.context.idle_s, self._size))
            await self.session.send_text(
                config(replicaID=scratch.replica.id, replicaPath=self.name.path, base=scratch.base, ready=True)
            )
            await together(self._receive(replica), self._send(replica))
            complete = self._complete
            assert complete is not None
            if asked.dry:
                raise Abort("FAILED", "a dry run has to end as one")
            await replica.wait()
            if not self._received.has_ended:
                raise Abort("FAILED", "the stream of pages did not come to its end")
            return complete
        except _DryRunEnded:
            return None
        except ReplicationFailedError as exc:
            raise _failure(exc.why, scratch) from exc
        finally:
            await replica.gone()

    async def _receive(self, replica: RsyncProcess) -> None:
        """Receive until the client has sent everything."""
        limit = _with_heads(self.context.bytes_max)
        space_checked_at = 0
        while True:
            frame = await self.session.next()
            if frame is None:
                raise Gone
            if isinstance(frame, str):
                break
            self._received.feed(frame)
            if self._received.bytes > limit:
                raise Abort("TOO_LARGE", f"more came than a database of {self.context.bytes_max:,} bytes needs")
            if self._received.bytes - space_checked_at > SPACE_CHECK_BYTES:
                space_checked_at = self._received.bytes
                await self.context.threads.do(refuse_to_fill, self.context.store.directory, 0)
            replica.refuse_error_output()
            await replica.write(frame)
        complete = config_of(frame, PushComplete)
        if not complete.complete:
            raise Abort("FAILED", "a push is complete, or it is cut off")
        self._complete = complete
        if complete.dry:
            raise _DryRunEnded
        replica.close_input()

    async def _send(self, replica: RsyncProcess) -> None:
        while data := await replica.read():
            self._sent += len(data)
            if self._complete is None:  # afterwards the client's process has exited
                await self.session.send_binary(data)
        if self._complete is None:
            # The replica process has exited first. It sent the reason to the client's process; the session ends with
            # it.
            await replica.wait()
            if not self._received.has_ended:
                raise ReplicationFailedError("the server's end gave up before all pages were there")

    # --- the version --------------------------------------------------------------------------------------------

    async def _accept(self, scratch: Scratch, message: str, dbhash: str | None) -> None:
        """Check the copy and make it a version. During the check, a disconnected client or a stopping server ends it;
        after the check it becomes a version in any case."""
        self.session.on_end = self._stop.set
        if self.session.is_over:
            raise Gone
        finishing = asyncio.ensure_future(self._accept_and_answer(scratch, message, dbhash))
        try:
            await asyncio.shield(finishing)
        except asyncio.CancelledError:
            asyncio.get_running_loop().call_later(STOP_S, self._stop.set)
            await wait_out(finishing)
            finishing.exception()  # retrieved: the client receives that the server stops
            raise

    async def _accept_and_answer(self, scratch: Scratch, message: str, dbhash: str | None) -> None:
        context = self.context
        began_s = asyncio.get_running_loop().time()
        try:
            version, is_new = await context.threads.do(
                context.store.accept_push,
                scratch,
                message=message,
                dbhash=dbhash,
                wire_bytes=self._received.bytes + self._sent,
                check_rights=self.check_rights,
                stop=self._stop,
            )
        except HeadwaterError as exc:
            logger.info("a push of %s was refused: %s", self.name.path, exc.why)
            raise
        finally:
            context.metrics.observe_acceptance(asyncio.get_running_loop().time() - began_s)
        self.outcome = "accepted" if is_new else "unchanged"
        if is_new:
            context.metrics.refresh()
            details = {"version": version.number, "replica": self.name.path, "size": version.size}
            logger.info("version %(version)d of %(replica)s: %(size)d bytes", details, extra={"client": scratch.client})
            await context.announcer.announce(scratch.replica, version)
            context.subscribers.announce_version(scratch.replica, version.number)
        if self.session.is_over:
            return
        await self.session.send_text(
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
    """The client has ended a dry run; its pages are discarded."""


def _with_heads(bytes_max: int) -> int:
    """The largest stream or journal of a database of so many bytes."""
    return bytes_max + bytes_max // HEADS_PART + SLACK_BYTES


def _failure(why: str, scratch: Scratch) -> Abort:
    why = why.replace(f"./{os.path.basename(scratch.path)}", "the copy on the server")
    if "disk is full" in why:
        return Abort("DISK_FULL", "the server's disk is full")
    if "larger than is allowed" in why:
        return Abort("TOO_LARGE", "the database is larger than the server allows")
    return Abort("FAILED", why)
