"""Handlers of events, and requests that wait for a handler's reply.

A message becomes an event, the handler gets it, and what it returns is published as the reply. A message that no
attempt would make readable is rejected at once.

A request subscribes to the reply's topic, ephemerally, before it is published, so a quick reply is not missed. After
the timeout a late reply stays in the log unread. All requests of an open log share one reply topic, because a log keeps
a counter for every topic it ever had; the correlation id tells replies apart.
"""

from __future__ import annotations

import functools
import inspect
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from headwater import errors
from headwater.api._async import AsyncLog
from headwater.api.received import Received
from headwater.broker.flow import Call, Flow, run_async, run_blocking, wait
from headwater.broker.handlers import Reject
from headwater.broker.subscribe import SubscribeOptions
from headwater.broker.verbs import LogVerbs
from headwater.errors import HeadwaterError, InvalidInputError, InvalidOptionError, NoReplyError
from headwater.message import Message
from headwater.ports.dedupe import DedupeQueue
from headwater.topics import parse_pattern
from headwater.typed.bus import AsyncBus, Bus, log_of, publish_prepared
from headwater.typed.codec import class_of, prepare, read_event, unknown_type
from headwater.typed.declaration import Declaration, common_pattern

if TYPE_CHECKING:
    from headwater.typed.event import Event

REPLY_TOPICS = "_reply"
TIMEOUT_S = 5.0
TIMEOUT_S_MAX = 24 * 3600.0
REPLIES_FETCHED = 10

Function = TypeVar("Function", bound=Callable[..., Any])
Others = Literal["reject", "skip"]


class ByClass:
    """The default of `dedupe`: the queue of the class."""

    def __repr__(self) -> str:
        return "by class"


BY_CLASS = ByClass()


def on(
    target: Any,
    id: str | None,
    *classes: type[Event],
    pattern: str | None = None,
    others: Others = "reject",
    dedupe: DedupeQueue | ByClass | None = BY_CLASS,
    **options: Any,
) -> Callable[[Function], Function]:
    """Declares a handler for events of these classes and of their subclasses; it runs once the log is started.

    The handler takes the event, or the event and the message. `pattern` overrides the topics of the classes. Messages
    of other types are dead-lettered, or with `others="skip"` skipped. Other options are those of `log.on`.
    """
    where = f"handler {id}" if id else "handler"
    if not classes:
        raise InvalidOptionError("no class is named", where=where, next="Name the classes whose events it handles")
    if others not in ("reject", "skip"):
        raise InvalidOptionError(f"others is 'reject' or 'skip', not {others!r}", where=where)
    log = log_of(target, where)
    queue = _queue_of(classes, where) if isinstance(dedupe, ByClass) else dedupe
    own = [] if pattern is not None else [_pattern_of(cls) for cls in classes]
    wanted = pattern if pattern is not None else common_pattern(own, options.get("dialect", "nats"))

    def declare(handler: Function) -> Function:
        if inspect.iscoroutinefunction(handler) and not isinstance(log, AsyncLog):
            raise InvalidOptionError(
                f"{handler.__qualname__} is a coroutine function", where=wanted, next="Use headwater.open_async()"
            )
        name = id or str(getattr(handler, "__qualname__", "handler"))
        wrapped = _EventHandler(log, name, classes, handler, others, own if set(own) != {wanted} else [])
        if isinstance(log, AsyncLog):

            @functools.wraps(handler)
            async def run(message: Received) -> None:
                await run_async(wrapped.handle(message))

            log.on(wanted, id=id, dedupe=queue, **options)(run)
        else:

            @functools.wraps(handler)
            def run_in_thread(message: Received) -> None:
                run_blocking(wrapped.handle(message))

            log.on(wanted, id=id, dedupe=queue, **options)(run_in_thread)
        for cls in classes:
            cls.registry.note_handler(cls, name)
        return handler

    return declare


class _EventHandler:
    def __init__(
        self,
        log: Any,
        id: str,
        classes: Sequence[type[Event]],
        handler: Callable[..., Any],
        others: Others,
        patterns: Sequence[str],
    ) -> None:
        self._verbs: LogVerbs = log._core
        self._id = id
        self._classes = tuple(classes)
        self._handler = handler
        self._takes_message = _takes_message(handler)
        self._others = others
        self._patterns = [
            parse_pattern(pattern) for pattern in patterns
        ]  # of the classes, where the subscription matches more

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
            except InvalidInputError as exc:  # the same answer would be refused again
                raise as_rejection(exc) from exc

    def _reply(self, answer: Any, received: Received) -> Flow[None]:
        declared = getattr(type(answer), "__headwater__", None)
        if not isinstance(declared, Declaration):
            raise errors.InvalidMessageError(
                f"handler {self._id} answered with a {type(answer).__name__}",
                where=f"message {received.seq} on {received.topic}",
                next="A reply is an event; return None to give none",
            )
        options = {
            "id": answer_id(received.message.scoped_id, self._id),
            "correlation_id": received.correlation_id or received.id,
            "to": declared.to or received.from_,
        }
        topic, data, sent = prepare(answer, options, topic=received.reply_to)
        yield from wait(self._verbs.publish(topic, data, sent))  # type: ignore[arg-type]


