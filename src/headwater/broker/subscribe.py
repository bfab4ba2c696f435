"""Subscribing: the options become a stored specification, and a consumer becomes the holder."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any, Literal, NamedTuple, TypedDict

from headwater.arguments import check_choice, check_flag, check_number, check_whole, nearest, shown
from headwater.broker import deliveries
from headwater.broker.committer import TransactionHooks
from headwater.broker.deliveries import (
    NOTHING_RESUMED,
    RECOVERY_PAGE,
    LeftInFlight,
    Resume,
    Resumed,
    replace,
    settled_to,
)
from headwater.broker.engine import Engine
from headwater.broker.flow import Flow, WaitFor
from headwater.broker.shared_consumers import renew_consumer
from headwater.delivery.filters import parse_entity_filter, parse_path, parse_where
from headwater.delivery.lease import release
from headwater.delivery.retry import ATTEMPTS_MAX, FACTOR_MAX, RetryPolicy
from headwater.delivery.window import WindowState
from headwater.errors import (
    ClosedError,
    HeadwaterError,
    InvalidFilterError,
    InvalidOptionError,
    InvalidWhereError,
    SubscriptionActiveError,
    SubscriptionMismatchError,
    TooLargeError,
)
from headwater.formats import Span, span_ms, time_ms
from headwater.ports.records import (
    Mode,
    Order,
    SubscriptionRecord,
    SubscriptionSpec,
    pattern_of,
    selection_of,
)
from headwater.ports.store import Reader, Writer
from headwater.topics import Dialect, parse_pattern

SUBSCRIPTION_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:@/-]{0,127}")
IN_FLIGHT_MAX = 10_000
STANDBY_POLL_S = 1.0  # a killed holder, or a lease that was not renewed, sends no wake-up
Entities = str | list[str] | None

Start = Literal["first", "new"] | int | datetime
"""Where a new subscription begins: at the oldest message, at the next one, at the message of a seq, or at a time."""


class SubscribeOptions(TypedDict, total=False):
    """What may stand beside id and pattern. `start` says where a new subscription begins, `timeout` how many seconds to
    wait for another holder to release it (None: no limit), `takeover` not to wait; all else is stored with the
    subscription."""

    mode: Mode
    start: Start
    timeout: float | None
    takeover: bool
    dialect: Dialect
    from_: Entities
    to: Entities
    broadcast: bool
    where: str | None
    order: Order
    order_key: str | None
    ack_wait: Span
    extension_max: Span
    lease: Span
    max_in_flight: int
    max_attempts: int
    backoff: Span
    backoff_factor: float
    backoff_max: Span
    jitter: float
    inactive_timeout: Span | None
    dead_letter_expired: bool


def check_subscription_id(id: str) -> str:
    if not isinstance(id, str) or not SUBSCRIPTION_ID.fullmatch(id):
        raise InvalidOptionError(
            f"{shown(id)} cannot name a subscription",
            next="Use 1 to 128 letters, digits and . _ : @ / -, beginning with a letter or digit",
        )
    return id


def spec_of(id: str, pattern: str, options: Mapping[str, Any]) -> SubscriptionSpec:
    """`make_spec`, with the subscription's id in errors about its filters."""
    try:
        return make_spec(pattern, options)
    except (InvalidFilterError, InvalidWhereError) as exc:
        raise type(exc)(exc.why, where=f"subscription {id}, {exc.where}", next=exc.next) from exc


def make_spec(pattern: str, options: Mapping[str, Any]) -> SubscriptionSpec:
    dialect = check_choice("dialect", options.get("dialect", "nats"), ("nats", "amqp"))
    entities = parse_entity_filter(
        from_=options.get("from_"), to=options.get("to"), broadcast=options.get("broadcast", False)
    )
    where, order_key = options.get("where"), options.get("order_key")
    if order_key is not None:
        if not isinstance(order_key, str):
            raise InvalidOptionError(f"order_key must be text like 'data.customer', not {order_key!r}")
        try:
            parse_path(order_key)
        except InvalidWhereError as exc:
            raise InvalidWhereError(exc.why, where=exc.where.replace("where", "order_key", 1), next=exc.next) from exc
    default = SubscriptionSpec("")
    max_in_flight = check_whole("max_in_flight", options.get("max_in_flight", default.max_in_flight), 1, IN_FLIGHT_MAX)
    inactive = options.get("inactive_timeout")
    return SubscriptionSpec(
        pattern=parse_pattern(pattern, dialect).text,
        dialect=dialect,
        entities=entities.to_json(),
        where=None if where is None else parse_where(where).text,
        mode=check_choice("mode", options.get("mode", "exclusive"), ("exclusive", "shared", "ephemeral")),
        order=check_choice("order", options.get("order", "seq"), ("seq", "priority")),
        order_key=order_key,
        ack_wait_ms=_positive("ack_wait", options, default.ack_wait_ms),
        extension_ms_max=_positive("extension_max", options, default.extension_ms_max),
        lease_ms=_positive("lease", options, default.lease_ms),
        max_in_flight=max_in_flight,
        inactive_ms=None if inactive is None else _positive("inactive_timeout", options, 0),
        dead_letter_expired=check_flag("dead_letter_expired", options.get("dead_letter_expired", True)),
        retry=_retry_policy(options),
    )


