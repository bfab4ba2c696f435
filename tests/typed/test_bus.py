"""A bus: the log first, then copies to the transports of a class."""

import asyncio
import logging
from collections.abc import Sequence
from decimal import Decimal
from functools import partial
from pathlib import Path

import pytest

import headwater
from headwater import Message
from headwater.errors import (
    AllTransportsFailedError,
    InvalidMessageError,
    InvalidOptionError,
    TransportFailedError,
    UnsentError,
)
from headwater.ports.clock import ManualClock
from headwater.settings import Settings, load_settings
from headwater.transports.memory import MemoryTransport
from headwater.transports.open import open_transport
from headwater.typed import AsyncBus, Bus, make_bus, publish_many

TIME_LIMIT_S = 20


class Broken:
    """A transport whose target is away, until changed."""

    name = "broken"
    recognises_ids = False
    connected = False

    def __init__(self) -> None:
        self.works = False
        self.messages: list[Message] = []
        self.unsent: list[Message] = []
        self.closed = 0

    def publish(self, message: Message) -> None:
        self.publish_many([message])

    def publish_many(self, messages: Sequence[Message]) -> None:
        if not self.works:
            raise TransportFailedError("refused", where=self.name)
        self.messages += messages

    def close(self) -> None:
        self.closed += 1
        if self.unsent:
            raise UnsentError("some are left", messages=self.unsent)


@pytest.fixture
def placed(base):
    class OrderPlaced(base, topic="orders.placed", version=2, from_="shop", transports=("archive", "live")):
        order_id: str
        amount: Decimal = Decimal(1)

    return OrderPlaced


@pytest.fixture
def transports() -> dict[str, MemoryTransport]:
    return {"archive": MemoryTransport(), "live": MemoryTransport(), "other": MemoryTransport()}


def stored(log) -> list[Message]:
    with log.subscribe("look", ">", mode="ephemeral", start="first") as subscription:
        return [each.message for each in subscription.fetch(100)]


def test_copies_are_the_message_that_the_log_has(placed, log, transports):
    bus = Bus(log, transports)
    order = placed(order_id="o-1", amount="9.90")
    assert order.publish(bus, to="billing", headers={"a": 1}, priority=2) == 1
    [message] = stored(log)
    for name in ("archive", "live"):
        [copy] = transports[name].messages
        assert placed.read(copy) == order
        ours, theirs = copy.to_json(), message.to_json()
        assert abs(copy.published_ms - message.published_ms) < TIME_LIMIT_S * 1000
        del ours["published_at"], theirs["published_at"]
        assert ours == theirs
    assert transports["other"].messages == []
    assert bus.failures == {}


def test_ids_are_new_for_each_and_sort_by_time(placed, log, transports):
    clock = ManualClock()
    bus = Bus(log, transports, clock=clock)
    for _ in range(20):
        placed(order_id="o").publish(bus)
        clock.advance(0.001)
    ids = [message.id for message in transports["archive"].messages]
    assert len(set(ids)) == 20
    assert ids == sorted(ids) == [message.id for message in stored(log)]
    assert {(each[14], each[19] in "89ab", len(each)) for each in ids} == {("7", True, 36)}


def test_a_transport_that_fails_does_not_fail_the_publish(placed, log, transports, caplog):
    broken = Broken()
    bus = Bus(log, transports | {"archive": broken})
    with caplog.at_level(logging.INFO, "headwater.typed"):
        assert [placed(order_id=f"o-{number}").publish(bus) for number in range(3)] == [1, 2, 3]
        broken.works = True
        placed(order_id="o-3").publish(bus)
    assert [placed.read(each).order_id for each in broken.messages] == ["o-3"]
    assert len(transports["live"].messages) == len(stored(log)) == 4
    assert bus.failures == {"archive": 3}
    # One line when it begins and one when it ends, not one a message.
    assert [record.getMessage() for record in caplog.records] == [
        "copies for transport archive are lost while it fails: broken: refused. Use a forwarder for what must arrive",
        "transport archive works again; 3 copies did not reach it so far",
    ]


def test_the_log_that_says_no_sends_no_copies(placed, log, transports):
    bus = Bus(log, transports)
    with pytest.raises(InvalidOptionError, match="unknown publish option"):
        placed(order_id="o").publish(bus, colour="red")
    with pytest.raises(InvalidMessageError):
        placed.model_construct(order_id=1).publish(bus)
    with pytest.raises(InvalidOptionError, match="a bus sends no copies of what may yet be rolled back"):
        placed(order_id="o").publish(bus, tx=object())
    assert (transports["archive"].messages, log.last_seq()) == ([], 0)


def test_a_class_without_the_log_goes_to_its_transports_alone(base, log, transports):
    class Sampled(base, topic="samples", log=False, transports=("archive", "live")):
        n: int

    broken, other = Broken(), Broken()
    bus = Bus(log, transports)
    assert Sampled(n=1).publish(bus) == 0
    [copy] = transports["live"].messages
    assert (copy.seq, Sampled.read(copy)) == (0, Sampled(n=1))
    assert Sampled(n=2).publish(Bus(log, {"archive": broken, "live": transports["live"]})) == 0
    with pytest.raises(AllTransportsFailedError) as caught:
        Sampled(n=3).publish(Bus(log, {"archive": broken, "live": other}))
    assert list(caught.value.causes) == ["archive", "live"]
    assert str(caught.value) == ("Sampled: no transport took it: archive: broken: refused; live: broken: refused")
    for target in (log, Bus(log, {}, routes={"Sampled": ()})):
        with pytest.raises(InvalidOptionError, match="its class has log=False"):
            Sampled(n=4).publish(target)
    with pytest.raises(InvalidOptionError, match="its class has log=False"):
        publish_many(log, [Sampled(n=4)])
    assert log.last_seq() == 0


