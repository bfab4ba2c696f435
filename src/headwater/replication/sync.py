"""`headwater.sync`: push, pull or copy, by which of the two places is remote; once, or as a subscription."""

from __future__ import annotations

import asyncio
import os
import re
import socket
import tempfile
import time
import uuid
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any, Literal, NamedTuple

from headwater.errors import DiskFullError, InputOutputError, InvalidOptionError, ReplicationFailedError
from headwater.replication.local_database import (
    Shell,
    check_database_file,
    no_space,
    remove_if_empty,
    replace_content,
    require_file,
    require_place_for,
    require_shape,
    settle,
    shape_of,
)
from headwater.replication.names import Place, Remote, VersionName, place_of
from headwater.replication.outcome import (
    Callbacks,
    OnFailure,
    OnOutcome,
    OnProgress,
    Outcome,
    Progress,
    TransferOptions,
)
from headwater.replication.pull import pull
from headwater.replication.push import push
from headwater.replication.rsync import OriginStream, transfer
from headwater.replication.snapshot import take_snapshot
from headwater.replication.subscription import PullSubscription, PushSubscription, Watch
from headwater.replication.sync_state import SyncState
from headwater.replication.threads import stoppable, thread_to_its_end
from headwater.replication.timers import Timers
from headwater.replication.watch import DatabaseWatcher

Direction = Literal["push", "pull", "copy"]


class Keys(NamedTuple):
    push: str | None = None
    pull: str | None = None
    token: str | None = None

    @classmethod
    def from_environment(cls, push: str | None, pull: str | None, token: str | None) -> Keys:
        """Missing ones are read from the environment."""
        return cls(
            push or os.environ.get("HEADWATER_PUSH_KEY"),
            pull or os.environ.get("HEADWATER_PULL_KEY"),
            token or os.environ.get("HEADWATER_TOKEN"),
        )

    def key_for(self, direction: Direction) -> str | None:
        """A push uses the push key, otherwise the token or the pull key; a pull the pull key, otherwise the others."""
        return (self.push or self.token or self.pull) if direction == "push" else (self.pull or self.push or self.token)


NO_KEYS = Keys()


class Sync:
    """A source, a target and the options."""

    def __init__(
        self,
        source: Place,
        target: Place,
        *,
        message: str = "",
        keys: Keys = NO_KEYS,
        ca: str | None = None,
        dry: bool = False,
        overwrite: bool = False,
    ) -> None:
        self.source = source
        self.target = target
        self.dry = dry
        self.direction = _direction(source, target)
        if message and self.direction != "push":
            raise InvalidOptionError("a message goes with a new version, and this makes none", next="Leave it out")
        if overwrite and self.direction != "pull":
            raise InvalidOptionError(
                "overwrite is for a pull", next="A push over a newer version: name it TARGET@latest"
            )
        for text in (message, *(place for place in (source, target) if isinstance(place, str))):
            _check_text(text)
        self._options = TransferOptions(
            client_id=new_client_id(),
            key=keys.key_for(self.direction),
            ca=ca,
            dry=dry,
            message=message,
            overwrite=overwrite,
        )

    def _refuse_mistyped(self) -> None:
        """Missing files and files that are no databases, before a server is asked."""
        if isinstance(self.source, str):
            require_file(self.source)
            check_database_file(self.source)
        if isinstance(self.target, str):
            require_place_for(self.target)
            check_database_file(self.target)

    async def once(self, on_progress: OnProgress | None = None) -> Outcome:
        self._refuse_mistyped()
        match self.source, self.target:
            case str(path), Remote() as remote:
                return await push(path, remote, self._options, on_progress)
            case Remote() as remote, str(path):
                return await pull(remote, path, self._options, on_progress)
            case str(path), str(to):
                return await copy(path, to, on_progress, dry=self.dry)
        raise AssertionError(self.direction)

    def follow(
        self,
        timers: Timers,
        *,
        on_outcome: OnOutcome | None = None,
        coordinate: bool = False,
        push_on_exit: bool = False,
        on_progress: OnProgress | None = None,
        on_failure: OnFailure | None = None,
        watch: Watch = DatabaseWatcher,
    ) -> PushSubscription | PullSubscription:
        """`watch`: how writes are noticed."""
        if self.direction == "pull" and (coordinate or push_on_exit):
            flag = "coordinate" if coordinate else "pushOnExit"
            raise InvalidOptionError(f"--{flag} is for pushing", next="Leave it out")
        callbacks = Callbacks(on_outcome, on_progress, on_failure)
        match self.source, self.target:
            case str(path), Remote() as remote:
                self._refuse_mistyped()
                return PushSubscription(
                    path,
                    remote,
                    self._options,
                    callbacks,
                    timers,
                    coordinate=coordinate,
                    push_on_exit=push_on_exit,
                    watch=watch,
                )
            case Remote() as remote, str(path):
                if remote.version not in (None, VersionName()):
                    raise InvalidOptionError(
                        "a subscription follows the newest version",
                        where=str(remote),
                        next=f"Leave {remote.version} out, or --subscribe",
                    )
                self._refuse_mistyped()
                return PullSubscription(path, remote, self._options, callbacks, timers.given)
        raise InvalidOptionError(
            "only a replica on a server can be followed", next="Name it like ws://host:8765/ns/app.db"
        )


