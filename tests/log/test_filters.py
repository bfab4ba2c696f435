"""Which messages a subscription gets: by topic in both dialects, by sender and receiver, by content. Here that options
reach the store; what patterns and conditions mean is in tests/topics, tests/delivery and tests/stores."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from headwater import Log, Subscription

TOPICS = [
    "orders.electronics.laptops.premium",
    "orders.electronics.phones.budget",
    "orders.books.fiction",
    "notifications.user.123.email",
    "logs.system.error.database",
    "orders",
    "premium",
]


def received(log: Log, pattern: str, **options: Any) -> list[Any]:
    with log.subscribe("s", pattern, **options) as subscription:
        found = subscription.fetch()
        assert log.subscription("s").lag == len(found), "what is counted is what is delivered"
        subscription.ack_many(found)
    return found


@pytest.mark.parametrize("mode", ["exclusive", "shared", "ephemeral"])
@pytest.mark.parametrize(
    ("dialect", "pattern", "expected"),
    [
        ("nats", "orders", [5]),
        ("nats", "orders.>", [0, 1, 2]),
        ("nats", "*.*.error.*", [4]),
        ("amqp", "orders.#", [0, 1, 2, 5]),
        ("amqp", "#.premium", [0, 6]),
    ],
)
def test_topics(log: Log, mode: Any, dialect: Any, pattern: str, expected: list[int]) -> None:
    log.publish_many([(topic, None) for topic in TOPICS])
    subscription = log.subscribe("s", pattern, dialect=dialect, mode=mode, start="first")
    assert [message.seq - 1 for message in subscription.fetch()] == expected


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"broadcast": True}, [2, 4]),
        ({"to": "orders", "broadcast": True}, [0, 2, 4]),
        ({"from_": "admin", "to": "mine"}, [1]),
        ({"from_": ["admin", "/^pay/"]}, [1, 2, 3]),
    ],
    ids=str,
)
def test_senders_and_receivers(log: Log, options: dict[str, Any], expected: list[int]) -> None:
    log.publish_many(
        [
            ("a", 0, {"from_": "shop", "to": "orders"}),
            ("a", 1, {"from_": "admin", "to": "mine"}),
            ("a", 2, {"from_": "admin"}),
            ("a", 3, {"from_": "payment-1", "to": "mine"}),
            ("a", 4),
        ]
    )
    assert [message.data for message in received(log, ">", **options)] == expected


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        ("data.total > 100", [1, 2]),
        ("data.total > 100 and data.country == 'CH'", [2]),
        ("priority >= 5 or data.vip", [1, 3]),
        ("headers.tenant == 'acme'", [3]),
    ],
)
def test_content(log: Log, where: str, expected: list[int]) -> None:
    log.publish_many(
        [
            ("o", {"total": 10, "country": "CH"}, {"type": "OrderPlaced"}),
            ("o", {"total": 500, "country": "DE"}, {"priority": 9}),
            ("o", {"total": 101, "country": "CH", "lines": ["x"]}),
            ("o", {"vip": True}, {"headers": {"tenant": "acme"}}),
        ]
    )
    assert [message.seq - 1 for message in received(log, "o", where=where)] == expected


def test_all_conditions_hold_together(log: Log) -> None:
    for topic in ("a.x", "b.x"):
        for sender in ("me", "you"):
            for n in (1, 2):
                log.publish(topic, {"n": n}, from_=sender)
    found = received(log, "a.>", from_="me", where="data.n == 2")
    assert [(message.topic, message.from_, message.data["n"]) for message in found] == [("a.x", "me", 2)]


def test_a_filter_holds_after_resuming(log: Log) -> None:
    log.publish_many([("a", {"n": n}) for n in range(10)])
    with log.subscribe("s", "a", where="data.n >= 5") as subscription:
        assert [message.data["n"] for message in subscription.fetch(2)] == [5, 6]
    log.publish_many([("a", {"n": n}) for n in (1, 7)])
    with log.subscribe("s", "a", where="data.n >= 5") as subscription:
        delivered = []
        while found := subscription.fetch():
            delivered += [message.data["n"] for message in found]
            subscription.ack_many(found)
    assert delivered == [5, 6, 7, 8, 9, 7]
    assert log.subscription("s").lag == 0


def test_messages_of_others_are_passed_over_however_many(log: Log) -> None:
    log.publish_many([("noise", n) for n in range(12_000)])
    log.publish("wanted", 1)
    for mode in ("exclusive", "shared"):
        subscription = log.subscribe(mode, "wanted", mode=mode, start="first")
        assert [message.seq for message in subscription.fetch()] == [12_001]
        assert log.subscription(mode).lag == 1


def test_sharers_with_a_condition_outrun_each_other_and_miss_nothing(log: Log) -> None:
    count = 400
    sharers = [log.subscribe("s", "a", mode="shared", where="data.wanted") for _ in range(4)]
    log.publish_many([("a", {"wanted": n % 2 == 0, "n": n}) for n in range(count)])
    seen: list[int] = []

    def consume(sharer: Subscription) -> None:
        while messages := sharer.fetch(7):
            seen.extend(message.data["n"] for message in messages)
            sharer.ack_many(messages)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(consume, sharers))
    for sharer in sharers:
        consume(sharer)
    assert sorted(seen) == [*range(0, count, 2)]
    assert log.subscriptions()[0].lag == 0


def test_priorities_among_what_a_condition_keeps(log: Log) -> None:
    log.publish_many([("a", n, {"priority": n % 10}) for n in range(300)])
    first = log.subscribe("s", "a", order="priority", where="data >= 100").fetch(21)
    assert [message.priority for message in first] == [9] * 20 + [8]
    assert [message.data for message in first[:2]] == [109, 119]


def test_a_holder_takes_over_what_a_condition_kept(log: Log) -> None:
    log.publish_many([("a", n) for n in range(10)])
    lost = log.subscribe("s", "a", where="data >= 4")
    lost.fetch(2)[1].ack()
    held = log.subscribe("s", "a", where="data >= 4", takeover=True)
    assert sorted(message.data for message in held.fetch()) == [4, 6, 7, 8, 9]


def test_retention_counts_as_gaps_what_a_condition_wants(log: Log) -> None:
    log.publish_many([("a", {"n": n, "text": "x" * 5_000 * (n % 2)}) for n in range(10)])
    log.subscribe("s", "a", where="data.n >= 7").close()
    log.retain("a", max_count=0)
    log.run_maintenance()
    assert log.subscriptions()[0].gaps == 3
