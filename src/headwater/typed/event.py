"""Messages as classes on pydantic.

class OrderPlaced(Event, topic="orders.placed", version=2):
    order_id: str
    amount: Decimal

OrderPlaced(order_id="o-1", amount="9.90").publish(log)

Events are frozen, because they record what has happened, and refuse unknown fields, because a field added or removed
is a new version. Both are pydantic's settings; a class may set `frozen=False` or `extra="ignore"`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from typing import Any, ClassVar, Protocol, Self, TypeVar, Unpack, overload

from pydantic import BaseModel, ConfigDict

from headwater.api._async import AsyncLog
from headwater.api._sync import Log
from headwater.api.received import Received
from headwater.broker.flow import Flow
from headwater.errors import InvalidOptionError
from headwater.message import Message, PublishOptions
from headwater.ports.dedupe import DedupeQueue
from headwater.typed.bus import AsyncBus, Binding, Bus, check_publishable, log_of, publish_prepared, run, target_of
from headwater.typed.codec import class_of, prepare, read_event, unknown_type
from headwater.typed.declaration import Declaration, Registry, Upgrader, declare
from headwater.typed.handling import BY_CLASS, TIMEOUT_S, ByClass, Others, ask, check_timeout, on

Function = TypeVar("Function", bound=Callable[..., Any])
Reply = TypeVar("Reply", bound="Event")


class Publisher(Protocol):
    """A log, or a transaction in one."""

    def publish(self, topic: str, data: Any) -> int: ...


class AsyncPublisher(Protocol):
    async def publish(self, topic: str, data: Any) -> int: ...


class EventOptions(PublishOptions, total=False):
    """The options of `Event.publish`. `type`, `version` and `content_type` belong to the class and are refused."""

    tx: Any


class Event(BaseModel):
    """The base of all event classes: pydantic models with a topic, a type and a version."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        validate_default=True,
        allow_inf_nan=False,
        ser_json_inf_nan="constants",  # they are refused; else those in a field of type Any would become null
        ser_json_bytes="base64",
        val_json_bytes="base64",
    )

    registry: ClassVar[Registry] = Registry()
    __headwater__: ClassVar[Declaration] = declare("Event", {}, {}, ())

    def __init_subclass__(
        cls,
        *,
        topic: str | None = None,
        version: int = 1,
        type: str | None = None,
        from_: str | None = None,
        to: str | None = None,
        reply_to: str | None = None,
        serializer: str = "json",
        transports: Iterable[str] = (),
        log: bool = True,
        dedupe: DedupeQueue | None = None,
        registry: Registry | None = None,
        **rest: Any,
    ) -> None:
        """For its signature; `__pydantic_init_subclass__`, which knows the fields, reads the keywords."""
        super().__init_subclass__()

    @classmethod
    def __pydantic_init_subclass__(cls, **keywords: Any) -> None:
        if cls.__pydantic_generic_metadata__["origin"] is not None:
            return  # Envelope[int] is Envelope, until a class is made of it
        inherited: dict[str, Any] = {}
        for base in reversed(cls.__mro__[1:]):
            declared = base.__dict__.get("__headwater__")
            inherited |= {} if declared is None else declared.given
        _check_field_names(cls)
        cls.__headwater__ = declare(cls.__name__, keywords, inherited, list(cls.model_fields))
        if "registry" in keywords:
            if not isinstance(keywords["registry"], Registry):
                raise InvalidOptionError("registry is a Registry", where=f"class {cls.__name__}")
            cls.registry = keywords["registry"]
        if cls.__headwater__.topic is not None:
            cls.registry.add(cls)

    @overload
    def publish(self, target: Publisher | Bus, /, **options: Unpack[EventOptions]) -> int: ...

    @overload
    def publish(self, target: AsyncPublisher | AsyncBus, /, **options: Unpack[EventOptions]) -> Awaitable[int]: ...

    @overload
    def publish(self, target: None = None, /, **options: Unpack[EventOptions]) -> Any: ...

    def publish(self, target: Any = None, /, **options: Unpack[EventOptions]) -> Any:
        """Publishes to a log, a bus or a transaction, or to what the class is bound to; returns the seq, or for asyncio
        an awaitable of it. Options are those of `log.publish`; `from_`, `to` and `reply_to` override the class, also
        with None."""
        target = target_of(type(self), target)
        check_publishable(target, f"class {type(self).__name__}")
        prepared = prepare(self, options)
        if isinstance(target, Bus | AsyncBus):
            return run(target.log, _first(publish_prepared(target.log._core, target, [(self, prepared)])))
        _check_logged(self)
        topic, data, sent = prepared
        return target.publish(topic, data, **sent)

    @overload
    def request(
        self, target: Log | Bus, /, *, reply: type[Reply], timeout: float = TIMEOUT_S, **options: Unpack[PublishOptions]
    ) -> Reply: ...

    @overload
    def request(
        self,
        target: AsyncLog | AsyncBus,
        /,
        *,
        reply: type[Reply],
        timeout: float = TIMEOUT_S,
        **options: Unpack[PublishOptions],
    ) -> Awaitable[Reply]: ...

    @overload
    def request(
        self,
        target: Any = None,
        /,
        *,
        reply: type[Event] | tuple[type[Event], ...],
        timeout: float = TIMEOUT_S,
        **options: Unpack[PublishOptions],
    ) -> Any: ...

    def request(
        self, target: Any = None, /, *, reply: Any, timeout: float = TIMEOUT_S, **options: Unpack[PublishOptions]
    ) -> Any:
        """Publishes it and waits for the reply, an event of class `reply` or of one of several. Raises NoReplyError
        after `timeout` seconds; a later reply stays in the log unread."""
        where = type(self).__headwater__.type
        target = target_of(type(self), target)
        log = log_of(target, where)
        wait_s = check_timeout(timeout, where)
        replies = reply if isinstance(reply, tuple) else (reply,)
        if not replies or not all(isinstance(each, type) and issubclass(each, Event) for each in replies):
            raise InvalidOptionError(f"reply is a class of events, or several, not {reply!r}", where=where)
        if "reply_to" in options:
            raise InvalidOptionError(
                "a request has a reply_to of its own", where=where, next="Use publish() for another"
            )
        return run(log, ask(target, self, options, replies, wait_s))

    @classmethod
    def read(cls, message: Message | Received) -> Self:
        """The event that a message carries. Raises UnknownTypeError, VersionMismatchError or InvalidMessageError."""
        plain = message if isinstance(message, Message) else message.message
        found = class_of((cls,), plain)
        if found is None:
            raise unknown_type((cls,), plain)
        event: Any = read_event(found, plain)
        return event  # type: ignore[no-any-return]

    @classmethod
    def on(
        cls,
        target: Any = None,
        /,
        *,
        id: str | None = None,
        pattern: str | None = None,
        others: Others = "reject",
        dedupe: DedupeQueue | ByClass | None = BY_CLASS,
        **options: Any,
    ) -> Callable[[Function], Function]:
        """Declares a handler of this class on a log or bus; `headwater.typed.on` takes several classes."""
        return on(target_of(cls, target), id, cls, pattern=pattern, others=others, dedupe=dedupe, **options)

    @classmethod
    def upgrade(cls, *, from_version: int) -> Callable[[Upgrader], Upgrader]:
        """Declares how the fields of this version, a dict, become those of the next."""
        return cls.__headwater__.add_upgrader(from_version)

    @classmethod
    def bind(cls, target: Any) -> Binding:
        """Set where `publish()` of this class and its subclasses goes, until `undo()` of the result or the end of its
        `with` block."""
        check_publishable(target, f"class {cls.__name__}")
        return Binding(cls, target)


