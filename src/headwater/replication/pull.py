"""One pull: the local database becomes equal to a version of the replica, or stays as it is."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass

import msgspec

from headwater.errors import (
    DiskFullError,
    HeadwaterError,
    LockedError,
    ReplicationFailedError,
    UnreachableError,
    UnsyncedChangesError,
)
from headwater.replication.connection import CLOSE_S_MAX, CLOSED_EARLY, ReplicaConnection, as_partial
from headwater.replication.integrity import dbhash_if_any, hashing
from headwater.replication.local_database import (
    Shell,
    no_space,
    remove_database,
    remove_if_empty,
    replace_content,
    require_shape,
    settle,
    shape_of,
)
from headwater.replication.names import Remote
from headwater.replication.outcome import OnProgress, Outcome, Phase, Progress, TransferOptions
from headwater.replication.protocol import PullOffer
from headwater.replication.rsync import REPLICA_BEGIN, OriginStream, RsyncProcess
from headwater.replication.snapshot import take_snapshot
from headwater.replication.sync_state import SyncRecord, SyncState
from headwater.replication.threads import running, thread_to_its_end

CLOSING_S_MAX = 60.0  # for the server to close the session after all pages are written


async def pull(remote: Remote, local: str, options: TransferOptions, progress: OnProgress | None = None) -> Outcome:
    """Raises UnsyncedChangesError when the local database has changes that were never pushed, or never came from this
    remote.

    A dry run pulls into a private copy of the database, which is removed."""
    with SyncState(local) as state:
        async with AsyncExitStack() as stack:
            pulling = _Pull(remote, local, options, progress, state, stack)
            try:
                return await pulling.run()
            finally:
                pulling.stop.set()


@dataclass(eq=False)
class _Pull:
    remote: Remote
    local: str
    options: TransferOptions
    progress: OnProgress | None
    state: SyncState
    stack: AsyncExitStack

    def __post_init__(self) -> None:
        self._path = self.state.database
        self._connection = ReplicaConnection(self.remote.endpoint("pull"), self.options)
        self.stop = threading.Event()  # so that no thread goes on waiting for a lock after a cancellation
        self._sent = 0
        self._received = OriginStream()
        self._size = 0
        self._is_whole = False
        self._may_be_written = False  # from then on only the content shows which version it is
        self._was_there = False
        self._compared: Shell | None = None  # the connection through which the database was compared
        self._compared_version = ""  # its data_version then
        self._head: str | None = None  # the hash of the first page before the pull

    async def run(self) -> Outcome:
        started_s = time.monotonic()
        self._report("preparing")
        shape = await asyncio.to_thread(shape_of, self._path, self.stop)
        page_size = here = None
        if shape is not None and not self.options.overwrite:
            self._compared = self.stack.enter_context(Shell(self._path, self.stop))
            self._compared_version = await asyncio.to_thread(self._compared.data_version)
            shape = await asyncio.to_thread(self._compared.shape)  # once more: it may have been written
            here = await self.stack.enter_async_context(hashing(self._path, live=True))
        if shape is not None:
            page_size, self._head = shape.page_size, shape.head
        await self.stack.enter_async_context(self._connection)
        await self._connection.send_config({})
        offer = await self._connection.config(PullOffer)
        self._size = offer.size
        self._received = OriginStream(offer.page_size)
        if here is not None:
            self._refuse_unsynced(await here, offer)
        try:
            await self._move(offer, page_size)
        except LockedError:
            raise
        except HeadwaterError as exc:
            if "database is locked" in exc.why:  # the local process reports it through the server, too
                raise LockedError(
                    "a program is writing it", where=self._path, next="Try again when its transaction has ended"
                ) from exc
            if "database or disk is full" in exc.why and not isinstance(exc, DiskFullError):  # the same
                exc = no_space(self._path)
            raise as_partial(exc) from exc
        self._report("finishing")
        head: str | None
        if self.options.dry:
            dbhash = offer.dbhash
            head = (await require_shape(self.state.pulled_path)).head
        else:
            dbhash, head = await self._proved(offer)
            record = SyncRecord(replica_id=offer.replica_id, base=offer.version, dbhash=dbhash, head=head)
            self.state.save(self.remote, record)
        changed_pages = self._received.changed_pages(is_first_page_same=head == self._head is not None)
        return Outcome(
            kind="pull",
            local=self.local,
            remote=self.remote.key,
            version=offer.version,
            is_new=changed_pages > 0,
            base=offer.version,
            size=offer.size,
            pages=offer.pages,
            page_size=offer.page_size,
            sent=self._sent,
            received=self._received.bytes,
            seconds=time.monotonic() - started_s,
            changed_pages=changed_pages,
            dbhash=dbhash,
            dry=self.options.dry,
        )

    def _report(self, phase: Phase) -> None:
        if self.progress is not None:
            self.progress(Progress(self._sent, self._received.bytes, self._size, phase))

    # --- unsynced changes -----------------------------------------------------------------------------------------

    def _refuse_unsynced(self, here: str | None, offer: PullOffer) -> None:
        record = self.state.load(self.remote)
        if here is not None and here in (offer.dbhash, record.dbhash, record.pulling):
            return
        why = "it was never synced with this remote"
        if here is None:
            why = "a change cannot be detected without the functions of its application"
        elif record.base:
            why = f"it has changed since version {record.base}"
        raise UnsyncedChangesError(
            f"a pull would overwrite this database, and {why}",
            where=self._path,
            next="Push it first, pull into another file, or pass --overwrite",
        )

    def _refuse_written(self) -> None:
        """Refuse if it was written since the comparison. Called while the replica process holds the write lock and has
        written nothing yet. Blocks."""
        if self.options.overwrite:
            return
        if self._compared is None:
            was_written = shape_of(self._path, self.stop) is not None
        else:
            was_written = self._compared.data_version() != self._compared_version
        if was_written:  # the next try compares it again
            raise LockedError("another program wrote it meanwhile", where=self._path, next="Try again")

    # --- the pages ------------------------------------------------------------------------------------------------

    async def _move(self, offer: PullOffer, page_size: int | None) -> None:
        """Receive all pages. If this fails, the file is as before, or does not exist if it did not."""
        if self.options.dry:
            if page_size == offer.page_size and not (await take_snapshot(self._path, self.state.pulled_path)).is_copy:
                raise no_space(self._path)
            await self._receive(self.state.pulled_path)
            return
        record = self.state.load(self.remote)
        self._was_there = os.path.exists(self._path)
        try:
            if self._was_there:
                pulling = msgspec.structs.replace(record, pulling=offer.dbhash or "")
                await thread_to_its_end(self.state.save, self.remote, pulling, durable=False)
            if page_size in (None, offer.page_size):
                await self._receive(self._path)
            else:  # sqlite3_rsync keeps the page size of a replica, so a new file is made and its content copied
                await self._receive(self.state.pulled_path)
                await thread_to_its_end(self._replace)
        except BaseException as exc:
            if not self._was_there:
                remove_if_empty(self._path)
            if self._may_be_written and os.path.exists(self._path):
                record = await self._record_after(offer, record, exc)
            with contextlib.suppress(HeadwaterError):  # then `pulling` stays in the record, which is safe
                self.state.save(self.remote, record, durable=False)
            raise

    def _replace(self) -> None:
        """Replace the content, through the connection that is open since the comparison: its data_version shows later
        writes. Blocks."""

        def begin() -> None:
            self._refuse_written()
            self._may_be_written = True

        with self._compared or Shell(self._path) as shell:
            replace_content(self.state.pulled_path, shell, begin)

    async def _record_after(self, offer: PullOffer, record: SyncRecord, error: BaseException) -> SyncRecord:
        """The record after an error that came when the replica process may have committed: the content decides which
        version the database is."""
        unknown = msgspec.structs.replace(record, pulling=offer.dbhash or "")
        if not isinstance(error, HeadwaterError):  # cancelled: there is no time to read it
            return unknown
        try:
            here, _, was_written = await asyncio.to_thread(self._hash_now)
        except HeadwaterError:
            return unknown
        if here is None or was_written or here not in (offer.dbhash, record.dbhash):
            return unknown
        if here == offer.dbhash:
            return SyncRecord(replica_id=offer.replica_id, base=offer.version, dbhash=here)
        return record

    async def _receive(self, path: str) -> None:
        replica = await RsyncProcess.replica(path)
        try:
            async with (
                running(self._answer(replica, path)) as answering,
                running(self._read_pages(replica)) as receiving,
            ):
                await self._connection.first_of(answering, receiving, lambda: self._sent + self._received.bytes)
                if receiving.done():  # it ends early only by an error
                    await receiving
                await answering
                await replica.wait()
                self._is_whole = True
                try:
                    await self._connection.send_config({"complete": True})
                except UnreachableError:  # the reason that the server sent may still be unread
                    await asyncio.wait({receiving}, timeout=CLOSE_S_MAX)
                    if receiving.done():
                        await receiving
                    raise
                await asyncio.wait({receiving}, timeout=CLOSING_S_MAX)
                if not receiving.done():
                    raise UnreachableError(
                        "the server did not close the session", where=self._connection.shown, next="Try again"
                    )
                await receiving
        finally:
            is_live = path == self._path
            self._may_be_written = is_live and (self._is_whole or self._received.may_have_committed)
            await replica.gone()
            if is_live and not self._is_whole:
                await settle(path)

    async def _answer(self, replica: RsyncProcess, path: str) -> None:
        is_checked = path != self._path
        while data := await replica.read():
            if not is_checked and data[0] != REPLICA_BEGIN:  # that one precedes the lock: a dialect is agreed upon
                await asyncio.to_thread(self._refuse_written)
                is_checked = True
            await self._connection.send(data)
            self._sent += len(data)

    async def _read_pages(self, replica: RsyncProcess) -> None:
        """Read until the server closes the session, which it does in order only if its process succeeded."""
        while True:
            frame = await self._connection.next()
            if isinstance(frame, bytes):
                self._received.feed(frame)
                await replica.write(frame)
                self._report("moving")
            elif frame is not None:
                self._connection.config_of(frame, msgspec.Raw)
            elif not self._is_whole:
                raise ReplicationFailedError(CLOSED_EARLY, where=self._connection.shown)
            else:
                return

    # --- the result -----------------------------------------------------------------------------------------------

    async def _proved(self, offer: PullOffer) -> tuple[str | None, str | None]:
        """The hash of the pulled database and that of its first page; of the version, if a program has written it
        already."""
        here, head, was_written = await asyncio.to_thread(self._hash_now)
        if was_written:
            return offer.dbhash, None
        if offer.dbhash is None or here is None or here == offer.dbhash:
            return offer.dbhash or here, head
        why, again = "what came is not the content of version {}", "pull again"
        if self._was_there:
            why, again = why + ", and it is in this file: do not trust it", "pull again with --overwrite"
        else:
            await asyncio.to_thread(remove_database, self._path)
        raise ReplicationFailedError(
            why.format(offer.version),
            where=self._path,
            next=f"Verify the replica first: headwater replica verify {self.remote.key}@{offer.version}; then {again}",
        )

    def _hash_now(self) -> tuple[str | None, str | None, bool]:
        """The hash of the database, that of its first page, and whether it was written meanwhile. Opens it first:
        `sqlite3_dbhash` waits for no lock. Blocks."""
        with Shell(self._path) as shell:
            before = shell.data_version()
            here, head = dbhash_if_any(self._path, live=True, stop=self.stop), shell.shape().head
            return here, head, shell.data_version() != before
