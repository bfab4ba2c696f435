"""A request waits for its reply: one flow for both colours.

The ephemeral subscription to the reply's topic begins before the request is published, so a quick reply is not missed.
When nobody waits any more, a late reply stays in the log unread. All requests of an open log share one topic, for a log
counts the messages of every topic it ever had; what is whose, the correlation id says.
"""

from __future__ import annotations

import threading
import time
import uuid
import weakref
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from headwater.broker.flow import Flow
from headwater.broker.options import SubscribeOptions
from headwater.broker.verbs import LogVerbs
from headwater.errors import InvalidOption, NoReply
from headwater.typed.copying import Copies, publish_prepared
from headwater.typed.preparing import Prepared, prepare
from headwater.typed.reading import class_of, read_event, unknown_type

if TYPE_CHECKING:
    from headwater.typed.event import Event

REPLY_TOPICS = "_reply"
TIMEOUT_S = 5.0
TIMEOUT_S_MAX = 24 * 3600.0
REPLIES_FETCHED = 10

_ANSWERS = uuid.UUID("6f1c3a52-6a53-4f0e-9d0b-1f5f0b1d8a77")

_reply_topics: weakref.WeakKeyDictionary[LogVerbs, str] = weakref.WeakKeyDictionary()
_reply_topics_lock = threading.Lock()


def answer_id(request: str, handler: str) -> str:
    """The same for every delivery of a request, told by its scoped id, to a handler: so the log recognises a second
    answer."""
    return str(uuid.uuid5(_ANSWERS, f"{request}\n{handler}"))


def check_timeout(timeout: object, where: str) -> float:
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not 0 < timeout <= TIMEOUT_S_MAX:
        raise InvalidOption(f"timeout is seconds, more than 0 and at most a day, not {timeout!r}", where=where)
    return float(timeout)


def ask(
    verbs: LogVerbs,
    copies: Copies | None,
    asked: Event,
    options: Mapping[str, Any],
    replies: Sequence[type[Event]],
    wait_s: float,
) -> Flow[Event]:
    """Refuses at once what cannot be published; the flow publishes it and waits."""
    how: SubscribeOptions = {"mode": "ephemeral", "start": "new"}
    if options.get("correlation_id") is not None:  # the user may give it to another request too
        mine = {**options, "reply_to": _new_reply_topic()}
    else:
        mine = {**options, "reply_to": _reply_topic_of(verbs), "correlation_id": uuid.uuid4().hex}
        how["where"] = f"correlation_id == '{mine['correlation_id']}'"
    return _ask(verbs, copies, asked, prepare(asked, mine), how, replies, wait_s)


def _reply_topic_of(verbs: LogVerbs) -> str:
    with _reply_topics_lock:
        return _reply_topics.setdefault(verbs, _new_reply_topic())


def _new_reply_topic() -> str:
    return f"{REPLY_TOPICS}.{uuid.uuid4().hex}"


def _ask(
    verbs: LogVerbs,
    copies: Copies | None,
    asked: Event,
    request: Prepared,
    how: SubscribeOptions,
    replies: Sequence[type[Event]],
    wait_s: float,
) -> Flow[Event]:
    reply_to, correlation_id = request.options["reply_to"], request.options["correlation_id"]
    consumer = yield from verbs.subscribe(f"reply-{uuid.uuid4().hex}", reply_to, **how)
    try:
        yield from publish_prepared(verbs, copies, [(asked, request)])
        deadline = time.monotonic() + wait_s
        while (left_s := deadline - time.monotonic()) > 0:
            found = yield from consumer.take(REPLIES_FETCHED, left_s)
            for message in (claimed.message for claimed in found):
                if message.correlation_id == correlation_id:
                    cls = class_of(replies, message)
                    if cls is None:
                        raise unknown_type(replies, message)
                    return read_event(cls, message)
    finally:
        yield from consumer.close()
    raise NoReply(
        f"no reply within {wait_s:g} s",
        where=f"{type(asked).__headwater__.type} on {request.topic}",
        next="See that a handler of it runs and returns its reply, or give it more time with timeout=…",
    )
