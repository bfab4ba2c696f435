"""The proxy itself, against a plain echo server: a fault that does not happen would make other tests lie."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from echo_client import CLIENT_S_MAX, connect, echoed, receive
from echo_server import EchoServer
from fault_connection import reset_socket
from fault_lane import BUFFER_BYTES_MAX, CHUNK_BYTES_MAX, Direction, Weather
from fault_proxy import FaultProxy

SILENCE_S = 0.05

NewClient = Callable[[], socket.socket]


@pytest.fixture
def server() -> Iterator[EchoServer]:
    with EchoServer() as server:
        yield server


@pytest.fixture
def proxy(server: EchoServer) -> Iterator[FaultProxy]:
    with FaultProxy("127.0.0.1", server.port) as proxy:
        yield proxy


@pytest.fixture
def new_client(proxy: FaultProxy) -> Iterator[NewClient]:
    with contextlib.ExitStack() as clients:
        yield lambda: clients.enter_context(connect(proxy))


@pytest.fixture
def client(new_client: NewClient) -> socket.socket:
    """One whose connection is known to work."""
    client = new_client()
    assert echoed(client, b"hello") == b"hello"
    return client


def hears_nothing(client: socket.socket) -> bool:
    client.settimeout(SILENCE_S)
    try:
        client.recv(1)
    except TimeoutError:
        return True
    finally:
        client.settimeout(CLIENT_S_MAX)
    return False


def send_often(one: socket.socket) -> None:
    for _ in range(10_000):
        one.sendall(b"x" * 1_000)


def test_without_faults_everything_passes_and_is_counted(
    server: EchoServer, proxy: FaultProxy, new_client: NewClient
) -> None:
    data = bytes(range(256)) * 4096
    client = new_client()
    sender = threading.Thread(target=client.sendall, args=(data,))
    sender.start()
    assert receive(client, len(data)) == data
    sender.join()
    counts = proxy.wait_until(lambda counts: counts.to_client_bytes == len(data))
    assert (counts.connections, counts.open, counts.to_server_bytes) == (1, 1, len(data))
    assert counts.swallowed_bytes == counts.cuts == counts.orphaned == counts.held_bytes == counts.late_bytes == 0


def test_a_clients_end_reaches_the_server_and_the_servers_reaches_the_client(
    server: EchoServer, proxy: FaultProxy, new_client: NewClient
) -> None:
    client = new_client()
    client.sendall(b"last words")
    client.shutdown(socket.SHUT_WR)
    assert receive(client, 100) == b"last words"
    server.wait_until(lambda: server.endings == {0: "fin"})
    proxy.wait_until(lambda counts: counts.open == 0)


def test_a_clients_reset_reaches_the_server_as_one(
    server: EchoServer, proxy: FaultProxy, client: socket.socket
) -> None:
    reset_socket(client)
    server.wait_until(lambda: server.endings == {0: "reset"})


def test_a_server_that_talks_on_is_reported_that_its_client_is_gone() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        FaultProxy("127.0.0.1", listener.getsockname()[1]) as proxy,
        socket.create_connection((proxy.host, proxy.port), CLIENT_S_MAX) as client,
    ):
        served, _ = listener.accept()
        with served:
            client.shutdown(socket.SHUT_WR)
            assert served.recv(1) == b""
            client.close()
            with pytest.raises(ConnectionError):
                send_often(served)


def test_latency_delays_each_chunk_and_keeps_the_order(proxy: FaultProxy, new_client: NewClient) -> None:
    client = new_client()
    proxy.wait_until(lambda counts: counts.connections == 1)
    proxy.hold_back()  # tells when each chunk is in, so that the next is one of its own
    proxy.latency(0.03, 0.02, Direction.TO_SERVER)
    began = time.monotonic()
    for number in range(100):
        client.sendall(b"%03d" % number)
        proxy.wait_until(lambda counts, size=3 * number + 3: counts.held_bytes == size)  # type: ignore[misc]
    proxy.deliver_late()
    assert receive(client, 300) == b"".join(b"%03d" % number for number in range(100))
    assert 0.03 <= time.monotonic() - began < 3.0  # each waits, but not one after the other


def test_healing_releases_what_latency_keeps(proxy: FaultProxy, new_client: NewClient) -> None:
    client = new_client()
    proxy.latency(3600)
    client.sendall(b"slow")
    assert hears_nothing(client)
    proxy.heal()
    assert receive(client, 4) == b"slow"


def test_jitter_adds_a_share_of_itself_to_the_delay() -> None:
    weather = Weather(delay_s=1.0, jitter_s=0.5)
    assert [weather.due_s(10.0, share) for share in (0.0, 0.5, 1.0)] == [11.0, 11.25, 11.5]
    weather.clear()
    assert weather == Weather()


def test_throttling_lets_so_many_bytes_through_a_second(proxy: FaultProxy, new_client: NewClient) -> None:
    client = new_client()
    proxy.throttle(100_000, Direction.TO_CLIENT)
    began = time.monotonic()
    assert echoed(client, b"x" * 10_000) == b"x" * 10_000
    assert time.monotonic() - began >= 0.08
    proxy.throttle(None)
    assert echoed(client, b"fast" * 10_000) == b"fast" * 10_000


def test_a_reset_reaches_both_ends_of_all_connections(
    server: EchoServer, proxy: FaultProxy, new_client: NewClient
) -> None:
    clients = [new_client() for _ in range(3)]
    for client in clients:
        assert echoed(client, b"hello") == b"hello"
    proxy.reset()
    assert proxy.counts.open == 0
    for client in clients:
        with pytest.raises(ConnectionResetError):
            client.recv(1)
    server.wait_until(lambda: server.endings == dict.fromkeys(range(3), "reset"))
    assert echoed(new_client(), b"again") == b"again"


def test_a_clean_close_delivers_what_is_on_its_way_and_ends_both_sides_without_a_reset(
    server: EchoServer, proxy: FaultProxy, client: socket.socket
) -> None:
    proxy.hold_back()
    client.sendall(b", on its way")
    proxy.wait_until(lambda counts: counts.held_bytes == 12)
    proxy.close_cleanly()
    assert client.recv(1) == b""
    assert (server.heard, server.endings) == ([b"hello"], {})
    proxy.deliver_late()
    server.wait_until(lambda: server.endings == {0: "fin"})
    assert server.heard == [b"hello, on its way"]


@pytest.mark.parametrize("direction", list(Direction))
def test_a_cut_lets_exactly_so_many_bytes_through(
    server: EchoServer, proxy: FaultProxy, client: socket.socket, new_client: NewClient, direction: Direction
) -> None:
    bystander = new_client()
    proxy.cut_after(7, direction)
    client.sendall(b"0123456789")
    proxy.wait_until(lambda counts: counts.cuts == 1)
    server.wait_until(lambda: server.endings == {0: "reset"})
    if direction is Direction.TO_SERVER:
        assert server.heard[0] == b"hello0123456"
    else:
        assert receive(client, 7) == b"0123456"
    with pytest.raises(ConnectionResetError):
        client.recv(1)
    assert echoed(bystander, b"unharmed, and the cut is spent") == b"unharmed, and the cut is spent"


def test_a_black_hole_swallows_and_closes_nothing(
    server: EchoServer, proxy: FaultProxy, client: socket.socket, new_client: NewClient
) -> None:
    proxy.blackhole()
    client.sendall(b"anybody?")
    proxy.wait_until(lambda counts: counts.swallowed_bytes == 8)
    client.close()
    proxy.heal()
    assert echoed(new_client(), b"back") == b"back"
    assert server.heard == [b"hello", b"back"]
    assert server.endings == {}  # it still believes in the first one
    assert proxy.counts.open == 2


def test_a_black_hole_can_have_one_direction(server: EchoServer, proxy: FaultProxy, new_client: NewClient) -> None:
    client = new_client()
    proxy.blackhole(Direction.TO_CLIENT)
    client.sendall(b"one way")
    server.wait_until(lambda: server.heard == [b"one way"])
    proxy.wait_until(lambda counts: counts.swallowed_bytes == 7)
    proxy.heal()
    client.sendall(b" only")
    server.wait_until(lambda: server.heard == [b"one way only"])
    proxy.wait_until(lambda counts: counts.swallowed_bytes == 12)  # a stream with a hole does not go on
    assert proxy.counts.to_client_bytes == 0


def test_a_connection_that_lost_nothing_survives_a_black_hole(proxy: FaultProxy, client: socket.socket) -> None:
    proxy.blackhole()
    proxy.heal()
    assert echoed(client, b"still here") == b"still here"


def test_refusing_hits_new_connections_only_and_ends_on_the_same_port(
    proxy: FaultProxy, client: socket.socket, new_client: NewClient
) -> None:
    proxy.refuse()
    for _ in range(3):
        with pytest.raises(ConnectionRefusedError):
            new_client()
    assert echoed(client, b"still here") == b"still here"
    proxy.accept()
    assert echoed(new_client(), b"welcome") == b"welcome"


def test_a_server_that_is_not_there_resets_the_client(proxy: FaultProxy, new_client: NewClient) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed_soon:
        closed_port: int = closed_soon.getsockname()[1]
    proxy.retarget("127.0.0.1", closed_port)
    with pytest.raises(ConnectionResetError):
        new_client().recv(1)
    proxy.wait_until(lambda counts: counts.unreachable == 1)


def test_a_late_duplicate_arrives_after_the_client_is_back(
    server: EchoServer, proxy: FaultProxy, client: socket.socket, new_client: NewClient
) -> None:
    proxy.duplicate_late(after_bytes=5)
    client.sendall(b"order")
    with pytest.raises(ConnectionResetError):
        client.recv(1)
    proxy.wait_until(lambda counts: counts.orphaned == 1)
    assert (server.heard, server.endings) == ([b"hello"], {})
    assert (proxy.counts.held_bytes, proxy.counts.late_bytes) == (5, 0)
    back = new_client()
    server.wait_until(lambda: len(server.heard) == 2)
    assert server.heard == [b"hello", b""]  # connected is not yet back: the server has to answer
    assert echoed(back, b"order") == b"order"
    server.wait_until(lambda: server.endings == {0: "fin"})
    assert server.heard == [b"helloorder", b"order"]
    assert (proxy.counts.held_bytes, proxy.counts.late_bytes) == (0, 5)


def test_a_test_may_decide_itself_when_the_late_bytes_arrive(
    server: EchoServer, proxy: FaultProxy, client: socket.socket, new_client: NewClient
) -> None:
    proxy.hold_back()
    client.sendall(b"order")
    proxy.wait_until(lambda counts: counts.held_bytes == 5)
    proxy.part_from_clients()
    with pytest.raises(ConnectionResetError):
        client.recv(1)
    back = new_client()
    assert [echoed(back, b"order") for _ in range(3)] == [b"order"] * 3
    assert server.heard == [b"hello", b"order" * 3]
    proxy.deliver_late()
    server.wait_until(lambda: server.heard[0] == b"helloorder")


def test_a_client_that_leaves_by_itself_while_held_back_is_still_believed_in(
    server: EchoServer, proxy: FaultProxy, client: socket.socket
) -> None:
    proxy.hold_back()
    client.sendall(b"order")
    client.close()
    proxy.wait_until(lambda counts: counts.orphaned == 1 and counts.held_bytes == 5)
    assert server.endings == {}
    proxy.deliver_late()
    server.wait_until(lambda: server.endings == {0: "fin"} and server.heard == [b"helloorder"])


def test_healing_lets_a_held_back_connection_go_on(
    server: EchoServer, proxy: FaultProxy, client: socket.socket
) -> None:
    proxy.hold_back()
    client.sendall(b"order")
    proxy.wait_until(lambda counts: counts.held_bytes == 5)
    proxy.heal()
    assert receive(client, 5) == b"order"
    assert (server.heard, proxy.counts.held_bytes) == ([b"helloorder"], 0)


def test_a_reset_takes_what_is_held_back_along(server: EchoServer, proxy: FaultProxy, client: socket.socket) -> None:
    proxy.hold_back()
    client.sendall(b"order")
    proxy.wait_until(lambda counts: counts.held_bytes == 5)
    proxy.reset()
    server.wait_until(lambda: server.endings == {0: "reset"})
    assert (server.heard, proxy.counts.held_bytes) == ([b"hello"], 0)


def test_a_full_buffer_stops_the_client_and_a_clean_close_lets_it_go(proxy: FaultProxy, new_client: NewClient) -> None:
    client = new_client()
    proxy.wait_until(lambda counts: counts.connections == 1)
    proxy.hold_back()
    sender = threading.Thread(target=client.sendall, args=(b"x" * (8 * BUFFER_BYTES_MAX),), daemon=True)
    sender.start()
    counts = proxy.wait_until(lambda counts: counts.held_bytes >= BUFFER_BYTES_MAX)
    assert counts.held_bytes < BUFFER_BYTES_MAX + CHUNK_BYTES_MAX
    proxy.close_cleanly()
    sender.join(CLIENT_S_MAX)
    assert not sender.is_alive()
    assert proxy.counts.held_bytes == counts.held_bytes


def test_waiting_for_what_does_not_come_says_what_came(proxy: FaultProxy) -> None:
    with pytest.raises(TimeoutError, match="connections=0"):
        proxy.wait_until(lambda counts: counts.connections == 1, timeout_s=0.01)
