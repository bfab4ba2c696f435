"""Notifications and results as a client reads them: as JROW's specification has them, or as its implementation does.

The two differ, and the path that a client connects to selects one of them; see `RPC_PATHS` in `server`. Methods and
deliveries use the shapes of their connection.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from headwater.broker.deliveries import Claimed
from headwater.errors import HeadwaterError
from headwater.formats import iso
from headwater.message import NAMED_HEADERS, NO_HEADERS, Message, readable
from headwater.protocol import methods as rpc
from headwater.protocol.jsonrpc import Notice
from headwater.protocol.session import may_be_deep
from headwater.topics import Pattern

if TYPE_CHECKING:
    from headwater.server.subscriptions import Subscriptions

ENVELOPE_DEPTH = 64  # levels that a frame adds to a payload, and more, because the stack of its reader takes some too

_NO_HEADERS: dict[str, Any] = {}
Refused = Mapping[tuple[str, int], HeadwaterError]  # by subscription_id and sequence_id


class LiveMessage(NamedTuple):
    """A message, and the live subscription of the connection that matches it."""

    message: Message
    pattern: Pattern


class SpecificationShapes:
    """The shapes of the specification. Notifications have more fields than it requires, for Headwater's own client."""

    reads_batches = True  # after rpc.hello

    def __init__(self, subscriptions: Subscriptions) -> None:
        self._subscriptions = subscriptions

    # --- notifications ------------------------------------------------------------------------------------------

    def live(self, messages: Sequence[LiveMessage]) -> list[Notice]:
        return [Notice("rpc.notification", _notification(message, pattern.text)) for message, pattern in messages]

    def durable(self, id: str, topic: str, found: Iterable[Claimed]) -> list[Notice]:
        """`topic`: the topic or pattern as the client subscribed to it."""
        return [Notice("rpc.notification.persistent", _delivery(id, claimed)) for claimed in found]

    # --- results ------------------------------------------------------------------------------------------------

    def subscribed_live(self, pattern: Pattern) -> Any:
        return {"subscribed": True, "topic": pattern.text}

    def unsubscribed_live(self, topic: str, was_subscribed: bool) -> Any:
        return {"unsubscribed": was_subscribed}

    def subscribed(self, done: rpc.Subscribed) -> Any:
        return done

    def subscribed_all(self, done: Sequence[rpc.Subscribed]) -> Any:
        return {"subscriptions": done}

    def released(self, id: str) -> Any:
        return {"unsubscribed": True}

    def released_all(self, ids: Sequence[str]) -> Any:
        return {"unsubscribed": ids}

    def acknowledged(self, params: rpc.Acknowledge, late: list[int]) -> Any:
        return rpc.Acknowledged(True, late)

    def acknowledged_all(self, acks: Sequence[rpc.OneAcknowledgment], refused: Refused) -> Any:
        return {"acknowledged": [{**_ack(each), "success": _key(each) not in refused} for each in acks]}


class ImplementationShapes(SpecificationShapes):
    """The shapes of JROW's own clients. They find the handler of a notification by its `method`, which is the topic or
    pattern as subscribed; the Rust client ignores notifications in arrays."""

    reads_batches = False

    def live(self, messages: Sequence[LiveMessage]) -> list[Notice]:
        # These clients also subscribe live to the topic of a durable subscription, one to register its handler, another
        # after it reconnected. That handler expects a seq, so it gets the durable notification only.
        durable = self._subscriptions.topics() if len(self._subscriptions) else ()
        return [_bare(message, pattern) for message, pattern in messages if pattern.text not in durable]

    def durable(self, id: str, topic: str, found: Iterable[Claimed]) -> list[Notice]:
        return [
            Notice(topic, _NumberedData(m.seq, m.topic, _json_data(m))) for m in (claimed.message for claimed in found)
        ]

    def subscribed_live(self, pattern: Pattern) -> Any:
        return {"subscribed": True, "topic": pattern.text, "pattern": not pattern.is_exact}

    def unsubscribed_live(self, topic: str, was_subscribed: bool) -> Any:
        return {"unsubscribed": was_subscribed, "topic": topic}

    def subscribed(self, done: rpc.Subscribed) -> Any:
        return {"subscribed": True, **_resumed(done)}

    def subscribed_all(self, done: Sequence[rpc.Subscribed]) -> Any:
        return [{**_resumed(each), "success": True} for each in done]

    def released(self, id: str) -> Any:
        return {"unsubscribed": True, "subscription_id": id}

    def released_all(self, ids: Sequence[str]) -> Any:
        return [{"subscription_id": id, "unsubscribed": True} for id in ids]

    def acknowledged(self, params: rpc.Acknowledge, late: list[int]) -> Any:
        answer = {"acknowledged": True, "subscription_id": params.subscription_id}
        if params.sequence_id is not None:
            return {**answer, "sequence_id": params.sequence_id}
        return {**answer, "sequence_ids": params.sequence_ids, "late": late}  # JROW has no ack of many in one call

    def acknowledged_all(self, acks: Sequence[rpc.OneAcknowledgment], refused: Refused) -> Any:
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
    data = _json_data(message)
    return Notice(pattern.text, data if pattern.is_exact else _TopicAndData(message.topic, data))