def _retry_policy(options: Mapping[str, Any]) -> RetryPolicy:
    default = RetryPolicy()
    base_ms = span_ms(options["backoff"], "backoff") if "backoff" in options else default.base_ms
    cap_ms = (
        span_ms(options["backoff_max"], "backoff_max") if "backoff_max" in options else max(default.cap_ms, base_ms)
    )
    return RetryPolicy(
        max_attempts=check_whole("max_attempts", options.get("max_attempts", default.max_attempts), 1, ATTEMPTS_MAX),
        base_ms=base_ms,
        factor=check_number("backoff_factor", options.get("backoff_factor", default.factor), 1, FACTOR_MAX),
        cap_ms=cap_ms,
        jitter=check_number("jitter", options.get("jitter", default.jitter), 0, 1),
    )


def _positive(name: str, options: Mapping[str, Any], default_ms: int) -> int:
    if name not in options:
        return default_ms
    ms = span_ms(options[name], name)
    if ms < 1:
        raise InvalidOptionError(f"{name} must be longer than 0, not {options[name]!r}")
    return ms


def check_start(start: Start) -> None:
    if start in ("first", "new"):
        return
    if isinstance(start, datetime):
        time_ms(start, "start")
    elif type(start) is not int or start < 0:
        near = nearest(start, ("first", "new"))
        raise InvalidOptionError(
            f"start must be 'first', 'new', a seq or a datetime, not {shown(start)}",
            next=f"Did you mean {near!r}?" if near else "A seq is that of the first message to deliver: start=7",
        )


def start_position(reader: Reader, start: Start) -> int:
    """The seq after which a subscription with this start begins."""
    check_start(start)
    if start == "first":
        return 0
    if start == "new":
        return reader.last_seq()
    if isinstance(start, datetime):
        return reader.seq_before(time_ms(start, "start"))
    return min(max(start - 1, 0), reader.last_seq())


# --- becoming the holder ----------------------------------------------------------------------------------------------

Allow = Callable[[SubscriptionRecord], None]
"""Raises UnauthorizedError if the caller has no right to this subscription."""


def load_allowed(reader: Reader, id: str, allow: Allow | None) -> SubscriptionRecord:
    record = deliveries.load(reader, id)
    if allow is not None:
        allow(record)
    return record


def load_movable(reader: Reader, id: str, allow: Allow | None, now_ms: int) -> SubscriptionRecord:
    """Load a subscription for a seek. A shared one may be moved while it has consumers; an exclusive one has to be
    free."""
    record = load_allowed(reader, id, allow)
    if record.spec.mode == "exclusive" and record.lease.live(now_ms):
        raise deliveries.already_active(record, "Close it, seek, and subscribe again")
    return record


class Tenant(NamedTuple):
    """The token for which a server subscribes: it owns new subscriptions, up to `subscriptions_max`."""

    owner: str
    allow: Allow
    subscriptions_max: int

    def check_new(self, writer: Writer, record: SubscriptionRecord) -> None:
        self.allow(record)
        if (there := writer.owned_subscriptions(self.owner)) >= self.subscriptions_max:
            raise TooLargeError(
                f"there are {there:,} durable subscriptions of this token and the limit is {self.subscriptions_max:,}",
                where=record.id,
                next="Remove those that are not used, or raise limits.subscriptions_per_token",
            )


class SubscribeRequest(NamedTuple):
    """What is not stored with the subscription: where a new one starts, whether a live holder loses it, the state that
    a client resumes with, and a name for the consumer of a shared one."""

    start: Start
    takeover: bool
    resume: Resume | None
    consumer: str
    tenant: Tenant | None = None


class Begun(NamedTuple):
    record: SubscriptionRecord
    resumed_from: int
    resumed: Resumed
    is_new: bool


def acquire(
    engine: Engine, id: str, spec: SubscriptionSpec, request: SubscribeRequest, timeout_s: float | None
) -> Flow[Begun]:
    """Begin or resume a subscription; while another consumer holds it, wait for its release or the end of its lease."""
    until = None if timeout_s is None else time.monotonic() + timeout_s
    waiter = engine.wakeups.add(pattern_of(spec), id, wake_on_settle=True)

    def look(reader: Reader) -> int:
        record = reader.subscription(id)
        return 0 if record is None else _held_ms(engine, record, engine.clock.now_ms())

    try:
        while True:
            completion = waiter.arm()
            try:
                return (yield from _begin_or_release(engine, id, spec, request))
            except SubscriptionActiveError:
                engine.ensure_watching()
                while held_ms := (yield from engine.read(look)):  # beside the writers: it may be for days
                    left_s = None if until is None else until - time.monotonic()
                    if left_s is not None and left_s <= 0:
                        raise
                    yield WaitFor(completion, min(s for s in (left_s, held_ms / 1000, STANDBY_POLL_S) if s is not None))
                    completion = waiter.arm()
    finally:
        engine.wakeups.remove(waiter)


