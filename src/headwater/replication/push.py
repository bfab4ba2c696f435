"""One push: the database here becomes the newest version of its replica, or nothing changes there."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from typing import Any

import msgspec

from headwater.errors import DiskFull, HeadwaterError, InvalidOption, ReplicationFailed, VersionConflict
from headwater.replication.asking import newest_of
from headwater.replication.beside import Beside, Noted
from headwater.replication.conflicts import (
    Recognised,
    another_replica,
    half_pulled,
    no_such_base,
    nothing_written,
    recognised,
    stale,
)
from headwater.replication.database_file import settle, shape_aside
from headwater.replication.first_page import rest_of_first_page
from headwater.replication.link import CLOSED_EARLY, Link, Number, ReplicaID, abort_of, as_partial, is_cut
from headwater.replication.names import ABORT, MESSAGE, MESSAGE_CHARS_MAX, Remote
from headwater.replication.outcome import OnProgress, Outcome, Phase, Progress
from headwater.replication.proof import Hashing
from headwater.replication.rsync_stream import (
    BEGIN_BYTES,
    END,
    LAST_BYTES,
    REPLICA_ERROR,
    TXN,
    OriginStream,
    error_at_the_end,
)
from headwater.replication.snapshot import Snapshot, snapshot_aside
from headwater.replication.threads import thread_to_its_end
from headwater.replication.tools import End

LAST_WORD_S_MAX = 2.0  # for the server to say why, when its end has failed


logger = logging.getLogger("headwater")


class PushOptions(msgspec.Struct, frozen=True, kw_only=True):
    client_id: str
    message: str = ""
    key: str | None = None
    ca: str | None = None
    dry: bool = False

    def without_message(self) -> PushOptions:
        return msgspec.structs.replace(self, message="")


class Ready(msgspec.Struct, rename="camel"):
    """The server's CONFIG before the pages."""

    replica_id: ReplicaID | None = msgspec.field(name="replicaID", default=None)
    base: Number = 0
    ready: bool = False


class Committed(msgspec.Struct, rename="camel"):
    """The server's CONFIG after them."""

    version: Number = msgspec.field(name="committedVersionID")
    is_new: bool = False
    changed_pages: Number = 0
    replica_id: ReplicaID | None = msgspec.field(name="replicaID", default=None)


async def push(local: str, remote: Remote, options: PushOptions, progress: OnProgress | None = None) -> Outcome:
    """Raises VersionConflict when the replica has a newer version than the one this database comes from."""
    if len(options.message) > MESSAGE_CHARS_MAX:
        raise InvalidOption(f"a message has at most {MESSAGE_CHARS_MAX} characters", where=remote.key)
    consent = _consent(remote)
    with Beside(local) as beside:
        noted = beside.noted(remote)

        async def attempt(noted: Noted, *, is_first: bool) -> Outcome:
            async with AsyncExitStack() as stack:
                pushing = _Push(local, remote, options, progress, beside, stack)
                return await pushing.run(consent, noted, may_recognise=is_first)

        try:
            return await attempt(noted, is_first=True)
        except Recognised as exc:
            noted = exc.noted
            logger.info("%s is known as version %d of %s", local, noted.base, remote.key)
        except VersionConflict as exc:
            is_gone = not exc.newest and noted.base > 0
            if not is_gone or consent is not None:
                raise
            # Where nothing is, nothing can be overwritten; a server that lost its disk is to be filled again.
            would = "would be" if options.dry else "is"
            logger.warning("the server has no version of %s any more: it %s pushed anew", remote.key, would)
            noted = Noted()
        if not options.dry:
            beside.note(remote, noted)
        return await attempt(noted, is_first=False)


def _consent(remote: Remote) -> int | str | None:
    """The base that the caller names, if any: `@4` or `@latest`."""
    version = remote.version
    if version is None:
        return None
    if version.number is not None:
        return int(version.number)
    if version.back:
        raise InvalidOption(
            "a push is from a version by its number, or over the newest one",
            where=remote.key,
            next="Write @4 or @latest",
        )
    return "latest"


