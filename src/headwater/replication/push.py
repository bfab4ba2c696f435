"""One push: the local database becomes the newest version of its replica, or nothing changes on the server."""

from __future__ import annotations

import asyncio
import logging
import shlex
import time
import uuid
from contextlib import AsyncExitStack
from dataclasses import dataclass

import msgspec

from headwater.errors import (
    DiskFullError,
    HeadwaterError,
    InvalidOptionError,
    ReplicationFailedError,
    VersionConflictError,
)
from headwater.replication.connection import (
    CLOSED_EARLY,
    ReplicaConnection,
    abort_of,
    as_partial,
    is_cut,
    newest_version,
)
from headwater.replication.integrity import hashing
from headwater.replication.local_database import require_shape, settle
from headwater.replication.names import Remote
from headwater.replication.outcome import OnProgress, Outcome, Phase, Progress, TransferOptions
from headwater.replication.protocol import (
    ABORT,
    MESSAGE,
    MESSAGE_CHARS_MAX,
    NewestVersion,
    PushCommitted,
    PushReady,
)
from headwater.replication.rsync import (
    BEGIN_BYTES,
    END,
    END_BYTES,
    REPLICA_ERROR,
    TXN,
    OriginStream,
    RsyncProcess,
    error_at_the_end,
)
from headwater.replication.snapshot import Snapshot, take_snapshot
from headwater.replication.sync_state import SyncRecord, SyncState
from headwater.replication.threads import running, thread_to_its_end

ABORT_S_MAX = 2.0  # for the server's reason to arrive, when its process has failed

logger = logging.getLogger("headwater")


async def push(local: str, remote: Remote, options: TransferOptions, progress: OnProgress | None = None) -> Outcome:
    """Raises VersionConflictError when the replica has a newer version than the one this database comes from.

    A dry run transfers the pages too; the server discards them."""
    if len(options.message) > MESSAGE_CHARS_MAX:
        raise InvalidOptionError(f"a message has at most {MESSAGE_CHARS_MAX} characters", where=remote.key)
    named_base = _named_base(remote)
    with SyncState(local) as state:
        record = state.load(remote)

        async def attempt(record: SyncRecord, *, is_first: bool) -> Outcome:
            async with AsyncExitStack() as stack:
                pushing = _Push(local, remote, options, progress, state, stack)
                return await pushing.run(named_base, record, may_recognise=is_first)

        try:
            return await attempt(record, is_first=True)
        except _Recognised as exc:
            record = exc.record
            logger.info("%s is known as version %d of %s", local, record.base, remote.key)
        except VersionConflictError as exc:
            is_lost = not exc.newest and record.base > 0
            if not is_lost or named_base is not None:
                raise
            # A replica without versions has nothing to overwrite: the server has lost its disk and is filled again.
            would = "would be" if options.dry else "is"
            logger.warning("the server has no version of %s any more: it %s pushed anew", remote.key, would)
            record = SyncRecord()
        if not options.dry:
            state.save(remote, record)
        return await attempt(record, is_first=False)


def _named_base(remote: Remote) -> int | str | None:
    """The base that the caller insists on, if any: `@4` or `@latest`."""
    version = remote.version
    if version is None:
        return None
    if version.number is not None:
        return int(version.number)
    if version.back:
        raise InvalidOptionError(
            "a push is from a version by its number, or over the newest one",
            where=remote.key,
            next="Write @4 or @latest",
        )
    return "latest"


