"""Which of the two places is remote says what `sync` does: push, pull or copy; once, or for as long as it runs."""

from __future__ import annotations

import asyncio
import os
import re
import socket
import uuid
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal, NamedTuple

from headwater.errors import InvalidOption
from headwater.replication.copying import copy
from headwater.replication.line import LINE_PONG_S_MAX
from headwater.replication.link import Link
from headwater.replication.local_files import refuse_no_database, require_file, require_place_for
from headwater.replication.names import Local, Remote, VersionName, place_of
from headwater.replication.outcome import OnFailure, OnOutcome, OnProgress, Outcome
from headwater.replication.pull import PullOptions, pull
from headwater.replication.pull_subscription import PullSubscription
from headwater.replication.push import PushOptions, push
from headwater.replication.push_subscription import PushSubscription, Watch
from headwater.replication.spans import Timers
from headwater.replication.watcher import DatabaseWatcher

Way = Literal["push", "pull", "copy"]


class Keys(NamedTuple):
    """What opens the door; the first that fits is shown."""

    push: str | None = None
    pull: str | None = None
    token: str | None = None

    @classmethod
    def found(cls, push: str | None, pull: str | None, token: str | None) -> Keys:
        """Those that are not given are looked for in the environment."""
        return cls(
            push or os.environ.get("HEADWATER_PUSH_KEY"),
            pull or os.environ.get("HEADWATER_PULL_KEY"),
            token or os.environ.get("HEADWATER_TOKEN"),
        )


NO_KEYS = Keys()


class Sync:
    """A source, a target and how."""

    def __init__(
        self,
        source: Local | Remote,
        target: Local | Remote,
        *,
        client_id: str,
        message: str = "",
        keys: Keys = NO_KEYS,
        ca: str | None = None,
        dry: bool = False,
        overwrite: bool = False,
    ) -> None:
        self.source = source
        self.target = target
        self.dry = dry
        self.way = _way(source, target)
        if message and self.way != "push":
            raise InvalidOption("a message goes with a new version, and this makes none", next="Leave it out")
        if overwrite and self.way != "pull":
            raise InvalidOption("overwrite is for a pull", next="A push over a newer version: name it TARGET@latest")
        for text in (message, *(place.path for place in (source, target) if isinstance(place, Local))):
            _check_text(text)
        self._message = message
        self._keys = keys
        self._ca = ca
        self._overwrite = overwrite
        self._client_id = client_id

    def _refuse_mistyped(self) -> None:
        """Files that are not there, or no databases, before a server is asked."""
        if isinstance(self.source, Local):
            require_file(self.source.path)
            refuse_no_database(self.source.path)
        if isinstance(self.target, Local):
            require_place_for(self.target.path)
            refuse_no_database(self.target.path)

    async def once(self, on_progress: OnProgress | None = None) -> Outcome:
        self._refuse_mistyped()
        match self.source, self.target:
            case Local(path), Remote() as remote:
                return await push(path, remote, self._push_options(), on_progress)
            case Remote() as remote, Local(path):
                return await pull(remote, path, self._pull_options(), on_progress)
            case Local(path), Local(to):
                return await copy(path, to, on_progress, dry=self.dry)
        raise AssertionError(self.way)

    def follow(
        self,
        timers: Timers,
        *,
        on_outcome: OnOutcome,
        given: Mapping[str, float] | None = None,
        coordinate: bool = False,
        push_on_exit: bool = False,
        on_progress: OnProgress | None = None,
        on_failure: OnFailure | None = None,
        watch: Watch = DatabaseWatcher,
    ) -> PushSubscription | PullSubscription:
        """`given`: the timers that were asked for by name; a server warns who may only pull about them. `watch`: how
        writes are noticed."""
        if self.way == "pull" and (coordinate or push_on_exit):
            flag = "coordinate" if coordinate else "pushOnExit"
            raise InvalidOption(f"--{flag} is for pushing", next="Leave it out")
        match self.source, self.target:
            case Local(path), Remote() as remote:
                self._refuse_mistyped()
                return PushSubscription(
                    path,
                    remote,
                    self._push_options(),
                    timers,
                    coordinate=coordinate,
                    push_on_exit=push_on_exit,
                    connect=self._connect,
                    on_outcome=on_outcome,
                    on_progress=on_progress,
                    on_failure=on_failure,
                    watch=watch,
                )
            case Remote() as remote, Local(path):
                if remote.version not in (None, VersionName()):
                    raise InvalidOption(
                        "who follows a replica follows its newest version",
                        where=str(remote),
                        next=f"Leave {remote.version} out, or --subscribe",
                    )
                self._refuse_mistyped()
                return PullSubscription(
                    remote,
                    path,
                    self._pull_options(),
                    asked_spans=dict(given or {}),
                    connect=self._connect,
                    on_outcome=on_outcome,
                    on_progress=on_progress,
                    on_failure=on_failure,
                )
        raise InvalidOption("only a replica on a server can be followed", next="Name it like ws://host:8765/ns/app.db")

    def _connect(self, url: str) -> Link:
        key = self._push_key() if self.way == "push" else self._pull_key()
        return Link(url, key=key, ca=self._ca, client_id=self._client_id, pong_s_max=LINE_PONG_S_MAX)

    def _push_options(self) -> PushOptions:
        return PushOptions(
            message=self._message, key=self._push_key(), ca=self._ca, dry=self.dry, client_id=self._client_id
        )

    def _pull_options(self) -> PullOptions:
        return PullOptions(
            key=self._pull_key(), ca=self._ca, dry=self.dry, overwrite=self._overwrite, client_id=self._client_id
        )

    def _push_key(self) -> str | None:
        return self._keys.push or self._keys.token or self._keys.pull

    def _pull_key(self) -> str | None:
        return self._keys.pull or self._keys.push or self._keys.token


def _check_text(text: str) -> None:
    """Neither SQLite nor the wire takes the bytes that Python keeps in a text as lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InvalidOption(f"{text[:200]!a} is not UTF-8", next="Spell or name it otherwise") from None


def _way(source: Local | Remote, target: Local | Remote) -> Way:
    if isinstance(source, Remote) and isinstance(target, Remote):
        raise InvalidOption("one of the two is a file here", next="Pull it into a file first, and push that")
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
    """Make `target` equal to `source`, moving only the pages that differ; blocking.

    Each is a SQLite file or a replica on a server, `ws://host:8765/namespace/name`, with `@3`, `@latest` or `@latest-2`
    behind it for a version. A key that is not given is looked for in HEADWATER_PUSH_KEY, HEADWATER_PULL_KEY and
    HEADWATER_TOKEN."""
    work = Sync(
        place_of(os.fspath(source)),
        place_of(os.fspath(target)),
        client_id=new_client_id(),
        message=message,
        keys=Keys.found(push_key, pull_key, token),
        ca=ca,
        dry=dry,
        overwrite=overwrite,
    )
    return run_blocking(work.once)


def run_blocking(work: Callable[[], Coroutine[Any, Any, Outcome]]) -> Outcome:
    """Also where an event loop runs already: then on a thread of its own."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work())
    with ThreadPoolExecutor(1, "headwater-sync") as pool:
        return pool.submit(lambda: asyncio.run(work())).result()


def new_client_id() -> str:
    """The name of this machine, as far as it may stand in a header, and a number for this run."""
    return f"{re.sub('[^A-Za-z0-9._-]+', '-', socket.gethostname())}:{uuid.uuid4().hex}"
