"""A file, and a server in front of one, are asked the same: results are equal, and so are errors, word by word."""

from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest
from served import ServedFile

import headwater
from headwater import Log, ManualClock
from headwater.errors import HeadwaterError, SubscriptionActiveError

Act = Callable[[Log], Any]


@pytest.fixture
def two(tmp_path: Path, clock: ManualClock) -> Iterator[tuple[Log, Log]]:
    options: dict[str, Any] = {
        "clock": clock,
        "maintenance_interval": None,
        "heartbeats": False,
        "durability": "relaxed",
    }
    served = ServedFile(tmp_path / "served.db", **options)
    with headwater.open(tmp_path / "here.db", **options) as here, served.open() as there:
        yield here, there
    served.stop()


def outcome(log: Log, act: Act) -> Any:
    """What came of it, as something that can be compared: without the place of the log, the names of holders, and the
    method that a client names where an error names nothing."""
    try:
        return plain(act(log))
    except HeadwaterError as exc:
        may_differ = exc.where == log.name or exc.where.startswith("rpc.") or isinstance(exc, SubscriptionActiveError)
        return type(exc), exc.why, exc.next, "" if may_differ else exc.where


def plain(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    if isinstance(value, msgspec.Struct):
        return {
            name: plain(getattr(value, name)) for name in value.__struct_fields__ if name not in ("identity", "holder")
        }
    return value


def published(log: Log) -> list[int]:
    return log.publish_many([("a.b", {"n": n}, {"from_": "me", "headers": {"n": n}}) for n in range(5)])


def handed_out(log: Log, count: int = 2, **options: Any) -> Any:
    published(log)
    subscription = log.subscribe("s", "a.>", **options)
    return subscription, subscription.fetch(count)


def after_close(act: Act) -> Act:
    def closed(log: Log) -> Any:
        log.close()
        return act(log)

    return closed


def settled_twice(verb: str) -> Act:
    def act(log: Log) -> Any:
        _, [first, _] = handed_out(log)
        first.ack()
        first.settled = False
        return getattr(first, verb)()

    return act


def of_a_closed_subscription(verb: str, mode: Any) -> Act:
    def act(log: Log) -> Any:
        subscription, [first, _] = handed_out(log, mode=mode)
        subscription.close()
        return getattr(first, verb)()

    return act


def taken_over(verb: str) -> Act:
    def act(log: Log) -> Any:
        _, [first, _] = handed_out(log)
        log.subscribe("s", "a.>", takeover=True)
        return getattr(first, verb)()

    return act


def of_another(log: Log) -> Any:
    subscription, _ = handed_out(log)
    others = log.subscribe("t", "a.>").fetch()
    return subscription.ack_many(others)


def delivered_again(log: Log) -> Any:
    subscription, [first, _] = handed_out(log)
    first.nack(0)
    subscription.fetch()
    return subscription.ack_many([first])


def dead_lettered(log: Log) -> Any:
    _, [first, second] = handed_out(log)
    first.reject("no use")
    second.reject()
    return log.dead_letters


REFUSED: dict[str, Act] = {
    "a bad topic": lambda log: log.publish("a..b", 1),
    "a topic with a wildcard": lambda log: log.publish("a.>", 1),
    "no JSON": lambda log: log.publish("a", object()),
    "not a number": lambda log: log.publish("a", float("nan")),
    "too large": lambda log: log.publish("a", "x" * 2_000_000),
    "a bad priority": lambda log: log.publish("a", 1, priority="high"),  # type: ignore[arg-type]
    "a naive time": lambda log: log.publish("a", 1, deliver_at=datetime(2030, 1, 1)),
    "a negative delay": lambda log: log.publish("a", 1, delay=-1),
    "a bad header": lambda log: log.publish("a", 1, headers={"x": object()}),
    "headers that are none": lambda log: log.publish("a", 1, headers=[1]),  # type: ignore[arg-type]
    "an empty id": lambda log: log.publish("a", 1, id=""),
    "a bad one among many": lambda log: log.publish_many([("a", 1), ("b..c", 2)]),
    "a bad option among many": lambda log: log.publish_many([("a", 1), ("b", 2, {"delay": -1})]),
    "too large among many": lambda log: log.publish_many([("a", 1), ("b", "x" * 2_000_000)]),
    "no message": lambda log: log.publish_many([("a",)]),  # type: ignore[list-item]
    "too many": lambda log: log.publish_many([("a", 1)] * 200_000),
    "a bad pattern": lambda log: log.subscribe("s", "a.*.>"),
    "a bad id": lambda log: log.subscribe("s p", "a"),
    "an id with a mark": lambda log: log.subscribe("s#2", "a"),
    "a bad mode": lambda log: log.subscribe("s", "a", mode="both"),  # type: ignore[arg-type]
    "a bad where": lambda log: log.subscribe("s", "a", where="data >"),
    "a bad filter": lambda log: log.subscribe("s", "a", from_=5),  # type: ignore[arg-type]
    "a bad start": lambda log: log.subscribe("s", "a", start="last"),  # type: ignore[arg-type]
    "a start in the past": lambda log: log.subscribe("s", "a", start=-1),
    "a naive start": lambda log: log.subscribe("s", "a", start=datetime(2020, 1, 1)),
    "held by another": lambda log: [log.subscribe("s", "a") for _ in range(2)],
    "another purpose": lambda log: [log.subscribe("s", pattern).close() for pattern in ("a", "b")],
    "nothing to fetch": lambda log: log.subscribe("s", "a").fetch(0),
    "too much to fetch": lambda log: log.subscribe("s", "a").fetch(10_001),
    "no subscription": lambda log: log.subscription("s"),
    "no subscription to delete": lambda log: log.delete_subscription("s"),
    "deleting a held subscription": lambda log: [log.subscribe("s", "a"), log.delete_subscription("s")],
    "seeking what is held": lambda log: [log.subscribe("s", "a"), log.seek("s", "first")],
    "seeking nowhere": lambda log: [log.subscribe("s", "a").close(), log.seek("s", "last")],  # type: ignore[arg-type]
    "describing what keeps no state": lambda log: log.subscribe("s", "a", mode="ephemeral").info(),
    "settling what is another's": of_another,
    "settling what was delivered again": delivered_again,
    "a negative delay of a nack": lambda log: handed_out(log)[1][0].nack(-1),
    "a negative extension": lambda log: handed_out(log)[1][0].extend(-1),
    "retention by nothing": lambda log: log.retain("a", max_count=-1),
    "retention of a bad pattern": lambda log: log.retain("a..b", max_count=1),
    "retention of a bad dialect": lambda log: log.retain("a", max_count=1, dialect="x"),  # type: ignore[arg-type]
    "retention by a bad age": lambda log: log.retain("a", max_age=timedelta(-1)),
    "no dead letter": lambda log: log.dead_letters.get(7),
    "dead letters of a bad pattern": lambda log: log.dead_letters.list(topic="a..b"),
    "dead letters by a bad regex": lambda log: log.dead_letters.list(error="("),
    "dead letters by a bad id": lambda log: log.dead_letters.purge(0),
    "redriving to a bad topic": lambda log: dead_lettered(log).redrive(to_topic="a..b"),
    "importing nonsense": lambda log: log.dead_letters.import_(["{"]),
    "the last seq of a bad topic": lambda log: log.topic_max_seq("a.>"),
    "a bad live pattern": lambda log: log.live.subscribe("x", "a..b", print),
    "after close, publishing": after_close(lambda log: log.publish("a", 1)),
    "after close, publishing many": after_close(lambda log: log.publish_many([("a", 1)])),
    "after close, subscribing": after_close(lambda log: log.subscribe("s", "a")),
    "after close, looking": after_close(lambda log: log.statistics()),
    **{f"{verb} twice": settled_twice(verb) for verb in ("ack", "nack", "reject", "extend")},
    **{f"{verb} after a takeover": taken_over(verb) for verb in ("ack", "nack", "reject", "extend")},
    **{
        f"{verb} in a closed {mode} subscription": of_a_closed_subscription(verb, mode)
        for mode in ("exclusive", "shared")
        for verb in ("ack", "nack", "reject", "extend")
    },
}


@pytest.mark.parametrize("name", REFUSED)
def test_errors(two: tuple[Log, Log], name: str) -> None:
    here, there = (outcome(log, REFUSED[name]) for log in two)
    assert isinstance(here, tuple), "nothing was refused"
    assert there == here


ANSWERED: dict[str, Act] = {
    "seqs": published,
    "an id twice": lambda log: [log.publish("a", 1, id="x"), log.publish("a", 2, id="x"), log.last_seq()],
    "messages": lambda log: [each.message for each in handed_out(log, 100)[1]],
    "an ephemeral reader's": lambda log: [
        each.message for each in [published(log), log.subscribe("l", ">", mode="ephemeral", start=3).fetch()][1]
    ],
    "where a subscription begins": lambda log: [
        [published(log), log.subscribe(f"s{number}", ">", start=start).resumed_from]
        for number, start in enumerate((0, 3, 99, datetime(2000, 1, 1, tzinfo=UTC), datetime(2100, 1, 1, tzinfo=UTC)))
    ],
    "how it is": lambda log: [handed_out(log)[0].info(), log.subscriptions()],
    "topics": lambda log: [published(log), log.topics(), log.topic_max_seq("a.b"), log.topic_max_seq("x")],
    "figures": lambda log: [handed_out(log), log.statistics()][1],
    "retention": lambda log: [
        log.retain("a.>", max_age=1.5, max_count=2, keep_unacked=True),
        log.retain("#.b", max_bytes=9, dialect="amqp"),
        log.retention(),
        log.delete_retention("a.>"),
        log.delete_retention("a.>"),
    ],
    "maintenance": lambda log: [
        published(log),
        log.retain(">", max_count=2),
        log.run_maintenance(),
        log.run_maintenance(),
    ],
    "dead letters": lambda log: [dead_lettered(log).list(), log.dead_letters.statistics(), log.dead_letters.get(1)],
    "dead letters by filter": lambda log: [
        [letter.message.seq for letter in dead_lettered(log).list(error="use")],
        log.dead_letters.statistics(reason="rejected"),
        log.dead_letters.list(after=1),
        log.dead_letters.list(limit=0),
    ],
    "redriving": lambda log: [
        dead_lettered(log).redrive(2),
        log.dead_letters.redrive(to_topic="b"),
        log.dead_letters.list(),
    ],
    "export and import": lambda log: [
        lines := list(dead_lettered(log).export()),
        log.dead_letters.purge(),
        log.dead_letters.import_(lines),
    ][1:],
    "a move": lambda log: [handed_out(log)[0].close(), log.seek("s", 3), log.seek("s", "first"), log.seek("s", "new")],
    "health": lambda log: sorted(log.health()),
}


@pytest.mark.parametrize("name", ANSWERED)
def test_results(two: tuple[Log, Log], name: str) -> None:
    here, there = (outcome(log, ANSWERED[name]) for log in two)
    assert not isinstance(here, tuple), "refused"
    assert there == here
