"""Arguments of the public API: validators that all verbs share, and hints for words that other systems use.

A validator returns the value, or raises InvalidOptionError with the name of the argument and what it may be. `hinted`
adds to Python's TypeError what to write instead; `no_attribute` does so for methods and properties.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, NoReturn, ParamSpec, TypeVar

from headwater.errors import InvalidOptionError

INT64_MAX = 2**63 - 1
SHOWN_CHARS_MAX = 200  # of what was given, in an error

T = TypeVar("T")
P = ParamSpec("P")


# --- validators -------------------------------------------------------------------------------------------------------


def shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= SHOWN_CHARS_MAX else f"{text[:SHOWN_CHARS_MAX]}…"


def check_whole(name: str, value: object, least: int, most: int) -> int:
    """A whole number within bounds; True and 3.0 are none."""
    if type(value) is not int or not least <= value <= most:
        bounds = f"from {least} to {most}" if most < INT64_MAX else f"of at least {least}"
        raise InvalidOptionError(f"{name} must be a whole number {bounds}, not {shown(value)}")
    return value


def check_number(name: str, value: object, least: float, most: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        raise InvalidOptionError(f"{name} must be a number from {least:g} to {most:g}, not {shown(value)}")
    return float(value)


def check_flag(name: str, value: object, where: str = "") -> bool:
    if not isinstance(value, bool):
        raise InvalidOptionError(f"{name} is True or False, not {shown(value)}", where=where)
    return value


def check_text(name: str, value: object) -> str:
    if not isinstance(value, str):
        raise InvalidOptionError(
            f"{name} must be text, not {shown(value)}", next="" if value is None else f"Write {str(value)[:80]!r}"
        )
    return value


def check_optional_text(name: str, value: object) -> str | None:
    return None if value is None else check_text(name, value)


def check_callable(name: str, value: object, where: str = "") -> None:
    if not callable(value):
        raise InvalidOptionError(f"{name} must be a function, not {shown(value)}", where=where)


def check_choice(name: str, value: object, allowed: Sequence[str], where: str = "") -> Any:
    if value not in allowed:
        raise InvalidOptionError(
            f"{name} must be one of {', '.join(allowed)}, not {shown(value)}",
            where=where,
            next=f"Did you mean {near!r}?" if (near := nearest(value, allowed)) else "",
        )
    return value


_SAME_VALUES = {
    "earliest": "first",
    "beginning": "first",
    "oldest": "first",
    "all": "first",
    "latest": "new",
    "newest": "new",
    "now": "new",
    "end": "new",
    "$": "new",
    "queue": "shared",
    "group": "shared",
    "durable": "exclusive",
    "max_retries": "max_attempts",
    "failed": "max_attempts",
    "error": "processing_error",
}


def nearest(value: object, allowed: Sequence[str]) -> str | None:
    """The allowed text that was probably meant: another system's word for it, or a typing error."""
    if not isinstance(value, str):
        return None
    word = value.strip().lower()
    same = word if word in allowed else _SAME_VALUES.get(word)
    if same in allowed:
        return same
    return _close(word, allowed)


def _close(word: str, known: Sequence[str]) -> str | None:
    from difflib import get_close_matches  # not before it is wanted

    return next(iter(get_close_matches(word, known, 1)), None)


# --- words of other systems -------------------------------------------------------------------------------------------

_TOPIC = 'The topic is the first argument: log.publish("orders.new", data)'
_DATA = 'The data is the second argument: log.publish("orders.new", data)'
_PARTITION = 'There are no partitions: a subscription keeps the order of a field by order_key="data.customer"'
_ID_SHARED = 'The id names it; consumers of one id share the work with mode="shared"'
_CALLBACK = 'A function is called by @log.on("orders.>", id="billing"); a subscription is iterated'
_ACK = "A subscription is acked by message.ack(); @log.on acks when the function returns"
_RETRIES = "Retries belong to the subscription: max_attempts= and backoff= of subscribe and on"
_INTERVAL = 'The interval is the first argument: log.every("5m", id=…, topic=…)'
_CALENDAR = 'The expression is the first argument: log.cron("0 3 * * *", id=…, topic=…)'
_RETURNS_DATA = "The decorated function returns the data"

_SUBSCRIBING: dict[str, str] = {
    _ID_SHARED: "group group_id consumer_group queue durable durable_name name consumer",
    "pattern": "topic topics subject channel stream",
    _CALLBACK: "callback cb handler",
    "max_attempts": "retries max_retries max_deliver autoretry_for retry",
    "backoff": "retry_backoff retry_delay",
    "start": "auto_offset_reset offset from_seq deliver_policy last_id",
    "max_in_flight": "prefetch prefetch_count max_ack_pending",
    "ack_wait": "visibility_timeout time_limit task_time_limit job_timeout",
    "Each message is acked: message.ack()": "ack_policy",
    "fetch(n) says how many": "count batch",
    "where": "filter selector",
}

