"""`headwater sync`: a SQLite database to a server, from a server, or to another file."""

from __future__ import annotations

import logging
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headwater.cli.arguments import AsJson
from headwater.cli.output import console, note, printable, say, surround_lines, write_document, write_line
from headwater.errors import InvalidOptionError, UnauthorizedError
from headwater.formats import format_duration, format_size, parse_duration
from headwater.replication.timers import WAIT_IDLE_MS_DEFAULT, Timers

if TYPE_CHECKING:
    import asyncio

    from rich.progress import Progress, TaskID

    from headwater.replication.outcome import Outcome
    from headwater.replication.outcome import Progress as Moved
    from headwater.replication.subscription import PullSubscription, PushSubscription
    from headwater.replication.sync import Sync

_WHEN, _WHO = "Keep at it", "With a server"
logger = logging.getLogger("headwater")
SPEEDUP_TOLD_MIN = 1.5  # less is not shown
SPEEDUP_WHOLE_MIN = 10.0  # from here on without decimals
SIGNALS = (signal.SIGINT, signal.SIGTERM)
SOON_S = 0.5  # an end that takes longer is announced
SPAN_HELP = "like 3s, 10m, 1h30m, 3d or 1w"


def _option(*spellings: str, metavar: str | None = None, help: str, panel: str, envvar: str | None = None) -> Any:
    return typer.Option(
        *spellings, metavar=metavar, help=help, rich_help_panel=panel, show_default=False, envvar=envvar
    )


def sync(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE",
            help="A database file, or a replica like ws://host:8765/ns/app.db; @3 or @latest-2 names a version.",
            show_default=False,
        ),
    ],
    target: Annotated[
        str, typer.Argument(metavar="TARGET", help="What is made equal to it; a file or a replica.", show_default=False)
    ],
    message: Annotated[
        str, typer.Option("--message", "-m", help="Stays with the new version.", show_default=False)
    ] = "",
    subscribe: Annotated[
        bool, _option("--subscribe", help="Go on: push when the file changes; or pull each new version.", panel=_WHEN)
    ] = False,
    wait_idle: Annotated[
        str | None,
        _option(
            "--waitIdle",
            "--wait-idle",
            metavar="SPAN",
            help=f"Push after so long without a write, {SPAN_HELP}; {format_duration(WAIT_IDLE_MS_DEFAULT)}.",
            panel=_WHEN,
        ),
    ] = None,
    min_interval: Annotated[
        str | None,
        _option(
            "--minInterval",
            "--min-interval",
            metavar="SPAN",
            help="At least so long between pushes; as waitIdle.",
            panel=_WHEN,
        ),
    ] = None,
    max_interval: Annotated[
        str | None,
        _option(
            "--maxInterval",
            "--max-interval",
            metavar="SPAN",
            help="Push so long after the last one, however busy it is; 24h.",
            panel=_WHEN,
        ),
    ] = None,
    coordinate: Annotated[
        bool, _option("--coordinate", help="Take turns with others that push this replica.", panel=_WHEN)
    ] = False,
    push_on_exit: Annotated[
        bool,
        _option(
            "--pushOnExit",
            "--push-on-exit",
            help="When it is ended, push once more first.",
            panel=_WHEN,
        ),
    ] = False,
    push_key: Annotated[
        str | None,
        _option(
            "--pushKey",
            "--push-key",
            metavar="KEY",
            help="Lets you push and pull.",
            panel=_WHO,
            envvar="HEADWATER_PUSH_KEY",
        ),
    ] = None,
    pull_key: Annotated[
        str | None,
        _option(
            "--pullKey", "--pull-key", metavar="KEY", help="Lets you pull.", panel=_WHO, envvar="HEADWATER_PULL_KEY"
        ),
    ] = None,
    token: Annotated[
        str | None,
        _option(
            "--token", metavar="TOKEN", help="Of the server, if there is no key.", panel=_WHO, envvar="HEADWATER_TOKEN"
        ),
    ] = None,
    ca: Annotated[
        str | None,
        _option("--ca", metavar="FILE", help="Certificates to trust for wss://, instead of the system's.", panel=_WHO),
    ] = None,
    dry: Annotated[
        bool,
        typer.Option("--dry", help="Transfer the pages and discard them: say what would change, and change nothing."),
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Pull also over changes that were never pushed.")
    ] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Say more: claims, versions, retries.")] = False,
    as_json: AsJson = False,
) -> None:
    """Make TARGET equal to SOURCE, moving only the pages that differ.

    [dim]Push:[/]    headwater sync app.db ws://host:8765/ns/app.db -m "before the move"
    [dim]Pull:[/]    headwater sync ws://host:8765/ns/app.db@latest-2 old.db
    [dim]Copy:[/]    headwater sync app.db copy.db
    [dim]Keep:[/]    headwater sync app.db ws://host:8765/ns/app.db --subscribe --waitIdle 10m --maxInterval 24h
    [dim]Follow:[/]  headwater sync ws://host:8765/ns/app.db copy.db --subscribe

    Programs may write the database meanwhile. A push from a version that is
    not the newest is refused; TARGET@latest says that you mean it all the
    same. Ctrl-C or SIGTERM ends it in order.
    """
    import asyncio

    from headwater.replication.names import place_of
    from headwater.replication.sync import Keys, Sync, new_client_id

    if verbose:
        _log_more()
    work = Sync(
        place_of(source),
        place_of(target),
        message=message,
        keys=Keys(push_key, pull_key, token),
        ca=ca,
        dry=dry,
        overwrite=overwrite,
        client_id=new_client_id(),
    )
    flags = {"waitIdle": wait_idle, "minInterval": min_interval, "maxInterval": max_interval}
    given = {name: text for name, text in flags.items() if text is not None}
    shown = _Display(as_json=as_json, dry=dry)
    try:
        if subscribe:
            _subscribe(work, given, shown, coordinate=coordinate, push_on_exit=push_on_exit)
            return
        if given or coordinate or push_on_exit:
            flag = next(iter(given), "coordinate" if coordinate else "pushOnExit")
            raise InvalidOptionError(f"--{flag} is for --subscribe", next="Add --subscribe, or leave it out")
        with shown:
            outcome = asyncio.run(work.once(shown.progress))
        shown.outcome(outcome, as_document=True)
    except UnauthorizedError as exc:
        advice = "Pass --pushKey, --pullKey or --token; on the server's machine, headwater replica key create makes one"
        raise UnauthorizedError(exc.why, where=exc.where, next=advice) from exc