def _resumed(done: rpc.Subscribed) -> dict[str, Any]:
    names = ("subscription_id", "topic", "resumed_from_seq", "undelivered_count")
    return {name: getattr(done, name) for name in names}


def _ack(ack: rpc.OneAcknowledgment) -> dict[str, Any]:
    return {"subscription_id": ack.subscription_id, "sequence_id": ack.sequence_id}


def _key(ack: rpc.OneAcknowledgment) -> tuple[str, int]:
    return ack.subscription_id, ack.sequence_id


def _delivery(subscription: str, claimed: Claimed) -> rpc.Delivery:
    message = claimed.message
    return rpc.Delivery(
        subscription,
        message.topic,
        message.seq,
        iso(message.published_ms),
        _json_data(message),
        message.id,
        _all_headers(message),
        claimed.attempt,
    )


def _notification(message: Message, pattern: str) -> rpc.Notification:
    return rpc.Notification(
        message.topic,
        _json_data(message),
        pattern,
        message.seq,
        iso(message.published_ms),
        message.id,
        _all_headers(message),
    )


def _all_headers(message: Message) -> dict[str, Any]:
    """The free headers and the named ones together. Free ones that are invalid (inserted by hand) are left out."""
    named = {name: value for name in NAMED_HEADERS if (value := message.field(name)) is not None}
    if bytes(message.raw_headers) == b"null" or not _is_sendable(message.raw_headers):
        return named or _NO_HEADERS
    return {**message.headers, **named}


def _json_data(message: Message) -> msgspec.Raw:
    """The payload as JSON. An invalid one (inserted by hand) goes as text, or the frame would be invalid."""
    return message.raw if _is_sendable(message.raw) else _as_text(message.raw)


def _as_text(raw: msgspec.Raw) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(bytes(raw).decode(errors="replace")))


def _is_sendable(raw: msgspec.Raw) -> bool:
    """Whether it is JSON, also for a receiver that can nest ENVELOPE_DEPTH levels less than this process."""
    text = bytes(raw)
    return readable(raw) and (not may_be_deep(text) or readable(msgspec.Raw(_with_envelope(text))))


def _with_envelope(text: bytes) -> bytes:
    return b"%b%b%b" % (b"[" * ENVELOPE_DEPTH, text, b"]" * ENVELOPE_DEPTH)


# --- the result of rpc.fetch ----------------------------------------------------------------------------------------

_skim = msgspec.json.Decoder(msgspec.Raw)


def fetched(found: Sequence[Claimed]) -> rpc.Fetched:
    """Messages as arrays of their fields, encoded without a step in Python for each. One pass over the result finds out
    whether a payload is invalid JSON; only then each message is checked."""
    packed = msgspec.json.encode(found)
    try:
        _skim.decode(_with_envelope(packed) if may_be_deep(packed) else packed)
        return rpc.Fetched(msgspec.Raw(packed))
    except (msgspec.DecodeError, RecursionError):
        pass
    valid, unreadable = list(found), []
    for at, claimed in enumerate(found):
        message = claimed.message
        if not (_is_sendable(message.raw) and _is_sendable(message.raw_headers)):
            headers = message.raw_headers if _is_sendable(message.raw_headers) else NO_HEADERS
            message = msgspec.structs.replace(message, raw=_as_text(message.raw), raw_headers=headers)
            valid[at] = msgspec.structs.replace(claimed, message=message)
            unreadable.append(at)
    return rpc.Fetched(msgspec.Raw(msgspec.json.encode(valid)), unreadable)