def _queue_of(classes: Sequence[type[Event]], where: str) -> DedupeQueue | None:
    queues = {id(cls.__headwater__.dedupe): cls.__headwater__.dedupe for cls in classes}
    if len(queues) > 1:
        raise InvalidOptionError(
            "its classes have different dedupe queues", where=where, next="Pass dedupe=… or dedupe=None"
        )
    [queue] = queues.values()
    return queue  # type: ignore[no-any-return]


def _pattern_of(cls: type[Event]) -> str:
    topic = cls.__headwater__.topic
    if topic is None:
        raise InvalidOptionError(
            "it has no topic to subscribe to",
            where=f"class {cls.__name__}",
            next='Pass pattern="…", or give the class a topic',
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
        raise InvalidOptionError(
            f"{getattr(handler, '__qualname__', handler)} cannot be called with an event",
            where="handler",
            next="Write def handle(event), or def handle(event, message)",
        )
    return len(positional) == 2


# A handler that raises one of these has its message dead-lettered at once, and the dead letter's error begins with
# the name of the error.
class UnknownTypeError(errors.UnknownTypeError, Reject):
    pass


class VersionMismatchError(errors.VersionMismatchError, Reject):
    pass


class InvalidMessageError(errors.InvalidMessageError, Reject):
    pass


_KINDS: tuple[tuple[type[HeadwaterError], type[HeadwaterError]], ...] = (
    (errors.UnknownTypeError, UnknownTypeError),
    (errors.VersionMismatchError, VersionMismatchError),
    (InvalidInputError, InvalidMessageError),
)


def as_rejection(exc: HeadwaterError) -> HeadwaterError:
    """The error as one that rejects its message; others unchanged."""
    for kind, rejection in _KINDS:
        if isinstance(exc, kind) and not isinstance(exc, Reject):
            return rejection(exc.why, where=exc.where, next=exc.next)
    return exc


# --- requests ---------------------------------------------------------------------------------------------------


_ANSWERS = uuid.UUID("6f1c3a52-6a53-4f0e-9d0b-1f5f0b1d8a77")

_reply_topics: weakref.WeakKeyDictionary[LogVerbs, str] = weakref.WeakKeyDictionary()
_reply_topics_lock = threading.Lock()


def answer_id(request: str, handler: str) -> str:
    """The same for every delivery of a request (its scoped id) to a handler, so that the log recognises a repeated
    answer."""
    return str(uuid.uuid5(_ANSWERS, f"{request}\n{handler}"))


def check_timeout(timeout: object, where: str) -> float:
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not 0 < timeout <= TIMEOUT_S_MAX:
        raise InvalidOptionError(f"timeout is seconds, more than 0 and at most a day, not {timeout!r}", where=where)
    return float(timeout)


def ask(
    target: Any, asked: Event, options: Mapping[str, Any], replies: Sequence[type[Event]], wait_s: float
) -> Flow[Event]:
    """Raises at once if it cannot be published; the flow publishes it and waits."""
    where = type(asked).__headwater__.type
    verbs = log_of(target, where)._core
    how: SubscribeOptions = {"mode": "ephemeral", "start": "new"}
    if options.get("correlation_id") is not None:  # the user may give it to another request too
        sent = {**options, "reply_to": _new_reply_topic()}
    else:
        sent = {**options, "reply_to": _reply_topic_of(verbs), "correlation_id": uuid.uuid4().hex}
        how["where"] = f"correlation_id == '{sent['correlation_id']}'"
    bus = target if isinstance(target, Bus | AsyncBus) else None
    request = prepare(asked, sent)

    def reply_of(message: Message) -> Event:
        cls = class_of(replies, message)
        if cls is None:
            raise unknown_type(replies, message)
        return read_event(cls, message)

    def flow() -> Flow[Event]:
        consumer = yield from verbs.subscribe(f"reply-{uuid.uuid4().hex}", sent["reply_to"], **how)
        try:
            yield from publish_prepared(verbs, bus, [(asked, request)])
            deadline = time.monotonic() + wait_s
            while (left_s := deadline - time.monotonic()) > 0:
                found = yield from consumer.take(REPLIES_FETCHED, left_s)
                for claimed in found:
                    if claimed.message.correlation_id == sent["correlation_id"]:
                        return reply_of(claimed.message)
        finally:
            yield from consumer.close()
        raise NoReplyError(
            f"no reply within {wait_s:g} s",
            where=f"{where} on {request.topic}",
            next="See that a handler of it runs and returns its reply, or give it more time with timeout=…",
        )

    return flow()


def _reply_topic_of(verbs: LogVerbs) -> str:
    with _reply_topics_lock:
        return _reply_topics.setdefault(verbs, _new_reply_topic())


def _new_reply_topic() -> str:
    return f"{REPLY_TOPICS}.{uuid.uuid4().hex}"
