"""Typed messages on a log in PostgreSQL: the user's transaction, handlers, dead letters, requests."""

import threading
from collections.abc import Iterator
from decimal import Decimal

import psycopg
import pytest

import headwater
from headwater import Log

TIME_LIMIT_S = 20


@pytest.fixture
def log(postgres_schema_url: str) -> Iterator[Log]:
    with headwater.open(postgres_schema_url, housekeeping=None) as log:
        yield log


@pytest.fixture
def placed(base):
    class OrderPlaced(base, topic="orders.{region}.placed", version=2):
        region: str
        amount: Decimal

    return OrderPlaced


def test_an_event_is_published_with_the_users_rows_or_not_at_all(placed, log, postgres_schema_url):
    with psycopg.connect(postgres_schema_url) as mine:
        mine.execute("CREATE TABLE orders (amount numeric)")
        placed(region="eu", amount="1.10").publish(log, tx=mine)
        mine.rollback()
        mine.execute("CREATE TABLE orders (amount numeric)")
        assert placed(region="eu", amount="9.90").publish(log, tx=mine, to="billing") == 1
        assert log.last_seq() == 0
    with log.subscribe("look", "orders.>") as look:
        [message] = look.fetch(10)
        assert (placed.read(message), message.to) == (placed(region="eu", amount="9.90"), "billing")


def test_an_event_is_handled_and_what_cannot_be_read_is_a_dead_letter(placed, log):
    seen: list[Decimal] = []
    done = threading.Event()

    @placed.on(log, id="billing", where="data.region == 'eu'")
    def bill(order):
        seen.append(order.amount)
        if order.amount == 0:
            done.set()

    placed(region="us", amount="5").publish(log)
    placed(region="eu", amount="9.90").publish(log)
    log.publish("orders.eu.placed", {"region": "eu"}, type="OrderPlaced", version=2)
    placed(region="eu", amount=0).publish(log)
    log.start()
    assert done.wait(TIME_LIMIT_S)
    log.stop()
    [letter] = log.dead_letters.list()
    assert (letter.reason, letter.message.seq, letter.subscription) == ("rejected", 3, "billing")
    assert letter.error.startswith("InvalidMessage: message 3 on orders.eu.placed, OrderPlaced.amount: field required")
    assert seen == [Decimal("9.90"), 0]


def test_a_request_is_answered(placed, base, log):
    class Accepted(base):
        amount: Decimal

    @placed.on(log, id="shop")
    def accept(order):
        return Accepted(amount=order.amount)

    log.start()
    for amount in (Decimal("1.10"), Decimal("2.20")):
        assert placed(region="eu", amount=amount).request(log, reply=Accepted, timeout=TIME_LIMIT_S).amount == amount
    log.stop()
    assert len([topic for topic in log.topics() if topic.topic.startswith("_reply.")]) == 1