# By verb: the option that it is here, or a sentence, and the words of other systems for it.
OPTIONS: dict[str, dict[str, str]] = {
    "publish": {
        "delay": "countdown schedule_in delay_ms delay_seconds",
        "deliver_at": "eta schedule_at run_at",
        "ttl": "expires expiration ttl_ms timeout",
        "published_at": "timestamp",
        _TOPIC: "queue subject channel stream routing_key exchange",
        _DATA: "payload body value message args kwargs",
        _PARTITION: "key partition partition_key lock",
        "id": "msg_id message_id job_id task_id dedupe_id deduplication_id idempotency_key queueing_lock",
        _RETRIES: "retries retry max_retries",
        "from_": "sender",
        "reply_to": "reply",
        "priority": "at_front",
        "Limits belong to the topic: log.retain(pattern, max_count=…)": "maxlen",
        "asyncio has `await log.publish(…)` of headwater.open_async()": "nowait",
        "Data is stored as JSON": "serializer",
    },
    "publish_many": {
        "Each message has its own options: (topic, data, {…})": "delay ttl id headers priority",
        "Each message has its own topic: [(topic, data), …]": "topic",
    },
    "subscribe": {
        **_SUBSCRIBING,
        _ACK: "auto_ack enable_auto_commit",
        _CALLBACK: _SUBSCRIBING[_CALLBACK] + " concurrency",
    },
    "on": {
        **_SUBSCRIBING,
        "concurrency": "workers threads max_workers",
        "ack_wait": _SUBSCRIBING["ack_wait"] + " timeout",
        "The function gets the message, which has `attempt`, nack() and reject()": "bind",
        "auto_ack": "enable_auto_commit",
        "A message is acked when the function returns; auto_ack=False leaves it to the function": "acks_late",
    },
    "fetch": {
        "n": "batch batch_size count limit max_messages max_records num",
        "timeout": "block wait timeout_ms expires",
    },
    "messages": {"timeout": "block wait timeout_ms consumer_timeout_ms"},
    "nack": {
        "delay": "countdown eta timeout",
        "error": "exc reason",
        "A nack redelivers the message after a delay; reject() dead-letters it": "requeue",
        "max_attempts= of the subscription limits the attempts": "max_retries",
    },
    "reject": {
        "A reject dead-letters the message; nack() redelivers it": "requeue",
        "reason": "error exc",
    },
    "every": {
        _INTERVAL: "seconds minutes hours days schedule",
        _RETURNS_DATA: "data args kwargs",
        'An interval has no time zone; log.cron("0 3 * * *", tz=…) has': "tz timezone",
        "id": "name",
        "topic": "queue",
    },
    "cron": {
        _CALENDAR: "minute hour day_of_week day month schedule",
        _RETURNS_DATA: "data args kwargs",
        "tz": "timezone",
        "id": "name",
        "topic": "queue",
    },
    "retain": {
        "max_age": "days seconds age ttl retention retention_ms",
        "max_count": "max_len maxlen count max_msgs",
        "max_bytes": "size max_size retention_bytes",
        "pattern": "topic",
    },
    "seek": {"start": "offset seq position to timestamp"},
    "open": {
        "create=False opens only what exists": "readonly read_only mode flags",
        'The url holds it: "postgres://user@host/database"': "password user host port",
        "url": "servers broker path filename dsn",
    },
    "dead letters": {"subscription": "queue id name"},
    "drain": {"within": "timeout seconds until"},
    "assert_published": {
        "pattern": "topic",
        "count": "times",
        "data": "payload",
    },
}

