"""A copy from file to file on this machine, by pages: what the target has already is not written again."""

from __future__ import annotations

import asyncio
import os
import tempfile
import threading
import time
from contextlib import ExitStack

from headwater.errors import DiskFull, InputOutput, InvalidOption, ReplicationFailed
from headwater.replication.beside import Beside
from headwater.replication.database_file import remove_if_empty, replace_content, settle, shape_aside, shape_of
from headwater.replication.first_page import first_page_of
from headwater.replication.local_files import no_room
from headwater.replication.outcome import OnProgress, Outcome, Progress
from headwater.replication.rsync_stream import OriginStream, pages_in
from headwater.replication.shell import Shell
from headwater.replication.snapshot import snapshot_aside
from headwater.replication.threads import stoppable, thread_to_its_end
from headwater.replication.tools import End, Moved, both_ends, join


async def copy(source: str, target: str, progress: OnProgress | None = None, *, dry: bool = False) -> Outcome:
    """The target becomes the same as the source at one moment, in one transaction; or it stays as it is."""
    started_s = time.monotonic()
    if os.path.exists(source) and os.path.exists(target) and os.path.samefile(source, target):
        raise InvalidOption("source and target are the same file", where=target, next="Name another target")
    shape, stop = await shape_aside(source), threading.Event()
    there = await stoppable(asyncio.to_thread(shape_of, target, stop), stop)
    page_size, pages = shape.page_size, shape.pages
    size = page_size * pages
    moved = Moved()
    if progress is not None:
        moved.watch = lambda: progress(Progress(moved.to_replica, moved.to_origin, size, "moving"))
    counters_only = False
    if there is not None and there.page_size == page_size:
        counters_only = await stoppable(asyncio.to_thread(_differ_only_by_counters, source, target, stop), stop)
    if dry:
        changed_pages = await _count(source, target, there is not None and there.page_size == page_size, moved)
    elif there is not None and there.page_size != page_size:
        # A replica keeps its page size; SQLite's own backup does not.
        with ExitStack() as stack:
            await thread_to_its_end(_replace, await _steady(source, stack), target)
        changed_pages, moved.to_replica = pages, size
    else:
        was_there = os.path.exists(target)
        try:
            with ExitStack() as stack:
                steady = source if shape.is_wal else await _steady(source, stack)
                await join(*await both_ends(steady, target), moved)
        except BaseException as exc:
            if not was_there:
                remove_if_empty(target)
            for end in (source, target):
                await settle(end)
            if isinstance(exc, ReplicationFailed) and "disk is full" in exc.why:  # whichever end repeats it
                raise no_room(target) from exc
            raise
        changed_pages = pages_in(moved.to_replica, page_size)
    if changed_pages == 1 and counters_only:
        changed_pages = 0  # what moved counts the commits of the source, which is not content
    return Outcome(
        kind="copy",
        local=source,
        remote=target,
        version=None,
        is_new=changed_pages > 0,
        base=None,
        size=size,
        pages=pages,
        page_size=page_size,
        sent=moved.to_replica,
        received=moved.to_origin,
        seconds=time.monotonic() - started_s,
        changed_pages=changed_pages,
        dbhash=None,
        dry=dry,
    )


def _replace(source: str, target: str) -> None:
    with Shell(target) as shell:
        replace_content(source, shell)


def _differ_only_by_counters(source: str, target: str, stop: threading.Event) -> bool:
    """Of their first pages. Blocks."""
    return first_page_of(source, stop).differs_only_by_counters(first_page_of(target, stop))


async def _steady(source: str, stack: ExitStack) -> str:
    """An origin gives up when a writer has the database of a rollback journal locked; a snapshot is more patient."""
    try:
        beside = stack.enter_context(Beside(source))
        return (await snapshot_aside(source, beside.snapshot_path)).path
    except (InputOutput, DiskFull):  # nothing can be written beside it, so as it lies
        return source


async def _count(source: str, target: str, is_alike: bool, moved: Moved) -> int:
    """Up to the first page as in earnest; then the pages are counted and go nowhere. Compared with an empty file
    elsewhere when there is no target, or one that would be written whole."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
        compared = target if is_alike else os.path.join(scratch, "empty.db")
        try:
            return await _count_between(*await both_ends(source, compared), moved)
        finally:
            for end in (source, target):
                await settle(end)


async def _count_between(origin: End, replica: End, moved: Moved) -> int:
    stream = OriginStream()

    async def back() -> None:
        while data := await replica.read():
            moved.to_origin += len(data)
            await origin.write(data)

    answering = asyncio.create_task(back())
    try:
        while not stream.ended and (data := await origin.read()):
            moved.to_replica += len(data)
            await replica.write(stream.feed(data))
        stream.finish()
        await origin.wait()
    finally:
        answering.cancel()
        await asyncio.gather(answering, origin.gone(), replica.gone(), return_exceptions=True)
    return stream.pages
