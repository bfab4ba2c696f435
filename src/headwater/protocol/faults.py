"""Errors on the wire: which code an error has there, and which error a code was."""

from __future__ import annotations

import re
from typing import Any

import msgspec

import headwater.errors as errors
from headwater.errors import HeadwaterError
from headwater.protocol.jsonrpc import (
    CONFLICT,
    INTERNAL_ERROR,
    INVALID_PARAMS,
    INVALID_TOPIC,
    NOT_DELIVERED,
    OVERLOADED,
    SUBSCRIPTION_ACTIVE,
    TOO_LARGE,
    UNAUTHORIZED,
    UNKNOWN_SUBSCRIPTION,
    ErrorObject,
    Fault,
)

# The nearest of these above an error's class gives its code.
CODES: dict[type[HeadwaterError], int] = {
    errors.Unauthorized: UNAUTHORIZED,
    errors.SubscriptionActive: SUBSCRIPTION_ACTIVE,
    errors.UnknownSubscription: UNKNOWN_SUBSCRIPTION,
    errors.UnknownDeadLetter: UNKNOWN_SUBSCRIPTION,
    errors.NotDelivered: NOT_DELIVERED,
    errors.LeaseLost: NOT_DELIVERED,
    errors.InvalidTopic: INVALID_TOPIC,
    errors.InvalidPattern: INVALID_TOPIC,
    errors.TooLarge: TOO_LARGE,
    errors.Overloaded: OVERLOADED,
    errors.RequestTimeout: OVERLOADED,
    errors.SubscriptionMismatch: CONFLICT,
    errors.InvalidInput: INVALID_PARAMS,
    errors.HeadwaterError: INTERNAL_ERROR,
}

# What a code means when the other end does not name the class. Any other code is a CallFailed.
KINDS_OF_CODES: dict[int, type[HeadwaterError]] = {
    UNAUTHORIZED: errors.Unauthorized,
    SUBSCRIPTION_ACTIVE: errors.SubscriptionActive,
    UNKNOWN_SUBSCRIPTION: errors.UnknownSubscription,
    NOT_DELIVERED: errors.NotDelivered,
    INVALID_TOPIC: errors.InvalidTopic,
    TOO_LARGE: errors.TooLarge,
    OVERLOADED: errors.Overloaded,
    CONFLICT: errors.SubscriptionMismatch,
    INVALID_PARAMS: errors.InvalidInput,
}

# A closed table: a name from the wire is looked up here and nowhere else.
KINDS_BY_NAME: dict[str, type[HeadwaterError]] = {
    name: kind for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, HeadwaterError)
}

# Where a file lies on this machine is no business of the other end; its name is enough to tell one from another.
_FOLDERS = re.compile(r"(?<![\w/.:])/(?:[^\s/'\"]+/)+")

TOLD_CHARS_MAX = 4_000  # of each text; an error that quotes what was sent does not send it back whole
RETRY_AFTER = "retry_after"  # seconds, on an Overloaded that knows


def fault_of(exc: Exception) -> Fault:
    """What the caller is told. Of an error that is not ours nothing but that it happened: its text may tell secrets."""
    if isinstance(exc, Fault):
        return exc
    if not isinstance(exc, HeadwaterError):
        return Fault(INTERNAL_ERROR, "internal error")
    line = type(exc).__mro__
    kind = next(each.__name__ for each in line if each.__name__ in KINDS_BY_NAME)
    told = {"kind": kind, "where": exc.where, "why": exc.why, "next": exc.next}
    data: dict[str, Any] = {name: _FOLDERS.sub("", text)[:TOLD_CHARS_MAX] for name, text in told.items() if text}
    retry_after = getattr(exc, RETRY_AFTER, None)
    if retry_after is not None:
        data[RETRY_AFTER] = retry_after
    if isinstance(exc, errors.CallFailed):  # passed on: somebody else's code
        return Fault(exc.code, exc.why[:TOLD_CHARS_MAX], data if exc.data is None else {**data, "data": exc.data})
    return Fault(next(CODES[each] for each in line if each in CODES), data.get("why", ""), data)


def error_of(error: ErrorObject, where: str) -> HeadwaterError:
    """The error that the other end had: of the same class if it names one of ours, else by its code."""
    data = _plain(error)
    told: dict[str, Any] = data if isinstance(data, dict) else {}
    why, next = _text(told, "why") or error.message, _text(told, "next")
    where = _text(told, "where") or where
    kind = KINDS_BY_NAME.get(_text(told, "kind"))
    if kind is errors.CallFailed:
        return errors.CallFailed(why, where=where, next=next, code=error.code, data=told.get("data"))
    kind = kind or KINDS_OF_CODES.get(error.code)
    if kind is None:
        return errors.CallFailed(why, where=where, next=next, code=error.code, data=data)
    rebuilt = kind(why, where=where, next=next)
    retry_after = told.get(RETRY_AFTER)
    if isinstance(retry_after, (int, float)) and not isinstance(retry_after, bool):
        setattr(rebuilt, RETRY_AFTER, retry_after)
    return rebuilt


def _plain(error: ErrorObject) -> Any:
    if error.data is msgspec.UNSET:
        return None
    try:
        return msgspec.json.decode(error.data)
    except (msgspec.DecodeError, RecursionError):  # such as a number out of any range
        return None


def _text(told: dict[str, Any], name: str) -> str:
    text = told.get(name)
    return text if isinstance(text, str) else ""
