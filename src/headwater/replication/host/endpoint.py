"""The paths under `/sapi/`: an annex of the server for replicas.

    /sapi/push/<ns>/<name>, /sapi/pull/<ns>/<name>[@version], /sapi/subscribe/<ns>/<name>     WebSockets
    GET /sapi/replicas[/<ns>][?after=<ns>/<name>], GET /sapi/versions/<ns>/<name>[@version]   lists
    POST /sapi/<replica id>, POST /sapi/<ns>/<name>                                           error reports

Names and rights are checked before a WebSocket is opened, again and again while it lasts, before a push becomes a
version, and at each claim: a key or token that is revoked ends what runs under it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

from headwater.errors import Closed, HeadwaterError, InvalidInput, InvalidOption, UnknownReplica
from headwater.ports.annex import (
    FrameGuest,
    FrameWire,
    HttpRequest,
    HttpResponse,
    Refusal,
    Rights,
    Surroundings,
    UpgradeRequest,
)
from headwater.ports.clock import Clock
from headwater.protocol.websocket import GOING_AWAY, NORMAL
from headwater.replication.host.access import Access, access_to, client_of, refusal_of, refuse_no_more, who_of
from headwater.replication.host.announcing import Announcer
from headwater.replication.host.figures import Figures, SessionEnd, outcome_of
from headwater.replication.host.gathering import Gatherings
from headwater.replication.host.hosting import Hosting
from headwater.replication.host.http_answers import refused, text
from headwater.replication.host.listing import after_of, list_replicas, list_versions
from headwater.replication.host.pulling import Pull
from headwater.replication.host.pushing import Push
from headwater.replication.host.records import Replica
from headwater.replication.host.reports import store_report
from headwater.replication.host.room import Room
from headwater.replication.host.shelf import Shelf
from headwater.replication.host.slots import Slots
from headwater.replication.host.subscribing import Subscription
from headwater.replication.host.visit import FRAME_BYTES_MAX, IDLE_S, Abort, Gone, Visit, abort_of
from headwater.replication.names import PREFIX, ReplicaName, Session, VersionName, split_version
from headwater.replication.threads import Threads, wait_out

SESSIONS: tuple[Session, ...] = ("push", "pull", "subscribe")
PULLS_MAX = 32  # at once
SUBSCRIPTIONS_MAX = 10_000
LOOKS_MAX = 4  # at the catalogue, at once
RIGHTS_S = 2.0  # between two looks whether those who are here still may be
POLICY_S = 600.0  # between two looks for versions that have become too old
GOING_AWAY_TEXT = "the server is going away"

logger = logging.getLogger("headwater")


class ReplicaEndpoint:
    """`make_shelf` gives a shelf that is not open yet. `bytes_max`: of one database; `pushes_max`: at once;
    `idle_s`: that a client may be silent."""

    prefix = PREFIX
    message_bytes_max = FRAME_BYTES_MAX

    def __init__(
        self, make_shelf: Callable[[Clock], Shelf], *, bytes_max: int, pushes_max: int, idle_s: float = IDLE_S
    ) -> None:
        self._make_shelf = make_shelf
        self._bytes_max = bytes_max
        self._idle_s = idle_s
        self._most: dict[Session, int] = {"push": pushes_max, "pull": PULLS_MAX, "subscribe": SUBSCRIPTIONS_MAX}
        self._slots = Slots(self._most)
        self._sessions: dict[asyncio.Task[None], _Guest] = {}
        self._keepers: list[asyncio.Task[None]] = []
        self._closing: asyncio.Task[None] | None = None
        self._hosting: Hosting | None = None
        self._needs_token = False

    # --- its life -----------------------------------------------------------------------------------------------

    async def start(self, surroundings: Surroundings) -> None:
        threads = Threads(self._most["push"] + self._most["pull"] + LOOKS_MAX)
        clock = surroundings.clock
        try:
            shelf = await threads.do_or_undo(Shelf.close, self._open_shelf, clock)
        except BaseException:
            threads.close()
            raise
        announcer = Announcer(shelf, surroundings.publish, threads.do)
        self._needs_token = surroundings.needs_token
        self._audit = surroundings.audit
        self._slots = Slots(self._most)
        figures = Figures(surroundings.meter, self._slots.running, self._most["push"])
        room = Room(shelf.directory)
        self._hosting = Hosting(
            shelf, threads, announcer, Gatherings(clock), figures, room, self._bytes_max, self._idle_s
        )
        keepers = (
            announcer.run(),
            self._keep(self._hosting),
            self._watch_rights(self._hosting),
            figures.keep(lambda: threads.do(shelf.totals)),
        )
        self._keepers = [asyncio.create_task(keeper) for keeper in keepers]

    def _open_shelf(self, clock: Clock) -> Shelf:
        shelf = self._make_shelf(clock).open(serve=True)
        try:
            recovered = shelf.recover()
        except BaseException:
            shelf.close()
            raise
        if recovered.removed:
            logger.info("files of replicas that were left behind are removed: %d", len(recovered.removed))
        for damage in recovered.damaged:
            logger.error("a replica is damaged: %s", damage)
        return shelf

    async def _keep(self, hosting: Hosting) -> None:
        """Versions go by their age, also when nobody pushes."""
        while True:
            await asyncio.sleep(POLICY_S)
            try:
                await hosting.threads.do(_apply_policy, hosting.shelf)
                hosting.figures.stir()
            except Exception:
                logger.exception("the policy for old versions was not applied")

    async def _watch_rights(self, hosting: Hosting) -> None:
        """Who would not be let in by now is let go."""
        while True:
            await asyncio.sleep(RIGHTS_S)
            guests = [guest for guest in self._sessions.values() if not guest.visit.is_withdrawn]
            try:
                for guest, abort in await hosting.threads.do(_unwelcome, guests) if guests else ():
                    logger.info("%s %s: %s", guest.visit.client, guest.asked.name, abort.why)
                    guest.visit.withdraw(abort)
            except HeadwaterError as exc:
                logger.warning("rights were not looked at, and will be again: %s", exc)
            except Exception:
                logger.exception("rights were not looked at, and will be again")

    async def stop(self) -> None:
        """Pushes that are complete are finished; whoever else is here is told that the server goes away. Who is too
        impatient to wait for that leaves it to go on, and the directory locked until it is done."""
        hosting, self._hosting = self._hosting, None
        if hosting is not None:
            self._closing = asyncio.create_task(self._close(hosting))
            await asyncio.shield(self._closing)

    async def _close(self, hosting: Hosting) -> None:
        tasks, visits = [*self._sessions, *self._keepers], [guest.visit for guest in self._sessions.values()]
        for task in tasks:
            task.cancel()
        try:
            await wait_out(*tasks)
            for visit in visits:  # also those whose session had not begun
                visit.close(GOING_AWAY, GOING_AWAY_TEXT)
            await hosting.threads.do(hosting.shelf.close)
        finally:
            hosting.threads.close()

    # --- who comes ----------------------------------------------------------------------------------------------

    async def admit(
        self, request: UpgradeRequest, wire: FrameWire, bearer: str | None, rights: Rights | None
    ) -> FrameGuest | Refusal:
        try:
            asked = _asked(request.target)
        except InvalidInput as exc:
            return Refusal(400, f"{exc}\n")
        if asked is None:
            return Refusal(404, f"sessions are at {', '.join(f'{PREFIX}{each}/ns/name' for each in SESSIONS)}\n")
        if (hosting := self._hosting) is None:
            return Refusal(503, f"{GOING_AWAY_TEXT}\n")
        figures = hosting.figures
        visit = Visit(wire, client_of(request.headers, request.address), figures.count_received, figures.count_sent)
        visit.who = who_of(request.headers, bearer)
        look = partial(self._look, hosting.shelf, asked.name, bearer, rights)
        work = await self._work(hosting, visit, asked, look)
        refusal: Refusal | None
        if isinstance(work, Refusal):
            refusal = work
        elif self._hosting is not hosting:
            refusal = Refusal(503, f"{GOING_AWAY_TEXT}\n")
        else:
            access, session = work
            holder = bearer if bearer is not None and access.key_type != "none" else request.address
            slots, slot = self._slots, (asked.session, asked.name, holder)
            refusal = slots.refusal(*slot)
        if refusal is not None:
            figures.ended(asked.session, "refused")
            return refusal
        if asked.version is not None:  # an earlier one, as a restore wants it
            who = {"address": request.address, **({} if rights is None else rights.who)}
            self._audit(
                "replica.restore",
                who,
                replica=asked.name.path,
                version=asked.version.number or f"latest-{asked.version.back}",
                client=client_of(request.headers, request.address),
            )
        slots.take(*slot)
        task = asyncio.create_task(self._run(asked.session, visit, session, figures))
        self._sessions[task] = _Guest(visit, asked, bearer, look)
        task.add_done_callback(self._sessions.pop)
        task.add_done_callback(lambda _: slots.give_back(*slot))
        return visit

    async def _work(
        self, hosting: Hosting, visit: Visit, asked: _Asked, look: Callable[[], Access]
    ) -> tuple[Access, _Work] | Refusal:
        try:
            return await hosting.threads.do(self._session, hosting, visit, asked, look)
        except UnknownReplica as exc:
            return Refusal(404, f"{exc.why}. {exc.next}\n")
        except HeadwaterError as exc:
            logger.warning("a client could not be admitted: %s", exc)
            return Refusal(503, f"{exc.why}\n")

    def _session(
        self, hosting: Hosting, visit: Visit, asked: _Asked, look: Callable[[], Access]
    ) -> tuple[Access, _Work] | Refusal:
        """What there is to do, if the client may. Blocking."""
        name, access = asked.name, look()
        if (refusal := refusal_of(access, asked.session)) is not None:
            return refusal
        if asked.session == "push":
            return access, Push(hosting, visit, name, lambda: refuse_no_more(look(), "push"))
        if asked.session == "subscribe":
            return access, Subscription(hosting, visit, name, access, lambda: look().may_push)
        if access.replica is None:
            raise UnknownReplica("there is no such replica", next="Push it first")
        number = (asked.version or VersionName()).pick(access.replica.newest, hosting.shelf.numbers(name))
        return access, Pull(hosting, visit, name, number)

    def _look(self, shelf: Shelf, name: ReplicaName, bearer: str | None, rights: Rights | None) -> Access:
        """Blocking."""
        return self._access(shelf, name, shelf.find(name), bearer, rights)

    def _access(
        self, shelf: Shelf, name: ReplicaName, replica: Replica | None, bearer: str | None, rights: Rights | None
    ) -> Access:
        return access_to(shelf, name, replica, bearer, rights, needs_token=self._needs_token)

    async def _run(self, session: Session, visit: Visit, work: _Work, figures: Figures) -> None:
        outcome: SessionEnd = "failed"
        try:
            await work.run()
            visit.close(NORMAL, "")
        except asyncio.CancelledError:
            visit.close(GOING_AWAY, GOING_AWAY_TEXT)
        except Gone:
            pass
        except Abort as exc:
            outcome = outcome_of(exc)
            visit.abort(exc)
        except HeadwaterError as exc:
            logger.info("a %s ended: %s", session, exc)
            abort = abort_of(exc)
            outcome = outcome_of(abort)
            visit.abort(abort)
        except Exception:
            logger.exception("a %s failed", session)
            visit.abort(Abort("FAILED", "internal error"))
        finally:
            figures.ended(session, work.outcome or outcome)

    # --- plain HTTP ---------------------------------------------------------------------------------------------

    async def answer(self, request: HttpRequest, bearer: str | None, rights: Rights | None) -> HttpResponse:
        if (hosting := self._hosting) is None:
            return text(503, GOING_AWAY_TEXT)
        try:
            return await hosting.threads.do(self._answer, hosting.shelf, request, bearer, rights)
        except InvalidInput as exc:
            return text(400, str(exc))
        except Closed:
            return text(503, GOING_AWAY_TEXT)
        except HeadwaterError as exc:
            logger.warning("%s was not answered: %s", urlsplit(request.target).path, exc)
            return text(503, exc.why)

    def _answer(self, shelf: Shelf, request: HttpRequest, bearer: str | None, rights: Rights | None) -> HttpResponse:
        target = urlsplit(request.target)
        segments = _segments(target.path)
        method = request.method
        if len(segments) == 3 and segments[0] in SESSIONS:
            return text(426, "this is a WebSocket", ("Upgrade", "websocket"))
        if len(segments) == 3 and segments[0] == "versions":
            if method not in ("GET", "HEAD"):
                return text(405, "GET", ("Allow", "GET, HEAD"))
            last, upto = split_version(segments[2])
            name = ReplicaName(segments[1], last)
            found = self._found(shelf, shelf.find(name), name, "pull", bearer, rights)
            return found if isinstance(found, HttpResponse) else list_versions(shelf, found, upto or VersionName())
        if segments[0] == "replicas" and len(segments) < 3 and method in ("GET", "HEAD"):
            return list_replicas(
                shelf,
                lambda replica: self._access(shelf, replica.name, replica, bearer, rights),
                segments[1] if len(segments) > 1 else None,
                bearer,
                rights,
                after=after_of(target.query),
                needs_token=self._needs_token,
            )
        if len(segments) not in (1, 2) or not all(segments):
            return text(404, f"there is nothing here; {PREFIX}versions/ns/name has the versions of a replica")
        if method != "POST":
            return text(405, "POST", ("Allow", "POST"))
        name_or_none = ReplicaName(*segments) if len(segments) == 2 else None
        replica = shelf.find_id(segments[0]) if name_or_none is None else shelf.find(name_or_none)
        # Either right will do, as for a subscription: who pushes reports what kept it from pushing.
        found = self._found(shelf, replica, name_or_none, "subscribe", bearer, rights)
        if isinstance(found, HttpResponse):
            return found
        return store_report(shelf, found, client_of(request.headers, request.address), request.body)

    def _found(
        self,
        shelf: Shelf,
        replica: Replica | None,
        name: ReplicaName | None,
        needed: Session,
        bearer: str | None,
        rights: Rights | None,
    ) -> Replica | HttpResponse:
        """The replica, if it is there and the client may know of it: it needs the right to do this."""
        name = name if replica is None else replica.name
        if name is not None:
            refusal = refusal_of(self._access(shelf, name, replica, bearer, rights), needed)
            if refusal is not None:
                return refused(refusal.status, refusal.text.strip())
        elif self._needs_token and rights is None:
            return refused(401, "a token or key is needed")
        return text(404, "there is no such replica") if replica is None else replica


def _unwelcome(guests: Sequence[_Guest]) -> list[tuple[_Guest, Abort]]:
    """Those who may not go on, and what to tell them; who came for the same with the same key is looked at once.
    Blocking."""
    found: list[tuple[_Guest, Abort]] = []
    seen: dict[tuple[_Asked, str | None], Abort | None] = {}
    for guest in guests:
        who = (guest.asked, guest.bearer)
        if who not in seen:
            try:
                refuse_no_more(guest.look(), guest.asked.session)
                seen[who] = None
            except Abort as exc:
                seen[who] = exc
        if (abort := seen[who]) is not None:
            found.append((guest, abort))
    return found


def _apply_policy(shelf: Shelf) -> None:
    """Blocking."""
    for replica in shelf.list():
        try:
            shelf.apply_policy(replica.name)
        except UnknownReplica:  # removed just now
            continue
        except HeadwaterError as exc:
            logger.warning("the policy for old versions was not applied: %s", exc)


_Work = Push | Pull | Subscription


class _Guest(NamedTuple):
    visit: Visit
    asked: _Asked
    bearer: str | None
    look: Callable[[], Access]
    """What it may now. Blocking."""


class _Asked(NamedTuple):
    session: Session
    name: ReplicaName
    version: VersionName | None


def _asked(target: str) -> _Asked | None:
    """What a path asks for; None if it is none of ours. Raises InvalidOption for a name that is none."""
    *segments, last = _segments(urlsplit(target).path)
    last, version = split_version(last)
    segments.append(last)
    if len(segments) != 3 or segments[0] not in SESSIONS:
        return None
    if version is not None and segments[0] != "pull":
        return None
    return _Asked(segments[0], ReplicaName(segments[1], segments[2]), version)


def _segments(path: str) -> list[str]:
    """What stands between the slashes. One that is encoded is no slash, and no name has one."""
    segments = [unquote(each) for each in path.removeprefix(PREFIX).split("/")]
    if any(each in segment for segment in segments for each in "/\\%"):
        raise InvalidOption("a name has no slash, backslash or percent sign in it", next="Leave them out")
    return segments
