"""Messages on their way to a client: as notifications that anybody can read, or packed for a client that fetches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from headwater.broker.claims import Claimed
from headwater.message import NAMED_HEADERS, NO_HEADERS, Message, iso, readable
from headwater.protocol.wire import Delivery, Fetched, Notification

_skim = msgspec.json.Decoder(msgspec.Raw)
_NO_HEADERS: dict[str, Any] = {}


def as_delivery(subscription: str, claimed: Claimed) -> Delivery:
    message = claimed.message
    return Delivery(
        subscription,
        message.topic,
        message.seq,
        iso(message.published_ms),
        _sound(message),
        message.id,
        all_headers(message),
        claimed.attempt,
    )


def as_notification(message: Message, pattern: str) -> Notification:
    return Notification(
        message.topic,
        _sound(message),
        pattern,
        message.seq,
        iso(message.published_ms),
        message.id,
        all_headers(message),
    )


def all_headers(message: Message) -> dict[str, Any]:
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


def fetched(found: Sequence[Claimed]) -> Fetched:
    """Messages as arrays of their fields, written without a step in Python for each. Skimming what was written shows
    whether a payload spoils it; only then each is looked at."""
    packed = msgspec.json.encode(found)
    try:
        _skim.decode(packed)
        return Fetched(msgspec.Raw(packed))
    except (msgspec.DecodeError, RecursionError):
        pass
    unreadable = [at for at, claimed in enumerate(found) if not _all_readable(claimed.message)]
    mended = [_mended(claimed) if at in unreadable else claimed for at, claimed in enumerate(found)]
    return Fetched(msgspec.Raw(msgspec.json.encode(mended)), unreadable)


def _all_readable(message: Message) -> bool:
    return readable(message.raw) and readable(message.raw_headers)


def _mended(claimed: Claimed) -> Claimed:
    headers = claimed.message.raw_headers if readable(claimed.message.raw_headers) else NO_HEADERS
    text = msgspec.Raw(msgspec.json.encode(bytes(claimed.message.raw).decode(errors="replace")))
    return msgspec.structs.replace(
        claimed, message=msgspec.structs.replace(claimed.message, raw=text, raw_headers=headers)
    )
