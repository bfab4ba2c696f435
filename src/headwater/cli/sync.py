"""`headwater sync`: a SQLite database to a server, from a server, or to another file."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headwater.cli.opening import AsJson
from headwater.cli.output import note
from headwater.cli.sync_shown import Shown
from headwater.errors import InvalidOption, Unauthorized
from headwater.replication.names import place_of
from headwater.replication.spans import WAIT_IDLE_MS_DEFAULT, Timers, span_ms_of, span_text

if TYPE_CHECKING:  # what opens connections is imported when it is wanted: most commands open none
    from headwater.replication.pull_subscription import PullSubscription
    from headwater.replication.push_subscription import PushSubscription
    from headwater.replication.synchronise import Sync

_WHEN, _WHO = "Keep at it", "With a server"
logger = logging.getLogger("headwater")
SIGNALS = (signal.SIGINT, signal.SIGTERM)
SOON_S = 0.5  # what takes longer to end says so
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
            help=f"Push after so long without a write, {SPAN_HELP}; {span_text(WAIT_IDLE_MS_DEFAULT)}.",
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
    dry: Annotated[bool, typer.Option("--dry", help="Say what would move, and move nothing.")] = False,
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
    from headwater.replication.synchronise import Keys, Sync, new_client_id

    if verbose:
        _say_more()
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
    shown = Shown(as_json=as_json, dry=dry)
    try:
        if subscribe:
            _subscribe(work, given, shown, coordinate=coordinate, push_on_exit=push_on_exit)
            return
        if given or coordinate or push_on_exit:
            flag = next(iter(given), "coordinate" if coordinate else "pushOnExit")
            raise InvalidOption(f"--{flag} is for --subscribe", next="Add --subscribe, or leave it out")
        with shown:
            outcome = asyncio.run(work.once(shown.progress))
        shown.outcome(outcome, as_document=True)
    except Unauthorized as exc:
        advice = "Pass --pushKey, --pullKey or --token; on the server's machine, headwater replica key create makes one"
        raise Unauthorized(exc.why, where=exc.where, next=advice) from exc


def _subscribe(work: Sync, given: dict[str, str], shown: Shown, *, coordinate: bool, push_on_exit: bool) -> None:
    if work.dry:
        raise InvalidOption("--dry moves nothing, and --subscribe never ends", next="Leave one of them out")
    timers = Timers.of(
        given.get("waitIdle", span_text(WAIT_IDLE_MS_DEFAULT)), given.get("minInterval"), given.get("maxInterval")
    )
    following = work.follow(
        timers,
        given={name: span_ms_of(text) / 1000 for name, text in given.items()},
        coordinate=coordinate,
        push_on_exit=push_on_exit,
        on_outcome=shown.outcome,
        on_progress=shown.progress,
    )
    with shown:
        _run(following, lambda: _say_what_is_done(work, timers))


def _say_what_is_done(work: Sync, timers: Timers) -> None:
    if work.way == "pull":
        note(f"following {work.source} into {work.target}; Ctrl-C ends it")
        return
    idle, longest = span_text(timers.wait_idle_ms), span_text(timers.max_interval_ms)
    when = f"after {idle} without a write, or {longest} after the last push"
    note(f"pushing {work.source} to {work.target} {when}; Ctrl-C ends it")
    # People have been told to raise it. It belongs to each connection of their programs: we cannot see it.
    logger.debug("a busy_timeout shorter than %s is no harm: it has nothing to do with waitIdle", idle)


def _run(following: PushSubscription | PullSubscription, on_start: Callable[[], None]) -> None:
    """Until a signal ends it. The first one asks, the second one does not."""
    with asyncio.Runner() as runner:
        with _signals_held():  # one that comes while the loop is made would break it
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
            loop.call_later(SOON_S, self._say_that_it_takes_time)
        else:
            self._running.cancel()

    def _say_that_it_takes_time(self) -> None:
        if not self._running.done():
            note("ending when the push has; Ctrl-C again ends it at once")

    async def wait(self) -> None:
        try:
            await self._running
        except asyncio.CancelledError:
            if self._asked < 2:
                raise
            note("ended at once: the next push finds out what became of one that ran")


@contextmanager
def _signals_held() -> Iterator[None]:
    """They are delivered afterwards."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _say_more() -> None:
    logger = logging.getLogger("headwater")
    logger.setLevel(logging.DEBUG)
    for handler in logger.handlers:
        handler.setLevel(logging.DEBUG)
