"""What a plain client of the echo server does."""

from __future__ import annotations

import socket

from fault_proxy import FaultProxy

CLIENT_S_MAX = 5.0


def connect(proxy: FaultProxy) -> socket.socket:
    return socket.create_connection((proxy.host, proxy.port), CLIENT_S_MAX)


def receive(client: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size and (more := client.recv(size - len(data))):
        data += more
    return data


def echoed(client: socket.socket, data: bytes) -> bytes:
    client.sendall(data)
    return receive(client, len(data))
