"""Messages as classes on pydantic.

class OrderPlaced(Event, topic="orders.placed", version=2):
    order_id: str
    amount: Decimal

OrderPlaced(order_id="o-1", amount="9.90").publish(log)

Events are frozen, for they say what has happened, and refuse fields they do not know, for a field that comes or goes
is a new version. Both are pydantic's settings, and a class may say `frozen=False` or `extra="ignore"`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from typing import Any, ClassVar, Protocol, Self, TypeVar, overload

from pydantic import BaseModel, ConfigDict

from headwater.broker.asynchronous import AsyncLog
from headwater.broker.blocking import Log
from headwater.broker.received import Received
from headwater.errors import InvalidOption
from headwater.message import Message
from headwater.ports.dedupe import DedupeQueue
from headwater.typed.asking import TIMEOUT_S, ask, check_timeout
from headwater.typed.bus import AsyncBus, Bus
from headwater.typed.handling import AS_THE_CLASS_SAYS, AsTheClassSays, Others, on
from headwater.typed.keywords import Declared, Upgrader, declare
from headwater.typed.preparing import prepare
from headwater.typed.reading import class_of, message_of, read_event, unknown_type
from headwater.typed.registry import Registry
from headwater.typed.targets import Binding, check_publishable, log_of, run, target_of, verbs_of
from headwater.typed.upgrading import add_upgrader

Function = TypeVar("Function", bound=Callable[..., Any])
Reply = TypeVar("Reply", bound="Event")


class Publisher(Protocol):
    """A log, or a transaction in one."""

    def publish(self, topic: str, data: Any) -> int: ...


class AsyncPublisher(Protocol):
    async def publish(self, topic: str, data: Any) -> int: ...


class Event(BaseModel):
    """The base of all events; see the module."""

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
    __headwater__: ClassVar[Declared] = declare("Event", {}, {}, ())

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
        """Here for its signature; the fields are known only in the other one."""
        super().__init_subclass__()

    @classmethod
    def __pydantic_init_subclass__(cls, **keywords: Any) -> None:
        if cls.__pydantic_generic_metadata__["origin"] is not None:
            return  # Envelope[int] is Envelope, until a class is made of it
        inherited: dict[str, Any] = {}
        for base in reversed(cls.__mro__[1:]):
            said = base.__dict__.get("__headwater__")
            inherited |= {} if said is None else said.given
        _refuse_our_names(cls)
        cls.__headwater__ = declare(cls.__name__, keywords, inherited, list(cls.model_fields))
        if "registry" in keywords:
            if not isinstance(keywords["registry"], Registry):
                raise InvalidOption("registry is a Registry", where=f"class {cls.__name__}")
            cls.registry = keywords["registry"]
        if cls.__headwater__.topic is not None:
            cls.registry.add(cls)

    @overload
    def publish(self, target: Publisher | Bus, /, **options: Any) -> int: ...

    @overload
    def publish(self, target: AsyncPublisher | AsyncBus, /, **options: Any) -> Awaitable[int]: ...

    @overload
    def publish(self, target: None = None, /, **options: Any) -> Any: ...

    def publish(self, target: Any = None, /, **options: Any) -> Any:
        """Publish to a log, a bus or a transaction, or to what the class is bound to; the seq, or for asyncio
        something to await that gives it. Options are those of `log.publish`; `from_`, `to`, `reply_to` and
        `correlation_id` go before what the class says, and None takes it back."""
        target = target_of(type(self), target)
        check_publishable(target, f"class {type(self).__name__}")
        prepared = prepare(self, options)
        if isinstance(target, Bus):
            return target._publish([(self, prepared)])[0]
        if isinstance(target, AsyncBus):
            return _first(target._publish([(self, prepared)]))
        _refuse_without_log(self)
        topic, data, said = prepared
        return target.publish(topic, data, **said)

    @overload
    def request(
        self, target: Log | Bus, /, *, reply: type[Reply], timeout: float = TIMEOUT_S, **options: Any
    ) -> Reply: ...

    @overload
    def request(
        self, target: AsyncLog | AsyncBus, /, *, reply: type[Reply], timeout: float = TIMEOUT_S, **options: Any
    ) -> Awaitable[Reply]: ...

    @overload
    def request(
        self,
        target: Any = None,
        /,
        *,
        reply: type[Event] | tuple[type[Event], ...],
        timeout: float = TIMEOUT_S,
        **options: Any,
    ) -> Any: ...

    def request(self, target: Any = None, /, *, reply: Any, timeout: float = TIMEOUT_S, **options: Any) -> Any:
        """Publish it and wait for the reply, an event of class `reply` or of one of several. Raises NoReply after
        `timeout` seconds; a reply that comes later stays in the log unread."""
        where = type(self).__headwater__.type
        target = target_of(type(self), target)
        log = log_of(target, where)
        wait_s = check_timeout(timeout, where)
        replies = reply if isinstance(reply, tuple) else (reply,)
        if not replies or not all(isinstance(each, type) and issubclass(each, Event) for each in replies):
            raise InvalidOption(f"reply is a class of events, or several, not {reply!r}", where=where)
        if "reply_to" in options:
            raise InvalidOption("a request has a reply_to of its own", where=where, next="Use publish() for another")
        copies = target._copies if isinstance(target, Bus | AsyncBus) else None
        return run(log, ask(verbs_of(log), copies, self, options, replies, wait_s))

    @classmethod
    def read(cls, message: Message | Received) -> Self:
        """The event that a message carries. Raises UnknownType, VersionMismatch or InvalidMessage."""
        plain = message_of(message)
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
        dedupe: DedupeQueue | AsTheClassSays | None = AS_THE_CLASS_SAYS,
        **options: Any,
    ) -> Callable[[Function], Function]:
        """Declare a handler of this class on a log or bus; see `headwater.typed.on`, which takes several classes."""
        return on(target_of(cls, target), id, cls, pattern=pattern, others=others, dedupe=dedupe, **options)

    @classmethod
    def upgrade(cls, *, from_version: int) -> Callable[[Upgrader], Upgrader]:
        """Declare how the fields of this version, a dict, become those of the next."""
        return add_upgrader(cls.__headwater__, from_version)

    @classmethod
    def bind(cls, target: Any) -> Binding:
        """Where `publish()` of this class and its subclasses goes, until `undo()` or the end of the `with` block."""
        check_publishable(target, f"class {cls.__name__}")
        return Binding(cls, target)


OUR_NAMES = ("publish", "request", "read", "on", "upgrade", "bind", "registry")


def _refuse_our_names(cls: type[Event]) -> None:
    taken = next((name for name in OUR_NAMES if name in cls.model_fields), None)
    if taken is not None:
        raise InvalidOption(
            f"a field may not be called {taken!r}, for that is a verb of events",
            where=f"class {cls.__name__}",
            next=f'Call it {taken}_, with Field(alias="{taken}") if that is its name in messages',
        )


def _refuse_without_log(event: Event) -> None:
    if not type(event).__headwater__.log:
        raise InvalidOption(
            "its class says log=False",
            where=f"class {type(event).__name__}",
            next="Publish it to a bus, whose transports take it",
        )


async def _first(seqs: Awaitable[list[int]]) -> int:
    return (await seqs)[0]


@overload
def publish_many(target: Log | Bus, events: Iterable[Event]) -> list[int]: ...


@overload
def publish_many(target: AsyncLog | AsyncBus, events: Iterable[Event]) -> Awaitable[list[int]]: ...


def publish_many(target: Any, events: Iterable[Event]) -> Any:
    """Publish many in one transaction, all or none; on a bus, the copies after it."""
    check_publishable(target, "publish_many")
    batch = [(event, prepare(event, {})) for event in events]
    if isinstance(target, Bus | AsyncBus):
        return target._publish(batch, together=True)
    for event, _ in batch:
        _refuse_without_log(event)
    return target.publish_many([tuple(prepared) for _, prepared in batch])
