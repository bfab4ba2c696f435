"""What all transports share: their verbs, the reading of their options, and messages made without a log."""

from __future__ import annotations

import inspect
import re
import secrets
import typing
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any, ClassVar, Protocol, Self, TypeVar, Unpack
from urllib.parse import parse_qsl, quote, urlencode

import msgspec

from headwater.errors import ClosedError, InvalidMessageError, InvalidOptionError, PublishOnlyError
from headwater.formats import parse_duration, redact_url
from headwater.message import (
    EXTRA_FIELDS,
    NO_HEADERS,
    SALT_BITS,
    Extras,
    Message,
    PublishOptions,
    derived_id,
    make_draft,
)
from headwater.ports.transport import Handle, Subscribable, Transport, TransportSubscription
from headwater.topics import check_topic

ANY_NAME: frozenset[str] = frozenset("*")
_RANDOM_TAIL_BITS = 48

T = TypeVar("T")


class HasMessage(Protocol):
    """A `ReceivedMessage`, an `AsyncReceivedMessage` or a `DeadLetter`."""

    @property
    def message(self) -> Message: ...


class BaseTransport(ABC):
    name: str
    """The target, without passwords."""
    recognises_ids: bool
    """Whether the target drops a message that it has already, by its id."""
    read_instead: ClassVar[str] = "Subscribe to the log it is fed from"
    """What a publish-only transport recommends to a caller of `subscribe`."""
    client_options: ClassVar[frozenset[str]] = frozenset()
    """Names in a url's query that the target's client library reads; ANY_NAME if it checks them itself."""
    _closed = False
    _connected = True

    @classmethod
    def from_url(cls, url: str, **options: Any) -> Self:
        """Open the transport. Options are the keyword arguments of the class; they may also be in the url's query."""
        rest, read = read_options(cls, url, options, cls.client_options)
        return cls(*cls._address(rest), **read)

    @classmethod
    def _address(cls, url: str) -> tuple[Any, ...]:
        """The positional arguments of the class; `url` is without its options."""
        return (url,)

    @property
    def connected(self) -> bool:
        """Whether the last contact with the target succeeded."""
        return self._connected and not self._closed

    @abstractmethod
    def close(self) -> None:
        """Send what is buffered and disconnect."""

    def publish(self, message: Message | HasMessage) -> None:
        """Send one message; returns when the target has it."""
        self.publish_many([message])

    def publish_many(self, messages: Iterable[Message | HasMessage]) -> None:
        """Send messages in their order. A received message is sent as the log holds it; sending does not ack it."""
        self._publish([self._message_of(each) for each in messages])

    @abstractmethod
    def _publish(self, messages: Sequence[Message]) -> None: ...

    def subscribe(
        self, pattern: str, handle: Handle, *, group: str | None = None, consumer: str | None = None
    ) -> TransportSubscription:
        """Call `handle` with messages of the target; PublishOnlyError if the target cannot be read."""
        raise publish_only(type(self).__name__, self.name, self.read_instead)

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("this transport is closed", where=self.name)

    def _message_of(self, given: Message | HasMessage) -> Message:
        message = given if isinstance(given, Message) else getattr(given, "message", None)
        if not isinstance(message, Message):
            raise InvalidMessageError(
                f"expected a message, got {type(given).__name__}",
                where=self.name,
                next="Publish what a subscription gives, or make one with headwater.transports.base.make_message",
            )
        return message


class WrappingTransport(BaseTransport):
    """A transport in front of another one, `inner`, which has the connection and the subscriptions."""

    def __init__(self, inner: Transport) -> None:
        self.inner = inner
        self.name = inner.name
        self.recognises_ids = inner.recognises_ids

    @property
    def connected(self) -> bool:
        return self.inner.connected

    def subscribe(
        self, pattern: str, handle: Handle, *, group: str | None = None, consumer: str | None = None
    ) -> TransportSubscription:
        if not isinstance(self.inner, Subscribable):
            raise publish_only(type(self.inner).__name__, self.name, "Subscribe at its target")
        return self.inner.subscribe(pattern, handle, group=group, consumer=consumer)


def batches(items: Iterable[T], size_of: Callable[[T], int], items_max: int, bytes_max: int) -> Iterator[list[T]]:
    """The items in batches within both limits; one that is larger than the limit of bytes is a batch of its own."""
    batch: list[T] = []
    size = 0
    for item in items:
        own = size_of(item)
        if batch and (len(batch) == items_max or size + own > bytes_max):
            yield batch
            batch, size = [], 0
        batch.append(item)
        size += own
    if batch:
        yield batch


