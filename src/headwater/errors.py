"""Every error Headwater raises, in one tree.

HeadwaterError
├── InvalidInputError (also a ValueError)   what the caller passed cannot be used; nothing was changed
│   ├── InvalidTopicError
│   ├── InvalidPatternError
│   │   ├── EmptyPatternError
│   │   ├── EmptyTokenError
│   │   ├── CombinedWildcardError
│   │   ├── MultiWildcardNotLastError
│   │   └── MixedWildcardsError
│   ├── InvalidFilterError                  from/to/broadcast of a subscription
│   ├── InvalidWhereError                   the `where` condition of a subscription
│   ├── InvalidDataError                    a payload or header that is not JSON
│   ├── InvalidOptionError                  a named option with an impossible value
│   ├── InvalidMessageError                 fields that do not fit the class of a typed message
│   ├── InvalidConfigurationError           headwater.toml, the environment or a flag says something impossible
│   └── TooLargeError                       over a named limit
├── SubscriptionError
│   ├── UnknownSubscriptionError
│   ├── SubscriptionActiveError             another live holder has this exclusive subscription
│   ├── SubscriptionMismatchError           the stored subscription was created with other settings
│   ├── NotDeliveredError                   ack, nack, reject or extend of what was never delivered
│   └── LeaseLostError                      it was delivered, but another holder may settle it now
├── UnknownDeadLetterError
├── StoreError                              the database refused; committed messages are safe
│   ├── NotALogError
│   ├── NewerSchemaError
│   ├── UnsafeSqliteError
│   ├── ReadOnlyError
│   ├── DiskFullError
│   ├── LockedError
│   ├── CorruptError
│   ├── InputOutputError
│   ├── ConflictError                       the database rolled this transaction back in favour of another one
│   ├── UnavailableError (also a ConnectionError)  the database server is unreachable, or the connection broke
│   ├── OutcomeUnknownError                 the connection broke during a commit
│   └── SqlError                            the user's own SQL in a transaction; its cause says more
├── RemoteError                             a server refused, or did not answer
│   ├── UnreachableError (also a ConnectionError)  no connection, and the client has given up connecting
│   ├── RequestTimeoutError (also a TimeoutError)  no answer in time: it may or may not have been done
│   ├── UnauthorizedError                   no token, a wrong one, or one without this right
│   ├── OverloadedError                     over a rate or a queue limit of the server; a later call may succeed
│   └── CallError                           a method answered with an error of its own: `code`, `data`
├── TransportError                          a copy did not reach its target; the log still has the message
│   ├── TransportFailedError                the target refused, or is unreachable
│   ├── AllTransportsFailedError            none of several took it: `causes` by name
│   ├── CircuitOpenError                    the target failed too often, and is not called for a while
│   ├── PublishOnlyError                    this transport carries nothing back
│   └── UnsentError                         left in a buffer when it was closed: `messages`
├── TypedError                              a message and the class it belongs to
│   ├── UnknownTypeError                    no class is known for it
│   ├── VersionMismatchError                of another version than the class, and nothing upgrades it
│   └── NoReplyError (also a TimeoutError)  a request was not answered in time
├── ReplicationError                        a database and its replica; both are unchanged
│   ├── NotADatabaseError                   no SQLite database, or none with anything in it
│   ├── UnknownReplicaError                 no such replica, or no such version of it
│   ├── VersionConflictError                pushed from another version than the newest, which is `newest`
│   ├── UnsyncedChangesError                a pull would overwrite what was never pushed
│   └── ReplicationFailedError              interrupted, or one of the two ends failed
├── InvalidStateError (also a RuntimeError) the call does not fit what the object is or does now; nothing was changed
│   └── SecondLibraryError                  `sqlite3.connect` on the file of a log that is open in the same process
└── ClosedError                             used after close()

A warning besides: SecondLibraryWarning.

Each error carries `where` it happened, `why` it was refused and what to do `next`; `str()` says all three.
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
        text = f"{self.where}: {self.why}" if self.where else self.why
        return f"{text}. {self.next}" if self.next else text

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self.why, self.where, self.next), vars(self))  # with what subclasses add


def _rebuild(kind: type[HeadwaterError], why: str, where: str, next: str) -> HeadwaterError:
    return kind(why, where=where, next=next)


class InvalidInputError(HeadwaterError, ValueError):
    pass


class InvalidTopicError(InvalidInputError):
    pass


class InvalidPatternError(InvalidInputError):
    pass


class EmptyPatternError(InvalidPatternError):
    pass


class EmptyTokenError(InvalidPatternError):
    pass


class CombinedWildcardError(InvalidPatternError):
    pass


class MultiWildcardNotLastError(InvalidPatternError):
    pass


class MixedWildcardsError(InvalidPatternError):
    pass


class InvalidFilterError(InvalidInputError):
    pass


class InvalidWhereError(InvalidInputError):
    pass


class InvalidDataError(InvalidInputError):
    pass


class InvalidOptionError(InvalidInputError):
    pass


class InvalidMessageError(InvalidInputError):
    pass


class InvalidConfigurationError(InvalidInputError):
    pass


class TooLargeError(InvalidInputError):
    pass


class SubscriptionError(HeadwaterError):
    pass


class UnknownSubscriptionError(SubscriptionError):
    pass


class SubscriptionActiveError(SubscriptionError):
    pass


class SubscriptionMismatchError(SubscriptionError):
    pass


class NotDeliveredError(SubscriptionError):
    pass


class LeaseLostError(SubscriptionError):
    pass


class UnknownDeadLetterError(HeadwaterError):
    pass


class StoreError(HeadwaterError):
    pass


class NotALogError(StoreError):
    pass


class NewerSchemaError(StoreError):
    pass


class UnsafeSqliteError(StoreError):
    pass


class ReadOnlyError(StoreError):
    pass


class DiskFullError(StoreError):
    pass


class LockedError(StoreError):
    pass


class CorruptError(StoreError):
    pass


class InputOutputError(StoreError):
    pass


class ConflictError(StoreError):
    pass


class UnavailableError(StoreError, ConnectionError):
    pass


class OutcomeUnknownError(StoreError):
    pass


class SqlError(StoreError):
    pass


class RemoteError(HeadwaterError):
    pass


class UnreachableError(RemoteError, ConnectionError):
    pass


class RequestTimeoutError(RemoteError, TimeoutError):
    pass


class UnauthorizedError(RemoteError):
    pass


class OverloadedError(RemoteError):
    pass


class CallError(RemoteError):
    """`code` is the JSON-RPC error code, `data` what the other side added to it."""

    def __init__(self, why: str, *, where: str = "", next: str = "", code: int = -32603, data: object = None) -> None:
        super().__init__(why, where=where, next=next)
        self.code = code
        self.data = data


class TransportError(HeadwaterError):
    pass


class TransportFailedError(TransportError):
    pass


class AllTransportsFailedError(TransportError):
    """`causes` holds the error of each transport by its name."""

    def __init__(
        self, why: str, *, where: str = "", next: str = "", causes: Mapping[str, Exception] | None = None
    ) -> None:
        super().__init__(why, where=where, next=next)
        self.causes = dict(causes or {})


class CircuitOpenError(TransportError):
    pass


class PublishOnlyError(TransportError):
    pass


class UnsentError(TransportError):
    """`messages` are those that did not get out."""

    def __init__(self, why: str, *, where: str = "", next: str = "", messages: Sequence[object] = ()) -> None:
        super().__init__(why, where=where, next=next)
        self.messages = list(messages)


class TypedError(HeadwaterError):
    pass


class UnknownTypeError(TypedError):
    pass


class VersionMismatchError(TypedError):
    pass


class NoReplyError(TypedError, TimeoutError):
    pass


class ReplicationError(HeadwaterError):
    pass


class NotADatabaseError(ReplicationError):
    pass


class UnknownReplicaError(ReplicationError):
    pass


class VersionConflictError(ReplicationError):
    """`newest` is the version that a push has to be made from."""

    def __init__(self, why: str, *, where: str = "", next: str = "", newest: int = 0) -> None:
        super().__init__(why, where=where, next=next)
        self.newest = newest


class UnsyncedChangesError(ReplicationError):
    pass


class ReplicationFailedError(ReplicationError):
    pass


class InvalidStateError(HeadwaterError, RuntimeError):
    pass


class SecondLibraryError(InvalidStateError):
    pass


class ClosedError(HeadwaterError):
    pass


class SecondLibraryWarning(RuntimeWarning):
    """The file of a log that is being opened is open in this process already, other than by apsw."""
