"""The paths under `/sapi/`, which the server mounts for replicas.

    /sapi/push/<ns>/<name>, /sapi/pull/<ns>/<name>[@version], /sapi/subscribe/<ns>/<name>     WebSockets
    GET /sapi/replicas[/<ns>][?after=<ns>/<name>], GET /sapi/versions/<ns>/<name>[@version]   lists
    POST /sapi/<replica id>, POST /sapi/<ns>/<name>                                           error reports

Names and rights are checked before a WebSocket is opened, every few seconds while it is open, before a push becomes a
version, and at each claim: revoking a key or token ends the sessions that use it.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit

import msgspec

from headwater.errors import ClosedError, HeadwaterError, InvalidInputError, InvalidOptionError, UnknownReplicaError
from headwater.formats import iso
from headwater.ports.clock import Clock
from headwater.protocol.websocket import GOING_AWAY, NORMAL
from headwater.replication.claims import ClientIdentity
from headwater.replication.host.catalogue import (
    CLIENT_CHARS_MAX,
    REPORT_BYTES_MAX,
    Catalogue,
    Replica,
    ReplicaListing,
    is_key,
    version_document,
)
from headwater.replication.host.disk import SpaceReservations
from headwater.replication.host.events import ReplicaMetrics, SessionOutcome, VersionAnnouncer, outcome_of
from headwater.replication.host.pull import PullSession
from headwater.replication.host.push import PushSession
from headwater.replication.host.session import (
    FRAME_BYTES_MAX,
    IDLE_S,
    Abort,
    Gone,
    HostContext,
    ReplicaSession,
    abort_of,
)
from headwater.replication.host.store import ReplicaStore
from headwater.replication.host.subscribe import Claim, SubscriberRegistry, SubscribeSession, rights_revoked
from headwater.replication.names import ReplicaName, VersionName, split_version
from headwater.replication.protocol import PREFIX, ReportBody, SessionKind
from headwater.replication.threads import Threads, wait_out
from headwater.server.mount import (
    HttpRequest,
    HttpResponse,
    MountContext,
    MountSession,
    MountTransport,
    Refusal,
    Rights,
    UpgradeRequest,
    text_response,
)

SESSIONS: tuple[SessionKind, ...] = ("push", "pull", "subscribe")
PULLS_MAX = 32  # at once
SUBSCRIPTIONS_MAX = 10_000
LOOKUPS_MAX = 4  # in the catalogue, at once
RIGHTS_S = 2.0  # between two checks of the rights of running sessions
POLICY_S = 600.0  # between two removals of old versions by their age
LISTED_MAX = 1_000  # replicas in one answer; `?after=` asks for the next
LISTING_PAGE = 200  # replicas read from the catalogue at once
AFTER = "after"
JSON = "application/json"
GOING_AWAY_TEXT = "the server is going away"

Claims = Mapping[ReplicaName, Claim]
KeyType = Literal["push", "pull", "token", "none"]

logger = logging.getLogger("headwater")


class ReplicaEndpoint:
    """`make_store` returns a store that is not open yet. `bytes_max`: of one database; `pushes_max`: at once; `idle_s`:
    that a client may be silent."""

    prefix = PREFIX
    message_bytes_max = FRAME_BYTES_MAX

    def __init__(
        self, make_store: Callable[[Clock], ReplicaStore], *, bytes_max: int, pushes_max: int, idle_s: float = IDLE_S
    ) -> None:
        self._make_store = make_store
        self._bytes_max = bytes_max
        self._idle_s = idle_s
        self._limits: dict[SessionKind, int] = {"push": pushes_max, "pull": PULLS_MAX, "subscribe": SUBSCRIPTIONS_MAX}
        self._slots = Slots(self._limits)
        self._sessions: dict[asyncio.Task[None], _RunningSession] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._closing: asyncio.Task[None] | None = None
        self._context: HostContext | None = None
        self._needs_token = False

    # --- life cycle ---------------------------------------------------------------------------------------------

    async def start(self, server: MountContext) -> None:
        threads = Threads(self._limits["push"] + self._limits["pull"] + LOOKUPS_MAX)
        clock = server.clock
        try:
            store = await threads.do_or_undo(ReplicaStore.close, self._open_store, clock)
        except BaseException:
            threads.close()
            raise
        announcer = VersionAnnouncer(store.catalogue, server.publish, threads)
        self._needs_token = server.needs_token
        self._audit = server.audit
        self._slots = Slots(self._limits)
        metrics = ReplicaMetrics(server.meter, self._slots.running, self._limits["push"])
        space = SpaceReservations(store.directory)
        self._context = HostContext(
            store, threads, announcer, SubscriberRegistry(clock), metrics, space, self._bytes_max, self._idle_s
        )
        tasks = (
            announcer.run(),
            self._apply_policies(self._context),
            self._check_rights(self._context),
            metrics.run(lambda: threads.do(store.catalogue.totals)),
        )
        self._tasks = [asyncio.create_task(task) for task in tasks]

    def _open_store(self, clock: Clock) -> ReplicaStore:
        store = self._make_store(clock).open(serve=True)
        try:
            recovered = store.recover()
        except BaseException:
            store.close()
            raise
        if recovered.removed:
            logger.info("files of replicas that were left behind are removed: %d", len(recovered.removed))
        for damage in recovered.damaged:
            logger.error("a replica is damaged: %s", damage)
        return store

    async def _apply_policies(self, context: HostContext) -> None:
        """Versions are removed by their age, also without pushes."""
        while True:
            await asyncio.sleep(POLICY_S)
            try:
                await context.threads.do(_apply_policies, context.store)
                context.metrics.refresh()
            except Exception:
                logger.exception("old versions were not removed")

    async def _check_rights(self, context: HostContext) -> None:
        """Ends sessions whose client would be refused by now."""
        while True:
            await asyncio.sleep(RIGHTS_S)
            running = [each for each in self._sessions.values() if each.session.revoked is None]
            try:
                for each, abort in await context.threads.do(_unauthorized, running) if running else ():
                    logger.info("%s %s: %s", each.session.client, each.asked.name, abort.why)
                    each.session.revoke(abort)
            except HeadwaterError as exc:
                logger.warning("rights were not checked, trying again: %s", exc)
            except Exception:
                logger.exception("rights were not checked, trying again")

    async def stop(self) -> None:
        """Finish pushes that are complete, and end the other sessions. A caller that does not wait for that leaves it
        running, and the directory locked until it is done."""
        context, self._context = self._context, None
        if context is not None:
            self._closing = asyncio.create_task(self._close(context))
            await asyncio.shield(self._closing)

    async def _close(self, context: HostContext) -> None:
        tasks, sessions = [*self._sessions, *self._tasks], [each.session for each in self._sessions.values()]
        for task in tasks:
            task.cancel()
        try:
            await wait_out(*tasks)
            for session in sessions:  # also those that had not begun
                session.close(GOING_AWAY, GOING_AWAY_TEXT)
            await context.threads.do(context.store.close)
        finally:
            context.threads.close()

    # --- sessions -----------------------------------------------------------------------------------------------

    async def admit(
        self, request: UpgradeRequest, transport: MountTransport, bearer: str | None, rights: Rights | None
    ) -> MountSession | Refusal:
        try:
            asked = _asked(request.target)
        except InvalidInputError as exc:
            return Refusal(400, f"{exc}\n")
        if asked is None:
            return Refusal(404, f"sessions are at {', '.join(f'{PREFIX}{each}/ns/name' for each in SESSIONS)}\n")
        if (context := self._context) is None:
            return Refusal(503, f"{GOING_AWAY_TEXT}\n")
        metrics = context.metrics
        client = client_of(request.headers, request.address)
        session = ReplicaSession(transport, client, metrics.count_received, metrics.count_sent)
        session.identity = client_identity(request.headers, bearer)
        look_up = partial(Requester(context.store.catalogue, bearer, rights, self._needs_token).look_up, asked.name)
        prepared = await context.threads.do(_work_for, context, session, asked, look_up)
        refusal: Refusal | None
        if isinstance(prepared, Refusal):
            refusal = prepared
        elif self._context is not context:
            refusal = Refusal(503, f"{GOING_AWAY_TEXT}\n")
        else:
            access, work = prepared
            holder = bearer if bearer is not None and access.key_type != "none" else request.address
            slots, slot = self._slots, (asked.kind, asked.name, holder)
            refusal = slots.refusal(*slot)
        if refusal is not None:
            metrics.ended(asked.kind, "refused")
            return refusal
        if asked.version is not None:  # an older one, for a restore
            self._audit(
                "replica.restore",
                {"address": request.address, **({} if rights is None else rights.identity)},
                replica=asked.name.path,
                version=asked.version.number or f"latest-{asked.version.back}",
                client=client,
            )
        slots.take(*slot)
        task = asyncio.create_task(self._run(asked.kind, session, work, metrics))
        self._sessions[task] = _RunningSession(session, asked, bearer, look_up)
        task.add_done_callback(self._sessions.pop)
        task.add_done_callback(lambda _: slots.give_back(*slot))
        return session

    async def _run(self, kind: SessionKind, session: ReplicaSession, work: _Work, metrics: ReplicaMetrics) -> None:
        outcome: SessionOutcome = "failed"
        try:
            await work.run()
            session.close(NORMAL, "")
        except asyncio.CancelledError:
            session.close(GOING_AWAY, GOING_AWAY_TEXT)
        except Gone:
            pass
        except Abort as exc:
            outcome = outcome_of(exc)
            session.abort(exc)
        except HeadwaterError as exc:
            logger.info("a %s ended: %s", kind, exc)
            abort = session.revoked or abort_of(exc)  # a revocation ends the check of a push by an error
            outcome = outcome_of(abort)
            session.abort(abort)
        except Exception:
            logger.exception("a %s failed", kind)
            session.abort(Abort("FAILED", "internal error"))
        finally:
            metrics.ended(kind, work.outcome or outcome)

    # --- plain HTTP ---------------------------------------------------------------------------------------------

    async def answer(self, request: HttpRequest, bearer: str | None, rights: Rights | None) -> HttpResponse:
        if (context := self._context) is None:
            return text_response(503, GOING_AWAY_TEXT)
        try:
            claims = context.subscribers.claims()
            requester = Requester(context.store.catalogue, bearer, rights, self._needs_token)
            return await context.threads.do(_answer, context.store, claims, request, requester)
        except InvalidInputError as exc:
            return text_response(400, str(exc))
        except ClosedError:
            return text_response(503, GOING_AWAY_TEXT)
        except HeadwaterError as exc:
            logger.warning("%s was not answered: %s", urlsplit(request.target).path, exc)
            return text_response(503, exc.why)


_Work = PushSession | PullSession | SubscribeSession


class _RunningSession(NamedTuple):
    session: ReplicaSession
    asked: _Asked
    bearer: str | None
    look_up: Callable[[], Access]
    """The current rights of the client. Blocks."""


class _Asked(NamedTuple):
    kind: SessionKind
    name: ReplicaName
    version: VersionName | None


def _asked(target: str) -> _Asked | None:
    """What a path asks for; None if it is no session. Raises InvalidOptionError for an invalid name."""
    *segments, last = _segments(urlsplit(target).path)
    last, version = split_version(last)
    segments.append(last)
    if len(segments) != 3 or segments[0] not in SESSIONS:
        return None
    if version is not None and segments[0] != "pull":
        return None
    return _Asked(segments[0], ReplicaName(segments[1], segments[2]), version)


def _segments(path: str) -> list[str]:
    """The decoded parts between slashes. No name holds an encoded slash."""
    segments = [unquote(each) for each in path.removeprefix(PREFIX).split("/")]
    if any(each in segment for segment in segments for each in "/\\%"):
        raise InvalidOptionError("a name has no slash, backslash or percent sign in it", next="Leave them out")
    return segments


def _work_for(
    context: HostContext, session: ReplicaSession, asked: _Asked, look_up: Callable[[], Access]
) -> tuple[Access, _Work] | Refusal:
    """The session, if the client has the right to it. Blocks."""
    name = asked.name
    try:
        access = look_up()
        if (refusal := refusal_of(access, asked.kind)) is not None:
            return refusal
        if asked.kind == "push":
            return access, PushSession(context, session, name, lambda: refuse_revoked(look_up(), "push"))
        if asked.kind == "subscribe":
            return access, SubscribeSession(
                context,
                session,
                name,
                key_type=access.key_type,
                may_push=access.may_push,
                check_may_push=lambda: look_up().may_push,
            )
        if access.replica is None:
            return Refusal(404, "there is no such replica. Push it first\n")
        version = asked.version or VersionName()
        number = version.pick(access.replica.newest, context.store.catalogue.numbers(name))
        return access, PullSession(context, session, name, number)
    except UnknownReplicaError as exc:
        return Refusal(404, f"{exc.why}. {exc.next}\n")
    except HeadwaterError as exc:
        logger.warning("a client could not be admitted: %s", exc)
        return Refusal(503, f"{exc.why}\n")


def _unauthorized(running: Sequence[_RunningSession]) -> list[tuple[_RunningSession, Abort]]:
    """The sessions that have lost their rights, and the reason; each pair of target and key is checked once. Blocks."""
    found: list[tuple[_RunningSession, Abort]] = []
    checked: dict[tuple[_Asked, str | None], Abort | None] = {}
    for each in running:
        pair = (each.asked, each.bearer)
        if pair not in checked:
            try:
                refuse_revoked(each.look_up(), each.asked.kind)
                checked[pair] = None
            except Abort as exc:
                checked[pair] = exc
        if (abort := checked[pair]) is not None:
            found.append((each, abort))
    return found


def _apply_policies(store: ReplicaStore) -> None:
    """Blocks."""
    for replica in store.catalogue.replicas():
        try:
            store.apply_policy(replica.id)
        except HeadwaterError as exc:
            logger.warning("old versions of %s were not removed: %s", replica.name.path, exc)


# --- slots ----------------------------------------------------------------------------------------------------------


class Slots:
    """Limits of concurrent sessions of each kind: in all, of one replica, and of one holder, which is a token, a key
    or, without either, an address. A holder has up to half of the slots and a replica up to three quarters, so that no
    holder locks out the others, neither of the server nor of a replica."""

    def __init__(self, limits: Mapping[SessionKind, int]) -> None:
        self._limits = limits
        self._taken: Counter[tuple[SessionKind, ReplicaName | str | None]] = Counter()

    def running(self, kind: SessionKind) -> int:
        return self._taken[kind, None]

    def refusal(self, kind: SessionKind, name: ReplicaName, holder: str) -> Refusal | None:
        """Why there is no free slot; None if there is one."""
        limit = self._limits[kind]
        of_holder, of_replica = max(1, limit // 2), limit - limit // 4
        if self._taken[kind, None] >= limit:
            return Refusal(503, "the server has as many sessions of this kind as it takes; try again\n")
        if self._taken[kind, holder] >= of_holder:
            return Refusal(429, f"this token, key or address has {of_holder} of them running already; try again\n")
        if self._taken[kind, name] >= of_replica:
            return Refusal(429, f"of this replica {of_replica} of them are running already; try again\n")
        return None

    def take(self, kind: SessionKind, name: ReplicaName, holder: str) -> None:
        self._taken.update((kind, owner) for owner in (None, name, holder))

    def give_back(self, kind: SessionKind, name: ReplicaName, holder: str) -> None:
        for owner in (None, name, holder):
            self._taken[kind, owner] -= 1
            if not self._taken[kind, owner]:
                del self._taken[kind, owner]


# --- rights ---------------------------------------------------------------------------------------------------------


class Access(NamedTuple):
    """The rights of a client to one replica.

    Without tokens and keys every client has all rights. A replica with keys, or a server with tokens, needs a push or
    pull key, or a token whose scopes allow the topic of the replica."""

    replica: Replica | None
    key_type: KeyType
    may_push: bool
    may_pull: bool
    is_unknown: bool = False
    """Without a valid key or token, where one is needed."""
    has_bearer: bool = False


def client_of(headers: dict[str, str], address: str) -> str:
    """The name that a client gives itself, if it can be shown; otherwise its address."""
    name = headers.get("x-clientid", "").strip()[:CLIENT_CHARS_MAX]
    return name if name and name.isprintable() else address


def client_identity(headers: dict[str, str], bearer: str | None) -> ClientIdentity:
    """The owner of a claim, which alone may extend or release it: the same name with the same token or key. A client
    without a name is identified by its connection."""
    name = headers.get("x-clientid", "").strip()
    return (bearer, name) if name else object()


class Requester(NamedTuple):
    """A client that asks for something, by the key or token that it shows. `rights`: of its token."""

    catalogue: Catalogue
    bearer: str | None
    rights: Rights | None
    needs_token: bool

    def look_up(self, name: ReplicaName) -> Access:
        """Blocks."""
        return self.access_to(name, self.catalogue.find(name))

    def access_to(self, name: ReplicaName, replica: Replica | None) -> Access:
        """`replica` is the one of that name. Blocks."""
        catalogue, bearer, rights, needs_token = self
        if replica is not None and bearer is not None and (kind := catalogue.key_kind(replica.id, bearer)) is not None:
            return Access(replica, kind, may_push=kind == "push", may_pull=True)
        if rights is not None:
            return Access(replica, "token", rights.may_publish(name.topic), rights.may_read(name.topic))
        # An unknown key is refused even where none is needed: it would give a false sense of safety.
        has_key = bearer is not None and is_key(bearer)
        if not needs_token and not has_key and (replica is None or not catalogue.needs_key(replica.id)):
            return Access(replica, "none", may_push=True, may_pull=True)
        return Access(replica, "none", may_push=False, may_pull=False, is_unknown=True, has_bearer=bearer is not None)


def refusal_of(access: Access, kind: SessionKind) -> Refusal | None:
    """A subscription needs either right: pushing clients want claims, pulling ones versions."""
    if (access.may_push and kind != "pull") or (access.may_pull and kind != "push"):
        return None
    if access.is_unknown and access.has_bearer:
        return Refusal(401, "this key or token is not known here: it is wrong, or was revoked\n")
    if access.is_unknown:
        return Refusal(401, f"to {kind} needs a key of the replica, or a token of the server that allows it\n")
    shown = "token" if access.key_type == "token" else f"{access.key_type} key"
    return Refusal(403, f"this {shown} does not allow to {kind}\n")


def refuse_revoked(access: Access, kind: SessionKind) -> None:
    """Raise Abort in a running session when its client would be refused by now."""
    if refusal_of(access, kind) is not None:
        raise rights_revoked(kind)


# --- answers --------------------------------------------------------------------------------------------------------


def _answer(store: ReplicaStore, claims: Claims, request: HttpRequest, requester: Requester) -> HttpResponse:
    """Blocks."""
    catalogue = store.catalogue
    target = urlsplit(request.target)
    segments = _segments(target.path)
    method = request.method
    if len(segments) == 3 and segments[0] in SESSIONS:
        return text_response(426, "this is a WebSocket", ("Upgrade", "websocket"))
    if len(segments) == 3 and segments[0] == "versions":
        if method not in ("GET", "HEAD"):
            return text_response(405, "GET", ("Allow", "GET, HEAD"))
        last, upto = split_version(segments[2])
        name = ReplicaName(segments[1], last)
        found = _found(requester, catalogue.find(name), name, "pull")
        return found if isinstance(found, HttpResponse) else _list_versions(catalogue, found, upto or VersionName())
    if segments[0] == "replicas" and len(segments) < 3 and method in ("GET", "HEAD"):
        namespace = segments[1] if len(segments) > 1 else None
        return _list_replicas(requester, claims, namespace, _after(target.query))
    if len(segments) not in (1, 2) or not all(segments):
        return text_response(404, f"there is nothing here; {PREFIX}versions/ns/name has the versions of a replica")
    if method != "POST":
        return text_response(405, "POST", ("Allow", "POST"))
    name_or_none = ReplicaName(*segments) if len(segments) == 2 else None
    replica = catalogue.find_id(segments[0]) if name_or_none is None else catalogue.find(name_or_none)
    # The right to push or to pull, as for a subscription: a client reports what kept it from pushing.
    found = _found(requester, replica, name_or_none, "subscribe")
    if isinstance(found, HttpResponse):
        return found
    return _store_report(catalogue, found, client_of(request.headers, request.address), request.body)


def _found(
    requester: Requester, replica: Replica | None, name: ReplicaName | None, needed: SessionKind
) -> Replica | HttpResponse:
    """The replica, if it exists and the client has the right to such a session."""
    name = name if replica is None else replica.name
    if name is not None:
        refusal = refusal_of(requester.access_to(name, replica), needed)
        if refusal is not None:
            return _refused(refusal.status, refusal.text.strip())
    elif requester.needs_token and requester.rights is None:
        return _refused(401, "a token or key is needed")
    return text_response(404, "there is no such replica") if replica is None else replica


def _list_replicas(
    requester: Requester, claims: Claims, namespace: str | None, after: ReplicaName | None
) -> HttpResponse:
    """The replicas that the client may pull, by name, after `after`; `isCut` in the answer: there are more."""
    if namespace is not None:
        ReplicaName(namespace, "any")  # refuses an invalid one
    is_first, found = after is None, list[ReplicaListing]()
    while len(found) <= LISTED_MAX:
        page = requester.catalogue.listing(namespace=namespace, after=after, limit=LISTING_PAGE)
        found += [each for each in page if requester.access_to(each.replica.name, each.replica).may_pull]
        if len(page) < LISTING_PAGE:
            break
        after = page[-1].replica.name
    if not found and is_first and (refusal := _listing_refusal(requester, namespace)) is not None:
        return refusal
    shown = [_listing_document(each, claims.get(each.replica.name)) for each in found[:LISTED_MAX]]
    return HttpResponse(200, JSON, msgspec.json.encode({"replicas": shown, "isCut": len(found) > LISTED_MAX}))


def _listing_refusal(requester: Requester, namespace: str | None) -> HttpResponse | None:
    """The answer to a client that sees no replica. The text does not depend on the replicas of others."""
    if requester.rights is not None:
        everything = "replica.>" if namespace is None else f"replica.{namespace}.>"
        if requester.rights.may_read(everything):
            return None
        return text_response(403, "this token may pull no replica here")
    if requester.bearer is not None:
        return _refused(401, "this key or token opens no replica here: it is wrong, or was revoked")
    if requester.needs_token:
        return _refused(401, "to list replicas needs a token of the server, or a key of one")
    return None


def _refused(status: int, why: str) -> HttpResponse:
    return text_response(status, why, *((("WWW-Authenticate", "Bearer"),) if status == 401 else ()))


def _list_versions(catalogue: Catalogue, replica: Replica, upto: VersionName) -> HttpResponse:
    """Newest first from `upto` on, one page."""
    number = upto.number_from(replica.newest)
    try:
        versions = catalogue.versions(replica.name, below=number + 1)
    except UnknownReplicaError:  # removed just now
        versions = []
    documents = [version_document(replica, version) for version in versions]
    return HttpResponse(200, JSON, msgspec.json.encode(documents))


def _after(query: str) -> ReplicaName | None:
    """`after=ns/name`. Raises InvalidOptionError for an invalid name."""
    after = parse_qs(query).get(AFTER)
    return None if after is None else ReplicaName.parse(after[-1])


def _listing_document(listing: ReplicaListing, claim: Claim | None) -> dict[str, Any]:
    replica, newest = listing
    return {
        "replica": replica.name.path,
        "replicaID": replica.id,
        "createdAt": iso(replica.created_ms),
        "changedAt": None if replica.changed_ms is None else iso(replica.changed_ms),
        "versions": replica.versions,
        "storedBytes": replica.stored_bytes,
        "newest": None if newest is None else version_document(replica, newest),
        "claim": None if claim is None else {"client": claim.client, "until": iso(claim.until_ms)},
    }


def _store_report(catalogue: Catalogue, replica: Replica, client: str, body: bytes) -> HttpResponse:
    if len(body) > REPORT_BYTES_MAX:
        return text_response(413, f"a report has at most {REPORT_BYTES_MAX:,} bytes")
    try:
        msgspec.json.decode(body, type=ReportBody)
        document = msgspec.json.encode(msgspec.json.decode(body, type=dict[str, Any]), order="deterministic").decode()
    except msgspec.MsgspecError as exc:
        return text_response(400, f"this is no report: {exc}")
    except (UnicodeDecodeError, RecursionError):
        return text_response(400, "this is no report")
    if len(document.encode()) > REPORT_BYTES_MAX:
        return text_response(413, f"a report has at most {REPORT_BYTES_MAX:,} bytes")
    catalogue.add_report(replica.id, client, document)
    return HttpResponse(204, "text/plain; charset=utf-8", b"")
