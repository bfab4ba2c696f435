"""Accepts connections, and says who may stay when there is no room for all.

A connection is a stranger until it has shown a token; on a server without tokens, until its WebSocket is accepted.
Strangers have a limit of their own, in all and for each address. A new one then takes the place of the oldest, so that
connections which never say anything keep nobody out.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import socket
import ssl
from collections import OrderedDict
from collections.abc import Callable
from typing import Protocol

from headwater.configuration import Limits
from headwater.server.logger import logger

try:
    import resource
except ImportError:  # not on every system
    resource = None  # type: ignore[assignment]

BACKLOG = 1_024
FILES_RESERVED = 256  # open files besides connections: the database, its readers, replicas, children
PAUSE_S = 0.2  # without accepting, when the process or the system has no more files
ADDRESS_PART = 4  # one address may have a quarter of all connections, if the limits say nothing else
_OUT_OF_FILES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class Accepted(asyncio.Protocol):
    """What the acceptor knows of a connection."""

    address: str

    @property
    def is_stranger(self) -> bool:
        raise NotImplementedError

    def drop(self) -> None:
        raise NotImplementedError


class MakeProtocol(Protocol):
    def __call__(self, address: str, *, has_room: bool) -> Accepted: ...


class Acceptor:
    def __init__(self, limits: Limits, make_protocol: MakeProtocol, on_full: Callable[[], None]) -> None:
        self.connections: set[Accepted] = set()
        self._limits = limits
        self._make_protocol = make_protocol
        self._on_full = on_full
        self._most = limits.connections
        self.by_address: dict[str, int] = {}
        self._strangers: OrderedDict[Accepted, None] = OrderedDict()  # the oldest first; some may be known by now
        self._strangers_at: dict[str, OrderedDict[Accepted, None]] = {}
        self._listeners: list[socket.socket] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._beginning: dict[Accepted, asyncio.Task[None]] = {}  # their TLS handshake is under way
        self._context: ssl.SSLContext | None = None

    async def listen(self, host: str, port: int, context: ssl.SSLContext | None) -> None:
        loop = asyncio.get_running_loop()
        self._most = _connections_max(self._limits.connections)
        self._context = context
        bound = await loop.create_server(asyncio.Protocol, host, port, start_serving=False)
        self._listeners = [each.dup() for each in bound.sockets]
        bound.close()
        try:
            for listener in self._listeners:
                listener.listen(BACKLOG)
                listener.setblocking(False)
        except OSError:
            self.close()
            raise
        self._tasks = [loop.create_task(self._accept(listener)) for listener in self._listeners]

    @property
    def port(self) -> int:
        return int(self._listeners[0].getsockname()[1])

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        for listener in self._listeners:
            listener.close()

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, peer = await loop.sock_accept(listener)
            except OSError as exc:
                if exc.errno in _OUT_OF_FILES:
                    told = {"why": exc.strerror, "count": len(self.connections)}
                    logger.warning("no connection can be accepted: %(why)s; there are %(count)d", told)
                await asyncio.sleep(PAUSE_S if exc.errno in _OUT_OF_FILES else 0)
                continue
            try:
                self._begin(connection, str(peer[0]) if isinstance(peer, tuple) else "local")
            except Exception:  # the next one must be accepted all the same
                logger.exception("a connection was not accepted")
                connection.close()
            await asyncio.sleep(0)  # an accept that need not wait gives way to nobody

    def _begin(self, connection: socket.socket, address: str) -> None:
        has_room = self._make_room(address)
        if not has_room:
            self._on_full()
            if self._context is not None:  # a refusal would cost a handshake
                connection.close()
                return
        accepted = self._make_protocol(address, has_room=has_room)
        if has_room:
            self._add(accepted)
        task = asyncio.get_running_loop().create_task(self._connect(accepted, connection))
        task.add_done_callback(lambda task: connection.close() if task.cancelled() else None)
        self._beginning[accepted] = task

    async def _connect(self, accepted: Accepted, connection: socket.socket) -> None:
        loop, seconds = asyncio.get_running_loop(), self._limits.authenticate_timeout
        options = {} if self._context is None else {"ssl_handshake_timeout": seconds, "ssl_shutdown_timeout": seconds}
        try:
            await loop.connect_accepted_socket(lambda: accepted, connection, ssl=self._context, **options)
        except (OSError, ssl.SSLError):  # it left, or is no client of TLS, or too slow
            self.remove(accepted)
            connection.close()
        finally:
            self._beginning.pop(accepted, None)

    # --- who may stay -------------------------------------------------------------------------------------------

    def _make_room(self, address: str) -> bool:
        limits, strangers_here = self._limits, self._strangers_at.get(address, OrderedDict())
        strangers_max = limits.unauthenticated
        if len(strangers_here) >= _for_address(limits.unauthenticated_per_address, strangers_max, address):
            self._drop_oldest(strangers_here)
        if len(self._strangers) >= strangers_max:
            self._drop_oldest(self._strangers)
        if self.by_address.get(address, 0) >= _for_address(limits.connections_per_address, self._most, address):
            return self._drop_oldest(strangers_here)
        return len(self.connections) < self._most or self._drop_oldest(self._strangers)

    def _drop_oldest(self, strangers: OrderedDict[Accepted, None]) -> bool:
        """False if there is none: all have shown who they are."""
        while strangers:
            oldest = next(iter(strangers))
            if not oldest.is_stranger:
                self.recognise(oldest)
                continue
            self.remove(oldest)
            beginning = self._beginning.pop(oldest, None)
            if beginning is not None:
                beginning.cancel()
            oldest.drop()
            return True
        return False

    def _add(self, accepted: Accepted) -> None:
        self.connections.add(accepted)
        self.by_address[accepted.address] = self.by_address.get(accepted.address, 0) + 1
        self._strangers[accepted] = None
        self._strangers_at.setdefault(accepted.address, OrderedDict())[accepted] = None

    def recognise(self, accepted: Accepted) -> None:
        """It is no stranger any more."""
        self._strangers.pop(accepted, None)
        here = self._strangers_at.get(accepted.address)
        if here is not None:
            here.pop(accepted, None)
            if not here:
                del self._strangers_at[accepted.address]

    def remove(self, accepted: Accepted) -> None:
        if accepted in self.connections:
            self.connections.discard(accepted)
            self.recognise(accepted)
            self.by_address[accepted.address] -= 1
            if not self.by_address[accepted.address]:
                del self.by_address[accepted.address]


def _for_address(limit: int, total: int, address: str) -> int:
    """Behind the addresses of this machine may be a proxy, and so everybody."""
    return limit or (total if _is_loopback(address) else max(1, total // ADDRESS_PART))


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return address == "local"


def _connections_max(wanted: int) -> int:
    """As many as the system lets this process have, which is told to let it have as many as are wanted."""
    if resource is None:
        return wanted
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = wanted + FILES_RESERVED
    if soft != resource.RLIM_INFINITY and soft < needed:
        most = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return wanted
    possible = soft - min(FILES_RESERVED, soft // 2)
    told = {"possible": possible, "wanted": wanted, "files": soft}
    logger.warning("at most %(possible)d connections, not %(wanted)d: this process may have %(files)d files open", told)
    return possible