def test_many_go_in_one_transaction_and_to_each_transport_at_once(placed, base, log, transports):
    class Memo(base, topic="notes"):
        pass

    bus = Bus(log, transports, routes={"Memo": ["other"]})
    assert publish_many(bus, [placed(order_id="a"), Memo(), placed(order_id="b")]) == [1, 2, 3]
    assert [copy.seq for copy in transports["archive"].messages] == [1, 3]
    assert [copy.seq for copy in transports["other"].messages] == [2]


def test_routes_go_before_the_class_and_unknown_transports_are_refused(placed, log, transports):
    placed(order_id="a").publish(Bus(log, transports, routes={"OrderPlaced": ["other"]}))
    assert [len(transports[name].messages) for name in ("archive", "live", "other")] == [0, 0, 1]
    with pytest.raises(
        InvalidOptionError, match=r"OrderPlaced: the bus has no transport 'archive'. Configure \[transports"
    ):
        placed(order_id="a").publish(Bus(log, {"live": transports["live"]}))
    with pytest.raises(InvalidOptionError, match="Other: the bus has no transport 'nowhere'"):
        Bus(log, transports, routes={"Other": ["nowhere"]})
    assert log.last_seq() == 1


def test_a_bus_is_bound_handles_and_asks_like_a_log(placed, base, log, transports):
    class Answered(base):
        pass

    with Bus(log, transports) as bus, placed.bind(bus):

        @placed.on(id="billing")
        def bill(order):
            return Answered()

        log.start()
        assert placed(order_id="a").request(reply=Answered, timeout=TIME_LIMIT_S) == Answered()
        log.stop()
        assert len(transports["archive"].messages) == 1
    assert not transports["archive"].connected


def test_closing_closes_all_and_tells_what_was_left(log):
    one, two = Broken(), Broken()
    left = Message(1, "a", b"1", 0, 1, "x")
    one.unsent, two.unsent = [left], [left]
    with pytest.raises(UnsentError, match="2 messages were in buffers") as caught:
        Bus(log, {"one": one, "two": two}).close()
    assert (caught.value.messages, one.closed, two.closed) == ([left, left], 1, 1)


def test_a_bus_on_asyncio(placed, base, transports):
    class Sampled(base, topic="samples", log=False, transports=("archive",)):
        pass

    async def story() -> list[int]:
        async with headwater.open_async("memory:") as log, AsyncBus(log, transports) as bus:
            order = placed(order_id="a")
            return [await order.publish(bus), *await publish_many(bus, [order, Sampled()])]

    assert asyncio.run(story()) == [1, 2, 0]
    assert [copy.seq for copy in transports["archive"].messages] == [1, 2, 0]
    assert not transports["archive"].connected


# --- from configuration ---------------------------------------------------------------------------------------------

FILE = """
[transports.archive]
url = "memory:"
batch_size = 2
batch_wait = "1h"

[transports.live]
url = "memory:"

[messages.OrderPlaced]
transports = ["archive", "live"]

[profiles.test.messages.OrderPlaced]
transports = ["live"]
"""


def settings_of(directory: Path, profile: str) -> Settings:
    (directory / "headwater.toml").write_text(FILE)
    return load_settings(config=None, profile=profile, flags={}, environment={}, directory=str(directory))


@pytest.mark.parametrize(("profile", "arrive"), [("development", {"archive": 2, "live": 2}), ("test", {"live": 2})])
def test_a_bus_from_configuration(base, log, tmp_path, profile, arrive):
    class OrderPlaced(base, topic="orders.placed", transports=("elsewhere",)):
        pass

    opened = []

    def opening(url, **options):
        opened.append((url, options))
        return open_transport(url, clock=ManualClock(), **options)

    bus = make_bus(settings_of(tmp_path, profile), log, opening)
    breaker = {"failures": 5, "within": 120.0, "open": 30.0}
    assert opened == [
        ("memory:", {"breaker": breaker, "batch": {"size": 2, "wait": 3600.0}}),
        ("memory:", {"breaker": breaker}),
    ]
    publish_many(bus, [OrderPlaced(), OrderPlaced()])
    bus.close()
    assert {
        name: len(memory_in(each).messages) for name, each in bus.transports.items() if memory_in(each).messages
    } == arrive


def test_an_empty_table_of_a_type_leaves_it_to_the_class(placed, log, tmp_path):
    (tmp_path / "headwater.toml").write_text(
        "[transports]\narchive.url = 'memory:'\nlive.url = 'memory:'\n[messages.OrderPlaced]\n"
    )
    settings = load_settings(config=None, profile=None, flags={}, environment={}, directory=str(tmp_path))
    with make_bus(settings, log, partial(open_transport, clock=ManualClock())) as bus:
        placed(order_id="o-1").publish(bus)
        assert [len(memory_in(each).messages) for each in bus.transports.values()] == [1, 1]


def memory_in(transport) -> MemoryTransport:
    while not isinstance(transport, MemoryTransport):
        transport = transport.inner
    return transport


def test_transports_are_closed_when_one_does_not_open(log, tmp_path):
    first = Broken()

    def opening(url, **options):
        if "batch" in options:
            return first
        raise TransportFailedError("no")

    with pytest.raises(TransportFailedError):
        make_bus(settings_of(tmp_path, "test"), log, opening)
    assert first.closed == 1


async def test_an_async_log_has_an_async_bus(tmp_path):
    async with headwater.open_async("memory:") as log:
        opening = partial(open_transport, clock=ManualClock())
        async with make_bus(settings_of(tmp_path, "test"), log, opening) as bus:
            assert isinstance(bus, AsyncBus)
