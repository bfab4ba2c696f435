"""`headwater sync` and `headwater replica push`, `pull`, `copy` and `follow`: a SQLite database to a server, from a
server, or to another file."""

from __future__ import annotations

import logging
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal

from headwater.cli.arguments import AsJson, Ca
from headwater.cli.output import console, note, say, surround_lines, write_document, write_line
from headwater.cli.parameters import Shared, argument, flag, option
from headwater.errors import InvalidOptionError, UnauthorizedError
from headwater.formats import format_duration, format_size
from headwater.replication.timers import WAIT_IDLE_MS_DEFAULT, Timers

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from headwater.replication.outcome import Outcome
    from headwater.replication.outcome import Progress as Moved
    from headwater.replication.subscription import PullSubscription, PushSubscription
    from headwater.replication.sync import Sync

logger = logging.getLogger("headwater")
SPEEDUP_SHOWN_MIN = 1.5
SPEEDUP_WHOLE_MIN = 10.0  # from here on without decimals
SIGNALS = (signal.SIGINT, signal.SIGTERM)
SOON_S = 0.5  # an end that takes longer is announced
SPAN_HELP = "like 3s, 10m, 1h30m, 3d or 1w"


_REPLICA = "A replica on a server, like ws://host:8765/ns/app.db"
_DATABASE = "A SQLite database."
Source = Annotated[
    str, argument("SOURCE", "A database file, or a replica like ws://host/ns/app.db; @3 names a version.")
]
Target = Annotated[str, argument("TARGET", "The file or replica that is made equal to SOURCE.")]
File = Annotated[str, argument("FILE", _DATABASE)]
Url = Annotated[str, argument("URL", f"{_REPLICA}.")]
VersionUrl = Annotated[str, argument("URL", f"{_REPLICA}; @3 or @latest-2 names a version.")]
Message = Annotated[str, option("TEXT", "A note that is stored with the new version.", "-m")]
DryRun = Annotated[bool, flag("Show what would change: the pages are transferred and discarded.")]
Overwrite = Annotated[bool, flag("Overwrite changes that were not pushed.")]
Verbose = Annotated[bool, flag("Log claims, versions and retries.", "-v")]


def _credential(metavar: str, help: str, variable: str) -> Any:
    return option(
        metavar, f"{help} Else {variable}.", rich_help_panel="With a server", envvar=variable, show_envvar=False
    )


PushKey = Annotated[str | None, _credential("KEY", "A key that may push and pull.", "HEADWATER_PUSH_KEY")]
PullKey = Annotated[str | None, _credential("KEY", "A key that may pull.", "HEADWATER_PULL_KEY")]
Token = Annotated[str | None, _credential("TOKEN", "A token of the server, instead of a key.", "HEADWATER_TOKEN")]


@dataclass
class Access(Shared):
    push_key: PushKey = None
    pull_key: PullKey = None
    token: Token = None
    ca: Ca = None


_timer = partial(option, "SPAN", rich_help_panel="Continuous")
_when = partial(flag, rich_help_panel="Continuous")


@dataclass
class Following(Shared):
    """When to push."""

    wait_idle: Annotated[
        str | None,
        _timer(
            f"Push after this long without a write, {SPAN_HELP}; {format_duration(WAIT_IDLE_MS_DEFAULT)} by default."
        ),
    ] = None
    min_interval: Annotated[str | None, _timer("Minimum time between pushes; by default that of --wait-idle.")] = None
    max_interval: Annotated[
        str | None, _timer("Push at least this often, however busy the file is; 24h by default.")
    ] = None
    coordinate: Annotated[bool, _when("Take turns with other clients that push this replica.")] = False
    push_on_exit: Annotated[bool, _when("Push remaining changes before the command exits.")] = False


