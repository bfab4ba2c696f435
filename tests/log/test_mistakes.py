"""Common mistakes of users who know other systems, and the message that each gets."""

from __future__ import annotations

import asyncio
import inspect
import pickle
from collections.abc import Callable, Iterator
from datetime import date, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID
from zoneinfo import ZoneInfo

import pytest

import headwater
from headwater import testing
from headwater.api._async import AsyncDeadLetters, AsyncLog, AsyncReceivedMessage, AsyncSubscription, AsyncTransaction
from headwater.api._sync import Transaction
from headwater.arguments import ATTRIBUTES, OPTIONS
from headwater.errors import HeadwaterError

NOON = 1_700_000_000_000
TX: Any = Transaction(None)  # type: ignore[arg-type]
Given = tuple[Any, Any, Any]  # a log, a subscription of it and a message


@pytest.fixture
def given() -> Iterator[Given]:
    with testing.open_log() as log:
        log.publish("orders.new", 1)
        subscription = log.subscribe("billing", "orders.>")
        yield log, subscription, subscription.fetch()[0]


def generator(message: Any) -> Any:
    yield message


def no_message() -> None: ...


MISTAKES: list[tuple[str, Callable[[Any, Any, Any], Any], str]] = [
    # --- words of Celery, Procrastinate, NATS, Kafka, RQ and Redis ---
    ("countdown", lambda log, s, m: log.publish("a", 1, countdown=5), "keyword argument 'countdown'. Write delay="),
    ("eta", lambda log, s, m: log.publish("a", 1, eta=5), "keyword argument 'eta'. Write deliver_at="),
    ("a typo", lambda log, s, m: log.publish("a", 1, dely=5), "keyword argument 'dely'. Write delay="),
    (
        "queue",
        lambda log, s, m: log.publish("a", 1, queue="x"),
        'The topic is the first argument: log.publish("orders.new',
    ),
    ("key", lambda log, s, m: log.publish("a", 1, key="x"), "There are no partitions: a subscription keeps the order"),
    ("retries", lambda log, s, m: log.publish("a", 1, retries=3), "Retries belong to the subscription: max_attempts="),
    ("unheard of", lambda log, s, m: log.publish("a", 1, zzz=3), "'zzz'. It takes topic, data, id, headers, from_,"),
    ("no data", lambda log, s, m: log.publish("a"), "argument: 'data'. Write publish(topic, data, …)"),
    (
        "in a batch",
        lambda log, s, m: log.publish_many([("a", 1), ("a", 1, {"eta": 5})]),
        "(a): unknown publish option 'eta'. Write del",
    ),
    (
        "of a batch",
        lambda log, s, m: log.publish_many([("a", 1)], delay=5),
        "Each message has its own options: (topic, data,",
    ),
    ("group", lambda log, s, m: log.subscribe("s", ">", group="g"), 'share the work with mode="shared"'),
    ("callback", lambda log, s, m: log.subscribe("s", ">", print), "Write subscribe(id, pattern, …)"),
    ("max_retries", lambda log, s, m: log.on(">", id="s", max_retries=3), "'max_retries'. Write max_attempts="),
    ("minutes", lambda log, s, m: log.every(minutes=5), 'The interval is the first argument: log.every("5m", id=…'),
    ("timezone", lambda log, s, m: log.cron("0 3 * * *", id="s", topic="t", timezone="UTC"), "Write tz="),
    ("days", lambda log, s, m: log.retain(">", days=7), "Write max_age="),
    ("offset", lambda log, s, m: log.seek("s", offset=7), "Write start="),
    ("batch", lambda log, s, m: s.fetch(batch=10), "Write n="),
    ("requeue", lambda log, s, m: m.reject(requeue=True), "A reject dead-letters the message; nack() redelivers it"),
    ("readonly", lambda log, s, m: headwater.open("x.db", readonly=True), "create=False opens only what exists"),
    ("send", lambda log, s, m: log.send("a", 1), "no attribute 'send'. Write log.publish(topic, data)"),
    ("task", lambda log, s, m: log.task, """no attribute 'task'. Write @log.on("orders.>", id="billing")"""),
    ("flush", lambda log, s, m: log.flush(), "no attribute 'flush'. When publish returns, the message is on disk"),
    ("log.drain", lambda log, s, m: log.drain(), "Write headwater.testing.drain(log)"),
    ("body", lambda log, s, m: m.body, "no attribute 'body'. Write message.data"),
    ("subscripted", lambda log, s, m: m["order"], "attempt 1> is no mapping. Write message.data['order']"),
    ("commit", lambda log, s, m: TX.commit(), "no attribute 'commit'. The block commits at its end"),
    ("executemany", lambda log, s, m: TX.executemany("", []), "Write tx.execute(sql, bindings)"),
    ("nak", lambda log, s, m: m.nak(), "no attribute 'nak'. Write message.nack(delay)"),
    ("poll", lambda log, s, m: s.poll(), "no attribute 'poll'. Write subscription.fetch(n, timeout)"),
    ("dead letters", lambda log, s, m: log.dead_letters.requeue(1), "Write log.dead_letters.redrive(…)"),
    (
        "Error",
        lambda log, s, m: headwater.Error,  # type: ignore[attr-defined]
        "no attribute 'Error'. Write headwater.HeadwaterError",
    ),
    (
        "connect",
        lambda log, s, m: headwater.connect("x"),
        """no attribute 'connect'. Write headwater.open("events.db")""",
    ),
    ("Log()", lambda log, s, m: headwater.Log("x.db"), 'a log is opened by headwater.open("events.db")'),
    # --- durations, times and counts ---
    (
        "a fetch of 5s",
        lambda log, s, m: s.fetch(timeout="soon"),
        "timeout must be a duration, not 'soon'. Write it like",
    ),
    ("a negative wait", lambda log, s, m: s.fetch(timeout=-1), "not -1. None waits without limit"),
    ("a text", lambda log, s, m: log.publish("a", 1, delay="5"), "delay must be a duration, not '5'. Did you mean 5s?"),
    (
        "tomorrow",
        lambda log, s, m: log.publish("a", 1, deliver_at="tomorrow"),
        "a time from now is a duration: delay, ttl",
    ),
    (
        "a date",
        lambda log, s, m: log.publish("a", 1, deliver_at=date(2030, 1, 1)),
        "Give a date and time with its zone",
    ),
    (
        "no zone",
        lambda log, s, m: log.publish("a", 1, deliver_at=datetime(2030, 1, 1)),
        "has no time zone. Give it one",
    ),
    (
        "milliseconds",
        lambda log, s, m: log.publish("a", 1, expires_at=NOON * 10),
        "seconds since 1970, not milliseconds",
    ),
    (
        "a count",
        lambda log, s, m: log.retain(">", max_count="5"),
        "max_count must be a whole number of at least 0, not '5'",
    ),
    (
        "a page",
        lambda log, s, m: log.dead_letters.list(limit="5"),
        "limit must be a whole number of at least 0, not '5'",
    ),
    (
        "a factor",
        lambda log, s, m: log.subscribe("s", ">", backoff_factor=0),
        "backoff_factor must be a number from 1 to 100",
    ),
    (
        "missed_max",
        lambda log, s, m: log.every("5m", id="s", topic="t", missed_max="a"),
        "a whole number from 1 to 1000",
    ),
    # --- choices, flags, texts and functions ---
    ("earliest", lambda log, s, m: log.subscribe("s", ">", start="earliest"), "not 'earliest'. Did you mean 'first'?"),
    ("later", lambda log, s, m: log.on(">", id="s", start="latest"), "not 'latest'. Did you mean 'new'?"),
    (
        "a seq in text",
        lambda log, s, m: [s.close(), log.seek("billing", "7")],
        "A seq is that of the first message to deliver: start=7",
    ),
    ("a mode", lambda log, s, m: log.subscribe("s", ">", mode="queue"), "not 'queue'. Did you mean 'shared'?"),
    ("a reason", lambda log, s, m: log.dead_letters.list(reason="max_retries"), "Did you mean 'max_attempts'?"),
    (
        "any reason",
        lambda log, s, m: log.dead_letters.purge(reason="oops"),
        "reason must be one of processing_error, timeout",
    ),
    (
        "yes",
        lambda log, s, m: log.retain(">", max_count=1, keep_unacked="yes"),
        "keep_unacked is True or False, not 'yes'",
    ),
    ("no", lambda log, s, m: log.on(">", id="s", auto_ack="no"), "auto_ack is True or False, not 'no'"),
    (
        "an exception",
        lambda log, s, m: m.nack(error=ValueError("x")),
        "error must be text, not ValueError('x'). Write 'x'",
    ),
    (
        "a uuid",
        lambda log, s, m: log.publish("a", 1, id=UUID(int=1)),
        "must be non-empty text, not UUID('00000000-0000-0000-0000-000000000001'). Convert it with str(…)",
    ),
    (
        "a zone",
        lambda log, s, m: log.cron("0 3 * * *", id="s", topic="t", tz=ZoneInfo("UTC")),
        "tz must be text, not zone",
    ),
    ("a seq to ack", lambda log, s, m: s.ack(m.seq), "expected a list of received messages, not [1]. Pass what fetch"),
    (
        "no message",
        lambda log, s, m: log.on(">", id="s")(no_message),
        "no_message takes no message. Write def no_message(mes",
    ),
    (
        "yield",
        lambda log, s, m: log.on(">", id="s")(generator),
        "is a generator function, and a call of it runs none of its",
    ),
    ("on_gap", lambda log, s, m: log.on(">", id="s", on_gap=5), "on_gap must be a function, not 5"),
    (
        "a schedule twice",
        lambda log, s, m: [log.every("5m", id="s", topic="t")(print) for _ in "12"],
        "the schedule 's' is dec",
    ),
    (
        "order_key",
        lambda log, s, m: log.subscribe("s", ">", order_key="customer"),
        "subscription s, order_key, at 1: expected",
    ),
    # --- data ---
    (
        "a set",
        lambda log, s, m: log.publish("a", {1}),
        "a set is not JSON: it has no order. Send a list, like sorted(…)",
    ),
    ("NaN", lambda log, s, m: log.publish("a", float("nan")), "nan is not JSON. Send null or text instead"),
    (
        "itself",
        lambda log, s, m: log.publish("a", (lambda a: a.append(a) or a)([])),
        "it holds itself, or is nested too",
    ),
    ("surrogates", lambda log, s, m: log.publish("a", "\ud800"), "text with half a surrogate pair at 0 is not JSON"),
    ("a string", lambda log, s, m: log.publish_many("abc"), "expected (topic, data), not 'a'. A batch is a list of"),
    (
        "None",
        lambda log, s, m: log.publish_many(None),
        "expected a list of messages, not None. Write [(topic, data), …]",
    ),
    # --- places ---
    (
        "no scheme",
        lambda log, s, m: headwater.open("localhost:8765"),
        "Write ws://localhost:8765; a file of that name is",
    ),
    ("libpq", lambda log, s, m: headwater.open("host=db dbname=shop"), "Write postgres://user@host/database"),
    (
        "a driver",
        lambda log, s, m: headwater.open("postgresql+psycopg://db/shop"),
        "Write postgresql:// without a driver",
    ),
    (
        "file:",
        lambda log, s, m: headwater.open("file:events.db"),
        "a log in a file is named by its path. Write events.db",
    ),
    ("http", lambda log, s, m: headwater.open("http://localhost:8765"), "A server is opened with ws://"),
    ("redis", lambda log, s, m: headwater.open("redis://localhost"), "`headwater forward` copies a log there"),
    ("unset", lambda log, s, m: headwater.open(""), "not ''. Is an environment variable unset?"),
    ("a token", lambda log, s, m: headwater.open("ws://localhost:1", token=5), "token must be text, not 5. Write '5'"),
    ("a clock", lambda log, s, m: testing.open_log(clock=5), "Write clock=headwater.ManualClock()"),
    # --- order of calls, other processes, the testing kit ---
    ("ack, then nack", lambda log, s, m: [m.ack(), m.nack()], "message 1 was acked already; nack has no effect"),
    (
        "ack after close",
        lambda log, s, m: [s.close(), m.ack()],
        "has been taken over, or was closed here. Subscribe again",
    ),
    ("closed", lambda log, s, m: [log.close(), log.publish("a", 1)], "the log is closed. Open it again"),
    ("pickled", lambda log, s, m: pickle.dumps(log), "cannot be pickled or copied: open the log in the other process"),
    ("no handler", lambda log, s, m: testing.drain(log), "no handler is declared on this log. Is it on another log?"),
    (
        "no log",
        lambda log, s, m: testing.drain("x"),
        "expected a log, not 'x'. Pass that of headwater.testing.open_log()",
    ),
    ("a drain's timeout", lambda log, s, m: testing.drain(log, timeout=5), "Write within="),
]


