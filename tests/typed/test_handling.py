"""Handlers of events, over real logs: what reaches them, what becomes a dead letter, what is handled once."""

import asyncio
import json
import threading
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

import headwater
from headwater.errors import InvalidFilterError, InvalidOptionError, InvalidStateError
from headwater.stores.dedupe import MemoryDedupe
from headwater.typed import on

TIME_LIMIT_S = 20
FILTERS = json.loads((Path(__file__).parents[1] / "vectors" / "filters.json").read_text())


class Seen(list[Any]):
    """What a handler got; `wait(n)` until it has n."""

    def __init__(self) -> None:
        super().__init__()
        self._changed = threading.Condition()

    def add(self, value: Any) -> None:
        with self._changed:
            self.append(value)
            self._changed.notify_all()

    def wait(self, count: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self) >= count, TIME_LIMIT_S), list(self)


@pytest.fixture
def placed(base):
    class OrderPlaced(base, topic="orders.placed", version=2):
        order_id: str
        amount: Decimal = Decimal(1)

    return OrderPlaced


def test_a_handler_gets_the_event_or_the_event_and_the_message(placed, any_log):
    events, both = Seen(), Seen()

    @placed.on(any_log, id="billing")
    def bill(order, colour="red"):
        events.add((order, colour))

    @placed.on(any_log, id="ship")
    def ship(order, message):
        both.add((order.order_id, message.seq, message.attempt))

    any_log.start()
    seq = placed(order_id="o-1", amount="2.50").publish(any_log)
    events.wait(1)
    both.wait(1)
    any_log.stop()
    assert events == [(placed(order_id="o-1", amount="2.50"), "red")]
    assert both == [("o-1", seq, 1)]
    assert {info.id: info.lag for info in any_log.subscriptions()} == {"billing": 0, "ship": 0}


