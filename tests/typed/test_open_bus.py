"""`headwater.open_bus` and `connect_bus`: a log and its transports, as headwater.toml and the environment say."""

import asyncio
import sqlite3
import time
from pathlib import Path

import pytest
from served import RunningServer

import headwater
from headwater.errors import InvalidConfigurationError, TransportFailedError, UnsentError
from headwater.transports.file import from_line
from headwater.transports.memory import MemoryTransport

FILE = """
[server]
log = "shop.db"

[log]
durability = "relaxed"
dedupe = "0s"

[transports.archive]
url = "copies.jsonl"

[messages.OrderPlaced]
transports = ["archive"]

[profiles.test.server]
log = "memory:"

[profiles.test.transports.archive]
url = "memory:"

[profiles.production.transports.archive]
url = "production.jsonl"
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "headwater.toml").write_text(FILE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def placed(base):
    class OrderPlaced(base, topic="orders.placed"):
        order_id: str

    return OrderPlaced


def copies_in(path: Path) -> list[headwater.Message]:
    return [from_line(line) for line in path.read_bytes().splitlines()]


def await_the_next_millisecond() -> None:
    """dedupe = "0s": no id outlives its millisecond."""
    now_ms = time.time_ns() // 1_000_000
    while time.time_ns() // 1_000_000 == now_ms:
        pass


def memory_in(transport) -> MemoryTransport:
    while not isinstance(transport, MemoryTransport):
        transport = transport.inner
    return transport


def test_copies_arrive_where_the_file_says(here, placed):
    with headwater.open_bus() as bus:
        assert placed(order_id="o-1").publish(bus) == 1
    [copy] = copies_in(here / "copies.jsonl")
    assert (copy.seq, placed.read(copy)) == (1, placed(order_id="o-1"))
    with headwater.open("shop.db") as log:
        assert log.last_seq() == 1


def test_a_url_goes_before_the_log_of_the_file(here, placed):
    with headwater.open_bus(here / "other.db") as bus:
        placed(order_id="o-1").publish(bus)
    assert not (here / "shop.db").exists()


def test_another_profile_has_other_transports(here, placed):
    with headwater.open_bus(profile="test") as bus:
        placed(order_id="o-1").publish(bus)
        [copy] = memory_in(bus.transports["archive"]).messages
        assert placed.read(copy).order_id == "o-1"
    assert [path.name for path in here.iterdir()] == ["headwater.toml"]


def test_production_needs_no_tokens_without_a_server(here, placed):
    with headwater.open_bus(profile="production") as bus:
        placed(order_id="o-1").publish(bus)
    assert len(copies_in(here / "production.jsonl")) == 1


def test_the_environment_names_the_profile_and_the_transport(here, placed, monkeypatch):
    monkeypatch.setenv("HEADWATER_PROFILE", "production")
    monkeypatch.setenv("HEADWATER_TRANSPORTS_ARCHIVE_URL", "elsewhere.jsonl")
    with headwater.open_bus() as bus:
        placed(order_id="o-1").publish(bus)
    assert len(copies_in(here / "elsewhere.jsonl")) == 1
    assert not (here / "production.jsonl").exists()


def test_another_file_is_read_if_it_is_named(here, placed):
    (here / "other.toml").write_text("[transports]\n")
    with headwater.open_bus(config="other.toml") as bus:
        assert bus.transports == {}
    with (
        pytest.raises(InvalidConfigurationError, match=r"none\.toml: there is no such file"),
        headwater.open_bus(config="none.toml"),
    ):
        pass


def test_what_the_file_says_of_the_log_holds_for_a_log_here(here, placed):
    with headwater.open_bus() as bus:
        order = placed(order_id="o-1")
        first = order.publish(bus, id="x")
        await_the_next_millisecond()
        assert (first, order.publish(bus, id="x")) == (1, 2)


def test_what_the_file_says_of_the_log_is_not_sent_to_a_server(here, placed, tmp_path_factory):
    served = RunningServer(tmp_path_factory.mktemp("served") / "log.db")
    try:
        with headwater.open_bus(served.url) as bus:
            assert placed(order_id="o-1").publish(bus) == 1
    finally:
        served.stop()


def test_a_batch_that_does_not_get_out_is_reported_when_the_bus_closes(here, placed):
    (here / "headwater.toml").write_text(
        FILE.replace('url = "copies.jsonl"', 'url = "redis://127.0.0.1:1/0"\nbatch_size = 10')
    )

    def publish_one() -> None:
        with headwater.open_bus() as bus:
            assert placed(order_id="o-1").publish(bus) == 1
            assert bus.failures == {}  # it is in the buffer, and has not failed yet

    with pytest.raises(UnsentError, match="1 messages were in buffers") as caught:
        publish_one()
    [left] = caught.value.messages
    assert placed.read(left).order_id == "o-1"
    with headwater.open("shop.db") as log:
        assert log.last_seq() == 1


def test_the_log_is_closed_when_a_transport_does_not_open(here):
    (here / "copies.jsonl").mkdir()
    with pytest.raises(TransportFailedError, match="Is a directory"), headwater.open_bus():
        pass
    with sqlite3.connect(here / "shop.db") as connection:
        assert connection.execute("PRAGMA journal_mode = DELETE").fetchone() == ("delete",)  # it is not open


def test_a_bus_for_asyncio(here, placed):
    async def story() -> list[int]:
        async with headwater.open_bus_async(profile="production") as bus:
            order = placed(order_id="o-1")
            first = await order.publish(bus, id="x")
            await_the_next_millisecond()
            return [first, await order.publish(bus, id="x")]

    assert asyncio.run(story()) == [1, 2]
    assert [copy.id for copy in copies_in(here / "production.jsonl")] == ["x", "x"]