def _check_text(text: str) -> None:
    """Python keeps undecodable bytes as lone surrogates, which neither SQLite nor the wire accepts."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InvalidOptionError(f"{text[:200]!a} is not UTF-8", next="Spell or name it otherwise") from None


def _direction(source: Place, target: Place) -> Direction:
    if isinstance(source, Remote) and isinstance(target, Remote):
        raise InvalidOptionError("source or target must be a file", next="Pull the replica into a file, and push that")
    if isinstance(target, Remote):
        return "push"
    return "pull" if isinstance(source, Remote) else "copy"


def sync(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    message: str = "",
    push_key: str | None = None,
    pull_key: str | None = None,
    token: str | None = None,
    ca: str | None = None,
    dry: bool = False,
    overwrite: bool = False,
) -> Outcome:
    """Make `target` equal to `source`, transferring only the pages that differ. Blocks.

    Each is a SQLite file or a replica on a server, `ws://host:8765/namespace/name`, with `@3`, `@latest` or `@latest-2`
    behind it for a version. Missing keys are read from HEADWATER_PUSH_KEY, HEADWATER_PULL_KEY and HEADWATER_TOKEN.

    `dry` transfers the pages and discards them: neither database changes."""
    work = Sync(
        place_of(os.fspath(source)),
        place_of(os.fspath(target)),
        message=message,
        keys=Keys.from_environment(push_key, pull_key, token),
        ca=ca,
        dry=dry,
        overwrite=overwrite,
    )
    return run_blocking(work.once)


def run_blocking(work: Callable[[], Coroutine[Any, Any, Outcome]]) -> Outcome:
    """Run to the end, on a thread of its own if an event loop runs in this one."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work())
    with ThreadPoolExecutor(1, "headwater-sync") as pool:
        return pool.submit(lambda: asyncio.run(work())).result()


def new_client_id() -> str:
    """The name of this machine, fit for a header, and a random id."""
    return f"{re.sub('[^A-Za-z0-9._-]+', '-', socket.gethostname())}:{uuid.uuid4().hex}"


# --- a copy on this machine -----------------------------------------------------------------------------------------


async def copy(source: str, target: str, progress: OnProgress | None = None, *, dry: bool = False) -> Outcome:
    """Make the target equal to the source as it is at one moment, in one transaction; pages that are equal are not
    written. A dry run writes into a private copy of the target, which is removed."""
    started_s = time.monotonic()
    if os.path.exists(source) and os.path.exists(target) and os.path.samefile(source, target):
        raise InvalidOptionError("source and target are the same file", where=target, next="Name another target")
    shape = await require_shape(source)
    there = await stoppable(lambda stop: shape_of(target, stop))
    page_size, pages = shape.page_size, shape.pages
    size = page_size * pages
    stream, received = OriginStream(page_size), 0
    is_same_size = there is not None and there.page_size == page_size
    is_first_page_same = there is not None and there.head == shape.head

    def on_progress(sent: int, received: int) -> None:
        if progress is not None:
            progress(Progress(sent, received, size, "moving"))

    with ExitStack() as stack:
        is_replaced = there is not None and not is_same_size and not dry
        steady = source if shape.is_wal and not is_replaced else await _steady(source, stack)
        if is_replaced:  # sqlite3_rsync keeps the page size of a replica; SQLite's backup does not
            await thread_to_its_end(_replace, steady, target)
            changed_pages, sent = pages, size
        else:
            into = target
            if dry:
                into = await _private_copy(target if is_same_size else None, stack)
            was_there = os.path.exists(into)
            try:
                received = await transfer(steady, into, stream, on_progress)
            except BaseException as exc:
                if not was_there:
                    remove_if_empty(into)
                for database in (source, target):
                    await settle(database)
                if isinstance(exc, ReplicationFailedError) and "disk is full" in exc.why:  # of either process
                    raise no_space(target) from exc
                raise
            changed_pages, sent = stream.changed_pages(is_first_page_same=is_first_page_same), stream.bytes
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
        sent=sent,
        received=received,
        seconds=time.monotonic() - started_s,
        changed_pages=changed_pages,
        dbhash=None,
        dry=dry,
    )


def _replace(source: str, target: str) -> None:
    with Shell(target) as shell:
        replace_content(source, shell)


async def _steady(source: str, stack: ExitStack) -> str:
    """A snapshot of a database with a rollback journal: an origin process gives up when a writer holds the lock."""
    try:
        state = stack.enter_context(SyncState(source))
        return (await take_snapshot(source, state.snapshot_path)).path
    except (InputOutputError, DiskFullError):  # no file can be written next to it: the database itself
        return source


async def _private_copy(target: str | None, stack: ExitStack) -> str:
    """The path of a copy, or of a new file if there is nothing to compare with."""
    directory = stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True))
    path = os.path.join(directory, "copy.db")
    if target is not None and not (await take_snapshot(target, path)).is_copy:
        raise no_space(path)
    return path