@pytest.mark.parametrize(("act", "text"), [each[1:] for each in MISTAKES], ids=[each[0] for each in MISTAKES])
def test_says_what_to_write_instead(
    given: Given, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, act: Callable[..., Any], text: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises((HeadwaterError, TypeError, AttributeError)) as refused:
        act(*given)
    assert text in str(refused.value)
    assert not list(tmp_path.iterdir())  # no log was made by mistake


@pytest.mark.parametrize("timeout", ["10ms", timedelta(milliseconds=10), 0.01, 0])
def test_a_wait_is_seconds_a_timedelta_or_a_text(given: Given, timeout: Any) -> None:
    _, subscription, _ = given
    assert subscription.fetch(timeout=timeout) == []
    assert list(subscription.messages(timeout=timeout)) == []


# --- the tables -------------------------------------------------------------------------------------------------------

VERBS: dict[str, Callable[..., Any]] = {
    "publish": AsyncLog.publish,
    "publish_many": AsyncLog.publish_many,
    "subscribe": AsyncLog.subscribe,
    "on": AsyncLog.on,
    "fetch": AsyncSubscription.fetch,
    "messages": AsyncSubscription.messages,
    "nack": AsyncReceivedMessage.nack,
    "reject": AsyncReceivedMessage.reject,
    "every": AsyncLog.every,
    "cron": AsyncLog.cron,
    "retain": AsyncLog.retain,
    "seek": AsyncLog.seek,
    "open": headwater.open,
    "dead letters": AsyncDeadLetters.list,
    "drain": testing.drain,
    "assert_published": testing.assert_published,
}
KINDS = {
    "log": AsyncLog,
    "message": AsyncReceivedMessage,
    "subscription": AsyncSubscription,
    "transaction": AsyncTransaction,
    "dead letters": AsyncDeadLetters,
    "module": headwater,
}


def test_an_option_of_the_hints_is_one_and_the_others_are_not() -> None:
    assert VERBS.keys() == OPTIONS.keys()
    for verb, words in OPTIONS.items():
        parameters = inspect.signature(VERBS[verb]).parameters
        for here, others in words.items():
            assert here in parameters or " " in here, (verb, here)
            assert not parameters.keys() & set(others.split()), (verb, here)


def test_an_attribute_of_the_hints_is_not_there() -> None:
    assert KINDS.keys() == ATTRIBUTES.keys()
    for kind, words in ATTRIBUTES.items():
        for others in words.values():
            assert not [name for name in others.split() if hasattr(KINDS[kind], name)]


def test_an_error_of_the_function_itself_is_left_alone(given: Given) -> None:
    def messages() -> Iterator[Any]:
        raise TypeError("f() got an unexpected keyword argument 'countdown'")
        yield

    with pytest.raises(HeadwaterError) as refused:
        given[0].publish_many(messages())
    assert "Write delay=" not in str(refused.value)


def test_signatures_and_coroutine_functions_stay() -> None:
    assert "countdown" not in inspect.signature(AsyncLog.publish).parameters
    assert list(inspect.signature(AsyncLog.publish).parameters)[:3] == ["self", "topic", "data"]
    assert asyncio.iscoroutinefunction(AsyncLog.publish)