class _Push:
    def __init__(
        self,
        local: str,
        remote: Remote,
        options: PushOptions,
        progress: OnProgress | None,
        beside: Beside,
        stack: AsyncExitStack,
    ) -> None:
        self._local = local
        self._remote = remote
        self._options = options
        self._progress = progress
        self._beside = beside
        self._stack = stack
        self._link = Link(remote.endpoint("push"), key=options.key, ca=options.ca, client_id=options.client_id)
        self._sent = 0
        self._received = 0
        self._size = 0

    async def run(self, consent: int | str | None, noted: Noted, *, may_recognise: bool) -> Outcome:
        started_s = time.monotonic()
        # While it is not known what became of a push, the next ones go by the same id: whichever the server takes, and
        # be it the first one, late, it is known as ours.
        push_id = noted.last_push_id or uuid.uuid4().hex
        if consent is None and noted.pulling is not None:
            raise half_pulled(self._remote, self._local)
        self._tell("preparing")
        await shape_aside(self._beside.database)  # what is no database is not the server's business
        taken = await self._snapshot_and_connect()
        self._size = taken.size
        hashing = None
        if taken.is_copy and not self._options.dry:
            hashing = Hashing(taken.path)
            self._stack.push_async_callback(hashing.gone)
        if not taken.is_copy:
            self._stack.push_async_callback(settle, taken.path)
        origin = await End.origin(taken.path)
        self._stack.push_async_callback(origin.gone)
        try:
            agreed = await self._ask(taken, noted, noted.base if consent is None else consent, push_id)
        except VersionConflict as exc:
            if consent is None and exc.newest:
                raise await self._explained(exc, taken, noted, may_recognise) from exc
            if isinstance(consent, int) and consent > exc.newest:
                raise no_such_base(exc, consent, self._remote) from exc
            raise
        head = await asyncio.to_thread(rest_of_first_page, taken)
        if consent is None and noted.base and noted.replica_id not in (None, agreed.replica_id):
            raise another_replica(agreed.base, self._remote)
        try:
            if self._options.dry:
                stream = await self._count(origin)
                is_alike = agreed.base == noted.base > 0 and head == noted.head is not None
                # The counters of its first page are all that differs: of this the server makes no version.
                pages = 0 if stream.pages == 1 and stream.has_first_page and is_alike else stream.pages
                committed, dbhash = Committed(version=0, changed_pages=pages, is_new=pages > 0), None
            else:
                attempt = _attempt(noted, consent, agreed, push_id)
                committed, dbhash = await self._move_and_commit(origin, hashing, attempt)
        except HeadwaterError as exc:
            raise as_partial(exc) from exc
        if not self._options.dry:
            replica_id = committed.replica_id or agreed.replica_id
            result = Noted(replica_id=replica_id, base=committed.version, dbhash=dbhash, head=head)
            # If a crash of the machine takes it back, the server knows the push by its id, which is on disk.
            self._beside.note(self._remote, result, durable=False)
        return Outcome(
            kind="push",
            local=self._local,
            remote=self._remote.key,
            version=None if self._options.dry else committed.version,
            is_new=committed.is_new,
            base=agreed.base,
            size=taken.size,
            pages=taken.pages,
            page_size=taken.page_size,
            sent=self._sent,
            received=self._received,
            seconds=time.monotonic() - started_s,
            changed_pages=committed.changed_pages,
            dbhash=dbhash,
            dry=self._options.dry,
        )

    def _tell(self, phase: Phase) -> None:
        if self._progress is not None:
            self._progress(Progress(self._sent, self._received, self._size, phase))

    async def _explained(
        self, conflict: VersionConflict, taken: Snapshot, noted: Noted, may_recognise: bool
    ) -> VersionConflict | Recognised:
        newest = await asyncio.to_thread(newest_of, self._remote, self._options.key, self._options.ca)
        here = None
        if taken.is_copy and (noted.dbhash or (newest is not None and newest.dbhash)):
            hashing = Hashing(taken.path)
            self._stack.push_async_callback(hashing.gone)
            here = await asyncio.to_thread(hashing.result_if_any)
        if may_recognise and newest is not None:
            known = recognised(newest, here, noted, self._beside)
            if known is not None:
                return Recognised(known)
        if noted.base and here is not None and here == noted.dbhash:
            return nothing_written(conflict, noted.base, self._remote, self._local)
        return stale(conflict, noted.base, self._remote)

    async def _move_and_commit(
        self, origin: End, hashing: Hashing | None, attempt: Noted
    ) -> tuple[Committed, str | None]:
        noting = asyncio.create_task(thread_to_its_end(self._beside.note, self._remote, attempt))
        self._stack.push_async_callback(lambda: asyncio.gather(noting, return_exceptions=True))
        await self._move(origin)
        self._tell("finishing")
        dbhash = await asyncio.to_thread(hashing.result_if_any) if hashing else None
        await noting
        return await self._complete(dbhash), dbhash

    async def _snapshot_and_connect(self) -> Snapshot:
        """Both at once; when there is no connection, the snapshot is not waited for."""
        copying = asyncio.create_task(snapshot_aside(self._beside.database, self._beside.snapshot_path))
        try:
            await self._stack.enter_async_context(self._link)
            return await copying
        finally:
            copying.cancel()
            await asyncio.gather(copying, return_exceptions=True)

    async def _ask(self, taken: Snapshot, noted: Noted, base: int | str, push_id: str) -> Ready:
        if self._options.message:
            await self._link.send_text(MESSAGE + self._options.message)
        await self._link.send_config(
            {
                "base": base,
                "pushID": push_id,
                "lastPushID": noted.last_push_id,
                "baseHash": noted.dbhash if base == noted.base else None,
                "pageSize": taken.page_size,
                "pages": taken.pages,
                "dry": self._options.dry,
            }
        )
        agreed = await self._link.config(Ready)
        if not agreed.ready:
            raise ReplicationFailed("the server is not ready", where=self._link.shown)
        return agreed

    async def _move(self, origin: End) -> None:
        """All pages; returns when our end has gone and is content."""
        back = asyncio.create_task(self._hear(origin))
        try:
            await self._unless_aborted(self._speak(origin), back)
            try:
                await origin.wait()
            except ReplicationFailed as exc:
                # It repeats what the server's end told it; the server itself may say it better.
                await asyncio.wait({back}, timeout=LAST_WORD_S_MAX)
                if back.done():
                    await back
                raise _at_the_server(exc.why, self._link.shown) from exc
            if back.done():
                await back
        finally:
            back.cancel()
            await asyncio.gather(back, return_exceptions=True)

    async def _unless_aborted(self, work: Coroutine[Any, Any, None], back: asyncio.Task[None]) -> None:
        """Do it, unless the server ends the session first: then raise why."""
        working = asyncio.create_task(work)
        try:
            await self._link.first_of(working, back, lambda: self._sent + self._received)
            if not working.done() or (back.done() and is_cut(working)):
                await back
            await working
        finally:
            working.cancel()
            await asyncio.gather(working, return_exceptions=True)

    async def _speak(self, origin: End) -> None:
        head = tail = b""
        while data := await origin.read():
            await self._link.send(data)
            self._sent += len(data)
            head = head if len(head) == BEGIN_BYTES else (head + data[:BEGIN_BYTES])[:BEGIN_BYTES]
            tail = (tail + data[-LAST_BYTES:])[-LAST_BYTES:]
            if tail == bytes([TXN]) + head[-4:] + bytes([END]):
                # It has said all, and goes when it knows that it will hear no more. Should a page happen to look like
                # this, no harm is done: while pages are sent, an origin does not listen.
                origin.close_input()
            self._tell("moving")

    async def _hear(self, origin: End) -> None:
        """Until cancelled; ends only by an error."""
        while True:
            frame = await self._link.next()
            if isinstance(frame, bytes):
                self._received += len(frame)
                if origin.is_deaf:
                    _refuse_last_words(frame, self._link.shown)
                await origin.write(frame)
            elif frame is None:
                raise ReplicationFailed(CLOSED_EARLY, where=self._link.shown)
            elif frame.startswith(ABORT):
                raise abort_of(frame, self._link.shown)

    async def _count(self, origin: End) -> OriginStream:
        """Up to the first page as in earnest; then the pages are counted here and go nowhere."""
        stream = OriginStream()
        back = asyncio.create_task(self._hear(origin))
        try:
            await self._unless_aborted(self._speak_dry(origin, stream), back)
        finally:
            back.cancel()
            await asyncio.gather(back, return_exceptions=True)
        await self._link.send_config({"complete": True, "dry": True})
        return stream

    async def _speak_dry(self, origin: End, stream: OriginStream) -> None:
        while not stream.ended and (data := await origin.read()):
            through = stream.feed(data)
            if through:
                await self._link.send(through)
            self._sent += len(data)
        stream.finish()

    async def _complete(self, dbhash: str | None) -> Committed:
        await self._link.send_config({"complete": True, "dbhash": dbhash})
        while True:
            frame = await self._link.answer()
            if frame is None:
                raise ReplicationFailed("the server closed the session without an answer", where=self._link.shown)
            if isinstance(frame, str):
                return self._link.config_of(frame, Committed)
            self._received += len(frame)
            _refuse_last_words(frame, self._link.shown)


def _attempt(noted: Noted, consent: int | str | None, agreed: Ready, push_id: str) -> Noted:
    """To be noted before the server hears that all is sent: should its answer be lost, the next push can say which it
    was. With it goes the base that the server agreed to, but not one that the caller insisted on."""
    if consent is None and agreed.base != noted.base:
        return Noted(replica_id=agreed.replica_id, base=agreed.base, last_push_id=push_id)
    return msgspec.structs.replace(noted, last_push_id=push_id)


def _refuse_last_words(frame: bytes, where: str) -> None:
    """What the server's end says after the last page can only be that it failed."""
    if frame:
        raise _at_the_server(error_at_the_end(frame, REPLICA_ERROR) or "it went on talking", where)


def _at_the_server(why: str, where: str) -> HeadwaterError:
    if "disk is full" in why:
        return DiskFull(f"the server's end said: {why}", where=where, next="Free some disk space on the server")
    return ReplicationFailed(f"the server's end said: {why}", where=where)