def sync(
    source: Source,
    target: Target,
    message: Message = "",
    subscribe: Annotated[bool, _when("Keep running: push when the file changes, or pull each new version.")] = False,
    *,
    when: Following,
    access: Access,
    dry_run: DryRun = False,
    overwrite: Overwrite = False,
    verbose: Verbose = False,
    as_json: AsJson = False,
) -> None:
    """Make TARGET equal to SOURCE; only the pages that differ are transferred.

    [dim]Push:[/]    headwater sync app.db ws://host:8765/ns/app.db -m "before the move"
    [dim]Pull:[/]    headwater sync ws://host:8765/ns/app.db@latest-2 old.db
    [dim]Copy:[/]    headwater sync app.db copy.db
    [dim]Keep:[/]    headwater sync app.db ws://host/ns/app.db --subscribe --wait-idle 10m
    [dim]Follow:[/]  headwater sync ws://host:8765/ns/app.db copy.db --subscribe

    The short way for headwater replica push, pull, copy and follow.

    Programs may write to the database meanwhile. A push from a version that is
    not the newest is refused; TARGET@latest replaces the newest version. Ctrl-C
    or SIGTERM stops the command in order.
    """
    if not subscribe and (given := [name for name, value in vars(when).items() if value not in (None, False)]):
        option = given[0].replace("_", "-")
        raise InvalidOptionError(f"--{option} is for --subscribe", next="Add --subscribe, or leave it out")
    with _work(source, target, None, access, message, dry_run=dry_run, overwrite=overwrite, verbose=verbose) as work:
        if subscribe:
            _keep_at_it(work, when, as_json=as_json)
        else:
            _do_once(work, as_json=as_json)


def push(
    file: File,
    url: Url,
    message: Message = "",
    push_key: PushKey = None,
    token: Token = None,
    ca: Ca = None,
    dry_run: DryRun = False,
    verbose: Verbose = False,
    as_json: AsJson = False,
) -> None:
    """Push a database to a replica: a new version, of the pages that differ.

    [dim]Push:[/]  headwater replica push app.db ws://host:8765/ns/app.db -m "before the move"

    Programs may write to the database meanwhile. A push from a version that is
    not the newest is refused; URL@latest replaces the newest version.
    The command `headwater replica follow` pushes at each change.
    """
    access = Access(push_key=push_key, token=token, ca=ca)
    with _work(file, url, "push", access, message, dry_run=dry_run, verbose=verbose) as work:
        _do_once(work, as_json=as_json)


def pull(
    url: VersionUrl,
    file: File,
    overwrite: Overwrite = False,
    pull_key: PullKey = None,
    token: Token = None,
    ca: Ca = None,
    dry_run: DryRun = False,
    verbose: Verbose = False,
    as_json: AsJson = False,
) -> None:
    """Pull a version of a replica, the newest if none is named, into a file.

    [dim]Pull:[/]  headwater replica pull ws://host:8765/ns/app.db@latest-2 old.db

    To write a version to a new file: `headwater replica restore`.
    """
    access = Access(pull_key=pull_key, token=token, ca=ca)
    with _work(url, file, "pull", access, dry_run=dry_run, overwrite=overwrite, verbose=verbose) as work:
        _do_once(work, as_json=as_json)


def copy(
    source: Annotated[str, argument("SOURCE", _DATABASE)],
    target: Annotated[str, argument("TARGET", "The file that is made equal to SOURCE.")],
    dry_run: DryRun = False,
    verbose: Verbose = False,
    as_json: AsJson = False,
) -> None:
    """Make one file equal to another; only the pages that differ are written.

    [dim]Copy:[/]  headwater replica copy app.db copy.db
    """
    with _work(source, target, "copy", Access(), dry_run=dry_run, verbose=verbose) as work:
        _do_once(work, as_json=as_json)


def follow(
    source: Source,
    target: Target,
    message: Message = "",
    *,
    when: Following,
    overwrite: Overwrite = False,
    access: Access,
    verbose: Verbose = False,
    as_json: AsJson = False,
) -> None:
    """Push a database at each change, or pull each new version, until stopped.

    [dim]Keep:[/]    headwater replica follow app.db ws://host/ns/app.db --wait-idle 10m
    [dim]Mirror:[/]  headwater replica follow ws://host:8765/ns/app.db copy.db

    Ctrl-C or SIGTERM stops the command in order.
    """
    with _work(source, target, None, access, message, overwrite=overwrite, verbose=verbose) as work:
        _keep_at_it(work, when, as_json=as_json)