@dataclass(eq=False)
class _Push:
    local: str
    remote: Remote
    options: TransferOptions
    progress: OnProgress | None
    state: SyncState
    stack: AsyncExitStack

    def __post_init__(self) -> None:
        self._connection = ReplicaConnection(self.remote.endpoint("push"), self.options)
        self._sent = OriginStream()
        self._received = 0
        self._size = 0

    async def run(self, named_base: int | str | None, record: SyncRecord, *, may_recognise: bool) -> Outcome:
        started_s = time.monotonic()
        # While the result of a push is unknown, the next ones use the same id: whichever of them the server accepts,
        # even the first one late, it is recognised as ours.
        push_id = record.last_push_id or uuid.uuid4().hex
        if named_base is None and record.pulling is not None:
            raise _half_pulled(self.remote, self.local)
        self._report("preparing")
        await require_shape(self.state.database)  # refuses before the server is asked
        async with running(take_snapshot(self.state.database, self.state.snapshot_path)) as copying:
            await self.stack.enter_async_context(self._connection)
            taken = await copying
        self._size = taken.size
        self._sent = OriginStream(taken.page_size)
        here = None
        if taken.is_copy and not self.options.dry:
            here = await self.stack.enter_async_context(hashing(taken.path))
        if not taken.is_copy:
            self.stack.push_async_callback(settle, taken.path)
        origin = await RsyncProcess.origin(taken.path)
        self.stack.push_async_callback(origin.gone)
        try:
            agreed = await self._begin(taken, record, record.base if named_base is None else named_base, push_id)
        except VersionConflictError as exc:
            if named_base is None and exc.newest:
                raise await self._explained(exc, taken, record, may_recognise) from exc
            if isinstance(named_base, int) and named_base > exc.newest:
                raise _no_such_base(exc, named_base, self.remote) from exc
            raise
        head = (await require_shape(taken.path)).head if taken.is_copy else None
        if named_base is None and record.base and record.replica_id not in (None, agreed.replica_id):
            raise _another_replica(agreed.base, self.remote)
        try:
            if self.options.dry:
                committed, dbhash = await self._dry_run(origin, agreed, record, head), None
            else:
                attempt = _attempt(record, named_base, agreed, push_id)
                committed, dbhash = await self._move_and_commit(origin, here, attempt)
        except HeadwaterError as exc:
            raise as_partial(exc) from exc
        if not self.options.dry:
            replica_id = committed.replica_id or agreed.replica_id
            result = SyncRecord(replica_id=replica_id, base=committed.version, dbhash=dbhash, head=head)
            # If a crash of the machine reverts it, the server recognises the push by its id, which is on disk.
            self.state.save(self.remote, result, durable=False)
        return Outcome(
            kind="push",
            local=self.local,
            remote=self.remote.key,
            version=None if self.options.dry else committed.version,
            is_new=committed.is_new,
            base=agreed.base,
            size=taken.size,
            pages=taken.pages,
            page_size=taken.page_size,
            sent=self._sent.bytes,
            received=self._received,
            seconds=time.monotonic() - started_s,
            changed_pages=committed.changed_pages,
            dbhash=dbhash,
            dry=self.options.dry,
        )

    def _report(self, phase: Phase) -> None:
        if self.progress is not None:
            self.progress(Progress(self._sent.bytes, self._received, self._size, phase))

    async def _begin(self, taken: Snapshot, record: SyncRecord, base: int | str, push_id: str) -> PushReady:
        if self.options.message:
            await self._connection.send_text(MESSAGE + self.options.message)
        await self._connection.send_config(
            {
                "base": base,
                "pushID": push_id,
                "lastPushID": record.last_push_id,
                "baseHash": record.dbhash if base == record.base else None,
                "pageSize": taken.page_size,
                "pages": taken.pages,
                "dry": self.options.dry,
            }
        )
        agreed = await self._connection.config(PushReady)
        if not agreed.ready:
            raise ReplicationFailedError("the server is not ready", where=self._connection.shown)
        return agreed

    async def _explained(
        self, conflict: VersionConflictError, taken: Snapshot, record: SyncRecord, may_recognise: bool
    ) -> VersionConflictError | _Recognised:
        newest = await asyncio.to_thread(newest_version, self.remote, self.options.key, self.options.ca)
        here = None
        if taken.is_copy and (record.dbhash or (newest is not None and newest.dbhash)):
            async with hashing(taken.path) as found:
                here = await found
        if may_recognise and newest is not None:
            known = _recognised(newest, here, record, self.state)
            if known is not None:
                return _Recognised(known)
        if record.base and here is not None and here == record.dbhash:
            return _nothing_written(conflict, record.base, self.remote, self.local)
        return _stale(conflict, record.base, self.remote)

    # --- the pages ----------------------------------------------------------------------------------------------

    async def _dry_run(
        self, origin: RsyncProcess, agreed: PushReady, record: SyncRecord, head: str | None
    ) -> PushCommitted:
        await self._move(origin)
        await self._connection.send_config({"complete": True, "dry": True})
        is_first_page_same = agreed.base == record.base > 0 and head == record.head is not None
        pages = self._sent.changed_pages(is_first_page_same=is_first_page_same)
        return PushCommitted(version=0, changed_pages=pages, is_new=pages > 0)

    async def _move_and_commit(
        self, origin: RsyncProcess, here: asyncio.Task[str | None] | None, attempt: SyncRecord
    ) -> tuple[PushCommitted, str | None]:
        async with running(thread_to_its_end(self.state.save, self.remote, attempt)) as saving:
            await self._move(origin)
            self._report("finishing")
            dbhash = await here if here else None
            await saving
        return await self._complete(dbhash), dbhash

    async def _move(self, origin: RsyncProcess) -> None:
        """Send all pages; returns when the origin has exited without an error. Raises the server's reason if it ends
        the session first."""
        async with running(self._receive(origin)) as receiving:
            async with running(self._send(origin)) as sending:
                await self._connection.first_of(sending, receiving, lambda: self._sent.bytes + self._received)
                if not sending.done() or (receiving.done() and is_cut(sending)):
                    await receiving
                await sending
            try:
                await origin.wait()
            except ReplicationFailedError as exc:
                # It repeats the error of the server's process; the server's ABORT may explain it better.
                await asyncio.wait({receiving}, timeout=ABORT_S_MAX)
                if receiving.done():
                    await receiving
                raise _at_the_server(exc.why, self._connection.shown) from exc
            if receiving.done():
                await receiving

    async def _send(self, origin: RsyncProcess) -> None:
        head = tail = b""
        while data := await origin.read():
            await self._connection.send(data)
            self._sent.feed(data)
            head = head if len(head) == BEGIN_BYTES else (head + data[:BEGIN_BYTES])[:BEGIN_BYTES]
            tail = (tail + data[-END_BYTES:])[-END_BYTES:]
            if tail == bytes([TXN]) + head[-4:] + bytes([END]):
                # The last message; the origin exits when its input is closed. If a page happens to end like this, no
                # harm is done: while an origin sends pages, it does not read.
                origin.close_input()
            self._report("moving")

    async def _receive(self, origin: RsyncProcess) -> None:
        """Receive until cancelled; ends only by an error."""
        while True:
            frame = await self._connection.next()
            if isinstance(frame, bytes):
                self._received += len(frame)
                if origin.is_input_closed:
                    _refuse_last_messages(frame, self._connection.shown)
                await origin.write(frame)
            elif frame is None:
                raise ReplicationFailedError(CLOSED_EARLY, where=self._connection.shown)
            elif frame.startswith(ABORT):
                raise abort_of(frame, self._connection.shown)

    async def _complete(self, dbhash: str | None) -> PushCommitted:
        await self._connection.send_config({"complete": True, "dbhash": dbhash})
        while True:
            frame = await self._connection.answer()
            if frame is None:
                raise ReplicationFailedError(
                    "the server closed the session without an answer", where=self._connection.shown
                )
            if isinstance(frame, str):
                return self._connection.config_of(frame, PushCommitted)
            self._received += len(frame)
            _refuse_last_messages(frame, self._connection.shown)