@pytest.mark.parametrize(
    ("topic", "data", "options", "error"),
    [
        ("orders.placed", {}, {}, "UnknownTypeError: message 1 on orders.placed: it has no type, and this wants Order"),
        ("orders.placed", {}, {"type": "Other"}, "UnknownTypeError: message 1 on orders.placed: its type is 'Other', "),
        ("orders.placed", {}, {"type": "OrderPlaced", "version": 3},
         "VersionMismatchError: message 1 on orders.placed: the message is version 3 of OrderPlaced, and the class"),
        ("orders.placed", {"order_id": "o-1"}, {"type": "OrderPlaced", "version": 1},
         "VersionMismatchError: message 1 on orders.placed: the message is version 1 of OrderPlaced, the class here"),
        ("orders.placed", {"order_id": 5}, {"type": "OrderPlaced", "version": 2},
         "InvalidMessageError: message 1 on orders.placed, OrderPlaced.order_id: input should be a valid string."),
        ("orders.placed", {"base64": "!"}, {"type": "OrderPlaced", "version": 2, "content_type": "application/msgpack"},
         "InvalidMessageError: message 1 on orders.placed: it cannot be read as application/msgpack: ValueError"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_a_dead_letter_at_once(placed, any_log, topic, data, options, error):
    seen = Seen()

    @placed.on(any_log, id="billing")
    def bill(order):
        seen.add(order.order_id)

    any_log.publish(topic, data, **options)
    placed(order_id="next").publish(any_log)
    any_log.start()
    seen.wait(1)
    any_log.stop()
    [letter] = any_log.dead_letters.list()
    assert (letter.reason, letter.attempts, letter.subscription) == ("rejected", 1, "billing")
    assert letter.error.startswith(error)
    assert letter.handler.endswith("bill")
    assert seen == ["next"]


def test_a_dead_letter_is_redriven_when_the_upgrader_is_there(placed, log):
    seen = Seen()

    @placed.on(log, id="billing")
    def bill(order):
        seen.add(order)

    log.publish("orders.placed", {"id": "o-1"}, type="OrderPlaced", version=1)
    placed(order_id="next").publish(log)
    log.start()
    seen.wait(1)

    @placed.upgrade(from_version=1)
    def renamed(fields):
        return {"order_id": fields["id"]}

    assert log.dead_letters.redrive().redriven == 1
    seen.wait(2)
    log.stop()
    assert [order.order_id for order in seen] == ["next", "o-1"]
    assert log.dead_letters.list() == []


def test_other_types_may_be_passed_over(placed, base, log):
    class Cancelled(base, topic="orders.placed"):
        pass

    seen = Seen()

    @placed.on(log, id="billing", others="skip")
    def bill(order):
        seen.add(order.order_id)

    Cancelled().publish(log)
    placed(order_id="o-1").publish(log)
    log.start()
    seen.wait(1)
    log.stop()
    assert (seen, log.dead_letters.list(), log.subscription("billing").lag) == (["o-1"], [], 0)


def test_a_handler_that_raises_is_tried_again(placed, log):
    seen = Seen()

    @placed.on(log, id="billing", backoff=0, jitter=0)
    def bill(order, message):
        seen.add(message.attempt)
        if message.attempt == 1:
            raise RuntimeError("not now")

    placed(order_id="o-1").publish(log)
    log.start()
    seen.wait(2)
    log.stop()
    assert (seen, log.dead_letters.list()) == ([1, 2], [])


# --- several classes ------------------------------------------------------------------------------------------------


def test_one_handler_for_several_classes_keeps_their_order(base, any_log):
    class Placed(base, topic="orders.{region}.placed"):
        region: str

    class Cancelled(base, topic="orders.{region}.cancelled"):
        region: str

    class Late(base, topic="orders.{region}.placed.late"):
        region: str

    seen = Seen()

    @on(any_log, "orders", Placed, Cancelled, Late)
    def follow(event):
        seen.add(event)

    events = [Placed(region="eu"), Cancelled(region="us"), Late(region="eu"), Placed(region="us")]
    any_log.publish("orders.eu.noted", {})  # none of ours, though the pattern has it
    for event in events:
        event.publish(any_log)
    any_log.start()
    seen.wait(4)
    any_log.stop()
    assert seen == events
    assert any_log.dead_letters.list() == []
    assert any_log.subscription("orders").pattern == "orders.>"


def test_a_base_handles_all_that_is_made_of_it_under_a_pattern(base, log):
    class Order(base):
        n: int

    class Placed(Order, topic="orders.placed"):
        pass

    class Cancelled(Order, topic="orders.cancelled"):
        pass

    seen = Seen()
    with pytest.raises(InvalidOptionError, match=r'class Order: it has no topic to subscribe to\. Pass pattern="…"'):
        Order.on(log)

    @Order.on(log, id="all", pattern="orders.>")
    def follow(event):
        seen.add(event)

    log.start()
    Placed(n=1).publish(log)
    Cancelled(n=2).publish(log)
    seen.wait(2)
    log.stop()
    assert seen == [Placed(n=1), Cancelled(n=2)]


def test_two_versions_of_a_type_are_two_classes_if_one_likes(base, log):
    class First(base, topic="orders", type="Order", version=1):
        a: int

    class Second(base, topic="orders", type="Order", version=2):
        b: int

    seen = Seen()
    on(log, "both", First, Second)(seen.add)
    log.start()
    First(a=1).publish(log)
    Second(b=2).publish(log)
    seen.wait(2)
    log.stop()
    assert seen == [First(a=1), Second(b=2)]


# --- filters --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", FILTERS["cases"], ids=lambda case: json.dumps(case["filter"]))
def test_filters_by_sender_and_receiver(base, case):
    class Answered(base, topic="answered"):
        n: int

    seen = Seen()
    options = {"from_" if name == "from" else name: value for name, value in case["filter"].items()}
    with headwater.open("memory:", maintenance_interval=None) as log:
        Answered.on(log, id="listener", **options)(seen.add)
        for number, (from_, to) in enumerate(case["messages"]):
            Answered(n=number).publish(log, from_=from_, to=to)
        log.start()
        seen.wait(len(case["keeps"]))
        log.stop()
        assert log.subscription("listener").lag == 0
    assert [event.n for event in seen] == case["keeps"]


@pytest.mark.parametrize("wrong", FILTERS["refused"], ids=json.dumps)
def test_filters_that_cannot_be_are_refused(placed, log, wrong):
    with pytest.raises(InvalidFilterError):
        placed.on(log, id="h", **{"from_" if name == "from" else name: value for name, value in wrong.items()})(print)


def test_a_condition_sees_the_fields(placed, log):
    seen = Seen()
    placed.on(log, id="big", where="data.order_id starts with 'big'")(seen.add)
    placed(order_id="small").publish(log)
    placed(order_id="big-1").publish(log)
    log.start()
    seen.wait(1)
    log.stop()
    assert [order.order_id for order in seen] == ["big-1"]


# --- refusals -------------------------------------------------------------------------------------------------------


def three(a, b, c): ...
def keyword(a, *, b): ...
def nothing(): ...
async def coroutine(order): ...


@pytest.mark.parametrize(
    ("handler", "why"),
    [
        (three, "three cannot be called with an event"),
        (keyword, "keyword cannot be called with an event"),
        (nothing, "nothing cannot be called with an event"),
        (coroutine, "coroutine is a coroutine function"),
    ],
)
def test_handlers_that_cannot_be_called_are_refused(placed, log, handler, why):
    with pytest.raises(InvalidOptionError, match=why):
        placed.on(log, id="h")(handler)


def test_impossible_declarations_are_refused(placed, log):
    with pytest.raises(InvalidOptionError, match="no class is named"):
        on(log, "x")
    with pytest.raises(InvalidOptionError, match="others is 'reject' or 'skip', not 'keep'"):
        placed.on(log, others="keep")
    with pytest.raises(InvalidOptionError, match=r"'events.db' is no log\. Pass what headwater.open\(\)"):
        placed.on("events.db")
    with pytest.raises(TypeError, match="unexpected keyword argument 'colour'"):
        placed.on(log, id="red", colour="red")(print)
    with pytest.raises(InvalidStateError, match="not bound to a log"):
        placed.on()


# --- once -----------------------------------------------------------------------------------------------------------


def test_a_message_that_was_handled_is_not_handled_again(placed, log):
    queue, seen = MemoryDedupe(), Seen()

    @placed.on(log, id="billing", dedupe=queue, backoff=0, jitter=0)
    def bill(order, message):
        seen.add((order.order_id, message.attempt))
        if order.order_id == "a" and message.attempt == 1:
            raise RuntimeError("release it")

    first = placed(order_id="a").publish(log, id="id-a")
    log.start()
    seen.wait(2)
    log.stop()
    log.seek("billing", first)  # as a restored database would
    bill_again = Seen()

    @placed.on(log, id="billing", dedupe=queue)
    def bill_once_more(order):
        bill_again.add(order.order_id)

    placed(order_id="b").publish(log)
    log.start()
    bill_again.wait(1)
    log.stop()
    assert seen == [("a", 1), ("a", 2)]
    assert bill_again == ["b"]
    assert queue.contains("billing", "orders.placed#id-a")
    assert log.subscription("billing").lag == 0


def test_the_queue_of_the_class_is_used_unless_the_handler_says_otherwise(base, log):
    queue = MemoryDedupe()

    class Memo(base, topic="notes", dedupe=queue):
        pass

    with_queue, without = Seen(), Seen()
    Memo.on(log, id="with")(with_queue.add)
    Memo.on(log, id="without", dedupe=None)(without.add)
    log.start()
    Memo().publish(log)
    with_queue.wait(1)
    without.wait(1)
    log.stop()
    assert {each: queue.stats(each).done for each in ("with", "without")} == {"with": 1, "without": 0}


def test_classes_with_different_queues_want_a_word(base, log):
    class One(base, topic="notes.one", dedupe=MemoryDedupe()):
        pass

    class Two(base, topic="notes.two"):
        pass

    with pytest.raises(InvalidOptionError, match="its classes have different dedupe queues"):
        on(log, "both", One, Two)
    on(log, "both", One, Two, dedupe=None)(print)


# --- asyncio --------------------------------------------------------------------------------------------------------


def test_handlers_of_both_kinds_run_on_asyncio(placed):
    async def story() -> list[str]:
        got: list[str] = []
        both = asyncio.Semaphore(0)
        async with headwater.open_async("memory:") as log:

            @placed.on(log, id="one", dedupe=MemoryDedupe())
            async def one(order, message):
                await asyncio.sleep(0)
                got.append(f"one {message.seq}")
                both.release()

            @placed.on(log, id="two")
            def two(order):
                got.append(f"two {order.order_id}")
                both.release()

            await log.publish("orders.placed", {})
            await placed(order_id="o-1").publish(log)
            await log.start()
            async with asyncio.timeout(TIME_LIMIT_S):
                await both.acquire()
                await both.acquire()
            await log.stop()
            letters = await log.dead_letters.list()
            return [*sorted(got), *sorted(letter.subscription for letter in letters)]

    assert asyncio.run(story()) == ["one 2", "two o-1", "one", "two"]