def _held_ms(engine: Engine, record: SubscriptionRecord, now_ms: int) -> int:
    """How long a live holder has its lease, unless it renews or releases it before."""
    lease = record.lease
    return lease.until_ms - now_ms if lease.live(now_ms) and not engine.is_gone(lease.owner) else 0


def _begin_or_release(engine: Engine, id: str, spec: SubscriptionSpec, request: SubscribeRequest) -> Flow[Begun]:
    """A caller that is cancelled while it waits may have the lease already; then it is released."""
    begun: list[SubscriptionRecord] = []
    left = (yield from _left_in_flight(engine, id, spec)) if selection_of(spec).takes_time else None

    def work(writer: Writer, hooks: TransactionHooks) -> Begun:
        outcome = _begin(engine, writer, id, spec, request, left)
        begun[:] = [outcome.record]
        hooks.append(begun.clear)
        return outcome

    def release_it(writer: Writer, hooks: TransactionHooks) -> None:
        for mine in begun:
            record = writer.subscription(id)
            if record is not None and record.lease.held_by(mine.lease.owner, mine.lease.fence):
                writer.save_subscription(replace(record, lease=release(record.lease)))

    try:
        return (yield from engine.write(work))
    except HeadwaterError:
        raise
    except BaseException:
        with contextlib.suppress(ClosedError):  # which releases all leases
            engine.committer.submit(release_it)  # it comes after the beginning, for there is one queue
        raise


def _left_in_flight(engine: Engine, id: str, spec: SubscriptionSpec) -> Flow[LeftInFlight | None]:
    """Find what the last holder left in flight, beside the writers and a page at a time."""
    record = yield from engine.read(lambda reader: reader.subscription(id))
    if record is None or spec.mode != "exclusive":
        return None
    found = LeftInFlight(record.window, [])
    after, selection = record.window.floor, selection_of(spec)
    while after < record.window.delivered:
        messages, after = yield from engine.read(
            lambda reader, after=after: reader.scan(  # type: ignore[misc]
                selection, after, RECOVERY_PAGE, found.window.delivered
            ),
            engine.filters,
        )
        found.seqs.extend(message.seq for message in messages if not record.window.is_settled(message.seq))
    return found


def _begin(
    engine: Engine,
    writer: Writer,
    id: str,
    spec: SubscriptionSpec,
    request: SubscribeRequest,
    left: LeftInFlight | None,
) -> Begun:
    now_ms = engine.clock.now_ms()
    record = writer.subscription(id)
    is_new = record is None
    if record is None:
        after = start_position(writer, request.start)
        if request.tenant is not None:
            spec = replace(spec, owner=request.tenant.owner)
        record = SubscriptionRecord(id, spec, now_ms, now_ms, WindowState(after, after))
        if request.tenant is not None:
            request.tenant.check_new(writer, record)
    else:
        if request.tenant is not None:
            request.tenant.allow(record)
        _refuse_other_purpose(record.spec, spec, id)
        record = replace(
            record, spec=replace(spec, owner=record.spec.owner, paused_ms=record.spec.paused_ms), active_ms=now_ms
        )
    resumed_from = settled_to(writer, record)
    resumed = NOTHING_RESUMED
    if request.takeover or not _held_ms(engine, record, now_ms):
        record = replace(record, lease=release(record.lease))
    if request.resume is not None:
        record, resumed = deliveries.resume(writer, record, request.resume, request.consumer, now_ms, left)
    elif spec.mode == "exclusive":
        record = deliveries.take_exclusive_lease(writer, record, engine.new_owner(), now_ms, left)
    writer.save_subscription(record)
    if spec.mode == "shared":
        renew_consumer(writer, id, request.consumer, now_ms, now_ms + spec.lease_ms)
    return Begun(record, resumed_from, resumed, is_new)


def _refuse_other_purpose(stored: SubscriptionSpec, asked: SubscriptionSpec, id: str) -> None:
    """Settings may change from one subscribe to the next; what the subscription is for may not."""
    for name in ("pattern", "dialect", "mode", "entities", "where", "order", "order_key"):
        had, wants = getattr(stored, name), getattr(asked, name)
        if had != wants and not (name == "entities" and _is_unusable(stored)):
            raise SubscriptionMismatchError(
                f"subscription '{id}' was created with {name} {had!r}, not {wants!r}",
                where=id,
                next="Use another id, or remove the subscription first and start anew",
            )


def _is_unusable(stored: SubscriptionSpec) -> bool:
    """Whether its filter was written in a dialect that is no longer spoken; then another may take its place."""
    try:
        selection_of(stored)
    except InvalidFilterError:
        return True
    return False