def _attempt(record: SyncRecord, named_base: int | str | None, agreed: PushReady, push_id: str) -> SyncRecord:
    """Saved before the server learns that all pages are sent: if its answer is lost, the next push can name the id. The
    base that the server agreed to is saved with it, but not one that the caller insisted on."""
    if named_base is None and agreed.base != record.base:
        return SyncRecord(replica_id=agreed.replica_id, base=agreed.base, last_push_id=push_id)
    return msgspec.structs.replace(record, last_push_id=push_id)


def _refuse_last_messages(frame: bytes, where: str) -> None:
    """Raise what the server's process sends after the last page: it can only be an error."""
    if frame:
        raise _at_the_server(error_at_the_end(frame, REPLICA_ERROR) or "it went on talking", where)


def _at_the_server(why: str, where: str) -> HeadwaterError:
    if "disk is full" in why:
        return DiskFullError(f"the server reported: {why}", where=where, next="Free some disk space on the server")
    return ReplicationFailedError(f"the server reported: {why}", where=where)


# --- conflicts: the advice depends on the history of the database ---------------------------------------------------


class _Recognised(Exception):
    """The database is a known version, so perhaps there is no conflict."""

    def __init__(self, record: SyncRecord) -> None:
        super().__init__(f"version {record.base}")
        self.record = record