def publish_only(kind: str, where: str, instead: str) -> PublishOnlyError:
    return PublishOnlyError(f"{kind} is publish-only: it carries no messages back", where=where, next=instead)


def make_message(topic: str, data: Any, now_ms: int, **options: Unpack[PublishOptions]) -> Message:
    """A message that was never in a log, to publish to a transport directly: seq 0, and a new UUIDv7 as its id unless
    one is given."""
    draft = make_draft(check_topic(topic), data, options, now_ms)
    extras = draft.extras or Extras()
    headers = extras.headers_json
    return Message(
        seq=0,
        topic=draft.topic,
        raw=msgspec.Raw(draft.data_json.encode()),
        published_ms=now_ms if draft.published_ms is None else draft.published_ms,
        size=draft.size,
        identity=draft.id or new_id(now_ms),
        raw_headers=NO_HEADERS if headers is None else msgspec.Raw(headers.encode()),
        **{each.attribute: getattr(extras, each.attribute) for each in EXTRA_FIELDS if each.kind != "json"},
    )


def new_id(now_ms: int) -> str:
    """An id of the form that a log derives, with random bits in place of the log's salt and the seq."""
    return derived_id(now_ms, secrets.randbits(SALT_BITS), secrets.randbits(_RANDOM_TAIL_BITS))


# --- options -------------------------------------------------------------------------------------------


def read_options(
    make: Callable[..., Any], url: str, options: Mapping[str, Any], client_options: frozenset[str] = frozenset()
) -> tuple[str, dict[str, Any]]:
    """The keyword-only arguments of `make` from the url's query and from `options`, text converted to their types; and
    the url with what is left of its query, which must be among `client_options`."""
    where = redact_url(url)
    arguments = inspect.signature(make).parameters.values()
    known = [each.name for each in arguments if each.kind is inspect.Parameter.KEYWORD_ONLY]
    types = typing.get_type_hints(make.__init__ if isinstance(make, type) else make)  # type: ignore[misc]
    before, _, query = url.partition("?")
    read: dict[str, Any] = {}
    rest: dict[str, str] = {}
    for name, value in [*_parse_query(query, where), *options.items()]:
        if name in read or name in rest:
            raise given_twice(name, where)
        if name in known:
            read[name] = _convert(name, value, types[name], where)
        elif name in client_options or (client_options is ANY_NAME and name not in options):
            rest[name] = str(value)
        else:
            raise InvalidOptionError(
                f"unknown option {name!r}",
                where=where,
                next=f"Known: {', '.join(each for each in known if each != 'clock') or 'none'}",
            )
    return before + (f"?{urlencode(rest, quote_via=quote)}" if rest else ""), read


def given_twice(name: str, where: str) -> InvalidOptionError:
    return InvalidOptionError(f"{name} is given twice", where=where, next="Give it in the url or beside it")


def _parse_query(query: str, where: str) -> list[tuple[str, str]]:
    try:
        pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query))
        if not all(re.fullmatch(r"\w+", name) for name, _ in pairs):  # it may be a part of a password
            raise ValueError
    except ValueError:
        raise InvalidOptionError(
            "its query cannot be read", where=where, next="Write name=value, joined by &"
        ) from None
    return pairs


def _convert(name: str, value: Any, wanted: Any, where: str) -> Any:
    """Text as the type of its argument. The transport itself checks everything else."""
    types = typing.get_args(wanted) or (wanted,)
    if bool in types and str(value).lower() in _SWITCH:
        return _SWITCH[str(value).lower()]
    if not isinstance(value, str) or (str in types and timedelta not in types):
        return value
    if bool in types:
        raise InvalidOptionError(f"{name} is on or off, not {value!r}", where=where)
    if timedelta in types or float in types:
        if not re.fullmatch(r"[0-9]{1,12}(\.[0-9]{1,6})?", value):
            if timedelta in types:
                try:
                    return parse_duration(value, name)
                except InvalidOptionError as exc:
                    raise InvalidOptionError(exc.why, where=where, next=exc.next) from None
            raise InvalidOptionError(f"{name} must be a number of seconds, not {value!r}", where=where)
        return float(value)
    if int in types:
        if not re.fullmatch(r"[0-9]{1,18}", value):
            raise InvalidOptionError(f"{name} must be a whole number, not {value!r}", where=where)
        return int(value)
    return value


_SWITCH = dict.fromkeys(("on", "true", "yes", "1"), True) | dict.fromkeys(("off", "false", "no", "0"), False)
