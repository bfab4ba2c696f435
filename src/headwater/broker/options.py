"""What users write at subscribe, checked and turned into a stored specification."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import datetime
from typing import Any, Literal, TypedDict

from headwater.delivery.entity_filter import parse_entity_filter
from headwater.delivery.retry import ATTEMPTS_MAX, RetryPolicy
from headwater.delivery.where import parse_where
from headwater.delivery.where_syntax import parse_path
from headwater.errors import InvalidOption
from headwater.message import Span, check_whole, span_ms, time_ms
from headwater.ports.records import Mode, Order, SubscriptionSpec
from headwater.ports.store import Reader
from headwater.topics import Dialect, parse_pattern

SUBSCRIPTION_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:@/-]{0,127}")
SHOWN_CHARS_MAX = 200  # of what was given, in an error
IN_FLIGHT_MAX = 10_000
Entities = str | list[str] | None

Start = Literal["first", "new"] | int | datetime
"""Where a new subscription begins: at the oldest message, at the next one, after a seq, or at a time."""


class SubscribeOptions(TypedDict, total=False):
    """What may stand beside id and pattern. `start` says where a new subscription begins, `wait` how many seconds to
    wait for another holder to let go (None: for ever), `takeover` not to wait for it; all else is stored with the
    subscription."""

    mode: Mode
    start: Start
    wait: float | None
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
    bury_expired: bool


def check_subscription_id(id: str) -> str:
    if not isinstance(id, str) or not SUBSCRIPTION_ID.fullmatch(id):
        raise InvalidOption(
            f"{_shown(id)} cannot name a subscription",
            next="Use 1 to 128 letters, digits and . _ : @ / -, beginning with a letter or digit",
        )
    return id


def _shown(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= SHOWN_CHARS_MAX else f"{shown[:SHOWN_CHARS_MAX]}…"


def make_spec(pattern: str, options: Mapping[str, Any]) -> SubscriptionSpec:
    unknown = options.keys() - SubscribeOptions.__annotations__.keys()
    if unknown:
        raise InvalidOption(
            f"unknown subscribe option {sorted(unknown)[0]!r}",
            next=f"Known ones: {', '.join(SubscribeOptions.__annotations__)}",
        )
    dialect = _one_of("dialect", options.get("dialect", "nats"), ("nats", "amqp"))
    entities = parse_entity_filter(
        from_=options.get("from_"), to=options.get("to"), broadcast=options.get("broadcast", False)
    )
    where, order_key = options.get("where"), options.get("order_key")
    if order_key is not None:
        if not isinstance(order_key, str):
            raise InvalidOption(f"order_key must be text like 'data.customer', not {order_key!r}")
        parse_path(order_key)
    bury_expired = options.get("bury_expired", True)
    if not isinstance(bury_expired, bool):
        raise InvalidOption(f"bury_expired is True or False, not {bury_expired!r}")
    default = SubscriptionSpec("")
    max_in_flight = check_whole("max_in_flight", options.get("max_in_flight", default.max_in_flight), 1, IN_FLIGHT_MAX)
    inactive = options.get("inactive_timeout")
    return SubscriptionSpec(
        pattern=parse_pattern(pattern, dialect).text,
        dialect=dialect,
        entities=entities.to_json(),
        where=None if where is None else parse_where(where).text,
        mode=_one_of("mode", options.get("mode", "exclusive"), ("exclusive", "shared", "ephemeral")),
        order=_one_of("order", options.get("order", "seq"), ("seq", "priority")),
        order_key=order_key,
        ack_wait_ms=_positive("ack_wait", options, default.ack_wait_ms),
        extension_ms_max=_positive("extension_max", options, default.extension_ms_max),
        lease_ms=_positive("lease", options, default.lease_ms),
        max_in_flight=max_in_flight,
        inactive_ms=None if inactive is None else _positive("inactive_timeout", options, 0),
        bury_expired=bury_expired,
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
        factor=_number("backoff_factor", options.get("backoff_factor", default.factor)),
        cap_ms=cap_ms,
        jitter=_number("jitter", options.get("jitter", default.jitter)),
    )


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidOption(f"{name} must be a number, not {value!r}")
    return float(value)


def _one_of(name: str, value: Any, allowed: tuple[str, ...]) -> Any:
    if value not in allowed:
        raise InvalidOption(f"{name} must be one of {', '.join(allowed)}, not {value!r}")
    return value


def _positive(name: str, options: Mapping[str, Any], default_ms: int) -> int:
    if name not in options:
        return default_ms
    ms = span_ms(options[name], name)
    if ms < 1:
        raise InvalidOption(f"{name} must be longer than 0")
    return ms


def start_position(reader: Reader, start: Start) -> int:
    """The seq after which a subscription with this start begins."""
    if start == "first":
        return 0
    if start == "new":
        return reader.last_seq()
    if isinstance(start, datetime):
        return reader.seq_before(time_ms(start, "start"))
    if isinstance(start, int) and not isinstance(start, bool) and start >= 0:
        return min(start, reader.last_seq())
    raise InvalidOption(
        f"start must be 'first', 'new', a seq or a datetime, not {start!r}",
        next="A seq is the last one you have",
    )
