"""One pull: the database here becomes the same as a version of the replica, or stays as it is."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import Callable
from contextlib import AsyncExitStack

import msgspec

from headwater.errors import DiskFull, HeadwaterError, Locked, ReplicationFailed, Unreachable, UnsyncedChanges
from headwater.replication.beside import Beside, Noted
from headwater.replication.database_file import remove_database, remove_if_empty, replace_content, settle, shape_of
from headwater.replication.first_page import first_page_of, first_page_seen_by
from headwater.replication.link import CLOSE_S_MAX, CLOSED_EARLY, Hash, Link, Number, PageSize, ReplicaID, as_partial
from headwater.replication.local_files import no_room
from headwater.replication.names import Remote
from headwater.replication.outcome import OnProgress, Outcome, Phase, Progress
from headwater.replication.proof import Hashing
from headwater.replication.rsync_stream import LAST_BYTES, REPLICA_BEGIN, TXN, pages_in
from headwater.replication.shell import Shell
from headwater.replication.threads import thread_to_its_end
from headwater.replication.tools import End

GOOD_BYE_S_MAX = 60.0  # for the server to close when all is here


class PullOptions(msgspec.Struct, frozen=True, kw_only=True):
    client_id: str
    key: str | None = None
    ca: str | None = None
    dry: bool = False
    overwrite: bool = False


class WouldMove(msgspec.Struct):
    pages: Number
    bytes: Number


class Offer(msgspec.Struct, rename="camel"):
    """The server's CONFIG before the pages."""

    version: Number
    size: Number
    page_size: PageSize
    pages: Number
    replica_id: ReplicaID | None = msgspec.field(name="replicaID", default=None)
    dbhash: Hash | None = None


class Word(msgspec.Struct, rename="camel"):
    """A CONFIG of the server in the middle."""

    would_move: WouldMove | None = None


async def pull(remote: Remote, local: str, options: PullOptions, progress: OnProgress | None = None) -> Outcome:
    """Raises UnsyncedChanges when the database here has what was never pushed, or never came from this remote."""
    with Beside(local) as beside:
        async with AsyncExitStack() as stack:
            pulling = _Pull(remote, local, options, progress, beside, stack)
            try:
                return await pulling.run()
            finally:
                pulling.stop.set()


