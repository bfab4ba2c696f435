"""Every error Headwater raises, in one tree.

HeadwaterError
├── InvalidInput (also a ValueError)      what the caller passed cannot be used; nothing was changed
│   ├── InvalidTopic
│   ├── InvalidPattern
│   │   ├── EmptyPattern
│   │   ├── EmptyToken
│   │   ├── CombinedWildcard
│   │   ├── MultiWildcardNotLast
│   │   └── MixedWildcards
│   ├── InvalidFilter                     from/to/broadcast of a subscription
│   ├── InvalidWhere                      the `where` condition of a subscription
│   ├── InvalidData                       a payload or header that is not JSON
│   ├── InvalidOption                     a named option with an impossible value
│   ├── InvalidMessage                    fields that do not fit the class of a typed message
│   ├── InvalidConfiguration              headwater.toml, the environment or a flag says something impossible
│   └── TooLarge                          over a named limit
├── SubscriptionError
│   ├── UnknownSubscription
│   ├── SubscriptionActive                another live holder has this exclusive subscription
│   ├── SubscriptionMismatch              the stored subscription was created with other settings
│   ├── NotDelivered                      ack, nack, reject or extend of what was never delivered
│   └── LeaseLost                         it was delivered, but the right to settle it has passed on
├── UnknownDeadLetter
├── StoreError                            the database said no; committed messages are safe
│   ├── NotALog
│   ├── NewerSchema
│   ├── UnsafeSqlite
│   ├── ReadOnly
│   ├── DiskFull
│   ├── Locked
│   ├── Corrupt
│   ├── InputOutput
│   ├── Conflict                          the database made this transaction give way to another; nothing of it stays
│   ├── Unavailable                       the database server cannot be reached, or went away
│   ├── OutcomeUnknown                    it went away in the middle of a commit, and cannot be asked what became of it
│   └── SqlFailed                         the user's own SQL in a transaction; its cause says more
├── RemoteError                           a server said no, or did not answer
│   ├── Unreachable                       there is no connection, and no more hope for one
│   ├── RequestTimeout                    no answer in time: it may or may not have been done
│   ├── Unauthorized                      no token, a wrong one, or one without this right
│   ├── Overloaded                        over a rate or a queue limit of the server; later it may do
│   └── CallFailed                        a method answered with an error of its own: `code`, `data`
├── TransportError                        a copy did not reach its target; the log still has the message
│   ├── TransportFailed                   the target said no, or is away
│   ├── AllTransportsFailed               none of several took it: `causes` by name
│   ├── CircuitOpen                       it failed too often lately, and is not asked for a while
│   ├── PublishOnly                       this transport carries nothing back
│   └── Unsent                            left in a buffer when it was closed: `messages`
├── TypedError                            a message and the class it belongs to
│   ├── UnknownType                       no class is known for it
│   ├── VersionMismatch                   of another version than the class, and nothing upgrades it
│   └── NoReply                           a request was not answered in time
├── ReplicationError                      a database and its replica; both are as they were
│   ├── NotADatabase                      no SQLite database, or none with anything in it
│   ├── UnknownReplica                    no such replica, or no such version of it
│   ├── VersionConflict                   pushed from another version than the newest, which is `newest`
│   ├── UnsyncedChanges                   a pull would overwrite what was never pushed
│   └── ReplicationFailed                 cut off in the middle, or one of the two ends said no
└── Closed                                used after close()

Each carries `where` it happened, `why` it was refused and what to do `next`; `str()` says all three.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence


class HeadwaterError(Exception):
    """Base of the tree: `why`, and where it helps `where` and `next`."""

    def __init__(self, why: str, *, where: str = "", next: str = "") -> None:
        self.why = why
        self.where = where
        self.next = next
        super().__init__(self._sentence())

    def _sentence(self) -> str:
        told = f"{self.where}: {self.why}" if self.where else self.why
        return f"{told}. {self.next}" if self.next else told

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self.why, self.where, self.next))


def _rebuild(kind: type[HeadwaterError], why: str, where: str, next: str) -> HeadwaterError:
    return kind(why, where=where, next=next)


class InvalidInput(HeadwaterError, ValueError):
    pass


class InvalidTopic(InvalidInput):
    pass


class InvalidPattern(InvalidInput):
    pass


class EmptyPattern(InvalidPattern):
    pass


class EmptyToken(InvalidPattern):
    pass


class CombinedWildcard(InvalidPattern):
    pass


class MultiWildcardNotLast(InvalidPattern):
    pass


class MixedWildcards(InvalidPattern):
    pass


class InvalidFilter(InvalidInput):
    pass


class InvalidWhere(InvalidInput):
    pass


class InvalidData(InvalidInput):
    pass


class InvalidOption(InvalidInput):
    pass


class InvalidMessage(InvalidInput):
    pass


class InvalidConfiguration(InvalidInput):
    pass


class TooLarge(InvalidInput):
    pass


class SubscriptionError(HeadwaterError):
    pass


class UnknownSubscription(SubscriptionError):
    pass


class SubscriptionActive(SubscriptionError):
    pass


class SubscriptionMismatch(SubscriptionError):
    pass


class NotDelivered(SubscriptionError):
    pass


class LeaseLost(SubscriptionError):
    pass


class UnknownDeadLetter(HeadwaterError):
    pass


class StoreError(HeadwaterError):
    pass


class NotALog(StoreError):
    pass


class NewerSchema(StoreError):
    pass


class UnsafeSqlite(StoreError):
    pass


class ReadOnly(StoreError):
    pass


class DiskFull(StoreError):
    pass


class Locked(StoreError):
    pass


class Corrupt(StoreError):
    pass


class InputOutput(StoreError):
    pass


class Conflict(StoreError):
    pass


class Unavailable(StoreError):
    pass


class OutcomeUnknown(StoreError):
    pass


class SqlFailed(StoreError):
    pass


class RemoteError(HeadwaterError):
    pass


class Unreachable(RemoteError):
    pass


class RequestTimeout(RemoteError):
    pass


class Unauthorized(RemoteError):
    pass


class Overloaded(RemoteError):
    pass


class CallFailed(RemoteError):
    """`code` is the JSON-RPC error code, `data` what the other side added to it."""

    def __init__(self, why: str, *, where: str = "", next: str = "", code: int = -32603, data: object = None) -> None:
        super().__init__(why, where=where, next=next)
        self.code = code
        self.data = data

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild_call_failed, (self.why, self.where, self.next, self.code, self.data))


def _rebuild_call_failed(why: str, where: str, next: str, code: int, data: object) -> CallFailed:
    return CallFailed(why, where=where, next=next, code=code, data=data)


class TransportError(HeadwaterError):
    pass


class TransportFailed(TransportError):
    pass


class AllTransportsFailed(TransportError):
    """`causes` holds the error of each transport by its name."""

    def __init__(
        self, why: str, *, where: str = "", next: str = "", causes: Mapping[str, Exception] | None = None
    ) -> None:
        super().__init__(why, where=where, next=next)
        self.causes = dict(causes or {})

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild_all_failed, (self.why, self.where, self.next, self.causes))


def _rebuild_all_failed(why: str, where: str, next: str, causes: Mapping[str, Exception]) -> AllTransportsFailed:
    return AllTransportsFailed(why, where=where, next=next, causes=causes)


class CircuitOpen(TransportError):
    pass


class PublishOnly(TransportError):
    pass


class Unsent(TransportError):
    """`messages` are those that did not get out."""

    def __init__(self, why: str, *, where: str = "", next: str = "", messages: Sequence[object] = ()) -> None:
        super().__init__(why, where=where, next=next)
        self.messages = list(messages)

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild_unsent, (self.why, self.where, self.next, self.messages))


def _rebuild_unsent(why: str, where: str, next: str, messages: Sequence[object]) -> Unsent:
    return Unsent(why, where=where, next=next, messages=messages)


class TypedError(HeadwaterError):
    pass


class UnknownType(TypedError):
    pass


class VersionMismatch(TypedError):
    pass


class NoReply(TypedError):
    pass


class ReplicationError(HeadwaterError):
    pass


class NotADatabase(ReplicationError):
    pass


class UnknownReplica(ReplicationError):
    pass


class VersionConflict(ReplicationError):
    """`newest` is the version that a push has to be made from."""

    def __init__(self, why: str, *, where: str = "", next: str = "", newest: int = 0) -> None:
        super().__init__(why, where=where, next=next)
        self.newest = newest

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild_conflict, (self.why, self.where, self.next, self.newest))


def _rebuild_conflict(why: str, where: str, next: str, newest: int) -> VersionConflict:
    return VersionConflict(why, where=where, next=next, newest=newest)


class UnsyncedChanges(ReplicationError):
    pass


class ReplicationFailed(ReplicationError):
    pass


class Closed(HeadwaterError):
    pass
