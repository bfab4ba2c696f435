"""Handlers of events: a message becomes an event, the handler gets it, and what it returns is the reply.

A message that no attempt would make readable is rejected at once. One flow for both colours.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from headwater.broker.asynchronous import AsyncLog
from headwater.broker.flow import Call, Flow, run_async, run_blocking
from headwater.broker.received import Received
from headwater.errors import HeadwaterError, InvalidInput, InvalidMessage, InvalidOption
from headwater.ports.dedupe import DedupeQueue
from headwater.topics import parse_pattern
from headwater.typed.asking import answer_id
from headwater.typed.preparing import prepare
from headwater.typed.reading import class_of, read_event, unknown_type
from headwater.typed.rejecting import as_rejection
from headwater.typed.targets import log_of, verbs_of
from headwater.typed.topic_template import common_pattern

if TYPE_CHECKING:
    from headwater.typed.event import Event

Function = TypeVar("Function", bound=Callable[..., Any])
Others = Literal["reject", "skip"]


class AsTheClassSays:
    """A handler that says nothing of dedupe has the queue of its class."""

    def __repr__(self) -> str:
        return "as the class says"


AS_THE_CLASS_SAYS = AsTheClassSays()


def on(
    target: Any,
    id: str | None,
    *classes: type[Event],
    pattern: str | None = None,
    others: Others = "reject",
    dedupe: DedupeQueue | AsTheClassSays | None = AS_THE_CLASS_SAYS,
    **options: Any,
) -> Callable[[Function], Function]:
    """Declare a handler for events of these classes and of their subclasses; it runs once the log is started.

    The handler takes the event, or the event and the message. `pattern` goes before the topics of the classes. What is
    of another type is dead-lettered, or with `others="skip"` passed over. Other options are those of `log.on`.
    """
    where = f"handler {id}" if id else "handler"
    if not classes:
        raise InvalidOption("it is for no class", where=where, next="Name the classes whose events it handles")
    if others not in ("reject", "skip"):
        raise InvalidOption(f"others is 'reject' or 'skip', not {others!r}", where=where)
    log = log_of(target, where)
    queue = _queue_of(classes, where) if isinstance(dedupe, AsTheClassSays) else dedupe
    own = [] if pattern is not None else [_pattern_of(cls) for cls in classes]
    wanted = pattern if pattern is not None else common_pattern(own, options.get("dialect", "nats"))

    def declare(handler: Function) -> Function:
        if inspect.iscoroutinefunction(handler) and not isinstance(log, AsyncLog):
            raise InvalidOption(
                f"{handler.__qualname__} is a coroutine function", where=wanted, next="Use headwater.connect()"
            )
        name = id or str(getattr(handler, "__name__", "handler"))
        handling = _Handling(log, name, classes, handler, others, own if set(own) != {wanted} else [])
        if isinstance(log, AsyncLog):

            @functools.wraps(handler)
            async def run(message: Received) -> None:
                await run_async(handling.handle(message))

            log.on(wanted, id=name, dedupe=queue, **options)(run)
        else:

            @functools.wraps(handler)
            def run_in_thread(message: Received) -> None:
                run_blocking(handling.handle(message))

            log.on(wanted, id=name, dedupe=queue, **options)(run_in_thread)
        for cls in classes:
            cls.registry.note_handler(cls, name)
        return handler

    return declare


class _Handling:
    def __init__(
        self,
        log: Any,
        id: str,
        classes: Sequence[type[Event]],
        handler: Callable[..., Any],
        others: Others,
        patterns: Sequence[str],
    ) -> None:
        self._verbs = verbs_of(log)
        self._id = id
        self._classes = tuple(classes)
        self._handler = handler
        self._takes_message = _takes_message(handler)
        self._others = others
        self._patterns = [parse_pattern(pattern) for pattern in patterns]  # of ours, where the subscription has more

    def handle(self, received: Received) -> Flow[None]:
        message = received.message
        if self._patterns and not any(pattern.matches(message.topic) for pattern in self._patterns):
            return
        cls = class_of(self._classes, message)
        if cls is None and self._others == "skip":
            return
        try:
            if cls is None:
                raise unknown_type(self._classes, message)
            event = read_event(cls, message)
        except HeadwaterError as exc:
            raise as_rejection(exc) from exc
        yield from self._run(event, received)

    def _run(self, event: Event, received: Received) -> Flow[None]:
        call = (lambda event: self._handler(event, received)) if self._takes_message else self._handler
        answer = yield Call(call, event)
        if answer is not None and received.reply_to is not None:
            try:
                yield from self._reply(answer, received)
            except InvalidInput as exc:  # the same answer to the same place would be refused again
                raise as_rejection(exc) from exc

    def _reply(self, answer: Any, received: Received) -> Flow[None]:
        from headwater.typed.event import Event  # which has handlers itself

        if not isinstance(answer, Event):
            raise InvalidMessage(
                f"handler {self._id} answered with a {type(answer).__name__}",
                where=f"message {received.seq} on {received.topic}",
                next="A reply is an event; return None to give none",
            )
        to = type(answer).__headwater__.to or received.from_
        options = {
            "id": answer_id(received.message.scoped_id, self._id),
            "correlation_id": received.correlation_id or received.id,
            "to": to,
        }
        topic, data, said = prepare(answer, options, topic=received.reply_to)
        yield from self._verbs.publish(topic, data, said)  # type: ignore[arg-type]


def _queue_of(classes: Sequence[type[Event]], where: str) -> DedupeQueue | None:
    queues = {id(cls.__headwater__.dedupe): cls.__headwater__.dedupe for cls in classes}
    if len(queues) > 1:
        raise InvalidOption("its classes have different dedupe queues", where=where, next="Say dedupe=… or dedupe=None")
    [queue] = queues.values()
    return queue  # type: ignore[no-any-return]


def _pattern_of(cls: type[Event]) -> str:
    topic = cls.__headwater__.topic
    if topic is None:
        raise InvalidOption(
            "it has no topic to subscribe to",
            where=f"class {cls.__name__}",
            next='Say pattern="…", or give the class a topic',
        )
    return topic.pattern


def _takes_message(handler: Callable[..., Any]) -> bool:
    """Whether it has a second parameter without a default; the first is the event."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    try:
        parameters = list(inspect.signature(handler).parameters.values())
    except (TypeError, ValueError):  # a function of C, which does not tell
        return False
    required = [each for each in parameters if each.default is inspect.Parameter.empty]
    positional = [each for each in required if each.kind in kinds]
    takes_one = any(each.kind in (*kinds, inspect.Parameter.VAR_POSITIONAL) for each in parameters)
    keywords = [each for each in required if each.kind is inspect.Parameter.KEYWORD_ONLY]
    if len(positional) > 2 or keywords or not takes_one:
        raise InvalidOption(
            f"{getattr(handler, '__qualname__', handler)} cannot be called with an event",
            where="handler",
            next="Write def handle(event), or def handle(event, message)",
        )
    return len(positional) == 2
