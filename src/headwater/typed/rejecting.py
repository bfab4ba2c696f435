"""Errors that no further attempt would mend, as rejections: a handler that raises one has its message dead-lettered at
once, and the dead letter's error begins with the name of the error."""

from __future__ import annotations

from headwater import errors
from headwater.broker.handlers import Reject
from headwater.errors import HeadwaterError


class UnknownType(errors.UnknownType, Reject):
    pass


class VersionMismatch(errors.VersionMismatch, Reject):
    pass


class InvalidMessage(errors.InvalidMessage, Reject):
    pass


_KINDS: tuple[tuple[type[HeadwaterError], type[HeadwaterError]], ...] = (
    (errors.UnknownType, UnknownType),
    (errors.VersionMismatch, VersionMismatch),
    (errors.InvalidInput, InvalidMessage),
)


def as_rejection(exc: HeadwaterError) -> HeadwaterError:
    """The same error, as one that rejects; others are what they are."""
    for kind, rejection in _KINDS:
        if isinstance(exc, kind) and not isinstance(exc, Reject):
            return rejection(exc.why, where=exc.where, next=exc.next)
    return exc