RESERVED_NAMES = ("publish", "request", "read", "on", "upgrade", "bind", "registry")


def _check_field_names(cls: type[Event]) -> None:
    taken = next((name for name in RESERVED_NAMES if name in cls.model_fields), None)
    if taken is not None:
        raise InvalidOptionError(
            f"a field may not be called {taken!r}, for that is a verb of events",
            where=f"class {cls.__name__}",
            next=f'Call it {taken}_, with Field(alias="{taken}") if that is its name in messages',
        )


def _check_logged(event: Event) -> None:
    if not type(event).__headwater__.log:
        raise InvalidOptionError(
            "its class has log=False",
            where=f"class {type(event).__name__}",
            next="Publish it to a bus, whose transports take it",
        )


def _first(publishing: Flow[list[int]]) -> Flow[int]:
    seqs = yield from publishing
    return seqs[0]


@overload
def publish_many(target: Log | Bus, events: Iterable[Event]) -> list[int]: ...


@overload
def publish_many(target: AsyncLog | AsyncBus, events: Iterable[Event]) -> Awaitable[list[int]]: ...


def publish_many(target: Any, events: Iterable[Event]) -> Any:
    """Publishes events in one transaction, all or none; on a bus, the copies follow it."""
    check_publishable(target, "publish_many")
    batch = [(event, prepare(event, {})) for event in events]
    if isinstance(target, Bus | AsyncBus):
        return run(target.log, publish_prepared(target.log._core, target, batch, together=True))
    for event, _ in batch:
        _check_logged(event)
    return target.publish_many([tuple(prepared) for _, prepared in batch])