def _recognised(newest: NewestVersion, here: str | None, record: SyncRecord, state: SyncState) -> SyncRecord | None:
    """A better record of a database whose own one is missing or out of date: the newest version if it has the same
    content, so that nothing can be lost; otherwise the latest record under another address of this replica."""
    if here is not None and here == newest.dbhash:
        known = SyncRecord(replica_id=newest.replica_id, base=newest.version, dbhash=here)
    else:
        known = state.load_replica(newest.replica_id) or SyncRecord()
    is_better = (known.base, known.dbhash) != (record.base, record.dbhash)
    return known if known.base and is_better else None


def _half_pulled(remote: Remote, local: str) -> ReplicationFailedError:
    return ReplicationFailedError(
        "a pull into this database was killed, so it is not known which version it comes from",
        where=local,
        next=f"Pull again, or push over the newest version: {remote.key}@latest",
    )


def _another_replica(newest: int, remote: Remote) -> VersionConflictError:
    return VersionConflictError(
        "this is another replica than the one that the database was synced with: it was made anew",
        where=remote.key,
        next=f"Pull it elsewhere and compare, or push over it: {remote.key}@latest",
        newest=newest,
    )


def _no_such_base(conflict: VersionConflictError, base: int, remote: Remote) -> VersionConflictError:
    newest = f"the newest is {conflict.newest}" if conflict.newest else "there is none yet"
    next = f"Name the version that this database comes from, or push over the newest one: {remote.key}@latest"
    if not conflict.newest:
        next = f"Leave @{base} out"
    return VersionConflictError(
        f"there is no version {base}: {newest}", where=remote.key, next=next, newest=conflict.newest
    )


def _nothing_written(conflict: VersionConflictError, base: int, remote: Remote, local: str) -> VersionConflictError:
    """The server has newer versions, and the database no changes."""
    return VersionConflictError(
        f"the newest version is {conflict.newest}, and this database is version {base} unchanged",
        where=remote.key,
        next=f"To have the newest here: headwater sync {remote.key} {shlex.quote(local)}; "
        f"to make this one the newest: headwater sync {shlex.quote(local)} {remote.key}@latest",
        newest=conflict.newest,
    )


def _stale(conflict: VersionConflictError, base: int, remote: Remote) -> VersionConflictError:
    """The error for a push when both sides may have changes."""
    comes = f"comes from version {base}" if base else "was never synced with it"
    return VersionConflictError(
        f"the newest version is {conflict.newest}, and this database {comes}",
        where=remote.key,
        next=f"Pull it elsewhere and merge by hand, or push over it: {remote.key}@latest",
        newest=conflict.newest,
    )
