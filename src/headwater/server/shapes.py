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
from headwater.topics import Pattern

if TYPE_CHECKING:
    from headwater.server.subscriptions import Subscriptions

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
    """The free headers and the named ones together, with priority where it is not 0."""
    named = {name: value for name in NAMED_HEADERS if (value := message.field(name)) is not None}
    if bytes(message.raw_headers) == b"null":
        return named or _NO_HEADERS
    return {**message.headers, **named}


def _json_data(message: Message) -> msgspec.Raw:
    """The payload as JSON. An invalid one (inserted by hand) goes as text, or the frame would be invalid."""
    if readable(message.raw):
        return message.raw
    return msgspec.Raw(msgspec.json.encode(bytes(message.raw).decode(errors="replace")))


# --- the result of rpc.fetch ----------------------------------------------------------------------------------------

_skim = msgspec.json.Decoder(msgspec.Raw)


def fetched(found: Sequence[Claimed]) -> rpc.Fetched:
    """Messages as arrays of their fields, encoded without a step in Python for each. One pass over the result finds out
    whether a payload is invalid JSON; only then each message is checked."""
    packed = msgspec.json.encode(found)
    try:
        _skim.decode(packed)
        return rpc.Fetched(msgspec.Raw(packed))
    except (msgspec.DecodeError, RecursionError):
        pass
    unreadable = [at for at, claimed in enumerate(found) if not _all_readable(claimed.message)]
    valid = [_as_text(claimed) if at in unreadable else claimed for at, claimed in enumerate(found)]
    return rpc.Fetched(msgspec.Raw(msgspec.json.encode(valid)), unreadable)


def _all_readable(message: Message) -> bool:
    return readable(message.raw) and readable(message.raw_headers)


def _as_text(claimed: Claimed) -> Claimed:
    headers = claimed.message.raw_headers if readable(claimed.message.raw_headers) else NO_HEADERS
    text = msgspec.Raw(msgspec.json.encode(bytes(claimed.message.raw).decode(errors="replace")))
    return msgspec.structs.replace(
        claimed, message=msgspec.structs.replace(claimed.message, raw=text, raw_headers=headers)
    )