# By what it is: what to write, or a sentence, and the names that other systems have.
ATTRIBUTES: dict[str, dict[str, str]] = {
    "log": {
        "log.publish(topic, data)": "send emit enqueue produce put push add xadd delay apply_async send_task",
        '@log.on("orders.>", id="billing")': "task handler consumer subscriber listen job",
        "log.subscribe(id, pattern)": "consume receive poll fetch get xread pull_subscribe",
        "When publish returns, the message is on disk": "flush commit",
        "A topic exists with its first message: log.publish(topic, data)": "create_topic add_stream declare",
        "log.delete_subscription(id)": "unsubscribe delete_consumer",
        '@log.every("5m", …) or @log.cron("0 3 * * *", …)': "periodic schedule add_periodic_task",
        "headwater.testing.drain(log)": "drain",
        "headwater.testing.published(log)": "published",
        "headwater.testing.assert_published(log, pattern)": "assert_published",
        "headwater.testing.clock_of(log).advance(seconds)": "advance",
        'log.seek(id, "new"), which skips what waits': "purge",
        "log.statistics()": "stats",
        "log.dead_letters": "dlq",
    },
    "message": {
        "message.data": "body payload value content json args kwargs",
        "message.topic": "subject channel routing_key stream",
        "message.seq": "offset sequence delivery_tag",
        "message.published_at": "timestamp time created_at",
        "message.nack(delay)": "nak retry requeue",
        "message.reject(reason)": "term fail dead_letter",
        "message.extend(seconds)": "in_progress touch heartbeat",
        "log.publish(message.reply_to, data)": "respond reply",
        "message.attempt": "attempts delivery_count redelivered retries",
        "message.ack()": "commit acknowledge done complete",
        "message.id": "key",
    },
    "subscription": {
        "subscription.fetch(n, timeout)": "poll get receive pull next next_msg consume read",
        "subscription.close(), which keeps its position, or log.delete_subscription(id)": "unsubscribe stop",
        "message.ack() or subscription.ack_many(messages)": "commit acknowledge",
        "log.seek(id, start)": "seek",
        "log.pause(id)": "pause",
        "log.resume(id)": "resume",
        '@log.on("orders.>", id="billing")': "on",
    },
    "dead letters": {
        "log.dead_letters.redrive(…)": "requeue retry replay resend",
        "log.dead_letters.purge(…)": "delete clear remove discard",
        "log.dead_letters.list(…)": "all find read",
        "log.dead_letters.statistics()": "count stats",
    },
    "transaction": {
        "The block commits at its end": "commit",
        "An exception that leaves the block rolls it back": "rollback abort",
        "tx.execute(sql, bindings), which returns the rows": "cursor executemany executescript fetchall fetchone query",
        "message.transaction(), whose block acks at its end": "ack",
    },
    "module": {
        'headwater.open("events.db")': "connect Client App Queue Broker NATS Celery",
        "headwater.HeadwaterError": "Error HeadwaterException exceptions",
    },
}


def hinted(verb: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """A decorator: a call whose arguments do not fit says what to write instead. Signature and types stay."""

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> T:
            __tracebackhide__ = True  # in pytest
            try:
                return function(*args, **kwargs)
            except TypeError as exc:
                if exc.__traceback__ is None or exc.__traceback__.tb_next is not None:
                    raise  # by the function, which the arguments fit
                raise TypeError(f"{exc}. {_what_to_write(str(exc), verb, function)}") from None

        if inspect.iscoroutinefunction(function):
            _mark_coroutine_function(call)
        return call

    return decorate


def _mark_coroutine_function(call: Any) -> None:
    """Make frameworks and mocks, which ask whether a call has to be awaited, await this one."""
    if hasattr(inspect, "markcoroutinefunction"):  # since Python 3.12
        inspect.markcoroutinefunction(call)
    else:
        from asyncio import coroutines

        call._is_coroutine = coroutines._is_coroutine  # type: ignore[attr-defined]


_UNEXPECTED = re.compile(r"unexpected keyword argument '(\w+)'")


def _what_to_write(error: str, verb: str, function: Callable[..., Any]) -> str:
    parameters = [each for each in inspect.signature(function).parameters.values() if each.name != "self"]
    named = [each.name for each in parameters if each.kind is not each.VAR_POSITIONAL]
    if found := _UNEXPECTED.search(error):
        return _instead(found[1], OPTIONS.get(verb, {}), named)
    positional = [each.name for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD]
    required = [each.name for each in parameters if each.kind is each.KEYWORD_ONLY and each.default is each.empty]
    others = "…" if len(named) > len(positional) + len(required) else ""
    shape = ", ".join([*positional, *(f"{name}=…" for name in required), *([others] if others else [])])
    return f"Write {getattr(function, '__name__', verb)}({shape})"


def word_here(name: str, words: dict[str, str]) -> str | None:
    """The word here for one of another system."""
    return next((here for here, others in words.items() if name in others.split()), None)


def _instead(name: str, words: dict[str, str], options: Sequence[str]) -> str:
    text = word_here(name, words) or _close(name, options)
    if text is None:
        return f"It takes {', '.join(options)}"
    return f"Write {text}=" if text in options else text


def unknown_option(name: str, verb: str, options: Sequence[str]) -> str:
    """What to write instead of an option in a mapping."""
    return _instead(name, OPTIONS.get(verb, {}), options)


def no_attribute(thing: object, kind: str, name: str) -> NoReturn:
    """Raise the AttributeError of a `__getattr__`, with what may be meant instead."""
    text = f"{type(thing).__name__!r} object has no attribute {name!r}"
    raise AttributeError(text + _instead_of(kind, name), name=name, obj=thing)


def no_module_attribute(module: str, name: str) -> NoReturn:
    raise AttributeError(f"module {module!r} has no attribute {name!r}{_instead_of('module', name)}", name=name)


def _instead_of(kind: str, name: str) -> str:
    instead = word_here(name, ATTRIBUTES[kind])
    return "" if instead is None else f". {instead}" if instead[0].isupper() else f". Write {instead}"
