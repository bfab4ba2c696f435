"""What users write at subscribe, as it travels."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from headwater.broker.options import Start, SubscribeOptions
from headwater.errors import InvalidOption
from headwater.message import iso, span_ms, time_ms
from headwater.protocol import wire

WAIT_S_MAX = 365 * 86_400.0  # a wait without end
_SPANS = ("ack_wait", "extension_max", "lease", "backoff", "backoff_max", "inactive_timeout")


def subscribe_params(id: str, pattern: str, options: SubscribeOptions) -> wire.Subscribe:
    given: dict[str, Any] = dict(options)
    for name in _SPANS:
        if given.get(name) is not None:
            given[name] = span_ms(given[name], name) / 1000
    if "start" in given:
        given["start"] = start_on_the_wire(given["start"])
    if "wait" in given and given["wait"] is None:
        given["wait"] = WAIT_S_MAX
    return wire.Subscribe(id, pattern, deliver="fetch", **given)


def start_on_the_wire(start: Start) -> str | int:
    """Refuses what `broker.options.start_position` refuses, in its words."""
    if start in ("first", "new"):
        return str(start)
    if isinstance(start, datetime):
        return iso(time_ms(start, "start"))
    if isinstance(start, int) and not isinstance(start, bool) and start >= 0:
        return start
    raise InvalidOption(
        f"start must be 'first', 'new', a seq or a datetime, not {start!r}",
        next="A seq is the last one you have",
    )