class _Pull:
    def __init__(
        self,
        remote: Remote,
        local: str,
        options: PullOptions,
        progress: OnProgress | None,
        beside: Beside,
        stack: AsyncExitStack,
    ) -> None:
        self._remote = remote
        self._local = local
        self._path = beside.database
        self._options = options
        self._progress = progress
        self._beside = beside
        self._stack = stack
        self._link = Link(remote.endpoint("pull"), key=options.key, ca=options.ca, client_id=options.client_id)
        self.stop = threading.Event()  # so that no thread waits for a lock when nobody waits for the thread
        self._sent = 0
        self._received = 0
        self._size = 0
        self._is_whole = False
        self._is_here = False  # or may be: from then on only the content tells which version it is
        self._last_heard = b""
        self._was_there = False
        self._watch: Shell | None = None
        self._head: str | None = None  # of the first page, before
        self._unwritten = ""  # the data_version of what was compared

    async def run(self) -> Outcome:
        started_s = time.monotonic()
        self._tell("preparing")
        shape = await asyncio.to_thread(shape_of, self._path, self.stop)
        page_size = None if shape is None else shape.page_size
        hashing = None
        if page_size is not None and self._options.overwrite:
            self._head = (await asyncio.to_thread(first_page_of, self._path, self.stop)).rest
        elif page_size is not None:
            self._watch = self._stack.enter_context(Shell(self._path, self.stop))
            self._unwritten = await asyncio.to_thread(self._watch.data_version)
            self._head = (await asyncio.to_thread(first_page_seen_by, self._watch)).rest
            hashing = self._hashing(self._path)
        await self._stack.enter_async_context(self._link)
        await self._link.send_config({"dry": self._options.dry})
        offer = await self._link.config(Offer)
        self._size = offer.size
        here = None
        if hashing is not None:
            here = await asyncio.to_thread(hashing.result_if_any)
            self._refuse_unsynced(here, offer)
        try:
            would_move = await self._move(offer, page_size)
        except Locked:
            raise
        except HeadwaterError as exc:
            if "database is locked" in exc.why:  # our end says it through the server as well
                raise Locked(
                    "somebody is writing it", where=self._path, next="Try again when its transaction has ended"
                ) from exc
            if "database or disk is full" in exc.why and not isinstance(exc, DiskFull):  # the same
                exc = no_room(self._path)
            raise as_partial(exc) from exc
        self._tell("finishing")
        noted = self._beside.noted(self._remote)
        dbhash, head = offer.dbhash, self._head_of(offer, noted, here)
        if not self._options.dry:
            dbhash, head = await self._proved(offer)
            noted = Noted(replica_id=offer.replica_id, base=offer.version, dbhash=dbhash, head=head)
            self._beside.note(self._remote, noted)
        if would_move is not None:
            self._received += would_move.bytes
            changed_pages = would_move.pages
        else:
            changed_pages = pages_in(self._received, offer.page_size)
        if changed_pages == 1 and head is not None and head == self._head:
            changed_pages = 0  # what moved counts the commits of the replica, which is not content
        return Outcome(
            kind="pull",
            local=self._local,
            remote=self._remote.key,
            version=offer.version,
            is_new=changed_pages > 0,
            base=offer.version,
            size=offer.size,
            pages=offer.pages,
            page_size=offer.page_size,
            sent=self._sent,
            received=self._received,
            seconds=time.monotonic() - started_s,
            changed_pages=changed_pages,
            dbhash=dbhash,
            dry=self._options.dry,
        )

    def _tell(self, phase: Phase) -> None:
        if self._progress is not None:
            self._progress(Progress(self._sent, self._received, self._size, phase))

    def _hashing(self, path: str) -> Hashing:
        hashing = Hashing(path, live=True)
        self._stack.push_async_callback(hashing.gone)
        return hashing

    def _head_of(self, offer: Offer, noted: Noted, here: str | None) -> str | None:
        """Of the first page of the version, as far as it is known without a pull."""
        if noted.head is not None and (noted.base, noted.replica_id) == (offer.version, offer.replica_id):
            return noted.head
        return self._head if here is not None and here == offer.dbhash else None

    def _refuse_unsynced(self, here: str | None, offer: Offer) -> None:
        noted = self._beside.noted(self._remote)
        if here is not None and here in (offer.dbhash, noted.dbhash, noted.pulling):
            return
        why = "it was never synced with this remote"
        if here is None:
            why = "whether it has changed cannot be told without the functions of its application"
        elif noted.base:
            why = f"it has changed since version {noted.base}"
        raise UnsyncedChanges(
            f"a pull would overwrite this database, and {why}",
            where=self._path,
            next="Push it first, pull into another file, or say --overwrite",
        )

    def _refuse_written(self) -> None:
        """What somebody wrote since it was compared would be lost. Asked while our end keeps all others from writing,
        and has not written itself. Blocks."""
        if self._options.overwrite or self._options.dry:
            return
        if self._watch is None:
            was_written = shape_of(self._path, self.stop) is not None
        else:
            was_written = self._watch.data_version() != self._unwritten
        if was_written:
            raise Locked("somebody wrote it meanwhile", where=self._path, next="Try again")  # and be told what changed

    async def _move(self, offer: Offer, page_size: int | None) -> WouldMove | None:
        """All pages. The file is as before if this fails, or gone if it was not there."""
        if self._options.dry and page_size != offer.page_size:
            return await self._receive(self._beside.pulled_path)
        noted = self._beside.noted(self._remote)
        was_there = self._was_there = os.path.exists(self._path)
        try:
            if was_there and not self._options.dry:
                pulling = msgspec.structs.replace(noted, pulling=offer.dbhash or "")
                await thread_to_its_end(self._beside.note, self._remote, pulling, durable=False)
            if page_size in (None, offer.page_size):
                return await self._receive(self._path)
            # A replica keeps its page size: it is made anew beside, and its content put in place.
            await self._receive(self._beside.pulled_path)
            await thread_to_its_end(self._replace)
            return None
        except BaseException as exc:
            if not was_there:
                remove_if_empty(self._path)
            if self._is_here and os.path.exists(self._path):
                noted = await self._found_here(offer, noted, exc)
            if not self._options.dry:
                with contextlib.suppress(HeadwaterError):  # `pulling` stays noted, which is on the safe side
                    self._beside.note(self._remote, noted, durable=False)
            raise

    def _replace(self) -> None:
        """By the connection that has been there since the comparison: it knows whether somebody has written. Blocks."""

        def begin() -> None:
            self._refuse_written()
            self._is_here = True

        with self._watch or Shell(self._path) as shell:
            replace_content(self._beside.pulled_path, shell, begin)

    async def _found_here(self, offer: Offer, noted: Noted, fault: BaseException) -> Noted:
        """Our end wrote everything without a complaint, and then something failed. Perhaps only the good-bye was lost;
        perhaps our end could not write after all and told only the server. The content decides which version is
        here."""
        unknown = msgspec.structs.replace(noted, pulling=offer.dbhash or "")
        if not isinstance(fault, HeadwaterError):  # no time for a look
            return unknown
        try:
            here, _, was_written = await asyncio.to_thread(_hash_now, self._hashing, self._path)
        except HeadwaterError:
            return unknown
        if here is None or was_written or here not in (offer.dbhash, noted.dbhash):
            return unknown
        if here == offer.dbhash:
            return Noted(replica_id=offer.replica_id, base=offer.version, dbhash=here)
        return noted

    async def _receive(self, path: str) -> WouldMove | None:
        replica = await End.replica(path)
        try:
            speaking = asyncio.create_task(self._speak(replica, path))
            hearing = asyncio.create_task(self._hear(replica))
            try:
                await self._link.first_of(speaking, hearing, lambda: self._sent + self._received)
                if hearing.done():  # it ends early only by an error, or because this is a dry run
                    return await hearing
                await speaking
                await replica.wait()
                self._is_whole = True
                try:
                    await self._link.send_config({"complete": True})
                except Unreachable:  # perhaps the server has said why, and that is yet to be heard
                    await asyncio.wait({hearing}, timeout=CLOSE_S_MAX)
                    if hearing.done():
                        await hearing
                    raise
                await asyncio.wait({hearing}, timeout=GOOD_BYE_S_MAX)
                if not hearing.done():
                    raise Unreachable("the server did not say good-bye", where=self._link.shown, next="Try again")
                return await hearing
            finally:
                for task in (speaking, hearing):
                    task.cancel()
                await asyncio.gather(speaking, hearing, return_exceptions=True)
        finally:
            # It commits when it hears TXN; that is almost the last thing, so what is cut off before has none.
            self._is_here = path == self._path and (self._is_whole or TXN in self._last_heard)
            await replica.gone()
            if path == self._path and not self._is_whole:
                await settle(path)

    async def _speak(self, replica: End, path: str) -> None:
        has_locked = path != self._path
        while data := await replica.read():
            if not has_locked and data[0] != REPLICA_BEGIN:  # what it answers first, if it cannot speak as newly
                await asyncio.to_thread(self._refuse_written)
                has_locked = True
            await self._link.send(data)
            self._sent += len(data)

    async def _hear(self, replica: End) -> WouldMove | None:
        """Until the server closes: it does so in order only when its end is content too."""
        while True:
            frame = await self._link.next()
            if isinstance(frame, bytes):
                self._received += len(frame)
                self._last_heard = (self._last_heard + frame[-LAST_BYTES:])[-LAST_BYTES:]
                await replica.write(frame)
                self._tell("moving")
            elif frame is not None:
                word = self._link.config_of(frame, Word)
                if word.would_move is not None:
                    return word.would_move
            elif not self._is_whole:
                raise ReplicationFailed(CLOSED_EARLY, where=self._link.shown)
            else:
                return None

    async def _proved(self, offer: Offer) -> tuple[str | None, str | None]:
        """The hash of what is here now, and that of its first page: those of the version, unless somebody has written
        already."""
        here, head, was_written = await asyncio.to_thread(_hash_now, self._hashing, self._path)
        if was_written:
            return offer.dbhash, None
        if offer.dbhash is None or here is None or here == offer.dbhash:
            return offer.dbhash or here, head
        why, again = "what came is not the content of version {}", "pull again"
        if self._was_there:
            why, again = why + ", and it is in this file: do not trust it", "pull again with --overwrite"
        else:
            await asyncio.to_thread(remove_database, self._path)
        raise ReplicationFailed(
            why.format(offer.version),
            where=self._path,
            next=f"Verify the replica first: headwater replica verify {self._remote.key}@{offer.version}; then {again}",
        )


def _hash_now(hashing: Callable[[str], Hashing], path: str) -> tuple[str | None, str, bool]:
    """With that of the first page, and whether somebody wrote the database meanwhile. We open it first:
    `sqlite3_dbhash` waits for no lock."""
    with Shell(path) as shell:
        before = shell.data_version()
        here, head = hashing(path).result_if_any(), first_page_seen_by(shell).rest
        return here, head, shell.data_version() != before