@contextmanager
def _work(
    source: str,
    target: str,
    direction: Literal["push", "pull", "copy"] | None,
    access: Access,
    message: str = "",
    *,
    dry_run: bool = False,
    overwrite: bool = False,
    verbose: bool = False,
) -> Iterator[Sync]:
    """Yield what is to be done, in the direction of the command; a refusal by the server says which flags help."""
    from headwater.replication.names import place_of
    from headwater.replication.sync import Keys, Sync

    if verbose:
        _log_more()
    try:
        work = Sync(
            place_of(source),
            place_of(target),
            message=message,
            keys=Keys(access.push_key, access.pull_key, access.token),
            ca=access.ca,
            dry=dry_run,
            overwrite=overwrite,
        )
        if direction is not None and work.direction != direction:
            usage = {"push": "FILE URL", "pull": "URL FILE", "copy": "SOURCE TARGET, two files"}[direction]
            raise InvalidOptionError(
                f"from {work.source} to {work.target} is a {work.direction}",
                next=f"headwater replica {work.direction} does that; {direction} takes {usage}",
            )
        yield work
    except UnauthorizedError as exc:
        advice = (
            "Pass --push-key, --pull-key or --token; on the server's machine, headwater replica key create makes one"
        )
        raise UnauthorizedError(exc.why, where=exc.where, next=advice) from exc


def _do_once(work: Sync, *, as_json: bool) -> None:
    import asyncio

    shown = _Display(as_json=as_json, dry=work.dry)
    with shown:
        outcome = asyncio.run(work.once(shown.progress))
    shown.outcome(outcome, as_document=True)


def _keep_at_it(work: Sync, when: Following, *, as_json: bool) -> None:
    if work.dry:
        raise InvalidOptionError("--dry-run changes nothing, and --subscribe never ends", next="Leave one of them out")
    timers = Timers.of(when.wait_idle, when.min_interval, when.max_interval)
    shown = _Display(as_json=as_json)
    following = work.follow(
        timers,
        coordinate=when.coordinate,
        push_on_exit=when.push_on_exit,
        on_outcome=shown.outcome,
        on_progress=shown.progress,
    )
    with shown:
        _run(following, lambda: _announce_subscription(work, timers))


def _announce_subscription(work: Sync, timers: Timers) -> None:
    if work.direction == "pull":
        note(f"following {work.source} into {work.target}; Ctrl-C ends it")
        return
    idle, longest = format_duration(timers.wait_idle_ms), format_duration(timers.max_interval_ms)
    when = f"after {idle} without a write, or {longest} after the last push"
    note(f"pushing {work.source} to {work.target} {when}; Ctrl-C ends it")
    # Users have been advised to raise it. It belongs to the connections of their programs, which we cannot see.
    logger.debug("a busy_timeout shorter than %s is no harm: it has nothing to do with waitIdle", idle)


def _run(following: PushSubscription | PullSubscription, on_start: Callable[[], None]) -> None:
    """Run until a signal: the first one ends it in order, the second one at once."""
    import asyncio

    asked = 0

    def on_signal() -> None:
        nonlocal asked
        asked += 1
        if asked == 1:
            following.stop()
            loop.call_later(SOON_S, say_ending)
        else:
            running.cancel()

    def say_ending() -> None:
        if not running.done():
            note("stopping after the running push; Ctrl-C again stops at once")

    async def wait() -> None:
        try:
            await running
        except asyncio.CancelledError:
            if asked < 2:
                raise
            note("stopped at once; the next push finds out whether the running one succeeded")

    with asyncio.Runner() as runner:
        with _signals_held():  # a signal while the loop is made would break it
            loop = runner.get_loop()
            running = loop.create_task(following.run())
            for number in SIGNALS:
                loop.add_signal_handler(number, on_signal)
        on_start()
        runner.run(wait())


