"""Plain HTTP to a server of replicas: a list of versions, an error report. Blocking."""

from __future__ import annotations

import contextlib
import http.client
import socket
import threading
from collections.abc import Iterator
from urllib.parse import SplitResult, urlsplit, urlunsplit

import msgspec

from headwater.errors import HeadwaterError, Unreachable
from headwater.protocol.tls import client_context
from headwater.replication.link import (
    UNREADABLE,
    Hash,
    Number,
    ReplicaID,
    key_header,
    refusal_of,
    unreachable,
)
from headwater.replication.names import PREFIX, Remote

ANSWER_S_MAX = 10.0  # of silence
WHOLE_S_MAX = 30.0  # for all of an answer, however it trickles
ANSWER_BYTES_MAX = 64 * 1024 * 1024
WHY_BYTES_MAX = 16 * 1024  # of a refusal


def versions_url(remote: Remote) -> str:
    return _url(remote, f"{PREFIX}versions/")


class Newest(msgspec.Struct, rename="camel"):
    version: Number
    replica_id: ReplicaID = msgspec.field(name="replicaID")
    dbhash: Hash | None = None


def newest_of(remote: Remote, key: str | None, ca: str | None) -> Newest | None:
    """The newest version, if there is one and this key lets us know of it."""
    try:
        versions = msgspec.json.decode(ask(versions_url(remote), key=key, ca=ca), type=list[Newest])
    except (HeadwaterError, *UNREADABLE):
        return None
    return versions[0] if versions else None


def report_url(remote: Remote) -> str:
    """The server knows a replica by its id and by its name."""
    return _url(remote, PREFIX)


def _url(remote: Remote, prefix: str) -> str:
    scheme, host, *_ = urlsplit(remote.url_base)
    return urlunsplit(("https" if scheme == "wss" else "http", host, f"{prefix}{remote.name.path}", "", ""))


def ask(url: str, *, key: str | None, ca: str | None, body: bytes | None = None) -> bytes:
    """A GET, or a POST of JSON. It goes to this server and to no other: not to a proxy, nor where the server points."""
    headers = {"Connection": "close", **key_header(key, url)}
    if body:
        headers["Content-Type"] = "application/json"
    parts = urlsplit(url)
    try:
        with contextlib.closing(_connection(parts, ca)) as connection:
            connection.connect()
            with _within(connection.sock, WHOLE_S_MAX):
                target = urlunsplit(("", "", parts.path, parts.query, ""))
                connection.request("POST" if body else "GET", target, body, headers)
                answer = connection.getresponse()
                if not 200 <= answer.status < 300:
                    raise refusal_of(answer.status, _why(answer), url)
                said = answer.read(ANSWER_BYTES_MAX + 1)
                if answer.length and len(said) <= ANSWER_BYTES_MAX:
                    raise http.client.IncompleteRead(said, answer.length)
    except (OSError, http.client.HTTPException, UnicodeError) as exc:  # the last one: no name of a host
        raise unreachable(exc, url) from exc
    if len(said) > ANSWER_BYTES_MAX:
        raise Unreachable(f"the answer has more than {ANSWER_BYTES_MAX} bytes", where=url)
    return said


def _connection(parts: SplitResult, ca: str | None) -> http.client.HTTPConnection:
    host = parts.hostname or ""
    if parts.scheme == "https":
        return http.client.HTTPSConnection(host, parts.port or 443, timeout=ANSWER_S_MAX, context=client_context(ca))
    return http.client.HTTPConnection(host, parts.port or 80, timeout=ANSWER_S_MAX)


@contextlib.contextmanager
def _within(connection: socket.socket, seconds: float) -> Iterator[None]:
    """The timeout of a socket is for each of its bytes; this one is for all that is done here."""
    is_over = threading.Event()

    def end() -> None:
        is_over.set()
        with contextlib.suppress(OSError):  # it is closed already
            socket.socket.shutdown(connection, socket.SHUT_RDWR)  # also under TLS, which has a shutdown of its own

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    except (OSError, http.client.HTTPException):
        if not is_over.is_set():
            raise
    finally:
        timer.cancel()
    if is_over.is_set():
        raise TimeoutError(f"the answer took longer than {seconds:g} s")


def _why(refusal: http.client.HTTPResponse) -> bytes:
    try:
        return refusal.read(WHY_BYTES_MAX)
    except (OSError, http.client.HTTPException):
        return b""
