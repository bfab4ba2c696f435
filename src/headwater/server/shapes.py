"""What a client reads: notifications and results, in the shapes of JROW's specification or of its implementation.

The two differ. The path that a client connects to decides; see `RPC_PATHS` in `serving`. Methods and deliveries ask the
connection's shapes and know of no difference.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from headwater.broker.claims import Claimed
from headwater.errors import HeadwaterError
from headwater.message import NAMED_HEADERS, Message, iso, readable
from headwater.protocol import wire
from headwater.protocol.jsonrpc import Notice
from headwater.topics import Pattern

if TYPE_CHECKING:
    from headwater.server.subscriptions import Subscriptions

_NO_HEADERS: dict[str, Any] = {}
Refused = Mapping[tuple[str, int], HeadwaterError]  # by subscription_id and sequence_id


class Heard(NamedTuple):
    """A message, and the live subscription of the connection that matches it."""

    message: Message
    pattern: Pattern


class SpecificationShapes:
    """Those of the specification. Notifications carry more than it asks for: Headwater's own client needs it."""

    reads_batches = True  # once it has said hello

    def __init__(self, subscriptions: Subscriptions) -> None:
        self._subscriptions = subscriptions

    # --- notifications ------------------------------------------------------------------------------------------

    def live(self, heard: Sequence[Heard]) -> list[Notice]:
        return [Notice("rpc.notification", _notification(message, pattern.text)) for message, pattern in heard]

    def durable(self, id: str, topic: str, found: Iterable[Claimed]) -> list[Notice]:
        """`topic`: the topic or pattern as the client subscribed to it."""
        return [Notice("rpc.notification.persistent", _delivery(id, claimed)) for claimed in found]

    # --- results ------------------------------------------------------------------------------------------------

    def subscribed_live(self, pattern: Pattern) -> Any:
        return {"subscribed": True, "topic": pattern.text}

    def unsubscribed_live(self, topic: str, was_subscribed: bool) -> Any:
        return {"unsubscribed": was_subscribed}

    def subscribed(self, done: wire.Subscribed) -> Any:
        return done

    def subscribed_all(self, done: Sequence[wire.Subscribed]) -> Any:
        return {"subscriptions": done}

    def released(self, id: str) -> Any:
        return {"unsubscribed": True}

    def released_all(self, ids: Sequence[str]) -> Any:
        return {"unsubscribed": ids}

    def acknowledged(self, params: wire.Acknowledge, late: list[int]) -> Any:
        return wire.Acknowledged(True, late)

    def acknowledged_all(self, acks: Sequence[wire.OneAcknowledgment], refused: Refused) -> Any:
        return {"acknowledged": [{**_ack(each), "success": _key(each) not in refused} for each in acks]}


class ImplementationShapes(SpecificationShapes):
    """Those of JROW's own clients. They find the handler of a notification by its `method`, which is the topic or
    pattern as subscribed; the one in Rust overlooks notifications in arrays."""

    reads_batches = False

    def live(self, heard: Sequence[Heard]) -> list[Notice]:
        # These clients subscribe live to the topic of a durable subscription too, one to register its handler, another
        # after it reconnected. That handler expects a seq, so it gets the durable notification alone.
        durable = self._subscriptions.topics() if len(self._subscriptions) else ()
        return [_bare(message, pattern) for message, pattern in heard if pattern.text not in durable]

    def durable(self, id: str, topic: str, found: Iterable[Claimed]) -> list[Notice]:
        return [Notice(topic, _NumberedData(m.seq, m.topic, _sound(m))) for m in (claimed.message for claimed in found)]

    def subscribed_live(self, pattern: Pattern) -> Any:
        return {"subscribed": True, "topic": pattern.text, "pattern": not pattern.is_exact}

    def unsubscribed_live(self, topic: str, was_subscribed: bool) -> Any:
        return {"unsubscribed": was_subscribed, "topic": topic}

    def subscribed(self, done: wire.Subscribed) -> Any:
        return {"subscribed": True, **_resumed(done)}

    def subscribed_all(self, done: Sequence[wire.Subscribed]) -> Any:
        return [{**_resumed(each), "success": True} for each in done]

    def released(self, id: str) -> Any:
        return {"unsubscribed": True, "subscription_id": id}

    def released_all(self, ids: Sequence[str]) -> Any:
        return [{"subscription_id": id, "unsubscribed": True} for id in ids]

    def acknowledged(self, params: wire.Acknowledge, late: list[int]) -> Any:
        answer = {"acknowledged": True, "subscription_id": params.subscription_id}
        if params.sequence_id is not None:
            return {**answer, "sequence_id": params.sequence_id}
        return {**answer, "sequence_ids": params.sequence_ids, "late": late}  # JROW has no ack of many in one call

    def acknowledged_all(self, acks: Sequence[wire.OneAcknowledgment], refused: Refused) -> Any:
        return [
            {**_ack(each), "acknowledged": False, "error": refused[_key(each)].why}
            if _key(each) in refused
            else {**_ack(each), "acknowledged": True}
            for each in acks
        ]


class _TopicAndData(msgspec.Struct, gc=False):
    topic: str
    data: msgspec.Raw


class _NumberedData(msgspec.Struct, gc=False):
    sequence_id: int
    topic: str
    data: msgspec.Raw


def _bare(message: Message, pattern: Pattern) -> Notice:
    data = _sound(message)
    return Notice(pattern.text, data if pattern.is_exact else _TopicAndData(message.topic, data))


def _resumed(done: wire.Subscribed) -> dict[str, Any]:
    names = ("subscription_id", "topic", "resumed_from_seq", "undelivered_count")
    return {name: getattr(done, name) for name in names}


def _ack(ack: wire.OneAcknowledgment) -> dict[str, Any]:
    return {"subscription_id": ack.subscription_id, "sequence_id": ack.sequence_id}


def _key(ack: wire.OneAcknowledgment) -> tuple[str, int]:
    return ack.subscription_id, ack.sequence_id


def _delivery(subscription: str, claimed: Claimed) -> wire.Delivery:
    message = claimed.message
    return wire.Delivery(
        subscription,
        message.topic,
        message.seq,
        iso(message.published_ms),
        _sound(message),
        message.id,
        _all_headers(message),
        claimed.attempt,
    )


def _notification(message: Message, pattern: str) -> wire.Notification:
    return wire.Notification(
        message.topic,
        _sound(message),
        pattern,
        message.seq,
        iso(message.published_ms),
        message.id,
        _all_headers(message),
    )


def _all_headers(message: Message) -> dict[str, Any]:
    """The free headers and the named ones together, with priority where it is not 0."""
    named = {name: value for name in NAMED_HEADERS if (value := message.field(name)) is not None}
    if bytes(message.raw_headers) == b"null":
        return named or _NO_HEADERS
    return {**message.headers, **named}


def _sound(message: Message) -> msgspec.Raw:
    """The payload as JSON. One that no parser reads (put in by hand) goes as text, or it would spoil the frame."""
    if readable(message.raw):
        return message.raw
    return msgspec.Raw(msgspec.json.encode(bytes(message.raw).decode(errors="replace")))
