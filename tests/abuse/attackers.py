"""Attackers in a process of their own, each on a thread, until stdin ends: `attackers.py PORT TOKEN NAME…`.

They say "begun" when each has made its first move, and at the end how many moves each made.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import threading
from collections.abc import Callable
from itertools import count
from typing import Any

from websockets.exceptions import WebSocketException
from websockets.sync.client import ClientConnection, connect

PORT, TOKEN = int(sys.argv[1]), sys.argv[2]
STOP = threading.Event()
PAUSE_S = 0.02  # between two moves: a processor of this machine is the server's
FRAME_BYTES = 3_900_000
UPGRADE = (
    "GET /rpc HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    "Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
)


def dial() -> socket.socket:
    made = socket.create_connection(("127.0.0.1", PORT), 5)
    made.settimeout(2)
    return made


def authenticated() -> ClientConnection:
    headers = {"Authorization": f"Bearer {TOKEN}"}
    return connect(f"ws://127.0.0.1:{PORT}/rpc", additional_headers=headers, max_size=None, open_timeout=5)


def call(id: int, method: str, params: Any) -> str:
    return json.dumps({"jsonrpc": "2.0", "id": id, "method": method, "params": params})


def bare_connects(number: int, kept: list[Any]) -> None:
    for _ in range(100):
        kept.append(dial())
        if len(kept) > 1_500:
            kept.pop(0).close()


def unfinished_heads(number: int, kept: list[Any]) -> None:
    for _ in range(20):
        kept.append(dial())
        kept[-1].sendall(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n")
        if len(kept) > 500:
            kept.pop(0).close()


def unfinished_frames(number: int, kept: list[Any]) -> None:
    """By strangers: 4 MiB are announced, and all but the last byte sent."""
    stranger = dial()
    kept.append(stranger)
    stranger.sendall(UPGRADE.encode())
    stranger.sendall(b"\x81\xff" + FRAME_BYTES.to_bytes(8, "big") + b"\0\0\0\0" + b"x" * (FRAME_BYTES - 1))
    if len(kept) > 60:
        kept.pop(0).close()


def large_frames(number: int, kept: list[Any]) -> None:
    """Without a look at the answers."""
    if not kept:
        kept.append(authenticated())
    text = "x" * 900_000
    messages = [{"topic": "mine.large", "data": text} for _ in range(4)]
    kept[0].send(call(number, "rpc.publish.batch", {"messages": messages}))


def fetches_unread(number: int, kept: list[Any]) -> None:
    client = authenticated()
    kept.append(client)
    subscription = f"mine-{number}"
    params = {"subscription_id": subscription, "topic": "mine.>", "deliver": "fetch", "max_in_flight": 10_000}
    client.send(call(0, "rpc.subscribe.persistent", params))
    for id in range(1, 101):
        client.send(call(id, "rpc.fetch", {"subscription_id": subscription, "count": 1_000, "wait": 1}))
    if len(kept) > 10:
        kept.pop(0).socket.close()


def regexes(number: int, kept: list[Any]) -> None:
    with authenticated() as client:
        params = {"subscription_id": f"mine-regex-{number % 10}", "topic": "mine.>", "from": "/(a+)+$/"}
        client.send(call(1, "rpc.subscribe.persistent", params))
        client.send(call(2, "rpc.publish", {"topic": "mine.small", "data": 1, "headers": {"from": "a" * 200 + "!"}}))
        client.send(call(3, "rpc.dead_letters", {"error": "(a+)+$"}))
        for _ in range(3):
            client.recv(5)


def conditions(number: int, kept: list[Any]) -> None:
    where = " or ".join(f"data.a{at} == {at}" for at in range(60))
    if len(kept) < 40:
        client = authenticated()
        kept.append(client)
        for at in range(5):
            params = {"subscription_id": f"mine-where-{len(kept)}-{at}", "topic": "mine.>", "where": where}
            client.send(call(at, "rpc.subscribe.persistent", params))
    else:
        data = {f"b{at}": "x" * 90 for at in range(9_000)}
        kept[0].send(call(9, "rpc.publish", {"topic": "mine.deep", "data": data}))


def scrapes(number: int, kept: list[Any]) -> None:
    with dial() as asked:
        path = ("/metrics", "/readyz", "/healthz", "/")[number % 4]
        head = f"GET {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {TOKEN}\r\nConnection: close\r\n\r\n"
        asked.sendall(head.encode())
        while asked.recv(65_536):
            pass


def exports(number: int, kept: list[Any]) -> None:
    with authenticated() as client:
        for id in range(5):
            client.send(call(id, "rpc.dead_letters.export", {}))
        client.recv(5)


def pings(number: int, kept: list[Any]) -> None:
    if not kept:
        kept.append(authenticated())
    for _ in range(100):
        kept[0].ping(os.urandom(8))


def garbage(number: int, kept: list[Any]) -> None:
    with authenticated() as client:
        for size in (1, 10, 1_000, 100_000):
            client.send(os.urandom(size).hex())
            client.recv(5)


ATTACKS: dict[str, Callable[[int, list[Any]], None]] = {
    act.__name__: act
    for act in (
        bare_connects, unfinished_heads, unfinished_frames, large_frames, fetches_unread, regexes, conditions, scrapes,
        exports, pings, garbage,
    )
}  # fmt: skip


def attack(name: str, moves: dict[str, int], begun: threading.Event) -> None:
    kept: list[Any] = []
    for number in count():
        try:
            ATTACKS[name](number, kept)
        except (OSError, WebSocketException, TimeoutError):  # refused, paused or cut off: so be it
            for each in kept:
                with contextlib.suppress(Exception):
                    (each if isinstance(each, socket.socket) else each.socket).close()
            kept.clear()
        moves[name] = number + 1
        begun.set()
        if STOP.wait(PAUSE_S):
            return


def main() -> None:
    moves: dict[str, int] = {}
    for name in sys.argv[3:]:
        begun = threading.Event()
        threading.Thread(target=attack, args=(name, moves, begun), daemon=True).start()
        begun.wait(20)
    print("begun", flush=True)
    sys.stdin.read()
    STOP.set()
    print(json.dumps(moves), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