@contextmanager
def _signals_held() -> Iterator[None]:
    """Delivered afterwards."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _log_more() -> None:
    logger = logging.getLogger("headwater")
    logger.setLevel(logging.DEBUG)
    for handler in logger.handlers:
        handler.setLevel(logging.DEBUG)


# --- output ---------------------------------------------------------------------------------------------------------


class _Display:
    """While entered, a progress bar is shown from the first progress until the next line is written."""

    def __init__(self, *, as_json: bool, dry: bool = False) -> None:
        self._as_json = as_json
        self._dry = dry
        self._is_entered = False
        self._lock = threading.RLock()  # other threads write lines, too
        self._bar: Progress | None = None
        self._task: TaskID | None = None

    def __enter__(self) -> _Display:
        self._is_entered = sys.stderr.isatty()
        surround_lines(self._cleared)
        return self

    def __exit__(self, *exc: object) -> None:
        with self._cleared():
            self._is_entered = False
        surround_lines()

    @contextmanager
    def _cleared(self) -> Iterator[None]:
        with self._lock:
            if self._bar is not None:
                self._bar.stop()
            self._bar = self._task = None
            yield

    def progress(self, moved: Moved) -> None:
        with self._lock:
            if not self._is_entered:
                return
            if self._bar is None or self._task is None:
                self._bar = _bar()
                self._task = self._bar.add_task(moved.phase, total=None, moved="")
                self._bar.start()
            done, whole = moved.sent + moved.received, moved.total_estimate
            text = f"{format_size(min(done, whole))} of {format_size(whole)}" if whole else ""
            if moved.phase == "finishing" and done and not self._dry:  # before, the number of changed pages is unknown
                text += speedup_text(whole / done)
                done = whole
            self._bar.update(self._task, description=moved.phase, completed=done, total=whole or None, moved=text)

    def outcome(self, outcome: Outcome, *, as_document: bool = False) -> None:
        if self._as_json:
            (write_document if as_document else write_line)(outcome)
            sys.stdout.flush()
        else:
            say(sentence(outcome))


def _bar() -> Progress:
    from rich.progress import BarColumn, Progress, TextColumn

    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=28, complete_style="cyan", finished_style="green", pulse_style="cyan"),
        TextColumn("{task.fields[moved]}"),
        console=console(to_stderr=True),
        transient=True,
        redirect_stdout=False,  # each of our lines clears it
        redirect_stderr=False,
    )


def speedup_text(speedup: float) -> str:
    if speedup < SPEEDUP_SHOWN_MIN:
        return ""
    return f", speed-up {speedup:,.{0 if speedup >= SPEEDUP_WHOLE_MIN else 1}f} ×"


def sentence(outcome: Outcome) -> str:
    """The outcome on one line."""
    local, remote = outcome.local, outcome.remote
    if outcome.dry and outcome.is_new:
        route = f"{remote}@{outcome.version} to {local}" if outcome.kind == "pull" else f"{local} to {remote}"
        about = format_size(max(outcome.sent, outcome.received))
        return f"would move {outcome.changed_pages:,} of {outcome.pages:,} pages, about {about}, from {route}"
    if not outcome.is_new:
        return f"{_nothing(outcome)} ({_compared(outcome)})"
    moved = f"{format_size(outcome.size)}; {_compared(outcome)}{speedup_text(outcome.speedup)}"
    if outcome.kind == "copy":
        return f"copied {local} to {remote}: {moved}"
    if outcome.kind == "pull":
        return f"pulled version {outcome.version} of {remote} to {local}: {moved}"
    return f"pushed {local} as version {outcome.version} of {remote}: {moved}"


def _nothing(outcome: Outcome) -> str:
    if outcome.kind == "copy":
        return f"nothing to copy: {outcome.remote} has the same pages"
    if outcome.kind == "pull":
        return f"nothing new: version {outcome.version} of {outcome.remote} is in {outcome.local} already"
    version = outcome.base if outcome.version is None else outcome.version
    return f"nothing to push: version {version} of {outcome.remote} has the same pages"


def _compared(outcome: Outcome) -> str:
    return f"{format_size(outcome.sent)} sent, {format_size(outcome.received)} received, {outcome.seconds:.2f} s"