def _subscribe(work: Sync, given: dict[str, str], shown: _Display, *, coordinate: bool, push_on_exit: bool) -> None:
    if work.dry:
        raise InvalidOptionError("--dry changes nothing, and --subscribe never ends", next="Leave one of them out")
    timers = Timers.of(
        given.get("waitIdle", format_duration(WAIT_IDLE_MS_DEFAULT)), given.get("minInterval"), given.get("maxInterval")
    )
    following = work.follow(
        timers,
        given={name: parse_duration(text, f"--{name}").total_seconds() for name, text in given.items()},
        coordinate=coordinate,
        push_on_exit=push_on_exit,
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
    """Until a signal: the first one ends it in order, the second one at once."""
    import asyncio

    with asyncio.Runner() as runner:
        with _signals_held():  # a signal while the loop is made would break it
            loop = runner.get_loop()
            running = loop.create_task(following.run())
            ending = _Ending(following, running)
            for number in SIGNALS:
                loop.add_signal_handler(number, ending.on_signal, loop)
        on_start()
        runner.run(ending.wait())


class _Ending:
    def __init__(self, following: PushSubscription | PullSubscription, running: asyncio.Task[None]) -> None:
        self._following = following
        self._running = running
        self._asked = 0

    def on_signal(self, loop: asyncio.AbstractEventLoop) -> None:
        self._asked += 1
        if self._asked == 1:
            self._following.stop()
            loop.call_later(SOON_S, self._say_ending)
        else:
            self._running.cancel()

    def _say_ending(self) -> None:
        if not self._running.done():
            note("ending when the push has; Ctrl-C again ends it at once")

    async def wait(self) -> None:
        import asyncio

        try:
            await self._running
        except asyncio.CancelledError:
            if self._asked < 2:
                raise
            note("ended at once: the next push finds out whether a running one succeeded")


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
            say(printable(sentence(outcome)))


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
    if speedup < SPEEDUP_TOLD_MIN:
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
